"""An agent's page in a browser on this machine: a server on 127.0.0.1 passes what is asked on to the agent, through the API
server's proxy and with the token that the agent wants, neither of which a browser can do.

Only what an agent serves is passed on, path by path: a path with dots would lead the person's own credentials to other parts of
the API, and the scripts of a page are whoever's who calls a pod an agent.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from api.ports import Unavailable
from cli.fleet.asking import Asker, from_api_server, refused, unanswered
from cli.fleet.members import Member
from exporters.loopback import names_loopback
from kube.client import Raw
from kube.errors import Unreachable

HOST = "127.0.0.1"
LOOK_S = 5.0
"""From one look for the agent's next pod to the next."""
Find = Callable[[], Awaitable[Member]]
"""Looks up who answers for the node now. Raises Unavailable."""
SERVED = re.compile(r"/|/metrics|/healthz|/readyz|/api/v1/[a-z]+|/static/[a-z]+\.(?:js|css|svg)")
LINKS = re.compile(rb'"/api/v1/namespaces/[^/"]+/pods/[^/"]+/proxy/')
"""The API server's proxy writes itself before every link of a document that it passes on (apimachinery, pkg/util/proxy)."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""As agents have them."""


class Page:
    """One agent, as a browser here sees it."""

    def __init__(self, asker: Asker, member: Member, find: Find, clock: Callable[[], float] = time.monotonic) -> None:
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
            raise Unavailable(*refused(self._member, raw))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET and HEAD of what agents serve, asked for by a name of this machine's loopback."""
        if request.method not in ("GET", "HEAD"):
            return _problem(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not served", "use GET")
        if not names_loopback(request.headers.get("Host", "")):
            return _problem(HTTPStatus.FORBIDDEN, "Host is not a name of this machine's loopback", f"use {HOST}")
        # As it was sent: what is escaped in it is in no path of an agent's.
        path, mark, query = request.raw_path.partition("?")
        if SERVED.fullmatch(path) is None:
            return _problem(HTTPStatus.NOT_FOUND, "this is not served", "see /")
        return await self._asked(path + mark + query)

    async def _raw(self, path: str) -> Raw:
        try:
            async with self._turn:
                raw = await self._asker.raw(self._member, path)
                if _gone(raw) and await self._replaced():
                    raw = await self._asker.raw(self._member, path)
        except Unreachable as error:
            raise Unavailable(*unanswered(error)) from error
        if _gone(raw):
            raise Unavailable(
                f"its agent {self._member.pod} has just gone",
                "wait, this page finds the next one by itself: kubectl get pods -o wide says when it is there",
            )
        return raw

    async def _replaced(self) -> bool:
        """Whether another pod answers for the node now, as after a roll-out. Not looked up at every question of a page: that
        lists the cluster's nodes. Raises Unavailable."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
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
            return _problem(HTTPStatus.BAD_GATEWAY, error.reason, error.remedy)
        if from_api_server(raw) or raw.status == HTTPStatus.UNAUTHORIZED:
            return _problem(HTTPStatus.BAD_GATEWAY, *refused(self._member, raw))
        kind = {"Content-Type": raw.content_type} if raw.content_type else {}
        body = LINKS.sub(b'"/', raw.body) if raw.content_type.startswith("text/html") else raw.body
        return web.Response(status=raw.status, body=body, headers={**HEADERS, **kind})


async def serve(page: Page, ready: Callable[[str], None]) -> None:
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


def _gone(raw: Raw) -> bool:
    """Whether the API server knows no such pod."""
    return raw.status == HTTPStatus.NOT_FOUND and from_api_server(raw)


def _problem(status: HTTPStatus, error: str, remedy: str) -> web.Response:
    """As agents tell theirs, which the page shows."""
    body = msgspec.json.encode({"error": error, "remedy": remedy})
    return web.Response(status=status, body=body, headers={**HEADERS, "Content-Type": "application/json"})
