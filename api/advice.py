"""Advice of the advisor as plain data: CPU regions, pool sizes, headroom, memory, power, overcommitment.
Names and meanings are Katalyst's (SysAdvisor, v0.5). Sizes are numbers of CPUs; QRM selects which CPUs. Also holds
Katalyst's proportional scaling of pool sizes, which the advisor and QRM share.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

import msgspec

from api.knobs import Knob, Reason
from api.units import NS_PER_MS, NS_PER_S

NOT_NUMA_BOUND = -1
"""Placeholder for a NUMA node: not bound to one."""
NO_BANDWIDTH, NO_NETWORK_CARD, NETWORK_SPEED_UNKNOWN = "no_bandwidth", "no_network_card", "network_speed_unknown"
"""Rules by which a pod's network bandwidth request is rejected."""


class RegionKind(StrEnum):
    """What the containers of a region have in common."""

    SHARE = "share"
    """The pods of one pool of shared_cores."""
    DEDICATED = "dedicated"
    """One pod of dedicated_cores."""
    ISOLATION = "isolation"
    """One pod of shared_cores that is isolated from its pool for a while."""


class ControlKnob(StrEnum):
    """Katalyst's control knobs, the outputs of a provision policy, in cores."""

    REQUIREMENT = "non-reclaimed-cpu-requirement"
    ISOLATED_UPPER = "isolated-upper-cpu-size"
    ISOLATED_LOWER = "isolated-lower-cpu-size"
    RECLAIM_QUOTA = "reclaimed-cores-cpu-quota"


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Online containers that are provisioned together."""

    name: str
    """Stable across cycles: the pool or `dedicated-NAMESPACE/NAME`, with the suffix `-NUMA1` if NUMA-bound."""
    kind: RegionKind
    pool: str
    """Pool whose CPUs the containers run on."""
    numa_nodes: tuple[int, ...]
    """NUMA nodes that the containers are bound to, or all that no pod is bound to exclusively."""
    bound: bool = False
    exclusive: bool = False
    """Whether numa_exclusive keeps other online pods off these NUMA nodes."""
    reclaimable: bool = True
    """Whether the region's idle CPU may be reclaimed."""
    containers: tuple[str, ...] = ()
    """Paths of their cgroups."""
    pods: tuple[str, ...] = ()
    """`namespace/name`."""


class IndicatorState(msgspec.Struct, frozen=True, kw_only=True):
    """Current and target value of an indicator."""

    name: str
    current: float
    target: float


class RegionAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Provision of one region and the reason."""

    region: Region
    policy: str
    controls: Mapping[ControlKnob, float]
    upper_cores: float
    lower_cores: float
    headroom_cores: float | None = None
    """Headroom by the policy for this kind. Not additive: regions share the CPUs that they may grow to."""
    headroom_reason: Reason | None = msgspec.field(default=None, name="headroom_verdict")
    signals: tuple[IndicatorState, ...] = ()
    reason: Reason = msgspec.field(name="verdict")


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a pool on one NUMA node, or on all NUMA nodes without exclusive binding."""

    pool: str
    numa: int = NOT_NUMA_BOUND
    cpus: int
    quota_cores: float | None = None
    """CPU limit of all cgroups of the pool together; None if only its CPUs limit it."""
    overlap: Mapping[str, int] = {}
    """Number of CPUs shared with each other pool, by pool."""


class CpuAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """CPU provision of one cycle."""

    regions: tuple[RegionAdvice, ...] = ()
    sizes: tuple[PoolSize, ...] = ()
    isolated: tuple[str, ...] = ()
    """Isolated pods, `namespace/name`."""


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """Total resources that reclaimed pods may request, their current use included; None if inputs are missing."""

    cores: float | None = None
    cores_by_numa: Mapping[int, float] = {}
    memory_bytes: float | None = None
    memory_by_numa: Mapping[int, float] = {}
    stale: tuple[str, ...] = ()
    """`cpu` and `memory` if no new value could be computed: the previous value, or a reduced one, still applies."""
    reason: Reason = msgspec.field(name="verdict")


class NicBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth of one network card in Mbit/s. An allocation applies in both directions."""

    name: str
    speed: int
    egress_capacity: int
    """Allocatable outbound bandwidth: Katalyst's share of the speed minus the reserve."""
    ingress_capacity: int
    """Allocatable inbound bandwidth."""
    allocated_mbit: int = msgspec.field(default=0, name="promised")
    """Bandwidth allocated to all pods together."""
    pods: Mapping[str, int] = {}
    """Allocated bandwidth by pod, `namespace/name`."""

    @property
    def capacity(self) -> int:
        """Allocatable bandwidth in both directions."""
        return min(self.egress_capacity, self.ingress_capacity)

    @property
    def free(self) -> int:
        """Bandwidth still allocatable."""
        return max(self.capacity - self.allocated_mbit, 0)


class KnobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Desired value of one knob of one cgroup, or a one-shot operation; QRM decides whether and how to apply it."""

    cgroup: str
    knob: Knob
    value: str
    reason: Reason = msgspec.field(name="verdict")


class MemoryPressure(StrEnum):
    """Severity of a memory shortage: Katalyst's states and UNKNOWN."""

    NO_RISK = "no_risk"
    TUNE_MEMCG = "tune_memcg"
    """Free memory is below twice the critical watermark."""
    DROP_CACHE = "drop_cache"
    """Free memory is below the critical watermark."""
    UNKNOWN = "unknown"
    """Inputs are missing; no action is taken."""


class MemoryCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Memory condition of the node or of one NUMA node."""

    state: MemoryPressure
    target_bytes: int = 0
    """Bytes missing to twice the critical watermark; 0 if no action is needed."""
    reason: Reason = msgspec.field(name="verdict")


class MemoryAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Memory advice of one cycle, in bytes."""

    policy: str
    headroom_bytes: float | None
    """Memory that reclaimed pods may request in total, their current use included; None if inputs are missing."""
    headroom_by_numa: Mapping[int, float] = {}
    """Headroom by NUMA node; sums to headroom_bytes, empty if the distribution is unknown."""
    headroom_reason: Reason = msgspec.field(name="headroom_verdict")
    provision_by_numa: Mapping[int, float] = {}
    """Memory for reclaimed pods of each NUMA node as a stock advisor reports it (reclaimed_memory_size); empty without one."""
    condition: MemoryCondition
    numa_conditions: Mapping[int, MemoryCondition] = {}
    knob_requests: tuple[KnobRequest, ...] = msgspec.field(default=(), name="wishes")
    reasons: tuple[Reason, ...] = msgspec.field(default=(), name="verdicts")
    """Result of each enabled part, with or without a request."""


class PowerActionKind(StrEnum):
    """Kinds of action on a power alert."""

    NOOP = "noop"
    EVICT = "evict"
    CAP = "cap"
    RESET = "reset"


class PowerAction(msgspec.Struct, frozen=True, kw_only=True):
    """Action on a power alert with its amounts and the reason. It applies until the next one."""

    kind: PowerActionKind
    at_ns: int | None = None
    """CLOCK_MONOTONIC when an eviction or a cap was decided."""
    percent: int = 0
    """Percentage of all pods to evict."""
    count: int = 0
    """Number of reclaimed pods to evict."""
    target_watts: int = 0
    """Power of the node that a cap is to reach."""
    current_watts: int = 0
    """Measured power."""
    reason: Reason = msgspec.field(name="verdict")


class PowerCap(msgspec.Struct, frozen=True, kw_only=True):
    """A power cap in force. It outlasts the action that set it until the alert is over."""

    target_watts: int
    """Power of the node that the cap is to reach."""
    package_watts: int
    """Limit of each processor package; 0 if no package has an energy counter, so that none can be limited."""
    reason: Reason = msgspec.field(name="verdict")


class OvercommitAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Overcommitment ratios that the node reports; 1 means none."""

    cpu_ratio: float
    memory_ratio: float
    reason: Reason = msgspec.field(name="verdict")


class NodeAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Power and overcommitment advice in effect; None if disabled."""

    power: PowerAction | None = None
    power_cap: PowerCap | None = None
    """The cap in force; None without one."""
    releases_power_cap: bool = True
    """Whether limits that this agent or an earlier one wrote are restored; False while an alert lasts or is unknown."""
    overcommit: OvercommitAdvice | None = None


QUOTA_HELPED = "quota_helped"
"""Rule of the cycle in which a trial showed that the CPU quota of reclaimed pods helps. The quota does not change then."""


class QuotaVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial of the CPU quota of reclaimed pods: run-queue latency of online pods with and without it."""

    key: str
    """Digest of the online workloads that the verdict holds for."""
    workloads: str
    """The first of these workloads, for people."""
    helped: bool
    """Whether latency was lower with the quota, by more than the noise."""
    quantile: float
    without_quota_ns: float
    """Quantile of the waits while no quota limited reclaimed pods."""
    with_quota_ns: float
    """Quantile of the waits while the quota limited reclaimed pods."""
    without_quota_s: float
    """Length of the intervals without quota."""
    with_quota_s: float
    statistic: float
    """Mean excess of latency above the target without the quota minus that with it, in standard errors; positive if latency was
    lower with the quota (agent/advisor/latency_comparison.py)."""
    required_statistic: float
    """Value of `statistic` above which the difference is more than noise."""
    worst_ns: float
    """Longest quantile of one container in one cycle of the trial. The verdict does not hold for latency far above it."""
    wall_time_ns: int
    """When the trial ended (CLOCK_REALTIME)."""
    expires_wall_ns: int
    """When the quota is tried again (CLOCK_REALTIME)."""

    @property
    def text(self) -> str:
        """Two sentences with the numbers."""
        without_ms, with_ms = self.without_quota_ns / NS_PER_MS, self.with_quota_ns / NS_PER_MS
        subject = f"The CPU quota of reclaimed pods {'helped' if self.helped else 'did not help'} {self.workloads}"
        numbers = (
            f"run-queue latency p{self.quantile * 100:g} {without_ms:.3g} ms -> {with_ms:.3g} ms, over "
            f"{self.without_quota_s:.3g} s without and {self.with_quota_s:.3g} s with the quota "
            f"(difference {self.statistic:.2f} standard errors; noise stays below {self.required_statistic:.2f})"
        )
        effect = "The quota is tested again" if self.helped else "The quota is lifted, and tested again"
        at = datetime.fromtimestamp(self.expires_wall_ns // NS_PER_S, UTC)
        return f"{subject}: {numbers}. {effect} after {at:%H:%M} UTC."


PoolKeyT = TypeVar("PoolKeyT", str, tuple[str, int])
"""A pool, or a pool and its NUMA node."""


def scale_proportionally(sizes: Mapping[PoolKeyT, int], target: int) -> dict[PoolKeyT, int] | None:
    """Scale sizes to the given sum, keeping proportions and at least 1 each; None if the target is less than their number.

    Sizes must be at least 1. As in Katalyst's pool size regulation, all sizes are rounded up first; then the size that grew
    most in proportion loses one until the sum fits (ties: the larger size, then the first name).
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
