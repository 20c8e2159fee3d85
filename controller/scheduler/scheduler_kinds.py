"""Nodes and CustomNodeResources with the fields that the scheduler reads, and their resource types. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.overcommit import CPU_MANAGER_KEY, GUARANTEED_CPUS_KEY, MEMORY_MANAGER_KEY, OVERCOMMIT_KEYS
from controller.kinds import NODE_GROUP
from controller.scheduler.scheduling_pod import ScheduledPod
from kube.objects import ResourceType


class _SchedulerStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class VersionedName(_SchedulerStruct, frozen=True, kw_only=True):
    """Metadata of a cluster-wide object; all that an informer needs of it."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class SchedulerNodeAnnotations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Annotations of a Node that the scheduler reads; all others are dropped while decoding."""

    cpu_ratio: str | None = msgspec.field(default=None, name=OVERCOMMIT_KEYS["cpu"].ratio)
    memory_ratio: str | None = msgspec.field(default=None, name=OVERCOMMIT_KEYS["memory"].ratio)
    realtime_cpu_ratio: str | None = msgspec.field(default=None, name=OVERCOMMIT_KEYS["cpu"].realtime_ratio)
    realtime_memory_ratio: str | None = msgspec.field(default=None, name=OVERCOMMIT_KEYS["memory"].realtime_ratio)
    original_cpu: str | None = msgspec.field(default=None, name=OVERCOMMIT_KEYS["cpu"].original_allocatable)
    original_memory: str | None = msgspec.field(default=None, name=OVERCOMMIT_KEYS["memory"].original_allocatable)


class NodeMetadata(VersionedName, frozen=True, kw_only=True):
    annotations: SchedulerNodeAnnotations = SchedulerNodeAnnotations()


class CnrAnnotations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Annotations of a CustomNodeResource that the scheduler reads."""

    cpu_manager: str = msgspec.field(default="", name=CPU_MANAGER_KEY)
    memory_manager: str = msgspec.field(default="", name=MEMORY_MANAGER_KEY)
    guaranteed_cpus: str = msgspec.field(default="", name=GUARANTEED_CPUS_KEY)


class CnrMetadata(VersionedName, frozen=True, kw_only=True):
    annotations: CnrAnnotations = CnrAnnotations()


class SchedulerNodeStatus(_SchedulerStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, Any] = {}


class SchedulerNode(_SchedulerStruct, frozen=True, kw_only=True):
    """Node, with its allocatable resources."""

    metadata: NodeMetadata = NodeMetadata()
    status: SchedulerNodeStatus = SchedulerNodeStatus()


class CnrTaint(_SchedulerStruct, frozen=True, kw_only=True):
    """Taint of a CustomNodeResource; it applies to pods of one QoS level."""

    key: str = ""
    value: str = ""
    effect: str = ""
    qos_level: str = ""


class SchedulerCnrSpec(_SchedulerStruct, frozen=True, kw_only=True):
    taints: tuple[CnrTaint, ...] | None = None


class CnrResources(_SchedulerStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, Any] | None = None


class CnrNodeUsage(_SchedulerStruct, frozen=True, kw_only=True):
    generic_usage: Mapping[str, Any] | None = None


class CnrMetrics(_SchedulerStruct, frozen=True, kw_only=True):
    update_time: str | None = None
    node_metric: CnrNodeUsage | None = None


class SchedulerCnrStatus(_SchedulerStruct, frozen=True, kw_only=True):
    resources: CnrResources | None = None
    node_metric_status: CnrMetrics | None = None


class SchedulerCnr(_SchedulerStruct, frozen=True, kw_only=True):
    """CustomNodeResource: what reclaimed pods may use, taints, and measured usage."""

    metadata: CnrMetadata = CnrMetadata()
    spec: SchedulerCnrSpec | None = None
    status: SchedulerCnrStatus | None = None


class CnrZoneResources(_SchedulerStruct, frozen=True, kw_only=True):
    capacity: Mapping[str, Any] | None = None
    allocatable: Mapping[str, Any] | None = None


class CnrZoneAllocation(_SchedulerStruct, frozen=True, kw_only=True):
    consumer: str = ""
    requests: Mapping[str, Any] | None = None


class CnrZone(_SchedulerStruct, frozen=True, kw_only=True):
    """Part of a node, such as a socket or a NUMA node, with the parts in it."""

    type: str = ""
    name: str = ""
    resources: CnrZoneResources | None = None
    allocations: tuple[CnrZoneAllocation, ...] | None = None
    children: tuple[CnrZone, ...] | None = None


class ZonedCnrStatus(SchedulerCnrStatus, frozen=True, kw_only=True):
    topology_zone: tuple[CnrZone, ...] | None = None
    topology_policy: str = ""


class ZonedCnr(SchedulerCnr, frozen=True, kw_only=True):
    """CustomNodeResource with its zones. Decoded only if a plugin needs them: they are most of the object."""

    status: ZonedCnrStatus | None = None


class ElasticQuotaSpec(_SchedulerStruct, frozen=True, kw_only=True):
    min: Mapping[str, Any] | None = None
    max: Mapping[str, Any] | None = None


class ElasticQuota(_SchedulerStruct, frozen=True, kw_only=True):
    """Quota of a namespace."""

    metadata: VersionedName = VersionedName()
    spec: ElasticQuotaSpec = ElasticQuotaSpec()


ELASTIC_QUOTAS = ResourceType(
    "scheduling.sigs.k8s.io", "v1alpha1", "elasticquotas", "ElasticQuota", ElasticQuota, namespaced=True
)
SCHEDULER_NODES = ResourceType("", "v1", "nodes", "Node", SchedulerNode)
SCHEDULER_CNRS = ResourceType(NODE_GROUP, "v1alpha1", "customnoderesources", "CustomNodeResource", SchedulerCnr)
ZONED_CNRS: ResourceType[SchedulerCnr] = ResourceType(
    NODE_GROUP, "v1alpha1", "customnoderesources", "CustomNodeResource", ZonedCnr
)
SCHEDULER_PODS = ResourceType("", "v1", "pods", "Pod", ScheduledPod, namespaced=True)
