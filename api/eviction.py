"""Eviction thresholds, victims and events as plain data, with Katalyst's names (eviction manager, v0.5).
`since_ns` and `at_ns` are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from api.knobs import Reason
from api.quantity import format_bytes

TAINT_PREFIX = "node.katalyst.kubewharf.io/"
"""Of conditions that are shown as taints; all taints below it are the agent's."""


_BYTE_SCOPES = re.compile(
    r"(NumaMemory|NumaMemoryBalance|rootfs) .*|SystemMemory free|SystemRootfs bytes|.*reclaimed_memory "
)
"""Scope and subject."""


def format_observation(value: float | None, scope: str, subject: str) -> str:
    """A number of a threshold for a person. Their units differ: ratios, seconds, and bytes."""
    if value is None:
        return "not known"
    return format_bytes(value) if _BYTE_SCOPES.fullmatch(f"{scope} {subject}") else f"{value:.12g}"


class ThresholdMet(StrEnum):
    """How far a threshold is crossed."""

    NOT_MET = "not-met"
    SOFT = "soft"
    """No new pods; at most one pod of the whole node is asked to leave in a round."""
    HARD = "hard"
    """The first of the candidates has to leave."""


class EvictionCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What the node shows while a threshold is crossed, so that the scheduler keeps away."""

    name: str
    kind: Literal["node", "cnr"] = "node"
    """A taint of the Node, or one of Katalyst's CustomNodeResource."""
    effects: tuple[str, ...] = ("NoSchedule",)


class ActiveCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that is in force."""

    condition: EvictionCondition
    plugin: str
    """Whose threshold was crossed last."""
    since_ns: int
    last_met_ns: int
    """CLOCK_MONOTONIC, like since_ns. The condition outlives the threshold by some minutes."""


class EvictionThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """What one plugin looked at in one round, and how it judged it."""

    plugin: str
    met: ThresholdMet
    scope: str = ""
    """Which resource, where: `NumaMemory`, `cpu.load.1min.container`."""
    subject: str = ""
    """Which of several that have this scope: a NUMA node (`numa0`), a pool, a network card or a detector."""
    value: float | None = None
    """The threshold itself."""
    observed: float | None = None
    """What is held against it; None where it is not known, and then it is never met."""
    operator: Literal["<", ">"] = ">"
    """How `observed` relates to `value` when it is met."""
    condition: EvictionCondition | None = None
    reason: Reason = msgspec.field(name="verdict")
    tolerance_s: float = 0.0
    """It has to be met for so long before anybody leaves."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC since when it is met without a break."""
    dry_run: bool = False


class EvictionVictim(msgspec.Struct, frozen=True, kw_only=True):
    """One pod that has to leave, or in a dry run would have to."""

    pod: str
    """`namespace/name`."""
    uid: str
    plugin: str
    scope: str
    reason: Reason = msgspec.field(name="verdict")
    """`text` is the reason that people are shown."""
    forced: bool
    """Of a hard threshold; a soft one leaves pods the choice that ask to be told instead."""
    grace_s: float | None
    """From the request to leave until it is made to; None is the pod's own."""
    notify: bool = False
    """It is only told: it asked for that (pod_soft_evict_notify)."""
    dry_run: bool = False
    observed: float | None = None
    """What was held against the verdict's threshold,"""
    operator: Literal["<", ">"] = ">"
    """how it relates to that,"""
    since_ns: int | None = None
    """and since when it does without a break (CLOCK_MONOTONIC)."""
    subject: str = ""
    """Of its threshold."""
    cgroup: str = ""
    """Of the pod, or of its first container where they share none."""


class EvictionBlock(StrEnum):
    """Why a pod that has to leave stays for now."""

    BUDGET = "budget"
    """A disruption budget (PDB) does not allow it."""
    REFUSED = "refused"
    """Whoever is asked does not allow us to."""
    UNREACHABLE = "unreachable"
    BUSY = "busy"
    """He answers, and cannot do it now."""


class EvictionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The eviction manager's answer for one round."""

    thresholds: tuple[EvictionThreshold, ...] = ()
    conditions: tuple[ActiveCondition, ...] = ()
    victims: tuple[EvictionVictim, ...] = ()
    """In the order in which they are to leave."""
    waiting: tuple[str, ...] = ()
    """Pods that would leave too but for the burst allowed in one round."""
    terminating: tuple[str, ...] = msgspec.field(default=(), name="leaving")
    """Pods that were asked to leave, and are still here."""
    held: Mapping[str, EvictionBlock] = {}
    """Pods that have to leave and could not be asked yet, and why; they are tried again."""


class EvictionEventReason(StrEnum):
    """What became of an eviction; Katalyst's reasons of its events on the pod."""

    CREATED = "EvictCreated"
    SUCCEEDED = "EvictSucceeded"
    FAILED = "EvictFailed"
    EXCEEDED = "EvictExceededGracePeriod"
    """It is still there long after its grace."""
    CANCELLED = "EvictCancelled"
    """Ours: it could not be asked to leave, and by now need not."""
    STOPPED = "ContainerStopped"
    """Of the killer that stops containers and leaves the pod."""
    NOTIFIED = "NotifySuccess"
    """It was told of a soft threshold, as it asked for."""
    NOT_NOTIFIED = "NotifyFailed"


class EvictionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an eviction, as an event of the pod would say it."""

    pod: str
    reason: EvictionEventReason
    message: str
    at_ns: int
    """CLOCK_MONOTONIC."""

    @property
    def warning(self) -> bool:
        return self.reason in (
            EvictionEventReason.FAILED,
            EvictionEventReason.EXCEEDED,
            EvictionEventReason.NOT_NOTIFIED,
        )

    @property
    def action(self) -> str:
        """Katalyst's word for what was being done."""
        return _EVENT_ACTIONS.get(self.reason, "Evicting")


_EVENT_ACTIONS = {
    EvictionEventReason.STOPPED: "ContainerStopping",
    EvictionEventReason.NOTIFIED: "Notifying",
    EvictionEventReason.NOT_NOTIFIED: "Notifying",
}


class EvictionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the eviction journal: who was to leave and why, or what became of that."""

    seq: int
    """Grows by one for every entry, across restarts too."""
    wall_time_ns: int
    cycle_seq: int = msgspec.field(name="round_seq")
    victim: EvictionVictim | None = None
    kill: EvictionEvent | None = None
    """One of the two is there."""

    @property
    def pod(self) -> str:
        """`namespace/name`."""
        return self.victim.pod if self.victim is not None else self.kill.pod if self.kill is not None else ""
