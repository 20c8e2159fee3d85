"""Samples the CPU and memory use of all but reclaimed pods, and updates the node's forecasts and scores.
A CPU sample is the mean use of five seconds. A removed reclaimed cgroup invalidates its interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from agent.advisor.forecast import peak_model, predictor
from agent.advisor.forecast.predictor import HORIZON_NS, PeakPredictor
from agent.advisor.pod_usage import non_cache_bytes, reclaimed_cgroups
from agent.config.advisor import ForecastConfig
from api.forecast import Forecast, ForecastResource, ForecastScore, PeakForecast
from api.rates import delta
from api.snapshot import Snapshot
from api.units import NS_PER_S

if TYPE_CHECKING:
    from agent.advisor.forecast.baselines import ForecastMethod


class OnlineCpuTime(NamedTuple):
    """CPU time and the interval in which it was used, in nanoseconds."""

    online_ns: int
    """May be slightly negative, because the node counts in ticks and cgroups do not."""
    interval_ns: int


def online_cpu_time(previous: Snapshot | None, snapshot: Snapshot) -> OnlineCpuTime | None:
    """Return the node's CPU time between two snapshots without reclaimed pods; None unless all of it is measured.

    A reclaimed cgroup that was removed meanwhile invalidates the interval: its unknown last use would count as online,
    and the end of each batch job would be a peak.
    """
    if previous is None or previous.boot_id != snapshot.boot_id:
        return None
    interval_ns = snapshot.taken_at_ns - previous.taken_at_ns
    if interval_ns <= 0 or previous.node.cpu is None or snapshot.node.cpu is None:
        return None
    online_ns = delta(previous.node.cpu.busy_ns, snapshot.node.cpu.busy_ns)
    for path in {*reclaimed_cgroups(previous), *reclaimed_cgroups(snapshot)}:
        before, after = previous.cgroups.get(path), snapshot.cgroups.get(path)
        if before is None and after is None:
            continue
        if after is None or (before is not None and before.id != after.id):
            return None
        used_ns = delta(0 if before is None else before.cpu_usage_ns, after.cpu_usage_ns)
        if used_ns is None or online_ns is None:
            return None
        online_ns -= used_ns
    return None if online_ns is None else OnlineCpuTime(online_ns, interval_ns)


def online_memory_bytes(snapshot: Snapshot) -> float | None:
    """Return memory of the node that is not available, without reclaimed pods; None unless all of it is measured."""
    total, available = snapshot.node.memory_total_bytes, snapshot.node.memory_available_bytes
    if total is None or available is None:
        return None
    used = float(total - available)
    for path in set(reclaimed_cgroups(snapshot)):
        sample = snapshot.cgroups.get(path)
        reclaimed = 0.0 if sample is None else non_cache_bytes(sample)
        if reclaimed is None:
            return None
        used -= reclaimed
    return max(used, 0.0)


SAMPLE_INTERVAL_NS = 5 * NS_PER_S
BIG_MISS_RATIO = 0.1
"""Share of the node from which a miss is a big one."""


class ForecastSeries(msgspec.Struct, frozen=True, kw_only=True):
    """State of each resource's predictor; the type depends on the method."""

    cpu: Any = PeakPredictor()
    memory: Any = PeakPredictor()


class ForecastState(msgspec.Struct, frozen=True, kw_only=True):
    """State kept from one cycle to the next."""

    series: ForecastSeries | None = None
    """None before the first cycle."""
    sampled_ns: int | None = None
    online_ns: int = 0
    """CPU time since `sampled_ns`."""
    known_ns: int = 0
    """Part of the time since `sampled_ns` in which CPU time was measured."""
    forecasts: tuple[Forecast, ...] = ()


def update_forecasts(
    previous: Snapshot | None, snapshot: Snapshot, state: ForecastState, config: ForecastConfig, now_ns: int
) -> ForecastState:
    """Return the state with the use since the previous snapshot, and new forecasts every five seconds."""
    online = online_cpu_time(previous, snapshot)
    if online is not None:
        state = replace(
            state, online_ns=state.online_ns + online.online_ns, known_ns=state.known_ns + online.interval_ns
        )
    if state.sampled_ns is not None and 0 <= now_ns - state.sampled_ns < SAMPLE_INTERVAL_NS:
        return state
    cores = max(state.online_ns / state.known_ns, 0.0) if state.known_ns else None
    series = state.series or start_series(config)
    cpu, cpu_forecast = _update_resource(
        ForecastResource.CPU, series.cpu, cores, len(snapshot.topology.cpus), config, now_ns
    )
    memory, memory_forecast = _update_resource(
        ForecastResource.MEMORY,
        series.memory,
        online_memory_bytes(snapshot),
        snapshot.node.memory_total_bytes or 0,
        config,
        now_ns,
    )
    return ForecastState(
        series=ForecastSeries(cpu=cpu, memory=memory), sampled_ns=now_ns, forecasts=(cpu_forecast, memory_forecast)
    )


def start_series(config: ForecastConfig) -> ForecastSeries:
    """Return the initial state of the configured method."""
    if config.method == "calibrated":
        return ForecastSeries()
    start = _baseline_method(config).start
    return ForecastSeries(cpu=start(ForecastResource.CPU), memory=start(ForecastResource.MEMORY))


def _baseline_method(config: ForecastConfig) -> ForecastMethod:
    from agent.advisor.forecast.baselines import METHODS  # noqa: PLC0415 - only comparisons use them

    return METHODS[config.method]


def _update_resource(
    resource: ForecastResource, state: Any, used: float | None, capacity: float, config: ForecastConfig, now_ns: int
) -> tuple[Any, Forecast]:
    score: ForecastScore | None = None
    forecast: PeakForecast
    if config.method == "calibrated":
        state = predictor.observe_use(state, now_ns, used, config)
        forecast = predictor.predict_peak(state, now_ns, config=config, resource=resource)
        score = score_predictor(state, capacity)
    else:
        method = _baseline_method(config)
        state = state if used is None else method.observe(state, now_ns, used)
        forecast = method.predict(state, now_ns, HORIZON_NS, resource=resource)
    return state, Forecast(
        resource=resource, used=used, forecast=forecast, target_miss_ratio=config.miss_ratio, score=score
    )


def score_predictor(state: PeakPredictor, capacity: float) -> ForecastScore:
    """Return the scores of a predictor's forecasts; `capacity` is the node's, in the unit of the samples."""
    accuracy = state.accuracy
    return ForecastScore(
        miss_ratio=peak_model.recent_miss_ratio(accuracy),
        big_miss_ratio=peak_model.recent_miss_ratio(accuracy, BIG_MISS_RATIO * capacity) if capacity else None,
        shortfall_mean=peak_model.mean_shortfall(accuracy),
        shortfall_max=peak_model.max_shortfall(accuracy),
        bias=peak_model.forecast_bias(accuracy),
        quantile_ratio=state.margin.quantile,
        evaluated=accuracy.evaluated,
        missed=accuracy.missed,
    )
