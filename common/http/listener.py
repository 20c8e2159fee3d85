"""Listening addresses, plain or TLS, with a bounded number of connections and replaceable certificates.
aiohttp serves the requests and asyncio encrypts the connections. This module accepts them, because the limit depends on the
client's address before the TLS handshake: `ConnectionTable` selects the connection to close when there are too many, and keeps
a share for this machine, whose kubelet probes health. A request with a body is rejected first, unless its path and client may
send one: otherwise a client without authentication could make the agent read any amount of data.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError

from api.interfaces import Unavailable
from common.http.connection_table import ConnectionTable
from common.http.request_guard import is_loopback

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""More than the scrapers, pages and terminals of a node need, and far below the agent's limit of file descriptors."""
RESERVED_CONNECTIONS = 16
"""Connections of each address of this machine that no client of another machine or pod can displace."""
MAX_ACCEPTS = 8
"""Connections of one client address that are served in a row at the expense of others; further ones are reset at once while
there is no room. A new connection whose request has arrived is served within five turns of the event loop, so that fewer than
MAX_CONNECTIONS later ones can displace it."""
MAX_DRAINED = 256
"""Connections accepted in a row. The kernel drops the handshakes of all clients while the queue is full, and resetting a
connection is much cheaper than serving it."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""`struct linger` that ends a connection without TIME_WAIT (socket(7))."""
ACCEPT_PAUSE_S = 1.0
"""Pause after a failed accept, for instance without a free file descriptor."""
KEEPALIVE_S = 75.0
"""Longer than clients pause between two requests; aiohttp's default of an hour would keep idle connections."""
TLS_HANDSHAKE_TIMEOUT_S = 10.0
BACKLOG = 1024
"""Connections that the kernel completes before they are accepted; a flood must not fill the queue between two turns."""
TCP_USER_TIMEOUT_S = 10.0
"""Time after which the kernel closes the connection of a client that acknowledges no data (tcp(7))."""
MAX_WRITE_BUFFER_BYTES = 64 << 10
"""Buffered response data per client; with TLS the default is half a MiB."""
EVICTION_LOG_INTERVAL_S = 60.0
CLIENT_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpListener:
    """Sockets of one port on one or several hosts, with their connections and the application that serves them."""

    def __init__(
        self,
        app: web.Application,
        body_problem: Callable[[web.BaseRequest], str] | None = None,
        max_connections: int = MAX_CONNECTIONS,
        **limits: Any,
    ) -> None:
        """`body_problem` returns why a request may not have a body, empty if it may; without it no request may. The
        application's `client_max_size` limits its size. `limits` are aiohttp's other limits for a request."""
        self._max_connections = max_connections
        self._body_problem = body_problem or _no_bodies
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.5,
            keepalive_timeout=KEEPALIVE_S,
            logger=_server_logger(),
            auto_decompress=False,
            lingering_time=0,
            # The review of a client that has disconnected must not stay in the queue.
            handler_cancellation=True,
            **limits,
        )
        self._listening: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._table = ConnectionTable[web.RequestHandler](max_connections, RESERVED_CONNECTIONS)
        self._setups: dict[web.RequestHandler, asyncio.Task[None]] = {}
        """Tasks that set connections up, by the handler of their requests."""
        self._accepted: dict[web.RequestHandler, socket.socket] = {}
        """Connections whose task has not started, which therefore no transport owns."""
        self._closed_count = 0
        self._next_log_s = 0.0

    async def open(
        self, hosts: str | Sequence[str], port: int, option: str, tls: ssl.SSLContext | None = None
    ) -> list[tuple[str, int]]:
        """Listen on every address of each host and return them; for port 0 the kernel selects one for each.

        Each address has a socket and a queue of its own, so that a flood of one does not fill that of another.

        Raises Unavailable that names the option, also if only one of several hosts cannot be used.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        # Wraps the application, because its router answers some requests before any middleware is called.
        self._runner.server.request_handler = partial(self._handle, self._runner.server.request_handler)
        host = ""
        try:
            self._tls = tls
            for host in dict.fromkeys((hosts,) if isinstance(hosts, str) else hosts):
                await self._listen_on(host, port)
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: the name is invalid in IDNA
            await self.close()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise  # another address would not help
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Unavailable(
                f"cannot listen on {host}:{port}: {reason}",
                f"choose another address with {option} HOST:PORT, or stop the program that has this one",
            ) from error
        return [sock.getsockname()[:2] for sock in self._listening]

    async def _listen_on(self, host: str, port: int) -> None:
        """Listen on every address of one host. Raises OSError.

        One call per host: of several hosts asyncio skips those whose address no interface has, if another one can be bound
        (base_events.py, create_server, since Python 3.12.4).
        """
        bound = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
        # asyncio silently skips address families for which no socket can be created; creating one shows the error.
        if not bound.sockets:
            socket.socket().close()
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        listening = [sock.dup() for sock in bound.sockets]
        bound.close()
        self._listening += listening  # all of them, so that a failure closes all of them
        for sock in listening:
            sock.setblocking(False)  # noqa: FBT003 - the only form of this call
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_USER_TIMEOUT_S * 1000))
            sock.listen(BACKLOG)
            self._begin_accepting(sock)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Use another context for new connections; existing ones continue."""
        self._tls = tls

    async def close(self) -> None:
        """Close the port and every connection. Idempotent."""
        listening, self._listening = self._listening, []
        for sock in listening:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        for handler, setup in self._setups.items():
            setup.cancel()
            self._close_accepted(handler)
        if self._runner.server is not None:
            await self._runner.cleanup()

    def _begin_accepting(self, sock: socket.socket) -> None:
        if sock in self._listening:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        self._forget_finished()
        arrived = Counter[str]()
        for _ in range(MAX_DRAINED):
            try:
                connection, address = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor or memory is free; polling on would occupy a CPU
                log.error(
                    "cannot accept connections: %s; raise the limit of open files (ulimit -n) of this program",
                    error.strerror,
                )
                loop = asyncio.get_running_loop()
                loop.remove_reader(sock)
                loop.call_later(ACCEPT_PAUSE_S, self._begin_accepting, sock)
                return
            arrived[address[0]] += 1
            # A browser requests twenty files at once, which arrive as twenty connections of one API server.
            if arrived[address[0]] > MAX_ACCEPTS and self._table.is_full:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                connection.close()
            else:
                self._admit(connection, address[0])

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Add a connection, and close another one if there are too many."""
        if (excess := self._table.find_excess(address)) is not None:
            self._abort(excess)
        assert self._runner.server is not None
        handler = self._runner.server()
        self._table.add(handler, address, is_local=is_loopback(address) or connection.getsockname()[0] == address)
        self._accepted[handler] = connection
        self._setups[handler] = asyncio.get_running_loop().create_task(self._set_up(handler, connection))

    async def _set_up(self, handler: web.RequestHandler, connection: socket.socket) -> None:
        del self._accepted[handler]  # its transport closes it from here on
        loop, timeout_s = asyncio.get_running_loop(), None if self._tls is None else TLS_HANDSHAKE_TIMEOUT_S
        with contextlib.suppress(OSError):  # among them failed and late TLS handshakes
            await loop.connect_accepted_socket(
                lambda: handler, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )

    async def _handle(self, handler: RequestHandler, request: web.BaseRequest) -> web.StreamResponse:
        self._table.record_activity(request.protocol, is_busy=True)
        try:
            return await self._answer(handler, request)
        finally:
            self._table.record_activity(request.protocol, is_busy=False)

    async def _answer(self, handler: RequestHandler, request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.set_write_buffer_limits(MAX_WRITE_BUFFER_BYTES)
        if request.body_exists and (problem := self._body_problem(request)):
            response = web.Response(status=413, text=f"{problem}\n")
        elif hdrs.EXPECT in request.headers:  # aiohttp's own response repeats the header, which need not be text
            response = web.Response(status=417, text="the Expect header is not supported: no request has a body\n")
        else:
            return await handler(request)
        response.force_close()
        return response

    def _forget_finished(self) -> None:
        assert self._runner.server is not None
        served = set(self._runner.server.connections)
        for handler in self._table:
            if self._setups[handler].done() and handler not in served:
                self._forget(handler)

    def _forget(self, handler: web.RequestHandler) -> None:
        self._table.remove(handler)
        self._setups.pop(handler).cancel()
        self._close_accepted(handler)

    def _close_accepted(self, handler: web.RequestHandler) -> None:
        """Close a connection whose task is cancelled before it begins: nothing else would."""
        if (connection := self._accepted.pop(handler, None)) is not None:
            connection.close()

    def _abort(self, handler: web.RequestHandler) -> None:
        self._forget(handler)
        if handler.transport is not None:
            handler.transport.abort()
        self._closed_count += 1
        if (now := asyncio.get_running_loop().time()) >= self._next_log_s:
            self._next_log_s = now + EVICTION_LOG_INTERVAL_S
            log.warning(
                "more than %d connections to one port: closed those idle for the longest time, %d so far",
                self._max_connections,
                self._closed_count,
            )


def _no_bodies(_request: web.BaseRequest) -> str:
    return "requests with a body are not supported"


def connection_of(request: web.BaseRequest) -> str:
    """Return the connection of a request as `ADDRESS:PORT` of its client; empty if it is closed."""
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    return "" if not peer else f"{peer[0]}:{peer[1]}"


def _server_logger() -> logging.Logger:
    """Log of the server without tracebacks for invalid requests and clients that disconnect, which any client can cause."""

    def is_own(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], CLIENT_ERRORS))

    logger = logging.getLogger("common.http.server")
    if not logger.filters:
        logger.addFilter(is_own)
    return logger
