"""Sizes of the share and the reclaim pool and the CPUs that they consist of, where cpusets keep them apart.

The size follows Katalyst's canonical provision and regulator; the choice of CPUs keeps physical cores whole and moves
as few CPUs as possible, because every move costs the moved tasks their caches.
"""

from __future__ import annotations

from math import ceil

from agent.config import AdvisorConfig
from api.cpus import Topology


def share_cores(
    requirement: float,
    topology: Topology,
    config: AdvisorConfig,
    before: int | None,
    *,
    may_shrink: bool,
) -> int:
    """CPUs of the share pool: need and reserve rounded up, in steps, within [min_share, node - reclaim's minimum].

    With SMT the size is even, so that no physical core serves both pools. `may_shrink` is False within
    min_ramp_down_period_s of the last shrinking.
    """
    cpus = len(topology.cpus)
    upper = max(cpus - config.reclaim_reserve_cores(cpus, len(topology.numa_nodes)), 1)
    size = ceil(requirement + config.reserve_cores(cpus))
    if topology.smt:
        size += size % 2
        upper -= upper % 2 if upper > 1 else 0
    if before is not None:
        size = min(size, before + config.max_ramp_up_cores)
        size = max(size, before - config.max_ramp_down_cores if may_shrink else before)
    return min(max(size, min(config.min_share_cores, upper)), upper)


def split(topology: Topology, share_size: int, before: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """CPUs of the share and of the reclaim pool: disjoint, together the whole node, both in ascending order.

    CPUs that the share pool has now stay in it first; then come siblings of its cores, then whole free cores.
    """
    order = sorted(topology.cpus, key=lambda cpu: (cpu.numa, cpu.socket, cpu.core, cpu.id))
    kept = {cpu.id for cpu in topology.cpus} & set(before)
    cores_kept = {(cpu.socket, cpu.core) for cpu in topology.cpus if cpu.id in kept}
    preference = sorted(
        range(len(order)),
        key=lambda i: (order[i].id not in kept, (order[i].socket, order[i].core) not in cores_kept, i),
    )
    share = {order[i].id for i in preference[:share_size]}
    return (
        tuple(cpu for cpu in topology.ids if cpu in share),
        tuple(cpu for cpu in topology.ids if cpu not in share),
    )
