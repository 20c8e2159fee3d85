"""Settings of CPU provision: how large the pools of online pods are to be, and what is left to reclaimed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from agent.config.units import Cores, Ratio

Policy = Literal["none", "canonical", "rama", "dynamic-quota"]
Getter = Literal["spd-min", "spd-avg", "metric-threshold"]
Positive = Annotated[float, Meta(gt=0)]
Gain = Annotated[float, Meta(ge=0, le=10)]


class Gains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
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


_WAIT = Gains(up=0.05, down=0.009, dead_above=0.05, dead_below=0.2)
GAINS: Mapping[str, Gains] = {
    "cpu_sched_wait": _WAIT,
    "cpu_usage_ratio": Gains(up=0.1, down=0.04, dead_above=0.01, dead_below=0.06),
    "cpi": Gains(up=0.1, down=0.04, dead_above=0.0, dead_below=0.02),
    "mem_access_read_lat": _WAIT,
    "mem_access_write_lat": _WAIT,
    "mem_l3_miss_lat": _WAIT,
    "request_p99_ms": _WAIT,
}


class TargetsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[regionIndicators] Where indicators should be: those that are named are looked at."""

    share: Mapping[str, Positive] = field(default_factory=lambda: {"cpu_sched_wait": 460.0, "cpu_usage_ratio": 0.8})
    """Of share regions. cpu_sched_wait is in microseconds, the mean of all waits for a CPU of the pool. request_p99_ms, which
    pods publish of themselves, is followed of every pod whose service profile has a target for it, and of all if named here."""
    dedicated: Mapping[str, Positive] = field(default_factory=lambda: {"cpi": 1.4, "cpu_usage_ratio": 0.55})
    """Of dedicated regions. cpi is cycles per instruction of the main containers."""
    getter: Getter = "spd-min"
    """[indicatorTargetDefaultGetter] What of a region's pods counts: the lowest of their own targets, their mean, or
    `thresholds`, which go before them."""
    getters: Mapping[str, Getter] = field(default_factory=lambda: {"cpu_usage_ratio": "spd-avg"})
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

    share_policies: tuple[Policy, ...] = ("canonical",)
    """[cpu-provision-policy-priority, share] The first that has what it needs is followed; `canonical` is tried last."""
    dedicated_policies: tuple[Policy, ...] = ("canonical",)
    """[cpu-provision-policy-priority, dedicated] the same for dedicated pods."""
    restrict: Mapping[Policy, Policy] = field(default_factory=lambda: {"rama": "dynamic-quota"})
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
    gains: Mapping[str, Gains] = field(default_factory=lambda: dict(GAINS))
    """[PIDParameters] Of `rama`, by indicator; one without gains is not followed."""
    targets: TargetsConfig = TargetsConfig()
    isolation: IsolationConfig = IsolationConfig()
