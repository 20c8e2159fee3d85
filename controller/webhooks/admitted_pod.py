"""Fields of a pod that the webhooks read, as the API server sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MIRROR_KEY = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod, the copy of a static pod that a kubelet creates and that must equal its file."""

MAX_CONTAINERS = 1024
"""Containers of a pod, init containers included. Agents interpret 256 of one kind."""


class _PodStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class AdmittedResources(_PodStruct, frozen=True, kw_only=True):
    """Requests and limits by resource name, as quantities."""

    requests: Mapping[str, Any] | None = None
    limits: Mapping[str, Any] | None = None


class AdmittedContainer(_PodStruct, frozen=True, kw_only=True):
    name: str = ""
    resources: AdmittedResources = AdmittedResources()


class AdmittedPodMetadata(_PodStruct, frozen=True, kw_only=True):
    name: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


class AdmittedPodSpec(_PodStruct, frozen=True, kw_only=True):
    containers: tuple[AdmittedContainer, ...] = ()
    init_containers: tuple[AdmittedContainer, ...] | None = None
    resources: AdmittedResources | None = None
    """Requests and limits of the pod as a whole (KEP-2837)."""
    scheduler_name: str = ""
    priority_class_name: str = ""
    priority: int | None = None
    preemption_policy: str | None = None


class AdmittedPod(_PodStruct, frozen=True, kw_only=True):
    """Pod in a review, before it has a UID and, if it belongs to a ReplicaSet, before it has a name."""

    metadata: AdmittedPodMetadata = AdmittedPodMetadata()
    spec: AdmittedPodSpec = AdmittedPodSpec()

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def size_problem(self) -> str:
        """Return why the pod is too large to be reviewed; empty if it is not."""
        count = len(self.spec.containers) + len(self.spec.init_containers or ())
        if count <= MAX_CONTAINERS:
            return ""
        return f"spec.containers: {count} containers are more than {MAX_CONTAINERS}; write several pods"

    def containers(self) -> Iterator[tuple[str, AdmittedContainer]]:
        """Yield every container with its path in the pod, such as `spec.initContainers[0]`."""
        for field, containers in (("containers", self.spec.containers), ("initContainers", self.spec.init_containers)):
            for number, container in enumerate(containers or ()):
                yield f"spec.{field}[{number}]", container
