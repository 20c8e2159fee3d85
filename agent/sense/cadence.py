"""How old what was read of a cgroup may be. Apart from the files: whoever only says so may run elsewhere."""

from __future__ import annotations

from enum import IntEnum


class Cadence(IntEnum):
    """How often a file is read. Files that are long, or make the kernel add up its CPUs first, need not be read each time."""

    TICK = 0
    SLOW = 1
    RARE = 2
    """What people and agents set. Not kept open either."""


PERIOD_NS = {Cadence.TICK: 0, Cadence.SLOW: 5_000_000_000, Cadence.RARE: 30_000_000_000}
