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
    """[net] Upper bound of predictions; the last slot has none."""
    offset: Offset
    """[offset] Added to the target (borwein_v2), or the target (borwein_v3)."""


class InferenceSpecialTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_special_time] Part of the day, in UTC, in which predictions do not count; may span midnight."""

    start: TimeOfDay
    """First minute, `HH:MM`."""
    end: TimeOfDay
    """First minute after it, `HH:MM`."""
    offset: Offset
    """As in slots."""

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
    """[strategy_slots] Slots by ascending `below`."""
    special_times: tuple[InferenceSpecialTime, ...] = ()
    """[strategy_special_time] Times of day without predictions."""
    offset_min: Offset = -0.25
    """[OffsetMin] Lower bound of the offset."""
    offset_max: Offset = 0.25
    """[OffsetMax] Upper bound of the offset."""
    target_min: Ratio = 0.2
    """[IndicatorMin] Lower bound of the target."""
    target_max: Ratio = 0.9
    """[IndicatorMax] Upper bound of the target."""
    stale_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Maximum age of predictions."""

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
    """`calibrated` adjusts its margin to its misses. Others are for replay and simulation: Koordinator's p95 + 10 %,
    mean + 5 sigma, p99 and maximum of a day."""
    miss_ratio: Annotated[float, Meta(ge=0.005, le=0.2)] = 0.055
    """Share of forecasts that the next hour's peak may exceed; one point less costs about one point of the node."""
    min_history_s: Annotated[float, Meta(ge=3600, le=259_200)] = 86_400.0
    """With less history, headroom is at most Katalyst's formula."""
    stale_s: Annotated[float, Meta(ge=300, le=3600)] = 900.0
    """Without a newer sample, the forecast is the highest remembered peak, bounded by Katalyst's formula."""


ProvisionPolicyName = Literal["none", "canonical", "rama", "dynamic-quota"]
TargetGetter = Literal["spd-min", "spd-avg", "metric-threshold"]
Positive = Annotated[float, Meta(gt=0)]
Gain = Annotated[float, Meta(ge=0, le=10)]


class RamaGains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Gains of `rama` for one indicator; the error is ln(current / target)."""

    up: Gain
    """[Kpp] Cores per core of the region's upper bound and unit of error, above the target."""
    down: Gain
    """[Kpn] The same below the target."""
    dead_above: Annotated[float, Meta(ge=0, le=10)]
    """[DeadbandUpperPct] Relative deviation above the target without effect."""
    dead_below: Fraction
    """[DeadbandLowerPct] Relative deviation below the target without effect."""
    derivative_up: Gain = 0.0
    """[Kdp] Cores per change of the error, towards more CPU."""
    derivative_down: Gain = 0.0
    """[Kdn] Cores per change of the error, towards less CPU."""


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
    """Share regions: cpu_sched_wait is mean run-queue latency in microseconds; request_p99_ms counts if a service
    profile or this map has a target."""
    dedicated: Mapping[str, Positive] = field(default_factory=lambda: {"cpi": 1.4, "cpu_usage_ratio": 0.55})
    """Dedicated regions: cpi is cycles per instruction of main containers."""
    getter: TargetGetter = "spd-min"
    """[indicatorTargetDefaultGetter] Minimum or mean of the pods' own targets, or `thresholds`, which override them."""
    getters: Mapping[str, TargetGetter] = field(default_factory=lambda: {"cpu_usage_ratio": "spd-avg"})
    """[indicatorTargetGetters] `getter` by indicator."""
    thresholds: Mapping[str, Positive] = {}
    """[metricThreshold] Targets by indicator, for getter `metric-threshold`."""
    expand_factors: Mapping[str, Positive] = {}
    """[indicatorTargetMetricThresholdExpandFactors] Factor of a threshold, by indicator."""


class IsolationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Shared pods with many more runnable tasks than requested CPU temporarily get their own pool."""

    enabled: bool = False
    """[!isolationDisabled] Isolate overloaded pods."""
    disabled_pools: tuple[str, ...] = ()
    """[isolationDisabledPools] Pools without isolation, without NUMA suffix."""
    load_ratio: Positive = 1.5
    """[isolationCPURatio] Overloaded: more runnable tasks per CPU of its limit (or request)."""
    load_cores: Cores = 2.0
    """[isolationCPUSize] Overloaded: more runnable tasks than its limit (or request) plus this."""
    lock_in_rounds: Annotated[int, Meta(ge=1, le=1000)] = 3
    """[isolationLockInThreshold] Overloaded cycles in a row before isolation."""
    lock_out_s: Annotated[float, Meta(ge=0, le=3600)] = 120.0
    """[isolationLockOutPeriodSecs] Time without overload before isolation ends."""
    max_resource_ratio: Ratio = 0.2
    """[isolatedMaxResourceRatio] Maximum isolated share of a pool's CPU."""
    max_resource_ratios: Mapping[str, Ratio] = {}
    """[isolatedMaxPoolResourceRatios] `maxResourceRatio` by pool."""
    max_pod_ratio: Ratio = 0.5
    """[isolatedMaxPodRatio] Maximum isolated share of a pool's pods; never all."""
    max_pod_ratios: Mapping[str, Ratio] = {}
    """[isolatedMaxPoolPodRatios] `maxPodRatio` by pool."""
    include_sidecars: bool = False
    """[isolationIncludeSidecarRequirement] Count sidecars in the isolated pool's size."""


class ProvisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Pool sizes. Settings common to all policies are in `advisor`."""

    share_policies: tuple[ProvisionPolicyName, ...] = ("canonical",)
    """[cpu-provision-policy-priority, share] The first with its inputs is used, at last `canonical`."""
    dedicated_policies: tuple[ProvisionPolicyName, ...] = ("canonical",)
    """[cpu-provision-policy-priority, dedicated] The same for dedicated pods."""
    restrict: Mapping[ProvisionPolicyName, ProvisionPolicyName] = field(
        default_factory=lambda: {"rama": "dynamic-quota"}
    )
    """[restrict-ref-policy] Bounds the quota of one policy by another's, if both are used."""
    overlap: bool = False
    """[allowSharedCoresOverlapReclaimedCores] Online pools have all CPUs, reclaimed pods some of the same."""
    quota: bool = False
    """[feature_gate_quota_ctrl_knob] With `overlap`: a quota for reclaimed pods on NUMA nodes with bound pods."""
    disable_reclaim_share_pools: tuple[str, ...] = ()
    """[disableReclaimSharePools] Pools without reclaimable CPU, without NUMA suffix; if NUMA-bound, their socket has no
    headroom."""
    numa_min_reclaimed_ratio: Fraction = 0.0
    """[numaMinReclaimedResourceRatioForAllocate] Share of each NUMA node reserved for reclaimed pods; 0:
    `advisor.minReclaimedCores`, spread over the nodes."""
    numa_min_reclaimed_cores: Annotated[int, Meta(ge=0, le=8192)] = 2
    """[numaMinReclaimedResourceForAllocate] Minimum result of that ratio."""
    min_dedicated_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinDedicatedCPURequirement] Minimum requirement of a dedicated region, within its upper bound."""
    gains: Mapping[str, RamaGains] = field(default_factory=lambda: dict(DEFAULT_RAMA_GAINS))
    """[PIDParameters] Gains of `rama` by indicator; others are ignored."""
    targets: IndicatorTargetsConfig = IndicatorTargetsConfig()
    isolation: IsolationConfig = IsolationConfig()


_SMALL_NODE_CPUS = 16
"""Katalyst's amounts suit large nodes; with nothing configured a node below this size gets shares of itself."""
RegionPolicy = Literal["none", "canonical", "numa-dedicated", "numa-exclusive"]


class CpuUtilBasedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[cpuHeadroomConfig.utilBasedConfig] More headroom while reclaimed pods use little of their CPU."""

    enable: bool = False
    """[enable] Enables this."""
    target: Fraction = 0.6
    """[targetReclaimedCoreUtilization] Use of reclaimed CPU below which headroom exceeds the supply."""
    maximum: Fraction = 0.0
    """[maxReclaimedCoreUtilization] Use above which headroom falls; 0: never."""
    max_oversold_rate: Annotated[float, Meta(gt=0, le=100)] = 1.2
    """[maxOversoldRate] Maximum headroom / supply."""
    max_capacity_rate: Ratio = 1.0
    """[maxHeadroomCapacityRate] Maximum headroom, share of the NUMA nodes' CPUs."""

    def __post_init__(self) -> None:
        if 0 < self.maximum < self.target:
            raise ValueError(
                f"maximum {self.maximum:g} is below target {self.target:g}: headroom would grow and shrink at once; "
                "raise it, or set 0"
            )


class KoordinatorHeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's colocation strategy, with its names in brackets."""

    cpu_policy: Literal["usage", "maxUsageRequest"] = "usage"
    """[cpuCalculatePolicy] Subtract online pods' use, or the maximum of use and requests."""
    memory_policy: Literal["usage", "request", "maxUsageRequest"] = "usage"
    """[memoryCalculatePolicy] Subtract online pods' use, requests, or their maximum."""
    cpu_reclaim_threshold_percent: Percent = 60.0
    """[cpuReclaimThresholdPercent] Usable CPU; the rest is the margin."""
    memory_reclaim_threshold_percent: Percent = 65.0
    """[memoryReclaimThresholdPercent] Usable memory; the rest is the margin."""
    batch_cpu_threshold_percent: Percent | None = None
    """[batchCPUThresholdPercent] Maximum batch CPU, of capacity; unset: none."""
    batch_memory_threshold_percent: Percent | None = None
    """[batchMemoryThresholdPercent] Maximum batch memory, of capacity; unset: none."""
    mid_cpu_threshold_percent: Percent = 100.0
    """[midCPUThresholdPercent] Maximum mid CPU, of capacity."""
    mid_memory_threshold_percent: Percent = 100.0
    """[midMemoryThresholdPercent] Maximum mid memory, of capacity."""
    mid_unallocated_percent: Percent = 0.0
    """[midUnallocatedPercent] Share of unrequested resources that is mid too."""
    mid_static_cpu_percent: Percent | None = None
    """[midStaticCPUReservedPercent] Fixed mid CPU, of capacity; unset: by use."""
    mid_static_memory_percent: Percent | None = None
    """[midStaticMemoryReservedPercent] Fixed mid memory, of capacity; unset: by use."""


class HeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How headroom is computed."""

    policy: Literal["common", "estimate", "forecast", "koordinator-batch", "koordinator-mid"] | None = None
    """`common`: Katalyst's. `estimate`: the node minus the estimated need of online pods and the use of the system.
    `forecast`: minus their predicted peak, also for memory, bounded by the others on the first day. Others:
    Koordinator's. Unset: `common` for `canonical`, `estimate` for `latency`."""
    share_region: RegionPolicy = "canonical"
    """Policy of share regions."""
    isolation_region: RegionPolicy = "canonical"
    """Policy of isolation regions."""
    dedicated_region: RegionPolicy = "canonical"
    """Policy of dedicated regions."""
    whole_cores: bool | None = None
    """`common` rounds: up on bound NUMA nodes, else down. Unset: from 16 CPUs."""
    system_use: bool = True
    """`estimate` leaves the system the CPU that it uses. False: only its reserved CPUs, as Koordinator's policy
    `request`, where processes outside of pods yield to pods."""
    util: CpuUtilBasedConfig = CpuUtilBasedConfig()
    koordinator: KoordinatorHeadroomConfig = KoordinatorHeadroomConfig()

    def rounds(self, cpus: int) -> bool:
        """Return whether headroom of a node with this many CPUs is rounded to whole cores."""
        return cpus >= _SMALL_NODE_CPUS if self.whole_cores is None else self.whole_cores


class OvercommitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Ratios by which the node may be overcommitted, from the use of its pods."""

    enable: bool = False
    """[overcommit_aware among the sysadvisor plugins] Compute the ratios."""
    period_s: Seconds = 10.0
    """[SyncPeriod] Time between evaluations."""
    target_cpu: Ratio = 0.6
    """[TargetCPULoad] Target CPU use of pods, share of the node."""
    target_memory: Ratio = 0.8
    """[TargetMemoryLoad] Target memory use of pods, share of the node."""
    estimated_cpu: Ratio = 0.4
    """[EstimatedPodCPULoad] Minimum CPU use of new pods / their requests."""
    estimated_memory: Ratio = 0.8
    """[EstimatedPodMemoryLoad] Minimum memory use of new pods / their requests."""


class PowerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Reaction to a power alert of the node."""

    enable: bool = False
    """[power_aware among the sysadvisor plugins] React to alerts."""
    annotation_prefix: str = ""
    """[AnnotationKeyPrefix] Prefix of the node's annotations, without the slash."""
    period_s: Seconds = 9.0
    """Time between actions; a cap takes effect in 6 to 8 s."""
    voluntary_cpu_ratio: Fraction = 0.45
    """At p0 power is lowered only while the node's CPU use is above this share."""
    voluntary_percent: Annotated[int, Meta(ge=0, le=100)] = 10
    """Maximum total reduction of power by alerts below s0, until the alert ends."""
    capping: bool = True
    """[DisablePowerCapping, inverted] Write the power limits of the processor packages (RAPL)."""


class LatencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Policy `latency`: the run-queue latency of online pods decides how much CPU is reclaimable."""

    target_wait_ms: Annotated[float, Meta(ge=0.002, le=1000)] = 10.0
    """Target of online pods' run-queue latency at `quantile`. A lower one reclaims less."""
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.99
    """Quantile compared with the target."""
    min_waits_above: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Fewer waits above the target are no breach."""
    calm_s: Seconds = 3.0
    """Time below half the target before reclaimable CPU grows."""
    grow_ratio_per_s: Ratio = 0.1
    """Growth of reclaimable CPU, share of the node per second."""
    min_reclaimable_ratio: Annotated[float, Meta(gt=0, lt=1)] = field(default=0.05, name="minLentRatio")
    """Share of the node that batch work retains in a breach, so that it can be measured."""
    gross_breach_factor: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    """Latency of this many targets cuts reclaimable CPU to the minimum; less halves it."""
    least_blame_ratio: Fraction = 0.1
    """Share of the waits that batch work must cause to be cut; 0: always cut. Needs probe `blame`."""
    stale_s: Seconds = 5.0
    """Without newer latency, reclaimable CPU is at most what the estimated need leaves."""
    quota_trials: bool = True
    """Compare online latency with and without the CPU quota of reclaimed pods, and lift a quota that does not help."""


class AdvisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How much CPU is reclaimable, and how that is evaluated. Names in brackets are Katalyst's."""

    policy: Literal["latency", "canonical", "none"] = "latency"
    """`latency`: priority and run-queue latency. `canonical`: Katalyst's estimate and disjoint cpusets. `none`: no
    reclaiming."""
    enable_reclaim: bool = True
    """[enableReclaim] `false` leaves reclaimed pods the minimum only."""
    reserved_for_allocate_cores: Cores | None = None
    """[reservedResourceForAllocate] Reserved for bursts of online pods. Unset: 4, a quarter below 16 CPUs."""
    min_reclaimed_cores: Annotated[int, Meta(ge=1, le=8192)] | None = None
    """[minReclaimedResourceForAllocate] Reserved for reclaimed pods, at least one CPU per NUMA node. Unset: 4, a
    quarter below 16 CPUs."""
    min_share_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinShareCPURequirement] Minimum share pool, if the node is large enough."""
    usage_margin: Annotated[float, Meta(ge=1, le=10)] = 1.25
    """Estimated need / measured use, unless load is higher."""
    fallback_cores: Cores = 4.0
    """Need of an online container without measurement and request."""
    ramp_up_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """A new container's need is its request for this time."""
    max_ramp_up_cores: Annotated[int, Meta(ge=1)] = 10
    """[MaxRampUpStep] Maximum growth of the share pool per cycle."""
    max_ramp_down_cores: Annotated[int, Meta(ge=1)] = 2
    """[MaxRampDownStep] Maximum cut of the share pool per step."""
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
