"""Eviction through the API server, against a scripted server; tests/cluster uses a real one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agent.eviction import api_evictor
from agent.eviction.api_evictor import (
    ApiEvictionMethod,
    ApiEvictor,
    MethodResponse,
    MethodResult,
    PodObservation,
    response_of_error,
)
from api.eviction import EvictionBlock, EvictionEventReason
from api.pod import Pod
from api.qos import QoSLevel
from common.backoff import Backoff
from kube.errors import ApiError, parse_api_error
from tests.builders.api_server import client_of
from tests.builders.waiting import until_async

S = 1_000_000_000
CREATED, SUCCEEDED, FAILED = EvictionEventReason.CREATED, EvictionEventReason.SUCCEEDED, EvictionEventReason.FAILED


def pod(uid: str = "u-1") -> Pod:
    return Pod(uid=uid, namespace="shop", name="batch", qos=QoSLevel.RECLAIMED, containers=())


def status(code: int, message: str, cause: str = "", reason: str = "", **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "message": message, "reason": reason}
    body["details"] = {"causes": [{"reason": cause}]} if cause else {}
    if reason == "NotFound":
        body["details"] = {"kind": "pods", "name": "batch"}
    return web.json_response(body, status=code, headers=headers)


NOT_FOUND = b'{"kind":"Status","reason":"NotFound","code":404,"message":"m","details":{"name":"batch","kind":"pods"}}'
BUDGET = ("Cannot evict pod as it would violate the pod's disruption budget.", "DisruptionBudget", "TooManyRequests")


class Server:
    """One pod, and the responses to the next eviction requests."""

    def __init__(self, uid: str = "u-1") -> None:
        self.metadata: dict[str, Any] | None = {"name": "batch", "namespace": "shop", "uid": uid}
        self.next: list[web.Response | str] = []
        self.requests: list[tuple[str, Any]] = []
        self.looks = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.looks += 1
            if self.metadata is None:
                return status(404, "not found", reason="NotFound")
            return web.json_response({"metadata": self.metadata})
        body = await request.json()
        self.requests.append((f"{request.method} {request.path}", body))
        reply = self.next.pop(0) if self.next else "done"
        if isinstance(reply, web.Response):
            return reply
        options = body.get("deleteOptions", body) if isinstance(body, dict) else {}
        if self.metadata is None:
            return status(404, "not found", reason="NotFound")
        if options["preconditions"]["uid"] != self.metadata["uid"]:
            return status(409, "the UID in the precondition does not match the UID in record", reason="Conflict")
        self.metadata |= {
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": options.get("gracePeriodSeconds", 30),
        }
        if reply == "lost" and request.transport is not None:
            request.transport.close()
        return web.json_response({"kind": "Status"}, status=201)

    def graces(self) -> list[Any]:
        """Return the grace periods of all requests."""
        return [body.get("deleteOptions", body).get("gracePeriodSeconds") for _, body in self.requests]


class RecordedEvictor:
    """An evictor and its events."""

    def __init__(self, evictor: ApiEvictor) -> None:
        self.evictor, self.messages = evictor, list[str]()
        self.reasons: list[EvictionEventReason] = []

    async def until(self, what: str, check: Callable[[], bool]) -> None:
        """Collect events until the condition holds."""
        await until_async(check, what, step=self.collect)
        await self.collect()

    async def collect(self) -> None:
        for event in self.evictor.outcomes():
            self.reasons.append(event.reason)
            self.messages.append(event.message)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits to a hundredth."""
    monkeypatch.setattr(api_evictor, "RETRY_BACKOFF", Backoff(first_s=0.02, max_s=0.05))
    monkeypatch.setattr(api_evictor, "POLL_BACKOFF", Backoff(first_s=0.02, max_s=0.05))
    monkeypatch.setattr(api_evictor, "OVERDUE_POLL_INTERVAL_S", 0.05)


@asynccontextmanager
async def evicting(
    server: Server, form: str = "eviction", clock: Callable[[], int] = time.monotonic_ns, timeout_s: float = 5
) -> AsyncIterator[RecordedEvictor]:
    async with client_of(server.answer, timeout_s=timeout_s) as client:
        method = ApiEvictionMethod(client, form)  # type: ignore[arg-type]
        evictor = ApiEvictor(lambda _pod: method, clock=clock)
        try:
            yield RecordedEvictor(evictor)
        finally:
            evictor.close()


@pytest.mark.parametrize(
    ("form", "grace_s", "sent"),
    [
        ("eviction", None, None),
        ("eviction", 0.0, 1),
        ("eviction", 1.2, 2),
        ("deletion", 60.0, 60),
        ("deletion", None, None),
    ],
)
async def test_a_pod_is_evicted_once_by_its_uid_and_polled_until_it_is_gone(
    form: str, grace_s: float | None, sent: int | None
) -> None:
    server = Server()
    async with evicting(server, form) as recorded:
        recorded.evictor.evict(pod(), grace_s, "because")
        assert (recorded.evictor.terminating, recorded.evictor.blocked) == (frozenset(), {}), "nothing is accepted yet"
        await recorded.until("it is accepted", lambda: recorded.reasons == [CREATED])
        assert recorded.evictor.terminating == {"shop/batch"}
        looks = server.looks
        await recorded.until("it is looked at", lambda: server.looks >= looks + 2)
        server.metadata = None
        await recorded.until("it is gone", lambda: recorded.reasons == [CREATED, SUCCEEDED])
        assert (recorded.evictor.terminating, recorded.evictor.stuck) == (frozenset(), frozenset())
    ((path, body),) = server.requests
    suffix = {
        "eviction": "POST /api/v1/namespaces/shop/pods/batch/eviction",
        "deletion": "DELETE /api/v1/namespaces/shop/pods/batch",
    }
    assert path == suffix[form]
    assert body.get("deleteOptions", body)["preconditions"] == {"uid": "u-1"}
    assert server.graces() == [sent]
    assert recorded.messages == [
        "Successfully create eviction; reason: because",
        "Evicted pod has been deleted physically; reason: because",
    ]


async def test_a_budget_is_retried_after_retry_after_and_reported_once() -> None:
    server = Server()
    server.next = [status(429, *BUDGET, **{"Retry-After": "1"}), status(429, *BUDGET, **{"Retry-After": "1"})]
    async with evicting(server) as recorded:
        started = time.monotonic()
        recorded.evictor.evict(pod(), 5.0, "because")
        await recorded.until("it is held", lambda: recorded.evictor.blocked == {"shop/batch": EvictionBlock.BUDGET})
        assert (recorded.evictor.stuck, recorded.evictor.terminating) == ({"shop/batch"}, frozenset())
        assert recorded.evictor.problem() is None, "a budget is no failure"
        await recorded.until("the budget allows it", lambda: CREATED in recorded.reasons)
        assert time.monotonic() - started >= 2
        assert (recorded.evictor.stuck, recorded.evictor.terminating) == (frozenset(), {"shop/batch"})
    assert recorded.reasons == [FAILED, CREATED]
    assert recorded.messages[0] == f"Evict failed: {BUDGET[0]}; reason: because"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("error", "result", "held", "wait_s"),
    [
        (parse_api_error(404, NOT_FOUND), MethodResult.ABSENT, None, None),
        # No server has that path, which says nothing of the pod.
        (parse_api_error(404, b"404 page not found\n"), MethodResult.BLOCKED, EvictionBlock.BUSY, None),
        (
            parse_api_error(404, b'{"kind":"Status","reason":"NotFound","code":404}'),
            MethodResult.BLOCKED,
            EvictionBlock.BUSY,
            None,
        ),
        (ApiError(403, "Forbidden", "m"), MethodResult.BLOCKED, EvictionBlock.REFUSED, 60),
        (ApiError(422, "Invalid", "m"), MethodResult.BLOCKED, EvictionBlock.REFUSED, 60),
        # More than one budget selects the pod.
        (ApiError(500, "InternalError", "m"), MethodResult.BLOCKED, EvictionBlock.BUSY, None),
        (ApiError(503, "", "m", retry_after_s=7), MethodResult.BLOCKED, EvictionBlock.BUSY, 7),
        (ApiError(409, "Conflict", "m"), MethodResult.BLOCKED, EvictionBlock.BUSY, None),
        # Of its own queues, not of a budget.
        (ApiError(429, "TooManyRequests", "m", retry_after_s=1), MethodResult.BLOCKED, EvictionBlock.BUSY, 1),
    ],
)
def test_the_response_to_an_error_status(
    error: ApiError, result: MethodResult, held: EvictionBlock | None, wait_s: float | None
) -> None:
    answer = response_of_error(error, pod())
    assert (answer.result, answer.block, answer.wait_s) == (result, held, wait_s)


@pytest.mark.parametrize(("retry_s", "wait_s"), [(None, 5.0), (10.0, 10.0), (0.0, 5.0)])
def test_a_budget_without_retry_after_is_retried_in_five_seconds(retry_s: float | None, wait_s: float) -> None:
    error = ApiError(429, "TooManyRequests", "m", retry_after_s=retry_s)
    error.causes = ("DisruptionBudget",)
    answer = response_of_error(error, pod())
    assert (answer.block, answer.wait_s) == (EvictionBlock.BUDGET, wait_s)


async def test_a_pod_that_came_back_under_the_same_name_stays() -> None:
    server = Server(uid="u-2")
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod("u-1"), None, "because")
        await recorded.until("it is gone", lambda: recorded.reasons == [SUCCEEDED])
    assert server.metadata is not None
    assert "deletionTimestamp" not in server.metadata
    assert recorded.messages == ["The pod is gone without an eviction; reason: because"]


async def test_a_lost_response_leads_to_no_second_request() -> None:
    server = Server()
    server.next = ["lost"]
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod(), 7.0, "because")
        await recorded.until("it is known", lambda: CREATED in recorded.reasons)
        assert recorded.evictor.terminating == {"shop/batch"}
    assert (recorded.reasons, len(server.requests)) == ([FAILED, CREATED], 1)
    assert "the API server does not answer" in recorded.messages[0]


async def test_a_busy_server_is_retried_and_its_pod_is_stuck_after_three_tries() -> None:
    server = Server()
    server.next = [status(500, "more than one budget") for _ in range(5)]
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod(), None, "because")
        await recorded.until("it is held", lambda: recorded.evictor.blocked == {"shop/batch": EvictionBlock.BUSY})
        await recorded.until("it is stuck", lambda: recorded.evictor.stuck == {"shop/batch"})
        trouble = recorded.evictor.problem()
        assert trouble is not None
        assert "shop/batch cannot be evicted: the API server: 500: more than one budget" in trouble.reason
        await recorded.until("it is accepted in the end", lambda: CREATED in recorded.reasons)
        assert recorded.evictor.problem() is None
    assert recorded.reasons == [FAILED, CREATED], "reported once, not at each try"


async def away(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def test_without_an_answer_a_pod_is_neither_terminating_nor_stuck() -> None:
    async with evicting(Other(away)) as recorded:
        recorded.evictor.evict(pod(), None, "because")
        await recorded.until(
            "it is held", lambda: recorded.evictor.blocked == {"shop/batch": EvictionBlock.UNREACHABLE}
        )
        assert (recorded.evictor.terminating, recorded.evictor.stuck) == (frozenset(), frozenset())
        recorded.evictor.cancel("shop/batch", "the trouble is over")
        await recorded.until("it is let go", lambda: EvictionEventReason.CANCELLED in recorded.reasons)
    assert recorded.reasons == [FAILED, EvictionEventReason.CANCELLED]
    assert recorded.messages[-1] == "Cancelled the eviction: the trouble is over; reason of the eviction: because"


class Other(Server):
    """A server with another handler."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer  # type: ignore[method-assign]


async def test_a_cancelled_eviction_is_not_retried_and_an_accepted_one_is_not_cancelled() -> None:
    server = Server()
    server.next = [status(429, *BUDGET)]
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod(), None, "because")
        await recorded.until("it is held", lambda: bool(recorded.evictor.blocked))
        recorded.evictor.cancel("shop/batch", "it is over")
        await recorded.until("it is let go", lambda: recorded.reasons[-1:] == [EvictionEventReason.CANCELLED])
        assert (recorded.evictor.blocked, recorded.evictor.stuck, len(server.requests)) == ({}, frozenset(), 1)
        recorded.evictor.evict(pod(), None, "again")
        await recorded.until("it is accepted", lambda: recorded.reasons[-1:] == [CREATED])
        recorded.evictor.cancel("shop/batch", "too late")
        looks = server.looks
        await recorded.until("it is watched on", lambda: server.looks > looks + 1)
    assert recorded.reasons == [FAILED, EvictionEventReason.CANCELLED, CREATED]


async def test_after_a_request_only_a_shorter_grace_is_sent() -> None:
    server = Server()
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod(), 60.0, "slow")
        await recorded.until("it is accepted", lambda: recorded.reasons == [CREATED])
        recorded.evictor.evict(pod(), 600.0, "slower")
        recorded.evictor.evict(pod(), None, "as it likes")
        recorded.evictor.evict(pod(), 5.0, "fast")
        await recorded.until("it is sent again", lambda: len(server.requests) == 2)
        server.metadata = None
        await recorded.until("it is gone", lambda: recorded.reasons == [CREATED, SUCCEEDED])
    assert server.graces() == [60, 5]
    assert recorded.messages[-1].endswith("reason: fast")


async def test_another_pod_of_the_same_name_replaces_the_first_eviction() -> None:
    server = Server()
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod("u-1"), None, "first")
        await recorded.until("it is accepted", lambda: recorded.reasons == [CREATED])
        server.metadata = {"name": "batch", "namespace": "shop", "uid": "u-2"}
        recorded.evictor.evict(pod("u-2"), None, "second")
        await recorded.until("the second is accepted", lambda: recorded.reasons == [CREATED, SUCCEEDED, CREATED])
        server.metadata = None
        await recorded.until("and gone", lambda: len(recorded.reasons) == 4)
    assert [body["deleteOptions"]["preconditions"]["uid"] for _, body in server.requests] == ["u-1", "u-2"]


@pytest.mark.parametrize(
    ("grace_s", "given_s", "late_s"),
    [
        (2.0, 2, 10.0),
        (60.0, 60, 90.0),
        (None, 30, 45.0),
        (None, 600, 900.0),
        # A pod's own grace counts for ten minutes at most; that of a plugin in full.
        (None, 601, 900.0),
        (None, 86_400, 900.0),
        (3600.0, 3600, 5400.0),
    ],
)
async def test_a_pod_exceeds_its_deadline_after_one_and_a_half_times_its_grace_and_ten_seconds_at_least(
    grace_s: float | None, given_s: int, late_s: float
) -> None:
    server, now = Server(), [0]
    async with evicting(server, clock=lambda: now[0]) as recorded:
        recorded.evictor.evict(pod(), grace_s, "because")
        await recorded.until("it is accepted", lambda: recorded.reasons == [CREATED])
        assert server.metadata is not None
        server.metadata["deletionGracePeriodSeconds"] = given_s
        looks = server.looks
        await recorded.until("its grace is known", lambda: server.looks > looks + 2)
        now[0] = round((late_s - 0.1) * S)
        looks = server.looks
        await recorded.until("it is looked at", lambda: server.looks > looks + 2)
        assert (recorded.reasons, recorded.evictor.stuck) == ([CREATED], frozenset())
        now[0] = round(late_s * S)
        await recorded.until("it is late", lambda: recorded.reasons == [CREATED, EvictionEventReason.EXCEEDED])
        assert recorded.evictor.stuck == recorded.evictor.terminating == {"shop/batch"}
        assert recorded.messages[-1].startswith(
            "The pod still exists 900 s after the eviction, with a grace period of 86400 s"
            if given_s > late_s
            else "Container"
        )
        server.metadata = None
        await recorded.until("and goes in the end", lambda: recorded.reasons[-1] is SUCCEEDED)


async def test_at_most_ten_requests_are_open() -> None:
    most = here = 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal most, here
        if request.method == "POST":
            here += 1
            most = max(most, here)
            await asyncio.sleep(0.1)
            here -= 1
        return web.json_response({"kind": "Status", "metadata": json.loads('{"uid": "other"}')}, status=201)

    async with evicting(Other(slow)) as recorded:
        for number in range(30):
            item = Pod(uid=f"u-{number}", namespace="shop", name=f"b{number}", qos=QoSLevel.RECLAIMED, containers=())
            recorded.evictor.evict(item, None, "because")
        await recorded.until("all are evicted", lambda: recorded.reasons.count(SUCCEEDED) == 30)
    assert most == 10


async def test_an_eviction_whose_request_was_cancelled_elsewhere_fails() -> None:
    """The awaited request was cancelled, not the evictor's task: the pod would count as terminating for ever."""

    class Cancelled:
        async def evict(self, pod: Pod, grace_s: float | None) -> MethodResponse:
            inner = asyncio.create_task(asyncio.Event().wait())
            inner.cancel()
            await inner
            raise AssertionError

        async def observe(self, pod: Pod) -> PodObservation | None:
            return None

        def forget(self, pod: Pod) -> None:
            pass

    recorded = RecordedEvictor(ApiEvictor(lambda _pod: Cancelled()))
    recorded.evictor.evict(pod(), None, "because")
    await recorded.until("it fails", lambda: bool(recorded.reasons))
    assert recorded.messages == ["Evict failed: CancelledError; reason: because"]
    assert not recorded.evictor._pending


async def test_close_ends_all_tasks() -> None:
    server = Server()
    async with evicting(server) as recorded:
        recorded.evictor.evict(pod(), None, "because")
        await recorded.until("it is accepted", lambda: recorded.reasons == [CREATED])
        recorded.evictor.close()
        recorded.evictor.close()

        def working() -> list[object]:
            return [task for task in asyncio.all_tasks() if "ApiEvictor" in repr(task.get_coro())]

        await recorded.until("its tasks end", lambda: not working())


async def test_the_cycle_thread_may_evict_cancel_and_read_while_the_event_loop_works() -> None:
    """The cycle runs in a thread of its own, in which no task of the event loop can be created."""
    server = Server()
    server.next = [status(429, *BUDGET)]
    async with evicting(server) as recorded:
        await asyncio.to_thread(recorded.evictor.evict, pod(), None, "because")
        await recorded.until("it is blocked", lambda: recorded.evictor.blocked == {"shop/batch": EvictionBlock.BUDGET})
        await asyncio.to_thread(recorded.evictor.cancel, "shop/batch", "it is over")
        await recorded.until("it is cancelled", lambda: recorded.reasons[-1:] == [EvictionEventReason.CANCELLED])
        await asyncio.to_thread(recorded.evictor.evict, pod(), None, "again")
        deadline = time.monotonic() + 20
        while await asyncio.to_thread(lambda: recorded.evictor.terminating) != {"shop/batch"}:
            assert time.monotonic() < deadline
        assert [event.reason for event in await asyncio.to_thread(recorded.evictor.outcomes)] == [CREATED]
        assert await asyncio.to_thread(lambda: (recorded.evictor.stuck, recorded.evictor.problem())) == (
            frozenset(),
            None,
        )
