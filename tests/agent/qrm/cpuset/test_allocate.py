"""Whole allocations: pool sizes become pools, pods get CPUs, and the state carries both to the next cycle."""

from __future__ import annotations

import msgspec
import pytest

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetState, with_numa_bindings
from api.cpu import Topology
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from tests.agent.qrm.cpuset.builders import S, bound, counts, cpus, dedicated, machine, pod, pools, reclaimed, run, size

BIG = machine(2, 1, 1, 12, 2)
"""48 CPUs on two NUMA nodes: 0-11,24-35 and 12-23,36-47."""
EIGHT = machine(1, 1, 1, 8, 1)
TWO = machine(2, 1, 1, 4, 1)
"""0-3 and 4-7."""


def named(name: str, cores: float) -> Pod:
    """A shared pod of pool `batch`."""
    return pod(name, cores=cores, wants=Enhancements(cpuset_pool="batch"))


def offline(topology: Topology, *offline_cpus: int) -> Topology:
    return Topology(cpus=tuple(cpu for cpu in topology.cpus if cpu.id not in offline_cpus))


@pytest.mark.parametrize(
    ("share", "near", "reclaims"), [(6, 8, (18, 16)), (20, 20, (4, 4))], ids=["reclaim on", "reclaim off"]
)
def test_sizes_of_katalysts_assembler(share: int, near: int, reclaims: tuple[int, int]) -> None:
    sizes = (
        size("share", share), size("share-NUMA1", near, 1), size("reclaim", reclaims[0], 0), size("reclaim", reclaims[1], 1)
    )  # fmt: skip
    bound_near = msgspec.structs.replace(bound("near", 4.0), bound_numa=(1,))
    placement, _ = run(sizes, (pod("web", cores=2.0), bound_near), BIG)
    assert counts(placement) == {
        "share": share,
        "share-NUMA1": near,
        "reclaim": sum(reclaims),
        "fallback": share + near,
    }
    on_second = {cpu.id for cpu in BIG.cpus if cpu.numa == 1}
    by_name = {pool.name: set(pool.cpus) for pool in placement.pools}
    assert not by_name["share"] & on_second
    assert by_name["share-NUMA1"] <= on_second
    assert len(by_name["reclaim"] & on_second) == reclaims[1]


def test_overlap_and_isolation_of_katalysts_assembler() -> None:
    sizes = (
        size("share", 24), size("share-NUMA1", 8, 1), size("isolation-NUMA1-default/a", 8, 1),
        size("isolation-default/b-NUMA1", 8, 1), size("reclaim", 0, share=18, share_NUMA1=4),
    )  # fmt: skip
    pods = (pod("web"), *(bound(name, 4.0) for name in ("near", "a", "b")))
    state = run(sizes, tuple(msgspec.structs.replace(each, bound_numa=(1,)) for each in pods[1:]), BIG)[1]
    placement, after = run(sizes, pods, BIG, state)
    by_name = {pool.name: set(pool.cpus) for pool in placement.pools}
    assert {name: len(held) for name, held in by_name.items() if name != "fallback"} == {
        "share": 24, "share-NUMA1": 8, "isolation-NUMA1-default/a": 8, "isolation-default/b-NUMA1": 8, "reclaim": 22
    }  # fmt: skip
    assert len(by_name["reclaim"] & by_name["share"]) == 18
    assert len(by_name["reclaim"] & by_name["share-NUMA1"]) == 4
    assert set(placement.cpus["/a"]) == by_name["isolation-NUMA1-default/a"]
    assert set(placement.cpus["/b"]) == by_name["isolation-default/b-NUMA1"]
    assert set(placement.cpus["/near"]) == by_name["share-NUMA1"]
    assert by_name["fallback"] == set(BIG.ids)
    assert after.overlap
    again, _ = run(sizes, pods, BIG, after)
    assert again.cpus == placement.cpus


def test_the_tutorials_share_pool_grows_from_six_to_eight_and_keeps_its_six() -> None:
    pods = (pod("web", cores=2.0), reclaimed("batch"))
    first, state = run((size("share", 6), size("reclaim", 42)), pods, BIG)
    assert pools(first) == {"share": "0-2,24-26", "fallback": "0-2,24-26", "reclaim": "3-23,27-47"}
    second, _ = run((size("share", 8), size("reclaim", 40)), pods, BIG, state)
    assert cpus(second) == {"/web": "0-3,24-27", "/batch": "4-23,28-47"}
    assert second.mems == {"/web": (0, 1), "/batch": (0, 1)}
    assert second.reasons["/web"].text == "The container runs on the CPUs of pool share: 0-3,24-27."


@pytest.mark.parametrize(
    ("config", "reserve", "share"),
    [
        ({"reserved_cpus": 2}, "0,12", "1,25"),
        ({"reserved_cpu_list": "5,29"}, "5,29", "0,24"),
        ({"reserved_cpu_list": "5,99"}, "5", "0,24"),
        ({"reserved_cpus": 2, "interrupt_cpu_list": "0,24"}, "1,12", "2,26"),
        ({"reserved_cpus": 99}, "0-46", "47"),
        ({"reserved_cpu_list": "0-47"}, "0-46", "47"),
        ({"interrupt_cpu_list": "0-47"}, None, "0,24"),
    ],
)
def test_reserved_and_interrupt_cpus_are_assigned_to_no_pool(
    config: dict[str, object], reserve: str | None, share: str
) -> None:
    pods = (pod("web", cores=2.0), pod("agent", QoSLevel.SYSTEM))
    placement, _ = run((size("share", 2),), pods, BIG, config=CpuPlacementConfig(**config))
    assert pools(placement).get("reserve") == reserve
    assert cpus(placement)["/web"] == share
    assert reserve is None or cpus(placement)["/agent"] == reserve


def test_the_reserve_stays_where_it_was_and_takes_no_cpu_of_dedicated_pods() -> None:
    config = CpuPlacementConfig(reserved_cpus=2)
    pods = (dedicated("db", 2.0), pod("web", cores=1.0))
    first, state = run((), pods, TWO, config=config)
    assert (pools(first)["reserve"], cpus(first)["/db"], cpus(first)["/web"]) == ("0,4", "1-2", "3")
    second, state = run((), pods, offline(TWO, 0), state, config)
    assert (pools(second)["reserve"], cpus(second)["/db"], cpus(second)["/web"]) == ("3-4", "1-2", "5")
    back, _ = run((), pods, TWO, state, config)
    assert pools(back)["reserve"] == "3-4"


def test_system_pods_run_on_the_reserve_or_the_node_and_named_ones_in_their_pool() -> None:
    pods = (
        pod("agent", QoSLevel.SYSTEM), pod("dns", QoSLevel.SYSTEM, wants=Enhancements(cpuset_pool="net")),
        pod("log", QoSLevel.SYSTEM, wants=Enhancements(cpuset_pool="log")), dedicated("db", 2.0),
    )  # fmt: skip
    placement, _ = run((size("system-net", 2),), pods, EIGHT)
    assert cpus(placement) == {"/agent": "2-7", "/dns": "2-3", "/log": "2-7", "/db": "0-1"}


@pytest.mark.parametrize(
    ("pods", "config", "expected"),
    [
        # Requests rounded up; the rest to reclaim.
        ((pod("a", cores=1.2), pod("b", cores=0.5)), {}, {"share": 2, "reclaim": 6}),
        ((pod("a", cores=2.0), named("b", 3.0)), {}, {"share": 2, "batch": 3, "reclaim": 3}),
        # A pod without a request counts as configured.
        ((pod("a"),), {}, {"share": 4, "reclaim": 4}),
        # 30 of 8 minus reclaim's 2: in proportion.
        ((pod("a", cores=10.0), named("b", 20.0)), {}, {"share": 2, "batch": 4, "reclaim": 2}),
        ((pod("a", cores=10.0),), {"min_reclaimed_cpus": 3}, {"share": 5, "reclaim": 3}),
        ((), {}, {"reclaim": 8}),
    ],
)  # fmt: skip
def test_sizes_are_computed_from_requests(
    pods: tuple[object, ...], config: dict[str, object], expected: dict[str, int]
) -> None:
    placement, _ = run((), pods, EIGHT, config=CpuPlacementConfig(**config))
    assert {name: count for name, count in counts(placement).items() if name != "fallback"} == expected


def test_computed_sizes_of_bound_pools_are_twice_the_requests_on_their_node() -> None:
    placement, _ = run((), (bound("a", 1.5), pod("b", cores=2.0)), machine(2, 1, 1, 8, 1))
    assert pools(placement) == {"share-NUMA0": "0-2", "share": "8-9", "reclaim": "3-7,10-15", "fallback": "0-2,8-9"}


def test_a_pool_without_a_size_gets_its_requests() -> None:
    pods = (pod("a", cores=2.0), named("b", 1.0))
    placement, _ = run((size("share", 4), size("reclaim", 3)), pods, EIGHT)
    assert counts(placement) == {"share": 4, "batch": 1, "reclaim": 3, "fallback": 5}


@pytest.mark.parametrize(
    ("cpu_count", "sizes", "expected"),
    [
        (2, {"share": 1, "batch": 2, "flink": 3}, {"share": "0-1", "batch": "0-1", "flink": "0-1", "reclaim": "0"}),
        (2, {"share": 2}, {"share": "0-1", "reclaim": "0"}),
        (2, {"share": 2, "reclaim": 1}, {"share": "0", "reclaim": "1"}),
        (1, {"share": 1, "reclaim": 1}, {"share": "0", "reclaim": "0"}),
        (6, {"share": 6, "batch": 6, "reclaim": 0}, {"share": "3-5", "batch": "0-2", "reclaim": "0"}),
        (16, {"share": 16}, {"share": "0-15", "reclaim": "0-3"}),
        (6, {"share": 9, "reclaim": 3}, {"share": "0-4", "reclaim": "5"}),
    ],
)
def test_pools_share_cpus_if_there_are_too_few(cpu_count: int, sizes: dict[str, int], expected: dict[str, str]) -> None:
    pool_sizes = tuple(size(name, count) for name, count in sizes.items())
    placement, _ = run(pool_sizes, (), machine(1, 1, 1, cpu_count, 1))
    assert {name: held for name, held in pools(placement).items() if name != "fallback"} == expected


def test_a_new_container_may_use_all_cpus_of_pools_until_its_ramp_up_ends() -> None:
    sizes = (size("share", 2), size("reclaim", 4))
    pods = (pod("old", cores=1.0), dedicated("db", 1.0))
    first, state = run(sizes, pods, EIGHT, at_s=100.0)
    assert cpus(first)["/old"] == "1-2", "containers from before the agent are not new"
    with_new = (*pods, pod("new", cores=1.0))
    ramping, state = run(sizes, with_new, EIGHT, state, at_s=101.0)
    assert cpus(ramping) == {"/old": "1-2", "/db": "0", "/new": "1-7"}
    assert ramping.reasons["/new"].rule == "ramp_up"
    assert state.pod_entries["u-new"]["c"].ramp_up
    done, state = run(sizes, with_new, EIGHT, state, at_s=131.0)
    assert cpus(done)["/new"] == "1-2"
    assert not state.pod_entries["u-new"]["c"].ramp_up


def test_dedicated_without_numa_binding_is_rejected_and_runs_with_the_shared() -> None:
    pods = (pod("db", QoSLevel.DEDICATED, 2.0), pod("web", cores=3.0))
    placement, _ = run((), pods, EIGHT)
    assert placement.rejected["default/db"].rule == "dedicated_needs_numa_binding"
    assert cpus(placement)["/db"] == cpus(placement)["/web"] == pools(placement)["fallback"] == "0-4", "2 + 3 CPUs"


def test_dedicated_has_whole_cores_for_itself_and_sidecars_follow() -> None:
    main = dedicated("db", 4.0)
    sidecar = Container(name="proxy", cgroup="/db-proxy", cpu_request_cores=1.0, sidecar=True)
    second = Container(name="backup", cgroup="/db-backup", cpu_request_cores=2.0)
    db = msgspec.structs.replace(main, containers=(sidecar, *main.containers, second))
    placement, state = run((), (db, pod("web", cores=2.0)), BIG)
    assert cpus(placement) == {"/db": "0-1,24-25", "/db-proxy": "0-1,24-25", "/db-backup": "2,26", "/web": "3,27"}
    assert placement.mems["/db"] == placement.mems["/db-proxy"] == (0,)
    assert state.machine_state[0].allocated_cpuset == "0-2,24-26"
    assert state.machine_state[0].default_cpuset == "3-11,27-35"
    assert placement.reasons["/db"].text.startswith(
        "default/db requests 6 CPUs and has 6 exclusive CPUs of NUMA node 0;"
    )


@pytest.mark.parametrize(("hint", "nodes"), [("spreading", "0 1 0 1"), ("packing", "0 0 0 1")])
def test_dedicated_pods_spread_or_pack(hint: str, nodes: str) -> None:
    pods = tuple(dedicated(name, 1.0 if name < "d" else 2.0) for name in "abcd")
    placement, _ = run((), pods, TWO, config=CpuPlacementConfig(numa_hint=hint))
    assert " ".join(str(placement.mems[f"/{name}"][0]) for name in "abcd") == nodes


def test_an_exclusive_pod_owns_its_node_except_the_reserve_and_overlaps_reclaim() -> None:
    config = CpuPlacementConfig(reserved_cpus=2)
    pods = (dedicated("db", 3.0, numa_exclusive=True), pod("web", cores=1.0), reclaimed("batch"))
    sizes = (size("share", 1), size("reclaim", 2), size("reclaim", 1, 0))
    placement, state = run(sizes, pods, TWO, config=config)
    assert cpus(placement) == {"/db": "1-3", "/web": "5", "/batch": "1,6-7"}
    assert placement.mems == {"/db": (0,), "/web": (1,), "/batch": (0, 1)}
    more = (*pods, dedicated("late", 2.0, numa_ids=(0,), numa_exclusive=True), bound("near", 0.0))
    placement, _ = run(sizes, more, TWO, state, config)
    assert cpus(placement)["/db"] == "1-3"
    assert placement.rejected["default/late"].rule == "numa_binding_impossible"
    assert "left on node 0: 0, 1: 0" in placement.rejected["default/late"].text


def test_a_dedicated_pod_keeps_its_size_when_its_request_changes_in_place() -> None:
    _, state = run((), (dedicated("db", 2.0),), EIGHT)
    placement, state = run((), (dedicated("db", 4.0),), EIGHT, state)
    assert cpus(placement) == {"/db": "0-1"}
    assert placement.rejected["default/db"].rule == "dedicated_resize"
    placement, state = run((), (dedicated("db", 2.0),), EIGHT, state)
    assert placement.rejected == {}


def test_a_lost_cpu_of_a_dedicated_pod_is_replaced_near_by() -> None:
    pods = (dedicated("db", 3.0), pod("web", cores=1.0))
    first, state = run((), pods, TWO)
    assert cpus(first)["/db"] == "0-2"
    second, state = run((), pods, offline(TWO, 1), state)
    assert cpus(second)["/db"] == "0,2-3"
    third, state = run((), pods, offline(TWO, 0, 1, 2, 3), state)
    assert cpus(third)["/db"] == "5-7", "the whole NUMA node went offline: the pod moves to the other, next to the pool"
    assert cpus(third)["/web"] == "4"
    back, _ = run((), pods, TWO, state)
    assert cpus(back) == {"/db": "5-7", "/web": "4"}
    wide = (dedicated("db", 3.0), pod("web", cores=2.0))
    shared, _ = run((), wide, offline(TWO, 0, 1, 2, 3), state)
    assert cpus(shared) == {"/db": "4-6", "/web": "4-6"}, "of four CPUs, web requests two: three are not left for db"
    assert shared.rejected["default/db"].rule == "dedicated_exceeds_free_requests"


def test_a_dedicated_pod_keeps_too_few_cpus_with_a_reason() -> None:
    pods = (dedicated("db", 4.0), dedicated("other", 4.0))
    _, state = run((), pods, TWO)
    placement, state = run((), pods, offline(TWO, 1, 2), state)
    assert cpus(placement) == {"/db": "0,3", "/other": "4-7"}
    assert placement.reasons["/db"].rule == "dedicated_short"
    assert "requests 4 CPUs and has 2 exclusive CPUs of NUMA node 0" in placement.reasons["/db"].text
    back, _ = run((), pods, TWO, state)
    assert cpus(back) == {"/db": "0-3", "/other": "4-7"}


@pytest.mark.parametrize(
    "name", ["reclaim", "reserve", "interrupt", "fallback", "dedicated", "isolation-x", "system-x", "dedicated-x"]
)
def test_pool_names_that_pods_may_not_choose(name: str) -> None:
    placement, _ = run((), (pod("web", cores=2.0, wants=Enhancements(cpuset_pool=name)),), EIGHT)
    assert pools(placement) == {"share": "0-1", "fallback": "0-1", "reclaim": "2-7"}


def test_pool_cpus_that_vanish_are_replaced_and_those_that_come_back_are_used() -> None:
    sizes = (size("share", 3), size("reclaim", 3))
    _, state = run(sizes, (), EIGHT)
    fewer, state = run(sizes, (), offline(EIGHT, 1, 4), state)
    assert pools(fewer) == {"share": "0,2,6", "fallback": "0,2,6", "reclaim": "3,5,7"}
    back, _ = run((size("share", 3), size("reclaim", 5)), (), EIGHT, state)
    assert pools(back) == {"share": "0,2,6", "fallback": "0,2,6", "reclaim": "1,3-5,7"}


def test_a_shared_binding_is_in_the_state() -> None:
    pods = (bound("a", 2.0), bound("b", 1.0))
    first, state = run((), pods, TWO)
    assert {pool: held for pool, held in pools(first).items() if "NUMA" in pool} == {
        "share-NUMA0": "0-2",
        "share-NUMA1": "4-5",
    }
    assert [each.bound_numa for each in with_numa_bindings(pods, state)] == [(0,), (1,)]
    full = (*pods, bound("c", 3.0), bound("d", 2.0))
    second, after = run((), full, TWO, state)
    assert [after.pod(each.uid)["c"].bound_numa for each in full] == [(0,), (1,), (1,), (0,)]
    assert second.mems["/c"] == (1,)
    assert second.rejected == {}
    third, _ = run((), (*full, bound("e", 0.5)), TWO, after)
    assert third.rejected["default/e"].text == (
        "default/e requests 0.5 CPUs; no NUMA nodes have them (left on node 0: 0, 1: 0)."
    )


@pytest.mark.parametrize(
    ("near", "others", "rule"),
    [
        (bound("a", 5.0), (), "numa_binding_impossible"),  # more than a node has
        (bound("a", 2.0, numa_ids=(0, 1)), (), "numa_binding_impossible"),  # two nodes
        (bound("a", 2.0), (pod("b", cores=3.0),), None),
        (bound("a", 2.0), (pod("b", cores=5.0),), "numa_binding_impossible"),  # b would not fit on the other node
        (msgspec.structs.replace(bound("a", 2.0), bound_numa=(1,)), (), None),
    ],
)
def test_shared_binding_needs_one_node_that_the_others_can_spare(
    near: object, others: tuple[object, ...], rule: str | None
) -> None:
    placement, state = run((), (near, *others), TWO)
    assert {key: verdict.rule for key, verdict in placement.rejected.items()} == ({"default/a": rule} if rule else {})
    assert with_numa_bindings((near,), state)[0].bound_numa == (near.bound_numa or ((0,) if rule is None else ()))


def test_on_one_numa_node_bound_pods_get_what_the_others_leave() -> None:
    placement, _ = run((), (bound("a", 3.0), pod("b", cores=5.0)), EIGHT)
    assert placement.rejected == {}
    placement, _ = run((), (bound("a", 3.5), pod("b", cores=5.0)), EIGHT)
    assert "default/a" in placement.rejected


def test_without_numa_share_a_node_holds_one_bound_pod() -> None:
    pods = (bound("a", 1.0, numa_share=False), bound("b", 1.0), bound("c", 1.0))
    placement, _ = run((), pods, TWO)
    assert [placement.mems[f"/{name}"] for name in "abc"] == [(0,), (1,), (1,)]


def test_reclaimed_binding_needs_headroom_that_is_known() -> None:
    config = CpuPlacementConfig(enable_reclaim_numa_binding=True)
    pods = tuple(reclaimed(name, 2.0, numa_binding=name < "d") for name in "abcd")
    unknown, _ = run((), pods, TWO, config=config)
    assert {verdict.rule for verdict in unknown.rejected.values()} == {"numa_headroom_unknown"}
    headroom = CpusetState(numa_headroom={0: 3.0, 1: 4.5})
    # d needs 2 of some node, so only one node can be for bound pods: the one with most, which holds two of three.
    placement, state = run((), pods, TWO, headroom, config)
    assert cpus(placement) == {"/a": "4-7", "/b": "4-7", "/c": "0-3", "/d": "0-3"}
    assert placement.rejected.keys() == {"default/c"}
    assert "CPUs left by node: 1: 0.5" in placement.rejected["default/c"].text
    assert placement.mems["/a"] == (1,)
    without_headroom = msgspec.structs.replace(state, numa_headroom={})
    placement, _ = run((), pods, TWO, without_headroom, config)
    assert cpus(placement)["/a"] == "4-7", "a bound pod stays bound while headroom is unknown"
    off, _ = run((), pods, TWO, headroom)
    assert set(cpus(off).values()) == {"0-7"}
    assert off.rejected == {}


def test_excess_requests_are_rejected_for_the_newest_pods() -> None:
    _, state = run((), (pod("z", cores=6.0),), EIGHT, at_s=1.0)
    placement, _ = run((), (pod("a", cores=3.0), pod("z", cores=6.0)), EIGHT, state, at_s=2.0)
    assert placement.rejected.keys() == {"default/a"}
    assert placement.rejected["default/a"].threshold == 8.0
    assert placement.cpus["/a"]


def test_cpus_of_an_unlisted_pod_are_retained_until_it_expires() -> None:
    db, web = dedicated("db", 2.0), pod("web", cores=2.0)
    _, state = run((), (db, web), EIGHT)
    without, state = run((), (web, dedicated("other", 2.0)), EIGHT, state, at_s=10.0)
    assert cpus(without) == {"/web": "2-3", "/other": "4-5"}
    back, _ = run((), (web, db), EIGHT, state, at_s=20.0)
    assert cpus(back)["/db"] == "0-1"
    late = 10.0 + CpuPlacementConfig().residual_s
    expired, _ = run((), (web, dedicated("other", 2.0), dedicated("new", 1.0)), EIGHT, state, at_s=late)
    assert cpus(expired)["/new"] in ("0", "1")


def test_sizes_of_offline_numa_nodes_move_to_the_others() -> None:
    placement, _ = run((size("share-NUMA1", 2, 1), size("reclaim", 2, 1)), (), machine(1, 1, 1, 4, 1))
    assert pools(placement) == {"share-NUMA1": "0-1", "reclaim": "2-3", "fallback": "0-1"}


@pytest.mark.parametrize("qos", list(QoSLevel))
@pytest.mark.parametrize("policy", ["dynamic", "native"])
@pytest.mark.parametrize(
    "wants",
    [
        Enhancements(),
        Enhancements(numa_binding=True),
        Enhancements(numa_binding=True, numa_exclusive=True),
        Enhancements(numa_binding=True, numa_share=True),
    ],
)
def test_a_restarting_pod_keeps_its_cpus_and_one_that_never_started_has_none(
    qos: QoSLevel, wants: Enhancements, policy: str
) -> None:
    node, config = machine(1, 2, 1, 4, 1), CpuPlacementConfig(policy=policy, ramp_up_s=0)  # type: ignore[arg-type]
    running = pod("db", qos, 2, wants)
    waiting = without_running(running, "c")
    first, state = allocate_cpusets((), [waiting, pod("web", cores=1)], node, CpusetState(), config, 0)
    assert "/db" not in first.cpus
    _, state = allocate_cpusets((), [running, pod("web", cores=1)], node, state, config, S)
    had = {name: entry.cpus for name, entry in state.pod(running.uid).items()}
    _, down = allocate_cpusets((), [waiting, pod("web", cores=1)], node, state, config, 2 * S)
    assert {name: entry.cpus for name, entry in down.pod(running.uid).items()} == had
    late = (3 + round(config.residual_s)) * S
    placement, down = allocate_cpusets((), [waiting, pod("web", cores=1)], node, down, config, late)
    assert placement.cpus.keys() == placement.mems.keys() == placement.reasons.keys() == {"/web"}
    assert {name: entry.cpus for name, entry in down.pod(running.uid).items()} == had, (
        "for as long as the restart takes"
    )
    _, ended = allocate_cpusets((), [pod("web", cores=1)], node, down, config, late)
    _, ended = allocate_cpusets((), [pod("web", cores=1)], node, ended, config, 2 * late)
    assert not ended.pod(running.uid), "its pod has ended"


def without_running(original: Pod, *names: str) -> Pod:
    """Return the pod while these containers of it do not run."""
    waiting = tuple(
        msgspec.structs.replace(container, cgroup="") for container in original.containers if container.name in names
    )
    running = tuple(container for container in original.containers if container.name not in names)
    return msgspec.structs.replace(original, containers=running, waiting=waiting)


def with_sidecar(original: Pod, **resources: float) -> Pod:
    """Return the pod with a sidecar `s`."""
    resources = {"cpu_request_cores": 1.0, **resources}
    sidecar = msgspec.structs.replace(Container(name="s", cgroup=f"/{original.name}-s", sidecar=True), **resources)
    return msgspec.structs.replace(original, containers=(*original.containers, sidecar))


def test_a_dedicated_pod_keeps_its_cpus_while_a_container_restarts() -> None:
    db, web = with_sidecar(dedicated("db", 3.0)), pod("web", cores=1.0)
    placement, state = run((), (db, web), EIGHT)
    assert (cpus(placement)["/db"], cpus(placement)["/db-s"]) == ("0-2", "0-2")
    late = dedicated("a-late", 2.0)
    placement, state = run((), (without_running(db, "c"), web, late), EIGHT, state, at_s=1.0)
    assert cpus(placement) == {"/db-s": "0-2", "/web": "3", "/a-late": "4-5"}
    placement, state = run((), (without_running(db, "s"), web, late), EIGHT, state, at_s=2.0)
    assert (cpus(placement)["/db"], cpus(placement)["/a-late"]) == ("0-2", "4-5")


def test_a_sidecar_that_starts_first_reserves_the_cpus_of_the_main_container() -> None:
    db = with_sidecar(dedicated("db", 3.0))
    placement, state = run((), (without_running(db, "c"),), EIGHT)
    assert cpus(placement) == {"/db-s": "0-2"}
    placement, _ = run((), (db, dedicated("a-late", 2.0)), EIGHT, state, at_s=1.0)
    assert (cpus(placement)["/db"], cpus(placement)["/db-s"]) == ("0-2", "0-2")


def test_the_native_policy_counts_containers_that_are_restarting() -> None:
    config = CpuPlacementConfig(policy="native")
    guaranteed = {"cpu_limit_cores": 2.0, "memory_request_bytes": 1 << 20, "memory_limit_bytes": 1 << 20}
    db = with_sidecar(pod("db", cores=2.0), cpu_request_cores=2.0, **guaranteed)
    alike = tuple(msgspec.structs.replace(container, **guaranteed) for container in db.containers)
    db = msgspec.structs.replace(db, containers=alike)
    placement, state = run((), (db,), EIGHT, config=config)
    assert cpus(placement) == {"/db": "0-1", "/db-s": "2-3"}
    other = msgspec.structs.replace(
        db, uid="u-a", name="a", containers=(msgspec.structs.replace(alike[0], cgroup="/a"),)
    )
    placement, state = run((), (without_running(db, "c"), other), EIGHT, state, config, 1.0)
    assert cpus(placement) == {"/db-s": "2-3", "/a": "4-5"}
    # With a container without requests the pod is not Guaranteed, whether that container runs or not.
    renamed = msgspec.structs.replace(with_sidecar(other, cpu_request_cores=0.0), uid="u-b", name="b")
    placement, _ = run((), (without_running(renamed, "s"),), EIGHT, config=config)
    assert cpus(placement) == {"/a": "0-7"}
