"""Settings of the eviction plugins that look at CPU. Names in brackets are Katalyst's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.config.units import Ratio, Seconds, ascending

Grace = Annotated[float, Meta(ge=0, le=86_400)]
Samples = Annotated[int, Meta(ge=1, le=1000)]
Factor = Annotated[float, Meta(gt=0, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """cpu-pressure-load-plugin: more tasks of a pool want to run than it has CPUs."""

    upper_bound_ratio: Factor = 1.8
    """[loadUpperBoundRatio] hard above this many times the pool's size;"""
    lower_bound_ratio: Factor = 1.0
    """[loadLowerBoundRatio] soft above this many times."""
    threshold_met_percentage: Ratio = 0.8
    """[loadThresholdMetPercentage] so large a part of the last samples has to be above."""
    ring_size: Samples = 10
    """[loadMetricRingSize] samples that count."""
    sample_s: Seconds = 30.0
    """[loadEvictionSyncPeriod] between two samples."""
    cool_down_s: Seconds = 300.0
    """[loadEvictionCoolDownTime] between two victims."""
    skip_pools: tuple[str, ...] = ("reclaim", "dedicated", "fallback", "reserve")
    """[loadPressureEvictionSkipPools] pools that are not judged; isolation pools never are."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class SuppressionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """cpu-pressure-suppression-plugin: reclaimed pods get so little of what they requested that they are better elsewhere."""

    max_tolerance_rate: Factor = 5.0
    """[maxSuppressionToleranceRate] requests over supply that a pod has to bear at most, whatever it says it bears."""
    min_tolerance_s: Seconds = 300.0
    """[minSuppressionToleranceDuration] for longer than this."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class NumaCpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """numa-cpu-pressure-plugin: the shared pods that are bound to a NUMA node use too much of it."""

    usage_threshold: Ratio | None = None
    """[cpuUsageRatioThreshold] use over size of the NUMA node; unless set, what Katalyst has for such CPUs."""
    expand_factor: Factor = 1.1
    """[thresholdExpandFactor] the threshold times this is what use is held against."""
    threshold_met_percentage: Ratio = 0.7
    """[thresholdMetPercentage] so large a part of the last samples has to be above."""
    ring_size: Samples = 4
    """[metricRingSize] samples that count."""
    sample_s: Seconds = 15.0
    """Between two samples."""
    grace_s: Grace | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class NumaSysConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """numa-sys-cpu-pressure-plugin: a NUMA node is busy, and most of it in the kernel."""

    usage_soft: Ratio = 0.4
    """[numaCPUUsageSoftThreshold] use over size of the NUMA node."""
    usage_hard: Ratio = 0.5
    """[numaCPUUsageHardThreshold] the same."""
    system_soft: Ratio = 0.4
    """[numaSysOverTotalUsageSoftThreshold] part of it that the kernel uses."""
    system_hard: Ratio = 0.5
    """[numaSysOverTotalUsageHardThreshold] the same."""
    victim_system: Share = 0.3
    """[numaSysOverTotalUsageEvictionThreshold] a victim spends so much of its own use in the kernel."""
    threshold_met_percentage: Ratio = 0.7
    """[thresholdMetPercentage] so large a part of the last samples has to be above."""
    ring_size: Samples = 4
    """[metricRingSize] samples that count."""
    sample_s: Seconds = 10.0
    """[syncPeriod] between two samples."""
    grace_s: Grace | None = 60.0
    """[gracePeriod] of its victims."""


class KoordinatorCpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """koordinator-cpu-evict: Koordinator's BECPUEvict, CPUAllocatableEvict and CPUEvict. Names in brackets are its own."""

    satisfaction_lower: Ratio = 0.6
    """[cpuEvictBESatisfactionLowerPercent] what reclaimed pods may use over what they requested; at most 0.6."""
    satisfaction_upper: Ratio = 0.8
    """[cpuEvictBESatisfactionUpperPercent] pods leave until it is this much again."""
    usage_ratio: Ratio = 0.9
    """[cpuEvictBEUsageThresholdPercent] only while they use so much of what they may."""
    node_threshold: Ratio | None = None
    """[cpuEvictThresholdPercent] CPU use of the node; not judged unless set."""
    node_lower: Ratio | None = None
    """[cpuEvictLowerPercent] down to this; 0.02 below the threshold unless set."""
    allocatable_threshold: Factor | None = None
    """[cpuAllocatableEvictThresholdPercent] requests over what is promised; not judged unless set."""
    window_s: Seconds = 60.0
    """[cpuEvictTimeWindowSeconds] over which use is averaged; at least a third of its samples has to be there."""
    cool_down_s: Seconds = 20.0
    """[cpuEvictCoolTimeSeconds] between two rounds of victims."""
    grace_s: Grace | None = None
    """Of its victims; the pod's own unless set."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        ascending("satisfactionLower", self.satisfaction_lower, "satisfactionUpper", self.satisfaction_upper)
        ascending("nodeLower", self.node_lower, "nodeThreshold", self.node_threshold)
