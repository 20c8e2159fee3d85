"""Arithmetic of pool sizes: Katalyst's own vectors, and properties of any sizes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.provision.pool_sizes import regulate_overlap, regulate_pool_sizes
from api.advice import scale_proportionally

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
