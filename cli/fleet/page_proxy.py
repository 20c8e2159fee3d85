"""Serves one agent's page on 127.0.0.1 by proxying allowed paths through the API server.
Only paths that agents serve are passed on, so that a page cannot reach other parts of the API as the user.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from api.interfaces import Unavailable
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import AgentProxy, is_from_api_server, no_answer_reason, refusal_reason
from common.http.request_guard import is_loopback_host
from kube.client import RawResponse
from kube.errors import ApiUnreachable

HOST = "127.0.0.1"
LOOKUP_INTERVAL_S = 5.0
"""From one look for the agent's next pod to the next."""
EndpointLookup = Callable[[], Awaitable[AgentEndpoint]]
"""Looks up who answers for the node now. Raises Unavailable."""
SERVED_PATHS = re.compile(r"/|/metrics|/healthz|/readyz|/api/v1/[a-z]+|/static/[a-z]+\.(?:js|css|svg)")
PROXY_LINKS = re.compile(rb'"/api/v1/namespaces/[^/"]+/pods/[^/"]+/proxy/')
"""The API server's proxy writes itself before every link of a document that it passes on (apimachinery, pkg/util/proxy)."""
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""As agents have them."""


class PageProxy:
    """One agent, as a browser here sees it."""

    def __init__(
        self,
        asker: AgentProxy,
        member: AgentEndpoint,
        find: EndpointLookup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker, self._member, self._find, self._clock = asker, member, find, clock
        self._turn = asyncio.Lock()
        """An agent reviews one token of an address at a time and refuses the others, where a browser asks for six things at
        once. None of them is a stream, so that each is answered soon."""
        self._looked_s = float("-inf")

    async def check(self) -> None:
        """Raises Unavailable where there is nothing to look at."""
        if self._member.problem:
            raise Unavailable(self._member.problem, self._member.remedy or "kubectl dioptase doctor tells more")
        raw = await self._raw("/")
        if raw.status != HTTPStatus.OK:
            raise Unavailable(*refusal_reason(self._member, raw))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET and HEAD of what agents serve, asked for by a name of this machine's loopback."""
        if request.method not in ("GET", "HEAD"):
            return _error_response(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not served", "use GET")
        if not is_loopback_host(request.headers.get("Host", "")):
            return _error_response(HTTPStatus.FORBIDDEN, "Host is not a name of this machine's loopback", f"use {HOST}")
        # As it was sent: what is escaped in it is in no path of an agent's.
        path, mark, query = request.raw_path.partition("?")
        if SERVED_PATHS.fullmatch(path) is None:
            return _error_response(HTTPStatus.NOT_FOUND, "this is not served", "see /")
        return await self._asked(path + mark + query)

    async def _raw(self, path: str) -> RawResponse:
        try:
            async with self._turn:
                raw = await self._asker.raw(self._member, path)
                if _is_missing_pod(raw) and await self._replaced():
                    raw = await self._asker.raw(self._member, path)
        except ApiUnreachable as error:
            raise Unavailable(*no_answer_reason(error)) from error
        if _is_missing_pod(raw):
            raise Unavailable(
                f"its agent {self._member.pod} has just gone",
                "wait, this page finds the next one by itself: kubectl get pods -o wide says when it is there",
            )
        return raw

    async def _replaced(self) -> bool:
        """Whether another pod answers for the node now, as after a roll-out. Not looked up at every question of a page: that
        lists the cluster's nodes. Raises Unavailable."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOKUP_INTERVAL_S:
            return False
        self._looked_s = now_s
        found = await self._find()
        if found.problem:
            # Where it was is kept: a node whose agent is just made has one soon.
            raise Unavailable(found.problem, found.remedy or "wait, this page finds the next one by itself")
        before, self._member = self._member, found
        return found.path != before.path

    async def _asked(self, path: str) -> web.Response:
        try:
            raw = await self._raw(path)
        except Unavailable as error:
            return _error_response(HTTPStatus.BAD_GATEWAY, error.reason, error.remedy)
        if is_from_api_server(raw) or raw.status == HTTPStatus.UNAUTHORIZED:
            return _error_response(HTTPStatus.BAD_GATEWAY, *refusal_reason(self._member, raw))
        kind = {"Content-Type": raw.content_type} if raw.content_type else {}
        body = PROXY_LINKS.sub(b'"/', raw.body) if raw.content_type.startswith("text/html") else raw.body
        return web.Response(status=raw.status, body=body, headers={**SECURITY_HEADERS, **kind})


async def serve_page(page: PageProxy, ready: Callable[[str], None]) -> None:
    """Until cancelled; `ready` is told the URL. Raises Unavailable."""
    await page.check()
    # Who has left does not wait for a turn.
    runner = web.ServerRunner(web.Server(page.handle, access_log=None, handler_cancellation=True))
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        ready(f"http://{HOST}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _is_missing_pod(raw: RawResponse) -> bool:
    """Whether the API server knows no such pod."""
    return raw.status == HTTPStatus.NOT_FOUND and is_from_api_server(raw)


def _error_response(status: HTTPStatus, error: str, remedy: str) -> web.Response:
    """As agents tell theirs, which the page shows."""
    body = msgspec.json.encode({"error": error, "remedy": remedy})
    return web.Response(status=status, body=body, headers={**SECURITY_HEADERS, "Content-Type": "application/json"})
