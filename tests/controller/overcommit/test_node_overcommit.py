"""The overcommit controller against an API server in memory; on a real one: tests/cluster/test_overcommit.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.overcommit import CONFIG_KEY, NODE_POOL_LABEL
from controller.kinds import CNRS, NOCS, NODES
from controller.overcommit.node_overcommit import MATCHED_METRIC, OvercommitController
from controller.reconcile import MetricValues
from kube.informer import Informer
from tests.builders.api_server import FakeApiServer

K = "katalyst.kubewharf.io/"


def node(name: str, pool: str = "p", **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "labels": {NODE_POOL_LABEL: pool}, "annotations": annotations}
    return {"metadata": {**metadata, "resourceVersion": "1"}}


def config(name: str, pool: str = "p", second: int = 1, **ratios: str) -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "creationTimestamp": f"2026-01-01T00:00:0{second}Z", "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {"nodeOvercommitSelectorVal": pool, "resourceOvercommitRatio": ratios}}


@pytest.fixture
def server() -> FakeApiServer:
    cnr = {"metadata": {"name": "n1", "annotations": {f"{K}cpu_overcommit_ratio": "1.50"}, "resourceVersion": "1"}}
    return FakeApiServer(
        {
            NODES.path("n1"): node("n1", **{f"{K}original_allocatable_cpu": "8", f"{K}original_capacity_cpu": "8"}),
            NODES.path("n2"): node("n2", pool="q"),
            CNRS.path("n1"): cnr,
            NOCS.path("first"): config("first", cpu="2", memory="big"),
        }
    )


@asynccontextmanager
async def running(server: FakeApiServer, metrics: MetricValues) -> AsyncIterator[None]:
    async with server.client() as client:
        nodes, cnrs, configs = Informer(client, NODES), Informer(client, CNRS), Informer(client, NOCS)
        controller = OvercommitController(client, nodes, cnrs, configs, metrics)
        tasks = [asyncio.create_task(run()) for run in (nodes.run, cnrs.run, configs.run, controller.run)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.02)


def annotations(server: FakeApiServer, name: str = "n1") -> dict[str, str]:
    return dict(server.objects[NODES.path(name)]["metadata"].get("annotations", {}))


def matched(server: FakeApiServer, name: str) -> list[str] | None:
    status = server.objects[NOCS.path(name)].get("status")
    return None if status is None else list(status["matchedNodeList"])


async def test_a_node_follows_its_configuration_and_is_restored_when_it_goes(server: FakeApiServer) -> None:
    metrics = MetricValues()
    original = annotations(server)
    async with running(server, metrics):
        await until(lambda: matched(server, "first") == ["n1"])
        assert annotations(server) == original | {
            CONFIG_KEY: "first",
            f"{K}cpu_overcommit_ratio": "2",
            f"{K}realtime_cpu_overcommit_ratio": "1.50",
            f"{K}memory_overcommit_ratio": "1",
            f"{K}overcommit_allocatable_cpu": "12",
            f"{K}overcommit_capacity_cpu": "12",
        }
        assert annotations(server, "n2") == {}
        events = [request.body for request in server.requests if request.path.endswith("/events")]
        assert [(event["reason"], event["involvedObject"]["kind"]) for event in events] == [
            ("InvalidRatio", "NodeOvercommitConfig")
        ]
        assert "spec.resourceOvercommitRatio.memory: 'big' counts as 1" in events[0]["message"]
        async with server.client() as client:
            await client.create(NOCS, config("second", second=2, cpu="3"))
            await until(lambda: matched(server, "second") == ["n1"] and matched(server, "first") == [])
            await until(lambda: annotations(server)[CONFIG_KEY] == "second")
            assert annotations(server)[f"{K}cpu_overcommit_ratio"] == "3"
            assert metrics.values(MATCHED_METRIC) == {("first",): 0, ("second",): 1}
            for name in ("second", "first"):
                await client.delete(NOCS, name)
            await until(lambda: annotations(server) == original)
            await until(lambda: metrics.values(MATCHED_METRIC) == {})


async def test_a_configuration_that_was_deleted_without_a_controller_is_undone(server: FakeApiServer) -> None:
    stale = {CONFIG_KEY: "gone", f"{K}cpu_overcommit_ratio": "2", f"{K}overcommit_allocatable_cpu": "16"}
    server.objects[NODES.path("n2")] = node("n2", pool="q", **stale, **{f"{K}original_allocatable_cpu": "8"})
    async with running(server, MetricValues()):
        await until(lambda: annotations(server, "n2") == {f"{K}original_allocatable_cpu": "8"})


async def test_a_rejected_write_is_retried_and_changes_nothing_else(server: FakeApiServer) -> None:
    server.refuse[NODES.path("n1")] = 500
    metrics = MetricValues()
    async with running(server, metrics):
        retried = ("overcommit", "retried")
        await until(lambda: metrics.values("dioptase_controller_reconciles_total").get(retried, 0) >= 1)
        await until(lambda: matched(server, "first") == ["n1"])
        assert CONFIG_KEY not in annotations(server)
        server.refuse.clear()
        await until(lambda: annotations(server).get(CONFIG_KEY) == "first")
