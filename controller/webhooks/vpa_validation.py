"""Rejects invalid KatalystVerticalPodAutoscalers, of both versions. Pure.

Unlike Katalyst's webhook it compares targets within a namespace, since two namespaces may have a workload of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from api.quantity import convert_quantity
from api.text import printable, quote
from controller.webhooks.admission_review import InvalidReview, ReviewRequest, ReviewResult, decode_admitted
from kube.objects import UnstructuredObject

RESOURCES = ("cpu", "memory")
MAX_PROBLEMS = 64
"""Maximum number of problems that are searched; a response names the first ones."""


class _VpaStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class _ControlledResource(_VpaStruct, frozen=True, kw_only=True):
    resource_name: str = ""
    min_allowed: Any = None
    max_allowed: Any = None


class _ContainerPolicy(_VpaStruct, frozen=True, kw_only=True):
    container_name: str = ""
    controlled_resources: tuple[str, ...] | None = None
    min_allowed: Mapping[str, Any] | None = None
    max_allowed: Mapping[str, Any] | None = None
    controlled_resources_policies: tuple[_ControlledResource, ...] | None = None


class _ResourcePolicy(_VpaStruct, frozen=True, kw_only=True):
    container_policies: tuple[_ContainerPolicy, ...] | None = None


def validate_vpa(request: ReviewRequest, others: Iterable[UnstructuredObject]) -> ReviewResult:
    """Return the problems of an autoscaler; `others` are those of all namespaces. Raises InvalidReview if it is no object."""
    vpa = decode_admitted(request.object, UnstructuredObject)
    if vpa.metadata.deletion_timestamp is not None:
        return ReviewResult()
    try:
        policy = msgspec.convert(vpa.spec.get("resourcePolicy") or {}, _ResourcePolicy)
    except msgspec.ValidationError as error:
        # Objects from the API server have the types of their definition; any client in the cluster's network can send others.
        raise InvalidReview(f"spec.resourcePolicy: {printable(str(error), 200)}") from None
    problems = list(islice(_policy_problems(policy), MAX_PROBLEMS))
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


def _policy_problems(policy: _ResourcePolicy) -> Iterator[str]:
    for number, container in enumerate(policy.container_policies or ()):
        where = f"spec.resourcePolicy.containerPolicies[{number}]"
        if not container.container_name:
            yield f"{where}.containerName: is missing; name a container, or write * for all"
        for index, name in enumerate(container.controlled_resources or ()):
            if name not in RESOURCES:
                yield f"{where}.controlledResources[{index}]: {quote(name)} cannot be scaled; use {' or '.join(RESOURCES)}"
        low, high = container.min_allowed or {}, container.max_allowed or {}
        for name in sorted(low.keys() | high.keys()):
            yield from _bound_problems(
                f"{where}.minAllowed.{name}", f"{where}.maxAllowed.{name}", low.get(name), high.get(name)
            )
        for index, resource in enumerate(container.controlled_resources_policies or ()):
            field = f"{where}.controlledResourcesPolicies[{index}]"
            if resource.resource_name not in RESOURCES:
                yield f"{field}.resourceName: {quote(resource.resource_name)} cannot be scaled; use {' or '.join(RESOURCES)}"
            yield from _bound_problems(
                f"{field}.minAllowed", f"{field}.maxAllowed", resource.min_allowed, resource.max_allowed
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
