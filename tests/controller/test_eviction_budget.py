"""The controller renews the eviction budget, and reads from it which nodes evict."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from api.eviction_budget import (
    BUDGET_ANNOTATION,
    INTERVAL_S,
    EvictionBudget,
    format_budget,
    parse_budget,
    with_eviction,
)
from controller.eviction_budget import EvictionBudgetRenewal
from controller.kcc.rollout_guard import NodeEviction
from controller.kinds import NODES, ControllerNode
from controller.reconcile import MetricValues
from controller.settings import EvictionBudgetConfig
from kube.errors import ApiError
from kube.informer import Informer
from tests.builders.api_server import FakeApiServer

LEASE = "/apis/coordination.k8s.io/v1/namespaces/dioptase/leases/dioptase-evictions"
WALL_S = 1_750_000_000.0


@asynccontextmanager
async def renewing(server: FakeApiServer, nodes: int = 3) -> AsyncIterator[tuple[EvictionBudgetRenewal, MetricValues]]:
    metrics = MetricValues()
    async with server.client() as client:
        informer = Informer(client, NODES)
        for number in range(nodes):
            informer.store.put(f"n{number}", ControllerNode())
        yield EvictionBudgetRenewal(client, informer, "dioptase", EvictionBudgetConfig(), metrics), metrics


def budget(server: FakeApiServer) -> EvictionBudget | None:
    return parse_budget(server.objects[LEASE]["metadata"]["annotations"])


def evict(server: FakeApiServer, node: str, pods: int = 1) -> None:
    """Count evictions as an agent does."""
    for _ in range(pods):
        current = budget(server)
        assert current is not None
        server.objects[LEASE]["metadata"]["annotations"][BUDGET_ANNOTATION] = format_budget(
            with_eviction(current, node)
        )


def writes(server: FakeApiServer) -> int:
    return sum(request.method != "GET" for request in server.requests)


async def test_the_budget_is_renewed_a_minute_after_its_first_eviction() -> None:
    server = FakeApiServer({f"{LEASE}-other": {"metadata": {"name": "dioptase-evictions-other"}}})
    async with renewing(server) as (renewal, metrics):
        await renewal.sync(0.0, WALL_S)
        assert budget(server) == EvictionBudget(limit=10)
        for tick in range(1, 100):
            await renewal.sync(tick * 5.0, WALL_S + tick * 5)
        assert writes(server) == 1, "while no pod is evicted, nothing is written"
        evict(server, "n1", 4)
        await renewal.sync(500.0, WALL_S + 500)
        assert renewal.evictions == (NodeEviction(WALL_S + 500, "n1", 4),)
        assert metrics.values("dioptase_eviction_budget_used") == {(): 4}
        evict(server, "n2")
        await renewal.sync(495.0 + INTERVAL_S - 1, WALL_S + 550)
        assert budget(server) == EvictionBudget(limit=10, evictions={"n1": 4, "n2": 1}), "not renewed yet"
        await renewal.sync(495.0 + INTERVAL_S, WALL_S + 555)
        assert budget(server) == EvictionBudget(limit=10)
        assert renewal.evictions == (NodeEviction(WALL_S + 500, "n1", 4), NodeEviction(WALL_S + 550, "n2", 1))
        evict(server, "n1")
        await renewal.sync(560.0, WALL_S + 560)
        assert renewal.evictions[-1] == NodeEviction(WALL_S + 560, "n1", 1)


async def test_a_new_leader_counts_nothing_twice_and_writes_a_new_limit() -> None:
    text = format_budget(EvictionBudget(limit=10, evictions={"n1": 6}))
    server = FakeApiServer(
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
    async with renewing(server, nodes=400) as (renewal, _):
        renewal._renew_at_s = INTERVAL_S
        await renewal.sync(0.0, WALL_S)
        assert renewal.evictions == ()
        assert budget(server) == EvictionBudget(limit=20, evictions={"n1": 6})


async def test_an_annotation_of_another_program_is_replaced() -> None:
    annotations = {BUDGET_ANNOTATION: "unlimited", "other": "stays"}
    server = FakeApiServer(
        {LEASE: {"metadata": {"name": "dioptase-evictions", "resourceVersion": "1", "annotations": annotations}}}
    )
    async with renewing(server) as (renewal, _):
        await renewal.sync(0.0, WALL_S)
    assert budget(server) == EvictionBudget(limit=10)
    assert server.objects[LEASE]["metadata"]["annotations"]["other"] == "stays"


async def test_the_controllers_own_evictions_count_like_those_of_agents() -> None:
    """Half of the limit is the limit of a node; agents that count at the same time lose no eviction."""
    server = FakeApiServer({f"{LEASE}-other": {"metadata": {"name": "dioptase-evictions-other"}}})
    async with renewing(server) as (renewal, _):
        with pytest.raises(ApiError, match="404"):
            await renewal.take("n1")
        await renewal.sync(0.0, WALL_S)
        server.rivals = 2
        assert [await renewal.take("n1") for _ in range(5)] == [""] * 5
        assert await renewal.take("n1") == "this node evicted 5 pods in this interval, the limit of a node is 5"
        evict(server, "n2", 5)
        assert await renewal.take("n3") == "the nodes of the cluster evicted 10 pods in this interval, the limit is 10"
        assert budget(server) == EvictionBudget(limit=10, evictions={"n1": 5, "n2": 5})
        server.rivals = 5
        server.objects[LEASE]["metadata"]["annotations"][BUDGET_ANNOTATION] = format_budget(EvictionBudget(limit=10))
        with pytest.raises(ApiError, match="409"):
            await renewal.take("n1")
