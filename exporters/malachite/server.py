"""The HTTP server that an unchanged Katalyst agent asks instead of Malachite: GET below /api/v1/, JSON, no more.

Documents are made when they are asked for, from the latest round, and kept until the next one. A cgroup is looked up among
those of the snapshot and never as a file, so no path that anyone can send leads anywhere. Headers and body leave in one
write: in two, the client's delayed acknowledgement costs 40 ms a call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from api.decisions import Round
from api.ports import Unavailable
from api.samples import Snapshot
from exporters.malachite import cgroup_v1, cgroup_v2
from exporters.malachite.cgroups import CgroupView, Layout, view
from exporters.malachite.compute import compute
from exporters.malachite.io import io
from exporters.malachite.memory import memory
from exporters.malachite.network import network
from exporters.malachite.past import History
from exporters.malachite.realtime import freq, info, power, resctrl
from exporters.malachite.subtree import Subtree
from exporters.malachite.wire import Wire, envelope, refusal
from exporters.serving import is_loopback, listen, names_loopback, tell_open

log = logging.getLogger(__name__)

API = "/api/v1/"
CGROUPS = "cgroup/groups"
PATH = "cgroup_user_path"
LONGEST_PATH = 4096
"""PATH_MAX of the kernel."""
MOST_LINE = 8 * LONGEST_PATH
"""Of a request; enough for a path that is too long to be refused in the words of this server."""
DOCUMENTS: Mapping[str, Callable[[Snapshot, History], Wire]] = {
    "system/compute": compute,
    "system/memory": memory,
    "system/io": io,
    "system/network": network,
    "system/info": info,
    "realtime/power": power,
    "realtime/freq": freq,
    "realtime/resctrl": resctrl,
}
VERSIONS: Mapping[str, Callable[[CgroupView], Wire]] = {"V1": cgroup_v1.groups, "V2": cgroup_v2.groups}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Cgroup(Wire, frozen=True):
    """The document `cgroup/groups`."""

    mount_point: str
    user_path: str
    cgroup_type: str
    sub_system_groups: Any


class Refused(Exception):
    """A request that gets an error instead of a document."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Malachite:
    """Sink of rounds and server in one."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._history = History()
        self._below: Subtree | None = None
        self._made: dict[str, bytes] = {}
        self._loopback = True
        self._runner: web.AppRunner | None = None

    def publish(self, finished: Round) -> None:
        try:
            self._history.add(finished.snapshot)
            self._below = None
            self._made.clear()
        except Exception:
            # The documents keep the time of the last round that was understood, and the client says they are old.
            log.exception("round %d cannot be shown", finished.snapshot.seq)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, which the kernel chooses where it is 0. Raises Unavailable with a remedy."""
        self._runner, bound = await listen(self.app(), host, port, "--malachite", max_line_size=MOST_LINE)
        names = [str(name) for name, *_ in self._runner.addresses]
        self._loopback = all(map(is_loopback, names))
        tell_open(names, "Malachite's protocol has no passwords; listen on 127.0.0.1")
        return bound

    async def stop(self) -> None:
        """Close the port and every connection. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def app(self) -> web.Application:
        """What answers, without a port."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(API + CGROUPS, self._cgroup, allow_head=False)
        for name in DOCUMENTS:
            app.router.add_get(API + name, self._document, allow_head=False)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._loopback and not names_loopback(request.headers.get("Host", "")):
                raise Refused(403, f"Host {request.headers['Host']!r} is not a name of this machine's loopback")
            return await handler(request)
        except Refused as refused:
            return _json(refused.status, refusal(str(refused)))
        except Unavailable as missing:
            return _json(503, refusal(f"{missing.reason}: {missing.remedy}"))
        except web.HTTPMethodNotAllowed:
            return _json(405, refusal(f"{request.method} is not served: use GET"))
        except web.HTTPNotFound:
            served = ", ".join(API + name for name in (*DOCUMENTS, CGROUPS))
            return _json(404, refusal(f"{request.path[:LONGEST_PATH]} is not served, but {served}"))

    async def _document(self, request: web.Request) -> web.StreamResponse:
        name = request.path.removeprefix(API)
        body = self._made.get(name)
        if body is None:
            body = envelope(DOCUMENTS[name](self._latest(), self._history))
            self._made[name] = body
        return _json(200, body)

    async def _cgroup(self, request: web.Request) -> web.StreamResponse:
        path = asked_path(request.rel_url.raw_query_string)
        body = self._made.get(path)
        if body is None:
            body = self._make_cgroup(path)
            self._made[path] = body
        return _json(200, body)

    def _make_cgroup(self, path: str) -> bytes:
        now = self._latest()
        sample = now.cgroups.get(path)
        if sample is None:
            raise Refused(404, f"there is no cgroup {path!r}")
        if sample.files_read_at_ns is None:
            raise Unavailable(f"the files of cgroup {path!r} have not been read yet", "ask again in five seconds")
        if self._below is None:
            self._below = Subtree(now, self._history)
        layout = self._layout
        groups = VERSIONS[layout.version](view(sample, now, self._history, self._below, layout))
        return envelope(
            Cgroup(mount_point=layout.root, user_path=path, cgroup_type=layout.version, sub_system_groups=groups)
        )

    def _latest(self) -> Snapshot:
        if self._history.latest is None:
            raise Unavailable("no round has finished yet", "ask again in a second")
        return self._history.latest


def asked_path(query: str) -> str:
    """The cgroup that a query names, as the snapshot has it: one leading slash, none at the end. Raises Refused."""
    if len(query) > 3 * LONGEST_PATH + len(PATH) + 1:
        raise Refused(414, f"the path is longer than {LONGEST_PATH} bytes")
    try:
        values = [value for name, value in parse_qsl(query, keep_blank_values=True, max_num_fields=8) if name == PATH]
    except ValueError as error:
        raise Refused(400, f"the query cannot be read: {error}") from error
    if len(values) != 1 or not values[0]:
        raise Refused(400, f"give {PATH} once, as in ?{PATH}=%2Fkubepods")
    parts = [part for part in values[0].split("/") if part]
    if "\0" in values[0] or any(part in (".", "..") for part in parts):
        raise Refused(
            400, f"{values[0][:LONGEST_PATH]!r} is no path of a cgroup: no part of it may be . or .. or hold NUL"
        )
    if len(values[0]) > LONGEST_PATH:
        raise Refused(414, f"the path is longer than {LONGEST_PATH} bytes")
    return "/" + "/".join(parts)


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")
