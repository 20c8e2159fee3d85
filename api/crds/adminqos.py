"""AdminQoSConfiguration: what nodes lend, how their advisors and plugins work, and when they evict (adminqos_eviction.py).

Katalyst's names stand on the wire; what is not said leaves what the node itself is configured with.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from api.crds.adminqos_eviction import EvictionConfig
from api.crds.generic import ConfigResource, GenericConfigSpec
from api.crds.meta import Factor, Part, Percent, Positive64, ResourceList, Share, schema


class CPUUtilBasedConfig(Part, frozen=True, kw_only=True):
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


class CPUHeadroomConfig(Part, frozen=True, kw_only=True):
    """How much CPU a node promises."""

    util_based_config: CPUUtilBasedConfig | None = None


class MemoryUtilBasedConfig(Part, frozen=True, kw_only=True):
    """Lending by how much memory is free or could be."""

    enable: bool | None = None
    free_based_ratio: Share | None = None
    static_based_capacity: Factor | None = None
    """In bytes."""
    cache_based_ratio: Share | None = None
    max_oversold_rate: Factor | None = None
    request_based_ratio: Share | None = None


class PodRequestLimitAwareConfig(Part, frozen=True, kw_only=True):
    """What is kept for the growth of pods, as parts of the gaps between what they use, request and may use."""

    request_used_gap_factor: Factor | None = None
    request_limit_gap_factor: Factor | None = None
    total_limit_gap_factor: Factor | None = None


class MemoryHeadroomConfig(Part, frozen=True, kw_only=True):
    """How much memory a node promises."""

    util_based_config: MemoryUtilBasedConfig | None = None
    pod_request_limit_aware_config: PodRequestLimitAwareConfig | None = None


class ReclaimedResourceConfig(Part, frozen=True, kw_only=True):
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


class CPUPluginConfig(Part, frozen=True, kw_only=True):
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


class QRMPluginConfig(Part, frozen=True, kw_only=True):
    """How resources are given out."""

    cpu_plugin_config: CPUPluginConfig | None = None


class IndicatorTarget(Part, frozen=True, kw_only=True):
    """What an indicator is to be kept at."""

    name: str
    target: float


class RegionIndicators(Part, frozen=True, kw_only=True):
    """What regions of one type are judged by."""

    region_type: str
    targets: tuple[IndicatorTarget, ...]


class KnobConstraint(Part, frozen=True, kw_only=True):
    """How far a control knob may go from its baseline, in its own unit or as a part of the baseline."""

    name: str
    max_upper_gap: float | None = None
    max_lower_gap: float | None = None
    max_upper_gap_ratio: float | None = None
    max_lower_gap_ratio: float | None = None


class CPUProvisionConfig(Part, frozen=True, kw_only=True):
    """How many CPUs regions get."""

    region_indicators: tuple[RegionIndicators, ...] | None = None
    constraints: tuple[KnobConstraint, ...] | None = None


class CPUAdvisorConfig(Part, frozen=True, kw_only=True):
    """How CPU is divided between what pays and what borrows."""

    allow_shared_cores_overlap_reclaimed_cores: bool | None = None
    """Both may run on the same CPUs, and the kernel puts reclaimed_cores last."""
    cpu_provision_config: CPUProvisionConfig | None = None


class MemoryGuardConfig(Part, frozen=True, kw_only=True):
    """Keeps reclaimed_cores from taking the memory that the rest is about to need."""

    enable: bool | None = None
    critical_watermark_scale_factor: Factor | None = None


class MemoryAdvisorConfig(Part, frozen=True, kw_only=True):
    """How memory is divided between what pays and what borrows."""

    memory_guard_config: MemoryGuardConfig | None = None


class AdvisorConfig(Part, frozen=True, kw_only=True):
    """How resources are divided between what pays and what borrows."""

    cpu_advisor_config: CPUAdvisorConfig | None = None
    memory_advisor_config: MemoryAdvisorConfig | None = None


class CPUBurstConfig(Part, frozen=True, kw_only=True):
    """Whether pods that say nothing about it may save up CPU time."""

    enable_dedicated_cores_default_cpu_burst: bool | None = field(
        default=None, name="enableDedicatedCoresDefaultCPUBurst"
    )
    enable_shared_cores_default_cpu_burst: bool | None = field(default=None, name="enableSharedCoresDefaultCPUBurst")
    default_cpu_burst_percent: Annotated[Percent, schema(format="int64")] | None = field(
        default=None, name="defaultCPUBurstPercent"
    )


class CPUWeightOverride(Part, frozen=True, kw_only=True):
    """Pods whose share of CPU is set."""

    name: str
    pod_selector: str
    pod_cpu_demand: Positive64 = field(name="podCPUDemand")
    """They get the weight of a pod that requests so many CPUs."""


class CPUWeightRestore(Part, frozen=True, kw_only=True):
    """Pods whose share of CPU is what they requested again."""

    name: str
    pod_selector: str


class CPUWeightConfig(Part, frozen=True, kw_only=True):
    """Shares of CPU that are not by request."""

    override_rules: tuple[CPUWeightOverride, ...] | None = None
    restore_rules: tuple[CPUWeightRestore, ...] | None = None


class FineGrainedResourceConfig(Part, frozen=True, kw_only=True):
    """How single pods use what they have."""

    cpu_burst_config: CPUBurstConfig | None = None
    cpu_weight_config: CPUWeightConfig | None = None


class AdminQoSConfig(Part, frozen=True, kw_only=True):
    """How nodes lend, divide, give out and take back."""

    reclaimed_resource_config: ReclaimedResourceConfig | None = None
    advisor_config: AdvisorConfig | None = None
    qrm_plugin_config: QRMPluginConfig | None = None
    fine_grained_resource_config: FineGrainedResourceConfig | None = None
    eviction_config: EvictionConfig | None = None


class AdminQoSConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes lend, and how."""

    config: AdminQoSConfig


class AdminQoSConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes lend idle resources to reclaimed_cores, and take them back."""

    spec: AdminQoSConfigurationSpec | None = None
