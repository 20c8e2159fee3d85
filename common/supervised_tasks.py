"""Runs background tasks, restarts each after an unexpected exception, and reports failures as health."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from api.interfaces import ProbeReading, Unavailable
from common.backoff import Backoff

log = logging.getLogger(__name__)
RESTART_BACKOFF = Backoff(first_s=1.0, max_s=60.0)
STEADY_S = 120.0
"""Work that went on for so long since a bug ended it is well again."""
TaskFunction = Callable[[], Coroutine[Any, Any, None]]
"""Goes on until it is cancelled; what can be foreseen does not end it. It may be begun more than once."""


class _TaskFailure(msgspec.Struct, frozen=True):
    """How work ended."""

    error: str
    failures: int
    """In a row."""
    begun_at_s: float | None = None
    """When it was begun again; None before that."""


class SupervisedTasks:
    """Whoever begins such work, and a source of its own (api.interfaces.Probe) that says what of it has ended."""

    name, form = "tasks", "tended"
    lost_events = None

    def __init__(
        self, stack: AsyncExitStack, pace: Backoff = RESTART_BACKOFF, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stack = stack
        """Of the agent: where it is left, what was begun ends, the last first, and before what was opened until then."""
        self._pace, self._clock = pace, clock
        self._fallen: dict[str, _TaskFailure] = {}

    def begin(self, name: str, work: TaskFunction) -> None:
        """Have it done until the stack is left, which waits until it has left what it used."""
        self.stack.push_async_callback(_cancel_and_wait, asyncio.create_task(self._tend(name, work)))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """What has ended, and does not go on, or has not for long."""
        fallen = {name: one for name, one in self._fallen.items() if not self._steady(one)}
        if not fallen:
            return None
        said = "; ".join(
            f"{name} ended by a bug, and was begun again: {one.error}" for name, one in sorted(fallen.items())
        )
        return Unavailable(said, "report it with the agent's log, which has where it was")

    def close(self) -> None:
        """Nothing to give back: the stack ends what was begun."""

    async def _tend(self, name: str, work: TaskFunction) -> None:
        while True:
            try:
                await work()
                error = "it came to an end"
                log.error("%s came to an end by itself; it is begun again", name)
            except (Exception, asyncio.CancelledError) as failure:
                if is_own_cancellation(failure):
                    raise
                error, before = f"{type(failure).__name__}: {failure}".removesuffix(": "), self._fallen.get(name)
                if before is None or before.error != error:
                    log.exception("%s ended by a bug; it is begun again", name)
            await asyncio.sleep(self._fell(name, error))
            self._fallen[name] = msgspec.structs.replace(self._fallen[name], begun_at_s=self._clock())

    def _fell(self, name: str, error: str) -> float:
        """Remember it; seconds until it is begun again."""
        before = self._fallen.get(name)
        failures = 1 if before is None or self._steady(before) else before.failures + 1
        self._fallen[name] = _TaskFailure(error, failures)
        return self._pace.wait_s(failures, random.random())

    def _steady(self, one: _TaskFailure) -> bool:
        return one.begun_at_s is not None and self._clock() - one.begun_at_s >= STEADY_S


def is_own_cancellation(failure: BaseException) -> bool:
    """Whether somebody cancelled this task. If not, it was something that it waited for, and that is a bug as any other: left
    to end the task it would be told nowhere."""
    task = asyncio.current_task()
    return isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel it, and wait until it has left what it used."""
    task.cancel()
    await asyncio.wait([task])
