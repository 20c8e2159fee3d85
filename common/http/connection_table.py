"""Selects the connection to close when a port has too many. Pure.
The client address with the most connections loses one, so that a flood from one address costs that address alone. This
machine's own addresses, from which the kubelet probes health, have a reserved share that no other address can take. Of an
address's connections, the one that has been idle for the longest time is closed. Connections with a request in progress are
closed only if the address has few idle ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

K = TypeVar("K")
MIN_IDLE_SHARE = 0.25
"""Share of an address's connections that may be closed although the others have requests in progress. Without it, clients
that read nothing could hold all of them."""


class ClientConnection(msgspec.Struct):
    """One connection of a client."""

    address: str
    is_local: bool
    """Whether the client is on this machine."""
    is_busy: bool = False
    """Whether a request is in progress."""


class ConnectionTable(Generic[K]):
    """Connections in the order of their latest activity, at most `max_connections`; `reserved` of them for each address of
    this machine."""

    def __init__(self, max_connections: int, reserved: int) -> None:
        self._max_connections, self._reserved = max_connections, reserved
        self._connections: dict[K, ClientConnection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._connections))

    @property
    def is_full(self) -> bool:
        """Return whether one more connection takes the place of another."""
        return len(self._connections) >= self._max_connections

    def add(self, key: K, address: str, *, is_local: bool) -> None:
        """Add a connection."""
        self._connections[key] = ClientConnection(address, is_local)

    def remove(self, key: K) -> None:
        """Remove a connection; a removed one is ignored."""
        self._connections.pop(key, None)

    def record_activity(self, key: K, *, is_busy: bool) -> None:
        """Record that a request begins or ends; a removed connection is ignored."""
        connection = self._connections.pop(key, None)
        if connection is not None:
            connection.is_busy = is_busy
            self._connections[key] = connection

    def find_excess(self, address: str) -> K | None:
        """Return the connection to close before one of this address is added; None if there is room."""
        if not self.is_full:
            return None
        counts = Counter(connection.address for connection in self._connections.values())
        reserved = {
            connection.address
            for connection in self._connections.values()
            if connection.is_local and counts[connection.address] <= self._reserved
        }
        candidates = [each for each in counts if each not in reserved] or list(counts)
        # Of two addresses with the same number the first, whose connection has been idle for longer.
        return self._oldest(max(candidates, key=lambda each: counts[each] + (each == address)))

    def _oldest(self, address: str) -> K:
        own = [
            (key, connection.is_busy) for key, connection in self._connections.items() if connection.address == address
        ]
        idle, busy = [key for key, is_busy in own if not is_busy], [key for key, is_busy in own if is_busy]
        return idle[0] if not busy or len(idle) >= max(1, MIN_IDLE_SHARE * len(own)) else busy[0]
