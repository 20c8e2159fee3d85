"""How much CPU can be promised to reclaimed pods: Katalyst's formulas for a region and for the reclaim pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def region_cores(upper: float, estimate: float, reserved_for_allocate: float, reserved_for_reclaim: float) -> float:
    """Region policy `canonical`: what the online pods of a region leave of its upper bound."""
    return max(upper - estimate - reserved_for_allocate + reserved_for_reclaim, 0.0)


def pool_cores(cpus: Sequence[int], busy: Mapping[int, float], reclaimed_use_cores: float) -> float:
    """Assembler `common`: the idle part of the reclaim pool's CPUs and what reclaimed pods use of them already.

    `busy` is the busy ratio of each CPU; a CPU without one counts as fully busy, since nothing can be promised of it.
    """
    idle = len(cpus) - sum(busy.get(cpu, 1.0) for cpu in cpus)
    return min(max(idle, 0.0) + reclaimed_use_cores, float(len(cpus)))
