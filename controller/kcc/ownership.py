"""Resolves which KatalystCustomConfig owns which kind, and the status and finalizers of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from api.text import quote
from controller.kcc.rollout_plan import conditions_with
from controller.kinds import CONFIG_GROUP, GroupVersionResource, Kcc, target_resource_type

FINALIZER = "kcc.katalyst.kubewharf.io/kcc-controller"
ALLOWED_GROUPS = (CONFIG_GROUP,)
"""Only these groups may be distributed, so that the author of a KCC cannot make this controller delete other kinds."""
NORMAL_REASON = "Normal"


class TargetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of one kind."""

    missing: bool = False
    """Whether the API server does not have the kind."""
    count: int = 0
    invalid: tuple[str, ...] = ()


class KccOwnership(msgspec.Struct, frozen=True, kw_only=True):
    """Ownership of all kinds by all KCCs."""

    owners: Mapping[GroupVersionResource, str]
    """Key of the KCC that distributes each kind."""
    reasons: Mapping[str, tuple[str, str]]
    """Reason and message of each KCC's condition."""


def resolve_owners(kccs: Mapping[str, Kcc], targets: Callable[[GroupVersionResource], TargetSummary]) -> KccOwnership:
    """Assign each kind to the oldest KCC that declares it, or to the first by name if they are equally old.

    A KCC that is being deleted owns its kind until no object of it is left, so that deleted objects are still removed from
    their nodes.
    """
    owners: dict[GroupVersionResource, str] = {}
    reasons: dict[str, tuple[str, str]] = {}
    by_age = sorted(kccs.items(), key=lambda item: (item[1].metadata.creation_timestamp or "", item[0]))
    for key, kcc in by_age:
        gvr = kcc.spec.target_type
        if problem := spec_problem(kcc):
            reasons[key] = problem
        elif gvr in owners:
            reasons[key] = ("TargetTypeOverlap", f"{gvr.name} belongs to {owners[gvr]}; delete one of the two")
        else:
            owners[gvr] = key
            reasons[key] = _owner_reason(kcc, gvr, targets(gvr))
    return KccOwnership(owners=owners, reasons=reasons)


def allowed_label_keys(kcc: Kcc) -> dict[int, frozenset[str]]:
    """Label keys that selectors may use, by priority."""
    return {allowed.priority: frozenset(allowed.key_list) for allowed in kcc.spec.node_label_selector_allowed_key_list}


def changed_status(kcc: Kcc, reason: tuple[str, str], invalid: Collection[str], now_s: float) -> dict[str, Any]:
    """Status fields of a KCC that differ from the stored ones."""
    before = msgspec.to_builtins(kcc.status)
    conditions = conditions_with(
        before.get("conditions"), valid=reason[0] == NORMAL_REASON, reason=reason[0], message=reason[1], now_s=now_s
    )
    desired: dict[str, Any] = {
        "observedGeneration": kcc.metadata.generation,
        "invalidTargetConfigList": sorted(invalid),
        "conditions": conditions,
    }
    before = (
        {"observedGeneration": 0} | before | {"invalidTargetConfigList": list(kcc.status.invalid_target_config_list)}
    )
    before["conditions"] = [{"reason": "", "message": "", **condition} for condition in before.get("conditions", ())]
    return {name: value for name, value in desired.items() if before.get(name) != value}


def planned_finalizers(kcc: Kcc, remaining: int) -> tuple[str, ...] | None:
    """Finalizers of a KCC with `remaining` objects of its kind, which this controller's finalizer waits for; None if
    unchanged."""
    before = kcc.metadata.finalizers
    keep = kcc.metadata.deletion_timestamp is None or (remaining > 0 and FINALIZER in before)
    after = tuple(name for name in before if name != FINALIZER)
    if keep:
        after = before if FINALIZER in before else (*before, FINALIZER)
    return None if after == before else after


def spec_problem(kcc: Kcc) -> tuple[str, str] | None:
    """Return reason and message of what is wrong with a KCC by itself; None if it is valid."""
    counts = Counter(allowed.priority for allowed in kcc.spec.node_label_selector_allowed_key_list)
    if duplicates := sorted(priority for priority, count in counts.items() if count > 1):
        return "PrioritySelectorKeyInvalid", f"duplicated priority: {duplicates}"
    gvr = kcc.spec.target_type
    if gvr.group not in ALLOWED_GROUPS:
        return "TargetTypeNotAllowed", f"group {quote(gvr.group)} is not allowed, only {', '.join(ALLOWED_GROUPS)}"
    try:
        target_resource_type(gvr).collection()
    except ValueError as error:
        return "TargetTypeNotExist", f"spec.targetType.{error}"
    return None


def _owner_reason(kcc: Kcc, gvr: GroupVersionResource, targets: TargetSummary) -> tuple[str, str]:
    if kcc.metadata.deletion_timestamp is not None and targets.count:
        return "Terminating", f"{targets.count} objects of {gvr.name} are left; delete them first"
    if targets.missing:
        return "TargetTypeNotExist", f"the API server has no {gvr.name}; install its CustomResourceDefinition"
    return NORMAL_REASON, ""
