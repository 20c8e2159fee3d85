"""Load isolation: loads, cycles, lock-out, and bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import IsolationLoad, ProvisionState
from agent.advisor.provision.load_isolation import fits_numa_nodes, isolate_pods
from agent.config.advisor import IsolationConfig
from api.pod import Container, Pod
from tests.agent.advisor.provision.builders import dedicated, shared, situation, steady
from tests.builders.nodes import S, topology

CONFIG = IsolationConfig(enabled=True)
ROOMY = IsolationConfig(enabled=True, max_resource_ratio=1.0, max_pod_ratio=1.0)
PODS = [shared("a", 2, 2), shared("b", 8, 8), shared("c", 10, 10)]


def story(
    cycles: Sequence[tuple[float, Mapping[str, float]]],
    config: IsolationConfig = CONFIG,
    pods: Sequence[Pod] = PODS,
    **more: Any,
) -> list[tuple[str, ...]]:
    """Isolated pods after each cycle; a cycle is its time and the runnable tasks by pod."""
    state, current = ProvisionState(), []
    for at_s, runnable in cycles:
        built = situation(
            pods, cpus=topology(48, sockets=2), at_s=at_s, runnable={f"/{n}": r for n, r in runnable.items()}, **more
        )
        result = isolate_pods(built, state, config)
        state = ProvisionState(loads=result.loads, isolated=tuple(sorted(result.pods)))
        current.append(tuple(key.partition("/")[2] for key in state.isolated))
    return current


@pytest.mark.parametrize(
    ("runnable", "expected"),
    [
        (3.0, ()),  # exactly 1.5 times
        (3.1, ("a",)),
        (50.0, ("a",)),
    ],
)
def test_isolated_above_one_and_a_half_times_its_limit(runnable: float, expected: tuple[str, ...]) -> None:
    assert story([(k, {"a": runnable}) for k in range(3)])[-1] == expected


@pytest.mark.parametrize(("runnable", "expected"), [(12.0, ()), (12.1, ("c",))])
def test_isolated_above_two_tasks_more_than_its_limit(runnable: float, expected: tuple[str, ...]) -> None:
    assert story([(k, {"c": runnable}) for k in range(3)], ROOMY)[-1] == expected


def test_isolated_after_three_cycles_in_a_row() -> None:
    loud, quiet = {"a": 9.0}, {"a": 1.0}
    assert story([(0, loud), (1, loud), (2, quiet), (3, loud), (4, loud), (5, loud)]) == [(), (), (), (), (), ("a",)]


def test_isolation_ends_two_minutes_after_its_load_fell() -> None:
    loud, quiet = {"a": 9.0}, {"a": 1.0}
    cycles = [(0, loud), (1, loud), (2, loud), (10, quiet), (129, quiet), (130, quiet), (131, loud)]
    assert story(cycles) == [(), (), ("a",), ("a",), ("a",), (), ()]
    # The time restarts when the load rises in between.
    cycles = [(0, loud), (1, loud), (2, loud), (10, quiet), (100, loud), (101, quiet), (220, quiet), (221, quiet)]
    assert story(cycles)[2:] == [("a",), ("a",), ("a",), ("a",), ("a",), ()]


def test_without_a_measurement_every_pod_stays_as_it_is() -> None:
    loud = {"a": 9.0}
    assert story([(0, loud), (1, loud), (2, {}), (3, loud)]) == [(), (), (), ("a",)]
    assert story([(0, loud), (1, loud), (2, loud), (500, {})])[-1] == ("a",)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, ("a",)),  # 2 of 20 cores are within a fifth, 8 and 10 are not
        (IsolationConfig(enabled=True, max_resource_ratio=0.5), ("c",)),  # 10 are half
        (IsolationConfig(enabled=True, max_resource_ratio=0.6, max_pod_ratio=0.7), ("a", "c")),  # of three pods two
        (IsolationConfig(enabled=True, max_resource_ratio=1.0, max_pod_ratio=0.5), ("c",)),  # of three pods one
        (ROOMY, ("b", "c")),  # never all of them
        (IsolationConfig(enabled=True, max_resource_ratios={"share": 0.05}), ()),
        (IsolationConfig(enabled=True, max_pod_ratios={"share": 0.3}), ()),
        (IsolationConfig(enabled=True, max_pod_ratios={"other": 0.3}), ("a",)),
        (IsolationConfig(enabled=True, disabled_pools=("share",)), ()),
        (IsolationConfig(), ()),
    ],
)
def test_bounds_of_isolated_pods(config: IsolationConfig, expected: tuple[str, ...]) -> None:
    overloaded = {"a": 99.0, "b": 99.0, "c": 99.0}
    assert story([(k, overloaded) for k in range(4)], config)[-1] == expected


def test_an_isolated_pod_is_not_displaced_by_another() -> None:
    cycles = [(k, {"a": 99.0}) for k in range(3)] + [(k, dict.fromkeys("abc", 99.0)) for k in range(3, 8)]
    config = IsolationConfig(enabled=True, max_resource_ratio=1.0, max_pod_ratio=0.5)
    assert story(cycles, config)[2:] == [("a",)] * 6


def test_the_only_pod_of_a_pool_is_never_isolated() -> None:
    assert story([(k, {"a": 99.0}) for k in range(4)], ROOMY, [PODS[0]])[-1] == ()


def test_bounds_are_of_each_pool_and_its_name_is_without_the_numa_node() -> None:
    pods = [*PODS, *(shared(f"n{k}", 4, 4, numa=(1,)) for k in range(6))]
    loud = dict.fromkeys(("a", "n0", "n1"), 99.0)
    cycles = [(k, loud) for k in range(3)]
    assert story(cycles, CONFIG, pods)[-1] == ("a", "n1")
    assert story(cycles, IsolationConfig(enabled=True, disabled_pools=("share",)), pods)[-1] == ()


def test_dedicated_and_ramping_pods_are_not_isolated() -> None:
    pods = [dedicated("d", 2), *PODS]
    assert story([(k, {"d": 99.0}) for k in range(4)], ROOMY, pods)[-1] == ()
    ramping = {"/a": steady(1.0, ramping=True)}
    assert story([(k, {"a": 99.0}) for k in range(4)], ROOMY, PODS, needs=ramping)[-1] == ()


def test_any_container_isolates_its_pod_and_removed_ones_are_dropped() -> None:
    two = replace(PODS[0], containers=(*PODS[0].containers, Container(name="x", cgroup="/x", cpu_limit_cores=1.0)))
    pods = [two, *PODS[1:]]
    assert story([(k, {"a": 0.5, "x": 1.6}) for k in range(3)], CONFIG, pods)[-1] == ("a",)
    state = ProvisionState(loads={"/gone": IsolationLoad(rounds=2)})
    result = isolate_pods(situation(pods, runnable={"/x": 1.6}), state, CONFIG)
    assert result.loads == {
        "/a": IsolationLoad(), "/x": IsolationLoad(rounds=1), "/b": IsolationLoad(), "/c": IsolationLoad()
    }  # fmt: skip


def test_reasons_contain_the_lock_out_time() -> None:
    state = ProvisionState(loads={"/a": IsolationLoad(calm_since_ns=990 * S)}, isolated=("default/a",))
    (reason,) = isolate_pods(situation(PODS, runnable={"/a": 1.25}), state, CONFIG).pods.values()
    assert reason.rule == "isolation_lock_out"
    assert reason.text == "default/a stays isolated until 120 s after its load fell to 1.2 runnable tasks"
    assert reason.threshold == 3.0
    assert reason.inputs == {"runnable": 1.25, "cores": 2.0, "rounds": 0, "container": "/a"}


# Katalyst's own node: eight pods in three pools; a container is (runnable, request, limit).
EIGHT = {
    "uid1": ("", [(3, 0, 4), (2, 4, 0)]),
    "uid2": ("batch", [(6, 0, 4), (2, 4, 0), (7, 0, 4)]),
    "uid3": ("flink", [(2, 4, 0), (4.1, 0, 4)]),
    "uid5": ("", [(5.1, 0, 4), (8, 0, 4)]),
    "uid6": ("", [(9, 0, 4), (7, 0, 4), (4, 4, 0)]),
    "uid7": ("batch", [(2.1, 0, 4)]),
    "uid8": ("batch", [(1.1, 0, 4)]),
}


def eager(**more: Any) -> IsolationConfig:
    plain: dict[str, Any] = {
        "enabled": True, "load_ratio": 1, "load_cores": 0, "lock_in_rounds": 1, "lock_out_s": 1,
        "max_resource_ratio": 1, "max_pod_ratio": 1,
    }  # fmt: skip
    return IsolationConfig(**(plain | more))


@pytest.mark.parametrize(
    ("config", "were", "expected"),
    [
        (eager(enabled=False), "", ""),
        (eager(disabled_pools=("share",)), "", "2"),
        (eager(), "", "256"),
        (eager(load_ratio=1.3, load_cores=1), "", "256"),
        (eager(load_ratio=5, load_cores=4), "", "6"),
        (eager(lock_in_rounds=2), "", ""),
        (eager(max_resource_ratio=0.4), "", "5"),
        (eager(max_resource_ratio=0.6), "", "26"),
        (eager(max_resource_ratio=0.8), "", "256"),
        (eager(load_ratio=30, load_cores=30, lock_out_s=0), "1235678", ""),
        (eager(load_cores=1, lock_out_s=0), "1235678", "256"),
        (eager(load_ratio=30, load_cores=30, lock_out_s=20), "1235678", "5678"),
    ],
)
def test_katalysts_eight_pods(config: IsolationConfig, were: str, expected: str) -> None:
    pods, runnable = [], {}
    for uid, (pool, containers) in EIGHT.items():
        built = []
        for k, (tasks, request, limit) in enumerate(containers):
            built.append(
                Container(name=f"c{k}", cgroup=f"/{uid}/c{k}", cpu_request_cores=request, cpu_limit_cores=limit)
            )
            runnable[built[-1].cgroup] = float(tasks)
        pods.append(replace(shared(uid, pool=pool), containers=tuple(built)))
    pods.append(dedicated("uid4", 4))
    state = ProvisionState(isolated=tuple(f"default/uid{digit}" for digit in were))
    result = isolate_pods(situation(pods, runnable=runnable), state, config)
    assert "".join(sorted(key[-1] for key in result.pods)) == expected


@pytest.mark.parametrize(
    ("needed", "free", "expected"),
    [
        ({-1: 24, 1: 24}, [0], True),
        ({-1: 25}, [0], False),
        ({-1: 25}, [0, 1], True),
        ({1: 25}, [0], False),
        ({1: 24, -1: 1}, [], False),
        ({}, [0], True),
    ],
)
def test_whether_isolation_fits(needed: Mapping[int, int], free: list[int], expected: bool) -> None:
    assert fits_numa_nodes(needed, {0: 24, 1: 24}, free) is expected
