"""Plans of moves: reclaimed pods first, budgets, disruption budgets, targets that take the pod and do not become hot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.descheduler.move_history import (
    MAX_ANNOTATION_CHARS,
    MOVES_ANNOTATION,
    MoveHistory,
    format_history,
    parse_history,
)
from controller.descheduler.move_plan import MovePlanner
from controller.scheduler.scheduling_pod import Amounts
from tests.controller.descheduler.hot_nodes import GIB, OWNER, Cluster, PodSpec, settings
from tests.controller.scheduler.objects import NOW_S

MANY = {"maxNoOfPodsToEvictPerNode": 100, "maxNoOfPodsToEvictPerNamespace": 100, "maxNoOfPodsToEvictTotal": 100}
SHARED = "shared_cores"


def hot_cluster(
    *pods: PodSpec, usage: float = 80, targets: Any = None, offered: int = 10_000, **config: Any
) -> Cluster:
    """Return a cluster with node `hot`, which uses `usage` percent of its CPU and has these pods, and idle nodes."""
    cluster = Cluster(
        {"hot": usage, **({"idle": 5} if targets is None else targets)}, settings(**config), offered=offered
    )
    for pod in pods:
        cluster.add("hot", pod)
    return cluster


def test_reclaimed_pods_are_moved_until_the_node_is_below_the_high_threshold() -> None:
    # 81 % are used, 50 % is the limit: 20 and 10 are not enough, 20 + 10 + 5 is.
    pods = [PodSpec("a", 20), PodSpec("b", 10), PodSpec("c", 5), PodSpec("d", 4), PodSpec("web", 30, SHARED)]
    moves, skipped = hot_cluster(*pods, usage=81, **MANY).plan()
    assert moves == [("a", "idle"), ("b", "idle"), ("c", "idle")]
    assert skipped == {
        "default/d": "the moves before it are enough for now",
        "default/web": "the moves before it are enough for now",
    }


def test_an_online_pod_is_moved_if_reclaimed_pods_are_not_enough() -> None:
    moves, _ = hot_cluster(PodSpec("batch", 10), PodSpec("web", 25, SHARED), PodSpec("db", 24, SHARED), **MANY).plan()
    assert moves == [("batch", "idle"), ("web", "idle")]


def test_online_pods_stay_while_a_reclaimed_pod_only_waits_for_its_cooldown() -> None:
    history = MoveHistory(workloads={"default/ReplicaSet/rs-batch": NOW_S - 60})
    moves, skipped = hot_cluster(PodSpec("batch", 40), PodSpec("web", 40, SHARED), **MANY).plan(history=history)
    assert moves == []
    assert skipped == {
        "default/batch": "the eviction of a pod of default/ReplicaSet/rs-batch was requested 60 s ago,"
        " workloadCooldownS is 900",
        "default/web": "reclaimed pods are moved first, and default/batch waits",
    }


def test_a_reclaimed_pod_that_fits_nowhere_does_not_block_online_ones() -> None:
    cluster = hot_cluster(PodSpec("batch", 40), PodSpec("web", 10, SHARED), offered=0, **MANY)
    moves, skipped = cluster.plan()
    assert moves == [("web", "idle")]
    assert skipped == {
        "default/batch": "no target takes it: 1 Insufficient resource.katalyst.kubewharf.io/reclaimed_millicpu"
    }


@pytest.mark.parametrize(
    ("config", "moved"),
    [
        ({}, 2),  # maxNoOfPodsToEvictPerNode is 2
        ({"maxNoOfPodsToEvictPerNode": 1}, 1),
        ({"maxNoOfPodsToEvictPerNode": 9}, 5),  # maxNoOfPodsToEvictPerNamespace is 5
        ({"maxNoOfPodsToEvictPerNode": 9, "maxNoOfPodsToEvictPerNamespace": 3}, 3),
        ({"maxNoOfPodsToEvictPerNode": 9, "maxNoOfPodsToEvictTotal": 4}, 4),
    ],
)
def test_budgets_of_one_evaluation(config: Any, moved: int) -> None:
    cluster = hot_cluster(*[PodSpec(f"p{number}", 3) for number in range(8)], usage=95, **config)
    assert len(cluster.plan()[0]) == moved


def test_budgets_hold_across_nodes() -> None:
    cluster = Cluster({"hot1": 90, "hot2": 90, "idle": 5}, settings(maxNoOfPodsToEvictTotal=3))
    for node in ("hot1", "hot2"):
        for number in range(3):
            cluster.add(node, PodSpec(f"{node}-{number}", 3))
    moves, skipped = cluster.plan()
    assert [name for name, _ in moves] == ["hot1-0", "hot1-1", "hot2-0"]
    assert skipped["default/hot2-1"] == "maxNoOfPodsToEvictTotal is 3"


@pytest.mark.parametrize(("limit", "moved"), [(1, ["a1"]), (2, ["a1", "a2"])])
def test_one_workload_loses_at_most_its_budget(limit: int, moved: list[str]) -> None:
    same = {"owner": {**OWNER, "name": "rs-a"}}
    pods = [PodSpec(name, 5, fields=same) for name in ("a1", "a2", "a3")]
    moves, skipped = hot_cluster(*pods, **MANY, maxNoOfPodsToEvictPerWorkload=limit).plan()
    assert [name for name, _ in moves] == moved
    assert skipped["default/a3"] == f"maxNoOfPodsToEvictPerWorkload is {limit}"


def test_a_disruption_budget_is_charged_for_every_planned_pod() -> None:
    budget = {
        "metadata": {"name": "web", "namespace": "default", "uid": "u"},
        "spec": {"selector": {}}, "status": {"disruptionsAllowed": 1},
    }  # fmt: skip
    moves, skipped = hot_cluster(PodSpec("a", 10), PodSpec("b", 10), **MANY).plan(budgets=[budget])
    assert moves == [("a", "idle")]
    assert skipped["default/b"] == "PodDisruptionBudget web allows no disruption now"


@pytest.mark.parametrize(
    ("status", "moved"),
    [
        # Two pods are there, one has to be: the budget allows the next eviction when the first pod has been replaced.
        ({"disruptionsAllowed": 0, "expectedPods": 2, "desiredHealthy": 1}, []),
        # It never allows one, so that an online pod has to be moved.
        ({"disruptionsAllowed": 0, "expectedPods": 2, "desiredHealthy": 2}, [("web", "idle")]),
    ],
)
def test_online_pods_stay_while_a_reclaimed_pod_waits_for_its_disruption_budget(status: Any, moved: list[Any]) -> None:
    batch = PodSpec("batch", 30, fields={"labels": {"app": "batch"}})
    budget = {
        "metadata": {"name": "b", "namespace": "default", "uid": "u"},
        "spec": {"selector": {"matchLabels": {"app": "batch"}}}, "status": status,
    }  # fmt: skip
    cluster = hot_cluster(batch, PodSpec("web", 40, SHARED), usage=80, **MANY)
    assert cluster.plan(budgets=[budget])[0] == moved


@pytest.mark.parametrize(
    ("fields", "moved"),
    [
        ({"age_s": 59}, []),  # in a minute it may be moved
        ({"deletionTimestamp": "2027-01-15T07:59:50Z"}, []),  # what it uses is free soon
        ({"owner": None}, [("web", "idle")]),  # it never may be moved
    ],
)
def test_online_pods_stay_while_a_reclaimed_pod_starts_or_ends(fields: Any, moved: list[Any]) -> None:
    cluster = hot_cluster(PodSpec("batch", 30, fields=fields), PodSpec("web", 40, SHARED), usage=80, **MANY)
    moves, skipped = cluster.plan()
    assert moves == moved
    if not moved:
        assert skipped["default/web"] == "reclaimed pods are moved first, and default/batch waits"


@pytest.mark.parametrize(
    ("usage", "pod", "expected"),
    [
        (20, 30, [("p", "target")]),  # 20 + 30 is the limit of 50
        (20, 31, []),
        (15, 31, [("p", "target")]),
    ],
)
def test_a_target_never_exceeds_the_high_threshold(usage: float, pod: float, expected: list[Any]) -> None:
    moves, skipped = hot_cluster(PodSpec("p", pod), targets={"target": usage}).plan()
    assert moves == expected
    assert list(skipped.values()) == (
        [] if expected else ["no target takes it: 1 CPU usage would exceed the high threshold"]
    )


def test_every_planned_pod_is_charged_to_its_target() -> None:
    """Each of two targets has room for one of the pods: 20 + 25 is below 50, 20 + 2 * 25 is not."""
    pods = [PodSpec(name, 25) for name in ("a", "b", "c")]
    cluster = hot_cluster(*pods, usage=99, targets={"t1": 20, "t2": 20}, **MANY)
    moves, skipped = cluster.plan()
    assert sorted(target for _, target in moves) == ["t1", "t2"]
    assert skipped["default/c"] == "the moves before it are enough for now"
    cluster = hot_cluster(*pods, usage=100.5, targets={"t1": 20, "t2": 20}, **MANY)
    assert cluster.plan()[1]["default/c"] == "no target takes it: 2 CPU usage would exceed the high threshold"


def test_the_plan_leaves_the_state_of_the_scheduler_as_it_was() -> None:
    cluster = hot_cluster(PodSpec("a", 20), PodSpec("b", 10), **MANY)
    nodes = cluster.state.nodes
    before = {name: np.copy(getattr(nodes, name)) for name in ("requested", "native_requested", "unmeasured", "usage")}
    assert len(cluster.plan()[0]) == 2
    assert all(np.array_equal(getattr(nodes, name), array, equal_nan=True) for name, array in before.items())
    assert cluster.state.assumptions == {}


def test_the_target_with_the_best_score_of_the_scheduler_is_chosen() -> None:
    moves, _ = hot_cluster(PodSpec("p", 10), targets={"busier": 18, "idle": 2, "middle": 10}).plan()
    assert moves == [("p", "idle")]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (MoveHistory(sources={"idle": NOW_S - 1}), []),  # a node that was relieved is no target
        (MoveHistory(targets={"idle": NOW_S - 1}), [("p", "idle")]),
        (MoveHistory(workloads={"default/ReplicaSet/other": NOW_S}), [("p", "idle")]),
    ],
)
def test_cooldowns(history: MoveHistory, expected: list[Any]) -> None:
    assert hot_cluster(PodSpec("p", 10)).plan(history=history)[0] == expected


def test_after_one_move_for_latency_the_next_reports_decide() -> None:
    cluster = hot_cluster(PodSpec("a", 3), PodSpec("b", 2), usage=30, **MANY)
    cluster.loads["hot"] = cluster.loads["hot"]._replace(harm=(0.02, float("nan"), float("nan"), float("nan")))
    moves, skipped = cluster.plan()
    assert moves == [("a", "idle")]
    assert skipped == {"default/b": "the moves before it are enough for now"}


def test_online_pods_are_not_moved_for_interference_that_reclaimed_pods_cause() -> None:
    cluster = hot_cluster(PodSpec("web", 20, SHARED), usage=30)
    cluster.loads["hot"] = cluster.loads["hot"]._replace(harm=(float("nan"), float("nan"), float("nan"), 1.0))
    assert cluster.plan() == ([], {"default/web": "only reclaimed pods cause the interference"})


def test_a_move_that_relieves_nothing_is_not_made() -> None:
    moves, skipped = hot_cluster(PodSpec("tiny", 0.4), PodSpec("small", 0.5)).plan()
    assert moves == [("small", "idle")]
    assert skipped == {"default/tiny": "its move would relieve 0.4% of the node, less than 0.5%"}


def test_without_targets_nothing_is_moved() -> None:
    cluster = hot_cluster(PodSpec("p", 10), targets={"warm": 30})
    assert cluster.plan() == ([], {"default/p": "no node is below the low thresholds and without harm"})


@pytest.mark.parametrize(("fits", "expected"), [(True, []), (False, [("web", "idle")])])
def test_node_fit_false_evaluates_usage_only(fits: bool, expected: list[Any]) -> None:
    cluster = hot_cluster(PodSpec("web", 10, SHARED), lowNodeLoad={"nodeFit": fits})
    inputs = cluster.inputs()
    full = {name: target._replace(free=Amounts(0, GIB)) for name, target in inputs.targets.items()}
    plans = MovePlanner(inputs._replace(targets=full)).plan(cluster.hot_nodes())
    assert [(move.candidate.pod.metadata.name, move.target) for plan in plans for move in plan.moves] == expected


def test_moves_are_remembered_until_their_cooldown_ends() -> None:
    history = (
        MoveHistory().with_move("ns/Deployment/a", "n1", "n2", 1000.0).with_move("ns/Deployment/b", "n3", "n2", 1200.0)
    )
    assert parse_history({MOVES_ANNOTATION: format_history(history)}) == history
    assert history.within(300, 900, 1250.0) == history
    later = history.within(300, 900, 1300.0)
    assert (later.sources, later.targets) == ({"n3": 1200.0}, {"n2": 1200.0})
    assert set(later.workloads) == {"ns/Deployment/a", "ns/Deployment/b"}
    assert history.within(300, 900, 2100.0) == MoveHistory()
    # A clock that was ahead blocks nothing for longer than the cool-down.
    assert history.within(300, 900, 100.0).workloads == {}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("{}", True),
        ("", False),
        ("[]", False),
        ('{"workloads": {"a": "x"}}', False),
        ("x" * (MAX_ANNOTATION_CHARS + 1), False),
    ],
)
def test_invalid_moves_are_not_taken_for_none(text: str, valid: bool) -> None:
    assert (parse_history({MOVES_ANNOTATION: text}) is not None) is valid
    assert parse_history({}) == MoveHistory()
