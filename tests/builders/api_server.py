"""A fake API server for every test of a client: objects by path, scripted failures, and a record of all requests.

    server = FakeApiServer({"/api/v1/nodes/n1": {...}})
    server.refuse["/api/v1/nodes/n1"] = 409
    async with server.client() as client: ...

Tests that play back bytes use `client_of(handler)` with a handler of their own.

It implements GET, LIST (a path below which there are or were objects), WATCH (changes from its start on), POST, PUT with
optimistic concurrency, PATCH with optimistic concurrency (merge, also for server-side apply, also of the status), DELETE, and
the token subresource of service accounts.
Handlers for other paths: `handlers[path]`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RecordedRequest(NamedTuple):
    """One request; `body` is the decoded JSON, or None."""

    method: str
    path: str
    body: Any
    headers: Mapping[str, str] = {}
    query: Mapping[str, str] = {}


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve HTTP requests with the handler on a free port; yields the URL."""
    runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(
    handler: Handler, credentials: ApiCredentials | None = None, timeout_s: float = 5
) -> AsyncIterator[KubeClient]:
    """Serve with the handler, and yield a client of this server."""
    async with (
        serving(handler) as url,
        KubeClient(ApiAccess(url, credentials or ApiCredentials()), "test", timeout_s) as client,
    ):
        yield client


def status_response(status: int, text: str, **headers: str) -> web.Response:
    """Return a response with this text; `Retry_After` is the header Retry-After."""
    return web.Response(status=status, text=text, headers={name.replace("_", "-"): v for name, v in headers.items()})


class FakeApiServer:
    """An API server in memory."""

    def __init__(self, objects: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.objects: dict[str, dict[str, Any]] = {path: dict(item) for path, item in (objects or {}).items()}
        self._collections = {path.rpartition("/")[0] for path in self.objects}
        self._watches: list[tuple[str, asyncio.Queue[tuple[str, Any]]]] = []
        self.refuse: dict[str, int] = {}
        """Status of the error for a path, or for a method alone, before anything else."""
        self.invalid = ""
        """Text that the server refuses in an object (422)."""
        self.claims: list[tuple[str, str]] = []
        """Manager and field of other owners: an apply without force conflicts with them, one with force takes them over."""
        self.rivals = 0
        """Number of patches before which another client writes the same object."""
        self.handlers: dict[str, Handler] = {}
        """Handlers by path prefix, before the objects."""
        self.requests: list[RecordedRequest] = []
        self.writes: list[RecordedRequest] = []
        """Accepted requests that write."""
        self.tokens = 0
        """Number of tokens issued; the n-th one is `tn`."""
        self._version = max(
            (int(item["metadata"].get("resourceVersion", 0)) for item in self.objects.values()), default=0
        )

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = msgspec.json.decode(raw) if raw else None
        recorded = RecordedRequest(request.method, request.path, body, dict(request.headers), dict(request.query))
        self.requests.append(recorded)
        if (status := self.refuse.get(request.path, self.refuse.get(request.method))) is not None:
            return self.error(status, "refused by the test")
        if self.invalid and self.invalid.encode() in raw:
            return self.error(422, "invalid")
        if self.claims and (force := request.query.get("force")):
            if force == "false":
                return self._conflict()
            self.claims.clear()
        for prefix, handler in self.handlers.items():
            if request.path.startswith(prefix):
                return await handler(request)
        if request.query.get("watch") == "true":
            return await self._watch(request)
        answer = self._answer(request.method, request.path, body)
        if answer.status < 300 and request.method != "GET":
            self.writes.append(recorded)
        return answer

    def put(self, path: str, item: Mapping[str, Any]) -> None:
        """Create or replace an object as another client does."""
        self._version += 1
        metadata = {**item.get("metadata", {}), "resourceVersion": str(self._version)}
        kind = "MODIFIED" if path in self.objects else "ADDED"
        self.objects[path] = {**item, "metadata": metadata}
        self._collections.add(path.rpartition("/")[0])
        self._notify(path, kind)

    def delete(self, path: str) -> dict[str, Any]:
        """Delete an object as another client does, and return it."""
        self._notify(path, "DELETED")
        return self.objects.pop(path)

    def _notify(self, path: str, kind: str) -> None:
        for collection, queue in self._watches:
            if path.startswith(f"{collection}/"):
                queue.put_nowait((kind, self.objects[path]))

    async def _watch(self, request: web.Request, collection: str = "") -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._watches.append((collection or request.path, queue))
        while True:
            kind, item = await queue.get()
            await response.write(msgspec.json.encode({"type": kind, "object": item}) + b"\n")

    @staticmethod
    def error(status: int, message: str) -> web.Response:
        """Return an error as the API server does: a Status object."""
        return web.json_response({"kind": "Status", "message": message, "code": status}, status=status)

    def _conflict(self) -> web.Response:
        causes = [
            {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}" using v1', "field": field}
            for manager, field in self.claims
        ]
        body = {"kind": "Status", "reason": "Conflict", "message": "m", "code": 409, "details": {"causes": causes}}
        return web.json_response(body, status=409)

    def _answer(self, method: str, path: str, body: Any) -> web.Response:
        path = path.removesuffix("/status")
        if method == "PATCH" and self.rivals:
            self.rivals -= 1
            self.put(path, self.objects[path])
        stored = self.objects.get(path)
        if method == "POST" and path.endswith("/token"):
            self.tokens += 1
            return web.json_response({"status": {"token": f"t{self.tokens}"}})
        if method == "POST":
            metadata = body["metadata"]
            self._version += 1
            name = metadata.get("name") or f"{metadata['generateName']}{self._version}"
            path, method, body = f"{path}/{name}", "PUT", {**body, "metadata": {**metadata, "name": name}}
            if path in self.objects:
                return self.error(409, f"{path} already exists")
        elif method == "GET" and stored is None:
            items = [item for key, item in sorted(self.objects.items()) if key.startswith(f"{path}/")]
            if items or path in self._collections:
                return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
        elif stored is not None and method in ("PUT", "PATCH"):
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, stored["metadata"].get("resourceVersion")):
                return self.error(409, f"{path} has been modified")
        if stored is None and method not in ("PUT", "PATCH"):
            body = {"kind": "Status", "reason": "NotFound", "code": 404, "details": {"name": path.rpartition("/")[2]}}
            return web.json_response({**body, "message": f"{path} not found"}, status=404)
        if method == "DELETE":
            return web.json_response(self.delete(path))
        if method in ("PUT", "PATCH"):
            self.put(path, merge(stored or {}, body) if method == "PATCH" else body)
        return web.json_response(self.objects[path])

    @asynccontextmanager
    async def client(self, timeout_s: float = 5) -> AsyncIterator[KubeClient]:
        """Serve, and yield a client of this server."""
        async with client_of(self, timeout_s=timeout_s) as client:
            yield client


def merge(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7386)."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merge(result.get(key) or {}, value)
        else:
            result[key] = value
    return result
