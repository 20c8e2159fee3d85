"""Requests to the API server: get, list, create, patch, apply, delete, evict, bind and watch.
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
from api.text import quote
from kube.credentials import ApiAccess
from kube.errors import ApiError, ApiUnreachable, InvalidResponse, parse_api_error
from kube.objects import PartialObjectMetadata, ResourceType, T, key_of
from kube.watch import LineSplitter, WatchEvent, decode_object, parse_watch_event

PAGE_LIMIT = 500
REQUEST_TIMEOUT_S = 30.0
"""Limit for every request but watches."""
CONNECT_TIMEOUT_S = 10.0
WATCH_END_GRACE_S = 30.0
"""Time after which a watch that the server should have ended counts as broken."""
PEER_TIMEOUT_S = 30
"""Limit for unacknowledged data. Without it, a watch of a server that lost power would wait for minutes."""
KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": PEER_TIMEOUT_S // 2,
    "TCP_KEEPALIVE": PEER_TIMEOUT_S // 2,
    "TCP_KEEPINTVL": PEER_TIMEOUT_S // 6,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": PEER_TIMEOUT_S * 1000,
}
"""Socket options by their names on Linux and macOS; names that the system lacks are skipped."""
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
"""UnicodeError: the host is not a valid name."""
PARTIAL_METADATA_ACCEPT = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1,application/json"
"""Requests only the metadata: a Node is 20 kB, most of it a list of images."""


class ListScope(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of a resource to list: a namespace or all, and selectors in kubectl's syntax."""

    namespace: str = ""
    labels: str = ""
    fields: str = ""

    def query(self) -> dict[str, str]:
        return {name: text for name, text in (("labelSelector", self.labels), ("fieldSelector", self.fields)) if text}


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    """Objects of a resource at one version. Those that do not match their type are in `problems`, by key, with the reason."""

    resource_version: str
    objects: Mapping[str, T]
    problems: Mapping[str, str]


class RawResponse(msgspec.Struct, frozen=True):
    """Response as received, errors included; through the proxy it is the API server's or that of the server behind it."""

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
    """Resource name in the request counts."""
    query: Mapping[str, str] = {}
    accept: str = JSON_TYPE
    content_type: str = JSON_TYPE
    body: RequestBody | None = None
    headers: Mapping[str, str] = {}
    attempts: int = MAX_ATTEMPTS


class KubeClient:
    """Client of one API server, used as `async with KubeClient(access, user_agent) as client`."""

    def __init__(self, access: ApiAccess, user_agent: str, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._access, self._agent, self._timeout_s = access, user_agent, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """Number of requests by method, resource and status, `unreachable` without a response."""

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket)
        # Proxies and passwords of the environment are not used: credentials go to the configured server only.
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: ResourceType[T], key: str) -> T:
        """Get an object. Like all methods, raises ApiError and ApiUnreachable (InvalidResponse if the type does not match)."""
        return await self._object(
            resource,
            _ApiRequest(method="GET", path=resource.path(key), resource=resource.gvr, accept=_accept_header(resource)),
        )

    async def raw(
        self, path: str, of: str, headers: Mapping[str, str] | None = None, max_bytes: int = MAX_RESPONSE_BYTES
    ) -> RawResponse:
        """Get a path once, such as that of the proxy to a pod; `of` is its name in the request counts.

        Raises ApiUnreachable without a response, or if it has more than `max_bytes` bytes.
        """
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
        """Create a token of the service account with this key; the API server's minimum lifetime is ten minutes."""
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
        """List all objects in pages; if a page expires on the server (410), list them in one response."""
        scope = scope or ListScope()
        try:
            return await self._pages(resource, scope, PAGE_LIMIT)
        except ApiError as error:
            if not error.expired:
                raise
        return await self._pages(resource, scope, None)

    async def create(self, resource: ResourceType[T], body: RequestBody, namespace: str = "") -> T:
        """Create an object; a conflict (409) means that it exists."""
        return await self._object(
            resource, _ApiRequest(method="POST", path=resource.collection(namespace), resource=resource.gvr, body=body)
        )

    async def merge_patch(self, resource: ResourceType[T], key: str, patch: RequestBody, subresource: str = "") -> T:
        """Patch an object by RFC 7386: null removes a field, lists are replaced as a whole."""
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
        """Server-side apply as this field manager, which takes over fields of other managers.

        Without `force`, such fields are a conflict (409) and listed in the error's `claims`.
        """
        namespace, _, name = key.rpartition("/")
        metadata = {"name": name, **({"namespace": namespace} if namespace else {}), **body.get("metadata", {})}
        object_ = {**body, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
        query = {"fieldManager": manager, "force": str(force).lower()}
        path = resource.path(key, subresource)
        request = _ApiRequest(
            method="PATCH", path=path, resource=resource.gvr, query=query, content_type=APPLY_PATCH_TYPE, body=object_
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
        """Delete an object. With `uid`, a conflict (409) means that another object has its name now.

        With `foreground`, the object exists until everything that it owns has been deleted.
        """
        options = _delete_options(uid, grace_s)
        if foreground:
            options["propagationPolicy"] = "Foreground"
        request = _ApiRequest(method="DELETE", path=resource.path(key), resource=resource.gvr, body=options)
        await self._answer(request)

    async def evict(self, pods: ResourceType[T], key: str, uid: str = "", grace_s: int | None = None) -> None:
        """Evict a pod (policy/v1).

        ApiError 429 means that a disruption budget does not allow it; it is not retried here. 404: the pod does not exist;
        409: another pod has its name. In these cases too, a budget counts the pod as evicted for two minutes.
        """
        namespace, _, name = key.rpartition("/")
        body: dict[str, Any] = {**EVICTION_BODY, "metadata": {"name": name, "namespace": namespace}}
        if options := _delete_options(uid, grace_s):
            body["deleteOptions"] = options
        path = pods.path(key, "eviction")
        request = _ApiRequest(method="POST", path=path, resource=f"{pods.gvr}/eviction", body=body, attempts=1)
        await self._answer(request)

    async def bind(
        self, pods: ResourceType[T], key: str, uid: str, node: str, annotations: Mapping[str, str] | None = None
    ) -> None:
        """Bind a pod to a node. ApiError 409: the pod is bound already, or another pod has its name (another `uid`).

        After ApiUnreachable the pod may be bound; read it before anything else. The API server adds the annotations of a
        Binding to the pod in the same write (pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata).
        """
        namespace, _, name = key.rpartition("/")
        metadata = {"name": name, "namespace": namespace, "uid": uid, "annotations": dict(annotations or {})}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        path = pods.path(key, "binding")
        request = _ApiRequest(method="POST", path=path, resource=f"{pods.gvr}/binding", body=body)
        await self._answer(request)

    async def watch(
        self, resource: ResourceType[T], since: str, scope: ListScope | None = None, duration_s: int = 300
    ) -> AsyncIterator[WatchEvent[T]]:
        """Yield changes after a version until the server ends the watch.

        Raises ApiError, ApiUnreachable and InvalidResponse; `kube.watch.WatchPosition` determines how to continue.
        """
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
                object_, problem = decode_object(raw, resource)
                if object_ is None:
                    problems[key_of(_decode_response(raw, PartialObjectMetadata).metadata)] = problem
                else:
                    objects[key_of(object_.metadata)] = object_
            if not page.metadata.continue_:
                return ObjectList(page.metadata.resource_version, objects, problems)
            query = query | {"continue": page.metadata.continue_}

    async def _object(self, resource: ResourceType[T], request: _ApiRequest) -> T:
        return _decode_response(await self._answer(request), resource.type)

    async def _answer(self, request: _ApiRequest) -> bytes:
        """Return the body of a successful response.

        Retries when the server says so (429, 503), and once after 401, because the token may just have been rotated.
        """
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        for left in range(request.attempts - 1, -1, -1):
            try:
                async with self._send(request, timeout) as answer:
                    body = await _read_body(answer, MAX_RESPONSE_BYTES)
                    self._count(request, str(answer.status))
                    if answer.status < 300:
                        return body
                    error = self._refusal(answer, body)
            except CONNECTION_ERRORS as failed:
                raise self._unreachable(request, failed) from failed
            if error.status == 401 and left == request.attempts - 1 and left > 0:
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
        return ApiUnreachable(
            f"{self._access.server}: {request.method} {request.path}: {str(error) or type(error).__name__}"
        )


def _accept_header(resource: ResourceType[T], of: str = "") -> str:
    return PARTIAL_METADATA_ACCEPT.format(of) if resource.type is PartialObjectMetadata else JSON_TYPE


def _decode_response(body: bytes | msgspec.Raw, kind: type[DecodedT]) -> DecodedT:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidResponse(f"unexpected response: {quote(bytes(body))}: {error}") from None


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
    created = socket.socket(family, kind, protocol)
    created.setblocking(False)  # noqa: FBT003 - the standard library's signature
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_OPTIONS.items():
        if hasattr(socket, name):
            created.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return created
