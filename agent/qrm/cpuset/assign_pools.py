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
"""A pool and its NUMA node, or UNBOUND."""
_UNSIZED_POOLS = frozenset((RESERVE, INTERRUPT, DEDICATED, FALLBACK))


@dataclass(frozen=True)
class PoolCapacity:
    """CPUs that pools can have: of each node that some pool is bound to, and of all others together."""

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
    """There are fewer CPUs than pools: each has all of them."""


def scale_pool_sizes(sizes: Mapping[PoolKey, int], available: int) -> Mapping[PoolKey, int] | None:
    """Sizes in proportion that add up to no more than `available`; each at least 1.

    Sizes that fit stay as they are. None where there are more pools than CPUs.
    """
    if len(sizes) > available:
        return None
    if not sizes or (sum(sizes.values()) <= available):
        return sizes
    return scale_proportionally(sizes, available)


def spread_over_numa(total: int, nodes: Sequence[int]) -> Mapping[int, int]:
    """So many CPUs over NUMA nodes evenly, rounded up, at least one each."""
    return {node: max(ceil(total / len(nodes)), 1) for node in nodes}


def complete_pool_sizes(
    sizes: Sequence[PoolSize],
    demand: Mapping[PoolKey, float],
    room: PoolCapacity,
    reserve: Mapping[int, int],
    config: CpuPlacementConfig,
) -> tuple[PoolSize, ...]:
    """The sizes that were given, and own ones for pools that pods are in but nobody has sized.

    `demand` is the sum of the requests of each pool; `reserve` what reclaimed pods keep of each NUMA node. With no size
    of any pool given, all are made here: requests, with the configured factor where bound, in proportion if they are too
    much, the rest to reclaim.
    """
    given = [size for size in sizes if size.pool not in _UNSIZED_POOLS]
    known = {(size.pool, size.numa) for size in given if size.pool != RECLAIM}
    names = {pool for pool, _numa in known}
    missing = {
        (pool, numa): max(ceil(cores * (1.0 if numa == NOT_NUMA_BOUND else config.numa_bound_factor)), 1)
        for (pool, numa), cores in sorted(demand.items())
        if (pool, numa) not in known and (numa != NOT_NUMA_BOUND or pool not in names)
    }
    if not known:
        missing = _sizes_within_reserve(missing, room, reserve)
    made = [PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in missing.items()]
    if not any(size.pool == RECLAIM for size in given):
        made += _remaining_to_reclaim([*given, *made], room)
    return (*given, *made)


def fit_pool_sizes(sizes: Sequence[PoolSize], room: PoolCapacity) -> tuple[SizedPool, ...]:
    """Sizes of online pools so that those of each node, and those of no node, have CPUs of their own as far as there are any.

    Where all is too much it is reclaim that gives way, but for one CPU in each place where it is to have some; its own
    sizes stay as they are, and it gets what is left.
    """
    wants: list[SizedPool] = []
    left = room.total
    for node, available in room.bound.items():
        here = [size for size in sizes if size.numa == node]
        fitted, kept = _fit_scope(here, available)
        wants += fitted
        left -= kept + (0 if any(want.shared for want in fitted) else sum(want.cpus for want in fitted))
    wants += _fit_scope([size for size in sizes if size.numa not in room.bound], max(left, 0))[0]
    wants += [SizedPool(size.pool, size.numa, size.cpus) for size in sizes if size.pool == RECLAIM and size.cpus > 0]
    return tuple(wants)


def _fit_scope(sizes: Sequence[PoolSize], available: int) -> tuple[list[SizedPool], int]:
    """Wants of the online pools, and how many CPUs reclaim keeps beside them at least."""
    wanted: dict[PoolKey, int] = {}
    for size in sizes:
        if size.pool != RECLAIM:
            key = (size.pool, size.numa)
            wanted[key] = wanted.get(key, 0) + max(size.cpus, 1)
    lends = any(size.pool == RECLAIM and size.cpus > 0 for size in sizes)
    kept = 1 if lends and available > len(wanted) else 0
    regulated = scale_pool_sizes(wanted, available - kept)
    if regulated is None:
        return [SizedPool(pool, numa, available, shared=True) for pool, numa in wanted], 0
    return [SizedPool(pool, numa, cpus) for (pool, numa), cpus in regulated.items()], kept


def _sizes_within_reserve(
    wanted: Mapping[PoolKey, int], room: PoolCapacity, reserve: Mapping[int, int]
) -> dict[PoolKey, int]:
    """The wanted sizes, within what each scope has beyond reclaim's reserve."""
    kept = {node: min(reserve.get(node, 0), max(available - 1, 0)) for node, available in room.bound.items()}
    elsewhere = sum(cpus for node, cpus in reserve.items() if node not in room.bound)
    kept[NOT_NUMA_BOUND] = min(elsewhere, max(room.unbound - 1, 0))
    result: dict[PoolKey, int] = {}
    for scope in (*room.bound, NOT_NUMA_BOUND):
        here = {key: cpus for key, cpus in wanted.items() if key[1] == scope}
        available = (room.unbound if scope == NOT_NUMA_BOUND else room.bound[scope]) - kept[scope]
        result |= scale_pool_sizes(here, available) or here
    return result


def _remaining_to_reclaim(sizes: Sequence[PoolSize], room: PoolCapacity) -> list[PoolSize]:
    made = []
    for node, available in (*room.bound.items(), (NOT_NUMA_BOUND, room.unbound)):
        left = available - sum(size.cpus for size in sizes if size.numa == node)
        made.append(PoolSize(pool=RECLAIM, numa=node, cpus=max(left, 0)))
    return made


@dataclass(frozen=True)
class AssignableCpus:
    """What pools are cut from."""

    layout: CpuLayout
    free: frozenset[int]
    """CPUs that no dedicated container has."""
    usable: frozenset[int]
    """Those with theirs; never empty."""
    before: Mapping[str, frozenset[int]]
    """What each pool had."""
    bound: frozenset[int]
    """NUMA nodes that pools are bound to."""
    dedicated: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """CPUs of dedicated pods, by pod key, for sizes that let reclaim share them."""
    least: int = 1
    """CPUs that reclaim shares with others where it has none of its own."""
    owned: frozenset[int] = NO_CPUS
    """CPUs of NUMA nodes that one pod has for itself."""

    @property
    def fallback_cpus(self) -> frozenset[int]:
        """Where there is nothing to divide, all pods share."""
        return self.free or self.usable


def assign_pools(
    wants: Sequence[SizedPool], sizes: Sequence[PoolSize], ground: AssignableCpus
) -> dict[str, frozenset[int]]:
    """CPUs of every pool, reclaim among them always."""
    pools: dict[str, frozenset[int]] = {}
    online = [want for want in wants if want.pool != RECLAIM]
    for node in sorted({want.numa for want in online if want.numa != NOT_NUMA_BOUND}):
        here = ground.layout.on([node]) & ground.free
        used = NO_CPUS.union(*(ground.before.get(want.pool, NO_CPUS) for want in online if want.numa != node))
        _assign_online_pools([want for want in online if want.numa == node], here, used, ground, pools)
    claimed = NO_CPUS.union(*pools.values())
    unbound = [want for want in online if want.numa == NOT_NUMA_BOUND]
    left = ground.free - claimed
    first = left - ground.layout.on(ground.bound)
    enough = len(first) >= sum(want.cpus for want in unbound)
    _assign_online_pools(unbound, first if enough else left, NO_CPUS if enough else left - first, ground, pools)
    reclaim = _assign_reclaim_pool(
        wants, sizes, {pool: cpus or ground.fallback_cpus for pool, cpus in pools.items()}, ground
    )
    overlaid = {name for size in sizes if size.pool == RECLAIM for name in size.overlap}
    # Who has to be on the CPUs of a pod that owns them all keeps off those that it lends, where pools are kept apart.
    apart = ground.fallback_cpus if ground.free else (ground.usable - reclaim or ground.usable)
    given = {pool: cpus or (ground.fallback_cpus if pool in overlaid else apart) for pool, cpus in pools.items()}
    return {**given, RECLAIM: reclaim}


def _assign_online_pools(
    wants: Sequence[SizedPool],
    here: frozenset[int],
    used: frozenset[int],
    ground: AssignableCpus,
    pools: dict[str, frozenset[int]],
) -> None:
    """Give each of these pools its CPUs out of `here`; `used` are those to be taken last."""
    kept: dict[str, frozenset[int]] = {}
    left = here
    for want in sorted(wants, key=lambda want: (want.pool, want.numa)):
        if want.shared:
            pools[want.pool] = pools.get(want.pool, NO_CPUS) | here
            continue
        kept[want.pool] = select_cpus(ground.layout, want.cpus, ground.before.get(want.pool, NO_CPUS) & left)
        left -= kept[want.pool]
    for want in sorted(wants, key=lambda want: (want.pool, want.numa)):
        if not want.shared:
            mine = kept[want.pool]
            others = (used | ground.before.get(RECLAIM, NO_CPUS)) - mine
            chosen = select_cpus(ground.layout, want.cpus, left | mine, mine, others)
            left -= chosen
            pools[want.pool] = pools.get(want.pool, NO_CPUS) | chosen


def _assign_reclaim_pool(
    wants: Sequence[SizedPool], sizes: Sequence[PoolSize], pools: Mapping[str, frozenset[int]], ground: AssignableCpus
) -> frozenset[int]:
    layout, before = ground.layout, ground.before.get(RECLAIM, NO_CPUS)
    left = ground.free - NO_CPUS.union(*pools.values())
    chosen = NO_CPUS
    for want in sorted((want for want in wants if want.pool == RECLAIM), key=lambda want: -want.numa):
        here = left if want.numa == NOT_NUMA_BOUND else left & layout.on([want.numa])
        far = layout.on(ground.bound) if want.numa == NOT_NUMA_BOUND else NO_CPUS
        mine = select_cpus(layout, want.cpus, here, before, far - before)
        owners = ground.owned & layout.on([want.numa])
        if len(mine) < want.cpus and want.numa != NOT_NUMA_BOUND and owners:
            # The node belongs to one pod: what is lent there are its own CPUs.
            mine |= select_cpus(layout, want.cpus - len(mine), owners, before)
        chosen |= mine
        left -= mine
    for size in sizes:
        if size.pool == RECLAIM:
            for name, count in sorted(size.overlap.items()):
                chosen |= select_cpus(layout, count, _lending_cpus(name, size.numa, pools, ground) - chosen, before)
    if not chosen:
        # Reclaimed pods always have somewhere to run: beside online pods, where priority holds them back.
        apart = NO_CPUS.union(*(cpus for name, cpus in pools.items() if name.startswith(ISOLATION_PREFIX)))
        chosen = select_round_robin(layout, ground.least, ground.free - apart or ground.fallback_cpus, before)
    return chosen


def _lending_cpus(name: str, numa: int, pools: Mapping[str, frozenset[int]], ground: AssignableCpus) -> frozenset[int]:
    """CPUs of the pool, or of the dedicated pod, of that name, with or without its node."""
    plain, _dash, node = name.removeprefix(f"{DEDICATED}-").rpartition("-NUMA")
    key = plain if node.isdigit() else name.removeprefix(f"{DEDICATED}-")
    cpus = pools.get(name) or ground.dedicated.get(key, NO_CPUS)
    nodes = [int(node)] if node.isdigit() and name not in pools else [numa] if numa != NOT_NUMA_BOUND else None
    return cpus if nodes is None else cpus & ground.layout.on(nodes)
