"""Which pods may be moved, in which order, and what they are estimated to use."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from api.qos import QoSLevel
from controller.descheduler.descheduler_kinds import PodDisruptionBudget
from controller.descheduler.movable_pods import (
    DisruptionAllowances,
    MoveCandidate,
    MoveRules,
    estimate_usage,
    move_order,
    relief,
    workload_of,
)
from controller.descheduler.stock_placement import TargetNode, stock_obstacle
from controller.scheduler.scheduling_pod import Amounts, SchedulingPod
from tests.controller.descheduler.hot_nodes import GIB, OWNER, a_movable, settings
from tests.controller.scheduler.objects import NOW_S

EVICT, PREFER = "descheduler.alpha.kubernetes.io/evict", "descheduler.alpha.kubernetes.io/prefer-no-eviction"
COST = "controller.kubernetes.io/pod-deletion-cost"
DAEMON = {**OWNER, "kind": "DaemonSet"}
LOCAL = [{"name": "scratch", "emptyDir": {}}]


def a_parsed(name: str, level: QoSLevel = QoSLevel.RECLAIMED, cpu: int = 0, memory: int = 0) -> SchedulingPod:
    """Return a pod with these requests in thousandths of a core and bytes."""
    amounts, none = Amounts(cpu, memory), Amounts()
    reclaimed = level is QoSLevel.RECLAIMED
    return SchedulingPod(
        f"default/{name}",
        f"uid-{name}",
        level,
        amounts if reclaimed else none,
        none,
        none if reclaimed else amounts,
        amounts,
    )


@pytest.mark.parametrize(
    ("fields", "config", "expected"),
    [
        ({}, {}, ""),
        ({"owner": {**OWNER, "kind": "StatefulSet"}}, {}, ""),
        ({"owner": {**OWNER, "kind": "Job"}}, {}, ""),
        ({"owner": DAEMON}, {}, "its DaemonSet binds it to this node"),
        ({"owner": DAEMON, "annotations": {EVICT: "true"}}, {}, "its DaemonSet binds it to this node"),
        ({"owner": None}, {}, "no controller would create it again"),
        ({"owner": None, "annotations": {EVICT: ""}}, {}, ""),  # the annotation alone counts, without a value too
        ({"annotations": {EVICT: "false"}}, {}, f"its annotation {EVICT} is false"),
        ({"annotations": {"kubernetes.io/config.mirror": "x", EVICT: "true"}}, {}, "it is a static pod"),
        ({"annotations": {"kubernetes.io/config.source": "file"}}, {}, "it is a static pod"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, {}, "it is terminating"),
        ({"phase": "Pending"}, {}, "its phase is Pending"),
        ({"priority": 2_000_000_000}, {}, "its priority is critical"),
        ({"priority": 1_999_999_999}, {}, ""),
        ({"priorityClassName": "system-node-critical"}, {}, "its priority is critical"),
        ({"volumes": LOCAL}, {}, "it has local storage"),
        ({"volumes": [{"name": "logs", "hostPath": {"path": "/var/log"}}]}, {}, "it has local storage"),
        ({"volumes": LOCAL}, {"evictLocalStoragePods": True}, ""),
        ({"volumes": LOCAL, "annotations": {EVICT: "true"}}, {}, ""),
        ({"volumes": [{"name": "token", "projected": {}}]}, {}, ""),
        ({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]}, {},
         "it has persistent volumes, and where these can be attached is not evaluated"),
        ({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}, {},
         "it requires affinity to other pods, which is not evaluated"),
        ({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}}, {}, ""),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}, {},
         "it requires a topology spread, which is not evaluated"),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, {}, ""),
        ({"hostNetwork": True}, {}, "it uses ports of its node, which are not evaluated"),
        ({"containers": [{"name": "a", "ports": [{"hostPort": 80}]}]}, {},
         "it uses ports of its node, which are not evaluated"),
        ({"containers": [{"name": "a", "ports": [{"containerPort": 80}]}]}, {}, ""),
        ({"containers": [{"name": "a", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]}, {},
         "it requests nvidia.com/gpu, which is not evaluated"),
        ({"containers": [{"name": "a", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]},
         {"lowNodeLoad": {"nodeFit": False}}, ""),
        ({"age_s": 59}, {}, "it started less than 60 s ago"),
        ({"age_s": 60}, {}, ""),
        ({"namespace": "kube-system"}, {}, "evictableNamespaces excludes its namespace"),
        ({"namespace": "kube-system"}, {"lowNodeLoad": {"evictableNamespaces": {"exclude": ["a"]}}}, ""),
        ({}, {"lowNodeLoad": {"evictableNamespaces": {"include": ["a"]}}}, "evictableNamespaces excludes its namespace"),
        ({"labels": {"app": "web"}}, {"lowNodeLoad": {"podSelectors": [{"selector": {"matchLabels": {"app": "web"}}}]}}, ""),
        ({"labels": {"app": "db"}},
         {"lowNodeLoad": {"podSelectors": [{"name": "x", "selector": {"matchLabels": {"app": "web"}}},
                                           {"selector": {"matchExpressions": [{"key": "tier", "operator": "Exists"}]}}]}},
         "no podSelector matches its labels"),
    ],
)  # fmt: skip
def test_a_pod_may_be_moved_or_the_reason_why_not(fields: Any, config: Any, expected: str) -> None:
    rules = MoveRules(settings(**config))
    assert rules.obstacle(a_movable("p", **fields), QoSLevel.RECLAIMED, NOW_S) == expected


@pytest.mark.parametrize(
    ("level", "config", "expected"),
    [
        (QoSLevel.SHARED, {}, ""),
        (QoSLevel.DEDICATED, {}, ""),
        (QoSLevel.SYSTEM, {}, "its QoS level is system_cores"),
        (QoSLevel.SHARED, {"moveOnline": False}, "it is an online pod, and moveOnline is false"),
        (QoSLevel.RECLAIMED, {"moveOnline": False}, ""),
    ],
)
def test_levels_that_may_be_moved(level: QoSLevel, config: Any, expected: str) -> None:
    assert MoveRules(settings(**config)).obstacle(a_movable("p"), level, NOW_S) == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Each pair: the first one is moved first, although the second one relieves more.
        (("reclaimed", {}, 0.1), ("shared", {"priority": -10}, 0.9)),
        (("reclaimed", {"priority": 5}, 0.1), ("reclaimed", {"priority": 1, "annotations": {PREFER: ""}}, 0.9)),
        (("reclaimed", {"priority": -1}, 0.1), ("reclaimed", {"priority": 0}, 0.9)),
        (("reclaimed", {"annotations": {COST: "-5"}}, 0.1), ("reclaimed", {}, 0.9)),
        (("reclaimed", {}, 0.1), ("reclaimed", {"annotations": {COST: "100"}}, 0.9)),
        # Without such statements the relief for the cost decides.
        (("reclaimed", {}, 0.3), ("reclaimed", {}, 0.2)),
        (
            ("reclaimed", {"age_s": 600}, 0.2),
            ("reclaimed", {"age_s": 86_400}, 0.3),
        ),  # a day of work costs twice as much
        (("reclaimed", {"restarts": 10}, 0.2), ("reclaimed", {}, 0.3)),  # a pod that restarts anyway costs half
        (("reclaimed", {"annotations": {COST: "invalid"}}, 0.3), ("reclaimed", {}, 0.2)),
    ],
)
def test_the_order_of_moves(first: Any, second: Any) -> None:
    keys = []
    for number, (level, fields, gain) in enumerate((first, second)):
        parsed = a_parsed(str(number), QoSLevel(f"{level}_cores"))
        candidate = MoveCandidate(a_movable(str(number), **fields), parsed, "w", (0.0, 0.0))
        keys.append(move_order(candidate, gain, NOW_S))
    assert keys[0] < keys[1]


@pytest.mark.parametrize(
    ("owner", "labels", "expected"),
    [
        (OWNER, {}, "default/ReplicaSet/web-abc"),
        (OWNER, {"pod-template-hash": "abc"}, "default/Deployment/web"),
        (OWNER, {"pod-template-hash": "xyz"}, "default/ReplicaSet/web-abc"),
        ({**OWNER, "kind": "StatefulSet", "name": "db"}, {}, "default/StatefulSet/db"),
        (None, {}, "default/Pod/p"),
    ],
)
def test_the_workload_of_a_pod_outlives_a_rollout(owner: Any, labels: Any, expected: str) -> None:
    assert workload_of(a_movable("p", owner=owner, labels=labels)) == expected


def test_the_measured_usage_of_a_level_is_divided_in_proportion_to_requests() -> None:
    pods = [a_parsed("a", cpu=1000), a_parsed("b", cpu=3000), a_parsed("web", QoSLevel.SHARED, cpu=4000)]
    groups = {QoSLevel.RECLAIMED: (2000.0, math.nan)}
    usages = estimate_usage(pods, groups, (5000.0, 10.0 * GIB), (0.85, 0.7))
    assert [usages[f"uid-{name}"][0] for name in ("a", "b")] == [500, 1500]
    # shared_cores is not reported: 85 % of 4 cores would be 3.4, but the node uses 3 beyond what reclaimed pods use.
    assert usages["uid-web"][0] == 3000


def test_a_pod_without_requests_has_the_default_weight() -> None:
    usages = estimate_usage(
        [a_parsed("none"), a_parsed("a", cpu=300)], {QoSLevel.RECLAIMED: (800.0, 0.0)}, (900.0, 0.0), (0.85, 0.7)
    )
    assert (usages["uid-none"][0], usages["uid-a"][0]) == (200, 600)


@pytest.mark.parametrize(
    ("columns", "weights", "expected"),
    [((0,), (1, 1), 0.2), ((1,), (1, 1), 0.1), ((0, 1), (1, 1), 0.15), ((0, 1), (3, 1), 0.175), ((0,), (0, 1), 0.0)],
)
def test_the_relief_is_the_share_of_what_makes_the_node_hot(columns: Any, weights: Any, expected: float) -> None:
    assert relief((2000.0, 10.0), (10_000.0, 100.0), columns, weights) == pytest.approx(expected)


def a_budget(name: str, allowed: int, selector: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": name}
    return {"metadata": metadata, "spec": {"selector": selector}, "status": {"disruptionsAllowed": allowed}}


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ([], ""),
        ([a_budget("b", 1, {"matchLabels": {"app": "web"}})], ""),
        ([a_budget("b", 0, {"matchLabels": {"app": "web"}})], "PodDisruptionBudget b allows no disruption now"),
        ([a_budget("b", 0, {"matchLabels": {"app": "db"}})], ""),
        ([a_budget("b", 0, {})], "PodDisruptionBudget b allows no disruption now"),  # empty: every pod
        ([a_budget("b", 0, None)], ""),  # none: no pod
        ([a_budget("a", 5, {}), a_budget("b", 5, {})],
         "it has more than one PodDisruptionBudget, which the Eviction API does not support"),
    ],
)  # fmt: skip
def test_disruption_budgets_are_checked_before_the_eviction(budgets: Any, expected: str) -> None:
    allowances = DisruptionAllowances(msgspec.convert(budgets, list[PodDisruptionBudget]))
    assert allowances.blocking(a_movable("p", labels={"app": "web"})) == expected


def test_planned_evictions_use_up_a_disruption_budget() -> None:
    allowances = DisruptionAllowances(msgspec.convert([a_budget("b", 2, {})], list[PodDisruptionBudget]))
    pods = [a_movable(str(number)) for number in range(3)]
    allowed = []
    for pod in pods:
        allowed.append(not allowances.blocking(pod))
        allowances.take(pod)
    assert allowed == [True, True, False]


NODE = TargetNode("n", {"zone": "a", "size": "8"}, (), Amounts(2000, GIB), 1)
TAINT = {"key": "gpu", "value": "x", "effect": "NoSchedule"}


def affinity(*expressions: Any, fields: Any = ()) -> dict[str, Any]:
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


@pytest.mark.parametrize(
    ("fields", "native", "node", "expected"),
    [
        ({}, Amounts(2000, GIB), NODE, ""),
        ({}, Amounts(2001, 0), NODE, "insufficient cpu"),
        ({}, Amounts(0, GIB + 1), NODE, "insufficient memory"),
        ({}, Amounts(), NODE._replace(free=Amounts(-5, -5)), ""),  # a pod without requests fits an overcommitted node
        ({}, Amounts(), NODE._replace(free_pods=0), "it has its maximum number of pods"),
        ({}, Amounts(), NODE._replace(taints=(TAINT,)), "taint gpu is not tolerated"),
        ({}, Amounts(), NODE._replace(taints=({**TAINT, "effect": "PreferNoSchedule"},)), ""),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, Amounts(), NODE._replace(taints=(TAINT,)), ""),
        ({"nodeSelector": {"zone": "a"}}, Amounts(), NODE, ""),
        ({"nodeSelector": {"zone": "b"}}, Amounts(), NODE, "its labels do not match the nodeSelector"),
        ({"affinity": affinity({"key": "zone", "operator": "In", "values": ["a", "b"]})}, Amounts(), NODE, ""),
        ({"affinity": affinity({"key": "zone", "operator": "NotIn", "values": ["a"]})}, Amounts(), NODE,
         "its labels do not match the node affinity"),
        ({"affinity": affinity({"key": "gone", "operator": "NotIn", "values": ["a"]})}, Amounts(), NODE, ""),
        ({"affinity": affinity({"key": "size", "operator": "Gt", "values": ["7"]})}, Amounts(), NODE, ""),
        ({"affinity": affinity({"key": "size", "operator": "Lt", "values": ["8"]})}, Amounts(), NODE,
         "its labels do not match the node affinity"),
        ({"affinity": affinity(fields=[{"key": "metadata.name", "operator": "In", "values": ["n"]}])}, Amounts(), NODE, ""),
        ({"affinity": affinity()}, Amounts(), NODE, "its labels do not match the node affinity"),
    ],
)  # fmt: skip
def test_what_kube_scheduler_itself_checks(fields: Any, native: Amounts, node: TargetNode, expected: str) -> None:
    assert stock_obstacle(a_movable("p", **fields), native, node) == expected
