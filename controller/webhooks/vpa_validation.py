"""Rejects invalid KatalystVerticalPodAutoscalers, of both versions. Pure.

Unlike Katalyst's webhook it compares targets within a namespace, since two namespaces may have a workload of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from api.quantity import convert_quantity
from api.text import quote
from controller.webhooks.admission_review import ReviewRequest, ReviewResult, decode_admitted
from kube.objects import UnstructuredObject

RESOURCES = ("cpu", "memory")


def validate_vpa(request: ReviewRequest, others: Iterable[UnstructuredObject]) -> ReviewResult:
    """Return the problems of an autoscaler; `others` are those of all namespaces. Raises InvalidReview if it is no object."""
    vpa = decode_admitted(request.object, UnstructuredObject)
    if vpa.metadata.deletion_timestamp is not None:
        return ReviewResult()
    problems = list(_policy_problems(vpa.spec))
    target = _target(vpa.spec)
    for other in others:
        same = (other.metadata.namespace, other.metadata.name) == (request.namespace, vpa.metadata.name)
        if not same and other.metadata.namespace == request.namespace and target and _target(other.spec) == target:
            problems.append(
                f"spec.targetRef: {quote(' '.join(target))} belongs to {other.metadata.namespace}/{other.metadata.name};"
                " delete one of the two"
            )
    return ReviewResult(problems=tuple(problems))


def _target(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return group, kind and name of the target; the version of the group does not matter."""
    target = spec.get("targetRef")
    if not isinstance(target, Mapping):
        return ()
    group = str(target.get("apiVersion") or "").rpartition("/")[0]
    return group, str(target.get("kind", "")), str(target.get("name", ""))


def _policy_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    policies = (spec.get("resourcePolicy") or {}).get("containerPolicies") or ()
    for number, policy in enumerate(policies):
        where = f"spec.resourcePolicy.containerPolicies[{number}]"
        if not policy.get("containerName"):
            yield f"{where}.containerName: is missing; name a container, or write * for all"
        for index, name in enumerate(policy.get("controlledResources") or ()):
            if name not in RESOURCES:
                yield f"{where}.controlledResources[{index}]: {quote(name)} cannot be scaled; use {' or '.join(RESOURCES)}"
        low, high = policy.get("minAllowed") or {}, policy.get("maxAllowed") or {}
        for name in sorted(low.keys() | high.keys()):
            yield from _bound_problems(
                f"{where}.minAllowed.{name}", f"{where}.maxAllowed.{name}", low.get(name), high.get(name)
            )
        for index, resource in enumerate(policy.get("controlledResourcesPolicies") or ()):
            field = f"{where}.controlledResourcesPolicies[{index}]"
            if resource.get("resourceName") not in RESOURCES:
                name = quote(resource.get("resourceName"))
                yield f"{field}.resourceName: {name} cannot be scaled; use {' or '.join(RESOURCES)}"
            yield from _bound_problems(
                f"{field}.minAllowed", f"{field}.maxAllowed", resource.get("minAllowed"), resource.get("maxAllowed")
            )


def _bound_problems(low_field: str, high_field: str, low: Any, high: Any) -> Iterator[str]:
    amounts = []
    for field, value in ((low_field, low), (high_field, high)):
        if value is None:
            continue
        try:
            amounts.append(convert_quantity(value))
        except ValueError as error:
            yield f"{field}: {error}"
    if len(amounts) == 2 and amounts[0] > amounts[1]:
        yield f"{low_field}: {low} is more than maxAllowed, {high}; lower it"
