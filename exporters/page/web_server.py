"""Serves the page, `/metrics`, health and the JSON API of the agent over HTTP, read only.
It binds loopback by default and then accepts only loopback Host headers, against DNS rebinding. TLS and passwords
come from a web configuration file that is polled for changes. `publish` never raises, and any thread may call it:
building and compressing a view takes milliseconds. Views of the last five minutes are kept compressed, at most 1 MiB;
the findings of `dioptase doctor` are cached for a minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web

from api.decision import Cycle, JournalEntry
from api.diagnostics import DoctorCheck, DoctorReport, EffectiveConfiguration
from api.eviction import EvictionEntry
from api.interfaces import DecisionRecord, EvictionRecord
from api.text import quote, to_json
from common.http import responses
from common.http.listener import HttpListener, connection_of
from common.http.passwords import RETRY_AFTER_S, PasswordChecker, TooManyChecks
from common.http.request_guard import HttpProblem, HttpRefused, is_loopback, is_loopback_host
from common.http.token_review import (
    HEALTH_PATHS,
    HEALTHZ_PATH,
    PROXIED_AUTHORIZATION_HEADER,
    READYZ_PATH,
    TokenReviewer,
)
from common.http.web_config import WebConfig, WebSecurity
from exporters.page.health import STALE_S, CycleHealth
from exporters.prometheus.exposition import PrometheusExporter
from exporters.prometheus.families import AgentInfo
from exporters.view import cycle_view

log = logging.getLogger(__name__)

HISTORY_CYCLES = 300
"""Five minutes of cycles."""
HISTORY_MAX_BYTES = 1 << 20
HISTORY_ZLIB_LEVEL = 6
"""A quarter smaller than level 1, for 1 ms more with 200 containers."""
FINDINGS_TTL_S = 60.0
"""Maximum age of cached findings."""
INDEX_PATH = "/"
PAGE_DIRECTORY = Path(__file__).parent / "static"
MAX_ENTRIES = 2000
DECISION_FILTERS: Mapping[str, Callable[[JournalEntry], str]] = {
    "pod": lambda entry: entry.outcome.decision.pod,
    "cgroup": lambda entry: entry.outcome.decision.cgroup,
    "knob": lambda entry: entry.outcome.decision.knob.value,
    "rule": lambda entry: entry.outcome.decision.reason.rule,
    "status": lambda entry: entry.outcome.status.value,
}
"""Query parameters that filter decisions, in addition to `after` and `limit`."""
EVICTION_FILTERS: Mapping[str, Callable[[EvictionEntry], str]] = {
    "pod": lambda entry: entry.pod,
    "plugin": lambda entry: "" if entry.victim is None else entry.victim.plugin,
    "reason": lambda entry: "" if entry.kill is None else entry.kill.reason.value,
}
"""Query parameters that filter evictions."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
JSON_HEADERS = {"Content-Type": "application/json", **HEADERS}
EXTRA_HEADERS = {
    401: {"WWW-Authenticate": 'Basic realm="dioptase", charset="UTF-8"'},
    405: {"Allow": "GET, HEAD"},
    429: {"Retry-After": str(RETRY_AFTER_S)},
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class ViewHistory:
    """Compressed views of the latest cycles. Reading while a view is added returns the state before or after it."""

    def __init__(self, cycles: int = HISTORY_CYCLES, max_bytes: int = HISTORY_MAX_BYTES) -> None:
        self._views: deque[tuple[int, bytes]] = deque()
        self._cycles, self._max_bytes = cycles, max_bytes
        self._bytes = 0

    def add(self, seq: int, view_json: bytes) -> None:
        """Add a view and drop the oldest ones beyond the bounds; the newest is kept whatever its size."""
        packed = zlib.compress(view_json, HISTORY_ZLIB_LEVEL)
        self._views.append((seq, packed))
        self._bytes += len(packed)
        while len(self._views) > 1 and (len(self._views) > self._cycles or self._bytes > self._max_bytes):
            self._bytes -= len(self._views.popleft()[1])

    def after(self, seq: int) -> Iterator[bytes]:
        """Yield the JSON of every stored View with a greater seq, oldest first."""
        return (zlib.decompress(packed) for number, packed in tuple(self._views) if number > seq)


class CachedFindings:
    """Findings of the doctor as JSON, computed on request."""

    def __init__(self, version: str, checks: Callable[[], tuple[DoctorCheck, ...]]) -> None:
        self._version, self._checks = version, checks
        self._computation: asyncio.Task[None] | None = None
        self._text, self._until_s = b"", 0.0

    async def findings_json(self) -> bytes:
        """Return a DoctorReport as JSON, at most FINDINGS_TTL_S old. Concurrent requests share one computation, which
        continues if they are cancelled: a client that disconnects and requests them again must not start another one."""
        if time.monotonic() >= self._until_s:
            if self._computation is None or self._computation.done():
                self._computation = asyncio.create_task(self._compute())
            await asyncio.shield(self._computation)
        return self._text

    async def _compute(self) -> None:
        checks = await asyncio.to_thread(self._checks)
        self._text = to_json(DoctorReport(version=self._version, checks=checks))
        self._until_s = time.monotonic() + FINDINGS_TTL_S


class EntryRecord(Protocol[E_co]):
    """A bounded record of entries: DecisionRecord or EvictionRecord."""

    def entries(self, after: int, limit: int, predicate: Callable[[E_co], bool] | None, /) -> Sequence[E_co]:
        """Return the newest matching entries after a number, oldest first."""


class AgentWebServer:
    """Sink of cycles and HTTP server in one: it serves exactly what was published."""

    def __init__(  # noqa: PLR0913 - one argument per part of the server
        self,
        *,
        journal: DecisionRecord,
        evictions: EvictionRecord | None = None,
        version: str,
        node_name: str = "",
        page: Path = PAGE_DIRECTORY,
        stale_s: float = STALE_S,
        about: Callable[[], AgentInfo] = AgentInfo,
        configuration: Callable[[], EffectiveConfiguration] | None = None,
        checks: Callable[[], tuple[DoctorCheck, ...]] | None = None,
        web_config: WebConfig | None = None,
        tokens: TokenReviewer | None = None,
    ) -> None:
        self._journal, self._evictions = journal, evictions
        self._configuration = configuration
        self._checked = None if checks is None else CachedFindings(version, checks)
        self._page, self._node_name = page, node_name
        self._health = CycleHealth(stale_s)
        self._exposition = PrometheusExporter(version, about)
        self._history = ViewHistory()
        self._view_json: bytes | None = None
        self._loopback = True
        self._encrypted = False
        self._web_config = web_config
        self._passwords: PasswordChecker | None = None
        self._tokens = tokens
        self._listener: HttpListener | None = None
        self._config_task: asyncio.Task[None] | None = None

    @property
    def encrypted(self) -> bool:
        """Return whether the port uses TLS, as of its opening or latest renewal."""
        return self._encrypted

    def publish(self, finished: Cycle) -> None:
        self._health.record_cycle(finished)
        try:
            view = cycle_view.build_view(finished, self._node_name)
            view_json = to_json(view)
            self._exposition.publish(finished)
            self._history.add(finished.snapshot.seq, to_json(cycle_view.past_view(view)))
            self._view_json = view_json
            self._health.record_published()
        except Exception:
            # A bug of the view must not stop the agent; /readyz turns 503 when the latest published cycle is too old.
            log.exception("cycle %d could not be published", finished.snapshot.seq)

    async def start(self, hosts: str | Sequence[str], port: int) -> int:
        """Listen and return the port; for port 0 the kernel chooses one. Raises Unavailable with a remedy."""
        config = self._web_config
        secured = WebSecurity() if config is None else await asyncio.to_thread(config.load)
        self._encrypted = secured.tls is not None
        self._passwords = PasswordChecker(secured.users) if secured.users else None
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(INDEX_PATH, self._index)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(HEALTHZ_PATH, self._alive)
        app.router.add_get(READYZ_PATH, self._ready)
        app.router.add_get("/api/v1/view", self._view)
        app.router.add_get("/api/v1/history", self._views)
        app.router.add_get("/api/v1/decisions", self._decisions)
        app.router.add_get("/api/v1/evictions", self._evicted)
        app.router.add_get("/api/v1/snapshot", self._snapshot)
        app.router.add_get("/api/v1/config", self._settings)
        app.router.add_get("/api/v1/doctor", self._doctor)
        self._listener = HttpListener(app)
        bound = await self._listener.open(hosts, port, "--listen", secured.tls)
        if config is not None:
            self._config_task = asyncio.create_task(config.follow(self._apply))
        self._loopback = all(is_loopback(name) for name, _ in bound)
        if config is None and self._tokens is None and not self._loopback:
            log.warning(
                "every client that reaches %s can read all data of this agent: "
                "add a --web-config with passwords or a certificate",
                ", ".join(name for name, _ in bound if not is_loopback(name)),
            )
        return int(bound[0][1])

    async def stop(self) -> None:
        """Close the port and every connection. Idempotent."""
        if self._config_task is not None:
            self._config_task.cancel()
        if self._listener is not None:
            await self._listener.close()
        if self._passwords is not None:
            self._passwords.close()

    async def _apply(self, secured: WebSecurity) -> None:
        """Use another certificate and other users from the next connection and request on."""
        assert self._listener is not None
        before, self._passwords = self._passwords, PasswordChecker(secured.users) if secured.users else None
        if before is not None:
            before.close()
        await self._listener.renew(secured.tls)
        self._encrypted = secured.tls is not None

    async def _authenticate(self, request: web.Request) -> bool:
        """Return whether the client is authenticated, or need not be. Raises HttpRefused.

        Other clients may read the status of the health paths, without their bodies.
        """
        passwords, address = self._passwords, request.remote or ""
        authorization = request.headers.get("Authorization", "")
        if self._tokens is not None and not (passwords is not None and authorization[:6].lower() == "basic "):
            authorization = authorization or request.headers.get(PROXIED_AUTHORIZATION_HEADER, "")
            if not authorization and request.path in HEALTH_PATHS:
                return False
            # All paths that are not served share one review: a client could make up any number of them.
            path = request.path if request.match_info.http_exception is None else INDEX_PATH
            if refusal := await self._tokens.refusal(authorization, path, connection_of(request)):
                raise HttpRefused(*refusal)
            return True
        try:
            if passwords is None or await passwords.authenticates(authorization, address):
                return True
        except TooManyChecks:
            raise HttpRefused(
                429,
                "too many passwords are being checked, or another one of this address",
                f"retry after {RETRY_AFTER_S} seconds",
            ) from None
        raise HttpRefused(
            401, "this agent requires a user and a password", "use one of basic_auth_users of its web config"
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        authenticated = True
        try:
            authenticated = await self._authenticate(request)
            if request.method not in ("GET", "HEAD"):
                raise HttpRefused(405, f"{request.method} is not served", "use GET: this server is read only")
            if self._loopback and not is_loopback_host(request.headers.get("Host", "")):
                raise HttpRefused(
                    403,
                    f"Host {quote(request.headers['Host'])} is not a name of this machine's loopback",
                    "use 127.0.0.1 or localhost, or serve other names with --listen ADDRESS:PORT",
                )
            response = await handler(request)
        except HttpRefused as refusal:
            response = _problem_response(refusal.status, refusal.problem)
            if refusal.status == 401 and self._tokens is not None:
                response.headers["WWW-Authenticate"] = 'Bearer realm="dioptase"'
        except web.HTTPNotFound:
            served = "view, history, decisions, evictions, snapshot, config or doctor"
            remedy = f"see /, /metrics, /healthz or /api/v1/ followed by {served}"
            response = _problem_response(404, HttpProblem(f"{request.path} is not served", remedy))
        if not authenticated:
            response = web.Response(status=response.status, text="ok\n" if response.status == 200 else "not ok\n")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _index(self, _request: web.Request) -> web.StreamResponse:
        return await self._file("index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return await self._file(request.match_info["name"])

    async def _file(self, name: str) -> web.StreamResponse:
        """Send one of the page's own files. Names come from the directory's listing, so that none can lead out of it."""
        files = await asyncio.to_thread(lambda: {entry.name: entry for entry in self._page.iterdir()})
        path, content_type = files.get(name), responses.CONTENT_TYPES.get(Path(name).suffix)
        if path is None or content_type is None:
            raise web.HTTPNotFound
        charset = "; charset=utf-8" if content_type.startswith("text/") else ""
        return web.FileResponse(path, headers={"Content-Type": content_type + charset})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        render = partial(self._exposition.render, request.headers.get("Accept", ""))
        packed, content_type = await responses.render_in_thread(render)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding", **HEADERS}
        return await responses.send_gzipped(request, packed, headers)

    async def _alive(self, request: web.Request) -> web.StreamResponse:
        return await responses.send_body(request, to_json(self._health.liveness()), JSON_HEADERS)

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        return await responses.send_body(request, to_json(self._health.readiness()), JSON_HEADERS)

    async def _view(self, request: web.Request) -> web.StreamResponse:
        _query_parameters(request)
        if self._view_json is None:
            raise _no_cycle_yet()
        return await responses.send_body(request, self._view_json, JSON_HEADERS)

    async def _views(self, request: web.Request) -> web.StreamResponse:
        """Send the history view by view: five minutes of a full node are tens of MiB."""
        after = _query_parameters(request, ("after",))[0].get("after", 0)
        response = web.StreamResponse(headers=JSON_HEADERS)
        if responses.accepts_gzip(request):
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        separator = b"["
        for view_json in self._history.after(after):
            await response.write(separator + view_json)
            await asyncio.sleep(0)  # write() never waits for a fast reader, and a cycle may be due
            separator = b","
        await response.write_eof(b"]" if separator == b"," else b"[]")
        return response

    async def _settings(self, request: web.Request) -> web.StreamResponse:
        """Send the effective settings; secrets are in files of their own, never in settings."""
        _query_parameters(request)
        if self._configuration is None:
            raise web.HTTPNotFound
        return await responses.send_body(request, to_json(self._configuration()), JSON_HEADERS)

    async def _doctor(self, request: web.Request) -> web.StreamResponse:
        _query_parameters(request)
        if self._checked is None:
            raise web.HTTPNotFound
        return await responses.send_body(request, await self._checked.findings_json(), JSON_HEADERS)

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        return await self._send_entries(request, self._journal, DECISION_FILTERS)

    async def _evicted(self, request: web.Request) -> web.StreamResponse:
        """Send evictions; none if no eviction plugin is configured."""
        return await self._send_entries(request, self._evictions, EVICTION_FILTERS)

    async def _send_entries(
        self, request: web.Request, record: EntryRecord[E] | None, filters: Mapping[str, Callable[[E], str]]
    ) -> web.StreamResponse:
        after, limit, texts = _entry_query(request, tuple(filters))

        def matches(entry: E) -> bool:
            return all(filters[name](entry) == text for name, text in texts.items())

        def entries_json() -> bytes:
            return to_json([] if record is None else list(record.entries(after, limit, matches if texts else None)))

        return await responses.send_computed(request, entries_json, JSON_HEADERS)

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        _query_parameters(request)
        latest = self._exposition.state.latest
        if latest is None:
            raise _no_cycle_yet()
        return await responses.send_computed(request, partial(to_json, latest.snapshot), JSON_HEADERS)


def _no_cycle_yet() -> HttpRefused:
    return HttpRefused(503, "no cycle has finished yet", "retry after a second")


def _entry_query(request: web.Request, texts: tuple[str, ...]) -> tuple[int, int, dict[str, str]]:
    """Return number, limit and filters of a query of entries."""
    numbers, filters = _query_parameters(request, ("after", "limit"), texts)
    limit = numbers.get("limit", 200)
    if not 1 <= limit <= MAX_ENTRIES:
        raise HttpRefused(400, f"limit: {limit} is out of range", f"use a number from 1 to {MAX_ENTRIES}")
    return numbers.get("after", 0), limit, filters


def _query_parameters(
    request: web.Request, numbers: tuple[str, ...] = (), texts: tuple[str, ...] = ()
) -> tuple[dict[str, int], dict[str, str]]:
    """Return integers and texts of the query. Unknown names and wrong values are refused, never ignored."""
    values: dict[str, int] = {}
    filters: dict[str, str] = {}
    for name, text in request.query.items():
        if name not in numbers + texts:
            supported = " or ".join(numbers + texts)
            remedy = f"use {supported}" if supported else "leave it out: this path takes no parameters"
            raise HttpRefused(400, f"{name}: unknown parameter", remedy)
        if name in values or name in filters:
            raise HttpRefused(400, f"{name}: set twice", "set it once")
        if name in texts:
            filters[name] = text
        elif text.isascii() and text.isdigit() and len(text) <= 18:
            values[name] = int(text)
        else:
            raise HttpRefused(400, f"{name}: {quote(text)} is not a whole number", f"write it as in {name}=0")
    return values, filters


def _problem_response(status: int, problem: HttpProblem) -> web.Response:
    headers = {"Content-Type": "application/json"} | EXTRA_HEADERS.get(status, {})
    return web.Response(status=status, body=to_json(problem), headers=headers)
