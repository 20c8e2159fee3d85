"""Messages of kube-scheduler's HTTP extender protocol (k8s.io/kube-scheduler/extender/v1/types.go), as JSON structs. Pure.
Only what a `nodeCacheCapable` extender exchanges: names of nodes instead of Node objects.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from controller.scheduler.scheduling_pod import ScheduledPod

MAX_NODE_NAMES = 50_000


class _Message(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    pass


class ExtenderArgs(_Message, frozen=True, kw_only=True):
    """Request of the verbs filter and prioritize."""

    pod: ScheduledPod
    node_names: list[str] | None = None
    """None from a kube-scheduler whose configuration lacks `nodeCacheCapable`: it sends Node objects."""


class ExtenderFilterResult(_Message, frozen=True, kw_only=True):
    """Response of the verb filter. The reasons of rejected nodes appear in the pod's events, counted by text."""

    node_names: list[str] = []
    failed_and_unresolvable_nodes: Mapping[str, str] = {}
    """Rejected nodes on which preemption would change nothing, with the reason."""
    error: str = ""


class HostPriority(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """Score of one node, 0 to 10. Without keywords, because a response has thousands of them."""

    host: str
    score: int


class ExtenderBindingArgs(_Message, frozen=True, kw_only=True):
    """Request of the verb bind."""

    pod_name: str
    pod_namespace: str
    pod_uid: str = msgspec.field(name="PodUID")
    node: str


class ExtenderBindingResult(_Message, frozen=True, kw_only=True):
    """Response of the verb bind. If it has an error, the pod is not bound, and kube-scheduler tries it again."""

    error: str = ""


class MetaPod(_Message, frozen=True, kw_only=True):
    uid: str = msgspec.field(name="UID")


class MetaVictims(_Message, frozen=True, kw_only=True):
    """Pods that would be removed from a node."""

    pods: list[MetaPod] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class ExtenderPreemptionArgs(_Message, frozen=True, kw_only=True):
    """Request of the verb preempt: the victims that kube-scheduler selected on each node."""

    pod: ScheduledPod
    node_name_to_meta_victims: Mapping[str, MetaVictims | None] | None = None


class ExtenderPreemptionResult(_Message, frozen=True, kw_only=True):
    """Response of the verb preempt: the nodes on which preemption helps, with their victims."""

    node_name_to_meta_victims: Mapping[str, MetaVictims] = {}
