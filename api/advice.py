"""What the advisor says of CPU and memory, as plain data: regions, the sizes of pools, what can be promised, what cgroups need.

Names and meanings are Katalyst's (SysAdvisor, v0.5). Sizes are numbers of CPUs; which CPUs they are is for QRM to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from api.knobs import Knob, Verdict

UNBOUND = -1
"""In the place of a NUMA node: whatever is not bound to one."""
NO_BANDWIDTH, NO_CARD, SPEED_UNKNOWN = "no_bandwidth", "no_network_card", "network_speed_unknown"
"""Rules by which a pod is not promised the network bandwidth that it asks for."""


class RegionKind(StrEnum):
    """What the containers of a region have in common."""

    SHARE = "share"
    """The pods of one pool of shared_cores."""
    DEDICATED = "dedicated"
    """One pod of dedicated_cores."""
    ISOLATION = "isolation"
    """One pod of shared_cores that is kept apart for a while."""


class Control(StrEnum):
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


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """An indicator, where it is and where it should be."""

    name: str
    current: float
    target: float


class RegionAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What one region gets, and why."""

    region: Region
    policy: str
    controls: Mapping[Control, float]
    upper_cores: float
    lower_cores: float
    headroom_cores: float | None = None
    """What it leaves by the policy of headroom for its kind; shown, but not summed: regions share what they may grow to."""
    headroom_verdict: Verdict | None = None
    signals: tuple[Signal, ...] = ()
    verdict: Verdict


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """How large a pool is to be on one NUMA node, or on all that are free to it."""

    pool: str
    numa: int = UNBOUND
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
    verdict: Verdict


class CardBandwidth(msgspec.Struct, frozen=True, kw_only=True):
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


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup is to have one value, or to be treated so once; QRM decides whether and how."""

    cgroup: str
    knob: Knob
    value: str
    verdict: Verdict
