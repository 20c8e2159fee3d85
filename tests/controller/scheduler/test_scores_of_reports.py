"""Taints, measured load and measured harm: which nodes are rejected or preferred, and how reports age."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.harm_score import HarmScore, HarmSettings
from controller.scheduler.load_aware import LoadAware, LoadSettings, UsageThresholds
from controller.scheduler.qos_taints import QosTaints
from controller.scheduler.scheduler_kinds import SchedulerNode
from controller.scheduler.scheduling_pod import SchedulingPod, parse_scheduling_pod
from tests.controller.scheduler.objects import NOW_S, a_cnr, a_node, a_pod, pod_of

AT = "2027-01-15T08:00:00Z"
"""NOW_S."""
GIB = 1 << 30


def reported(**usage_by_node: dict[str, str] | None) -> ClusterState:
    """Nodes with 10 CPUs and 100 GiB, and reports of NOW_S; None for a node without one."""
    state = ClusterState()
    for name, usage in usage_by_node.items():
        state.apply_node(name, a_node(name, "10", "100Gi"))
        state.apply_cnr(name, a_cnr(name, 5000, GIB, usage=usage, at=AT))
    return state


def rows(state: ClusterState, *names: str) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return state.nodes.rows_of(list(names))


def batch(millicpu: int = 0, memory: int = 0) -> SchedulingPod:
    return parse_scheduling_pod(a_pod("batch", millicpu, memory))


def online(cpu: str = "0", limit: str = "0") -> SchedulingPod:
    resources = {"requests": {"cpu": cpu}, "limits": {"cpu": limit}}
    return parse_scheduling_pod(pod_of("online", {"containers": [{"resources": resources}]}))


@pytest.mark.parametrize(
    ("taint", "toleration", "is_rejected"),
    [
        ({}, None, True),
        ({"effect": "NoExecute"}, None, True),
        ({"effect": "PreferNoSchedule"}, None, False),
        ({"qosLevel": "shared_cores"}, None, False),
        ({}, {"operator": "Exists"}, False),
        ({}, {"key": "k", "operator": "Exists", "effect": "NoSchedule"}, False),
        ({}, {"key": "k", "operator": "Exists", "effect": "NoExecute"}, True),
        ({}, {"key": "k", "value": "v"}, False),
        ({}, {"key": "k", "value": "w"}, True),
        ({}, {"key": "other", "operator": "Exists"}, True),
    ],
)
def test_taints_apply_to_their_level(
    taint: dict[str, str], toleration: dict[str, str] | None, is_rejected: bool
) -> None:
    state = ClusterState()
    full = {"key": "k", "value": "v", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"} | taint
    state.apply_cnr("clean", a_cnr("clean", 1, 1))
    state.apply_cnr("tainted", a_cnr("tainted", 1, 1, taints=[full]))
    pod = parse_scheduling_pod(a_pod("p", tolerations=[] if toleration is None else [toleration]))
    numbers = QosTaints().filter(pod, state.nodes, rows(state, "clean", "tainted"), NOW_S)
    assert (numbers is not None and numbers.tolist() == [0, 1]) == is_rejected
    scores = QosTaints().score(pod, state.nodes, rows(state, "clean", "tainted"), NOW_S)
    assert (None if scores is None else scores.tolist()) == ([100, 0] if full["effect"] == "PreferNoSchedule" else None)


@pytest.mark.parametrize(
    ("pod", "settings", "expected"),
    [
        # 6.4 cores + 0.85 * 0.1 = 6.485 of 10: 64.85 %
        (online("100m"), LoadSettings(), [0, 1, 2, 0]),
        # The limit of 200m counts: 6.4 + 0.17 = 65.7 %
        (online("100m", "200m"), LoadSettings(), [1, 1, 2, 0]),
        # Reclaimed pods use what others leave: only memory limits them.
        (batch(1000), LoadSettings(), [0, 0, 2, 0]),
        (batch(1000), LoadSettings(reclaimed_thresholds=UsageThresholds(cpu=70)), [1, 1, 0, 0]),
        # 6.4 + 0.85 * 0.1765 = 65.5 %, rounded 66 %; with 0.85 * 0.1752 it is 65 %, which does not exceed the threshold.
        (online("176500u"), LoadSettings(), [1, 1, 2, 0]),
        (online("175200u"), LoadSettings(), [0, 1, 2, 0]),
        (online("1m"), LoadSettings(percentile_thresholds=UsageThresholds(cpu=60)), [3, 1, 2, 0]),
    ],
)
def test_load_rejects_nodes_above_thresholds(pod: SchedulingPod, settings: LoadSettings, expected: list[int]) -> None:
    state = reported(
        warm={"cpu": "6400m", "memory": "10Gi"}, hot={"cpu": "6600m"}, full={"memory": "96Gi"}, silent=None
    )
    plugin, candidates = LoadAware(settings), rows(state, "warm", "hot", "full", "silent")
    numbers = plugin.filter(pod, state.nodes, candidates, NOW_S + 179)
    assert numbers is not None
    assert numbers.tolist() == expected
    numbers = plugin.filter(pod, state.nodes, candidates, NOW_S + 180)
    assert numbers is not None
    assert numbers.tolist() == [0, 0, 0, 0], "a stale report rejects nothing"


def test_a_pod_that_requests_nothing_is_estimated_at_a_quarter_of_a_core_and_200_mib() -> None:
    """As in Koordinator; a burst of such pods would go to one node otherwise. The amounts are not scaled."""
    state = reported(n1={"cpu": "1", "memory": "20Gi"})
    row = state.nodes.row("n1")
    for number in range(4):
        state.assume(parse_scheduling_pod(pod_of(f"p{number}", {"containers": [{}]})), "n1", NOW_S)
    assert state.nodes.unmeasured[row].tolist() == [1000, 800 << 20]
    load = LoadAware(LoadSettings())._load(batch(1000), state.nodes, rows(state, "n1"))
    assert load.tolist() == [[1000 + 1000 + 850, (20 << 30) + (800 << 20) + (200 << 20)]]


def test_load_of_an_overcommitted_node_is_that_of_its_machine() -> None:
    """16 cores that are offered as 32 are as busy with 14 cores as without overcommitment: 88 %, not 44 %."""
    state = ClusterState()
    key = "katalyst.kubewharf.io/original_allocatable_"
    document = {
        "metadata": {"name": "n1", "annotations": {f"{key}cpu": "16", f"{key}memory": "64Gi"}},
        "status": {"allocatable": {"cpu": "32", "memory": "128Gi"}},
    }
    state.apply_node("n1", msgspec.convert(document, SchedulerNode))
    state.apply_cnr("n1", a_cnr("n1", usage={"cpu": "14", "memory": "32Gi"}, at=AT))
    plugin, candidates = LoadAware(LoadSettings()), rows(state, "n1")
    numbers = plugin.filter(online("1m"), state.nodes, candidates, NOW_S)
    assert numbers is not None
    assert numbers.tolist() == [1]
    assert plugin.describe(online("1m"), state.nodes, int(candidates[0]), NOW_S).startswith(
        "CPU and memory usage with the pod 88% and 50%"
    )


def test_load_scores_the_free_share_with_pods_that_the_report_lacks() -> None:
    state = reported(idle={"cpu": "1", "memory": "20Gi"}, busy={"cpu": "5", "memory": "20Gi"}, silent=None)
    candidates, pod = rows(state, "idle", "busy", "silent"), batch(1000, 10 * GIB)
    scores = LoadAware(LoadSettings()).score(pod, state.nodes, candidates, NOW_S)
    assert scores is not None
    # With 0.85 cores and 7 GiB of the pod: (81.5 + 73)/2, (41.5 + 73)/2, unknown
    assert scores.tolist() == [77.25, 57.25, 0]
    for number in range(5):
        state.assume(parse_scheduling_pod(a_pod(f"new{number}", 1000, GIB)), "idle", NOW_S)
    scores = LoadAware(LoadSettings()).score(pod, state.nodes, candidates, NOW_S)
    assert scores is not None
    # 1 + 6 * 0.85 = 6.1 cores and 20 + 7 + 5 * 0.7 = 30.5 GiB: (39 + 69.5)/2
    assert scores.round(6).tolist() == [54.25, 57.25, 0]


def harm_scores(state: ClusterState, now_s: float, *names: str) -> list[float]:
    scores = HarmScore(HarmSettings(half_life_s=60)).score(batch(), state.nodes, rows(state, *names), now_s)
    assert scores is not None
    return [round(float(score), 2) for score in scores]


def test_harm_prefers_nodes_whose_online_pods_wait_least_and_decays_as_the_report_ages() -> None:
    latency, pressure = "dioptase.io/runq_latency_p99", "dioptase.io/cpu_pressure"
    state = reported(
        calm={latency: "1m", pressure: "20m"}, slow={latency: "8m", pressure: "20m"}, harmed={latency: "40m"},
        pressed={pressure: "300m"}, disturbed={"dioptase.io/reclaimed_interference": "100m"}, silent=None,
    )  # fmt: skip
    names = ("calm", "slow", "harmed", "pressed", "disturbed", "silent")
    # 1 ms of 10, 8 of 10, 40 of 10, 0.3 of 0.4, 0.1 of 0.5
    assert harm_scores(state, NOW_S, *names) == [90, 20, 0, 25, 80, 50]
    assert harm_scores(state, NOW_S + 60, *names) == [70, 35, 25, 37.5, 65, 50]
    assert harm_scores(state, NOW_S + 3600, *names) == [50, 50, 50, 50, 50, 50]
    assert harm_scores(state, NOW_S - 3600, *names) == [90, 20, 0, 25, 80, 50], (
        "a clock that was set back trusts the report"
    )
    # 2 cores of 10 that no report contains yet: 17 %
    state.assume(parse_scheduling_pod(a_pod("new", 2000, 0)), "calm", NOW_S)
    assert harm_scores(state, NOW_S, "calm") == [73]


def test_one_second_of_waits_counts_half_after_a_minute() -> None:
    state = reported(n1={"dioptase.io/runq_latency_p99": "10m"})
    for at, latency in (("2027-01-15T08:01:00Z", "0"), ("2027-01-15T08:01:00Z", "0"), ("2027-01-15T08:02:00Z", "0")):
        state.apply_cnr("n1", a_cnr("n1", 1, 1, usage={"dioptase.io/runq_latency_p99": latency}, at=at))
    assert state.nodes.harm[state.nodes.row("n1"), 0] == pytest.approx(0.0025), "the repeated report counts once"


def test_explanations_name_the_numbers() -> None:
    state = reported(n1={"cpu": "7", "memory": "20Gi", "dioptase.io/runq_latency_p99": "4m"})
    row = state.nodes.row("n1")
    assert row is not None
    assert LoadAware(LoadSettings()).describe(online("1"), state.nodes, row, NOW_S + 30) == (
        "CPU and memory usage with the pod 78% and 20%, reported 30 s ago"
    )
    assert HarmScore(HarmSettings()).describe(batch(), state.nodes, row, NOW_S + 30) == (
        "runq_latency_p99_s 0.004 (limit 0.01), reported 30 s ago"
    )
