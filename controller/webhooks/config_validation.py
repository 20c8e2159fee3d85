"""Rejects invalid KatalystCustomConfigs, configuration objects and colocation profiles. Pure.

It uses the parsers of the controller and of the agents. It does not compare objects, because the result would depend on the
order in which they arrive: the controller reports conflicts, such as two objects that select the same node, in the status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from api.colocation_profile import COLOCATION_PROFILE_KIND, ColocationProfile
from api.text import printable
from controller.kcc.ownership import spec_problem
from controller.kcc.targets import InvalidTarget, parse_target
from controller.kinds import KCCS, Kcc
from controller.label_selectors import parse_selector
from controller.webhooks.admission_review import ReviewRequest, ReviewResult, decode_admitted
from controller.webhooks.colocation_profiles import parse_profile
from kube.objects import UnstructuredObject


class ConfigFindings(NamedTuple):
    """Result of an agent's parser: why it cannot apply an object, empty if it can, and fields without effect."""

    problem: str = ""
    ineffective: tuple[str, ...] = ()


ConfigChecker = Callable[[str, Mapping[str, Any]], ConfigFindings]
"""Function that parses an object as the agents do; its first argument is the resource, such as adminqosconfigurations."""


def validate_config(request: ReviewRequest, check: ConfigChecker) -> ReviewResult:
    """Return the problems of an object. Raises InvalidReview if it is no object of the API.

    An update that does not change the spec, for example a change of a finalizer, is accepted even if the object is invalid.
    """
    new = decode_admitted(request.object, UnstructuredObject)
    if new.metadata.deletion_timestamp is not None:
        return ReviewResult()
    if request.operation == "UPDATE" and decode_admitted(request.old_object, UnstructuredObject).spec == new.spec:
        return ReviewResult()
    resource = request.resource.resource
    try:
        if resource == KCCS.plural:
            return _validate_kcc(msgspec.json.decode(bytes(request.object), type=Kcc))
        if resource == COLOCATION_PROFILE_KIND.plural:
            parse_profile(msgspec.json.decode(bytes(request.object), type=ColocationProfile))
            return ReviewResult()
        parse_target(new.metadata.name, new, _any_label_keys(new))
    except msgspec.ValidationError as error:
        return ReviewResult(problems=(printable(str(error).replace("`", "").replace("$.", "")),))
    except (InvalidTarget, ValueError) as error:
        return ReviewResult(problems=(str(error),))
    findings = check(resource, {"spec": new.spec, "status": new.status})
    problems = (findings.problem,) if findings.problem else ()
    return ReviewResult(problems=problems, warnings=tuple(f"without effect: {text}" for text in findings.ineffective))


def _validate_kcc(kcc: Kcc) -> ReviewResult:
    problem = spec_problem(kcc)
    return ReviewResult(problems=() if problem is None else (f"{problem[0]}: {problem[1]}",))


def _any_label_keys(object_: UnstructuredObject) -> dict[int, frozenset[str]]:
    """Allow all labels that the object selects: the KCC of its kind, which lists the allowed ones, may arrive later."""
    selector, priority = object_.spec.get("nodeLabelSelector"), object_.spec.get("priority", 0)
    if not isinstance(selector, str) or not isinstance(priority, int):
        return {}
    try:
        return {priority: parse_selector(selector).keys}
    except ValueError:
        return {}
