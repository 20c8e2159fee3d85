"""Serves Malachite's documents over HTTP: GET below /api/v1/, JSON, on loopback only.
Documents are made on request from the latest cycle and kept until the next one. A cgroup is looked up in the snapshot
and never as a file. Headers and body leave in one write: in two, the client's delayed acknowledgement costs 40 ms a
call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from api.decision import Cycle
from api.interfaces import Unavailable
from api.snapshot import Snapshot
from api.text import cgroup_name_to_text, encodable, quote
from common.http.listener import HttpListener
from common.http.request_guard import is_loopback, is_loopback_host
from exporters.malachite import cgroup_v1, cgroup_v2
from exporters.malachite.cgroup_documents import CgroupInputs, CgroupLayout, SubtreeSums, cgroup_inputs
from exporters.malachite.compute import compute_document
from exporters.malachite.devices import (
    frequency_document,
    info_document,
    io_document,
    network_document,
    power_document,
    resctrl_document,
)
from exporters.malachite.history import MalachiteHistory
from exporters.malachite.memory import memory_document
from exporters.malachite.wire import MalachiteStruct, error_body, success_body

log = logging.getLogger(__name__)

API_PREFIX = "/api/v1/"
CGROUP_DOCUMENT = "cgroup/groups"
CGROUP_PATH_PARAMETER = "cgroup_user_path"
MAX_PATH_BYTES = 4096
"""PATH_MAX of the kernel."""
MAX_REQUEST_LINE = 8 * MAX_PATH_BYTES
"""Limit of a request line, large enough to reject a path that is too long with an error of this server."""
DOCUMENTS: Mapping[str, Callable[[Snapshot, MalachiteHistory], MalachiteStruct]] = {
    "system/compute": compute_document,
    "system/memory": memory_document,
    "system/io": io_document,
    "system/network": network_document,
    "system/info": info_document,
    "realtime/power": power_document,
    "realtime/freq": frequency_document,
    "realtime/resctrl": resctrl_document,
}
GROUPS_BY_VERSION: Mapping[str, Callable[[CgroupInputs], MalachiteStruct]] = {
    "V1": cgroup_v1.v1_groups,
    "V2": cgroup_v2.v2_groups,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CgroupDocument(MalachiteStruct, frozen=True):
    """The document `cgroup/groups`."""

    mount_point: str
    user_path: str
    cgroup_type: str
    sub_system_groups: Any


class MalachiteRefused(Exception):
    """Rejection of a request, with the status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _PublishedCycle:
    """The history up to one cycle, and the documents rendered from it so far. Requests are answered from both."""

    def __init__(self, history: MalachiteHistory) -> None:
        self.history = history
        self.rendered: dict[str, bytes] = {}
        self._below: SubtreeSums | None = None

    @property
    def latest(self) -> Snapshot:
        """The latest snapshot. Raises Unavailable before the first cycle."""
        if self.history.latest is None:
            raise Unavailable("no cycle has finished yet", "retry after a second")
        return self.history.latest

    def below(self) -> SubtreeSums:
        """Return the sums over subtrees, made when a cgroup is first requested."""
        if self._below is None:
            self._below = SubtreeSums(self.latest, self.history)
        return self._below


class MalachiteServer:
    """Sink of cycles and HTTP server in one.

    The cycle thread publishes each cycle, because copying the counters of 1,200 cgroups takes 22 ms. Requests on the event
    loop read one published cycle as a whole.
    """

    def __init__(self, layout: CgroupLayout) -> None:
        self._layout = layout
        self._published = _PublishedCycle(MalachiteHistory())
        self._listener: HttpListener | None = None

    def publish(self, finished: Cycle) -> None:
        try:
            self._published = _PublishedCycle(self._published.history.after(finished.snapshot))
        except Exception:
            # The documents keep the time of the latest good cycle, and the client reports that they are old.
            log.exception("cycle %d could not be published", finished.snapshot.seq)

    async def start(self, host: str, port: int) -> int:
        """Listen on loopback and return the port; for port 0 the kernel chooses one. Raises Unavailable with a remedy.

        Other addresses are rejected: the client's address is compiled in, and it supports neither TLS nor passwords.
        """
        self._listener = HttpListener(self.app(), max_line_size=MAX_REQUEST_LINE)
        bound = await self._listener.open(host, port, "--malachite")
        if not all(is_loopback(name) for name, _ in bound):
            await self._listener.close()
            raise Unavailable(
                f"--malachite {host}:{port} would show every cgroup to every client that reaches it: "
                "the protocol has no passwords",
                "use a loopback address: Katalyst's agent connects to 127.0.0.1:9002",
            )
        return bound[0][1]

    async def stop(self) -> None:
        """Close the port and every connection. Idempotent."""
        if self._listener is not None:
            await self._listener.close()

    def app(self) -> web.Application:
        """Return the application that serves the documents."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(API_PREFIX + CGROUP_DOCUMENT, self._cgroup, allow_head=False)
        for name in DOCUMENTS:
            app.router.add_get(API_PREFIX + name, self._document, allow_head=False)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not is_loopback_host(request.headers.get("Host", "")):
                raise MalachiteRefused(
                    403, f"Host {quote(request.headers['Host'])} is not a name of this machine's loopback"
                )
            return await handler(request)
        except MalachiteRefused as refused:
            return _json_response(refused.status, error_body(str(refused)))
        except Unavailable as missing:
            return _json_response(503, error_body(f"{missing.reason}: {missing.remedy}"))
        except web.HTTPMethodNotAllowed:
            return _json_response(405, error_body(f"{request.method} is not served: use GET"))
        except web.HTTPNotFound:
            served = ", ".join(API_PREFIX + name for name in (*DOCUMENTS, CGROUP_DOCUMENT))
            return _json_response(404, error_body(f"{request.path[:MAX_PATH_BYTES]} is not served, but {served}"))

    async def _document(self, request: web.Request) -> web.StreamResponse:
        name, published = request.path.removeprefix(API_PREFIX), self._published
        body = published.rendered.get(name)
        if body is None:
            body = success_body(DOCUMENTS[name](published.latest, published.history))
            published.rendered[name] = body
        return _json_response(200, body)

    async def _cgroup(self, request: web.Request) -> web.StreamResponse:
        published = self._published
        path = _resolve_path(requested_path(request.rel_url.raw_query_string), published.latest)
        body = published.rendered.get(path)
        if body is None:
            body = self._make_cgroup(path, published)
            published.rendered[path] = body
        return _json_response(200, body)

    def _make_cgroup(self, path: str, published: _PublishedCycle) -> bytes:
        now = published.latest
        sample = now.cgroups.get(path)
        if sample is None:
            raise MalachiteRefused(404, f"there is no cgroup {quote(path)}")
        if sample.files_read_at_ns is None:
            raise Unavailable(f"the files of cgroup {quote(path)} have not been read yet", "retry after five seconds")
        layout = self._layout
        groups = GROUPS_BY_VERSION[layout.version](
            cgroup_inputs(sample, now, published.history, published.below(), layout)
        )
        return success_body(
            CgroupDocument(
                mount_point=layout.root, user_path=path, cgroup_type=layout.version, sub_system_groups=groups
            )
        )


def _resolve_path(query_path: str, latest: Snapshot) -> str:
    """Return the snapshot's spelling of a path in a query, which has the kernel's bytes or that spelling."""
    path = cgroup_name_to_text(query_path.encode(errors="surrogateescape"))
    return path if path in latest.cgroups else encodable(query_path)


def requested_path(query: str) -> str:
    """Return the cgroup that a query names, with a leading and without a trailing slash.

    Bytes that are not UTF-8 are surrogates. Raises MalachiteRefused.
    """
    if len(query) > 3 * MAX_PATH_BYTES + len(CGROUP_PATH_PARAMETER) + 1:
        raise MalachiteRefused(414, f"the path is longer than {MAX_PATH_BYTES} bytes")
    try:
        named = parse_qsl(query, keep_blank_values=True, max_num_fields=8, errors="surrogateescape")
    except ValueError as error:
        raise MalachiteRefused(400, f"the query cannot be read: {error}") from error
    values = [value for name, value in named if name == CGROUP_PATH_PARAMETER]
    if len(values) != 1 or not values[0]:
        raise MalachiteRefused(400, f"give {CGROUP_PATH_PARAMETER} once, as in ?{CGROUP_PATH_PARAMETER}=%2Fkubepods")
    parts = [part for part in values[0].split("/") if part]
    if "\0" in values[0] or any(part in (".", "..") for part in parts):
        raise MalachiteRefused(
            400, f"{quote(values[0], MAX_PATH_BYTES)} is no path of a cgroup: no part of it may be . or .. or hold NUL"
        )
    if len(values[0]) > MAX_PATH_BYTES:
        raise MalachiteRefused(414, f"the path is longer than {MAX_PATH_BYTES} bytes")
    return "/" + "/".join(parts)


def _json_response(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")
