"""Eviction thresholds, victims and events as plain data, with Katalyst's names (eviction manager, v0.5).
`since_ns` and `at_ns` are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from api.knobs import Reason
from api.quantity import format_bytes
from api.text import make_printable

TAINT_PREFIX = "node.katalyst.kubewharf.io/"
"""Prefix of the taints for eviction conditions. A stock Katalyst agent writes taints with the same prefix."""
NODE_TAINTS_ANNOTATION = "dioptase.io/node-taints"
"""Annotation of a Node that records the taints its agent added, as `KEY:EFFECT,...`. It changes in the same patch as the
taints, so that after a crash the next agent, the controller and `dioptase withdraw` remove these taints and no others."""
NodeTaint = tuple[str, str]
"""Key and effect of a taint of a Node."""

_BYTE_SCOPES = re.compile(
    r"(NumaMemory|NumaMemoryBalance|rootfs) .*|SystemMemory free|SystemRootfs bytes|.*reclaimed_memory "
)
"""`SCOPE SUBJECT` of the thresholds whose values are bytes; the others are ratios or seconds."""


def format_observation(value: float | None, scope: str, subject: str) -> str:
    """Format a threshold's value in the unit of its scope: bytes, or a plain number for ratios and seconds."""
    if value is None:
        return "not known"
    return format_bytes(value) if _BYTE_SCOPES.fullmatch(f"{scope} {subject}") else f"{value:.12g}"


def recorded_taints(annotations: Mapping[str, str]) -> frozenset[NodeTaint]:
    """Return the taints that the annotations of a Node record as added by its agent. Other taints than an agent adds are left
    out: a kubelet may write annotations of its Node, but not remove the Node's taints."""
    words = annotations.get(NODE_TAINTS_ANNOTATION, "").split(",")
    pairs = (word.rpartition(":") for word in words)
    return frozenset((key, effect) for key, _, effect in pairs if key.startswith(TAINT_PREFIX))


def format_recorded_taints(taints: Iterable[NodeTaint]) -> str | None:
    """Return the annotation's text for these taints; None, which removes it in a merge patch, without taints."""
    return ",".join(f"{key}:{effect}" for key, effect in sorted(taints)) or None


class ThresholdMet(StrEnum):
    """Whether a threshold is crossed, and which one."""

    NOT_MET = "not-met"
    SOFT = "soft"
    """New pods are kept away, and at most one pod of the node is evicted in a cycle."""
    HARD = "hard"
    """The first candidate is evicted."""


class EvictionCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Condition that the node reports while a threshold is crossed, so that the scheduler avoids it."""

    name: str
    kind: Literal["node", "cnr"] = "node"
    """Taint of the Node, or of Katalyst's CustomNodeResource."""
    effects: tuple[str, ...] = ("NoSchedule",)


class ActiveCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Eviction condition in force."""

    condition: EvictionCondition
    plugin: str
    """Plugin whose threshold was crossed last."""
    since_ns: int
    last_met_ns: int
    """CLOCK_MONOTONIC, like since_ns. The condition remains for some minutes after the threshold was last crossed."""
    ends_ns: int = 0
    """CLOCK_MONOTONIC at which it and its taint end unless the threshold is crossed again."""


class EvictionThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """Threshold of one plugin and its evaluation in one cycle."""

    plugin: str
    met: ThresholdMet
    scope: str = ""
    """Resource and place: `NumaMemory`, `cpu.load.1min.container`."""
    subject: str = ""
    """Instance within the scope: a NUMA node (`numa0`), a pool, a network card or a detector."""
    value: float | None = None
    """Threshold."""
    observed: float | None = None
    """Value compared with the threshold; None if unknown, and then the threshold is not met."""
    operator: Literal["<", ">"] = ">"
    """Relation of `observed` to `value` that meets the threshold."""
    condition: EvictionCondition | None = None
    reason: Reason = msgspec.field(name="verdict")
    tolerance_s: float = 0.0
    """Time for which the threshold has to be met before a pod is evicted."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC time since which the threshold has been met without interruption."""
    dry_run: bool = False


class EvictionVictim(msgspec.Struct, frozen=True, kw_only=True):
    """Pod to be evicted, or that would be evicted without dry-run."""

    pod: str
    """`namespace/name`."""
    uid: str
    plugin: str
    scope: str
    reason: Reason = msgspec.field(name="verdict")
    """Reason of the eviction; `text` is shown to people."""
    forced: bool
    """True for a hard threshold. A soft one only notifies pods that requested notification."""
    grace_s: float | None
    """Termination grace period of the eviction; None uses the pod's own."""
    notify: bool = False
    """Notify the pod instead of evicting it, as it requested (pod_soft_evict_notify)."""
    dry_run: bool = False
    observed: float | None = None
    """Value compared with the threshold of `reason`."""
    operator: Literal["<", ">"] = ">"
    """Relation of `observed` to that threshold."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC time since which that threshold has been met without interruption."""
    subject: str = ""
    """Subject of the threshold."""
    cgroup: str = ""
    """Cgroup of the pod, or of its first container if they share none."""


class EvictionBlock(StrEnum):
    """Why the eviction of a pod is pending."""

    BUDGET = "budget"
    """A disruption budget (PDB) does not allow it."""
    REFUSED = "refused"
    """The API server or the container runtime denies the agent permission."""
    UNREACHABLE = "unreachable"
    BUSY = "busy"
    """The API server or the container runtime answers, but is overloaded."""
    CLUSTER_BUDGET = "cluster-budget"
    """The agents of the cluster have evicted as many pods as the controller allows in one interval."""


class EvictionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the eviction manager for one cycle."""

    thresholds: tuple[EvictionThreshold, ...] = ()
    conditions: tuple[ActiveCondition, ...] = ()
    victims: tuple[EvictionVictim, ...] = ()
    """Victims in eviction order."""
    waiting: tuple[str, ...] = ()
    """Candidates deferred because the number of evictions per cycle is limited."""
    terminating: tuple[str, ...] = msgspec.field(default=(), name="leaving")
    """Pods whose eviction was accepted and which are still on the node."""
    held: Mapping[str, EvictionBlock] = {}
    """Pods whose eviction is blocked, with the cause; it is retried."""


class EvictionEventReason(StrEnum):
    """Steps of an eviction; Katalyst's reasons of its events on the pod."""

    CREATED = "EvictCreated"
    SUCCEEDED = "EvictSucceeded"
    FAILED = "EvictFailed"
    EXCEEDED = "EvictExceededGracePeriod"
    """The pod is still on the node long after its grace period."""
    CANCELLED = "EvictCancelled"
    """The eviction was blocked until it was no longer needed. Not a reason of Katalyst's."""
    STOPPED = "ContainerStopped"
    """The eviction method that stops containers and leaves the pod."""
    NOTIFIED = "NotifySuccess"
    """The pod was notified of a soft threshold, as it requested."""
    NOT_NOTIFIED = "NotifyFailed"


class EvictionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an eviction, in the form of an event on the pod."""

    pod: str
    reason: EvictionEventReason
    message: str
    """Printable."""
    at_ns: int
    """CLOCK_MONOTONIC."""

    def __post_init__(self) -> None:
        make_printable(self, "message")

    @property
    def warning(self) -> bool:
        return self.reason in (
            EvictionEventReason.FAILED,
            EvictionEventReason.EXCEEDED,
            EvictionEventReason.NOT_NOTIFIED,
        )

    @property
    def action(self) -> str:
        """Katalyst's action of the event."""
        return _EVENT_ACTIONS.get(self.reason, "Evicting")


_EVENT_ACTIONS = {
    EvictionEventReason.STOPPED: "ContainerStopping",
    EvictionEventReason.NOTIFIED: "Notifying",
    EvictionEventReason.NOT_NOTIFIED: "Notifying",
}


class EvictionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the eviction journal: a victim, or one step of an eviction."""

    seq: int
    """Increases by one for every entry, also across restarts."""
    wall_time_ns: int
    cycle_seq: int = msgspec.field(name="round_seq")
    victim: EvictionVictim | None = None
    kill: EvictionEvent | None = None
    """Exactly one of `victim` and `kill` is set."""

    @property
    def pod(self) -> str:
        """`namespace/name`."""
        return self.victim.pod if self.victim is not None else self.kill.pod if self.kill is not None else ""
