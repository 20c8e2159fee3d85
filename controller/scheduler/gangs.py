"""Gangs by Koordinator's annotations: of the pods of a gang, either a minimum number starts together, or none. Pure.
Plugins of kube-scheduler can make pods wait that have a node already (Permit), but extenders cannot. So an attempt of the first
pod of a complete gang plans all of them: each is assumed on a node, and a later attempt of a pod gets its planned node only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from api.quantity import format_count
from api.text import quote
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.node_arrays import FloatArray
from controller.scheduler.plugin_chain import PluginChain, Rows
from controller.scheduler.scheduling_pod import (
    GANG_MIN_KEY,
    GANG_NAME_KEY,
    MAX_NAME_CHARS,
    ScheduledPod,
    SchedulingPod,
    parse_pending_pod,
)

MAX_GANG_PODS = 1000
SHORTLIST_NODES = 64
PLAN_INTERVAL_S = 0.01
"""Time per pod of a failed plan until the gang is planned again. For plans of more than MAX_QUICK_PODS pods it is multiplied by
the number of such gangs. Planning a pod that differs from the one before it takes 2 ms for 5,000 nodes, so gangs that never fit
take a fifth of the CPU time instead of all of it."""
MAX_HOLD_S = 300.0
MAX_QUICK_PODS = 50
"""Largest gang that is planned again at once if kube-scheduler's own plugins reject the planned node of a pod."""


class Gang(NamedTuple):
    """The gang that a pod names: namespace/name, and how many of its pods start together."""

    key: str
    min_pods: int


class GangRejection(NamedTuple):
    """Why no pod of a gang can start yet."""

    message: str
    is_complete: bool
    """Whether enough of its pods exist, so that only room for them is missing."""


class PlanHold(NamedTuple):
    """Result of the latest plan of a gang, and the time until which it is not planned again."""

    message: str
    until_s: float
    is_large: bool
    """Whether the plan had more than MAX_QUICK_PODS pods."""


class Gangs:
    """Pods of all gangs, from the API server."""

    def __init__(self, state: ClusterState, chain: PluginChain) -> None:
        self._state, self._chain = state, chain
        self._members: dict[str, dict[str, ScheduledPod]] = {}
        self._holds: dict[str, PlanHold] = {}

    def apply(self, key: str, old: ScheduledPod | None, new: ScheduledPod | None) -> None:
        """Apply a change of a pod. A pod that has ended or is being deleted is no member any more."""
        if old is not None and (name := gang_key(old)) and (members := self._members.get(name)) is not None:
            members.pop(key, None)
            if not members:
                del self._members[name]
                self._holds.pop(name, None)
        is_member = new is not None and new.metadata.deletion_timestamp is None and not new.has_ended
        if new is not None and is_member and (name := gang_key(new)):
            self._members.setdefault(name, {})[key] = new

    def choose_node(
        self, stored: ScheduledPod, names: list[str], rows: Rows, now_s: float
    ) -> tuple[str, list[str]] | GangRejection | None:
        """Return the node of a gang's pod and the keys of the other pods that can start now; None if the pod may use any node,
        because it is in no gang or because enough pods of the gang have a node.

        Raises ValueError that names the annotation.
        """
        if (gang := parse_gang(stored)) is None:
            return None
        uid, members = stored.metadata.uid, self._members.get(gang.key, {})
        if (node := dict(self._state.assumptions.keys()).get(uid)) is not None:
            if node in names:
                return node, []
            if (held := self._held(gang.key, now_s)) is not None:
                return held
            # kube-scheduler's own plugins do not accept the planned node for this pod: plan again on those that they accept.
            # Bindings that are under way may take effect, so their pods count as started.
            self._state.release_plans({uid, *(member.metadata.uid for member in members.values())})
        assumed = dict(self._state.assumptions.keys())
        others = {key: each for key, each in sorted(members.items()) if each.metadata.uid != uid}
        started = sum(1 for each in others.values() if each.spec.node_name or each.metadata.uid in assumed)
        if started >= gang.min_pods:
            return None
        waiting = {
            key: each for key, each in others.items() if each.metadata.uid not in assumed and _can_start(each, stored)
        }
        if started + 1 + len(waiting) < gang.min_pods:
            present = format_count(started + 1 + len(waiting), "pod")
            return GangRejection(f"gang {gang.key} has {present} of at least {gang.min_pods}", is_complete=False)
        if (held := self._held(gang.key, now_s)) is not None:
            return held
        selected = list(waiting.values())[: gang.min_pods - started - 1]
        pods = [parse_pending_pod(each) for each in (stored, *selected)]
        # Large pods are the least likely to fit, so they are planned first; small pods fit into the rest.
        pods.sort(key=lambda each: each.reclaimed, reverse=True)
        planned = self._plan(pods, names, rows, now_s)
        if len(planned) < len(pods):
            message = f"gang {gang.key}: only {len(planned)} of {len(pods)} pods that have to start together fit"
            self._hold(gang.key, message, len(planned) + 1, now_s)
            return GangRejection(message, is_complete=True)
        self._holds.pop(gang.key, None)
        if len(pods) > MAX_QUICK_PODS:
            message = (
                f"gang {gang.key}: kube-scheduler rejects the planned node of a pod; the gang is planned again soon"
            )
            self._hold(gang.key, message, len(pods), now_s)
        # Pods beyond the minimum may start now, too.
        return planned[uid], list(waiting)

    def _hold(self, key: str, message: str, planned: int, now_s: float) -> None:
        # A clock that was set back must not hold a gang for longer.
        self._holds = {each: hold for each, hold in self._holds.items() if 0 < hold.until_s - now_s <= MAX_HOLD_S}
        is_large = planned > MAX_QUICK_PODS
        # Gangs of few pods do not delay others, because planning any number of them takes little time.
        others = sum(hold.is_large for each, hold in self._holds.items() if each != key) if is_large else 0
        until_s = now_s + min(planned * PLAN_INTERVAL_S * (1 + others), MAX_HOLD_S)
        self._holds[key] = PlanHold(message, until_s, is_large)

    def _held(self, key: str, now_s: float) -> GangRejection | None:
        """Return the result of the latest plan of a gang if it may not be planned again yet."""
        hold = self._holds.get(key)
        if hold is None or not 0 < hold.until_s - now_s <= MAX_HOLD_S:
            return None
        return GangRejection(hold.message, is_complete=True)

    def describe(self, stored: ScheduledPod) -> str:
        """Return the state of a pod's gang as a sentence; empty without one."""
        try:
            gang = parse_gang(stored)
        except ValueError as error:
            return str(error)
        if gang is None:
            return ""
        members = self._members.get(gang.key, {}).values()
        bound = sum(1 for each in members if each.spec.node_name)
        present = format_count(len(members), "pod")
        return f"gang {gang.key}: {present}, {bound} with a node; at least {gang.min_pods} start together"

    def _plan(self, pods: list[SchedulingPod], names: list[str], rows: Rows, now_s: float) -> dict[str, str]:
        """Assume every pod on the best node that it fits, and return the nodes by uid. If a pod fits nowhere, release all
        assumptions and return the nodes of the pods before it."""
        planned = dict[str, str]()
        shortlist = _Shortlist(self._state, self._chain, rows, now_s)
        for pod in pods:
            index = shortlist.best(pod)
            if index is None:
                self._state.release_plans(planned)
                return planned
            self._state.assume(pod, names[index], now_s, is_planned=True)
            planned[pod.uid] = names[index]
        return planned


class _Shortlist:
    """The best nodes for pods of one shape. An assumed pod changes its own node only. So for the next pod only these few of the
    thousands of nodes are evaluated, and the others only if one of them may be better."""

    def __init__(self, state: ClusterState, chain: PluginChain, rows: Rows, now_s: float) -> None:
        self._state, self._chain, self._rows, self._now_s = state, chain, rows, now_s
        self._shape: SchedulingPod | None = None
        self._indices = np.empty(0, np.intp)
        self._best_other = -np.inf
        """Highest score of a node that is not in the list, when the list was made."""

    def best(self, pod: SchedulingPod) -> int | None:
        """Return the position, among the rows, of the best node that the pod fits; None if it fits none."""
        # The namespace of all pods is that of their gang.
        shape = pod._replace(key="", uid="")
        if shape == self._shape:
            index, score = self._best_of(pod, self._indices)
            if score >= self._best_other:
                return index
        self._shape, listed = shape, np.flatnonzero(self._rows >= 0)
        scores = self._scores(pod, listed)
        order = np.argsort(-scores, kind="stable")
        self._indices = listed[order[:SHORTLIST_NODES]]
        self._best_other = float(scores[order[SHORTLIST_NODES]]) if len(order) > SHORTLIST_NODES else -np.inf
        return self._best_of(pod, self._indices)[0]

    def _best_of(self, pod: SchedulingPod, indices: Rows) -> tuple[int | None, float]:
        scores = self._scores(pod, indices)
        first = int(scores.argmax()) if len(scores) else 0
        return (int(indices[first]), float(scores[first])) if scores.max(initial=-np.inf) >= 0 else (None, -np.inf)

    def _scores(self, pod: SchedulingPod, indices: Rows) -> FloatArray:
        """Return the scores of these candidates; negative infinity where the pod does not fit."""
        nodes, rows = self._state.nodes, self._rows[indices]
        passes = self._chain.filter(pod, nodes, rows, self._now_s).passes
        return np.where(passes, self._chain.score(pod, nodes, rows, self._now_s), -np.inf)


def _can_start(member: ScheduledPod, planned: ScheduledPod) -> bool:
    """Return whether kube-scheduler will try this pod as well. If it will not, a plan for the pod would withhold resources in
    vain."""
    spec = member.spec
    return not spec.node_name and not spec.scheduling_gates and spec.scheduler_name == planned.spec.scheduler_name


def parse_gang(pod: ScheduledPod) -> Gang | None:
    """Return the gang of a pod, None without one. Raises ValueError that names the annotation and valid values."""
    if not (key := gang_key(pod)):
        return None
    name, text = pod.metadata.annotations.gang_name, pod.metadata.annotations.gang_min
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"annotation {GANG_NAME_KEY}: {quote(name)} is no name; write at most {MAX_NAME_CHARS} letters"
        )
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_GANG_PODS):
        raise ValueError(f"annotation {GANG_MIN_KEY}: {quote(text)} is no number of pods; write 1 to {MAX_GANG_PODS}")
    return Gang(key, int(text))


def gang_key(pod: ScheduledPod) -> str:
    """Return namespace and name of the gang that a pod names; empty without one."""
    name = pod.metadata.annotations.gang_name
    return f"{pod.metadata.namespace}/{name}" if name else ""
