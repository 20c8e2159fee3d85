"""Simple peaks to compare with, of the predictor's shape: N-sigma, RC-like and the maximum, over minutes of the past. Pure.

N-sigma and the percentile are those of "Take it to the Limit" (EuroSys 2021), at the level of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, sqrt

import msgspec

from agent.advisor.forecast import histogram, predictor
from agent.advisor.forecast.amounts import said
from agent.advisor.forecast.histogram import MINUTE_NS
from agent.advisor.forecast.predictor import HORIZON_NS, Predictor
from api.forecasts import Forecast, Resource
from api.knobs import Verdict

DAY_MINUTES = 1440


class Minutes(msgspec.Struct, frozen=True, kw_only=True):
    """The highest use of each of the last minutes that had a sample."""

    minute: int | None = None
    open: float = 0.0
    closed: tuple[float, ...] = ()


def observe(state: Minutes, now_ns: int, used_cores: float, kept: int = DAY_MINUTES) -> Minutes:
    """The state with one more sample, of the last `kept` minutes."""
    minute = now_ns // MINUTE_NS
    if minute == state.minute:
        return msgspec.structs.replace(state, open=max(state.open, used_cores))
    closed = state.closed if state.minute is None else (*state.closed[-kept + 2 :], state.open)
    return Minutes(minute=minute, open=used_cores, closed=closed)


def n_sigma(values: Sequence[float]) -> float:
    """Mean and five standard deviations."""
    mean = sum(values) / len(values)
    return mean + 5 * sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, nearest rank."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]


class Method(msgspec.Struct, frozen=True):
    """One way to foretell, for a bench or a replay: a state that has seen nothing, and its two functions."""

    start: Callable[[Resource], object]
    observe: Callable[..., object]
    """(state, now_ns, used_cores) -> state"""
    predict: Callable[..., Forecast]
    """(state, now_ns, horizon_ns, resource=) -> forecast"""
    what: str


def _over(minutes: int, rule: str, peak_of: Callable[[Sequence[float]], float], what: str) -> Method:
    def seen(state: Minutes, now_ns: int, used_cores: float) -> Minutes:
        return observe(state, now_ns, used_cores, minutes)

    def foretold(
        state: Minutes, now_ns: int, horizon_ns: int = HORIZON_NS, resource: Resource = Resource.CPU
    ) -> Forecast:
        values = state.closed if state.minute is None else (*state.closed, state.open)
        peak = peak_of(values) if values else None
        text = "Nothing was seen yet." if peak is None else f"{said(resource, peak)} is the {what}."
        inputs = {"now_ns": now_ns, "horizon_ns": horizon_ns, "minutes": len(values)}
        return Forecast(
            peak=peak,
            expected=peak,
            trusted=len(values) >= minutes,
            history_s=60.0 * len(values),
            verdict=Verdict(rule=rule, text=text, inputs=inputs),
        )

    return Method(lambda _: Minutes(), seen, foretold, what)


METHODS: dict[str, Method] = {
    "calibrated": Method(
        lambda _: Predictor(),
        predictor.observe,
        predictor.predict,
        "regression on recent and seasonal peaks, conformal margin",
    ),
    "koordinator": Method(
        histogram.start,
        histogram.observe,
        histogram.predict,
        "95th percentile of a histogram, half-life 12 h, times 1.1",
    ),
    "n-sigma": _over(120, "n_sigma_5", n_sigma, "mean and five standard deviations of two hours"),
    "rc-like": _over(DAY_MINUTES, "rc_like_p99", p99, "99th percentile of a day"),
    "max": _over(DAY_MINUTES, "max_day", max, "maximum of a day"),
}  # fmt: skip
