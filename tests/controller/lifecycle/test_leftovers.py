"""What agents do not write any more is removed from their Nodes; on a real API server: tests/cluster/test_install.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.kinds import NODES
from controller.lifecycle.leftovers import LeftoverRemoval
from controller.reconcile import MetricValues
from controller.settings import ControllerConfig, HealthConfig, Leftover
from kube.informer import Informer
from tests.builders.api_server import FakeApiServer

PRESSURE = {"key": "node.katalyst.kubewharf.io/MemoryPressure", "effect": "NoSchedule"}
KATALYSTS = {"key": "node.katalyst.kubewharf.io/CPUPressure", "effect": "NoSchedule"}
RECORD = {"dioptase.io/node-taints": "node.katalyst.kubewharf.io/MemoryPressure:NoSchedule", "example.com/a": "b"}
CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
AMOUNTS = {RECLAIMED_CPU: "4k", RECLAIMED_MEMORY: "1Gi", "cpu": "8"}


def node(name: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels, "annotations": dict(RECORD), "resourceVersion": "1"},
        "spec": {"taints": [PRESSURE, KATALYSTS, CORDON]},
        "status": {"capacity": dict(AMOUNTS), "allocatable": dict(AMOUNTS)},
    }


async def remove(server: FakeApiServer, *kinds: Leftover, passes: tuple[float, ...] = (1000.0,)) -> MetricValues:
    config = ControllerConfig(leftovers=kinds, health=HealthConfig(node_selector="agents=yes", dry_run=True))
    metrics = MetricValues()
    async with server.client() as client:
        nodes = Informer(client, NODES)
        removal = LeftoverRemoval(client, nodes, config, metrics)
        watching = asyncio.create_task(nodes.run())
        await asyncio.wait_for(nodes.synced.wait(), 10)
        for now_s in passes:
            await removal.remove(now_s)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return metrics


@pytest.fixture
def server() -> FakeApiServer:
    return FakeApiServer({NODES.path("n1"): node("n1", agents="yes"), NODES.path("n2"): node("n2")})


async def test_both_kinds_are_removed_in_one_pass(server: FakeApiServer) -> None:
    await remove(server, "reclaimed-resources", "eviction-taints")
    after = server.objects[NODES.path("n1")]
    assert after["status"] == {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}}
    assert after["spec"]["taints"] == [KATALYSTS, CORDON], "a stock Katalyst agent wrote the other one"
    assert after["metadata"]["annotations"] == {"example.com/a": "b"}
    assert server.objects[NODES.path("n2")] == node("n2"), "no agent is expected there"


@pytest.mark.parametrize(
    ("kind", "path"), [("reclaimed-resources", f"{NODES.path('n1')}/status"), ("eviction-taints", NODES.path("n1"))]
)
async def test_only_the_kinds_that_are_named_are_removed(server: FakeApiServer, kind: Leftover, path: str) -> None:
    await remove(server, kind)
    assert [request.path for request in server.requests if request.method == "PATCH"] == [path]


async def test_a_node_without_a_record_is_not_patched(server: FakeApiServer) -> None:
    del server.objects[NODES.path("n1")]["metadata"]["annotations"]
    await remove(server, "eviction-taints")
    assert [request for request in server.requests if request.method == "PATCH"] == []


async def test_a_refused_patch_is_sent_again_after_a_minute(server: FakeApiServer) -> None:
    server.refuse[NODES.path("n1")] = 403
    await remove(server, "eviction-taints", passes=(1000.0, 1005.0, 1061.0))
    patches = [request for request in server.requests if request.method == "PATCH"]
    assert len(patches) == 2
