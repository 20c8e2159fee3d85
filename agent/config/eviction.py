"""Defines the settings of the eviction manager and of each eviction plugin. Names in brackets are Katalyst's,
Koordinator's or oomd's, as the section says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from agent.config.units import Fraction, Ratio, Seconds, check_ascending
from api.qos import QoSLevel
from api.text import quote
from api.units import GIB

GraceSeconds = Annotated[float, Meta(ge=0, le=86_400)]
Samples = Annotated[int, Meta(ge=1, le=1000)]
Factor = Annotated[float, Meta(gt=0, le=1000)]


NumaCpuScorer = Literal["Usage", "WorkloadEvictionFrequency"]


class CpuLoadEvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `cpu-pressure-load-plugin`: more runnable tasks in a pool than CPUs."""

    upper_bound_ratio: Factor = 1.8
    """[loadUpperBoundRatio] Hard threshold, runnable tasks per CPU."""
    lower_bound_ratio: Factor = 1.0
    """[loadLowerBoundRatio] Soft threshold, runnable tasks per CPU."""
    threshold_met_percentage: Ratio = 0.8
    """[loadThresholdMetPercentage] Share of the samples above the threshold."""
    ring_size: Samples = 10
    """[loadMetricRingSize] Samples that count."""
    sample_s: Seconds = 30.0
    """[loadEvictionSyncPeriod] Time between samples."""
    cool_down_s: Seconds = 300.0
    """[loadEvictionCoolDownTime] Time between victims."""
    skip_pools: tuple[str, ...] = ("reclaim", "dedicated", "fallback", "reserve")
    """[loadPressureEvictionSkipPools] Pools to skip; isolation pools always are."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class CpuSuppressionEvictionConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Plugin `cpu-pressure-suppression-plugin`: reclaimed pods get much less CPU than requested."""

    max_tolerance_rate: Factor = 5.0
    """[maxSuppressionToleranceRate] Tolerated requests / supply; a pod's annotation can only lower it."""
    min_tolerance_s: Seconds = 300.0
    """[minSuppressionToleranceDuration] Time above the tolerance before eviction."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class NumaCpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `numa-cpu-pressure-plugin`: shared pods bound to a NUMA node use too much of it."""

    usage_threshold: Ratio | None = None
    """[cpuUsageRatioThreshold] Used share of the NUMA node; unset: Katalyst's value for the CPU model."""
    expand_factor: Factor = 1.1
    """[thresholdExpandFactor] Factor of the threshold."""
    threshold_met_percentage: Ratio = 0.7
    """[thresholdMetPercentage] Share of the samples above the threshold."""
    ring_size: Samples = 4
    """[metricRingSize] Samples that count."""
    sample_s: Seconds = 15.0
    """Time between samples."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""
    scorers: tuple[NumaCpuScorer, ...] = ("Usage",)
    """[enabledScorers] Scores that are added: `Usage`, how well the pod's use fits the excess; `WorkloadEvictionFrequency`,
    which spares workloads that this agent evicted lately."""


class NumaSysConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `numa-sys-cpu-pressure-plugin`: a NUMA node is busy, mostly in the kernel."""

    usage_soft: Ratio = 0.4
    """[numaCPUUsageSoftThreshold] Soft threshold of the NUMA node's use."""
    usage_hard: Ratio = 0.5
    """[numaCPUUsageHardThreshold] Hard threshold of the NUMA node's use."""
    system_soft: Ratio = 0.4
    """[numaSysOverTotalUsageSoftThreshold] Soft threshold of the kernel's share of it."""
    system_hard: Ratio = 0.5
    """[numaSysOverTotalUsageHardThreshold] Hard threshold of the kernel's share of it."""
    victim_system: Fraction = 0.3
    """[numaSysOverTotalUsageEvictionThreshold] Minimum kernel share of a victim's use."""
    threshold_met_percentage: Ratio = 0.7
    """[thresholdMetPercentage] Share of the samples above the threshold."""
    ring_size: Samples = 4
    """[metricRingSize] Samples that count."""
    sample_s: Seconds = 10.0
    """[syncPeriod] Time between samples."""
    grace_s: GraceSeconds | None = 60.0
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class KoordinatorCpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `koordinator-cpu-evict`: Koordinator's BECPUEvict, CPUAllocatableEvict and CPUEvict, with its names in
    brackets."""

    satisfaction_lower: Ratio = 0.6
    """[cpuEvictBESatisfactionLowerPercent] Evict if reclaimed pods may use at most this share of their requests; above
    0.6 it counts as 0.6."""
    satisfaction_upper: Ratio = 0.8
    """[cpuEvictBESatisfactionUpperPercent] Evict until that share is reached."""
    usage_ratio: Ratio = 0.9
    """[cpuEvictBEUsageThresholdPercent] Evict only while they use this share of their supply."""
    node_threshold: Ratio | None = None
    """[cpuEvictThresholdPercent] CPU use of the node; unset: not checked."""
    node_lower: Ratio | None = None
    """[cpuEvictLowerPercent] Evict down to this use; unset: 0.02 below the threshold."""
    allocatable_threshold: Factor | None = None
    """[cpuAllocatableEvictThresholdPercent] Requests / headroom; unset: not checked."""
    window_s: Seconds = 60.0
    """[cpuEvictTimeWindowSeconds] Averaging time of use; needs a third of its samples."""
    cool_down_s: Seconds = 20.0
    """[cpuEvictCoolTimeSeconds] Time between evictions."""
    grace_s: GraceSeconds | None = None
    """Grace period of victims; unset: the pod's."""

    def __post_init__(self) -> None:
        check_ascending("satisfactionLower", self.satisfaction_lower, "satisfactionUpper", self.satisfaction_upper)
        check_ascending("nodeLower", self.node_lower, "nodeThreshold", self.node_threshold)


Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Rate = Annotated[float, Meta(ge=0)]
Cycles = Annotated[int, Meta(ge=0, le=10_000)]


class ReclaimedPressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugins `reclaimed-resource-pressure-eviction-plugin` and `reclaimed-numa-resource-pressure-eviction-plugin`:
    reclaimed pods request much more than the headroom."""

    cpu_threshold: Factor = 5.0
    """[evictionThreshold reclaimed_millicpu] Ratio of CPU requests to headroom."""
    memory_threshold: Factor = 5.0
    """[evictionThreshold reclaimed_memory] Ratio of memory requests to headroom."""
    cpu_soft_threshold: Factor = 1.5
    """[softEvictionThreshold] CPU ratio from which pods with pod_soft_evict_notify are notified, one at a time."""
    memory_soft_threshold: Factor = 1.2
    """[softEvictionThreshold] The same for memory."""
    tolerance_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """[thresholdMetToleranceDuration] Time above the hard threshold before eviction."""
    soft_tolerance_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    """Time above the soft threshold before a notification."""
    grace_s: GraceSeconds | None = 60.0
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class NumaMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `numa-memory-pressure-eviction-plugin`: a NUMA node runs out of free memory."""

    reclaimed_rounds: Cycles = 6
    """[numaFreeBelowWatermarkTimesReclaimedThreshold] Cycles below the low watermark before a reclaimed pod is
    evicted."""
    any_rounds: Cycles = 12
    """[numaFreeBelowWatermarkTimesThreshold] Cycles below the low watermark before any pod may be evicted."""
    fast_wait_rounds: Cycles = 1
    """[numaFreeConstraintFastEvictionWaitCycle] Cycles below the minimum, after the first, before any pod may be
    evicted."""
    victim_ratio: Fraction = 0.001
    """[numaVictimMinimumUtilizationThreshold] Minimum share of the NUMA node that a victim uses."""
    reclaimed_grace_s: GraceSeconds | None = 1.0
    """[reclaimedGracePeriod] Grace period of reclaimed victims; unset: the pod's."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of other victims; unset: the pod's."""


class SystemMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `system-memory-pressure-eviction-plugin`: the whole node is short of memory."""

    free_minimum_bytes: Bytes = 0
    """[systemFreeMemoryThresholdMinimum] Minimum free memory, or total x watermark_scale_factor / 10000 if larger."""
    kswapd_pages_per_s: Rate = 2000.0
    """[systemKswapdRateThreshold] Pages that kswapd reclaims per second."""
    kswapd_s: Seconds = 120.0
    """[systemKswapdRateExceedDurationThreshold] Time above that rate."""
    psi_avg10: Rate = 15.0
    """[PSI some avg10] Memory pressure of the burstable root in percent."""
    psi_pods: Annotated[int, Meta(ge=1)] = 3
    """Minimum number of stalled pods."""
    psi_pod_avg10: Rate = 1.0
    """Pressure in percent above which a pod is stalled."""
    psi_pods_mean: Rate = 4.0
    """Minimum mean pressure of these pods in percent."""
    psi_s: Seconds = 15.0
    """Duration before a reclaimed pod is evicted; three times as long for others."""
    psi_roots: tuple[str, ...] = ("/kubepods/burstable", "/kubepods.slice/kubepods-burstable.slice")
    """Cgroups of burstable pods; the first that exists counts."""
    cool_down_s: Seconds = 35.0
    """[systemPressureCoolDownPeriod] Time between victims."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class RssOveruseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `rss-overuse-eviction-plugin`: a pod uses more memory than requested."""

    ratio: Factor = 1.05
    """[rssOveruseRateThreshold] Resident memory / requests; the pod's rss_overuse_threshold overrides it."""
    labels: Mapping[str, str] = {}
    """[rssOveruseEvictionFilter] Only pods with all of these labels."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class FilesystemThreshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """An amount, or a part of the file system; `number` takes precedence, and unset there is no threshold."""

    number: Annotated[int, Meta(ge=0)] | None = None
    """Bytes, or inodes."""
    ratio: Fraction | None = None
    """Part of the file system."""

    def of(self, capacity: int) -> float | None:
        """Return the threshold on a file system with this capacity; None if unset."""
        if self.number is not None:
            return self.number
        return None if self.ratio is None else self.ratio * capacity


class RootfsPressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `rootfs-pressure-eviction-plugin`: the file system of images and writable layers is full."""

    mount: str = "/"
    """Mount point of that file system."""
    minimum_free: FilesystemThreshold = FilesystemThreshold()
    """[minimumImageFsFreeThreshold] Minimum free space; unset: not checked."""
    minimum_free_inodes: FilesystemThreshold = FilesystemThreshold()
    """[minimumImageFsInodesFreeThreshold] Minimum free inodes; unset: not checked."""
    minimum_capacity_bytes: Bytes = 10 * GIB
    """[minimumImageFsDiskCapacityThreshold] Smaller file systems are not checked."""
    pod_minimum: FilesystemThreshold = FilesystemThreshold()
    """[podMinimumUsedThreshold] Pods that use less space are not evicted."""
    pod_minimum_inodes: FilesystemThreshold = FilesystemThreshold()
    """[podMinimumInodesUsedThreshold] Pods that use fewer inodes are not evicted."""
    reclaimed_priority: FilesystemThreshold = FilesystemThreshold()
    """[reclaimedQoSPodUsedPriorityThreshold] Reclaimed pods that use more space are evicted first."""
    reclaimed_priority_inodes: FilesystemThreshold = FilesystemThreshold()
    """[reclaimedQoSPodInodesUsedPriorityThreshold] Reclaimed pods that use more inodes are evicted first."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class RootfsOveruseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `rootfs-overuse-eviction-plugin`: one pod writes too much into its writable layers."""

    mount: str = "/"
    """Mount point of the writable layers."""
    levels: tuple[QoSLevel, ...] = (QoSLevel.SHARED,)
    """[rootfsOveruseEvictionSupportedQoSLevels] Levels to check."""
    shared: FilesystemThreshold = FilesystemThreshold()
    """[sharedQoSRootfsOveruseThreshold] Threshold of shared pods, at least 20 GiB or a tenth of the file system; unset:
    not checked."""
    reclaimed: FilesystemThreshold = FilesystemThreshold()
    """[reclaimedQoSRootfsOveruseThreshold] Threshold of reclaimed pods; unset: not checked."""
    shared_namespaces: tuple[str, ...] = ("default",)
    """[sharedQoSNamespaceFilter] Only shared pods in these namespaces."""
    count: Annotated[int, Meta(ge=1, le=100)] = 1
    """[rootfsOveruseEvictionCount] Victims per cycle."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class NicEvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `network-eviction-plugin`: a network card has no bandwidth left."""

    tolerance_s: Seconds = 300.0
    """[nicUnhealthyToleranceDuration] Time before eviction."""
    grace_s: GraceSeconds | None = None
    """[gracePeriod] Grace period of victims; unset: the pod's."""


class KoordinatorMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `koordinator-memory-evict`: Koordinator's MemoryEvict, with its names in brackets."""

    threshold: Ratio = 0.7
    """[memoryEvictThresholdPercent] Used share of the node's memory."""
    lower: Ratio | None = None
    """[memoryEvictLowerPercent] Evict down to this share; unset: 0.02 below the threshold."""
    reclaimed_only: bool = True
    """[MemoryEvict of BE pods, or of all by priority] `false` evicts any pod, lowest priority first."""
    cool_down_s: Seconds = 4.0
    """[memoryEvictCoolTimeSeconds] Time between evictions."""
    grace_s: GraceSeconds | None = None
    """Grace period of victims; unset: the pod's."""

    def __post_init__(self) -> None:
        check_ascending("lower", self.lower, "threshold", self.threshold)


class OomdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Plugin `oomd-pressure`: evicts reclaimed pods before the kernel's OOM killer acts. Names in brackets are oomd's."""

    full_avg10: Rate = 60.0
    """[pressure_above threshold] Full memory stall, percent of 10 s."""
    duration_s: Seconds = 30.0
    """[duration] Time above that threshold."""
    swap_free_ratio: Fraction = 0.1
    """[swap_free threshold_pct] Minimum free share of swap."""
    cool_down_s: Seconds = 15.0
    """[post_action_delay] Time between victims."""
    grace_s: GraceSeconds | None = 1.0
    """Grace period of victims; unset: the pod's."""


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
PLUGIN_NAMES: tuple[str, ...] = get_args(PluginName)
DEFAULT_PLUGINS = frozenset(PLUGIN_NAMES[:4])
"""The plugins of `*`: those that Katalyst enables by default. Add new names at the end."""

EvictionMethodName = Literal["eviction-api-killer", "deletion-api-killer", "container-killer", "signals"]
EvictableLevel = Literal["shared_cores", "dedicated_cores", "reclaimed_cores"]


class EvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Evictions of pods from this node. No plugin runs by default."""

    plugins: tuple[PluginName | Literal["*"], ...] = ()
    """[evictionPlugins] Plugins to run; `*`: Katalyst's defaults."""
    dry_run: tuple[str, ...] = ()
    """[dryRun] Plugins, external ones included, that only show victims and conditions; `*`: all."""
    interval_s: Seconds = 5.0
    """[evictionManagerSyncPeriod] Time between eviction cycles."""
    burst: Annotated[int, Meta(ge=1, le=100)] = 3
    """[evictionBurst] Maximum victims per cycle."""
    condition_s: Seconds = 300.0
    """[evictionConditionTransitionPeriod] A condition lasts this long after it was last met."""
    stale_s: Seconds = 30.0
    """Maximum age of readings; older ones never evict."""
    skipped_annotations: tuple[str, ...] = ()
    """[evictionSkippedAnnotation] Annotation keys of pods that are never evicted."""
    skipped_labels: tuple[str, ...] = ()
    """[evictionSkippedLabels] Label keys of pods that are never evicted."""
    killer: EvictionMethodName | None = None
    """[pod-killer] Eviction method, see docs/eviction.md. Unset: `eviction-api-killer` with `--node` and `--kubelet`,
    else `signals`."""
    killers: Mapping[EvictableLevel, EvictionMethodName] = {}
    """[qos-pod-killers] Eviction method by QoS level."""
    budget_lease: str = ""
    """Lease `NAMESPACE/NAME` with the eviction budget of the cluster, which the controller renews, see docs/eviction.md. Empty:
    no budget limits evictions."""
    plugin_sockets: str = ""
    """[pluginRegistrationDir] Directory of external plugins, such as `/var/lib/katalyst/plugin-socks`. Empty: none."""
    plugin_tokens_file: str = ""
    """[strictAuthentication] File of accepted tokens (GetToken), one a line, reread on change. Empty: all plugins."""
    notify_root: str = ""
    """[HostPathNotifierRootPath] Directory with one folder per notified pod; Katalyst's is `/opt/katalyst`. Empty:
    events only."""
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
        if self.budget_lease and (len(self.budget_lease.split("/")) != 2 or not all(self.budget_lease.split("/"))):
            raise ValueError(f"budgetLease: {quote(self.budget_lease)} is not NAMESPACE/NAME of a Lease")
        for name in self.dry_run:
            if name not in PLUGIN_NAMES and name != "*" and not self.plugin_sockets:
                raise ValueError(
                    f"dryRun: there is no plugin {quote(name)}; correct it, or set pluginSockets for external plugins"
                )
            if name in PLUGIN_NAMES and not self.enabled(name):
                raise ValueError(f"dryRun: {name} does not run; name it in plugins too, or remove it here")

    def enabled(self, name: str) -> bool:
        """Return whether this plugin runs."""
        return name in self.plugins or ("*" in self.plugins and name in DEFAULT_PLUGINS)

    def dry(self, name: str) -> bool:
        """Return whether this plugin's victims are only shown."""
        return name in self.dry_run or "*" in self.dry_run
