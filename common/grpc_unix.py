"""Client and server for gRPC over Unix sockets; the only importer of grpc besides the OTLP exporter.
Every call has a deadline; message sizes and concurrent calls are bounded. A server creates its socket under a
temporary name and renames it once it answers; it replaces a stale socket, but not one in use.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from api.interfaces import Unavailable
from common.grpc_calls import CALL_COUNTS
from common.socket_trust import SocketIdentity, check_listener, check_socket, check_socket_directory

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 10.0
"""Timeout that Katalyst and the kubelet use for calls."""
SERVER_STOP_GRACE_S = 1.0
"""Time that active calls may continue when a server stops."""
MAX_MESSAGE_BYTES = 16 << 20
"""Limit for one message in either direction, sufficient for a thousand pods with their annotations."""
MAX_CONCURRENT_CALLS = 32
"""Limit of concurrent calls; further calls fail with RESOURCE_EXHAUSTED."""
MAX_SOCKET_PATH_BYTES = 107
"""Limit of a socket's path in bytes (unix(7))."""
_MAX_ERROR_LETTERS = 300
"""Number of characters of a peer's error message that are shown."""
_INTERNAL_ERROR = "this is a bug, see the log of dioptase"
_OK = grpc.StatusCode.OK
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # gRPC would send the socket's path as authority, which servers written in Go reject.
    ("grpc.default_authority", "localhost"),
)
_REMEDIES = {
    grpc.StatusCode.UNAVAILABLE: "check that it runs and listens there",
    grpc.StatusCode.DEADLINE_EXCEEDED: "check why it hangs; the call is repeated",
    grpc.StatusCode.UNIMPLEMENTED: "use a version of it that has this method",
    grpc.StatusCode.RESOURCE_EXHAUSTED: f"send fewer or smaller requests: messages have at most {MAX_MESSAGE_BYTES >> 20} MiB",
}

GrpcHandler = Callable[[Any, Mapping[str, str]], Awaitable["Message"] | AsyncIterator["Message"]]
"""Handles a request and its metadata: returns one response, or yields responses for a stream."""


class MethodNotOffered(Unavailable):
    """The peer does not implement this method."""


class CallRefused(Unavailable):
    """The peer rejected the call; `reason` ends with its message."""


class HandlerRefusal(Exception):
    """Raised by a handler to reject a request; the text is sent to the caller."""


class GrpcService(NamedTuple):
    """Service of a server; methods without a handler are unimplemented."""

    descriptor: ServiceDescriptor
    handlers: Mapping[str, GrpcHandler]


class GrpcClient:
    """Client of one service on a socket. Connects on the first call, and again when the peer restarts.

    Create and use it in a running event loop.
    """

    def __init__(
        self,
        path: Path,
        service: ServiceDescriptor,
        timeout_s: float = CALL_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
        trusted_uids: Collection[int] | None = None,
    ) -> None:
        """`trusted_uids` are users besides root and the agent's own whose process may serve the socket; None for a
        peer that the settings cannot name."""
        self.path, self._service, self._timeout_s = path, service, timeout_s
        self._trusted_uids = trusted_uids
        self._checked: SocketIdentity | None = None
        self._metadata = tuple((metadata or {}).items())
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)

    async def call(self, method: str, request: Message) -> Any:
        """Return the response. Raises Unavailable if there is none in time, or its subclass for a rejected call."""
        descriptor = self._method(method)
        self._check_trust(descriptor)
        unary = self._channel.unary_unary(_method_path(descriptor), _serializer(descriptor))
        try:
            answer = await unary(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failed(method, error) from None
        response = self._decode(descriptor, answer)
        _count_call("made", descriptor.full_name, _OK)
        return response

    async def stream(self, method: str, request: Message) -> AsyncGenerator[Any, None]:
        """Yield responses until the peer or the caller ends the stream. Raises as `call` does.

        The caller has to bound the time between two responses: a healthy peer may send nothing for long.
        """
        descriptor = self._method(method)
        self._check_trust(descriptor)
        stream = self._channel.unary_stream(_method_path(descriptor), _serializer(descriptor))
        responses = stream(request, metadata=self._metadata)
        try:
            async for answer in responses:
                yield self._decode(descriptor, answer)
            _count_call("made", descriptor.full_name, _OK)
        except grpc.aio.AioRpcError as error:
            raise self._failed(method, error) from None
        finally:
            responses.cancel()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._channel.close()

    def _check_trust(self, method: MethodDescriptor) -> None:
        """Raise Unavailable if another user could serve the socket. Files are checked at each call, the listening process
        once for each file: no other process can listen on the same one."""
        try:
            identity = check_socket(self.path, self._trusted_uids)
            if identity != self._checked:
                check_listener(self.path, self._trusted_uids)
                self._checked = identity
        except BlockingIOError:
            # The process may be of another user, which keeps its backlog full until the check is over.
            raise Unavailable(
                f"{self.path} is not trusted yet: its process accepts no connections, so that its user is unknown",
                "check why it hangs; the call is repeated",
            ) from None
        except OSError as error:
            # Without a check there is no call: another user could make the socket, or its directory, between the two.
            _count_call("made", method.full_name, grpc.StatusCode.UNAVAILABLE)
            call, reason = f"{self.path}: {self._service.name}.{method.name}", error.strerror or "it cannot be reached"
            raise Unavailable(f"{call}: no server answers ({reason})", _REMEDIES[grpc.StatusCode.UNAVAILABLE]) from None

    def _method(self, name: str) -> MethodDescriptor:
        return self._service.methods_by_name[name]

    def _decode(self, method: MethodDescriptor, answer: bytes) -> Any:
        # Decoded here because gRPC returns None for invalid bytes and logs each of them.
        try:
            return GetMessageClass(method.output_type).FromString(answer)
        except DecodeError:
            _count_call("made", method.full_name, grpc.StatusCode.DATA_LOSS)
            reason = f"{self.path}: the response of {self._service.name}.{method.name} cannot be decoded"
            raise Unavailable(reason, "check whether another service, or version of it, listens there") from None

    def _failed(self, method: str, error: Any) -> Unavailable:
        code, details = error.code(), str(error.details() or "")[:_MAX_ERROR_LETTERS]
        _count_call("made", self._method(method).full_name, code)
        call = f"{self.path}: {self._service.name}.{method}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return MethodNotOffered(f"{call} is not offered", _REMEDIES[code])
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"{call} did not answer within {self._timeout_s:g} s", _REMEDIES[code])
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"{call}: no server answers ({details})", _REMEDIES[code])
        if code in _REMEDIES:
            return Unavailable(f"{call}: {details}", _REMEDIES[code])
        return CallRefused(f"{call} failed: {details or code.name}", "see the log of the process that serves it")


class GrpcServer:
    """Running server on one socket, created by `serve_on_socket`."""

    def __init__(self, path: Path, server: Any) -> None:
        self.path, self._server = path, server
        self._inode = path.stat().st_ino

    def is_socket_in_place(self) -> bool:
        """Whether the socket file is still this server's. The kubelet removes all sockets of its directory when it starts."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    async def stop(self) -> None:
        """End active calls within a second and remove the socket file if it is still this server's. Idempotent."""
        if self.is_socket_in_place():
            self.path.unlink(missing_ok=True)
        await self._server.stop(SERVER_STOP_GRACE_S)


async def serve_on_socket(path: Path, services: Sequence[GrpcService]) -> GrpcServer:
    """Serve on a socket that only this user can access; create its directory if it is missing.

    Raises Unavailable if another process serves there, if another user can write the directory, if the socket cannot be
    created, or if the path is too long.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if len(os.fsencode(temporary)) > MAX_SOCKET_PATH_BYTES:
        raise Unavailable(
            f"{path} is longer than a socket path may be",
            f"shorten it to {MAX_SOCKET_PATH_BYTES - len(temporary.name)} bytes",
        )
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Another user that could replace the socket would answer in the agent's place.
        check_socket_directory(path.parent)
        await asyncio.to_thread(_remove_stale_socket, path)
        temporary.unlink(missing_ok=True)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        for service in services:
            server.add_generic_rpc_handlers((_handlers(service),))
        server.add_insecure_port(f"unix:{temporary}")
        await server.start()
        try:
            temporary.chmod(0o600)
            temporary.replace(path)
        except OSError:
            await server.stop(0)
            raise
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"{path} cannot be served: {error}", "check the permissions of its directory") from None
    return GrpcServer(path, server)


def _remove_stale_socket(path: Path) -> None:
    """Raise Unavailable unless the path is free or a socket without a listening process."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise Unavailable(f"{path} is not a socket", "move it away, or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("%s was left behind by a terminated process and is replaced", path)
            return
        except TimeoutError:
            pass  # a process listens, but does not accept
        except FileNotFoundError:
            return
    raise Unavailable(f"{path} is served by another process", "stop that process, or choose another path")


def _method_path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _serializer(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type).SerializeToString


def _handlers(service: GrpcService) -> Any:
    method_handlers = {}
    for name, handler in service.handlers.items():
        method = service.descriptor.methods_by_name[name]
        codec = {
            "request_deserializer": GetMessageClass(method.input_type).FromString,
            "response_serializer": GetMessageClass(method.output_type).SerializeToString,
        }
        if method.server_streaming:
            method_handlers[name] = grpc.unary_stream_rpc_method_handler(
                _stream_handler(method.full_name, handler), **codec
            )
        else:
            method_handlers[name] = grpc.unary_unary_rpc_method_handler(
                _unary_handler(method.full_name, handler), **codec
            )
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, method_handlers)


def _unary_handler(name: str, handler: GrpcHandler) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        try:
            pending = handler(request, _metadata_of(context))
            assert inspect.isawaitable(pending)
            response = await pending
        except (HandlerRefusal, Unavailable) as error:
            await _abort_refused(context, name, error)
        except Exception as error:
            log.exception("%s failed", name)
            await _abort_internal(context, name, error)
        else:
            _count_call("served", name, _OK)
            return response

    return answer


def _stream_handler(name: str, handler: GrpcHandler) -> Any:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            stream = handler(request, _metadata_of(context))
            assert isinstance(stream, AsyncIterator)
            async for response in stream:
                yield response
            _count_call("served", name, _OK)
        except (HandlerRefusal, Unavailable) as error:
            await _abort_refused(context, name, error)
        except Exception as error:
            log.exception("%s failed", name)
            await _abort_internal(context, name, error)

    return answers


def _metadata_of(context: Any) -> Mapping[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


async def _abort_refused(context: Any, name: str, error: HandlerRefusal | Unavailable) -> None:
    text = error.reason if isinstance(error, Unavailable) else str(error)
    _count_call("served", name, grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text[:_MAX_ERROR_LETTERS])


async def _abort_internal(context: Any, name: str, error: Exception) -> None:
    _count_call("served", name, grpc.StatusCode.INTERNAL)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {_INTERNAL_ERROR}")


def _count_call(side: str, method: str, code: grpc.StatusCode) -> None:
    CALL_COUNTS[side, method, code.name] += 1
