"""Advice of the advisor as plain data: CPU regions, pool sizes, headroom, memory, power, overcommitment.
Names and meanings are Katalyst's (SysAdvisor, v0.5). Sizes are numbers of CPUs; QRM selects which CPUs. Also holds
Katalyst's proportional scaling of pool sizes, which the advisor and QRM share.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from api.knobs import Knob, Reason

NOT_NUMA_BOUND = -1
"""In the place of a NUMA node: whatever is not bound to one."""
NO_BANDWIDTH, NO_NETWORK_CARD, NETWORK_SPEED_UNKNOWN = "no_bandwidth", "no_network_card", "network_speed_unknown"
"""Rules by which a pod is not promised the network bandwidth that it asks for."""


class RegionKind(StrEnum):
    """What the containers of a region have in common."""

    SHARE = "share"
    """The pods of one pool of shared_cores."""
    DEDICATED = "dedicated"
    """One pod of dedicated_cores."""
    ISOLATION = "isolation"
    """One pod of shared_cores that is kept apart for a while."""


class ControlKnob(StrEnum):
    """What a provision policy turns; Katalyst's control knobs. All in cores."""

    REQUIREMENT = "non-reclaimed-cpu-requirement"
    ISOLATED_UPPER = "isolated-upper-cpu-size"
    ISOLATED_LOWER = "isolated-lower-cpu-size"
    RECLAIM_QUOTA = "reclaimed-cores-cpu-quota"


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Online containers that are provided for together."""

    name: str
    """Stable from round to round: the pool, `dedicated-NAMESPACE/NAME`; with `-NUMA1` at its end where it is bound."""
    kind: RegionKind
    pool: str
    """The pool whose CPUs they run on."""
    numa_nodes: tuple[int, ...]
    """Those that they are bound to, or all that nobody is bound to exclusively."""
    bound: bool = False
    exclusive: bool = False
    """numa_exclusive: nobody else's online pods are on these NUMA nodes."""
    reclaimable: bool = True
    """Whether what they leave idle may be lent."""
    containers: tuple[str, ...] = ()
    """Paths of their cgroups."""
    pods: tuple[str, ...] = ()
    """`namespace/name`."""


class IndicatorState(msgspec.Struct, frozen=True, kw_only=True):
    """An indicator, where it is and where it should be."""

    name: str
    current: float
    target: float


class RegionAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What one region gets, and why."""

    region: Region
    policy: str
    controls: Mapping[ControlKnob, float]
    upper_cores: float
    lower_cores: float
    headroom_cores: float | None = None
    """What it leaves by the policy of headroom for its kind; shown, but not summed: regions share what they may grow to."""
    headroom_reason: Reason | None = msgspec.field(default=None, name="headroom_verdict")
    signals: tuple[IndicatorState, ...] = ()
    reason: Reason = msgspec.field(name="verdict")


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """How large a pool is to be on one NUMA node, or on all that are free to it."""

    pool: str
    numa: int = NOT_NUMA_BOUND
    cpus: int
    quota_cores: float | None = None
    """Limit of all cgroups of the pool together; None where CPUs alone limit."""
    overlap: Mapping[str, int] = {}
    """By pool: how many of its CPUs this one may use too."""


class CpuAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Provision of one round."""

    regions: tuple[RegionAdvice, ...] = ()
    sizes: tuple[PoolSize, ...] = ()
    isolated: tuple[str, ...] = ()
    """Pods kept apart, `namespace/name`."""


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """What can be promised to reclaimed pods in all, what they use now included; None where inputs are missing."""

    cores: float | None = None
    cores_by_numa: Mapping[int, float] = {}
    memory_bytes: float | None = None
    memory_by_numa: Mapping[int, float] = {}
    stale: tuple[str, ...] = ()
    """`cpu` and `memory`, where nothing new was known of it: what was said before stands, or what is left of it."""
    reason: Reason = msgspec.field(name="verdict")


class NicBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """One network card, in Mbit/s. A promise holds both ways."""

    name: str
    speed: int
    egress_capacity: int
    """What can be promised outwards: Katalyst's part of the speed, less what is reserved,"""
    ingress_capacity: int
    """and inwards."""
    promised: int = 0
    """To all pods together,"""
    pods: Mapping[str, int] = {}
    """and to each, by `namespace/name`."""

    @property
    def capacity(self) -> int:
        """What can be promised in all."""
        return min(self.egress_capacity, self.ingress_capacity)

    @property
    def free(self) -> int:
        """And what may still be."""
        return max(self.capacity - self.promised, 0)


class KnobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup is to have one value, or to be treated so once; QRM decides whether and how."""

    cgroup: str
    knob: Knob
    value: str
    reason: Reason = msgspec.field(name="verdict")


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
    reason: Reason = msgspec.field(name="verdict")


class MemoryAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one round. Bytes."""

    policy: str
    headroom_bytes: float | None
    """What can be promised to reclaimed pods in all, what they use now included; None where inputs are missing."""
    headroom_by_numa: Mapping[int, float] = {}
    """Sums to the above; empty where it is not known how it is spread."""
    headroom_reason: Reason = msgspec.field(name="headroom_verdict")
    provision_by_numa: Mapping[int, float] = {}
    """[reclaimed_memory_size] What a stock advisor would give reclaimed pods of each NUMA node; empty without one."""
    condition: MemoryCondition
    numa_conditions: Mapping[int, MemoryCondition] = {}
    knob_requests: tuple[KnobRequest, ...] = msgspec.field(default=(), name="wishes")
    reasons: tuple[Reason, ...] = msgspec.field(default=(), name="verdicts")
    """Why each part that is switched on did, or did not, ask for anything."""


class PowerActionKind(StrEnum):
    """What is to be done about power."""

    NOOP = "noop"
    EVICT = "evict"
    CAP = "cap"
    RESET = "reset"


class PowerAction(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done, in numbers, and why. It stands until the next answer."""

    kind: PowerActionKind
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
    reason: Reason = msgspec.field(name="verdict")


class OvercommitAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself: 1 is no overcommitment."""

    cpu_ratio: float
    memory_ratio: float
    reason: Reason = msgspec.field(name="verdict")


class NodeAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The answers that stand; None of what is switched off."""

    power: PowerAction | None = None
    overcommit: OvercommitAdvice | None = None


PoolKeyT = TypeVar("PoolKeyT", str, tuple[str, int])
"""A pool, or a pool and its NUMA node."""


def scale_proportionally(sizes: Mapping[PoolKeyT, int], target: int) -> dict[PoolKeyT, int] | None:
    """Sizes in the same proportion whose sum is the target, none below 1; None where the target is less than their number.
    What is given is 1 at least.

    All are rounded up first; then the one that is largest for its original size gives one back, until they fit: of equals
    the larger, then the first by name. That is Katalyst's regulation of pool sizes.
    """
    total = sum(sizes.values())
    if total == target:
        return dict(sizes)
    if target < len(sizes):
        return None
    result = {name: -(-size * target // total) for name, size in sizes.items()}
    excess = sum(result.values()) - target
    for _ in range(max(excess, 0)):
        name = max(
            (name for name in sorted(result) if result[name] > 1),
            key=lambda name: (result[name] / sizes[name], result[name]),
        )
        result[name] -= 1
    return result
