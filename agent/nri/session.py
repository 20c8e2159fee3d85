"""One ttrpc connection to the runtime's NRI socket with calls in both directions.
A handler that fails answers with nothing, because an error would keep the container from being created.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from agent.nri.frames import (
    PLUGIN_CONVERSATION,
    RUNTIME_CONVERSATION,
    FrameReader,
    MessageKind,
    NriMessage,
    NriProtocolError,
    encode_frame,
)
from api.interfaces import Unavailable
from api.proto import nri_pb2 as wire
from api.proto import ttrpc_pb2 as rpc
from api.units import NS_PER_S
from common.socket_trust import check_peer, check_socket

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16
UNIMPLEMENTED, INVALID_ARGUMENT = 12, 3
"""Status codes of gRPC, which ttrpc shares."""
_MAX_ERROR_CHARS = 300
_PLUGIN = wire.DESCRIPTOR.services_by_name["Plugin"]
_RUNTIME = wire.DESCRIPTOR.services_by_name["Runtime"]
_REQUESTS = {method.name: getattr(wire, method.input_type.name) for method in _PLUGIN.methods}
_ANSWERS = {method.name: getattr(wire, method.output_type.name) for method in _RUNTIME.methods}
Handler = Callable[[Any], Awaitable[Any] | Any]
"""Maps an NRI request to its response."""


class NriSession:
    """An open connection; `run` answers the runtime's requests while `call` sends requests to it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler],
        timeout_s: float,
    ) -> None:
        self._reader, self._writer, self._handlers, self._timeout_s = reader, writer, handlers, timeout_s
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._next = 1
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Dispatch requests to handlers until the runtime closes the connection. Raises NriProtocolError and OSError."""
        frames = FrameReader()
        try:
            while data := await self._reader.read(READ_BYTES):
                for message in frames.feed(data):
                    self._dispatch(message)
        finally:
            for task in self._answering:
                task.cancel()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the runtime closed the connection", "see the log of the runtime"))
            self._writer.close()

    async def call(self, method: str, request: Any) -> Any:
        """Return the runtime's response. Raises Unavailable on timeout or refusal, and NriProtocolError for an invalid
        response."""
        number, self._next = self._next, self._next + 2
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = rpc.Request(
            service=_RUNTIME.full_name,
            method=method,
            payload=request.SerializeToString(),
            timeout_nano=round(self._timeout_s * NS_PER_S),
        )
        try:
            self._send(NriMessage(RUNTIME_CONVERSATION, number, MessageKind.REQUEST, message.SerializeToString()))
            async with asyncio.timeout(self._timeout_s):
                response = _decode_message(rpc.Response, await future, method)
            if response.status.code:
                raise Unavailable(
                    f"the runtime refused {method}: {response.status.message[:_MAX_ERROR_CHARS]}",
                    "see the runtime's log",
                )
            return _decode_message(_ANSWERS[method], response.payload, method)
        except TimeoutError:
            raise Unavailable(
                f"the runtime did not answer {method} within {self._timeout_s:g} s", "see the log of the runtime"
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        self._writer.close()

    def _dispatch(self, message: NriMessage) -> None:
        if message.conversation == RUNTIME_CONVERSATION and message.kind is MessageKind.RESPONSE:
            future = self._waiting.get(message.call)
            # A response after the timeout has no future any more.
            if future is not None and not future.done():
                future.set_result(message.data)
        elif message.conversation == PLUGIN_CONVERSATION and message.kind is MessageKind.REQUEST:
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, message: NriMessage) -> None:
        response = await self._handle(message.data)
        self._send(NriMessage(PLUGIN_CONVERSATION, message.call, MessageKind.RESPONSE, response.SerializeToString()))

    async def _handle(self, data: bytes) -> rpc.Response:
        try:
            request = rpc.Request.FromString(data)
            handler = self._handlers.get(request.method) if request.service == _PLUGIN.full_name else None
            if handler is None:
                return _error_response(UNIMPLEMENTED, f"{request.service}.{request.method} is not offered")
            body = _REQUESTS[request.method].FromString(request.payload)
        except Exception as error:  # noqa: BLE001 - protobuf's DecodeError depends on its implementation
            return _error_response(INVALID_ARGUMENT, f"invalid request: {error}")
        try:
            response = handler(body)
            if inspect.isawaitable(response):
                response = await response
            return rpc.Response(payload=response.SerializeToString())
        except Exception:
            # An error response would make the runtime fail the container: an empty response leaves it unchanged.
            log.exception("NRI: %s failed; an empty response was sent", request.method)
            return rpc.Response()

    def _send(self, message: NriMessage) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))


async def connect_nri(socket: Path, handlers: Mapping[str, Handler], timeout_s: float) -> NriSession:
    """Connect to the socket. Raises Unavailable."""
    try:
        check_socket(socket)
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(socket)
    except (OSError, TimeoutError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no process accepts connections"
        raise Unavailable(
            f"{socket}: {reason}", "check that the container runtime runs and has NRI enabled (containerd 2 has)"
        ) from None
    try:
        check_peer(writer.get_extra_info("socket"), socket)
    except Unavailable:
        writer.close()
        raise
    return NriSession(reader, writer, handlers, timeout_s)


def _decode_message(kind: Any, data: bytes, method: str) -> Any:
    try:
        return kind.FromString(data)
    except Exception as error:  # noqa: BLE001 - as above
        raise NriProtocolError(f"the response to {method} cannot be decoded: {error}") from None


def _error_response(code: int, text: str) -> rpc.Response:
    return rpc.Response(status=rpc.Status(code=code, message=text[:_MAX_ERROR_CHARS]))
