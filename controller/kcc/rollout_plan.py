"""Computes what to write for all objects of one kind: entries, statuses, finalizers and deletions.
Pure. One invalid object stops the rollout of its whole kind: it may be the one that a node should have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from controller.kcc.targets import (
    FINALIZER,
    LEGACY_FINALIZERS,
    NORMAL,
    ConfigTarget,
    InvalidTarget,
    assign_target,
    canary_cutoff,
    find_conflicts,
    parse_target,
)
from controller.kinds import Cnc, GroupVersionResource
from kube.objects import UnstructuredObject, format_timestamp

ConfigEntry = Mapping[str, Any]


class RolloutInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the plan of one kind depends on."""

    gvr: GroupVersionResource
    allowed: Mapping[int, frozenset[str]]
    objects: Mapping[str, UnstructuredObject]
    unreadable: Mapping[str, str] = {}
    """Objects that are there and could not be read, with the reason: they stop the kind like any invalid one."""
    nodes: Mapping[str, Cnc]


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written. Applied twice, it does nothing the second time."""

    entries: Mapping[str, ConfigEntry | None] = {}
    """By node, what its CustomNodeConfig is to have of this kind; None removes it. Nodes that stay are not listed."""
    statuses: Mapping[str, Mapping[str, Any]] = {}
    """By object, fields of its status that change."""
    finalizers: Mapping[str, tuple[str, ...]] = {}
    expired: tuple[str, ...] = ()
    """Objects that held for a time, which is over: to be deleted."""
    invalid: tuple[str, ...] = ()
    wake_at_s: float | None = None
    """When the next one ends."""
    counts: Mapping[str, Mapping[str, int]] = {}
    """By object, the numbers of its status, for metrics."""


class _NodeAssignment(msgspec.Struct, frozen=True, kw_only=True):
    entries: Mapping[str, ConfigEntry | None]
    counts: Mapping[str, Mapping[str, int]]


def plan_rollout(inputs: RolloutInputs, now_s: float) -> RolloutPlan:
    """See the module. `now_s` is since the epoch."""
    standing, invalid, expired = _validate_targets(inputs, now_s)
    spread = None if invalid or inputs.unreadable else _assign_nodes(inputs, standing)
    statuses = _statuses(inputs, standing, invalid, spread, now_s)
    ends = [target.expires_at_s for target in standing.values() if target.expires_at_s is not None]
    return RolloutPlan(
        entries={} if spread is None else spread.entries,
        statuses=statuses,
        finalizers=_plan_finalizers(inputs, halted=spread is None),
        expired=tuple(expired),
        invalid=tuple(sorted({*invalid, *inputs.unreadable})),
        wake_at_s=min(ends, default=None),
        counts={} if spread is None else spread.counts,
    )


def entry_of(entries: tuple[ConfigEntry, ...], gvr: GroupVersionResource) -> ConfigEntry | None:
    """What a node has of this kind now."""
    kind = msgspec.to_builtins(gvr)
    return next((entry for entry in entries if entry.get("configType") == kind), None)


def with_entry(
    entries: tuple[ConfigEntry, ...], gvr: GroupVersionResource, new: ConfigEntry | None
) -> list[ConfigEntry]:
    """The list of a node with this entry in place of what it has of this kind; all others as they are, in their order."""
    kind = msgspec.to_builtins(gvr)
    kept: list[ConfigEntry] = []
    for entry in entries:
        if entry.get("configType") != kind:
            kept.append(entry)
        elif new is not None:
            kept.append({**entry, **new})
            new = None
    return kept if new is None else [*kept, new]


def _validate_targets(
    known: RolloutInputs, now_s: float
) -> tuple[dict[str, ConfigTarget], dict[str, InvalidTarget], list[str]]:
    # Objects that are being deleted, and those whose time is over, count no more.
    standing: dict[str, ConfigTarget] = {}
    invalid: dict[str, InvalidTarget] = {}
    expired = []
    for key, found in sorted(known.objects.items()):
        if found.metadata.deletion_timestamp is not None:
            continue
        try:
            target = parse_target(key, found, known.allowed)
        except InvalidTarget as error:
            invalid[key] = error
            continue
        if target.expires_at_s is not None and target.expires_at_s <= now_s:
            expired.append(key)
        else:
            standing[key] = target
    return standing, invalid | find_conflicts(standing), expired


def _assign_nodes(known: RolloutInputs, standing: Mapping[str, ConfigTarget]) -> _NodeAssignment:
    assigned: dict[str, list[str]] = {key: [] for key in standing}
    for node in sorted(known.nodes):
        if target := assign_target(node, known.nodes[node].metadata.labels, standing.values()):
            assigned[target.key].append(node)
    cutoffs = {key: canary_cutoff(target.canary, len(assigned[key])) for key, target in standing.items()}
    # What a node has is what it will have, until this says otherwise.
    before = {node: entry_of(cnc.status.katalyst_custom_config_list, known.gvr) for node, cnc in known.nodes.items()}
    after = dict(before)
    for node, entry in before.items():
        if (
            entry is not None
            and f"{entry.get('configNamespace', '')}/{entry.get('configName')}".strip("/") not in standing
        ):
            after[node] = None  # the agent would ask in vain for what is gone
    counts: dict[str, dict[str, int]] = {}
    for key, target in standing.items():
        wanted = _target_entry(known.gvr, target)
        for node in assigned[key][: cutoffs[key]] if not target.paused else ():
            after[node] = wanted
    for key, target in standing.items():
        wanted = _target_entry(known.gvr, target)
        counts[key] = {  # of what is, not of what is meant to be: a node counts when its entry was written
            "targetNodes": len(assigned[key]),
            "canaryNodes": cutoffs[key],
            "updatedTargetNodes": sum(_same_entry(before[node], wanted) for node in assigned[key]),
            "updatedNodes": sum(entry is not None and entry.get("hash") == target.hash for entry in before.values()),
        }
    entries = {node: entry for node, entry in after.items() if not _same_entry(before[node], entry)}
    return _NodeAssignment(entries=entries, counts=counts)


def _target_entry(gvr: GroupVersionResource, target: ConfigTarget) -> ConfigEntry:
    return {
        "configType": msgspec.to_builtins(gvr),
        "configName": target.metadata.name,
        "configNamespace": target.metadata.namespace,
        "hash": target.hash,
    }


def _same_entry(one: ConfigEntry | None, other: ConfigEntry | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(one.get(name) == other.get(name) for name in ("configName", "configNamespace", "hash"))


def _statuses(
    known: RolloutInputs,
    standing: Mapping[str, ConfigTarget],
    invalid: Mapping[str, InvalidTarget],
    spread: _NodeAssignment | None,
    now_s: float,
) -> dict[str, dict[str, Any]]:
    changed: dict[str, dict[str, Any]] = {}
    stopping = sorted({*invalid, *known.unreadable})
    held_up = f"not rolled out while {stopping[0]} cannot stand" if stopping else ""
    for key, found in known.objects.items():
        if key not in standing and key not in invalid:
            continue
        problem = invalid.get(key)
        wanted: dict[str, Any] = {"observedGeneration": found.metadata.generation}
        if problem is None:
            # Also while nothing is rolled out: by this an agent knows whether what it is told is still what the object says.
            wanted["currentHash"] = standing[key].hash
        if spread is not None:
            wanted |= spread.counts[key]
        reason, message = (NORMAL, held_up) if problem is None else (problem.reason, problem.message)
        wanted["conditions"] = conditions_with(
            found.status.get("conditions"), valid=problem is None, reason=reason, message=message, now_s=now_s
        )
        # Absent numbers are zero, as the API leaves zeros out.
        if differing := {
            name: value for name, value in wanted.items() if found.status.get(name, _STATUS_DEFAULTS.get(name)) != value
        }:
            changed[key] = differing
    return changed


_STATUS_DEFAULTS: Mapping[str, Any] = {
    "observedGeneration": 0, "currentHash": "", "targetNodes": 0, "canaryNodes": 0, "updatedTargetNodes": 0, "updatedNodes": 0,
}  # fmt: skip


def conditions_with(before: object, *, valid: bool, reason: str, message: str, now_s: float) -> list[Mapping[str, Any]]:
    """The conditions with this one of type Valid; its time is when it last turned, and others stay."""
    listed = [each for each in before if isinstance(each, Mapping)] if isinstance(before, (list, tuple)) else []
    status = "True" if valid else "False"
    old = next((each for each in listed if each.get("type") == "Valid"), {})
    turned = old.get("lastTransitionTime") if old.get("status") == status else None
    new = {"type": "Valid", "status": status, "reason": reason, "message": message}
    new["lastTransitionTime"] = turned or format_timestamp(now_s)
    return [*(each for each in listed if each.get("type") != "Valid"), new]


def _plan_finalizers(known: RolloutInputs, *, halted: bool) -> dict[str, tuple[str, ...]]:
    """Every object gets ours, so that its nodes are moved before it goes. It is taken away once no node has the object any
    longer, or while the kind is stopped: nobody's deletion may depend on somebody else's mistake."""
    named = set()
    if not halted:
        for cnc in known.nodes.values():
            if entry := entry_of(cnc.status.katalyst_custom_config_list, known.gvr):
                named.add(f"{entry.get('configNamespace', '')}/{entry.get('configName')}".strip("/"))
    wanted = {}
    for key, found in known.objects.items():
        before = found.metadata.finalizers
        after = tuple(each for each in before if each not in (*LEGACY_FINALIZERS, FINALIZER))
        if found.metadata.deletion_timestamp is None or key in named:
            after = tuple(each for each in before if each not in LEGACY_FINALIZERS)
            after = after if FINALIZER in after or found.metadata.deletion_timestamp else (*after, FINALIZER)
        if after != before:
            wanted[key] = after
    return wanted
