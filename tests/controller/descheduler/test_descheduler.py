"""The controller on a fake API server: what it writes, in which order, and when it evicts nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from api.eviction_budget import BUDGET_ANNOTATION, EvictionBudget, format_budget, parse_budget
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.descheduler.descheduler import DeschedulerController
from controller.descheduler.descheduling_report import DeschedulerHalt
from controller.descheduler.move_history import (
    MAX_ANNOTATION_CHARS,
    MOVES_ANNOTATION,
    MoveHistory,
    format_history,
    parse_history,
)
from controller.eviction_budget import EvictionBudgetRenewal
from controller.kinds import NODES, ControllerNode
from controller.reconcile import MetricValues
from controller.settings import EvictionBudgetConfig
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import format_timestamp, key_of
from kube.watch import WatchEvent, WatchEventType
from tests.builders.api_server import FakeApiServer
from tests.controller.descheduler.hot_nodes import GIB, OWNER, settings
from tests.controller.scheduler.objects import NOW_S

LEASES = "/apis/coordination.k8s.io/v1/namespaces/dioptase/leases"
MOVES_LEASE, BUDGET_LEASE = f"{LEASES}/dioptase-descheduler", f"{LEASES}/dioptase-evictions"
PODS = "/api/v1/namespaces/default/pods"
TWICE = {"anomalyCondition": {"consecutiveAbnormalities": 2}}
MINUTE_S = 60.0
EVICTIONS = "dioptase_descheduler_evictions_total"


def a_pod(name: str, *, node: str = "hot", millicpu: int = 4000) -> dict[str, Any]:
    amounts = {RECLAIMED_CPU: str(millicpu), RECLAIMED_MEMORY: "1048576"}
    metadata = {
        "name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1",
        "annotations": {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}, "ownerReferences": [{**OWNER, "name": name}],
    }  # fmt: skip
    container = {"name": "main", "resources": {"requests": amounts, "limits": amounts}}
    started = format_timestamp(NOW_S - 3600)
    spec = {"nodeName": node, "containers": [container]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running", "startTime": started}}


def answering(status: int) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that refuses every request with this status."""

    async def refuse(_request: web.Request) -> web.Response:
        return FakeApiServer.error(status, "refused by the test")

    return refuse


class Harness:
    """A descheduler, and the objects of which it has received the latest versions."""

    def __init__(self, server: FakeApiServer, client: Any, config: Any) -> None:
        self.server, self.metrics = server, MetricValues()
        self.nodes: Informer[ControllerNode] = Informer(client, NODES)
        budget = EvictionBudgetRenewal(client, self.nodes, "dioptase", EvictionBudgetConfig(), self.metrics)
        self.controller = DeschedulerController(client, self.nodes, config, "dioptase", budget.take, self.metrics)
        self._version, self._pods = 1, [a_pod("batch"), a_pod("other")]
        for name in ("hot", "idle"):
            status = {"allocatable": {"cpu": "10", "memory": "100Gi", "pods": "110"}}
            self._deliver(self.nodes, {"metadata": {"name": name, "resourceVersion": "1"}, "status": status})
        for pod in self._pods:
            self._deliver(self.controller.copy.pods, pod)

        async def list_pods(request: web.Request) -> web.Response:
            node = request.query["fieldSelector"].removeprefix("spec.nodeName=")
            items = [pod for pod in self._pods if pod["spec"]["nodeName"] == node]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})

        server.handlers["/api/v1/pods"] = list_pods
        server.handlers.setdefault(f"{PODS}/", self._evict)

    async def _evict(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def minute(
        self, number: int, usage: float = 80, *, reclaimed: float | None = None, received_s: float = 0.0
    ) -> None:
        """Deliver the reports of a minute, and evaluate them; reclaimed pods use all, or `reclaimed` percent of a node."""
        now_s = NOW_S + number * MINUTE_S
        for name, percent in (("hot", usage), ("idle", 5.0)):
            self._version += 1
            amounts = {"cpu": f"{percent * 100:.0f}m", "memory": "1Gi"}
            part = percent if reclaimed is None else reclaimed
            groups = [{"QoSLevel": "reclaimed_cores", "genericUsage": {"cpu": f"{part * 100:.0f}m", "memory": "1Gi"}}]
            status = {
                "resources": {"allocatable": {RECLAIMED_CPU: "10000", RECLAIMED_MEMORY: str(10 * GIB)}},
                "nodeMetricStatus": {"updateTime": format_timestamp(now_s), "nodeMetric": {"genericUsage": amounts},
                                     "groupMetric": groups},
            }  # fmt: skip
            self._deliver(
                self.controller.copy.cnrs,
                {"metadata": {"name": name, "resourceVersion": str(self._version)}, "status": status},
            )
        await self.evaluate(now_s, received_s=received_s)

    async def evaluate(self, now_s: float, *, received_s: float = 0.0) -> None:
        """Evaluate; the API server was last heard so many seconds ago."""
        tick_s = time.monotonic()
        for informer in (self.nodes, *self.controller.copy.informers):
            informer._received_at_s = tick_s - received_s
        await self.controller.evaluate(now_s, tick_s)

    @property
    def report(self) -> Any:
        assert self.controller.report is not None
        return self.controller.report

    @property
    def evicted(self) -> list[str]:
        """Names of the pods whose eviction was requested."""
        return [request.path.split("/")[-2] for request in self.server.requests if request.path.endswith("/eviction")]

    def results(self) -> Mapping[tuple[str, ...], float]:
        return {labels[1:]: value for labels, value in self.metrics.values(EVICTIONS).items()}

    @staticmethod
    def _deliver(informer: Informer[Any], document: Mapping[str, Any]) -> None:
        received = msgspec.convert(document, informer.resource.type)
        informer._apply(WatchEvent(WatchEventType.MODIFIED, key_of(received.metadata), "", received))


def a_server(limit: int = 10, moves: str | None = None) -> FakeApiServer:
    budget = {BUDGET_ANNOTATION: format_budget(EvictionBudget(limit=limit))}
    granted = {"name": "dioptase-evictions", "resourceVersion": "1", "annotations": budget}
    objects: dict[str, Any] = {BUDGET_LEASE: {"metadata": granted}}
    if moves is not None:
        metadata = {"name": "dioptase-descheduler", "resourceVersion": "7", "annotations": {MOVES_ANNOTATION: moves}}
        objects[MOVES_LEASE] = {"metadata": metadata}
    return FakeApiServer(objects)


@asynccontextmanager
async def descheduling(server: FakeApiServer, **node_load: Any) -> AsyncIterator[Harness]:
    async with server.client() as client:
        yield Harness(server, client, settings(lowNodeLoad={**TWICE, **node_load}))


async def test_a_move_is_recorded_and_counted_before_the_pod_is_evicted() -> None:
    server = a_server()
    async with descheduling(server) as harness:
        await harness.minute(0)
        assert harness.evicted == []
        assert harness.report.hot_nodes[0].state == "1 of 2 consecutive hot reports"
        await harness.minute(1)
        assert harness.evicted == ["batch"]
        assert harness.results() == {("evicted",): 1}
        (hot,) = harness.report.hot_nodes
        assert (hot.state, hot.moves[0].target, hot.moves[0].relieves) == ("relieved", "idle", 0.4)
        assert hot.skipped == {"default/other": "the moves before it are enough for now"}
    budget = parse_budget(server.objects[BUDGET_LEASE]["metadata"]["annotations"])
    assert budget is not None
    assert budget.evictions == {"hot": 1}
    history = parse_history(server.objects[MOVES_LEASE]["metadata"]["annotations"])
    assert history is not None
    assert history.workloads == {"default/ReplicaSet/batch": NOW_S + 60}
    assert (history.sources, history.targets) == ({"hot": NOW_S + 60}, {"idle": NOW_S + 60})
    written = [request.path for request in server.requests if request.method != "GET"]
    assert written == [BUDGET_LEASE, LEASES, f"{PODS}/batch/eviction", "/api/v1/namespaces/default/events"]
    (event,) = (request.body for request in server.writes if request.path.endswith("/events"))
    assert event["reason"] == "Descheduled"
    assert event["message"] == (
        "Moving the pod relieves 40.0% of node hot, which is hot: CPU usage is 80.0 %, highThresholds.cpu 50 %. "
        "Node idle would take it"
    )


async def test_the_cooldown_of_a_node_ends_and_the_other_workload_is_moved() -> None:
    async with descheduling(a_server()) as harness:
        for number in range(6):
            await harness.minute(number)
        assert harness.evicted == ["batch"], "five minutes have not passed"
        await harness.minute(6)
        assert harness.evicted == ["batch", "other"]


async def test_the_next_leader_continues_cooldowns() -> None:
    server = a_server()
    async with descheduling(server) as harness:
        for number in range(2):
            await harness.minute(number)
    async with descheduling(server) as harness:
        for number in range(2, 6):
            await harness.minute(number)
        assert harness.evicted == ["batch"]
        await harness.minute(6)
        assert harness.evicted == ["batch", "other"]


async def test_a_dry_run_explains_and_writes_nothing() -> None:
    server = a_server()
    async with descheduling(server, dryRun=True) as harness:
        for number in range(4):
            await harness.minute(number)
        assert harness.results() == {("dry-run",): 1}, "the cool-down holds in a dry run, too"
        assert harness.report.dry_run
    assert [request.path for request in server.requests if request.method != "GET"] == []


@pytest.mark.parametrize(
    ("status", "result", "attempts"), [(429, "budget", ["batch", "other"]), (403, "refused", ["batch", "other"])]
)  # fmt: skip
async def test_a_pod_whose_eviction_is_refused_is_not_tried_at_every_evaluation(
    status: int, result: str, attempts: list[str]
) -> None:
    """Each attempt is counted in the budget of the cluster, which agents need for pods that endanger their node."""
    server = a_server()
    server.handlers[f"{PODS}/"] = answering(status)
    async with descheduling(server) as harness:
        for number in range(8):
            await harness.minute(number)
        assert harness.results() == {(result,): 2}
        assert harness.evicted == attempts
    history = parse_history(server.objects[MOVES_LEASE]["metadata"]["annotations"])
    assert history is not None
    assert set(history.workloads) == {"default/ReplicaSet/batch", "default/ReplicaSet/other"}
    assert (history.sources, history.targets) == ({}, {}), "the node may be relieved of other pods"


async def test_a_pod_that_does_not_exist_any_more_is_no_move() -> None:
    server = a_server()
    server.handlers[f"{PODS}/"] = answering(409)
    async with descheduling(server) as harness:
        for number in range(2):
            await harness.minute(number)
        assert harness.results() == {("gone",): 1}
    assert parse_history(server.objects[MOVES_LEASE]["metadata"]["annotations"]) == MoveHistory()


@pytest.mark.parametrize("status", [500, 504])
async def test_the_cooldown_stays_recorded_if_the_result_of_an_eviction_is_unknown(status: int) -> None:
    """After a timeout of etcd the API server answers 500 or 504, and the pod may have been evicted."""
    server = a_server()
    server.handlers[f"{PODS}/"] = answering(status)
    async with descheduling(server) as harness:
        await harness.minute(0)
        with pytest.raises(ApiError, match=str(status)):
            await harness.minute(1)
        for number in range(2, 6):
            await harness.minute(number)
        assert harness.evicted == ["batch"]
    history = parse_history(server.objects[MOVES_LEASE]["metadata"]["annotations"])
    assert history is not None
    assert history.sources == {"hot": NOW_S + 60}


async def test_after_a_refused_eviction_no_other_pod_of_the_node_is_moved_in_its_place() -> None:
    """Both pods are planned, because one is not enough. Without the first one the plan is not what was evaluated."""
    server = a_server()
    server.handlers[f"{PODS}/batch/"] = answering(429)
    async with descheduling(server, highThresholds={"cpu": 90}) as harness:
        for number in range(2):
            await harness.minute(number, usage=95, reclaimed=4)
        assert harness.evicted == ["batch"]
        (hot,) = harness.report.hot_nodes
        assert hot.skipped == {"default/other": "the move of default/batch, planned before it, was not made: budget"}
        await harness.minute(2, usage=95, reclaimed=4)
        assert harness.evicted == ["batch", "other"]


async def test_the_eviction_budget_of_the_cluster_holds_for_moves() -> None:
    async with descheduling(a_server(limit=0)) as harness:
        for number in range(2):
            await harness.minute(number)
        assert (harness.evicted, harness.results()) == ([], {("cluster-budget",): 1})


@pytest.mark.parametrize(
    ("path", "error"),
    [("/api/v1/pods", ApiError), (MOVES_LEASE, ApiError), (BUDGET_LEASE, ApiError), (LEASES, ApiError)],
)
async def test_without_an_answer_of_the_api_server_no_pod_is_evicted(path: str, error: type[Exception]) -> None:
    server = a_server()
    server.refuse[path] = 500
    async with descheduling(server) as harness:
        await harness.minute(0)
        with pytest.raises((error, ApiUnreachable)):
            await harness.minute(1)
        assert harness.evicted == []


async def test_a_conflict_in_the_lease_of_moves_evicts_nothing() -> None:
    server = a_server(moves="{}")
    async with descheduling(server) as harness:
        await harness.minute(0)
        take = harness.controller._take_budget

        async def other_leader(node: str) -> str:
            server.put(MOVES_LEASE, server.objects[MOVES_LEASE])
            return await take(node)

        harness.controller._take_budget = other_leader
        with pytest.raises(ApiError, match="409"):
            await harness.minute(1)
        assert harness.evicted == []


async def test_invalid_moves_halt_until_they_are_removed() -> None:
    async with descheduling(a_server(moves="?")) as harness:
        for number in range(2):
            await harness.minute(number)
        assert harness.report.halt is DeschedulerHalt.HISTORY
        assert harness.report.message.endswith("so that cool-downs are not known; remove it")
        assert harness.evicted == []


async def test_moves_that_the_next_leader_could_not_read_are_not_made() -> None:
    """A long cool-down and large budgets fill the annotation, which is invalid above its limit."""
    workloads = {f"default/Job/{number:060}": NOW_S for number in range(2272)}
    moves = format_history(MoveHistory(workloads=workloads))
    assert MAX_ANNOTATION_CHARS - 100 < len(moves) < MAX_ANNOTATION_CHARS, len(moves)
    async with descheduling(a_server(moves=moves)) as harness:
        for number in range(2):
            await harness.minute(number)
        assert (harness.evicted, harness.results()) == ([], {("refused",): 1})


async def test_a_replica_that_leads_no_more_reports_no_nodes() -> None:
    async with descheduling(a_server()) as harness:
        await harness.minute(0)
        for informer in (harness.nodes, *harness.controller.copy.informers):
            informer.synced.set()
        running = asyncio.create_task(harness.controller.run())
        await asyncio.sleep(0)
        assert sum(harness.metrics.values("dioptase_descheduler_halt").values()) == 1
        running.cancel()
        await asyncio.wait([running])
        for name in ("hot_nodes", "target_nodes", "stale_nodes", "halt"):
            assert harness.metrics.values(f"dioptase_descheduler_{name}") == {}


async def test_stale_copies_and_stale_reports_evict_nothing() -> None:
    async with descheduling(a_server()) as harness:
        await harness.minute(0)
        await harness.minute(1, received_s=151)
        assert harness.report.halt is DeschedulerHalt.STALE
        assert "nodes.v1" in harness.report.message
        await harness.evaluate(NOW_S + 60 + 180)
        assert harness.report.stale_nodes == ("hot", "idle")
        assert harness.report.hot_nodes == ()
        assert harness.evicted == []
        await harness.minute(5)
        assert harness.evicted == [], "the count begins again after stale reports"


@pytest.mark.parametrize(
    ("config", "halt"),
    [({"paused": True}, DeschedulerHalt.PAUSED), ({"numberOfNodes": 1}, DeschedulerHalt.TARGETS)],
)
async def test_paused_and_too_few_targets(config: Any, halt: DeschedulerHalt) -> None:
    async with descheduling(a_server(), **config) as harness:
        for number in range(3):
            await harness.minute(number)
        assert harness.report.halt is halt
        assert harness.evicted == []
        values = harness.metrics.values("dioptase_descheduler_halt")
        assert {labels for labels, value in values.items() if value} == {(halt.value,)}


async def test_metrics_name_the_causes() -> None:
    async with descheduling(a_server()) as harness:
        await harness.minute(0)
        hot = harness.metrics.values("dioptase_descheduler_hot_nodes")
        assert {labels for labels, value in hot.items() if value} == {("cpu_usage",)}
        assert harness.metrics.values("dioptase_descheduler_target_nodes") == {(): 1}
        assert harness.metrics.values("dioptase_descheduler_stale_nodes") == {(): 0}
