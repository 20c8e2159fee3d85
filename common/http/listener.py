"""Listening addresses, plain or TLS, with a bounded number of connections and replaceable certificates.
aiohttp serves the requests and asyncio accepts and encrypts the connections. The limit is ours, because aiohttp has none:
at the limit, the connection that has been idle for the longest is closed, including those in the TLS handshake.
A request with a body is rejected before anything else: reading one is work that an unauthenticated client could cause.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError

from api.interfaces import Unavailable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""More than the scrapers, pages and terminals of a node need, and far below the agent's limit of file descriptors."""
KEEPALIVE_S = 75.0
"""Longer than clients pause between two requests; aiohttp's default of an hour would keep idle connections."""
TLS_HANDSHAKE_TIMEOUT_S = 10.0
BACKLOG = 100
TCP_USER_TIMEOUT_S = 10.0
"""Time after which the kernel closes the connection of a client that acknowledges no data (tcp(7))."""
MAX_WRITE_BUFFER_BYTES = 64 << 10
"""Buffered response data per client; with TLS the default is half a MiB."""
EVICTION_LOG_INTERVAL_S = 60.0
CLIENT_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpListener:
    """Sockets of one port on one or several hosts, with their connections and the application that serves them."""

    def __init__(self, app: web.Application, **limits: Any) -> None:
        """`limits` are aiohttp's limits for a request."""
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
        self._servers: dict[socket.socket, asyncio.Server] = {}
        """Listening sockets with the servers that accept from duplicates of them."""
        self._connections: OrderedDict[web.RequestHandler, asyncio.Task[None]] = OrderedDict()
        """Handlers of the connections with the tasks that set them up, in the order of their last request."""
        self._closed_count = 0
        self._next_log_s = 0.0

    async def open(
        self, hosts: str | Sequence[str], port: int, option: str, tls: ssl.SSLContext | None = None
    ) -> list[tuple[str, int]]:
        """Listen on every address of each host and return them; for port 0 the kernel selects one for each.

        Raises Unavailable that names the option, also if only one of several hosts cannot be used.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        # Wraps the application, because its router answers some requests before any middleware is called.
        self._runner.server.request_handler = partial(self._handle, self._runner.server.request_handler)
        host = ""
        try:
            for host in dict.fromkeys((hosts,) if isinstance(hosts, str) else hosts):
                await self._listen_on(host, port, tls)
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: the name is invalid in IDNA
            await self.close()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise  # another address would not help
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Unavailable(
                f"cannot listen on {host}:{port}: {reason}",
                f"choose another address with {option} HOST:PORT, or stop the program that has this one",
            ) from error
        return [sock.getsockname()[:2] for sock in self._servers]

    async def _listen_on(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
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
        for sock in listening:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_USER_TIMEOUT_S * 1000))
            self._servers[sock] = await self._serve(sock, tls)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Use another context for new connections; existing ones continue. Raises OSError."""
        for sock in self._servers:
            # The next server accepts before the previous one stops, so that the kernel refuses no connection.
            following = await self._serve(sock, tls)
            self._servers[sock].close()
            self._servers[sock] = following

    async def close(self) -> None:
        """Close the port and every connection. Idempotent."""
        for sock, server in self._servers.items():
            server.close()
            sock.close()
        self._servers = {}
        for setup in self._connections.values():
            setup.cancel()
        if self._runner.server is not None:
            await self._runner.cleanup()

    async def _serve(self, sock: socket.socket, tls: ssl.SSLContext | None) -> asyncio.Server:
        """Accept connections from a duplicate of the socket, because a server closes the one it is given."""
        server = await asyncio.get_running_loop().create_server(
            self._connect,
            sock=sock.dup(),
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_TIMEOUT_S,
            # Also the number of accepts in a row, and of log lines when no file descriptor is left.
            backlog=1,
        )
        sock.listen(BACKLOG)
        return server

    def _connect(self) -> web.RequestHandler:
        """Return the handler of a new connection. asyncio calls this in the task that sets the connection up."""
        self._close_oldest()
        setup = asyncio.current_task()
        assert setup is not None
        assert self._runner.server is not None
        handler = self._runner.server()
        self._connections[handler] = setup
        return handler

    async def _handle(self, handler: RequestHandler, request: web.BaseRequest) -> web.StreamResponse:
        if request.protocol in self._connections:
            self._connections.move_to_end(request.protocol)
        if request.transport is not None:
            request.transport.set_write_buffer_limits(MAX_WRITE_BUFFER_BYTES)
        if request.body_exists:
            response = web.Response(status=413, text="requests with a body are not supported\n")
        elif hdrs.EXPECT in request.headers:  # aiohttp's own response repeats the header, which need not be text
            response = web.Response(status=417, text="the Expect header is not supported: no request has a body\n")
        else:
            return await handler(request)
        response.force_close()
        return response

    def _close_oldest(self) -> None:
        assert self._runner.server is not None
        served = set(self._runner.server.connections)
        finished = [handler for handler, setup in self._connections.items() if setup.done() and handler not in served]
        for handler in finished:
            del self._connections[handler]
        if len(self._connections) < MAX_CONNECTIONS:
            return
        handler, setup = self._connections.popitem(last=False)
        setup.cancel()
        if handler.transport is not None:
            handler.transport.abort()
        self._closed_count += 1
        if (now := asyncio.get_running_loop().time()) >= self._next_log_s:
            self._next_log_s = now + EVICTION_LOG_INTERVAL_S
            log.warning(
                "more than %d connections to one port: closed those idle for the longest time, %d so far",
                MAX_CONNECTIONS,
                self._closed_count,
            )


def _server_logger() -> logging.Logger:
    """Log of the server without tracebacks for invalid requests and clients that disconnect, which any client can cause."""

    def is_own(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], CLIENT_ERRORS))

    logger = logging.getLogger("common.http.server")
    if not logger.filters:
        logger.addFilter(is_own)
    return logger
