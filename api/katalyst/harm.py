"""Names of the indicators of harm to online pods in `nodeMetric.genericUsage` of the CustomNodeResource.
Katalyst's consumers of that list read `cpu` and `memory` and skip other names.
"""

from __future__ import annotations

RUNQ_LATENCY_P99 = "dioptase.io/runq_latency_p99"
"""Run-queue latency in seconds that 99 % of the waits of online pods did not exceed, such as `2500u`."""
CPU_PRESSURE = "dioptase.io/cpu_pressure"
"""Share of time in which some task of the node waited for a CPU (PSI, some avg60), 0 to 1."""
MEMORY_PRESSURE = "dioptase.io/memory_pressure"
"""Share of time in which some task of the node waited for memory (PSI, some avg60), 0 to 1."""
RECLAIMED_INTERFERENCE = "dioptase.io/reclaimed_interference"
"""Seconds per second for which tasks of online pods waited while reclaimed pods had the CPU, summed over tasks."""
