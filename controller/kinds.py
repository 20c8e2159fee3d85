"""Kubernetes and Katalyst kinds with the fields that the controllers read.
Lists that are written back keep their entries unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from kube.objects import PartialObjectMetadata, ResourceType, TaintedObject, UnstructuredObject

RECLAIMED_RESOURCES = (RECLAIMED_CPU, RECLAIMED_MEMORY)
"""Extended resources that the agent reports on its Node."""
NODE_GROUP, CONFIG_GROUP = "node.katalyst.kubewharf.io", "config.katalyst.kubewharf.io"
OVERCOMMIT_GROUP = "overcommit.katalyst.kubewharf.io"


class _KindStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class StatusCondition(_KindStruct, frozen=True, kw_only=True):
    """Condition of a pod or a configuration."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class ControllerPodSpec(_KindStruct, frozen=True, kw_only=True):
    node_name: str = ""


class ControllerPodStatus(_KindStruct, frozen=True, kw_only=True):
    phase: str = ""
    conditions: tuple[StatusCondition, ...] = ()


class ControllerPod(PartialObjectMetadata, frozen=True, kw_only=True):
    """Pod, with the fields for its health and its eviction."""

    spec: ControllerPodSpec = ControllerPodSpec()
    status: ControllerPodStatus = ControllerPodStatus()

    @property
    def ready(self) -> bool:
        return self.metadata.deletion_timestamp is None and any(
            condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions
        )


class ControllerNodeStatus(_KindStruct, frozen=True, kw_only=True):
    capacity: Mapping[str, Any] = {}
    allocatable: Mapping[str, Any] = {}


class ControllerNode(TaintedObject, frozen=True, kw_only=True):
    """Node, with the fields that schedulers use."""

    status: ControllerNodeStatus = ControllerNodeStatus()

    @property
    def reclaimed_resources(self) -> tuple[str, ...]:
        """Resources for reclaimed pods that the Node reports, with any amount."""
        return tuple(
            name for name in RECLAIMED_RESOURCES if name in self.status.capacity or name in self.status.allocatable
        )


class CncStatus(_KindStruct, frozen=True, kw_only=True):
    katalyst_custom_config_list: tuple[Mapping[str, Any], ...] = ()


class Cnc(PartialObjectMetadata, frozen=True, kw_only=True):
    """CustomNodeConfig: the configuration objects of a node."""

    status: CncStatus = CncStatus()


class GroupVersionResource(_KindStruct, frozen=True, kw_only=True, order=True):
    """Kind that a KatalystCustomConfig distributes."""

    group: str
    version: str
    resource: str

    @property
    def name(self) -> str:
        return f"{self.resource}.{self.version}.{self.group}"


class PriorityLabelKeys(_KindStruct, frozen=True, kw_only=True):
    """Label keys that selectors of one priority may use."""

    priority: int
    key_list: tuple[str, ...] = ()


class KccSpec(_KindStruct, frozen=True, kw_only=True):
    target_type: GroupVersionResource
    node_label_selector_allowed_key_list: tuple[PriorityLabelKeys, ...] = ()


class KccStatus(_KindStruct, frozen=True, kw_only=True):
    observed_generation: int = 0
    invalid_target_config_list: tuple[str, ...] = ()
    conditions: tuple[StatusCondition, ...] = ()


class Kcc(PartialObjectMetadata, frozen=True, kw_only=True):
    """KatalystCustomConfig: declares a configuration kind and the label keys of its selectors."""

    spec: KccSpec
    status: KccStatus = KccStatus()


class NocSpec(_KindStruct, frozen=True, kw_only=True):
    node_overcommit_selector_val: str = ""
    resource_overcommit_ratio: Mapping[str, str] = {}


class NocStatus(_KindStruct, frozen=True, kw_only=True):
    matched_node_list: tuple[str, ...] = ()


class Noc(PartialObjectMetadata, frozen=True, kw_only=True):
    """NodeOvercommitConfig: ratios of the nodes of one pool."""

    spec: NocSpec = NocSpec()
    status: NocStatus = NocStatus()


NODES = ResourceType("", "v1", "nodes", "Node", ControllerNode)
PODS = ResourceType("", "v1", "pods", "Pod", ControllerPod, namespaced=True)
CNRS = ResourceType(NODE_GROUP, "v1alpha1", "customnoderesources", "CustomNodeResource", TaintedObject)
CNCS = ResourceType(CONFIG_GROUP, "v1alpha1", "customnodeconfigs", "CustomNodeConfig", Cnc)
KCCS = ResourceType(CONFIG_GROUP, "v1alpha1", "katalystcustomconfigs", "KatalystCustomConfig", Kcc, namespaced=True)
NOCS = ResourceType(OVERCOMMIT_GROUP, "v1alpha1", "nodeovercommitconfigs", "NodeOvercommitConfig", Noc)


def target_resource_type(gvr: GroupVersionResource, key: str = "a/b") -> ResourceType[UnstructuredObject]:
    """Resource of a kind that is determined at run time; `key` of an object determines whether it is namespaced."""
    return ResourceType(gvr.group, gvr.version, gvr.resource, "", UnstructuredObject, namespaced="/" in key)
