"""Explains why reclaimed pods are Pending: no scheduler, too little of a reclaimed resource, or the scheduler's own message.
It compares the requests of the pods with the amounts that each node offers and has left. Both come from the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from agent.sensors.pods.koordinator_labels import BATCH_RESOURCES
from agent.sensors.pods.resource_quantities import MEMORY
from api import VERSION
from api.eviction import TAINT_PREFIX
from api.interfaces import Unavailable
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.quantity import format_bytes, format_count
from cli.fleet.reclaimed_pods import (
    DEFAULT_SCHEDULER,
    OFFERING_NODE_RESOURCE,
    PENDING_POD_RESOURCE,
    RECLAIMED_RESOURCES,
    OfferingCnr,
    OfferingNode,
    PlacedPod,
    list_cnrs,
    list_remedy,
    parse_amount,
)
from kube.client import KubeClient, ListScope
from kube.credentials import ApiAccess
from kube.errors import ApiError, ApiUnreachable

MIN_AGE_S = 10.0
"""A younger pod may be between its creation and the first attempt of its scheduler."""
MAX_NODES, TIMEOUT_S = 3, 10.0
MAX_MESSAGE_CHARS = 300
"""Length of a message that a scheduler or a kubelet has written about a pod."""
_HEADROOM_COLUMN = "column HEADROOM of `kubectl dioptase top` shows the amount of each node"
OFFER_REMEDY = (
    "use profile colocate or `--set agent.extendedResources=true`, and wait two minutes after the start of an agent; "
    f"{_HEADROOM_COLUMN}"
)
CNR_REMEDY = f"use profile colocate, and wait two minutes after the start of an agent; {_HEADROOM_COLUMN}"
BATCH_REMEDY = (
    f"request {RECLAIMED_CPU} and {RECLAIMED_MEMORY} instead: only Koordinator's manager offers batch resources"
)
ROOM_REMEDY = "request less, delete reclaimed pods, or wait: a node offers more when its online pods use less"


class PendingReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group of pods is Pending, and the remedy."""

    pods: tuple[str, ...]
    ok: bool
    """False if waiting does not help: nothing schedules the pods, or no node offers what they request."""
    detail: str
    remedy: str
    since_s: float | None = None
    """Creation of the oldest pod, in seconds since the epoch; None if it is unknown."""


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
        raise Unavailable(str(error), list_remedy(error)) from error
    waiting = [pod for pod in pending.values() if pod.is_pending_reclaimed]
    cnrs = await list_cnrs(client) if any(pod.spec.scheduler_name != DEFAULT_SCHEDULER for pod in waiting) else ()
    # A pod that started between the two requests is in both.
    every = tuple({**pending, **pods.objects}.values())
    return pending_reasons(every, tuple(nodes.objects.values()), now_s, cnrs)


def pending_reasons(
    pods: Sequence[PlacedPod], nodes: Sequence[OfferingNode], now_s: float, cnrs: Sequence[OfferingCnr] = ()
) -> tuple[PendingReason, ...]:
    """Return one reason for each group of pending reclaimed pods with the same reason, those that need action first.
    `pods` are all pods of the cluster that have not ended, `now_s` seconds since the epoch."""
    offers = _offers(pods, nodes, cnrs)
    groups: dict[tuple[bool, str, str], list[PlacedPod]] = {}
    for pod in sorted(pods, key=lambda pod: pod.key):
        if pod.is_pending_reclaimed and (reason := _reason(pod, nodes, offers, now_s)) is not None:
            groups.setdefault(reason, []).append(pod)
    reasons = [
        PendingReason(
            pods=tuple(pod.key for pod in members),
            ok=ok,
            detail=detail,
            remedy=remedy,
            since_s=min((pod.created_s for pod in members if pod.created_s is not None), default=None),
        )
        for (ok, detail, remedy), members in groups.items()
    ]
    return tuple(sorted(reasons, key=lambda reason: (reason.ok, -len(reason.pods), reason.pods)))


def pending_reason_of(pod: str, reasons: Sequence[PendingReason] | Unavailable) -> PendingReason | None:
    """Return the reason of a pod, given by its name or with its namespace; None if it is not known to be Pending."""
    if isinstance(reasons, Unavailable):
        return None
    return next((each for each in reasons for key in each.pods if pod in (key, key.partition("/")[2])), None)


class _Offers(NamedTuple):
    """Free amounts of reclaimed resources by node, counted in the ways of two kinds of schedulers."""

    of_nodes: Mapping[str, Mapping[str, Decimal]]
    """By the allocatable resources of Nodes, as a stock kube-scheduler does."""
    of_cnrs: Mapping[str, Mapping[str, Decimal]]
    """By CustomNodeResources, as a scheduler with Katalyst's plugins or with an extender does; empty if none is known."""

    def for_pod(self, pod: PlacedPod) -> tuple[Mapping[str, Mapping[str, Decimal]], str]:
        """Return the amounts that count for a pod's scheduler, and the remedy if no node offers a resource."""
        if pod.spec.scheduler_name != DEFAULT_SCHEDULER and self.of_cnrs:
            return self.of_cnrs, CNR_REMEDY
        return self.of_nodes, OFFER_REMEDY


def _offers(pods: Iterable[PlacedPod], nodes: Iterable[OfferingNode], cnrs: Iterable[OfferingCnr]) -> _Offers:
    members = tuple(pods)
    return _Offers(
        _free_by_node(members, {node.metadata.name: node.status.allocatable for node in nodes}),
        _free_by_node(members, {cnr.metadata.name: cnr.allocatable for cnr in cnrs}),
    )


def _reason(
    pod: PlacedPod, nodes: Sequence[OfferingNode], offers: _Offers, now_s: float
) -> tuple[bool, str, str] | None:
    """Return whether waiting may help, the reason and the remedy; None if the pod may start at any moment."""
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
    scheduled = pod.scheduled
    if scheduled is None:
        created_s = pod.created_s
        if created_s is not None and now_s - created_s < MIN_AGE_S:
            return None
        return False, f"no scheduler named {pod.spec.scheduler_name} has tried to place it", _scheduler_remedy(pod)
    if scheduled.reason == "SchedulingGated":
        return True, "its scheduling gates are closed", "wait until the owner of the gate, such as a queue, opens it"
    free, offer_remedy = offers.for_pod(pod)
    shortages = list(_shortages(pod, free))
    if shortages:
        requests = pod.reclaimed_requests()
        offered = any(name in amounts for name in requests for amounts in free.values())
        unoffered_remedy = offer_remedy if requests.keys() & {RECLAIMED_CPU, RECLAIMED_MEMORY} else BATCH_REMEDY
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
        return f"{remedy} by `helm upgrade` with `--set scheduler.enabled=true`"
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


def _free_by_node(pods: Iterable[PlacedPod], offers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Decimal]]:
    """Return by node what it offers of each reclaimed resource minus the requests of its pods; at least 0."""
    free = {
        node: {name: parse_amount(allocatable[name]) for name in RECLAIMED_RESOURCES if name in allocatable}
        for node, allocatable in offers.items()
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


def _amount(name: str, size: Decimal) -> str:
    is_memory = name == RECLAIMED_MEMORY or BATCH_RESOURCES.get(name) == MEMORY
    return format_bytes(float(size)) if is_memory else f"{size:.0f}"


def _cut(message: str) -> str:
    # kube-scheduler appends why it preempts no pod, in a text that repeats the reasons.
    text = message.partition(" preemption: ")[0]
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"
