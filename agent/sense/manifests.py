"""Kubernetes' own objects in place of our file: a v1 Pod, or a list of them as `kubectl get pods -o yaml` prints it.

They are those of somebody else's format: what we do not read in them is left alone, only what we read has to hold. The
one thing that they lack is an annotation: `cgroup.dioptase.io/CONTAINER`, with the path of that container's cgroup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import field

from agent.sense.podspec import (
    KNOWN_RESOURCES,
    SIDECAR_POLICY,
    Place,
    RawContainer,
    RawPod,
    RawResources,
    address_of,
)
from agent.sense.resources import FieldError

CGROUP_PREFIX = "cgroup.dioptase.io/"
LISTS = ("List", "PodList")
OVER = ("Succeeded", "Failed")
"""Phases of pods that have no cgroups any more."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str = "default"
    labels: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    uid: str = ""


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None


class _Container(msgspec.Struct, frozen=True):
    name: str
    resources: _Resources | None = None
    restart_policy: str | None = field(name="restartPolicy", default=None)


class _Spec(msgspec.Struct, frozen=True):
    containers: list[_Container]
    init_containers: list[_Container] | None = field(name="initContainers", default=None)
    priority: int | None = None
    priority_class: str | None = field(name="priorityClassName", default=None)
    host_network: bool | None = field(name="hostNetwork", default=None)


class _Status(msgspec.Struct, frozen=True):
    phase: str | None = None
    pod_ip: str | None = field(name="podIP", default=None)


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec
    status: _Status | None = None


class Found(msgspec.Struct, frozen=True):
    """One pod of the document."""

    raw: RawPod
    place: Place
    uid: str
    address: str | None


def is_manifest(document: object) -> bool:
    """Whether this is one of Kubernetes' objects rather than our own file."""
    return isinstance(document, dict) and "kind" in document


def read_manifest(document: Mapping[str, Any]) -> list[Found]:
    """The pods that have not ended. Raises FieldError, or msgspec.ValidationError with the path inside of `document`."""
    if document["kind"] not in LISTS:
        return _found(document, "")
    items = document.get("items")
    if not isinstance(items, list):
        raise FieldError("items", "is no list; write `items: []` where there are no pods")
    return [found for index, item in enumerate(items) for found in _found(item, f"items[{index}].")]


def _found(item: object, prefix: str) -> list[Found]:
    kind = item.get("kind", "Pod") if isinstance(item, dict) else type(item).__name__
    if kind != "Pod":
        raise FieldError(f"{prefix}kind", f"{kind!r:.80} is no Pod; leave Pods only")
    try:
        pod = msgspec.convert(item, _Pod)
    except msgspec.ValidationError as error:
        # As if it had been converted together with what holds it.
        reason, _, path = str(error).partition(" - at `$.")
        field_of = f"{prefix}{path.rstrip('`')}".rstrip(".")
        raise msgspec.ValidationError(f"{reason} - at `$.{field_of}`" if field_of else reason) from None
    if pod.status is not None and pod.status.phase in OVER:
        return []
    place = Place(f"{prefix}metadata", f"{prefix}spec")
    annotations = pod.metadata.annotations or {}
    staying = [each for each in pod.spec.init_containers or () if each.restart_policy == SIDECAR_POLICY]
    raw = RawPod(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        labels=pod.metadata.labels or {},
        annotations=annotations,
        priority=pod.spec.priority,
        priority_class=pod.spec.priority_class or "",
        containers=[_container(each, annotations, place) for each in pod.spec.containers],
        init_containers=[_container(each, annotations, place) for each in staying],
    )
    ip = pod.status.pod_ip if pod.status is not None else None
    # One without is somebody's own writing, for what runs on the node without a network of its own.
    address = address_of(ip, host_network=not ip or bool(pod.spec.host_network))
    return [Found(raw, place, pod.metadata.uid, address)]


def _container(container: _Container, annotations: Mapping[str, Any], place: Place) -> RawContainer:
    key = f"{CGROUP_PREFIX}{container.name}"
    cgroup = annotations.get(key)
    if not isinstance(cgroup, str):
        raise FieldError(
            f"{place.metadata}.annotations[{key!r:.80}]",
            "is missing; write the path of that container's cgroup there, below the cgroup root, like /kubepods/web",
        )
    listed = container.resources or _Resources()
    requests, limits = (
        {name: value for name, value in (entries or {}).items() if name in KNOWN_RESOURCES}
        for entries in (listed.requests, listed.limits)
    )
    # Of containers that are no init containers Kubernetes has further policies, which change nothing here.
    policy = container.restart_policy if container.restart_policy == SIDECAR_POLICY else None
    return RawContainer(cgroup, container.name, RawResources(requests, limits), policy)
