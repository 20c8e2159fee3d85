"""Computes what to write for all objects of one kind: entries, statuses, finalizers and deletions.
One invalid object stops the rollout of its whole kind, because it may be the one that a node should have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from controller.kcc.rollout_guard import RolloutGuard, RolloutStep, halted_condition, next_step, with_rollout_condition
from controller.kcc.targets import (
    FINALIZER,
    LEGACY_FINALIZERS,
    NORMAL,
    ConfigTarget,
    InvalidTarget,
    assign_target,
    find_conflicts,
    parse_target,
)
from controller.kinds import Cnc, GroupVersionResource
from kube.objects import UnstructuredObject, format_timestamp

ConfigEntry = Mapping[str, Any]


class RolloutInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the plan of one kind."""

    gvr: GroupVersionResource
    allowed: Mapping[int, frozenset[str]]
    objects: Mapping[str, UnstructuredObject]
    unreadable: Mapping[str, str] = {}
    """Objects that could not be decoded, with the reason. They stop the rollout like invalid ones."""
    nodes: Mapping[str, Cnc]
    guard: RolloutGuard | None = None
    """Settings and observations of the guard; None rolls new content out to all nodes at once."""


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to write. Idempotent: after they are written, the next plan is empty."""

    entries: Mapping[str, ConfigEntry | None] = {}
    """New entry of the kind by node; None removes it. Unchanged nodes are absent."""
    statuses: Mapping[str, Mapping[str, Any]] = {}
    """Changed status fields by object."""
    finalizers: Mapping[str, tuple[str, ...]] = {}
    expired: tuple[str, ...] = ()
    """Temporary objects whose time is over, to be deleted."""
    invalid: tuple[str, ...] = ()
    wake_at_s: float | None = None
    """Time at which the next temporary object expires, or a guarded rollout is evaluated again."""
    paused: Mapping[str, str] = {}
    """Objects whose rollout this plan pauses, with the message."""
    counts: Mapping[str, Mapping[str, int]] = {}
    """Numbers of each object's status, for metrics."""


class _NodeAssignment(msgspec.Struct, frozen=True, kw_only=True):
    entries: Mapping[str, ConfigEntry | None]
    counts: Mapping[str, Mapping[str, int]]
    steps: Mapping[str, RolloutStep]


def plan_rollout(inputs: RolloutInputs, now_s: float) -> RolloutPlan:
    """Compute the plan of one kind. `now_s` is since the epoch."""
    targets, invalid, expired = _validate_targets(inputs, now_s)
    assignment = None if invalid or inputs.unreadable else _assign_nodes(inputs, targets, now_s)
    statuses = _statuses(inputs, targets, invalid, assignment, now_s)
    steps = {} if assignment is None else assignment.steps
    wake_times = [target.expires_at_s for target in targets.values()] + [step.wake_at_s for step in steps.values()]
    return RolloutPlan(
        entries={} if assignment is None else assignment.entries,
        statuses=statuses,
        finalizers=_plan_finalizers(inputs, halted=assignment is None),
        expired=tuple(expired),
        invalid=tuple(sorted({*invalid, *inputs.unreadable})),
        wake_at_s=min((at_s for at_s in wake_times if at_s is not None), default=None),
        paused={
            key: str(step.condition["message"])
            for key, step in steps.items()
            if step.paused_now and step.condition is not None
        },
        counts={} if assignment is None else assignment.counts,
    )


def entry_of(entries: tuple[ConfigEntry, ...], gvr: GroupVersionResource) -> ConfigEntry | None:
    """Current entry of this kind in a node's list."""
    kind = msgspec.to_builtins(gvr)
    return next((entry for entry in entries if entry.get("configType") == kind), None)


def with_entry(
    entries: tuple[ConfigEntry, ...], gvr: GroupVersionResource, new: ConfigEntry | None
) -> list[ConfigEntry]:
    """List of a node with the entry of this kind replaced, and all others unchanged and in order."""
    kind = msgspec.to_builtins(gvr)
    result: list[ConfigEntry] = []
    for entry in entries:
        if entry.get("configType") != kind:
            result.append(entry)
        elif new is not None:
            result.append({**entry, **new})
            new = None
    return result if new is None else [*result, new]


def _validate_targets(
    inputs: RolloutInputs, now_s: float
) -> tuple[dict[str, ConfigTarget], dict[str, InvalidTarget], list[str]]:
    # Objects that are being deleted or have expired are ignored.
    targets: dict[str, ConfigTarget] = {}
    invalid: dict[str, InvalidTarget] = {}
    expired = []
    for key, object_ in sorted(inputs.objects.items()):
        if object_.metadata.deletion_timestamp is not None:
            continue
        try:
            target = parse_target(key, object_, inputs.allowed)
        except InvalidTarget as error:
            invalid[key] = error
            continue
        if target.expires_at_s is not None and target.expires_at_s <= now_s:
            expired.append(key)
        else:
            targets[key] = target
    return targets, invalid | find_conflicts(targets), expired


def _assign_nodes(inputs: RolloutInputs, targets: Mapping[str, ConfigTarget], now_s: float) -> _NodeAssignment:
    assigned: dict[str, list[str]] = {key: [] for key in targets}
    for node in sorted(inputs.nodes):
        if target := assign_target(node, inputs.nodes[node].metadata.labels, targets.values()):
            assigned[target.key].append(node)
    before = {node: entry_of(cnc.status.katalyst_custom_config_list, inputs.gvr) for node, cnc in inputs.nodes.items()}
    # A node keeps its entry, unless the object does not exist any more: the agent could not fetch it.
    after = {node: entry if entry is None or _entry_key(entry) in targets else None for node, entry in before.items()}
    counts: dict[str, dict[str, int]] = {}
    steps: dict[str, RolloutStep] = {}
    for key, target in targets.items():
        entry = _target_entry(inputs.gvr, target)
        updated = frozenset(node for node in assigned[key] if _same_entry(before[node], entry))
        steps[key] = next_step(target, inputs.objects[key].status, assigned[key], updated, inputs.guard, now_s)
        for node in steps[key].nodes if not target.paused else ():
            after[node] = entry
        counts[key] = {  # from the entries that are written, not from those that are planned
            "targetNodes": len(assigned[key]),
            "canaryNodes": len(steps[key].nodes),
            "updatedTargetNodes": len(updated),
            "updatedNodes": sum(
                current is not None and current.get("hash") == target.hash for current in before.values()
            ),
        }
    entries = {node: entry for node, entry in after.items() if not _same_entry(before[node], entry)}
    return _NodeAssignment(entries=entries, counts=counts, steps=steps)


def _entry_key(entry: ConfigEntry) -> str:
    return f"{entry.get('configNamespace', '')}/{entry.get('configName')}".strip("/")


def _target_entry(gvr: GroupVersionResource, target: ConfigTarget) -> ConfigEntry:
    return {
        "configType": msgspec.to_builtins(gvr),
        "configName": target.metadata.name,
        "configNamespace": target.metadata.namespace,
        "hash": target.hash,
    }


def _same_entry(first: ConfigEntry | None, second: ConfigEntry | None) -> bool:
    if first is None or second is None:
        return first is second
    return all(first.get(name) == second.get(name) for name in ("configName", "configNamespace", "hash"))


def _statuses(
    inputs: RolloutInputs,
    targets: Mapping[str, ConfigTarget],
    invalid: Mapping[str, InvalidTarget],
    assignment: _NodeAssignment | None,
    now_s: float,
) -> dict[str, dict[str, Any]]:
    changes: dict[str, dict[str, Any]] = {}
    blocking = sorted({*invalid, *inputs.unreadable})
    blocked_message = f"not rolled out while {blocking[0]} is invalid" if blocking else ""
    for key, object_ in inputs.objects.items():
        if key not in targets and key not in invalid:
            continue
        problem = invalid.get(key)
        desired: dict[str, Any] = {"observedGeneration": object_.metadata.generation}
        if problem is None:
            # Written during a halted rollout too: agents compare it with the hash in their CustomNodeConfig.
            desired["currentHash"] = targets[key].hash
        if assignment is not None:
            desired |= assignment.counts[key]
        reason, message = (NORMAL, blocked_message) if problem is None else (problem.reason, problem.message)
        before = object_.status.get("conditions")
        if assignment is not None:
            before = with_rollout_condition(before, assignment.steps[key].condition)
        elif problem is None:
            before = with_rollout_condition(before, halted_condition(targets[key], object_.status, inputs.guard, now_s))
        desired["conditions"] = conditions_with(
            before, valid=problem is None, reason=reason, message=message, now_s=now_s
        )
        # The API omits zeros, so absent numbers are zero.
        if changed := {
            name: value
            for name, value in desired.items()
            if object_.status.get(name, _STATUS_DEFAULTS.get(name)) != value
        }:
            changes[key] = changed
    return changes


_STATUS_DEFAULTS: Mapping[str, Any] = {
    "observedGeneration": 0, "currentHash": "", "targetNodes": 0, "canaryNodes": 0, "updatedTargetNodes": 0, "updatedNodes": 0,
}  # fmt: skip


def conditions_with(before: object, *, valid: bool, reason: str, message: str, now_s: float) -> list[Mapping[str, Any]]:
    """Conditions with one of type Valid, whose transition time is kept while its status is unchanged."""
    conditions = [item for item in before if isinstance(item, Mapping)] if isinstance(before, (list, tuple)) else []
    status = "True" if valid else "False"
    old = next((condition for condition in conditions if condition.get("type") == "Valid"), {})
    transition_time = old.get("lastTransitionTime") if old.get("status") == status else None
    new = {"type": "Valid", "status": status, "reason": reason, "message": message}
    new["lastTransitionTime"] = transition_time or format_timestamp(now_s)
    return [*(condition for condition in conditions if condition.get("type") != "Valid"), new]


def _plan_finalizers(inputs: RolloutInputs, *, halted: bool) -> dict[str, tuple[str, ...]]:
    """Finalizers to change.

    Every object gets this controller's finalizer, so that its nodes are moved before it is deleted. It is removed once no
    node has the object, or while the kind is halted: an invalid object must not block the deletion of others.
    """
    in_use = set()
    if not halted:
        for cnc in inputs.nodes.values():
            if entry := entry_of(cnc.status.katalyst_custom_config_list, inputs.gvr):
                in_use.add(_entry_key(entry))
    changes = {}
    for key, object_ in inputs.objects.items():
        before = object_.metadata.finalizers
        after = tuple(name for name in before if name not in (*LEGACY_FINALIZERS, FINALIZER))
        if object_.metadata.deletion_timestamp is None or key in in_use:
            after = tuple(name for name in before if name not in LEGACY_FINALIZERS)
            after = after if FINALIZER in after or object_.metadata.deletion_timestamp else (*after, FINALIZER)
        if after != before:
            changes[key] = after
    return changes
