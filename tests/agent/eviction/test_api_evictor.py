"""The killer that asks the API server, against a server that plays its answers; the real one is asked in tests/cluster."""

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
    """One pod, and what the next requests to make it leave are answered."""

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
        """Of the requests so far."""
        return [body.get("deleteOptions", body).get("gracePeriodSeconds") for _, body in self.requests]


class Watched:
    """The killer and what it told."""

    def __init__(self, killer: ApiEvictor) -> None:
        self.killer, self.messages = killer, list[str]()
        self.reasons: list[EvictionEventReason] = []

    async def until(self, what: str, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not check():
            assert time.monotonic() < deadline, f"{what}: {self.messages}"
            await asyncio.sleep(0.01)
            self.hear()
        self.hear()

    def hear(self) -> None:
        for event in self.killer.outcomes():
            self.reasons.append(event.reason)
            self.messages.append(event.message)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are a hundredth of what they are."""
    monkeypatch.setattr(api_evictor, "RETRY_BACKOFF", Backoff(first_s=0.02, max_s=0.05))
    monkeypatch.setattr(api_evictor, "POLL_BACKOFF", Backoff(first_s=0.02, max_s=0.05))
    monkeypatch.setattr(api_evictor, "OVERDUE_POLL_INTERVAL_S", 0.05)


@asynccontextmanager
async def killing(
    server: Server, form: str = "eviction", clock: Callable[[], int] = time.monotonic_ns, timeout_s: float = 5
) -> AsyncIterator[Watched]:
    async with client_of(server.answer, timeout_s=timeout_s) as client:
        way = ApiEvictionMethod(client, form)  # type: ignore[arg-type]
        killer = ApiEvictor(lambda _pod: way, clock=clock)
        try:
            yield Watched(killer)
        finally:
            killer.close()


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
async def test_a_pod_is_asked_once_by_its_uid_and_watched_until_it_is_gone(
    form: str, grace_s: float | None, sent: int | None
) -> None:
    server = Server()
    async with killing(server, form) as watcher:
        watcher.killer.evict(pod(), grace_s, "because")
        assert (watcher.killer.terminating, watcher.killer.blocked) == (frozenset(), {}), "nobody waited for"
        await watcher.until("it is told", lambda: watcher.reasons == [CREATED])
        assert watcher.killer.terminating == {"shop/batch"}
        looks = server.looks
        await watcher.until("it is looked at", lambda: server.looks >= looks + 2)
        server.metadata = None
        await watcher.until("it is gone", lambda: watcher.reasons == [CREATED, SUCCEEDED])
        assert (watcher.killer.terminating, watcher.killer.stuck) == (frozenset(), frozenset())
    ((path, body),) = server.requests
    suffix = {
        "eviction": "POST /api/v1/namespaces/shop/pods/batch/eviction",
        "deletion": "DELETE /api/v1/namespaces/shop/pods/batch",
    }
    assert path == suffix[form]
    assert body.get("deleteOptions", body)["preconditions"] == {"uid": "u-1"}
    assert server.graces() == [sent]
    assert watcher.messages == [
        "Successfully create eviction; reason: because",
        "Evicted pod has been deleted physically; reason: because",
    ]


async def test_a_budget_is_waited_for_as_long_as_the_server_says_and_told_once() -> None:
    server = Server()
    server.next = [status(429, *BUDGET, **{"Retry-After": "1"}), status(429, *BUDGET, **{"Retry-After": "1"})]
    async with killing(server) as watcher:
        started = time.monotonic()
        watcher.killer.evict(pod(), 5.0, "because")
        await watcher.until("it is held", lambda: watcher.killer.blocked == {"shop/batch": EvictionBlock.BUDGET})
        assert (watcher.killer.stuck, watcher.killer.terminating) == ({"shop/batch"}, frozenset())
        assert watcher.killer.problem() is None, "a budget is no trouble of ours"
        await watcher.until("the budget allows it", lambda: CREATED in watcher.reasons)
        assert time.monotonic() - started >= 2
        assert (watcher.killer.stuck, watcher.killer.terminating) == (frozenset(), {"shop/batch"})
    assert watcher.reasons == [FAILED, CREATED]
    assert watcher.messages[0] == f"Evict failed: {BUDGET[0]}; reason: because"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("error", "result", "held", "wait_s"),
    [
        (parse_api_error(404, NOT_FOUND), MethodResult.ABSENT, None, None),
        # Nobody serves that path: of the pod this says nothing.
        (parse_api_error(404, b"404 page not found\n"), MethodResult.BLOCKED, EvictionBlock.BUSY, None),
        (
            parse_api_error(404, b'{"kind":"Status","reason":"NotFound","code":404}'),
            MethodResult.BLOCKED,
            EvictionBlock.BUSY,
            None,
        ),
        (ApiError(403, "Forbidden", "m"), MethodResult.BLOCKED, EvictionBlock.REFUSED, 60),
        (ApiError(422, "Invalid", "m"), MethodResult.BLOCKED, EvictionBlock.REFUSED, 60),
        # More than one budget for a pod, which the API server cannot judge.
        (ApiError(500, "InternalError", "m"), MethodResult.BLOCKED, EvictionBlock.BUSY, None),
        (ApiError(503, "", "m", retry_after_s=7), MethodResult.BLOCKED, EvictionBlock.BUSY, 7),
        (ApiError(409, "Conflict", "m"), MethodResult.BLOCKED, EvictionBlock.BUSY, None),
        # Of its own queues, not of a budget.
        (ApiError(429, "TooManyRequests", "m", retry_after_s=1), MethodResult.BLOCKED, EvictionBlock.BUSY, 1),
    ],
)
def test_what_refusals_mean(
    error: ApiError, result: MethodResult, held: EvictionBlock | None, wait_s: float | None
) -> None:
    answer = response_of_error(error, pod())
    assert (answer.result, answer.block, answer.wait_s) == (result, held, wait_s)


@pytest.mark.parametrize(("retry_s", "wait_s"), [(None, 5.0), (10.0, 10.0), (0.0, 5.0)])
def test_a_budget_without_a_time_is_asked_again_in_five_seconds(retry_s: float | None, wait_s: float) -> None:
    error = ApiError(429, "TooManyRequests", "m", retry_after_s=retry_s)
    error.causes = ("DisruptionBudget",)
    answer = response_of_error(error, pod())
    assert (answer.block, answer.wait_s) == (EvictionBlock.BUDGET, wait_s)


async def test_a_pod_that_came_back_under_the_same_name_stays() -> None:
    server = Server(uid="u-2")
    async with killing(server) as watcher:
        watcher.killer.evict(pod("u-1"), None, "because")
        await watcher.until("it is gone", lambda: watcher.reasons == [SUCCEEDED])
    assert server.metadata is not None
    assert "deletionTimestamp" not in server.metadata
    assert watcher.messages == ["The pod is gone without an eviction; reason: because"]


async def test_an_answer_that_is_lost_leads_to_no_second_request() -> None:
    server = Server()
    server.next = ["lost"]
    async with killing(server) as watcher:
        watcher.killer.evict(pod(), 7.0, "because")
        await watcher.until("it is known", lambda: CREATED in watcher.reasons)
        assert watcher.killer.terminating == {"shop/batch"}
    assert (watcher.reasons, len(server.requests)) == ([FAILED, CREATED], 1)
    assert "the API server does not answer" in watcher.messages[0]


async def test_busy_and_absent_servers_are_asked_again_and_again_and_who_refuses_for_long_is_stuck() -> None:
    server = Server()
    server.next = [status(500, "more than one budget") for _ in range(5)]
    async with killing(server) as watcher:
        watcher.killer.evict(pod(), None, "because")
        await watcher.until("it is held", lambda: watcher.killer.blocked == {"shop/batch": EvictionBlock.BUSY})
        await watcher.until("it is stuck", lambda: watcher.killer.stuck == {"shop/batch"})
        trouble = watcher.killer.problem()
        assert trouble is not None
        assert "shop/batch cannot be evicted: the API server: 500: more than one budget" in trouble.reason
        await watcher.until("it is told in the end", lambda: CREATED in watcher.reasons)
        assert watcher.killer.problem() is None
    assert watcher.reasons == [FAILED, CREATED], "told once, not at each try"


async def away(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def test_while_nobody_answers_a_pod_is_neither_leaving_nor_stuck() -> None:
    async with killing(Other(away)) as watcher:
        watcher.killer.evict(pod(), None, "because")
        await watcher.until("it is held", lambda: watcher.killer.blocked == {"shop/batch": EvictionBlock.UNREACHABLE})
        assert (watcher.killer.terminating, watcher.killer.stuck) == (frozenset(), frozenset())
        watcher.killer.cancel("shop/batch", "the trouble is over")
        await watcher.until("it is let go", lambda: EvictionEventReason.CANCELLED in watcher.reasons)
    assert watcher.reasons == [FAILED, EvictionEventReason.CANCELLED]
    assert watcher.messages[-1] == "Cancelled the eviction: the trouble is over; reason of the eviction: because"


class Other(Server):
    """Answers otherwise."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer  # type: ignore[method-assign]


async def test_who_is_withdrawn_is_not_asked_any_more_and_who_was_told_goes() -> None:
    server = Server()
    server.next = [status(429, *BUDGET)]
    async with killing(server) as watcher:
        watcher.killer.evict(pod(), None, "because")
        await watcher.until("it is held", lambda: bool(watcher.killer.blocked))
        watcher.killer.cancel("shop/batch", "it is over")
        await watcher.until("it is let go", lambda: watcher.reasons[-1:] == [EvictionEventReason.CANCELLED])
        assert (watcher.killer.blocked, watcher.killer.stuck, len(server.requests)) == ({}, frozenset(), 1)
        watcher.killer.evict(pod(), None, "again")
        await watcher.until("it is told", lambda: watcher.reasons[-1:] == [CREATED])
        watcher.killer.cancel("shop/batch", "too late")
        looks = server.looks
        await watcher.until("it is watched on", lambda: server.looks > looks + 1)
    assert watcher.reasons == [FAILED, EvictionEventReason.CANCELLED, CREATED]


async def test_of_a_pod_that_was_asked_only_a_shorter_grace_counts() -> None:
    server = Server()
    async with killing(server) as watcher:
        watcher.killer.evict(pod(), 60.0, "slow")
        await watcher.until("it is told", lambda: watcher.reasons == [CREATED])
        watcher.killer.evict(pod(), 600.0, "slower")
        watcher.killer.evict(pod(), None, "as it likes")
        watcher.killer.evict(pod(), 5.0, "fast")
        await watcher.until("it is told again", lambda: len(server.requests) == 2)
        server.metadata = None
        await watcher.until("it is gone", lambda: watcher.reasons == [CREATED, SUCCEEDED])
    assert server.graces() == [60, 5]
    assert watcher.messages[-1].endswith("reason: fast")


async def test_another_pod_of_the_same_name_takes_the_place_of_the_first() -> None:
    server = Server()
    async with killing(server) as watcher:
        watcher.killer.evict(pod("u-1"), None, "first")
        await watcher.until("it is told", lambda: watcher.reasons == [CREATED])
        server.metadata = {"name": "batch", "namespace": "shop", "uid": "u-2"}
        watcher.killer.evict(pod("u-2"), None, "second")
        await watcher.until("the second is told", lambda: watcher.reasons == [CREATED, SUCCEEDED, CREATED])
        server.metadata = None
        await watcher.until("and gone", lambda: len(watcher.reasons) == 4)
    assert [body["deleteOptions"]["preconditions"]["uid"] for _, body in server.requests] == ["u-1", "u-2"]


@pytest.mark.parametrize(
    ("grace_s", "given_s", "late_s"),
    [
        (2.0, 2, 10.0),
        (60.0, 60, 90.0),
        (None, 30, 45.0),
        (None, 600, 900.0),
        # What pods ask for themselves counts for ten minutes at most; what a plugin is set to in full.
        (None, 601, 900.0),
        (None, 86_400, 900.0),
        (3600.0, 3600, 5400.0),
    ],
)
async def test_a_pod_is_late_after_one_and_a_half_times_its_grace_and_ten_seconds_at_least(
    grace_s: float | None, given_s: int, late_s: float
) -> None:
    server, now = Server(), [0]
    async with killing(server, clock=lambda: now[0]) as watcher:
        watcher.killer.evict(pod(), grace_s, "because")
        await watcher.until("it is told", lambda: watcher.reasons == [CREATED])
        assert server.metadata is not None
        server.metadata["deletionGracePeriodSeconds"] = given_s
        looks = server.looks
        await watcher.until("its grace is known", lambda: server.looks > looks + 2)
        now[0] = round((late_s - 0.1) * S)
        looks = server.looks
        await watcher.until("it is looked at", lambda: server.looks > looks + 2)
        assert (watcher.reasons, watcher.killer.stuck) == ([CREATED], frozenset())
        now[0] = round(late_s * S)
        await watcher.until("it is late", lambda: watcher.reasons == [CREATED, EvictionEventReason.EXCEEDED])
        assert watcher.killer.stuck == watcher.killer.terminating == {"shop/batch"}
        assert watcher.messages[-1].startswith(
            "The pod still exists 900 s after the eviction, with a grace period of 86400 s"
            if given_s > late_s
            else "Container"
        )
        server.metadata = None
        await watcher.until("and goes in the end", lambda: watcher.reasons[-1] is SUCCEEDED)


async def test_ten_are_asked_at_a_time() -> None:
    most = here = 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal most, here
        if request.method == "POST":
            here += 1
            most = max(most, here)
            await asyncio.sleep(0.1)
            here -= 1
        return web.json_response({"kind": "Status", "metadata": json.loads('{"uid": "other"}')}, status=201)

    async with killing(Other(slow)) as watcher:
        for number in range(30):
            item = Pod(uid=f"u-{number}", namespace="shop", name=f"b{number}", qos=QoSLevel.RECLAIMED, containers=())
            watcher.killer.evict(item, None, "because")
        await watcher.until("all are asked", lambda: watcher.reasons.count(SUCCEEDED) == 30)
    assert most == 10


async def test_a_pod_whose_request_was_cancelled_by_others_is_judged_anew() -> None:
    """What the killer waits for was cancelled, and not the killer: the pod would be on its way out for ever."""

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

    watcher = Watched(ApiEvictor(lambda _pod: Cancelled()))
    watcher.killer.evict(pod(), None, "because")
    await watcher.until("it is told", lambda: bool(watcher.reasons))
    assert watcher.messages == ["Evict failed: CancelledError; reason: because"]
    assert not watcher.killer._pending


async def test_nothing_is_left_when_the_agent_ends() -> None:
    server = Server()
    async with killing(server) as watcher:
        watcher.killer.evict(pod(), None, "because")
        await watcher.until("it is told", lambda: watcher.reasons == [CREATED])
        watcher.killer.close()
        watcher.killer.close()

        def working() -> list[object]:
            return [task for task in asyncio.all_tasks() if "ApiEvictor" in repr(task.get_coro())]

        await watcher.until("its tasks end", lambda: not working())


async def test_the_cycle_thread_may_evict_cancel_and_read_while_the_event_loop_works() -> None:
    """The cycle runs in a thread of its own, in which no task of the event loop can be created."""
    server = Server()
    server.next = [status(429, *BUDGET)]
    async with killing(server) as watcher:
        await asyncio.to_thread(watcher.killer.evict, pod(), None, "because")
        await watcher.until("it is blocked", lambda: watcher.killer.blocked == {"shop/batch": EvictionBlock.BUDGET})
        await asyncio.to_thread(watcher.killer.cancel, "shop/batch", "it is over")
        await watcher.until("it is cancelled", lambda: watcher.reasons[-1:] == [EvictionEventReason.CANCELLED])
        await asyncio.to_thread(watcher.killer.evict, pod(), None, "again")
        deadline = time.monotonic() + 20
        while await asyncio.to_thread(lambda: watcher.killer.terminating) != {"shop/batch"}:
            assert time.monotonic() < deadline
        assert [event.reason for event in await asyncio.to_thread(watcher.killer.outcomes)] == [CREATED]
        assert await asyncio.to_thread(lambda: (watcher.killer.stuck, watcher.killer.problem())) == (frozenset(), None)
