"""Decides which nodes to taint, untaint or evict from because their agent is not ready. Pure.
Too many unhealthy agents at once suggest a bad image or a partition: beyond `disruptionThreshold`, and while the
copy of the API objects is stale, nothing is tainted or evicted. Pods of DaemonSets and static pods are not evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from api.qos import QoSLevel, explicit_qos_level
from common.backoff import TokenBucket
from controller.kinds import ControllerCnr, ControllerPod
from controller.label_selectors import LabelSelectorSet
from controller.settings import HealthConfig
from kube.objects import format_timestamp

TAINT_KEY, TAINT_EFFECT, TAINT_QOS = "node.kubernetes.io/unschedulable", "NoSchedule", "reclaimed_cores"
MAX_EVALUATION_GAP_S = 60.0
"""Between two looks, at most: a process that stood still has seen nothing meanwhile."""
ROLLOUT_TOLERANCE_S = 120.0
"""An agent that a newer one replaces is away for less: a roll-out is no disaster, however many nodes it takes at a time."""
MIN_DISRUPTED_NODES = 2
"""So many nodes may always be unwell: in a small cluster two are a large share."""


class AgentState(StrEnum):
    """One agent on one node."""

    READY = "ready"
    NOT_READY = "not_ready"
    NOT_FOUND = "not_found"


class HaltReason(StrEnum):
    """Why nothing is tainted or evicted."""

    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"
    STALE = "stale"


AgentStates = Mapping[tuple[str, str], AgentState]
"""By node and agent."""


class HealthResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one look, which the next begins with."""

    at_s: float
    unhealthy_since_s: Mapping[str, float] = {}
    """By node."""
    halt: HaltReason = HaltReason.NONE
    taint: tuple[str, ...] = ()
    untaint: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    """Nodes that reclaimed pods are to be kept away from, tainted already or not."""
    evict: tuple[str, ...] = ()
    """Those that have been unwell for longest come first."""


def agent_states(
    nodes: Iterable[str], agents: Mapping[str, LabelSelectorSet], pods: Mapping[str, list[ControllerPod]]
) -> dict[tuple[str, str], AgentState]:
    """How each agent is on each of the nodes; `pods` are by node, and may be of anybody."""
    states: dict[tuple[str, str], AgentState] = {}
    for node in nodes:
        for name, selector in agents.items():
            mine = [pod for pod in pods.get(node, ()) if selector.matches(pod.metadata.labels)]
            if any(pod.ready for pod in mine):
                states[node, name] = AgentState.READY
            else:
                states[node, name] = AgentState.NOT_READY if mine else AgentState.NOT_FOUND
    return states


def evaluate_agent_health(
    states: AgentStates,
    before: HealthResult,
    cnrs: Mapping[str, ControllerCnr],
    config: HealthConfig,
    *,
    now_s: float,
    fresh: bool,
) -> HealthResult:
    """`now_s` is since the epoch; `fresh` says whether the API server was heard lately.

    A node whose agent turns from missing to not ready has been unwell all along. Time in which nobody looked, or nothing was
    heard, does not count. A leader that has just begun takes a node that bears the taint to have been unwell until then for as
    long as that takes, and no longer.
    """
    passed_s = max(0.0, now_s - before.at_s)
    unseen_s = max(0.0, passed_s - MAX_EVALUATION_GAP_S) if fresh else passed_s
    before_s = {node: since + unseen_s for node, since in before.unhealthy_since_s.items()}
    if not fresh:
        return HealthResult(at_s=now_s, unhealthy_since_s=before_s, halt=HaltReason.STALE)
    nodes = {node for node, _ in states}
    unwell = {node for (node, _), state in states.items() if state is not AgentState.READY}
    since_s = {node: _unhealthy_since(node, before_s, cnrs.get(node), config, now_s) for node in unwell}
    lasting = [node for node in unwell if now_s - since_s[node] >= min(ROLLOUT_TOLERANCE_S, config.taint_after_s)]
    halt = disruption_halt(len(lasting), len(nodes), config.disruption_threshold)
    tainted = {node for node, cnr in cnrs.items() if find_own_taint(cnr) is not None}
    due = [node for node, since in since_s.items() if now_s - since >= config.taint_after_s]
    out = [node for node, since in since_s.items() if now_s - since >= config.evict_after_s]
    halted = halt is not HaltReason.NONE
    # Nobody is evicted while many have just become unwell: what hit them may be what made the others due.
    stormy = disruption_halt(len(unwell), len(nodes), config.disruption_threshold) is not HaltReason.NONE
    return HealthResult(
        at_s=now_s,
        unhealthy_since_s=since_s,
        halt=halt,
        taint=()
        if halted
        else _longest_unhealthy_first(since_s, (node for node in due if node in cnrs and node not in tainted)),
        away=() if halted else _longest_unhealthy_first(since_s, due),
        # Nodes that nobody asks about any longer (`nodeSelector`) are not kept tainted either.
        untaint=tuple(sorted(tainted - unwell)),
        evict=() if halted or stormy else _longest_unhealthy_first(since_s, out),
    )


def keep_same_nodes(judged: HealthResult, before: Mapping[str, str], uids: Mapping[str, str]) -> HealthResult:
    """What was judged of nodes that had these uids, without those that were made anew under their old names since."""
    kept = {node: since for node, since in judged.unhealthy_since_s.items() if before.get(node) == uids.get(node)}
    return msgspec.structs.replace(judged, unhealthy_since_s=kept)


def disruption_halt(unwell: int, nodes: int, threshold: float) -> HaltReason:
    """Whether so many of so many nodes are too many to believe: all of them, or more than two and more than this share."""
    if unwell and unwell == nodes:
        return HaltReason.FULL
    return HaltReason.PARTIAL if unwell > MIN_DISRUPTED_NODES and unwell > threshold * nodes else HaltReason.NONE


def find_own_taint(cnr: ControllerCnr) -> Mapping[str, Any] | None:
    """The taint that this controller sets, if it is there."""
    return next((taint for taint in cnr.spec.taints if is_own_taint(taint)), None)


def with_own_taint(cnr: ControllerCnr, now_s: float) -> list[Mapping[str, Any]]:
    """Its taints and ours."""
    ours = {"key": TAINT_KEY, "effect": TAINT_EFFECT, "qosLevel": TAINT_QOS, "timeAdded": format_timestamp(now_s)}
    return [*without_own_taint(cnr), ours]


def without_own_taint(cnr: ControllerCnr) -> list[Mapping[str, Any]]:
    """Its taints but ours."""
    return [taint for taint in cnr.spec.taints if not is_own_taint(taint)]


def is_own_taint(taint: Mapping[str, Any]) -> bool:
    """Whether this controller sets it."""
    return (taint.get("key"), taint.get("effect"), taint.get("qosLevel")) == (TAINT_KEY, TAINT_EFFECT, TAINT_QOS)


def _unhealthy_since(
    node: str, before_s: Mapping[str, float], cnr: ControllerCnr | None, config: HealthConfig, now_s: float
) -> float:
    if node in before_s:
        return before_s[node]
    return now_s - config.taint_after_s if cnr is not None and find_own_taint(cnr) is not None else now_s


def _longest_unhealthy_first(since_s: Mapping[str, float], nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=lambda node: (since_s[node], node)))


MIRROR_POD_KEY = "kubernetes.io/config.mirror"
TERMINATED_PHASES = ("Succeeded", "Failed")


def reclaimed_victims(pods: Iterable[ControllerPod]) -> list[ControllerPod]:
    """Reclaimed pods that run. Not those that would be back at once (of a DaemonSet), nor those that the API server cannot
    send away (static ones), nor those on their way out."""
    return [pod for pod in pods if _is_reclaimed(pod) and not _is_not_evictable(pod)]


def _is_reclaimed(pod: ControllerPod) -> bool:
    try:
        return explicit_qos_level(pod.metadata.annotations) is QoSLevel.RECLAIMED
    except ValueError:
        return False  # what cannot be read is not evicted


def _is_not_evictable(pod: ControllerPod) -> bool:
    owners = {owner.kind for owner in pod.metadata.owner_references if owner.controller}
    over = pod.status.phase in TERMINATED_PHASES or pod.metadata.deletion_timestamp is not None
    return over or "DaemonSet" in owners or MIRROR_POD_KEY in pod.metadata.annotations


NODE_RETRY_S = 60.0
"""A node that was emptied, or could not be tainted, is looked at again: a disruption budget may let more go by then."""


class NodeRotation:
    """Of one action. A node that was tried a moment ago, whatever came of it, must not take the turns of all others."""

    def __init__(self) -> None:
        self._tried_s: dict[str, float] = {}

    def next_nodes(self, nodes: Sequence[str], now_s: float, bucket: TokenBucket | None = None) -> list[str]:
        """As many as the rate allows, in the order given. Nodes that no longer want it are forgotten."""
        self._tried_s = {node: at_s for node, at_s in self._tried_s.items() if node in nodes}
        picked = []
        for node in nodes:
            if now_s - self._tried_s.get(node, now_s - NODE_RETRY_S) < NODE_RETRY_S:
                continue
            if bucket is not None and not bucket.take(now_s):
                break
            self._tried_s[node] = now_s
            picked.append(node)
        return picked
