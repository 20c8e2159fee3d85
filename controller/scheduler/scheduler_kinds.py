"""Nodes and CustomNodeResources with the fields that the scheduler reads, and their resource types. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

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


class SchedulerNodeStatus(_SchedulerStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, Any] = {}


class SchedulerNode(_SchedulerStruct, frozen=True, kw_only=True):
    """Node, with its allocatable resources."""

    metadata: VersionedName = VersionedName()
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

    metadata: VersionedName = VersionedName()
    spec: SchedulerCnrSpec | None = None
    status: SchedulerCnrStatus | None = None


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
SCHEDULER_PODS = ResourceType("", "v1", "pods", "Pod", ScheduledPod, namespaced=True)
