"""Ways to make a pod leave that the API server offers, and what its answers mean.

Every request names the pod's uid: one that has come back under the same name is another pod, and stays. A grace of nothing is
sent as one second, for with none the API server forgets the pod before its processes have ended.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from api.evictions import Held
from api.pods import Pod
from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.objects import Bare, Resource

PODS = Resource("", "v1", "pods", "Pod", Bare, namespaced=True)
LEAST_GRACE_S = 1
BUDGET_WAIT_S = 5.0
"""Katalyst's pause where the API server names none: a budget is counted anew within seconds."""
REFUSED_WAIT_S = 60.0
"""Until somebody may have given the permission that was missing."""
FORBIDDEN = frozenset((400, 401, 403, 405, 422))
"""Asked again soon, these are answered the same."""


class Fate(StrEnum):
    """What asking led to."""

    ASKED = "asked"
    """It is told to leave, and to be watched until it is gone."""
    GONE = "gone"
    DONE = "done"
    """All that this way does is done, whether or not the pod comes back."""
    HELD = "held"
    """It stays for now."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of one try. `held` is why it stays, `wait_s` when to try again at the earliest; None where nobody said."""

    fate: Fate
    held: Held | None = None
    text: str = ""
    wait_s: float | None = None


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a pod that is to go."""

    gone: bool = False
    told: bool = False
    """Whether somebody has told it to end."""
    grace_s: float | None = None
    """What it was given then."""


class Way(Protocol):
    """One way to make a pod leave; Katalyst's killers. Neither method raises for what the other side does."""

    async def ask(self, pod: Pod, grace_s: float | None) -> Answer:
        """Once; `grace_s` None is the pod's own."""

    async def look(self, pod: Pod) -> Sight | None:
        """Whether it is there still; None where nobody knows."""

    def forget(self, pod: Pod) -> None:
        """It is gone, or need not leave any more: nothing of what was tried is to be remembered."""


class ApiWay:
    """By the eviction of policy/v1, which disruption budgets may refuse, or by deletion, which asks nobody."""

    def __init__(self, client: Client, form: Literal["eviction", "deletion"]) -> None:
        self._client, self._form = client, form

    async def ask(self, pod: Pod, grace_s: float | None) -> Answer:
        """As Way says."""
        seconds = None if grace_s is None else max(LEAST_GRACE_S, math.ceil(grace_s))
        send = self._client.evict if self._form == "eviction" else self._client.delete
        try:
            await send(PODS, pod.key, pod.uid, seconds)
        except ApiError as error:
            if error.conflict:
                # Another pod has its name, or somebody else wrote at the same time.
                seen = await self.look(pod)
                if seen is not None and seen.gone:
                    return Answer(fate=Fate.GONE)
            return answer_of(error, pod)
        except Unreachable as error:
            return Answer(fate=Fate.HELD, held=Held.UNREACHABLE, text=f"the API server does not answer: {error}")
        return Answer(fate=Fate.ASKED)

    def forget(self, pod: Pod) -> None:
        """As Way says: nothing is."""

    async def look(self, pod: Pod) -> Sight | None:
        """As Way says."""
        try:
            there = (await self._client.get(PODS, pod.key)).metadata
        except ApiError as error:
            return Sight(gone=True) if error.missing else None
        except Unreachable:
            return None
        if there.uid != pod.uid:
            return Sight(gone=True)
        given = there.deletion_grace_period_seconds
        return Sight(told=bool(there.deletion_timestamp), grace_s=None if given is None else float(given))


def answer_of(error: ApiError, pod: Pod) -> Answer:
    """What a refusal means. Pure."""
    if error.missing:
        return Answer(fate=Fate.GONE)
    if error.status == 429 and "DisruptionBudget" in error.causes:
        wait_s = error.retry_after_s or BUDGET_WAIT_S
        return Answer(fate=Fate.HELD, held=Held.BUDGET, text=error.message, wait_s=wait_s)
    if error.status in FORBIDDEN:
        text = f"the API server refuses to have {pod.key} leave: {error}"
        return Answer(fate=Fate.HELD, held=Held.REFUSED, text=text, wait_s=REFUSED_WAIT_S)
    return Answer(fate=Fate.HELD, held=Held.BUSY, text=f"the API server: {error}", wait_s=error.retry_after_s)
