"""Smaller configuration kinds: strategy groups, authentication, power, memory bandwidth and memory offloading."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from api.katalyst.kcc import ConfigResource, GenericConfigSpec, GenericConfigStatus
from api.katalyst.meta import (
    Count,
    CustomResource,
    Duration,
    Int64,
    KatalystStruct,
    Percent,
    Quantity,
    keyed_by,
    schema_keywords,
)


class Strategy(KatalystStruct, frozen=True, kw_only=True):
    """Enabled strategy, by name."""

    name: str
    parameters: dict[str, str] | None = None


class StrategyGroupStatus(GenericConfigStatus, frozen=True, kw_only=True):
    """Enabled strategies; they are in the status, not in the spec."""

    enabled_strategies: tuple[Strategy, ...] | None = None


class StrategyGroup(CustomResource, frozen=True, kw_only=True):
    """Strategies enabled together on the selected nodes."""

    spec: GenericConfigSpec | None = None
    status: StrategyGroupStatus | None = None


class GroupConfig(KatalystStruct, frozen=True, kw_only=True):
    """Group of strategies."""

    enabled_strategies: tuple[Strategy, ...]
    ratio: float
    """Share of the nodes that receive this group."""


class StrategyGroupConfig(KatalystStruct, frozen=True, kw_only=True):
    """Groups that nodes are assigned to."""

    group_configs: tuple[GroupConfig, ...] | None = None


class StrategyGroupConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Nodes to divide into groups, and the groups."""

    config: StrategyGroupConfig


class StrategyGroupConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Divides nodes into groups with different strategies for comparison."""

    spec: StrategyGroupConfigurationSpec | None = None


class PasswordPair(KatalystStruct, frozen=True, kw_only=True):
    """Credentials of a user of the agents."""

    username: str | None = None
    password: str | None = None


class BasicAuthConfig(KatalystStruct, frozen=True, kw_only=True):
    """Users that may send requests to the agents."""

    user_password_pairs: tuple[PasswordPair, ...] | None = None


class PolicyRule(KatalystStruct, frozen=True, kw_only=True):
    """Resources that may be requested."""

    resources: tuple[str, ...] | None = None


class AccessControlPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Access rights of one user."""

    username: str | None = None
    policy_rule: PolicyRule | None = None


class AccessControlConfig(KatalystStruct, frozen=True, kw_only=True):
    """Access rights of all users."""

    access_control_policies: tuple[AccessControlPolicy, ...] | None = None


class AuthConfig(KatalystStruct, frozen=True, kw_only=True):
    """Users and their access rights."""

    basic_auth_config: BasicAuthConfig | None = None
    access_control_config: AccessControlConfig | None = None


class AuthConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Nodes whose agents apply these access rights."""

    config: AuthConfig | None = None


class AuthConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Users and access rights of the agents' HTTP server."""

    spec: AuthConfigurationSpec | None = None


class PowerManagementConfig(KatalystStruct, frozen=True, kw_only=True):
    """Power capping of a node."""

    disable_power_advisor: bool | None = None
    disable_power_capping: bool | None = None
    power_reduction_ratio: Annotated[Percent, schema_keywords(format="int32")] | None = None
    """Power reduction in percent."""


class PowerManagementConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Nodes with a power budget, and the capping parameters."""

    config: PowerManagementConfig


class PowerManagementConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Power capping of nodes."""

    spec: PowerManagementConfigurationSpec | None = None


class MemoryBandwidthConfig(KatalystStruct, frozen=True, kw_only=True):
    """Division of memory bandwidth among resctrl control groups, which are named without a path."""

    reset_resctrl_only: bool | None = None
    """Reset every schemata file and do nothing else."""
    ccd_min_mb: Count | None = field(default=None, name="ccdMinMB")
    """Guaranteed MB/s of each group on each core complex (CCD)."""
    ccd_max_mb: Count | None = field(default=None, name="ccdMaxMB")
    """Maximum MB/s of each group on each core complex."""
    ccd_cap_kp: float | None = None
    """Gain of the controller that limits ccdCapGroups; 0 disables it."""
    ccd_cap_groups: dict[str, int] | None = None
    """Target MB/s on each core complex, by group."""
    cap_limit_percent: Percent | None = None
    """Written limit in percent of the desired usage, because hardware exceeds the written value slightly."""
    local_is_victim: bool | None = None
    """Whether the counter of local bytes counts victim writes, and that of all bytes counts reads."""
    no_throttle_groups: tuple[str, ...] | None = None
    extra_group_priorities: dict[str, int] | None = None
    """Weight by group; groups with a higher weight are throttled later."""
    group_aware_capacity_percentage: dict[str, int] | None = None
    """Percentage of the measured capacity by group, above 0 and below 100."""


class MemoryBandwidthConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Nodes that divide memory bandwidth, and how."""

    config: MemoryBandwidthConfig


class MemoryBandwidthConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Division of memory bandwidth on nodes."""

    spec: MemoryBandwidthConfigurationSpec | None = None


class PSIPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Offload until tasks stall on memory."""

    max_probe: float | None = None
    """Share of the used memory to reclaim in one step."""
    psi_avg60_threshold: float | None = None


class RefaultPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Offload until reclaimed memory is read again (refaults)."""

    max_probe: float | None = None
    """Share of the used memory to reclaim in one step."""
    reclaim_accuracy_target: float | None = None
    reclaim_scan_efficiency_target: float | None = None


class OffloadingDetail(KatalystStruct, frozen=True, kw_only=True):
    """Parameters of memory offloading."""

    enable_tmo: bool | None = field(default=None, name="enableTMO")
    enable_swap: bool | None = None
    """Also reclaim anonymous memory."""
    interval: Duration | None = None
    """Minimum time between two steps."""
    policy_name: str | None = None
    """PSI, Refault or Integrated."""
    psi_policy: PSIPolicy | None = None
    refault_policy: RefaultPolicy | None = None
    max_reclaim_size: Quantity | None = None
    """Maximum amount to reclaim in one step."""
    reserved_inactive_file: Int64 | None = None
    """Bytes of inactive page cache that are not reclaimed."""


class QoSLevelOffloading(KatalystStruct, frozen=True, kw_only=True):
    """Offloading for the pods of one QoS level."""

    qos_level: str
    config_detail: OffloadingDetail


class PoolOffloading(KatalystStruct, frozen=True, kw_only=True):
    """Offloading for the pods of one pool."""

    pool_name: str
    config_detail: OffloadingDetail


class CgroupOffloading(KatalystStruct, frozen=True, kw_only=True):
    """Offloading for one cgroup, which may belong to no pod."""

    cgroup_path: str
    """Absolute path including the mount point."""
    config_detail: OffloadingDetail


class SelectorExpression(KatalystStruct, frozen=True, kw_only=True):
    """Requirement on a label or annotation."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] | None = None


class BlockConfig(KatalystStruct, frozen=True, kw_only=True):
    """Pods excluded from offloading."""

    labels: tuple[SelectorExpression, ...] | None = None
    annotations: tuple[SelectorExpression, ...] | None = None


class TransparentMemoryOffloadingConfig(KatalystStruct, frozen=True, kw_only=True):
    """Offloading by QoS level, pool and cgroup."""

    qos_level_config: Annotated[tuple[QoSLevelOffloading, ...], keyed_by("qosLevel")] | None = None
    pool_name_config: Annotated[tuple[PoolOffloading, ...], keyed_by("poolName")] | None = None
    cgroup_config: Annotated[tuple[CgroupOffloading, ...], keyed_by("cgroupPath")] | None = field(
        default=None, name="CgroupConfig"
    )
    block_config: BlockConfig | None = None


class TransparentMemoryOffloadingSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Nodes that offload unused memory, and how."""

    config: TransparentMemoryOffloadingConfig


class TransparentMemoryOffloadingConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Offloading of unused memory on nodes."""

    spec: TransparentMemoryOffloadingSpec | None = None
