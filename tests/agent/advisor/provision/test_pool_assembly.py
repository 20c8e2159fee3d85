"""Pool sizes by regions' requests: Katalyst's own cases on two NUMA nodes of 24 CPUs, 4 of each reserved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.provision.pool_sizes import RegionRequest, SharingMode, assemble_pools
from agent.advisor.provision.regions import NumaCapacity
from api.advice import NOT_NUMA_BOUND, PoolSize, Region, RegionKind

NODE = NumaCapacity(cpus={0: 24, 1: 24}, available={0: 24, 1: 24}, reserved_for_reclaim={0: 4, 1: 4})
ON, OFF = SharingMode(), SharingMode(enable_reclaim=False)
OVERLAP, OVERLAP_OFF = SharingMode(overlap=True), SharingMode(overlap=True, enable_reclaim=False)
QUOTA = SharingMode(overlap=True, quota=True)


def _request(name: str, kind: RegionKind, numa: int | None, pool: str = "", **fields: Any) -> RegionRequest:
    """Return the request of a region; `exclusive` and `reclaimable` are of the region, other fields of the request."""
    flags = {flag: fields.pop(flag) for flag in ("exclusive", "reclaimable") if flag in fields}
    nodes = () if numa is None else (numa,)
    region = Region(name=name, kind=kind, pool=pool or name, numa_nodes=nodes, bound=numa is not None, **flags)
    return RegionRequest(region=region, **fields)


def share(name: str, requirement: int, numa: int | None = None, **fields: Any) -> RegionRequest:
    return _request(name, RegionKind.SHARE, numa, requirement=requirement, **fields)


def isolation(name: str, upper: int, lower: int, numa: int | None = 1) -> RegionRequest:
    return _request(name, RegionKind.ISOLATION, numa, upper=upper, lower=lower)


def dedicated(name: str, requirement: int, numa: int, **fields: Any) -> RegionRequest:
    return _request(f"{name}-NUMA{numa}", RegionKind.DEDICATED, numa, name, requirement=requirement, **fields)


def flat(sizes: Sequence[PoolSize]) -> dict[tuple[str, int], int]:
    return {(size.pool, size.numa): size.cpus for size in sizes}


def overlaps(sizes: Sequence[PoolSize]) -> dict[int, Mapping[str, int]]:
    return {size.numa: size.overlap for size in sizes if size.pool == "reclaim" and size.overlap}


APART = isolation("i1", 8, 4), isolation("i2", 8, 4)


@pytest.mark.parametrize(
    ("mode", "requests", "expected"),
    [
        (
            ON,
            [share("share", 6), share("share-NUMA1", 8, 1)],
            {"share": 6, "share-NUMA1": 8, "reclaim": 18, "reclaim1": 16},
        ),
        (
            OFF,
            [share("share", 6), share("share-NUMA1", 8, 1)],
            {"share": 20, "share-NUMA1": 20, "reclaim": 4, "reclaim1": 4},
        ),
        (
            ON,
            [share("share", 6), share("share-NUMA1", 8, 1), APART[0]],
            {"share": 6, "share-NUMA1": 8, "i1": 8, "reclaim": 18, "reclaim1": 8},
        ),
        (
            OFF,
            [share("share", 6), share("share-NUMA1", 8, 1), APART[0]],
            {"share": 20, "share-NUMA1": 12, "i1": 8, "reclaim": 4, "reclaim1": 4},
        ),
        (
            OFF,  # 15 and 8 are more than 20: isolated pods get their lower size
            [share("share", 6), share("share-NUMA1", 15, 1), APART[0]],
            {"share": 20, "share-NUMA1": 16, "i1": 4, "reclaim": 4, "reclaim1": 4},
        ),
        (
            ON,
            [share("share", 6), share("share-NUMA1", 15, 1), APART[0]],
            {"share": 6, "share-NUMA1": 15, "i1": 4, "reclaim": 18, "reclaim1": 5},
        ),
        (
            ON,
            [share("share", 6), share("share-NUMA1", 4, 1), *APART],
            {"share": 6, "share-NUMA1": 4, "i1": 8, "i2": 8, "reclaim": 18, "reclaim1": 4},
        ),
        (
            ON,
            [share("share", 6), share("share-NUMA1", 8, 1), *APART],
            {"share": 6, "share-NUMA1": 8, "i1": 4, "i2": 4, "reclaim": 18, "reclaim1": 8},
        ),
        (
            OFF,
            [share("share", 6), share("share-NUMA1", 8, 1), *APART],
            {"share": 20, "share-NUMA1": 12, "i1": 4, "i2": 4, "reclaim": 4, "reclaim1": 4},
        ),
        (ON, [], {"reclaim": 48}),
        (OFF, [], {"reclaim": 8}),
        (OVERLAP, [], {"reclaim": 48}),
        (OVERLAP, list(APART), {"i1": 8, "i2": 8, "reclaim": 24, "reclaim1": 8}),
        # A pool that is not reclaimable keeps the requests of its pods.
        (
            ON,
            [share("share", 6, requested=10, reclaimable=False), share("share-NUMA1", 8, 1)],
            {"share": 10, "share-NUMA1": 8, "reclaim": 14, "reclaim1": 16},
        ),
        # More pools than CPUs: all of them have all, and the reserve stays.
        (
            ON,
            [isolation(f"i{k}", 1, 1) for k in range(21)],
            {f"i{k}": 20 for k in range(21)} | {"reclaim": 24, "reclaim1": 4},
        ),
    ],
)
def test_sizes(mode: SharingMode, requests: list[RegionRequest], expected: Mapping[str, int]) -> None:
    assembled = assemble_pools(requests, NODE, mode).sizes
    assert {
        f"reclaim{size.numa}" if size.pool == "reclaim" and size.numa != NOT_NUMA_BOUND else size.pool: size.cpus
        for size in assembled
    } == expected
    assert {size.quota_cores for size in assembled} == {None}


@pytest.mark.parametrize(
    ("mode", "requests", "sizes", "reclaimable"),
    [
        (
            OVERLAP,
            [share("share", 6), share("share-NUMA1", 8, 1), *APART],
            {"share": 24, "share-NUMA1": 8, "i1": 8, "i2": 8},
            {NOT_NUMA_BOUND: {"share": 18}, 1: {"share-NUMA1": 4}},
        ),
        (
            OVERLAP_OFF,
            [share("share", 6), share("share-NUMA1", 8, 1), *APART],
            {"share": 24, "share-NUMA1": 8, "i1": 8, "i2": 8},
            {NOT_NUMA_BOUND: {"share": 4}, 1: {"share-NUMA1": 4}},
        ),
        (
            OVERLAP,
            [share("share-a", 6), share("share-b", 8)],
            {"share-a": 24, "share-b": 24},
            {NOT_NUMA_BOUND: {"share-a": 18, "share-b": 16}},
        ),
        # A pool that needs all of its CPUs still lends one of them.
        (
            OVERLAP,
            [share("share-a", 24), share("share-b", 8)],
            {"share-a": 24, "share-b": 24},
            {NOT_NUMA_BOUND: {"share-a": 1, "share-b": 16}},
        ),
        # Of one that is not reclaimable nothing is reclaimable.
        (
            OVERLAP,
            [share("share-a", 6, requested=8, reclaimable=False), share("share-b", 8, requested=8)],
            {"share-a": 24, "share-b": 24},
            {NOT_NUMA_BOUND: {"share-b": 16}},
        ),
        # But of the reserve of 8 that lies nowhere else.
        (
            OVERLAP,
            [share("share-a", 6, requested=40, reclaimable=False), share("share-b", 6, requested=8)],
            {"share-a": 40, "share-b": 8},
            {NOT_NUMA_BOUND: {"share-a": 7, "share-b": 1}},
        ),
        # Dedicated and share: the gap of both.
        (
            OVERLAP,
            [share("share-NUMA1", 8, 1), dedicated("d", 5, 1, requested=8)],
            {"share-NUMA1": 16, "d": 8},
            {1: {"share-NUMA1": 8, "d": 3}},
        ),
        # Isolated pods have nearly all: the reserve lies on the share pool and on them.
        (
            OVERLAP,
            [share("share-NUMA1", 2, 1), isolation("i1", 22, 22)],
            {"share-NUMA1": 2, "i1": 22},
            {1: {"i1": 4}},
        ),
        # The whole reserve fits on the pool that lends, so the other one is left alone.
        (
            OVERLAP_OFF,
            [share("share-a", 20, requested=40, reclaimable=False), share("share-b", 8, requested=8)],
            {"share-a": 40, "share-b": 8},
            {NOT_NUMA_BOUND: {"share-b": 8}},
        ),
        (
            OVERLAP_OFF,
            [isolation("i1", 24, 24)],
            {"i1": 24},
            {1: {"i1": 4}},
        ),
    ],
)
def test_overlap(
    mode: SharingMode,
    requests: list[RegionRequest],
    sizes: Mapping[str, int],
    reclaimable: Mapping[int, Mapping[str, int]],
) -> None:
    assembled = assemble_pools(requests, NODE, mode).sizes
    assert {size.pool: size.cpus for size in assembled if size.pool != "reclaim"} == sizes
    assert overlaps(assembled) == reclaimable
    if any(request.region.numa_nodes for request in requests):
        assert flat(assembled)["reclaim", 1] == 0


@pytest.mark.parametrize(
    ("requests", "quota", "reclaimable"),
    [
        ([share("share-NUMA1", 8, 1)], 16.0, {"share-NUMA1": 24}),  # what it does not require
        ([share("share-NUMA1", 24, 1)], 4.0, {"share-NUMA1": 24}),  # at least the reserve
        ([share("share-NUMA1", 8, 1, quota=9.5)], 9.5, {"share-NUMA1": 24}),  # what a policy says
        ([share("share-NUMA1", 8, 1, quota=2.0)], 4.0, {"share-NUMA1": 24}),
        (
            [share("share-NUMA1", 8, 1, quota=9.5), dedicated("d", 5, 1, requested=8, quota=7.0)],
            7.0,
            {"share-NUMA1": 16, "d": 8},
        ),
        # The rest of share regions is bounded by the quota of dedicated ones, but not the other way round.
        (
            [share("share-NUMA1", 10, 1), dedicated("d", 5, 1, requested=8, quota=20.0)],
            9.0,
            {"share-NUMA1": 16, "d": 8},
        ),
        (
            [share("share-NUMA1", 1, 1, quota=20.0), dedicated("d", 5, 1, requested=8)],
            20.0,
            {"share-NUMA1": 16, "d": 8},
        ),
    ],
)
def test_quota_on_a_bound_node(requests: list[RegionRequest], quota: float, reclaimable: Mapping[str, int]) -> None:
    assembled = assemble_pools([share("share", 6), *requests], NODE, QUOTA).sizes
    reclaim = {size.numa: size for size in assembled if size.pool == "reclaim"}
    assert reclaim[1].quota_cores == quota
    assert reclaim[1].overlap == reclaimable
    assert reclaim[1].cpus == 0
    assert reclaim[NOT_NUMA_BOUND].quota_cores is None
    assert reclaim[NOT_NUMA_BOUND].overlap == {"share": 18}


@pytest.mark.parametrize(
    ("mode", "region_request", "reclaimable", "quota"),
    [
        (ON, dedicated("d", 15, 1, requested=20, exclusive=True), 9, None),
        (ON, dedicated("d", 22, 1, requested=20, exclusive=True), 4, None),
        (ON, dedicated("d", 15, 1, requested=20, exclusive=True, reclaimable=False), 4, None),
        (QUOTA, dedicated("d", 15, 1, requested=20, exclusive=True), 24, 9.0),
        (QUOTA, dedicated("d", 15, 1, requested=20, exclusive=True, quota=12.5), 24, 12.5),
        (QUOTA, dedicated("d", 15, 1, requested=20, exclusive=True, quota=1.0), 24, 4.0),
        (QUOTA, dedicated("d", 15, 1, requested=20, exclusive=True, reclaimable=False), 24, 4.0),
        (QUOTA, dedicated("d", 15, 1, requested=20, exclusive=True, reclaimable=False, quota=12.5), 24, 4.0),
    ],
)
def test_a_pod_with_a_numa_node_of_its_own(
    mode: SharingMode, region_request: RegionRequest, reclaimable: int, quota: float | None
) -> None:
    assembled = assemble_pools([region_request], NODE, mode).sizes
    assert flat(assembled) == {("d", 1): 24, ("reclaim", 1): 0, ("reclaim", NOT_NUMA_BOUND): 24}
    reclaim = next(size for size in assembled if size.pool == "reclaim" and size.numa == 1)
    assert (reclaim.overlap, reclaim.quota_cores) == ({"d": reclaimable}, quota)


def test_without_overlap_cpus_that_a_dedicated_pod_does_not_require_are_reclaimable() -> None:
    assembled = assemble_pools([dedicated("d", 5, 1, requested=8), share("share-NUMA1", 6, 1)], NODE, ON).sizes
    assert flat(assembled) == {("d", 1): 8, ("share-NUMA1", 1): 6, ("reclaim", 1): 10, ("reclaim", NOT_NUMA_BOUND): 24}
    assert overlaps(assembled) == {1: {"d": 3}}


@pytest.mark.parametrize(
    ("mode", "requests", "expected"),
    [
        # The node with most room takes it.
        (
            ON,
            [share("share", 6), share("share-NUMA0", 14, 0), share("share-NUMA1", 12, 1)],
            {
                ("share-NUMA0", 0): 14,
                ("reclaim", 0): 10,
                ("share", NOT_NUMA_BOUND): 6,
                ("share-NUMA1", 1): 12,
                ("reclaim", 1): 6,
            },
        ),
        # In parts, where no node has enough: 4 and 2.
        (
            ON,
            [share("share", 6, requested=12), share("share-NUMA0", 18, 0), share("share-NUMA1", 16, 1)],
            {
                ("share", NOT_NUMA_BOUND): 6,
                ("share-NUMA0", 0): 18,
                ("reclaim", 0): 4,
                ("share-NUMA1", 1): 16,
                ("reclaim", 1): 4,
            },
        ),
        # There they fill the node like all others where nothing is reclaimable.
        (
            OFF,
            [share("share", 6, requested=6), dedicated("d", 8, 0, requested=8), dedicated("e", 16, 1, requested=16)],
            {("share", NOT_NUMA_BOUND): 12, ("d", 0): 8, ("reclaim", 0): 4, ("e", 1): 16, ("reclaim", 1): 4},
        ),
        (
            OVERLAP,
            [share("share", 6, requested=6), dedicated("d", 8, 0, requested=8), dedicated("e", 16, 1, requested=16)],
            {("share", NOT_NUMA_BOUND): 16, ("d", 0): 8, ("reclaim", 0): 0, ("e", 1): 16, ("reclaim", 1): 7},
        ),
        # No room anywhere: all of a node are squeezed.
        (
            ON,
            [share("share", 6), share("share-NUMA0", 24, 0), share("share-NUMA1", 20, 1)],
            {
                ("share-NUMA0", 0): 20,
                ("reclaim", 0): 4,
                ("share", NOT_NUMA_BOUND): 4,
                ("share-NUMA1", 1): 16,
                ("reclaim", 1): 4,
            },
        ),
        # A pod with a node for itself is spared as long as there is another one.
        (
            ON,
            [share("share", 6), dedicated("d", 4, 0, requested=4, exclusive=True), share("share-NUMA1", 18, 1)],
            {("d", 0): 24, ("reclaim", 0): 0, ("share", NOT_NUMA_BOUND): 5, ("share-NUMA1", 1): 15, ("reclaim", 1): 4},
        ),
        (
            ON,
            [
                share("share", 6),
                dedicated("d", 4, 0, requested=4, exclusive=True),
                dedicated("e", 9, 1, requested=4, exclusive=True),
            ],
            {("share", NOT_NUMA_BOUND): 1, ("d", 0): 23, ("reclaim", 0): 0, ("e", 1): 24, ("reclaim", 1): 0},
        ),
    ],
)
def test_unbound_regions_overlap_bound_ones_if_every_node_has_bound_pods(
    mode: SharingMode, requests: list[RegionRequest], expected: Mapping[tuple[str, int], int]
) -> None:
    assert flat(assemble_pools(requests, NODE, mode).sizes) == {**expected, ("reclaim", NOT_NUMA_BOUND): 0}


def test_a_split_region_is_granted_all_its_parts() -> None:
    requests = [
        share("share", 6, requested=6),
        share("share-NUMA0", 20, 0, requested=20),
        share("share-NUMA1", 18, 1, requested=18),
    ]
    assembled = assemble_pools(requests, NODE, OVERLAP)
    assert assembled.granted["share"] == sum(size.cpus for size in assembled.sizes if size.pool == "share")
    assert assembled.reclaimable_cpus["share"] == sum(size.overlap.get("share", 0) for size in assembled.sizes)


def test_more_pools_than_cpus_on_the_only_node() -> None:
    node = NumaCapacity(cpus={0: 2}, available={0: 2}, reserved_for_reclaim={0: 1})
    requests = [share("a", 2), share("b", 2), share("c", 2), share("share-NUMA0", 2, 0)]
    assembled = assemble_pools(requests, node, ON)
    assert assembled.granted == {"a": 1, "b": 1, "c": 1, "share-NUMA0": 1}
    assert flat(assembled.sizes)["reclaim", 0] == 1


def test_isolated_pods_count_with_their_upper_size_when_room_is_looked_for() -> None:
    requests = [share("share", 6), isolation("i0", 18, 2, 0), isolation("i1", 14, 2)]
    assembled = assemble_pools(requests, NODE, ON)
    assert assembled.granted == {"share": 6, "i0": 18, "i1": 14}


def test_throttled_regions_are_named() -> None:
    result = assemble_pools([share("share", 6), share("share-NUMA1", 30, 1)], NODE, ON)
    assert result.throttled == {"share-NUMA1"}
    assert result.granted == {"share": 6, "share-NUMA1": 20}


@st.composite
def nodes(draw: st.DrawFn) -> tuple[NumaCapacity, list[RegionRequest]]:
    numa = draw(st.integers(1, 4))
    cpus = draw(st.integers(4, 64))
    reserved = draw(st.integers(1, 4))
    reserve = draw(st.integers(0, min(2, cpus - reserved)))
    node = NumaCapacity(
        cpus=dict.fromkeys(range(numa), cpus),
        available=dict.fromkeys(range(numa), cpus - reserve),
        reserved_for_reclaim=dict.fromkeys(range(numa), min(reserved, cpus - reserve)),
    )
    small = st.integers(1, 2 * cpus)
    requests: list[RegionRequest] = []
    for where in (None, *range(numa)):
        if where is not None and draw(st.booleans()) and draw(st.booleans()):
            requests.append(
                dedicated(
                    f"x{where}",
                    draw(small),
                    where,
                    requested=draw(small),
                    exclusive=True,
                    reclaimable=draw(st.booleans()),
                )
            )
            continue
        suffix = "" if where is None else f"-NUMA{where}"
        requests += [
            share(f"s{k}{suffix}", draw(small), where, requested=draw(small), reclaimable=draw(st.booleans()))
            for k in range(draw(st.integers(0, 2)))
        ]
        requests += [
            isolation(f"i{k}{suffix}", size := draw(small), size, where) for k in range(draw(st.integers(0, 1)))
        ]
        if where is not None and draw(st.booleans()):
            requests.append(dedicated(f"d{where}", draw(small), where, requested=draw(small)))
    return node, requests


@given(nodes(), st.booleans(), st.booleans(), st.booleans())
def test_every_pool_has_a_cpu_and_no_cpu_is_assigned_twice(
    node_and_requests: tuple[NumaCapacity, list[RegionRequest]], enable: bool, overlap: bool, quota: bool
) -> None:
    node, requests = node_and_requests
    mode = SharingMode(enable_reclaim=enable, overlap=overlap, quota=quota)
    result = assemble_pools(requests, node, mode)
    assert result == assemble_pools(list(reversed(requests)), node, mode)._replace(sizes=result.sizes)
    assert all(result.granted[request.region.name] >= 1 for request in requests)
    by_group: dict[int, list[PoolSize]] = {}
    for size in result.sizes:
        by_group.setdefault(size.numa, []).append(size)
    crowded = set()
    # Pools without a NUMA node that are laid over those of others: the reserve of a node may lie on them.
    overlapping = {request.region.numa_nodes[0] for request in requests if request.region.bound} == set(node.cpus)
    for numa, sizes in by_group.items():
        online = [size for size in sizes if size.pool != "reclaim"]
        (reclaim,) = [size for size in sizes if size.pool == "reclaim"]
        bound = {request.region.numa_nodes[0] for request in requests if request.region.bound}
        where = [numa] if numa != NOT_NUMA_BOUND else [free for free in node.cpus if free not in bound]
        available = sum(node.available[n] for n in where)
        reserved = sum(node.reserved_for_reclaim[n] for n in where)
        if len(online) > available - reserved - len(requests):
            if where:
                crowded.add(numa)  # perhaps fewer CPUs than pools: all of them have the same ones
            continue
        assert sum(size.cpus for size in online) + reclaim.cpus <= available
        if not overlapping:
            assert reclaim.cpus + sum(reclaim.overlap.values()) >= reserved
        for pool, cpus in reclaim.overlap.items():
            assert 1 <= cpus <= next(size.cpus for size in online if size.pool == pool)
        if reclaim.quota_cores is not None:
            assert quota
            assert numa != NOT_NUMA_BOUND
            assert reclaim.quota_cores >= reserved
    if not crowded:
        total = sum(size.cpus for size in result.sizes)
        assert total <= sum(node.available.values())
        if enable and not overlap:
            assert total == sum(node.available.values())
        reclaimable = sum(size.cpus + sum(size.overlap.values()) for size in result.sizes if size.pool == "reclaim")
        assert reclaimable >= sum(node.reserved_for_reclaim.values())
