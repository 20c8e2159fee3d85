"""AdminQoSConfiguration.spec.config.evictionConfig: from which pressure on pods are evicted, and which go first.

Rates and ratios are parts of one unless said otherwise. A gracePeriod is what pods have to end by themselves, in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from api.crds.meta import Count, Count64, Duration, Factor, Int64, Part, Positive, Positive64, Quantity, Share

SPACE_PATTERN = r"^(0|[1-9][0-9]*)((\.[0-9]+)?%?|[kKmMGTPeE]i?)$"
"""A number, alone, with `%`, or as a whole quantity: `10Gi`."""
INODES_PATTERN = r"^([0-9]+|(0|[1-9][0-9]*)(\.[0-9]+)?%?)$"
Space = Annotated[str, Meta(pattern=SPACE_PATTERN)]
Inodes = Annotated[str, Meta(pattern=INODES_PATTERN)]
NumaRanking = Literal["qos.pod", "priority.pod", "mem.total.numa.container"]
SystemRanking = Literal["qos.pod", "priority.pod", "mem.usage.container", "native.qos.pod", "owner.pod"]


class NumaCPUPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where the CPUs of one NUMA node are busier than their kind bears."""

    enable_eviction: bool | None = None
    threshold_met_percentage: Share | None = None
    """Of the measurements that are kept, how many have to be above."""
    metric_ring_size: Positive | None = None
    """Measurements that are kept."""
    grace_period: Count64 | None = None
    threshold_expand_factor: Factor | None = None
    """Times the threshold of this kind of CPU."""
    candidate_count: Count | None = None
    """Pods among which the one that goes is chosen."""
    skipped_pod_kinds: tuple[str, ...] | None = None
    """Kinds of owners whose pods stay."""
    cpu_usage_ratio_threshold: float | None = None
    upper_bound_ratio: float | None = None
    lower_bound_ratio: float | None = None
    reclaimed_evict_bound_ratio: float | None = None


class NumaSysCPUPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where the kernel's own work takes too much of the CPUs of one NUMA node."""

    enable_eviction: bool | None = None
    metric_ring_size: int | None = None
    grace_period: Int64 | None = None
    sync_period: Int64 | None = None
    """In seconds."""
    threshold_met_percentage: float | None = None
    numa_cpu_usage_soft_threshold: float | None = field(default=None, name="numaCPUUsageSoftThreshold")
    numa_cpu_usage_hard_threshold: float | None = field(default=None, name="numaCPUUsageHardThreshold")
    numa_sys_over_total_usage_soft_threshold: float | None = None
    numa_sys_over_total_usage_hard_threshold: float | None = None
    numa_sys_over_total_usage_eviction_threshold: float | None = None


class CPUPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where the CPUs of a pool are too busy, or reclaimed pods get too little of them."""

    enable_load_eviction: bool | None = None
    load_upper_bound_ratio: Annotated[float, Meta(ge=1)] | None = None
    """Load over the CPUs of the pool from which pods are evicted."""
    load_lower_bound_ratio: Factor | None = None
    """And from which no further reclaimed pods are let onto the node."""
    load_threshold_met_percentage: Share | None = None
    load_metric_ring_size: Positive | None = None
    load_eviction_cool_down_time: Duration | None = None
    enable_suppression_eviction: bool | None = None
    max_suppression_tolerance_rate: Factor | None = None
    """What any pod has to bear at most: its requests over what it can get."""
    min_suppression_tolerance_duration: Duration | None = None
    grace_period: Count64 | None = None
    numa_cpu_pressure_eviction_config: NumaCPUPressureEvictionConfig | None = field(
        default=None, name="numaCPUPressureEvictionConfig"
    )
    numa_sys_cpu_pressure_eviction_config: NumaSysCPUPressureEvictionConfig | None = field(
        default=None, name="numaSysCPUPressureEvictionConfig"
    )


class CPUSystemPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where all CPUs of the node together are too busy."""

    enable_cpu_system_pressure_eviction: bool | None = field(default=None, name="enableCPUSystemPressureEviction")
    load_upper_bound_ratio: Share | None = None
    load_lower_bound_ratio: Share | None = None
    usage_upper_bound_ratio: Share | None = None
    usage_lower_bound_ratio: Share | None = None
    threshold_met_percentage: Share | None = None
    metric_ring_size: Positive | None = None
    eviction_cool_down_time: Duration | None = None
    eviction_ranking_metrics: tuple[str, ...] | None = None
    grace_period: Int64 | None = None
    check_cpu_manager: bool | None = field(default=None, name="checkCPUManager")
    ranking_labels: dict[str, tuple[str, ...]] | None = field(default=None, name="RankingLabels")
    """Label to its values, who goes first before the others."""


class MemoryPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where memory runs out: of one NUMA node, of the whole node, or beyond what a pod requested."""

    enable_numa_level_eviction: bool | None = None
    enable_system_level_eviction: bool | None = None
    numa_victim_minimum_utilization_threshold: float | None = None
    """Of a NUMA node's memory, what a pod has to use to be worth its eviction."""
    numa_free_below_watermark_times_threshold: Count | None = None
    """Rounds in a row with less free than the low watermark."""
    numa_free_below_watermark_times_reclaimed_threshold: Count | None = None
    """The same for pods of reclaimed_cores."""
    numa_free_constraint_fast_eviction_wait_cycle: Count | None = None
    system_free_memory_threshold_minimum: Quantity | None = None
    system_kswapd_rate_threshold: Count | None = None
    """Pages a second that kswapd takes back."""
    system_kswapd_rate_exceed_duration_threshold: Count | None = None
    """In seconds."""
    numa_eviction_ranking_metrics: Annotated[tuple[NumaRanking, ...], Meta(min_length=1)] | None = None
    system_eviction_ranking_metrics: Annotated[tuple[SystemRanking, ...], Meta(min_length=1)] | None = None
    enable_rss_overuse_eviction: bool | None = field(default=None, name="enableRSSOveruseEviction")
    rss_overuse_rate_threshold: Factor | None = None
    """Resident memory over requests."""
    grace_period: Count64 | None = None
    reclaimed_grace_period: Count64 | None = None
    evict_non_reclaimed_annotation_selector: str | None = None
    """Pods that are not of reclaimed_cores and may go all the same."""
    evict_non_reclaimed_label_selector: str | None = None


class RootfsPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where the file system of images and containers runs full. Thresholds are quantities or percents of it."""

    enable_rootfs_pressure_eviction: bool | None = None
    enable_rootfs_overuse_eviction: bool | None = None
    minimum_image_fs_free_threshold: Space | None = None
    minimum_image_fs_inodes_free_threshold: Inodes | None = None
    pod_minimum_used_threshold: Space | None = None
    """Who uses less stays."""
    pod_minimum_inodes_used_threshold: Inodes | None = None
    reclaimed_qos_pod_used_priority_threshold: Space | None = field(
        default=None, name="reclaimedQoSPodUsedPriorityThreshold"
    )
    """Pods of reclaimed_cores that use more go before all others."""
    reclaimed_qos_pod_inodes_used_priority_threshold: Inodes | None = field(
        default=None, name="reclaimedQoSPodInodesUsedPriorityThreshold"
    )
    minimum_image_fs_disk_capacity_threshold: Quantity | None = None
    """Smaller file systems are left alone."""
    shared_qos_rootfs_overuse_threshold: str | None = field(default=None, name="sharedQoSRootfsOveruseThreshold")
    reclaimed_qos_rootfs_overuse_threshold: str | None = field(default=None, name="reclaimedQoSRootfsOveruseThreshold")
    rootfs_overuse_eviction_supported_qos_levels: tuple[str, ...] | None = field(
        default=None, name="rootfsOveruseEvictionSupportedQoSLevels"
    )
    grace_period: Int64 | None = None


class ReclaimedResourcesEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where pods requested more than the node lends by now. Thresholds are requests over what is lent."""

    eviction_threshold: dict[str, float] | None = None
    soft_eviction_threshold: dict[str, float] | None = None
    grace_period: Count64 | None = None
    threshold_met_tolerance_duration: Count64 | None = None
    """In seconds."""


class SystemLoadPressureEvictionConfig(Part, frozen=True, kw_only=True):
    """Taken and ignored: cpuSystemPressureEvictionConfig came after it."""

    soft_threshold: Int64 | None = None
    hard_threshold: Int64 | None = None
    history_size: Positive64 | None = None
    sync_period: Positive64 | None = None
    cool_down_time: Positive64 | None = None
    grace_period: Int64 | None = None
    threshold_met_percentage: float | None = None


class NetworkEvictionConfig(Part, frozen=True, kw_only=True):
    """Evicts where the network card that a pod was given is not healthy."""

    enable_nic_network_eviction: bool | None = field(default=None, name="enableNICNetworkEviction")
    nic_unhealthy_tolerance_duration: Duration | None = None
    grace_period: Count64 | None = None


class EvictionConfig(Part, frozen=True, kw_only=True):
    """Which pressure evicts, and what only says that it would."""

    dry_run: tuple[str, ...] | None = None
    """Names of plugins that only say whom they would evict; `*` is all."""
    cpu_pressure_eviction_config: CPUPressureEvictionConfig | None = None
    cpu_system_pressure_eviction_config: CPUSystemPressureEvictionConfig | None = None
    memory_pressure_eviction_config: MemoryPressureEvictionConfig | None = None
    rootfs_pressure_eviction_config: RootfsPressureEvictionConfig | None = None
    reclaimed_resources_eviction_config: ReclaimedResourcesEvictionConfig | None = None
    system_load_pressure_eviction_config: SystemLoadPressureEvictionConfig | None = None
    network_eviction_config: NetworkEvictionConfig | None = None
