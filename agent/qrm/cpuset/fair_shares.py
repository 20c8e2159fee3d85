"""Protects the CPU requests of pods: a named pool has at most the requests of its pods, and a shared pool at least those of its
own. Pure. The order in which pods arrive does not matter, because only their requests count.

The API server and the kubelet accept pods while their requests fit on the node, so requests are what each tenant was
granted. What an annotation adds to the requests (whole CPUs for a fraction, a named pool) comes from CPUs that no pod requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil

import msgspec

from agent.qrm.cpuset.assign_pools import PoolCapacity, PoolKey, SizedPool
from agent.qrm.cpuset.select_cpus import NO_CPUS, select_cpus
from agent.qrm.cpuset.state import ISOLATION_PREFIX, RECLAIM, SHARE
from agent.qrm.cpuset.topology_layout import CpuLayout
from api.advice import NOT_NUMA_BOUND, PoolSize
from api.pod import Pod


def ceil_cores(cores: float) -> int:
    """Return the number of whole CPUs that hold these cores; rounded first, because 0.1 + 0.2 is more than 0.3."""
    return ceil(round(cores, 6))


def requested_pod_cores(pod: Pod) -> float:
    """Return the CPU requests of all containers of an online pod; a container without one requests nothing."""
    return sum(container.cpu_request_cores or 0.0 for container in pod.containers)


def limit_own_pools(sizes: Sequence[PoolSize], requests: Mapping[PoolKey, float]) -> tuple[PoolSize, ...]:
    """Return the sizes with each named pool limited to the requests of its pods. The CPUs that it loses go to the share pool of
    the same NUMA node, or to reclaim if that node has none."""
    limited: list[PoolSize] = []
    freed: dict[int, int] = {}
    for size in sizes:
        cores = requests.get((size.pool, size.numa)) if is_named_pool(size.pool) else None
        cpus = size.cpus if cores is None else min(size.cpus, max(ceil_cores(cores), 1))
        freed[size.numa] = freed.get(size.numa, 0) + size.cpus - cpus
        limited.append(msgspec.structs.replace(size, cpus=cpus))
    for numa, cpus in freed.items():
        share = SHARE if numa == NOT_NUMA_BOUND else f"{SHARE}-NUMA{numa}"
        for name in (share, RECLAIM):
            index = next((i for i, size in enumerate(limited) if (size.pool, size.numa) == (name, numa)), None)
            if index is not None:
                limited[index] = msgspec.structs.replace(limited[index], cpus=limited[index].cpus + cpus)
                break
    return tuple(limited)


def is_named_pool(pool: str) -> bool:
    """Return whether pods gave the pool its name by `cpuset_pool`."""
    return (
        pool.rpartition("-NUMA")[0] != SHARE and pool not in (SHARE, RECLAIM) and not pool.startswith(ISOLATION_PREFIX)
    )


def min_pool_sizes(
    sized_pools: Sequence[SizedPool],
    requests: Mapping[PoolKey, float],
    capacity: PoolCapacity,
    advised: Collection[PoolKey],
) -> Mapping[PoolKey, int]:
    """Return the CPUs of each pool that hold the requests of its pods.

    An advisor lends idle CPUs of pools to reclaimed pods and returns them on demand. A pool with an `advised` size may
    therefore be smaller, if reclaim has the missing CPUs where the pool can grow: on its NUMA node, or on those without
    bound pods.
    """
    min_sizes = {_sized_key(key, sized_pools): ceil_cores(cores) for key, cores in requests.items()}
    sizes = {(pool.pool, pool.numa): pool.cpus for pool in sized_pools if pool.pool != RECLAIM}
    for numa in (*capacity.bound, NOT_NUMA_BOUND):
        available = capacity.unbound if numa == NOT_NUMA_BOUND else capacity.bound[numa]
        here = [key for key in min_sizes if key[1] == numa]
        lendable = available - sum(cpus for key, cpus in sizes.items() if key[1] == numa)
        if sum(max(min_sizes[key] - sizes.get(key, 0), 0) for key in here) <= lendable:
            min_sizes |= {key: min(min_sizes[key], sizes[key]) for key in here if key in advised and key in sizes}
    return min_sizes


def raise_to_requests(
    sized_pools: Sequence[SizedPool], min_sizes: Mapping[PoolKey, int], capacity: PoolCapacity, lendable: int
) -> tuple[tuple[SizedPool, ...], Mapping[PoolKey, int]]:
    """Return the pools with at least these sizes. The CPUs come from pools that have more, and from reclaim, which retains up
    to `lendable` of the missing CPUs.

    Also returns the sizes that cannot be met because they, rounded up to whole CPUs by pool, together exceed the CPUs.
    Then the pools are unchanged.
    """
    sizes = {(pool.pool, pool.numa): pool.cpus for pool in sized_pools if pool.pool != RECLAIM}
    if all(sizes.get(key, 0) >= cpus for key, cpus in min_sizes.items()):
        return tuple(sized_pools), {}
    if any(pool.shared for pool in sized_pools):
        return tuple(sized_pools), min_sizes
    sizes |= {key: max(cpus, sizes.get(key, 0)) for key, cpus in min_sizes.items() if cpus}
    for numa, available in capacity.bound.items():
        _shrink_to_fit(sizes, [key for key in sizes if key[1] == numa], available, min_sizes)
    _shrink_to_fit(sizes, list(sizes), capacity.total - lendable, min_sizes)
    for _ in range(min(sum(sizes.values()) - capacity.total + lendable, lendable)):
        largest = max(sizes, key=lambda key: (sizes[key], key))
        sizes[largest] = max(sizes[largest] - 1, 1)
    fits = all(
        sum(cpus for key, cpus in sizes.items() if key[1] == numa) <= available
        for numa, available in capacity.bound.items()
    )
    if not fits or sum(sizes.values()) > capacity.total - lendable:
        return tuple(sized_pools), min_sizes
    online = [SizedPool(pool, numa, cpus) for (pool, numa), cpus in sizes.items()]
    return (*online, *(pool for pool in sized_pools if pool.pool == RECLAIM)), {}


def share_missing_cpus(
    pools: Mapping[str, frozenset[int]], min_sizes: Mapping[PoolKey, int], layout: CpuLayout, free: frozenset[int]
) -> dict[str, frozenset[int]]:
    """Return the pools after those with fewer CPUs than these sizes have received CPUs of other pools that are in `free`."""
    result = dict(pools)
    for (pool, numa), cpus in sorted(min_sizes.items()):
        own = result.get(pool, NO_CPUS)
        if pool in result and len(own) < cpus:
            candidates = free if numa == NOT_NUMA_BOUND else free & layout.on([numa])
            result[pool] = select_cpus(layout, cpus, candidates | own, own, pools[RECLAIM])
    return result


def _sized_key(key: PoolKey, sized_pools: Sequence[SizedPool]) -> PoolKey:
    """Return the key under which the pool has a size: the pool of an offline NUMA node is no longer bound."""
    keys = [(pool.pool, pool.numa) for pool in sized_pools if pool.pool == key[0]]
    return key if key in keys or len(keys) != 1 else keys[0]


def _shrink_to_fit(
    sizes: dict[PoolKey, int], keys: Sequence[PoolKey], available: int, min_sizes: Mapping[PoolKey, int]
) -> None:
    """Take CPUs one by one from the pool with most above its requests until all fit, or no pool has more."""

    def excess(key: PoolKey) -> int:
        return sizes[key] - max(min_sizes.get(key, 0), 1)

    for _ in range(sum(sizes[key] for key in keys) - available):
        largest = max(keys, key=lambda key: (excess(key), key))
        if excess(largest) <= 0:
            return
        sizes[largest] -= 1
