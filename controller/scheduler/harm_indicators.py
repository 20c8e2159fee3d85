"""Indicators of harm to online pods that agents report in `nodeMetric.genericUsage` of the CustomNodeResource. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.katalyst.harm import CPU_PRESSURE, MEMORY_PRESSURE, RECLAIMED_INTERFERENCE, RUNQ_LATENCY_P99
from api.quantity import convert_quantity

_KEYS = (RUNQ_LATENCY_P99, CPU_PRESSURE, MEMORY_PRESSURE, RECLAIMED_INTERFERENCE)
"""In the order of HARM_INDICATORS of node_arrays."""


def parse_harm(usage: Mapping[str, Any]) -> list[float]:
    """Return the indicators, NaN for one that is not reported. Raises ValueError that names the indicator."""
    return [_value(usage, key) for key in _KEYS]


def _value(usage: Mapping[str, Any], key: str) -> float:
    if key not in usage:
        return float("nan")
    try:
        return float(convert_quantity(usage[key]))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
