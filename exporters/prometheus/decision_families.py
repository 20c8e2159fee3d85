"""Turns advice, headroom, forecasts and evictions of one cycle into metric families.
Pure. A threshold that could not be evaluated has no numbers, never a zero; their count is a metric of its own.
Eviction rows are absent where no eviction plugin is configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from api.advice import NOT_NUMA_BOUND, Headroom, MemoryAdvice, MemoryCondition, MemoryPressure, PoolSize
from api.decision import Advice, Cycle
from api.eviction import EvictionBlock, EvictionEventReason, EvictionResult, EvictionThreshold, ThresholdMet
from api.forecast import Forecast, ForecastResource
from exporters.prometheus.metric_family import Labels, MetricFamily, point_family
from exporters.prometheus.node_families import MAX_INTERFACES


def headroom_families(advice: Advice) -> Iterator[MetricFamily]:
    """Rows of both; of what is not known there is none."""
    for what, amounts in (("headroom", advice.headroom), ("advertised", advice.reported_headroom)):
        if amounts is not None:
            yield from _headroom_amounts(what, amounts)
    yield point_family(
        "dioptase_region_headroom_cores",
        (((one.region.name, one.region.kind.value), one.headroom_cores) for one in advice.cpu.regions),
    )


def _headroom_amounts(what: str, amounts: Headroom) -> Iterator[MetricFamily]:
    yield point_family(f"dioptase_reclaim_{what}_cores", [((), amounts.cores)])
    yield point_family(f"dioptase_reclaim_memory_{what}_bytes", [((), amounts.memory_bytes)])
    yield point_family(f"dioptase_reclaim_numa_{what}_cores", _by_numa(amounts.cores_by_numa))
    yield point_family(f"dioptase_reclaim_numa_memory_{what}_bytes", _by_numa(amounts.memory_by_numa))


def _by_numa(parts: Mapping[int, float]) -> Iterator[tuple[Labels, float]]:
    return (((str(numa),), amount) for numa, amount in sorted(parts.items()))


WHOLE_NODE = ""
"""In the place of a NUMA node: the node as a whole."""


def advice_families(finished: Cycle) -> Iterator[MetricFamily]:
    """What stands behind the sums of the advice; nothing where nothing was advised."""
    if finished.advice is not None:
        yield from _cpu_advice(finished.advice)
    if finished.memory is not None:
        yield from _memory_advice(finished.memory)


def _cpu_advice(advice: Advice) -> Iterator[MetricFamily]:
    sizes, regions = advice.cpu.sizes, advice.cpu.regions
    yield point_family("dioptase_pool_size_cpus", ((_pool_labels(size), size.cpus) for size in sizes))
    yield point_family("dioptase_pool_quota_cores", ((_pool_labels(size), size.quota_cores) for size in sizes))
    yield point_family("dioptase_region_control_cores", (
        ((one.region.name, one.region.kind.value, one.policy, control.value), value)
        for one in regions for control, value in one.controls.items()
    ))  # fmt: skip
    yield point_family("dioptase_region_bound_cores", (
        ((one.region.name, bound), value)
        for one in regions for bound, value in (("lower", one.lower_cores), ("upper", one.upper_cores))
    ))  # fmt: skip
    signals = [(one.region.name, signal) for one in regions for signal in one.signals]
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
    conditions = {WHOLE_NODE: advice.condition, **{str(numa): found for numa, found in advice.numa_conditions.items()}}
    yield point_family(
        "dioptase_memory_provision_bytes", (((str(numa),), size) for numa, size in advice.provision_by_numa.items())
    )
    yield point_family("dioptase_memory_condition", (
        ((where, state.value), int(found.state is state)) for where, found in conditions.items() for state in MemoryPressure
    ))  # fmt: skip
    yield point_family(
        "dioptase_memory_shortfall_bytes", (((where,), _shortfall_bytes(found)) for where, found in conditions.items())
    )


def _shortfall_bytes(found: MemoryCondition) -> int | None:
    """None where it is not known: that is not nothing."""
    return None if found.state is MemoryPressure.UNKNOWN else found.target_bytes


RESOURCE_UNITS = {ForecastResource.CPU: "cores", ForecastResource.MEMORY: "bytes"}


def forecast_families(forecasts: Sequence[Forecast]) -> Iterator[MetricFamily]:
    """Amounts are rows of their own for each resource, because their units differ."""
    for outlook in forecasts:
        yield from _forecast_amounts(outlook)
    named = [((outlook.resource.value,), outlook) for outlook in forecasts]
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


def _forecast_amounts(outlook: Forecast) -> Iterator[MetricFamily]:
    forecast, score = outlook.forecast, outlook.score
    amounts = {
        "used": outlook.used,
        "peak": forecast.peak,
        "expected": forecast.expected,
        "margin": None if forecast.peak is None else forecast.margin,
    }
    if score is not None and score.miss_ratio is not None:
        # Where nothing fell short, by nothing: a line that ends would say that nobody knows.
        amounts |= {
            "shortfall_mean": score.shortfall_mean or 0.0,
            "shortfall_max": score.shortfall_max,
            "bias": score.bias,
        }
    unit = RESOURCE_UNITS[outlook.resource]
    for what, amount in amounts.items():
        yield point_family(f"dioptase_forecast_{outlook.resource.value}_{what}_{unit}", [((), amount)])


THRESHOLD_LEVELS = {ThresholdMet.NOT_MET: 0, ThresholdMet.SOFT: 1, ThresholdMet.HARD: 2}
NOT_EVALUATED_RULES = frozenset(("input_missing", "plugin_failed"))
"""Rules of thresholds that could not be judged (agent/eviction/finding.py)."""


def eviction_families(found: EvictionResult) -> Iterator[MetricFamily]:
    """The rows of one round."""
    worst: dict[Labels, EvictionThreshold] = {}
    blind: dict[Labels, int] = {}
    for each in found.thresholds:
        blind.setdefault((each.plugin,), 0)
        if each.reason.rule in NOT_EVALUATED_RULES:
            blind[(each.plugin,)] += 1
            continue
        key = (each.plugin, each.scope, each.subject)
        known = worst.get(key)
        if known is None or THRESHOLD_LEVELS[each.met] > THRESHOLD_LEVELS[known.met]:
            worst[key] = each
    yield point_family("dioptase_eviction_threshold", ((key, each.value) for key, each in worst.items()))
    yield point_family("dioptase_eviction_observed", ((key, each.observed) for key, each in worst.items()))
    yield point_family("dioptase_eviction_met", ((key, THRESHOLD_LEVELS[each.met]) for key, each in worst.items()))
    yield point_family("dioptase_eviction_not_judged", blind.items())
    shown = {(each.condition.name, each.condition.kind): 1 for each in found.conditions}
    yield point_family("dioptase_eviction_condition", shown.items())
    yield point_family("dioptase_eviction_leaving_pods", [((), len(found.terminating))])
    held = {(why.value,): 0 for why in EvictionBlock}
    for why in found.held.values():
        held[(why.value,)] += 1
    yield point_family("dioptase_eviction_held_pods", held.items())


class VictimCounts(msgspec.Struct, frozen=True):
    """Who had to leave since the agent started, and in a dry run would have had to."""

    counts: Mapping[Labels, int] = {}
    """By plugin and whether it ran dry."""
    dry: frozenset[tuple[str, str]] = frozenset()
    """Plugin and uid of pods that are here still because it ran dry."""

    def after(self, finished: Cycle) -> VictimCounts:
        """With those of one more round. Plugins begin at zero. Who is only told is none, and of a pod that stays although it
        would have had to leave its plugin says so again and again: it counts once."""
        found = finished.evictions
        if found is None:
            return self
        here = {pod.uid for pod in finished.snapshot.pods}
        dry = {each for each in self.dry if each[1] in here}
        counts = {(each.plugin, _bool_label(each.dry_run)): 0 for each in found.thresholds} | dict(self.counts)
        for victim in found.victims:
            one = (victim.plugin, victim.uid)
            if victim.notify or one in dry:
                continue
            if victim.dry_run:
                dry.add(one)
            key = (victim.plugin, _bool_label(victim.dry_run))
            counts[key] = counts.get(key, 0) + 1
        return VictimCounts(counts, frozenset(dry))


def count_kills(before: Mapping[Labels, int], finished: Cycle) -> Mapping[Labels, int]:
    """Events of evictions by reason, with those of one more round; each reason begins at zero."""
    if finished.evictions is None and not finished.kills:
        return before
    counts = {(reason.value,): 0 for reason in EvictionEventReason} | dict(before)
    for kill in finished.kills:
        counts[(kill.reason.value,)] += 1
    return counts


def _bool_label(value: bool) -> str:
    return "true" if value else "false"
