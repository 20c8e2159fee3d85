"""When an agent that ends may expect another one on its node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent.reporter.successor import find_successor_obstacle
from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials
from tests.builders.api_server import FakeApiServer

KEY = "dioptase/dioptase-agent"
DAEMON_SET, NODE = "/apis/apps/v1/namespaces/dioptase/daemonsets/dioptase-agent", "/api/v1/nodes/n1"
STATE = {"name": "state", "hostPath": {"path": "/var/lib/dioptase"}}
GPU_TAINT = {"key": "gpu", "value": "a100", "effect": "NoSchedule"}
DELETED = {"deletionTimestamp": "2026-01-31T09:30:00Z"}


def daemon_set(metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    template = {"volumes": [STATE], "nodeSelector": {"kubernetes.io/os": "linux"}, **spec}
    return {"metadata": {"name": "dioptase-agent", **(metadata or {})}, "spec": {"template": {"spec": template}}}


def node(*taints: dict[str, str], **metadata: Any) -> dict[str, Any]:
    labels = {"kubernetes.io/os": "linux", "dioptase": "yes"}
    return {"metadata": {"name": "n1", "labels": labels, **metadata}, "spec": {"taints": list(taints)}}


def obstacle(server: FakeApiServer) -> str:
    async def ask() -> str:
        async with server.client() as client:
            return await find_successor_obstacle(client, KEY, "n1", "/var/lib/dioptase")

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("owner", "of_node", "expected"),
    [
        (daemon_set(), node(), ""),
        (daemon_set(nodeSelector={"dioptase": "yes"}), node(), ""),
        (daemon_set(nodeSelector={"dioptase": "no"}), node(), "its nodeSelector dioptase=no does not select this node"),
        (daemon_set(DELETED), node(), "it is being deleted"),
        (daemon_set(), node(**DELETED), "the Node is being deleted"),
        (daemon_set(), node({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}), ""),
        (daemon_set(), node({"key": "slow", "effect": "PreferNoSchedule"}), ""),
        (daemon_set(), node(GPU_TAINT), "it does not tolerate the node's taint gpu"),
        (daemon_set(tolerations=[{"operator": "Exists"}]), node(GPU_TAINT), ""),
        (daemon_set(tolerations=[{"key": "gpu", "value": "a100"}]), node(GPU_TAINT), ""),
        (
            daemon_set(tolerations=[{"key": "gpu", "value": "h100"}]), node(GPU_TAINT),
            "it does not tolerate the node's taint gpu",
        ),
        (
            daemon_set(affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}), node(),
            "its template has a nodeAffinity, which the agent does not evaluate",
        ),
        (
            daemon_set(volumes=[{"name": "state", "hostPath": {"path": "/data/dioptase"}}]), node(),
            "its template does not mount the state directory /var/lib/dioptase of this agent",
        ),
    ],
)  # fmt: skip
def test_a_successor_has_to_run_here_with_the_same_state(
    owner: dict[str, Any], of_node: dict[str, Any], expected: str
) -> None:
    result = obstacle(FakeApiServer({DAEMON_SET: owner, NODE: of_node}))
    assert result == (f"DaemonSet dioptase/dioptase-agent: {expected}" if expected else "")


@pytest.mark.parametrize(("status", "restores"), [(401, True), (403, True), (404, True), (429, False), (500, False)])
def test_a_release_that_is_being_removed_differs_from_an_outage(status: int, restores: bool) -> None:
    server = FakeApiServer({DAEMON_SET: daemon_set(), NODE: node()})
    server.refuse[DAEMON_SET] = status
    assert bool(obstacle(server)) == restores


def test_without_an_api_server_the_kubelet_restarts_the_container() -> None:
    async def ask() -> str:
        async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test", 1) as client:
            return await find_successor_obstacle(client, KEY, "n1", "/var/lib/dioptase")

    assert asyncio.run(ask()) == ""
