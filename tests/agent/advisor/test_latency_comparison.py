"""The statistic of quota trials: what is an effect, what is noise, and what is too little."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.latency_comparison import LatencyInterval, compare_latency
from api.histogram import SLOT_COUNT
from tests.builders.nodes import run_queue_latency

S = 1_000_000_000


def interval(counts: dict[int, int], *, limited: bool) -> LatencyInterval:
    slots = run_queue_latency(counts).slots
    assert slots is not None
    return LatencyInterval(limited=limited, started_ns=0, duration_ns=5 * S, slots=slots)


def intervals(without: list[dict[int, int]], limited: list[dict[int, int]]) -> list[LatencyInterval]:
    return [interval(counts, limited=False) for counts in without] + [
        interval(counts, limited=True) for counts in limited
    ]


QUIET, BURST = {100: 2000}, {100: 1800, 40_000: 200}
SLIGHTLY = {100: 1980, 40_000: 20}


@pytest.mark.parametrize(
    ("without", "limited", "improved"),
    [
        ([QUIET] * 4, [QUIET] * 4, False),
        ([BURST] * 4, [BURST] * 4, False),
        ([BURST] * 4, [QUIET] * 4, True),
        ([QUIET] * 4, [BURST] * 4, False),
        # The merged p99 falls from 55 ms to 0.13 ms, but one burst in one interval is no evidence.
        ([BURST, QUIET, QUIET, QUIET], [QUIET] * 4, False),
        ([BURST, QUIET, QUIET, QUIET], [QUIET] * 30, False),
        # Bursts in half of many intervals, and with the quota in none.
        ([BURST, QUIET] * 6, [QUIET] * 12, True),
        ([BURST, QUIET] * 6, [BURST, QUIET, QUIET] * 4, False),
        # Ten times fewer long waits, in every interval.
        ([BURST] * 4, [SLIGHTLY] * 4, True),
        ([BURST, BURST], [QUIET, QUIET], True),
        # A third more, but it varies as much.
        ([{100: 1950, 40_000: n} for n in (20, 60, 30, 90)], [{100: 1950, 40_000: n} for n in (40, 25, 70, 15)], False),
    ],
)
def test_an_improvement_exceeds_the_noise(
    without: list[dict[int, int]], limited: list[dict[int, int]], *, improved: bool
) -> None:
    comparison = compare_latency(intervals(without, limited), 0.99)
    assert comparison is not None
    assert comparison.improved is improved


def test_the_numbers_are_those_of_the_merged_histograms() -> None:
    comparison = compare_latency(intervals([BURST, QUIET, BURST], [SLIGHTLY] * 4), 0.99)
    assert comparison is not None
    # 400 of 6,000 waits are in the slot of 32.8 to 65.5 ms; the upper 60 of them are above p99.
    assert comparison.without_quota_ns == pytest.approx(32.768e6 * (1 + 340 / 400))
    # 20 of 2,000: p99 is where the slot of 0.1 ms ends.
    assert comparison.with_quota_ns == pytest.approx(128e3)
    assert (comparison.without_quota_s, comparison.with_quota_s) == (15.0, 20.0)


def test_few_intervals_have_to_differ_more_than_many() -> None:
    required = []
    for count in (2, 4, 12):
        noisy = [{100: 2000, 40_000: 20 + 10 * (i % 2)} for i in range(count)]
        comparison = compare_latency(intervals(noisy, noisy), 0.99)
        assert comparison is not None
        required.append(comparison.required_statistic)
        assert comparison.statistic == 0
    assert required == [2.920, 1.943, 1.812], "Student's t at 95 % with 2, 6 and 22 (10 and more) degrees of freedom"


def test_with_few_waits_a_lower_quantile_is_compared() -> None:
    """p99 of 800 waits in 8 intervals would be one wait each; p97 has three."""
    few = intervals([{100: 97, 40_000: 3}] * 4, [{100: 100}] * 4)
    comparison = compare_latency(few, 0.99)
    assert comparison is not None
    assert comparison.improved


@pytest.mark.parametrize(
    ("without", "limited"),
    [([], [QUIET] * 9), ([QUIET] * 9, [QUIET]), ([{}] * 9, [QUIET] * 9), ([{100: 9}] * 4, [{100: 9}] * 4)],
    ids=["none", "one", "no waits", "72 waits"],
)
def test_too_little_is_not_compared(without: list[dict[int, int]], limited: list[dict[int, int]]) -> None:
    assert compare_latency(intervals(without, limited), 0.99) is None


SLOTS = st.lists(st.integers(0, 300), min_size=SLOT_COUNT, max_size=SLOT_COUNT).map(tuple)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), SLOTS), max_size=12), st.floats(0.5, 0.999))
def test_the_other_way_round_it_has_the_opposite_sign(
    given_intervals: list[tuple[bool, tuple[int, ...]]], quantile: float
) -> None:
    blocks = [
        LatencyInterval(limited=limited, started_ns=0, duration_ns=S, slots=slots) for limited, slots in given_intervals
    ]
    swapped = [replace(block, limited=not block.limited) for block in blocks]
    one, other = compare_latency(blocks, quantile), compare_latency(swapped, quantile)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.statistic == pytest.approx(-other.statistic)
        assert one.required_statistic == other.required_statistic
        assert not (one.improved and other.improved)
