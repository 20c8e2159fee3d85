from __future__ import annotations

import math
from itertools import pairwise, takewhile

import msgspec
import pytest

from demo.schedule import Constant, Wave, arrivals, parse

WAVE = Wave(low=100, high=500, period_s=40, spike=900, spike_at_s=30, spike_s=4)


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
    assert Constant(rate=5).spikes(1000) == ()


def test_arrivals_come_as_often_as_the_rate_integrates_to() -> None:
    due = list(takewhile(lambda t: t < 4000, arrivals(WAVE, 7)))
    in_spikes = sum(WAVE.in_spike(t) for t in due)
    assert in_spikes == pytest.approx(100 * 4 * 900, abs=4 * math.sqrt(100 * 4 * 900))
    steps = 40_000
    outside = sum(WAVE.rate_at(t) for k in range(steps) if not WAVE.in_spike(t := 40 * k / steps)) * 40 / steps * 100
    assert len(due) - in_spikes == pytest.approx(outside, abs=4 * math.sqrt(outside))


def test_gaps_of_a_constant_rate_are_exponential() -> None:
    due = list(takewhile(lambda t: t < 2000, arrivals(Constant(rate=50), 3)))
    gaps = [b - a for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    longer_than_mean = sum(gap > mean for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.02)
    assert longer_than_mean == pytest.approx(math.exp(-1), rel=0.02)


def test_a_schedule_survives_its_json_form() -> None:
    for schedule in (WAVE, Constant(rate=800)):
        assert parse(msgspec.json.encode(schedule).decode()) == schedule


@pytest.mark.parametrize(
    ("change", "word"),
    [({"low": 0}, "low"), ({"high": 50}, "high"), ({"spike_s": 11}, "spike"), ({"spike": 0}, "spike")],
)
def test_a_wave_that_cannot_be_is_refused(change: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        msgspec.structs.replace(WAVE, **change)
    fields = {"type": "wave", **msgspec.structs.asdict(WAVE), **change}
    with pytest.raises(ValueError, match=word):
        parse(msgspec.json.encode(fields).decode())


def test_arrivals_after_a_warm_up_of_any_length_are_the_same() -> None:
    def after(warmup_s: float) -> list[float]:
        due = takewhile(lambda t: t < warmup_s + 8, arrivals(Constant(rate=50), 3, warmup_s))
        return [t - warmup_s for t in due if t > warmup_s]

    assert len(after(2.0)) > 300
    assert after(2.0) == pytest.approx(after(15.0), abs=1e-9)
