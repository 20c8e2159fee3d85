"""Rolls new content out to a canary first, and pauses when evictions or unready agents rise among the nodes that have it.
The stage of a rollout is the condition RolledOut of its object, so that a new leader continues it. A rollout that is paused
stays paused until the object changes. An object with a canary of its own is not guarded: its owner decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from controller.kcc.targets import ConfigTarget, SelectorClass, canary_cutoff
from kube.objects import format_timestamp, parse_timestamp

CONDITION = "RolledOut"
CHECK_INTERVAL_S = 5.0
"""Time between two evaluations of a rollout that is not complete."""
MIN_EVICTIONS, MIN_SHARE, RISE_FACTOR = 3, 0.1, 2.0
"""Evictions or unready agents rise if there are at least this number of evictions, at least this number per node with the new
content, and more than this multiple of the number per other node."""
OBSERVATION_DELAY_S = 10.0
"""Time from an eviction until the stage in which it is observed: the budget is read, and a rollout evaluated, every five
seconds each. Evictions this long before a later stage belong to the rollout as well."""
UNREADY_S = 30.0
"""Time after which an agent that is not ready counts; a restart takes some seconds."""


class RolloutStage(StrEnum):
    """Reasons of the condition."""

    CANARY_UPDATING = "CanaryUpdating"
    CANARY_SOAKING = "CanarySoaking"
    """All canaries have the content; the other nodes wait."""
    UPDATING = "Updating"
    CORRECTING = "Correcting"
    """The content was changed while the rollout was paused: all nodes get it, so that a rollback is fast."""
    COMPLETE = "Complete"
    EVICTIONS_ROSE = "EvictionsRose"
    AGENTS_NOT_READY = "AgentsNotReady"


PAUSED = (RolloutStage.EVICTIONS_ROSE, RolloutStage.AGENTS_NOT_READY)
GUARDED = (RolloutStage.CANARY_UPDATING, RolloutStage.CANARY_SOAKING, RolloutStage.UPDATING)


class NodeEviction(NamedTuple):
    """Evictions of one node."""

    at_s: float
    """Seconds since the epoch."""
    node: str
    pods: int


class RolloutGuard(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the guard, and what nodes report."""

    canary: int | str
    soak_s: float
    evictions: tuple[NodeEviction, ...] = ()
    unready_since_s: Mapping[str, float] = {}
    """Nodes whose agent is not ready, with the time since the epoch."""


class RolloutStep(msgspec.Struct, frozen=True, kw_only=True):
    """Which nodes get the content of one object now."""

    nodes: Collection[str]
    condition: Mapping[str, Any] | None = None
    """The condition RolledOut; None for an object that is not guarded."""
    wake_at_s: float | None = None
    paused_now: bool = False
    """Whether this step pauses the rollout."""


class _Stage(NamedTuple):
    stage: RolloutStage
    since_s: float


def next_step(
    target: ConfigTarget,
    status: Mapping[str, Any],
    assigned: Sequence[str],
    updated: frozenset[str],
    guard: RolloutGuard | None,
    now_s: float,
) -> RolloutStep:
    """Return the next step of a rollout; `assigned` are the nodes of the object in their order, `updated` those that have its
    content."""
    if guard is None or not _is_guarded(target):
        return RolloutStep(nodes=assigned[: canary_cutoff(target.canary, len(assigned))])
    canaries = assigned[: max(1, canary_cutoff(guard.canary, len(assigned)))]
    before = _stage_of(status)
    stage, detail = _advance(_begin(target, status, before, now_s), (assigned, canaries, updated), guard, now_s)
    if stage.stage in PAUSED:
        nodes: Collection[str] = updated
    else:
        nodes = canaries if stage.stage in (RolloutStage.CANARY_UPDATING, RolloutStage.CANARY_SOAKING) else assigned
    done = stage.stage is RolloutStage.COMPLETE or stage.stage in PAUSED
    paused_now = stage.stage in PAUSED and stage != before
    unchanged = before is not None and stage == before
    condition = (
        _condition(status) if unchanged else _new_condition(stage, (len(canaries), len(assigned)), detail, guard)
    )
    return RolloutStep(
        nodes=nodes,
        condition=condition,
        wake_at_s=None if done or target.paused else now_s + CHECK_INTERVAL_S,
        paused_now=paused_now,
    )


def _is_guarded(target: ConfigTarget) -> bool:
    return target.canary is None and target.kind is not SelectorClass.NODES


def halted_condition(
    target: ConfigTarget, status: Mapping[str, Any], guard: RolloutGuard | None, now_s: float
) -> Mapping[str, Any] | None:
    """Return the condition RolledOut of an object whose kind is halted; None for none.

    The hash in the status follows the content also while the kind is halted. The rollout of that content has to begin with it:
    later its hash is no new one, and all nodes would get it at once.
    """
    before = _stage_of(status)
    if guard is None or not _is_guarded(target) or status.get("currentHash") == target.hash:
        return _condition(status)
    stage = _begin(target, status, before, now_s)
    return {
        **_new_condition(stage, (0, 0), "", guard),
        "message": "the rollout waits until all objects of its kind are valid",
    }


def _begin(target: ConfigTarget, status: Mapping[str, Any], before: _Stage | None, now_s: float) -> _Stage:
    """Return the stage before this step: that of the condition, or the first one for new content."""
    if status.get("currentHash") == target.hash:
        # Content that an earlier release has rolled out has no condition.
        return before or _Stage(RolloutStage.COMPLETE, now_s)
    paused = before is not None and before.stage in PAUSED
    return _Stage(RolloutStage.CORRECTING if paused else RolloutStage.CANARY_UPDATING, now_s)


def _advance(
    stage: _Stage,
    nodes: tuple[Sequence[str], Sequence[str], frozenset[str]],
    guard: RolloutGuard,
    now_s: float,
) -> tuple[_Stage, str]:
    """Return the stage after this step, and why it is paused."""
    assigned, canaries, updated = nodes
    if stage.stage in PAUSED or stage.stage is RolloutStage.COMPLETE:
        return stage, ""
    if updated.issuperset(assigned):
        return _Stage(RolloutStage.COMPLETE, now_s), ""
    if stage.stage in GUARDED:
        for reason, detail in (
            (RolloutStage.EVICTIONS_ROSE, _rise_of_evictions(stage, assigned, updated, guard)),
            (RolloutStage.AGENTS_NOT_READY, _rise_of_unready(stage.since_s, assigned, updated, guard, now_s)),
        ):
            if detail:
                return _Stage(reason, now_s), detail
    if stage.stage is RolloutStage.CANARY_UPDATING and updated.issuperset(canaries):
        return _Stage(RolloutStage.CANARY_SOAKING, now_s), ""
    if stage.stage is RolloutStage.CANARY_SOAKING and now_s - stage.since_s >= guard.soak_s:
        return _Stage(RolloutStage.UPDATING, now_s), ""
    return stage, ""


def _rise_of_evictions(stage: _Stage, assigned: Sequence[str], updated: frozenset[str], guard: RolloutGuard) -> str:
    new, other = set(assigned) & updated, set(assigned) - updated
    delay_s = 0.0 if stage.stage is RolloutStage.CANARY_UPDATING else OBSERVATION_DELAY_S
    recent = [each for each in guard.evictions if each.at_s >= stage.since_s - delay_s]
    on_new, on_other = (sum(each.pods for each in recent if each.node in nodes) for nodes in (new, other))
    if on_new < MIN_EVICTIONS or not _rises((on_new, len(new)), (on_other, len(other))):
        return ""
    return f"{on_new} pods were evicted on the {len(new)} nodes with the new content, {on_other} on the {len(other)} others"


def _rise_of_unready(
    since_s: float, assigned: Sequence[str], updated: frozenset[str], guard: RolloutGuard, now_s: float
) -> str:
    new, other = set(assigned) & updated, set(assigned) - updated
    unready = {node for node, at_s in guard.unready_since_s.items() if since_s <= at_s <= now_s - UNREADY_S}
    on_new, on_other = len(unready & new), len(unready & other)
    if not _rises((on_new, len(new)), (on_other, len(other))):
        return ""
    others = f"{on_other} of the {len(other)} others"
    return f"the agents of {on_new} of the {len(new)} nodes with the new content are not ready, {others}"


def _rises(new: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether the count per node is a rise; both are counts and numbers of nodes."""
    (count, nodes), (other_count, other_nodes) = new, other
    if not count or count < MIN_SHARE * nodes:
        return False
    return count / nodes > RISE_FACTOR * other_count / max(1, other_nodes)


def _condition(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    conditions = status.get("conditions")
    for condition in conditions if isinstance(conditions, (list, tuple)) else ():
        if isinstance(condition, Mapping) and condition.get("type") == CONDITION:
            return condition
    return None


def with_rollout_condition(before: object, condition: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the conditions with this one of type RolledOut in its place, or without one."""
    conditions = [each for each in before if isinstance(each, Mapping)] if isinstance(before, (list, tuple)) else []
    others = [each for each in conditions if each.get("type") != CONDITION]
    return others if condition is None else [condition, *others]


def _stage_of(status: Mapping[str, Any]) -> _Stage | None:
    condition = _condition(status)
    if condition is None:
        return None
    try:
        since_s = parse_timestamp(str(condition.get("lastTransitionTime")))
        return _Stage(RolloutStage(str(condition.get("reason"))), since_s)
    except ValueError:
        return None  # written by another program


def _new_condition(stage: _Stage, counts: tuple[int, int], detail: str, guard: RolloutGuard) -> Mapping[str, Any]:
    canaries, nodes = counts
    texts = {
        RolloutStage.CANARY_UPDATING: f"{canaries} of {nodes} nodes get this content first",
        RolloutStage.CANARY_SOAKING: (
            f"{canaries} of {nodes} nodes have this content. The others get it after {guard.soak_s:g} s, unless evictions or "
            "unready agents rise"
        ),
        RolloutStage.UPDATING: f"all {nodes} nodes get this content",
        RolloutStage.CORRECTING: f"all {nodes} nodes get this content, because the rollout of the content before was paused",
        RolloutStage.COMPLETE: "",
    }
    paused = (
        f"paused: {detail}. Correct the content or apply the previous one, or set "
        "spec.updateStrategy.rollingUpdate.canary: 100% to continue"
    )
    return {
        "type": CONDITION,
        "status": "True" if stage.stage is RolloutStage.COMPLETE else "False",
        "reason": stage.stage.value,
        "message": texts.get(stage.stage, paused),
        "lastTransitionTime": format_timestamp(math.ceil(stage.since_s)),
    }
