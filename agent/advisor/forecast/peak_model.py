"""Statistics of the peak predictor: five-minute peaks, least squares, conformal margin and accuracy.
All state is of bounded size. A bucket without samples is None and is skipped by windows. The margin is adaptive
conformal inference (Gibbs and Candes, 2021): a miss raises the quantile, a hit lowers it less.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec

from api.units import NS_PER_S

BUCKET_S = 300
BUCKET_NS = BUCKET_S * NS_PER_S
HORIZON_BUCKETS = 12
"""Buckets of the forecast horizon: an hour."""
DAY_BUCKETS = 288
HISTORY_BUCKETS = 3 * DAY_BUCKETS + 1
QUARTER_BUCKETS = 3
"""Buckets of the last quarter of an hour, at least one of which must have samples."""

Peaks = Sequence[float | None]


class PeakFeatures(msgspec.Struct, frozen=True):
    """Features of the regression, in the unit of the samples."""

    values: tuple[float, ...]
    """1 and eight peaks, see FEATURE_NAMES."""
    season: bool
    """Whether yesterday's peaks are known; otherwise the last hour's replace them."""


FEATURE_NAMES = (
    "constant", "bucket", "quarter", "hour", "six_hours", "day", "next_hour_yesterday", "same_hour_yesterday",
    "next_hour_of_days",
)  # fmt: skip
PRIOR_WEIGHTS = (0.0, 0.0, 0.3, 0.3, 0.0, 0.0, 0.2, 0.0, 0.2)
"""Weights of the features before anything is learned: half the present, half the days before."""


def max_known_peak(values: Peaks, minimum: int = 1) -> float | None:
    """Return the highest measured value; None with fewer than `minimum` measured values."""
    measured = [value for value in values if value is not None]
    return max(measured) if len(measured) >= minimum else None


def hour_peak(values: Peaks) -> float | None:
    """Return the peak of an hour with samples in at least three quarters; None with fewer, since the peak may be missing."""
    return max_known_peak(values, HORIZON_BUCKETS * 3 // 4)


def build_features(peaks: Peaks) -> PeakFeatures | None:
    """Return the features at the end of the last bucket; None with too few samples in the last hour."""
    quarter = max_known_peak(peaks[-QUARTER_BUCKETS:])
    hour = max_known_peak(peaks[-HORIZON_BUCKETS:], QUARTER_BUCKETS)
    if quarter is None or hour is None:
        return None
    newest = next(value for value in reversed(peaks) if value is not None)
    six_hours, day = max_known_peak(peaks[-6 * HORIZON_BUCKETS :]), max_known_peak(peaks[-DAY_BUCKETS:])
    last = len(peaks) - 1
    days = [_next_hour_peak(peaks, last - DAY_BUCKETS * ago) for ago in (1, 2, 3)]
    before = (
        hour_peak(peaks[last - DAY_BUCKETS - HORIZON_BUCKETS + 1 : last - DAY_BUCKETS + 1])
        if last - DAY_BUCKETS - HORIZON_BUCKETS + 1 >= 0
        else None
    )
    past_days = [value for value in days if value is not None]
    values = (
        1.0,
        newest,
        quarter,
        hour,
        hour if six_hours is None else six_hours,
        hour if day is None else day,
        hour if days[0] is None else days[0],
        hour if before is None else before,
        sum(past_days) / len(past_days) if past_days else hour,
    )
    return PeakFeatures(values, days[0] is not None)


def _next_hour_peak(peaks: Peaks, index: int) -> float | None:
    return hour_peak(peaks[index + 1 : index + 1 + HORIZON_BUCKETS]) if index >= 0 else None


FEATURE_COUNT = len(PRIOR_WEIGHTS)
SAMPLE_DECAY = 1 - 1 / 2016
"""Factor of a sample's weight per bucket: half is left after five days."""
PRIOR_SAMPLES = 4.0
"""Number of samples that the prior counts as."""
_TRIANGLE = tuple((i, j) for i in range(FEATURE_COUNT) for j in range(i + 1))


class PeakRegression(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of products, and the weights that follow from them."""

    samples: float = 0.0
    gram: tuple[float, ...] = (0.0,) * len(_TRIANGLE)
    """Lower triangle, row by row."""
    moments: tuple[float, ...] = (0.0,) * FEATURE_COUNT
    weights: tuple[float, ...] = PRIOR_WEIGHTS


def expected_peak(regression: PeakRegression, features: Sequence[float]) -> float:
    """Return the expected peak, in the unit of the features."""
    return sum(weight * feature for weight, feature in zip(regression.weights, features, strict=True))


def update_regression(regression: PeakRegression, features: Sequence[float], actual: float) -> PeakRegression:
    """Return the regression with one more sample."""
    gram = tuple(
        SAMPLE_DECAY * old + features[i] * features[j] for old, (i, j) in zip(regression.gram, _TRIANGLE, strict=True)
    )
    moments = tuple(SAMPLE_DECAY * old + actual * x for old, x in zip(regression.moments, features, strict=True))
    samples = SAMPLE_DECAY * regression.samples + 1
    return PeakRegression(samples=samples, gram=gram, moments=moments, weights=_solve_weights(gram, moments, samples))


def _solve_weights(gram: Sequence[float], moments: Sequence[float], samples: float) -> tuple[float, ...]:
    """Solve (S G S + r I) u = S m + r S^-1 prior for weights S u, S being one over the roots of G's diagonal."""
    diagonal = [gram[i * (i + 1) // 2 + i] for i in range(FEATURE_COUNT)]
    scale = [1 / sqrt(entry) if entry > 0 else 1.0 for entry in diagonal]
    ridge = PRIOR_SAMPLES / samples
    matrix = [[0.0] * FEATURE_COUNT for _ in range(FEATURE_COUNT)]
    for entry, (i, j) in zip(gram, _TRIANGLE, strict=True):
        matrix[i][j] = entry * scale[i] * scale[j] + (ridge if i == j else 0.0)
    right = [m * s + ridge * prior / s for m, s, prior in zip(moments, scale, PRIOR_WEIGHTS, strict=True)]
    return tuple(u * s for u, s in zip(_cholesky_solve(matrix, right), scale, strict=True))


def _cholesky_solve(lower: list[list[float]], right: list[float]) -> list[float]:
    # The ridge keeps the matrix positive definite: every pivot is at least as large as it, but for rounding.
    for i, row in enumerate(lower):
        for j in range(i):
            other = lower[j]
            row[j] = (row[j] - sum(row[k] * other[k] for k in range(j))) / other[j]
        row[i] = sqrt(max(row[i] - sum(row[k] * row[k] for k in range(i)), 1e-12))
        right[i] = (right[i] - sum(row[k] * right[k] for k in range(i))) / row[i]
    for i in range(FEATURE_COUNT - 1, -1, -1):
        right[i] = (right[i] - sum(lower[k][i] * right[k] for k in range(i + 1, FEATURE_COUNT))) / lower[i][i]
    return right


MAX_RESIDUALS = 3 * DAY_BUCKETS
RESIDUAL_HALF_LIFE = DAY_BUCKETS
QUANTILE_STEP = 0.0005
"""Change of the quantile by one miss. Misses come in dozens, one for each forecast that contains the peak."""
MIN_QUANTILE, MAX_QUANTILE, MAX_MISS_FACTOR = 0.85, 0.98, 1.5
"""Bounds of the quantile; the lower one falls with a high miss ratio, to 1 - MAX_MISS_FACTOR times it.

Forecasts miss less often than their quantile because the alarm raises them.
"""
MIN_RESIDUALS = HORIZON_BUCKETS
"""Minimum number of errors: an hour."""
_RESIDUAL_WEIGHTS = tuple(0.5 ** (age / RESIDUAL_HALF_LIFE) for age in range(MAX_RESIDUALS - 1, -1, -1))


class ConformalMargin(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the expected peak over three days, and the margin that follows from them."""

    residuals: tuple[float, ...] = ()
    """Actual minus expected peak, the latest last."""
    quantile: float | None = None
    """As controlled; None before the first forecast was evaluated."""
    amount: float | None = None
    """Added to the expected peak; None with too few errors."""


def update_margin(margin: ConformalMargin, residual: float, missed: bool | None, miss_ratio: float) -> ConformalMargin:
    """Return the margin with one more error; `missed` is None if nothing was predicted."""
    quantile = 1 - miss_ratio if margin.quantile is None else margin.quantile
    if missed is not None:
        lowest, highest = min(MIN_QUANTILE, 1 - MAX_MISS_FACTOR * miss_ratio), max(MAX_QUANTILE, 1 - miss_ratio)
        quantile = min(max(quantile + QUANTILE_STEP * (missed - miss_ratio), lowest), highest)
    residuals = (*margin.residuals[-MAX_RESIDUALS + 1 :], residual)
    amount = weighted_quantile(residuals, quantile) if len(residuals) >= MIN_RESIDUALS else None
    return ConformalMargin(residuals=residuals, quantile=quantile, amount=amount)


def weighted_quantile(residuals: tuple[float, ...], quantile: float) -> float:
    """Return the quantile of the residuals, whose weight halves per day of age."""
    weights = _RESIDUAL_WEIGHTS[-len(residuals) :]
    threshold, cumulated = quantile * sum(weights), 0.0
    order = sorted(range(len(residuals)), key=residuals.__getitem__)
    for index in order:
        cumulated += weights[index]
        if cumulated >= threshold:
            return residuals[index]
    return residuals[order[-1]]


SHORT_HISTORY_SHARE = 0.09
"""Share of the range of peaks that the margin gains at 12 hours of history. docs/forecast.md describes the fit."""


def short_history_margin(peaks: Peaks) -> float:
    """Return what is added to the margin while less than a day of peaks is known, in the unit of the samples; 0 later.

    It is SHORT_HISTORY_SHARE times the range of the known peaks times (a day / known time - 1). Errors of a few hours overlap
    and all come from one part of the day: their quantile understates what the rest of the day brings. The range adapts the
    addition to the kind of workload, and needs no unit.
    """
    measured = [value for value in peaks if value is not None]
    if not 0 < len(measured) < DAY_BUCKETS:
        return 0.0
    return SHORT_HISTORY_SHARE * (DAY_BUCKETS / len(measured) - 1) * (max(measured) - min(measured))


MAX_ERRORS = DAY_BUCKETS


class ForecastAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start, and each error of the last day. In the unit of the samples."""

    evaluated: int = 0
    """Forecasts whose hour is over, one every five minutes."""
    missed: int = 0
    """Forecasts that the peak exceeded."""
    shortfall_sum: float = 0.0
    """Sum of the excess of missed forecasts."""
    shortfall_max: float = 0.0
    error_sum: float = 0.0
    """Sum of forecast minus peak: capacity that was not reclaimed for safety."""
    recent: tuple[float, ...] = ()
    """Forecast minus peak over the last day, the latest last."""


def count_forecast(accuracy: ForecastAccuracy, predicted: float, actual: float) -> ForecastAccuracy:
    """Return the accuracy with one more forecast."""
    error = predicted - actual
    return ForecastAccuracy(
        evaluated=accuracy.evaluated + 1,
        missed=accuracy.missed + (error < 0),
        shortfall_sum=accuracy.shortfall_sum + max(-error, 0.0),
        shortfall_max=max(accuracy.shortfall_max, -error),
        error_sum=accuracy.error_sum + error,
        recent=(*accuracy.recent[-MAX_ERRORS + 1 :], error),
    )


def recent_miss_ratio(accuracy: ForecastAccuracy, beyond: float = 0.0) -> float | None:
    """Return the share of the last day's forecasts that the peak exceeded by more than `beyond`; None before the first."""
    if not accuracy.recent:
        return None
    return sum(error < -beyond for error in accuracy.recent) / len(accuracy.recent)


def mean_shortfall(accuracy: ForecastAccuracy) -> float | None:
    """Return the mean excess of the last day's missed forecasts; None without a miss."""
    short = [-error for error in accuracy.recent if error < 0]
    return sum(short) / len(short) if short else None


def max_shortfall(accuracy: ForecastAccuracy) -> float | None:
    """Return the largest excess of the last day, 0 without a miss; None before the first forecast."""
    return max(0.0, -min(accuracy.recent)) if accuracy.recent else None


def forecast_bias(accuracy: ForecastAccuracy) -> float | None:
    """Return the mean of forecast minus peak over the last day: positive is cautious. None before the first forecast."""
    return sum(accuracy.recent) / len(accuracy.recent) if accuracy.recent else None
