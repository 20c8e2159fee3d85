"""What the agent says over HTTP of what its node can and cannot do. To look costs tens of milliseconds of a thread, so whoever
asks soon after is told the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from api.checks import Check, Findings
from api.text import to_json

AGAIN_S = 60.0


class Checked:
    """Findings as JSON, made when somebody asks."""

    def __init__(self, version: str, checks: Callable[[], tuple[Check, ...]]) -> None:
        self._version, self._checks = version, checks
        self._lock = asyncio.Lock()
        self._text, self._until_s = b"", 0.0

    async def told(self) -> bytes:
        """One JSON document of Findings, at most a minute old. Many who ask at once have it made once."""
        async with self._lock:
            if time.monotonic() >= self._until_s:
                found = await asyncio.to_thread(self._checks)
                self._text = to_json(Findings(version=self._version, checks=found))
                self._until_s = time.monotonic() + AGAIN_S
        return self._text
