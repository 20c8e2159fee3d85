"""NodeOvercommitConfig and TideNodePool: overcommitment and online/offline roles of groups of nodes."""

from __future__ import annotations

from api.katalyst.meta import CustomResource, IntOrText, KatalystStruct


class NodeOvercommitConfigSpec(KatalystStruct, frozen=True, kw_only=True):
    """How much more than they have is promised of some nodes."""

    node_overcommit_selector_val: str | None = None
    """Value of the nodes' label katalyst.kubewharf.io/overcommit_node_pool."""
    resource_overcommit_ratio: dict[str, str] | None = None
    """Resource to how many times of it: `cpu: "1.5"`."""


class NodeOvercommitConfigStatus(KatalystStruct, frozen=True, kw_only=True):
    """Which nodes these are."""

    matched_node_list: tuple[str, ...] | None = None


class NodeOvercommitConfig(CustomResource, frozen=True, kw_only=True):
    """How much more than they have is promised of the nodes of one pool."""

    spec: NodeOvercommitConfigSpec | None = None
    status: NodeOvercommitConfigStatus | None = None


class TideLabel(KatalystStruct, frozen=True, kw_only=True):
    """A label of nodes."""

    key: str
    value: str


class TideTaint(KatalystStruct, frozen=True, kw_only=True):
    """A taint of nodes."""

    key: str
    value: str
    effect: str | None = None


class TideReserve(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that do not change sides, as a number or in percent."""

    online: IntOrText | None = None
    """Rounded up."""
    offline: IntOrText | None = None
    """Rounded down."""


class TideNodeConfigs(KatalystStruct, frozen=True, kw_only=True):
    """Which nodes are in the pool, and how they are marked."""

    node_selector: dict[str, str] | None = None
    reserve: TideReserve | None = None
    online_label: TideLabel | None = None
    offline_label: TideLabel | None = None
    tide_label: TideLabel | None = None
    """Of nodes that change sides."""


class EvictWatermark(KatalystStruct, frozen=True, kw_only=True):
    """Taints that make pods leave a node that changes sides."""

    evict_online_pod_taint: TideTaint | None = None
    evict_offline_pod_taint: TideTaint | None = None


class EvictStrategy(KatalystStruct, frozen=True, kw_only=True):
    """How pods are made to leave a node that changes sides."""

    type: str
    watermark: EvictWatermark | None = None


class TideNodePoolSpec(KatalystStruct, frozen=True, kw_only=True):
    """Which nodes change sides, and how."""

    node_configs: TideNodeConfigs
    evict_strategy: EvictStrategy | None = None


class ReserveNodes(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that do not change sides."""

    online_nodes: tuple[str, ...] | None = None
    offline_nodes: tuple[str, ...] | None = None


class TideNodes(KatalystStruct, frozen=True, kw_only=True):
    """Nodes that do."""

    nodes: tuple[str, ...] | None = None


class TideNodePoolStatus(KatalystStruct, frozen=True, kw_only=True):
    """Which node is what."""

    reserve_nodes: ReserveNodes | None = None
    tide_nodes: TideNodes | None = None


class TideNodePool(CustomResource, frozen=True, kw_only=True):
    """Nodes that serve online work by day and offline work by night."""

    spec: TideNodePoolSpec | None = None
    status: TideNodePoolStatus | None = None
