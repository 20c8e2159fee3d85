"""The verb bind against an API server: check and assume in one step, rollback, lost responses, and reading pods back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from api.pod import RECLAIMED_CPU
from controller.scheduler.binding import RESOLVE_AFTER_S, PodBinder
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.extender import Extender
from controller.scheduler.extender_messages import ExtenderArgs, ExtenderBindingArgs
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.resource_fit import FitSettings, ResourceFit
from controller.scheduler.scheduler_process import SchedulerCache, build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.topology_plugin import TopologySettings, topology_rules
from tests.builders.api_server import FakeApiServer
from tests.controller.scheduler.objects import NOW_S

PODS = "/api/v1/namespaces/default/pods"
CNRS = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"


class BindingServer(FakeApiServer):
    """An API server with pods p0, p1, ... of 1000 millicores, which binds them, or loses its responses."""

    def __init__(self, pods: int) -> None:
        super().__init__({f"{PODS}/p{number}": pod_object(f"p{number}") for number in range(pods)})
        for path, item in (("nodes/n1", {}), ("nodes/n2", {})):
            self.put(f"/api/v1/{path}", {"metadata": {"name": path[-2:]}, **item})
        for name in ("n1", "n2"):
            status = {"resources": {"allocatable": {RECLAIMED_CPU: "3k"}}}
            self.put(f"{CNRS}/{name}", {"metadata": {"name": name}, "status": status})
        self.rooms: list[str] = []
        """Nodes on which an assumption ended."""
        self.lost_responses = 0
        self.is_bound_before_loss = True
        self.is_silent = False
        """Whether the watch does not deliver bindings."""
        self.status_after_binding = 201
        self.handlers[f"{PODS}/"] = self._pod
        self.handlers["/api/v1/pods"] = self._all_pods

    async def _all_pods(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request, PODS)
        return self._answer("GET", PODS, None)

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/binding"):
            return self._answer(request.method, request.path, None)
        path, body = request.path.removesuffix("/binding"), msgspec.json.decode(await request.read())
        stored = self.objects[path]
        if stored["spec"].get("nodeName") or stored["metadata"]["uid"] != body["metadata"]["uid"]:
            return self.error(409, "already assigned")
        is_lost = self.lost_responses > 0
        self.lost_responses -= is_lost
        if not is_lost or self.is_bound_before_loss:
            watches, self._watches = self._watches, [] if self.is_silent else self._watches
            self.put(path, {**stored, "spec": {**stored["spec"], "nodeName": body["target"]["name"]}})
            self._watches = watches
        if is_lost:
            assert request.transport is not None
            request.transport.abort()
        if self.status_after_binding != 201:
            return self.error(self.status_after_binding, "etcdserver: request timed out")
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    def bound(self) -> list[str]:
        return sorted(item["spec"]["nodeName"] for path, item in self.objects.items()
                      if path.startswith(PODS) and item["spec"].get("nodeName"))  # fmt: skip


def pod_object(name: str, millicpu: str = "1000", level: str = "reclaimed_cores") -> dict[str, Any]:
    metadata = {
        "name": name, "namespace": "default", "uid": f"uid-{name}",
        "annotations": {"katalyst.kubewharf.io/qos_level": level},
    }  # fmt: skip
    container = {"name": "main", "resources": {"requests": {RECLAIMED_CPU: millicpu}}}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": {"phase": "Pending"}}


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def binding(
    server: BindingServer, clock: Clock, config: SchedulerConfig | None = None
) -> AsyncIterator[tuple[PodBinder, SchedulerCache]]:
    """Run a binder with all plugins of these settings; without any, with ResourceFit alone."""
    async with server.client(timeout_s=2) as client:
        rules = None if config is None else topology_rules(config.topology)
        cache = SchedulerCache(client, ClusterState(rules=rules))
        chain = PluginChain((ResourceFit(FitSettings()),)) if config is None else build_chain(config)
        binder = PodBinder(client, cache.pods, cache.state, chain, clock, server.rooms.append)
        running = [asyncio.create_task(informer.run()) for informer in cache.informers]
        for informer in cache.informers:
            await asyncio.wait_for(informer.synced.wait(), 10)
        try:
            yield binder, cache
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def args(pod: str, node: str = "n1", uid: str = "") -> ExtenderBindingArgs:
    return ExtenderBindingArgs(pod_name=pod, pod_namespace="default", pod_uid=uid or f"uid-{pod}", node=node)


def requested(cache: SchedulerCache, node: str = "n1") -> int:
    return int(cache.state.nodes.requested[cache.state.nodes.row(node), 0])


async def settled(cache: SchedulerCache) -> None:
    for _ in range(500):
        if not cache.state.assumptions:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(cache.state.assumptions)


async def test_pods_that_have_ended_are_not_watched() -> None:
    """They take nothing, and a cluster of batch work retains many of them. kube-scheduler leaves them out too."""
    server = BindingServer(1)
    async with binding(server, Clock()):
        queries = [request.query for request in server.requests if request.path == "/api/v1/pods"]
        assert {query["fieldSelector"] for query in queries} == {"status.phase!=Succeeded,status.phase!=Failed"}
        assert "fieldSelector" not in next(each.query for each in server.requests if each.path == "/api/v1/nodes")


async def test_a_bound_pod_carries_the_score_of_its_node() -> None:
    """LeastAllocated of 1000 of 3000 millicores: two thirds are left. Memory is not requested, and not offered."""
    server = BindingServer(1)
    async with binding(server, Clock()) as (binder, _):
        assert await binder.bind(args("p0")) == ""
    (body,) = (each.body for each in server.requests if each.path.endswith("/binding"))
    assert body["metadata"]["annotations"].keys() == {"dioptase.io/placement-score"}
    assert 0 < float(body["metadata"]["annotations"]["dioptase.io/placement-score"]) <= 67


async def test_of_ten_pods_at_once_as_many_are_bound_as_fit() -> None:
    server = BindingServer(10)
    async with binding(server, Clock()) as (binder, cache):
        errors = await asyncio.gather(*(binder.bind(args(f"p{number}")) for number in range(10)))
        assert errors.count("") == 3
        refused = next(error for error in errors if error)
        assert f"Insufficient {RECLAIMED_CPU} (reclaimed_millicpu: requests 1000, 0 of 3000 are free" in refused
        await settled(cache)
        assert (server.bound(), requested(cache)) == (["n1"] * 3, 3000)


async def test_a_refused_binding_frees_what_was_assumed() -> None:
    server = BindingServer(1)
    server.refuse[f"{PODS}/p0/binding"] = 403
    async with binding(server, Clock()) as (binder, cache):
        assert "403" in await binder.bind(args("p0"))
        assert (requested(cache), len(cache.state.assumptions)) == (0, 0)
        assert await binder.bind(args("p0", "n7")) == "node n7 is not known"
        assert "was deleted and created again" in await binder.bind(args("p0", uid="other"))
        assert await binder.bind(args("none")) != ""


@pytest.mark.parametrize("is_bound", [True, False])
async def test_a_lost_response_frees_nothing_until_the_pod_is_read_back(*, is_bound: bool) -> None:
    server, clock = BindingServer(1), Clock()
    server.lost_responses, server.is_bound_before_loss, server.is_silent = 1, is_bound, True
    async with binding(server, clock) as (binder, cache):
        error = await binder.bind(args("p0"))
        assert (error == "") is is_bound
        assert requested(cache) == 1000, "bound, or possibly bound later"
        if not is_bound:
            # kube-scheduler tries again, on another node: both count until one of them is certain.
            server.refuse[f"{PODS}/p0/binding"] = 403
            assert "403" in await binder.bind(args("p0", "n2"))
            assert (requested(cache), requested(cache, "n2")) == (1000, 0)
            server.refuse.clear()
            assert await binder.bind(args("p0")) == "", "the resources of the same node are its own"
        assert server.bound() == ["n1"]


@pytest.mark.parametrize("status", [500, 504])
@pytest.mark.parametrize("is_bound", [True, False])
async def test_an_error_of_the_server_may_come_after_the_binding_and_frees_nothing(
    status: int, *, is_bound: bool
) -> None:
    """Such as a timeout of etcd, which may have stored the binding."""
    server = BindingServer(1)
    server.is_silent, server.status_after_binding = True, status
    if not is_bound:
        server.refuse[f"{PODS}/p0/binding"] = status
    async with binding(server, Clock()) as (binder, cache):
        error = await binder.bind(args("p0"))
        assert (error == "") is is_bound
        assert requested(cache) == 1000, "bound, or possibly bound later"


async def test_a_second_attempt_that_finds_the_pod_bound_to_its_node_has_succeeded() -> None:
    server = BindingServer(2)
    server.is_silent, server.lost_responses, server.is_bound_before_loss = True, 1, False
    async with binding(server, Clock()) as (binder, cache):
        assert await binder.bind(args("p0")) != ""
        # The first request was still under way and takes effect now; the watch is late.
        stored = server.objects[f"{PODS}/p0"]
        watches, server._watches = server._watches, []
        server.put(f"{PODS}/p0", {**stored, "spec": {**stored["spec"], "nodeName": "n1"}})
        server._watches = watches
        assert await binder.bind(args("p0")) == ""
        assert requested(cache) == 1000
        # Bound to another node than this request names: 409, and nothing stays assumed there.
        stored = server.objects[f"{PODS}/p1"]
        server._watches = []
        server.put(f"{PODS}/p1", {**stored, "spec": {**stored["spec"], "nodeName": "n2"}})
        assert "409" in await binder.bind(args("p1"))
        assert requested(cache) == 1000


async def test_a_binding_that_the_watch_does_not_deliver_is_read_back() -> None:
    server, clock = BindingServer(2), Clock()
    server.is_silent = True
    async with binding(server, clock) as (binder, cache):
        assert await binder.bind(args("p0")) == ""
        assert len(cache.state.assumptions) == 1
        await binder.resolve_old_assumptions()
        assert len(cache.state.assumptions) == 1, "the watch may still deliver it"
        clock.now_s += RESOLVE_AFTER_S
        await binder.resolve_old_assumptions()
        assert (len(cache.state.assumptions), requested(cache)) == (0, 1000)


@pytest.mark.parametrize("offset_s", [RESOLVE_AFTER_S, -3600.0], ids=["old", "clock set back"])
async def test_an_assumption_of_a_pod_that_is_gone_or_unbound_ends(offset_s: float) -> None:
    server, clock = BindingServer(2), Clock()
    async with binding(server, clock) as (binder, cache):
        server.lost_responses, server.is_bound_before_loss = 2, False
        for name in ("p0", "p1"):
            assert await binder.bind(args(name)) != ""
        assert requested(cache) == 2000
        clock.now_s += offset_s
        server.delete(f"{PODS}/p1")
        await binder.resolve_old_assumptions()
        assert (requested(cache), "n1" in server.rooms) == (0, True)


async def test_a_pod_whose_binding_had_no_response_still_fits_the_node_that_it_fills() -> None:
    server = BindingServer(1)
    server.put(f"{PODS}/p0", pod_object("p0", "3000"))
    server.lost_responses, server.is_bound_before_loss = 1, False
    async with binding(server, Clock()) as (binder, cache):
        assert await binder.bind(args("p0")) != ""
        pod, chain = cache.pods.store["default/p0"], PluginChain((ResourceFit(FitSettings()),))
        request = ExtenderArgs(pod=pod, node_names=["n1"])
        assert Extender(cache.state, chain).filter(request, NOW_S).node_names == ["n1"]
        assert requested(cache) == 3000


async def test_a_second_attempt_without_a_response_is_waited_for_as_long_as_the_first() -> None:
    """Each may take effect until the API server has given up on it."""
    server, clock = BindingServer(1), Clock()
    server.lost_responses, server.is_bound_before_loss = 2, False
    async with binding(server, clock) as (binder, cache):
        assert await binder.bind(args("p0")) != ""
        clock.now_s += RESOLVE_AFTER_S - 5
        assert await binder.bind(args("p0")) != ""
        clock.now_s += 10
        await binder.resolve_old_assumptions()
        assert requested(cache) == 1000
        clock.now_s += RESOLVE_AFTER_S - 10
        await binder.resolve_old_assumptions()
        assert requested(cache) == 0


def dedicated_pod_object(name: str, cpu: str) -> dict[str, Any]:
    pod, amounts = pod_object(name, level="dedicated_cores"), {"cpu": cpu, "memory": "1Gi"}
    pod["metadata"]["annotations"]["katalyst.kubewharf.io/memory_enhancement"] = '{"numa_binding": "true"}'
    pod["spec"]["containers"][0]["resources"] = {"requests": amounts, "limits": amounts}
    return pod


def zoned_cnr_object(consumer: str = "") -> dict[str, Any]:
    """Return node n1 with two NUMA nodes of 4 CPUs; the consumer has 3 of the second."""
    zones: list[dict[str, Any]] = [
        {"type": "Numa", "name": str(number), "resources": {"allocatable": {"cpu": "4", "memory": "8Gi"}}}
        for number in range(2)
    ]
    if consumer:
        zones[1]["allocations"] = [{"consumer": consumer, "requests": {"cpu": "3", "memory": "1Gi"}}]
    status = {
        "topologyPolicy": "SingleNUMANodeContainerLevel",
        "topologyZone": [{"type": "Socket", "name": "0", "children": zones}],
    }
    return {"metadata": {"name": "n1"}, "status": status}


async def test_of_two_pods_that_want_the_same_numa_node_the_second_waits_until_the_cnr_names_that_of_the_first() -> (
    None
):
    server = BindingServer(2)
    for name in ("p0", "p1"):
        server.put(f"{PODS}/{name}", dedicated_pod_object(name, "3"))
    server.put(f"{CNRS}/n1", zoned_cnr_object())
    config = SchedulerConfig(topology=TopologySettings(enabled=True))
    async with binding(server, Clock(), config) as (binder, cache):
        errors = await asyncio.gather(binder.bind(args("p0")), binder.bind(args("p1")))
        assert errors[0] == ""
        assert "node(s) whose NUMA nodes cannot hold the pod" in errors[1]
        assert "milli-CPUs: requested 3000, largest free 1000 in a NUMA node, 2000 in all" in errors[1]
        await settled(cache)
        assert "NUMA nodes cannot hold the pod" in await binder.bind(args("p1")), "the zone of p0 is not known yet"
        server.put(f"{CNRS}/n1", zoned_cnr_object("default/p0/uid-p0"))
        for _ in range(500):
            if (error := await binder.bind(args("p1"))) == "":
                break
            await asyncio.sleep(0.01)
        assert (error, server.bound()) == ("", ["n1", "n1"])
