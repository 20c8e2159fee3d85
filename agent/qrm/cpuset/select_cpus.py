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
    retained: Collection[int] = NO_CPUS,
    used: Collection[int] = NO_CPUS,
) -> frozenset[int]:
    """Return `count` of the free CPUs, or all if there are fewer. `retained` are CPUs that the pool or container has
    already; `used` are those of other pools, selected last."""
    selected = _select_retained(layout, count, frozenset(retained) & frozenset(free))
    for tier in (frozenset(free) - frozenset(used), frozenset(free)):
        if len(selected) < count:
            selected |= _select_more(layout, count - len(selected), tier - selected, selected)
    return selected


def select_round_robin(
    layout: CpuLayout,
    count: int,
    free: Collection[int],
    retained: Collection[int] = NO_CPUS,
    used: Collection[int] = NO_CPUS,
) -> frozenset[int]:
    """Return `count` of the free CPUs, one of each NUMA node in turn, each on the core with the fewest selected so
    far. `retained` and `used` as for `select_cpus`."""
    free_by_node = {node: set(cpus) & set(free) for node, cpus in layout.numa.items()}
    count_by_core: Counter[Core] = Counter()
    selected: set[int] = set()
    while len(selected) < count and any(free_by_node.values()):
        for cpus in free_by_node.values():
            if cpus and len(selected) < count:
                cpu = min(
                    cpus, key=lambda cpu: (cpu not in retained, cpu in used, count_by_core[layout.core[cpu]], cpu)
                )
                cpus.remove(cpu)
                selected.add(cpu)
                count_by_core[layout.core[cpu]] += 1
    return frozenset(selected)


def select_evenly(layout: CpuLayout, count: int, free: Collection[int], nodes: Iterable[int]) -> frozenset[int]:
    """Return `count` CPUs, the same number on each NUMA node; the first nodes get one more for a remainder."""
    ordered = tuple(nodes)
    each, remainder = divmod(count, len(ordered))
    parts = [
        select_cpus(layout, each + (index < remainder), layout.on([node]) & frozenset(free))
        for index, node in enumerate(ordered)
    ]
    selected = NO_CPUS.union(*parts)
    return selected | select_cpus(layout, count - len(selected), layout.on(ordered) & frozenset(free) - selected)


def _select_retained(layout: CpuLayout, count: int, owned: frozenset[int]) -> frozenset[int]:
    # Give up half cores first, then CPUs away from the rest.
    if len(owned) <= count:
        return owned
    whole_cores = set(layout.whole_cores(owned))
    nodes = Counter(layout.cpu[cpu].numa for cpu in owned)
    caches = Counter(layout.cache[cpu] for cpu in owned)
    ranked = sorted(
        owned,
        key=lambda cpu: (
            layout.core[cpu] not in whole_cores,
            -nodes[layout.cpu[cpu].numa],
            layout.cpu[cpu].numa,
            -caches[layout.cache[cpu]],
            layout.place[cpu],
        ),
    )
    return frozenset(ranked[:count])


def _select_more(layout: CpuLayout, need: int, free: frozenset[int], owned: frozenset[int]) -> frozenset[int]:
    if len(free) <= need:
        return free
    selected = _select_siblings(layout, need, free, owned)
    while len(selected) < need:
        more = _select_whole_cores(layout, need - len(selected), free - selected, owned | selected)
        if not more:
            break
        selected |= more
    if len(selected) < need:
        selected |= _select_single_threads(layout, need - len(selected), free - selected, owned | selected)
    return selected


def _select_siblings(layout: CpuLayout, need: int, free: frozenset[int], owned: frozenset[int]) -> frozenset[int]:
    # Cores of which the pool or container has a part, and whose rest is free.
    siblings: list[int] = []
    for core in sorted({layout.core[cpu] for cpu in owned}):
        rest = [cpu for cpu in layout.cores[core] if cpu not in owned]
        if rest and len(siblings) + len(rest) <= need and free.issuperset(rest):
            siblings += rest
    return frozenset(siblings)


def _select_whole_cores(layout: CpuLayout, need: int, free: frozenset[int], owned: frozenset[int]) -> frozenset[int]:
    """Return whole cores of the best cache; empty if no whole core is free and small enough."""
    by_cache: dict[Cache, list[int]] = {}
    for core in layout.whole_cores(sorted(free, key=layout.place.__getitem__)):
        threads = layout.cores[core]
        by_cache.setdefault(layout.cache[threads[0]], []).extend(threads)
    if not by_cache:
        return NO_CPUS
    in_node: Counter[int] = Counter()
    for (_socket, node, _l3), cpus in by_cache.items():
        in_node[node] += len(cpus)
    caches = {layout.cache[cpu] for cpu in owned}
    nodes = {node for _socket, node, _l3 in caches}
    sockets = {socket for socket, _node, _l3 in caches}

    def rank(cache: Cache) -> tuple[int | bool, ...]:
        socket, node, _l3 = cache
        size = len(by_cache[cache])
        fit = (0, size) if size >= need else (1, -size)
        return (
            cache not in caches, node not in nodes, socket not in sockets, in_node[node] < need, socket, node, *fit, *cache
        )  # fmt: skip

    selected: list[int] = []
    best = by_cache[min(by_cache, key=rank)]
    for core in dict.fromkeys(layout.core[cpu] for cpu in best):
        if len(selected) + len(layout.cores[core]) > need:
            break
        selected += layout.cores[core]
    return frozenset(selected)


def _select_single_threads(layout: CpuLayout, need: int, free: frozenset[int], owned: frozenset[int]) -> frozenset[int]:
    # From partly used cores before splitting another one, near the owned CPUs.
    whole_cores = set(layout.whole_cores(free))
    caches = {layout.cache[cpu] for cpu in owned}
    nodes = {node for _socket, node, _l3 in caches}
    ranked = sorted(
        free,
        key=lambda cpu: (
            layout.core[cpu] in whole_cores,
            layout.cache[cpu] not in caches,
            layout.cpu[cpu].numa not in nodes,
            layout.place[cpu],
        ),
    )
    return frozenset(ranked[:need])
