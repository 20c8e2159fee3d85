"""One configuration object: what it asks for, its hash, and which of them cannot stand beside which. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from enum import IntEnum
from itertools import combinations
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.durations import duration_s
from controller.selectors import Selector, overlap, parse
from kube.moments import moment
from kube.objects import Dynamic
from kube.objects import Meta as Metadata

FINALIZER = "kcct.katalyst.kubewharf.io/kcc-controller"
OLD_FINALIZERS = ("kcct.katalyst.kubewharf.io/kcct-controller", "kcct.katalyst.kubewharf.io/cnc-controller")
OWN_STATUS = frozenset({
    "targetNodes", "canaryNodes", "updatedTargetNodes", "updatedNodes", "currentHash", "collisionCount", "observedGeneration",
    "conditions",
})  # fmt: skip
"""Fields of the status that this controller writes. All others belong to the configuration, and so to its hash."""
NORMAL, VALIDATE_FAILED, HASH_FAILED = "Normal", "ValidateFailed", "HashFailed"
CUTOFF_FAILED = "CalculateCanaryCutoffFailed"
HASH_LETTERS = 12


class Class(IntEnum):
    """How an object chooses its nodes; the larger goes first."""

    GLOBAL = 0
    LABELS = 1
    NODES = 2


class _Spec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class Ephemeral(_Spec, frozen=True, kw_only=True):
    """For these nodes, for so long."""

    node_names: tuple[str, ...] = ()
    last_duration: str | None = None


class RollingUpdate(_Spec, frozen=True, kw_only=True):
    """How many nodes get it: a number, or `N%` of them."""

    canary: int | str | None = None


class Strategy(_Spec, frozen=True, kw_only=True):
    """How a new configuration spreads."""

    type: Literal["RollingUpdate", ""] = "RollingUpdate"
    rolling_update: RollingUpdate | None = None


class Spec(_Spec, frozen=True, kw_only=True):
    """What all kinds of configuration say beside the configuration itself."""

    node_label_selector: str = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    ephemeral_selector: Ephemeral | None = None
    paused: bool = False
    update_strategy: Strategy | None = None
    config: Mapping[str, Any] | None = None


class Invalid(ValueError):
    """An object that cannot stand: the reason that its condition gives, and the message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One object that can be judged."""

    key: str
    metadata: Metadata
    kind: Class
    selector: Selector = Selector()
    priority: int = 0
    node_names: frozenset[str] = frozenset()
    expires_at_s: float | None = None
    paused: bool = False
    canary: int | str | None = None
    hash: str = ""


def read(key: str, found: Dynamic, allowed: Mapping[int, frozenset[str]]) -> Target:
    """Raises Invalid, with the field and what it may be."""
    try:
        spec = msgspec.convert(found.spec, Spec)
    except msgspec.ValidationError as error:
        message = str(error).replace("`", "").replace("$", "spec")
        raise Invalid(HASH_FAILED if ".config" in message else VALIDATE_FAILED, message) from None
    ephemeral = spec.ephemeral_selector or Ephemeral()
    rolling = (spec.update_strategy or Strategy()).rolling_update or RollingUpdate()
    common: dict[str, Any] = {"key": key, "metadata": found.metadata, "paused": spec.paused, "canary": rolling.canary}
    cutoff(rolling.canary, 0)
    try:
        common["hash"] = hash_of(spec.config or {}, found.status)
    except RecursionError:
        raise Invalid(HASH_FAILED, "spec.config is nested too deep to be written as JSON") from None
    if ephemeral.node_names:
        if spec.node_label_selector:
            raise _invalid(
                "nodeLabelSelector", "cannot be combined with ephemeralSelector.nodeNames; remove one of the two"
            )
        expires_at_s = _expiry(ephemeral, found.metadata)
        return Target(kind=Class.NODES, node_names=frozenset(ephemeral.node_names), expires_at_s=expires_at_s, **common)
    if ephemeral.last_duration is not None:
        raise _invalid("ephemeralSelector.lastDuration", "needs nodeNames beside it; only they are for a time")
    if not spec.node_label_selector:
        return Target(kind=Class.GLOBAL, **common)
    selector = _selector(spec, allowed)
    return Target(kind=Class.LABELS, selector=selector, priority=spec.priority, **common)


def conflicts(targets: Mapping[str, Target]) -> dict[str, Invalid]:
    """Of objects that can each stand alone, those that cannot stand together, by key."""
    found: dict[str, Invalid] = {}
    for (one, first), (other, second) in combinations(sorted(targets.items()), 2):
        if first.kind is not second.kind:
            continue
        if first.kind is Class.GLOBAL:
            what = "both are for all nodes: neither has nodeLabelSelector or ephemeralSelector; one may do without"
        elif first.kind is Class.NODES:
            shared = sorted(first.node_names & second.node_names)
            what = f"both name node {shared[0]}" if shared else ""
        elif first.priority == second.priority and overlap(first.selector, second.selector):
            what = f"a node can match both selectors, and both have priority {first.priority}"
        else:
            what = ""
        if what:
            found.setdefault(one, Invalid(VALIDATE_FAILED, f"conflicts with {other}: {what}"))
            found.setdefault(other, Invalid(VALIDATE_FAILED, f"conflicts with {one}: {what}"))
    return found


def hash_of(config: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """12 hex digits of the SHA-256 of the configuration as canonical JSON: keys sorted, no spaces. What other writers put
    into the status, as strategy groups have it, counts as `status/FIELD`."""
    whole = dict(config) | {f"status/{name}": value for name, value in status.items() if name not in OWN_STATUS}
    return hashlib.sha256(msgspec.json.encode(whole, order="sorted")).hexdigest()[:HASH_LETTERS]


def cutoff(canary: int | str | None, nodes: int) -> int:
    """How many of so many nodes get a new configuration: all unless set; a share is rounded down. Raises Invalid."""
    if canary is None:
        return nodes
    if isinstance(canary, str):
        number = canary.removesuffix("%")
        if not (canary.endswith("%") and number.isascii() and number.removeprefix("-").isdigit() and len(number) < 10):
            raise Invalid(
                CUTOFF_FAILED, f"spec.updateStrategy.rollingUpdate.canary: {canary!r:.40} is none; write 3 or 10%"
            )
        canary = math.floor(int(number) * nodes / 100)
    return max(0, min(canary, nodes))


def _expiry(ephemeral: Ephemeral, metadata: Metadata) -> float:
    if ephemeral.last_duration is None:
        raise _invalid(
            "ephemeralSelector.lastDuration", "is missing beside nodeNames; write how long it holds, such as 2h"
        )
    try:
        lasts_s = duration_s(ephemeral.last_duration)
    except ValueError as error:
        raise _invalid("ephemeralSelector.lastDuration", str(error)) from None
    return moment(metadata.creation_timestamp or "1970-01-01T00:00:00Z") + lasts_s


def _selector(spec: Spec, allowed: Mapping[int, frozenset[str]]) -> Selector:
    try:
        selector = parse(spec.node_label_selector)
    except ValueError as error:
        raise _invalid("nodeLabelSelector", str(error)) from None
    known = allowed.get(spec.priority)
    if known is None:
        listed = ", ".join(map(str, sorted(allowed))) or "none"
        raise _invalid(
            "priority", f"{spec.priority} has no nodeLabelSelectorAllowedKeyList in the KCC, which lists {listed}"
        )
    if strange := sorted(selector.keys - known):
        listed = ", ".join(sorted(known)) or "none"
        raise _invalid(
            "nodeLabelSelector", f"label {strange[0]} is not allowed for priority {spec.priority}, only {listed}"
        )
    return selector


def _invalid(field: str, what: str) -> Invalid:
    return Invalid(VALIDATE_FAILED, f"spec.{field}: {what}")
