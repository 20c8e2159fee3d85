"""The cpuset state: rebuilt from cgroups, read back from JSON, and the sizes and reserves next to it."""

from __future__ import annotations

import msgspec
import pytest

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allowed_cpus import reserve_cpus
from agent.qrm.cpuset.assign_pools import PoolCapacity, fit_pool_sizes, scale_pool_sizes, spread_over_numa
from agent.qrm.cpuset.state import CpusetState, rebuild_state, with_numa_bindings
from agent.qrm.cpuset.topology_layout import layout_of
from api.snapshot import CgroupLimits, CgroupSample
from tests.agent.qrm.cpuset.builders import bound, cpus, dedicated, machine, pod, reclaimed, run, size

NODE = machine(2, 1, 1, 4, 1)
PODS = (pod("web", cores=2.0), bound("near", 1.0), dedicated("db", 2.0), reclaimed("batch"), pod("api", cores=1.0))


def samples(sets: dict[str, str | None]) -> dict[str, CgroupSample]:
    return {path: CgroupSample(path=path, id=1, limits=CgroupLimits(cpus=text)) for path, text in sets.items()}


def test_a_rebuilt_state_moves_no_container() -> None:
    placement, state = run((), PODS, NODE)
    rebuilt = rebuild_state(PODS, samples(dict(cpus(placement))), NODE, "dynamic", 7)
    after, _ = run((), PODS, NODE, rebuilt, at_s=1.0)
    assert after.cpus == placement.cpus
    assert with_numa_bindings(PODS, rebuilt) == with_numa_bindings(PODS, state)
    assert rebuilt.pod_entries["u-db"]["c"].since_ns == 7
    assert not rebuilt.pod_entries["u-web"]["c"].ramp_up


@pytest.mark.parametrize(
    ("sets", "share"),
    [
        ({"/web": "0-1", "/api": "0-1"}, {0, 1}),
        ({"/web": "0-1", "/api": "0-6"}, {0, 1}),  # of one each the smaller: the other may ramp up
        ({"/web": "0-7", "/api": "2-3"}, {2, 3}),  # as wide as the node tells nothing
        ({"/web": "0-7", "/api": "0-7"}, set()),
        ({"/web": "0-1,9", "/api": "0-1"}, {0, 1}),  # 9 is offline
        ({"/web": None, "/api": "x"}, set()),
        ({"/web": "", "/api": "9"}, set()),
        ({}, set()),
    ],
)
def test_a_pool_is_rebuilt_from_the_cpusets_of_its_containers(sets: dict[str, str | None], share: set[int]) -> None:
    pods = (pod("web"), pod("api"))
    assert rebuild_state(pods, samples(sets), NODE, "dynamic", 0).pool("share") == share


def test_a_binding_is_rebuilt_from_a_cpuset_within_one_node() -> None:
    rebuilt = rebuild_state((bound("a", 1.0), bound("b", 1.0)), samples({"/a": "4-5", "/b": "3-4"}), NODE, "dynamic", 0)
    assert rebuilt.pod("u-a")["c"].bound_numa == (1,)
    assert rebuilt.pod("u-b")["c"].bound_numa == ()
    assert rebuilt.pool("share-NUMA1") == {4, 5}


def test_a_state_survives_json() -> None:
    _, state = run((), PODS, NODE)
    assert msgspec.json.decode(msgspec.json.encode(state), type=CpusetState) == state


@pytest.mark.parametrize(
    ("available", "expected"),
    [(12, (1, 2, 3)), (6, (1, 2, 3)), (5, (1, 2, 2)), (4, (1, 1, 2)), (3, (1, 1, 1)), (2, None)],
)
def test_sizes_are_regulated_as_katalysts(available: int, expected: tuple[int, ...] | None) -> None:
    sizes_before = {("share", -1): 1, ("batch", -1): 2, ("flink", -1): 3}
    regulated = scale_pool_sizes(sizes_before, available)
    assert (None if regulated is None else tuple(regulated.values())) == expected


def test_of_equal_sizes_the_first_gives_a_cpu_back() -> None:
    assert scale_pool_sizes({("a", -1): 3, ("b", -1): 3}, 5) == {("a", -1): 2, ("b", -1): 3}


def test_reclaim_yields_all_but_one_cpu() -> None:
    room = PoolCapacity(bound={1: 4}, unbound=4)
    wants = fit_pool_sizes((size("near", 4, 1), size("share", 4), size("reclaim", 2, 1), size("reclaim", 0)), room)
    assert [(want.pool, want.numa, want.cpus) for want in wants] == [
        ("near", 1, 3), ("share", -1, 4), ("reclaim", 1, 2)
    ]  # fmt: skip
    crowded = fit_pool_sizes(
        (size("near", 9, 1), size("far", 9, 1), size("share", 3)), PoolCapacity(bound={1: 1}, unbound=3)
    )
    assert [(want.pool, want.cpus, want.shared) for want in crowded] == [
        ("near", 1, True), ("far", 1, True), ("share", 3, False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("near", "unbound", "expected"),
    [
        (1, {"share": 3}, {"near": 1, "share": 2}),  # Reclaim has the fourth CPU while each pool has one.
        (3, {"share": 2}, {"near": 3, "share": 1}),
        (2, {"share": 2, "own": 1}, {"near": 2, "share": 1, "own": 1}),
        (2, {"share": 2, "own": 1, "more": 1}, {"near": 2, "share": 2, "own": 2, "more": 2}),  # Three share two CPUs.
    ],
)
def test_reclaim_yields_its_cpu_of_a_bound_node_to_an_unbound_pool_without_one(
    near: int, unbound: dict[str, int], expected: dict[str, int]
) -> None:
    sizes = (size("near", near, 0), size("reclaim", 1, 0), *(size(name, cpus) for name, cpus in unbound.items()))
    sized_pools = fit_pool_sizes(sizes, PoolCapacity(bound={0: 4}, unbound=0))
    assert {pool.pool: pool.cpus for pool in sized_pools if pool.pool != "reclaim"} == expected


@pytest.mark.parametrize(
    ("cpu_count", "nodes", "least", "expected"),
    [(16, 2, 4, 2), (16, 2, 16, 8), (16, 8, 4, 1), (16, 2, None, 2), (8, 2, None, 1), (2, 1, None, 1), (1, 1, None, 1)],
)
def test_reserve_of_reclaim_on_each_numa_node(cpu_count: int, nodes: int, least: int | None, expected: int) -> None:
    reserve = CpuPlacementConfig(min_reclaimed_cpus=least).reclaim_reserve(cpu_count, nodes)
    assert set(spread_over_numa(reserve, range(nodes)).values()) == {expected}


@pytest.mark.parametrize("field", ["reserved_cpu_list", "interrupt_cpu_list"])
def test_an_invalid_cpu_list_in_the_settings_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a range"):
        CpuPlacementConfig(**{field: "0-3;5"})


def test_reserve_interrupt_and_usable_cpus_are_the_whole_node() -> None:
    config = CpuPlacementConfig(reserved_cpus=3, interrupt_cpu_list="0,99")
    static = reserve_cpus(layout_of(NODE), config)
    assert (static.reserve, static.interrupt) == ({1, 2, 4}, {0})
    assert static.reserve | static.interrupt | static.usable == set(NODE.ids)
