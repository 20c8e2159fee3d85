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
from api.interfaces import Unavailable
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import AgentProxy
from cli.fleet.page_proxy import SERVED_PATHS, PageProxy, serve_page
from common.http.token_review import PROXIED_AUTHORIZATION_HEADER, TokenReviewer
from tests.builders.api_server import client_of
from tests.builders.waiting import until_async

MEMBER = AgentEndpoint(node="n1", namespace="d", pod="agent-1", scheme="https")
PROXY = "/api/v1/namespaces/d/pods/https:agent-1:9102/proxy"
NEXT = AgentEndpoint(node="n1", namespace="d", pod="agent-2", scheme="https")
NEXT_PROXY = "/api/v1/namespaces/d/pods/https:agent-2:9102/proxy"
FILES = sorted(
    path.name for path in (Path(exporters.__file__).parent / "page/static").iterdir() if path.name != "index.html"
)


class Cluster:
    """An API server with an agent behind its proxy that requires a token; it records all requests."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.tokens = 0
        self.deleted = False
        self.here = MEMBER
        """Result of a lookup of the node's agent."""
        self.looks = 0
        """Number of lookups."""

    async def __call__(self, request: web.Request) -> web.Response:
        self.heard.append(request.raw_path)
        if request.method == "POST":
            self.tokens += 1
            return web.json_response({"status": {"token": f"t{self.tokens}"}})
        if self.deleted and (NEXT_PROXY not in request.path or self.here is not NEXT):
            return web.json_response({"kind": "Status", "message": "pods agent-1 not found"}, status=404)
        if request.headers.get("X-Dioptase-Authorization") != f"Bearer t{self.tokens}":
            return web.json_response({"error": "this program asks for a token", "remedy": "send one"}, status=401)
        kind = "text/html" if request.path == f"{PROXY}/" else "application/json"
        # Links of documents as an API server passes them on.
        html = f'<link href="{PROXY}/static/style.css"><script type="module" src="{PROXY}/static/app.js"></script>'
        return web.Response(body=html.encode() if kind == "text/html" else b"[7]", content_type=kind)

    async def find(self) -> AgentEndpoint:
        self.looks += 1
        return self.here


class Reviewing:
    """An API server that reviews slowly the tokens that the agent behind its proxy receives, all from one address."""

    def __init__(self, review_s: float, *, each_file: bool = False) -> None:
        self.review_s, self.each_file = review_s, each_file
        self.reviews: list[str] = []
        self.refused = 0
        self.tokens = TokenReviewer(self.review)

    async def review(self, _token: str, path: str) -> bool:
        self.reviews.append(path)
        await asyncio.sleep(self.review_s)
        return True

    async def __call__(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.json_response({"status": {"token": "t"}})
        path = request.path.removeprefix(PROXY)
        if self.each_file:
            # Older agents reviewed the token of every file.
            path = path.replace("/static/", "/static-")
        refusal = await self.tokens.refusal(request.headers.get(PROXIED_AUTHORIZATION_HEADER, ""), path, "192.0.2.1")
        if refusal is None:
            return web.Response(body=b"[7]")
        self.refused += refusal[0] == 429
        return web.json_response({"error": refusal[1], "remedy": refusal[2]}, status=refusal[0])

    async def find(self) -> AgentEndpoint:
        return MEMBER


@asynccontextmanager
async def open_page(cluster: Cluster | Reviewing, member: AgentEndpoint = MEMBER) -> AsyncIterator[str]:
    async with client_of(cluster) as client:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve_page(PageProxy(AgentProxy(client, "reader"), member, cluster.find), ready.set_result)
        )
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
    """Send the path unchanged: http.client does not normalize it."""

    def fetch() -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            text = answer.status, answer.headers.get("Content-Type", ""), answer.read()
        connection.close()
        return text

    return await asyncio.to_thread(fetch)


async def test_a_browser_gets_the_agents_responses_with_a_token_of_the_account() -> None:
    cluster = Cluster()
    async with open_page(cluster) as url:
        assert urlsplit(url).hostname == "127.0.0.1"
        html = b'<link href="/static/style.css"><script type="module" src="/static/app.js"></script>'
        assert await get(url, "/") == (200, "text/html", html), "as the agent wrote it"
        assert await get(url, "/api/v1/history?after=3&limit=2") == (200, "application/json", b"[7]")
        assert await get(url, "/", "HEAD") == (200, "text/html", b"")
    assert cluster.heard[:3] == [f"{PROXY}/", "/api/v1/namespaces/d/serviceaccounts/reader/token", f"{PROXY}/"]
    assert f"{PROXY}/api/v1/history?after=3&limit=2" in cluster.heard
    assert cluster.tokens == 1


async def test_other_paths_of_the_api_server_cannot_be_reached() -> None:
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


@pytest.mark.parametrize(("each_file", "reviews"), [(False, 3), (True, 2 + len(FILES))])
async def test_concurrent_requests_of_a_browser_are_all_answered(each_file: bool, reviews: int) -> None:
    cluster = Reviewing(0.02, each_file=each_file)
    async with open_page(cluster) as url:
        requests = ["/", *(f"/static/{name}" for name in FILES), "/api/v1/view"]
        assert [answer[0] for answer in await asyncio.gather(*(get(url, path) for path in requests))] == [200] * len(
            requests
        )
    assert (len(cluster.reviews), cluster.refused) == (reviews, 0)


async def test_requests_of_closed_connections_are_dropped() -> None:
    cluster = Reviewing(1.0)
    async with open_page(cluster) as url:
        place = urlsplit(url)
        running = asyncio.create_task(get(url, "/api/v1/view"))
        await until_async(lambda: cluster.reviews[-1].endswith("view"))
        for name in ("history", "decisions", "evictions"):
            _, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(f"GET /api/v1/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            await asyncio.sleep(0.05)
            writer.close()
        assert (await get(url, "/api/v1/config"))[0] == 200
        assert (await running)[0] == 200
    assert [path for path in cluster.reviews if path.endswith(("history", "decisions", "evictions"))] == []


async def test_a_deleted_agent_is_an_error_that_the_page_shows() -> None:
    cluster = Cluster()
    async with open_page(cluster) as url:
        cluster.deleted = True
        for _ in range(3):
            status, kind, body = await get(url, "/api/v1/view")
            assert (status, kind) == (502, "application/json")
            document = json.loads(body)
            assert document["error"] == "its agent agent-1 was just deleted"
            assert "this page finds it by itself" in document["remedy"]
        assert cluster.looks == 1, "not at every request"


async def test_the_replacing_agent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    async with open_page(cluster) as url:
        assert await get(url, "/api/v1/view") == (200, "application/json", b"[7]")
        cluster.deleted, cluster.here = True, NEXT
        assert await get(url, "/api/v1/view") == (200, "application/json", b"[7]")
        assert (cluster.looks, cluster.heard[-1]) == (1, f"{NEXT_PROXY}/api/v1/view")
        assert await get(url, "/api/v1/history") == (200, "application/json", b"[7]")
        assert cluster.looks == 1
        # Again, with no agent on the node for a while.
        monkeypatch.setattr("cli.fleet.page_proxy.LOOKUP_INTERVAL_S", 0.0)
        cluster.here = AgentEndpoint(node="n1", problem="no agent runs here")
        status, _, body = await get(url, "/api/v1/view")
        assert (status, json.loads(body)["error"]) == (502, "no agent runs here")
        cluster.here = NEXT
        assert (await get(url, "/api/v1/view"))[0] == 200


async def test_a_token_is_replaced_before_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.fleet.api_server.TOKEN_LIFETIME_S", 0)
    cluster = Cluster()
    async with open_page(cluster) as url:
        assert [(await get(url, "/"))[0] for _ in range(3)] == [200] * 3
    assert cluster.tokens == 4


async def test_without_an_agent_there_is_no_page() -> None:
    with pytest.raises(Unavailable, match="no agent runs here"):
        async with open_page(Cluster(), AgentEndpoint(node="n1", problem="no agent runs here")):
            pass
    cluster = Cluster()
    cluster.deleted = True
    with pytest.raises(Unavailable, match="agent-1 was just deleted"):
        async with open_page(cluster):
            pass


def test_every_file_of_the_page_is_passed_on() -> None:
    assert len(FILES) > 10
    assert all(SERVED_PATHS.fullmatch(f"/static/{name}") for name in FILES)
