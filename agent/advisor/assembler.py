"""From what each region asks for to the sizes of pools: Katalyst's assembler `common`, NUMA node by NUMA node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from agent.advisor.pool_sizes import Regulation, regulate_overlap, regulate_pool_sizes
from agent.advisor.regions import Node
from api.advice import UNBOUND, PoolSize, Region, RegionKind

RECLAIM_POOL = "reclaim"


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What one region asks for, in CPUs."""

    region: Region
    requirement: int = 1
    """What it needs, whatever else may be lent."""
    request: int = 1
    """What its pods asked for; its size where nothing is lent of it."""
    upper: int = 1
    """Of a pod that is kept apart: its size where there is room,"""
    lower: int = 1
    """and where there is not."""
    quota: float | None = None
    """What reclaimed pods may use at most, where a policy says so."""

    @property
    def need(self) -> int:
        return self.requirement if self.region.reclaimable else self.request


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """How the node is shared out."""

    enable_reclaim: bool = True
    overlap: bool = False
    quota: bool = False


class Assembled(NamedTuple):
    """Sizes of all pools, those that got less than they asked for, and what each region has."""

    sizes: tuple[PoolSize, ...]
    throttled: frozenset[str]
    """Names of regions."""
    granted: dict[str, int]
    """CPUs by name of region."""
    lent: dict[str, int]
    """How many of those reclaimed pods may run on too."""


class Group(NamedTuple):
    """The regions that share some NUMA nodes."""

    numa: int
    wants: tuple[Want, ...]
    available: int
    reserved: int
    """For reclaimed pods, of those available."""


class _Reclaim(NamedTuple):
    cpus: int
    overlap: dict[str, int]
    quota: float | None = None


def assemble(wants: Sequence[Want], node: Node, mode: Mode) -> Assembled:
    """Size every pool and what is left to reclaimed pods. All CPUs that are available belong to somebody."""
    sizes: list[PoolSize] = []
    throttled: set[str] = set()
    granted: dict[str, int] = {}
    lent: dict[str, int] = {}
    for group in groups(wants, node):
        exclusive = [want for want in group.wants if want.region.exclusive]
        if exclusive:
            regulation, reclaim = _exclusive(group, exclusive, mode)
        else:
            regulation, reclaim = _shared(group, mode)
        for want in group.wants:
            name, size = want.region.name, regulation.sizes[want.region.pool]
            granted[name] = granted.get(name, 0) + size
            lent[name] = lent.get(name, 0) + reclaim.overlap.get(want.region.pool, 0)
            if want.region.bound or group.numa == UNBOUND:
                sizes.append(PoolSize(pool=want.region.pool, numa=group.numa, cpus=size))
            if regulation.throttled:
                throttled.add(name)
        sizes.append(
            PoolSize(
                pool=RECLAIM_POOL,
                numa=group.numa,
                cpus=max(reclaim.cpus - sum(reclaim.overlap.values()), 0),
                quota_cores=reclaim.quota,
                overlap=_own(group, reclaim.overlap),
            )
        )
    if not any(size.numa == UNBOUND for size in sizes):
        sizes = [*_laid_over(wants, granted, lent), *sizes]
    return Assembled(tuple(sizes), frozenset(throttled), granted, lent)


def _own(group: Group, overlap: Mapping[str, int]) -> dict[str, int]:
    """Without what pools lend that are no pools of this NUMA node, but laid over it: that is told of them as a whole."""
    foreign = {want.region.pool for want in group.wants if not want.region.bound} if group.numa != UNBOUND else set()
    return {pool: cpus for pool, cpus in sorted(overlap.items()) if pool not in foreign}


def _laid_over(wants: Sequence[Want], granted: Mapping[str, int], lent: Mapping[str, int]) -> list[PoolSize]:
    """Pools that are bound to no NUMA node, where every node has bound ones."""
    unbound = [want.region for want in wants if not want.region.bound]
    sizes = [PoolSize(pool=region.pool, cpus=granted[region.name]) for region in unbound]
    overlap = {region.pool: lent[region.name] for region in unbound if lent[region.name]}
    return [*sizes, PoolSize(pool=RECLAIM_POOL, cpus=0, overlap=overlap)] if unbound else []


def groups(wants: Sequence[Want], node: Node) -> tuple[Group, ...]:
    """One for all that is bound to no NUMA node, then one for each node that something is bound to.

    Where every node has bound regions, the others are laid over those nodes.
    """
    bound: dict[int, list[Want]] = {}
    unbound = [want for want in wants if not want.region.bound]
    for want in wants:
        if want.region.bound:
            bound.setdefault(want.region.numa_nodes[0], []).append(want)
    result = []
    if free := [numa for numa in node.cpus if numa not in bound]:
        available = sum(node.available[numa] for numa in free)
        reserved = sum(node.reserved_for_reclaim[numa] for numa in free)
        result.append(Group(UNBOUND, tuple(unbound), available, reserved))
    else:
        _lay_over(sorted(unbound, key=lambda want: want.region.name), bound, node)
    for numa in sorted(bound):
        result.append(Group(numa, tuple(bound[numa]), node.available[numa], node.reserved_for_reclaim[numa]))
    return tuple(result)


def _lay_over(unbound: Sequence[Want], bound: dict[int, list[Want]], node: Node) -> None:
    """Add each region to the node with most room, a share region in parts where one node has not enough. Nodes that a pod
    has for itself give a CPU each, and only where there are no others."""
    shared = [numa for numa, wants in bound.items() if not any(want.region.exclusive for want in wants)]
    room = {
        numa: node.available[numa] - node.reserved_for_reclaim[numa] - sum(_asked(want) for want in bound[numa])
        for numa in shared or bound
    }
    for want in unbound:
        left: Want | None = (
            want if shared else msgspec.structs.replace(want, requirement=1, request=1, upper=1, lower=1)
        )
        while left is not None:
            numa = max(room, key=lambda numa: (room[numa], -numa))
            part: Want = left
            rest: Want | None = None
            if want.region.kind is RegionKind.SHARE and 0 < room[numa] < _asked(left) and _elsewhere(room, numa):
                part, rest = _split(left, room[numa])
            bound[numa].append(part)
            room[numa] -= _asked(part)
            left = rest


def _elsewhere(room: Mapping[int, int], numa: int) -> bool:
    return any(cpus > 0 for other, cpus in room.items() if other != numa)


def _split(want: Want, cpus: int) -> tuple[Want, Want]:
    """A part that needs so many CPUs, and the rest; what was asked for in the same proportion."""
    need = want.need
    requirement, request = (
        min(max(round(size * cpus / need), 1), max(size - 1, 1)) for size in (want.requirement, want.request)
    )
    part = msgspec.structs.replace(want, requirement=requirement, request=request)
    rest = msgspec.structs.replace(
        want, requirement=max(want.requirement - requirement, 1), request=max(want.request - request, 1)
    )
    return part, rest


def _asked(want: Want) -> int:
    return want.upper if want.region.kind is RegionKind.ISOLATION else want.need


def _of(wants: Iterable[Want], kind: RegionKind) -> list[Want]:
    return [want for want in wants if want.region.kind is kind]


def _regulate(wants: Sequence[Want], room: int, mode: Mode) -> Regulation:
    """Sizes of share, isolation and dedicated pools within `room`."""
    share, dedicated = _of(wants, RegionKind.SHARE), _of(wants, RegionKind.DEDICATED)
    apart = _of(wants, RegionKind.ISOLATION)
    asked = max(sum(want.request for want in share), sum(want.requirement for want in share))
    roomy = asked + sum(want.upper for want in apart) <= room - sum(want.request for want in dedicated)
    fixed = {want.region.pool: want.upper if roomy else want.lower for want in apart}
    fixed.update({want.region.pool: want.request for want in dedicated})
    expand = mode.overlap or not mode.enable_reclaim
    growing = {want.region.pool: want.request if expand else want.need for want in share}
    return regulate_pool_sizes(growing, fixed, room, expand=expand)


def _shared(group: Group, mode: Mode) -> tuple[Regulation, _Reclaim]:
    room = group.available if mode.overlap else group.available - group.reserved
    regulation = _regulate(group.wants, room, mode)
    if mode.overlap:
        return regulation, _overlapping(group, regulation, mode)
    left = max(group.available - regulation.occupied, 0)
    if not mode.enable_reclaim:
        return regulation, _Reclaim(min(group.reserved, left), {})
    gaps = {
        want.region.pool: regulation.sizes[want.region.pool] - want.requirement
        for want in _of(group.wants, RegionKind.DEDICATED)
        if want.region.reclaimable
    }
    overlap = {pool: gap for pool, gap in gaps.items() if gap > 0}
    return regulation, _Reclaim(left + sum(overlap.values()), overlap)


def _overlapping(group: Group, regulation: Regulation, mode: Mode) -> _Reclaim:
    """Reclaimed pods run on CPUs of online pools: as many of each as it does not require."""
    sizes = regulation.sizes
    online = {want.region.pool: want for want in group.wants if want.region.kind is not RegionKind.ISOLATION}
    lendable = {pool: sizes[pool] for pool, want in online.items() if want.region.reclaimable}
    share = {pool: sizes[pool] for pool, want in online.items() if want.region.kind is RegionKind.SHARE}
    kept = sum(online[pool].requirement if pool in lendable else sizes[pool] for pool in share)
    rest = {pool: size for pool, size in sizes.items() if pool not in share}
    free = group.available - sum(rest.values()) - kept
    gaps = sum(max(sizes[pool] - online[pool].requirement, 0) for pool in lendable if pool not in share)
    if not mode.enable_reclaim:
        overlap = _reserved_overlap(group.reserved, free, lendable, share, _enough(online, sizes, group.reserved))
        reclaim = _Reclaim(group.reserved, overlap)
    elif free + gaps >= group.reserved:
        # A pool that requires all of its CPUs still lends one, so that reclaimed pods on it are never without any.
        reclaim = _Reclaim(free + gaps, {pool: max(sizes[pool] - online[pool].requirement, 1) for pool in lendable})
    else:
        every = _enough(online, sizes, group.reserved)
        reclaim = _Reclaim(group.reserved, regulate_overlap(every, min(group.reserved, sum(every.values()))))
    if mode.quota and group.numa != UNBOUND and online:
        overlap = {pool: max(cpus, lendable.get(pool, 0)) for pool, cpus in reclaim.overlap.items()}
        reclaim = _Reclaim(reclaim.cpus, overlap, _quota(group, online.values(), reclaim.cpus))
    return reclaim


def _enough(online: Iterable[str], sizes: Mapping[str, int], reserved: int) -> dict[str, int]:
    """Sizes of pools that the reserve may lie on: without those of pods that are kept apart, unless they have the rest."""
    every = {pool: sizes[pool] for pool in online}
    return every if sum(every.values()) >= reserved else dict(sizes)


def _reserved_overlap(
    reserved: int, free: int, lendable: dict[str, int], share: dict[str, int], every: dict[str, int]
) -> dict[str, int]:
    """Where reclaiming is off: on whose CPUs the reserve of reclaimed pods lies, by sizes of pools."""
    if reserved > free:
        pools = lendable if reserved <= sum(lendable.values()) else every
        return regulate_overlap(pools, min(reserved, sum(pools.values())))
    if share and reserved <= sum(share.values()):
        return regulate_overlap(share, reserved)
    return {}


def _quota(group: Group, wants: Iterable[Want], reclaim: int) -> float:
    """What policies of share regions allow at most, or else what is left; no more than those of dedicated regions allow,
    and never less than the reserve."""
    asked: dict[RegionKind, list[float]] = {RegionKind.SHARE: [], RegionKind.DEDICATED: []}
    for want in wants:
        if want.quota is not None:
            asked[want.region.kind].append(want.quota)
    least = min((min(asked[RegionKind.SHARE], default=float(reclaim)), *asked[RegionKind.DEDICATED]))
    return max(float(group.reserved), least)


def _exclusive(group: Group, exclusive: Sequence[Want], mode: Mode) -> tuple[Regulation, _Reclaim]:
    """A pod that has its NUMA node for itself: it may run on all of it, reclaimed pods on what it does not require."""
    others = [want for want in group.wants if not want.region.exclusive]
    room = max(group.available - group.reserved - len(exclusive), len(others))
    beside = _regulate(others, room, Mode()) if others else Regulation({}, 0)
    each = max((group.available - beside.occupied) // len(exclusive), 1)
    own = {want.region.pool: each for want in exclusive}
    required = {
        want.region.pool: min(want.requirement, each) if want.region.reclaimable else each for want in exclusive
    }
    regulation = Regulation({**beside.sizes, **own}, group.available, throttled=beside.throttled)
    reserved = min(max(ceil(group.reserved / len(exclusive)), 1), each)
    if not mode.quota:
        return regulation, _Reclaim(0, {pool: max(each - required[pool], reserved) for pool in own})
    # What a policy allows goes before what the requirement leaves.
    quotas = {want.region.pool: want.quota for want in exclusive if want.quota is not None and want.region.reclaimable}
    left = sum(each if pool in quotas else each - required[pool] for pool in own)
    return regulation, _Reclaim(0, own, max(float(group.reserved), min((float(left), *quotas.values()))))
