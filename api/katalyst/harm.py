"""Names of the indicators of harm to online pods in `nodeMetric.genericUsage` of the CustomNodeResource.
Katalyst's consumers of that list read `cpu` and `memory` and skip other names.
"""

from __future__ import annotations

from collections.abc import Mapping

RUNQ_LATENCY_P99 = "dioptase.io/runq_latency_p99"
"""Run-queue latency in seconds that 99 % of the waits of online pods did not exceed, such as `2500u`."""
CPU_PRESSURE = "dioptase.io/cpu_pressure"
"""Share of time in which some task of the node waited for a CPU (PSI, some avg60), 0 to 1."""
MEMORY_PRESSURE = "dioptase.io/memory_pressure"
"""Share of time in which some task of the node waited for memory (PSI, some avg60), 0 to 1."""
RECLAIMED_INTERFERENCE = "dioptase.io/reclaimed_interference"
"""Seconds per second for which tasks of online pods waited while reclaimed pods had the CPU, summed over tasks."""
HARM_LIMITS = {RUNQ_LATENCY_P99: 0.010, CPU_PRESSURE: 0.4, MEMORY_PRESSURE: 0.1, RECLAIMED_INTERFERENCE: 0.5}
"""Value of each indicator at which the scheduler gives a node the score 0; the scheduler's settings `harm` can set others. The
limit of run-queue latency is the target of the agents' policy `latency`."""

REPORT_EXPIRATION_S = 180.0
"""Age in seconds from which a report of usage and harm is ignored; the scheduler's setting `load.expirationS` can set another
one."""


def worst_indicator(values: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the indicator with the largest share of its limit, and that share; None if no indicator is known."""
    shares = {name: values[name] / limit for name, limit in HARM_LIMITS.items() if name in values}
    return max(shares.items(), key=lambda item: item[1], default=None)
