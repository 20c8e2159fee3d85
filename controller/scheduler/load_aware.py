"""Koordinator's LoadAware: keeps pods off nodes with high usage, and prefers nodes with low usage. Pure.
Usage is the sum of the usage in the CustomNodeResource and an estimate for pods that this report cannot contain yet, so that a
node with low usage does not receive all pods that are placed until its next report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from api.katalyst.harm import REPORT_EXPIRATION_S
from controller.scheduler.node_arrays import CPU_COLUMN, MEMORY_COLUMN, BoolArray, FloatArray, NodeArrays
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.resource_fit import Percent, PluginWeight, Weight
from controller.scheduler.scheduling_pod import Amounts, SchedulingPod

DEFAULT_LOAD = (250, 200 << 20)
"""Estimated millicores and bytes of a pod that has neither requests nor limits (Koordinator,
pkg/scheduler/plugins/loadaware/estimator/default_estimator.go)."""


class UsageThresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Usage in percent of the allocatable amount, rounded, above which a node takes no more pods; 0 is no limit."""

    cpu: Percent = 0
    memory: Percent = 0


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Limits and weights of measured usage. Names in brackets are those of Koordinator's LoadAwareSchedulingArgs."""

    thresholds: UsageThresholds = UsageThresholds(cpu=65, memory=95)
    """[usageThresholds] Limits for pods of every level but reclaimed_cores."""
    reclaimed_thresholds: UsageThresholds = UsageThresholds(memory=95)
    """Limits for reclaimed pods. CPU has none, because the CustomNodeResource offers only the CPU that online pods leave."""
    percentile_thresholds: UsageThresholds = UsageThresholds()
    """[aggregated.usageThresholds] Limits for the percentile of the latest 20 reports, for pods of every level."""
    percentile: Annotated[int, Meta(ge=50, le=99)] = 95
    """[aggregated.usageAggregationType] The percentile."""
    cpu_factor: Percent = 85
    """[estimatedScalingFactors] Share of its CPU request or limit that a new pod is estimated to use, in percent."""
    memory_factor: Percent = 70
    """[estimatedScalingFactors] The same for memory."""
    expiration_s: Annotated[float, Meta(ge=1, le=86_400)] = REPORT_EXPIRATION_S
    """[nodeMetricExpirationSeconds] Age from which a report is ignored."""
    cpu_weight: Weight = 1
    """[resourceWeights] Weight of CPU in the score."""
    memory_weight: Weight = 1
    """[resourceWeights] Weight of memory in the score."""
    weight: PluginWeight = 1.0
    """Weight of this score among the scores of all plugins; 0 leaves it out."""


class LoadAware:
    """Koordinator's LoadAwareScheduling on the reports of CustomNodeResources."""

    name = "LoadAware"
    reasons: Sequence[RejectionReason] = (
        RejectionReason("node(s) whose CPU usage exceeds the threshold", preemptible=False),
        RejectionReason("node(s) whose memory usage exceeds the threshold", preemptible=False),
        RejectionReason("node(s) whose CPU usage percentile exceeds the threshold", preemptible=False),
        RejectionReason("node(s) whose memory usage percentile exceeds the threshold", preemptible=False),
    )

    def __init__(self, settings: LoadSettings) -> None:
        self._settings, self.weight = settings, settings.weight
        self._factors = np.array((settings.cpu_factor, settings.memory_factor)) / 100
        self._weights = np.array((settings.cpu_weight, settings.memory_weight), np.float64)

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:
        """Reject nodes whose usage with this pod exceeds a threshold. Without a fresh report every node passes."""
        settings = self._settings
        limits = settings.reclaimed_thresholds if pod.is_reclaimed else settings.thresholds
        numbers = np.zeros(len(rows), np.int16)
        fresh = self._is_fresh(nodes, rows, now_s)
        # Percentiles are measured amounts, to which no estimate for this pod is added.
        checks = (
            (settings.percentile_thresholds, nodes.usage_percentile[rows], 3),
            (limits, self._load(pod, nodes, rows), 1),
        )
        capacity = nodes.native_allocatable[rows]
        for thresholds, load, first in checks:
            for column, percent in ((MEMORY_COLUMN, thresholds.memory), (CPU_COLUMN, thresholds.cpu)):
                if percent:
                    # Rounded as in Koordinator (load_aware.go, filterNodeUsage). Unknown usage is NaN, which exceeds nothing.
                    usage = np.floor(load[:, column] * 100 / np.maximum(capacity[:, column], 1) + 0.5)
                    numbers[(usage > percent) & fresh & (capacity[:, column] > 0)] = first + column
        return numbers

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:
        """Score the weighted free share of CPU and memory; 0 without a fresh report, as in Koordinator."""
        capacity = nodes.native_allocatable[rows]
        free = (capacity - self._load(pod, nodes, rows)) / np.maximum(capacity, 1) * 100
        free = np.where(np.isnan(free) | (capacity <= 0), 0, np.clip(free, 0, 100))
        scores: FloatArray = free @ self._weights / self._weights.sum()
        return np.where(self._is_fresh(nodes, rows, now_s), scores, 0.0)

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:
        """Return usage, estimates and age of the report."""
        reported_at_s = float(nodes.reported_at_s[row])
        if np.isnan(reported_at_s):
            return "the CustomNodeResource reports no usage"
        rows = np.array([row])
        load, capacity = self._load(pod, nodes, rows)[0], nodes.native_allocatable[row]
        shares = " and ".join(
            "unknown" if np.isnan(load[column]) or not capacity[column] else f"{load[column] / capacity[column]:.0%}"
            for column in (CPU_COLUMN, MEMORY_COLUMN)
        )
        age_s = max(now_s - reported_at_s, 0.0)
        stale = (
            "" if self._is_fresh(nodes, rows, now_s)[0] else f", older than {self._settings.expiration_s:g} s: ignored"
        )
        return f"CPU and memory usage with the pod {shares}, reported {age_s:.0f} s ago{stale}"

    def _load(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows) -> FloatArray:
        load: FloatArray = nodes.usage[rows] + nodes.unmeasured[rows] + estimate_load([pod.load_basis], self._factors)
        return load

    def _is_fresh(self, nodes: NodeArrays, rows: Rows, now_s: float) -> BoolArray:
        # If the clock of a node runs ahead, its report has a time in the future, and counts as fresh.
        fresh: BoolArray = now_s - nodes.reported_at_s[rows] < self._settings.expiration_s
        return fresh


def estimate_load(pods: Sequence[Amounts], factors: FloatArray) -> FloatArray:
    """Return the sum of the estimated load of pods, (2,): the factors times what they request, DEFAULT_LOAD where they request
    nothing."""
    basis = np.array(pods, np.float64).reshape(-1, 2)
    total: FloatArray = np.where(basis > 0, basis * factors, DEFAULT_LOAD).sum(axis=0)
    return total
