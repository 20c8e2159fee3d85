"""Decides which nodes to taint, untaint or evict from because their agent is not ready.
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
from controller.kinds import ControllerPod
from controller.label_selectors import LabelSelectorSet
from controller.settings import HealthConfig
from kube.objects import TaintedObject, format_timestamp

TAINT_KEY, TAINT_EFFECT, TAINT_QOS = "node.kubernetes.io/unschedulable", "NoSchedule", "reclaimed_cores"
MAX_EVALUATION_GAP_S = 60.0
"""Longer gaps between evaluations do not count as unhealthy time: a suspended process has observed nothing."""
ROLLOUT_TOLERANCE_S = 120.0
"""Agents restart in less time, so that a rollout does not count as a disruption, however many nodes it restarts."""
MIN_DISRUPTED_NODES = 2
"""Number of unhealthy nodes that never halts: in a small cluster two are a large share."""


class AgentState(StrEnum):
    """State of one agent on one node."""

    READY = "ready"
    NOT_READY = "not_ready"
    NOT_FOUND = "not_found"


class HaltReason(StrEnum):
    """Why taints and evictions are halted."""

    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"
    STALE = "stale"


AgentStates = Mapping[tuple[str, str], AgentState]
"""Agent states by node and agent."""


class HealthResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one evaluation, and input of the next one."""

    at_s: float
    unhealthy_since_s: Mapping[str, float] = {}
    """Time since when each unhealthy node's agent has not been ready."""
    halt: HaltReason = HaltReason.NONE
    taint: tuple[str, ...] = ()
    untaint: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    """Nodes that must not receive reclaimed pods, whether already tainted or not."""
    evict: tuple[str, ...] = ()
    """Nodes to evict from, those unhealthy for the longest time first."""


def agent_states(
    nodes: Iterable[str], agents: Mapping[str, LabelSelectorSet], pods: Mapping[str, list[ControllerPod]]
) -> dict[tuple[str, str], AgentState]:
    """State of each agent on each node; `pods` are by node, and may include other pods."""
    states: dict[tuple[str, str], AgentState] = {}
    for node in nodes:
        for name, selector in agents.items():
            own = [pod for pod in pods.get(node, ()) if selector.matches(pod.metadata.labels)]
            if any(pod.ready for pod in own):
                states[node, name] = AgentState.READY
            else:
                states[node, name] = AgentState.NOT_READY if own else AgentState.NOT_FOUND
    return states


def evaluate_agent_health(
    states: AgentStates,
    before: HealthResult,
    cnrs: Mapping[str, TaintedObject],
    config: HealthConfig,
    *,
    now_s: float,
    fresh: bool,
) -> HealthResult:
    """Evaluate all nodes. `now_s` is since the epoch; `fresh` is whether the copies of the API objects are current.

    A change from missing to not ready does not reset the unhealthy time. Gaps between evaluations and stale copies do not
    count. A new leader assumes that a tainted node has been unhealthy for exactly the time that a taint takes.
    """
    elapsed_s = max(0.0, now_s - before.at_s)
    unobserved_s = max(0.0, elapsed_s - MAX_EVALUATION_GAP_S) if fresh else elapsed_s
    before_s = {node: since + unobserved_s for node, since in before.unhealthy_since_s.items()}
    if not fresh:
        return HealthResult(at_s=now_s, unhealthy_since_s=before_s, halt=HaltReason.STALE)
    nodes = {node for node, _ in states}
    unhealthy = {node for (node, _), state in states.items() if state is not AgentState.READY}
    since_s = {node: _unhealthy_since(node, before_s, cnrs.get(node), config, now_s) for node in unhealthy}
    lasting = [node for node in unhealthy if now_s - since_s[node] >= min(ROLLOUT_TOLERANCE_S, config.taint_after_s)]
    halt = disruption_halt(len(lasting), len(nodes), config.disruption_threshold)
    tainted = {node for node, cnr in cnrs.items() if find_own_taint(cnr) is not None}
    taint_due = [node for node, since in since_s.items() if now_s - since >= config.taint_after_s]
    evict_due = [node for node, since in since_s.items() if now_s - since >= config.evict_after_s]
    halted = halt is not HaltReason.NONE
    # No evictions while many agents have just become unhealthy: the same cause may affect those that are due.
    recent_halt = disruption_halt(len(unhealthy), len(nodes), config.disruption_threshold)
    return HealthResult(
        at_s=now_s,
        unhealthy_since_s=since_s,
        halt=halt,
        taint=()
        if halted
        else _longest_unhealthy_first(since_s, (node for node in taint_due if node in cnrs and node not in tainted)),
        away=() if halted else _longest_unhealthy_first(since_s, taint_due),
        # Includes tainted nodes that `nodeSelector` does not select any more.
        untaint=tuple(sorted(tainted - unhealthy)),
        evict=() if halted or recent_halt is not HaltReason.NONE else _longest_unhealthy_first(since_s, evict_due),
    )


def keep_same_nodes(result: HealthResult, before: Mapping[str, str], uids: Mapping[str, str]) -> HealthResult:
    """Drop the unhealthy times of nodes whose uid has changed, because they were recreated."""
    retained = {node: since for node, since in result.unhealthy_since_s.items() if before.get(node) == uids.get(node)}
    return msgspec.structs.replace(result, unhealthy_since_s=retained)


def disruption_halt(unhealthy: int, nodes: int, threshold: float) -> HaltReason:
    """Whether so many unhealthy nodes suggest a common cause: all of them, or more than two and more than this share."""
    if unhealthy and unhealthy == nodes:
        return HaltReason.FULL
    is_partial = unhealthy > MIN_DISRUPTED_NODES and unhealthy > threshold * nodes
    return HaltReason.PARTIAL if is_partial else HaltReason.NONE


def find_own_taint(cnr: TaintedObject) -> Mapping[str, Any] | None:
    """The taint that this controller sets; None if there is none."""
    return next((taint for taint in cnr.spec.taints if is_own_taint(taint)), None)


def with_own_taint(cnr: TaintedObject, now_s: float) -> list[Mapping[str, Any]]:
    """All taints, with this controller's renewed."""
    own = {"key": TAINT_KEY, "effect": TAINT_EFFECT, "qosLevel": TAINT_QOS, "timeAdded": format_timestamp(now_s)}
    return [*without_own_taint(cnr), own]


def without_own_taint(cnr: TaintedObject) -> list[Mapping[str, Any]]:
    """All taints but this controller's."""
    return [taint for taint in cnr.spec.taints if not is_own_taint(taint)]


def is_own_taint(taint: Mapping[str, Any]) -> bool:
    """Whether this controller sets the taint."""
    return (taint.get("key"), taint.get("effect"), taint.get("qosLevel")) == (TAINT_KEY, TAINT_EFFECT, TAINT_QOS)


def _unhealthy_since(
    node: str, before_s: Mapping[str, float], cnr: TaintedObject | None, config: HealthConfig, now_s: float
) -> float:
    if node in before_s:
        return before_s[node]
    return now_s - config.taint_after_s if cnr is not None and find_own_taint(cnr) is not None else now_s


def _longest_unhealthy_first(since_s: Mapping[str, float], nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=lambda node: (since_s[node], node)))


MIRROR_POD_KEY = "kubernetes.io/config.mirror"
TERMINATED_PHASES = ("Succeeded", "Failed")


def reclaimed_victims(pods: Iterable[ControllerPod]) -> list[ControllerPod]:
    """Running reclaimed pods, except those that would be recreated at once (DaemonSet), that the API server cannot evict
    (static pods), or that are terminating."""
    return [pod for pod in pods if _is_reclaimed(pod) and not _is_not_evictable(pod)]


def _is_reclaimed(pod: ControllerPod) -> bool:
    try:
        return explicit_qos_level(pod.metadata.annotations) is QoSLevel.RECLAIMED
    except ValueError:
        return False  # a pod with an invalid level is not evicted


def _is_not_evictable(pod: ControllerPod) -> bool:
    owners = {owner.kind for owner in pod.metadata.owner_references if owner.controller}
    terminated = pod.status.phase in TERMINATED_PHASES or pod.metadata.deletion_timestamp is not None
    return terminated or "DaemonSet" in owners or MIRROR_POD_KEY in pod.metadata.annotations


NODE_RETRY_S = 60.0
"""Time after which a node is tried again: a write may succeed, or a disruption budget allow further evictions."""


class NodeRotation:
    """Rotation of the nodes of one action, so that nodes that fail do not use up the rate of all others."""

    def __init__(self, bucket: TokenBucket | None = None) -> None:
        """`bucket` limits the rate; None means no limit."""
        self._bucket = bucket
        self._tried_s: dict[str, float] = {}

    def next_nodes(self, nodes: Sequence[str], now_s: float) -> list[str]:
        """As many nodes as the rate allows, in the order given. Nodes that are no longer listed are forgotten."""
        self._tried_s = {node: at_s for node, at_s in self._tried_s.items() if node in nodes}
        selected = []
        for node in nodes:
            if now_s - self._tried_s.get(node, now_s - NODE_RETRY_S) < NODE_RETRY_S:
                continue
            if self._bucket is not None and not self._bucket.take(now_s):
                break
            self._tried_s[node] = now_s
            selected.append(node)
        return selected
