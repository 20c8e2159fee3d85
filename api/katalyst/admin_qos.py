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
"""A number, alone, with `%`, or as a whole quantity: `10Gi`."""
INODES_PATTERN = r"^([0-9]+|(0|[1-9][0-9]*)(\.[0-9]+)?%?)$"
Space = Annotated[str, Meta(pattern=SPACE_PATTERN)]
Inodes = Annotated[str, Meta(pattern=INODES_PATTERN)]
NumaRanking = Literal["qos.pod", "priority.pod", "mem.total.numa.container"]
SystemRanking = Literal["qos.pod", "priority.pod", "mem.usage.container", "native.qos.pod", "owner.pod"]


class NumaCPUPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class NumaSysCPUPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class CPUPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class CPUSystemPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class MemoryPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class RootfsPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class ReclaimedResourcesEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Evicts where pods requested more than the node lends by now. Thresholds are requests over what is lent."""

    eviction_threshold: dict[str, float] | None = None
    soft_eviction_threshold: dict[str, float] | None = None
    grace_period: Count64 | None = None
    threshold_met_tolerance_duration: Count64 | None = None
    """In seconds."""


class SystemLoadPressureEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Taken and ignored: cpuSystemPressureEvictionConfig came after it."""

    soft_threshold: Int64 | None = None
    hard_threshold: Int64 | None = None
    history_size: Positive64 | None = None
    sync_period: Positive64 | None = None
    cool_down_time: Positive64 | None = None
    grace_period: Int64 | None = None
    threshold_met_percentage: float | None = None


class NetworkEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
    """Evicts where the network card that a pod was given is not healthy."""

    enable_nic_network_eviction: bool | None = field(default=None, name="enableNICNetworkEviction")
    nic_unhealthy_tolerance_duration: Duration | None = None
    grace_period: Count64 | None = None


class AdminEvictionConfig(KatalystStruct, frozen=True, kw_only=True):
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


class CPUUtilBasedConfig(KatalystStruct, frozen=True, kw_only=True):
    """Lending by how busy the lent CPUs are. Shares are of one CPU's time."""

    enable: bool | None = None
    target_reclaimed_core_utilization: Share | None = None
    max_reclaimed_core_utilization: Share | None = None
    """0 is no limit."""
    max_oversold_rate: Factor | None = None
    """How much of it is promised for each CPU that is lent."""
    max_headroom_capacity_rate: Factor | None = None
    """Of all CPUs of the node, what is promised at most."""
    non_reclaim_utilization_high: Share | None = None
    non_reclaim_utilization_low: Share | None = None


class CPUHeadroomConfig(KatalystStruct, frozen=True, kw_only=True):
    """How much CPU a node promises."""

    util_based_config: CPUUtilBasedConfig | None = None


class MemoryUtilBasedConfig(KatalystStruct, frozen=True, kw_only=True):
    """Lending by how much memory is free or could be."""

    enable: bool | None = None
    free_based_ratio: Share | None = None
    static_based_capacity: Factor | None = None
    """In bytes."""
    cache_based_ratio: Share | None = None
    max_oversold_rate: Factor | None = None
    request_based_ratio: Share | None = None


class PodRequestLimitAwareConfig(KatalystStruct, frozen=True, kw_only=True):
    """What is kept for the growth of pods, as parts of the gaps between what they use, request and may use."""

    request_used_gap_factor: Factor | None = None
    request_limit_gap_factor: Factor | None = None
    total_limit_gap_factor: Factor | None = None


class MemoryHeadroomConfig(KatalystStruct, frozen=True, kw_only=True):
    """How much memory a node promises."""

    util_based_config: MemoryUtilBasedConfig | None = None
    pod_request_limit_aware_config: PodRequestLimitAwareConfig | None = None


class ReclaimedResourceConfig(KatalystStruct, frozen=True, kw_only=True):
    """What a node lends: `report` is what the scheduler is told, `allocate` is what pods get."""

    enable_reclaim: bool | None = None
    disable_reclaim_share_pools: tuple[str, ...] | None = None
    """Pools of shared_cores that lend nothing."""
    reserved_resource_for_report: ResourceList | None = None
    min_reclaimed_resource_for_report: ResourceList | None = None
    min_ignored_reclaimed_resource_for_report: ResourceList | None = None
    """Less than this is reported as nothing."""
    reserved_resource_for_allocate: ResourceList | None = None
    min_reclaimed_resource_for_allocate: ResourceList | None = None
    numa_min_reclaimed_resource_for_allocate: ResourceList | None = None
    numa_min_reclaimed_resource_ratio_for_allocate: ResourceList | None = None
    """Of what a NUMA node has."""
    cpu_headroom_config: CPUHeadroomConfig | None = None
    memory_headroom_config: MemoryHeadroomConfig | None = None


class CPUPluginConfig(KatalystStruct, frozen=True, kw_only=True):
    """How CPUs are given out."""

    prefer_use_exist_numa_hint_result: bool | None = field(default=None, name="preferUseExistNUMAHintResult")
    system_exclusive_pool: dict[str, int] | None = None
    """Pool of system_cores to how many CPUs it has for itself."""
    system_exclusive_pool_shrink_min: Positive64 | None = None
    """CPUs that such a pool gives back in one step, at least."""
    system_exclusive_pool_shrink_max: Positive64 | None = None
    """And at most."""
    system_exclusive_pool_shrink_ratio: Share | None = None
    """Of its CPUs, what it gives back in one step."""


class QRMPluginConfig(KatalystStruct, frozen=True, kw_only=True):
    """How resources are given out."""

    cpu_plugin_config: CPUPluginConfig | None = None


class RegionIndicatorTarget(KatalystStruct, frozen=True, kw_only=True):
    """What an indicator is to be kept at."""

    name: str
    target: float


class RegionIndicators(KatalystStruct, frozen=True, kw_only=True):
    """What regions of one type are judged by."""

    region_type: str
    targets: tuple[RegionIndicatorTarget, ...]


class KnobConstraint(KatalystStruct, frozen=True, kw_only=True):
    """How far a control knob may go from its baseline, in its own unit or as a part of the baseline."""

    name: str
    max_upper_gap: float | None = None
    max_lower_gap: float | None = None
    max_upper_gap_ratio: float | None = None
    max_lower_gap_ratio: float | None = None


class CPUProvisionConfig(KatalystStruct, frozen=True, kw_only=True):
    """How many CPUs regions get."""

    region_indicators: tuple[RegionIndicators, ...] | None = None
    constraints: tuple[KnobConstraint, ...] | None = None


class CPUAdvisorConfig(KatalystStruct, frozen=True, kw_only=True):
    """How CPU is divided between what pays and what borrows."""

    allow_shared_cores_overlap_reclaimed_cores: bool | None = None
    """Both may run on the same CPUs, and the kernel puts reclaimed_cores last."""
    cpu_provision_config: CPUProvisionConfig | None = None


class MemoryGuardConfig(KatalystStruct, frozen=True, kw_only=True):
    """Keeps reclaimed_cores from taking the memory that the rest is about to need."""

    enable: bool | None = None
    critical_watermark_scale_factor: Factor | None = None


class MemoryAdvisorConfig(KatalystStruct, frozen=True, kw_only=True):
    """How memory is divided between what pays and what borrows."""

    memory_guard_config: MemoryGuardConfig | None = None


class AdminAdvisorConfig(KatalystStruct, frozen=True, kw_only=True):
    """How resources are divided between what pays and what borrows."""

    cpu_advisor_config: CPUAdvisorConfig | None = None
    memory_advisor_config: MemoryAdvisorConfig | None = None


class CPUBurstConfig(KatalystStruct, frozen=True, kw_only=True):
    """Whether pods that say nothing about it may save up CPU time."""

    enable_dedicated_cores_default_cpu_burst: bool | None = field(
        default=None, name="enableDedicatedCoresDefaultCPUBurst"
    )
    enable_shared_cores_default_cpu_burst: bool | None = field(default=None, name="enableSharedCoresDefaultCPUBurst")
    default_cpu_burst_percent: Annotated[Percent, schema_keywords(format="int64")] | None = field(
        default=None, name="defaultCPUBurstPercent"
    )


class CPUWeightOverride(KatalystStruct, frozen=True, kw_only=True):
    """Pods whose share of CPU is set."""

    name: str
    pod_selector: str
    pod_cpu_demand: Positive64 = field(name="podCPUDemand")
    """They get the weight of a pod that requests so many CPUs."""


class CPUWeightRestore(KatalystStruct, frozen=True, kw_only=True):
    """Pods whose share of CPU is what they requested again."""

    name: str
    pod_selector: str


class CPUWeightConfig(KatalystStruct, frozen=True, kw_only=True):
    """Shares of CPU that are not by request."""

    override_rules: tuple[CPUWeightOverride, ...] | None = None
    restore_rules: tuple[CPUWeightRestore, ...] | None = None


class FineGrainedResourceConfig(KatalystStruct, frozen=True, kw_only=True):
    """How single pods use what they have."""

    cpu_burst_config: CPUBurstConfig | None = None
    cpu_weight_config: CPUWeightConfig | None = None


class AdminQoSConfig(KatalystStruct, frozen=True, kw_only=True):
    """How nodes lend, divide, give out and take back."""

    reclaimed_resource_config: ReclaimedResourceConfig | None = None
    advisor_config: AdminAdvisorConfig | None = None
    qrm_plugin_config: QRMPluginConfig | None = None
    fine_grained_resource_config: FineGrainedResourceConfig | None = None
    eviction_config: AdminEvictionConfig | None = None


class AdminQoSConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes lend, and how."""

    config: AdminQoSConfig


class AdminQoSConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes lend idle resources to reclaimed_cores, and take them back."""

    spec: AdminQoSConfigurationSpec | None = None
