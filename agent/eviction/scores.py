"""Which pod of an overloaded NUMA node leaves: Katalyst's scores, the highest first. Pure, and in its own numbers."""

from __future__ import annotations

from math import floor

FULL = 100.0
REMOVE = -1000.0
USAGE_WEIGHT, USAGE_REACH, TOO_SMALL = 0.6, 0.3, 0.4


def usage_score(use: float, gap: float) -> int:
    """60 for a pod that uses just what is too much, falling to 0 at 0.3 beside it; -1000 for one that frees next to nothing.

    Both are parts of the NUMA node: `use` the pod's, `gap` what the node uses above its threshold.
    """
    if use <= TOO_SMALL * gap:
        return round(REMOVE)
    distance = abs(use - abs(gap))
    return _rounded(USAGE_WEIGHT * FULL * (1 - distance / USAGE_REACH)) if distance < USAGE_REACH else 0


def _rounded(value: float) -> int:
    """Half away from zero."""
    return floor(value + 0.5) if value >= 0 else -floor(-value + 0.5)
