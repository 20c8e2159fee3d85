"""Indicators of harm to online pods in one cycle: what the agent reports to the scheduler, and what the page shows. Pure."""

from __future__ import annotations

from api.decision import Cycle
from api.histogram import quantile_ns
from api.katalyst.harm import CPU_PRESSURE, MEMORY_PRESSURE, RECLAIMED_INTERFERENCE, RUNQ_LATENCY_P99
from api.rates import sum_runq_latencies
from api.units import NS_PER_S


def harm_indicators(cycle: Cycle) -> dict[str, float]:
    """Return the measured indicators by their names and in the units of api/katalyst/harm.py."""
    node, values = cycle.snapshot.node, dict[str, float]()
    waits = [wait for wait in cycle.evaluated_latency.values() if wait is not None and wait.slots is not None]
    if waits and (slots := sum_runq_latencies(waits).slots) is not None:
        # No wait at all is the best that can be reported.
        values[RUNQ_LATENCY_P99] = (quantile_ns(slots, 0.99) or 0.0) / NS_PER_S
    if cycle.rates is not None and cycle.interference_ns is not None:
        values[RECLAIMED_INTERFERENCE] = cycle.interference_ns / cycle.rates.node.interval_ns
    for name, pressure in ((CPU_PRESSURE, node.cpu_pressure), (MEMORY_PRESSURE, node.memory_pressure)):
        if pressure is not None:
            percent = pressure.some_avg10 if pressure.some_avg60 is None else pressure.some_avg60
            values[name] = percent / 100
    return values
