"""Maps the fields of AdminQoSConfiguration, its evictionConfig included, to settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.dynamic_config.mappings.field_mapping import (
    FieldMapping,
    SettingValues,
    UnusedField,
    map_field,
    map_fields,
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
    unused_fields,
)
from api.text import quote

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
            raise ValueError(f"regionType {quote(kind, 60)} is neither share nor dedicated; only those have targets")
        for target in region["targets"]:
            yield ("advisor", "provision", "targets", section, target["name"]), target["target"]


def _map_cpu_burst(field: str, setting: str) -> FieldMapping:
    def put(value: Any) -> SettingValues:
        yield ("knobs", "burst", setting), value
        # A default implies Katalyst's rules; without them it would have no effect.
        yield ("knobs", "burst", "policy"), "katalyst"

    return FieldMapping(f"{_BURST}.{field}", (f"knobs.burst.{setting}", "knobs.burst.policy"), put)


ADMIN_QOS_MAPPINGS: tuple[FieldMapping, ...] = (
    *map_fields(
        _RECLAIM,
        ("enableReclaim", "advisor.enableReclaim"),
        ("disableReclaimSharePools", "advisor.provision.disableReclaimSharePools"),
        ("reservedResourceForReport.cpu", "report.reservedCores", to_cores),
        ("reservedResourceForReport.memory", "report.reservedMemoryMib", to_mebibytes),
        ("minReclaimedResourceForReport.cpu", "report.minCores", to_cores),
        ("minReclaimedResourceForReport.memory", "report.minMemoryMib", to_mebibytes),
        ("minIgnoredReclaimedResourceForReport.cpu", "report.ignoredCores", to_cores),
        ("minIgnoredReclaimedResourceForReport.memory", "report.ignoredMemoryMib", to_mebibytes),
        ("reservedResourceForAllocate.cpu", "advisor.reservedForAllocateCores", to_cores),
        ("reservedResourceForAllocate.memory", "memory.reservedForAllocateBytes", to_byte_count),
        (
            "minReclaimedResourceForAllocate.cpu",
            "advisor.minReclaimedCores placing.minReclaimedCpus",
            lambda value: max(to_whole_cores(value), 1),
        ),
        ("numaMinReclaimedResourceRatioForAllocate.cpu", "advisor.provision.numaMinReclaimedRatio", to_ratio),
        ("numaMinReclaimedResourceForAllocate.cpu", "advisor.provision.numaMinReclaimedCores", to_whole_cores),
    ),
    *map_fields(
        _CPU_HEADROOM,
        ("utilBasedConfig.enable", "advisor.headroom.util.enable"),
        ("utilBasedConfig.targetReclaimedCoreUtilization", "advisor.headroom.util.target"),
        ("utilBasedConfig.maxReclaimedCoreUtilization", "advisor.headroom.util.maximum"),
        ("utilBasedConfig.maxOversoldRate", "advisor.headroom.util.maxOversoldRate"),
        ("utilBasedConfig.maxHeadroomCapacityRate", "advisor.headroom.util.maxCapacityRate"),
    ),
    *map_fields(
        _MEMORY_HEADROOM,
        ("utilBasedConfig.enable", "memory.utilBased.enable"),
        ("utilBasedConfig.freeBasedRatio", "memory.utilBased.freeBasedRatio"),
        ("utilBasedConfig.staticBasedCapacity", "memory.utilBased.staticBasedCapacityBytes", to_byte_count),
        ("utilBasedConfig.cacheBasedRatio", "memory.utilBased.cacheBasedRatio"),
        ("utilBasedConfig.requestBasedRatio", "memory.utilBased.requestBasedRatio"),
        ("utilBasedConfig.maxOversoldRate", "memory.utilBased.maxOversoldRate"),
    ),
    *map_fields(
        _CPU_ADVISOR,
        ("allowSharedCoresOverlapReclaimedCores", "advisor.provision.overlap"),
        FieldMapping(
            "cpuProvisionConfig.regionIndicators",
            ("advisor.provision.targets.share", "advisor.provision.targets.dedicated"),
            _map_indicator_targets,
        ),
    ),
    *map_fields(
        _MEMORY_GUARD,
        ("enable", "memory.guard.enable"),
        ("criticalWatermarkScaleFactor", "memory.guard.criticalWatermarkScaleFactor"),
    ),
    _map_cpu_burst("enableDedicatedCoresDefaultCPUBurst", "dedicated"),
    _map_cpu_burst("enableSharedCoresDefaultCPUBurst", "shared"),
    map_field(f"{_BURST}.defaultCPUBurstPercent", "knobs.burst.percent"),
)

ADMIN_QOS_UNUSED: tuple[UnusedField, ...] = (
    *unused_fields(
        _RECLAIM,
        ("minReclaimedResourceForAllocate.memory", "no memory is reserved for reclaimed pods"),
        ("numaMinReclaimedResourceRatioForAllocate.memory", "no memory of a NUMA node is reserved for reclaimed pods"),
        ("numaMinReclaimedResourceForAllocate.memory", "no memory of a NUMA node is reserved for reclaimed pods"),
    ),
    *unused_fields(
        _CPU_HEADROOM,
        ("utilBasedConfig.nonReclaimUtilizationHigh", _API_ONLY),
        ("utilBasedConfig.nonReclaimUtilizationLow", _API_ONLY),
    ),
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
)

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


EVICTION_MAPPINGS: tuple[FieldMapping, ...] = (
    *map_fields(
        _CPU_PRESSURE,
        map_plugin_switch("enableLoadEviction", "cpu-pressure-load-plugin"),
        ("loadUpperBoundRatio", "eviction.load.upperBoundRatio"),
        ("loadLowerBoundRatio", "eviction.load.lowerBoundRatio"),
        ("loadThresholdMetPercentage", "eviction.load.thresholdMetPercentage"),
        ("loadMetricRingSize", "eviction.load.ringSize"),
        ("loadEvictionCoolDownTime", "eviction.load.coolDownS", to_seconds),
        map_plugin_switch("enableSuppressionEviction", "cpu-pressure-suppression-plugin"),
        ("maxSuppressionToleranceRate", "eviction.suppression.maxToleranceRate"),
        ("minSuppressionToleranceDuration", "eviction.suppression.minToleranceS", to_seconds),
        ("gracePeriod", "eviction.load.graceS eviction.suppression.graceS", to_grace_s),
    ),
    *map_fields(
        _NUMA_CPU_PRESSURE,
        map_plugin_switch("enableEviction", "numa-cpu-pressure-plugin"),
        ("thresholdMetPercentage", "eviction.numaCpu.thresholdMetPercentage"),
        ("metricRingSize", "eviction.numaCpu.ringSize"),
        ("gracePeriod", "eviction.numaCpu.graceS", to_grace_s),
        ("thresholdExpandFactor", "eviction.numaCpu.expandFactor"),
        ("cpuUsageRatioThreshold", "eviction.numaCpu.usageThreshold"),
    ),
    *map_fields(
        _NUMA_SYS_PRESSURE,
        map_plugin_switch("enableEviction", "numa-sys-cpu-pressure-plugin"),
        ("metricRingSize", "eviction.numaSys.ringSize"),
        ("gracePeriod", "eviction.numaSys.graceS", to_grace_s),
        ("syncPeriod", "eviction.numaSys.sampleS"),
        ("thresholdMetPercentage", "eviction.numaSys.thresholdMetPercentage"),
        ("numaCPUUsageSoftThreshold", "eviction.numaSys.usageSoft"),
        ("numaCPUUsageHardThreshold", "eviction.numaSys.usageHard"),
        ("numaSysOverTotalUsageSoftThreshold", "eviction.numaSys.systemSoft"),
        ("numaSysOverTotalUsageHardThreshold", "eviction.numaSys.systemHard"),
        ("numaSysOverTotalUsageEvictionThreshold", "eviction.numaSys.victimSystem"),
    ),
    *map_fields(
        _MEMORY_PRESSURE,
        map_plugin_switch("enableNumaLevelEviction", "numa-memory-pressure-eviction-plugin"),
        map_plugin_switch("enableSystemLevelEviction", "system-memory-pressure-eviction-plugin"),
        ("numaVictimMinimumUtilizationThreshold", "eviction.numaMemory.victimRatio"),
        ("numaFreeBelowWatermarkTimesThreshold", "eviction.numaMemory.anyRounds"),
        ("numaFreeBelowWatermarkTimesReclaimedThreshold", "eviction.numaMemory.reclaimedRounds"),
        ("numaFreeConstraintFastEvictionWaitCycle", "eviction.numaMemory.fastWaitRounds"),
        ("systemFreeMemoryThresholdMinimum", "eviction.systemMemory.freeMinimumBytes", to_byte_count),
        ("systemKswapdRateThreshold", "eviction.systemMemory.kswapdPagesPerS"),
        ("systemKswapdRateExceedDurationThreshold", "eviction.systemMemory.kswapdS"),
        map_plugin_switch("enableRSSOveruseEviction", "rss-overuse-eviction-plugin"),
        ("rssOveruseRateThreshold", "eviction.rss.ratio"),
        ("gracePeriod", "eviction.numaMemory.graceS eviction.systemMemory.graceS eviction.rss.graceS", to_grace_s),
        ("reclaimedGracePeriod", "eviction.numaMemory.reclaimedGraceS", to_grace_s),
    ),
    FieldMapping("evictionConfig.dryRun", ("eviction.dryRun",), _map_dry_run),
    *map_fields(
        _ROOTFS_PRESSURE,
        map_plugin_switch("enableRootfsPressureEviction", "rootfs-pressure-eviction-plugin"),
        map_plugin_switch("enableRootfsOveruseEviction", "rootfs-overuse-eviction-plugin"),
        ("minimumImageFsFreeThreshold", "eviction.rootfsPressure.minimumFree", to_threshold),
        ("minimumImageFsInodesFreeThreshold", "eviction.rootfsPressure.minimumFreeInodes", to_threshold),
        ("podMinimumUsedThreshold", "eviction.rootfsPressure.podMinimum", to_threshold),
        ("podMinimumInodesUsedThreshold", "eviction.rootfsPressure.podMinimumInodes", to_threshold),
        ("reclaimedQoSPodUsedPriorityThreshold", "eviction.rootfsPressure.reclaimedPriority", to_threshold),
        ("reclaimedQoSPodInodesUsedPriorityThreshold", "eviction.rootfsPressure.reclaimedPriorityInodes", to_threshold),
        ("minimumImageFsDiskCapacityThreshold", "eviction.rootfsPressure.minimumCapacityBytes", to_byte_count),
        ("sharedQoSRootfsOveruseThreshold", "eviction.rootfsOveruse.shared", to_threshold),
        ("reclaimedQoSRootfsOveruseThreshold", "eviction.rootfsOveruse.reclaimed", to_threshold),
        ("rootfsOveruseEvictionSupportedQoSLevels", "eviction.rootfsOveruse.levels"),
        ("gracePeriod", "eviction.rootfsPressure.graceS eviction.rootfsOveruse.graceS", to_grace_s),
    ),
    *map_fields(
        _RECLAIMED_PRESSURE,
        map_resources("evictionThreshold", "eviction.reclaimed.cpuThreshold", "eviction.reclaimed.memoryThreshold"),
        map_resources(
            "softEvictionThreshold", "eviction.reclaimed.cpuSoftThreshold", "eviction.reclaimed.memorySoftThreshold"
        ),
        ("gracePeriod", "eviction.reclaimed.graceS", to_grace_s),
        ("thresholdMetToleranceDuration", "eviction.reclaimed.toleranceS"),
    ),
    *map_fields(
        _NETWORK_EVICTION,
        map_plugin_switch("enableNICNetworkEviction", "network-eviction-plugin"),
        ("nicUnhealthyToleranceDuration", "eviction.network.toleranceS", to_seconds),
        ("gracePeriod", "eviction.network.graceS", to_grace_s),
    ),
)

_FIXED_EVICTION_ORDER = "the order of victims is fixed: see docs/eviction.md"
EVICTION_UNUSED: tuple[UnusedField, ...] = (
    *unused_fields(
        _NUMA_CPU_PRESSURE,
        ("candidateCount", "every candidate is considered"),
        ("skippedPodKinds", "a pod's owner is unknown here; use eviction.skippedLabels"),
        ("upperBoundRatio", _API_ONLY),
        ("lowerBoundRatio", _API_ONLY),
        ("reclaimedEvictBoundRatio", _API_ONLY),
    ),
    UnusedField("evictionConfig.cpuSystemPressureEvictionConfig", _API_ONLY),
    UnusedField("evictionConfig.systemLoadPressureEvictionConfig", _API_ONLY),
    *unused_fields(
        _MEMORY_PRESSURE,
        ("numaEvictionRankingMetrics", _FIXED_EVICTION_ORDER),
        ("systemEvictionRankingMetrics", _FIXED_EVICTION_ORDER),
        ("evictNonReclaimedAnnotationSelector", "pods of other levels are evicted only after reclaimed ones"),
        ("evictNonReclaimedLabelSelector", "pods of other levels are evicted only after reclaimed ones"),
    ),
)
