"""Selects CPUs from a set of free ones, as close to each other as possible. Pure.
The order of preference: CPUs that the pool or container already has, whole cores, one cache, one NUMA node,
sockets in order. Retained CPUs outrank locality because a move costs the tasks their caches. CPUs used by other
pools are taken last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from agent.qrm.cpuset.topology_layout import Cache, Core, CpuLayout

NO_CPUS: frozenset[int] = frozenset()


def select_cpus(
    layout: CpuLayout,
    count: int,
    free: Collection[int],
    kept: Collection[int] = NO_CPUS,
    used: Collection[int] = NO_CPUS,
) -> frozenset[int]:
    """`count` of the CPUs in `free`, or all where there are fewer.

    `kept` are those that the asker has already, `used` those that somebody else would have to give up.
    """
    chosen = _select_retained(layout, count, frozenset(kept) & frozenset(free))
    for tier in (frozenset(free) - frozenset(used), frozenset(free)):
        if len(chosen) < count:
            chosen |= _select_more(layout, count - len(chosen), tier - chosen, chosen)
    return chosen


def select_round_robin(
    layout: CpuLayout,
    count: int,
    free: Collection[int],
    kept: Collection[int] = NO_CPUS,
    used: Collection[int] = NO_CPUS,
) -> frozenset[int]:
    """`count` of the CPUs in `free`, one of each NUMA node in turn, each on the core that has given the fewest so far.

    `kept` and `used` as for `pick`.
    """
    left = {node: set(cpus) & set(free) for node, cpus in layout.numa.items()}
    given: Counter[Core] = Counter()
    chosen: set[int] = set()
    while len(chosen) < count and any(left.values()):
        for cpus in left.values():
            if cpus and len(chosen) < count:
                cpu = min(cpus, key=lambda cpu: (cpu not in kept, cpu in used, given[layout.core[cpu]], cpu))
                cpus.remove(cpu)
                chosen.add(cpu)
                given[layout.core[cpu]] += 1
    return frozenset(chosen)


def select_evenly(layout: CpuLayout, count: int, free: Collection[int], nodes: Iterable[int]) -> frozenset[int]:
    """`count` CPUs, the same number on each of these NUMA nodes, one more on the first ones where it does not divide."""
    wanted = tuple(nodes)
    each, more = divmod(count, len(wanted))
    parts = [
        select_cpus(layout, each + (index < more), layout.on([node]) & frozenset(free))
        for index, node in enumerate(wanted)
    ]
    chosen = NO_CPUS.union(*parts)
    return chosen | select_cpus(layout, count - len(chosen), layout.on(wanted) & frozenset(free) - chosen)


def _select_retained(layout: CpuLayout, count: int, has: frozenset[int]) -> frozenset[int]:
    # Half cores go first, then what is away from the rest.
    if len(has) <= count:
        return has
    whole = set(layout.whole_cores(has))
    nodes = Counter(layout.cpu[cpu].numa for cpu in has)
    caches = Counter(layout.cache[cpu] for cpu in has)
    ranked = sorted(
        has,
        key=lambda cpu: (
            layout.core[cpu] not in whole,
            -nodes[layout.cpu[cpu].numa],
            layout.cpu[cpu].numa,
            -caches[layout.cache[cpu]],
            layout.place[cpu],
        ),
    )
    return frozenset(ranked[:count])


def _select_more(layout: CpuLayout, need: int, free: frozenset[int], mine: frozenset[int]) -> frozenset[int]:
    if len(free) <= need:
        return free
    chosen = _select_siblings(layout, need, free, mine)
    while len(chosen) < need:
        more = _select_whole_cores(layout, need - len(chosen), free - chosen, mine | chosen)
        if not more:
            break
        chosen |= more
    if len(chosen) < need:
        chosen |= _select_single_threads(layout, need - len(chosen), free - chosen, mine | chosen)
    return chosen


def _select_siblings(layout: CpuLayout, need: int, free: frozenset[int], mine: frozenset[int]) -> frozenset[int]:
    # Cores that the asker has a part of, and can have the rest of.
    found: list[int] = []
    for core in sorted({layout.core[cpu] for cpu in mine}):
        rest = [cpu for cpu in layout.cores[core] if cpu not in mine]
        if rest and len(found) + len(rest) <= need and free.issuperset(rest):
            found += rest
    return frozenset(found)


def _select_whole_cores(layout: CpuLayout, need: int, free: frozenset[int], mine: frozenset[int]) -> frozenset[int]:
    """Whole cores of the one cache that suits best; empty where not one whole core is free and small enough."""
    by_cache: dict[Cache, list[int]] = {}
    for core in layout.whole_cores(sorted(free, key=layout.place.__getitem__)):
        threads = layout.cores[core]
        by_cache.setdefault(layout.cache[threads[0]], []).extend(threads)
    if not by_cache:
        return NO_CPUS
    in_node: Counter[int] = Counter()
    for (_socket, node, _l3), cpus in by_cache.items():
        in_node[node] += len(cpus)
    caches = {layout.cache[cpu] for cpu in mine}
    nodes = {node for _socket, node, _l3 in caches}
    sockets = {socket for socket, _node, _l3 in caches}

    def rank(cache: Cache) -> tuple[int | bool, ...]:
        socket, node, _l3 = cache
        size = len(by_cache[cache])
        fit = (0, size) if size >= need else (1, -size)
        return (
            cache not in caches, node not in nodes, socket not in sockets, in_node[node] < need, socket, node, *fit, *cache
        )  # fmt: skip

    taken: list[int] = []
    best = by_cache[min(by_cache, key=rank)]
    for core in dict.fromkeys(layout.core[cpu] for cpu in best):
        if len(taken) + len(layout.cores[core]) > need:
            break
        taken += layout.cores[core]
    return frozenset(taken)


def _select_single_threads(layout: CpuLayout, need: int, free: frozenset[int], mine: frozenset[int]) -> frozenset[int]:
    # From cores that are broken already before another one is broken, near what the asker has.
    whole = set(layout.whole_cores(free))
    caches = {layout.cache[cpu] for cpu in mine}
    nodes = {node for _socket, node, _l3 in caches}
    ranked = sorted(
        free,
        key=lambda cpu: (
            layout.core[cpu] in whole,
            layout.cache[cpu] not in caches,
            layout.cpu[cpu].numa not in nodes,
            layout.place[cpu],
        ),
    )
    return frozenset(ranked[:need])
