"""What is to be done about all objects of one kind: who gets what now, and what each object's status is to say. Pure.

One object that cannot stand stops the whole kind: it may be the one that a node should have had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from controller.kcc.assign import match
from controller.kcc.targets import (
    FINALIZER,
    NORMAL,
    OLD_FINALIZERS,
    Invalid,
    Target,
    conflicts,
    cutoff,
    read,
)
from controller.kinds import Cnc, Gvr
from kube.moments import stamp
from kube.objects import Dynamic

Entry = Mapping[str, Any]


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the plan of one kind depends on."""

    gvr: Gvr
    allowed: Mapping[int, frozenset[str]]
    objects: Mapping[str, Dynamic]
    unreadable: Mapping[str, str] = {}
    """Objects that are there and could not be read, with the reason: they stop the kind like any invalid one."""
    nodes: Mapping[str, Cnc]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written. Applied twice, it does nothing the second time."""

    entries: Mapping[str, Entry | None] = {}
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


class _Spread(msgspec.Struct, frozen=True, kw_only=True):
    entries: Mapping[str, Entry | None]
    counts: Mapping[str, Mapping[str, int]]


def plan(known: Known, now_s: float) -> Plan:
    """See the module. `now_s` is since the epoch."""
    standing, invalid, expired = _judge(known, now_s)
    spread = None if invalid or known.unreadable else _spread(known, standing)
    statuses = _statuses(known, standing, invalid, spread, now_s)
    ends = [target.expires_at_s for target in standing.values() if target.expires_at_s is not None]
    return Plan(
        entries={} if spread is None else spread.entries,
        statuses=statuses,
        finalizers=_finalizers(known, halted=spread is None),
        expired=tuple(expired),
        invalid=tuple(sorted({*invalid, *known.unreadable})),
        wake_at_s=min(ends, default=None),
        counts={} if spread is None else spread.counts,
    )


def entry_of(entries: tuple[Entry, ...], gvr: Gvr) -> Entry | None:
    """What a node has of this kind now."""
    kind = msgspec.to_builtins(gvr)
    return next((entry for entry in entries if entry.get("configType") == kind), None)


def with_entry(entries: tuple[Entry, ...], gvr: Gvr, new: Entry | None) -> list[Entry]:
    """The list of a node with this entry in place of what it has of this kind; all others as they are, in their order."""
    kind = msgspec.to_builtins(gvr)
    kept: list[Entry] = []
    for entry in entries:
        if entry.get("configType") != kind:
            kept.append(entry)
        elif new is not None:
            kept.append({**entry, **new})
            new = None
    return kept if new is None else [*kept, new]


def _judge(known: Known, now_s: float) -> tuple[dict[str, Target], dict[str, Invalid], list[str]]:
    # Objects that are being deleted, and those whose time is over, count no more.
    standing: dict[str, Target] = {}
    invalid: dict[str, Invalid] = {}
    expired = []
    for key, found in sorted(known.objects.items()):
        if found.metadata.deletion_timestamp is not None:
            continue
        try:
            target = read(key, found, known.allowed)
        except Invalid as error:
            invalid[key] = error
            continue
        if target.expires_at_s is not None and target.expires_at_s <= now_s:
            expired.append(key)
        else:
            standing[key] = target
    return standing, invalid | conflicts(standing), expired


def _spread(known: Known, standing: Mapping[str, Target]) -> _Spread:
    assigned: dict[str, list[str]] = {key: [] for key in standing}
    for node in sorted(known.nodes):
        if target := match(node, known.nodes[node].metadata.labels, standing.values()):
            assigned[target.key].append(node)
    cutoffs = {key: cutoff(target.canary, len(assigned[key])) for key, target in standing.items()}
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
        wanted = _entry(known.gvr, target)
        for node in assigned[key][: cutoffs[key]] if not target.paused else ():
            after[node] = wanted
    for key, target in standing.items():
        wanted = _entry(known.gvr, target)
        counts[key] = {  # of what is, not of what is meant to be: a node counts when its entry was written
            "targetNodes": len(assigned[key]),
            "canaryNodes": cutoffs[key],
            "updatedTargetNodes": sum(_same(before[node], wanted) for node in assigned[key]),
            "updatedNodes": sum(entry is not None and entry.get("hash") == target.hash for entry in before.values()),
        }
    entries = {node: entry for node, entry in after.items() if not _same(before[node], entry)}
    return _Spread(entries=entries, counts=counts)


def _entry(gvr: Gvr, target: Target) -> Entry:
    return {
        "configType": msgspec.to_builtins(gvr),
        "configName": target.metadata.name,
        "configNamespace": target.metadata.namespace,
        "hash": target.hash,
    }


def _same(one: Entry | None, other: Entry | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(one.get(name) == other.get(name) for name in ("configName", "configNamespace", "hash"))


def _statuses(
    known: Known,
    standing: Mapping[str, Target],
    invalid: Mapping[str, Invalid],
    spread: _Spread | None,
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
            name: value for name, value in wanted.items() if found.status.get(name, _ZERO.get(name)) != value
        }:
            changed[key] = differing
    return changed


_ZERO: Mapping[str, Any] = {
    "observedGeneration": 0, "currentHash": "", "targetNodes": 0, "canaryNodes": 0, "updatedTargetNodes": 0, "updatedNodes": 0,
}  # fmt: skip


def conditions_with(before: object, *, valid: bool, reason: str, message: str, now_s: float) -> list[Mapping[str, Any]]:
    """The conditions with this one of type Valid; its time is when it last turned, and others stay."""
    listed = [each for each in before if isinstance(each, Mapping)] if isinstance(before, (list, tuple)) else []
    status = "True" if valid else "False"
    old = next((each for each in listed if each.get("type") == "Valid"), {})
    turned = old.get("lastTransitionTime") if old.get("status") == status else None
    new = {"type": "Valid", "status": status, "reason": reason, "message": message}
    new["lastTransitionTime"] = turned or stamp(now_s)
    return [*(each for each in listed if each.get("type") != "Valid"), new]


def _finalizers(known: Known, *, halted: bool) -> dict[str, tuple[str, ...]]:
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
        after = tuple(each for each in before if each not in (*OLD_FINALIZERS, FINALIZER))
        if found.metadata.deletion_timestamp is None or key in named:
            after = tuple(each for each in before if each not in OLD_FINALIZERS)
            after = after if FINALIZER in after or found.metadata.deletion_timestamp else (*after, FINALIZER)
        if after != before:
            wanted[key] = after
    return wanted
