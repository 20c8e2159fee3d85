"""The forecasts of one round: what online work uses is sampled, its peaks are foretold, and how that fared is told. Pure.

A sample of CPU is its mean use over five seconds, however long rounds are; between samples a round costs a subtraction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agent.advisor.forecast import accuracy, predictor
from agent.advisor.forecast.online_use import online_cpu, online_memory
from agent.advisor.forecast.predictor import HORIZON_NS, Predictor
from agent.advisor.forecast.window import NS_PER_S
from agent.config.forecast import ForecastConfig
from api.forecasts import Forecast, Outlook, Resource, Score
from api.samples import Snapshot

if TYPE_CHECKING:
    from agent.advisor.forecast.baselines import Method

EVERY_NS = 5 * NS_PER_S
BIG = 0.1
"""Share of the node by which a miss is a big one."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of each resource; of another type for each method."""

    cpu: Any = Predictor()
    memory: Any = Predictor()


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """Memory between rounds."""

    series: Series | None = None
    """None before the first round."""
    sampled_ns: int | None = None
    online_ns: int = 0
    """CPU time since then,"""
    known_ns: int = 0
    """in the part of that time in which it is known."""
    outlooks: tuple[Outlook, ...] = ()


def look_ahead(
    previous: Snapshot | None, snapshot: Snapshot, watched: Watched, config: ForecastConfig, now_ns: int
) -> Watched:
    """One round: the same with what happened since the previous snapshot, and new forecasts every five seconds."""
    spent = online_cpu(previous, snapshot)
    if spent is not None:
        watched = msgspec.structs.replace(
            watched, online_ns=watched.online_ns + spent.online_ns, known_ns=watched.known_ns + spent.interval_ns
        )
    if watched.sampled_ns is not None and 0 <= now_ns - watched.sampled_ns < EVERY_NS:
        return watched
    cores = max(watched.online_ns / watched.known_ns, 0.0) if watched.known_ns else None
    series = watched.series or fresh(config)
    cpu, cpu_outlook = _next(Resource.CPU, series.cpu, cores, len(snapshot.topology.cpus), config, now_ns)
    memory, memory_outlook = _next(
        Resource.MEMORY, series.memory, online_memory(snapshot), snapshot.node.memory_total_bytes or 0, config, now_ns
    )
    return Watched(series=Series(cpu=cpu, memory=memory), sampled_ns=now_ns, outlooks=(cpu_outlook, memory_outlook))


def fresh(config: ForecastConfig) -> Series:
    """Memory of a method that has seen nothing."""
    if config.method == "calibrated":
        return Series()
    start = _rival(config).start
    return Series(cpu=start(Resource.CPU), memory=start(Resource.MEMORY))


def _rival(config: ForecastConfig) -> Method:
    from agent.advisor.forecast.baselines import METHODS  # noqa: PLC0415 - to compare with; no agent needs them to run

    return METHODS[config.method]


def _next(
    resource: Resource, state: Any, used: float | None, capacity: float, config: ForecastConfig, now_ns: int
) -> tuple[Any, Outlook]:
    score: Score | None = None
    forecast: Forecast
    if config.method == "calibrated":
        state = predictor.observe(state, now_ns, used, config)
        forecast = predictor.predict(state, now_ns, config=config, resource=resource)
        score = score_of(state, capacity)
    else:
        rival = _rival(config)
        state = state if used is None else rival.observe(state, now_ns, used)
        forecast = rival.predict(state, now_ns, HORIZON_NS, resource=resource)
    return state, Outlook(
        resource=resource, used=used, forecast=forecast, promised_miss_ratio=config.miss_ratio, score=score
    )


def score_of(state: Predictor, capacity: float) -> Score:
    """How a predictor's forecasts fared; `capacity` is the node's, in the unit of the samples."""
    kept = state.accuracy
    return Score(
        miss_ratio=accuracy.miss_ratio(kept),
        big_miss_ratio=accuracy.miss_ratio(kept, BIG * capacity) if capacity else None,
        shortfall_mean=accuracy.mean_shortfall(kept),
        shortfall_max=accuracy.max_shortfall(kept),
        bias=accuracy.bias(kept),
        quantile_ratio=state.margin.quantile,
        evaluated=kept.evaluated,
        missed=kept.missed,
    )
