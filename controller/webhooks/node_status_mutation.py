"""Multiplies CPU and memory of overcommitted Nodes when their status is written. Pure.

A kubelet writes the amounts of its machine with each status that differs from the stored one. The webhook retains them as
annotations and replaces them in the status, so that schedulers see the overcommitted amounts. Other writers of the status send
the stored amounts back; these must not be multiplied again.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from api.overcommit import OVERCOMMIT_KEYS, OvercommitKeys, effective_ratio, overcommit_cpu, overcommit_memory
from api.quantity import convert_quantity
from controller.webhooks.admission_review import (
    PatchOperation,
    ReviewRequest,
    ReviewResult,
    decode_admitted,
    patch_mapping,
)


class _NodeStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class AdmittedNodeMetadata(_NodeStruct, frozen=True, kw_only=True):
    annotations: Mapping[str, str] | None = None


class AdmittedNodeStatus(_NodeStruct, frozen=True, kw_only=True):
    capacity: Mapping[str, Any] | None = None
    allocatable: Mapping[str, Any] | None = None


class AdmittedNode(_NodeStruct, frozen=True, kw_only=True):
    """Node in a review, with the fields that overcommitment reads and writes."""

    metadata: AdmittedNodeMetadata = AdmittedNodeMetadata()
    status: AdmittedNodeStatus = AdmittedNodeStatus()

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}

    @property
    def amounts(self) -> dict[str, dict[str, Any]]:
        """Return a copy of capacity and allocatable by resource name."""
        return {"capacity": dict(self.status.capacity or {}), "allocatable": dict(self.status.allocatable or {})}


class _AmountKeys(msgspec.Struct, frozen=True):
    original: str
    overcommit: str


def mutate_node_status(request: ReviewRequest) -> ReviewResult:
    """Return the patch of a Node's status and annotations. Raises InvalidReview if an object is no Node."""
    new, old = decode_admitted(request.object, AdmittedNode), _old_node(request)
    annotations, amounts = dict(new.annotations), new.amounts
    for resource, keys in OVERCOMMIT_KEYS.items():
        ratio = effective_ratio(annotations, keys) if keys.ratio in annotations else None
        for field, field_keys in _amount_keys(keys).items():
            if resource not in amounts[field]:
                continue
            incoming = str(amounts[field][resource])
            stored = old.annotations.get(field_keys.original)
            original = stored if stored is not None and _equal(incoming, old.amounts[field].get(resource)) else incoming
            if ratio is None:
                annotations.pop(field_keys.original, None)
                amounts[field][resource] = original
                continue
            # The controller computed its amounts from the original that the annotation had; they do not fit another one.
            computed = annotations.get(field_keys.overcommit) if stored in (None, original) else None
            annotations[field_keys.original] = original
            amounts[field][resource] = overcommitted_amount(resource, original, ratio, computed)
    return ReviewResult(patch=_patch(new, annotations, amounts))


def overcommitted_amount(resource: str, original: str, ratio: Decimal, computed: str | None) -> str:
    """Return the amount to write: `computed`, in which the controller did not multiply pinned CPUs, or without it the original
    times the ratio.

    The result is the original if the ratio is 1 or a quantity is invalid. A computed amount below the original is ignored.
    """
    try:
        if ratio <= 1:
            return original
        if computed is not None and convert_quantity(computed) >= convert_quantity(original):
            return computed
        return (overcommit_cpu if resource == "cpu" else overcommit_memory)(original, ratio)
    except ValueError:
        return original


def _amount_keys(keys: OvercommitKeys) -> dict[str, _AmountKeys]:
    return {
        "capacity": _AmountKeys(keys.original_capacity, keys.overcommit_capacity),
        "allocatable": _AmountKeys(keys.original_allocatable, keys.overcommit_allocatable),
    }


def _old_node(request: ReviewRequest) -> AdmittedNode:
    is_create = bytes(request.old_object) == b"null"
    return AdmittedNode() if is_create else decode_admitted(request.old_object, AdmittedNode)


def _equal(first: str, second: Any) -> bool:
    """Return whether two quantities are equal, in any notation."""
    if first == second:
        return True
    try:
        return second is not None and convert_quantity(first) == convert_quantity(second)
    except ValueError:
        return False


def _patch(
    node: AdmittedNode, annotations: Mapping[str, str], amounts: Mapping[str, Mapping[str, Any]]
) -> tuple[PatchOperation, ...]:
    return (
        *patch_mapping("/metadata/annotations", node.metadata.annotations, annotations),
        *patch_mapping("/status/capacity", node.status.capacity, amounts["capacity"]),
        *patch_mapping("/status/allocatable", node.status.allocatable, amounts["allocatable"]),
    )
