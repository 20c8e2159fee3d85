"""How short memory is, of the node and of each NUMA node: Katalyst's detectors.

Critical is what must be free: the configured minimum (of every NUMA node together, for the node) or twice the watermark of
kswapd, whichever is more. With less, cache is dropped; with less than twice as much, cgroups are tuned. Where an input is
missing nothing is known, and so nothing is done.
"""

from __future__ import annotations

from agent.advisor.memory.situation import Situation, Unknown
from agent.advisor.memory.stats import human, node_size, node_total, numa_size, scale_factor
from agent.config.memory import MemoryConfig
from api.knobs import Verdict
from api.memory_advice import MemoryCondition, MemoryPressure

_SCALE = 10_000


def node_condition(situation: Situation, config: MemoryConfig) -> MemoryCondition:
    """The state of the node as a whole."""
    snapshot = situation.snapshot
    try:
        total, count = node_total(snapshot), max(len(snapshot.topology.numa_nodes), 1)
        least = config.critical_bytes(total // count) * count
        return _judge("the node", node_size(snapshot, "MemFree"), total, least, scale_factor(snapshot))
    except Unknown as missing:
        return _unknown("the node", missing)


def numa_conditions(situation: Situation, config: MemoryConfig) -> dict[int, MemoryCondition]:
    """The state of every NUMA node."""
    return {numa: _numa_condition(situation, config, numa) for numa in situation.snapshot.topology.numa_nodes}


def _numa_condition(situation: Situation, config: MemoryConfig, numa: int) -> MemoryCondition:
    snapshot, where = situation.snapshot, f"NUMA node {numa}"
    try:
        total = numa_size(snapshot, numa, "MemTotal", config.stale_s)
        free = numa_size(snapshot, numa, "MemFree", config.stale_s)
        return _judge(where, free, total, config.critical_bytes(total), scale_factor(snapshot))
    except Unknown as missing:
        return _unknown(where, missing)


def _judge(where: str, free: int, total: int, least: int, scale: int) -> MemoryCondition:
    critical = max(float(least), 2 * total * scale / _SCALE)
    if free < critical:
        state, rule, what = (
            MemoryPressure.DROP_CACHE,
            "memory_drop_cache",
            f"less than the {human(critical)} that it must",
        )
    elif free < 2 * critical:
        state, rule, what = MemoryPressure.TUNE_MEMCG, "memory_tune_memcg", f"less than twice {human(critical)}"
    else:
        state, rule, what = MemoryPressure.NO_RISK, "memory_no_risk", f"at least twice {human(critical)}"
    return MemoryCondition(
        state=state,
        target_bytes=max(round(2 * critical - free), 0),
        verdict=Verdict(
            rule=rule,
            text=f"{where[0].upper()}{where[1:]} has {human(free)} free, {what}.",
            threshold=critical,
            inputs={"free_bytes": free, "total_bytes": total, "min_critical_bytes": least, "scale_factor": scale},
        ),
    )


def _unknown(where: str, missing: Unknown) -> MemoryCondition:
    text = f"How short memory is on {where} is not known: {missing} is missing."
    verdict = Verdict(rule="memory_pressure_unknown", text=text, inputs={"missing": str(missing)})
    return MemoryCondition(state=MemoryPressure.UNKNOWN, verdict=verdict)
