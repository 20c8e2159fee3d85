"""Waiting for a condition, for every test of threads, processes and tasks: `until` and `until_async`.

Both return the condition's first true result, and raise an AssertionError with `what` and the condition's last exception;
a callable `what` is called only then.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
What = str | Callable[[], object]
POLL_INTERVAL_S = 0.05
PATIENCE_S = 200.0 if "DIOPTASE_VM" in os.environ else 20.0
"""Default limit. A guest whose every instruction is translated takes ten times as long."""


class _Attempts:
    # Evaluates a condition until its deadline, and keeps the last exception for the message.
    def __init__(self, what: What, seconds: float) -> None:
        self._what, self._seconds, self._deadline = what, seconds, time.monotonic() + seconds

    def evaluate(self, condition: Callable[[], T]) -> T | None:
        error = ""
        try:
            if result := condition():
                return result
        except Exception as problem:  # noqa: BLE001 - the condition may not be computable yet
            error = f"; last error: {problem!r}"
        if time.monotonic() >= self._deadline:
            what = self._what() if callable(self._what) else self._what
            raise AssertionError(f"not within {self._seconds:g} s: {what}{error}")
        return None


def until(condition: Callable[[], T], what: What = "the condition holds", seconds: float = PATIENCE_S) -> T:
    """Poll the condition until its result is true; an exception counts as false."""
    attempts = _Attempts(what, seconds)
    while not (result := attempts.evaluate(condition)):
        time.sleep(POLL_INTERVAL_S)
    return result


async def until_async(
    condition: Callable[[], T],
    what: What = "the condition holds",
    seconds: float = PATIENCE_S,
    step: Callable[[], Awaitable[object]] | None = None,
) -> T:
    """Poll like `until` without blocking the event loop; awaits `step`, if given, before each further poll."""
    attempts = _Attempts(what, seconds)
    while not (result := attempts.evaluate(condition)):
        if step is not None:
            await step()
        await asyncio.sleep(POLL_INTERVAL_S)
    return result
