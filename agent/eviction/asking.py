"""A killer that asks somebody else to make pods leave: the API server, or the container runtime.

The loop only hands a pod over. A task for each asks until it is answered, waits as long as it is told to, and watches the pod
until it is gone. What cannot be asked for now is no secret: it is told once, and shown for as long as it lasts; whether it
still has to leave is for the manager to say (`withdraw`), so that nobody leaves for a trouble that is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from agent.eviction.situation import MOST_GRACE_S, NS_PER_S, USUAL_GRACE_S, wait_s
from agent.eviction.ways import Answer, Fate, Way
from agent.tending import told_to_end
from api.decisions import Round
from api.evictions import Held, KillEvent, KillReason
from api.pods import Pod
from api.ports import Seen, Unavailable
from kube.pace import Backoff

log = logging.getLogger(__name__)
WORKERS = 10
"""Requests at the same time, as Katalyst has them."""
PACE = Backoff(first_s=1.0, most_s=30.0)
"""Between two tries, at least."""
LOOKS = Backoff(first_s=1.0, most_s=5.0)
"""Between two looks whether a pod is gone."""
LATE_LOOKS_S = 30.0
"""The same of one that should have been long ago."""
STUCK_TRIES = 3
"""Whoever is too busy so often in a row is taken for one who will not do it."""


class _Pending(msgspec.Struct):
    """One pod on its way out."""

    pod: Pod
    way: Way
    grace_s: float | None
    reason: str
    asked_ns: int
    """When the loop handed it over, or again."""
    accepted: bool = False
    told_s: float | None = None
    """The grace that it was really given."""
    held: Held | None = None
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
        told_s = None if self.told_s is None else min(self.told_s, MOST_GRACE_S)
        known = (each for each in (self.grace_s, told_s, USUAL_GRACE_S) if each is not None)
        return wait_s(next(known))

    @property
    def stuck(self) -> bool:
        if self.accepted:
            return self.exceeded
        busy = self.held is Held.BUSY and self.tries >= STUCK_TRIES
        return busy or self.held in (Held.BUDGET, Held.REFUSED)


class AskingKiller:
    """A Killer (agent.eviction.killer), and a source of its own (api.ports.Probe) that says whether it can do its work.

    To be used in a running event loop; `choose` says which way goes for a pod.
    """

    name, form = "evicting", "ask"
    lost_events = None

    def __init__(self, choose: Callable[[Pod], Way], *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._choose, self._clock = choose, clock
        self._pending: dict[str, _Pending] = {}
        self._events: list[KillEvent] = []
        self._turns = asyncio.Semaphore(WORKERS)
        self._trouble: Unavailable | None = None

    @property
    def leaving(self) -> frozenset[str]:
        """Pods that were told to leave and are not known to be gone."""
        return frozenset(key for key, each in self._pending.items() if each.accepted)

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be asked, or were and do not go."""
        return frozenset(key for key, each in self._pending.items() if each.stuck)

    @property
    def held(self) -> Mapping[str, Held]:
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
            self._end(known, KillReason.SUCCEEDED, _gone(known))
            _cancel(known)
        pending = _Pending(pod=pod, way=self._choose(pod), grace_s=grace_s, reason=reason, asked_ns=now_ns)
        self._pending[pod.key] = pending
        pending.task = asyncio.create_task(self._carry(pending))

    def withdraw(self, pod: str, why: str) -> None:
        """Leave a pod alone that could not be asked to leave; one that was is past that."""
        pending = self._pending.get(pod)
        if pending is not None and not pending.accepted:
            pending.withdrawn = why
            pending.wake.set()

    def outcomes(self) -> Sequence[KillEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def publish(self, finished: Round) -> None:
        """Nothing: rounds are told of through the evictor. As the others that run beside the rounds."""

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        return Seen()

    def problem(self) -> Unavailable | None:
        """Why pods cannot be asked to leave although no budget keeps them; None where they can, or none has to."""
        failing = any(each.held not in (None, Held.BUDGET) for each in self._pending.values() if not each.accepted)
        return self._trouble if failing else None

    def close(self) -> None:
        """Forget everybody; who was told to leave leaves all the same. Idempotent."""
        for pending in self._pending.values():
            _cancel(pending)
        self._pending.clear()

    def _renew(self, known: _Pending, grace_s: float | None, reason: str, now_ns: int) -> None:
        since_s = (now_ns - known.asked_ns) / NS_PER_S
        before_s = next(each for each in (known.grace_s, known.told_s, USUAL_GRACE_S) if each is not None)
        if grace_s is not None and (since_s if known.accepted else 0.0) + grace_s < before_s:
            known.grace_s, known.reason, known.again = grace_s, reason, True
            known.wake.set()
        if not known.accepted:
            known.asked_ns, known.withdrawn = now_ns, ""

    async def _carry(self, pending: _Pending) -> None:
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
            if told_to_end(error):
                raise
            log.exception("the eviction of %s failed; it is judged anew", pending.pod.key)
            self._end(pending, KillReason.FAILED, f"Evict failed: {type(error).__name__}; reason: {pending.reason}")

    async def _ask(self, pending: _Pending) -> float:
        """One try, and after how many seconds the next step is due."""
        if pending.tries and not pending.accepted:
            # The answer to the last try may have been lost, and somebody else may have done it meanwhile.
            seen = await pending.way.look(pending.pod)
            if seen is not None and seen.gone:
                self._end(pending, KillReason.SUCCEEDED, _gone(pending))
                return 0.0
            if seen is not None and seen.told:
                pending.told_s = seen.grace_s
                self._accepted(pending)
                return LOOKS.first_s
            if pending.withdrawn:
                text = f"The pod stays: {pending.withdrawn}; it was to leave because: {pending.reason}"
                self._end(pending, KillReason.CANCELLED, text)
                return 0.0
        async with self._turns:
            pending.again = False
            answer = await pending.way.ask(pending.pod, pending.grace_s)
        if answer.fate is Fate.GONE:
            self._end(pending, KillReason.SUCCEEDED, _gone(pending))
        elif answer.fate is Fate.DONE:
            self._end(pending, KillReason.STOPPED, f"{answer.text}; reason: {pending.reason}")
        elif answer.fate is Fate.ASKED:
            self._accepted(pending)
        elif not pending.accepted:
            return self._held(pending, answer)
        return LOOKS.first_s

    def _accepted(self, pending: _Pending) -> None:
        pending.held, pending.tries = None, 0
        if not pending.accepted:
            pending.accepted, pending.asked_ns = True, self._clock()
            self._tell(pending, KillReason.CREATED, f"Successfully create eviction; reason: {pending.reason}")

    def _held(self, pending: _Pending, answer: Answer) -> float:
        assert answer.held is not None
        pending.tries += 1
        if answer.held is not pending.held:
            pending.held = answer.held
            self._tell(pending, KillReason.FAILED, f"Evict failed: {answer.text}; reason: {pending.reason}")
        if answer.held is not Held.BUDGET:
            self._trouble = Unavailable(f"{pending.pod.key} has to leave: {answer.text}", _REMEDIES[answer.held])
        # A budget that allows nothing for hours is not asked every few seconds, by every node.
        return max(answer.wait_s or 0.0, PACE.wait_s(pending.tries, random.random()))

    async def _look(self, pending: _Pending) -> float:
        pending.tries += 1
        seen = await pending.way.look(pending.pod)
        if seen is not None and seen.gone:
            self._end(pending, KillReason.SUCCEEDED, _gone(pending))
            return 0.0
        if seen is not None and seen.grace_s is not None:
            pending.told_s = seen.grace_s
        since_s = (self._clock() - pending.asked_ns) / NS_PER_S
        # Where nobody answers nobody knows that it is late.
        if seen is not None and since_s >= pending.deadline_s and not pending.exceeded:
            pending.exceeded = True
            text = f"Container runtime did not kill the pod within specified grace period: it is there {since_s:.0f} s later"
            if pending.grace_s is None and (pending.told_s or 0.0) > since_s:
                text = f"The pod was given {pending.told_s:.0f} s and is there {since_s:.0f} s later: others leave in its place"
            self._tell(pending, KillReason.EXCEEDED, f"{text}; reason: {pending.reason}")
        return LATE_LOOKS_S if pending.exceeded else LOOKS.wait_s(pending.tries)

    def _end(self, pending: _Pending, reason: KillReason, text: str) -> None:
        self._tell(pending, reason, text)
        pending.way.forget(pending.pod)
        if self._pending.get(pending.pod.key) is pending:
            del self._pending[pending.pod.key]

    def _tell(self, pending: _Pending, reason: KillReason, message: str) -> None:
        self._events.append(KillEvent(pod=pending.pod.key, reason=reason, message=message, at_ns=self._clock()))


def _gone(pending: _Pending) -> str:
    done = "Evicted pod has been deleted physically" if pending.accepted else "The pod is gone, and was not asked"
    return f"{done}; reason: {pending.reason}"


def _cancel(pending: _Pending) -> None:
    if pending.task is not None:
        pending.task.cancel()


_REMEDIES = {
    Held.REFUSED: "give the agent's role create of pods/eviction (or delete of pods), and get of pods",
    Held.UNREACHABLE: "it is tried again; see that whoever is asked runs",
    Held.BUSY: "it is tried again; see the log of whoever is asked",
}
