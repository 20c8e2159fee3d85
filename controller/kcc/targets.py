"""Validates one configuration object, computes its hash, detects conflicts, and selects the object of a node. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import combinations
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.quantity import parse_duration_s
from controller.label_selectors import LabelSelectorSet, parse_selector, selectors_overlap
from kube.objects import KubeMetadata as Metadata
from kube.objects import UnstructuredObject, parse_timestamp

FINALIZER = "kcct.katalyst.kubewharf.io/kcc-controller"
LEGACY_FINALIZERS = ("kcct.katalyst.kubewharf.io/kcct-controller", "kcct.katalyst.kubewharf.io/cnc-controller")
CONTROLLER_STATUS_FIELDS = frozenset({
    "targetNodes", "canaryNodes", "updatedTargetNodes", "updatedNodes", "currentHash", "collisionCount", "observedGeneration",
    "conditions",
})  # fmt: skip
"""Fields of the status that this controller writes. All others belong to the configuration, and so to its hash."""
NORMAL, VALIDATE_FAILED, HASH_FAILED = "Normal", "ValidateFailed", "HashFailed"
CUTOFF_FAILED = "CalculateCanaryCutoffFailed"
HASH_HEX_DIGITS = 12


class SelectorClass(IntEnum):
    """How an object chooses its nodes; the larger goes first."""

    GLOBAL = 0
    LABELS = 1
    NODES = 2


class _TargetStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class TargetEphemeralSelector(_TargetStruct, frozen=True, kw_only=True):
    """For these nodes, for so long."""

    node_names: tuple[str, ...] = ()
    last_duration: str | None = None


class TargetRollingUpdate(_TargetStruct, frozen=True, kw_only=True):
    """How many nodes get it: a number, or `N%` of them."""

    canary: int | str | None = None


class TargetUpdateStrategy(_TargetStruct, frozen=True, kw_only=True):
    """How a new configuration spreads."""

    type: Literal["RollingUpdate", ""] = "RollingUpdate"
    rolling_update: TargetRollingUpdate | None = None


class TargetSpec(_TargetStruct, frozen=True, kw_only=True):
    """What all kinds of configuration say beside the configuration itself."""

    node_label_selector: str = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    ephemeral_selector: TargetEphemeralSelector | None = None
    paused: bool = False
    update_strategy: TargetUpdateStrategy | None = None
    config: Mapping[str, Any] | None = None


class InvalidTarget(ValueError):
    """An object that cannot stand: the reason that its condition gives, and the message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class ConfigTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One object that can be judged."""

    key: str
    metadata: Metadata
    kind: SelectorClass
    selector: LabelSelectorSet = LabelSelectorSet()
    priority: int = 0
    node_names: frozenset[str] = frozenset()
    expires_at_s: float | None = None
    paused: bool = False
    canary: int | str | None = None
    hash: str = ""


def parse_target(key: str, found: UnstructuredObject, allowed: Mapping[int, frozenset[str]]) -> ConfigTarget:
    """Raises Invalid, with the field and what it may be."""
    try:
        spec = msgspec.convert(found.spec, TargetSpec)
    except msgspec.ValidationError as error:
        message = str(error).replace("`", "").replace("$", "spec")
        raise InvalidTarget(HASH_FAILED if ".config" in message else VALIDATE_FAILED, message) from None
    ephemeral = spec.ephemeral_selector or TargetEphemeralSelector()
    rolling = (spec.update_strategy or TargetUpdateStrategy()).rolling_update or TargetRollingUpdate()
    common: dict[str, Any] = {"key": key, "metadata": found.metadata, "paused": spec.paused, "canary": rolling.canary}
    canary_cutoff(rolling.canary, 0)
    try:
        common["hash"] = config_hash(spec.config or {}, found.status)
    except RecursionError:
        raise InvalidTarget(HASH_FAILED, "spec.config is nested too deep to be written as JSON") from None
    if ephemeral.node_names:
        if spec.node_label_selector:
            raise _invalid_field(
                "nodeLabelSelector", "cannot be combined with ephemeralSelector.nodeNames; remove one of the two"
            )
        expires_at_s = _expiry(ephemeral, found.metadata)
        return ConfigTarget(
            kind=SelectorClass.NODES, node_names=frozenset(ephemeral.node_names), expires_at_s=expires_at_s, **common
        )
    if ephemeral.last_duration is not None:
        raise _invalid_field("ephemeralSelector.lastDuration", "needs nodeNames beside it; only they are for a time")
    if not spec.node_label_selector:
        return ConfigTarget(kind=SelectorClass.GLOBAL, **common)
    selector = _selector(spec, allowed)
    return ConfigTarget(kind=SelectorClass.LABELS, selector=selector, priority=spec.priority, **common)


def find_conflicts(targets: Mapping[str, ConfigTarget]) -> dict[str, InvalidTarget]:
    """Of objects that can each stand alone, those that cannot stand together, by key."""
    found: dict[str, InvalidTarget] = {}
    for (one, first), (other, second) in combinations(sorted(targets.items()), 2):
        if first.kind is not second.kind:
            continue
        if first.kind is SelectorClass.GLOBAL:
            what = "both are for all nodes: neither has nodeLabelSelector or ephemeralSelector; one may do without"
        elif first.kind is SelectorClass.NODES:
            shared = sorted(first.node_names & second.node_names)
            what = f"both name node {shared[0]}" if shared else ""
        elif first.priority == second.priority and selectors_overlap(first.selector, second.selector):
            what = f"a node can match both selectors, and both have priority {first.priority}"
        else:
            what = ""
        if what:
            found.setdefault(one, InvalidTarget(VALIDATE_FAILED, f"conflicts with {other}: {what}"))
            found.setdefault(other, InvalidTarget(VALIDATE_FAILED, f"conflicts with {one}: {what}"))
    return found


def config_hash(config: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """12 hex digits of the SHA-256 of the configuration as canonical JSON: keys sorted, no spaces. What other writers put
    into the status, as strategy groups have it, counts as `status/FIELD`."""
    whole = dict(config) | {
        f"status/{name}": value for name, value in status.items() if name not in CONTROLLER_STATUS_FIELDS
    }
    return hashlib.sha256(msgspec.json.encode(whole, order="sorted")).hexdigest()[:HASH_HEX_DIGITS]


def canary_cutoff(canary: int | str | None, nodes: int) -> int:
    """How many of so many nodes get a new configuration: all unless set; a share is rounded down. Raises Invalid."""
    if canary is None:
        return nodes
    if isinstance(canary, str):
        number = canary.removesuffix("%")
        if not (canary.endswith("%") and number.isascii() and number.removeprefix("-").isdigit() and len(number) < 10):
            raise InvalidTarget(
                CUTOFF_FAILED, f"spec.updateStrategy.rollingUpdate.canary: {canary!r:.40} is none; write 3 or 10%"
            )
        canary = math.floor(int(number) * nodes / 100)
    return max(0, min(canary, nodes))


def _expiry(ephemeral: TargetEphemeralSelector, metadata: Metadata) -> float:
    if ephemeral.last_duration is None:
        raise _invalid_field(
            "ephemeralSelector.lastDuration", "is missing beside nodeNames; write how long it holds, such as 2h"
        )
    try:
        lasts_s = parse_duration_s(ephemeral.last_duration)
    except ValueError as error:
        raise _invalid_field("ephemeralSelector.lastDuration", str(error)) from None
    return parse_timestamp(metadata.creation_timestamp or "1970-01-01T00:00:00Z") + lasts_s


def _selector(spec: TargetSpec, allowed: Mapping[int, frozenset[str]]) -> LabelSelectorSet:
    try:
        selector = parse_selector(spec.node_label_selector)
    except ValueError as error:
        raise _invalid_field("nodeLabelSelector", str(error)) from None
    known = allowed.get(spec.priority)
    if known is None:
        listed = ", ".join(map(str, sorted(allowed))) or "none"
        raise _invalid_field(
            "priority", f"{spec.priority} has no nodeLabelSelectorAllowedKeyList in the KCC, which lists {listed}"
        )
    if strange := sorted(selector.keys - known):
        listed = ", ".join(sorted(known)) or "none"
        raise _invalid_field(
            "nodeLabelSelector", f"label {strange[0]} is not allowed for priority {spec.priority}, only {listed}"
        )
    return selector


def _invalid_field(field: str, what: str) -> InvalidTarget:
    return InvalidTarget(VALIDATE_FAILED, f"spec.{field}: {what}")


def assign_target(node: str, labels: Mapping[str, str], targets: Iterable[ConfigTarget]) -> ConfigTarget | None:
    """Node names before selectors, among selectors the highest priority, then the object for all.

    Of objects that may stand together (`targets.conflicts`) no two have the same claim to a node.
    """
    return max((target for target in targets if _selects_node(target, node, labels)), key=_target_rank, default=None)


def _target_rank(target: ConfigTarget) -> tuple[int, int]:
    return target.kind.value, target.priority if target.kind is SelectorClass.LABELS else 0


def _selects_node(target: ConfigTarget, node: str, labels: Mapping[str, str]) -> bool:
    if target.kind is SelectorClass.NODES:
        return node in target.node_names
    return target.kind is SelectorClass.GLOBAL or target.selector.matches(labels)
