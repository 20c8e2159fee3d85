"""The verbs of the extender over HTTP, as kube-scheduler sends them, and what hostile or wrong requests receive."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import click
import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from api.interfaces import Unavailable
from api.placement import PlacementExplanation
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from cli.explain.placement import explain_pod_placement, placement_lines
from common.http.listener import HttpListener
from controller.endpoints import build_application
from controller.metrics import ControllerExposition
from controller.reconcile import MetricValues
from controller.scheduler.binding import PodBinder
from controller.scheduler.cluster_state import ClusterState, PodCharge
from controller.scheduler.extender import Extender, add_victims
from controller.scheduler.extender_endpoints import MAX_BODY_BYTES, ExtenderEndpoints, body_problem
from controller.scheduler.pending_pods import PendingPods
from controller.scheduler.scheduler_process import SchedulerCache, build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import Amounts
from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials
from tests.controller.scheduler.objects import a_cnr, a_node, a_pod

GIB = 1 << 30


class Service:
    """An extender with two nodes on a free port, without an API server."""

    def __init__(self, session: aiohttp.ClientSession, cache: SchedulerCache, pending: PendingPods) -> None:
        self.session, self.cache, self.pending = session, cache, pending

    async def post(self, verb: str, body: Any) -> Any:
        async with self.session.post(f"/{verb}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@asynccontextmanager
async def serving(*, is_synced: bool = True) -> AsyncIterator[Service]:
    async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test") as client:
        state, chain, metrics = ClusterState(), build_chain(SchedulerConfig()), MetricValues()
        cache = SchedulerCache(client, state)
        pending = PendingPods(client, cache.pods, state, chain, time.time)
        binder = PodBinder(client, cache.pods, state, chain, time.time)
        for name, millicpu in (("small", 1000), ("large", 9000)):
            state.apply_node(name, a_node(name))
            state.apply_cnr(name, a_cnr(name, millicpu, 64 * GIB))
        if is_synced:
            for informer in cache.informers:
                informer.synced.set()
        app = build_application(ControllerExposition(metrics, client), cache.unsynced, None, MAX_BODY_BYTES)
        ExtenderEndpoints(Extender(state, chain), binder, pending, cache, metrics).add_to(app)
        listener = HttpListener(app, body_problem, 256)
        ((host, port),) = await listener.open("127.0.0.1", 0, "--listen")
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield Service(session, cache, pending)
        await listener.close()


def request_body(millicpu: Any, names: list[str] | None = None, **metadata: Any) -> dict[str, Any]:
    amounts = {RECLAIMED_CPU: millicpu, RECLAIMED_MEMORY: "1Gi"}
    annotations = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
    pod = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u", "annotations": annotations, **metadata},
        "spec": {"containers": [{"name": "c", "resources": {"requests": amounts}}]},
    }
    return {"Pod": pod, "Nodes": None, "NodeNames": ["small", "large"] if names is None else names}


async def test_filter_and_prioritize_as_kube_scheduler_sends_them() -> None:
    async with serving() as service:
        result = await service.post("filter", request_body("2k", ["large", "small", "unknown"]))
        assert result["NodeNames"] == ["large"]
        assert result["FailedAndUnresolvableNodes"] == {
            "small": f"Insufficient {RECLAIMED_CPU}",
            "unknown": "node(s) not known to the extender yet",
        }
        scores = await service.post("prioritize", request_body("500"))
        assert [item["Host"] for item in scores] == ["small", "large"]
        small, large = (item["Score"] for item in scores)
        assert 0 <= small < large <= 10
        assert len(service.pending) == 0
        await service.post("filter", request_body("20k"))
        assert len(service.pending) == 1, "no node fits"
        assert service.pending.counts_by_plugin()["QoSAwareNodeResourcesFit"] == 1
        await service.post("filter", request_body("2k", ["small", "unknown"]))
        assert service.pending.counts_by_plugin()["QoSAwareNodeResourcesFit"] == 1
        await service.post("filter", request_body("2k", ["unknown"]))
        assert service.pending.counts_by_plugin()["Cache"] == 1
        await service.post("filter", request_body("-5"))
        assert service.pending.counts_by_plugin()["Invalid"] == len(service.pending) == 1
        await service.post("filter", request_body("1"))
        assert len(service.pending) == 0


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (b"{", 400, "not a request of the verb filter"),
        (b"\xff\xfe", 400, "not a request of the verb filter"),
        (b"[" * 100_000, 400, "not a request of the verb filter"),
        (b'{"Pod": {"spec": {"containers": [{"name": 7}]}}, "NodeNames": []}', 400, "$.Pod.spec.containers[0].name"),
        (json.dumps({"Pod": {}, "Nodes": {"items": []}}).encode(), 200, "set nodeCacheCapable: true"),
        (json.dumps({"Pod": {}, "NodeNames": ["n"] * 50_001}).encode(), 200, "names 50001 nodes; at most 50000"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "the body has more than"),
    ],
    ids=["cut", "binary", "deep", "type", "node objects", "too many", "too large"],
)
async def test_invalid_requests_get_the_field_and_the_remedy(body: bytes, status: int, expected: str) -> None:
    async with serving() as service, service.session.post("/filter", data=io.BytesIO(body)) as answer:
        assert (answer.status, expected in await answer.text()) == (status, True), await answer.text()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (request_body("-5"), f"container c: {RECLAIMED_CPU}: '-5' is not a quantity"),
        (request_body("9" * 40), f"container c: {RECLAIMED_CPU}: '999"),
        (
            request_body("1", annotations={"katalyst.kubewharf.io/qos_level": "best_cores"}),
            "'best_cores' is not a QoS level; use one of shared_cores",
        ),
    ],
    ids=["negative", "huge", "level"],
)
async def test_a_pod_with_an_invalid_field_waits_with_the_reason_in_its_events(body: Any, expected: str) -> None:
    async with serving() as service:
        result = await service.post("filter", body)
        assert not result["NodeNames"]
        assert expected in result["FailedAndUnresolvableNodes"]["small"]
        assert await service.post("prioritize", body) == []


async def test_a_thousand_annotations_and_huge_names_change_nothing() -> None:
    annotations = {f"a{number}": "x" * 200 for number in range(1000)}
    annotations["katalyst.kubewharf.io/qos_level"] = "reclaimed_cores"
    async with serving() as service:
        result = await service.post("filter", request_body("2k", annotations=annotations, name="n" * 10_000))
        assert result["NodeNames"] == ["large"]


async def test_room_does_not_wake_a_pod_that_waits_for_others_of_its_gang_or_for_its_correction() -> None:
    """Three hundred pods of a gang of 1000 took the room, and the updates, of every pod after them once a second."""
    prefix = "gang.scheduling.koordinator.sh"
    async with serving() as service:
        for number, least in enumerate(("1000", "many")):
            gang = {f"{prefix}/name": "g", f"{prefix}/min-available": least}
            body = request_body("1k", name=f"p{number}", uid=f"uid-p{number}", annotations=gang)
            pod = a_pod(f"p{number}", 1000)
            service.cache.pods.store.put(f"default/p{number}", pod)
            assert not (await service.post("filter", body))["NodeNames"]
        service.cache.pods.store.put("default/other", a_pod("other", 9000))
        await service.post("filter", request_body("10k", name="other", uid="uid-other"))
        assert len(service.pending) == 3
        service.pending.record_room("large")
        assert service.pending.fitting_pods(time.time()) == [("default/other", "uid-other")]


async def test_nothing_is_evaluated_before_everything_is_listed() -> None:
    async with serving(is_synced=False) as service:
        for verb, body in (
            ("filter", request_body("1")),
            ("bind", {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "large"}),
        ):
            assert "the extender is starting: not listed yet: nodes.v1" in (await service.post(verb, body))["Error"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a%2fb", "n" * 300, "a/../../nodes/n1"])
async def test_a_binding_of_a_name_that_no_pod_can_have_is_refused(name: str) -> None:
    async with serving() as service:
        body = {"PodName": name, "PodNamespace": "default", "PodUID": "u", "Node": "large"}
        assert len((await service.post("bind", body))["Error"]) > 20
        assert not service.cache.state.assumptions


async def test_other_paths_accept_no_body() -> None:
    async with serving() as service, service.session.post("/metrics", data=b"x") as answer:
        assert (answer.status, await answer.text()) == (
            413,
            "/metrics: requests with a body are not supported; the verbs are filter, prioritize, bind, preempt\n",
        )


class Connection:
    """A connection of a client with this address, and with this certificate if it is not None."""

    def __init__(self, address: str, certificate: dict[str, str] | None) -> None:
        self.address, self.certificate = address, certificate

    def get_extra_info(self, name: str) -> object:
        if name == "peername":
            return (self.address, 40_000)
        return None if self.certificate is None else self

    def getpeercert(self) -> dict[str, str]:
        assert self.certificate is not None
        return self.certificate


@pytest.mark.parametrize(
    ("path", "address", "certificate", "is_allowed"),
    [
        ("/bind", "127.0.0.1", None, True),
        ("/bind", "::1", {}, True),
        ("/bind", "10.0.0.1", None, False),
        ("/bind", "10.0.0.1", {}, False),
        ("/bind", "10.0.0.1", {"subject": "kube-scheduler"}, True),
        ("/explain", "127.0.0.1", None, False),
    ],
    ids=["same pod", "same pod, TLS", "plain", "TLS without certificate", "verified", "no verb"],
)
def test_only_the_same_pod_and_clients_with_a_verified_certificate_may_send_verbs(
    path: str, address: str, certificate: dict[str, str] | None, is_allowed: bool
) -> None:
    request = make_mocked_request("POST", path, transport=Connection(address, certificate))
    assert (body_problem(request) == "") is is_allowed


async def test_an_explanation_has_every_node_with_the_numbers_of_every_plugin() -> None:
    async with serving() as service:
        bound = a_pod("bound", 8000, GIB, node="large")
        service.cache.pods.store.put("default/bound", bound)
        service.cache.state.apply_pod(None, bound, None)
        async with service.session.get("/explain", params={"pod": "default/bound"}) as answer:
            explanation = msgspec.json.decode(await answer.read(), type=PlacementExplanation)
        assert [(node.node, node.fits) for node in explanation.nodes] == [("large", True), ("small", False)]
        fits = {node.node: each for node in explanation.nodes for each in node.verdicts if "Fit" in each.plugin}
        assert fits["large"].numbers.startswith("reclaimed_millicpu: requests 8000, 9000 of 9000 are free")
        assert fits["small"].rejection == f"Insufficient {RECLAIMED_CPU}"
        assert service.cache.state.nodes.requested[service.cache.state.nodes.row("large"), 0] == 8000
        text = "\n".join(placement_lines(explanation))
        assert "default/bound (reclaimed_cores) is on large.\nIt fits 1 of 2 nodes.\n" in text
        assert (
            f"REJECTS: Insufficient {RECLAIMED_CPU}; reclaimed_millicpu: requests 8000, 1000 of 1000 are free" in text
        )
        async with service.session.get("/explain", params={"pod": "default/none"}) as answer:
            assert (answer.status, await answer.json()) == (
                404, {"error": "there is no pod 'default/none'", "remedy": "name it as NAMESPACE/NAME"},
            )  # fmt: skip


async def test_the_command_asks_the_extender_and_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as service:
        url = str(service.session._base_url).rstrip("/")
        service.cache.pods.store.put("default/waiting", a_pod("waiting", 20_000, GIB))
        assert await asyncio.to_thread(explain_pod_placement, "waiting", url, as_json=False) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == [
            "default/waiting (reclaimed_cores) is pending.",
            "It fits 0 of 2 nodes.",
            f"      2 rejected: Insufficient {RECLAIMED_CPU}",
        ]
        assert await asyncio.to_thread(explain_pod_placement, "default/waiting", url, as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["rejections"] == {f"Insufficient {RECLAIMED_CPU}": 2}
        with pytest.raises(Unavailable, match="there is no pod 'default/none'"):
            await asyncio.to_thread(explain_pod_placement, "none", url, as_json=False)
        with pytest.raises(click.UsageError, match="as NAMESPACE/NAME"):
            explain_pod_placement(None, url, as_json=False)


async def test_preemption_helps_only_where_pods_of_lower_priority_make_room() -> None:
    async with serving() as service:
        for name, node, amount, priority in (
            ("a", "large", 4000, 1), ("b", "large", 4000, 0), ("c", "large", 500, 0), ("d", "small", 800, 9),
        ):  # fmt: skip
            service.cache.state.apply_pod(None, a_pod(name, amount, GIB, node=node, priority=priority), None)
        body = request_body("3k")
        body["Pod"]["spec"]["priority"] = 5
        candidates = {"large": {"Pods": [], "NumPDBViolations": 0}, "small": {"Pods": None}, "unknown": None}
        result = await service.post("preempt", {"Pod": body["Pod"], "NodeNameToMetaVictims": candidates})
        assert result == {"NodeNameToMetaVictims": {"large": {"Pods": [{"UID": "uid-b"}], "NumPDBViolations": 0}}}


async def test_an_online_pod_preempts_on_a_node_whose_reclaimed_resources_have_shrunk() -> None:
    """Its own request decides: 8 cores are requested of 1 that is left, but it takes none of them."""
    async with serving() as service:
        for name, amount, priority in (("batch", 7000, 0), ("above", 1000, 9)):
            service.cache.state.apply_pod(None, a_pod(name, amount, GIB, node="small", priority=priority), None)
        pod = {
            "metadata": {"name": "web", "namespace": "default", "uid": "web"},
            "spec": {"priority": 5, "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]},
        }
        candidates = {"small": {"Pods": [{"UID": "victim"}], "NumPDBViolations": 1}}
        result = await service.post("preempt", {"Pod": pod, "NodeNameToMetaVictims": candidates})
        assert result == {"NodeNameToMetaVictims": candidates}


def test_victims_are_the_fewest_with_the_lowest_priority() -> None:
    def charge(millicpu: int, priority: int) -> PodCharge:
        amounts = Amounts(millicpu, 0)
        return PodCharge("k", "n", amounts, amounts, Amounts(), amounts, priority)

    charges = {"a": charge(1000, 0), "b": charge(3000, 0), "c": charge(9000, 3), "d": charge(9000, 5)}
    assert add_victims(5, [2500, 0], charges, []) == ["b"]
    assert add_victims(5, [3500, 0], charges, []) == ["b", "a"]
    assert add_victims(5, [4500, 0], charges, []) == ["b", "a", "c"]
    assert add_victims(5, [14_000, 0], charges, []) is None, "the priority of d is not lower"
    assert add_victims(5, [500, 0], charges, ["c"]) == ["c"], "kube-scheduler's own victims stay"
    assert add_victims(5, [-1, 0], charges, []) is None, "nothing has to go"
