"""What the agent asks of whoever makes pods leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from api.evictions import KillEvent
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

    def outcomes(self) -> Sequence[KillEvent]:
        """What happened since the last call, oldest first; also the time at which pending evictions go on."""
