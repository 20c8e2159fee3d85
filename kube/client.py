"""Requests to the API server: get, list, create, patch, apply, delete, evict and watch.
Objects are named by key, `namespace/name` or the name alone. Existing objects are patched, never replaced, so
unknown fields survive; a patch with `metadata.resourceVersion` is a compare-and-swap. The only importer of aiohttp
in kube.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import aiohttp
import msgspec
from multidict import CIMultiDict

from api.interfaces import Unavailable
from kube.credentials import ApiAccess
from kube.errors import ApiError, ApiUnreachable, InvalidResponse, parse_api_error
from kube.objects import PartialObjectMetadata, ResourceType, T, key_of
from kube.watch import LineSplitter, WatchEvent, decode_object, parse_watch_event

PAGE_LIMIT = 500
REQUEST_TIMEOUT_S = 30.0
"""Of everything but watches."""
CONNECT_TIMEOUT_S = 10.0
WATCH_END_GRACE_S = 30.0
"""A watch that the server does not end when it was asked to is broken."""
PEER_TIMEOUT_S = 30
"""A peer that acknowledges nothing for so long is gone: else a watch of a machine that lost power waits for minutes."""
KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": PEER_TIMEOUT_S // 2, "TCP_KEEPALIVE": PEER_TIMEOUT_S // 2, "TCP_KEEPINTVL": PEER_TIMEOUT_S // 6, "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": PEER_TIMEOUT_S * 1000,
}  # fmt: skip
"""Options of a connection by the names that Linux and macOS have for them; those that a system lacks are left out."""
MAX_RESPONSE_BYTES = 256 << 20
MAX_ATTEMPTS = 4
MAX_RETRY_WAIT_S = 10.0
JSON_TYPE, MERGE_PATCH_TYPE, APPLY_PATCH_TYPE = (
    "application/json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
)
EVICTION_BODY = {"apiVersion": "policy/v1", "kind": "Eviction"}
DecodedT = TypeVar("DecodedT")
RequestBody = Mapping[str, Any] | Sequence[Any] | msgspec.Struct


CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, UnicodeError)
"""UnicodeError is of a host that is no name."""
PARTIAL_METADATA_ACCEPT = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1,application/json"
"""Objects of which only the metadata is wanted are not sent whole: a Node is 20 kB, most of it a list of images."""


class ListScope(msgspec.Struct, frozen=True, kw_only=True):
    """Which objects of a resource: of one namespace or of all, and by selectors in kubectl's syntax."""

    namespace: str = ""
    labels: str = ""
    fields: str = ""

    def query(self) -> dict[str, str]:
        return {name: text for name, text in (("labelSelector", self.labels), ("fieldSelector", self.fields)) if text}


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    """Everything at one version. Objects that do not fit their type are in `problems`, by key, with the reason."""

    resource_version: str
    objects: Mapping[str, T]
    problems: Mapping[str, str]


class RawResponse(msgspec.Struct, frozen=True):
    """An answer as it came, a refusal too: through the proxy it may be the API server's own, or that of whoever is behind."""

    status: int
    body: bytes
    content_type: str = ""


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _ObjectListPage(msgspec.Struct, frozen=True):
    metadata: _ListMeta = _ListMeta()
    items: list[msgspec.Raw] | None = None


class _Token(msgspec.Struct, frozen=True):
    token: str


class _TokenRequest(msgspec.Struct, frozen=True):
    status: _Token


class _ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    resource: str
    """For the counts."""
    query: Mapping[str, str] = {}
    accept: str = JSON_TYPE
    content_type: str = JSON_TYPE
    body: RequestBody | None = None
    headers: Mapping[str, str] = {}
    tries: int = MAX_ATTEMPTS


class KubeClient:
    """One API server. To be entered and left: `async with Client(access) as client`."""

    def __init__(self, access: ApiAccess, user_agent: str, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._access, self._agent, self._timeout_s = access, user_agent, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """By method, resource and status; `unreachable` where there was none."""

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket)
        # Neither proxies nor passwords of the environment: credentials go to the server that was named.
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: ResourceType[T], key: str) -> T:
        """Raises ApiError and Unreachable, as all of these do; its kind Garbage where the object does not fit its type."""
        return await self._object(
            resource,
            _ApiRequest(method="GET", path=resource.path(key), resource=resource.gvr, accept=_accept_header(resource)),
        )

    async def raw(
        self, path: str, of: str, headers: Mapping[str, str] | None = None, max_bytes: int = MAX_RESPONSE_BYTES
    ) -> RawResponse:
        """What is said at a path, such as that of the proxy to a pod; `of` is for the counts. Asked once. Raises Unreachable
        where there is no answer, or one of more than `most` bytes."""
        request = _ApiRequest(method="GET", path=path, resource=of, accept="*/*", headers=headers or {})
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._send(request, timeout) as answer:
                body = await _read_body(answer, max_bytes)
                self._count(request, str(answer.status))
        except CONNECTION_ERRORS as failed:
            raise self._unreachable(request, failed) from failed
        return RawResponse(answer.status, body, answer.headers.get("Content-Type", ""))

    async def token(self, account: str, lifetime_s: int) -> str:
        """A new token of a service account by its key; the API server gives none for less than ten minutes."""
        accounts = ResourceType("", "v1", "serviceaccounts", "ServiceAccount", PartialObjectMetadata, namespaced=True)
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": lifetime_s},
        }
        path = accounts.path(account, "token")
        request = _ApiRequest(method="POST", path=path, resource=f"{accounts.gvr}/token", body=body)
        return _decode_response(await self._answer(request), _TokenRequest).status.token

    async def list(self, resource: ResourceType[T], scope: ListScope | None = None) -> ObjectList[T]:
        """All objects, in pages. When the server forgets a page in between (410), everything in one answer."""
        scope = scope or ListScope()
        try:
            return await self._pages(resource, scope, PAGE_LIMIT)
        except ApiError as error:
            if not error.expired:
                raise
        return await self._pages(resource, scope, None)

    async def create(self, resource: ResourceType[T], body: RequestBody, namespace: str = "") -> T:
        """A conflict (409) means that it is there already."""
        return await self._object(
            resource, _ApiRequest(method="POST", path=resource.collection(namespace), resource=resource.gvr, body=body)
        )

    async def merge_patch(self, resource: ResourceType[T], key: str, patch: RequestBody, subresource: str = "") -> T:
        """RFC 7386: null removes a field, and lists are replaced whole."""
        path = resource.path(key, subresource)
        return await self._object(
            resource,
            _ApiRequest(method="PATCH", path=path, resource=resource.gvr, content_type=MERGE_PATCH_TYPE, body=patch),
        )

    async def apply(
        self,
        resource: ResourceType[T],
        key: str,
        body: Mapping[str, Any],
        manager: str,
        subresource: str = "",
        *,
        force: bool = True,
    ) -> T:
        """Server-side apply by this field manager, which takes over what others hold: its fields are its own. Without `force`
        it is a conflict (409) instead, whose `claims` say who holds what."""
        namespace, _, name = key.rpartition("/")
        named = {"name": name, **({"namespace": namespace} if namespace else {}), **body.get("metadata", {})}
        whole = {**body, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": named}
        query = {"fieldManager": manager, "force": str(force).lower()}
        path = resource.path(key, subresource)
        request = _ApiRequest(
            method="PATCH", path=path, resource=resource.gvr, query=query, content_type=APPLY_PATCH_TYPE, body=whole
        )
        return await self._object(resource, request)

    async def delete(
        self,
        resource: ResourceType[T],
        key: str,
        uid: str = "",
        grace_s: int | None = None,
        *,
        foreground: bool = False,
    ) -> None:
        """With `uid`, only that very object: a conflict (409) means that another has its name now. With `foreground` it is
        there until everything that it owns is gone."""
        options = _delete_options(uid, grace_s)
        if foreground:
            options["propagationPolicy"] = "Foreground"
        request = _ApiRequest(method="DELETE", path=resource.path(key), resource=resource.gvr, body=options)
        await self._answer(request)

    async def evict(self, pods: ResourceType[T], key: str, uid: str = "", grace_s: int | None = None) -> None:
        """Ask a pod to leave (policy/v1). ApiError 429 means that a disruption budget does not let it, and is not tried again
        here; 404 that it has gone, 409 that another pod has its name: then too a budget counts it as gone, for two minutes."""
        namespace, _, name = key.rpartition("/")
        body: dict[str, Any] = {**EVICTION_BODY, "metadata": {"name": name, "namespace": namespace}}
        if options := _delete_options(uid, grace_s):
            body["deleteOptions"] = options
        path = pods.path(key, "eviction")
        await self._answer(_ApiRequest(method="POST", path=path, resource=f"{pods.gvr}/eviction", body=body, tries=1))

    async def watch(
        self, resource: ResourceType[T], since: str, scope: ListScope | None = None, duration_s: int = 300
    ) -> AsyncIterator[WatchEvent[T]]:
        """Changes after that version until the server ends the watch. Raises ApiError, Unreachable and Garbage; then the caller
        goes on as `kube.watch.WatchPosition` says."""
        scope = scope or ListScope()
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(duration_s),
        }
        request = _ApiRequest(
            method="GET",
            path=resource.collection(scope.namespace),
            resource=f"{resource.gvr}/watch",
            query=query | scope.query(),
            accept=_accept_header(resource),
        )
        timeout = aiohttp.ClientTimeout(total=duration_s + WATCH_END_GRACE_S, sock_connect=CONNECT_TIMEOUT_S)
        lines = LineSplitter()
        try:
            async with self._send(request, timeout) as answer:
                self._count(request, str(answer.status))
                if answer.status != 200:
                    raise self._refusal(answer, await _read_body(answer, MAX_RESPONSE_BYTES))
                async for piece in answer.content.iter_any():
                    for line in lines.feed(piece):
                        yield parse_watch_event(line, resource)
        except CONNECTION_ERRORS as error:
            raise self._unreachable(request, error) from error

    async def _pages(self, resource: ResourceType[T], scope: ListScope, size: int | None) -> ObjectList[T]:
        objects: dict[str, T] = {}
        problems: dict[str, str] = {}
        query = scope.query() | ({} if size is None else {"limit": str(size)})
        while True:
            path = resource.collection(scope.namespace)
            request = _ApiRequest(
                method="GET", path=path, resource=resource.gvr, query=query, accept=_accept_header(resource, "List")
            )
            page = _decode_response(await self._answer(request), _ObjectListPage)
            for raw in page.items or ():
                known, problem = decode_object(raw, resource)
                key = key_of(
                    known.metadata if known is not None else _decode_response(raw, PartialObjectMetadata).metadata
                )
                if known is None:
                    problems[key] = problem
                else:
                    objects[key] = known
            if not page.metadata.continue_:
                return ObjectList(page.metadata.resource_version, objects, problems)
            query = query | {"continue": page.metadata.continue_}

    async def _object(self, resource: ResourceType[T], request: _ApiRequest) -> T:
        return _decode_response(await self._answer(request), resource.type)

    async def _answer(self, request: _ApiRequest) -> bytes:
        """The body of an answer that is not a refusal. Asks again where the server says when (429, 503), and once where it
        did not know us: a token may have been replaced a moment ago."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        for left in range(request.tries - 1, -1, -1):
            try:
                async with self._send(request, timeout) as answer:
                    body = await _read_body(answer, MAX_RESPONSE_BYTES)
                    self._count(request, str(answer.status))
                    if answer.status < 300:
                        return body
                    error = self._refusal(answer, body)
            except CONNECTION_ERRORS as failed:
                raise self._unreachable(request, failed) from failed
            if error.status == 401 and left == request.tries - 1 and left > 0:
                continue
            if left == 0 or error.retry_after_s is None or error.status not in (429, 503):
                raise error
            await asyncio.sleep(min(error.retry_after_s, MAX_RETRY_WAIT_S))
        raise AssertionError("unreachable")

    def _send(self, request: _ApiRequest, timeout: aiohttp.ClientTimeout) -> aiohttp.client._RequestContextManager:
        assert self._session is not None, "enter the client first"
        headers = CIMultiDict({**request.headers, "Accept": request.accept, "User-Agent": self._agent})
        try:
            context = self._access.context()
            headers.extend(self._access.headers)
            if token := self._access.token():
                headers["Authorization"] = f"Bearer {token}"
        except Unavailable as error:
            raise ApiUnreachable(f"no credentials: {error.reason}") from error
        data = None
        if request.body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(request.body), request.content_type
        url = self._access.server + request.path
        ssl_: ssl.SSLContext | bool = True if context is None else context
        return self._session.request(
            request.method, url, params=dict(request.query), data=data, headers=headers, timeout=timeout, ssl=ssl_,
            server_hostname=self._access.server_name, proxy=self._access.proxy, allow_redirects=False,
        )  # fmt: skip

    def _refusal(self, answer: aiohttp.ClientResponse, body: bytes) -> ApiError:
        if answer.status == 401:
            self._access.refused()
        return parse_api_error(answer.status, body, answer.headers)

    def _count(self, request: _ApiRequest, status: str) -> None:
        self.requests[request.method, request.resource, status] += 1

    def _unreachable(self, request: _ApiRequest, error: Exception) -> ApiUnreachable:
        self._count(request, "unreachable")
        said = str(error) or type(error).__name__
        return ApiUnreachable(f"{self._access.server}: {request.method} {request.path}: {said}")


def _accept_header(resource: ResourceType[T], of: str = "") -> str:
    return PARTIAL_METADATA_ACCEPT.format(of) if resource.type is PartialObjectMetadata else JSON_TYPE


def _decode_response(body: bytes | msgspec.Raw, kind: type[DecodedT]) -> DecodedT:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidResponse(f"not what was asked for: {bytes(body)[:80]!r}: {error}") from None


def _delete_options(uid: str, grace_s: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if uid:
        options["preconditions"] = {"uid": uid}
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    return options


async def _read_body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    pieces, size = [], 0
    async for piece in answer.content.iter_any():
        size += len(piece)
        if size > max_bytes:
            raise aiohttp.ClientPayloadError(f"more than {max_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _keepalive_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)  # noqa: FBT003 - the standard library's
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_OPTIONS.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
