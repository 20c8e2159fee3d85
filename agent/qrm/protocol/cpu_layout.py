"""Our advisor's sizes as somebody else's CPU plugin can carry them out: nothing beyond what it may choose from. Pure.

It takes the CPUs of an unbound pool from NUMA nodes that nobody is bound to, and those of a bound one from its node, neither
from what is reserved or dedicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from agent.qrm.placing.state import DEDICATED, FALLBACK, INTERRUPT, RECLAIM, RESERVE
from agent.qrm.protocol.common import Unusable
from api.advice import UNBOUND, PoolSize

Lent = dict[tuple[str, int], int]
"""CPUs that reclaimed pods may share, by lender and NUMA node."""


class Layout(msgspec.Struct, frozen=True):
    """Sizes of online pools and of reclaim, none of no CPUs, and what reclaim shares of the former."""

    online: tuple[PoolSize, ...]
    reclaim: tuple[PoolSize, ...]
    lent: Lent


def lay_out(sizes: Sequence[PoolSize], usable: Mapping[int, int], dedicated: Mapping[int, int]) -> Layout:
    """`usable` are the CPUs of each NUMA node that are neither reserved nor for interrupts, `dedicated` those of containers.

    What is too much is taken from reclaimed pods, whatever our own settings say is reserved. Raises Unusable where online
    pools alone are too much.
    """
    lent = lent_of(sizes)
    online = tuple(size for size in sizes if _sized(size.pool) and size.cpus > 0)
    reclaim = tuple(size for size in sizes if size.pool == RECLAIM)
    taken = {numa for numa, cpus in dedicated.items() if cpus}
    bound = {size.numa for size in online if size.numa != UNBOUND} | taken
    room = {numa: cpus - dedicated.get(numa, 0) for numa, cpus in usable.items()}
    if set(usable) <= bound and any(size.numa == UNBOUND for size in online):
        online = _over_nodes(online, reclaim, room, lent)
    fitted = list(reclaim)
    for scope in (*sorted(usable), UNBOUND):
        free = room[scope] if scope != UNBOUND else _unbound(room, bound, fitted)
        fitted = _within(scope, free, online, fitted)
    return Layout(online, tuple(fitted), lent)


def lent_of(sizes: Iterable[PoolSize]) -> Lent:
    """What sizes say that reclaimed pods may share."""
    found: Lent = {}
    for size in sizes:
        if size.pool == RECLAIM:
            for lender, cpus in size.overlap.items():
                plain, _dash, node = lender.rpartition("-NUMA")
                # A dedicated pod may be named with the node that it is lent from.
                own = lender.startswith(f"{DEDICATED}-") and node.isdigit()
                key = (plain, int(node)) if own else (lender, size.numa)
                found[key] = found.get(key, 0) + cpus
    return found


def _sized(pool: str) -> bool:
    return pool not in (RECLAIM, RESERVE, INTERRUPT, DEDICATED, FALLBACK) and not pool.startswith(f"{DEDICATED}-")


def _over_nodes(
    online: Sequence[PoolSize], reclaim: Sequence[PoolSize], room: Mapping[int, int], lent: Lent
) -> tuple[PoolSize, ...]:
    """Where every NUMA node has pods that are bound to it, pools of no node are laid over them, where there is most room
    first, and what they lend with them."""
    laid = [size for size in online if size.numa != UNBOUND]
    left_on = {
        numa: cpus - sum(size.cpus for size in (*laid, *reclaim) if size.numa == numa) for numa, cpus in room.items()
    }
    for size in (size for size in online if size.numa == UNBOUND):
        left, shared = size.cpus, lent.pop((size.pool, UNBOUND), 0)
        while left > 0:
            numa = max(left_on, key=lambda numa: (left_on[numa], -numa))
            # Where nothing is left reclaimed pods give way.
            part = min(left, max(left_on[numa], 1))
            laid.append(msgspec.structs.replace(size, numa=numa, cpus=part))
            left_on[numa], left = left_on[numa] - part, left - part
            if share := min(shared, part):
                lent[size.pool, numa] = lent.get((size.pool, numa), 0) + share
                shared -= share
    merged: dict[tuple[str, int], int] = {}
    for size in laid:
        merged[size.pool, size.numa] = merged.get((size.pool, size.numa), 0) + size.cpus
    return tuple(PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in merged.items())


def _unbound(room: Mapping[int, int], bound: Iterable[int], reclaim: Sequence[PoolSize]) -> int:
    """CPUs of the nodes that nobody is bound to, without what reclaimed pods have there in particular."""
    free = set(room).difference(bound)
    return sum(room[numa] for numa in free) - sum(size.cpus for size in reclaim if size.numa in free)


def _within(scope: int, free: int, online: Sequence[PoolSize], reclaim: Sequence[PoolSize]) -> list[PoolSize]:
    """The sizes of reclaim, with less of this scope where all is too much."""
    asked = sum(size.cpus for size in online if size.numa == scope)
    if asked > max(free, 0):
        where = "beside bound pods" if scope == UNBOUND else f"on NUMA node {scope}"
        raise Unusable(
            f"the advisor gives online pools {asked} CPUs {where}, where the plugin has {max(free, 0)} for them"
        )
    left, fitted = free - asked, []
    for size in reclaim:
        if size.numa == scope:
            size = msgspec.structs.replace(size, cpus=min(size.cpus, left))  # noqa: PLW2901 - the same, but smaller
            left -= size.cpus
        fitted.append(size)
    return fitted
