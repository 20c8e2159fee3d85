"""Sockets of ours that stay where neighbours look for them: put back where somebody cleaned the directory, and tried again
where somebody else is served there."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from agent.rpc import Server
from api.ports import Unavailable

log = logging.getLogger(__name__)


class Kept:
    """Servers that stand and fall together; `start` makes them, all or none, and raises Unavailable."""

    def __init__(self, start: Callable[[], Awaitable[tuple[Server, ...]]]) -> None:
        self._start, self._servers = start, tuple[Server, ...]()
        self.problem: Unavailable | None = None
        """Why they are not there; None where they are."""

    async def look(self) -> bool:
        """See that they are there, to be called every few seconds; whether they were made just now."""
        if self._servers and all(server.intact() for server in self._servers):
            return False
        for server in self._servers:
            if not server.intact():
                log.info("%s is gone; it is put back", server.path)
        await self.close()
        try:
            self._servers = await self._start()
        except Unavailable as error:
            if self.problem is None or self.problem.reason != error.reason:
                log.warning("%s; %s", error.reason, error.remedy)
            self.problem = error
            return False
        self.problem = None
        return True

    async def close(self) -> None:
        """Take them away. Idempotent."""
        servers, self._servers = self._servers, ()
        for server in servers:
            await server.stop()
