"""Predicts the peak of the next hour from samples of use; incremental, and calibrated by its own misses.
Forecast = expected peak + margin, wider with less than a day of history, + the excess of the last hour over all its forecasts.
It reads no clock.
Samples may have any interval up to five minutes; the unit of a forecast is that of the samples.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agent.advisor.forecast import peak_model
from agent.advisor.forecast.peak_model import (
    BUCKET_NS,
    BUCKET_S,
    HISTORY_BUCKETS,
    HORIZON_BUCKETS,
    ConformalMargin,
    ForecastAccuracy,
    PeakFeatures,
    PeakRegression,
    build_features,
    hour_peak,
    max_known_peak,
)
from agent.config.advisor import ForecastConfig
from api.forecast import ForecastResource, PeakForecast
from api.knobs import Reason
from api.quantity import format_bytes, format_cores
from api.units import NS_PER_S


def format_amount(resource: ForecastResource, amount: float) -> str:
    return format_cores(amount) if resource is ForecastResource.CPU else format_bytes(amount)


DEFAULT_CONFIG = ForecastConfig()
HORIZON_NS = HORIZON_BUCKETS * BUCKET_NS


class PendingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast at the end of one bucket, until its hour is over."""

    features: PeakFeatures | None = None
    base: float | None = None
    predicted: float | None = None
    excess: float = 0.0
    """Excess of the bucket's peak over all forecasts that contain it."""


class PeakPredictor(msgspec.Struct, frozen=True, kw_only=True):
    """State of one series of use."""

    bucket: int | None = None
    """Number of the open bucket: five minutes each since the clock's zero."""
    last_ns: int = 0
    open_peak: float | None = None
    open_samples: int = 0
    usual_samples: int = 0
    """Samples of the last bucket that had any."""
    peaks: tuple[float | None, ...] = ()
    """Peaks of closed buckets, the latest last."""
    pending: tuple[PendingForecast, ...] = ()
    regression: PeakRegression = PeakRegression()
    margin: ConformalMargin = ConformalMargin()
    accuracy: ForecastAccuracy = ForecastAccuracy()


def observe_use(
    state: PeakPredictor, now_ns: int, used_cores: float | None, config: ForecastConfig = DEFAULT_CONFIG
) -> PeakPredictor:
    """Return the state with one more sample; a sample that is None, negative or not finite is ignored.

    A clock that jumped back by less than an hour adds to the open bucket. One that jumped back further, or ahead by more
    than the history (a reboot, a restored machine), resets the state.
    """
    if used_cores is None or not isfinite(used_cores) or used_cores < 0:
        return state
    bucket = now_ns // BUCKET_NS
    ahead = None if state.bucket is None else bucket - state.bucket
    if ahead is None or not -HORIZON_BUCKETS < ahead <= HISTORY_BUCKETS:
        state, ahead = PeakPredictor(bucket=bucket), 0
    for _ in range(ahead):
        state = _close_bucket(state, config)
    return replace(
        state,
        bucket=bucket if ahead > 0 else state.bucket,
        last_ns=max(state.last_ns, now_ns),
        open_peak=used_cores if state.open_peak is None else max(state.open_peak, used_cores),
        open_samples=state.open_samples + 1,
    )


def predict_peak(
    state: PeakPredictor,
    now_ns: int,
    horizon_ns: int = HORIZON_NS,
    config: ForecastConfig = DEFAULT_CONFIG,
    resource: ForecastResource = ForecastResource.CPU,
) -> PeakForecast:
    """Return the predicted peak of use until `now_ns + horizon_ns`; `resource` selects the unit of the reason.

    The calibration is for an hour: a shorter horizon gets the hour's peak, for a longer one there is no forecast.
    """
    history_s = float(BUCKET_S * sum(peak is not None for peak in state.peaks))
    if horizon_ns > HORIZON_NS:
        return _unknown_forecast(
            "horizon_too_long", f"The forecast horizon is at most {HORIZON_NS // NS_PER_S} s.", history_s
        )
    peaks = _peaks_with_open_bucket(state)
    features = build_features(peaks)
    pending = _forecast_peak(state, features, peaks)
    highest = max_known_peak(peaks)
    if pending is None or features is None or highest is None or pending.predicted is None:
        # The open bucket is not part of the history.
        text = f"Less than {(history_s + BUCKET_S) / 60:.0f} minutes of use are measured, too little for a forecast."
        return _unknown_forecast("no_history", text, history_s)
    base, peak = pending.base or 0.0, pending.predicted
    age_s = (now_ns - state.last_ns) / NS_PER_S
    alarm = pending.excess > 0 or any(entry.excess > 0 for entry in state.pending[-HORIZON_BUCKETS + 1 :])
    fresh = abs(age_s) <= config.stale_s
    if not fresh:
        peak = max(peak, highest)
    return PeakForecast(
        peak=peak,
        expected=base,
        margin=peak - base,
        season=features.season,
        alarm=alarm,
        trusted=fresh and history_s >= config.min_history_s,
        history_s=history_s,
        reason=_forecast_reason(
            state,
            pending,
            (format_amount(resource, base), format_amount(resource, peak)),
            _ReasonContext(age_s, history_s, alarm, peak_model.short_history_margin(peaks)),
            config,
        ),
    )


def resume_predictor(state: PeakPredictor, shift_ns: int) -> PeakPredictor:
    """Return the state moved to a clock that is `shift_ns` ahead, to the nearest bucket, with totals reset."""
    totals = ForecastAccuracy(recent=state.accuracy.recent)
    if state.bucket is None:
        return replace(state, accuracy=totals)
    bucket = state.bucket + (shift_ns + BUCKET_NS // 2) // BUCKET_NS
    return replace(state, bucket=bucket, last_ns=state.last_ns + shift_ns, accuracy=totals)


def _close_bucket(state: PeakPredictor, config: ForecastConfig) -> PeakPredictor:
    """Open the next bucket; evaluate the forecast whose hour ends with the closed one."""
    peaks = (*state.peaks[-HISTORY_BUCKETS + 1 :], state.open_peak)
    state = replace(
        state,
        open_peak=None,
        open_samples=0,
        usual_samples=state.open_samples or state.usual_samples,
        peaks=peaks,
    )
    actual = hour_peak(peaks[-HORIZON_BUCKETS:])
    if len(state.pending) == HORIZON_BUCKETS and actual is not None:
        state = _learn_from_peak(state, state.pending[0], actual, config)
    entry = _forecast_peak(state, build_features(peaks), peaks) if peaks[-1] is not None else None
    return replace(state, pending=(*state.pending[-HORIZON_BUCKETS + 1 :], entry or PendingForecast()))


def _learn_from_peak(
    state: PeakPredictor, entry: PendingForecast, actual: float, config: ForecastConfig
) -> PeakPredictor:
    if entry.features is None or entry.base is None:
        return state
    missed = None if entry.predicted is None else actual > entry.predicted
    return replace(
        state,
        regression=peak_model.update_regression(state.regression, entry.features.values, actual),
        margin=peak_model.update_margin(state.margin, actual - entry.base, missed, config.miss_ratio),
        accuracy=state.accuracy
        if entry.predicted is None
        else peak_model.count_forecast(state.accuracy, entry.predicted, actual),
    )


def _forecast_peak(
    state: PeakPredictor, features: PeakFeatures | None, peaks: tuple[float | None, ...]
) -> PendingForecast | None:
    """The forecast after the last of these peaks; without `predicted` while the margin is not known."""
    if features is None:
        return None
    newest = features.values[1]
    base = max(peak_model.expected_peak(state.regression, features.values), 0.0)
    outstanding = [entry.predicted for entry in state.pending if entry.predicted is not None]
    excess = max(newest - max(outstanding), 0.0) if outstanding and peaks[-1] is not None else 0.0
    predicted = None
    if state.margin.amount is not None:
        excess_held = max([excess, *(entry.excess for entry in state.pending[-HORIZON_BUCKETS + 1 :])])
        margin = state.margin.amount + peak_model.short_history_margin(peaks)
        predicted = max(base + margin + excess_held, newest)
    return PendingForecast(features=features, base=base, predicted=predicted, excess=excess)


def _peaks_with_open_bucket(state: PeakPredictor) -> tuple[float | None, ...]:
    """Peaks up to now. An open bucket with fewer samples than usual is incomplete: it can only raise the one before."""
    if state.open_peak is None:
        return state.peaks
    if state.open_samples >= state.usual_samples or not state.peaks or state.peaks[-1] is None:
        return (*state.peaks[-HISTORY_BUCKETS + 1 :], state.open_peak)
    return (*state.peaks[:-1], max(state.peaks[-1], state.open_peak))


def _unknown_forecast(rule: str, text: str, history_s: float) -> PeakForecast:
    return PeakForecast(
        peak=None, history_s=history_s, reason=Reason(rule=rule, text=text, inputs={"history_s": history_s})
    )


class _ReasonContext(NamedTuple):
    age_s: float
    history_s: float
    alarm: bool
    short_history_margin: float


def _forecast_reason(
    state: PeakPredictor,
    pending: PendingForecast,
    amounts: tuple[str, str],
    context: _ReasonContext,
    config: ForecastConfig,
) -> Reason:
    (base, peak), age_s, history_s = amounts, context.age_s, context.history_s
    ratio, quantile = peak_model.recent_miss_ratio(state.accuracy), state.margin.quantile
    text = f"The expected peak within the hour is {base}, {peak} with the margin"
    if abs(age_s) > config.stale_s:
        rule, text = "stale", f"The last sample is {age_s:.0f} s old: {peak}, the highest peak of the history."
    elif context.alarm:
        rule, text = "drift_alarm", f"{text}, which is wider because use exceeded every forecast within the last hour."
    elif history_s < config.min_history_s:
        rule, text = (
            "short_history",
            f"{text}, which is wider because only {history_s / 3600:.1f} hours of history are known.",
        )
    else:
        rule, text = "calibrated", f"{text} that covers {quantile:.1%} of the errors."
    return Reason(
        rule=rule,
        text=text,
        threshold=config.miss_ratio,
        inputs={
            "base": pending.base,
            "margin": state.margin.amount,
            "short_history_margin": context.short_history_margin,
            "excess": pending.excess,
            "quantile": quantile,
            "miss_ratio_day": ratio,
            "age_s": age_s,
            "history_s": history_s,
        },
    )
