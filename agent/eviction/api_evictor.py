"""Evicts pods through the API server: one task per pod requests, retries and polls until the pod is gone.
The cycle only hands a pod over. Each request names the pod's UID (a precondition), so that a new pod of the same
name stays. A refusal by a PodDisruptionBudget (HTTP 429) is retried after the server's Retry-After; it is reported,
never forced.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from agent.eviction.eviction_inputs import DEFAULT_GRACE_S, MAX_GRACE_S, termination_wait_s
from api.eviction import EvictionBlock, EvictionEvent, EvictionEventReason
from api.interfaces import Unavailable
from api.pod import Pod
from api.units import NS_PER_S
from common.backoff import Backoff
from common.supervised_tasks import is_own_cancellation
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType

log = logging.getLogger(__name__)
PODS = ResourceType("", "v1", "pods", "Pod", PartialObjectMetadata, namespaced=True)
MIN_GRACE_S = 1
BUDGET_RETRY_S = 5.0
"""Wait after a budget's refusal without Retry-After, as in Katalyst: the API server updates a budget within seconds."""
REFUSED_RETRY_S = 60.0
"""Wait after a refusal that lasts until an administrator grants the missing permission."""
PERMANENT_STATUSES = frozenset((400, 401, 403, 405, 422))
"""HTTP statuses that an immediate retry would receive again."""
MAX_CONCURRENT_REQUESTS = 10
"""Requests at the same time, as in Katalyst."""
RETRY_BACKOFF = Backoff(first_s=1.0, max_s=30.0)
"""Minimum wait between two requests for one pod."""
POLL_BACKOFF = Backoff(first_s=1.0, max_s=5.0)
"""Wait between two polls of a terminating pod."""
OVERDUE_POLL_INTERVAL_S = 30.0
"""Wait between two polls of a pod that exceeded its deadline."""
MAX_BUSY_TRIES = 3
"""After so many busy responses in a row the pod counts as stuck."""


class MethodResult(StrEnum):
    """The result of one eviction request."""

    REQUESTED = "asked"
    """The pod is terminating, and is polled until it is gone."""
    ABSENT = "gone"
    DONE = "done"
    """The method has done all that it does, whether or not the pod comes back."""
    BLOCKED = "held"
    """The pod stays for now."""


class MethodResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response to one eviction request.

    `block` is the reason why the pod stays; `wait_s` the minimum wait before the next request, None if unspecified.
    """

    result: MethodResult
    block: EvictionBlock | None = None
    text: str = ""
    wait_s: float | None = None


class PodObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a pod that is to be evicted."""

    absent: bool = False
    terminating: bool = False
    """Whether its deletion was requested, by any client."""
    grace_s: float | None = None
    """The grace period of that deletion."""


class EvictionMethod(Protocol):
    """One way to evict a pod; the equivalent of Katalyst's killers. No method raises for an error of the other side."""

    async def evict(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        """Request the eviction once; a grace of None is the pod's own."""

    async def observe(self, pod: Pod) -> PodObservation | None:
        """Return whether the pod exists and is terminating; None if that is not available now."""

    def forget(self, pod: Pod) -> None:
        """Drop the state of earlier requests: the pod is gone, or its eviction was cancelled."""


class EvictionGate(Protocol):
    """Allows or denies evictions, as the budget of the cluster does."""

    async def refusal(self) -> MethodResponse | None:
        """Return why no pod may be evicted now; None if one may, which is counted."""


class ApiEvictionMethod:
    """Evicts by the eviction of policy/v1, which disruption budgets may refuse, or by deletion, which no budget can refuse."""

    def __init__(self, client: KubeClient, form: Literal["eviction", "deletion"]) -> None:
        self._client, self._form = client, form

    async def evict(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        """Request the eviction, as EvictionMethod says."""
        seconds = None if grace_s is None else max(MIN_GRACE_S, math.ceil(grace_s))
        send = self._client.evict if self._form == "eviction" else self._client.delete
        try:
            await send(PODS, pod.key, pod.uid, seconds)
        except ApiError as error:
            if error.conflict:
                # Another pod has the name, or another client wrote at the same time.
                observation = await self.observe(pod)
                if observation is not None and observation.absent:
                    return MethodResponse(result=MethodResult.ABSENT)
            return response_of_error(error, pod)
        except ApiUnreachable as error:
            return _blocked(EvictionBlock.UNREACHABLE, f"the API server does not answer: {error}")
        return MethodResponse(result=MethodResult.REQUESTED)

    def forget(self, pod: Pod) -> None:
        """Do nothing: this method keeps no state."""

    async def observe(self, pod: Pod) -> PodObservation | None:
        """Read the pod's metadata, as EvictionMethod says."""
        try:
            metadata = (await self._client.get(PODS, pod.key)).metadata
        except ApiError as error:
            return PodObservation(absent=True) if error.missing else None
        except ApiUnreachable:
            return None
        if metadata.uid != pod.uid:
            return PodObservation(absent=True)
        grace_s = metadata.deletion_grace_period_seconds
        return PodObservation(
            terminating=bool(metadata.deletion_timestamp), grace_s=None if grace_s is None else float(grace_s)
        )


def response_of_error(error: ApiError, pod: Pod) -> MethodResponse:
    """Return the meaning of an error status of the API server. Pure."""
    if error.missing:
        return MethodResponse(result=MethodResult.ABSENT)
    if error.status == 429 and "DisruptionBudget" in error.causes:
        return _blocked(EvictionBlock.BUDGET, error.message, error.retry_after_s or BUDGET_RETRY_S)
    if error.status in PERMANENT_STATUSES:
        return _blocked(EvictionBlock.REFUSED, f"the API server refuses to evict {pod.key}: {error}", REFUSED_RETRY_S)
    return _blocked(EvictionBlock.BUSY, f"the API server: {error}", error.retry_after_s)


def _blocked(block: EvictionBlock, text: str, wait_s: float | None = None) -> MethodResponse:
    return MethodResponse(result=MethodResult.BLOCKED, block=block, text=text, wait_s=wait_s)


class _PodEviction(msgspec.Struct):
    """The eviction of one pod while it lasts."""

    pod: Pod
    method: EvictionMethod
    grace_s: float | None
    reason: str
    requested_ns: int
    """When the cycle handed the pod over, or when its eviction was accepted."""
    accepted: bool = False
    granted_grace_s: float | None = None
    """The grace period that the API server reports."""
    block: EvictionBlock | None = None
    tries: int = 0
    exceeded: bool = False
    repeat: bool = False
    """Whether to send the request again, because the grace became shorter."""
    granted: bool = False
    """Whether the gate allowed the eviction: repeated requests count once."""
    cancel_reason: str = ""
    """Why the pod need not leave any more. A request that is under way may be answered first."""
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def deadline_s(self) -> float:
        """Seconds after which the pod should be gone. A pod with a grace of hours keeps it, but other pods are evicted in
        its place after MAX_GRACE_S."""
        granted_s = None if self.granted_grace_s is None else min(self.granted_grace_s, MAX_GRACE_S)
        graces = (grace for grace in (self.grace_s, granted_s, DEFAULT_GRACE_S) if grace is not None)
        return termination_wait_s(next(graces))

    @property
    def stuck(self) -> bool:
        if self.accepted:
            return self.exceeded
        busy = self.block is EvictionBlock.BUSY and self.tries >= MAX_BUSY_TRIES
        return busy or self.block in (EvictionBlock.BUDGET, EvictionBlock.REFUSED)


class ApiEvictor:
    """A PodEvictor (agent.eviction.runner) by EvictionMethods, and a HealthReporter.

    Made on the event loop, where its tasks run. `evict`, `cancel`, `outcomes` and the properties may be used from one other
    thread, which is the cycle's: they read copies, and pass changes to the event loop.
    """

    name, form = "evictor", "eviction"
    lost_events = None

    def __init__(
        self, choose: Callable[[Pod], EvictionMethod], *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`choose` returns the method for a pod."""
        self._choose, self._clock = choose, clock
        self._loop = asyncio.get_running_loop()
        self._pending: dict[str, _PodEviction] = {}
        self._events: list[EvictionEvent] = []
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._problem: Unavailable | None = None
        self.gate: EvictionGate | None = None
        """Allows or denies the first request for each pod; None allows all."""

    @property
    def terminating(self) -> frozenset[str]:
        """Pods whose eviction was accepted and that may still exist."""
        return frozenset(key for key, each in self._pending.copy().items() if each.accepted)

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be evicted, or that exceeded their deadline."""
        return frozenset(key for key, each in self._pending.copy().items() if each.stuck)

    @property
    def blocked(self) -> Mapping[str, EvictionBlock]:
        """Pods whose eviction was refused for now, with the reason; a pod whose first request is under way is not included."""
        pending = self._pending.copy().items()
        return {key: each.block for key, each in pending if not each.accepted and each.block is not None}

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Start the eviction of the pod. For a pod under eviction only a shorter grace has an effect."""
        self._run_on_loop(self._evict, pod, grace_s, reason)

    def cancel(self, pod: str, reason: str) -> None:
        """Cancel the eviction of a pod, `namespace/name`, unless it was accepted."""
        self._run_on_loop(self._cancel, pod, reason)

    def retry_gated(self) -> None:
        """Try again at once with all pods that the gate refused. Call it on the event loop."""
        for pending in self._pending.values():
            if pending.block is EvictionBlock.CLUSTER_BUDGET:
                pending.wake.set()

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Return the events since the last call, oldest first."""
        events = self._events.copy()
        del self._events[: len(events)]
        return events

    def problem(self) -> Unavailable | None:
        """Return why evictions fail for another reason than a budget; None if none fails."""
        failing = any(
            each.block not in (None, EvictionBlock.BUDGET)
            for each in self._pending.copy().values()
            if not each.accepted
        )
        return self._problem if failing else None

    def close(self) -> None:
        """End all tasks; pods whose eviction was accepted terminate all the same. Idempotent."""
        for pending in self._pending.values():
            _cancel_task(pending)
        self._pending.clear()

    def _run_on_loop(self, change: Callable[..., None], *arguments: object) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            change(*arguments)
        else:
            self._loop.call_soon_threadsafe(change, *arguments)

    def _evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        now_ns, earlier = self._clock(), self._pending.get(pod.key)
        if earlier is not None and earlier.pod.uid == pod.uid:
            self._shorten_grace(earlier, grace_s, reason, now_ns)
            return
        if earlier is not None:
            # Another pod has the name, so the one under eviction is gone.
            self._finish(earlier, EvictionEventReason.SUCCEEDED, _deletion_message(earlier))
            _cancel_task(earlier)
        pending = _PodEviction(pod=pod, method=self._choose(pod), grace_s=grace_s, reason=reason, requested_ns=now_ns)
        self._pending[pod.key] = pending
        pending.task = self._loop.create_task(self._run(pending))

    def _cancel(self, pod: str, reason: str) -> None:
        pending = self._pending.get(pod)
        if pending is not None and not pending.accepted:
            pending.cancel_reason = reason
            pending.wake.set()

    def _shorten_grace(self, pending: _PodEviction, grace_s: float | None, reason: str, now_ns: int) -> None:
        since_s = (now_ns - pending.requested_ns) / NS_PER_S
        graces = (pending.grace_s, pending.granted_grace_s, DEFAULT_GRACE_S)
        before_s = next(grace for grace in graces if grace is not None)
        if grace_s is not None and (since_s if pending.accepted else 0.0) + grace_s < before_s:
            pending.grace_s, pending.reason, pending.repeat = grace_s, reason, True
            pending.wake.set()
        if not pending.accepted:
            pending.requested_ns, pending.cancel_reason = now_ns, ""

    async def _run(self, pending: _PodEviction) -> None:
        """Evict one pod, from the first request until it is gone."""
        try:
            while True:
                requesting = pending.repeat or not pending.accepted
                wait_s = await (self._request(pending) if requesting else self._poll(pending))
                if self._pending.get(pending.pod.key) is not pending:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(pending.wake.wait(), wait_s)
                pending.wake.clear()
        except (Exception, asyncio.CancelledError) as error:
            if is_own_cancellation(error):
                raise
            log.exception("the eviction of %s failed; the next cycle evaluates the pod again", pending.pod.key)
            message = f"Evict failed: {type(error).__name__}; reason: {pending.reason}"
            self._finish(pending, EvictionEventReason.FAILED, message)

    async def _request(self, pending: _PodEviction) -> float:
        """Request the eviction once; return the seconds until the next step."""
        if pending.tries and not pending.accepted:
            # The response to the last request may have been lost, or another client may have deleted the pod meanwhile.
            observation = await pending.method.observe(pending.pod)
            if observation is not None and observation.absent:
                self._finish(pending, EvictionEventReason.SUCCEEDED, _deletion_message(pending))
                return 0.0
            if observation is not None and observation.terminating:
                pending.granted_grace_s = observation.grace_s
                self._mark_accepted(pending)
                return POLL_BACKOFF.first_s
            if pending.cancel_reason:
                text = f"Cancelled the eviction: {pending.cancel_reason}; reason of the eviction: {pending.reason}"
                self._finish(pending, EvictionEventReason.CANCELLED, text)
                return 0.0
        if self.gate is not None and not pending.granted:
            refusal = await self.gate.refusal()
            if refusal is not None:
                return self._mark_blocked(pending, refusal)
            pending.granted = True
        async with self._request_slots:
            pending.repeat = False
            response = await pending.method.evict(pending.pod, pending.grace_s)
        if response.result is MethodResult.ABSENT:
            self._finish(pending, EvictionEventReason.SUCCEEDED, _deletion_message(pending))
        elif response.result is MethodResult.DONE:
            self._finish(pending, EvictionEventReason.STOPPED, f"{response.text}; reason: {pending.reason}")
        elif response.result is MethodResult.REQUESTED:
            self._mark_accepted(pending)
        elif not pending.accepted:
            return self._mark_blocked(pending, response)
        return POLL_BACKOFF.first_s

    def _mark_accepted(self, pending: _PodEviction) -> None:
        pending.block, pending.tries = None, 0
        if not pending.accepted:
            pending.accepted, pending.requested_ns = True, self._clock()
            message = f"Successfully create eviction; reason: {pending.reason}"
            self._record(pending, EvictionEventReason.CREATED, message)

    def _mark_blocked(self, pending: _PodEviction, response: MethodResponse) -> float:
        assert response.block is not None
        pending.tries += 1
        if response.block is not pending.block:
            pending.block = response.block
            message = f"Evict failed: {response.text}; reason: {pending.reason}"
            self._record(pending, EvictionEventReason.FAILED, message)
        if response.block is not EvictionBlock.BUDGET:
            reason = f"{pending.pod.key} cannot be evicted: {response.text}"
            self._problem = Unavailable(reason, _REMEDIES[response.block])
        # A budget may allow no eviction for hours: the backoff keeps every node from sending a request every few seconds.
        return max(response.wait_s or 0.0, RETRY_BACKOFF.wait_s(pending.tries, random.random()))

    async def _poll(self, pending: _PodEviction) -> float:
        """Poll a terminating pod once; return the seconds until the next step."""
        pending.tries += 1
        observation = await pending.method.observe(pending.pod)
        if observation is not None and observation.absent:
            self._finish(pending, EvictionEventReason.SUCCEEDED, _deletion_message(pending))
            return 0.0
        if observation is not None and observation.grace_s is not None:
            pending.granted_grace_s = observation.grace_s
        since_s = (self._clock() - pending.requested_ns) / NS_PER_S
        # Without an observation it is not known whether the pod still exists.
        if observation is not None and since_s >= pending.deadline_s and not pending.exceeded:
            pending.exceeded = True
            self._record(pending, EvictionEventReason.EXCEEDED, _overdue_message(pending, since_s))
        return OVERDUE_POLL_INTERVAL_S if pending.exceeded else POLL_BACKOFF.wait_s(pending.tries)

    def _finish(self, pending: _PodEviction, reason: EvictionEventReason, text: str) -> None:
        self._record(pending, reason, text)
        pending.method.forget(pending.pod)
        if self._pending.get(pending.pod.key) is pending:
            del self._pending[pending.pod.key]

    def _record(self, pending: _PodEviction, reason: EvictionEventReason, message: str) -> None:
        self._events.append(EvictionEvent(pod=pending.pod.key, reason=reason, message=message, at_ns=self._clock()))


def _deletion_message(pending: _PodEviction) -> str:
    text = "Evicted pod has been deleted physically" if pending.accepted else "The pod is gone without an eviction"
    return f"{text}; reason: {pending.reason}"


def _overdue_message(pending: _PodEviction, since_s: float) -> str:
    if pending.grace_s is None and (pending.granted_grace_s or 0.0) > since_s:
        text = (
            f"The pod still exists {since_s:.0f} s after the eviction, with a grace period of "
            f"{pending.granted_grace_s:.0f} s; other pods are evicted in its place"
        )
    else:
        text = (
            "Container runtime did not kill the pod within specified grace period: "
            f"it still exists {since_s:.0f} s after the eviction"
        )
    return f"{text}; reason: {pending.reason}"


def _cancel_task(pending: _PodEviction) -> None:
    if pending.task is not None:
        pending.task.cancel()


_REMEDIES = {
    EvictionBlock.REFUSED: (
        "give the agent's role create of pods/eviction (or delete of pods), and get of pods "
        "(the chart: --set agent.evictions=true), or disable the eviction plugin in the AdminQoSConfiguration"
    ),
    EvictionBlock.UNREACHABLE: "check that the API server or container runtime runs; the agent tries again",
    EvictionBlock.BUSY: "see the log of the API server or container runtime; the agent tries again",
    EvictionBlock.CLUSTER_BUDGET: "find out why so many pods are evicted, or whether the controller runs (docs/eviction.md)",
}
