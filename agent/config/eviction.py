"""Defines the settings of the eviction manager and of each eviction plugin. Names in brackets are Katalyst's,
Koordinator's or oomd's, as the section says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from agent.config.units import Ratio, Seconds, check_ascending
from api.qos import QoSLevel

GraceSeconds = Annotated[float, Meta(ge=0, le=86_400)]
Samples = Annotated[int, Meta(ge=1, le=1000)]
Factor = Annotated[float, Meta(gt=0, le=1000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class CpuLoadEvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
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
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class CpuSuppressionEvictionConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """cpu-pressure-suppression-plugin: reclaimed pods get so little of what they requested that they are better elsewhere."""

    max_tolerance_rate: Factor = 5.0
    """[maxSuppressionToleranceRate] requests over supply that a pod has to bear at most, whatever it says it bears."""
    min_tolerance_s: Seconds = 300.0
    """[minSuppressionToleranceDuration] for longer than this."""
    grace_s: GraceSeconds | None = None
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
    grace_s: GraceSeconds | None = None
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
    victim_system: Fraction = 0.3
    """[numaSysOverTotalUsageEvictionThreshold] a victim spends so much of its own use in the kernel."""
    threshold_met_percentage: Ratio = 0.7
    """[thresholdMetPercentage] so large a part of the last samples has to be above."""
    ring_size: Samples = 4
    """[metricRingSize] samples that count."""
    sample_s: Seconds = 10.0
    """[syncPeriod] between two samples."""
    grace_s: GraceSeconds | None = 60.0
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
    grace_s: GraceSeconds | None = None
    """Of its victims; the pod's own unless set."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        check_ascending("satisfactionLower", self.satisfaction_lower, "satisfactionUpper", self.satisfaction_upper)
        check_ascending("nodeLower", self.node_lower, "nodeThreshold", self.node_threshold)


Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Rate = Annotated[float, Meta(ge=0)]
Cycles = Annotated[int, Meta(ge=0, le=10_000)]
GIB = 1 << 30


class ReclaimedPressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """reclaimed-resource-pressure-eviction-plugin, and the same for each NUMA node: reclaimed pods requested too much."""

    cpu_threshold: Factor = 5.0
    """[evictionThreshold reclaimed_millicpu] their requests over what is promised."""
    memory_threshold: Factor = 5.0
    """[evictionThreshold reclaimed_memory] the same of memory."""
    cpu_soft_threshold: Factor = 1.5
    """[softEvictionThreshold] from here on pods that ask for it (pod_soft_evict_notify) are told, one at a time."""
    memory_soft_threshold: Factor = 1.2
    """[softEvictionThreshold] the same of memory."""
    tolerance_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """[thresholdMetToleranceDuration] of the hard threshold."""
    soft_tolerance_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    """Of the soft one: what is promised goes up and down with the load."""
    grace_s: GraceSeconds | None = 60.0
    """[gracePeriod] of its victims."""


class NumaMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """numa-memory-pressure-eviction-plugin: a NUMA node runs out of free memory."""

    reclaimed_rounds: Cycles = 6
    """[numaFreeBelowWatermarkTimesReclaimedThreshold] more rounds than this below the low mark: a reclaimed pod leaves."""
    any_rounds: Cycles = 12
    """[numaFreeBelowWatermarkTimesThreshold] so many rounds: any pod may have to."""
    fast_wait_rounds: Cycles = 1
    """[numaFreeConstraintFastEvictionWaitCycle] so many rounds below the minimum, after the first, do the same."""
    victim_ratio: Fraction = 0.001
    """[numaVictimMinimumUtilizationThreshold] a victim uses so much of the NUMA node at least."""
    reclaimed_grace_s: GraceSeconds | None = 1.0
    """[reclaimedGracePeriod] of reclaimed pods."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of others; the pod's own unless set."""


class SystemMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """system-memory-pressure-eviction-plugin: the whole node is short of memory."""

    free_minimum_bytes: Bytes = 0
    """[systemFreeMemoryThresholdMinimum] free memory below this, or below total x watermark_scale_factor / 10000."""
    kswapd_pages_per_s: Rate = 2000.0
    """[systemKswapdRateThreshold] pages that background reclaim takes away in a second,"""
    kswapd_s: Seconds = 120.0
    """[systemKswapdRateExceedDurationThreshold] for so long."""
    psi_avg10: Rate = 15.0
    """[PSI some avg10] of the burstable pods' root, in per cent,"""
    psi_pods: Annotated[int, Meta(ge=1)] = 3
    """of so many pods at least that stall themselves,"""
    psi_pod_avg10: Rate = 1.0
    """each by more than this,"""
    psi_pods_mean: Rate = 4.0
    """and by this on average,"""
    psi_s: Seconds = 15.0
    """for so long: a reclaimed pod leaves; three times as long: any."""
    psi_roots: tuple[str, ...] = ("/kubepods/burstable", "/kubepods.slice/kubepods-burstable.slice")
    """Where the burstable pods are; the first that exists."""
    cool_down_s: Seconds = 35.0
    """[systemPressureCoolDownPeriod] between two victims."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class RssOveruseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """rss-overuse-eviction-plugin: a pod uses more memory than it requested."""

    ratio: Factor = 1.05
    """[rssOveruseRateThreshold] resident memory over requests; the pod's rss_overuse_threshold overrides it."""
    labels: Mapping[str, str] = {}
    """[rssOveruseEvictionFilter] only pods that have all of these labels."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class FilesystemThreshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """So much, or such a part of the whole; the number counts where both are set, and nothing where neither is."""

    number: Annotated[int, Meta(ge=0)] | None = None
    """Bytes, or inodes."""
    ratio: Fraction | None = None
    """Part of the file system."""

    def of(self, capacity: int) -> float | None:
        """How much that is on a file system of this capacity; None where nothing is set."""
        if self.number is not None:
            return self.number
        return None if self.ratio is None else self.ratio * capacity


class RootfsPressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """rootfs-pressure-eviction-plugin: the file system of images and writable layers fills up."""

    mount: str = "/"
    """Mount point of that file system."""
    minimum_free: FilesystemThreshold = FilesystemThreshold()
    """[minimumImageFsFreeThreshold] less than this free is too little; not judged unless set."""
    minimum_free_inodes: FilesystemThreshold = FilesystemThreshold()
    """[minimumImageFsInodesFreeThreshold] the same of inodes."""
    minimum_capacity_bytes: Bytes = 10 * GIB
    """[minimumImageFsDiskCapacityThreshold] smaller file systems are not judged."""
    pod_minimum: FilesystemThreshold = FilesystemThreshold()
    """[podMinimumUsedThreshold] pods that use less stay."""
    pod_minimum_inodes: FilesystemThreshold = FilesystemThreshold()
    """[podMinimumInodesUsedThreshold] the same of inodes."""
    reclaimed_priority: FilesystemThreshold = FilesystemThreshold()
    """[reclaimedQoSPodUsedPriorityThreshold] reclaimed pods that use more leave before all others."""
    reclaimed_priority_inodes: FilesystemThreshold = FilesystemThreshold()
    """[reclaimedQoSPodInodesUsedPriorityThreshold] the same of inodes."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class RootfsOveruseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """rootfs-overuse-eviction-plugin: one pod writes too much into its writable layers."""

    mount: str = "/"
    """Mount point of the file system of writable layers."""
    levels: tuple[QoSLevel, ...] = (QoSLevel.SHARED,)
    """[rootfsOveruseEvictionSupportedQoSLevels] whose pods are judged."""
    shared: FilesystemThreshold = FilesystemThreshold()
    """[sharedQoSRootfsOveruseThreshold] not judged unless set; at least 20 GiB or a tenth of the file system."""
    reclaimed: FilesystemThreshold = FilesystemThreshold()
    """[reclaimedQoSRootfsOveruseThreshold] the same of reclaimed pods."""
    shared_namespaces: tuple[str, ...] = ("default",)
    """[sharedQoSNamespaceFilter] only shared pods of these."""
    count: Annotated[int, Meta(ge=1, le=100)] = 1
    """[rootfsOveruseEvictionCount] victims put forward in a round."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class NicEvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """network-eviction-plugin: a network card has no bandwidth left to give."""

    tolerance_s: Seconds = 300.0
    """[nicUnhealthyToleranceDuration] for so long."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] of its victims; the pod's own unless set."""


class KoordinatorMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """koordinator-memory-evict: Koordinator's MemoryEvict. Names in brackets are its own."""

    threshold: Ratio = 0.7
    """[memoryEvictThresholdPercent] memory in use over the node's."""
    lower: Ratio | None = None
    """[memoryEvictLowerPercent] down to this; 0.02 below the threshold unless set."""
    reclaimed_only: bool = True
    """[MemoryEvict of BE pods, or of all by priority] False lets any pod leave, lowest priority first."""
    cool_down_s: Seconds = 4.0
    """[memoryEvictCoolTimeSeconds] between two rounds of victims."""
    grace_s: GraceSeconds | None = None
    """Of its victims; the pod's own unless set."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        check_ascending("lower", self.lower, "threshold", self.threshold)


class OomdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """oomd-pressure: reclaimed pods leave before the kernel's OOM killer has to. Names in brackets are oomd's."""

    full_avg10: Rate = 60.0
    """[pressure_above threshold] part of the last 10 s in which all tasks stalled for memory, in per cent,"""
    duration_s: Seconds = 30.0
    """[duration] for so long."""
    swap_free_ratio: Fraction = 0.1
    """[swap_free threshold_pct] less free swap than this."""
    cool_down_s: Seconds = 15.0
    """[post_action_delay] between two victims."""
    grace_s: GraceSeconds | None = 1.0
    """Of its victims."""


PluginName = Literal[
    "reclaimed-resource-pressure-eviction-plugin",
    "reclaimed-numa-resource-pressure-eviction-plugin",
    "numa-memory-pressure-eviction-plugin",
    "system-memory-pressure-eviction-plugin",
    "rss-overuse-eviction-plugin",
    "rootfs-pressure-eviction-plugin",
    "rootfs-overuse-eviction-plugin",
    "network-eviction-plugin",
    "cpu-pressure-load-plugin",
    "cpu-pressure-suppression-plugin",
    "numa-cpu-pressure-plugin",
    "numa-sys-cpu-pressure-plugin",
    "koordinator-cpu-evict",
    "koordinator-memory-evict",
    "oomd-pressure",
    "node_power_pressure",
]
"""Every plugin there is."""
PLUGIN_NAMES: tuple[str, ...] = get_args(PluginName)
DEFAULT_PLUGINS = frozenset(PLUGIN_NAMES[:4])
"""Those that `*` stands for: what Katalyst runs unless told otherwise. The others run where they are named."""

EvictionMethodName = Literal["eviction-api-killer", "deletion-api-killer", "container-killer", "signals"]
EvictableLevel = Literal["shared_cores", "dedicated_cores", "reclaimed_cores"]


class EvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Which pods have to leave this node when it is in trouble. Nobody has to, unless a plugin is named."""

    plugins: tuple[PluginName | Literal["*"], ...] = ()
    """[evictionPlugins] plugins that judge, by name; `*` are those that Katalyst has on by default."""
    dry_run: tuple[str, ...] = ()
    """[dryRun] plugins whose victims and conditions are only shown, those of others by their names too; `*` are all."""
    interval_s: Seconds = 5.0
    """[evictionManagerSyncPeriod] between two rounds."""
    burst: Annotated[int, Meta(ge=1, le=100)] = 3
    """[evictionBurst] victims in one round at most."""
    condition_s: Seconds = 300.0
    """[evictionConditionTransitionPeriod] a condition is shown for so long after it was last met."""
    stale_s: Seconds = 30.0
    """What was read longer ago than this counts as missing: it never evicts."""
    skipped_annotations: tuple[str, ...] = ()
    """[evictionSkippedAnnotation] pods that carry one of these keys never leave."""
    skipped_labels: tuple[str, ...] = ()
    """[evictionSkippedLabels] the same of labels."""
    killer: EvictionMethodName | None = None
    """[pod-killer] how pods are made to leave. `eviction-api-killer` asks the API server, and disruption budgets are respected;
    `deletion-api-killer` deletes them, whatever budgets say; `container-killer` has the runtime stop their containers, which
    the kubelet starts again where it is to; `signals` signals their processes. Unless set, the first with `--node` and
    `--kubelet`, else the last."""
    killers: Mapping[EvictableLevel, EvictionMethodName] = {}
    """[qos-pod-killers] the same for pods of single levels."""
    plugin_sockets: str = ""
    """[pluginRegistrationDir] directory in which eviction plugins of others register, such as
    `/var/lib/katalyst/plugin-socks`; empty: none are asked."""
    plugin_tokens_file: str = ""
    """[strictAuthentication] with it only plugins are heeded whose token is a line of this file, which is read again when it
    changes; a token is what the plugin answers to GetToken, such as `Basic dXNlcjpwYXNzd29yZA==`. Empty: all are."""
    notify_root: str = ""
    """[HostPathNotifierRootPath] directory in which pods that ask for it are told of soft thresholds, each in a folder of its
    own that it may mount; Katalyst's is `/opt/katalyst`. Empty: they are told by events alone."""
    reclaimed: ReclaimedPressureConfig = ReclaimedPressureConfig()
    numa_memory: NumaMemoryConfig = NumaMemoryConfig()
    system_memory: SystemMemoryConfig = SystemMemoryConfig()
    rss: RssOveruseConfig = RssOveruseConfig()
    rootfs_pressure: RootfsPressureConfig = RootfsPressureConfig()
    rootfs_overuse: RootfsOveruseConfig = RootfsOveruseConfig()
    network: NicEvictionConfig = NicEvictionConfig()
    load: CpuLoadEvictionConfig = CpuLoadEvictionConfig()
    suppression: CpuSuppressionEvictionConfig = CpuSuppressionEvictionConfig()
    numa_cpu: NumaCpuConfig = NumaCpuConfig()
    numa_sys: NumaSysConfig = NumaSysConfig()
    koordinator_cpu: KoordinatorCpuConfig = KoordinatorCpuConfig()
    koordinator_memory: KoordinatorMemoryConfig = KoordinatorMemoryConfig()
    oomd: OomdConfig = OomdConfig()

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        for name in self.dry_run:
            if name not in PLUGIN_NAMES and name != "*" and not self.plugin_sockets:
                raise ValueError(
                    f"dryRun: there is no plugin {name!r:.80}; those of others are asked with pluginSockets"
                )
            if name in PLUGIN_NAMES and not self.enabled(name):
                raise ValueError(f"dryRun: {name} does not judge at all; name it in plugins too, or take it out here")

    def enabled(self, name: str) -> bool:
        """Whether this plugin judges at all."""
        return name in self.plugins or ("*" in self.plugins and name in DEFAULT_PLUGINS)

    def dry(self, name: str) -> bool:
        """Whether its victims stay."""
        return name in self.dry_run or "*" in self.dry_run
