"""Maps the fields of AdminQoSConfiguration, its evictionConfig included, to settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.dynamic_config.mappings.field_mapping import (
    FieldMapping,
    SettingValues,
    UnusedField,
    map_field,
    map_plugin_switch,
    map_resources,
    to_byte_count,
    to_cores,
    to_grace_s,
    to_mebibytes,
    to_ratio,
    to_seconds,
    to_threshold,
    to_whole_cores,
)

_RECLAIM = "reclaimedResourceConfig"
_CPU_HEADROOM, _MEMORY_HEADROOM = f"{_RECLAIM}.cpuHeadroomConfig", f"{_RECLAIM}.memoryHeadroomConfig"
_CPU_ADVISOR = "advisorConfig.cpuAdvisorConfig"
_MEMORY_GUARD = "advisorConfig.memoryAdvisorConfig.memoryGuardConfig"
_BURST = "fineGrainedResourceConfig.cpuBurstConfig"
_API_ONLY = "Katalyst's own agent ignores it too"


def _map_indicator_targets(regions: Sequence[Mapping[str, Any]]) -> SettingValues:
    for region in regions:
        kind = region["regionType"]
        section = next((name for name in ("share", "dedicated") if kind == name or kind.startswith(f"{name}-")), None)
        if section is None:
            raise ValueError(f"regionType {kind!r:.60} is neither share nor dedicated; only those have targets")
        for target in region["targets"]:
            yield ("advisor", "provision", "targets", section, target["name"]), target["target"]


def _map_cpu_burst(field: str, setting: str) -> FieldMapping:
    def put(value: Any) -> SettingValues:
        yield ("knobs", "burst", setting), value
        # A default implies Katalyst's rules; without them it would have no effect.
        yield ("knobs", "burst", "policy"), "katalyst"

    return FieldMapping(f"{_BURST}.{field}", (f"knobs.burst.{setting}", "knobs.burst.policy"), put)


ADMIN_QOS_MAPPINGS: tuple[FieldMapping, ...] = (
    map_field(f"{_RECLAIM}.enableReclaim", "advisor.enableReclaim"),
    map_field(f"{_RECLAIM}.disableReclaimSharePools", "advisor.provision.disableReclaimSharePools"),
    map_field(f"{_RECLAIM}.reservedResourceForReport.cpu", "report.reservedCores", unit=to_cores),
    map_field(f"{_RECLAIM}.reservedResourceForReport.memory", "report.reservedMemoryMib", unit=to_mebibytes),
    map_field(f"{_RECLAIM}.minReclaimedResourceForReport.cpu", "report.minCores", unit=to_cores),
    map_field(f"{_RECLAIM}.minReclaimedResourceForReport.memory", "report.minMemoryMib", unit=to_mebibytes),
    map_field(f"{_RECLAIM}.minIgnoredReclaimedResourceForReport.cpu", "report.ignoredCores", unit=to_cores),
    map_field(f"{_RECLAIM}.minIgnoredReclaimedResourceForReport.memory", "report.ignoredMemoryMib", unit=to_mebibytes),
    map_field(f"{_RECLAIM}.reservedResourceForAllocate.cpu", "advisor.reservedForAllocateCores", unit=to_cores),
    map_field(f"{_RECLAIM}.reservedResourceForAllocate.memory", "memory.reservedForAllocateBytes", unit=to_byte_count),
    map_field(
        f"{_RECLAIM}.minReclaimedResourceForAllocate.cpu",
        "advisor.minReclaimedCores",
        "placing.minReclaimedCpus",
        unit=lambda value: max(to_whole_cores(value), 1),
    ),
    map_field(
        f"{_RECLAIM}.numaMinReclaimedResourceRatioForAllocate.cpu",
        "advisor.provision.numaMinReclaimedRatio",
        unit=to_ratio,
    ),
    map_field(
        f"{_RECLAIM}.numaMinReclaimedResourceForAllocate.cpu",
        "advisor.provision.numaMinReclaimedCores",
        unit=to_whole_cores,
    ),
    map_field(f"{_CPU_HEADROOM}.utilBasedConfig.enable", "advisor.headroom.util.enable"),
    map_field(f"{_CPU_HEADROOM}.utilBasedConfig.targetReclaimedCoreUtilization", "advisor.headroom.util.target"),
    map_field(f"{_CPU_HEADROOM}.utilBasedConfig.maxReclaimedCoreUtilization", "advisor.headroom.util.maximum"),
    map_field(f"{_CPU_HEADROOM}.utilBasedConfig.maxOversoldRate", "advisor.headroom.util.maxOversoldRate"),
    map_field(f"{_CPU_HEADROOM}.utilBasedConfig.maxHeadroomCapacityRate", "advisor.headroom.util.maxCapacityRate"),
    map_field(f"{_MEMORY_HEADROOM}.utilBasedConfig.enable", "memory.utilBased.enable"),
    map_field(f"{_MEMORY_HEADROOM}.utilBasedConfig.freeBasedRatio", "memory.utilBased.freeBasedRatio"),
    map_field(
        f"{_MEMORY_HEADROOM}.utilBasedConfig.staticBasedCapacity",
        "memory.utilBased.staticBasedCapacityBytes",
        unit=to_byte_count,
    ),
    map_field(f"{_MEMORY_HEADROOM}.utilBasedConfig.cacheBasedRatio", "memory.utilBased.cacheBasedRatio"),
    map_field(f"{_MEMORY_HEADROOM}.utilBasedConfig.requestBasedRatio", "memory.utilBased.requestBasedRatio"),
    map_field(f"{_MEMORY_HEADROOM}.utilBasedConfig.maxOversoldRate", "memory.utilBased.maxOversoldRate"),
    map_field(f"{_CPU_ADVISOR}.allowSharedCoresOverlapReclaimedCores", "advisor.provision.overlap"),
    FieldMapping(
        f"{_CPU_ADVISOR}.cpuProvisionConfig.regionIndicators",
        ("advisor.provision.targets.share", "advisor.provision.targets.dedicated"),
        _map_indicator_targets,
    ),
    map_field(f"{_MEMORY_GUARD}.enable", "memory.guard.enable"),
    map_field(f"{_MEMORY_GUARD}.criticalWatermarkScaleFactor", "memory.guard.criticalWatermarkScaleFactor"),
    _map_cpu_burst("enableDedicatedCoresDefaultCPUBurst", "dedicated"),
    _map_cpu_burst("enableSharedCoresDefaultCPUBurst", "shared"),
    map_field(f"{_BURST}.defaultCPUBurstPercent", "knobs.burst.percent"),
)

ADMIN_QOS_UNUSED: tuple[UnusedField, ...] = (
    UnusedField(f"{_RECLAIM}.minReclaimedResourceForAllocate.memory", "no memory is reserved for reclaimed pods"),
    UnusedField(
        f"{_RECLAIM}.numaMinReclaimedResourceRatioForAllocate.memory",
        "no memory of a NUMA node is reserved for reclaimed pods",
    ),
    UnusedField(
        f"{_RECLAIM}.numaMinReclaimedResourceForAllocate.memory",
        "no memory of a NUMA node is reserved for reclaimed pods",
    ),
    UnusedField(f"{_CPU_HEADROOM}.utilBasedConfig.nonReclaimUtilizationHigh", _API_ONLY),
    UnusedField(f"{_CPU_HEADROOM}.utilBasedConfig.nonReclaimUtilizationLow", _API_ONLY),
    UnusedField(f"{_MEMORY_HEADROOM}.podRequestLimitAwareConfig", _API_ONLY),
    UnusedField(
        "qrmPluginConfig.cpuPluginConfig.preferUseExistNUMAHintResult",
        "a pod always keeps the NUMA node in its annotation",
    ),
    UnusedField(
        "qrmPluginConfig.cpuPluginConfig",
        f"{_API_ONLY}; pools of system_cores are as large as their pods' requests",
    ),
    UnusedField(
        f"{_CPU_ADVISOR}.cpuProvisionConfig.constraints",
        "rama and dynamic-quota stay within the bounds of their regions",
    ),
    UnusedField("fineGrainedResourceConfig.cpuWeightConfig", f"{_API_ONLY}; weights follow requests"),
)  # fmt: skip

_CPU_PRESSURE = "evictionConfig.cpuPressureEvictionConfig"
_NUMA_CPU_PRESSURE, _NUMA_SYS_PRESSURE = (
    f"{_CPU_PRESSURE}.numaCPUPressureEvictionConfig",
    f"{_CPU_PRESSURE}.numaSysCPUPressureEvictionConfig",
)
_MEMORY_PRESSURE = "evictionConfig.memoryPressureEvictionConfig"
_ROOTFS_PRESSURE = "evictionConfig.rootfsPressureEvictionConfig"
_RECLAIMED_PRESSURE = "evictionConfig.reclaimedResourcesEvictionConfig"
_NETWORK_EVICTION = "evictionConfig.networkEvictionConfig"


def _map_dry_run(names: Sequence[str]) -> SettingValues:
    # merge_document drops plugins that do not run here: it knows the external ones.
    yield ("eviction", "dryRun"), list(names)


CPU_EVICTION_MAPPINGS: tuple[FieldMapping, ...] = (
    map_plugin_switch(f"{_CPU_PRESSURE}.enableLoadEviction", "cpu-pressure-load-plugin"),
    map_field(f"{_CPU_PRESSURE}.loadUpperBoundRatio", "eviction.load.upperBoundRatio"),
    map_field(f"{_CPU_PRESSURE}.loadLowerBoundRatio", "eviction.load.lowerBoundRatio"),
    map_field(f"{_CPU_PRESSURE}.loadThresholdMetPercentage", "eviction.load.thresholdMetPercentage"),
    map_field(f"{_CPU_PRESSURE}.loadMetricRingSize", "eviction.load.ringSize"),
    map_field(f"{_CPU_PRESSURE}.loadEvictionCoolDownTime", "eviction.load.coolDownS", unit=to_seconds),
    map_plugin_switch(f"{_CPU_PRESSURE}.enableSuppressionEviction", "cpu-pressure-suppression-plugin"),
    map_field(f"{_CPU_PRESSURE}.maxSuppressionToleranceRate", "eviction.suppression.maxToleranceRate"),
    map_field(f"{_CPU_PRESSURE}.minSuppressionToleranceDuration", "eviction.suppression.minToleranceS", unit=to_seconds),
    map_field(f"{_CPU_PRESSURE}.gracePeriod", "eviction.load.graceS", "eviction.suppression.graceS", unit=to_grace_s),
    map_plugin_switch(f"{_NUMA_CPU_PRESSURE}.enableEviction", "numa-cpu-pressure-plugin"),
    map_field(f"{_NUMA_CPU_PRESSURE}.thresholdMetPercentage", "eviction.numaCpu.thresholdMetPercentage"),
    map_field(f"{_NUMA_CPU_PRESSURE}.metricRingSize", "eviction.numaCpu.ringSize"),
    map_field(f"{_NUMA_CPU_PRESSURE}.gracePeriod", "eviction.numaCpu.graceS", unit=to_grace_s),
    map_field(f"{_NUMA_CPU_PRESSURE}.thresholdExpandFactor", "eviction.numaCpu.expandFactor"),
    map_field(f"{_NUMA_CPU_PRESSURE}.cpuUsageRatioThreshold", "eviction.numaCpu.usageThreshold"),
    map_plugin_switch(f"{_NUMA_SYS_PRESSURE}.enableEviction", "numa-sys-cpu-pressure-plugin"),
    map_field(f"{_NUMA_SYS_PRESSURE}.metricRingSize", "eviction.numaSys.ringSize"),
    map_field(f"{_NUMA_SYS_PRESSURE}.gracePeriod", "eviction.numaSys.graceS", unit=to_grace_s),
    map_field(f"{_NUMA_SYS_PRESSURE}.syncPeriod", "eviction.numaSys.sampleS"),
    map_field(f"{_NUMA_SYS_PRESSURE}.thresholdMetPercentage", "eviction.numaSys.thresholdMetPercentage"),
    map_field(f"{_NUMA_SYS_PRESSURE}.numaCPUUsageSoftThreshold", "eviction.numaSys.usageSoft"),
    map_field(f"{_NUMA_SYS_PRESSURE}.numaCPUUsageHardThreshold", "eviction.numaSys.usageHard"),
    map_field(f"{_NUMA_SYS_PRESSURE}.numaSysOverTotalUsageSoftThreshold", "eviction.numaSys.systemSoft"),
    map_field(f"{_NUMA_SYS_PRESSURE}.numaSysOverTotalUsageHardThreshold", "eviction.numaSys.systemHard"),
    map_field(f"{_NUMA_SYS_PRESSURE}.numaSysOverTotalUsageEvictionThreshold", "eviction.numaSys.victimSystem"),
)  # fmt: skip

MEMORY_EVICTION_MAPPINGS: tuple[FieldMapping, ...] = (
    map_plugin_switch(f"{_MEMORY_PRESSURE}.enableNumaLevelEviction", "numa-memory-pressure-eviction-plugin"),
    map_plugin_switch(f"{_MEMORY_PRESSURE}.enableSystemLevelEviction", "system-memory-pressure-eviction-plugin"),
    map_field(f"{_MEMORY_PRESSURE}.numaVictimMinimumUtilizationThreshold", "eviction.numaMemory.victimRatio"),
    map_field(f"{_MEMORY_PRESSURE}.numaFreeBelowWatermarkTimesThreshold", "eviction.numaMemory.anyRounds"),
    map_field(f"{_MEMORY_PRESSURE}.numaFreeBelowWatermarkTimesReclaimedThreshold", "eviction.numaMemory.reclaimedRounds"),
    map_field(f"{_MEMORY_PRESSURE}.numaFreeConstraintFastEvictionWaitCycle", "eviction.numaMemory.fastWaitRounds"),
    map_field(
        f"{_MEMORY_PRESSURE}.systemFreeMemoryThresholdMinimum",
        "eviction.systemMemory.freeMinimumBytes",
        unit=to_byte_count,
    ),
    map_field(f"{_MEMORY_PRESSURE}.systemKswapdRateThreshold", "eviction.systemMemory.kswapdPagesPerS"),
    map_field(f"{_MEMORY_PRESSURE}.systemKswapdRateExceedDurationThreshold", "eviction.systemMemory.kswapdS"),
    map_plugin_switch(f"{_MEMORY_PRESSURE}.enableRSSOveruseEviction", "rss-overuse-eviction-plugin"),
    map_field(f"{_MEMORY_PRESSURE}.rssOveruseRateThreshold", "eviction.rss.ratio"),
    map_field(
        f"{_MEMORY_PRESSURE}.gracePeriod",
        "eviction.numaMemory.graceS",
        "eviction.systemMemory.graceS",
        "eviction.rss.graceS",
        unit=to_grace_s,
    ),
    map_field(f"{_MEMORY_PRESSURE}.reclaimedGracePeriod", "eviction.numaMemory.reclaimedGraceS", unit=to_grace_s),
)  # fmt: skip

OTHER_EVICTION_MAPPINGS: tuple[FieldMapping, ...] = (
    FieldMapping("evictionConfig.dryRun", ("eviction.dryRun",), _map_dry_run),
    map_plugin_switch(f"{_ROOTFS_PRESSURE}.enableRootfsPressureEviction", "rootfs-pressure-eviction-plugin"),
    map_plugin_switch(f"{_ROOTFS_PRESSURE}.enableRootfsOveruseEviction", "rootfs-overuse-eviction-plugin"),
    map_field(f"{_ROOTFS_PRESSURE}.minimumImageFsFreeThreshold", "eviction.rootfsPressure.minimumFree", unit=to_threshold),
    map_field(
        f"{_ROOTFS_PRESSURE}.minimumImageFsInodesFreeThreshold",
        "eviction.rootfsPressure.minimumFreeInodes",
        unit=to_threshold,
    ),
    map_field(f"{_ROOTFS_PRESSURE}.podMinimumUsedThreshold", "eviction.rootfsPressure.podMinimum", unit=to_threshold),
    map_field(
        f"{_ROOTFS_PRESSURE}.podMinimumInodesUsedThreshold",
        "eviction.rootfsPressure.podMinimumInodes",
        unit=to_threshold,
    ),
    map_field(
        f"{_ROOTFS_PRESSURE}.reclaimedQoSPodUsedPriorityThreshold",
        "eviction.rootfsPressure.reclaimedPriority",
        unit=to_threshold,
    ),
    map_field(
        f"{_ROOTFS_PRESSURE}.reclaimedQoSPodInodesUsedPriorityThreshold",
        "eviction.rootfsPressure.reclaimedPriorityInodes",
        unit=to_threshold,
    ),
    map_field(
        f"{_ROOTFS_PRESSURE}.minimumImageFsDiskCapacityThreshold",
        "eviction.rootfsPressure.minimumCapacityBytes",
        unit=to_byte_count,
    ),
    map_field(f"{_ROOTFS_PRESSURE}.sharedQoSRootfsOveruseThreshold", "eviction.rootfsOveruse.shared", unit=to_threshold),
    map_field(
        f"{_ROOTFS_PRESSURE}.reclaimedQoSRootfsOveruseThreshold", "eviction.rootfsOveruse.reclaimed", unit=to_threshold
    ),
    map_field(f"{_ROOTFS_PRESSURE}.rootfsOveruseEvictionSupportedQoSLevels", "eviction.rootfsOveruse.levels"),
    map_field(
        f"{_ROOTFS_PRESSURE}.gracePeriod",
        "eviction.rootfsPressure.graceS",
        "eviction.rootfsOveruse.graceS",
        unit=to_grace_s,
    ),
    map_resources(
        f"{_RECLAIMED_PRESSURE}.evictionThreshold",
        ("eviction.reclaimed.cpuThreshold",),
        ("eviction.reclaimed.memoryThreshold",),
    ),
    map_resources(
        f"{_RECLAIMED_PRESSURE}.softEvictionThreshold",
        ("eviction.reclaimed.cpuSoftThreshold",),
        ("eviction.reclaimed.memorySoftThreshold",),
    ),
    map_field(f"{_RECLAIMED_PRESSURE}.gracePeriod", "eviction.reclaimed.graceS", unit=to_grace_s),
    map_field(f"{_RECLAIMED_PRESSURE}.thresholdMetToleranceDuration", "eviction.reclaimed.toleranceS"),
    map_plugin_switch(f"{_NETWORK_EVICTION}.enableNICNetworkEviction", "network-eviction-plugin"),
    map_field(f"{_NETWORK_EVICTION}.nicUnhealthyToleranceDuration", "eviction.network.toleranceS", unit=to_seconds),
    map_field(f"{_NETWORK_EVICTION}.gracePeriod", "eviction.network.graceS", unit=to_grace_s),
)  # fmt: skip
EVICTION_MAPPINGS = (*CPU_EVICTION_MAPPINGS, *MEMORY_EVICTION_MAPPINGS, *OTHER_EVICTION_MAPPINGS)

_FIXED_EVICTION_ORDER = "the order of victims is fixed: see docs/eviction.md"
EVICTION_UNUSED: tuple[UnusedField, ...] = (
    UnusedField(f"{_NUMA_CPU_PRESSURE}.candidateCount", "every candidate is considered"),
    UnusedField(f"{_NUMA_CPU_PRESSURE}.skippedPodKinds", "a pod's owner is unknown here; use eviction.skippedLabels"),
    *(
        UnusedField(f"{_NUMA_CPU_PRESSURE}.{name}", _API_ONLY)
        for name in ("upperBoundRatio", "lowerBoundRatio", "reclaimedEvictBoundRatio")
    ),
    UnusedField("evictionConfig.cpuSystemPressureEvictionConfig", _API_ONLY),
    UnusedField("evictionConfig.systemLoadPressureEvictionConfig", _API_ONLY),
    UnusedField(f"{_MEMORY_PRESSURE}.numaEvictionRankingMetrics", _FIXED_EVICTION_ORDER),
    UnusedField(f"{_MEMORY_PRESSURE}.systemEvictionRankingMetrics", _FIXED_EVICTION_ORDER),
    UnusedField(
        f"{_MEMORY_PRESSURE}.evictNonReclaimedAnnotationSelector",
        "pods of other levels are evicted only after reclaimed ones",
    ),
    UnusedField(
        f"{_MEMORY_PRESSURE}.evictNonReclaimedLabelSelector",
        "pods of other levels are evicted only after reclaimed ones",
    ),
)  # fmt: skip
