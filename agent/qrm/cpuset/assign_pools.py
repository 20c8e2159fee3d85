"""Completes and fits the sizes of pools, and assigns CPUs to each pool. Pure.
Sizes are completed from requests where the advisor gives none, and regulated in proportion where they exceed the
node (Katalyst's pool sizing in QRM). Pools are disjoint except where a size declares an overlap, and are never
empty. Pools bound to a NUMA node select first, then unbound pools; `reclaim` gets what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.select_cpus import NO_CPUS, select_cpus, select_round_robin
from agent.qrm.cpuset.state import DEDICATED, FALLBACK, INTERRUPT, ISOLATION_PREFIX, RECLAIM, RESERVE
from agent.qrm.cpuset.topology_layout import CpuLayout
from api.advice import NOT_NUMA_BOUND, PoolSize, scale_proportionally

PoolKey = tuple[str, int]
"""Pool name and NUMA node, or NOT_NUMA_BOUND."""
_UNSIZED_POOLS = frozenset((RESERVE, INTERRUPT, DEDICATED, FALLBACK))


@dataclass(frozen=True)
class PoolCapacity:
    """CPUs available to pools: of each NUMA node with a bound pool, and of all other nodes together."""

    bound: Mapping[int, int]
    unbound: int

    @property
    def total(self) -> int:
        return sum(self.bound.values()) + self.unbound


@dataclass(frozen=True)
class SizedPool:
    """A pool with a size that fits."""

    pool: str
    numa: int
    cpus: int
    shared: bool = False
    """Whether there are fewer CPUs than pools, so that each pool has all of them."""


def scale_pool_sizes(sizes: Mapping[PoolKey, int], available: int) -> Mapping[PoolKey, int] | None:
    """Scale sizes in proportion to at most `available` CPUs; each at least 1. Sizes that fit stay unchanged. None if
    there are more pools than CPUs."""
    return scale_proportionally(sizes, min(sum(sizes.values()), available))


def spread_over_numa(total: int, nodes: Sequence[int]) -> Mapping[int, int]:
    """Split the CPUs evenly over NUMA nodes, rounded up, at least one each."""
    return {node: max(ceil(total / len(nodes)), 1) for node in nodes}


def complete_pool_sizes(
    sizes: Sequence[PoolSize],
    demand: Mapping[PoolKey, float],
    capacity: PoolCapacity,
    reserve: Mapping[int, int],
    config: CpuPlacementConfig,
) -> tuple[PoolSize, ...]:
    """Return the given sizes, and computed ones for pools with pods and without a size. `demand` is the sum of the
    requests of each pool; `reserve` is kept for reclaimed pods on each NUMA node. Without any given size, all are
    computed: requests, times the configured factor if bound, scaled down if they do not fit, and the rest for
    reclaim."""
    given = [size for size in sizes if size.pool not in _UNSIZED_POOLS]
    given_keys = {(size.pool, size.numa) for size in given if size.pool != RECLAIM}
    names = {pool for pool, _numa in given_keys}
    missing = {
        (pool, numa): max(ceil(cores * (1.0 if numa == NOT_NUMA_BOUND else config.numa_bound_factor)), 1)
        for (pool, numa), cores in sorted(demand.items())
        if (pool, numa) not in given_keys and (numa != NOT_NUMA_BOUND or pool not in names)
    }
    if not given_keys:
        missing = _sizes_within_reserve(missing, capacity, reserve)
    computed = [PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in missing.items()]
    if not any(size.pool == RECLAIM for size in given):
        computed += _remaining_to_reclaim([*given, *computed], capacity)
    return (*given, *computed)


def fit_pool_sizes(sizes: Sequence[PoolSize], capacity: PoolCapacity) -> tuple[SizedPool, ...]:
    """Fit the online pools of each scope (a NUMA node, or the unbound rest) to its CPUs. Reclaim yields, except one
    CPU in each scope where it has a size; its own sizes are not scaled, because it gets what is left."""
    sized_pools: list[SizedPool] = []
    left = capacity.total
    reclaim_left = 0
    for node, available in capacity.bound.items():
        here = [size for size in sizes if size.numa == node]
        fitted, reclaim_cpus = _fit_scope(here, available)
        sized_pools += fitted
        left -= 0 if any(pool.shared for pool in fitted) else sum(pool.cpus for pool in fitted)
        reclaim_left += reclaim_cpus
    unbound = [size for size in sizes if size.numa not in capacity.bound]
    # On bound nodes too, reclaim yields where an unbound pool would have no CPU: the unbound pools would share what is left.
    unbound_pools = len({(size.pool, size.numa) for size in unbound if size.pool != RECLAIM})
    reclaim_left = min(reclaim_left, max(left - unbound_pools, 0))
    sized_pools += _fit_scope(unbound, max(left - reclaim_left, 0))[0]
    sized_pools += [
        SizedPool(size.pool, size.numa, size.cpus) for size in sizes if size.pool == RECLAIM and size.cpus > 0
    ]
    return tuple(sized_pools)


def _fit_scope(sizes: Sequence[PoolSize], available: int) -> tuple[list[SizedPool], int]:
    """Return the sized online pools of one scope, and the CPUs that reclaim keeps there."""
    online_sizes: dict[PoolKey, int] = {}
    for size in sizes:
        if size.pool != RECLAIM:
            key = (size.pool, size.numa)
            online_sizes[key] = online_sizes.get(key, 0) + max(size.cpus, 1)
    has_reclaim = any(size.pool == RECLAIM and size.cpus > 0 for size in sizes)
    reclaim_cpus = 1 if has_reclaim and available > len(online_sizes) else 0
    regulated = scale_pool_sizes(online_sizes, available - reclaim_cpus)
    if regulated is None:
        return [SizedPool(pool, numa, available, shared=True) for pool, numa in online_sizes], 0
    return [SizedPool(pool, numa, cpus) for (pool, numa), cpus in regulated.items()], reclaim_cpus


def _sizes_within_reserve(
    sizes: Mapping[PoolKey, int], capacity: PoolCapacity, reserve: Mapping[int, int]
) -> dict[PoolKey, int]:
    """Scale the sizes to what each scope has beyond the reserve of reclaim."""
    reserved = {node: min(reserve.get(node, 0), max(available - 1, 0)) for node, available in capacity.bound.items()}
    elsewhere = sum(cpus for node, cpus in reserve.items() if node not in capacity.bound)
    reserved[NOT_NUMA_BOUND] = min(elsewhere, max(capacity.unbound - 1, 0))
    result: dict[PoolKey, int] = {}
    for scope in (*capacity.bound, NOT_NUMA_BOUND):
        here = {key: cpus for key, cpus in sizes.items() if key[1] == scope}
        available = (capacity.unbound if scope == NOT_NUMA_BOUND else capacity.bound[scope]) - reserved[scope]
        result |= scale_pool_sizes(here, available) or here
    return result


def _remaining_to_reclaim(sizes: Sequence[PoolSize], capacity: PoolCapacity) -> list[PoolSize]:
    remaining = []
    for node, available in (*capacity.bound.items(), (NOT_NUMA_BOUND, capacity.unbound)):
        left = available - sum(size.cpus for size in sizes if size.numa == node)
        remaining.append(PoolSize(pool=RECLAIM, numa=node, cpus=max(left, 0)))
    return remaining


@dataclass(frozen=True)
class AssignableCpus:
    """CPUs that pools are assigned from."""

    layout: CpuLayout
    free: frozenset[int]
    """CPUs that no dedicated container has."""
    usable: frozenset[int]
    """The free CPUs and those of dedicated containers; never empty."""
    before: Mapping[str, frozenset[int]]
    """CPUs that each pool had."""
    bound: frozenset[int]
    """NUMA nodes that pools are bound to."""
    dedicated: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """CPUs of dedicated pods by pod key, for sizes that overlap them with reclaim."""
    shared_reclaim_cpus: int = 1
    """Number of CPUs that reclaim shares with other pools if it has none of its own."""
    owned: frozenset[int] = NO_CPUS
    """CPUs of NUMA nodes that one pod owns."""

    @property
    def fallback_cpus(self) -> frozenset[int]:
        """CPUs that all pods share if there is nothing to divide."""
        return self.free or self.usable


def assign_pools(
    sized_pools: Sequence[SizedPool], sizes: Sequence[PoolSize], assignable: AssignableCpus
) -> dict[str, frozenset[int]]:
    """Return the CPUs of every pool, always including reclaim."""
    pools: dict[str, frozenset[int]] = {}
    online = [pool for pool in sized_pools if pool.pool != RECLAIM]
    for node in sorted({pool.numa for pool in online if pool.numa != NOT_NUMA_BOUND}):
        here = assignable.layout.on([node]) & assignable.free
        used = NO_CPUS.union(*(assignable.before.get(pool.pool, NO_CPUS) for pool in online if pool.numa != node))
        _assign_online_pools([pool for pool in online if pool.numa == node], here, used, assignable, pools)
    claimed = NO_CPUS.union(*pools.values())
    unbound = [pool for pool in online if pool.numa == NOT_NUMA_BOUND]
    left = assignable.free - claimed
    preferred = left - assignable.layout.on(assignable.bound)
    enough = len(preferred) >= sum(pool.cpus for pool in unbound)
    _assign_online_pools(
        unbound, preferred if enough else left, NO_CPUS if enough else left - preferred, assignable, pools
    )
    reclaim = _assign_reclaim_pool(
        sized_pools, sizes, {name: cpus or assignable.fallback_cpus for name, cpus in pools.items()}, assignable
    )
    overlapping = {name for size in sizes if size.pool == RECLAIM for name in size.overlap}
    # Online pools on the CPUs of a pod that owns the whole node avoid the CPUs that it shares with reclaim.
    apart = assignable.fallback_cpus if assignable.free else (assignable.usable - reclaim or assignable.usable)
    assigned = {
        name: cpus or (assignable.fallback_cpus if name in overlapping else apart) for name, cpus in pools.items()
    }
    return {**assigned, RECLAIM: reclaim}


def _assign_online_pools(
    sized_pools: Sequence[SizedPool],
    candidates: frozenset[int],
    used: frozenset[int],
    assignable: AssignableCpus,
    pools: dict[str, frozenset[int]],
) -> None:
    """Assign CPUs of `candidates` to each pool, those in `used` last."""
    retained: dict[str, frozenset[int]] = {}
    remaining = candidates
    for pool in sorted(sized_pools, key=lambda pool: (pool.pool, pool.numa)):
        if pool.shared:
            pools[pool.pool] = pools.get(pool.pool, NO_CPUS) | candidates
            continue
        retained[pool.pool] = select_cpus(
            assignable.layout, pool.cpus, assignable.before.get(pool.pool, NO_CPUS) & remaining
        )
        remaining -= retained[pool.pool]
    for pool in sorted(sized_pools, key=lambda pool: (pool.pool, pool.numa)):
        if not pool.shared:
            own = retained[pool.pool]
            others = (used | assignable.before.get(RECLAIM, NO_CPUS)) - own
            selected = select_cpus(assignable.layout, pool.cpus, remaining | own, own, others)
            remaining -= selected
            pools[pool.pool] = pools.get(pool.pool, NO_CPUS) | selected


def _assign_reclaim_pool(
    sized_pools: Sequence[SizedPool],
    sizes: Sequence[PoolSize],
    pools: Mapping[str, frozenset[int]],
    assignable: AssignableCpus,
) -> frozenset[int]:
    layout, before = assignable.layout, assignable.before.get(RECLAIM, NO_CPUS)
    remaining = assignable.free - NO_CPUS.union(*pools.values())
    result = NO_CPUS
    for pool in sorted((pool for pool in sized_pools if pool.pool == RECLAIM), key=lambda pool: -pool.numa):
        candidates = remaining if pool.numa == NOT_NUMA_BOUND else remaining & layout.on([pool.numa])
        on_bound_nodes = layout.on(assignable.bound) if pool.numa == NOT_NUMA_BOUND else NO_CPUS
        selected = select_cpus(layout, pool.cpus, candidates, before, on_bound_nodes - before)
        owned_cpus = assignable.owned & layout.on([pool.numa])
        if len(selected) < pool.cpus and pool.numa != NOT_NUMA_BOUND and owned_cpus:
            # One pod owns the NUMA node, so its own CPUs are reclaimed.
            selected |= select_cpus(layout, pool.cpus - len(selected), owned_cpus, before)
        result |= selected
        remaining -= selected
    for size in sizes:
        if size.pool == RECLAIM:
            for name, count in sorted(size.overlap.items()):
                result |= select_cpus(
                    layout, count, _shareable_cpus(name, size.numa, pools, assignable) - result, before
                )
    if not result:
        # Reclaimed pods always get CPUs: if need be those of online pods, where priority makes them yield.
        isolated = NO_CPUS.union(*(cpus for name, cpus in pools.items() if name.startswith(ISOLATION_PREFIX)))
        result = select_round_robin(
            layout, assignable.shared_reclaim_cpus, assignable.free - isolated or assignable.fallback_cpus, before
        )
    return result


def _shareable_cpus(
    name: str, numa: int, pools: Mapping[str, frozenset[int]], assignable: AssignableCpus
) -> frozenset[int]:
    """Return the CPUs of the pool or dedicated pod that an overlap names, with or without a NUMA suffix."""
    base, _dash, node = name.removeprefix(f"{DEDICATED}-").rpartition("-NUMA")
    key = base if node.isdigit() else name.removeprefix(f"{DEDICATED}-")
    cpus = pools.get(name) or assignable.dedicated.get(key, NO_CPUS)
    nodes = [int(node)] if node.isdigit() and name not in pools else [numa] if numa != NOT_NUMA_BOUND else None
    return cpus if nodes is None else cpus & assignable.layout.on(nodes)
