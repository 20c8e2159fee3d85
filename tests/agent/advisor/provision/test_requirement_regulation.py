"""From cores to whole CPUs: reserve, rounding, steps, pauses and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.advisor_state import NS_PER_S
from agent.advisor.provision.pool_sizes import is_shrink_allowed, regulate_requirement
from agent.advisor.provision.regions import RegionBounds
from agent.config.advisor import AdvisorConfig

CONFIG = AdvisorConfig()


@pytest.mark.parametrize(
    ("cores", "reserve", "before", "pause", "even", "expected", "limit"),
    [
        (2.5, 4.0, None, False, False, 7, ""),
        (2.5, 4.0, None, False, True, 8, ""),
        (4.0, 4.0, None, False, True, 8, ""),
        (0.0, 0.0, None, False, False, 4, "the minimum is 4"),
        (80.0, 4.0, None, False, False, 44, "the maximum is 44"),
        (30.0, 0.0, 8, False, False, 18, "it grows by at most 10 at once"),
        (18.0, 0.0, 8, False, False, 18, ""),
        (5.0, 0.0, 8, False, False, 6, "it shrinks by at most 2 at once"),
        (6.0, 0.0, 8, False, False, 6, ""),
        (5.0, 0.0, 8, True, False, 8, "it shrinks once in 30 s"),
        (9.0, 0.0, 8, True, False, 9, ""),  # growing needs no pause
        (43.5, 0.0, 43, False, False, 44, ""),
        (43.5, 2.0, 43, False, False, 44, "the maximum is 44"),
        (60.0, 0.0, 60, True, False, 44, "the maximum is 44"),  # bounds go before pauses
    ],
)
def test_regulation(
    cores: float, reserve: float, before: int | None, pause: bool, even: bool, expected: int, limit: str
) -> None:
    bounds = RegionBounds(upper=44, lower=4, reserved_for_allocate=reserve)
    result = regulate_requirement(cores, bounds, before, CONFIG, may_shrink=not pause, even=even)
    assert (result.cpus, result.limit) == (expected, limit)


def test_with_smt_the_upper_bound_is_even_too() -> None:
    bounds = RegionBounds(upper=45, lower=4)
    assert regulate_requirement(60, bounds, None, CONFIG, may_shrink=True, even=True).cpus == 44
    assert regulate_requirement(60, bounds, None, CONFIG, may_shrink=True, even=False).cpus == 45
    assert regulate_requirement(60, RegionBounds(upper=1, lower=1), None, CONFIG, may_shrink=True, even=True).cpus == 1


@pytest.mark.parametrize(
    ("last_s", "now_s", "expected"), [(None, 0, True), (100, 129.9, False), (100, 130, True), (100, 90, False)]
)
def test_the_pause(last_s: float | None, now_s: float, expected: bool) -> None:
    last = None if last_s is None else round(last_s * NS_PER_S)
    assert is_shrink_allowed(last, round(now_s * NS_PER_S), CONFIG) is expected


@given(
    st.floats(0, 500),
    st.floats(1, 256),
    st.floats(0, 8),
    st.none() | st.integers(1, 256),
    st.booleans(),
    st.booleans(),
)
def test_steps_and_bounds_hold(
    cores: float, upper: float, reserve: float, before: int | None, pause: bool, even: bool
) -> None:
    bounds = RegionBounds(upper=upper, lower=min(4.0, upper), reserved_for_allocate=reserve)
    result = regulate_requirement(cores, bounds, before, CONFIG, may_shrink=not pause, even=even)
    odd = int(upper) % 2 if even and upper > 1 else 0  # whole physical cores only
    assert min(4, int(upper) - odd) <= result.cpus <= upper + 1
    assert not (even and result.cpus % 2 and upper > 1 and before is None)
    if before is not None and 4 <= before <= upper - 1:
        assert before - (0 if pause else 2) <= result.cpus <= before + 10
