"""The kinds that the controllers read, as far as they read them. Lists that are written back keep entries as they came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.pods import RECLAIMED_CPU, RECLAIMED_MEMORY
from kube.objects import Bare, Dynamic, Resource

LENT = (RECLAIMED_CPU, RECLAIMED_MEMORY)
"""Extended resources of a Node that its agent writes there."""
NODE_GROUP, CONFIG_GROUP = "node.katalyst.kubewharf.io", "config.katalyst.kubewharf.io"


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class Condition(_Struct, frozen=True, kw_only=True):
    """Of a pod or a configuration."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodSpec(_Struct, frozen=True, kw_only=True):
    node_name: str = ""


class PodStatus(_Struct, frozen=True, kw_only=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()


class Pod(Bare, frozen=True, kw_only=True):
    """A pod, as far as its health and its leave go."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def ready(self) -> bool:
        return self.metadata.deletion_timestamp is None and any(
            condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions
        )


class NodeSpec(_Struct, frozen=True, kw_only=True):
    taints: tuple[Mapping[str, Any], ...] = ()


class NodeStatus(_Struct, frozen=True, kw_only=True):
    capacity: Mapping[str, Any] = {}
    allocatable: Mapping[str, Any] = {}


class Node(Bare, frozen=True, kw_only=True):
    """A node, as far as schedulers go by what is written there."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def lent(self) -> tuple[str, ...]:
        """Resources for reclaimed pods that it promises, of which there may be none left."""
        return tuple(name for name in LENT if name in self.status.capacity or name in self.status.allocatable)


class CnrSpec(_Struct, frozen=True, kw_only=True):
    taints: tuple[Mapping[str, Any], ...] = ()


class Cnr(Bare, frozen=True, kw_only=True):
    """CustomNodeResource."""

    spec: CnrSpec = CnrSpec()


class CncStatus(_Struct, frozen=True, kw_only=True):
    katalyst_custom_config_list: tuple[Mapping[str, Any], ...] = ()


class Cnc(Bare, frozen=True, kw_only=True):
    """CustomNodeConfig: which configuration a node is to have."""

    status: CncStatus = CncStatus()


class Gvr(_Struct, frozen=True, kw_only=True, order=True):
    """Which kind a KatalystCustomConfig is about."""

    group: str
    version: str
    resource: str

    @property
    def name(self) -> str:
        return f"{self.resource}.{self.version}.{self.group}"


class KeyList(_Struct, frozen=True, kw_only=True):
    """Labels that selectors of one priority may use."""

    priority: int
    key_list: tuple[str, ...] = ()


class KccSpec(_Struct, frozen=True, kw_only=True):
    target_type: Gvr
    node_label_selector_allowed_key_list: tuple[KeyList, ...] = ()


class KccStatus(_Struct, frozen=True, kw_only=True):
    observed_generation: int = 0
    invalid_target_config_list: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()


class Kcc(Bare, frozen=True, kw_only=True):
    """KatalystCustomConfig: that objects of one kind are configuration, and which labels their selectors may use."""

    spec: KccSpec
    status: KccStatus = KccStatus()


NODES = Resource("", "v1", "nodes", "Node", Node)
PODS = Resource("", "v1", "pods", "Pod", Pod, namespaced=True)
CNRS = Resource(NODE_GROUP, "v1alpha1", "customnoderesources", "CustomNodeResource", Cnr)
CNCS = Resource(CONFIG_GROUP, "v1alpha1", "customnodeconfigs", "CustomNodeConfig", Cnc)
KCCS = Resource(CONFIG_GROUP, "v1alpha1", "katalystcustomconfigs", "KatalystCustomConfig", Kcc, namespaced=True)


def targets_of(gvr: Gvr, key: str = "a/b") -> Resource[Dynamic]:
    """The objects of a kind that is known only now; of one of them, its key says whether they are in namespaces."""
    return Resource(gvr.group, gvr.version, gvr.resource, "", Dynamic, namespaced="/" in key)
