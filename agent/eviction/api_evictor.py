"""Evicts pods through the API server: one task per pod requests, retries and watches until the pod is gone.
The loop only hands a pod over. Each request names the pod's UID (a precondition), so that a new pod of the same
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

from agent.eviction.eviction_inputs import DEFAULT_GRACE_S, MAX_GRACE_S, NS_PER_S, termination_wait_s
from api.decision import Cycle
from api.eviction import EvictionBlock, EvictionEvent, EvictionEventReason
from api.interfaces import ProbeReading, Unavailable
from api.pod import Pod
from common.backoff import Backoff
from common.supervised_tasks import is_own_cancellation
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType

PODS = ResourceType("", "v1", "pods", "Pod", PartialObjectMetadata, namespaced=True)
MIN_GRACE_S = 1
BUDGET_RETRY_S = 5.0
"""Katalyst's pause where the API server names none: a budget is counted anew within seconds."""
REFUSED_RETRY_S = 60.0
"""Until somebody may have given the permission that was missing."""
PERMANENT_STATUSES = frozenset((400, 401, 403, 405, 422))
"""Asked again soon, these are answered the same."""


class MethodResult(StrEnum):
    """What asking led to."""

    ASKED = "asked"
    """It is told to leave, and to be watched until it is gone."""
    GONE = "gone"
    DONE = "done"
    """All that this way does is done, whether or not the pod comes back."""
    HELD = "held"
    """It stays for now."""


class MethodResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Of one try. `held` is why it stays, `wait_s` when to try again at the earliest; None where nobody said."""

    result: MethodResult
    held: EvictionBlock | None = None
    text: str = ""
    wait_s: float | None = None


class PodObservation(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a pod that is to go."""

    gone: bool = False
    told: bool = False
    """Whether somebody has told it to end."""
    grace_s: float | None = None
    """What it was given then."""


class EvictionMethod(Protocol):
    """One way to make a pod leave; Katalyst's killers. Neither method raises for what the other side does."""

    async def ask(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        """Once; `grace_s` None is the pod's own."""

    async def look(self, pod: Pod) -> PodObservation | None:
        """Whether it is there still; None where nobody knows."""

    def forget(self, pod: Pod) -> None:
        """It is gone, or need not leave any more: nothing of what was tried is to be remembered."""


class ApiEvictionMethod:
    """By the eviction of policy/v1, which disruption budgets may refuse, or by deletion, which asks nobody."""

    def __init__(self, client: KubeClient, form: Literal["eviction", "deletion"]) -> None:
        self._client, self._form = client, form

    async def ask(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        """As Way says."""
        seconds = None if grace_s is None else max(MIN_GRACE_S, math.ceil(grace_s))
        send = self._client.evict if self._form == "eviction" else self._client.delete
        try:
            await send(PODS, pod.key, pod.uid, seconds)
        except ApiError as error:
            if error.conflict:
                # Another pod has its name, or somebody else wrote at the same time.
                seen = await self.look(pod)
                if seen is not None and seen.gone:
                    return MethodResponse(result=MethodResult.GONE)
            return response_of_error(error, pod)
        except ApiUnreachable as error:
            return MethodResponse(
                result=MethodResult.HELD,
                held=EvictionBlock.UNREACHABLE,
                text=f"the API server does not answer: {error}",
            )
        return MethodResponse(result=MethodResult.ASKED)

    def forget(self, pod: Pod) -> None:
        """As Way says: nothing is."""

    async def look(self, pod: Pod) -> PodObservation | None:
        """As Way says."""
        try:
            there = (await self._client.get(PODS, pod.key)).metadata
        except ApiError as error:
            return PodObservation(gone=True) if error.missing else None
        except ApiUnreachable:
            return None
        if there.uid != pod.uid:
            return PodObservation(gone=True)
        given = there.deletion_grace_period_seconds
        return PodObservation(told=bool(there.deletion_timestamp), grace_s=None if given is None else float(given))


def response_of_error(error: ApiError, pod: Pod) -> MethodResponse:
    """What a refusal means. Pure."""
    if error.missing:
        return MethodResponse(result=MethodResult.GONE)
    if error.status == 429 and "DisruptionBudget" in error.causes:
        wait_s = error.retry_after_s or BUDGET_RETRY_S
        return MethodResponse(result=MethodResult.HELD, held=EvictionBlock.BUDGET, text=error.message, wait_s=wait_s)
    if error.status in PERMANENT_STATUSES:
        text = f"the API server refuses to have {pod.key} leave: {error}"
        return MethodResponse(result=MethodResult.HELD, held=EvictionBlock.REFUSED, text=text, wait_s=REFUSED_RETRY_S)
    return MethodResponse(
        result=MethodResult.HELD, held=EvictionBlock.BUSY, text=f"the API server: {error}", wait_s=error.retry_after_s
    )


log = logging.getLogger(__name__)
MAX_CONCURRENT_REQUESTS = 10
"""Requests at the same time, as Katalyst has them."""
RETRY_BACKOFF = Backoff(first_s=1.0, max_s=30.0)
"""Between two tries, at least."""
POLL_BACKOFF = Backoff(first_s=1.0, max_s=5.0)
"""Between two looks whether a pod is gone."""
OVERDUE_POLL_INTERVAL_S = 30.0
"""The same of one that should have been long ago."""
MAX_BUSY_TRIES = 3
"""Whoever is too busy so often in a row is taken for one who will not do it."""


class _PodEviction(msgspec.Struct):
    """One pod on its way out."""

    pod: Pod
    way: EvictionMethod
    grace_s: float | None
    reason: str
    asked_ns: int
    """When the loop handed it over, or again."""
    accepted: bool = False
    granted_grace_s: float | None = None
    """The grace that it was really given."""
    held: EvictionBlock | None = None
    tries: int = 0
    exceeded: bool = False
    again: bool = False
    """It is to be asked again: its grace has become shorter."""
    withdrawn: str = ""
    """Why it need not leave any more; a try that is under way may be answered first."""
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def deadline_s(self) -> float:
        """After so many seconds it should be gone, or is not counted on any more: a pod that was given hours has them, and
        meanwhile others leave in its place."""
        told_s = None if self.granted_grace_s is None else min(self.granted_grace_s, MAX_GRACE_S)
        known = (each for each in (self.grace_s, told_s, DEFAULT_GRACE_S) if each is not None)
        return termination_wait_s(next(known))

    @property
    def stuck(self) -> bool:
        if self.accepted:
            return self.exceeded
        busy = self.held is EvictionBlock.BUSY and self.tries >= MAX_BUSY_TRIES
        return busy or self.held in (EvictionBlock.BUDGET, EvictionBlock.REFUSED)


class ApiEvictor:
    """A Killer (agent.eviction.runner), and a source of its own (api.interfaces.Probe) that says whether it can do its work.

    To be used in a running event loop; `choose` says which way goes for a pod.
    """

    name, form = "evicting", "ask"
    lost_events = None

    def __init__(
        self, choose: Callable[[Pod], EvictionMethod], *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._choose, self._clock = choose, clock
        self._pending: dict[str, _PodEviction] = {}
        self._events: list[EvictionEvent] = []
        self._turns = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._trouble: Unavailable | None = None

    @property
    def terminating(self) -> frozenset[str]:
        """Pods that were told to leave and are not known to be gone."""
        return frozenset(key for key, each in self._pending.items() if each.accepted)

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be asked, or were and do not go."""
        return frozenset(key for key, each in self._pending.items() if each.stuck)

    @property
    def held(self) -> Mapping[str, EvictionBlock]:
        """Pods that are not told to leave yet, and why; who is just being asked for the first time is not among them."""
        return {key: each.held for key, each in self._pending.items() if not each.accepted and each.held is not None}

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Have the pod asked to leave. Of the same pod again only a shorter grace counts."""
        now_ns, known = self._clock(), self._pending.get(pod.key)
        if known is not None and known.pod.uid == pod.uid:
            self._renew(known, grace_s, reason, now_ns)
            return
        if known is not None:
            # Another pod has the name, so that the one that was meant is gone.
            self._end(known, EvictionEventReason.SUCCEEDED, _deletion_message(known))
            _cancel_task(known)
        pending = _PodEviction(pod=pod, way=self._choose(pod), grace_s=grace_s, reason=reason, asked_ns=now_ns)
        self._pending[pod.key] = pending
        pending.task = asyncio.create_task(self._carry(pending))

    def withdraw(self, pod: str, why: str) -> None:
        """Leave a pod alone that could not be asked to leave; one that was is past that."""
        pending = self._pending.get(pod)
        if pending is not None and not pending.accepted:
            pending.withdrawn = why
            pending.wake.set()

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def publish(self, finished: Cycle) -> None:
        """Nothing: rounds are told of through the evictor. As the others that run beside the rounds."""

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why pods cannot be asked to leave although no budget keeps them; None where they can, or none has to."""
        failing = any(
            each.held not in (None, EvictionBlock.BUDGET) for each in self._pending.values() if not each.accepted
        )
        return self._trouble if failing else None

    def close(self) -> None:
        """Forget everybody; who was told to leave leaves all the same. Idempotent."""
        for pending in self._pending.values():
            _cancel_task(pending)
        self._pending.clear()

    def _renew(self, known: _PodEviction, grace_s: float | None, reason: str, now_ns: int) -> None:
        since_s = (now_ns - known.asked_ns) / NS_PER_S
        before_s = next(each for each in (known.grace_s, known.granted_grace_s, DEFAULT_GRACE_S) if each is not None)
        if grace_s is not None and (since_s if known.accepted else 0.0) + grace_s < before_s:
            known.grace_s, known.reason, known.again = grace_s, reason, True
            known.wake.set()
        if not known.accepted:
            known.asked_ns, known.withdrawn = now_ns, ""

    async def _carry(self, pending: _PodEviction) -> None:
        """One pod, from the first try until it is gone."""
        try:
            while True:
                asking = pending.again or not pending.accepted
                wait_s = await (self._ask(pending) if asking else self._look(pending))
                if self._pending.get(pending.pod.key) is not pending:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(pending.wake.wait(), wait_s)
                pending.wake.clear()
        except (Exception, asyncio.CancelledError) as error:
            if is_own_cancellation(error):
                raise
            log.exception("the eviction of %s failed; it is judged anew", pending.pod.key)
            self._end(
                pending, EvictionEventReason.FAILED, f"Evict failed: {type(error).__name__}; reason: {pending.reason}"
            )

    async def _ask(self, pending: _PodEviction) -> float:
        """One try, and after how many seconds the next step is due."""
        if pending.tries and not pending.accepted:
            # The answer to the last try may have been lost, and somebody else may have done it meanwhile.
            seen = await pending.way.look(pending.pod)
            if seen is not None and seen.gone:
                self._end(pending, EvictionEventReason.SUCCEEDED, _deletion_message(pending))
                return 0.0
            if seen is not None and seen.told:
                pending.granted_grace_s = seen.grace_s
                self._accepted(pending)
                return POLL_BACKOFF.first_s
            if pending.withdrawn:
                text = f"The pod stays: {pending.withdrawn}; it was to leave because: {pending.reason}"
                self._end(pending, EvictionEventReason.CANCELLED, text)
                return 0.0
        async with self._turns:
            pending.again = False
            answer = await pending.way.ask(pending.pod, pending.grace_s)
        if answer.result is MethodResult.GONE:
            self._end(pending, EvictionEventReason.SUCCEEDED, _deletion_message(pending))
        elif answer.result is MethodResult.DONE:
            self._end(pending, EvictionEventReason.STOPPED, f"{answer.text}; reason: {pending.reason}")
        elif answer.result is MethodResult.ASKED:
            self._accepted(pending)
        elif not pending.accepted:
            return self._held(pending, answer)
        return POLL_BACKOFF.first_s

    def _accepted(self, pending: _PodEviction) -> None:
        pending.held, pending.tries = None, 0
        if not pending.accepted:
            pending.accepted, pending.asked_ns = True, self._clock()
            self._tell(pending, EvictionEventReason.CREATED, f"Successfully create eviction; reason: {pending.reason}")

    def _held(self, pending: _PodEviction, answer: MethodResponse) -> float:
        assert answer.held is not None
        pending.tries += 1
        if answer.held is not pending.held:
            pending.held = answer.held
            self._tell(pending, EvictionEventReason.FAILED, f"Evict failed: {answer.text}; reason: {pending.reason}")
        if answer.held is not EvictionBlock.BUDGET:
            self._trouble = Unavailable(f"{pending.pod.key} has to leave: {answer.text}", _REMEDIES[answer.held])
        # A budget that allows nothing for hours is not asked every few seconds, by every node.
        return max(answer.wait_s or 0.0, RETRY_BACKOFF.wait_s(pending.tries, random.random()))

    async def _look(self, pending: _PodEviction) -> float:
        pending.tries += 1
        seen = await pending.way.look(pending.pod)
        if seen is not None and seen.gone:
            self._end(pending, EvictionEventReason.SUCCEEDED, _deletion_message(pending))
            return 0.0
        if seen is not None and seen.grace_s is not None:
            pending.granted_grace_s = seen.grace_s
        since_s = (self._clock() - pending.asked_ns) / NS_PER_S
        # Where nobody answers nobody knows that it is late.
        if seen is not None and since_s >= pending.deadline_s and not pending.exceeded:
            pending.exceeded = True
            text = f"Container runtime did not kill the pod within specified grace period: it is there {since_s:.0f} s later"
            if pending.grace_s is None and (pending.granted_grace_s or 0.0) > since_s:
                text = f"The pod was given {pending.granted_grace_s:.0f} s and is there {since_s:.0f} s later: others leave in its place"
            self._tell(pending, EvictionEventReason.EXCEEDED, f"{text}; reason: {pending.reason}")
        return OVERDUE_POLL_INTERVAL_S if pending.exceeded else POLL_BACKOFF.wait_s(pending.tries)

    def _end(self, pending: _PodEviction, reason: EvictionEventReason, text: str) -> None:
        self._tell(pending, reason, text)
        pending.way.forget(pending.pod)
        if self._pending.get(pending.pod.key) is pending:
            del self._pending[pending.pod.key]

    def _tell(self, pending: _PodEviction, reason: EvictionEventReason, message: str) -> None:
        self._events.append(EvictionEvent(pod=pending.pod.key, reason=reason, message=message, at_ns=self._clock()))


def _deletion_message(pending: _PodEviction) -> str:
    done = "Evicted pod has been deleted physically" if pending.accepted else "The pod is gone, and was not asked"
    return f"{done}; reason: {pending.reason}"


def _cancel_task(pending: _PodEviction) -> None:
    if pending.task is not None:
        pending.task.cancel()


_REMEDIES = {
    EvictionBlock.REFUSED: "give the agent's role create of pods/eviction (or delete of pods), and get of pods",
    EvictionBlock.UNREACHABLE: "it is tried again; see that whoever is asked runs",
    EvictionBlock.BUSY: "it is tried again; see the log of whoever is asked",
}
