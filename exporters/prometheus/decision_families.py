"""Turns advice, headroom, forecasts and evictions of one cycle into metric families.
Pure. A threshold that could not be evaluated has no numbers, never a zero; their count is a metric of its own.
Eviction rows are absent where no eviction plugin is configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from api.advice import NOT_NUMA_BOUND, Headroom, MemoryAdvice, MemoryCondition, MemoryPressure, PoolSize
from api.colocation import ColocationTotals
from api.decision import Advice, Cycle
from api.eviction import EvictionBlock, EvictionEventReason, EvictionResult, EvictionThreshold, ThresholdMet
from api.forecast import Forecast, ForecastResource
from api.metric_profiles import MetricProfile
from api.metrics import AGENT_METRICS_BY_NAME
from exporters.prometheus.metric_family import Labels, MetricFamily, ns_to_seconds, point_family, slot_distribution
from exporters.prometheus.node_families import MAX_INTERFACES
from exporters.prometheus.profile_filter import LATENCY_LAYOUTS


def headroom_families(advice: Advice) -> Iterator[MetricFamily]:
    """Yield computed and reported headroom; unknown amounts have no points."""
    for what, amounts in (("headroom", advice.headroom), ("advertised", advice.reported_headroom)):
        if amounts is not None:
            yield from _headroom_amounts(what, amounts)
    yield point_family(
        "dioptase_region_headroom_cores",
        (((region.region.name, region.region.kind.value), region.headroom_cores) for region in advice.cpu.regions),
    )


def _headroom_amounts(what: str, amounts: Headroom) -> Iterator[MetricFamily]:
    yield point_family(f"dioptase_reclaim_{what}_cores", [((), amounts.cores)])
    yield point_family(f"dioptase_reclaim_memory_{what}_bytes", [((), amounts.memory_bytes)])
    yield point_family(f"dioptase_reclaim_numa_{what}_cores", _by_numa(amounts.cores_by_numa))
    yield point_family(f"dioptase_reclaim_numa_memory_{what}_bytes", _by_numa(amounts.memory_by_numa))


def _by_numa(parts: Mapping[int, float]) -> Iterator[tuple[Labels, float]]:
    return (((str(numa),), amount) for numa, amount in sorted(parts.items()))


WHOLE_NODE = ""
"""Label value of the whole node, in place of a NUMA node."""


def advice_families(finished: Cycle) -> Iterator[MetricFamily]:
    """Yield the details of the advice; nothing if there is none."""
    if finished.advice is not None:
        yield from _cpu_advice(finished.advice)
    if finished.memory is not None:
        yield from _memory_advice(finished.memory)


def _cpu_advice(advice: Advice) -> Iterator[MetricFamily]:
    sizes, regions = advice.cpu.sizes, advice.cpu.regions
    yield point_family("dioptase_pool_size_cpus", ((_pool_labels(size), size.cpus) for size in sizes))
    yield point_family("dioptase_pool_quota_cores", ((_pool_labels(size), size.quota_cores) for size in sizes))
    yield point_family("dioptase_region_control_cores", (
        ((region.region.name, region.region.kind.value, region.policy, control.value), value)
        for region in regions for control, value in region.controls.items()
    ))  # fmt: skip
    yield point_family("dioptase_region_bound_cores", (
        ((region.region.name, bound), value)
        for region in regions for bound, value in (("lower", region.lower_cores), ("upper", region.upper_cores))
    ))  # fmt: skip
    signals = [(region.region.name, signal) for region in regions for signal in region.signals]
    yield point_family("dioptase_region_indicator", (((name, signal.name), signal.current) for name, signal in signals))
    yield point_family(
        "dioptase_region_indicator_target", (((name, signal.name), signal.target) for name, signal in signals)
    )
    rejected = Counter(verdict.rule for verdict in advice.rejected.values())
    yield point_family("dioptase_rejected_pods", (((rule,), count) for rule, count in sorted(rejected.items())))
    cards = advice.cards[:MAX_INTERFACES]
    yield point_family("dioptase_network_capacity_mbit", (
        ((card.name, direction), capacity)
        for card in cards
        for direction, capacity in (("received", card.ingress_capacity), ("sent", card.egress_capacity))
    ))  # fmt: skip
    yield point_family("dioptase_network_promised_mbit", (((card.name,), card.allocated_mbit) for card in cards))


def _pool_labels(size: PoolSize) -> Labels:
    return size.pool, WHOLE_NODE if size.numa == NOT_NUMA_BOUND else str(size.numa)


def _memory_advice(advice: MemoryAdvice) -> Iterator[MetricFamily]:
    conditions = {
        WHOLE_NODE: advice.condition,
        **{str(numa): result for numa, result in advice.numa_conditions.items()},
    }
    yield point_family(
        "dioptase_memory_provision_bytes", (((str(numa),), size) for numa, size in advice.provision_by_numa.items())
    )
    yield point_family("dioptase_memory_condition", (
        ((where, state.value), int(result.state is state)) for where, result in conditions.items() for state in MemoryPressure
    ))  # fmt: skip
    yield point_family(
        "dioptase_memory_shortfall_bytes",
        (((where,), _shortfall_bytes(result)) for where, result in conditions.items()),
    )


def _shortfall_bytes(result: MemoryCondition) -> int | None:
    """Return None, not zero, if the shortfall is unknown."""
    return None if result.state is MemoryPressure.UNKNOWN else result.target_bytes


def colocation_families(totals: ColocationTotals) -> Iterator[MetricFamily]:
    """Yield the totals of colocation; those that were never measured have no points."""
    online = {"busy": totals.busy, "idle": totals.idle}
    measured = {name: each for name, each in online.items() if each.duration_ns}
    interference_ns = totals.interference_ns if totals.interference_duration_ns else None
    yield point_family("dioptase_reclaimable_cpu_seconds_total", [((), ns_to_seconds(totals.reclaimable_ns))])
    yield point_family(
        "dioptase_reclaimed_cpu_seconds_total",
        (((name,), ns_to_seconds(ns)) for name, ns in totals.reclaimed_ns.items()),
    )
    yield point_family("dioptase_reclaimed_interference_seconds_total", [((), ns_to_seconds(interference_ns))])
    yield MetricFamily(
        AGENT_METRICS_BY_NAME["dioptase_online_runq_wait_seconds"],
        distributions=tuple(
            slot_distribution((), (name,), each.latency, LATENCY_LAYOUTS[MetricProfile.FULL])
            for name, each in measured.items()
        ),
    )
    yield point_family(
        "dioptase_online_measured_seconds_total",
        (((name,), ns_to_seconds(each.duration_ns)) for name, each in measured.items()),
    )
    yield point_family(
        "dioptase_online_cpu_seconds_total",
        (((name,), ns_to_seconds(each.cpu_ns)) for name, each in measured.items()),
    )
    yield point_family(
        "dioptase_reclaimed_reductions_total", (((rule,), count) for rule, count in totals.reductions.items())
    )
    yield point_family(
        "dioptase_reclaimed_evictions_total", (((rule,), count) for rule, count in totals.evictions.items())
    )


RESOURCE_UNITS = {ForecastResource.CPU: "cores", ForecastResource.MEMORY: "bytes"}


def forecast_families(forecasts: Sequence[Forecast]) -> Iterator[MetricFamily]:
    """Yield forecasts. Amounts are metrics of their own for each resource, because their units differ."""
    for forecast in forecasts:
        yield from _forecast_amounts(forecast)
    named = [((forecast.resource.value,), forecast) for forecast in forecasts]
    yield point_family("dioptase_forecast_promised_miss_ratio", ((name, o.target_miss_ratio) for name, o in named))
    yield point_family("dioptase_forecast_alarm", ((name, int(o.forecast.alarm)) for name, o in named))
    yield point_family("dioptase_forecast_trusted", ((name, int(o.forecast.trusted)) for name, o in named))
    yield point_family("dioptase_forecast_history_seconds", ((name, o.forecast.history_s) for name, o in named))
    scores = [(name, o.score) for name, o in named if o.score is not None]
    yield point_family("dioptase_forecast_miss_ratio", ((name, score.miss_ratio) for name, score in scores))
    yield point_family("dioptase_forecast_big_miss_ratio", ((name, score.big_miss_ratio) for name, score in scores))
    yield point_family("dioptase_forecast_quantile_ratio", ((name, score.quantile_ratio) for name, score in scores))
    yield point_family("dioptase_forecast_evaluated_total", ((name, score.evaluated) for name, score in scores))
    yield point_family("dioptase_forecast_missed_total", ((name, score.missed) for name, score in scores))


def _forecast_amounts(entry: Forecast) -> Iterator[MetricFamily]:
    forecast, score = entry.forecast, entry.score
    amounts = {
        "used": entry.used,
        "peak": forecast.peak,
        "expected": forecast.expected,
        "margin": None if forecast.peak is None else forecast.margin,
    }
    if score is not None and score.miss_ratio is not None:
        # Zero if no forecast was too low: an absent line would mean unknown.
        amounts |= {
            "shortfall_mean": score.shortfall_mean or 0.0,
            "shortfall_max": score.shortfall_max,
            "bias": score.bias,
        }
    unit = RESOURCE_UNITS[entry.resource]
    for kind, amount in amounts.items():
        yield point_family(f"dioptase_forecast_{entry.resource.value}_{kind}_{unit}", [((), amount)])


THRESHOLD_LEVELS = {ThresholdMet.NOT_MET: 0, ThresholdMet.SOFT: 1, ThresholdMet.HARD: 2}
NOT_EVALUATED_RULES = frozenset(("input_missing", "plugin_failed"))
"""Rules of thresholds that could not be evaluated (agent/eviction/finding.py)."""


def eviction_families(result: EvictionResult) -> Iterator[MetricFamily]:
    """Yield the families of one cycle."""
    worst: dict[Labels, EvictionThreshold] = {}
    unevaluated: dict[Labels, int] = {}
    for item in result.thresholds:
        unevaluated.setdefault((item.plugin,), 0)
        if item.reason.rule in NOT_EVALUATED_RULES:
            unevaluated[(item.plugin,)] += 1
            continue
        key = (item.plugin, item.scope, item.subject)
        previous = worst.get(key)
        if previous is None or THRESHOLD_LEVELS[item.met] > THRESHOLD_LEVELS[previous.met]:
            worst[key] = item
    yield point_family("dioptase_eviction_threshold", ((key, item.value) for key, item in worst.items()))
    yield point_family("dioptase_eviction_observed", ((key, item.observed) for key, item in worst.items()))
    yield point_family("dioptase_eviction_met", ((key, THRESHOLD_LEVELS[item.met]) for key, item in worst.items()))
    yield point_family("dioptase_eviction_not_judged", unevaluated.items())
    shown = {(item.condition.name, item.condition.kind): 1 for item in result.conditions}
    yield point_family("dioptase_eviction_condition", shown.items())
    yield point_family("dioptase_eviction_leaving_pods", [((), len(result.terminating))])
    blocked = {(why.value,): 0 for why in EvictionBlock}
    for why in result.held.values():
        blocked[(why.value,)] += 1
    yield point_family("dioptase_eviction_held_pods", blocked.items())


class VictimCounts(msgspec.Struct, frozen=True):
    """Number of victims since the agent started, dry runs included."""

    counts: Mapping[Labels, int] = {}
    """Counts by plugin and dry run."""
    dry: frozenset[tuple[str, str]] = frozenset()
    """Plugin and uid of victims of a dry run that still exist."""

    def after(self, finished: Cycle) -> VictimCounts:
        """Return the counts including one more cycle. Plugins begin at zero.

        A pod that is only notified is no victim. A victim of a dry run is listed in every cycle and counts once.
        """
        result = finished.evictions
        if result is None:
            return self
        uids = {pod.uid for pod in finished.snapshot.pods}
        dry = {item for item in self.dry if item[1] in uids}
        counts = {(item.plugin, _bool_label(item.dry_run)): 0 for item in result.thresholds} | dict(self.counts)
        for victim in result.victims:
            region = (victim.plugin, victim.uid)
            if victim.notify or region in dry:
                continue
            if victim.dry_run:
                dry.add(region)
            key = (victim.plugin, _bool_label(victim.dry_run))
            counts[key] = counts.get(key, 0) + 1
        return VictimCounts(counts, frozenset(dry))


def count_kills(before: Mapping[Labels, int], finished: Cycle) -> Mapping[Labels, int]:
    """Return eviction events by reason including one more cycle; each reason begins at zero."""
    if finished.evictions is None and not finished.kills:
        return before
    counts = {(reason.value,): 0 for reason in EvictionEventReason} | dict(before)
    for kill in finished.kills:
        counts[(kill.reason.value,)] += 1
    return counts


def _bool_label(value: bool) -> str:
    return "true" if value else "false"
