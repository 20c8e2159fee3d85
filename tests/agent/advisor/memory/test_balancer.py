"""Which NUMA node is relieved, whose memory moves, and where to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from agent.advisor.memory.balancer import Level, plan, thresholds
from agent.advisor.memory.migration import Balanced, balance
from agent.advisor.memory.situation import NumaLoad, Situation, Unknown
from agent.advisor.memory.state import Move
from agent.config.memory import BalancerConfig, MemoryConfig
from api.facts import Limits
from api.pods import Pod
from api.qos import Enhancements, QoSLevel
from tests.agent.advisor.memory.builders import GIB, ROOT, S, group, pod, situation

CONFIG = BalancerConfig(enable=True)
MEMORY = MemoryConfig(balancer=CONFIG)
SHARED, RECLAIMED = QoSLevel.SHARED, QoSLevel.RECLAIMED
FAR = {
    0: {0: 10, 1: 12, 2: 32, 3: 32},
    1: {0: 12, 1: 10, 2: 32, 3: 32},
    2: {0: 32, 1: 32, 2: 10, 3: 12},
    3: {0: 32, 1: 32, 2: 12, 3: 10},
}


def loads(*pairs: tuple[float, float]) -> dict[int, NumaLoad]:
    return {numa: NumaLoad(read_latency_ns=ns, bandwidth_bytes=gb * 1e9) for numa, (ns, gb) in enumerate(pairs)}


def node(
    measured: Mapping[int, NumaLoad],
    pods: Sequence[Pod] = (),
    anon: Mapping[str, Mapping[int, float]] | None = None,
    *,
    numa: int = 4,
    at_s: float = 1000,
    **fields: Any,
) -> Situation:
    """Four nodes, of which 0 and 1, and 2 and 3, are near; `anon` by pod and NUMA node, in GiB."""
    sizes = anon or {}
    groups = [
        group(each.containers[0].cgroup, on_numa={n: (size, 1) for n, size in sizes[each.name].items()})
        for each in pods
        if each.name in sizes
    ]
    return situation(
        pods, groups, numa=numa, at_s=at_s, loads=measured, distances={n: FAR[n] for n in range(numa)}, **fields
    )


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        # all is well: no latency above 70, no gap of more than 40 to the nearest
        (loads((70, 90), (60, 50), (60, 50), (60, 50)), None),
        # grace: only to what is near and faster by 15 %
        (loads((71, 90), (60, 50), (30, 50), (30, 50)), (Level.GRACE, 0, (1,))),
        (loads((71, 90), (62, 50), (30, 50), (30, 50)), (Level.GRACE, 0, ())),  # 62 x 1.15 = 71.3
        # force: farther too, where it is faster by 20 %
        (loads((81, 90), (72, 50), (67, 50), (68, 50)), (Level.FORCE, 0, (2,))),
        (loads((80, 90), (72, 50), (60, 50), (60, 50)), (Level.GRACE, 0, ())),  # 80 is not more than 80
        (
            loads((81, 90), (60, 50), (50, 50), (40, 50)),
            (Level.FORCE, 0, (1, 3, 2)),
        ),  # the nearest first, then the fastest
        # a gap to the nearest node
        (loads((65, 90), (24, 50), (60, 50), (60, 50)), (Level.GRACE, 0, (1,))),
        (loads((65, 90), (25, 50), (20, 50), (20, 50)), None),  # 40 is not more than 40
        # its bandwidth is not the highest: above 0.8 of it counts as high
        (loads((75, 81), (40, 100), (60, 50), (60, 50)), (Level.GRACE, 0, (1,))),
        (loads((75, 80), (40, 100), (60, 50), (60, 50)), None),  # medium, and grace is not enough
        # force, medium: off the busiest, to the one with least traffic
        (loads((85, 80), (40, 100), (60, 50), (60, 40)), (Level.FORCE, 1, (3,))),
        (loads((85, 51), (40, 100), (60, 50), (60, 84)), (Level.FORCE, 1, (2,))),
        # force, low: off the busiest, to the one that only seems slow
        (loads((85, 50), (40, 100), (60, 50), (60, 40)), (Level.FORCE, 1, (0,))),
    ],
)
def test_plan(measured: dict[int, NumaLoad], expected: tuple[Level, int, tuple[int, ...]] | None) -> None:
    found = plan(node(measured), CONFIG, ())
    assert (found and (found.level, found.source, found.destinations)) == expected


def test_amd_counts_misses_of_the_last_cache() -> None:
    assert thresholds(CONFIG, "AMD_K19Zen4") == (500, 600, 400)
    assert thresholds(CONFIG, "Intel_CascadeLake") == (70, 80, 40)
    assert thresholds(BalancerConfig(grace_latency_ns=90), "AMD_K19Zen4") == (90, 600, 400)
    measured = loads((550, 90), (100, 50))
    found = plan(node(measured, numa=2, machine="AMD_K19Zen4"), CONFIG, ())
    assert found is not None
    assert found.level is Level.GRACE


@pytest.mark.parametrize(
    ("of", "what"),
    [
        (node(loads((85, 90), (40, 50))), "latency and bandwidth of NUMA node 2, 3"),
        (node(loads((0, 90), (0, 50), (0, 1), (0, 1))), "latency and bandwidth of any NUMA node"),
        (node(loads((85, 0), (40, 0), (1, 0), (1, 0))), "latency and bandwidth of any NUMA node"),
        (situation(numa=2, loads=loads((85, 9), (40, 5)), distances={0: {}, 1: {}}), "distances of NUMA node 0"),
    ],
)
def test_what_is_not_measured_moves_nothing(of: Situation, what: str) -> None:
    with pytest.raises(Unknown, match=what):
        plan(of, CONFIG, ())
    found = balance(of, MEMORY, (), None)
    assert (found.wishes, found.evictions, found.verdict.rule) == ((), (), "memory_balance_unknown")


SLOW = loads((85, 100), (40, 50), (60, 50), (60, 50))


def test_only_nodes_of_the_share_pool_count() -> None:
    of = node({0: SLOW[0], 1: SLOW[1]}, share_numa=(0, 1))
    assert plan(of, CONFIG, ()) is not None
    assert plan(node({0: SLOW[0]}, share_numa=(0,)), CONFIG, ()) is None  # nowhere to go


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (Move(at_ns=101 * S, source=1, destinations=(0,)), (3, 2)),
        (Move(at_ns=100 * S, source=1, destinations=(0,)), (1, 3, 2)),  # 15 minutes ago
        (Move(at_ns=101 * S, source=0, destinations=(1,)), (1, 3, 2)),  # the same way again is no ping-pong
        (Move(at_ns=101 * S, source=0, destinations=(1,), succeeded=False), (3, 2)),
        (Move(at_ns=101 * S, source=2, destinations=(1,)), (1, 3, 2)),
    ],
)
def test_nothing_goes_back_nor_where_it_would_not_go(move: Move, expected: tuple[int, ...]) -> None:
    measured = loads((85, 100), (40, 50), (50, 50), (45, 50))
    found = plan(node(measured), CONFIG, (move,))
    assert found is not None
    assert found.destinations == expected


def moved(found: Balanced) -> dict[str, str]:
    return {wish.cgroup.rpartition("/")[2]: wish.value for wish in found.wishes}


def run(pods: Sequence[Pod], anon: Mapping[str, Mapping[int, float]], **fields: Any) -> Balanced:
    return balance(node(SLOW, pods, anon, **fields), MEMORY, (), None)


def test_reclaimed_pods_first_the_smallest_first() -> None:
    pods = [pod("b1", RECLAIMED), pod("b2", RECLAIMED), pod("web", SHARED)]
    found = run(pods, {"b1": {0: 2}, "b2": {0: 0.5}, "web": {0: 1}})
    assert moved(found) == {"b2": "0 1", "b1": "0 1", "web": "0 1"}
    assert [wish.cgroup for wish in found.wishes] == [f"{ROOT}/b2", f"{ROOT}/b1", "/web"]
    enough = run(pods, {"b1": {0: 2.5}, "b2": {0: 0.5}, "web": {0: 1}})
    assert moved(enough) == {"b2": "0 1", "b1": "0 1"}  # 3 GiB of reclaimed pods leave online ones in peace


@pytest.mark.parametrize(
    ("qos", "size", "moves"),
    [
        (RECLAIMED, 0.125, False),
        (RECLAIMED, 0.126, True),
        (RECLAIMED, 14.9, True),
        (RECLAIMED, 15, False),
        (SHARED, 0.125, False),
        (SHARED, 9.9, True),
        (SHARED, 10, False),
        (QoSLevel.DEDICATED, 1, False),
        (QoSLevel.SYSTEM, 1, False),
    ],
)
def test_sizes_of_pods(qos: QoSLevel, size: float, moves: bool) -> None:
    assert bool(run([pod("p", qos)], {"p": {0: size}}).wishes) == moves


def test_totals() -> None:
    batch = [pod(f"b{index}", RECLAIMED) for index in range(4)]
    found = run(batch, {"b0": {0: 4}, "b1": {0: 5}, "b2": {0: 6}, "b3": {0: 7}})
    assert moved(found) == {"b0": "0 1", "b1": "0 1", "b2": "0 1"}  # 15 GiB
    web = [pod(f"w{index}", SHARED) for index in range(3)]
    found = run(web, {"w0": {0: 5}, "w1": {0: 7}, "w2": {0: 8}})
    assert moved(found) == {"w0": "0 1", "w1": "0 1"}  # 12 GiB


@pytest.mark.parametrize(
    "who",
    [
        pod("p", SHARED, bound=(0,)),
        pod("p", RECLAIMED, bound=(0,)),
        pod("p", SHARED, enhancements=Enhancements(numa_binding=True)),
        pod("p", SHARED, enhancements=Enhancements(cpuset_pool="batch")),
    ],
)
def test_bound_pods_and_those_of_other_pools_stay(who: Pod) -> None:
    assert run([who], {"p": {0: 1}}).wishes == ()


def test_where_a_pod_may_not_use_the_best_node_it_goes_to_the_next() -> None:
    of = node(SLOW, [pod("web", SHARED)], {"web": {0: 1}})
    bound = msgspec.structs.replace(of.snapshot.cgroups["/web"], limits=Limits(mems="0,2-3"))
    cgroups = {**of.snapshot.cgroups, "/web": bound}
    of = msgspec.structs.replace(of, snapshot=msgspec.structs.replace(of.snapshot, cgroups=cgroups))
    assert moved(balance(of, MEMORY, (), None)) == {"web": "0 2"}


def test_a_destination_keeps_its_critical_watermark() -> None:
    pods = [pod("b1", RECLAIMED), pod("b2", RECLAIMED)]
    anon = {"b1": {0: 2}, "b2": {0: 2.5}}
    assert moved(run(pods, anon, free=(1, 8.4, 100, 3))) == {"b1": "0 1", "b2": "0 2"}
    assert moved(run(pods, anon, free=(1, 5, 3, 3))) == {}


def test_once_in_its_interval() -> None:
    of = node(SLOW, [pod("web", SHARED)], {"web": {0: 1}})
    assert balance(of, MEMORY, (), 971 * S).verdict.rule == "memory_balance_waiting"
    assert moved(balance(of, MEMORY, (), 970 * S)) == {"web": "0 1"}
    assert balance(of, MemoryConfig(), (), None).wishes == ()


@pytest.mark.parametrize(("left", "succeeded"), [(0.3, True), (0.31, False), (1.0, False), (2.0, False), (0.0, True)])
def test_a_move_is_judged_by_what_is_left(left: float, succeeded: bool) -> None:
    web = pod("web", SHARED)
    first = balance(node(SLOW, [web], {"web": {0: 1}}), MEMORY, (), None)
    assert first.moves[0].anon == {"/web": GIB}
    again = balance(node(SLOW, [web], {"web": {0: left, 1: 1 - left}}, at_s=1030), MEMORY, first.moves, first.at_ns)
    assert again.moves[0].succeeded is succeeded
    if not succeeded:
        assert "0 1" not in moved(again).values()


def test_a_move_that_cannot_be_measured_stays_open() -> None:
    first = balance(node(SLOW, [pod("web", SHARED)], {"web": {0: 1}}), MEMORY, (), None)
    again = balance(node(SLOW, [], at_s=1030), MEMORY, first.moves, first.at_ns)
    assert again.moves[0].succeeded is None


def test_where_nothing_can_move_and_force_is_needed_the_largest_reclaimed_pod_goes() -> None:
    pods = [pod("b1", RECLAIMED), pod("b2", RECLAIMED), pod("web", SHARED)]
    anon = {"b1": {0: 20}, "b2": {0: 16}, "web": {0: 40}}
    found = run(pods, anon)
    assert found.wishes == ()
    assert [(each.pod, each.numa) for each in found.evictions] == [("default/b1", 0)]
    grace = loads((75, 100), (40, 50), (60, 50), (60, 50))
    assert balance(node(grace, pods, anon), MEMORY, (), None).evictions == ()


def test_nobody_goes_on_memory_that_is_not_measured() -> None:
    found = run([pod("b1", RECLAIMED)], {})
    assert (found.evictions, found.verdict.rule) == ((), "memory_balance_stuck")
