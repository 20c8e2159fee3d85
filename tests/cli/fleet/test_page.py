"""The page of an agent on a person's own machine: what is passed on, with whose credentials, and what is not."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

import exporters
from api.ports import Unavailable
from cli.fleet.asking import Asker
from cli.fleet.members import Member
from cli.fleet.page import SERVED, Page, serve
from tests.kube.test_client import asking

MEMBER = Member(node="n1", namespace="d", pod="agent-1", scheme="https")
PROXY = "/api/v1/namespaces/d/pods/https:agent-1:9102/proxy"


class Cluster:
    """An API server with an agent behind its proxy that wants a token; it hears what was asked for."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.tokens = 0
        self.gone = False

    async def __call__(self, request: web.Request) -> web.Response:
        self.heard.append(request.raw_path)
        if request.method == "POST":
            self.tokens += 1
            return web.json_response({"status": {"token": f"t{self.tokens}"}})
        if self.gone:
            return web.json_response({"kind": "Status", "message": "pods agent-1 not found"}, status=404)
        if request.headers.get("X-Dioptase-Authorization") != f"Bearer t{self.tokens}":
            return web.json_response({"error": "this program asks for a token", "remedy": "send one"}, status=401)
        kind = "text/html" if request.path == f"{PROXY}/" else "application/json"
        return web.Response(body=b"<p>" if kind == "text/html" else b"[7]", content_type=kind)


@asynccontextmanager
async def open_page(cluster: Cluster, member: Member = MEMBER) -> AsyncIterator[str]:
    async with asking(cluster) as client:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(Page(Asker(client, "reader"), member), ready.set_result))
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        try:
            yield await ready
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def get(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
    """As it is written: nothing in the path is put in order on the way."""

    def asked() -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            said = answer.status, answer.headers.get("Content-Type", ""), answer.read()
        connection.close()
        return said

    return await asyncio.to_thread(asked)


async def test_a_browser_gets_what_the_agent_says_by_a_token_of_the_account() -> None:
    cluster = Cluster()
    async with open_page(cluster) as url:
        assert urlsplit(url).hostname == "127.0.0.1"
        assert await get(url, "/") == (200, "text/html", b"<p>")
        assert await get(url, "/api/v1/history?after=3&limit=2") == (200, "application/json", b"[7]")
        assert await get(url, "/", "HEAD") == (200, "text/html", b"")
    assert cluster.heard[:3] == [f"{PROXY}/", "/api/v1/namespaces/d/serviceaccounts/reader/token", f"{PROXY}/"]
    assert f"{PROXY}/api/v1/history?after=3&limit=2" in cluster.heard
    assert cluster.tokens == 1


async def test_nothing_else_of_the_api_server_is_within_reach() -> None:
    cluster = Cluster()
    async with open_page(cluster) as url:
        before = len(cluster.heard)
        for path in (
            "/../../../../../../api/v1/secrets", "/%2e%2e/%2e%2e/secrets", "/static/../app.js", "/static/%2e%2e/app.js",
            "/api/v1/../view", "//api/v1/view", "/api/v1/view/", "/api/v1/view%3f", "/api/v1/%76iew", "http://127.0.0.1/secrets",
        ):  # fmt: skip
            assert (await get(url, path))[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await get(url, "/", method))[0] == 405
        assert (await get(url, "/", Host="evil.example"))[0] == 403
        assert len(cluster.heard) == before, "none of it was passed on"
        assert (await get(url, "/", Host="localhost:1"))[0] == 200


async def test_an_agent_that_goes_is_told_as_the_page_shows_it() -> None:
    cluster = Cluster()
    async with open_page(cluster) as url:
        cluster.gone = True
        status, kind, body = await get(url, "/api/v1/view")
        assert (status, kind) == (502, "application/json")
        assert json.loads(body) == {"error": "its agent agent-1 has just gone", "remedy": "ask again"}


async def test_a_token_is_replaced_before_it_is_no_longer_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.fleet.asking.TOKEN_S", 0)
    cluster = Cluster()
    async with open_page(cluster) as url:
        assert [(await get(url, "/"))[0] for _ in range(3)] == [200] * 3
    assert cluster.tokens == 4


async def test_where_there_is_no_agent_there_is_no_page() -> None:
    with pytest.raises(Unavailable, match="no agent runs here"):
        async with open_page(Cluster(), Member(node="n1", problem="no agent runs here")):
            pass
    cluster = Cluster()
    cluster.gone = True
    with pytest.raises(Unavailable, match="agent-1 has just gone"):
        async with open_page(cluster):
            pass


def test_every_file_of_the_page_is_passed_on() -> None:
    files = [path.name for path in (Path(exporters.__file__).parent / "page").iterdir() if path.name != "index.html"]
    assert len(files) > 10
    assert all(SERVED.fullmatch(f"/static/{name}") for name in files)
