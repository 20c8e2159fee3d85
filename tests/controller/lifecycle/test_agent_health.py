"""What is done to nodes while others come and go; on a real API server: tests/cluster/test_controller.py."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from controller.kinds import CNRS, NODES
from controller.lifecycle.agent_health import AgentHealth
from controller.reconcile import MetricValues
from controller.settings import HealthConfig
from kube.informer import Informer
from tests.builders.api_server import client_of, status_response

RECLAIMED_RESOURCES = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": "4k"}
WELL = [f"w{number}" for number in range(9)]


def listed(request: web.Request) -> str:
    """Two nodes whose agents are gone, both of which promise CPUs, among others that are well."""
    names, extra = ["a", "b", *WELL], {}
    if request.path.endswith("/pods"):
        names = WELL
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        items = [
            {
                "metadata": {"name": name, "namespace": "x", "labels": {"app": "agent"}},
                "spec": {"nodeName": name},
                "status": ready,
            }
            for name in names
        ]
        return json.dumps({"metadata": {"resourceVersion": "1"}, "items": items})
    if request.path.endswith("/nodes"):
        extra = {"status": {"capacity": RECLAIMED_RESOURCES}}
    items = [{"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, **extra} for name in names]
    return json.dumps({"metadata": {"resourceVersion": "1"}, "items": items})


async def test_a_node_deleted_during_a_write_does_not_stop_the_evaluation() -> None:
    written: list[tuple[str, object]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH":
            written.append((request.path, await request.json()))
            nodes.store.drop("b")
            return status_response(409, json.dumps({"kind": "Status", "reason": "Conflict", "code": 409}))
        if "watch" in request.query:
            await asyncio.sleep(60)
        return status_response(200, listed(request))

    async with client_of(answer) as client:
        nodes, cnrs = Informer(client, NODES), Informer(client, CNRS)
        health = AgentHealth(
            client, nodes, cnrs, HealthConfig(agents={"one": "app=agent"}, taint_after_s=5), MetricValues()
        )
        running = [asyncio.create_task(each.run()) for each in (nodes, cnrs, *health.pods)]
        for each in (nodes, cnrs, *health.pods):
            await asyncio.wait_for(each.synced.wait(), 10)
        await health._evaluate(1000.0)
        await health._evaluate(1005.0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    status_patches = [path for path, body in written if path.endswith("/status")]
    assert status_patches == ["/api/v1/nodes/a/status"]
