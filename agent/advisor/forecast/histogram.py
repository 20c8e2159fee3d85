"""Koordinator's peak: a high percentile of a decaying histogram, and a tenth on top. Pure.

As its mid tier has it: a sample is the 90th percentile of a minute's use; buckets grow by 5 %, the percentile is the upper edge
of the bucket that it falls in. Of CPU it is the 95th, of memory the 98th, and memory is forgotten half as fast.
"""

from __future__ import annotations

from math import ceil, exp2, log

import msgspec

from agent.advisor.forecast.amounts import said
from agent.advisor.forecast.predictor import HORIZON_NS
from agent.advisor.forecast.window import NS_PER_S
from api.forecasts import Forecast, Resource
from api.knobs import Verdict

GROWTH = 1.05
MOST_EXPONENT = 100
"""Weights double each half-life; before they grow past 2 to this, the reference moves."""
EMPTY = 0.0001
"""A bucket with less weight than this has none."""
SAFETY = 1.1
MINUTE_NS, HOUR_S = 60 * NS_PER_S, 3600.0


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between resources; amounts are in the unit of the samples."""

    first: float
    """Width of the first bucket, which begins at 0."""
    most: float
    """Where the last one begins at least."""
    half_life_s: float
    """After so long half of a sample's weight is left."""
    percentile: float

    @property
    def buckets(self) -> int:
        return ceil(log(self.most * (GROWTH - 1) / self.first + 1) / log(GROWTH)) + 1

    def bucket_of(self, amount: float) -> int:
        if amount < self.first:
            return 0
        return min(int(log(amount * (GROWTH - 1) / self.first + 1) / log(GROWTH)), self.buckets - 1)

    def start_of(self, bucket: int) -> float:
        """Lower edge of a bucket."""
        return self.first * (GROWTH**bucket - 1) / (GROWTH - 1)


CORES = Scale(first=0.025, most=1024.0, half_life_s=12 * HOUR_S, percentile=0.95)
BYTES = Scale(first=5.0 * 2**20, most=2.0 * 2**40, half_life_s=24 * HOUR_S, percentile=0.98)


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the buckets, and the samples of the open minute."""

    scale: Scale = CORES
    minute: int | None = None
    open: tuple[float, ...] = ()
    reference_s: float = 0.0
    weights: tuple[float, ...] = (0.0,) * CORES.buckets
    samples: int = 0


def start(resource: Resource) -> Histogram:
    """One that has seen nothing."""
    scale = CORES if resource is Resource.CPU else BYTES
    return Histogram(scale=scale, weights=(0.0,) * scale.buckets)


def observe(state: Histogram, now_ns: int, used: float) -> Histogram:
    """The state with one more sample; the minute's 90th percentile is added when the minute is over."""
    minute = now_ns // MINUTE_NS
    if state.minute is None or minute == state.minute:
        return msgspec.structs.replace(state, minute=minute, open=(*state.open, used))
    ordered = sorted(state.open)
    state = _add(state, state.minute * 60.0, ordered[ceil(0.9 * len(ordered)) - 1])
    return msgspec.structs.replace(state, minute=minute, open=(used,))


def _add(state: Histogram, at_s: float, used: float) -> Histogram:
    weights, reference_s, half_life_s = list(state.weights), state.reference_s, state.scale.half_life_s
    if (at_s - reference_s) / half_life_s > MOST_EXPONENT:
        moved_s = round((at_s - reference_s) / half_life_s) * half_life_s
        weights = [weight * exp2(-moved_s / half_life_s) for weight in weights]
        reference_s += moved_s
    weights[state.scale.bucket_of(used)] += exp2((at_s - reference_s) / half_life_s)
    return msgspec.structs.replace(state, weights=tuple(weights), reference_s=reference_s, samples=state.samples + 1)


def percentile(state: Histogram, share: float) -> float:
    """Upper edge of the bucket in which so large a share of the weight is reached; 0 without samples."""
    filled = [k for k, weight in enumerate(state.weights) if weight >= EMPTY]
    if not filled:
        return 0.0
    threshold, seen = share * sum(state.weights), 0.0
    bucket = filled[-1]
    for k in range(filled[0], filled[-1]):
        seen += state.weights[k]
        if seen >= threshold:
            bucket = k
            break
    return state.scale.start_of(min(bucket + 1, len(state.weights) - 1))


def predict(state: Histogram, now_ns: int, horizon_ns: int = HORIZON_NS, resource: Resource = Resource.CPU) -> Forecast:
    """The percentile and a tenth on top, whatever the time and the horizon. Koordinator promises nothing for a day."""
    share, hours = state.scale.percentile, state.scale.half_life_s / HOUR_S
    known = percentile(state, share)
    peak = known * SAFETY if state.samples else None
    return Forecast(
        peak=peak,
        expected=known,
        margin=(peak or known) - known,
        trusted=state.samples >= 1440,
        history_s=60.0 * state.samples,
        verdict=Verdict(
            rule=f"koordinator_p{share * 100:g}",
            text=f"{said(resource, known)} is the {share * 100:g}th percentile of use, half-life {hours:g} h, "
            "and a tenth is added.",
            threshold=SAFETY,
            inputs={"now_ns": now_ns, "horizon_ns": horizon_ns, "samples": state.samples},
        ),
    )
