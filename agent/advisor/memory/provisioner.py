"""What reclaimed pods may have of each NUMA node, by Katalyst's provisioner: shown to people, nothing is set to it.

Free memory and what reclaimed pods requested, less an even part of the reserve and of twice kswapd's watermark. Never below
nothing: the original subtracts unsigned numbers there.
"""

from __future__ import annotations

from agent.advisor.memory.situation import Situation, Unknown, available_numa
from agent.advisor.memory.stats import node_total, numa_size, scale_factor
from agent.config.memory import MemoryConfig
from api.qos import QoSLevel

_SCALE = 10_000


def provision(situation: Situation, config: MemoryConfig) -> dict[int, float]:
    """Bytes by NUMA node, 0 on those of which nothing may be lent; empty where an input is missing."""
    snapshot = situation.snapshot
    result = dict.fromkeys(snapshot.topology.numa_nodes, 0.0)
    try:
        nodes = available_numa(situation)
        totals = {numa: numa_size(snapshot, numa, "MemTotal", config.stale_s) for numa in nodes}
        for numa in nodes:
            result[numa] = float(numa_size(snapshot, numa, "MemFree", config.stale_s))
        if not nodes:
            return result
        watermark = sum(totals.values()) * 2 * scale_factor(snapshot) / _SCALE / len(nodes)
        reserve = config.reserve_bytes(node_total(snapshot)) / len(nodes)
    except Unknown:
        return {}
    for pod in snapshot.pods:
        if pod.qos is QoSLevel.RECLAIMED:
            size = sum(each.reclaimed_memory_bytes or each.memory_request_bytes or 0 for each in pod.containers)
            bound = [numa for numa in pod.bound_numa if numa in totals] or nodes
            for numa in bound:
                result[numa] += size / len(bound)
    for numa in nodes:
        result[numa] = min(max(result[numa] - reserve - watermark, 0.0), float(totals[numa]))
    return result
