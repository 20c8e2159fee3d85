"""AdminQoSConfiguration's evictionConfig: which of its fields is which setting, in which unit."""

from __future__ import annotations

from collections.abc import Sequence

from agent.dynamic.rules import Put, Rule, Unused, resources, switch, to
from agent.dynamic.values import amount, grace, seconds, size

_CPU = "evictionConfig.cpuPressureEvictionConfig"
_NUMA, _SYS = f"{_CPU}.numaCPUPressureEvictionConfig", f"{_CPU}.numaSysCPUPressureEvictionConfig"
_MEMORY = "evictionConfig.memoryPressureEvictionConfig"
_ROOTFS = "evictionConfig.rootfsPressureEvictionConfig"
_RECLAIMED = "evictionConfig.reclaimedResourcesEvictionConfig"
_NETWORK = "evictionConfig.networkEvictionConfig"


def _dry_run(names: Sequence[str]) -> Put:
    # Those that do not judge here are left out where the settings come together: there it is known who is asked at a socket.
    yield ("eviction", "dryRun"), list(names)


CPU_RULES: tuple[Rule, ...] = (
    switch(f"{_CPU}.enableLoadEviction", "cpu-pressure-load-plugin"),
    to(f"{_CPU}.loadUpperBoundRatio", "eviction.load.upperBoundRatio"),
    to(f"{_CPU}.loadLowerBoundRatio", "eviction.load.lowerBoundRatio"),
    to(f"{_CPU}.loadThresholdMetPercentage", "eviction.load.thresholdMetPercentage"),
    to(f"{_CPU}.loadMetricRingSize", "eviction.load.ringSize"),
    to(f"{_CPU}.loadEvictionCoolDownTime", "eviction.load.coolDownS", unit=seconds),
    switch(f"{_CPU}.enableSuppressionEviction", "cpu-pressure-suppression-plugin"),
    to(f"{_CPU}.maxSuppressionToleranceRate", "eviction.suppression.maxToleranceRate"),
    to(f"{_CPU}.minSuppressionToleranceDuration", "eviction.suppression.minToleranceS", unit=seconds),
    to(f"{_CPU}.gracePeriod", "eviction.load.graceS", "eviction.suppression.graceS", unit=grace),
    switch(f"{_NUMA}.enableEviction", "numa-cpu-pressure-plugin"),
    to(f"{_NUMA}.thresholdMetPercentage", "eviction.numaCpu.thresholdMetPercentage"),
    to(f"{_NUMA}.metricRingSize", "eviction.numaCpu.ringSize"),
    to(f"{_NUMA}.gracePeriod", "eviction.numaCpu.graceS", unit=grace),
    to(f"{_NUMA}.thresholdExpandFactor", "eviction.numaCpu.expandFactor"),
    to(f"{_NUMA}.cpuUsageRatioThreshold", "eviction.numaCpu.usageThreshold"),
    switch(f"{_SYS}.enableEviction", "numa-sys-cpu-pressure-plugin"),
    to(f"{_SYS}.metricRingSize", "eviction.numaSys.ringSize"),
    to(f"{_SYS}.gracePeriod", "eviction.numaSys.graceS", unit=grace),
    to(f"{_SYS}.syncPeriod", "eviction.numaSys.sampleS"),
    to(f"{_SYS}.thresholdMetPercentage", "eviction.numaSys.thresholdMetPercentage"),
    to(f"{_SYS}.numaCPUUsageSoftThreshold", "eviction.numaSys.usageSoft"),
    to(f"{_SYS}.numaCPUUsageHardThreshold", "eviction.numaSys.usageHard"),
    to(f"{_SYS}.numaSysOverTotalUsageSoftThreshold", "eviction.numaSys.systemSoft"),
    to(f"{_SYS}.numaSysOverTotalUsageHardThreshold", "eviction.numaSys.systemHard"),
    to(f"{_SYS}.numaSysOverTotalUsageEvictionThreshold", "eviction.numaSys.victimSystem"),
)

MEMORY_RULES: tuple[Rule, ...] = (
    switch(f"{_MEMORY}.enableNumaLevelEviction", "numa-memory-pressure-eviction-plugin"),
    switch(f"{_MEMORY}.enableSystemLevelEviction", "system-memory-pressure-eviction-plugin"),
    to(f"{_MEMORY}.numaVictimMinimumUtilizationThreshold", "eviction.numaMemory.victimRatio"),
    to(f"{_MEMORY}.numaFreeBelowWatermarkTimesThreshold", "eviction.numaMemory.anyRounds"),
    to(f"{_MEMORY}.numaFreeBelowWatermarkTimesReclaimedThreshold", "eviction.numaMemory.reclaimedRounds"),
    to(f"{_MEMORY}.numaFreeConstraintFastEvictionWaitCycle", "eviction.numaMemory.fastWaitRounds"),
    to(f"{_MEMORY}.systemFreeMemoryThresholdMinimum", "eviction.systemMemory.freeMinimumBytes", unit=size),
    to(f"{_MEMORY}.systemKswapdRateThreshold", "eviction.systemMemory.kswapdPagesPerS"),
    to(f"{_MEMORY}.systemKswapdRateExceedDurationThreshold", "eviction.systemMemory.kswapdS"),
    switch(f"{_MEMORY}.enableRSSOveruseEviction", "rss-overuse-eviction-plugin"),
    to(f"{_MEMORY}.rssOveruseRateThreshold", "eviction.rss.ratio"),
    to(
        f"{_MEMORY}.gracePeriod",
        "eviction.numaMemory.graceS",
        "eviction.systemMemory.graceS",
        "eviction.rss.graceS",
        unit=grace,
    ),
    to(f"{_MEMORY}.reclaimedGracePeriod", "eviction.numaMemory.reclaimedGraceS", unit=grace),
)

OTHER_RULES: tuple[Rule, ...] = (
    Rule("evictionConfig.dryRun", ("eviction.dryRun",), _dry_run),
    switch(f"{_ROOTFS}.enableRootfsPressureEviction", "rootfs-pressure-eviction-plugin"),
    switch(f"{_ROOTFS}.enableRootfsOveruseEviction", "rootfs-overuse-eviction-plugin"),
    to(f"{_ROOTFS}.minimumImageFsFreeThreshold", "eviction.rootfsPressure.minimumFree", unit=amount),
    to(f"{_ROOTFS}.minimumImageFsInodesFreeThreshold", "eviction.rootfsPressure.minimumFreeInodes", unit=amount),
    to(f"{_ROOTFS}.podMinimumUsedThreshold", "eviction.rootfsPressure.podMinimum", unit=amount),
    to(f"{_ROOTFS}.podMinimumInodesUsedThreshold", "eviction.rootfsPressure.podMinimumInodes", unit=amount),
    to(f"{_ROOTFS}.reclaimedQoSPodUsedPriorityThreshold", "eviction.rootfsPressure.reclaimedPriority", unit=amount),
    to(
        f"{_ROOTFS}.reclaimedQoSPodInodesUsedPriorityThreshold",
        "eviction.rootfsPressure.reclaimedPriorityInodes",
        unit=amount,
    ),
    to(f"{_ROOTFS}.minimumImageFsDiskCapacityThreshold", "eviction.rootfsPressure.minimumCapacityBytes", unit=size),
    to(f"{_ROOTFS}.sharedQoSRootfsOveruseThreshold", "eviction.rootfsOveruse.shared", unit=amount),
    to(f"{_ROOTFS}.reclaimedQoSRootfsOveruseThreshold", "eviction.rootfsOveruse.reclaimed", unit=amount),
    to(f"{_ROOTFS}.rootfsOveruseEvictionSupportedQoSLevels", "eviction.rootfsOveruse.levels"),
    to(f"{_ROOTFS}.gracePeriod", "eviction.rootfsPressure.graceS", "eviction.rootfsOveruse.graceS", unit=grace),
    resources(
        f"{_RECLAIMED}.evictionThreshold",
        ("eviction.reclaimed.cpuThreshold",),
        ("eviction.reclaimed.memoryThreshold",),
    ),
    resources(
        f"{_RECLAIMED}.softEvictionThreshold",
        ("eviction.reclaimed.cpuSoftThreshold",),
        ("eviction.reclaimed.memorySoftThreshold",),
    ),
    to(f"{_RECLAIMED}.gracePeriod", "eviction.reclaimed.graceS", unit=grace),
    to(f"{_RECLAIMED}.thresholdMetToleranceDuration", "eviction.reclaimed.toleranceS"),
    switch(f"{_NETWORK}.enableNICNetworkEviction", "network-eviction-plugin"),
    to(f"{_NETWORK}.nicUnhealthyToleranceDuration", "eviction.network.toleranceS", unit=seconds),
    to(f"{_NETWORK}.gracePeriod", "eviction.network.graceS", unit=grace),
)
RULES = (*CPU_RULES, *MEMORY_RULES, *OTHER_RULES)

_ORDER = "the order in which pods leave is fixed: see docs/eviction.md"
UNUSED: tuple[Unused, ...] = (
    Unused(f"{_NUMA}.candidateCount", "every pod that may leave is looked at"),
    Unused(f"{_NUMA}.skippedPodKinds", "who owns a pod is not known here; spare pods by eviction.skippedLabels"),
    *(
        Unused(f"{_NUMA}.{name}", "Katalyst's own agent does not use it either")
        for name in ("upperBoundRatio", "lowerBoundRatio", "reclaimedEvictBoundRatio")
    ),
    Unused("evictionConfig.cpuSystemPressureEvictionConfig", "Katalyst's own agent does not use it either"),
    Unused("evictionConfig.systemLoadPressureEvictionConfig", "Katalyst's own agent does not use it either"),
    Unused(f"{_MEMORY}.numaEvictionRankingMetrics", _ORDER),
    Unused(f"{_MEMORY}.systemEvictionRankingMetrics", _ORDER),
    Unused(f"{_MEMORY}.evictNonReclaimedAnnotationSelector", "pods of other levels leave only after reclaimed ones"),
    Unused(f"{_MEMORY}.evictNonReclaimedLabelSelector", "pods of other levels leave only after reclaimed ones"),
)
