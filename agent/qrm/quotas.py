"""Quotas of NUMA nodes into those of containers: what reclaimed pods may use there together, split by claim. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agent.qrm.placing.state import RECLAIM
from api.advice import UNBOUND, PoolSize


def limited_nodes(sizes: Sequence[PoolSize]) -> dict[int, float]:
    """By NUMA node: what reclaimed pods may use of it together, in cores, where a quota says so."""
    return {
        size.numa: size.quota_cores
        for size in sizes
        if size.pool == RECLAIM and size.numa != UNBOUND and size.quota_cores is not None
    }


def shares(
    limits: Mapping[int, float], claims: Mapping[str, float], cpus: Mapping[str, Counter[int]]
) -> dict[str, float]:
    """Cores of each container that runs on a limited node; of each such node all together have its limit.

    One that runs on several claims a part of each, as large as that node's part in their limits. What it may use of a node
    without a limit are its CPUs there. `claims` and `cpus`, a number for each NUMA node, are by container.
    """
    parts = {}
    for container, claim in claims.items():
        room = {numa: limits[numa] for numa in cpus[container] if numa in limits}
        whole = sum(room.values())
        if room:
            parts[container] = {numa: claim * (limit / whole if whole else 1.0) for numa, limit in room.items()}
    total: dict[int, float] = {}
    for mine in parts.values():
        for numa, part in mine.items():
            total[numa] = total.get(numa, 0.0) + part
    free = {container: sum(n for numa, n in cpus[container].items() if numa not in limits) for container in parts}
    return {
        container: free[container]
        + sum(limits[numa] * part / total[numa] for numa, part in mine.items() if total[numa] > 0)
        for container, mine in parts.items()
    }
