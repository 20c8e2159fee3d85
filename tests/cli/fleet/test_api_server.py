"""Many agents behind one API server: limits of a response, and tokens shared by concurrent requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from api.interfaces import Unavailable
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import MAX_FLEET_ANSWER_BYTES, AgentProxy
from cli.kubectl import kubectl
from tests.kube.test_client import asking

LETTERS = MAX_FLEET_ANSWER_BYTES - 2


async def test_many_responses_have_a_lower_limit_than_one() -> None:
    async def agent(request: web.Request) -> web.Response:
        letters = LETTERS + ("talkative" in request.path)
        return web.Response(text=f'"{"x" * letters}"', content_type="application/json")

    quiet, talkative = (AgentEndpoint(node=name, namespace="d", pod=name) for name in ("quiet", "talkative"))
    async with asking(agent) as client:
        proxy = AgentProxy(client, "reader")
        item, other = await proxy.request_all([quiet, talkative], "/api/v1/view", str)
        assert (item.problem, len(item.answer or "")) == ("", LETTERS)
        assert other.answer is None
        assert "more than 16777216 bytes" in other.problem + other.remedy
        assert len((await proxy.request_one(talkative, "/api/v1/snapshot", str)).answer or "") == LETTERS + 1


class Tokens:
    """An API server that issues tokens unless it is down, and an agent behind it that requires one."""

    def __init__(self) -> None:
        self.down = False
        self.requests = 0
        self.waits = asyncio.Event()
        self.waits.set()

    async def __call__(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.requests += 1
            await self.waits.wait()
            if self.down:
                return web.json_response({"kind": "Status", "message": "not now"}, status=403)
            return web.json_response({"status": {"token": "t"}})
        if "X-Dioptase-Authorization" in request.headers:
            return web.json_response(7)
        return web.json_response({"error": "this program asks for a token"}, status=401)


async def test_a_failed_token_request_is_shared_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    server, member = Tokens(), AgentEndpoint(node="n1", namespace="d", pod="agent-1")
    server.down = True
    async with asking(server) as client:
        proxy = AgentProxy(client, "reader")
        for _ in range(3):
            with pytest.raises(Unavailable, match="not now"):
                await proxy.request_raw(member, "/")
        assert server.requests == 1, "a thousand agents must not cause a thousand requests"
        monkeypatch.setattr("cli.fleet.api_server.RETRY_DELAY_S", 0.0)
        with pytest.raises(Unavailable, match="not now"):
            await proxy.request_raw(member, "/")
        server.down = False
        assert [(await proxy.request_raw(member, "/")).body for _ in range(3)] == [b"7"] * 3
    assert server.requests == 3


async def test_cancelling_a_request_does_not_cancel_the_shared_token_request() -> None:
    server, member = Tokens(), AgentEndpoint(node="n1", namespace="d", pod="agent-1")
    server.waits.clear()
    async with asking(server) as client:
        proxy = AgentProxy(client, "reader")
        first, other = (asyncio.create_task(proxy.request_raw(member, "/")) for _ in range(2))
        while not server.requests:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        server.waits.set()
        assert (await other).body == b"7"
    assert (first.cancelled(), server.requests) == (True, 1)


def test_a_problem_moves_no_cursor(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text('{"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}')
    done = CliRunner().invoke(kubectl, ["top", "--kubeconfig", str(config), "--context", "\x1b[2Jx"])
    assert done.exit_code == 1
    assert "contexts[\\x1b[2Jx]: is not there\n  remedy: " in done.output
    assert "\x1b" not in done.output
