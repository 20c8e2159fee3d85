"""AdminQoSConfiguration: reclaimed resources, advisor, QRM plugins and eviction thresholds of nodes.
An absent field leaves the node's own setting in force. Rates and ratios are fractions of one unless stated
otherwise; a gracePeriod is in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from api.katalyst.kcc import ConfigResource, GenericConfigSpec
from api.katalyst.meta import (
    Count,
    Count64,
    Duration,
    Factor,
    Int64,
    KatalystStruct,
    Percent,
    Positive,
    Positive64,
    Quantity,
    ResourceList,
    Share,
    schema_keywords,
)

SPACE_PATTERN = r"^(0|[1-9][0-9]*)((\.[0-9]+)?%?|[kKmMGTPeE]i?)$"
"""Number, percentage, or quantity with a unit: `10Gi`."""
INODES_PATTERN = r"^([0-9]+|(0|[1-9][0-9]*)(\.[0-9]+)?%?)$"
Space = Annotated[str, Meta(pattern=SPACE_PATTERN)]
Inodes = Annotated[str, Meta(pattern=INODES_PATTERN)]
NumaRanking = Literal["qos.pod", "priority.pod", "mem.total.numa.container"]
SystemRanking = Literal["qos.pod", "priority.pod", "mem.usage.container", "native.qos.pod", "owner.pod"]


class NumaCPUPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when the CPUs of one NUMA node exceed the threshold of their CPU model."""

    enable_eviction: bool | None = None
    threshold_met_percentage: Share | None = None
    """Number of retained measurements that have to exceed the threshold."""
    metric_ring_size: Positive | None = None
    """Number of retained measurements."""
    grace_period: Count64 | None = None
    threshold_expand_factor: Factor | None = None
    """Factor on the threshold of the CPU model."""
    candidate_count: Count | None = None
    """Number of candidates among which the victim is selected."""
    skipped_pod_kinds: tuple[str, ...] | None = None
    """Owner kinds whose pods are not evicted."""
    cpu_usage_ratio_threshold: float | None = None
    upper_bound_ratio: float | None = None
    lower_bound_ratio: float | None = None
    reclaimed_evict_bound_ratio: float | None = None


class NumaSysCPUPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when system time takes too much of the CPUs of one NUMA node."""

    enable_eviction: bool | None = None
    metric_ring_size: int | None = None
    grace_period: Int64 | None = None
    sync_period: Int64 | None = None
    """Period in seconds."""
    threshold_met_percentage: float | None = None
    numa_cpu_usage_soft_threshold: float | None = field(default=None, name="numaCPUUsageSoftThreshold")
    numa_cpu_usage_hard_threshold: float | None = field(default=None, name="numaCPUUsageHardThreshold")
    numa_sys_over_total_usage_soft_threshold: float | None = None
    numa_sys_over_total_usage_hard_threshold: float | None = None
    numa_sys_over_total_usage_eviction_threshold: float | None = None


class CPUPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when the CPUs of a pool are overloaded, or reclaimed pods get too little of them."""

    enable_load_eviction: bool | None = None
    load_upper_bound_ratio: Annotated[float, Meta(ge=1)] | None = None
    """Ratio of load to the pool's CPUs from which pods are evicted."""
    load_lower_bound_ratio: Factor | None = None
    """Ratio of load to the pool's CPUs from which no new reclaimed pods are admitted."""
    load_threshold_met_percentage: Share | None = None
    load_metric_ring_size: Positive | None = None
    load_eviction_cool_down_time: Duration | None = None
    enable_suppression_eviction: bool | None = None
    max_suppression_tolerance_rate: Factor | None = None
    """Upper bound of every pod's tolerance: requested over available reclaimed CPU."""
    min_suppression_tolerance_duration: Duration | None = None
    grace_period: Count64 | None = None
    numa_cpu_pressure_eviction_config: NumaCPUPressureEvictionConfig | None = field(
        default=None, name="numaCPUPressureEvictionConfig"
    )
    numa_sys_cpu_pressure_eviction_config: NumaSysCPUPressureEvictionConfig | None = field(
        default=None, name="numaSysCPUPressureEvictionConfig"
    )


class CPUSystemPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when all CPUs of the node together are overloaded."""

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
    """Label values by label key; pods with earlier values are evicted first."""


class MemoryPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when memory of one NUMA node, of the node, or beyond a pod's request is exhausted."""

    enable_numa_level_eviction: bool | None = None
    enable_system_level_eviction: bool | None = None
    numa_victim_minimum_utilization_threshold: float | None = None
    """Minimum share of a NUMA node's memory that a victim has to use."""
    numa_free_below_watermark_times_threshold: Count | None = None
    """Number of consecutive cycles below the low watermark."""
    numa_free_below_watermark_times_reclaimed_threshold: Count | None = None
    """Number of consecutive cycles below the low watermark for pods of reclaimed_cores."""
    numa_free_constraint_fast_eviction_wait_cycle: Count | None = None
    system_free_memory_threshold_minimum: Quantity | None = None
    system_kswapd_rate_threshold: Count | None = None
    """Rate of pages reclaimed by kswapd, per second."""
    system_kswapd_rate_exceed_duration_threshold: Count | None = None
    """Period in seconds."""
    numa_eviction_ranking_metrics: Annotated[tuple[NumaRanking, ...], Meta(min_length=1)] | None = None
    system_eviction_ranking_metrics: Annotated[tuple[SystemRanking, ...], Meta(min_length=1)] | None = None
    enable_rss_overuse_eviction: bool | None = field(default=None, name="enableRSSOveruseEviction")
    rss_overuse_rate_threshold: Factor | None = None
    """Ratio of resident memory to requests."""
    grace_period: Count64 | None = None
    reclaimed_grace_period: Count64 | None = None
    evict_non_reclaimed_annotation_selector: str | None = None
    """Pods outside of reclaimed_cores that may be evicted too."""
    evict_non_reclaimed_label_selector: str | None = None


class RootfsPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when the file system of images and containers is full. Thresholds are quantities or percentages."""

    enable_rootfs_pressure_eviction: bool | None = None
    enable_rootfs_overuse_eviction: bool | None = None
    minimum_image_fs_free_threshold: Space | None = None
    minimum_image_fs_inodes_free_threshold: Inodes | None = None
    pod_minimum_used_threshold: Space | None = None
    """Minimum usage of a victim."""
    pod_minimum_inodes_used_threshold: Inodes | None = None
    reclaimed_qos_pod_used_priority_threshold: Space | None = field(
        default=None, name="reclaimedQoSPodUsedPriorityThreshold"
    )
    """Pods of reclaimed_cores above this usage are evicted first."""
    reclaimed_qos_pod_inodes_used_priority_threshold: Inodes | None = field(
        default=None, name="reclaimedQoSPodInodesUsedPriorityThreshold"
    )
    minimum_image_fs_disk_capacity_threshold: Quantity | None = None
    """Minimum size of a file system to be considered."""
    shared_qos_rootfs_overuse_threshold: str | None = field(default=None, name="sharedQoSRootfsOveruseThreshold")
    reclaimed_qos_rootfs_overuse_threshold: str | None = field(default=None, name="reclaimedQoSRootfsOveruseThreshold")
    rootfs_overuse_eviction_supported_qos_levels: tuple[str, ...] | None = field(
        default=None, name="rootfsOveruseEvictionSupportedQoSLevels"
    )
    grace_period: Int64 | None = None


class ReclaimedResourcesEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when requests exceed the node's reclaimed resources. Thresholds are ratios of requests to these resources."""

    eviction_threshold: dict[str, float] | None = None
    soft_eviction_threshold: dict[str, float] | None = None
    grace_period: Count64 | None = None
    threshold_met_tolerance_duration: Count64 | None = None
    """Period in seconds."""


class SystemLoadPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Accepted and ignored; superseded by cpuSystemPressureEvictionConfig."""

    soft_threshold: Int64 | None = None
    hard_threshold: Int64 | None = None
    history_size: Positive64 | None = None
    sync_period: Positive64 | None = None
    cool_down_time: Positive64 | None = None
    grace_period: Int64 | None = None
    threshold_met_percentage: float | None = None


class NetworkEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction when the network card allocated to a pod is unhealthy."""

    enable_nic_network_eviction: bool | None = field(default=None, name="enableNICNetworkEviction")
    nic_unhealthy_tolerance_duration: Duration | None = None
    grace_period: Count64 | None = None


class AdminEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction plugins and dry-run."""

    dry_run: tuple[str, ...] | None = None
    """Plugins in dry-run, by name; `*` means all."""
    cpu_pressure_eviction_config: CPUPressureEvictionConfig | None = None
    cpu_system_pressure_eviction_config: CPUSystemPressureEvictionConfig | None = None
    memory_pressure_eviction_config: MemoryPressureEvictionConfig | None = None
    rootfs_pressure_eviction_config: RootfsPressureEvictionConfig | None = None
    reclaimed_resources_eviction_config: ReclaimedResourcesEvictionConfig | None = None
    system_load_pressure_eviction_config: SystemLoadPressureEvictionConfig | None = None
    network_eviction_config: NetworkEvictionConfig | None = None


class CPUUtilBasedConfig(KatalystStruct, frozen=True, kw_only=True):
    """Headroom by the utilization of reclaimed CPUs, as a share of CPU time."""

    enable: bool | None = None
    target_reclaimed_core_utilization: Share | None = None
    max_reclaimed_core_utilization: Share | None = None
    """Maximum headroom; 0 means no limit."""
    max_oversold_rate: Factor | None = None
    """Maximum headroom per reclaimed CPU."""
    max_headroom_capacity_rate: Factor | None = None
    """Maximum headroom as a share of all CPUs of the node."""
    non_reclaim_utilization_high: Share | None = None
    non_reclaim_utilization_low: Share | None = None


class CPUHeadroomConfig(KatalystStruct, frozen=True, kw_only=True):
    """CPU headroom of a node."""

    util_based_config: CPUUtilBasedConfig | None = None


class MemoryUtilBasedConfig(KatalystStruct, frozen=True, kw_only=True):
    """Headroom by free and reclaimable memory."""

    enable: bool | None = None
    free_based_ratio: Share | None = None
    static_based_capacity: Factor | None = None
    """Amount in bytes."""
    cache_based_ratio: Share | None = None
    max_oversold_rate: Factor | None = None
    request_based_ratio: Share | None = None


class PodRequestLimitAwareConfig(KatalystStruct, frozen=True, kw_only=True):
    """Reserve for growing pods, as shares of the gaps between usage, request and limit."""

    request_used_gap_factor: Factor | None = None
    request_limit_gap_factor: Factor | None = None
    total_limit_gap_factor: Factor | None = None


class MemoryHeadroomConfig(KatalystStruct, frozen=True, kw_only=True):
    """Memory headroom of a node."""

    util_based_config: MemoryUtilBasedConfig | None = None
    pod_request_limit_aware_config: PodRequestLimitAwareConfig | None = None


class ReclaimedResourceConfig(KatalystStruct, frozen=True, kw_only=True):
    """Reclaimed resources: `report` is shown to the scheduler, `allocate` is given to pods."""

    enable_reclaim: bool | None = None
    disable_reclaim_share_pools: tuple[str, ...] | None = None
    """Pools of shared_cores whose resources are not reclaimed."""
    reserved_resource_for_report: ResourceList | None = None
    min_reclaimed_resource_for_report: ResourceList | None = None
    min_ignored_reclaimed_resource_for_report: ResourceList | None = None
    """Smaller amounts are reported as zero."""
    reserved_resource_for_allocate: ResourceList | None = None
    min_reclaimed_resource_for_allocate: ResourceList | None = None
    numa_min_reclaimed_resource_for_allocate: ResourceList | None = None
    numa_min_reclaimed_resource_ratio_for_allocate: ResourceList | None = None
    """Share of a NUMA node's resources."""
    cpu_headroom_config: CPUHeadroomConfig | None = None
    memory_headroom_config: MemoryHeadroomConfig | None = None


class CPUPluginConfig(KatalystStruct, frozen=True, kw_only=True):
    """CPU allocation."""

    prefer_use_exist_numa_hint_result: bool | None = field(default=None, name="preferUseExistNUMAHintResult")
    system_exclusive_pool: dict[str, int] | None = None
    """Number of exclusive CPUs by pool of system_cores."""
    system_exclusive_pool_shrink_min: Positive64 | None = None
    """Minimum number of CPUs that such a pool releases in one step."""
    system_exclusive_pool_shrink_max: Positive64 | None = None
    """Maximum number of CPUs that such a pool releases in one step."""
    system_exclusive_pool_shrink_ratio: Share | None = None
    """Share of its CPUs that such a pool releases in one step."""


class QRMPluginConfig(KatalystStruct, frozen=True, kw_only=True):
    """Resource allocation by QRM plugins."""

    cpu_plugin_config: CPUPluginConfig | None = None


class RegionIndicatorTarget(KatalystStruct, frozen=True, kw_only=True):
    """Target of an indicator."""

    name: str
    target: float


class RegionIndicators(KatalystStruct, frozen=True, kw_only=True):
    """Indicators of regions of one type."""

    region_type: str
    targets: tuple[RegionIndicatorTarget, ...]


class KnobConstraint(KatalystStruct, frozen=True, kw_only=True):
    """Maximum deviation of a control knob from its baseline, in its own unit or as a share of the baseline."""

    name: str
    max_upper_gap: float | None = None
    max_lower_gap: float | None = None
    max_upper_gap_ratio: float | None = None
    max_lower_gap_ratio: float | None = None


class CPUProvisionConfig(KatalystStruct, frozen=True, kw_only=True):
    """CPU provision of regions."""

    region_indicators: tuple[RegionIndicators, ...] | None = None
    constraints: tuple[KnobConstraint, ...] | None = None


class CPUAdvisorConfig(KatalystStruct, frozen=True, kw_only=True):
    """Division of CPUs between online and reclaimed pods."""

    allow_shared_cores_overlap_reclaimed_cores: bool | None = None
    """Share CPUs between online and reclaimed pods; the kernel then schedules reclaimed_cores last."""
    cpu_provision_config: CPUProvisionConfig | None = None


class MemoryGuardConfig(KatalystStruct, frozen=True, kw_only=True):
    """Protects the memory that online pods are about to need from reclaimed_cores."""

    enable: bool | None = None
    critical_watermark_scale_factor: Factor | None = None


class MemoryAdvisorConfig(KatalystStruct, frozen=True, kw_only=True):
    """Division of memory between online and reclaimed pods."""

    memory_guard_config: MemoryGuardConfig | None = None


class AdminAdvisorConfig(KatalystStruct, frozen=True, kw_only=True):
    """Division of resources between online and reclaimed pods."""

    cpu_advisor_config: CPUAdvisorConfig | None = None
    memory_advisor_config: MemoryAdvisorConfig | None = None


class CPUBurstConfig(KatalystStruct, frozen=True, kw_only=True):
    """Default CPU burst of pods that do not set cpu_burst_policy."""

    enable_dedicated_cores_default_cpu_burst: bool | None = field(
        default=None, name="enableDedicatedCoresDefaultCPUBurst"
    )
    enable_shared_cores_default_cpu_burst: bool | None = field(default=None, name="enableSharedCoresDefaultCPUBurst")
    default_cpu_burst_percent: Annotated[Percent, schema_keywords(format="int64")] | None = field(
        default=None, name="defaultCPUBurstPercent"
    )


class CPUWeightOverride(KatalystStruct, frozen=True, kw_only=True):
    """Pods whose CPU weight is overridden."""

    name: str
    pod_selector: str
    pod_cpu_demand: Positive64 = field(name="podCPUDemand")
    """Number of CPUs whose weight the pods get."""


class CPUWeightRestore(KatalystStruct, frozen=True, kw_only=True):
    """Pods whose CPU weight is restored to that of their requests."""

    name: str
    pod_selector: str


class CPUWeightConfig(KatalystStruct, frozen=True, kw_only=True):
    """CPU weights that differ from the requests."""

    override_rules: tuple[CPUWeightOverride, ...] | None = None
    restore_rules: tuple[CPUWeightRestore, ...] | None = None


class FineGrainedResourceConfig(KatalystStruct, frozen=True, kw_only=True):
    """Resource usage of single pods."""

    cpu_burst_config: CPUBurstConfig | None = None
    cpu_weight_config: CPUWeightConfig | None = None


class AdminQoSConfig(KatalystStruct, frozen=True, kw_only=True):
    """Eviction, reclaiming, advisor, QRM plugins and fine-grained resources."""

    reclaimed_resource_config: ReclaimedResourceConfig | None = None
    advisor_config: AdminAdvisorConfig | None = None
    qrm_plugin_config: QRMPluginConfig | None = None
    fine_grained_resource_config: FineGrainedResourceConfig | None = None
    eviction_config: AdminEvictionConfig | None = None


class AdminQoSConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Nodes with this QoS configuration, and its parameters."""

    config: AdminQoSConfig


class AdminQoSConfiguration(ConfigResource, frozen=True, kw_only=True):
    """QoS configuration of nodes: how idle resources are reclaimed for reclaimed_cores and returned."""

    spec: AdminQoSConfigurationSpec | None = None
