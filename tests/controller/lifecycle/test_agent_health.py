"""Actions on nodes while others come and go; on a real API server: tests/cluster/test_controller.py."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from api.pod import RECLAIMED_CPU
from controller.kinds import CNRS, NODES, PODS
from controller.lifecycle.agent_health import AgentHealth
from controller.reconcile import MetricValues
from controller.settings import HealthConfig
from kube.informer import Informer
from tests.builders.api_server import FakeApiServer

READY = [f"w{number}" for number in range(9)]
"""Nodes with a ready agent; a and b have none, and report reclaimed CPUs."""


def objects() -> dict[str, dict[str, Any]]:
    """Return nodes, their CustomNodeResources, and the agents' pods."""
    nodes = {
        resource.path(name): {"metadata": {"name": name, "uid": name}, "status": {"capacity": {RECLAIMED_CPU: "4k"}}}
        for resource in (NODES, CNRS)
        for name in ("a", "b", *READY)
    }
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return nodes | {
        f"{PODS.collection()}/{name}": {
            "metadata": {"name": name, "namespace": "x", "labels": {"app": "agent"}},
            "spec": {"nodeName": name},
            "status": status,
        }
        for name in READY
    }


async def test_a_node_deleted_during_a_write_does_not_stop_the_evaluation() -> None:
    server = FakeApiServer(objects())
    patched: list[str] = []

    async def conflict(request: web.Request) -> web.StreamResponse:
        patched.append(request.path)
        nodes.store.drop("b")
        return server.error(409, "conflict")

    server.handlers = dict.fromkeys((NODES.path("a"), NODES.path("b"), CNRS.path("a"), CNRS.path("b")), conflict)
    async with server.client() as client:
        nodes, cnrs = Informer(client, NODES), Informer(client, CNRS)
        config = HealthConfig(agents={"one": "app=agent"}, taint_after_s=5)
        health = AgentHealth(client, nodes, cnrs, config, MetricValues())
        informers = (nodes, cnrs, *health.pods)
        running = [asyncio.create_task(informer.run()) for informer in informers]
        for informer in informers:
            await asyncio.wait_for(informer.synced.wait(), 10)
        await health._evaluate(1000.0)
        await health._evaluate(1005.0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert [path for path in patched if path.endswith("/status")] == ["/api/v1/nodes/a/status"]
