"""What becomes of nodes whose agents are not well: first no new reclaimed pods, later the old ones leave. Pure.

Nobody lends and takes back on a node without its agent, so reclaimed pods there would run against online ones unwatched.
After `taintAfterS` the node's CustomNodeResource is tainted for reclaimed pods, and what the Node itself promises them is taken
away, for stock schedulers go by that; after `evictAfterS` those that run there are evicted. A node whose agents are well again
is untainted at once, and its agent promises anew.

Many agents that are gone at once are a mistake of somebody or of ours (a bad image, a partition, this controller's own view)
and no reason to empty nodes: beyond `disruptionThreshold` both halt. So do they while what is known is old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from controller.config import HealthConfig
from controller.kinds import Cnr, Pod
from controller.selectors import Selector
from kube.moments import stamp

TAINT_KEY, TAINT_EFFECT, TAINT_QOS = "node.kubernetes.io/unschedulable", "NoSchedule", "reclaimed_cores"
COUNTED_S = 60.0
"""Between two looks, at most: a process that stood still has seen nothing meanwhile."""
REPLACED_S = 120.0
"""An agent that a newer one replaces is away for less: a roll-out is no disaster, however many nodes it takes at a time."""
FEW = 2
"""So many nodes may always be unwell: in a small cluster two are a large share."""


class Agent(StrEnum):
    """One agent on one node."""

    READY = "ready"
    NOT_READY = "not_ready"
    NOT_FOUND = "not_found"


class Halt(StrEnum):
    """Why nothing is tainted or evicted."""

    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"
    STALE = "stale"


Agents = Mapping[tuple[str, str], Agent]
"""By node and agent."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one look, which the next begins with."""

    at_s: float
    unwell_since_s: Mapping[str, float] = {}
    """By node."""
    halt: Halt = Halt.NONE
    taint: tuple[str, ...] = ()
    untaint: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    """Nodes that reclaimed pods are to be kept away from, tainted already or not."""
    evict: tuple[str, ...] = ()
    """Those that have been unwell for longest come first."""


def look(
    nodes: Iterable[str], agents: Mapping[str, Selector], pods: Mapping[str, list[Pod]]
) -> dict[tuple[str, str], Agent]:
    """How each agent is on each of the nodes; `pods` are by node, and may be of anybody."""
    states: dict[tuple[str, str], Agent] = {}
    for node in nodes:
        for name, selector in agents.items():
            mine = [pod for pod in pods.get(node, ()) if selector.matches(pod.metadata.labels)]
            if any(pod.ready for pod in mine):
                states[node, name] = Agent.READY
            else:
                states[node, name] = Agent.NOT_READY if mine else Agent.NOT_FOUND
    return states


def judge(
    states: Agents, before: Judged, cnrs: Mapping[str, Cnr], config: HealthConfig, *, now_s: float, fresh: bool
) -> Judged:
    """`now_s` is since the epoch; `fresh` says whether the API server was heard lately.

    A node whose agent turns from missing to not ready has been unwell all along. Time in which nobody looked, or nothing was
    heard, does not count. A leader that has just begun takes a node that bears the taint to have been unwell until then for as
    long as that takes, and no longer.
    """
    passed_s = max(0.0, now_s - before.at_s)
    unseen_s = max(0.0, passed_s - COUNTED_S) if fresh else passed_s
    before_s = {node: since + unseen_s for node, since in before.unwell_since_s.items()}
    if not fresh:
        return Judged(at_s=now_s, unwell_since_s=before_s, halt=Halt.STALE)
    nodes = {node for node, _ in states}
    unwell = {node for (node, _), state in states.items() if state is not Agent.READY}
    since_s = {node: _since(node, before_s, cnrs.get(node), config, now_s) for node in unwell}
    lasting = [node for node in unwell if now_s - since_s[node] >= min(REPLACED_S, config.taint_after_s)]
    halt = disruption(len(lasting), len(nodes), config.disruption_threshold)
    tainted = {node for node, cnr in cnrs.items() if our_taint(cnr) is not None}
    due = [node for node, since in since_s.items() if now_s - since >= config.taint_after_s]
    out = [node for node, since in since_s.items() if now_s - since >= config.evict_after_s]
    halted = halt is not Halt.NONE
    # Nobody is evicted while many have just become unwell: what hit them may be what made the others due.
    stormy = disruption(len(unwell), len(nodes), config.disruption_threshold) is not Halt.NONE
    return Judged(
        at_s=now_s,
        unwell_since_s=since_s,
        halt=halt,
        taint=() if halted else _longest(since_s, (node for node in due if node in cnrs and node not in tainted)),
        away=() if halted else _longest(since_s, due),
        # Nodes that nobody asks about any longer (`nodeSelector`) are not kept tainted either.
        untaint=tuple(sorted(tainted - unwell)),
        evict=() if halted or stormy else _longest(since_s, out),
    )


def of_these(judged: Judged, before: Mapping[str, str], uids: Mapping[str, str]) -> Judged:
    """What was judged of nodes that had these uids, without those that were made anew under their old names since."""
    kept = {node: since for node, since in judged.unwell_since_s.items() if before.get(node) == uids.get(node)}
    return msgspec.structs.replace(judged, unwell_since_s=kept)


def disruption(unwell: int, nodes: int, threshold: float) -> Halt:
    """Whether so many of so many nodes are too many to believe: all of them, or more than two and more than this share."""
    if unwell and unwell == nodes:
        return Halt.FULL
    return Halt.PARTIAL if unwell > FEW and unwell > threshold * nodes else Halt.NONE


def our_taint(cnr: Cnr) -> Mapping[str, Any] | None:
    """The taint that this controller sets, if it is there."""
    return next((taint for taint in cnr.spec.taints if is_ours(taint)), None)


def with_taint(cnr: Cnr, now_s: float) -> list[Mapping[str, Any]]:
    """Its taints and ours."""
    ours = {"key": TAINT_KEY, "effect": TAINT_EFFECT, "qosLevel": TAINT_QOS, "timeAdded": stamp(now_s)}
    return [*without_taint(cnr), ours]


def without_taint(cnr: Cnr) -> list[Mapping[str, Any]]:
    """Its taints but ours."""
    return [taint for taint in cnr.spec.taints if not is_ours(taint)]


def is_ours(taint: Mapping[str, Any]) -> bool:
    """Whether this controller sets it."""
    return (taint.get("key"), taint.get("effect"), taint.get("qosLevel")) == (TAINT_KEY, TAINT_EFFECT, TAINT_QOS)


def _since(node: str, before_s: Mapping[str, float], cnr: Cnr | None, config: HealthConfig, now_s: float) -> float:
    if node in before_s:
        return before_s[node]
    return now_s - config.taint_after_s if cnr is not None and our_taint(cnr) is not None else now_s


def _longest(since_s: Mapping[str, float], nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=lambda node: (since_s[node], node)))
