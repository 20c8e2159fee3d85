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
    """A way of doing things that is switched on, by its name."""

    name: str
    parameters: dict[str, str] | None = None


class StrategyGroupStatus(GenericConfigStatus, frozen=True, kw_only=True):
    """What is switched on: here, not in the spec."""

    enabled_strategies: tuple[Strategy, ...] | None = None


class StrategyGroup(CustomResource, frozen=True, kw_only=True):
    """Strategies that are switched on together on some nodes."""

    spec: GenericConfigSpec | None = None
    status: StrategyGroupStatus | None = None


class GroupConfig(KatalystStruct, frozen=True, kw_only=True):
    """One group of strategies."""

    enabled_strategies: tuple[Strategy, ...]
    ratio: float
    """The part of the nodes that get it."""


class StrategyGroupConfig(KatalystStruct, frozen=True, kw_only=True):
    """Groups to choose among."""

    group_configs: tuple[GroupConfig, ...] | None = None


class StrategyGroupConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes are divided into groups, and how."""

    config: StrategyGroupConfig


class StrategyGroupConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Divides nodes into groups with different strategies, to compare them."""

    spec: StrategyGroupConfigurationSpec | None = None


class PasswordPair(KatalystStruct, frozen=True, kw_only=True):
    """Somebody who may ask an agent."""

    username: str | None = None
    password: str | None = None


class BasicAuthConfig(KatalystStruct, frozen=True, kw_only=True):
    """Who may ask an agent with name and password."""

    user_password_pairs: tuple[PasswordPair, ...] | None = None


class PolicyRule(KatalystStruct, frozen=True, kw_only=True):
    """What may be asked for."""

    resources: tuple[str, ...] | None = None


class AccessControlPolicy(KatalystStruct, frozen=True, kw_only=True):
    """What one user may ask for."""

    username: str | None = None
    policy_rule: PolicyRule | None = None


class AccessControlConfig(KatalystStruct, frozen=True, kw_only=True):
    """Who may ask for what."""

    access_control_policies: tuple[AccessControlPolicy, ...] | None = None


class AuthConfig(KatalystStruct, frozen=True, kw_only=True):
    """Names, passwords and rights."""

    basic_auth_config: BasicAuthConfig | None = None
    access_control_config: AccessControlConfig | None = None


class AuthConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Whom the agents of which nodes answer."""

    config: AuthConfig | None = None


class AuthConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Who may ask the agents over HTTP."""

    spec: AuthConfigurationSpec | None = None


class PowerManagementConfig(KatalystStruct, frozen=True, kw_only=True):
    """How a node keeps to its power budget."""

    disable_power_advisor: bool | None = None
    disable_power_capping: bool | None = None
    power_reduction_ratio: Annotated[Percent, schema_keywords(format="int32")] | None = None
    """In percent: 10 is a tenth less."""


class PowerManagementConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes keep to a power budget, and how."""

    config: PowerManagementConfig


class PowerManagementConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes keep to their power budgets."""

    spec: PowerManagementConfigurationSpec | None = None


class MemoryBandwidthConfig(KatalystStruct, frozen=True, kw_only=True):
    """How memory bandwidth is divided among control groups of resctrl, which are named without a path."""

    reset_resctrl_only: bool | None = None
    """Put every schemata file back, and do nothing else."""
    ccd_min_mb: Count | None = field(default=None, name="ccdMinMB")
    """MB/s that every group has on each core complex."""
    ccd_max_mb: Count | None = field(default=None, name="ccdMaxMB")
    """MB/s that a group can have at most on each core complex."""
    ccd_cap_kp: float | None = None
    """Gain of the controller that keeps groups at ccdCapGroups; 0 is none."""
    ccd_cap_groups: dict[str, int] | None = None
    """Group to the MB/s on each core complex that it is kept at."""
    cap_limit_percent: Percent | None = None
    """Of what a group is to use, what is written as its limit: it uses a little more than that."""
    local_is_victim: bool | None = None
    """The counter of local bytes counts written victims, and that of all bytes counts reads."""
    no_throttle_groups: tuple[str, ...] | None = None
    extra_group_priorities: dict[str, int] | None = None
    """Group to its weight; who has more is throttled later."""
    group_aware_capacity_percentage: dict[str, int] | None = None
    """Group to how much of the measured capacity counts for it, above 0 and below 100."""


class MemoryBandwidthConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes divide memory bandwidth, and how."""

    config: MemoryBandwidthConfig


class MemoryBandwidthConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes divide memory bandwidth."""

    spec: MemoryBandwidthConfigurationSpec | None = None


class PSIPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Taking back until tasks wait for memory."""

    max_probe: float | None = None
    """Of the memory in use, what is taken back in one step."""
    psi_avg60_threshold: float | None = None


class RefaultPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Taking back until what was taken is read again."""

    max_probe: float | None = None
    """Of the memory in use, what is taken back in one step."""
    reclaim_accuracy_target: float | None = None
    reclaim_scan_efficiency_target: float | None = None


class OffloadingDetail(KatalystStruct, frozen=True, kw_only=True):
    """How memory is taken back."""

    enable_tmo: bool | None = field(default=None, name="enableTMO")
    enable_swap: bool | None = None
    """Also what has no file."""
    interval: Duration | None = None
    """Between two steps, at least."""
    policy_name: str | None = None
    """PSI, Refault or Integrated."""
    psi_policy: PSIPolicy | None = None
    refault_policy: RefaultPolicy | None = None
    max_reclaim_size: Quantity | None = None
    """In one step, at most."""
    reserved_inactive_file: Int64 | None = None
    """Bytes of inactive page cache that stay."""


class QoSLevelOffloading(KatalystStruct, frozen=True, kw_only=True):
    """How it is done for the pods of one level."""

    qos_level: str
    config_detail: OffloadingDetail


class PoolOffloading(KatalystStruct, frozen=True, kw_only=True):
    """How it is done for the pods of one pool."""

    pool_name: str
    config_detail: OffloadingDetail


class CgroupOffloading(KatalystStruct, frozen=True, kw_only=True):
    """How it is done for one cgroup, which need not be a pod's."""

    cgroup_path: str
    """Absolute, with the mount point."""
    config_detail: OffloadingDetail


class SelectorExpression(KatalystStruct, frozen=True, kw_only=True):
    """What a label or annotation has to be."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] | None = None


class BlockConfig(KatalystStruct, frozen=True, kw_only=True):
    """Pods whose memory is left alone."""

    labels: tuple[SelectorExpression, ...] | None = None
    annotations: tuple[SelectorExpression, ...] | None = None


class TransparentMemoryOffloadingConfig(KatalystStruct, frozen=True, kw_only=True):
    """Whose memory is taken back, and how."""

    qos_level_config: Annotated[tuple[QoSLevelOffloading, ...], keyed_by("qosLevel")] | None = None
    pool_name_config: Annotated[tuple[PoolOffloading, ...], keyed_by("poolName")] | None = None
    cgroup_config: Annotated[tuple[CgroupOffloading, ...], keyed_by("cgroupPath")] | None = field(
        default=None, name="CgroupConfig"
    )
    block_config: BlockConfig | None = None


class TransparentMemoryOffloadingSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes take memory back that nobody misses, and how."""

    config: TransparentMemoryOffloadingConfig


class TransparentMemoryOffloadingConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes take memory back that nobody misses."""

    spec: TransparentMemoryOffloadingSpec | None = None
