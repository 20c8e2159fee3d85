"""NodeOvercommitConfig and TideNodePool: overcommitment and online/offline roles of groups of nodes."""

from __future__ import annotations

from api.katalyst.meta import CustomResource, IntOrText, KatalystStruct


class NodeOvercommitConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """Overcommitment ratios of the selected nodes."""

    node_overcommit_selector_val: str | None = None
    """Value of the node label katalyst.kubewharf.io/overcommit_node_pool."""
    resource_overcommit_ratio: dict[str, str] | None = None
    """Ratio by resource: `cpu: "1.5"`."""


class NodeOvercommitConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that match."""

    matched_node_list: tuple[str, ...] | None = None


class NodeOvercommitConfig(CustomResource, frozen=True, kw_only=True):
    """Overcommitment ratios of the nodes of one pool."""

    spec: NodeOvercommitConfigSpec | None = None
    status: NodeOvercommitConfigStatus | None = None


class TideLabel(KatalystStruct, frozen=True, kw_only=True):
    """Node label."""

    key: str
    value: str


class TideTaint(KatalystStruct, frozen=True, kw_only=True):
    """Node taint."""

    key: str
    value: str
    effect: str | None = None


class TideReserve(KatalystStruct, frozen=True, kw_only=True):
    """Nodes with a fixed role, as a number or percentage."""

    online: IntOrText | None = None
    """Rounded up."""
    offline: IntOrText | None = None
    """Rounded down."""


class TideNodeConfigs(KatalystStruct, frozen=True, kw_only=True):
    """Nodes of the pool and their labels."""

    node_selector: dict[str, str] | None = None
    reserve: TideReserve | None = None
    online_label: TideLabel | None = None
    offline_label: TideLabel | None = None
    tide_label: TideLabel | None = None
    """Label of nodes that change roles."""


class EvictWatermark(KatalystStruct, frozen=True, kw_only=True):
    """Taints that evict pods from a node that changes roles."""

    evict_online_pod_taint: TideTaint | None = None
    evict_offline_pod_taint: TideTaint | None = None


class EvictStrategy(KatalystStruct, frozen=True, kw_only=True):
    """How pods are evicted from a node that changes roles."""

    type: str
    watermark: EvictWatermark | None = None


class TideNodePoolSpec(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that change roles, and how."""

    node_configs: TideNodeConfigs
    evict_strategy: EvictStrategy | None = None


class ReserveNodes(KatalystStruct, frozen=True, kw_only=True):
    """Nodes with a fixed role."""

    online_nodes: tuple[str, ...] | None = None
    offline_nodes: tuple[str, ...] | None = None


class TideNodes(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that change roles."""

    nodes: tuple[str, ...] | None = None


class TideNodePoolStatus(KatalystStruct, frozen=True, kw_only=True):
    """Role of each node."""

    reserve_nodes: ReserveNodes | None = None
    tide_nodes: TideNodes | None = None


class TideNodePool(CustomResource, frozen=True, kw_only=True):
    """Nodes that alternate between online and offline work, for example by day and night."""

    spec: TideNodePoolSpec | None = None
    status: TideNodePoolStatus | None = None
