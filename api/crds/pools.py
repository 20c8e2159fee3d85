"""NodeOvercommitConfig and TideNodePool: what whole groups of nodes promise, and whom they are there for."""

from __future__ import annotations

from api.crds.meta import IntOrText, Part, Resource


class NodeOvercommitConfigSpec(Part, frozen=True, kw_only=True):
    """How much more than they have is promised of some nodes."""

    node_overcommit_selector_val: str | None = None
    """Value of the nodes' label katalyst.kubewharf.io/overcommit_node_pool."""
    resource_overcommit_ratio: dict[str, str] | None = None
    """Resource to how many times of it: `cpu: "1.5"`."""


class NodeOvercommitConfigStatus(Part, frozen=True, kw_only=True):
    """Which nodes these are."""

    matched_node_list: tuple[str, ...] | None = None


class NodeOvercommitConfig(Resource, frozen=True, kw_only=True):
    """How much more than they have is promised of the nodes of one pool."""

    spec: NodeOvercommitConfigSpec | None = None
    status: NodeOvercommitConfigStatus | None = None


class Label(Part, frozen=True, kw_only=True):
    """A label of nodes."""

    key: str
    value: str


class TideTaint(Part, frozen=True, kw_only=True):
    """A taint of nodes."""

    key: str
    value: str
    effect: str | None = None


class Reserve(Part, frozen=True, kw_only=True):
    """Nodes that do not change sides, as a number or in percent."""

    online: IntOrText | None = None
    """Rounded up."""
    offline: IntOrText | None = None
    """Rounded down."""


class NodeConfigs(Part, frozen=True, kw_only=True):
    """Which nodes are in the pool, and how they are marked."""

    node_selector: dict[str, str] | None = None
    reserve: Reserve | None = None
    online_label: Label | None = None
    offline_label: Label | None = None
    tide_label: Label | None = None
    """Of nodes that change sides."""


class Watermark(Part, frozen=True, kw_only=True):
    """Taints that make pods leave a node that changes sides."""

    evict_online_pod_taint: TideTaint | None = None
    evict_offline_pod_taint: TideTaint | None = None


class EvictStrategy(Part, frozen=True, kw_only=True):
    """How pods are made to leave a node that changes sides."""

    type: str
    watermark: Watermark | None = None


class TideNodePoolSpec(Part, frozen=True, kw_only=True):
    """Which nodes change sides, and how."""

    node_configs: NodeConfigs
    evict_strategy: EvictStrategy | None = None


class ReserveNodes(Part, frozen=True, kw_only=True):
    """Nodes that do not change sides."""

    online_nodes: tuple[str, ...] | None = None
    offline_nodes: tuple[str, ...] | None = None


class TideNodes(Part, frozen=True, kw_only=True):
    """Nodes that do."""

    nodes: tuple[str, ...] | None = None


class TideNodePoolStatus(Part, frozen=True, kw_only=True):
    """Which node is what."""

    reserve_nodes: ReserveNodes | None = None
    tide_nodes: TideNodes | None = None


class TideNodePool(Resource, frozen=True, kw_only=True):
    """Nodes that serve online work by day and offline work by night."""

    spec: TideNodePoolSpec | None = None
    status: TideNodePoolStatus | None = None
