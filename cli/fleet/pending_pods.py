"""Explains why reclaimed pods are Pending: no scheduler, too little of a reclaimed resource, or the scheduler's own message.
It compares the requests of the pods with the amounts that each node offers and has left. Both come from the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from http import HTTPStatus

import msgspec

from agent.sensors.pods.koordinator_labels import BATCH_RESOURCES, LEVELS_BY_QOS_CLASS, QOS_CLASS_LABEL
from agent.sensors.pods.resource_quantities import MEMORY
from api import VERSION
from api.eviction import TAINT_PREFIX
from api.interfaces import Unavailable
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QOS_LEVEL_KEY, QoSLevel
from api.quantity import format_bytes, format_count, parse_quantity
from kube.client import KubeClient, ListScope
from kube.credentials import ApiAccess
from kube.errors import ApiError, ApiUnreachable
from kube.objects import KubeMetadata, ResourceType, parse_timestamp

DEFAULT_SCHEDULER = "default-scheduler"
MIN_AGE_S = 10.0
"""A younger pod may be between its creation and the first attempt of its scheduler."""
MAX_NODES, TIMEOUT_S = 3, 10.0
MAX_MESSAGE_CHARS = 300
"""Length of a message that a scheduler or a kubelet has written about a pod."""
RECLAIMED_RESOURCES = (RECLAIMED_CPU, RECLAIMED_MEMORY, *BATCH_RESOURCES)
"""Resources of reclaimed pods. A scheduler compares each by its own name, so that they are not added to each other."""
OFFER_REMEDY = (
    "use profile colocate or `--set agent.extendedResources=true`, and wait two minutes after the start of an agent; "
    "column HEADROOM of `kubectl dioptase top` shows the amount of each node"
)
BATCH_REMEDY = (
    f"request {RECLAIMED_CPU} and {RECLAIMED_MEMORY} in its place: Koordinator's manager alone offers batch resources"
)
ROOM_REMEDY = "request less, delete reclaimed pods, or wait: a node offers more when its online pods use less"
NO_RIGHT = "ask an administrator for the right to list pods and nodes of the cluster"


class _KubeStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class _Requirements(_KubeStruct, frozen=True, kw_only=True):
    requests: Mapping[str, str | int | float] = {}


class _Container(_KubeStruct, frozen=True, kw_only=True):
    resources: _Requirements = _Requirements()
    restart_policy: str = ""

    def requests(self) -> dict[str, Decimal]:
        requests = self.resources.requests
        return {name: _quantity(requests[name]) for name in RECLAIMED_RESOURCES if name in requests}


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
        """Return by name the amounts of reclaimed resources that the pod needs on its node. As the scheduler computes them
        (k8s.io/component-helpers/resource/helpers.go, PodRequests()): init containers run one after another before the
        containers, and those with restart policy Always, sidecars, run beside all that start later."""
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
        return self.status.phase == "Pending" and self.metadata.deletion_timestamp is None and self._is_reclaimed()

    def _is_reclaimed(self) -> bool:
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


class PendingReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group of pods is Pending, and the remedy."""

    pods: tuple[str, ...]
    ok: bool
    """False if waiting does not help: nothing schedules the pods, or no node offers what they request."""
    detail: str
    remedy: str


PENDING_POD_RESOURCE = ResourceType("", "v1", "pods", "Pod", PlacedPod, namespaced=True)
OFFERING_NODE_RESOURCE = ResourceType("", "v1", "nodes", "Node", OfferingNode)


def ask_pending_reasons(access: ApiAccess, now_s: float) -> tuple[PendingReason, ...]:
    """Return `list_pending_reasons` with these credentials. Raises Unavailable."""

    async def run() -> tuple[PendingReason, ...]:
        async with KubeClient(access, f"dioptase-doctor/{VERSION}", TIMEOUT_S) as client:
            return await list_pending_reasons(client, now_s)

    return asyncio.run(run())


async def list_pending_reasons(client: KubeClient, now_s: float) -> tuple[PendingReason, ...]:
    """Return the reasons of the cluster's pending reclaimed pods, by the rights of the user. Raises Unavailable."""
    others = ListScope(fields="status.phase!=Pending,status.phase!=Succeeded,status.phase!=Failed")
    try:
        # Most clusters have no such pod, and listing all pods of 5,000 nodes takes long.
        pending = (await client.list(PENDING_POD_RESOURCE, ListScope(fields="status.phase=Pending"))).objects
        if not any(pod.is_pending_reclaimed for pod in pending.values()):
            return ()
        pods, nodes = await asyncio.gather(
            client.list(PENDING_POD_RESOURCE, others), client.list(OFFERING_NODE_RESOURCE)
        )
    except (ApiError, ApiUnreachable, ValueError) as error:
        forbidden = isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN
        raise Unavailable(str(error), NO_RIGHT if forbidden else "check that `kubectl get pods -A` works") from error
    # A pod that started between the two requests is in both.
    return pending_reasons(tuple({**pending, **pods.objects}.values()), tuple(nodes.objects.values()), now_s)


def pending_reasons(
    pods: Sequence[PlacedPod], nodes: Sequence[OfferingNode], now_s: float
) -> tuple[PendingReason, ...]:
    """Return one reason for each group of pending reclaimed pods with the same reason, those that need action first.
    `pods` are all pods of the cluster that have not ended, `now_s` seconds since the epoch."""
    free = _free_by_node(pods, nodes)
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for pod in sorted(pods, key=lambda pod: pod.key):
        if pod.is_pending_reclaimed and (reason := _reason(pod, nodes, free, now_s)) is not None:
            groups.setdefault(reason, []).append(pod.key)
    reasons = [
        PendingReason(pods=tuple(names), ok=ok, detail=detail, remedy=remedy)
        for (ok, detail, remedy), names in groups.items()
    ]
    return tuple(sorted(reasons, key=lambda reason: (reason.ok, -len(reason.pods), reason.pods)))


def pending_reason_of(pod: str, reasons: Sequence[PendingReason] | Unavailable) -> PendingReason | None:
    """Return the reason of a pod, given by its name or with its namespace; None if it is not known to be Pending."""
    if isinstance(reasons, Unavailable):
        return None
    return next((each for each in reasons for key in each.pods if pod in (key, key.partition("/")[2])), None)


def _reason(
    pod: PlacedPod, nodes: Sequence[OfferingNode], free: Mapping[str, Mapping[str, Decimal]], now_s: float
) -> tuple[bool, str, str] | None:
    """Return whether waiting may help, the reason and the remedy; None while it is too early to say."""
    describe = "run `kubectl describe pod` and read its events"
    if pod.spec.node_name:
        waiting = next((s.state.waiting for s in pod.status.container_statuses if s.state.waiting is not None), None)
        if waiting is None or waiting.reason in ("", "ContainerCreating", "PodInitializing"):
            return None
        return (
            False,
            f"placed on {pod.spec.node_name}, but not started: {waiting.reason} {_cut(waiting.message)}".strip(),
            describe,
        )
    scheduled = next((each for each in pod.status.conditions if each.type == "PodScheduled"), None)
    if scheduled is None:
        created_s = _created_s(pod)
        if created_s is not None and now_s - created_s < MIN_AGE_S:
            return None
        return False, f"no scheduler named {pod.spec.scheduler_name} has tried to place it", _scheduler_remedy(pod)
    if scheduled.reason == "SchedulingGated":
        return True, "its scheduling gates are closed", "wait until the owner of the gate, such as a queue, opens it"
    shortages = list(_shortages(pod, free))
    if shortages:
        requests = pod.reclaimed_requests()
        offered = any(name in amounts for name in requests for amounts in free.values())
        unoffered_remedy = OFFER_REMEDY if requests.keys() & {RECLAIMED_CPU, RECLAIMED_MEMORY} else BATCH_REMEDY
        return offered, "; ".join(shortages), ROOM_REMEDY if offered else unoffered_remedy
    taints = "; ".join(_taint_texts(nodes))
    text = f"its scheduler reports: {_cut(scheduled.message or scheduled.reason)}"
    if taints:
        remedy = (
            f"{taints}: wait, a taint ends five minutes after its cause; `kubectl dioptase explain NODE` shows when"
        )
        return True, text, remedy
    return True, text, describe


KATALYST_SCHEDULER = "katalyst-scheduler"
"""Name of the scheduler that the chart runs with its value `scheduler.enabled`."""


def _scheduler_remedy(pod: PlacedPod) -> str:
    if pod.spec.scheduler_name == DEFAULT_SCHEDULER:
        return "check that kube-scheduler runs: `kubectl -n kube-system get pods,leases`"
    remedy = "remove spec.schedulerName, so that the stock scheduler places the pod, or run a scheduler of that name"
    if pod.spec.scheduler_name == KATALYST_SCHEDULER:
        return f"{remedy}: `helm upgrade` with `--set scheduler.enabled=true` does"
    return remedy


def _shortages(pod: PlacedPod, free: Mapping[str, Mapping[str, Decimal]]) -> Iterator[str]:
    """Yield a sentence for each resource that is short on every node, if no node has enough of all of them."""
    requests = pod.reclaimed_requests()
    if any(all(amounts.get(name, Decimal(0)) >= size for name, size in requests.items()) for amounts in free.values()):
        return
    for name, size in requests.items():
        short = sorted((size - amounts.get(name, Decimal(0)), node) for node, amounts in free.items())
        short = [(by, node) for by, node in short if by > 0]
        if not short:
            continue
        unit = name.partition("/")[2]
        if not any(name in amounts for amounts in free.values()):
            yield f"it requests {_amount(name, size)} of {unit}, which no node offers"
            continue
        listed = ", ".join(
            f"{node} has {_amount(name, free[node].get(name, Decimal(0)))} left, {_amount(name, by)} short"
            for by, node in short[:MAX_NODES]
        )
        more = f", and {format_count(len(short) - MAX_NODES, 'more node')}" if len(short) > MAX_NODES else ""
        yield f"it requests {_amount(name, size)} of {unit}: {listed}{more}"


def _free_by_node(pods: Iterable[PlacedPod], nodes: Iterable[OfferingNode]) -> dict[str, dict[str, Decimal]]:
    """Return by node what it offers of each reclaimed resource minus the requests of its pods; at least 0."""
    free = {
        node.metadata.name: {
            name: _quantity(node.status.allocatable[name])
            for name in RECLAIMED_RESOURCES
            if name in node.status.allocatable
        }
        for node in nodes
    }
    for pod in pods:
        amounts = free.get(pod.spec.node_name, {})
        for name, size in pod.reclaimed_requests().items():
            if name in amounts:
                amounts[name] = max(amounts[name] - size, Decimal(0))
    return free


def _taint_texts(nodes: Iterable[OfferingNode]) -> Iterator[str]:
    for node in sorted(nodes, key=lambda node: node.metadata.name)[:MAX_NODES]:
        for taint in node.spec.taints:
            if taint.key.startswith(TAINT_PREFIX):
                yield f"{node.metadata.name} has the taint {taint.key}:{taint.effect}"


def _quantity(value: str | float) -> Decimal:
    try:
        return parse_quantity(str(value))
    except ValueError:
        return Decimal(0)


def _amount(name: str, size: Decimal) -> str:
    is_memory = name == RECLAIMED_MEMORY or BATCH_RESOURCES.get(name) == MEMORY
    return format_bytes(float(size)) if is_memory else f"{size:.0f}"


def _created_s(pod: PlacedPod) -> float | None:
    """Return when the pod was created; None if that is unknown or no time."""
    try:
        return None if pod.metadata.creation_timestamp is None else parse_timestamp(pod.metadata.creation_timestamp)
    except ValueError:
        return None


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"
