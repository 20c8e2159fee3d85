"""Calls over Unix sockets, to a peer and from one: the only module that knows gRPC. Methods come from descriptors.

Nothing here waits without end: every call has a deadline, messages and calls at once are bounded. A socket of ours is in its
place only once it answers, in the stead of what a killed process left there, and never in that of one that is in use.
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

from agent.calls import CALLS
from api.ports import Unavailable

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message

log = logging.getLogger(__name__)
TIMEOUT_S = 10.0
"""What Katalyst and the kubelet grant each other for a call."""
CLOSE_S = 1.0
"""How long calls that are under way may go on when a server stops."""
MOST_BYTES = 16 << 20
"""Of one message, either way: a thousand pods with all their annotations have room."""
MOST_CALLS = 32
"""At once; more are told to come back."""
LONGEST_PATH = 107
"""Bytes of a socket's path (unix(7))."""
_TEXT = 300
"""Characters of what a peer says that are worth showing."""
_BUG = "this is a bug, see the log of dioptase"
_OK = grpc.StatusCode.OK
_OPTIONS = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
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
    grpc.StatusCode.RESOURCE_EXHAUSTED: f"ask less often, or for less: messages have at most {MOST_BYTES >> 20} MiB",
}

Handler = Callable[[Any, Mapping[str, str]], Awaitable["Message"] | AsyncIterator["Message"]]
"""Answers a request, with what the caller said beside it (metadata): once, or for a stream again and again."""


class NotOffered(Unavailable):
    """The peer answers, but does not know this method."""


class Refused(Unavailable):
    """The peer answers, and says no; `reason` ends with its words."""


class Refusal(Exception):
    """Raised by a handler: the caller's request cannot be fulfilled, and the text says which field or why."""


class Service(NamedTuple):
    """What a server offers: methods without a handler are unknown to callers."""

    descriptor: ServiceDescriptor
    handlers: Mapping[str, Handler]


class Peer:
    """Somebody who serves one service on a socket. Connects when it is called, and again when the peer comes back.

    To be made and used in a running event loop.
    """

    def __init__(
        self,
        path: Path,
        service: ServiceDescriptor,
        timeout_s: float = TIMEOUT_S,
        words: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self._service, self._timeout_s = path, service, timeout_s
        self._words = tuple((words or {}).items())
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)

    async def call(self, method: str, request: Message) -> Any:
        """The answer. Raises Unavailable where there is none in time, NotOffered and Refused as they say."""
        found = self._method(method)
        called = self._channel.unary_unary(_path(found), _serializer(found))
        try:
            answer = await called(request, timeout=self._timeout_s, metadata=self._words)
        except grpc.aio.AioRpcError as error:
            raise self._failed(method, error) from None
        understood = self._understood(found, answer)
        _count("made", found.full_name, _OK)
        return understood

    async def stream(self, method: str, request: Message) -> AsyncGenerator[Any, None]:
        """Answers as they come, until the peer ends it or the caller stops. Raises as `call` does.

        The time between two answers is the caller's to bound: a peer may have nothing to say for long.
        """
        found = self._method(method)
        called = self._channel.unary_stream(_path(found), _serializer(found))(request, metadata=self._words)
        try:
            async for answer in called:
                yield self._understood(found, answer)
            _count("made", found.full_name, _OK)
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
            _count("made", method.full_name, grpc.StatusCode.DATA_LOSS)
            reason = f"{self.path}: {self._service.name}.{method.name} was answered with garbage"
            raise Unavailable(reason, "see whether another service, or version of it, listens there") from None

    def _failed(self, method: str, error: Any) -> Unavailable:
        code, details = error.code(), str(error.details() or "")[:_TEXT]
        _count("made", self._method(method).full_name, code)
        who = f"{self.path}: {self._service.name}.{method}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return NotOffered(f"{who} is not offered", _REMEDIES[code])
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"{who} did not answer within {self._timeout_s:g} s", _REMEDIES[code])
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"{who}: nobody answers ({details})", _REMEDIES[code])
        if code in _REMEDIES:
            return Unavailable(f"{who}: {details}", _REMEDIES[code])
        return Refused(f"{who} failed: {details or code.name}", "see the log of the process that serves it")


class Server:
    """Services on one socket; `serve` makes one."""

    def __init__(self, path: Path, server: Any) -> None:
        self.path, self._server = path, server
        self._inode = path.stat().st_ino

    def intact(self) -> bool:
        """Whether the socket is still in its place: who cleans the directory, as a kubelet does when it starts, takes it."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    async def stop(self) -> None:
        """End calls that are under way within a second, and take the socket away if it is still ours. Idempotent."""
        if self.intact():
            self.path.unlink(missing_ok=True)
        await self._server.stop(CLOSE_S)


async def serve(path: Path, services: Sequence[Service]) -> Server:
    """Offer these services at `path`, whose directory is made where it is missing, to this user alone.

    Raises Unavailable where somebody else is served there, where no socket can be, or where the path is too long.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    if len(os.fsencode(hidden)) > LONGEST_PATH:
        raise Unavailable(
            f"{path} is longer than the path of a socket may be", f"keep it to {LONGEST_PATH - len(hidden.name)} bytes"
        )
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        await asyncio.to_thread(_make_room, path)
        hidden.unlink(missing_ok=True)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
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
    return Server(path, server)


def _make_room(path: Path) -> None:
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


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _serializer(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type).SerializeToString


def _handlers(service: Service) -> Any:
    made = {}
    for name, handler in service.handlers.items():
        method = service.descriptor.methods_by_name[name]
        codec = {
            "request_deserializer": GetMessageClass(method.input_type).FromString,
            "response_serializer": GetMessageClass(method.output_type).SerializeToString,
        }
        if method.server_streaming:
            made[name] = grpc.unary_stream_rpc_method_handler(_streaming(method.full_name, handler), **codec)
        else:
            made[name] = grpc.unary_unary_rpc_method_handler(_answering(method.full_name, handler), **codec)
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, made)


def _answering(name: str, handler: Handler) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        try:
            answered = handler(request, _said(context))
            assert inspect.isawaitable(answered)
            made = await answered
        except (Refusal, Unavailable) as error:
            await _refuse(context, name, error)
        except Exception as error:
            log.exception("%s failed", name)
            await _admit_bug(context, name, error)
        else:
            _count("served", name, _OK)
            return made

    return answer


def _streaming(name: str, handler: Handler) -> Any:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            stream = handler(request, _said(context))
            assert isinstance(stream, AsyncIterator)
            async for one in stream:
                yield one
            _count("served", name, _OK)
        except (Refusal, Unavailable) as error:
            await _refuse(context, name, error)
        except Exception as error:
            log.exception("%s failed", name)
            await _admit_bug(context, name, error)

    return answers


def _said(context: Any) -> Mapping[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


async def _refuse(context: Any, name: str, error: Refusal | Unavailable) -> None:
    text = error.reason if isinstance(error, Unavailable) else str(error)
    _count("served", name, grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text[:_TEXT])


async def _admit_bug(context: Any, name: str, error: Exception) -> None:
    _count("served", name, grpc.StatusCode.INTERNAL)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {_BUG}")


def _count(side: str, method: str, code: grpc.StatusCode) -> None:
    CALLS[side, method, code.name] += 1
