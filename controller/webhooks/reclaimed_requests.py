"""Moves requests of reclaimed pods from CPU and memory to Katalyst's extended resources. Pure.

A pod without requests and limits of CPU and memory is in the kubelet's class BestEffort, where the agent's limits of reclaimed
pods apply. The API server sets a missing request to the limit, so both must be removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.quantity import MAX_QUANTITY, convert_quantity
from controller.webhooks.admission_review import PatchOperation, patch_mapping
from controller.webhooks.admitted_pod import AdmittedPod, AdmittedResources

MOVED_RESOURCES = (("cpu", RECLAIMED_CPU, 1000), ("memory", RECLAIMED_MEMORY, 1))
"""Native resource, extended resource, and units of the extended one in a unit of the native one."""


def move_resources(resources: AdmittedResources) -> AdmittedResources:
    """Return the resources with CPU in reclaimed_millicpu and memory, in bytes, in reclaimed_memory, rounded up.

    The amount is the request, or the limit without one: an extended resource cannot be overcommitted, so its request equals
    its limit (API validation of core/v1). An extended resource that the container already has stays as it is. Raises
    ValueError that names an invalid quantity.
    """
    requests, limits = dict(resources.requests or {}), dict(resources.limits or {})
    for native, extended, units in MOVED_RESOURCES:
        limit = limits.pop(native, None)
        amount = requests.pop(native, limit)
        if amount is None or extended in requests or extended in limits:
            continue
        try:
            moved = min(math.ceil(convert_quantity(amount) * units), MAX_QUANTITY)
        except ValueError as error:
            raise ValueError(f"{native}: {error}") from None
        if moved > 0:
            requests[extended] = limits[extended] = str(moved)
    return AdmittedResources(requests=requests, limits=limits)


def native_requests(resources: AdmittedResources | None) -> Mapping[str, Any]:
    """Return the amounts of CPU and memory that are requested or limited, by their path within the resources."""
    if resources is None:
        return {}
    return {
        f"{field}.{native}": amounts[native]
        for field, amounts in (("requests", resources.requests or {}), ("limits", resources.limits or {}))
        for native, _, _ in MOVED_RESOURCES
        if native in amounts
    }


def move_pod_requests(pod: AdmittedPod) -> tuple[tuple[PatchOperation, ...], tuple[str, ...]]:
    """Return the patch that moves the requests of all containers, and a sentence for each that cannot be moved."""
    patch: list[PatchOperation] = []
    problems = [
        f"spec.resources.{field}: requests of the pod as a whole cannot be moved to reclaimed resources; set them in"
        " its containers"
        for field in native_requests(pod.spec.resources)
    ]
    for where, container in pod.containers():
        if not native_requests(container.resources):
            continue
        try:
            moved = move_resources(container.resources)
        except ValueError as error:
            problems.append(f"{where}.resources: {error}")
            continue
        path = f"/{where.replace('[', '/').replace(']', '').replace('.', '/')}/resources"
        patch += patch_mapping(f"{path}/requests", container.resources.requests, moved.requests or {})
        patch += patch_mapping(f"{path}/limits", container.resources.limits, moved.limits or {})
    return tuple(patch), tuple(problems)
