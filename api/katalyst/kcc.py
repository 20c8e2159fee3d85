"""KatalystCustomConfig, CustomNodeConfig, and the spec and status that all configuration kinds share."""

from __future__ import annotations

from typing import Annotated, Literal

from api.katalyst.meta import (
    CountOrPercent,
    CustomResource,
    Duration,
    Int32,
    Int64,
    KatalystStruct,
    ResourceCondition,
    schema_default,
    schema_keywords,
)


class EphemeralSelector(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that have this configuration temporarily, with precedence over any other."""

    node_names: tuple[str, ...] | None = None
    last_duration: Duration | None = None
    """Time since the object's creation; required with nodeNames."""


class RollingUpdate(KatalystStruct, frozen=True, kw_only=True):
    """Extent of the rollout."""

    canary: CountOrPercent | None = None
    """Nodes, or percentage of the target nodes rounded down, that receive the configuration; all if not set."""


class UpdateStrategy(KatalystStruct, frozen=True, kw_only=True):
    """How nodes change from the previous configuration to this one."""

    type: Literal["RollingUpdate"] | None = None
    rolling_update: RollingUpdate | None = None


class GenericConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Target nodes of a configuration. Without selectors it applies to all nodes that no other configuration targets."""

    revision_history_limit: Annotated[Int64, schema_default(3)] | None = None
    """Accepted and ignored."""
    node_label_selector: str | None = None
    """Label selector in kubectl's notation; its keys must be allowed by the KatalystCustomConfig."""
    priority: Int32 | None = None
    """The highest priority applies if several nodeLabelSelectors match a node."""
    ephemeral_selector: EphemeralSelector | None = None
    paused: bool | None = None
    """Stop the rollout: nodes keep their configuration."""
    update_strategy: UpdateStrategy | None = None


class GenericConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """Progress of the rollout."""

    target_nodes: Int32 | None = None
    """Nodes that this configuration targets."""
    canary_nodes: Int32 | None = None
    """Target nodes that the rollout has reached."""
    updated_target_nodes: Int32 | None = None
    """Target nodes that have this configuration."""
    updated_nodes: Int32 | None = None
    """All nodes that have this configuration, targeted or not."""
    current_hash: str | None = None
    collision_count: Int32 | None = None
    observed_generation: Int64 | None = None
    conditions: tuple[ResourceCondition, ...] | None = None
    """Conditions of type Valid."""


class ConfigResource(CustomResource, frozen=True, kw_only=True):
    """Base of the configuration kinds whose status is the rollout's progress only."""

    status: GenericConfigStatus | None = None


class TargetType(KatalystStruct, frozen=True, kw_only=True):
    """Kind, by its resource name."""

    group: str
    version: str
    resource: str


class AllowedLabelKeys(KatalystStruct, frozen=True, kw_only=True):
    """Label keys that nodeLabelSelector may use in configurations of one priority."""

    priority: Int32
    key_list: tuple[str, ...]


class KatalystCustomConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Kind that is distributed to the nodes."""

    target_type: TargetType
    disable_revision_history: Annotated[bool, schema_keywords(default=True)] | None = None
    """Accepted and ignored."""
    node_label_selector_allowed_key_list: tuple[AllowedLabelKeys, ...] | None = None


class KatalystCustomConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """Whether the kind can be distributed, and its invalid objects."""

    observed_generation: Int64 | None = None
    invalid_target_config_list: tuple[str, ...] | None = None
    """Objects as namespace/name."""
    conditions: tuple[ResourceCondition, ...] | None = None
    """Conditions of type Valid."""


class KatalystCustomConfig(CustomResource, frozen=True, kw_only=True):
    """Declares the objects of one kind to be node configuration, distributed by their selectors."""

    spec: KatalystCustomConfigSpec | None = None
    status: KatalystCustomConfigStatus | None = None


class TargetConfig(KatalystStruct, frozen=True, kw_only=True):
    """Configuration object for a node, which fetches the object again when the hash changes."""

    config_type: TargetType
    config_name: str
    config_namespace: str
    hash: str


class CustomNodeConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Empty."""


class CustomNodeConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """All configuration objects of one node."""

    katalyst_custom_config_list: tuple[TargetConfig, ...] | None = None
    service_profile_config_list: tuple[TargetConfig, ...] | None = None


class CustomNodeConfig(CustomResource, frozen=True, kw_only=True):
    """Configuration objects of one node; it has the node's name and labels."""

    spec: CustomNodeConfigSpec | None = None
    status: CustomNodeConfigStatus | None = None
