"""How many CPUs each pool gets when nobody says so, or when what was said does not fit: Katalyst's pool sizing in QRM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.state import DEDICATED, FALLBACK, INTERRUPT, RECLAIM, RESERVE
from api.advice import UNBOUND, PoolSize
from api.sizes import in_proportion

Key = tuple[str, int]
"""A pool and its NUMA node, or UNBOUND."""
_NOT_SIZED = frozenset((RESERVE, INTERRUPT, DEDICATED, FALLBACK))


@dataclass(frozen=True)
class Room:
    """CPUs that pools can have: of each node that some pool is bound to, and of all others together."""

    bound: Mapping[int, int]
    unbound: int

    @property
    def total(self) -> int:
        return sum(self.bound.values()) + self.unbound


@dataclass(frozen=True)
class Want:
    """A pool with a size that fits."""

    pool: str
    numa: int
    cpus: int
    shared: bool = False
    """There are fewer CPUs than pools: each has all of them."""


def regulate(sizes: Mapping[Key, int], available: int) -> Mapping[Key, int] | None:
    """Sizes in proportion that add up to no more than `available`; each at least 1.

    Sizes that fit stay as they are. None where there are more pools than CPUs.
    """
    if len(sizes) > available:
        return None
    if not sizes or (sum(sizes.values()) <= available):
        return sizes
    return in_proportion(sizes, available)


def spread(total: int, nodes: Sequence[int]) -> Mapping[int, int]:
    """So many CPUs over NUMA nodes evenly, rounded up, at least one each."""
    return {node: max(ceil(total / len(nodes)), 1) for node in nodes}


def complete(
    sizes: Sequence[PoolSize],
    demand: Mapping[Key, float],
    room: Room,
    reserve: Mapping[int, int],
    config: CpuPlacementConfig,
) -> tuple[PoolSize, ...]:
    """The sizes that were given, and own ones for pools that pods are in but nobody has sized.

    `demand` is the sum of the requests of each pool; `reserve` what reclaimed pods keep of each NUMA node. With no size
    of any pool given, all are made here: requests, with the configured factor where bound, in proportion if they are too
    much, the rest to reclaim.
    """
    given = [size for size in sizes if size.pool not in _NOT_SIZED]
    known = {(size.pool, size.numa) for size in given if size.pool != RECLAIM}
    names = {pool for pool, _numa in known}
    missing = {
        (pool, numa): max(ceil(cores * (1.0 if numa == UNBOUND else config.numa_bound_factor)), 1)
        for (pool, numa), cores in sorted(demand.items())
        if (pool, numa) not in known and (numa != UNBOUND or pool not in names)
    }
    if not known:
        missing = _own(missing, room, reserve)
    made = [PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in missing.items()]
    if not any(size.pool == RECLAIM for size in given):
        made += _rest([*given, *made], room)
    return (*given, *made)


def fit(sizes: Sequence[PoolSize], room: Room) -> tuple[Want, ...]:
    """Sizes of online pools so that those of each node, and those of no node, have CPUs of their own as far as there are any.

    Where all is too much it is reclaim that gives way, but for one CPU in each place where it is to have some; its own
    sizes stay as they are, and it gets what is left.
    """
    wants: list[Want] = []
    left = room.total
    for node, available in room.bound.items():
        here = [size for size in sizes if size.numa == node]
        fitted, kept = _fit(here, available)
        wants += fitted
        left -= kept + (0 if any(want.shared for want in fitted) else sum(want.cpus for want in fitted))
    wants += _fit([size for size in sizes if size.numa not in room.bound], max(left, 0))[0]
    wants += [Want(size.pool, size.numa, size.cpus) for size in sizes if size.pool == RECLAIM and size.cpus > 0]
    return tuple(wants)


def _fit(sizes: Sequence[PoolSize], available: int) -> tuple[list[Want], int]:
    """Wants of the online pools, and how many CPUs reclaim keeps beside them at least."""
    wanted: dict[Key, int] = {}
    for size in sizes:
        if size.pool != RECLAIM:
            key = (size.pool, size.numa)
            wanted[key] = wanted.get(key, 0) + max(size.cpus, 1)
    lends = any(size.pool == RECLAIM and size.cpus > 0 for size in sizes)
    kept = 1 if lends and available > len(wanted) else 0
    regulated = regulate(wanted, available - kept)
    if regulated is None:
        return [Want(pool, numa, available, shared=True) for pool, numa in wanted], 0
    return [Want(pool, numa, cpus) for (pool, numa), cpus in regulated.items()], kept


def _own(wanted: Mapping[Key, int], room: Room, reserve: Mapping[int, int]) -> dict[Key, int]:
    """The wanted sizes, within what each scope has beyond reclaim's reserve."""
    kept = {node: min(reserve.get(node, 0), max(available - 1, 0)) for node, available in room.bound.items()}
    elsewhere = sum(cpus for node, cpus in reserve.items() if node not in room.bound)
    kept[UNBOUND] = min(elsewhere, max(room.unbound - 1, 0))
    result: dict[Key, int] = {}
    for scope in (*room.bound, UNBOUND):
        here = {key: cpus for key, cpus in wanted.items() if key[1] == scope}
        available = (room.unbound if scope == UNBOUND else room.bound[scope]) - kept[scope]
        result |= regulate(here, available) or here
    return result


def _rest(sizes: Sequence[PoolSize], room: Room) -> list[PoolSize]:
    made = []
    for node, available in (*room.bound.items(), (UNBOUND, room.unbound)):
        left = available - sum(size.cpus for size in sizes if size.numa == node)
        made.append(PoolSize(pool=RECLAIM, numa=node, cpus=max(left, 0)))
    return made
