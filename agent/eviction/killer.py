"""What the agent asks of whoever makes pods leave, and how victims get there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from api.evictions import Evictions, Held, KillEvent, Victim
from api.pods import Pod


class Killer(Protocol):
    """Makes pods leave, each with its grace, without the caller ever waiting."""

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Ask the pod to leave now; None is the pod's own grace. Of a pod that was asked before, only a shorter grace counts.

        Returns at once; what came of it is in `outcomes` later.
        """

    @property
    def leaving(self) -> frozenset[str]:
        """Pods that were asked and are not known to be gone, `namespace/name`."""

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be asked, or were and do not go: nobody asks them again, or counts on what they would free."""

    @property
    def held(self) -> Mapping[str, Held]:
        """Pods that could not be asked yet, and why. It goes on trying until they are withdrawn."""

    def withdraw(self, pod: str, why: str) -> None:
        """Leave a pod alone that is held, because `why`."""

    def outcomes(self) -> Sequence[KillEvent]:
        """What happened since the last call, oldest first. To be called every round: it also carries on what is pending."""

    def close(self) -> None:
        """Forget everybody, and give back what is held open. Idempotent."""


class Teller(Protocol):
    """Tells pods of soft thresholds that ask for it."""

    def turn(self, victims: Iterable[Victim], pods: Sequence[Pod], now_ns: int) -> None:
        """Tell those of the victims that are to be told. Never raises."""

    def outcomes(self) -> Sequence[KillEvent]:
        """Who was told since the last call."""


def carry_out(evictions: Evictions, pods: Iterable[Pod], killer: Killer) -> None:
    """Hand the victims over, in their order; those of a dry run and those that are only told stay."""
    known = {pod.uid: pod for pod in pods}
    for victim in evictions.victims:
        if not victim.dry_run and not victim.notify and victim.uid in known:
            killer.evict(known[victim.uid], victim.grace_s, victim.verdict.text)
