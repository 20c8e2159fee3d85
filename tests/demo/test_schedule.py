from __future__ import annotations

import math
from itertools import pairwise, takewhile
from typing import Any

import msgspec
import pytest

from demo.schedule import ConstantRate, RateBursts, RateWave, arrivals, parse_schedule, random_bursts

WAVE = RateWave(low=100, high=500, period_s=40, spike=900, spike_at_s=30, spike_s=4)
BURSTS = RateBursts(low=100, high=900, period_s=10, on=((2, 3), (5, 5.5)), from_s=4)


def test_a_wave_starts_low_is_high_half_way_and_spikes_without_warning() -> None:
    assert [round(WAVE.rate_at(t), 6) for t in (0, 10, 20, 40)] == [100, 300, 500, 100]
    assert WAVE.rate_at(29.999) == pytest.approx(300, abs=0.1)
    assert [WAVE.rate_at(t) for t in (30, 33.999, 70, 73.999)] == [900] * 4
    assert WAVE.rate_at(34) == pytest.approx(100 + 400 * (1 - math.cos(2 * math.pi * 34 / 40)) / 2)
    assert WAVE.peak == 900


def test_spikes_are_listed_when_they_begin() -> None:
    assert WAVE.spikes(30) == ()
    assert WAVE.spikes(30.1) == (30,)
    assert WAVE.spikes(110.5) == (30, 70, 110)
    assert ConstantRate(rate=5).spikes(1000) == ()


def test_arrivals_come_as_often_as_the_rate_integrates_to() -> None:
    due = list(takewhile(lambda t: t < 4000, arrivals(WAVE, 7)))
    in_spikes = sum(WAVE.in_spike(t) for t in due)
    assert in_spikes == pytest.approx(100 * 4 * 900, abs=4 * math.sqrt(100 * 4 * 900))
    steps = 40_000
    outside = sum(WAVE.rate_at(t) for k in range(steps) if not WAVE.in_spike(t := 40 * k / steps)) * 40 / steps * 100
    assert len(due) - in_spikes == pytest.approx(outside, abs=4 * math.sqrt(outside))


def test_gaps_of_a_constant_rate_are_exponential() -> None:
    due = list(takewhile(lambda t: t < 2000, arrivals(ConstantRate(rate=50), 3)))
    gaps = [b - a for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    longer_than_mean = sum(gap > mean for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.02)
    assert longer_than_mean == pytest.approx(math.exp(-1), rel=0.02)


def test_a_schedule_survives_its_json_form() -> None:
    for schedule in (WAVE, ConstantRate(rate=800), BURSTS):
        assert parse_schedule(msgspec.json.encode(schedule).decode()) == schedule


@pytest.mark.parametrize(
    ("change", "word"),
    [({"low": 0}, "low"), ({"high": 50}, "high"), ({"spike_s": 11}, "spike"), ({"spike": 0}, "spike")],
)
def test_a_wave_that_cannot_be_is_refused(change: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        msgspec.structs.replace(WAVE, **change)
    fields = {"type": "wave", **msgspec.structs.asdict(WAVE), **change}
    with pytest.raises(ValueError, match=word):
        parse_schedule(msgspec.json.encode(fields).decode())


def test_arrivals_after_a_warm_up_of_any_length_are_the_same() -> None:
    def after(warmup_s: float) -> list[float]:
        due = takewhile(lambda t: t < warmup_s + 8, arrivals(ConstantRate(rate=50), 3, warmup_s))
        return [t - warmup_s for t in due if t > warmup_s]

    assert len(after(2.0)) > 300
    assert after(2.0) == pytest.approx(after(15.0), abs=1e-9)


def test_bursts_begin_and_end_at_once_and_come_again() -> None:
    """From second 4 on, so at 6 to 7, 9 to 9.5, and ten seconds before and after that."""
    assert [BURSTS.rate_at(t) for t in (5.999, 6, 6.999, 7, 9, 9.499, 9.5, 16, 19.4)] == [
        100, 900, 900, 100, 900, 900, 100, 900, 900,
    ]  # fmt: skip
    assert BURSTS.spikes(19.1) == (6, 9, 16, 19)
    assert msgspec.structs.replace(BURSTS, from_s=14).spikes(19.1) == (6, 9, 16, 19)
    assert BURSTS.peak == 900


@pytest.mark.parametrize("seed", range(5))
def test_drawn_bursts_last_their_share_whatever_the_seed(seed: int) -> None:
    drawn = random_bursts(100, 900, period_s=20, count=10, on_share=0.3, seed=seed)
    assert len(drawn.on) == 10
    assert sum(end - begin for begin, end in drawn.on) == pytest.approx(6)
    assert min(end - begin for begin, end in drawn.on) > 0.1
    assert drawn.on[-1][1] <= 20
    assert drawn != random_bursts(100, 900, period_s=20, count=10, on_share=0.3, seed=seed + 5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"on": ((3, 2),)}, "end"),
        ({"on": ((1, 4), (3, 5))}, "next"),
        ({"on": ((9, 11),)}, "period"),
        ({"low": 0}, "low"),
    ],
)
def test_bursts_that_cannot_be_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        msgspec.structs.replace(BURSTS, **change)


def test_bursts_after_a_warm_up_of_any_length_are_the_same() -> None:
    def after(warmup_s: float) -> list[float]:
        schedule = msgspec.structs.replace(BURSTS, from_s=warmup_s)
        due = takewhile(lambda t: t < warmup_s + 10, arrivals(schedule, 3, warmup_s))
        return [t - warmup_s for t in due if t > warmup_s]

    assert len(after(2.0)) == pytest.approx(8.5 * 100 + 1.5 * 900, rel=0.1)
    assert after(2.0) == pytest.approx(after(15.0), abs=1e-9)
