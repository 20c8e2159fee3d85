"""Pods, Nodes and CustomNodeResources of a cluster, with the fields that say what reclaimed pods request, use and are offered.
All come from the API server alone: no agent and no scheduler has to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from decimal import Decimal
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from agent.sensors.pods.koordinator_labels import BATCH_RESOURCES, LEVELS_BY_QOS_CLASS, QOS_CLASS_LABEL
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QOS_LEVEL_KEY, QoSLevel
from api.quantity import convert_quantity
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.objects import KubeMetadata, KubeObject, ResourceType, parse_timestamp

DEFAULT_SCHEDULER = "default-scheduler"
RECLAIMED_RESOURCES = (RECLAIMED_CPU, RECLAIMED_MEMORY, *BATCH_RESOURCES)
"""Resources of reclaimed pods. A scheduler compares each of them by its own name, so they are never added to each other."""
NO_RIGHT = "ask an administrator for the right to list pods, nodes and customnoderesources of the cluster"


class _KubeStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class _Requirements(_KubeStruct, frozen=True, kw_only=True):
    requests: Mapping[str, str | int | float] = {}


class _Container(_KubeStruct, frozen=True, kw_only=True):
    resources: _Requirements = _Requirements()
    restart_policy: str = ""

    def requests(self) -> dict[str, Decimal]:
        requests = self.resources.requests
        return {name: parse_amount(requests[name]) for name in RECLAIMED_RESOURCES if name in requests}


class _PodSpec(_KubeStruct, frozen=True, kw_only=True):
    node_name: str = ""
    scheduler_name: str = DEFAULT_SCHEDULER
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()


class _Condition(_KubeStruct, frozen=True, kw_only=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class _State(_KubeStruct, frozen=True, kw_only=True):
    waiting: _Condition | None = None


class _ContainerStatus(_KubeStruct, frozen=True, kw_only=True):
    state: _State = _State()


class _PodStatus(_KubeStruct, frozen=True, kw_only=True):
    phase: str = ""
    conditions: tuple[_Condition, ...] = ()
    container_statuses: tuple[_ContainerStatus, ...] = ()


class PlacedPod(_KubeStruct, frozen=True, kw_only=True):
    """The parts of a pod that decide where it can be placed."""

    metadata: KubeMetadata = KubeMetadata()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def reclaimed_requests(self) -> dict[str, Decimal]:
        """Return by name the amounts of reclaimed resources that the pod needs on its node, as the scheduler computes them
        (k8s.io/component-helpers/resource/helpers.go, PodRequests()). Init containers run one after another before the
        containers; one with restart policy Always, a sidecar, runs together with all containers that start later."""
        running, peak = dict[str, Decimal](), dict[str, Decimal]()
        for container in self.spec.init_containers:
            needed = _sum_amounts(running, container.requests())
            peak = _max_amounts(peak, needed)
            if container.restart_policy == "Always":
                running = needed
        for container in self.spec.containers:
            running = _sum_amounts(running, container.requests())
        return {name: amount for name, amount in _max_amounts(peak, running).items() if amount > 0}

    @property
    def is_pending_reclaimed(self) -> bool:
        """Whether the pod is reclaimed and none of its containers has started."""
        return self.status.phase == "Pending" and self.metadata.deletion_timestamp is None and self.is_reclaimed

    @property
    def scheduled(self) -> _Condition | None:
        """The condition PodScheduled; None before a scheduler has tried to place the pod."""
        return next((each for each in self.status.conditions if each.type == "PodScheduled"), None)

    @property
    def created_s(self) -> float | None:
        """Time of creation in seconds since the epoch; None if it is unknown or invalid."""
        return parse_time_s(self.metadata.creation_timestamp)

    @property
    def placed_s(self) -> float | None:
        """Time at which the pod got its node, in seconds since the epoch; None if that is unknown."""
        scheduled = self.scheduled
        if not self.spec.node_name or scheduled is None or scheduled.status != "True":
            return None
        return parse_time_s(scheduled.last_transition_time)

    @property
    def is_reclaimed(self) -> bool:
        """Whether the pod is reclaimed, by its QoS level or, without one, by what it requests."""
        requests, level = self.reclaimed_requests(), self.metadata.annotations.get(QOS_LEVEL_KEY)
        if level == QoSLevel.RECLAIMED.value or RECLAIMED_CPU in requests or RECLAIMED_MEMORY in requests:
            return True
        if level is not None:
            return False
        # As the agent translates Koordinator's pods: the label counts, and without it the resources do.
        qos_class = self.metadata.labels.get(QOS_CLASS_LABEL)
        if qos_class is None:
            return bool(requests)
        return LEVELS_BY_QOS_CLASS.get(qos_class) is QoSLevel.RECLAIMED


def _sum_amounts(first: Mapping[str, Decimal], second: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: first.get(name, Decimal(0)) + second.get(name, Decimal(0)) for name in (*first, *second)}


def _max_amounts(first: Mapping[str, Decimal], second: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(first.get(name, Decimal(0)), second.get(name, Decimal(0))) for name in (*first, *second)}


class _Taint(_KubeStruct, frozen=True, kw_only=True):
    key: str = ""
    effect: str = ""


class _NodeSpec(_KubeStruct, frozen=True, kw_only=True):
    taints: tuple[_Taint, ...] = ()


class _NodeStatus(_KubeStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, str] = {}


class OfferingNode(_KubeStruct, frozen=True, kw_only=True):
    """The parts of a Node that decide which pods fit."""

    metadata: KubeMetadata = KubeMetadata()
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


class _Resources(_KubeStruct, frozen=True, kw_only=True):
    allocatable: Mapping[str, Any] | None = None


class _Usage(_KubeStruct, frozen=True, kw_only=True):
    generic_usage: Mapping[str, Any] | None = None


class _GroupUsage(_Usage, frozen=True, kw_only=True):
    qos_level: str = msgspec.field(default="", name="QoSLevel")


class _Metrics(_KubeStruct, frozen=True, kw_only=True):
    update_time: str | None = None
    node_metric: _Usage | None = None
    group_metric: tuple[_GroupUsage, ...] | None = None


class _CnrStatus(_KubeStruct, frozen=True, kw_only=True):
    resources: _Resources | None = None
    node_metric_status: _Metrics | None = None


class OfferingCnr(_KubeStruct, frozen=True, kw_only=True):
    """The fields of a CustomNodeResource with the amounts that reclaimed pods may request and use, and with the harm to online
    pods."""

    metadata: KubeMetadata = KubeMetadata()
    status: _CnrStatus | None = None

    @property
    def allocatable(self) -> Mapping[str, Any]:
        """Reclaimed resources that the node offers, as quantities."""
        resources = None if self.status is None else self.status.resources
        return (None if resources is None else resources.allocatable) or {}

    @property
    def metrics(self) -> _Metrics:
        """Measured usage, and the time of the measurement."""
        return (None if self.status is None else self.status.node_metric_status) or _Metrics()

    @property
    def reclaimed_usage(self) -> Mapping[str, Any]:
        """CPU in cores and memory in bytes that reclaimed pods of the node use, as quantities."""
        groups = self.metrics.group_metric or ()
        level = QoSLevel.RECLAIMED.value
        return next((group.generic_usage or {} for group in groups if group.qos_level == level), {})


PENDING_POD_RESOURCE = ResourceType("", "v1", "pods", "Pod", PlacedPod, namespaced=True)
OFFERING_NODE_RESOURCE = ResourceType("", "v1", "nodes", "Node", OfferingNode)
OFFERING_CNR_RESOURCE = ResourceType(
    "node.katalyst.kubewharf.io", "v1alpha1", "customnoderesources", "CustomNodeResource", OfferingCnr
)
UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
MAX_NODE_LISTS = 16
"""Maximum number of selected nodes for which only their pods are listed; the API server has an index of pods by node."""


class ClusterObjects(msgspec.Struct, frozen=True, kw_only=True):
    """Pods that have not ended, Nodes and CustomNodeResources of a cluster. None stands for a list that failed."""

    pods: tuple[PlacedPod, ...] | None = None
    nodes: tuple[OfferingNode, ...] | None = None
    cnrs: tuple[OfferingCnr, ...] | None = None
    problem: str = ""
    """Why a list failed; of several failures the first."""
    remedy: str = ""


T = TypeVar("T", bound=KubeObject)


async def list_cluster_objects(client: KubeClient, nodes: Sequence[str] | None = None) -> ClusterObjects:
    """List the objects with the rights of the user. Up to MAX_NODE_LISTS `nodes` limit the list of pods to these nodes. If a
    list fails, the others are returned."""
    failures: list[ApiError | ApiUnreachable | ValueError] = []

    async def listed(resource: ResourceType[T], scope: ListScope | None = None) -> tuple[T, ...] | None:
        try:
            return tuple((await client.list(resource, scope)).objects.values())
        except (ApiError, ApiUnreachable, ValueError) as error:
            failures.append(error)
            return None

    async def listed_pods() -> tuple[PlacedPod, ...] | None:
        if nodes is None or len(nodes) > MAX_NODE_LISTS:
            return await listed(PENDING_POD_RESOURCE, ListScope(fields=UNFINISHED))
        scopes = [ListScope(fields=f"spec.nodeName={node},{UNFINISHED}") for node in nodes]
        parts = await asyncio.gather(*(listed(PENDING_POD_RESOURCE, scope) for scope in scopes))
        pods_of_nodes = [part for part in parts if part is not None]
        return tuple(pod for part in pods_of_nodes for pod in part) if len(pods_of_nodes) == len(parts) else None

    pods, offering, cnrs = await asyncio.gather(
        listed_pods(), listed(OFFERING_NODE_RESOURCE), listed(OFFERING_CNR_RESOURCE)
    )
    problem, remedy = (str(failures[0]), list_remedy(failures[0])) if failures else ("", "")
    return ClusterObjects(pods=pods, nodes=offering, cnrs=cnrs, problem=problem, remedy=remedy)


async def list_cnrs(client: KubeClient) -> tuple[OfferingCnr, ...]:
    """Return the CustomNodeResources; none if they cannot be listed, because a cluster may have no such kind."""
    try:
        return tuple((await client.list(OFFERING_CNR_RESOURCE)).objects.values())
    except (ApiError, ApiUnreachable, ValueError):
        return ()


def list_remedy(error: Exception) -> str:
    """Return what to do about a list that failed."""
    if isinstance(error.__cause__, TimeoutError):
        return "raise --request-timeout: listing the pods of a large cluster takes long"
    forbidden = isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN
    return NO_RIGHT if forbidden else "check that `kubectl get pods -A` works"


def parse_amount(value: object) -> Decimal:
    """Return a quantity; 0 if it is invalid, which the API server does not accept."""
    try:
        return convert_quantity(value)
    except ValueError:
        return Decimal(0)


def parse_time_s(text: str | None) -> float | None:
    """Return a timestamp in seconds since the epoch; None if there is none, or if it is invalid."""
    try:
        return None if text is None else parse_timestamp(text)
    except ValueError:
        return None
