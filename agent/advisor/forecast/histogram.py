"""Koordinator's peak: the 95th percentile of a decaying histogram, and a tenth on top. Pure.

As its mid tier has it: a sample is the 90th percentile of a minute's use; buckets grow by 5 % from 0.025 to 1024 cores; half of
a sample's weight is left after 12 hours; the percentile is the upper edge of the bucket that it falls in.
"""

from __future__ import annotations

from math import ceil, exp2, log

import msgspec

from agent.advisor.forecast.amounts import said
from agent.advisor.forecast.predictor import HORIZON_NS
from agent.advisor.forecast.window import NS_PER_S
from api.forecasts import Forecast, Resource
from api.knobs import Verdict

FIRST_CORES, GROWTH, MOST_CORES = 0.025, 1.05, 1024.0
BUCKETS = ceil(log(MOST_CORES * (GROWTH - 1) / FIRST_CORES + 1) / log(GROWTH)) + 1
HALF_LIFE_S = 12 * 3600.0
MOST_EXPONENT = 100
"""Weights double each half-life; before they grow past 2 to this, the reference moves."""
EMPTY = 0.0001
"""A bucket with less weight than this has none."""
PERCENTILE, SAFETY = 0.95, 1.1
MINUTE_NS = 60 * NS_PER_S


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the buckets, and the samples of the open minute."""

    minute: int | None = None
    open: tuple[float, ...] = ()
    reference_s: float = 0.0
    weights: tuple[float, ...] = (0.0,) * BUCKETS
    samples: int = 0


def bucket_of(cores: float) -> int:
    if cores < FIRST_CORES:
        return 0
    return min(int(log(cores * (GROWTH - 1) / FIRST_CORES + 1) / log(GROWTH)), BUCKETS - 1)


def start_of(bucket: int) -> float:
    """Lower edge in cores; the first bucket begins at 0."""
    return FIRST_CORES * (GROWTH**bucket - 1) / (GROWTH - 1)


def observe(state: Histogram, now_ns: int, used_cores: float) -> Histogram:
    """The state with one more sample; the minute's 90th percentile is added when the minute is over."""
    minute = now_ns // MINUTE_NS
    if state.minute is None or minute == state.minute:
        return msgspec.structs.replace(state, minute=minute, open=(*state.open, used_cores))
    ordered = sorted(state.open)
    state = _add(state, state.minute * 60.0, ordered[ceil(0.9 * len(ordered)) - 1])
    return msgspec.structs.replace(state, minute=minute, open=(used_cores,))


def _add(state: Histogram, at_s: float, cores: float) -> Histogram:
    weights, reference_s = list(state.weights), state.reference_s
    if (at_s - reference_s) / HALF_LIFE_S > MOST_EXPONENT:
        moved_s = round((at_s - reference_s) / HALF_LIFE_S) * HALF_LIFE_S
        weights = [weight * exp2(-moved_s / HALF_LIFE_S) for weight in weights]
        reference_s += moved_s
    weights[bucket_of(cores)] += exp2((at_s - reference_s) / HALF_LIFE_S)
    return msgspec.structs.replace(state, weights=tuple(weights), reference_s=reference_s, samples=state.samples + 1)


def percentile(state: Histogram, share: float) -> float:
    """Upper edge in cores of the bucket in which so large a share of the weight is reached; 0 without samples."""
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
    return start_of(min(bucket + 1, BUCKETS - 1))


def predict(state: Histogram, now_ns: int, horizon_ns: int = HORIZON_NS, resource: Resource = Resource.CPU) -> Forecast:
    """The percentile and a tenth on top, whatever the time and the horizon. Koordinator promises nothing for a day."""
    known = percentile(state, PERCENTILE)
    peak = known * SAFETY if state.samples else None
    return Forecast(
        peak=peak,
        expected=known,
        margin=(peak or known) - known,
        trusted=state.samples >= 1440,
        history_s=60.0 * state.samples,
        verdict=Verdict(
            rule="koordinator_p95",
            text=f"{said(resource, known)} is the 95th percentile of use, half-life 12 h, and a tenth is added.",
            threshold=SAFETY,
            inputs={"now_ns": now_ns, "horizon_ns": horizon_ns, "samples": state.samples},
        ),
    )
