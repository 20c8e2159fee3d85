"""Pods, CustomNodeResources and PodDisruptionBudgets with the fields that the descheduler reads. Pure.
The copy of all pods in memory has only the scheduler's few fields. Pods with the fields of this module are listed for a hot
node when it is relieved, so that their fields are also current."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.katalyst.ihpa import LabelSelector
from controller.kinds import NODE_GROUP
from controller.scheduler.scheduler_kinds import CnrMetrics, SchedulerCnr, SchedulerCnrStatus, ZonedCnr, ZonedCnrStatus
from kube.objects import KubeMetadata, PartialObjectMetadata, ResourceType, Toleration


class _DeschedulerStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class PodVolume(_DeschedulerStruct, frozen=True, kw_only=True):
    """Volume of a pod, with the sources that bind the pod to its node or to other nodes."""

    host_path: Mapping[str, Any] | None = None
    empty_dir: Mapping[str, Any] | None = None
    persistent_volume_claim: Mapping[str, Any] | None = None
    ephemeral: Mapping[str, Any] | None = None


class ContainerPort(_DeschedulerStruct, frozen=True, kw_only=True):
    host_port: int = 0


class RequestedResources(_DeschedulerStruct, frozen=True, kw_only=True):
    requests: Mapping[str, Any] | None = None
    claims: tuple[Any, ...] | None = None


class MovableContainer(_DeschedulerStruct, frozen=True, kw_only=True):
    name: str = ""
    ports: tuple[ContainerPort, ...] | None = None
    resources: RequestedResources = RequestedResources()


class NodeSelectorRequirement(_DeschedulerStruct, frozen=True, kw_only=True):
    key: str
    operator: str
    values: tuple[str, ...] | None = None


class NodeSelectorTerm(_DeschedulerStruct, frozen=True, kw_only=True):
    match_expressions: tuple[NodeSelectorRequirement, ...] | None = None
    match_fields: tuple[NodeSelectorRequirement, ...] | None = None


class RequiredNodeAffinity(_DeschedulerStruct, frozen=True, kw_only=True):
    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = None


class NodeAffinityRules(_DeschedulerStruct, frozen=True, kw_only=True):
    required: RequiredNodeAffinity | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class PodAffinityRules(_DeschedulerStruct, frozen=True, kw_only=True):
    required: tuple[Any, ...] | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class PodAffinities(_DeschedulerStruct, frozen=True, kw_only=True):
    node_affinity: NodeAffinityRules | None = None
    pod_affinity: PodAffinityRules | None = None
    pod_anti_affinity: PodAffinityRules | None = None


class SpreadConstraint(_DeschedulerStruct, frozen=True, kw_only=True):
    when_unsatisfiable: str = ""


class MovablePodSpec(_DeschedulerStruct, frozen=True, kw_only=True):
    node_name: str = ""
    priority: int = 0
    priority_class_name: str = ""
    node_selector: Mapping[str, str] | None = None
    affinity: PodAffinities | None = None
    tolerations: tuple[Toleration, ...] | None = None
    topology_spread_constraints: tuple[SpreadConstraint, ...] | None = None
    volumes: tuple[PodVolume, ...] | None = None
    containers: tuple[MovableContainer, ...] = ()
    init_containers: tuple[MovableContainer, ...] | None = None
    resource_claims: tuple[Any, ...] | None = None
    host_network: bool = False


class ContainerRestarts(_DeschedulerStruct, frozen=True, kw_only=True):
    restart_count: int = 0


class MovablePodStatus(_DeschedulerStruct, frozen=True, kw_only=True):
    phase: str = ""
    start_time: str | None = None
    container_statuses: tuple[ContainerRestarts, ...] | None = None


class MovablePod(PartialObjectMetadata, frozen=True, kw_only=True):
    """Pod of a hot node, with what decides whether it may be moved, and at which cost."""

    spec: MovablePodSpec = MovablePodSpec()
    status: MovablePodStatus = MovablePodStatus()

    @property
    def key(self) -> str:
        """Namespace and name, `NAMESPACE/NAME`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measured usage of the pods of one QoS level."""

    qos_level: str = msgspec.field(default="", name="QoSLevel")
    generic_usage: Mapping[str, Any] | None = msgspec.field(default=None, name="genericUsage")


class GroupedMetrics(CnrMetrics, frozen=True, kw_only=True):
    group_metric: tuple[GroupUsage, ...] | None = None


class MeasuredCnrStatus(SchedulerCnrStatus, frozen=True, kw_only=True):
    node_metric_status: GroupedMetrics | None = None


class MeasuredCnr(SchedulerCnr, frozen=True, kw_only=True):
    """CustomNodeResource with the usage of each QoS level."""

    status: MeasuredCnrStatus | None = None


class ZonedMeasuredCnrStatus(ZonedCnrStatus, frozen=True, kw_only=True):
    node_metric_status: GroupedMetrics | None = None


class ZonedMeasuredCnr(ZonedCnr, frozen=True, kw_only=True):
    """The same with zones, which only the plugin NodeResourceTopology needs."""

    status: ZonedMeasuredCnrStatus | None = None


class DisruptionBudgetSpec(_DeschedulerStruct, frozen=True, kw_only=True):
    selector: LabelSelector | None = None


class DisruptionBudgetStatus(_DeschedulerStruct, frozen=True, kw_only=True):
    disruptions_allowed: int = 0
    expected_pods: int = 0
    desired_healthy: int = 0


class PodDisruptionBudget(_DeschedulerStruct, frozen=True, kw_only=True):
    """PodDisruptionBudget, with the number of pods that it allows to be evicted now."""

    metadata: KubeMetadata = KubeMetadata()
    spec: DisruptionBudgetSpec = DisruptionBudgetSpec()
    status: DisruptionBudgetStatus = DisruptionBudgetStatus()


MOVABLE_PODS = ResourceType("", "v1", "pods", "Pod", MovablePod, namespaced=True)
MEASURED_CNRS: ResourceType[SchedulerCnr] = ResourceType(
    NODE_GROUP, "v1alpha1", "customnoderesources", "CustomNodeResource", MeasuredCnr
)
ZONED_MEASURED_CNRS: ResourceType[SchedulerCnr] = ResourceType(
    NODE_GROUP, "v1alpha1", "customnoderesources", "CustomNodeResource", ZonedMeasuredCnr
)
BUDGETS = ResourceType(
    "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", PodDisruptionBudget, namespaced=True
)
