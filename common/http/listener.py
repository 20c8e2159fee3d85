"""Listening port, plain or TLS, with a bounded number of connections and reload of certificates.
At the limit, the connection that has been idle for the longest is closed, including those in the TLS handshake. A
request with a body is refused before anything else: reading one is work that an unauthenticated client could cause.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError

from api.interfaces import Unavailable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""More than scrapers, pages and terminals of a node keep, and far fewer descriptors than an agent may have."""
KEEPALIVE_S = 75.0
"""Longer than readers pause between two requests; aiohttp's own hour would let idle ones hold their place."""
TLS_HANDSHAKE_TIMEOUT_S = 10.0
BACKLOG = 100
TCP_USER_TIMEOUT_S = 10.0
"""A reader that takes nothing of an answer for so long is gone. The kernel watches, and then ends the connection."""
MAX_WRITE_BUFFER_BYTES = 64 << 10
"""What waits in memory for one reader before more is made; TLS would let half a MiB wait."""
ACCEPT_RETRY_S = 1.0
"""After a connection could not be taken for want of descriptors or memory."""
EVICTION_LOG_INTERVAL_S = 60.0
CLIENT_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpListener:
    """The sockets of one HOST:PORT, their connections, and the application behind them."""

    def __init__(self, app: web.Application, **limits: Any) -> None:
        """`limits` are aiohttp's, of a request."""
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.5,
            keepalive_timeout=KEEPALIVE_S,
            logger=_server_logger(),
            auto_decompress=False,
            lingering_time=0,
            **limits,
        )
        self._tls: ssl.SSLContext | None = None
        self._sockets: list[socket.socket] = []
        self._taken: OrderedDict[web.RequestHandler, asyncio.Task[None]] = OrderedDict()
        """By what handles it, with the task that brings it there; the one that asked longest ago comes first."""
        self._pushed_out = 0
        self._silent_until = 0.0

    async def open(self, host: str, port: int, option: str, tls: ssl.SSLContext | None = None) -> list[tuple[str, int]]:
        """Listen on every address of the host, and return them; the kernel chooses port 0. Raises Unavailable, naming the
        option."""
        loop, self._tls = asyncio.get_running_loop(), tls
        await self._runner.setup()
        assert self._runner.server is not None
        # Around the application, because its router answers some requests before any middleware sees them.
        self._runner.server.request_handler = partial(self._asked, self._runner.server.request_handler)
        try:
            bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
            if (
                not bound.sockets
            ):  # asyncio leaves out kinds of addresses for which no socket can be made, whatever the reason
                socket.socket().close()
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            self._sockets = [sock.dup() for sock in bound.sockets]
            bound.close()
            for listening in self._sockets:
                listening.listen(BACKLOG)
                loop.add_reader(listening, self._accept, listening)
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot spell
            await self.close()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise  # another address would not help
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Unavailable(
                f"cannot listen on {host}:{port}: {reason}",
                f"choose another address with {option} HOST:PORT, or stop the program that has this one",
            ) from error
        return [listening.getsockname()[:2] for listening in self._sockets]

    def renew(self, tls: ssl.SSLContext | None) -> None:
        """Take new connections with another context; those that are open go on."""
        self._tls = tls

    async def close(self) -> None:
        """Close the port and every connection. Idempotent."""
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._sockets = []
        for taking in self._taken.values():
            taking.cancel()
        if self._runner.server is not None:
            await self._runner.cleanup()

    async def _asked(self, answer: RequestHandler, request: web.BaseRequest) -> web.StreamResponse:
        if request.protocol in self._taken:
            self._taken.move_to_end(request.protocol)
        refused = None
        if request.body_exists:
            refused = web.Response(status=413, text="no request has a body here\n")
        elif hdrs.EXPECT in request.headers:  # aiohttp's own refusal repeats what was sent, which need not be text
            refused = web.Response(status=417, text="nothing can be expected here: no request has a body\n")
        if refused is None:
            return await answer(request)
        refused.force_close()
        return refused

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # It would stay ready, and the loop would do nothing else.
            log.error("no connection can be taken: %s", error.strerror)
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_RETRY_S, self._resume, listening)
            return
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_USER_TIMEOUT_S * 1000))
        self._make_room()
        assert self._runner.server is not None
        handler = self._runner.server()
        self._taken[handler] = loop.create_task(self._take(handler, connection))

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _take(self, handler: web.RequestHandler, connection: socket.socket) -> None:
        loop, tls = asyncio.get_running_loop(), self._tls
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: handler,
                connection,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_TIMEOUT_S,
            )
            transport.set_write_buffer_limits(MAX_WRITE_BUFFER_BYTES)
        except OSError:
            return  # it went away, or does not speak TLS as we do: whoever is there knows

    def _make_room(self) -> None:
        assert self._runner.server is not None
        served = set(self._runner.server.connections)
        for handler in [handler for handler, taking in self._taken.items() if taking.done() and handler not in served]:
            del self._taken[handler]
        if len(self._taken) < MAX_CONNECTIONS:
            return
        handler, taking = self._taken.popitem(last=False)
        taking.cancel()
        if handler.transport is not None:
            handler.transport.abort()
        self._pushed_out += 1
        if (now := asyncio.get_running_loop().time()) >= self._silent_until:
            self._silent_until = now + EVICTION_LOG_INTERVAL_S
            log.warning(
                "more than %d connections to one port: those that asked for nothing for the longest time are closed, %d so far",
                MAX_CONNECTIONS,
                self._pushed_out,
            )


def _server_logger() -> logging.Logger:
    """The server's log without a traceback for every request that is no HTTP, and for every client that goes away while it
    is answered: anyone can do both, at any rate."""

    def is_own(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], CLIENT_ERRORS))

    logger = logging.getLogger("exporters.page.web_server.server")
    if not logger.filters:
        logger.addFilter(is_own)
    return logger
