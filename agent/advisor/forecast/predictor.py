"""The peak predictor: samples in, the next hour's peak out, calibrated by its own misses. Pure, incremental, of bounded size.

Samples of any interval up to five minutes become a peak for each five minutes. When such a bucket closes, the forecast of an
hour ago is compared with what came: the regression learns the peak, the margin learns its error, and the accuracy counts it.
A forecast is expectation + margin + what the last hour showed above all forecasts for it (the alarm: at once, for an hour).

It does not read a clock, does not know the node, and lends nothing: `lending` does.
"""

from __future__ import annotations

from math import isfinite

import msgspec

from agent.advisor.forecast import accuracy, conformal, regression
from agent.advisor.forecast.accuracy import Accuracy
from agent.advisor.forecast.amounts import said
from agent.advisor.forecast.conformal import Margin
from agent.advisor.forecast.regression import Regression
from agent.advisor.forecast.window import (
    BUCKET_NS,
    BUCKET_S,
    HORIZON,
    KEPT,
    NS_PER_S,
    Features,
    features,
    hour_peak,
    known_peak,
)
from agent.config.forecast import ForecastConfig
from api.forecasts import Forecast, Resource
from api.knobs import Verdict

DEFAULT = ForecastConfig()
HORIZON_NS = HORIZON * BUCKET_NS


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """What was foretold at the end of one bucket, until its hour is over."""

    features: Features | None = None
    base: float | None = None
    predicted: float | None = None
    excess: float = 0.0
    """How far the bucket's peak rose above every forecast that it was in."""


class Predictor(msgspec.Struct, frozen=True, kw_only=True):
    """Everything remembered of one series of use. A new one has seen nothing."""

    bucket: int | None = None
    """Number of the open bucket, five minutes each since the clock's zero."""
    last_ns: int = 0
    open_peak: float | None = None
    open_samples: int = 0
    usual_samples: int = 0
    """Of the last bucket that had any."""
    peaks: tuple[float | None, ...] = ()
    """Of closed buckets, the latest last."""
    pending: tuple[Pending, ...] = ()
    regression: Regression = Regression()
    margin: Margin = Margin()
    accuracy: Accuracy = Accuracy()


def observe(state: Predictor, now_ns: int, used_cores: float | None, config: ForecastConfig = DEFAULT) -> Predictor:
    """The state with one more sample in it; None, a number below 0 or no number at all leaves it as it was.

    A clock that jumped back by less than an hour adds to the open bucket. One that jumped back further, or ahead by more than
    all that is kept (a reboot, a restored machine), makes a fresh start: what it knew belongs to another time.
    """
    if used_cores is None or not isfinite(used_cores) or used_cores < 0:
        return state
    bucket = now_ns // BUCKET_NS
    ahead = None if state.bucket is None else bucket - state.bucket
    if ahead is None or not -HORIZON < ahead <= KEPT:
        state, ahead = Predictor(bucket=bucket), 0
    for _ in range(ahead):
        state = _close(state, config)
    return msgspec.structs.replace(
        state,
        bucket=bucket if ahead > 0 else state.bucket,
        last_ns=max(state.last_ns, now_ns),
        open_peak=used_cores if state.open_peak is None else max(state.open_peak, used_cores),
        open_samples=state.open_samples + 1,
    )


def predict(
    state: Predictor,
    now_ns: int,
    horizon_ns: int = HORIZON_NS,
    config: ForecastConfig = DEFAULT,
    resource: Resource = Resource.CPU,
) -> Forecast:
    """The peak of use until `now_ns + horizon_ns`; `resource` is for the words.

    The calibration is for an hour: a shorter horizon gets the hour's peak, for a longer one there is no forecast.
    """
    history_s = float(BUCKET_S * sum(peak is not None for peak in state.peaks))
    if horizon_ns > HORIZON_NS:
        return _unknown("horizon_too_long", f"Forecasts reach {HORIZON_NS // NS_PER_S} s, not further.", history_s)
    peaks = _with_open(state)
    known = features(peaks)
    foretold = _foretell(state, known, peaks)
    highest = known_peak(peaks)
    if foretold is None or known is None or highest is None or foretold.predicted is None:
        # A step counts from its first sample on, and the open one is not among them.
        text = f"Less than {(history_s + BUCKET_S) / 60:.0f} minutes of use are known, too little to foretell."
        return _unknown("no_history", text, history_s)
    base, peak = foretold.base or 0.0, foretold.predicted
    age_s = (now_ns - state.last_ns) / NS_PER_S
    alarm = foretold.excess > 0 or any(entry.excess > 0 for entry in state.pending[-HORIZON + 1 :])
    fresh = abs(age_s) <= config.stale_s
    if not fresh:
        peak = max(peak, highest)
    return Forecast(
        peak=peak,
        expected=base,
        margin=peak - base,
        season=known.season,
        alarm=alarm,
        trusted=fresh and history_s >= config.min_history_s,
        history_s=history_s,
        verdict=_verdict(
            state, foretold, (said(resource, base), said(resource, peak)), (age_s, history_s, alarm), config
        ),
    )


def resumed(state: Predictor, shift_ns: int) -> Predictor:
    """The same on a clock that shows `shift_ns` more, to the nearest bucket, with totals that start again."""
    totals = Accuracy(recent=state.accuracy.recent)
    if state.bucket is None:
        return msgspec.structs.replace(state, accuracy=totals)
    bucket = state.bucket + (shift_ns + BUCKET_NS // 2) // BUCKET_NS
    return msgspec.structs.replace(state, bucket=bucket, last_ns=state.last_ns + shift_ns, accuracy=totals)


def _close(state: Predictor, config: ForecastConfig) -> Predictor:
    """The next bucket is open; the forecast that ends with this one is compared with what came."""
    peaks = (*state.peaks[-KEPT + 1 :], state.open_peak)
    state = msgspec.structs.replace(
        state,
        open_peak=None,
        open_samples=0,
        usual_samples=state.open_samples or state.usual_samples,
        peaks=peaks,
    )
    actual = hour_peak(peaks[-HORIZON:])
    if len(state.pending) == HORIZON and actual is not None:
        state = _learn(state, state.pending[0], actual, config)
    entry = _foretell(state, features(peaks), peaks) if peaks[-1] is not None else None
    return msgspec.structs.replace(state, pending=(*state.pending[-HORIZON + 1 :], entry or Pending()))


def _learn(state: Predictor, entry: Pending, actual: float, config: ForecastConfig) -> Predictor:
    if entry.features is None or entry.base is None:
        return state
    missed = None if entry.predicted is None else actual > entry.predicted
    return msgspec.structs.replace(
        state,
        regression=regression.learn(state.regression, entry.features.values, actual),
        margin=conformal.learn(state.margin, actual - entry.base, missed, config.miss_ratio),
        accuracy=state.accuracy if entry.predicted is None else accuracy.count(state.accuracy, entry.predicted, actual),
    )


def _foretell(state: Predictor, known: Features | None, peaks: tuple[float | None, ...]) -> Pending | None:
    """What is expected after the last of these peaks; without `predicted` while the margin is not known."""
    if known is None:
        return None
    newest = known.values[1]
    base = max(regression.value(state.regression, known.values), 0.0)
    outstanding = [entry.predicted for entry in state.pending if entry.predicted is not None]
    excess = max(newest - max(outstanding), 0.0) if outstanding and peaks[-1] is not None else 0.0
    predicted = None
    if state.margin.amount is not None:
        held = max([excess, *(entry.excess for entry in state.pending[-HORIZON + 1 :])])
        predicted = max(base + state.margin.amount + held, newest)
    return Pending(features=known, base=base, predicted=predicted, excess=excess)


def _with_open(state: Predictor) -> tuple[float | None, ...]:
    """Peaks up to now. An open bucket with fewer samples than usual has not peaked yet: it only raises the one before."""
    if state.open_peak is None:
        return state.peaks
    if state.open_samples >= state.usual_samples or not state.peaks or state.peaks[-1] is None:
        return (*state.peaks[-KEPT + 1 :], state.open_peak)
    return (*state.peaks[:-1], max(state.peaks[-1], state.open_peak))


def _unknown(rule: str, text: str, history_s: float) -> Forecast:
    return Forecast(
        peak=None, history_s=history_s, verdict=Verdict(rule=rule, text=text, inputs={"history_s": history_s})
    )


def _verdict(
    state: Predictor,
    foretold: Pending,
    amounts: tuple[str, str],
    seen: tuple[float, float, bool],
    config: ForecastConfig,
) -> Verdict:
    (base, peak), (age_s, history_s, alarm) = amounts, seen
    ratio, quantile = accuracy.miss_ratio(state.accuracy), state.margin.quantile
    text = f"{base} are expected at the most within the hour, {peak} with the margin"
    if abs(age_s) > config.stale_s:
        rule, text = "stale", f"The last sample is {age_s:.0f} s old: {peak}, the highest remembered."
    elif alarm:
        rule, text = "drift_alarm", f"{text}, widened since use rose above every forecast within the last hour."
    elif history_s < config.min_history_s:
        rule, text = "short_history", f"{text}, from {history_s / 3600:.1f} hours of history only."
    else:
        rule, text = "calibrated", f"{text} that {quantile:.1%} of errors kept."
    return Verdict(
        rule=rule,
        text=text,
        threshold=config.miss_ratio,
        inputs={
            "base": foretold.base,
            "margin": state.margin.amount,
            "excess": foretold.excess,
            "quantile": quantile,
            "miss_ratio_day": ratio,
            "age_s": age_s,
            "history_s": history_s,
        },
    )
