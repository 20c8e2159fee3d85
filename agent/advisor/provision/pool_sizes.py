"""Turns the requirements of regions into whole CPUs and pool sizes: Katalyst's regulator and assembler `common`.
A requirement changes in bounded steps. Pools that do not fit are reduced in proportion; all available CPUs are
assigned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agent.advisor.provision.regions import NumaCapacity, RegionBounds
from agent.config.advisor import AdvisorConfig
from api.advice import NOT_NUMA_BOUND, PoolSize, Region, RegionKind, scale_proportionally
from api.units import NS_PER_S


class PoolRegulation(NamedTuple):
    """Pool sizes that fit."""

    sizes: dict[str, int]
    occupied: int
    """CPUs of all pools together."""
    throttled: bool = False
    """Whether a pool got less than requested."""


def regulate_pool_sizes(
    flexible: Mapping[str, int], fixed: Mapping[str, int], available: int, *, expand: bool
) -> PoolRegulation:
    """Return sizes that fit: as requested, or in proportion if that is too much; with `expand`, flexible pools fill the
    rest.

    With fewer CPUs than pools, every pool has all CPUs and they overlap.
    """
    requested = sum(flexible.values()) + sum(fixed.values())
    if requested > available:
        sizes = scale_proportionally({**flexible, **fixed}, available)
        if sizes is None:
            each = max(available, 1)
            return PoolRegulation(dict.fromkeys((*flexible, *fixed), each), each, throttled=True)
        return PoolRegulation(sizes, available, throttled=True)
    target = available - sum(fixed.values()) if expand else sum(flexible.values())
    grown = scale_proportionally(flexible, target)
    assert grown is not None  # a target of at least the requested sizes is never too small
    return PoolRegulation({**grown, **fixed}, sum(grown.values()) + sum(fixed.values()))


def regulate_overlap(sizes: Mapping[str, int], cpus: int) -> dict[str, int]:
    """Return how many of `cpus` each pool contributes: in proportion to its size, rounded up, the largest pools first.

    Raises ValueError if the pools together have fewer.
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
    """Split cores of the whole node between these NUMA nodes, and NOT_NUMA_BOUND for the others, in proportion to CPUs."""
    total = sum(cpus.values())
    parts = {numa: cores * size / total for numa, size in cpus.items() if numa in nodes}
    others = [size for numa, size in cpus.items() if numa not in nodes]
    return parts | ({NOT_NUMA_BOUND: cores * sum(others) / total} if others else {})


class RegulatedRequirement(NamedTuple):
    """A requirement in CPUs, its value without step limits, and the limit that applied."""

    cpus: int
    unlimited: int
    limit: str
    """Empty without a limit, else a part of a sentence: `it grows by at most 10 at once`."""


def regulate_requirement(
    cores: float, bounds: RegionBounds, before: int | None, config: AdvisorConfig, *, may_shrink: bool, even: bool
) -> RegulatedRequirement:
    """Add the reserve, round up, and move in steps from `before` (None: at once), within the bounds.

    With `even`, online and reclaimed pods never share a physical core, and the upper bound is even too. `may_shrink` is
    False within `min_ramp_down_period_s` of the last shrink.
    """
    size = ceil(cores + bounds.reserved_for_allocate)
    upper = ceil(bounds.upper)
    if even:
        size += size % 2
        upper -= upper % 2 if upper > 1 else 0
    unlimited, limit = size, ""
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
        limit = f"the minimum is {lower}" if size < lower else f"the maximum is {upper}"
    return RegulatedRequirement(min(max(size, lower), upper), unlimited, limit)


def hold_requirement(before: int, bounds: RegionBounds) -> RegulatedRequirement:
    """Keep the restored requirement within the bounds until something is measured: the previous agent learnt it over days."""
    upper = ceil(bounds.upper)
    cpus = min(max(before, min(ceil(bounds.lower), upper)), upper)
    return RegulatedRequirement(cpus, before, "it keeps the previous value until something is measured")


def is_shrink_allowed(last_ramp_down_ns: int | None, now_ns: int, config: AdvisorConfig) -> bool:
    """Return whether the pause since the last shrink is over."""
    return last_ramp_down_ns is None or now_ns - last_ramp_down_ns >= config.min_ramp_down_period_s * NS_PER_S


RECLAIM_POOL = "reclaim"


class RegionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs that one region requests."""

    region: Region
    requirement: int = 1
    """CPUs that it needs, which are not reclaimable."""
    requested: int = 1
    """Sum of its pods' requests; the size of a region that is not reclaimable."""
    upper: int = 1
    """Size of an isolated pod if there is room."""
    lower: int = 1
    """Size of an isolated pod if there is not."""
    quota: float | None = None
    """Maximum CPU use of reclaimed pods, if a policy sets one."""

    @property
    def pool(self) -> str:
        return self.region.pool

    @property
    def need(self) -> int:
        return self.requirement if self.region.reclaimable else self.requested


class SharingMode(msgspec.Struct, frozen=True, kw_only=True):
    """How pools share the node's CPUs."""

    enable_reclaim: bool = True
    overlap: bool = False
    quota: bool = False


class PoolAssembly(NamedTuple):
    """Sizes of all pools, throttled regions, and the CPUs of every region."""

    sizes: tuple[PoolSize, ...]
    throttled: frozenset[str]
    """Names of regions."""
    granted: dict[str, int]
    """CPUs by name of region."""
    reclaimable_cpus: dict[str, int]
    """CPUs that reclaimed pods may run on too, by name of region."""


class NumaGroup(NamedTuple):
    """Regions that share the same NUMA nodes."""

    numa: int
    requests: tuple[RegionRequest, ...]
    available: int
    reserved: int
    """Reserved for reclaimed pods, of those available."""


class _ReclaimPool(NamedTuple):
    cpus: int
    overlap: dict[str, int]
    quota: float | None = None


def assemble_pools(requests: Sequence[RegionRequest], node: NumaCapacity, mode: SharingMode) -> PoolAssembly:
    """Size every pool and the reclaim pool, so that every available CPU belongs to a pool."""
    sizes: list[PoolSize] = []
    throttled: set[str] = set()
    granted: dict[str, int] = {}
    reclaimable_cpus: dict[str, int] = {}
    for group in group_by_numa(requests, node):
        exclusive = [request for request in group.requests if request.region.exclusive]
        if exclusive:
            regulation, reclaim = _size_exclusive(group, exclusive, mode)
        else:
            regulation, reclaim = _size_shared(group, mode)
        for request in group.requests:
            name, size = request.region.name, regulation.sizes[request.pool]
            granted[name] = granted.get(name, 0) + size
            reclaimable_cpus[name] = reclaimable_cpus.get(name, 0) + reclaim.overlap.get(request.pool, 0)
            if request.region.bound or group.numa == NOT_NUMA_BOUND:
                sizes.append(PoolSize(pool=request.pool, numa=group.numa, cpus=size))
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
        sizes = [*_unbound_sizes(requests, granted, reclaimable_cpus), *sizes]
    return PoolAssembly(tuple(sizes), frozenset(throttled), granted, reclaimable_cpus)


def _own_overlap(group: NumaGroup, overlap: Mapping[str, int]) -> dict[str, int]:
    """The overlap without pools that are not bound to this NUMA node: theirs is reported for the whole node."""
    unbound_pools = (
        {request.pool for request in group.requests if not request.region.bound}
        if group.numa != NOT_NUMA_BOUND
        else set()
    )
    return {pool: cpus for pool, cpus in sorted(overlap.items()) if pool not in unbound_pools}


def _unbound_sizes(
    requests: Sequence[RegionRequest], granted: Mapping[str, int], reclaimable_cpus: Mapping[str, int]
) -> list[PoolSize]:
    unbound = [request.region for request in requests if not request.region.bound]
    sizes = [PoolSize(pool=region.pool, cpus=granted[region.name]) for region in unbound]
    overlap = {region.pool: reclaimable_cpus[region.name] for region in unbound if reclaimable_cpus[region.name]}
    return [*sizes, PoolSize(pool=RECLAIM_POOL, cpus=0, overlap=overlap)] if unbound else []


def group_by_numa(requests: Sequence[RegionRequest], node: NumaCapacity) -> tuple[NumaGroup, ...]:
    """Return one group for everything unbound, then one for each NUMA node with bound regions.

    If every NUMA node has bound regions, the unbound ones are placed on those nodes.
    """
    bound: dict[int, list[RegionRequest]] = {}
    unbound = [request for request in requests if not request.region.bound]
    for request in requests:
        if request.region.bound:
            bound.setdefault(request.region.numa_nodes[0], []).append(request)
    result = []
    if free := [numa for numa in node.cpus if numa not in bound]:
        available = sum(node.available[numa] for numa in free)
        reserved = sum(node.reserved_for_reclaim[numa] for numa in free)
        result.append(NumaGroup(NOT_NUMA_BOUND, tuple(unbound), available, reserved))
    else:
        _place_unbound(sorted(unbound, key=lambda request: request.region.name), bound, node)
    for numa in sorted(bound):
        result.append(NumaGroup(numa, tuple(bound[numa]), node.available[numa], node.reserved_for_reclaim[numa]))
    return tuple(result)


def _place_unbound(unbound: Sequence[RegionRequest], bound: dict[int, list[RegionRequest]], node: NumaCapacity) -> None:
    """Place each region on the NUMA node with the most room; a share region is split if one node has not enough.

    Exclusive NUMA nodes give one CPU each, and only if all nodes are exclusive.
    """
    shared = [numa for numa, requests in bound.items() if not any(request.region.exclusive for request in requests)]
    room = {
        numa: node.available[numa]
        - node.reserved_for_reclaim[numa]
        - sum(_requested_cpus(request) for request in bound[numa])
        for numa in shared or bound
    }
    for request in unbound:
        left: RegionRequest | None = (
            request if shared else replace(request, requirement=1, requested=1, upper=1, lower=1)
        )
        while left is not None:
            numa = max(room, key=lambda numa: (room[numa], -numa))
            part: RegionRequest = left
            rest: RegionRequest | None = None
            if (
                request.region.kind is RegionKind.SHARE
                and 0 < room[numa] < _requested_cpus(left)
                and any(cpus > 0 for other, cpus in room.items() if other != numa)
            ):
                part, rest = _split_request(left, room[numa])
            bound[numa].append(part)
            room[numa] -= _requested_cpus(part)
            left = rest


def _split_request(original: RegionRequest, cpus: int) -> tuple[RegionRequest, RegionRequest]:
    """Split off a part that needs `cpus` CPUs, with the requested CPUs in the same proportion."""
    need = original.need
    requirement, part_requested = (
        min(max(round(size * cpus / need), 1), max(size - 1, 1)) for size in (original.requirement, original.requested)
    )
    part = replace(original, requirement=requirement, requested=part_requested)
    rest = replace(
        original,
        requirement=max(original.requirement - requirement, 1),
        requested=max(original.requested - part_requested, 1),
    )
    return part, rest


def _requested_cpus(request: RegionRequest) -> int:
    return request.upper if request.region.kind is RegionKind.ISOLATION else request.need


def _of_kind(requests: Iterable[RegionRequest], kind: RegionKind) -> list[RegionRequest]:
    return [request for request in requests if request.region.kind is kind]


def _regulate_pools(requests: Sequence[RegionRequest], room: int, mode: SharingMode) -> PoolRegulation:
    share, dedicated = _of_kind(requests, RegionKind.SHARE), _of_kind(requests, RegionKind.DEDICATED)
    isolated = _of_kind(requests, RegionKind.ISOLATION)
    requested = max(sum(request.requested for request in share), sum(request.requirement for request in share))
    has_room = requested + sum(request.upper for request in isolated) <= room - sum(
        request.requested for request in dedicated
    )
    fixed = {request.pool: request.upper if has_room else request.lower for request in isolated}
    fixed.update({request.pool: request.requested for request in dedicated})
    expand = mode.overlap or not mode.enable_reclaim
    flexible = {request.pool: request.requested if expand else request.need for request in share}
    return regulate_pool_sizes(flexible, fixed, room, expand=expand)


def _size_shared(group: NumaGroup, mode: SharingMode) -> tuple[PoolRegulation, _ReclaimPool]:
    room = group.available if mode.overlap else group.available - group.reserved
    regulation = _regulate_pools(group.requests, room, mode)
    if mode.overlap:
        return regulation, _size_overlapping(group, regulation, mode)
    left = max(group.available - regulation.occupied, 0)
    if not mode.enable_reclaim:
        return regulation, _ReclaimPool(min(group.reserved, left), {})
    gaps = {
        request.pool: regulation.sizes[request.pool] - request.requirement
        for request in _of_kind(group.requests, RegionKind.DEDICATED)
        if request.region.reclaimable
    }
    overlap = {pool: gap for pool, gap in gaps.items() if gap > 0}
    return regulation, _ReclaimPool(left + sum(overlap.values()), overlap)


def _size_overlapping(group: NumaGroup, regulation: PoolRegulation, mode: SharingMode) -> _ReclaimPool:
    """Reclaimed pods run on CPUs of online pools: as many of each pool as it does not require."""
    sizes = regulation.sizes
    online = {request.pool: request for request in group.requests if request.region.kind is not RegionKind.ISOLATION}
    reclaimable_sizes = {pool: sizes[pool] for pool, request in online.items() if request.region.reclaimable}
    share = {pool: sizes[pool] for pool, request in online.items() if request.region.kind is RegionKind.SHARE}
    required = sum(online[pool].requirement if pool in reclaimable_sizes else sizes[pool] for pool in share)
    rest = {pool: size for pool, size in sizes.items() if pool not in share}
    free = group.available - sum(rest.values()) - required
    gaps = sum(max(sizes[pool] - online[pool].requirement, 0) for pool in reclaimable_sizes if pool not in share)
    if not mode.enable_reclaim:
        overlap = _overlap_reserve(
            group.reserved, free, reclaimable_sizes, share, _pools_for_reserve(online, sizes, group.reserved)
        )
        reclaim = _ReclaimPool(group.reserved, overlap)
    elif free + gaps >= group.reserved:
        # A pool that requires all of its CPUs still shares one, so that reclaimed pods on it always have a CPU.
        reclaim = _ReclaimPool(
            free + gaps, {pool: max(sizes[pool] - online[pool].requirement, 1) for pool in reclaimable_sizes}
        )
    else:
        pools = _pools_for_reserve(online, sizes, group.reserved)
        reclaim = _ReclaimPool(group.reserved, regulate_overlap(pools, min(group.reserved, sum(pools.values()))))
    if mode.quota and group.numa != NOT_NUMA_BOUND and online:
        overlap = {pool: max(cpus, reclaimable_sizes.get(pool, 0)) for pool, cpus in reclaim.overlap.items()}
        reclaim = _ReclaimPool(reclaim.cpus, overlap, _group_quota(group, online.values(), reclaim.cpus))
    return reclaim


def _pools_for_reserve(online: Iterable[str], sizes: Mapping[str, int], reserved: int) -> dict[str, int]:
    """Sizes of the pools that the reserve may overlap: isolation pools only if the others are too small."""
    pools = {pool: sizes[pool] for pool in online}
    return pools if sum(pools.values()) >= reserved else dict(sizes)


def _overlap_reserve(
    reserved: int, free: int, reclaimable_sizes: dict[str, int], share: dict[str, int], all_pools: dict[str, int]
) -> dict[str, int]:
    """With reclaim disabled: the pools that the reserve of reclaimed pods overlaps."""
    if reserved > free:
        pools = reclaimable_sizes if reserved <= sum(reclaimable_sizes.values()) else all_pools
        return regulate_overlap(pools, min(reserved, sum(pools.values())))
    if share and reserved <= sum(share.values()):
        return regulate_overlap(share, reserved)
    return {}


def _group_quota(group: NumaGroup, requests: Iterable[RegionRequest], reclaim: int) -> float:
    """The minimum of the quotas of share and dedicated regions, and at least the reserve; without one, the reclaim pool."""
    requested: dict[RegionKind, list[float]] = {RegionKind.SHARE: [], RegionKind.DEDICATED: []}
    for request in requests:
        if request.quota is not None:
            requested[request.region.kind].append(request.quota)
    quota = min((min(requested[RegionKind.SHARE], default=float(reclaim)), *requested[RegionKind.DEDICATED]))
    return max(float(group.reserved), quota)


def _size_exclusive(
    group: NumaGroup, exclusive: Sequence[RegionRequest], mode: SharingMode
) -> tuple[PoolRegulation, _ReclaimPool]:
    """An exclusive pod may run on its whole NUMA node, reclaimed pods on the CPUs that it does not require."""
    others = [request for request in group.requests if not request.region.exclusive]
    room = max(group.available - group.reserved - len(exclusive), len(others))
    other_pools = _regulate_pools(others, room, SharingMode()) if others else PoolRegulation({}, 0)
    each = max((group.available - other_pools.occupied) // len(exclusive), 1)
    own = {request.pool: each for request in exclusive}
    required = {
        request.pool: min(request.requirement, each) if request.region.reclaimable else each for request in exclusive
    }
    regulation = PoolRegulation({**other_pools.sizes, **own}, group.available, throttled=other_pools.throttled)
    reserved = min(max(ceil(group.reserved / len(exclusive)), 1), each)
    if not mode.quota:
        return regulation, _ReclaimPool(0, {pool: max(each - required[pool], reserved) for pool in own})
    # The quota of a policy takes precedence over the CPUs that the requirement leaves.
    quotas = {
        request.pool: request.quota for request in exclusive if request.quota is not None and request.region.reclaimable
    }
    left = sum(each if pool in quotas else each - required[pool] for pool in own)
    return regulation, _ReclaimPool(0, own, max(float(group.reserved), min((float(left), *quotas.values()))))


def pool_reclaimable_cores(sizes: Sequence[PoolSize], numa_nodes: Collection[int]) -> float | None:
    """Return the cores of reclaimed pods by the sizes and quotas of their pools; None without such a pool."""
    pools = {size.numa: size for size in sizes if size.pool == "reclaim"}
    if not pools:
        return None
    sizes_by_numa = {numa: size.cpus + sum(size.overlap.values()) for numa, size in pools.items()}
    limits = {numa: inf if size.quota_cores is None else size.quota_cores for numa, size in pools.items()}
    if set(numa_nodes) <= set(pools) and NOT_NUMA_BOUND in pools:
        # The unbound pool overlaps all NUMA nodes, within their quotas.
        return float(min(sum(sizes_by_numa.values()), sum(limits[numa] for numa in numa_nodes)))
    return float(sum(min(cpus, limits[numa]) for numa, cpus in sizes_by_numa.items()))
