"""What the advisor says of the node as a whole, as plain data: its power, and how much more than it has may be scheduled."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from api.knobs import Verdict


class PowerKind(StrEnum):
    """What is to be done about power."""

    NOOP = "noop"
    EVICT = "evict"
    CAP = "cap"
    RESET = "reset"


class PowerAction(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done, in numbers, and why. It stands until the next answer."""

    kind: PowerKind
    at_ns: int | None = None
    """CLOCK_MONOTONIC when an eviction or a cap was decided."""
    percent: int = 0
    """Of all pods, to be evicted,"""
    count: int = 0
    """and how many reclaimed pods that makes."""
    target_watts: int = 0
    """To cap power to,"""
    current_watts: int = 0
    """from this."""
    verdict: Verdict


class Overcommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself: 1 is no overcommitment."""

    cpu_ratio: float
    memory_ratio: float
    verdict: Verdict


class NodeAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The answers that stand; None of what is switched off."""

    power: PowerAction | None = None
    overcommit: Overcommit | None = None
