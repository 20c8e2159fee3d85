"""Agents evict within the budget of the cluster, and without it only while their node runs out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from agent.eviction import cluster_budget
from agent.eviction.api_evictor import ApiEvictor, MethodResponse, MethodResult, PodObservation
from agent.eviction.cluster_budget import ClusterEvictionBudget, memory_emergency, open_cluster_budget
from api.eviction import EvictionBlock
from api.eviction_budget import BUDGET_ANNOTATION, EvictionBudget, budget_limit, format_budget, parse_budget
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import NodeSample, Pressure
from api.units import GIB, MIB
from kube.budget_lease import count_eviction
from kube.client import KubeClient
from tests.builders.api_server import FakeApiServer
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.waiting import until_async

LEASE, KEY = "/apis/coordination.k8s.io/v1/namespaces/dioptase/leases/dioptase-evictions", "dioptase/dioptase-evictions"


def server_with(limit: int, **evictions: int) -> FakeApiServer:
    text = format_budget(EvictionBudget(limit=limit, evictions=evictions))
    return FakeApiServer(
        {
            LEASE: {
                "metadata": {
                    "name": "dioptase-evictions",
                    "resourceVersion": "1",
                    "annotations": {BUDGET_ANNOTATION: text},
                }
            }
        }
    )


def evictions(server: FakeApiServer) -> Mapping[str, int]:
    budget = parse_budget(server.objects[LEASE]["metadata"]["annotations"])
    assert budget is not None
    return budget.evictions


async def refusals(server: FakeApiServer, node: str, count: int) -> list[str]:
    """Return the refusals of so many evictions."""
    async with server.client() as client:
        own = ClusterEvictionBudget(client, KEY, node)
        answers = [await own.refusal() for _ in range(count)]
    return ["" if answer is None else answer.text for answer in answers]


async def test_one_node_takes_half_of_the_budget_and_all_nodes_together_all() -> None:
    server = server_with(5)
    first = await refusals(server, "n1", 4)
    assert first[:3] == ["", "", ""]
    assert first[3] == (
        "the eviction budget of the cluster: this node evicted 3 pods in this interval, the limit of a node is 3"
    )
    second = await refusals(server, "n2", 3)
    assert second[:2] == ["", ""]
    assert second[2].endswith("the nodes of the cluster evicted 5 pods in this interval, the limit is 5")
    assert evictions(server) == {"n1": 3, "n2": 2}


async def test_agents_that_count_at_the_same_time_stay_within_the_limit() -> None:
    server = server_with(7)
    granted = 0
    for _ in range(8):
        results = await asyncio.gather(*(refusals(server, f"n{number}", 1) for number in range(8)))
        granted += sum(text == "" for each in results for text in each)
        assert granted == sum(evictions(server).values()) <= 7
    assert granted == 7, "an agent that loses against others tries again"


@pytest.mark.parametrize(
    ("annotation", "status"),
    [
        (None, 0),
        ("{", 0),
        ('{"limit":-1}', 0),
        ("[" * 100_000, 0),
        ('{"limit":9}', 403),
        ('{"limit":9}', 404),
        ('{"limit":9}', 500),
    ],
)
async def test_without_a_readable_budget_no_pod_is_evicted(annotation: str | None, status: int) -> None:
    """The controller has not run yet, another program wrote the Lease, or the API server refuses."""
    annotations = {} if annotation is None else {BUDGET_ANNOTATION: annotation}
    server = FakeApiServer(
        {LEASE: {"metadata": {"name": "dioptase-evictions", "resourceVersion": "1", "annotations": annotations}}}
    )
    if status:
        server.refuse[LEASE] = status
    assert "" not in await refusals(server, "n1", 2)


async def test_a_denial_holds_for_all_pods_of_the_node() -> None:
    server = server_with(0)
    assert len(await refusals(server, "n1", 50)) == 50
    assert [request.method for request in server.requests] == ["GET"]


@pytest.mark.parametrize(
    ("available", "total", "full_avg10", "expected"),
    [
        (199 * MIB, 4 * GIB, 0.0, True),
        (201 * MIB, 4 * GIB, 0.0, False),
        (5 * GIB, 256 * GIB, 0.0, False),
        (3 * GIB, 256 * GIB, 0.0, True),
        (int(3.9 * GIB), 2048 * GIB, 0.0, True),
        (int(4.1 * GIB), 2048 * GIB, 0.0, False),
        (100 * GIB, 256 * GIB, 39.0, False),
        (100 * GIB, 256 * GIB, 40.0, True),
        (None, None, None, False),
    ],
)
def test_an_emergency_is_a_fact_of_the_kernel(
    available: int | None, total: int | None, full_avg10: float | None, *, expected: bool
) -> None:
    pressure = None if full_avg10 is None else Pressure(some_us=0, some_avg10=50.0, full_avg10=full_avg10)
    node = NodeSample(memory_available_bytes=available, memory_total_bytes=total, memory_pressure=pressure)
    assert memory_emergency(node) == expected


def cycle_with(available_bytes: int) -> Any:
    cycle = busy_cycle()
    node = msgspec.structs.replace(
        cycle.snapshot.node, memory_available_bytes=available_bytes, memory_total_bytes=8 * GIB, memory_pressure=None
    )
    return msgspec.structs.replace(cycle, snapshot=msgspec.structs.replace(cycle.snapshot, node=node))


class Method:
    """Evicts every pod at once."""

    def __init__(self) -> None:
        self.evicted: list[str] = []

    async def evict(self, pod: Pod, _grace_s: float | None) -> MethodResponse:
        self.evicted.append(pod.name)
        return MethodResponse(result=MethodResult.ABSENT)

    async def observe(self, _pod: Pod) -> PodObservation | None:
        return PodObservation()

    def forget(self, pod: Pod) -> None:
        pass


def pod(name: str) -> Pod:
    return Pod(uid=name, namespace="shop", name=name, qos=QoSLevel.RECLAIMED, containers=())


async def test_a_pod_waits_for_the_budget_and_leaves_when_memory_runs_out() -> None:
    server, method = server_with(1), Method()
    async with server.client() as client:
        evictor = ApiEvictor(lambda _pod: method)
        budget = open_cluster_budget(client, KEY, "n1", evictor)
        try:
            evictor.evict(pod("a"), None, "because")
            await until_async(lambda: method.evicted == ["a"], "the first leaves")
            evictor.evict(pod("b"), None, "because")
            blocked = {"shop/b": EvictionBlock.CLUSTER_BUDGET}
            await until_async(lambda: evictor.blocked == blocked, "the second waits")
            assert evictor.stuck == frozenset(), "no other pod is evicted in its place"
            problem = evictor.problem()
            assert problem is not None
            assert "evicted 1 pods in this interval, the limit " in problem.reason
            budget.publish(cycle_with(GIB))
            assert method.evicted == ["a"]
            budget.publish(cycle_with(100 * MIB))
            await until_async(lambda: method.evicted == ["a", "b"], "it leaves")
            assert evictions(server) == {"n1": 2}, "counted all the same"
        finally:
            evictor.close()


async def test_memory_runs_out_while_the_api_server_refuses_the_lease() -> None:
    server = server_with(0)
    server.refuse[LEASE] = 500
    async with server.client() as client:
        budget = ClusterEvictionBudget(client, KEY, "n1")
        budget.publish(cycle_with(100 * MIB))
        assert await budget.refusal() is None
        budget.publish(cycle_with(GIB))
        assert await budget.refusal() is not None


async def test_memory_runs_out_during_the_request_to_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eviction of the cycle that finds the emergency is requested before the cycle is published."""
    server = server_with(0)
    async with server.client() as client:
        budget = ClusterEvictionBudget(client, KEY, "n1")

        async def count_slowly(client: KubeClient, lease_key: str, node: str, *, forced: bool = False) -> str:
            reason = await count_eviction(client, lease_key, node, forced=forced)
            budget.publish(cycle_with(100 * MIB))
            return reason

        monkeypatch.setattr(cluster_budget, "count_eviction", count_slowly)
        assert await budget.refusal() is None
    assert evictions(server) == {"n1": 1}, "counted all the same"


def test_the_limit_grows_with_the_nodes() -> None:
    assert [budget_limit(10, 0.05, nodes) for nodes in (0, 1, 200, 201, 500)] == [10, 10, 10, 11, 25]


def test_the_annotation_is_plain_json() -> None:
    text = format_budget(EvictionBudget(limit=10, evictions={"n2": 1, "n1": 2}))
    assert text == '{"evictions":{"n1":2,"n2":1},"limit":10}'
