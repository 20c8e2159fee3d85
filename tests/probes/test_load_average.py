"""Load averages against the kernel's arithmetic, done by hand, and against what it must do whatever is counted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.snapshot import ThreadStates
from probes.load_average import (
    DECAYS,
    FIXED_POINT_ONE,
    FSHIFT,
    FixedPointLoad,
    advance_averages,
    calc_load,
    calc_load_n,
    fixed_power_int,
)


def states(runnable: int, uninterruptible: int = 0) -> ThreadStates:
    return ThreadStates(runnable=runnable, uninterruptible=uninterruptible, iowait=0, sleeping=9)


@pytest.mark.parametrize(
    ("load", "decay", "active", "expected"),
    [
        (0, 1884, 2048, 164),  # (0 + 2048 * 164 + 2047) / 2048 = 164.9
        (164, 1884, 2048, 315),  # (164 * 1884 + 2048 * 164 + 2047) / 2048 = 315.8
        (0, 2014, 2048, 34),  # 34.9
        (34, 2014, 2048, 68),  # 68.4
        (0, 2037, 2048, 11),  # 11.9
        (11, 2037, 2048, 22),  # 22.9
        (2048, 1884, 0, 1884),  # a falling load is not rounded up
        (1884, 1884, 0, 1733),  # 1733.1
        (6144, 1884, 6144, 6144),  # at its goal it stays
        (6143, 1884, 6144, 6144),  # and reaches it: (6143 * 1884 + 6144 * 164 + 2047) / 2048 = 6144.07
        (1, 2037, 0, 0),
    ],
)
def test_one_sample_is_what_the_kernel_computes(load: int, decay: int, active: int, expected: int) -> None:
    assert calc_load(load, decay, active) == expected


@pytest.mark.parametrize(
    ("samples", "power"),
    [
        (0, 2048),
        (1, 1884),
        (2, 1733),  # (1884 * 1884 + 1024) >> 11
        (4, 1466),  # (1733 * 1733 + 1024) >> 11
        (8, 1049),  # (1466 * 1466 + 1024) >> 11
        (12, 751),  # (1466 * 1049 + 1024) >> 11
    ],
)
def test_powers_are_rounded_as_the_kernel_rounds(samples: int, power: int) -> None:
    assert fixed_power_int(1884, FSHIFT, samples) == power


def test_a_minute_at_once_is_a_minute_in_steps_but_for_rounding() -> None:
    """One thread for a minute: 1 - 1/e of 2048 is 1294.6; each step rounds up, one step of a power rounds up once."""
    load = 0
    for _ in range(12):
        load = calc_load(load, 1884, 2048)
    assert load == 1299
    assert calc_load_n(0, 1884, 2048, 12) == 1297
    assert 2048 * (1 - 1 / math.e) == pytest.approx(1294.6, abs=0.1)


@given(st.integers(0, 5000), st.lists(st.integers(0, 5000), max_size=30))
def test_an_average_stays_between_what_it_was_and_what_is_counted(start: int, counts: list[int]) -> None:
    load, low, high = start * FIXED_POINT_ONE, start, start
    for count in counts:
        load = calc_load(load, 1884, count * FIXED_POINT_ONE)
        low, high = min(low, count), max(high, count)
        assert low * FIXED_POINT_ONE <= load + 1
        assert load <= high * FIXED_POINT_ONE


@given(st.integers(0, 300), st.integers(0, 10**6))
def test_gaps_of_any_length_end_where_the_count_is(threads: int, samples: int) -> None:
    for decay in DECAYS:
        load = calc_load_n(0, decay, threads * FIXED_POINT_ONE, samples)
        assert 0 <= load <= threads * FIXED_POINT_ONE
    assert calc_load_n(0, 1884, threads * FIXED_POINT_ONE, 10**6) == threads * FIXED_POINT_ONE


def test_runnable_threads_are_averaged_by_themselves_too() -> None:
    load = advance_averages(FixedPointLoad(), states(2, uninterruptible=1)).load()
    assert (load.load1, load.load5, load.load15) == (492 / 2048, 102 / 2048, 33 / 2048)
    assert (load.runnable1, load.runnable5, load.runnable15) == (328 / 2048, 68 / 2048, 22 / 2048)


def test_an_idle_cgroup_has_no_load() -> None:
    assert advance_averages(FixedPointLoad(), states(0), 1000) == FixedPointLoad()
