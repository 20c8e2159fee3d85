"""Waiting for a condition, for every test of threads, processes and tasks: `until` and `until_async`.

Both return the condition's first true result, and raise an AssertionError with `what` and the condition's last exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
POLL_INTERVAL_S = 0.05


class _Attempts:
    # Evaluates a condition until its deadline, and keeps the last exception for the message.
    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds, self._deadline = what, seconds, time.monotonic() + seconds

    def evaluate(self, condition: Callable[[], T]) -> T | None:
        error = ""
        try:
            if result := condition():
                return result
        except Exception as problem:  # noqa: BLE001 - the condition may not be computable yet
            error = f"; last error: {problem!r}"
        assert time.monotonic() < self._deadline, f"not within {self._seconds:g} s: {self._what}{error}"
        return None


def until(condition: Callable[[], T], what: str = "the condition holds", seconds: float = 20.0) -> T:
    """Poll the condition until its result is true; an exception counts as false."""
    attempts = _Attempts(what, seconds)
    while not (result := attempts.evaluate(condition)):
        time.sleep(POLL_INTERVAL_S)
    return result


async def until_async(
    condition: Callable[[], T],
    what: str = "the condition holds",
    seconds: float = 20.0,
    step: Callable[[], Awaitable[object]] | None = None,
) -> T:
    """Poll like `until` without blocking the event loop; awaits `step`, if given, before each further poll."""
    attempts = _Attempts(what, seconds)
    while not (result := attempts.evaluate(condition)):
        if step is not None:
            await step()
        await asyncio.sleep(POLL_INTERVAL_S)
    return result
