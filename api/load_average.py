"""Load averages from samples every five seconds, in the kernel's arithmetic (kernel/sched/loadavg.c).
Pure. An average starts at 0, as the kernel's does at boot: it is too low until its period has passed.
"""

from __future__ import annotations

import msgspec

from api.measurements import LoadAverages, ThreadStates

FSHIFT = 11
FIXED_POINT_ONE = 1 << FSHIFT
"""1.0 in the kernel's fixed point."""
DECAYS = (1884, 2014, 2037)
"""exp(-5 s / 1, 5 and 15 minutes) in fixed point."""
SAMPLE_INTERVAL_NS = 5_000_000_000
"""Between two samples; the kernel takes one tick more (LOAD_FREQ), so as not to meet what happens every five seconds."""

FixedPointTriple = tuple[int, int, int]


class FixedPointLoad(msgspec.Struct, frozen=True):
    """What is kept of one cgroup from sample to sample, in fixed point, over 1, 5 and 15 minutes."""

    active: FixedPointTriple = (0, 0, 0)
    """Of runnable and uninterruptible threads."""
    runnable: FixedPointTriple = (0, 0, 0)
    """Of runnable ones alone."""

    def load(self) -> LoadAverages:
        one, five, fifteen = (value / FIXED_POINT_ONE for value in self.active)
        runnable_one, runnable_five, runnable_fifteen = (value / FIXED_POINT_ONE for value in self.runnable)
        return LoadAverages(
            one=one,
            five=five,
            fifteen=fifteen,
            runnable_one=runnable_one,
            runnable_five=runnable_five,
            runnable_fifteen=runnable_fifteen,
        )


def advance_averages(before: FixedPointLoad, states: ThreadStates, samples: int = 1) -> FixedPointLoad:
    """The averages after a sample; of several that were missed, all are taken to have been like this one."""
    return FixedPointLoad(
        active=_advance(before.active, states.runnable + states.uninterruptible, samples),
        runnable=_advance(before.runnable, states.runnable, samples),
    )


def _advance(before: FixedPointTriple, threads: int, samples: int) -> FixedPointTriple:
    one, five, fifteen = (
        calc_load_n(value, decay, threads * FIXED_POINT_ONE, samples)
        for value, decay in zip(before, DECAYS, strict=True)
    )
    return one, five, fifteen


def calc_load(load: int, decay: int, active: int) -> int:
    """a1 = a0 * e + a * (1 - e); rounded up while the load rises, so that it can reach what it rises to."""
    grown = load * decay + active * (FIXED_POINT_ONE - decay)
    if active >= load:
        grown += FIXED_POINT_ONE - 1
    return grown // FIXED_POINT_ONE


def calc_load_n(load: int, decay: int, active: int, samples: int) -> int:
    """`samples` steps at once: e becomes e to the power of that."""
    return calc_load(load, fixed_power_int(decay, FSHIFT, samples), active)


def fixed_power_int(x: int, frac_bits: int, n: int) -> int:
    """x ** n in fixed point, by squaring, with the kernel's rounding."""
    result, half = 1 << frac_bits, 1 << (frac_bits - 1)
    while n:
        if n & 1:
            result = (result * x + half) >> frac_bits
        n >>= 1
        x = (x * x + half) >> frac_bits
    return result
