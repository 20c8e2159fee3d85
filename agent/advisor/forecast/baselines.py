"""Forecast methods to compare with: Koordinator's decaying histogram, N-sigma, percentile and maximum.
N-sigma and the percentile follow "Take it to the Limit" (EuroSys 2021) at the level of a node. Imported only on
request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, exp2, log, sqrt

import msgspec
from msgspec.structs import replace

from agent.advisor.forecast import predictor
from agent.advisor.forecast.predictor import HORIZON_NS, PeakPredictor, format_amount
from api.forecast import ForecastResource, PeakForecast
from api.knobs import Reason
from api.units import NS_PER_S

BUCKET_GROWTH = 1.05
MAX_EXPONENT = 100
"""Weights double each half-life; before they exceed 2 to this power, the reference time moves."""
MIN_BUCKET_WEIGHT = 0.0001
"""A bucket below this weight counts as empty."""
SAFETY_FACTOR = 1.1
MINUTE_NS, HOUR_S = 60 * NS_PER_S, 3600.0


class HistogramScale(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one resource; amounts are in the unit of the samples."""

    first: float
    """Width of the first bucket, which starts at 0."""
    last: float
    """Minimum start of the last bucket."""
    half_life_s: float
    """Time after which half of a sample's weight is left."""
    percentile: float

    @property
    def buckets(self) -> int:
        return ceil(log(self.last * (BUCKET_GROWTH - 1) / self.first + 1) / log(BUCKET_GROWTH)) + 1

    def bucket_of(self, amount: float) -> int:
        if amount < self.first:
            return 0
        return min(int(log(amount * (BUCKET_GROWTH - 1) / self.first + 1) / log(BUCKET_GROWTH)), self.buckets - 1)

    def start_of(self, bucket: int) -> float:
        """Return the lower edge of a bucket."""
        return self.first * (BUCKET_GROWTH**bucket - 1) / (BUCKET_GROWTH - 1)


CPU_SCALE = HistogramScale(first=0.025, last=1024.0, half_life_s=12 * HOUR_S, percentile=0.95)
MEMORY_SCALE = HistogramScale(first=5.0 * 2**20, last=2.0 * 2**40, half_life_s=24 * HOUR_S, percentile=0.98)


class DecayingHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the buckets, and the samples of the open minute."""

    scale: HistogramScale = CPU_SCALE
    minute: int | None = None
    open: tuple[float, ...] = ()
    reference_s: float = 0.0
    weights: tuple[float, ...] = (0.0,) * CPU_SCALE.buckets
    samples: int = 0


def start_histogram(resource: ForecastResource) -> DecayingHistogram:
    """Return an empty histogram."""
    scale = CPU_SCALE if resource is ForecastResource.CPU else MEMORY_SCALE
    return DecayingHistogram(scale=scale, weights=(0.0,) * scale.buckets)


def observe_histogram(state: DecayingHistogram, now_ns: int, used: float) -> DecayingHistogram:
    """Return the state with one more sample; the minute's 90th percentile is added when the minute is over."""
    minute = now_ns // MINUTE_NS
    if state.minute is None or minute == state.minute:
        return replace(state, minute=minute, open=(*state.open, used))
    ordered = sorted(state.open)
    state = _add_sample(state, state.minute * 60.0, ordered[ceil(0.9 * len(ordered)) - 1])
    return replace(state, minute=minute, open=(used,))


def _add_sample(state: DecayingHistogram, at_s: float, used: float) -> DecayingHistogram:
    weights, reference_s, half_life_s = list(state.weights), state.reference_s, state.scale.half_life_s
    if (at_s - reference_s) / half_life_s > MAX_EXPONENT:
        moved_s = round((at_s - reference_s) / half_life_s) * half_life_s
        weights = [weight * exp2(-moved_s / half_life_s) for weight in weights]
        reference_s += moved_s
    weights[state.scale.bucket_of(used)] += exp2((at_s - reference_s) / half_life_s)
    return replace(state, weights=tuple(weights), reference_s=reference_s, samples=state.samples + 1)


def histogram_percentile(state: DecayingHistogram, share: float) -> float:
    """Return the upper edge of the bucket in which this share of the weight is reached; 0 without samples."""
    filled = [k for k, weight in enumerate(state.weights) if weight >= MIN_BUCKET_WEIGHT]
    if not filled:
        return 0.0
    threshold, cumulated = share * sum(state.weights), 0.0
    bucket = filled[-1]
    for k in range(filled[0], filled[-1]):
        cumulated += state.weights[k]
        if cumulated >= threshold:
            bucket = k
            break
    return state.scale.start_of(min(bucket + 1, len(state.weights) - 1))


def predict_histogram(
    state: DecayingHistogram,
    now_ns: int,
    horizon_ns: int = HORIZON_NS,
    resource: ForecastResource = ForecastResource.CPU,
) -> PeakForecast:
    """Return the percentile plus a tenth, whatever the time and the horizon. Koordinator predicts nothing for the first day."""
    quantile, hours = state.scale.percentile, state.scale.half_life_s / HOUR_S
    percentile = histogram_percentile(state, quantile)
    peak = percentile * SAFETY_FACTOR if state.samples else None
    return PeakForecast(
        peak=peak,
        expected=percentile,
        margin=(peak or percentile) - percentile,
        trusted=state.samples >= 1440,
        history_s=60.0 * state.samples,
        reason=Reason(
            rule=f"koordinator_p{quantile * 100:g}",
            text=f"{format_amount(resource, percentile)} is the {quantile * 100:g}th percentile of use, half-life {hours:g} h, "
            "plus a tenth.",
            threshold=SAFETY_FACTOR,
            inputs={"now_ns": now_ns, "horizon_ns": horizon_ns, "samples": state.samples},
        ),
    )


DAY_MINUTES = 1440


class MinutePeaks(msgspec.Struct, frozen=True, kw_only=True):
    """The highest use of each of the last minutes with a sample."""

    minute: int | None = None
    open: float = 0.0
    closed: tuple[float, ...] = ()


def observe_minute(state: MinutePeaks, now_ns: int, used_cores: float, minutes: int = DAY_MINUTES) -> MinutePeaks:
    """Return the state with one more sample, of the last `minutes` minutes."""
    minute = now_ns // MINUTE_NS
    if minute == state.minute:
        return replace(state, open=max(state.open, used_cores))
    closed = state.closed if state.minute is None else (*state.closed[-minutes + 2 :], state.open)
    return MinutePeaks(minute=minute, open=used_cores, closed=closed)


def mean_plus_sigmas(values: Sequence[float]) -> float:
    """Return the mean plus five standard deviations."""
    mean = sum(values) / len(values)
    return mean + 5 * sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def percentile_99(values: Sequence[float]) -> float:
    """Return the 99th percentile, nearest rank."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]


class ForecastMethod(msgspec.Struct, frozen=True):
    """A forecast method for benchmarks and replays: its initial state and its two functions."""

    start: Callable[[ForecastResource], object]
    observe: Callable[..., object]
    """Called as (state, now_ns, used_cores); returns the next state."""
    predict: Callable[..., PeakForecast]
    """Called as (state, now_ns, horizon_ns, resource=); returns the forecast."""
    description: str


def _windowed_method(
    minutes: int, rule: str, peak_of: Callable[[Sequence[float]], float], description: str
) -> ForecastMethod:
    def observe(state: MinutePeaks, now_ns: int, used_cores: float) -> MinutePeaks:
        return observe_minute(state, now_ns, used_cores, minutes)

    def predict(
        state: MinutePeaks, now_ns: int, horizon_ns: int = HORIZON_NS, resource: ForecastResource = ForecastResource.CPU
    ) -> PeakForecast:
        values = state.closed if state.minute is None else (*state.closed, state.open)
        peak = peak_of(values) if values else None
        text = "There is no sample yet." if peak is None else f"{format_amount(resource, peak)} is the {description}."
        inputs = {"now_ns": now_ns, "horizon_ns": horizon_ns, "minutes": len(values)}
        return PeakForecast(
            peak=peak,
            expected=peak,
            trusted=len(values) >= minutes,
            history_s=60.0 * len(values),
            reason=Reason(rule=rule, text=text, inputs=inputs),
        )

    return ForecastMethod(lambda _: MinutePeaks(), observe, predict, description)


METHODS: dict[str, ForecastMethod] = {
    "calibrated": ForecastMethod(
        lambda _: PeakPredictor(),
        predictor.observe_use,
        predictor.predict_peak,
        "regression on recent and seasonal peaks, conformal margin",
    ),
    "koordinator": ForecastMethod(
        start_histogram,
        observe_histogram,
        predict_histogram,
        "95th percentile of a histogram, half-life 12 h, times 1.1",
    ),
    "n-sigma": _windowed_method(120, "n_sigma_5", mean_plus_sigmas, "mean and five standard deviations of two hours"),
    "rc-like": _windowed_method(DAY_MINUTES, "rc_like_p99", percentile_99, "99th percentile of a day"),
    "max": _windowed_method(DAY_MINUTES, "max_day", max, "maximum of a day"),
}  # fmt: skip
