"""Which pod of an overloaded NUMA node leaves: Katalyst's scores, the highest first. Pure, and in its own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor

FULL = 100.0
REMOVE = -1000.0
USAGE_WEIGHT, USAGE_REACH, TOO_SMALL = 0.6, 0.3, 0.4
TOP_PART = 0.9


def usage_score(use: float, gap: float) -> int:
    """60 for a pod that uses just what is too much, falling to 0 at 0.3 beside it; -1000 for one that frees next to nothing.

    Both are parts of the NUMA node: `use` the pod's, `gap` what the node uses above its threshold.
    """
    if use <= TOO_SMALL * gap:
        return round(REMOVE)
    distance = abs(use - abs(gap))
    return _rounded(USAGE_WEIGHT * FULL * (1 - distance / USAGE_REACH)) if distance < USAGE_REACH else 0


def frequency_score(ratios: Mapping[float, float], limits: tuple[float, float, float]) -> int:
    """100 for a workload that lost no pod lately; -10000 times what it lost in an hour where that is too much.

    `ratios` has windows in hours and which part of the workload was evicted in each; short windows weigh more. 0 of none.
    """
    windows = {window: ratio for window, ratio in ratios.items() if window > 0}
    weights = sum(1 / window for window in windows)
    if not weights:
        return 0
    return _rounded(sum(_hourly(ratio / window, limits) / window for window, ratio in windows.items()) / weights)


def _hourly(ratio: float, limits: tuple[float, float, float]) -> float:
    low, middle, high = limits
    if ratio >= high:
        return REMOVE * 10 * ratio
    if ratio >= middle:
        return (1 - (ratio - middle) / (high - middle)) * (1 - TOP_PART) * FULL
    if ratio >= low:
        return (TOP_PART / 2 + (1 - (ratio - low) / (middle - low)) * (1 - TOP_PART)) * FULL
    return (TOP_PART + (1 - ratio / low) * (1 - TOP_PART)) * FULL


def _rounded(value: float) -> int:
    """Half away from zero."""
    return floor(value + 0.5) if value >= 0 else -floor(-value + 0.5)
