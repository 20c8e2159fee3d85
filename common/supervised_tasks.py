"""Runs background tasks, restarts each after an unexpected exception, and reports failures as health."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from api.interfaces import Unavailable
from common.backoff import Backoff

log = logging.getLogger(__name__)
RESTART_BACKOFF = Backoff(first_s=1.0, max_s=60.0)
STEADY_S = 120.0
"""A task that has run for this long since its restart counts as recovered."""
TaskFunction = Callable[[], Coroutine[Any, Any, None]]
"""Runs until it is cancelled and handles expected errors itself. It may be started more than once."""


class _TaskFailure(msgspec.Struct, frozen=True):
    error: str
    failures: int
    """Consecutive failures, this one included."""
    restarted_at_s: float | None = None


class SupervisedTasks:
    """Starts and restarts background tasks; also a HealthReporter of the failed ones."""

    name, form = "tasks", "asyncio"
    lost_events = None

    def __init__(
        self, stack: AsyncExitStack, backoff: Backoff = RESTART_BACKOFF, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stack = stack
        """The agent's exit stack. Closing it ends the tasks, last started first, before resources opened earlier."""
        self._backoff, self._clock = backoff, clock
        self._failures: dict[str, _TaskFailure] = {}

    def begin(self, name: str, work: TaskFunction) -> None:
        """Run the task until the exit stack is closed, which waits for the task to release its resources."""
        self.stack.push_async_callback(_cancel_and_wait, asyncio.create_task(self._supervise(name, work)))

    def problem(self) -> Unavailable | None:
        """Tasks that failed and have not recovered yet."""
        failures = sorted(item for item in self._failures.items() if not self._recovered(item[1]))
        if not failures:
            return None
        reason = "; ".join(f"{name} failed because of a bug and was restarted: {fail.error}" for name, fail in failures)
        return Unavailable(reason, "report it with the agent's log, which has the traceback")

    async def _supervise(self, name: str, work: TaskFunction) -> None:
        while True:
            try:
                await work()
                error = "it returned"
                log.error("%s returned unexpectedly; it is restarted", name)
            except (Exception, asyncio.CancelledError) as failure:
                if is_own_cancellation(failure):
                    raise
                error, before = f"{type(failure).__name__}: {failure}".removesuffix(": "), self._failures.get(name)
                if before is None or before.error != error:
                    log.exception("%s failed because of a bug; it is restarted", name)
            await asyncio.sleep(self._record_failure(name, error))
            self._failures[name] = msgspec.structs.replace(self._failures[name], restarted_at_s=self._clock())

    def _record_failure(self, name: str, error: str) -> float:
        """Record the failure and return the delay before the restart."""
        before = self._failures.get(name)
        failures = 1 if before is None or self._recovered(before) else before.failures + 1
        self._failures[name] = _TaskFailure(error, failures)
        return self._backoff.wait_s(failures, random.random())

    def _recovered(self, failure: _TaskFailure) -> bool:
        return failure.restarted_at_s is not None and self._clock() - failure.restarted_at_s >= STEADY_S


def is_own_cancellation(failure: BaseException) -> bool:
    """Whether this task was cancelled, as opposed to a task that it awaits.

    The latter is a bug like any other, which would end the task without a log line if it were not handled.
    """
    task = asyncio.current_task()
    return isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
