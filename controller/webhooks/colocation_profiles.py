"""Parses ColocationProfiles and Koordinator's ClusterColocationProfiles, and selects the profiles of a pod. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from api.colocation_profile import DRAW_KEY, ColocationProfile
from api.katalyst.ihpa import LabelSelector
from api.qos import QOS_LEVEL_KEY, QoSLevel
from api.text import quote
from controller.label_selectors import (
    ABSENT,
    EXISTS,
    IN,
    NOT_IN,
    LabelRequirement,
    LabelSelectorSet,
    is_label_key,
    is_label_value,
)
from kube.objects import UnstructuredObject

SKIP_RESOURCES_KEY = "config.koordinator.sh/skip-update-resources"
"""Annotation of a ClusterColocationProfile by which the requests of its pods are not moved."""
DRAWS = 100
MAX_ANNOTATION_BYTES = 64 << 10
"""Maximum size of a profile's annotations: the API server refuses pods with more than 256 KiB of them
(apimachinery/pkg/api/validation)."""
_OBJECT_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_OPERATORS = {"In": IN, "NotIn": NOT_IN, "Exists": EXISTS, "DoesNotExist": ABSENT}
_KOORDINATOR_LEVELS = {"BE": QoSLevel.RECLAIMED, "LS": QoSLevel.SHARED, "": None}
_WITHOUT_EFFECT = ("labelKeysMapping", "annotationKeysMapping", "labelSuffixes", "patch")
"""Fields of a ClusterColocationProfile that change pods in ways that are not implemented here."""


class PodProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of either kind. A selector without requirements matches everything."""

    name: str
    namespaces: LabelSelectorSet = LabelSelectorSet()
    pods: LabelSelectorSet = LabelSelectorSet()
    percent: int = 100
    level: QoSLevel | None = QoSLevel.RECLAIMED
    """QoS level of its pods; None leaves it."""
    moves_requests: bool = True
    priority_class: str = ""
    scheduler: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


class _KoordinatorSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    namespace_selector: LabelSelector | None = None
    selector: LabelSelector | None = None
    probability: int | str | None = None
    qos_class: str = ""
    priority_class_name: str = ""
    scheduler_name: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


def parse_profile(profile: ColocationProfile) -> PodProfile:
    """Parse a ColocationProfile. Raises ValueError that names the field and the remedy."""
    spec = profile.spec
    namespaces = parse_label_selector("spec.namespaceSelector", spec.namespace_selector)
    pods = parse_label_selector("spec.selector", spec.selector)
    if not namespaces.requirements and not pods.requirements:
        raise ValueError(
            "spec: without namespaceSelector and selector every pod of the cluster would be reclaimed; write for example"
            " namespaceSelector: {matchLabels: {colocation: batch}}"
        )
    if QOS_LEVEL_KEY in (spec.annotations or {}):
        raise ValueError(
            f"spec.annotations: remove {QOS_LEVEL_KEY}, which the profile sets to {QoSLevel.RECLAIMED.value}"
        )
    return _checked(
        PodProfile(
            name=profile.metadata.name or "",
            namespaces=namespaces,
            pods=pods,
            percent=100 if spec.percent is None else spec.percent,
            priority_class=spec.priority_class_name or "",
            scheduler=spec.scheduler_name or "",
            labels=spec.labels or {},
            annotations=spec.annotations or {},
        )
    )


def parse_koordinator_profile(profile: UnstructuredObject) -> PodProfile:
    """Parse a ClusterColocationProfile. Raises ValueError that names the field and the remedy.

    BE becomes reclaimed_cores, LS stays shared_cores. `koordinatorPriority` has no reader here and is ignored.
    """
    try:
        spec = msgspec.convert(profile.spec, _KoordinatorSpec)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`", "").replace("$", "spec")) from None
    if used := [field for field in _WITHOUT_EFFECT if profile.spec.get(field)]:
        raise ValueError(
            f"spec.{used[0]} is not supported; remove it, and write the resulting labels or annotations instead"
        )
    if spec.qos_class not in _KOORDINATOR_LEVELS:
        raise ValueError(f"spec.qosClass: {quote(spec.qos_class)} is not supported; write BE for reclaimed pods, or LS")
    level = _KOORDINATOR_LEVELS[spec.qos_class]
    return _checked(
        PodProfile(
            name=profile.metadata.name,
            namespaces=parse_label_selector("spec.namespaceSelector", spec.namespace_selector),
            pods=parse_label_selector("spec.selector", spec.selector),
            percent=_parse_probability(spec.probability),
            level=level,
            moves_requests=SKIP_RESOURCES_KEY not in profile.metadata.annotations,
            priority_class=spec.priority_class_name,
            scheduler=spec.scheduler_name,
            labels=spec.labels or {},
            annotations=spec.annotations or {},
        )
    )


def _checked(profile: PodProfile) -> PodProfile:
    """Return the profile if the API server accepts the values that it sets; otherwise it would refuse every selected pod.

    Raises ValueError that names the field and the remedy.
    """
    for field, texts in (("labels", profile.labels), ("annotations", profile.annotations)):
        for key in texts:
            if not is_label_key(key):
                raise ValueError(f"spec.{field}: {quote(key)} is no key; write letters, digits, '-', '_' and '.'")
    for key, value in profile.labels.items():
        if not is_label_value(value):
            raise ValueError(
                f"spec.labels.{key}: {quote(value)} is no label value; write at most 63 letters and digits"
            )
    size = sum(len(key.encode()) + len(value.encode()) for key, value in profile.annotations.items())
    if size > MAX_ANNOTATION_BYTES:
        raise ValueError(f"spec.annotations: has {size} bytes, more than {MAX_ANNOTATION_BYTES}; shorten them")
    for field, name in (("priorityClassName", profile.priority_class), ("schedulerName", profile.scheduler)):
        if name and not _OBJECT_NAME.fullmatch(name):
            raise ValueError(f"spec.{field}: {quote(name)} is no name; write lower-case letters, digits, '-' and '.'")
    return profile


def parse_label_selector(field: str, selector: LabelSelector | None) -> LabelSelectorSet:
    """Convert a LabelSelector of the API (meta/v1). Raises ValueError that names the field and the remedy."""
    if selector is None:
        return LabelSelectorSet()
    requirements = [
        LabelRequirement(key, IN, frozenset({value})) for key, value in (selector.match_labels or {}).items()
    ]
    for number, expression in enumerate(selector.match_expressions or ()):
        where = f"{field}.matchExpressions[{number}]"
        operator, values = _OPERATORS.get(expression.operator), frozenset(expression.values or ())
        if operator is None:
            raise ValueError(f"{where}.operator: {quote(expression.operator)} is unknown; use {', '.join(_OPERATORS)}")
        if (operator in (IN, NOT_IN)) != bool(values):
            problem = "remove them" if values else "write at least one"
            raise ValueError(f"{where}.values: {expression.operator} has {len(values)} values; {problem}")
        requirements.append(LabelRequirement(expression.key, operator, values))
    return LabelSelectorSet(tuple(requirements))


def _parse_probability(probability: int | str | None) -> int:
    if probability is None:
        return 100
    number = str(probability).removesuffix("%")
    if not (number.isascii() and number.isdigit() and len(number) <= 3 and int(number) <= 100):
        raise ValueError(f"spec.probability: {quote(probability, 40)} is no percentage; write 0% to 100%")
    return int(number)


def draw_of(annotations: Mapping[str, str], namespace: str, name: str, review: str) -> int:
    """Return the draw of a pod, 0 to 99: the one that its annotation has, else a hash of its name.

    A pod of a Deployment has no name before it is stored, so the UID of the review, which is random, is used in place of it.
    """
    text = annotations.get(DRAW_KEY, "")
    if text.isascii() and text.isdigit() and len(text) <= 2:
        return int(text)
    identity = f"{namespace}/{name}" if name else review
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") % DRAWS


def matching_profiles(
    profiles: Iterable[PodProfile],
    namespace_labels: Mapping[str, str],
    labels: Mapping[str, str],
    own_level: QoSLevel | None,
    applied: Collection[str] = (),
) -> list[PodProfile]:
    """Return the profiles that select the pod, in order of their names, as Koordinator applies them.

    `own_level` is the level that the pod states: profiles with another level do not apply, unless an earlier review of the pod
    has `applied` them, by name, before the level was set.
    """
    selected = [
        profile
        for profile in profiles
        if (own_level is None or profile.level in (None, own_level) or profile.name in applied)
        and profile.namespaces.matches(namespace_labels)
        and profile.pods.matches(labels)
    ]
    return sorted(selected, key=lambda profile: profile.name)
