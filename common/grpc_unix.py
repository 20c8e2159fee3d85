"""gRPC client and server over Unix sockets; the only importer of grpc besides the OTLP exporter.
Every call has a deadline; message sizes and concurrent calls are bounded. A server creates its socket under a
temporary name and renames it once it answers; it replaces a stale socket, never one that is in use.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from api.interfaces import Unavailable
from common.grpc_calls import CALL_COUNTS

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 10.0
"""What Katalyst and the kubelet grant each other for a call."""
SERVER_STOP_GRACE_S = 1.0
"""How long calls that are under way may go on when a server stops."""
MAX_MESSAGE_BYTES = 16 << 20
"""Of one message, either way: a thousand pods with all their annotations have room."""
MAX_CONCURRENT_CALLS = 32
"""At once; more are told to come back."""
MAX_SOCKET_PATH_BYTES = 107
"""Bytes of a socket's path (unix(7))."""
_MAX_ERROR_LETTERS = 300
"""Characters of what a peer says that are worth showing."""
_INTERNAL_ERROR = "this is a bug, see the log of dioptase"
_OK = grpc.StatusCode.OK
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Servers written in Go refuse the path that would be said here.
    ("grpc.default_authority", "localhost"),
)
_REMEDIES = {
    grpc.StatusCode.UNAVAILABLE: "see that it runs and listens there",
    grpc.StatusCode.DEADLINE_EXCEEDED: "see why it hangs; it is asked again",
    grpc.StatusCode.UNIMPLEMENTED: "use a version of it that has this method",
    grpc.StatusCode.RESOURCE_EXHAUSTED: f"ask less often, or for less: messages have at most {MAX_MESSAGE_BYTES >> 20} MiB",
}

GrpcHandler = Callable[[Any, Mapping[str, str]], Awaitable["Message"] | AsyncIterator["Message"]]
"""Answers a request, with what the caller said beside it (metadata): once, or for a stream again and again."""


class MethodNotOffered(Unavailable):
    """The peer answers, but does not know this method."""


class CallRefused(Unavailable):
    """The peer answers, and says no; `reason` ends with its words."""


class HandlerRefusal(Exception):
    """Raised by a handler: the caller's request cannot be fulfilled, and the text says which field or why."""


class GrpcService(NamedTuple):
    """What a server offers: methods without a handler are unknown to callers."""

    descriptor: ServiceDescriptor
    handlers: Mapping[str, GrpcHandler]


class GrpcClient:
    """Somebody who serves one service on a socket. Connects when it is called, and again when the peer comes back.

    To be made and used in a running event loop.
    """

    def __init__(
        self,
        path: Path,
        service: ServiceDescriptor,
        timeout_s: float = CALL_TIMEOUT_S,
        words: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self._service, self._timeout_s = path, service, timeout_s
        self._words = tuple((words or {}).items())
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)

    async def call(self, method: str, request: Message) -> Any:
        """The answer. Raises Unavailable where there is none in time, NotOffered and Refused as they say."""
        found = self._method(method)
        called = self._channel.unary_unary(_method_path(found), _serializer(found))
        try:
            answer = await called(request, timeout=self._timeout_s, metadata=self._words)
        except grpc.aio.AioRpcError as error:
            raise self._failed(method, error) from None
        understood = self._understood(found, answer)
        _count_call("made", found.full_name, _OK)
        return understood

    async def stream(self, method: str, request: Message) -> AsyncGenerator[Any, None]:
        """Answers as they come, until the peer ends it or the caller stops. Raises as `call` does.

        The time between two answers is the caller's to bound: a peer may have nothing to say for long.
        """
        found = self._method(method)
        called = self._channel.unary_stream(_method_path(found), _serializer(found))(request, metadata=self._words)
        try:
            async for answer in called:
                yield self._understood(found, answer)
            _count_call("made", found.full_name, _OK)
        except grpc.aio.AioRpcError as error:
            raise self._failed(method, error) from None
        finally:
            called.cancel()

    async def close(self) -> None:
        """Idempotent."""
        await self._channel.close()

    def _method(self, name: str) -> MethodDescriptor:
        return self._service.methods_by_name[name]

    def _understood(self, method: MethodDescriptor, answer: bytes) -> Any:
        # Not left to gRPC, which hands over None for such bytes, and writes to the log each time.
        try:
            return GetMessageClass(method.output_type).FromString(answer)
        except DecodeError:
            _count_call("made", method.full_name, grpc.StatusCode.DATA_LOSS)
            reason = f"{self.path}: {self._service.name}.{method.name} was answered with garbage"
            raise Unavailable(reason, "see whether another service, or version of it, listens there") from None

    def _failed(self, method: str, error: Any) -> Unavailable:
        code, details = error.code(), str(error.details() or "")[:_MAX_ERROR_LETTERS]
        _count_call("made", self._method(method).full_name, code)
        who = f"{self.path}: {self._service.name}.{method}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return MethodNotOffered(f"{who} is not offered", _REMEDIES[code])
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"{who} did not answer within {self._timeout_s:g} s", _REMEDIES[code])
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"{who}: nobody answers ({details})", _REMEDIES[code])
        if code in _REMEDIES:
            return Unavailable(f"{who}: {details}", _REMEDIES[code])
        return CallRefused(f"{who} failed: {details or code.name}", "see the log of the process that serves it")


class GrpcServer:
    """Services on one socket; `serve` makes one."""

    def __init__(self, path: Path, server: Any) -> None:
        self.path, self._server = path, server
        self._inode = path.stat().st_ino

    def is_socket_in_place(self) -> bool:
        """Whether the socket is still in its place: who cleans the directory, as a kubelet does when it starts, takes it."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    async def stop(self) -> None:
        """End calls that are under way within a second, and take the socket away if it is still ours. Idempotent."""
        if self.is_socket_in_place():
            self.path.unlink(missing_ok=True)
        await self._server.stop(SERVER_STOP_GRACE_S)


async def serve_on_socket(path: Path, services: Sequence[GrpcService]) -> GrpcServer:
    """Offer these services at `path`, whose directory is made where it is missing, to this user alone.

    Raises Unavailable where somebody else is served there, where no socket can be, or where the path is too long.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    if len(os.fsencode(hidden)) > MAX_SOCKET_PATH_BYTES:
        raise Unavailable(
            f"{path} is longer than the path of a socket may be",
            f"keep it to {MAX_SOCKET_PATH_BYTES - len(hidden.name)} bytes",
        )
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        await asyncio.to_thread(_remove_stale_socket, path)
        hidden.unlink(missing_ok=True)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        for service in services:
            server.add_generic_rpc_handlers((_handlers(service),))
        server.add_insecure_port(f"unix:{hidden}")
        await server.start()
        try:
            hidden.chmod(0o600)
            hidden.replace(path)
        except OSError:
            await server.stop(0)
            raise
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"{path} cannot be served: {error}", "see who may write to its directory") from None
    return GrpcServer(path, server)


def _remove_stale_socket(path: Path) -> None:
    """See that what is at the path, if anything is, is a socket that nobody listens to."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise Unavailable(f"{path} is no socket", "move it away, or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("%s was left by a process that is gone; it is taken over", path)
            return
        except TimeoutError:
            pass  # somebody listens who does not even accept
        except FileNotFoundError:
            return
    raise Unavailable(f"{path} is served by another process", "stop that one, or choose another path")


def _method_path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _serializer(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type).SerializeToString


def _handlers(service: GrpcService) -> Any:
    made = {}
    for name, handler in service.handlers.items():
        method = service.descriptor.methods_by_name[name]
        codec = {
            "request_deserializer": GetMessageClass(method.input_type).FromString,
            "response_serializer": GetMessageClass(method.output_type).SerializeToString,
        }
        if method.server_streaming:
            made[name] = grpc.unary_stream_rpc_method_handler(_stream_handler(method.full_name, handler), **codec)
        else:
            made[name] = grpc.unary_unary_rpc_method_handler(_unary_handler(method.full_name, handler), **codec)
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, made)


def _unary_handler(name: str, handler: GrpcHandler) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        try:
            answered = handler(request, _metadata_of(context))
            assert inspect.isawaitable(answered)
            made = await answered
        except (HandlerRefusal, Unavailable) as error:
            await _abort_refused(context, name, error)
        except Exception as error:
            log.exception("%s failed", name)
            await _abort_internal(context, name, error)
        else:
            _count_call("served", name, _OK)
            return made

    return answer


def _stream_handler(name: str, handler: GrpcHandler) -> Any:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            stream = handler(request, _metadata_of(context))
            assert isinstance(stream, AsyncIterator)
            async for one in stream:
                yield one
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
