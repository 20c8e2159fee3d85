"""What the advisor says of memory, as plain data: what can be promised, where it is short, and what cgroups are to do."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from api.advice import Wish
from api.knobs import Verdict


class MemoryPressure(StrEnum):
    """How short memory is; Katalyst's states, and one for nobody knows."""

    NO_RISK = "no_risk"
    TUNE_MEMCG = "tune_memcg"
    """Less is free than twice the critical watermark."""
    DROP_CACHE = "drop_cache"
    """Less than the watermark itself."""
    UNKNOWN = "unknown"
    """Inputs are missing: nothing is done about it."""


class MemoryCondition(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the node or of one NUMA node."""

    state: MemoryPressure
    target_bytes: int = 0
    """What is missing to twice the critical watermark; 0 where nothing is to be done."""
    verdict: Verdict


class MemoryAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one round. Bytes."""

    policy: str
    headroom_bytes: float | None
    """What can be promised to reclaimed pods in all, what they use now included; None where inputs are missing."""
    headroom_by_numa: Mapping[int, float] = {}
    """Sums to the above; empty where it is not known how it is spread."""
    headroom_verdict: Verdict
    provision_by_numa: Mapping[int, float] = {}
    """[reclaimed_memory_size] What a stock advisor would give reclaimed pods of each NUMA node; empty without one."""
    condition: MemoryCondition
    numa_conditions: Mapping[int, MemoryCondition] = {}
    wishes: tuple[Wish, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    """Why each part that is switched on did, or did not, ask for anything."""
