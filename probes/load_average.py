"""Load averages from samples every five seconds, in the kernel's arithmetic (kernel/sched/loadavg.c).
An average starts at 0, as the kernel's does at boot: it is too low until its period has passed.
"""

from __future__ import annotations

import msgspec

from api.snapshot import LoadAverages, ThreadStates

FSHIFT = 11
FIXED_POINT_ONE = 1 << FSHIFT
"""Value 1.0 in the kernel's fixed-point format."""
DECAYS = (1884, 2014, 2037)
"""Fixed-point exp(-5 s / T) for T = 1, 5 and 15 minutes."""
SAMPLE_INTERVAL_NS = 5_000_000_000
"""The kernel adds one tick (LOAD_FREQ) to avoid aliasing with work that runs every five seconds."""

FixedPointTriple = tuple[int, int, int]


class FixedPointLoad(msgspec.Struct, frozen=True):
    """State of one cgroup between samples, in fixed point, over 1, 5 and 15 minutes."""

    active: FixedPointTriple = (0, 0, 0)
    """Average of runnable and uninterruptible threads."""
    runnable: FixedPointTriple = (0, 0, 0)
    """Average of runnable threads."""

    def load(self) -> LoadAverages:
        load1, load5, load15, runnable1, runnable5, runnable15 = (
            value / FIXED_POINT_ONE for value in (*self.active, *self.runnable)
        )
        return LoadAverages(
            load1=load1, load5=load5, load15=load15, runnable1=runnable1, runnable5=runnable5, runnable15=runnable15
        )


def advance_averages(before: FixedPointLoad, states: ThreadStates, samples: int = 1) -> FixedPointLoad:
    """Return the averages after `samples` samples; missed samples are assumed equal to this one."""
    return FixedPointLoad(
        active=_advance(before.active, states.runnable + states.uninterruptible, samples),
        runnable=_advance(before.runnable, states.runnable, samples),
    )


def _advance(before: FixedPointTriple, threads: int, samples: int) -> FixedPointTriple:
    load1, load5, load15 = (
        calc_load_n(value, decay, threads * FIXED_POINT_ONE, samples)
        for value, decay in zip(before, DECAYS, strict=True)
    )
    return load1, load5, load15


def calc_load(load: int, decay: int, active: int) -> int:
    """Compute a1 = a0 * e + a * (1 - e), rounded up while the load rises, so that it can reach its target."""
    grown = load * decay + active * (FIXED_POINT_ONE - decay)
    if active >= load:
        grown += FIXED_POINT_ONE - 1
    return grown // FIXED_POINT_ONE


def calc_load_n(load: int, decay: int, active: int, samples: int) -> int:
    """Compute `samples` steps at once, with e raised to that power."""
    return calc_load(load, fixed_power_int(decay, FSHIFT, samples), active)


def fixed_power_int(x: int, frac_bits: int, n: int) -> int:
    """Compute x ** n in fixed point by squaring, with the kernel's rounding."""
    result, half = 1 << frac_bits, 1 << (frac_bits - 1)
    while n:
        if n & 1:
            result = (result * x + half) >> frac_bits
        n >>= 1
        x = (x * x + half) >> frac_bits
    return result
