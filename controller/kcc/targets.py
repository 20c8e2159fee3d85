"""Validates one configuration object, computes its hash, detects conflicts, and selects the object of a node."""

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
from api.text import quote
from controller.label_selectors import LabelSelectorSet, parse_selector, selectors_overlap
from kube.objects import KubeMetadata as Metadata
from kube.objects import UnstructuredObject, parse_timestamp

FINALIZER = "kcct.katalyst.kubewharf.io/kcc-controller"
LEGACY_FINALIZERS = ("kcct.katalyst.kubewharf.io/kcct-controller", "kcct.katalyst.kubewharf.io/cnc-controller")
CONTROLLER_STATUS_FIELDS = frozenset({
    "targetNodes", "canaryNodes", "updatedTargetNodes", "updatedNodes", "currentHash", "collisionCount", "observedGeneration",
    "conditions",
})  # fmt: skip
"""Status fields that this controller writes. All others are part of the configuration, and so of its hash."""
NORMAL, VALIDATE_FAILED, HASH_FAILED = "Normal", "ValidateFailed", "HashFailed"
CUTOFF_FAILED = "CalculateCanaryCutoffFailed"
HASH_HEX_DIGITS = 12


class SelectorClass(IntEnum):
    """How an object selects its nodes; a larger value takes precedence."""

    GLOBAL = 0
    LABELS = 1
    NODES = 2


class _TargetStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class TargetEphemeralSelector(_TargetStruct, frozen=True, kw_only=True):
    """Nodes and duration of a temporary configuration."""

    node_names: tuple[str, ...] = ()
    last_duration: str | None = None


class TargetRollingUpdate(_TargetStruct, frozen=True, kw_only=True):
    """Number or percentage (`N%`) of the nodes that receive a new configuration."""

    canary: int | str | None = None


class TargetUpdateStrategy(_TargetStruct, frozen=True, kw_only=True):
    """How a new configuration is rolled out."""

    type: Literal["RollingUpdate", ""] = "RollingUpdate"
    rolling_update: TargetRollingUpdate | None = None


class TargetSpec(_TargetStruct, frozen=True, kw_only=True):
    """Spec fields that all configuration kinds share."""

    node_label_selector: str = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    ephemeral_selector: TargetEphemeralSelector | None = None
    paused: bool = False
    update_strategy: TargetUpdateStrategy | None = None
    config: Mapping[str, Any] | None = None


class InvalidTarget(ValueError):
    """Configuration object that is invalid; `reason` and `message` are those of its condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class ConfigTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Valid configuration object."""

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


def parse_target(key: str, object_: UnstructuredObject, allowed: Mapping[int, frozenset[str]]) -> ConfigTarget:
    """Parse a configuration object. Raises InvalidTarget with the field and its valid values."""
    try:
        spec = msgspec.convert(object_.spec, TargetSpec)
    except msgspec.ValidationError as error:
        message = str(error).replace("`", "").replace("$", "spec")
        raise InvalidTarget(HASH_FAILED if ".config" in message else VALIDATE_FAILED, message) from None
    ephemeral = spec.ephemeral_selector or TargetEphemeralSelector()
    rolling = (spec.update_strategy or TargetUpdateStrategy()).rolling_update or TargetRollingUpdate()
    common: dict[str, Any] = {"key": key, "metadata": object_.metadata, "paused": spec.paused, "canary": rolling.canary}
    canary_cutoff(rolling.canary, 0)
    try:
        common["hash"] = config_hash(spec.config or {}, object_.status)
    except RecursionError:
        raise InvalidTarget(HASH_FAILED, "spec.config is nested too deeply to be encoded as JSON") from None
    if ephemeral.node_names:
        if spec.node_label_selector:
            raise _invalid_field(
                "nodeLabelSelector", "cannot be combined with ephemeralSelector.nodeNames; remove one of the two"
            )
        expires_at_s = _expiry(ephemeral, object_.metadata)
        return ConfigTarget(
            kind=SelectorClass.NODES, node_names=frozenset(ephemeral.node_names), expires_at_s=expires_at_s, **common
        )
    if ephemeral.last_duration is not None:
        raise _invalid_field("ephemeralSelector.lastDuration", "requires nodeNames; only they are temporary")
    if not spec.node_label_selector:
        return ConfigTarget(kind=SelectorClass.GLOBAL, **common)
    selector = _selector(spec, allowed)
    return ConfigTarget(kind=SelectorClass.LABELS, selector=selector, priority=spec.priority, **common)


def find_conflicts(targets: Mapping[str, ConfigTarget]) -> dict[str, InvalidTarget]:
    """Find valid objects that conflict with each other, by key."""
    conflicts: dict[str, InvalidTarget] = {}
    for (key, target), (other_key, other) in combinations(sorted(targets.items()), 2):
        if message := _conflict(target, other):
            conflicts.setdefault(key, InvalidTarget(VALIDATE_FAILED, f"conflicts with {other_key}: {message}"))
            conflicts.setdefault(other_key, InvalidTarget(VALIDATE_FAILED, f"conflicts with {key}: {message}"))
    return conflicts


def _conflict(first: ConfigTarget, second: ConfigTarget) -> str:
    if first.kind is not second.kind:
        return ""
    if first.kind is SelectorClass.GLOBAL:
        return "both apply to all nodes: neither has nodeLabelSelector or ephemeralSelector; only one may have none"
    if first.kind is SelectorClass.NODES:
        shared = sorted(first.node_names & second.node_names)
        return f"both name node {shared[0]}" if shared else ""
    if first.priority == second.priority and selectors_overlap(first.selector, second.selector):
        return f"a node can match both selectors, and both have priority {first.priority}"
    return ""


def config_hash(config: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """12 hex digits of the SHA-256 of the configuration as canonical JSON: keys sorted, no spaces.

    Status fields of other writers, such as those of strategy groups, are included as `status/FIELD`.
    """
    content = dict(config) | {
        f"status/{name}": value for name, value in status.items() if name not in CONTROLLER_STATUS_FIELDS
    }
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:HASH_HEX_DIGITS]


def canary_cutoff(canary: int | str | None, nodes: int) -> int:
    """Number of nodes that receive a new configuration: all unless set; a percentage is rounded down. Raises InvalidTarget."""
    if canary is None:
        return nodes
    if isinstance(canary, str):
        number = canary.removesuffix("%")
        if not (canary.endswith("%") and number.isascii() and number.removeprefix("-").isdigit() and len(number) < 10):
            raise InvalidTarget(
                CUTOFF_FAILED,
                f"spec.updateStrategy.rollingUpdate.canary: {quote(canary, 40)} is invalid; write 3 or 10%",
            )
        canary = math.floor(int(number) * nodes / 100)
    return max(0, min(canary, nodes))


def _expiry(ephemeral: TargetEphemeralSelector, metadata: Metadata) -> float:
    if ephemeral.last_duration is None:
        raise _invalid_field(
            "ephemeralSelector.lastDuration", "is required with nodeNames; write how long it holds, such as 2h"
        )
    try:
        duration_s = parse_duration_s(ephemeral.last_duration)
    except ValueError as error:
        raise _invalid_field("ephemeralSelector.lastDuration", str(error)) from None
    return parse_timestamp(metadata.creation_timestamp or "1970-01-01T00:00:00Z") + duration_s


def _selector(spec: TargetSpec, allowed: Mapping[int, frozenset[str]]) -> LabelSelectorSet:
    try:
        selector = parse_selector(spec.node_label_selector)
    except ValueError as error:
        raise _invalid_field("nodeLabelSelector", str(error)) from None
    allowed_keys = allowed.get(spec.priority)
    if allowed_keys is None:
        listed = ", ".join(map(str, sorted(allowed))) or "none"
        raise _invalid_field(
            "priority", f"{spec.priority} has no nodeLabelSelectorAllowedKeyList in the KCC, which lists {listed}"
        )
    if forbidden := sorted(selector.keys - allowed_keys):
        listed = ", ".join(sorted(allowed_keys)) or "none"
        raise _invalid_field(
            "nodeLabelSelector", f"label {forbidden[0]} is not allowed for priority {spec.priority}, only {listed}"
        )
    return selector


def _invalid_field(field: str, what: str) -> InvalidTarget:
    return InvalidTarget(VALIDATE_FAILED, f"spec.{field}: {what}")


def assign_target(node: str, labels: Mapping[str, str], targets: Iterable[ConfigTarget]) -> ConfigTarget | None:
    """Select the object of a node: node names before selectors, the highest priority among selectors, then the global one.

    Valid objects without conflicts (`find_conflicts`) never tie.
    """
    return max((target for target in targets if _selects_node(target, node, labels)), key=_target_rank, default=None)


def _target_rank(target: ConfigTarget) -> tuple[int, int]:
    return target.kind.value, target.priority if target.kind is SelectorClass.LABELS else 0


def _selects_node(target: ConfigTarget, node: str, labels: Mapping[str, str]) -> bool:
    if target.kind is SelectorClass.NODES:
        return node in target.node_names
    return target.kind is SelectorClass.GLOBAL or target.selector.matches(labels)
