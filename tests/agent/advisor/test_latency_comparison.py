"""The statistic of quota trials distinguishes effects from noise, and returns nothing with too few intervals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.latency_comparison import LatencyInterval, compare_latency
from tests.builders.nodes import run_queue_latency

S = 1_000_000_000
QUIET, BURST = {100: 2000}, {100: 1800, 40_000: 200}


def interval(excess: float, *, limited: bool, counts: dict[int, int] | None = None) -> LatencyInterval:
    slots = run_queue_latency((BURST if excess else QUIET) if counts is None else counts).slots
    assert slots is not None
    return LatencyInterval(limited=limited, started_ns=0, duration_ns=5 * S, slots=slots, excess=excess)


def intervals(without: list[float], limited: list[float]) -> list[LatencyInterval]:
    return [interval(excess, limited=False) for excess in without] + [
        interval(excess, limited=True) for excess in limited
    ]


@pytest.mark.parametrize(
    ("without", "limited", "improved"),
    [
        ([0.0] * 4, [0.0] * 4, False),
        ([2.0] * 4, [2.0] * 4, False),
        # Four times the target in every interval, and never above it with the quota.
        ([2.0] * 4, [0.0] * 4, True),
        ([0.0] * 4, [2.0] * 4, False),
        # The merged p99 falls from 55 ms to 0.13 ms, but one burst in one interval is no evidence.
        ([2.0, 0.0, 0.0, 0.0], [0.0] * 4, False),
        ([2.0, 0.0, 0.0, 0.0], [0.0] * 30, False),
        # Bursts in half of many intervals, and with the quota in none.
        ([2.0, 0.0] * 6, [0.0] * 12, True),
        ([2.0, 0.0] * 6, [2.0, 0.0, 0.0] * 4, False),
        # From 400 ms to 50 ms with a target of 10 ms: still too long, but less so.
        ([5.3, 5.4, 5.2, 5.3], [2.3, 2.4, 2.2, 2.3], True),
        # Half as long, which is as much as the resolution of the histogram explains.
        ([2.0, 2.0], [1.0, 1.0], True),
        ([2.0, 2.0], [1.2, 1.2], False),
    ],
)
def test_an_improvement_exceeds_the_noise(without: list[float], limited: list[float], *, improved: bool) -> None:
    comparison = compare_latency(intervals(without, limited), 0.99)
    assert comparison is not None
    assert comparison.improved is improved


def test_the_numbers_are_those_of_the_merged_histograms() -> None:
    comparison = compare_latency(intervals([2.0, 0.0, 2.0], [0.0] * 4), 0.99)
    assert comparison is not None
    # 400 of 6,000 waits are in the slot of 32.8 to 65.5 ms; the upper 60 of them are above p99.
    assert comparison.without_quota_ns == pytest.approx(32.768e6 * (1 + 340 / 400))
    assert comparison.with_quota_ns == pytest.approx(64e3 + 0.99 * 64e3)
    assert (comparison.without_quota_s, comparison.with_quota_s) == (15.0, 20.0)


def test_the_difference_and_its_error_are_those_of_welch() -> None:
    """Means 1.5 and 0.5; variances 3 and 1 of 4 intervals each."""
    comparison = compare_latency(intervals([0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 0.0, 2.0]), 0.99)
    assert comparison is not None
    assert (comparison.difference, comparison.error) == (pytest.approx(1.0), pytest.approx(1.0))
    # (3/4 + 1/4)^2 / ((3/4)^2 / 3 + (1/4)^2 / 3) = 4.8, so 4 degrees of freedom.
    assert comparison.required_statistic == 2.132
    assert (comparison.statistic, comparison.upper_difference) == (pytest.approx(1.0), pytest.approx(3.132))


def test_few_intervals_have_to_differ_more_than_many() -> None:
    required = []
    for count in (2, 4, 12):
        comparison = compare_latency(intervals([2.0, 0.0] * (count // 2), [0.0, 2.0] * (count // 2)), 0.99)
        assert comparison is not None
        required.append(comparison.required_statistic)
        assert comparison.statistic == 0
    assert required == [2.920, 1.943, 1.812], "Student's t at 95 % with 2, 6 and 22 (10 and more) degrees of freedom"


def test_equal_intervals_have_the_error_of_the_histogram() -> None:
    """A slot spans a factor of 2: a value within it has a variance of 1/12 octaves."""
    comparison = compare_latency(intervals([2.0] * 4, [0.0] * 4), 0.99)
    assert comparison is not None
    assert comparison.error == pytest.approx((2 / 12 / 4) ** 0.5)


@pytest.mark.parametrize(
    ("without", "limited"), [([], [0.0] * 9), ([2.0] * 9, [0.0]), ([2.0], [0.0])], ids=["none", "one", "one each"]
)
def test_too_little_is_not_compared(without: list[float], limited: list[float]) -> None:
    assert compare_latency(intervals(without, limited), 0.99) is None


def test_intervals_without_waits_do_not_count() -> None:
    silent = [interval(0.0, limited=True, counts={}) for _ in range(9)]
    assert compare_latency([*intervals([2.0] * 4, [0.0]), *silent], 0.99) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 12)), max_size=12), st.floats(0.5, 0.999))
def test_the_other_way_round_it_has_the_opposite_sign(values: list[tuple[bool, float]], quantile: float) -> None:
    measured = [interval(excess, limited=limited, counts=BURST) for limited, excess in values]
    swapped = [replace(each, limited=not each.limited) for each in measured]
    first, second = compare_latency(measured, quantile), compare_latency(swapped, quantile)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.statistic == pytest.approx(-second.statistic)
        assert first.required_statistic == second.required_statistic
        assert not (first.improved and second.improved)
