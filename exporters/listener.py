"""A listening port, plain or with TLS, that takes on new certificates without refusing or losing a connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable


class Listener:
    """The sockets of one HOST:PORT and the server behind them."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol = protocol
        self._servers: list[asyncio.Server] = []

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None) -> list[tuple[str, int]]:
        """Listen on every address of the host, and return them; the kernel chooses port 0. Raises OSError and others."""
        server = await asyncio.get_running_loop().create_server(self._protocol, host, port, ssl=tls)
        self._servers = [server]
        return [sock.getsockname()[:2] for sock in server.sockets]

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Go on with another context. The sockets stay: both servers share their queues while one follows the other."""
        loop, before = asyncio.get_running_loop(), self._servers
        sockets = [sock.dup() for server in before for sock in server.sockets]
        self._servers = [await loop.create_server(self._protocol, sock=sock, ssl=tls) for sock in sockets]
        for server in before:
            server.close()

    def close(self) -> None:
        """Take no more connections; those that are open are their server's to end. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers = []
