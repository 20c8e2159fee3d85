"""Requests of the eviction manager to a real API server without nodes: evictions by uid, and taints."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.eviction.api_evictor import ApiEvictionMethod, MethodResult
from agent.reporter.node_taints import NodeTaints
from api.eviction import ActiveCondition, EvictionBlock, EvictionCondition, EvictionResult
from api.pod import Pod
from api.qos import QoSLevel
from kube.client import KubeClient
from tests.builders.four_cpu_node import busy_cycle
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Refused, Server

pytestmark = pytest.mark.cluster
OTHERS = {"key": "example.com/reserved", "value": "x", "effect": "NoSchedule"}
PREFIX = "node.katalyst.kubewharf.io/"


def create_pod(server: Server, namespace: str) -> Pod:
    """Create a pod that no node runs, and the account that every pod needs."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    try:
        server.ask("POST", accounts, {"metadata": {"name": "default"}})
    except Refused as error:
        if error.status != 409:
            raise
    body = a_pod("batch")
    body["spec"]["nodeName"] = "nowhere"
    there = server.ask("POST", f"/api/v1/namespaces/{namespace}/pods", body)
    uid = there["metadata"]["uid"]
    return Pod(uid=uid, namespace=namespace, name="batch", qos=QoSLevel.RECLAIMED, containers=())


@pytest.mark.parametrize("form", ["eviction", "deletion"])
async def test_only_the_pod_that_was_meant_leaves_with_the_grace_that_was_meant(
    client: KubeClient, server: Server, namespace: str, form: Any
) -> None:
    batch, method = create_pod(server, namespace), ApiEvictionMethod(client, form)
    before = msgspec.structs.replace(batch, uid="00000000-0000-0000-0000-000000000000")
    assert (await method.evict(before, 5)).result is MethodResult.ABSENT
    observed = await method.observe(batch)
    assert observed is not None
    assert (observed.absent, observed.terminating) == (False, False), "its namesake is not there, and it is left alone"
    assert (await method.evict(batch, 60)).result is MethodResult.REQUESTED
    observed = await method.observe(batch)
    assert observed is not None
    assert (observed.absent, observed.terminating, observed.grace_s) == (False, True, 60)
    # Again with less: nothing is lost by asking twice, and the shorter grace counts.
    assert (await method.evict(batch, 0)).result is MethodResult.REQUESTED
    observed = await method.observe(batch)
    assert observed is not None
    assert (observed.terminating, observed.grace_s) == (True, 1)
    server.ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/batch?gracePeriodSeconds=0")
    observed = await method.observe(batch)
    assert observed is not None
    assert observed.absent
    assert (await method.evict(batch, 5)).result is MethodResult.ABSENT


async def test_a_namespace_that_is_none_and_a_pod_that_never_was(client: KubeClient, namespace: str) -> None:
    method = ApiEvictionMethod(client, "eviction")
    pod = Pod(uid="u", namespace=namespace, name="never", qos=QoSLevel.RECLAIMED, containers=())
    assert (await method.evict(pod, None)).result is MethodResult.ABSENT
    strange = msgspec.structs.replace(pod, name="Never_Was")
    assert (await method.evict(strange, None)).block in (None, EvictionBlock.REFUSED)


def in_force(*names: str) -> Any:
    shown = (
        ActiveCondition(condition=EvictionCondition(name=name), plugin="p", since_ns=0, last_met_ns=0) for name in names
    )
    return msgspec.structs.replace(busy_cycle(), evictions=EvictionResult(conditions=tuple(shown)))


async def test_taints_of_the_node_come_and_go_next_to_those_of_others(client: KubeClient, server: Server) -> None:
    path = "/api/v1/nodes/taint-test"
    server.ask("POST", "/api/v1/nodes", {"metadata": {"name": "taint-test"}, "spec": {"taints": [OTHERS]}})

    def keys() -> list[str]:
        # A node that says nothing is not ready, where there are controllers that tell.
        results = [item["key"] for item in server.ask("GET", path)["spec"].get("taints", [])]
        return [key for key in results if not key.startswith("node.kubernetes.io/")]

    try:
        taints = NodeTaints(client, "taint-test")
        taints.publish(in_force("MemoryPressure", "CPUPressure", "not a name"))
        await taints.sync(0)
        assert taints.problem() is None
        assert keys() == [OTHERS["key"], f"{PREFIX}CPUPressure", f"{PREFIX}MemoryPressure"]
        server.ask("PATCH", path, {"metadata": {"labels": {"changed": "meanwhile"}}}, MERGE)
        taints.publish(in_force("CPUPressure"))
        await taints.sync(10)
        assert keys() == [OTHERS["key"], f"{PREFIX}CPUPressure"]
        await taints.withdraw()
        assert keys() == [OTHERS["key"]]
        assert server.ask("GET", path)["spec"]["taints"][0] == OTHERS
    finally:
        server.ask("DELETE", path)
