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
"""Minimum time between two lookups of the agent's next pod."""
EndpointLookup = Callable[[], Awaitable[AgentEndpoint]]
"""Looks up the agent that serves the node now. Raises Unavailable."""
SERVED_PATHS = re.compile(r"/|/metrics|/healthz|/readyz|/api/v1/[a-z]+|/static/[a-z_]+\.(?:js|css|svg)")
PROXY_LINKS = re.compile(rb'"/api/v1/namespaces/[^/"]+/pods/[^/"]+/proxy/')
"""The API server's proxy prefixes every link of a document with its own path (apimachinery, pkg/util/proxy)."""
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The same headers as agents send."""


class PageProxy:
    """Serves one agent's page to browsers on this machine."""

    def __init__(
        self,
        proxy: AgentProxy,
        member: AgentEndpoint,
        find: EndpointLookup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proxy, self._member, self._find, self._clock = proxy, member, find, clock
        self._request_lock = asyncio.Lock()
        """An agent reviews one token of an address at a time and refuses others, while a browser sends six requests at once. No
        response is a stream, so each request waits only briefly."""
        self._looked_up_at_s = float("-inf")

    async def check(self) -> None:
        """Raise Unavailable if the agent's page cannot be reached."""
        if self._member.problem:
            raise Unavailable(self._member.problem, self._member.remedy or "kubectl dioptase doctor lists the causes")
        raw = await self._raw("/")
        if raw.status != HTTPStatus.OK:
            raise Unavailable(*refusal_reason(self._member, raw))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer GET and HEAD requests for the agent's paths, if the Host header is a loopback name."""
        if request.method not in ("GET", "HEAD"):
            return _error_response(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not served", "use GET")
        if not is_loopback_host(request.headers.get("Host", "")):
            return _error_response(HTTPStatus.FORBIDDEN, "Host is not a name of this machine's loopback", f"use {HOST}")
        # The raw path: escaped characters occur in no path of an agent.
        path, separator, query = request.raw_path.partition("?")
        if SERVED_PATHS.fullmatch(path) is None:
            return _error_response(HTTPStatus.NOT_FOUND, "this is not served", "see /")
        return await self._proxy_response(path + separator + query)

    async def _raw(self, path: str) -> RawResponse:
        try:
            async with self._request_lock:
                raw = await self._proxy.request_raw(self._member, path)
                if _is_missing_pod(raw) and await self._find_replacement():
                    raw = await self._proxy.request_raw(self._member, path)
        except ApiUnreachable as error:
            raise Unavailable(*no_answer_reason(error)) from error
        if _is_missing_pod(raw):
            raise Unavailable(
                f"its agent {self._member.pod} was just deleted",
                "wait until the next one runs (kubectl get pods -o wide); this page finds it by itself",
            )
        return raw

    async def _find_replacement(self) -> bool:
        """Look up the node's agent again; return whether the pod has changed, as after a roll-out. At most once per interval,
        because a lookup lists the cluster's nodes. Raises Unavailable."""
        now_s = self._clock()
        if now_s - self._looked_up_at_s < LOOKUP_INTERVAL_S:
            return False
        self._looked_up_at_s = now_s
        endpoint = await self._find()
        if endpoint.problem:
            # The previous endpoint stays: a node whose agent is being replaced has a new one soon.
            raise Unavailable(endpoint.problem, endpoint.remedy or "wait, this page finds the next one by itself")
        previous, self._member = self._member, endpoint
        return endpoint.path != previous.path

    async def _proxy_response(self, path: str) -> web.Response:
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
    """Serve the page until cancelled; calls `ready` with the URL. Raises Unavailable."""
    await page.check()
    # Handlers are cancelled when the browser disconnects, so that its requests do not hold the lock.
    runner = web.ServerRunner(web.Server(page.handle, access_log=None, handler_cancellation=True))
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        ready(f"http://{HOST}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _is_missing_pod(raw: RawResponse) -> bool:
    """Whether the API server reports that the pod does not exist."""
    return raw.status == HTTPStatus.NOT_FOUND and is_from_api_server(raw)


def _error_response(status: HTTPStatus, error: str, remedy: str) -> web.Response:
    """Return an error in the format of agents, which the page displays."""
    body = msgspec.json.encode({"error": error, "remedy": remedy})
    return web.Response(status=status, body=body, headers={**SECURITY_HEADERS, "Content-Type": "application/json"})
