"""Score by measured harm: batch work is placed on nodes whose online pods wait least. Pure.
The agents report run-queue latency of online pods and the node's pressure (PSI) in the CustomNodeResource.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from api.katalyst.harm import (
    CPU_PRESSURE,
    HARM_LIMITS,
    MEMORY_PRESSURE,
    RECLAIMED_INTERFERENCE,
    RUNQ_LATENCY_P99,
)
from controller.scheduler.node_arrays import CPU_COLUMN, HARM_INDICATORS, FloatArray, NodeArrays
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.resource_fit import PluginWeight
from controller.scheduler.scheduling_pod import SchedulingPod

Share = Annotated[float, Meta(gt=0, le=1)]
NEUTRAL_SCORE = 50.0
"""Score of a node without a report of harm."""


class HarmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Values at which a node scores 0. Half of a value scores 50."""

    runq_latency_ms: Annotated[float, Meta(gt=0, le=10_000)] = 1000 * HARM_LIMITS[RUNQ_LATENCY_P99]
    """Run-queue latency p99 of online pods; the default is the target of the agents' policy `latency`."""
    cpu_pressure: Share = HARM_LIMITS[CPU_PRESSURE]
    """Share of time in which some task waited for a CPU."""
    memory_pressure: Share = HARM_LIMITS[MEMORY_PRESSURE]
    """Share of time in which some task waited for memory."""
    interference: Annotated[float, Meta(gt=0, le=1000)] = HARM_LIMITS[RECLAIMED_INTERFERENCE]
    """Seconds per second for which online tasks waited for reclaimed pods."""
    half_life_s: Annotated[float, Meta(ge=1, le=86_400)] = 120.0
    """Age of a report at which it counts half: the score is then the mean of the measured score and NEUTRAL_SCORE. Agents
    report usage once a minute."""
    weight: PluginWeight = 2.0
    """Weight of this score among the scores of all plugins; 0 leaves it out."""


class HarmScore:
    """Prefers nodes whose online pods are harmed least."""

    name = "HarmAware"
    reasons: Sequence[RejectionReason] = ()

    def __init__(self, settings: HarmSettings) -> None:
        self._settings, self.weight = settings, settings.weight
        self._limits = np.array(
            (settings.runq_latency_ms / 1000, settings.cpu_pressure, settings.memory_pressure, settings.interference)
        )

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Pass every node: where online pods are harmed, the agent takes resources back from reclaimed pods."""
        return None

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score (1 - the largest share of a limit) * 100, which decays to NEUTRAL_SCORE as the report ages.

        The estimated CPU use of pods placed since the report counts as harm, so that one node does not get a burst of pods.
        """
        shares = nodes.harm[rows] / self._limits
        is_reported = ~np.isnan(shares).all(axis=1)
        harm = np.where(np.isnan(shares), 0.0, shares).max(axis=1, initial=0.0)
        capacity = np.maximum(nodes.native_allocatable[rows, CPU_COLUMN], 1)
        measured = np.clip(1 - harm, 0, 1) * 100
        age_s = np.maximum(now_s - nodes.reported_at_s[rows], 0)
        trust = np.where(is_reported & ~np.isnan(age_s), 0.5 ** (age_s / self._settings.half_life_s), 0.0)
        scores = NEUTRAL_SCORE + (measured - NEUTRAL_SCORE) * trust
        added = np.where(
            nodes.native_allocatable[rows, CPU_COLUMN] > 0, nodes.unmeasured[rows, CPU_COLUMN] / capacity, 0
        )
        return np.asarray(np.clip(scores - added * 100, 0, 100), np.float64)

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return the indicators, and the age of the report."""
        values = nodes.harm[row]
        if np.isnan(values).all():
            return "the CustomNodeResource reports no run-queue latency and no pressure"
        shown = ", ".join(
            f"{name} {value:.4g} (limit {limit:.4g})"
            for name, value, limit in zip(HARM_INDICATORS, values, self._limits, strict=True)
            if not np.isnan(value)
        )
        return f"{shown}, reported {max(now_s - float(nodes.reported_at_s[row]), 0.0):.0f} s ago"
