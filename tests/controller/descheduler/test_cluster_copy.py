"""What the descheduler reads of Nodes, CustomNodeResources and Pods."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest

from api.qos import QoSLevel
from controller.descheduler.cluster_copy import ClusterCopy
from controller.descheduler.descheduler_kinds import MovablePod
from controller.kinds import NODES, ControllerNode
from kube.informer import Informer
from kube.objects import key_of
from kube.watch import WatchEvent, WatchEventType
from tests.builders.api_server import FakeApiServer
from tests.controller.descheduler.hot_nodes import GIB, settings

ORIGINAL = "katalyst.kubewharf.io/original_allocatable_"
TAINT = {"key": "node.katalyst.kubewharf.io/MemoryPressure", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}


@pytest.fixture
async def copy() -> AsyncIterator[ClusterCopy]:
    async with FakeApiServer().client() as client:
        nodes: Informer[ControllerNode] = Informer(client, NODES)
        selector = {"nodeSelector": {"matchExpressions": [{"key": "edge", "operator": "DoesNotExist"}]}}
        yield ClusterCopy(client, nodes, settings(lowNodeLoad=selector))


def deliver(
    informer: Informer[Any], document: Mapping[str, Any], what: WatchEventType = WatchEventType.MODIFIED
) -> None:
    received = msgspec.convert(document, informer.resource.type)
    informer._apply(WatchEvent(what, key_of(received.metadata), "", received))


def a_node(name: str = "n", *, taints: Any = (), **metadata: Any) -> dict[str, Any]:
    status = {"allocatable": {"cpu": "20", "memory": "100Gi", "pods": "3"}}
    return {"metadata": {"name": name, **metadata}, "spec": {"taints": list(taints)}, "status": status}


def a_cnr(
    name: str = "n", *, taints: Any = (), groups: Any = (), latency: str = "2500u", at: str = "2027-01-15T08:00:00Z"
) -> dict[str, Any]:
    usage = {"cpu": "5", "memory": "10Gi", "dioptase.io/runq_latency_p99": latency}
    metrics = {"updateTime": at, "nodeMetric": {"genericUsage": usage}, "groupMetric": list(groups)}
    return {"metadata": {"name": name}, "spec": {"taints": list(taints)}, "status": {"nodeMetricStatus": metrics}}


def a_pod(name: str, node: str = "n", **status: Any) -> dict[str, Any]:
    container = {"name": "main", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}, "status": status}


async def test_the_load_of_a_node(copy: ClusterCopy) -> None:
    deliver(copy.nodes, a_node())
    deliver(copy.cnrs, a_cnr())
    load = copy.loads()["n"]
    assert (load.capacity, load.usage) == ((20_000, 100 * GIB), (5000, 10 * GIB))
    assert (load.usage_percent(0), load.usage_percent(1)) == (25, 10)
    assert load.harm[0] == pytest.approx(0.0025)
    assert math.isnan(load.harm[1])
    assert load.reported_at_s == 1_800_000_000
    assert (load.pressures, load.is_schedulable) == ((), True)


async def test_usage_is_compared_with_what_the_machine_has_not_with_a_multiple(copy: ClusterCopy) -> None:
    deliver(copy.nodes, a_node(annotations={f"{ORIGINAL}cpu": "10", f"{ORIGINAL}memory": "invalid"}))
    deliver(copy.cnrs, a_cnr())
    assert copy.loads()["n"].capacity == (10_000, 100 * GIB)


async def test_harm_is_that_of_the_latest_report_not_the_decaying_mean_that_the_scheduler_scores(
    copy: ClusterCopy,
) -> None:
    """One report of 320 ms, decayed by half a minute after minute, would be five reports above a limit of 10 ms."""
    deliver(copy.nodes, a_node())
    latencies = []
    for minute, latency in enumerate(("320m", "0", "0", "x")):
        deliver(copy.cnrs, a_cnr(latency=latency, at=f"2027-01-15T08:0{minute}:00Z"))
        latencies.append(copy.loads()["n"].harm[0])
    assert latencies[:3] == [0.32, 0, 0]
    assert math.isnan(latencies[3])


async def test_pressures_and_cordons_are_taints(copy: ClusterCopy) -> None:
    other = {"key": "node.katalyst.kubewharf.io/CPUPressure", "effect": "NoSchedule"}
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    deliver(copy.nodes, a_node(taints=[other, cordon]))
    deliver(copy.cnrs, a_cnr(taints=[TAINT, {**TAINT, "qosLevel": "shared_cores"}]))
    load = copy.loads()["n"]
    assert (load.pressures, load.is_schedulable) == (("MemoryPressure", "CPUPressure"), False)


async def test_nodes_without_a_custom_node_resource_report_nothing_and_others_are_not_selected(
    copy: ClusterCopy,
) -> None:
    deliver(copy.nodes, a_node("bare"))
    deliver(copy.nodes, a_node("edge", labels={"edge": ""}))
    deliver(copy.cnrs, a_cnr("edge"))
    deliver(copy.nodes, a_node("gone"))
    deliver(copy.cnrs, a_cnr("gone"))
    assert list(copy.loads()) == ["bare", "gone"]
    assert math.isnan(copy.loads()["bare"].reported_at_s)
    deliver(copy.nodes, a_node("gone"), WatchEventType.DELETED)
    assert list(copy.loads()) == ["bare"]


async def test_a_target_has_what_its_pods_leave(copy: ClusterCopy) -> None:
    deliver(copy.nodes, a_node(labels={"zone": "a"}))
    deliver(copy.cnrs, a_cnr())
    for pod in (a_pod("a"), a_pod("b"), a_pod("done", phase="Succeeded"), a_pod("other", node="elsewhere")):
        deliver(copy.pods, pod)
    target = copy.target_nodes(["n", "unknown"])["n"]
    assert (target.free, target.free_pods) == ((19_000, 98 * GIB), 1)
    assert target.labels == {"zone": "a"}


async def test_kube_scheduler_gives_away_what_an_overcommitted_node_reports(copy: ClusterCopy) -> None:
    deliver(copy.nodes, a_node(annotations={f"{ORIGINAL}cpu": "10"}))
    deliver(copy.cnrs, a_cnr())
    deliver(copy.pods, a_pod("a"))
    assert copy.loads()["n"].capacity[0] == 10_000
    assert copy.target_nodes(["n"])["n"].free.millicpu == 19_500


async def test_the_usage_of_each_level_without_invalid_ones(copy: ClusterCopy) -> None:
    groups = [
        {"QoSLevel": "reclaimed_cores", "genericUsage": {"cpu": "1500m"}},
        {"QoSLevel": "shared_cores", "genericUsage": {"cpu": "x", "memory": "1Gi"}},
        {"QoSLevel": "unknown", "genericUsage": {"cpu": "1"}},
    ]
    deliver(copy.cnrs, a_cnr(groups=groups))
    usages = copy.group_usages("n")
    assert list(usages) == [QoSLevel.RECLAIMED]
    assert usages[QoSLevel.RECLAIMED][0] == 1500
    assert math.isnan(usages[QoSLevel.RECLAIMED][1])
    assert copy.group_usages("unknown") == {}


async def test_a_listed_pod_counts_only_as_the_one_of_the_copy(copy: ClusterCopy) -> None:
    for pod in (a_pod("same"), a_pod("replaced"), a_pod("ended", phase="Failed")):
        deliver(copy.pods, pod)
    listed = {name: msgspec.convert(a_pod(name), MovablePod) for name in ("same", "replaced", "ended", "new")}
    listed["replaced"] = msgspec.convert(
        {"metadata": {"name": "replaced", "namespace": "default", "uid": "2"}}, MovablePod
    )
    pairs = copy.with_requests({pod.key: pod for pod in listed.values()})
    assert [(pod.metadata.name, parsed.native.millicpu) for pod, parsed in pairs] == [("same", 500)]


async def test_pods_that_have_ended_are_not_in_memory(copy: ClusterCopy) -> None:
    """A cluster of batch jobs has more of them than of pods that run."""
    assert copy.pods.scope.fields == "status.phase!=Succeeded,status.phase!=Failed"


async def test_a_copy_that_received_nothing_is_stale(copy: ClusterCopy) -> None:
    assert len(copy.stale_resources(1000.0)) == 4
    for informer in (copy.nodes, *copy.informers):
        informer._received_at_s = 849.0
    copy.cnrs._received_at_s = 850.0
    assert copy.stale_resources(1000.0) == ["nodes.v1", "pods.v1", "poddisruptionbudgets.v1.policy"]
