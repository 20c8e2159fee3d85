"""A fake API server for every test of a client: objects by path, scripted failures, and a record of all requests.

    server = FakeApiServer({"/api/v1/nodes/n1": {...}})
    server.refuse["/api/v1/nodes/n1"] = 409
    async with server.client() as client: ...

It implements GET, LIST (a path below which there are or were objects), WATCH (changes from its start on), POST, PUT with
optimistic concurrency, PATCH (merge, also for server-side apply), DELETE, and the token subresource of service accounts.
Handlers for other paths: `handlers[path]`.
"""

from __future__ import annotations

import asyncio
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


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve HTTP requests with the handler on a free port; yields the URL."""
    runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class FakeApiServer:
    """An API server in memory."""

    def __init__(self, objects: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.objects: dict[str, dict[str, Any]] = {path: dict(item) for path, item in (objects or {}).items()}
        self._collections = {path.rpartition("/")[0] for path in self.objects}
        self._watches: list[tuple[str, asyncio.Queue[tuple[str, Any]]]] = []
        self.refuse: dict[str, int] = {}
        """Status of the error for a path, before anything else."""
        self.handlers: dict[str, Handler] = {}
        """Handlers by path prefix, before the objects."""
        self.requests: list[RecordedRequest] = []
        self.tokens = 0
        """Number of tokens issued; the n-th one is `tn`."""
        self._version = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = msgspec.json.decode(raw) if raw else None
        self.requests.append(RecordedRequest(request.method, request.path, body))
        if (status := self.refuse.get(request.path)) is not None:
            return self.error(status, "refused by the test")
        for prefix, handler in self.handlers.items():
            if request.path.startswith(prefix):
                return await handler(request)
        if request.query.get("watch") == "true":
            return await self._watch(request)
        return self._answer(request.method, request.path, body)

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

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._watches.append((request.path, queue))
        while True:
            kind, item = await queue.get()
            await response.write(msgspec.json.encode({"type": kind, "object": item}) + b"\n")

    @staticmethod
    def error(status: int, message: str) -> web.Response:
        """Return an error as the API server does: a Status object."""
        return web.json_response({"kind": "Status", "message": message, "code": status}, status=status)

    def _answer(self, method: str, path: str, body: Any) -> web.Response:
        stored = self.objects.get(path)
        if method == "POST" and path.endswith("/token"):
            self.tokens += 1
            return web.json_response({"status": {"token": f"t{self.tokens}"}})
        if method == "POST":
            path, method = f"{path}/{body['metadata']['name']}", "PUT"
            if path in self.objects:
                return self.error(409, f"{path} already exists")
        elif method == "GET" and stored is None:
            items = [item for key, item in sorted(self.objects.items()) if key.startswith(f"{path}/")]
            if items or path in self._collections:
                return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
        elif stored is not None and method == "PUT":
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, stored["metadata"].get("resourceVersion")):
                return self.error(409, f"{path} has been modified")
        if stored is None and method not in ("PUT", "PATCH"):
            return self.error(404, f"{path} not found")
        if method == "DELETE":
            return web.json_response(self.delete(path))
        if method in ("PUT", "PATCH"):
            self.put(path, merge(stored or {}, body) if method == "PATCH" else body)
        return web.json_response(self.objects[path])

    @asynccontextmanager
    async def client(self, timeout_s: float = 5) -> AsyncIterator[KubeClient]:
        """Serve, and yield a client of this server."""
        async with (
            serving(self) as url,
            KubeClient(ApiAccess(url, ApiCredentials()), "test", timeout_s) as client,
        ):
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
