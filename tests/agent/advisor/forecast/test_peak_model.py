"""The parts of the peak predictor against numbers computed by hand."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.forecast import peak_model
from agent.advisor.forecast.peak_model import (
    DAY_BUCKETS,
    FEATURE_NAMES,
    MAX_QUANTILE,
    MIN_QUANTILE,
    PRIOR_WEIGHTS,
    ConformalMargin,
    ForecastAccuracy,
    PeakRegression,
    build_features,
    hour_peak,
    weighted_quantile,
)

FEATURE_INDEX = dict(zip(FEATURE_NAMES, range(len(FEATURE_NAMES)), strict=True))


def named(peaks: list[float | None]) -> dict[str, float]:
    result = build_features(peaks)
    assert result is not None
    return dict(zip(FEATURE_NAMES, result.values, strict=True))


def test_features_after_two_days() -> None:
    peaks: list[float | None] = [1.0] * (2 * DAY_BUCKETS)
    now = len(peaks) - 1
    peaks[now] = 2.0  # the newest bucket
    peaks[now - 2] = 3.0  # within the quarter
    peaks[now - 11] = 4.0  # the hour's first
    peaks[now - 71] = 5.0  # the first of six hours
    peaks[now - DAY_BUCKETS] = 6.0  # this time yesterday: the last of the hour then, a bucket too early for "the day"
    peaks[now - DAY_BUCKETS + 12] = 7.0  # the last of the hour that followed, and the day's maximum
    assert named(peaks) == {
        "constant": 1.0,
        "bucket": 2.0,
        "quarter": 3.0,
        "hour": 4.0,
        "six_hours": 5.0,
        "day": 7.0,
        "same_hour_yesterday": 6.0,
        "next_hour_yesterday": 7.0,
        "next_hour_of_days": 7.0,  # the day before yesterday is not there
    }


def test_days_are_averaged_and_the_last_hour_replaces_missing_days() -> None:
    peaks: list[float | None] = [*([4.0] * DAY_BUCKETS), *([2.0] * DAY_BUCKETS), 1.0]
    assert named(peaks)["next_hour_of_days"] == 3.0  # 2 yesterday, 4 the day before
    young = build_features([1.0, 2.0, 1.0])
    assert young is not None
    assert not young.season
    assert young.values[FEATURE_INDEX["next_hour_yesterday"] :] == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("peaks", "state"),
    [
        ([], False),
        ([1.0], False),  # five minutes
        ([1.0, 1.0, 1.0], True),  # a quarter of an hour
        ([1.0, 1.0, 1.0, None, None], True),
        ([1.0, 1.0, 1.0, None, None, None], False),  # nothing for a quarter of an hour
        ([1.0] + [None] * 10 + [1.0], False),  # two buckets of the hour
    ],
)
def test_too_few_samples_in_the_last_hour_give_no_forecast(peaks: list[float | None], state: bool) -> None:
    assert (build_features(peaks) is not None) is state


@pytest.mark.parametrize(("missing", "expected"), [(0, 5.0), (3, 5.0), (4, None)])
def test_an_hour_with_more_than_a_quarter_missing_has_no_peak(missing: int, expected: float | None) -> None:
    assert hour_peak([5.0] * (12 - missing) + [None] * missing) == expected


@pytest.mark.parametrize("unit", [1.0, 1000.0, 2.0**30])
def test_regression_finds_weights_whatever_the_unit_is(unit: float) -> None:
    """The true model is 0.5 x the hour + 0.25 x the day + 0.1, in different units."""
    rng, result = Random(1), PeakRegression()
    for _ in range(4000):
        values = [1.0, *(unit * rng.uniform(0.1, 1) for _ in FEATURE_NAMES[1:])]
        result = peak_model.update_regression(result, values, 0.5 * values[3] + 0.25 * values[5] + 0.1 * unit)
    expected = [0.1 * unit, 0, 0, 0.5, 0, 0.25, 0, 0, 0]
    size = [unit] + [1.0] * 8
    assert [w / s for w, s in zip(result.weights, size, strict=True)] == pytest.approx(
        [e / s for e, s in zip(expected, size, strict=True)], abs=0.01
    )


def test_regression_without_samples_is_the_prior_and_features_that_are_always_zero_stay_at_it() -> None:
    assert peak_model.expected_peak(PeakRegression(), [1.0, 10, 8, 6, 0, 0, 4, 0, 2]) == pytest.approx(
        0.3 * 14 + 0.2 * 6
    )
    result = PeakRegression()
    for _ in range(50):
        result = peak_model.update_regression(result, [1.0] + [0.0] * 8, 0.0)
    assert result.weights == pytest.approx(PRIOR_WEIGHTS)


def test_regression_forgets() -> None:
    """A weight of 1 for two weeks, then 2 for two weeks: the first weeks decay by e twice."""
    result = PeakRegression()
    for weight in [1.0] * 4032 + [2.0] * 4032:
        result = peak_model.update_regression(result, [0.0, 1.0, *([0.0] * 7)], weight)
    e = 2.718281828
    mixed = (2 * (1 - e**-2) + 1 * (e**-2 - e**-4)) / (1 - e**-4)
    assert result.weights[1] == pytest.approx(mixed, abs=0.01)


def test_the_latest_errors_weigh_most() -> None:
    """An error that is a day old has half the weight: of 1 (a day ago) and 3 ones now, quantiles change at 1 / (1 + ...)."""
    day_ago = tuple([5.0] + [0.0] * DAY_BUCKETS)
    weights_now = sum(0.5 ** (age / DAY_BUCKETS) for age in range(DAY_BUCKETS))
    share = weights_now / (weights_now + 0.5)
    assert weighted_quantile(day_ago, share - 1e-6) == 0.0
    assert weighted_quantile(day_ago, share + 1e-6) == 5.0
    assert weighted_quantile((3.0, 1.0, 2.0), 1.0) == 3.0


@pytest.mark.parametrize(("state", "amount"), [(11, None), (12, 12.0)])
def test_an_hour_of_errors_makes_a_margin(state: int, amount: float | None) -> None:
    margin = ConformalMargin()
    for residual in range(1, state + 1):
        margin = peak_model.update_margin(margin, float(residual), None, 0.06)
    assert margin.amount == amount
    assert margin.quantile == pytest.approx(0.94)


def test_each_miss_raises_the_quantile_and_each_hit_lowers_it_by_its_share() -> None:
    margin = peak_model.update_margin(ConformalMargin(), 0.0, missed=True, miss_ratio=0.06)
    assert margin.quantile == pytest.approx(0.94 + 0.0005 * 0.94)
    margin = peak_model.update_margin(margin, 0.0, missed=False, miss_ratio=0.06)
    assert margin.quantile == pytest.approx(0.94 + 0.0005 * (0.94 - 0.06))


@pytest.mark.parametrize(("miss_ratio", "lowest"), [(0.055, 0.85), (0.1, 0.85), (0.15, 0.775), (0.2, 0.7)])
def test_hits_lower_the_quantile_to_the_bound_of_the_miss_ratio(miss_ratio: float, lowest: float) -> None:
    margin = ConformalMargin(quantile=lowest + 0.00001)
    for _ in range(3):
        margin = peak_model.update_margin(margin, 0.0, missed=False, miss_ratio=miss_ratio)
    assert margin.quantile == pytest.approx(lowest)


@given(st.lists(st.tuples(st.floats(-1e12, 1e12), st.sampled_from([True, False, None])), max_size=60))
def test_the_margin_is_one_of_the_errors_and_the_quantile_within_bounds(
    history: list[tuple[float, bool | None]],
) -> None:
    margin = ConformalMargin()
    for residual, missed in history:
        margin = peak_model.update_margin(margin, residual, missed, 0.055)
        assert margin.quantile is not None
        assert MIN_QUANTILE <= margin.quantile <= MAX_QUANTILE
        assert margin.amount is None or margin.amount in margin.residuals


@pytest.mark.parametrize(
    ("hours", "added"), [(0, 0.0), (1, 20.7), (3, 6.3), (6, 2.7), (12, 0.9), (18, 0.3), (24, 0.0), (72, 0.0)]
)
def test_the_margin_is_wider_by_nine_percent_of_the_range_times_unknown_over_known_day(
    hours: int, added: float
) -> None:
    """Peaks between 20 and 30 cores."""
    peaks = [20.0, 30.0] * (hours * 6)
    assert peak_model.short_history_margin(peaks) == pytest.approx(added)
    assert peak_model.short_history_margin([*peaks, *([None] * 600)]) == pytest.approx(added)  # gaps are not history


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=300), st.floats(0.001, 1e9))
def test_the_short_history_margin_is_never_negative_and_has_the_unit_of_the_samples(
    peaks: list[float | None], unit: float
) -> None:
    """In bytes or in cores the same share of the range; it shrinks as the same peaks repeat."""
    margin = peak_model.short_history_margin(peaks)
    assert margin >= 0
    scaled = peak_model.short_history_margin([None if peak is None else peak * unit for peak in peaks])
    assert scaled == pytest.approx(margin * unit, rel=1e-6, abs=1e-9 * unit)
    assert peak_model.short_history_margin(peaks * 2) <= margin


def test_accuracy_counts_misses_their_size_and_bias() -> None:
    result = ForecastAccuracy()
    for predicted, actual in ((10.0, 8.0), (10.0, 13.0), (10.0, 11.0), (10.0, 10.0)):
        result = peak_model.count_forecast(result, predicted, actual)
    assert (result.evaluated, result.missed, result.shortfall_sum, result.shortfall_max) == (4, 2, 4.0, 3.0)
    assert peak_model.recent_miss_ratio(result) == 0.5
    assert peak_model.recent_miss_ratio(result, beyond=1.0) == 0.25
    assert peak_model.mean_shortfall(result) == 2.0
    assert peak_model.max_shortfall(result) == 3.0
    assert peak_model.forecast_bias(result) == -0.5


def test_accuracy_is_unknown_before_the_first_forecast_and_covers_one_day() -> None:
    assert peak_model.recent_miss_ratio(ForecastAccuracy()) is None
    assert peak_model.mean_shortfall(ForecastAccuracy()) is None
    assert peak_model.max_shortfall(ForecastAccuracy()) is None
    assert peak_model.forecast_bias(ForecastAccuracy()) is None
    result = peak_model.count_forecast(ForecastAccuracy(), 1.0, 9.0)
    for _ in range(DAY_BUCKETS):
        result = peak_model.count_forecast(result, 3.0, 2.0)
    assert (result.missed, peak_model.recent_miss_ratio(result), peak_model.max_shortfall(result)) == (1, 0.0, 0.0)
