"""When batch work's CPU counts as taken back, from samples of its CPU time that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from bench.reaction import (
    FIRST_S,
    PERIOD_S,
    STEP_S,
    WINDOW_S,
    burst_end_s,
    mean_cores,
    schedule_of,
    taken_back_ms,
    used_ns,
)

MS = 1_000_000
ONSET_MS, END_MS, LEFT = 1000, 2200, 0.2


def sampled(use: Callable[[float], float], every_ms: int = 5, until_ms: int = 2500) -> list[tuple[int, int]]:
    """CPU time of a job that uses so many cores at each millisecond, looked at every few."""
    used, result = 0.0, []
    for at_ms in range(until_ms):
        if at_ms % every_ms == 0:
            result.append((at_ms * MS, round(used * MS)))
        used += use(at_ms)
    return result


def falling(after_ms: float, *, before: float = 1.8, to: float = 0.19) -> Callable[[float], float]:
    return lambda at_ms: before if at_ms < ONSET_MS + after_ms else to


def taken_back(samples: Sequence[tuple[int, int]]) -> float | None:
    return taken_back_ms(samples, ONSET_MS * MS, END_MS * MS, LEFT)


@pytest.mark.parametrize("after_ms", [0, 40, 300, 900])
def test_it_is_taken_back_when_nine_tenths_of_a_window_lie_behind_the_fall(after_ms: int) -> None:
    assert taken_back(sampled(falling(after_ms))) == pytest.approx(after_ms + 900 * WINDOW_S)


@pytest.mark.parametrize(
    ("use", "result"),
    [
        (falling(0, to=1.8), math.inf),
        (falling(0, to=0.4), math.inf),
        (falling(0, to=0.355), 50),
        (falling(0, before=0.2), None),
        (falling(0, before=0.0, to=0.0), None),
        (falling(1190), math.inf),
    ],
    ids=["never", "not far enough", "nine tenths", "had no more", "had nothing", "after the step"],
)
def test_what_is_not_taken_back_and_what_was_not_there(use: Callable[[float], float], result: float | None) -> None:
    assert taken_back(sampled(use)) == result


def test_a_dip_before_the_jump_is_none_of_it() -> None:
    """20 ms without work just before it: the mean of 300 ms before is 1.68, and nine tenths of the way are 0.35."""
    samples = sampled(lambda at_ms: 0.0 if 980 <= at_ms < 1000 else falling(500)(at_ms))
    assert taken_back(samples) == 500 + 50


def test_without_samples_nothing_is_said() -> None:
    assert taken_back([]) is None
    assert mean_cores([(5, 0)], 5, 5) is None


def test_a_late_look_counts_as_late() -> None:
    """Samples that come only every 200 ms: the answer cannot be earlier than the first one that shows it."""
    result = taken_back(sampled(falling(10), every_ms=200))
    assert result is not None
    assert result >= 200


@pytest.mark.parametrize(
    ("text", "ns"),
    [(b"123456789\n", 123456789), (b"usage_usec 1234\nuser_usec 1000\nsystem_usec 234\n", 1234000)],
)
def test_cpu_time_of_both_versions(text: bytes, ns: int) -> None:
    assert used_ns(text) == ns


def test_steps_and_bursts_take_the_same_time_and_end_when_they_do() -> None:
    steps, bursts = (schedule_of(kind, 100, 900, 30) for kind in ("steps", "bursts"))
    assert steps.spikes(30 * PERIOD_S) == tuple(FIRST_S + k * PERIOD_S for k in range(30))
    assert burst_end_s(steps, FIRST_S + 7 * PERIOD_S) == pytest.approx(FIRST_S + 7 * PERIOD_S + STEP_S)
    assert len(bursts.spikes(30 * PERIOD_S)) == 30
    assert [burst_end_s(bursts, begin) for begin, _ in bursts.on] == pytest.approx([end for _, end in bursts.on])
    assert min(end - begin for begin, end in bursts.on) > 0.4
