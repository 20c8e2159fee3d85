"""Defines the settings of the advisor: latency policy, provision, headroom, inference, forecast, overcommit and power.
Names in brackets are Katalyst's, or Koordinator's where the section says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from agent.config.units import SMALL_NODE_SHARE, Cores, Fraction, Percent, Ratio, Seconds, reclaim_reserve_cpus

TimeOfDay = Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Offset = Annotated[float, Meta(ge=-1, le=1)]


class InferenceSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_slots] Effect of predictions below a bound."""

    below: float
    """[net] Upper bound of predictions in the slot; the last slot has none."""
    offset: Offset
    """[offset] Added to the target (borwein_v2), or the target itself (borwein_v3)."""


class InferenceSpecialTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_special_time] Part of the day, in UTC, in which predictions do not count; may span midnight."""

    start: TimeOfDay
    """First minute, `HH:MM`."""
    end: TimeOfDay
    """First minute after it, `HH:MM`."""
    offset: Offset
    """Added to the target (borwein_v2), or the target itself (borwein_v3)."""

    def covers(self, minute: int) -> bool:
        """Return whether this minute of the day is in the interval."""
        start, end = _minute_of_day(self.start), _minute_of_day(self.end)
        return start <= minute < end if start <= end else minute >= start or minute < end


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How latency predictions move the target of cpu_usage_ratio. Without a model, a pod's request_p99_ms divided by
    the target of its service profile counts: 1 is on target."""

    strategy: Literal["none", "borwein_v2", "borwein_v3"] = "none"
    """[StrategyGroup] `borwein_v2` adds the slot's offset to the target, `borwein_v3` replaces the target."""
    slots: tuple[InferenceSlot, ...] = ()
    """[strategy_slots] Slots in ascending order of `below`."""
    special_times: tuple[InferenceSpecialTime, ...] = ()
    """[strategy_special_time] Parts of the day in which predictions do not count."""
    offset_min: Offset = -0.25
    """[OffsetMin] Lower bound of the offset."""
    offset_max: Offset = 0.25
    """[OffsetMax] Upper bound of the offset."""
    target_min: Ratio = 0.2
    """[IndicatorMin] Lower bound of the target."""
    target_max: Ratio = 0.9
    """[IndicatorMax] Upper bound of the target."""
    stale_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Older predictions do not count."""

    def __post_init__(self) -> None:
        if self.strategy != "none" and not self.slots:
            raise ValueError(f"strategy {self.strategy} needs slots; add them or choose none")
        if self.offset_min > self.offset_max:
            raise ValueError(f"offsetMin {self.offset_min:g} is above offsetMax {self.offset_max:g}; lower it")
        if self.target_min > self.target_max:
            raise ValueError(f"targetMin {self.target_min:g} is above targetMax {self.target_max:g}; lower it")
        for first, second in pairwise(self.slots):
            if first.below >= second.below:
                raise ValueError(
                    f"slots: below {second.below:g} comes after below {first.below:g}; put them in ascending order"
                )


def _minute_of_day(time: str) -> int:
    return int(time[:2]) * 60 + int(time[3:])


class ForecastConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Margin and history of usage forecasts."""

    method: Literal["calibrated", "koordinator", "n-sigma", "rc-like", "max"] = "calibrated"
    """`calibrated` steers its margin by its misses. The others are for comparison in replay and simulation:
    Koordinator's p95 + 10 %, mean + 5 sigma, p99 and maximum of a day."""
    miss_ratio: Annotated[float, Meta(ge=0.005, le=0.2)] = 0.055
    """Share of forecasts that the next hour's peak may exceed; one point less costs about one point of the node."""
    min_history_s: Annotated[float, Meta(ge=3600, le=259_200)] = 86_400.0
    """With less history, headroom is at most Katalyst's formula (Koordinator waits a day too)."""
    stale_s: Annotated[float, Meta(ge=300, le=3600)] = 900.0
    """Without a newer sample, the forecast is the highest remembered peak and Katalyst's formula holds."""


ProvisionPolicyName = Literal["none", "canonical", "rama", "dynamic-quota"]
TargetGetter = Literal["spd-min", "spd-avg", "metric-threshold"]
Positive = Annotated[float, Meta(gt=0)]
Gain = Annotated[float, Meta(ge=0, le=10)]


class RamaGains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Gains of `rama` for one indicator; the error is ln(current / target)."""

    up: Gain
    """[Kpp] Cores per core of the region's upper bound and unit of error, above the target."""
    down: Gain
    """[Kpn] Cores per core of the region's upper bound and unit of error, below the target."""
    dead_above: Annotated[float, Meta(ge=0, le=10)]
    """[DeadbandUpperPct] Relative deviation above the target without effect."""
    dead_below: Fraction
    """[DeadbandLowerPct] Relative deviation below the target without effect."""
    derivative_up: Gain = 0.0
    """[Kdp] Cores per unit of change of the error, towards more CPU."""
    derivative_down: Gain = 0.0
    """[Kdn] Cores per unit of change of the error, towards less CPU."""


_RUNQ_LATENCY_GAINS = RamaGains(up=0.05, down=0.009, dead_above=0.05, dead_below=0.2)
DEFAULT_RAMA_GAINS: Mapping[str, RamaGains] = {
    "cpu_sched_wait": _RUNQ_LATENCY_GAINS,
    "cpu_usage_ratio": RamaGains(up=0.1, down=0.04, dead_above=0.01, dead_below=0.06),
    "cpi": RamaGains(up=0.1, down=0.04, dead_above=0.0, dead_below=0.02),
    "mem_access_read_lat": _RUNQ_LATENCY_GAINS,
    "mem_access_write_lat": _RUNQ_LATENCY_GAINS,
    "mem_l3_miss_lat": _RUNQ_LATENCY_GAINS,
    "request_p99_ms": _RUNQ_LATENCY_GAINS,
}


class IndicatorTargetsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[regionIndicators] Targets of indicators; only those named are followed."""

    share: Mapping[str, Positive] = field(default_factory=lambda: {"cpu_sched_wait": 460.0, "cpu_usage_ratio": 0.8})
    """For share regions. cpu_sched_wait is a pod's mean run-queue latency in microseconds. request_p99_ms is followed
    where a service profile has a target, and for all pods if named here."""
    dedicated: Mapping[str, Positive] = field(default_factory=lambda: {"cpi": 1.4, "cpu_usage_ratio": 0.55})
    """For dedicated regions. cpi is cycles per instruction of the main containers."""
    getter: TargetGetter = "spd-min"
    """[indicatorTargetDefaultGetter] Target of a region: minimum or mean of its pods' own targets, or `thresholds`,
    which override them."""
    getters: Mapping[str, TargetGetter] = field(default_factory=lambda: {"cpu_usage_ratio": "spd-avg"})
    """[indicatorTargetGetters] By indicator, instead of `getter`."""
    thresholds: Mapping[str, Positive] = {}
    """[metricThreshold] By indicator, for getter `metric-threshold`; others keep their target."""
    expand_factors: Mapping[str, Positive] = {}
    """[indicatorTargetMetricThresholdExpandFactors] Factor of a threshold, by indicator."""


class IsolationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Shared pods with many more runnable tasks than requested CPU get a pool of their own for a while."""

    enabled: bool = False
    """[!isolationDisabled] Turn isolation on."""
    disabled_pools: tuple[str, ...] = ()
    """[isolationDisabledPools] Pools whose pods are never isolated, without the NUMA node's suffix."""
    load_ratio: Positive = 1.5
    """[isolationCPURatio] A pod is overloaded above this many runnable tasks per CPU of its limit (or request)."""
    load_cores: Cores = 2.0
    """[isolationCPUSize] A pod is overloaded above its limit (or request) plus this."""
    lock_in_rounds: Annotated[int, Meta(ge=1, le=1000)] = 3
    """[isolationLockInThreshold] Overloaded cycles in a row before isolation."""
    lock_out_s: Annotated[float, Meta(ge=0, le=3600)] = 120.0
    """[isolationLockOutPeriodSecs] Time without overload before isolation ends."""
    max_resource_ratio: Ratio = 0.2
    """[isolatedMaxResourceRatio] Largest isolated part of a pool's CPU."""
    max_resource_ratios: Mapping[str, Ratio] = {}
    """[isolatedMaxPoolResourceRatios] `maxResourceRatio` by pool."""
    max_pod_ratio: Ratio = 0.5
    """[isolatedMaxPodRatio] Largest isolated part of a pool's pods; never all."""
    max_pod_ratios: Mapping[str, Ratio] = {}
    """[isolatedMaxPoolPodRatios] `maxPodRatio` by pool."""
    include_sidecars: bool = False
    """[isolationIncludeSidecarRequirement] Include sidecars in the size of the isolated pool."""


class ProvisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How pools are sized. Names in brackets are Katalyst's. Settings common to all policies are in `advisor`."""

    share_policies: tuple[ProvisionPolicyName, ...] = ("canonical",)
    """[cpu-provision-policy-priority, share] The first policy that has its inputs is used; `canonical` is tried last."""
    dedicated_policies: tuple[ProvisionPolicyName, ...] = ("canonical",)
    """[cpu-provision-policy-priority, dedicated] Policies for dedicated pods, in order."""
    restrict: Mapping[ProvisionPolicyName, ProvisionPolicyName] = field(
        default_factory=lambda: {"rama": "dynamic-quota"}
    )
    """[restrict-ref-policy] Bounds the quota of one policy by another's, where both are used."""
    overlap: bool = False
    """[allowSharedCoresOverlapReclaimedCores] Online pools have all CPUs; reclaimed pods run on part of the same CPUs."""
    quota: bool = False
    """[feature_gate_quota_ctrl_knob] With `overlap`: limit reclaimed pods by a quota on NUMA nodes to which pods are
    bound."""
    disable_reclaim_share_pools: tuple[str, ...] = ()
    """[disableReclaimSharePools] Pools without reclaimable CPU; if NUMA-bound, their socket has no headroom. Without
    the NUMA node's suffix."""
    numa_min_reclaimed_ratio: Fraction = 0.0
    """[numaMinReclaimedResourceRatioForAllocate] Part of each NUMA node reserved for reclaimed pods; 0:
    `advisor.minReclaimedCores`, spread over the nodes."""
    numa_min_reclaimed_cores: Annotated[int, Meta(ge=0, le=8192)] = 2
    """[numaMinReclaimedResourceForAllocate] Smallest result of that ratio, in CPUs."""
    min_dedicated_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinDedicatedCPURequirement] Smallest requirement of a dedicated region, within its upper bound."""
    gains: Mapping[str, RamaGains] = field(default_factory=lambda: dict(DEFAULT_RAMA_GAINS))
    """[PIDParameters] Gains of `rama` by indicator; an indicator without gains is ignored."""
    targets: IndicatorTargetsConfig = IndicatorTargetsConfig()
    isolation: IsolationConfig = IsolationConfig()


_SMALL_NODE_CPUS = 16
"""Katalyst's amounts suit large nodes; with nothing configured a node below this size gets shares of itself."""
RegionPolicy = Literal["none", "canonical", "numa-dedicated", "numa-exclusive"]


class CpuUtilBasedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[cpuHeadroomConfig.utilBasedConfig] More headroom while reclaimed pods use little of their CPU."""

    enable: bool = False
    """[enable] Turn it on."""
    target: Fraction = 0.6
    """[targetReclaimedCoreUtilization] Use of reclaimed CPU below which headroom exceeds the supply."""
    maximum: Fraction = 0.0
    """[maxReclaimedCoreUtilization] Use above which headroom falls; 0: never."""
    max_oversold_rate: Annotated[float, Meta(gt=0, le=100)] = 1.2
    """[maxOversoldRate] Largest headroom, as a multiple of the supply."""
    max_capacity_rate: Ratio = 1.0
    """[maxHeadroomCapacityRate] Largest headroom, as a share of the NUMA nodes' CPUs."""

    def __post_init__(self) -> None:
        if 0 < self.maximum < self.target:
            raise ValueError(
                f"maximum {self.maximum:g} is below target {self.target:g}: headroom would grow and shrink at once; "
                "raise it, or set 0"
            )


class KoordinatorHeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's colocation strategy, with its names in brackets."""

    cpu_policy: Literal["usage", "maxUsageRequest"] = "usage"
    """[cpuCalculatePolicy] Subtract the CPU use of online pods from capacity, or the maximum of use and requests."""
    memory_policy: Literal["usage", "request", "maxUsageRequest"] = "usage"
    """[memoryCalculatePolicy] Subtract the memory use of online pods from capacity, their requests, or the maximum of
    both."""
    cpu_reclaim_threshold_percent: Percent = 60.0
    """[cpuReclaimThresholdPercent] The rest of the CPU capacity is the margin."""
    memory_reclaim_threshold_percent: Percent = 65.0
    """[memoryReclaimThresholdPercent] The rest of the memory capacity is the margin."""
    batch_cpu_threshold_percent: Percent | None = None
    """[batchCPUThresholdPercent] Largest batch CPU, of capacity; unset: no bound."""
    batch_memory_threshold_percent: Percent | None = None
    """[batchMemoryThresholdPercent] Largest batch memory, of capacity; unset: no bound."""
    mid_cpu_threshold_percent: Percent = 100.0
    """[midCPUThresholdPercent] Largest mid CPU, of capacity."""
    mid_memory_threshold_percent: Percent = 100.0
    """[midMemoryThresholdPercent] Largest mid memory, of capacity."""
    mid_unallocated_percent: Percent = 0.0
    """[midUnallocatedPercent] Share of unrequested resources that is mid too."""
    mid_static_cpu_percent: Percent | None = None
    """[midStaticCPUReservedPercent] Fixed mid CPU, of capacity; unset: by use."""
    mid_static_memory_percent: Percent | None = None
    """[midStaticMemoryReservedPercent] Fixed mid memory, of capacity; unset: by use."""


class HeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How headroom is computed."""

    policy: Literal["common", "estimate", "forecast", "koordinator-batch", "koordinator-mid"] | None = None
    """`common`: Katalyst's assembler. `estimate`: the node less the estimated need of online pods. `forecast`: the node
    less their predicted peak, also for memory, bounded by the former two on the first day. Others: Koordinator's.
    Unset: `common` for `canonical`, `estimate` for `latency`."""
    share_region: RegionPolicy = "canonical"
    """Headroom policy of share regions."""
    isolation_region: RegionPolicy = "canonical"
    """Headroom policy of isolation regions."""
    dedicated_region: RegionPolicy = "canonical"
    """Headroom policy of dedicated regions."""
    whole_cores: bool | None = None
    """`common` rounds like Katalyst: up on bound NUMA nodes, else down. Unset: from 16 CPUs."""
    util: CpuUtilBasedConfig = CpuUtilBasedConfig()
    koordinator: KoordinatorHeadroomConfig = KoordinatorHeadroomConfig()

    def rounds(self, cpus: int) -> bool:
        """Return whether headroom of a node with this many CPUs is rounded to whole cores."""
        return cpus >= _SMALL_NODE_CPUS if self.whole_cores is None else self.whole_cores


class OvercommitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Ratios by which the node may be overcommitted, from the use of its pods."""

    enable: bool = False
    """[overcommit_aware among the sysadvisor plugins] Turn it on."""
    period_s: Seconds = 10.0
    """[SyncPeriod] Time between evaluations."""
    target_cpu: Ratio = 0.6
    """[TargetCPULoad] Share of the node's CPU that pods should use."""
    target_memory: Ratio = 0.8
    """[TargetMemoryLoad] Share of the node's memory that pods should use."""
    estimated_cpu: Ratio = 0.4
    """[EstimatedPodCPULoad] Smallest assumed CPU use of new pods, as a share of their requests."""
    estimated_memory: Ratio = 0.8
    """[EstimatedPodMemoryLoad] Smallest assumed memory use of new pods, as a share of their requests."""


class PowerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Reaction to a power alert of the node."""

    enable: bool = False
    """[power_aware among the sysadvisor plugins] Turn it on."""
    annotation_prefix: str = ""
    """[AnnotationKeyPrefix] Prefix of the node's annotations such as power-alert, without the slash."""
    period_s: Seconds = 9.0
    """Time between actions: a cap settles in 4 to 6 s and is measured in 2 more."""
    voluntary_cpu_ratio: Fraction = 0.45
    """At p0 frequencies fall only while the node is busier than this."""
    voluntary_percent: Annotated[int, Meta(ge=0, le=100)] = 10
    """Below s0 frequencies fall by at most this in total, until the alert ends."""
    capping: bool = True
    """[DisablePowerCapping, inverted] Write the power limits of the processor packages (RAPL)."""


class LatencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Policy `latency`: the run-queue latency of online pods decides how much CPU is reclaimable."""

    target_wait_ms: Annotated[float, Meta(ge=0.002, le=1000)] = 10.0
    """Target of the run-queue latency of online pods at `quantile`. A lower one protects more and reclaims less."""
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.99
    """Quantile compared with the target; at 0.99 one switch in a hundred may wait longer."""
    min_waits_above: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Fewer waits above the target are no breach, because a quiet pod may have one slow switch."""
    calm_s: Seconds = 3.0
    """Latency must be below half the target for this time before reclaimable CPU grows."""
    grow_ratio_per_s: Ratio = 0.1
    """Growth of reclaimable CPU, as a share of the node per second (0.1 as in Koordinator's suppress)."""
    min_lent_ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Share of the node that batch work retains in a breach, so that it progresses and can be measured."""
    gross_breach_factor: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    """Latency of this many targets cuts reclaimable CPU to the minimum at once; less halves it."""
    least_blame_ratio: Fraction = 0.1
    """Share of the waits that batch work must cause before its CPU is cut; 0 cuts always. Needs probe `blame`."""
    stale_s: Seconds = 5.0
    """Without newer latency, reclaimable CPU is at most what the estimated need of online pods leaves."""


class AdvisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How much CPU is reclaimable, and how that is evaluated. Names in brackets are Katalyst's."""

    policy: Literal["latency", "canonical", "none"] = "latency"
    """`latency`: priority and measured run-queue latency. `canonical`: Katalyst's estimate and disjoint cpusets.
    `none`: nothing."""
    enable_reclaim: bool = True
    """[enableReclaim] `false` takes everything but the minimum from reclaimed pods."""
    reserved_for_allocate_cores: Cores | None = None
    """[reservedResourceForAllocate] CPU reserved for bursts of online pods. Unset: 4, a quarter below 16 CPUs."""
    min_reclaimed_cores: Annotated[int, Meta(ge=1, le=8192)] | None = None
    """[minReclaimedResourceForAllocate] CPUs reserved for reclaimed pods, at least one per NUMA node. Unset: 4, a
    quarter below 16 CPUs."""
    min_share_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinShareCPURequirement] Smallest share pool, if the node is large enough."""
    usage_margin: Annotated[float, Meta(ge=1, le=10)] = 1.25
    """Estimated need as a multiple of measured use, unless load is higher."""
    fallback_cores: Cores = 4.0
    """Assumed need of an online container with neither measurement nor request."""
    ramp_up_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """For this time the need of a new container is its request."""
    max_ramp_up_cores: Annotated[int, Meta(ge=1)] = 10
    """[MaxRampUpStep] Largest growth of the share pool in one cycle."""
    max_ramp_down_cores: Annotated[int, Meta(ge=1)] = 2
    """[MaxRampDownStep] Largest cut of the share pool in one step."""
    min_ramp_down_period_s: Annotated[float, Meta(ge=0)] = 30.0
    """[MinRampDownPeriod] Time between two cuts."""
    latency: LatencyConfig = LatencyConfig()
    provision: ProvisionConfig = ProvisionConfig()
    headroom: HeadroomConfig = HeadroomConfig()

    def reserve_cores(self, cpus: int) -> float:
        """Return the cores reserved for bursts of online pods on a node with this many CPUs."""
        if self.reserved_for_allocate_cores is not None:
            return min(self.reserved_for_allocate_cores, cpus)
        return min(4.0, cpus / SMALL_NODE_SHARE)

    def reclaim_reserve_cores(self, cpus: int, numa_nodes: int) -> int:
        """Return the CPUs reserved for reclaimed pods: at least one per NUMA node, at most all."""
        return reclaim_reserve_cpus(self.min_reclaimed_cores, cpus, numa_nodes)
