"""Many agents behind one API server: limits of a response, and tokens shared by concurrent requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner

from api.colocation import ColocationTotals
from api.interfaces import Unavailable
from cli.colocation_report import NodeTotals, fleet_report
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import MAX_FLEET_ANSWER_BYTES, AgentProxy
from cli.kubectl import kubectl
from exporters.view.cycle_view import View, build_view
from tests.builders.api_server import FakeApiServer
from tests.builders.full_node import full_cycle
from tests.builders.waiting import until_async

LETTERS = MAX_FLEET_ANSWER_BYTES - 2


async def test_many_responses_have_a_lower_limit_than_one() -> None:
    async def agent(request: web.Request) -> web.Response:
        letters = LETTERS + ("talkative" in request.path)
        return web.Response(text=f'"{"x" * letters}"', content_type="application/json")

    quiet, talkative = (AgentEndpoint(node=name, namespace="d", pod=name) for name in ("quiet", "talkative"))
    server = FakeApiServer()
    server.handlers["/"] = agent
    async with server.client() as client:
        proxy = AgentProxy(client, "reader")
        item, other = await proxy.request_all([quiet, talkative], "/api/v1/view", str)
        assert (item.problem, len(item.answer or "")) == ("", LETTERS)
        assert other.answer is None
        assert "more than 16777216 bytes" in other.problem + other.remedy
        assert len((await proxy.request_one(talkative, "/api/v1/snapshot", str)).answer or "") == LETTERS + 1


TOKEN = "/api/v1/namespaces/d/serviceaccounts/reader/token"
MEMBER = AgentEndpoint(node="n1", namespace="d", pod="agent-1")


async def agent_with_token_review(request: web.Request) -> web.Response:
    if "X-Dioptase-Authorization" in request.headers:
        return web.json_response(7)
    return web.json_response({"error": "this program asks for a token"}, status=401)


@pytest.fixture
def server() -> FakeApiServer:
    """An API server, with an agent behind it that requires a token."""
    fake = FakeApiServer()
    fake.handlers["/api/v1/namespaces/d/pods/"] = agent_with_token_review
    return fake


def token_requests(server: FakeApiServer) -> int:
    return sum(request.path == TOKEN for request in server.requests)


async def test_a_failed_token_request_is_shared_and_retried(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refuse[TOKEN] = 403
    async with server.client() as client:
        proxy = AgentProxy(client, "reader")
        for _ in range(3):
            with pytest.raises(Unavailable, match="refused by the test"):
                await proxy.request_raw(MEMBER, "/")
        assert token_requests(server) == 1, "a thousand agents must not cause a thousand requests"
        monkeypatch.setattr("cli.fleet.api_server.RETRY_DELAY_S", 0.0)
        with pytest.raises(Unavailable, match="refused by the test"):
            await proxy.request_raw(MEMBER, "/")
        del server.refuse[TOKEN]
        assert [(await proxy.request_raw(MEMBER, "/")).body for _ in range(3)] == [b"7"] * 3
    assert token_requests(server) == 3


async def test_cancelling_a_request_does_not_cancel_the_shared_token_request(server: FakeApiServer) -> None:
    may_answer = asyncio.Event()

    async def issue_token(_request: web.Request) -> web.Response:
        await may_answer.wait()
        return web.json_response({"status": {"token": "t"}})

    server.handlers[TOKEN] = issue_token
    async with server.client() as client:
        proxy = AgentProxy(client, "reader")
        first, other = (asyncio.create_task(proxy.request_raw(MEMBER, "/")) for _ in range(2))
        await until_async(lambda: token_requests(server), "a token is requested")
        first.cancel()
        await asyncio.sleep(0.01)
        may_answer.set()
        assert (await other).body == b"7"
    assert (first.cancelled(), token_requests(server)) == (True, 1)


def test_a_problem_moves_no_cursor(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text('{"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}')
    done = CliRunner().invoke(kubectl, ["top", "--kubeconfig", str(config), "--context", "\x1b[2Jx"])
    assert done.exit_code == 1
    assert "contexts[\\x1b[2Jx]: is not there\n  remedy: " in done.output
    assert "\x1b" not in done.output


HUGE, SLOTS = "9" * 400, ",".join(["1"] * 27)


@pytest.mark.parametrize(
    "totals",
    [
        f'"duration_ns":{HUGE}',
        '"duration_ns":-1',
        f'"duration_ns":{1 << 63}',
        f'"reclaimed_ns":{{"default":{HUGE}}}',
        f'"evictions":{{"below_min":{HUGE}}}',
        f'"busy":{{"latency":{{"sum_ns":{HUGE},"count":1,"slots":[{SLOTS}]}}}}',
        '"busy":{"latency":{"sum_ns":1,"count":2,"slots":[1,1]}}',
        f'"idle":{{"latency":{{"sum_ns":1,"count":300,"slots":[{",".join(["1"] * 300)}]}}}}',
        f'"idle":{{"latency":{{"sum_ns":1,"count":27,"slots":[{SLOTS.replace("1", "-1", 1)}]}}}}',
    ],
)
async def test_totals_that_cannot_be_are_the_problem_of_their_node_alone(totals: str) -> None:
    async def agent(request: web.Request) -> web.Response:
        numbers = (
            totals if "damaged" in request.path else f'"busy":{{"latency":{{"sum_ns":1,"count":27,"slots":[{SLOTS}]}}}}'
        )
        return web.Response(text=f'{{"since_wall_ns":1,{numbers}}}', content_type="application/json")

    server = FakeApiServer()
    server.handlers["/"] = agent
    members = [AgentEndpoint(node=name, namespace="d", pod=name) for name in ("n1", "damaged")]
    async with server.client() as client:
        good, bad = await AgentProxy(client, "reader").request_all(members, "/api/v1/view", ColocationTotals)
    assert good.answer is not None
    assert good.answer.busy.latency.count == 27
    assert bad.answer is None
    assert bad.problem.startswith("its response is not that of an agent of this version: Expected `")
    report = fleet_report(
        [NodeTotals(node=reply.member.node, totals=reply.answer, problem=reply.problem) for reply in (good, bad)]
    )
    assert any(line.startswith("damaged") and "✕ its response is not" in line for line in report)


@pytest.mark.parametrize("size", [HUGE, "-1", str(1 << 63)])
def test_sizes_of_a_view_are_counts(size: str) -> None:
    view = msgspec.to_builtins(build_view(full_cycle(), "n1"))
    view["containers"][0]["memory_bytes"] = "SIZE"
    changed = msgspec.json.encode(view).decode().replace('"SIZE"', size)
    with pytest.raises(msgspec.ValidationError, match=r"containers\[0\]\.memory_bytes"):
        msgspec.json.decode(changed, type=View)
