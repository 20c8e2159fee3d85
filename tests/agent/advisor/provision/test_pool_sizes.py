"""Regulation of pools that do not fit, of overlap, and of a requirement's steps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.provision.pool_sizes import (
    is_shrink_allowed,
    regulate_overlap,
    regulate_pool_sizes,
    regulate_requirement,
)
from agent.advisor.provision.regions import RegionBounds
from agent.config.advisor import AdvisorConfig
from api.advice import scale_proportionally
from api.units import NS_PER_S

THREE = {"share": 1, "batch": 2, "flink": 3}
SIZES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 64), min_size=1)


@pytest.mark.parametrize(
    ("growing", "fixed", "available", "expand", "expected", "throttled"),
    [
        (THREE, {}, 12, True, {"share": 2, "batch": 4, "flink": 6}, False),
        (THREE, {}, 12, False, THREE, False),
        (THREE, {}, 6, False, THREE, False),
        (THREE, {}, 5, False, {"share": 1, "batch": 2, "flink": 2}, True),
        (THREE, {}, 4, False, {"share": 1, "batch": 1, "flink": 2}, True),
        (THREE, {}, 3, False, {"share": 1, "batch": 1, "flink": 1}, True),
        (THREE, {}, 2, False, {"share": 2, "batch": 2, "flink": 2}, True),
        (THREE, {"i1": 2, "i2": 2}, 24, True, {"share": 3, "batch": 7, "flink": 10, "i1": 2, "i2": 2}, False),
        (
            {"share": 2, "batch": 4, "flink": 6},
            {"i1": 2, "i2": 2},
            8,
            True,
            {"share": 1, "batch": 2, "flink": 3, "i1": 1, "i2": 1},
            True,
        ),
        ({}, {"i1": 2}, 24, True, {"i1": 2}, False),
    ],
)
def test_regulated_sizes(
    growing: Mapping[str, int],
    fixed: Mapping[str, int],
    available: int,
    expand: bool,
    expected: Mapping[str, int],
    throttled: bool,
) -> None:
    result = regulate_pool_sizes(growing, fixed, available, expand=expand)
    assert result.sizes == expected
    assert result.throttled is throttled
    assert result.occupied == (available if throttled else sum(expected.values()))


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (0, {}),
        (2, {"share": 1, "bmq": 1}),
        (4, {"share": 2, "bmq": 2}),
        (8, {"share": 3, "bmq": 3, "flink": 2}),
        (24, {"share": 9, "bmq": 8, "flink": 7}),
    ],
)
def test_overlap_is_taken_from_the_largest_first(cpus: int, expected: Mapping[str, int]) -> None:
    assert regulate_overlap({"share": 9, "bmq": 8, "flink": 7}, cpus) == expected


def test_more_overlap_than_pools_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="30 CPUs cannot overlap pools of 24"):
        regulate_overlap({"share": 9, "bmq": 8, "flink": 7}, 30)


@given(SIZES, st.integers(0, 512))
def test_normalised_sizes_add_up_and_none_is_zero(sizes: dict[str, int], target: int) -> None:
    result = scale_proportionally(sizes, target)
    if target < len(sizes):
        assert result is None
    else:
        assert result is not None
        assert sum(result.values()) == target
        assert min(result.values()) >= 1
        assert all(
            abs(result[pool] - size * target / sum(sizes.values())) < len(sizes) + 1 for pool, size in sizes.items()
        )


@given(SIZES)
def test_the_order_of_pools_does_not_matter(sizes: dict[str, int]) -> None:
    shuffled = dict(sorted(sizes.items(), reverse=True))
    target = sum(sizes.values()) // 2 + 1
    assert scale_proportionally(sizes, target) == scale_proportionally(shuffled, target)
    assert regulate_overlap(sizes, target) == regulate_overlap(shuffled, target)


@given(SIZES, st.integers(0, 512))
def test_overlap_is_exactly_the_requested_number(sizes: dict[str, int], cpus: int) -> None:
    cpus = min(cpus, sum(sizes.values()))
    result = regulate_overlap(sizes, cpus)
    assert sum(result.values()) == cpus
    assert all(0 < count <= sizes[pool] for pool, count in result.items())


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
