"""Defines the value types of settings with their bounds, and the defaults that several sections share. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Cores = Annotated[float, Meta(ge=0, le=8192)]
Ratio = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Percent = Annotated[float, Meta(ge=0, le=100)]

SMALL_NODE_SHARE = 4
"""Katalyst's reserves suit large nodes; with nothing configured a small node reserves a quarter of itself."""
_MIN_RECLAIMED = 4


def reclaim_reserve_cpus(configured: int | None, cpus: int, numa_nodes: int) -> int:
    """[minReclaimedResourceForAllocate] Return the CPUs reserved for reclaimed pods: at least one per NUMA node, at
    most all."""
    reserve = min(_MIN_RECLAIMED, cpus // SMALL_NODE_SHARE) if configured is None else configured
    return min(max(reserve, numa_nodes), cpus)


def check_ascending(lower: str, low: float | None, upper: str, high: float | None) -> None:
    """Raise ValueError if the first of two settings exceeds the second; an unset one exceeds nothing."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"{lower} {low:.12g} is above {upper} {high:.12g}; lower it, or raise {upper}")
