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
    """Nodes that have this configuration for a while, before any other."""

    node_names: tuple[str, ...] | None = None
    last_duration: Duration | None = None
    """Counted from when the object was created; needed with nodeNames, and refused without."""


class RollingUpdate(KatalystStruct, frozen=True, kw_only=True):
    """How many nodes get it first."""

    canary: CountOrPercent | None = None
    """Nodes, or percent of all that it is for, rounded down; all where nothing is said."""


class UpdateStrategy(KatalystStruct, frozen=True, kw_only=True):
    """How nodes come from the previous configuration to this one."""

    type: Literal["RollingUpdate"] | None = None
    rolling_update: RollingUpdate | None = None


class GenericConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Which nodes a configuration is for. With neither selector it is for all that no other one is for."""

    revision_history_limit: Annotated[Int64, schema_default(3)] | None = None
    """Taken and ignored."""
    node_label_selector: str | None = None
    """As kubectl takes it, over the labels of the nodes; keys are those that the KatalystCustomConfig allows."""
    priority: Int32 | None = None
    """Of two whose nodeLabelSelector fits a node the higher one counts."""
    ephemeral_selector: EphemeralSelector | None = None
    paused: bool | None = None
    """Nodes keep what they have."""
    update_strategy: UpdateStrategy | None = None


class GenericConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """How far the roll-out is."""

    target_nodes: Int32 | None = None
    """Nodes that this configuration is for."""
    canary_nodes: Int32 | None = None
    """Those of them that are to have it now."""
    updated_target_nodes: Int32 | None = None
    """Those of them that have it."""
    updated_nodes: Int32 | None = None
    """All nodes that have it, whether it is for them or not."""
    current_hash: str | None = None
    collision_count: Int32 | None = None
    observed_generation: Int64 | None = None
    conditions: tuple[ResourceCondition, ...] | None = None
    """Of type Valid."""


class ConfigResource(CustomResource, frozen=True, kw_only=True):
    """A configuration whose status says no more than how far it is."""

    status: GenericConfigStatus | None = None


class TargetType(KatalystStruct, frozen=True, kw_only=True):
    """A kind, by the name of its resource."""

    group: str
    version: str
    resource: str


class AllowedLabelKeys(KatalystStruct, frozen=True, kw_only=True):
    """Labels that nodeLabelSelector may look at in configurations of one priority."""

    priority: Int32
    key_list: tuple[str, ...]


class KatalystCustomConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Which kind is handed to the nodes."""

    target_type: TargetType
    disable_revision_history: Annotated[bool, schema_keywords(default=True)] | None = None
    """Taken and ignored."""
    node_label_selector_allowed_key_list: tuple[AllowedLabelKeys, ...] | None = None


class KatalystCustomConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """Whether the kind can be handed out, and which of its objects cannot."""

    observed_generation: Int64 | None = None
    invalid_target_config_list: tuple[str, ...] | None = None
    """As namespace/name."""
    conditions: tuple[ResourceCondition, ...] | None = None
    """Of type Valid."""


class KatalystCustomConfig(CustomResource, frozen=True, kw_only=True):
    """Says that the objects of one kind are configuration of nodes, to be handed out by their selectors."""

    spec: KatalystCustomConfigSpec | None = None
    status: KatalystCustomConfigStatus | None = None


class TargetConfig(KatalystStruct, frozen=True, kw_only=True):
    """One object that a node is to obey. It fetches the object again when the hash is another one."""

    config_type: TargetType
    config_name: str
    config_namespace: str
    hash: str


class CustomNodeConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Nothing."""


class CustomNodeConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """Everything that one node is to obey."""

    katalyst_custom_config_list: tuple[TargetConfig, ...] | None = None
    service_profile_config_list: tuple[TargetConfig, ...] | None = None


class CustomNodeConfig(CustomResource, frozen=True, kw_only=True):
    """Which configurations one node obeys; it has the node's name and labels."""

    spec: CustomNodeConfigSpec | None = None
    status: CustomNodeConfigStatus | None = None
