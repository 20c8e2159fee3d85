"""Kinds of configuration that are handed out as AdminQoSConfiguration is, each of one small matter."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from api.crds.generic import ConfigResource, GenericConfigSpec, GenericConfigStatus
from api.crds.meta import Count, Part, Percent, Resource, schema


class Strategy(Part, frozen=True, kw_only=True):
    """A way of doing things that is switched on, by its name."""

    name: str
    parameters: dict[str, str] | None = None


class StrategyGroupStatus(GenericConfigStatus, frozen=True, kw_only=True):
    """What is switched on: here, not in the spec."""

    enabled_strategies: tuple[Strategy, ...] | None = None


class StrategyGroup(Resource, frozen=True, kw_only=True):
    """Strategies that are switched on together on some nodes."""

    spec: GenericConfigSpec | None = None
    status: StrategyGroupStatus | None = None


class GroupConfig(Part, frozen=True, kw_only=True):
    """One group of strategies."""

    enabled_strategies: tuple[Strategy, ...]
    ratio: float
    """The part of the nodes that get it."""


class StrategyGroupConfig(Part, frozen=True, kw_only=True):
    """Groups to choose among."""

    group_configs: tuple[GroupConfig, ...] | None = None


class StrategyGroupConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes are divided into groups, and how."""

    config: StrategyGroupConfig


class StrategyGroupConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Divides nodes into groups with different strategies, to compare them."""

    spec: StrategyGroupConfigurationSpec | None = None


class PasswordPair(Part, frozen=True, kw_only=True):
    """Somebody who may ask an agent."""

    username: str | None = None
    password: str | None = None


class BasicAuthConfig(Part, frozen=True, kw_only=True):
    """Who may ask an agent with name and password."""

    user_password_pairs: tuple[PasswordPair, ...] | None = None


class PolicyRule(Part, frozen=True, kw_only=True):
    """What may be asked for."""

    resources: tuple[str, ...] | None = None


class AccessControlPolicy(Part, frozen=True, kw_only=True):
    """What one user may ask for."""

    username: str | None = None
    policy_rule: PolicyRule | None = None


class AccessControlConfig(Part, frozen=True, kw_only=True):
    """Who may ask for what."""

    access_control_policies: tuple[AccessControlPolicy, ...] | None = None


class AuthConfig(Part, frozen=True, kw_only=True):
    """Names, passwords and rights."""

    basic_auth_config: BasicAuthConfig | None = None
    access_control_config: AccessControlConfig | None = None


class AuthConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Whom the agents of which nodes answer."""

    config: AuthConfig | None = None


class AuthConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Who may ask the agents over HTTP."""

    spec: AuthConfigurationSpec | None = None


class PowerManagementConfig(Part, frozen=True, kw_only=True):
    """How a node keeps to its power budget."""

    disable_power_advisor: bool | None = None
    disable_power_capping: bool | None = None
    power_reduction_ratio: Annotated[Percent, schema(format="int32")] | None = None
    """In percent: 10 is a tenth less."""


class PowerManagementConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes keep to a power budget, and how."""

    config: PowerManagementConfig


class PowerManagementConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes keep to their power budgets."""

    spec: PowerManagementConfigurationSpec | None = None


class MemoryBandwidthConfig(Part, frozen=True, kw_only=True):
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
