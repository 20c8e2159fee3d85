"""Turns the requirements of regions into whole CPUs and pool sizes: Katalyst's regulator and assembler `common`.
A requirement changes in bounded steps. Pools that do not fit are reduced in proportion; all available CPUs are
assigned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

import msgspec

from agent.advisor.provision.regions import NumaCapacity, RegionBounds
from agent.config.advisor import AdvisorConfig
from api.advice import NOT_NUMA_BOUND, PoolSize, Region, RegionKind, scale_proportionally
from api.cpu import Topology


class PoolRegulation(NamedTuple):
    """Sizes by pool."""

    sizes: dict[str, int]
    occupied: int
    """CPUs that the pools have together."""
    throttled: bool = False
    """Whether somebody got less than it asked for."""


def regulate_pool_sizes(
    flexible: Mapping[str, int], fixed: Mapping[str, int], available: int, *, expand: bool
) -> PoolRegulation:
    """Sizes that fit: as asked for, or in proportion where that is too much; with `expand`, growing ones fill what is left.

    Fewer CPUs than pools: each pool has all of them, and they share.
    """
    asked = sum(flexible.values()) + sum(fixed.values())
    if asked > available:
        sizes = scale_proportionally({**flexible, **fixed}, available)
        if sizes is None:
            every = max(available, 1)
            return PoolRegulation(dict.fromkeys((*flexible, *fixed), every), every, throttled=True)
        return PoolRegulation(sizes, available, throttled=True)
    target = available - sum(fixed.values()) if expand else sum(flexible.values())
    grown = scale_proportionally(flexible, target)
    assert grown is not None  # a target of at least what was asked for is never too small
    return PoolRegulation({**grown, **fixed}, sum(grown.values()) + sum(fixed.values()))


def regulate_overlap(sizes: Mapping[str, int], cpus: int) -> dict[str, int]:
    """Which pool lends how many of `cpus`: in proportion to their sizes, rounded up, the largest first, until it is enough.

    Raises ValueError where the pools together have less.
    """
    total = sum(sizes.values())
    if cpus > total:
        raise ValueError(f"{cpus} CPUs cannot overlap pools of {total}")
    result: dict[str, int] = {}
    left = cpus
    for pool, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if not left:
            break
        result[pool] = min(-(-cpus * size // total), size, left)
        left -= result[pool]
    return result


def apportion_cores(cores: float, cpus: Mapping[int, int], nodes: Collection[int]) -> dict[int, float]:
    """What may be used of the whole node in all, by each of these NUMA nodes, and by the others together as UNBOUND if there
    are any: in proportion to CPUs, so that it is the same in all."""
    total = sum(cpus.values())
    parts = {numa: cores * size / total for numa, size in cpus.items() if numa in nodes}
    others = [size for numa, size in cpus.items() if numa not in nodes]
    return parts | ({NOT_NUMA_BOUND: cores * sum(others) / total} if others else {})


def cpus_per_numa_node(topology: Topology) -> dict[int, int]:
    """CPUs by NUMA node."""
    sizes: dict[int, int] = {}
    for cpu in topology.cpus:
        sizes[cpu.numa] = sizes.get(cpu.numa, 0) + 1
    return dict(sorted(sizes.items()))


NS_PER_S = 1_000_000_000


class RegulatedRequirement(NamedTuple):
    """A requirement in CPUs, what it would be without steps, and what held it back."""

    cpus: int
    wanted: int
    limit: str
    """Empty where nothing did; otherwise for a person: `grows by at most 10`."""


def regulate_requirement(
    cores: float, bounds: RegionBounds, before: int | None, config: AdvisorConfig, *, may_shrink: bool, even: bool
) -> RegulatedRequirement:
    """The reserve added, rounded up, in steps from `before` (None: at once), within the bounds.

    With `even` online and reclaimed pods never share a physical core, and the upper bound is taken to an even number of
    CPUs too. `may_shrink` is False within min_ramp_down_period_s of the last time that it did.
    """
    size = ceil(cores + bounds.reserved_for_allocate)
    upper = ceil(bounds.upper)
    if even:
        size += size % 2
        upper -= upper % 2 if upper > 1 else 0
    wanted, limit = size, ""
    if before is not None:
        if size > before + config.max_ramp_up_cores:
            size, limit = before + config.max_ramp_up_cores, f"it grows by at most {config.max_ramp_up_cores} at once"
        elif size < before and not may_shrink:
            size, limit = before, f"it shrinks once in {config.min_ramp_down_period_s:g} s"
        elif size < before - config.max_ramp_down_cores:
            size = before - config.max_ramp_down_cores
            limit = f"it shrinks by at most {config.max_ramp_down_cores} at once"
    lower = min(ceil(bounds.lower), upper)
    if not lower <= size <= upper:
        limit = f"the least is {lower}" if size < lower else f"the most is {upper}"
    return RegulatedRequirement(min(max(size, lower), upper), wanted, limit)


def hold_requirement(before: int, bounds: RegionBounds) -> RegulatedRequirement:
    """What the region had, within the bounds: an agent that was just started has measured nothing yet, and what one before
    it found out of days is better than what pods ask for."""
    upper = ceil(bounds.upper)
    cpus = min(max(before, min(ceil(bounds.lower), upper)), upper)
    return RegulatedRequirement(cpus, before, "it stays as it was: nothing has been measured yet")


def is_shrink_allowed(last_ramp_down_ns: int | None, now_ns: int, config: AdvisorConfig) -> bool:
    """Whether the pause since the last shrinking is over."""
    return last_ramp_down_ns is None or now_ns - last_ramp_down_ns >= config.min_ramp_down_period_s * NS_PER_S


RECLAIM_POOL = "reclaim"


class RegionRequest(msgspec.Struct, frozen=True, kw_only=True):
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


class SharingMode(msgspec.Struct, frozen=True, kw_only=True):
    """How the node is shared out."""

    enable_reclaim: bool = True
    overlap: bool = False
    quota: bool = False


class PoolAssembly(NamedTuple):
    """Sizes of all pools, those that got less than they asked for, and what each region has."""

    sizes: tuple[PoolSize, ...]
    throttled: frozenset[str]
    """Names of regions."""
    granted: dict[str, int]
    """CPUs by name of region."""
    lent: dict[str, int]
    """How many of those reclaimed pods may run on too."""


class NumaGroup(NamedTuple):
    """The regions that share some NUMA nodes."""

    numa: int
    wants: tuple[RegionRequest, ...]
    available: int
    reserved: int
    """For reclaimed pods, of those available."""


class _ReclaimPool(NamedTuple):
    cpus: int
    overlap: dict[str, int]
    quota: float | None = None


def assemble_pools(wants: Sequence[RegionRequest], node: NumaCapacity, mode: SharingMode) -> PoolAssembly:
    """Size every pool and what is left to reclaimed pods. All CPUs that are available belong to somebody."""
    sizes: list[PoolSize] = []
    throttled: set[str] = set()
    granted: dict[str, int] = {}
    lent: dict[str, int] = {}
    for group in group_by_numa(wants, node):
        exclusive = [want for want in group.wants if want.region.exclusive]
        if exclusive:
            regulation, reclaim = _size_exclusive(group, exclusive, mode)
        else:
            regulation, reclaim = _size_shared(group, mode)
        for want in group.wants:
            name, size = want.region.name, regulation.sizes[want.region.pool]
            granted[name] = granted.get(name, 0) + size
            lent[name] = lent.get(name, 0) + reclaim.overlap.get(want.region.pool, 0)
            if want.region.bound or group.numa == NOT_NUMA_BOUND:
                sizes.append(PoolSize(pool=want.region.pool, numa=group.numa, cpus=size))
            if regulation.throttled:
                throttled.add(name)
        sizes.append(
            PoolSize(
                pool=RECLAIM_POOL,
                numa=group.numa,
                cpus=max(reclaim.cpus - sum(reclaim.overlap.values()), 0),
                quota_cores=reclaim.quota,
                overlap=_own_overlap(group, reclaim.overlap),
            )
        )
    if not any(size.numa == NOT_NUMA_BOUND for size in sizes):
        sizes = [*_unbound_sizes(wants, granted, lent), *sizes]
    return PoolAssembly(tuple(sizes), frozenset(throttled), granted, lent)


def _own_overlap(group: NumaGroup, overlap: Mapping[str, int]) -> dict[str, int]:
    """Without what pools lend that are no pools of this NUMA node, but laid over it: that is told of them as a whole."""
    foreign = (
        {want.region.pool for want in group.wants if not want.region.bound} if group.numa != NOT_NUMA_BOUND else set()
    )
    return {pool: cpus for pool, cpus in sorted(overlap.items()) if pool not in foreign}


def _unbound_sizes(
    wants: Sequence[RegionRequest], granted: Mapping[str, int], lent: Mapping[str, int]
) -> list[PoolSize]:
    """Pools that are bound to no NUMA node, where every node has bound ones."""
    unbound = [want.region for want in wants if not want.region.bound]
    sizes = [PoolSize(pool=region.pool, cpus=granted[region.name]) for region in unbound]
    overlap = {region.pool: lent[region.name] for region in unbound if lent[region.name]}
    return [*sizes, PoolSize(pool=RECLAIM_POOL, cpus=0, overlap=overlap)] if unbound else []


def group_by_numa(wants: Sequence[RegionRequest], node: NumaCapacity) -> tuple[NumaGroup, ...]:
    """One for all that is bound to no NUMA node, then one for each node that something is bound to.

    Where every node has bound regions, the others are laid over those nodes.
    """
    bound: dict[int, list[RegionRequest]] = {}
    unbound = [want for want in wants if not want.region.bound]
    for want in wants:
        if want.region.bound:
            bound.setdefault(want.region.numa_nodes[0], []).append(want)
    result = []
    if free := [numa for numa in node.cpus if numa not in bound]:
        available = sum(node.available[numa] for numa in free)
        reserved = sum(node.reserved_for_reclaim[numa] for numa in free)
        result.append(NumaGroup(NOT_NUMA_BOUND, tuple(unbound), available, reserved))
    else:
        _place_unbound(sorted(unbound, key=lambda want: want.region.name), bound, node)
    for numa in sorted(bound):
        result.append(NumaGroup(numa, tuple(bound[numa]), node.available[numa], node.reserved_for_reclaim[numa]))
    return tuple(result)


def _place_unbound(unbound: Sequence[RegionRequest], bound: dict[int, list[RegionRequest]], node: NumaCapacity) -> None:
    """Add each region to the node with most room, a share region in parts where one node has not enough. Nodes that a pod
    has for itself give a CPU each, and only where there are no others."""
    shared = [numa for numa, wants in bound.items() if not any(want.region.exclusive for want in wants)]
    room = {
        numa: node.available[numa]
        - node.reserved_for_reclaim[numa]
        - sum(_requested_cpus(want) for want in bound[numa])
        for numa in shared or bound
    }
    for want in unbound:
        left: RegionRequest | None = (
            want if shared else msgspec.structs.replace(want, requirement=1, request=1, upper=1, lower=1)
        )
        while left is not None:
            numa = max(room, key=lambda numa: (room[numa], -numa))
            part: RegionRequest = left
            rest: RegionRequest | None = None
            if (
                want.region.kind is RegionKind.SHARE
                and 0 < room[numa] < _requested_cpus(left)
                and _has_room_elsewhere(room, numa)
            ):
                part, rest = _split_request(left, room[numa])
            bound[numa].append(part)
            room[numa] -= _requested_cpus(part)
            left = rest


def _has_room_elsewhere(room: Mapping[int, int], numa: int) -> bool:
    return any(cpus > 0 for other, cpus in room.items() if other != numa)


def _split_request(want: RegionRequest, cpus: int) -> tuple[RegionRequest, RegionRequest]:
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


def _requested_cpus(want: RegionRequest) -> int:
    return want.upper if want.region.kind is RegionKind.ISOLATION else want.need


def _of_kind(wants: Iterable[RegionRequest], kind: RegionKind) -> list[RegionRequest]:
    return [want for want in wants if want.region.kind is kind]


def _regulate_pools(wants: Sequence[RegionRequest], room: int, mode: SharingMode) -> PoolRegulation:
    """Sizes of share, isolation and dedicated pools within `room`."""
    share, dedicated = _of_kind(wants, RegionKind.SHARE), _of_kind(wants, RegionKind.DEDICATED)
    apart = _of_kind(wants, RegionKind.ISOLATION)
    asked = max(sum(want.request for want in share), sum(want.requirement for want in share))
    roomy = asked + sum(want.upper for want in apart) <= room - sum(want.request for want in dedicated)
    fixed = {want.region.pool: want.upper if roomy else want.lower for want in apart}
    fixed.update({want.region.pool: want.request for want in dedicated})
    expand = mode.overlap or not mode.enable_reclaim
    growing = {want.region.pool: want.request if expand else want.need for want in share}
    return regulate_pool_sizes(growing, fixed, room, expand=expand)


def _size_shared(group: NumaGroup, mode: SharingMode) -> tuple[PoolRegulation, _ReclaimPool]:
    room = group.available if mode.overlap else group.available - group.reserved
    regulation = _regulate_pools(group.wants, room, mode)
    if mode.overlap:
        return regulation, _size_overlapping(group, regulation, mode)
    left = max(group.available - regulation.occupied, 0)
    if not mode.enable_reclaim:
        return regulation, _ReclaimPool(min(group.reserved, left), {})
    gaps = {
        want.region.pool: regulation.sizes[want.region.pool] - want.requirement
        for want in _of_kind(group.wants, RegionKind.DEDICATED)
        if want.region.reclaimable
    }
    overlap = {pool: gap for pool, gap in gaps.items() if gap > 0}
    return regulation, _ReclaimPool(left + sum(overlap.values()), overlap)


def _size_overlapping(group: NumaGroup, regulation: PoolRegulation, mode: SharingMode) -> _ReclaimPool:
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
        overlap = _overlap_reserve(
            group.reserved, free, lendable, share, _pools_for_reserve(online, sizes, group.reserved)
        )
        reclaim = _ReclaimPool(group.reserved, overlap)
    elif free + gaps >= group.reserved:
        # A pool that requires all of its CPUs still lends one, so that reclaimed pods on it are never without any.
        reclaim = _ReclaimPool(free + gaps, {pool: max(sizes[pool] - online[pool].requirement, 1) for pool in lendable})
    else:
        every = _pools_for_reserve(online, sizes, group.reserved)
        reclaim = _ReclaimPool(group.reserved, regulate_overlap(every, min(group.reserved, sum(every.values()))))
    if mode.quota and group.numa != NOT_NUMA_BOUND and online:
        overlap = {pool: max(cpus, lendable.get(pool, 0)) for pool, cpus in reclaim.overlap.items()}
        reclaim = _ReclaimPool(reclaim.cpus, overlap, _group_quota(group, online.values(), reclaim.cpus))
    return reclaim


def _pools_for_reserve(online: Iterable[str], sizes: Mapping[str, int], reserved: int) -> dict[str, int]:
    """Sizes of pools that the reserve may lie on: without those of pods that are kept apart, unless they have the rest."""
    every = {pool: sizes[pool] for pool in online}
    return every if sum(every.values()) >= reserved else dict(sizes)


def _overlap_reserve(
    reserved: int, free: int, lendable: dict[str, int], share: dict[str, int], every: dict[str, int]
) -> dict[str, int]:
    """Where reclaiming is off: on whose CPUs the reserve of reclaimed pods lies, by sizes of pools."""
    if reserved > free:
        pools = lendable if reserved <= sum(lendable.values()) else every
        return regulate_overlap(pools, min(reserved, sum(pools.values())))
    if share and reserved <= sum(share.values()):
        return regulate_overlap(share, reserved)
    return {}


def _group_quota(group: NumaGroup, wants: Iterable[RegionRequest], reclaim: int) -> float:
    """What policies of share regions allow at most, or else what is left; no more than those of dedicated regions allow,
    and never less than the reserve."""
    asked: dict[RegionKind, list[float]] = {RegionKind.SHARE: [], RegionKind.DEDICATED: []}
    for want in wants:
        if want.quota is not None:
            asked[want.region.kind].append(want.quota)
    least = min((min(asked[RegionKind.SHARE], default=float(reclaim)), *asked[RegionKind.DEDICATED]))
    return max(float(group.reserved), least)


def _size_exclusive(
    group: NumaGroup, exclusive: Sequence[RegionRequest], mode: SharingMode
) -> tuple[PoolRegulation, _ReclaimPool]:
    """A pod that has its NUMA node for itself: it may run on all of it, reclaimed pods on what it does not require."""
    others = [want for want in group.wants if not want.region.exclusive]
    room = max(group.available - group.reserved - len(exclusive), len(others))
    beside = _regulate_pools(others, room, SharingMode()) if others else PoolRegulation({}, 0)
    each = max((group.available - beside.occupied) // len(exclusive), 1)
    own = {want.region.pool: each for want in exclusive}
    required = {
        want.region.pool: min(want.requirement, each) if want.region.reclaimable else each for want in exclusive
    }
    regulation = PoolRegulation({**beside.sizes, **own}, group.available, throttled=beside.throttled)
    reserved = min(max(ceil(group.reserved / len(exclusive)), 1), each)
    if not mode.quota:
        return regulation, _ReclaimPool(0, {pool: max(each - required[pool], reserved) for pool in own})
    # What a policy allows goes before what the requirement leaves.
    quotas = {want.region.pool: want.quota for want in exclusive if want.quota is not None and want.region.reclaimable}
    left = sum(each if pool in quotas else each - required[pool] for pool in own)
    return regulation, _ReclaimPool(0, own, max(float(group.reserved), min((float(left), *quotas.values()))))


def pool_reclaimable_cores(sizes: Sequence[PoolSize], numa_nodes: Collection[int]) -> float | None:
    """Cores that reclaimed pods may have by the sizes and limits of their pools; None where there is no such pool."""
    pools = {size.numa: size for size in sizes if size.pool == "reclaim"}
    if not pools:
        return None
    whole = {numa: size.cpus + sum(size.overlap.values()) for numa, size in pools.items()}
    limits = {numa: inf if size.quota_cores is None else size.quota_cores for numa, size in pools.items()}
    if set(numa_nodes) <= set(pools) and NOT_NUMA_BOUND in pools:
        # What is bound to no node is laid over all of them, under their limits.
        return float(min(sum(whole.values()), sum(limits[numa] for numa in numa_nodes)))
    return float(sum(min(cpus, limits[numa]) for numa, cpus in whole.items()))
