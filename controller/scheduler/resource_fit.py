"""Fit of reclaimed resources, and the scores Least, Most, RequestedToCapacityRatio and balanced allocation, as Katalyst
computes them (pkg/scheduler/plugins/qosawarenoderesources): integer arithmetic, with the same roundings. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.scheduler.node_arrays import CPU_COLUMN, MEMORY_COLUMN, FloatArray, IntArray, NodeArrays
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.scheduling_pod import SchedulingPod

Percent = Annotated[int, Meta(ge=0, le=100)]
Weight = Annotated[int, Meta(ge=1, le=100)]
PluginWeight = Annotated[float, Meta(ge=0, le=100)]


class ShapePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Point of the function from utilization to score."""

    utilization: Percent
    """Requested share of the capacity in percent."""
    score: Annotated[int, Meta(ge=0, le=10)]
    """Score at this utilization, 0 to 10 as in kube-scheduler."""


class FitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Score by requested reclaimed resources."""

    strategy: Literal["LeastAllocated", "MostAllocated", "RequestedToCapacityRatio"] = "LeastAllocated"
    """[scoringStrategy.type] LeastAllocated spreads, MostAllocated packs, RequestedToCapacityRatio follows `shape`."""
    cpu_weight: Weight = 1
    """[reclaimedResources] Weight of reclaimed CPU."""
    memory_weight: Weight = 1
    """[reclaimedResources] Weight of reclaimed memory."""
    shape: tuple[ShapePoint, ...] = (ShapePoint(utilization=0, score=0), ShapePoint(utilization=100, score=10))
    """[requestedToCapacityRatio.shape] Points with rising utilization."""
    weight: PluginWeight = 1.0
    """Weight of this score among the scores of all plugins."""
    balanced_weight: PluginWeight = 1.0
    """Weight of the score for balanced use of CPU and memory."""

    def __post_init__(self) -> None:
        points = [point.utilization for point in self.shape]
        if not points or points != sorted(set(points)):
            raise ValueError(f"shape has the utilizations {points}: list at least one, each larger than the one before")


class ResourceFit:
    """Katalyst's QoSAwareNodeResourcesFit."""

    name = "QoSAwareNodeResourcesFit"
    reasons: Sequence[RejectionReason] = (
        RejectionReason("node(s) without a CustomNodeResource offer no reclaimed resources", preemptible=False),
        RejectionReason(f"Insufficient {RECLAIMED_CPU}", preemptible=True),
        RejectionReason(f"Insufficient {RECLAIMED_MEMORY}", preemptible=True),
    )

    def __init__(self, settings: FitSettings) -> None:
        self._settings, self.weight = settings, settings.weight
        self._weights = np.array((settings.cpu_weight, settings.memory_weight), np.int64)

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Reject nodes whose free reclaimed resources are smaller than the request; an equal amount fits.

        A pod that requests none fits everywhere, also without a CustomNodeResource. The request counts, not the QoS level:
        the stock NodeResourcesFit ignores these resources, so nothing else would stop a pod without the annotation.
        """
        if pod.reclaimed == (0, 0):
            return None
        lacks = np.asarray(pod.reclaimed) > nodes.allocatable[rows] - nodes.requested[rows]
        numbers = np.zeros(len(rows), np.int16)
        numbers[lacks[:, MEMORY_COLUMN]] = 3
        numbers[lacks[:, CPU_COLUMN]] = 2
        numbers[~nodes.has_cnr[rows]] = 1
        return numbers

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score a reclaimed pod; the stock NodeResourcesFit scores all others."""
        if not pod.is_reclaimed:
            return None
        capacity = nodes.allocatable[rows]
        requested = nodes.requested_nonzero[rows] + np.asarray(pod.reclaimed_nonzero, np.int64)
        return allocation_score(self._settings, self._weights, capacity, requested)

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return request, free and offered amounts."""
        parts = []
        for column, (name, amount) in enumerate(zip((RECLAIMED_CPU, RECLAIMED_MEMORY), pod.reclaimed, strict=True)):
            offered, used = int(nodes.allocatable[row, column]), int(nodes.requested[row, column])
            parts.append(f"{name.rpartition('/')[2]}: requests {amount}, {offered - used} of {offered} are free")
        return "; ".join(parts) if nodes.has_cnr[row] else "the node has no CustomNodeResource"


class BalancedAllocation:
    """Katalyst's QoSAwareNodeResourcesBalancedAllocation."""

    name = "QoSAwareNodeResourcesBalancedAllocation"
    reasons: Sequence[RejectionReason] = ()

    def __init__(self, settings: FitSettings) -> None:
        self.weight = settings.balanced_weight

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Pass every node."""
        return None

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score (1 - standard deviation of the used shares) * 100, rounded down; of true requests, without defaults."""
        if not pod.is_reclaimed:
            return None
        return balance_score(nodes.allocatable[rows], nodes.requested[rows] + np.asarray(pod.reclaimed, np.int64))

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return the shares that would be in use."""
        shares = _used_shares(
            nodes.allocatable[row : row + 1], nodes.requested[row : row + 1] + np.asarray(pod.reclaimed)
        )[0]
        return f"with the pod {shares[0]:.0%} of reclaimed CPU and {shares[1]:.0%} of reclaimed memory are requested"


def allocation_score(settings: FitSettings, weights: IntArray, capacity: IntArray, requested: IntArray) -> FloatArray:
    """Return the score of each row for capacity and requested amounts of both resources, (rows, 2). A resource that a node does
    not offer has no weight there (resource_allocation.go, score)."""
    safe, offered = np.maximum(capacity, 1), np.where(capacity > 0, weights, 0)
    if settings.strategy == "MostAllocated":
        scores = np.minimum(requested, capacity) * 100 // safe
    elif settings.strategy == "LeastAllocated":
        scores = np.where(requested <= capacity, (capacity - requested) * 100 // safe, 0)
    else:
        return _ratio_score(settings.shape, offered, capacity, requested)
    return np.asarray((scores * offered).sum(axis=1) // np.maximum(offered.sum(axis=1), 1), np.float64)


def _ratio_score(shape: Sequence[ShapePoint], weights: IntArray, capacity: IntArray, requested: IntArray) -> FloatArray:
    utilization = np.where(requested <= capacity, requested * 100 // np.maximum(capacity, 1), 100)
    scores = _piecewise_linear(shape, utilization)
    # Katalyst leaves resources with score 0 out of the weights (requested_to_capacity_ratio.go).
    counted = np.where(scores > 0, weights, 0)
    total = counted.sum(axis=1)
    mean: FloatArray = (scores * counted).sum(axis=1) / np.maximum(total, 1)
    return np.asarray(np.floor(mean + 0.5), np.float64)


def _piecewise_linear(shape: Sequence[ShapePoint], utilization: IntArray) -> IntArray:
    """Return 0 to 100 with Go's integer division, which rounds towards zero (helper/shape_score.go)."""
    scores = np.full_like(utilization, shape[-1].score * 10)
    for before, after in reversed(list(pairwise(shape))):
        rise = (after.score - before.score) * 10 * (utilization - before.utilization)
        quotient = np.abs(rise) // (after.utilization - before.utilization) * np.sign(rise)
        scores = np.where(utilization <= after.utilization, before.score * 10 + quotient, scores)
    return np.where(utilization <= shape[0].utilization, shape[0].score * 10, scores)


def balance_score(capacity: IntArray, requested: IntArray) -> FloatArray:
    """Return the score of balanced allocation for each row. A resource that a node does not offer is left out."""
    shares = _used_shares(capacity, requested)
    deviation = np.abs(shares[:, CPU_COLUMN] - shares[:, MEMORY_COLUMN]) / 2
    score: FloatArray = np.floor((1 - np.where((capacity > 0).all(axis=1), deviation, 0)) * 100)
    return score


def _used_shares(capacity: IntArray, requested: IntArray) -> FloatArray:
    return np.where(capacity > 0, np.minimum(requested / np.maximum(capacity, 1), 1.0), 1.0)
