"""Resolves which KatalystCustomConfig owns which kind, and the status and finalizers of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from controller.kcc.rollout_plan import conditions_with
from controller.kinds import CONFIG_GROUP, GroupVersionResource, Kcc, target_resource_type

FINALIZER = "kcc.katalyst.kubewharf.io/kcc-controller"
ALLOWED_GROUPS = (CONFIG_GROUP,)
"""Whoever may write a KCC must not have this controller delete objects of any kind."""
NORMAL_REASON = "Normal"


class TargetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the objects of one kind."""

    missing: bool = False
    """The API server has no such kind."""
    count: int = 0
    invalid: tuple[str, ...] = ()


class KccOwnership(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for all KCCs."""

    owners: Mapping[GroupVersionResource, str]
    """By kind, the key of the KCC that it is distributed for."""
    reasons: Mapping[str, tuple[str, str]]
    """By KCC, why it is or is not: reason and message."""


def resolve_owners(kccs: Mapping[str, Kcc], targets: Callable[[GroupVersionResource], TargetSummary]) -> KccOwnership:
    """Of two KCCs about one kind the older owns it, and of equally old ones the first by name. One that is being deleted
    owns its kind until no object of it is left, so that those that go move their nodes."""
    owners: dict[GroupVersionResource, str] = {}
    reasons: dict[str, tuple[str, str]] = {}
    by_age = sorted(kccs.items(), key=lambda item: (item[1].metadata.creation_timestamp or "", item[0]))
    for key, kcc in by_age:
        gvr = kcc.spec.target_type
        if problem := _spec_problem(kcc):
            reasons[key] = problem
        elif gvr in owners:
            reasons[key] = ("TargetTypeOverlap", f"{gvr.name} belongs to {owners[gvr]}; delete one of the two")
        else:
            owners[gvr] = key
            reasons[key] = _owner_reason(kcc, gvr, targets(gvr))
    return KccOwnership(owners=owners, reasons=reasons)


def allowed_label_keys(kcc: Kcc) -> dict[int, frozenset[str]]:
    """Labels that selectors may use, by priority."""
    return {each.priority: frozenset(each.key_list) for each in kcc.spec.node_label_selector_allowed_key_list}


def changed_status(kcc: Kcc, reason: tuple[str, str], invalid: Collection[str], now_s: float) -> dict[str, Any]:
    """Fields of its status that change."""
    before = msgspec.to_builtins(kcc.status)
    conditions = conditions_with(
        before.get("conditions"), valid=reason[0] == NORMAL_REASON, reason=reason[0], message=reason[1], now_s=now_s
    )
    wanted: dict[str, Any] = {
        "observedGeneration": kcc.metadata.generation,
        "invalidTargetConfigList": sorted(invalid),
        "conditions": conditions,
    }
    before = (
        {"observedGeneration": 0} | before | {"invalidTargetConfigList": list(kcc.status.invalid_target_config_list)}
    )
    before["conditions"] = [{"reason": "", "message": "", **each} for each in before.get("conditions", ())]
    return {name: value for name, value in wanted.items() if before.get(name) != value}


def wanted_finalizers(kcc: Kcc, remaining: int) -> tuple[str, ...] | None:
    """Ours keeps a KCC while objects of its kind are left, of which are so many; None where nothing changes."""
    before = kcc.metadata.finalizers
    keep = kcc.metadata.deletion_timestamp is None or (remaining > 0 and FINALIZER in before)
    after = tuple(each for each in before if each != FINALIZER)
    if keep:
        after = before if FINALIZER in before else (*before, FINALIZER)
    return None if after == before else after


def _spec_problem(kcc: Kcc) -> tuple[str, str] | None:
    counts = Counter(each.priority for each in kcc.spec.node_label_selector_allowed_key_list)
    if twice := sorted(priority for priority, count in counts.items() if count > 1):
        return "PrioritySelectorKeyInvalid", f"duplicated priority: {twice}"
    gvr = kcc.spec.target_type
    if gvr.group not in ALLOWED_GROUPS:
        return "TargetTypeNotAllowed", f"group {gvr.group!r:.80} is not allowed, only {', '.join(ALLOWED_GROUPS)}"
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
