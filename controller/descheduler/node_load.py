"""Decides which nodes are hot and which may take pods, by the usage (Koordinator's LowNodeLoad thresholds) and the harm that
agents report. Pure. A node without a fresh report is neither."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from api.quantity import parse_duration_s
from controller.descheduler.descheduler_settings import RESOURCES, DeschedulerSettings, LowNodeLoadArgs, Resource

CPU_COLUMN, MEMORY_COLUMN = 0, 1
"""Columns of pairs of amounts: CPU in thousandths, memory in bytes."""
COOL_SHARE = 0.5
"""Share of a limit of harm up to which a node may be a target. It is below 1, because the harm that a pod adds is not
predictable."""
Pair = tuple[float, float]


class HotCause(StrEnum):
    """Why a node is hot."""

    CPU_USAGE = "cpu_usage"
    MEMORY_USAGE = "memory_usage"
    RUNQ_LATENCY = "runq_latency"
    CPU_PRESSURE = "cpu_pressure"
    MEMORY_PRESSURE = "memory_pressure"
    INTERFERENCE = "interference"
    EVICTION_PRESSURE = "eviction_pressure"


class NodeLoad(NamedTuple):
    """Reported load of a node. An amount that is not reported is NaN."""

    name: str
    capacity: Pair
    """Allocatable CPU and memory, before they were multiplied by an overcommit ratio."""
    usage: Pair = (math.nan, math.nan)
    unmeasured: Pair = (0.0, 0.0)
    """Estimated usage of pods that the report cannot contain yet."""
    harm: tuple[float, float, float, float] = (math.nan, math.nan, math.nan, math.nan)
    """Run-queue latency p99 in seconds, CPU pressure, memory pressure and interference, as HARM_INDICATORS of node_arrays."""
    pressures: tuple[str, ...] = ()
    """Eviction conditions that the agent, or Katalyst's agent, reports by a taint, such as `MemoryPressure`."""
    reported_at_s: float = math.nan
    is_schedulable: bool = True

    def load_percent(self, column: int) -> float:
        """Return usage with the estimate for new pods, in percent of the capacity."""
        return _percent(self.usage[column] + self.unmeasured[column], self.capacity[column])

    def usage_percent(self, column: int) -> float:
        return _percent(self.usage[column], self.capacity[column])


class NodeThresholds(NamedTuple):
    """Usage in percent for CPU and memory: up to `low` a node is a target, above `high` it is hot. None: the resource is not
    considered."""

    low: tuple[float | None, float | None] = (None, None)
    high: tuple[float | None, float | None] = (None, None)


class HotReason(NamedTuple):
    """One reason why a node is hot."""

    cause: HotCause
    columns: tuple[int, ...]
    """Columns of the resources that a moved pod must use to relieve the node: CPU, memory or both."""
    text: str


class NodeClasses(NamedTuple):
    """Names of hot nodes with their reasons, of targets, and of nodes without a fresh report."""

    hot: Mapping[str, tuple[HotReason, ...]]
    targets: tuple[str, ...]
    stale: tuple[str, ...]


def is_fresh(load: NodeLoad, args: LowNodeLoadArgs, now_s: float) -> bool:
    """Return whether the report is fresh. A report that is as far in the future has the time of a wrong clock, and is not."""
    return abs(now_s - load.reported_at_s) < args.node_metric_expiration_seconds


def compute_thresholds(args: LowNodeLoadArgs, fresh: Iterable[NodeLoad]) -> NodeThresholds:
    """Return the thresholds. With `use_deviation_thresholds` they are relative to the current mean usage of the nodes."""
    low, high = [_listed(args.low_thresholds), _listed(args.high_thresholds)]
    if not args.use_deviation_thresholds:
        return NodeThresholds((low[0], low[1]), (high[0], high[1]))
    nodes = list(fresh)
    for column in (CPU_COLUMN, MEMORY_COLUMN):
        shares = [share for load in nodes if not math.isnan(share := load.usage_percent(column))]
        below, above = low[column], high[column]
        # A deviation of 0 turns the resource off (utilization_util.go, getNodeThresholds).
        if below is None or above is None or below == 0 or not shares:
            low[column] = high[column] = None
            continue
        mean = sum(shares) / len(shares)
        low[column], high[column] = _clamp(mean - below), _clamp(mean + above)
    return NodeThresholds((low[0], low[1]), (high[0], high[1]))


def find_hot_reasons(
    load: NodeLoad, thresholds: NodeThresholds, settings: DeschedulerSettings
) -> tuple[HotReason, ...]:
    """Return why a node with a fresh report is hot; empty if it is not. An equal value is not above a limit."""
    reasons = []
    for column, cause in ((CPU_COLUMN, HotCause.CPU_USAGE), (MEMORY_COLUMN, HotCause.MEMORY_USAGE)):
        limit, percent = thresholds.high[column], load.usage_percent(column)
        if limit is not None and percent > limit:
            name = "CPU" if column == CPU_COLUMN else "memory"
            text = f"{name} usage is {percent:.1f} %, highThresholds.{RESOURCES[column]} {limit:.4g} %"
            reasons.append(HotReason(cause, (column,), text))
    harm = settings.harm
    limits = (harm.runq_latency_ms / 1000, harm.cpu_pressure, harm.memory_pressure, harm.interference)
    for (cause, column, label, scale, unit), value, limit in zip(_HARM_TEXTS, load.harm, limits, strict=True):
        if limit and value > limit:
            text = f"{label} is {value * scale:.3g}{unit}, limit {limit * scale:.4g}{unit}"
            reasons.append(HotReason(cause, (column,), text))
    if settings.eviction_pressure:
        for condition in load.pressures:
            if columns := pressure_columns(condition):
                reasons.append(HotReason(HotCause.EVICTION_PRESSURE, columns, f"eviction condition {condition}"))
    return tuple(reasons)


def pressure_columns(condition: str) -> tuple[int, ...]:
    """Return the columns of the resources that an eviction condition is about; empty for a condition that moves do not relieve,
    such as a full disk."""
    names = {"memory": MEMORY_COLUMN, "cpu": CPU_COLUMN}
    return tuple(sorted(column for name, column in names.items() if name in condition.lower()))


def classify_nodes(
    loads: Iterable[NodeLoad], settings: DeschedulerSettings, now_s: float
) -> tuple[NodeClasses, NodeThresholds]:
    """Return hot nodes, targets and nodes without a fresh report, and the thresholds that decided this."""
    args, listed = settings.low_node_load, list(loads)
    fresh = [load for load in listed if is_fresh(load, args, now_s)]
    thresholds = compute_thresholds(args, fresh)
    hot = {load.name: reasons for load in fresh if (reasons := find_hot_reasons(load, thresholds, settings))}
    targets = tuple(load.name for load in fresh if load.name not in hot and _is_target(load, thresholds, settings))
    names = {load.name for load in fresh}
    return NodeClasses(hot, targets, tuple(load.name for load in listed if load.name not in names)), thresholds


def severity(load: NodeLoad, args: LowNodeLoadArgs) -> float:
    """Return the weighted mean usage in percent, by which the hottest node is relieved first."""
    pairs = [
        (args.resource_weights.get(name, 1), load.usage_percent(column))
        for column, name in enumerate(RESOURCES)
        if not math.isnan(load.usage_percent(column))
    ]
    total = sum(weight for weight, _ in pairs)
    return sum(weight * percent for weight, percent in pairs) / total if total else 0.0


def _is_target(load: NodeLoad, thresholds: NodeThresholds, settings: DeschedulerSettings) -> bool:
    if not load.is_schedulable or load.pressures:
        return False
    for column, low in enumerate(thresholds.low):
        # NaN, an unknown usage, is not below a threshold.
        if low is not None and not load.load_percent(column) <= low:
            return False
    harm = settings.harm
    limits = (harm.runq_latency_ms / 1000, harm.cpu_pressure, harm.memory_pressure, harm.interference)
    return not any(limit and value > COOL_SHARE * limit for value, limit in zip(load.harm, limits, strict=True))


class _Streak(NamedTuple):
    reported_at_s: float
    hot: int
    normal: int = 0
    abnormal_since_s: float | None = None


class HotStreaks:
    """Consecutive hot reports of each node. The same report counts once, however often it is evaluated."""

    def __init__(self, args: LowNodeLoadArgs) -> None:
        self._condition = args.anomaly_condition
        self._forget_s = parse_duration_s(args.detector_cache_timeout)
        timeout = args.anomaly_condition.timeout
        self._timeout_s = math.inf if timeout is None else parse_duration_s(timeout)
        self._streaks: dict[str, _Streak] = {}

    def count(self, name: str) -> int:
        """Return the number of consecutive hot reports of a node."""
        streak = self._streaks.get(name)
        return 0 if streak is None else streak.hot

    def observe(self, name: str, reported_at_s: float, *, is_hot: bool) -> bool:
        """Count a report; return whether the node is hot and has been for enough consecutive reports to be relieved."""
        streak = self._streaks.get(name)
        if streak is None or not 0 <= reported_at_s - streak.reported_at_s < self._forget_s:
            streak = _Streak(-math.inf, 0)
        if reported_at_s != streak.reported_at_s:
            streak = self._next(streak, reported_at_s, is_hot=is_hot)
            self._streaks[name] = streak
        return is_hot and streak.abnormal_since_s is not None

    def reset(self, name: str) -> None:
        """Count from zero: the node was relieved."""
        self._streaks.pop(name, None)

    def retain(self, names: Collection[str]) -> None:
        """Forget all other nodes: they do not exist, or their reports are stale."""
        self._streaks = {name: streak for name, streak in self._streaks.items() if name in names}

    def _next(self, streak: _Streak, reported_at_s: float, *, is_hot: bool) -> _Streak:
        since_s = streak.abnormal_since_s
        if since_s is not None and reported_at_s - since_s > self._timeout_s:
            streak, since_s = _Streak(-math.inf, 0), None
        if not is_hot:
            normal = streak.normal + 1
            if since_s is None or normal >= self._condition.consecutive_normalities:
                return _Streak(reported_at_s, 0)
            return _Streak(reported_at_s, streak.hot, normal, since_s)
        hot = streak.hot + 1
        if since_s is None and hot >= self._condition.consecutive_abnormalities:
            since_s = reported_at_s
        return _Streak(reported_at_s, hot, 0, since_s)


_HARM_TEXTS = (
    (HotCause.RUNQ_LATENCY, CPU_COLUMN, "run-queue latency p99 of online pods", 1000, " ms"),
    (HotCause.CPU_PRESSURE, CPU_COLUMN, "CPU pressure", 100, " %"),
    (HotCause.MEMORY_PRESSURE, MEMORY_COLUMN, "memory pressure", 100, " %"),
    (HotCause.INTERFERENCE, CPU_COLUMN, "interference by reclaimed pods", 1, " s per s"),
)


def _listed(thresholds: Mapping[Resource, float]) -> list[float | None]:
    return [thresholds.get(name) for name in RESOURCES]


def _clamp(percent: float) -> float:
    return min(max(percent, 0.0), 100.0)


def _percent(amount: float, capacity: float) -> float:
    return amount / capacity * 100 if capacity > 0 else math.nan
