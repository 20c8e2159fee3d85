"""Defines the settings of the advisor: latency policy, provision, headroom, inference, forecast, overcommit and power.
Names in brackets are Katalyst's, or Koordinator's where the section says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from agent.config.units import SMALL_NODE_SHARE, Cores, Ratio, Seconds, reclaim_reserve_cpus

TimeOfDay = Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Offset = Annotated[float, Meta(ge=-1, le=1)]


class InferenceSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_slots] what a prediction below this means for the target."""

    below: float
    """[net] predictions below it, and not below the previous slot's, are in this one; the last slot has all above too."""
    offset: Offset
    """[offset] added to the target (borwein_v2), or the target itself (borwein_v3)."""


class InferenceSpecialTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_special_time] part of the day, in UTC, in which predictions do not count. May go over midnight."""

    start: TimeOfDay
    """`HH:MM`, the first minute of it,"""
    end: TimeOfDay
    """and the first after it."""
    offset: Offset
    """What is added to the target then (borwein_v2), or the target itself (borwein_v3)."""

    def covers(self, minute: int) -> bool:
        """Whether this minute of the day is within it, start included and end not."""
        start, end = _minute_of_day(self.start), _minute_of_day(self.end)
        return start <= minute < end if start <= end else minute >= start or minute < end


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How predictions of a latency regression move the target of cpu_usage_ratio. Where no model is asked, a pod's measured
    request_p99_ms over the target in its service profile takes their place: 1 is on target, 2 twice as long."""

    strategy: Literal["none", "borwein_v2", "borwein_v3"] = "none"
    """[StrategyGroup] `borwein_v2` adds the slot's offset to the target, `borwein_v3` puts it in the target's place."""
    slots: tuple[InferenceSlot, ...] = ()
    """[strategy_slots] in ascending order of `below`."""
    special_times: tuple[InferenceSpecialTime, ...] = ()
    """[strategy_special_time] parts of the day in which predictions do not count."""
    offset_min: Offset = -0.25
    """[OffsetMin] bounds of what is added,"""
    offset_max: Offset = 0.25
    """[OffsetMax] the upper of them,"""
    target_min: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """[IndicatorMin] and of the target that comes of it."""
    target_max: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """[IndicatorMax] the upper bound of it."""
    stale_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Predictions older than this do not count: the target is what it is without them."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
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
    """How sure a forecast has to be, and how much history it takes to be believed."""

    method: Literal["calibrated", "koordinator", "n-sigma", "rc-like", "max"] = "calibrated"
    """`calibrated` steers its margin by its misses and keeps score. The others are there to be compared with, in a replay or
    a simulation: Koordinator's 95th percentile and a tenth, mean and five deviations, 99th percentile and maximum of a day."""
    miss_ratio: Annotated[float, Meta(ge=0.005, le=0.2)] = 0.055
    """Share of forecasts that the next hour's peak may exceed; a point less of it lends about a point of the node less."""
    min_history_s: Annotated[float, Meta(ge=3600, le=259_200)] = 86_400.0
    """With less history than this, no more is promised than Katalyst's formula allows (Koordinator waits a day too)."""
    stale_s: Annotated[float, Meta(ge=300, le=3600)] = 900.0
    """Without a sample for so long, the forecast is the highest peak remembered and Katalyst's formula holds."""


ProvisionPolicyName = Literal["none", "canonical", "rama", "dynamic-quota"]
TargetGetter = Literal["spd-min", "spd-avg", "metric-threshold"]
Positive = Annotated[float, Meta(gt=0)]
Gain = Annotated[float, Meta(ge=0, le=10)]


class RamaGains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How hard `rama` answers one indicator; the error is ln(current / target)."""

    up: Gain
    """[Kpp] Cores for each core of the region's upper bound and unit of error, where the indicator is above its target."""
    down: Gain
    """[Kpn] The same below it."""
    dead_above: Annotated[float, Meta(ge=0, le=10)]
    """[DeadbandUpperPct] So far above the target, relative to it, nothing is done."""
    dead_below: Annotated[float, Meta(ge=0, le=1)]
    """[DeadbandLowerPct] The same below it."""
    derivative_up: Gain = 0.0
    """[Kdp] Cores for each unit by which the error grew, where that speaks for more;"""
    derivative_down: Gain = 0.0
    """[Kdn] and where it speaks for less."""


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
    """[regionIndicators] Where indicators should be: those that are named are looked at."""

    share: Mapping[str, Positive] = field(default_factory=lambda: {"cpu_sched_wait": 460.0, "cpu_usage_ratio": 0.8})
    """Of share regions. cpu_sched_wait is in microseconds, the mean of all waits for a CPU of the pool. request_p99_ms, which
    pods publish of themselves, is followed of every pod whose service profile has a target for it, and of all if named here."""
    dedicated: Mapping[str, Positive] = field(default_factory=lambda: {"cpi": 1.4, "cpu_usage_ratio": 0.55})
    """Of dedicated regions. cpi is cycles per instruction of the main containers."""
    getter: TargetGetter = "spd-min"
    """[indicatorTargetDefaultGetter] What of a region's pods counts: the lowest of their own targets, their mean, or
    `thresholds`, which go before them."""
    getters: Mapping[str, TargetGetter] = field(default_factory=lambda: {"cpu_usage_ratio": "spd-avg"})
    """[indicatorTargetGetters] By indicator, in place of `getter`."""
    thresholds: Mapping[str, Positive] = {}
    """[metricThreshold] By indicator, for the getter `metric-threshold`; where none is given, the target stands."""
    expand_factors: Mapping[str, Positive] = {}
    """[indicatorTargetMetricThresholdExpandFactors] By indicator: what its threshold is multiplied by."""


class IsolationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Shared pods that have far more tasks to run than CPU asked for are kept apart for a while."""

    enabled: bool = False
    """[!isolationDisabled] Whether it is done at all."""
    disabled_pools: tuple[str, ...] = ()
    """[isolationDisabledPools] Whose pods stay together, by the pool's name without its NUMA node."""
    load_ratio: Positive = 1.5
    """[isolationCPURatio] Runnable tasks above this times its limit (or request) are too many,"""
    load_cores: Cores = 2.0
    """[isolationCPUSize] and so are that and so many more,"""
    lock_in_rounds: Annotated[int, Meta(ge=1, le=1000)] = 3
    """[isolationLockInThreshold] in so many rounds in a row."""
    lock_out_s: Annotated[float, Meta(ge=0, le=3600)] = 120.0
    """[isolationLockOutPeriodSecs] So long after the load fell it stays apart."""
    max_resource_ratio: Ratio = 0.2
    """[isolatedMaxResourceRatio] Of what a pool's pods may use, so much may be apart;"""
    max_resource_ratios: Mapping[str, Ratio] = {}
    """[isolatedMaxPoolResourceRatios] by pool."""
    max_pod_ratio: Ratio = 0.5
    """[isolatedMaxPodRatio] Of a pool's pods so many may be apart, and never all;"""
    max_pod_ratios: Mapping[str, Ratio] = {}
    """[isolatedMaxPoolPodRatios] by pool."""
    include_sidecars: bool = False
    """[isolationIncludeSidecarRequirement] Whether sidecars count for the size of its pool."""


class ProvisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How pools are sized. Names in brackets are Katalyst's. What both ways of lending share is in `advisor`."""

    share_policies: tuple[ProvisionPolicyName, ...] = ("canonical",)
    """[cpu-provision-policy-priority, share] The first that has what it needs is followed; `canonical` is tried last."""
    dedicated_policies: tuple[ProvisionPolicyName, ...] = ("canonical",)
    """[cpu-provision-policy-priority, dedicated] the same for dedicated pods."""
    restrict: Mapping[ProvisionPolicyName, ProvisionPolicyName] = field(
        default_factory=lambda: {"rama": "dynamic-quota"}
    )
    """[restrict-ref-policy] A policy's quota is never more than that of another, where both are followed."""
    overlap: bool = False
    """[allowSharedCoresOverlapReclaimedCores] Online pools have all CPUs; reclaimed pods run on part of the same ones."""
    quota: bool = False
    """[feature_gate_quota_ctrl_knob] With `overlap`: a quota limits reclaimed pods on NUMA nodes that somebody is bound to."""
    disable_reclaim_share_pools: tuple[str, ...] = ()
    """[disableReclaimSharePools] Nothing is lent of these, and nothing is promised on a socket where one of them is bound to
    a NUMA node; by the pool's name without its NUMA node."""
    numa_min_reclaimed_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """[numaMinReclaimedResourceRatioForAllocate] Of each NUMA node so much is always reclaimed pods'; 0 leaves it to
    `advisor.minReclaimedCores`, spread over the nodes."""
    numa_min_reclaimed_cores: Annotated[int, Meta(ge=0, le=8192)] = 2
    """[numaMinReclaimedResourceForAllocate] And at least so many CPUs, where that ratio is set."""
    min_dedicated_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinDedicatedCPURequirement] A dedicated region's requirement is never less, as far as its upper bound allows."""
    gains: Mapping[str, RamaGains] = field(default_factory=lambda: dict(DEFAULT_RAMA_GAINS))
    """[PIDParameters] Of `rama`, by indicator; one without gains is not followed."""
    targets: IndicatorTargetsConfig = IndicatorTargetsConfig()
    isolation: IsolationConfig = IsolationConfig()


_SMALL_NODE_CPUS = 16
"""Katalyst's amounts are meant for large nodes; where nothing is configured a node below this gets shares of itself."""
RegionPolicy = Literal["none", "canonical", "numa-dedicated", "numa-exclusive"]
Percent = Annotated[float, Meta(ge=0, le=100)]


class CpuUtilBasedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[cpuHeadroomConfig.utilBasedConfig] promise more while reclaimed pods use little of what they have."""

    enable: bool = False
    """[enable] Whether it is done at all."""
    target: Annotated[float, Meta(ge=0, le=1)] = 0.6
    """[targetReclaimedCoreUtilization] below it more is promised than there is,"""
    maximum: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """[maxReclaimedCoreUtilization] above it less than was promised; 0 never takes back for that."""
    max_oversold_rate: Annotated[float, Meta(gt=0, le=100)] = 1.2
    """[maxOversoldRate] at most so many times what there is."""
    max_capacity_rate: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """[maxHeadroomCapacityRate] at most this share of the CPUs of the NUMA nodes."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        if 0 < self.maximum < self.target:
            raise ValueError(
                f"maximum {self.maximum:g} is below target {self.target:g}: more and less would be promised at once; "
                "raise it, or set 0"
            )


class KoordinatorHeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Koordinator's colocation strategy; names in brackets are its own."""

    cpu_policy: Literal["usage", "maxUsageRequest"] = "usage"
    """[cpuCalculatePolicy] what online pods use is taken off the capacity, or what they requested where that is more."""
    memory_policy: Literal["usage", "request", "maxUsageRequest"] = "usage"
    """[memoryCalculatePolicy] the same of memory; `request` takes off requests alone."""
    cpu_reclaim_threshold_percent: Percent = 60.0
    """[cpuReclaimThresholdPercent] the rest of the capacity is kept as a margin."""
    memory_reclaim_threshold_percent: Percent = 65.0
    """[memoryReclaimThresholdPercent] the same of memory."""
    batch_cpu_threshold_percent: Percent | None = None
    """[batchCPUThresholdPercent] batch is at most this share of the capacity; unset is no bound."""
    batch_memory_threshold_percent: Percent | None = None
    """[batchMemoryThresholdPercent] the same of memory."""
    mid_cpu_threshold_percent: Percent = 100.0
    """[midCPUThresholdPercent] mid is at most this share of the capacity."""
    mid_memory_threshold_percent: Percent = 100.0
    """[midMemoryThresholdPercent] the same of memory."""
    mid_unallocated_percent: Percent = 0.0
    """[midUnallocatedPercent] this share of what nobody requested is mid too."""
    mid_static_cpu_percent: Percent | None = None
    """[midStaticCPUReservedPercent] mid is this share of the capacity, whatever is used; unset goes by use."""
    mid_static_memory_percent: Percent | None = None
    """[midStaticMemoryReservedPercent] the same of memory."""


class HeadroomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How the amount that can be promised is found."""

    policy: Literal["common", "estimate", "forecast", "koordinator-batch", "koordinator-mid"] | None = None
    """`common` is Katalyst's assembler on the reclaim pool; `estimate` is what the need of online pods leaves of the node;
    `forecast` is what the foretold peak of their use leaves, of memory too (see `forecast`), for a day never more than those;
    the others are Koordinator's sums. Unless set, `common` for the policy `canonical` and `estimate` for `latency`."""
    share_region: RegionPolicy = "canonical"
    """What a pool of shared_cores is shown to leave."""
    isolation_region: RegionPolicy = "canonical"
    """The same of pods that are kept apart,"""
    dedicated_region: RegionPolicy = "canonical"
    """and of dedicated ones."""
    whole_cores: bool | None = None
    """`common` rounds as Katalyst does: up on bound NUMA nodes, down on the others. Unless set, on nodes of 16 CPUs and
    more."""
    util: CpuUtilBasedConfig = CpuUtilBasedConfig()
    koordinator: KoordinatorHeadroomConfig = KoordinatorHeadroomConfig()

    def rounds(self, cpus: int) -> bool:
        """Whether a node of so many CPUs is promised in whole cores."""
        return cpus >= _SMALL_NODE_CPUS if self.whole_cores is None else self.whole_cores


class OvercommitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How much more than it has a node may be scheduled for, given what its pods really use."""

    enable: bool = False
    """[overcommit_aware among the sysadvisor plugins] Whether it is done at all."""
    period_s: Seconds = 10.0
    """[SyncPeriod] the ratios are judged anew this often."""
    target_cpu: Ratio = 0.6
    """[TargetCPULoad] share of the node's CPU that pods may use in the end."""
    target_memory: Ratio = 0.8
    """[TargetMemoryLoad] the same of memory."""
    estimated_cpu: Ratio = 0.4
    """[EstimatedPodCPULoad] new pods are taken to use this share of their requests at least."""
    estimated_memory: Ratio = 0.8
    """[EstimatedPodMemoryLoad] the same of memory."""


class PowerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What is done when the node is told to use less power."""

    enable: bool = False
    """[power_aware among the sysadvisor plugins] Whether it is done at all."""
    annotation_prefix: str = ""
    """[AnnotationKeyPrefix] of the node's annotations power-alert and the like, without the slash."""
    period_s: Seconds = 9.0
    """A cap needs 4 to 6 s to settle, and its measurement 2 more: no more than one action in so long."""
    voluntary_cpu_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.45
    """At p0 frequencies are lowered only while the node is busier than this."""
    voluntary_percent: Annotated[int, Meta(ge=0, le=100)] = 10
    """Below s0 frequencies are lowered by no more than this in all, until the alert is over."""


class LatencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Policy `latency`: the measured run-queue wait of online pods decides how much CPU is lent."""

    target_wait_ms: Annotated[float, Meta(ge=0.002, le=1000)] = 10.0
    """Run-queue wait that online pods may see at `quantile`. Lower protects harder and lends less."""
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.99
    """Which wait is held against the target. 0.99: one switch in a hundred may wait longer."""
    min_waits_above: Annotated[int, Meta(ge=1, le=1000)] = 2
    """So many waits above the target make a breach at least, so that one odd switch of a quiet pod does not."""
    calm_s: Seconds = 3.0
    """Waits must have stayed below half the target for so long before more is lent."""
    grow_ratio_per_s: Ratio = 0.1
    """How fast lending grows once calm, as a share of the node per second (Koordinator's suppress uses 0.1)."""
    min_lent_ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """What batch work keeps even in a breach, as a share of the node, so that it makes progress and can be measured."""
    gross_breach_factor: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    """A wait so many times the target takes everything back down to the minimum at once instead of halving."""
    least_blame_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Part of the waits for which batch work must have had the CPU before anything is taken from it; 0 takes from it whoever
    it was. Counts where the kernel tells (probe `blame`)."""
    stale_s: Seconds = 5.0
    """Without wait measurements for so long, no more is lent than the estimated need of online pods leaves."""


class AdvisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What is lent to reclaimed pods, and how that is judged. Names in brackets are Katalyst's."""

    policy: Literal["latency", "canonical", "none"] = "latency"
    """`latency`: priority and measured wait. `canonical`: Katalyst's estimate and disjoint cpusets. `none`: nothing."""
    enable_reclaim: bool = True
    """[enableReclaim] False takes everything back but the minimum."""
    reserved_for_allocate_cores: Cores | None = None
    """[reservedResourceForAllocate] kept for bursts of online pods; 4 unless set, a quarter of nodes below 16 CPUs."""
    min_reclaimed_cores: Annotated[int, Meta(ge=1, le=8192)] | None = None
    """[minReclaimedResourceForAllocate] CPUs that reclaimed pods always keep; 4 unless set, a quarter of nodes below 16 CPUs,
    and one a NUMA node at least."""
    min_share_cores: Annotated[int, Meta(ge=1, le=8192)] = 4
    """[MinShareCPURequirement] the share pool is never smaller, as far as the node allows."""
    usage_margin: Annotated[float, Meta(ge=1, le=10)] = 1.25
    """Estimated need = this x measured use, unless load is higher."""
    fallback_cores: Cores = 4.0
    """Assumed need of an online container that is neither measured nor has a request."""
    ramp_up_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """A container that came after the agent is taken at its request for so long."""
    max_ramp_up_cores: Annotated[int, Meta(ge=1)] = 10
    """[MaxRampUpStep] the share pool grows by at most so much in one round."""
    max_ramp_down_cores: Annotated[int, Meta(ge=1)] = 2
    """[MaxRampDownStep] and shrinks by at most so much,"""
    min_ramp_down_period_s: Annotated[float, Meta(ge=0)] = 30.0
    """[MinRampDownPeriod] at most this often."""
    latency: LatencyConfig = LatencyConfig()
    provision: ProvisionConfig = ProvisionConfig()
    headroom: HeadroomConfig = HeadroomConfig()

    def reserve_cores(self, cpus: int) -> float:
        """CPU kept for bursts of online pods on a node of so many CPUs."""
        if self.reserved_for_allocate_cores is not None:
            return min(self.reserved_for_allocate_cores, cpus)
        return min(4.0, cpus / SMALL_NODE_SHARE)

    def reclaim_reserve_cores(self, cpus: int, numa_nodes: int) -> int:
        """CPUs that reclaimed pods always keep: at least one a NUMA node, at most all."""
        return reclaim_reserve_cpus(self.min_reclaimed_cores, cpus, numa_nodes)
