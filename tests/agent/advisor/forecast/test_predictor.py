"""The peak predictor over days: cold start, steady use, level shifts, gaps, clock jumps; and headroom by forecast."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.advisor.forecast import peak_model
from agent.advisor.forecast.predictor import HORIZON_NS, PeakPredictor, observe_use, predict_peak
from agent.advisor.headroom.forecast_headroom import compute_forecast_headroom
from agent.config.advisor import ForecastConfig
from api.forecast import Forecast, ForecastResource, PeakForecast
from api.knobs import Reason

S = 1_000_000_000
MINUTE, HOUR, DAY = 60 * S, 3600 * S, 86_400 * S


def fed(state: PeakPredictor, begin_ns: int, end_ns: int, cores: float, step_ns: int = 5 * MINUTE) -> PeakPredictor:
    for now_ns in range(begin_ns, end_ns, step_ns):
        state = observe_use(state, now_ns, cores)
    return state


STEADY = fed(PeakPredictor(), 0, 2 * DAY, 10.0)
"""Two days of ten cores, a sample every five minutes."""


@pytest.mark.parametrize(
    ("after_ns", "rule", "state", "trusted"),
    [
        (0, "no_history", False, False),
        (1 * HOUR, "no_history", False, False),  # no forecast has come true yet
        (3 * HOUR, "short_history", True, False),
        (23 * HOUR, "short_history", True, False),
        (25 * HOUR, "calibrated", True, True),
    ],
)
def test_cold_start(after_ns: int, rule: str, state: bool, trusted: bool) -> None:
    forecast = predict_peak(fed(PeakPredictor(), 0, after_ns, 10.0), max(after_ns - 5 * MINUTE, 0))
    assert (forecast.reason.rule, forecast.peak is not None, forecast.trusted) == (rule, state, trusted)


@pytest.mark.parametrize(("closed", "errors"), [(14, 0), (15, 1), (16, 2)])
def test_the_first_error_is_known_an_hour_after_the_first_quarter(closed: int, errors: int) -> None:
    state = fed(PeakPredictor(), 0, (closed + 1) * 5 * MINUTE, 10.0)
    assert len(state.margin.residuals) == errors


def test_steady_use_is_predicted_exactly() -> None:
    forecast = predict_peak(STEADY, 2 * DAY)
    assert forecast.peak == pytest.approx(10.0, rel=0.001)
    assert forecast.season
    assert not forecast.alarm
    assert "10" in forecast.reason.text


def test_three_hours_of_history_have_a_wider_margin_and_say_so() -> None:
    """Peaks alternate between 10 and 20 cores: 36 of them, the open one included, add 0.09 x 7 x 10 cores."""
    state = PeakPredictor()
    for number in range(36):
        state = observe_use(state, number * 5 * MINUTE, 20.0 if number % 2 else 10.0)
    forecast = predict_peak(state, 35 * 5 * MINUTE)
    assert forecast.reason.inputs["short_history_margin"] == pytest.approx(0.09 * (288 / 36 - 1) * 10)
    assert forecast.margin == pytest.approx((state.margin.amount or 0.0) + 6.3)
    assert "wider because only 2.9 hours of history are known" in forecast.reason.text
    assert predict_peak(STEADY, 2 * DAY).reason.inputs["short_history_margin"] == 0.0


def test_a_level_shift_is_followed_by_the_next_sample_and_widened_beyond_it() -> None:
    state = observe_use(STEADY, 2 * DAY, 30.0)
    forecast = predict_peak(state, 2 * DAY)
    assert forecast.peak is not None
    assert forecast.peak >= 30.0
    assert forecast.alarm
    assert forecast.reason.rule == "drift_alarm"
    assert forecast.margin == pytest.approx(20.0, abs=0.5)  # so far above every forecast that there was
    state = fed(state, 2 * DAY + 5 * MINUTE, 2 * DAY + 50 * MINUTE, 12.0)
    later = predict_peak(state, 2 * DAY + 50 * MINUTE)
    assert later.alarm  # for an hour
    assert later.margin >= 19.5
    state = fed(state, 2 * DAY + 50 * MINUTE, 2 * DAY + 70 * MINUTE, 12.0)
    assert not predict_peak(state, 2 * DAY + 70 * MINUTE).alarm


def test_a_spike_within_a_bucket_of_many_samples_counts_at_once() -> None:
    state = fed(PeakPredictor(), 0, 3 * HOUR, 10.0, 10 * S)
    assert predict_peak(observe_use(state, 3 * HOUR + S, 25.0), 3 * HOUR + S).peak >= 25.0  # type: ignore[operator]


def test_one_low_sample_at_the_start_of_a_bucket_is_not_its_peak() -> None:
    state = fed(PeakPredictor(), 0, 30 * HOUR, 10.0, MINUTE)
    rng = Random(2)
    for now_ns in range(30 * HOUR, 40 * HOUR, MINUTE):
        state = observe_use(state, now_ns, wave(now_ns, rng))
    state = fed(state, 40 * HOUR, 40 * HOUR + 5 * MINUTE, 30.0, MINUTE)
    now_ns = 40 * HOUR + 5 * MINUTE
    before, after = (predict_peak(s, now_ns).expected for s in (state, observe_use(state, now_ns, 1.0)))
    assert after == pytest.approx(before, rel=0.05)


def test_a_forecast_that_came_true_or_not_is_counted_an_hour_later() -> None:
    state = fed(STEADY, 2 * DAY, 2 * DAY + 5 * MINUTE, 30.0)
    before, before_quantile = state.accuracy, state.margin.quantile
    assert before.missed == 0
    state = fed(state, 2 * DAY + 5 * MINUTE, 2 * DAY + 65 * MINUTE, 10.0)
    after = state.accuracy
    assert after.evaluated - before.evaluated == 12
    assert after.missed == 12  # each forecast of the hour before had the spike in its hour
    assert state.margin.quantile == pytest.approx((before_quantile or 0) + 12 * 0.0005 * 0.945)
    assert after.shortfall_max == pytest.approx(20.0, abs=0.1)
    assert peak_model.recent_miss_ratio(after) == pytest.approx(12 / 288)


@pytest.mark.parametrize(
    ("now_ns", "rule"),
    [
        (2 * DAY + 5 * MINUTE, "calibrated"),
        (2 * DAY + 20 * MINUTE, "stale"),
        (2 * DAY - HOUR, "stale"),
        (2 * DAY - 6 * MINUTE, "calibrated"),
    ],
)
def test_old_samples_are_not_trusted_nor_those_from_the_future(now_ns: int, rule: str) -> None:
    forecast = predict_peak(STEADY, now_ns)
    assert forecast.reason.rule == rule
    assert forecast.trusted is (rule == "calibrated")


def test_a_stale_forecast_is_the_highest_peak_of_the_history() -> None:
    state = fed(observe_use(fed(PeakPredictor(), 0, DAY, 10.0), DAY, 40.0), DAY + 5 * MINUTE, 2 * DAY, 10.0)
    assert predict_peak(state, 2 * DAY + HOUR).peak >= 40.0  # type: ignore[operator]


def test_a_gap_is_not_zero_and_teaches_nothing() -> None:
    resumed = fed(STEADY, 2 * DAY + 6 * HOUR, 2 * DAY + 8 * HOUR, 10.0)
    assert resumed.peaks.count(None) == 72
    assert predict_peak(resumed, 2 * DAY + 8 * HOUR).peak == pytest.approx(10.0, rel=0.001)
    assert resumed.accuracy.missed == 0
    assert min(resumed.margin.residuals) > -1.0


@pytest.mark.parametrize(
    ("jump_ns", "peaks"), [(-30 * MINUTE, 575), (-2 * HOUR, 0), (2 * HOUR, 600), (3 * DAY, 865), (4 * DAY, 0)]
)
def test_clock_jumps(jump_ns: int, peaks: int) -> None:
    """Back by less than an hour: the open bucket continues. Further back, or ahead by more than the history: a fresh start."""
    jumped = observe_use(STEADY, 2 * DAY + jump_ns, 11.0)
    assert len(jumped.peaks) == peaks
    assert jumped.open_peak == 11.0


@pytest.mark.parametrize("used", [None, math.nan, math.inf, -1.0])
def test_an_invalid_sample_changes_nothing(used: float | None) -> None:
    assert observe_use(STEADY, 2 * DAY, used) is STEADY


def test_no_forecast_beyond_the_horizon_that_it_is_calibrated_for() -> None:
    assert predict_peak(STEADY, 2 * DAY, HORIZON_NS).peak is not None
    forecast = predict_peak(STEADY, 2 * DAY, HORIZON_NS + 1)
    assert (forecast.peak, forecast.reason.rule) == (None, "horizon_too_long")


def wave(now_ns: int, rng: Random) -> float:
    return 30 + 15 * math.sin(2 * math.pi * now_ns / DAY) + rng.gauss(0, 2)


def test_the_miss_ratio_of_a_noisy_day_is_the_configured_one() -> None:
    """Five days of a sine with noise; a higher miss ratio leaves more headroom and misses more often."""
    result = {}
    for request in (0.02, 0.1, 0.2):
        config, rng, state = ForecastConfig(miss_ratio=request), Random(3), PeakPredictor()
        for now_ns in range(0, 5 * DAY, 5 * MINUTE):
            state = observe_use(state, now_ns, wave(now_ns, rng), config)
        result[request] = state.accuracy.missed / state.accuracy.evaluated
    assert result[0.02] == pytest.approx(0.02, abs=0.02)
    assert result[0.1] == pytest.approx(0.1, abs=0.03)
    assert result[0.2] == pytest.approx(0.2, abs=0.03)


def test_state_is_bounded_and_survives_json() -> None:
    rng, state = Random(5), PeakPredictor()
    for now_ns in range(0, 7 * DAY, 5 * MINUTE):
        state = observe_use(state, now_ns, wave(now_ns, rng))
    text = msgspec.json.encode(state)
    assert len(text) < 100 * 1024
    assert len(state.peaks) == 865
    assert msgspec.json.decode(text, type=PeakPredictor) == state


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-2 * HOUR, 30 * HOUR), st.one_of(st.none(), st.floats(0, 1e9), st.just(math.nan))),
        max_size=60,
    )
)
def test_a_forecast_of_any_input_is_at_least_the_current_use_and_serializable(
    steps: list[tuple[int, float | None]],
) -> None:
    state, now_ns = PeakPredictor(), 40 * DAY
    for step_ns, used in steps:
        now_ns += step_ns
        for part in range(4):
            state = observe_use(state, now_ns + part * 5 * MINUTE, used)
        forecast = predict_peak(state, now_ns + 15 * MINUTE)
        msgspec.json.encode(forecast)
        if forecast.peak is not None and state.open_peak is not None:
            assert forecast.peak >= state.open_peak


def peak_forecast(
    peak: float | None, *, trusted: bool, used: float | None = None, resource: ForecastResource = ForecastResource.CPU
) -> Forecast:
    forecast = PeakForecast(peak=peak, trusted=trusted, reason=Reason(rule="calibrated", text="The peak is predicted."))
    return Forecast(resource=resource, used=used, forecast=forecast, target_miss_ratio=0.05)


@pytest.mark.parametrize(
    ("peak", "trusted", "canonical", "used", "amount", "rule"),
    [
        (40.0, True, 10.0, None, 20.0, "forecast"),  # 64 - 4 - 40: more than Katalyst's
        (40.0, True, None, None, 20.0, "forecast"),
        (40.0, True, 50.0, 45.0, 15.0, "forecast"),  # current use exceeds the forecast
        (70.0, True, 10.0, None, 0.0, "forecast"),  # more than the node
        (40.0, False, 10.0, None, 10.0, "forecast_below_canonical"),
        (55.0, False, 10.0, None, 5.0, "forecast_below_canonical"),
        (40.0, False, None, None, None, "forecast_below_canonical"),
        (None, False, 10.0, None, 10.0, "canonical_without_forecast"),
        (None, False, 99.0, None, 60.0, "canonical_without_forecast"),  # never more than the node without the reserve
        (None, False, None, None, None, "canonical_without_forecast"),
    ],
)
def test_headroom_of_64_cores_with_4_reserved(
    peak: float | None, trusted: bool, canonical: float | None, used: float | None, amount: float | None, rule: str
) -> None:
    result = compute_forecast_headroom(64.0, 4.0, peak_forecast(peak, trusted=trusted, used=used), canonical)
    assert (result.amount, result.reason.rule) == (amount, rule)


@given(
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.one_of(st.none(), st.floats(0, 1e4)),
    st.one_of(st.none(), st.floats(-10, 1e4)),
    st.booleans(),
)
def test_headroom_is_within_the_node_and_without_trust_within_katalysts(
    capacity: float, reserve: float, peak: float | None, canonical: float | None, trusted: bool
) -> None:
    result = compute_forecast_headroom(
        capacity, reserve, peak_forecast(peak, trusted=trusted and peak is not None), canonical
    )
    if result.amount is not None:
        assert 0 <= result.amount <= max(capacity - reserve, 0)
        if result.reason.rule != "forecast":
            assert canonical is not None
            assert result.amount <= max(canonical, 0)


def test_reasons_contain_amounts_with_units() -> None:
    gib = 1 << 30
    cpu = compute_forecast_headroom(64.0, 4.0, peak_forecast(40.0, trusted=True), None)
    memory = compute_forecast_headroom(
        24.0 * gib, 1.0 * gib, peak_forecast(None, trusted=False, resource=ForecastResource.MEMORY), 22_101_400_000.0
    )
    assert (
        cpu.reason.text
        == "The peak is predicted. 64.00 cores less 4.00 cores reserved and a peak of 40.00 cores leave 20.00 cores."
    )
    assert memory.reason.text == "The peak is predicted. Headroom by Katalyst's formula is 20.58 GiB."
    steady = fed(PeakPredictor(), 0, DAY, 0.444917 * gib)
    assert predict_peak(steady, DAY, resource=ForecastResource.MEMORY).reason.text.startswith(
        "The expected peak within the hour is 455.6 MiB"
    )


@pytest.mark.parametrize(
    ("began_s", "seconds", "message"), [(0, 200, "Less than 5 minutes"), (280, 38, "Less than 10 minutes")]
)
def test_reasons_do_not_overstate_the_history(began_s: int, seconds: int, message: str) -> None:
    """38 s across the border of a five-minute bucket have closed one."""
    state = fed(PeakPredictor(), began_s * S, (began_s + seconds) * S, 1.0, 5 * S)
    text = predict_peak(state, (began_s + seconds) * S).reason.text
    assert text == f"{message} of use are measured, too little for a forecast."
