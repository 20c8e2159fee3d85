"""From a requirement in cores to whole CPUs that do not jump: Katalyst's regulator."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from agent.advisor.regions import Bounds
from agent.config import AdvisorConfig

NS_PER_S = 1_000_000_000


class Regulated(NamedTuple):
    """A requirement in CPUs, what it would be without steps, and what held it back."""

    cpus: int
    wanted: int
    limit: str
    """Empty where nothing did; otherwise for a person: `grows by at most 10`."""


def regulate(
    cores: float, bounds: Bounds, before: int | None, config: AdvisorConfig, *, may_shrink: bool, even: bool
) -> Regulated:
    """The reserve added, rounded up, in steps from `before` (None: at once), within the bounds.

    With `even` online and reclaimed pods never share a physical core, and the upper bound is taken to an even number of
    CPUs too. `may_shrink` is False within min_ramp_down_period_s of the last time that it did.
    """
    size = ceil(cores + bounds.reserved_for_allocate)
    upper = ceil(bounds.upper)
    if even:
        size += size % 2
        upper -= upper % 2 if upper > 1 else 0
    wanted, limit = size, ""
    if before is not None:
        if size > before + config.max_ramp_up_cores:
            size, limit = before + config.max_ramp_up_cores, f"it grows by at most {config.max_ramp_up_cores} at once"
        elif size < before and not may_shrink:
            size, limit = before, f"it shrinks once in {config.min_ramp_down_period_s:g} s"
        elif size < before - config.max_ramp_down_cores:
            size = before - config.max_ramp_down_cores
            limit = f"it shrinks by at most {config.max_ramp_down_cores} at once"
    lower = min(ceil(bounds.lower), upper)
    if not lower <= size <= upper:
        limit = f"the least is {lower}" if size < lower else f"the most is {upper}"
    return Regulated(min(max(size, lower), upper), wanted, limit)


def held(before: int, bounds: Bounds) -> Regulated:
    """What the region had, within the bounds: an agent that was just started has measured nothing yet, and what one before
    it found out of days is better than what pods ask for."""
    upper = ceil(bounds.upper)
    cpus = min(max(before, min(ceil(bounds.lower), upper)), upper)
    return Regulated(cpus, before, "it stays as it was: nothing has been measured yet")


def may_shrink(last_ramp_down_ns: int | None, now_ns: int, config: AdvisorConfig) -> bool:
    """Whether the pause since the last shrinking is over."""
    return last_ramp_down_ns is None or now_ns - last_ramp_down_ns >= config.min_ramp_down_period_s * NS_PER_S
