"""Work beside the rounds, each in a task of its own: where a bug ends one, that is seen, and it is begun again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from api.ports import Seen, Unavailable
from kube.pace import Backoff

log = logging.getLogger(__name__)
PACE = Backoff(first_s=1.0, most_s=60.0)
STEADY_S = 120.0
"""Work that went on for so long since a bug ended it is well again."""
Work = Callable[[], Coroutine[Any, Any, None]]
"""Goes on until it is cancelled; what can be foreseen does not end it. It may be begun more than once."""


class _Fall(msgspec.Struct, frozen=True):
    """How work ended."""

    error: str
    failures: int
    """In a row."""
    begun_at_s: float | None = None
    """When it was begun again; None before that."""


class Tending:
    """Whoever begins such work, and a source of its own (api.ports.Probe) that says what of it has ended."""

    name, form = "tasks", "tended"
    lost_events = None

    def __init__(
        self, stack: AsyncExitStack, pace: Backoff = PACE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stack = stack
        """Of the agent: where it is left, what was begun ends, the last first, and before what was opened until then."""
        self._pace, self._clock = pace, clock
        self._fallen: dict[str, _Fall] = {}

    def begin(self, name: str, work: Work) -> None:
        """Have it done until the stack is left, which waits until it has left what it used."""
        self.stack.push_async_callback(_ended, asyncio.create_task(self._tend(name, work)))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        return Seen()

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

    async def _tend(self, name: str, work: Work) -> None:
        while True:
            try:
                await work()
                error = "it came to an end"
                log.error("%s came to an end by itself; it is begun again", name)
            except (Exception, asyncio.CancelledError) as failure:
                if told_to_end(failure):
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
        self._fallen[name] = _Fall(error, failures)
        return self._pace.wait_s(failures, random.random())

    def _steady(self, one: _Fall) -> bool:
        return one.begun_at_s is not None and self._clock() - one.begun_at_s >= STEADY_S


def told_to_end(failure: BaseException) -> bool:
    """Whether somebody cancelled this task. If not, it was something that it waited for, and that is a bug as any other: left
    to end the task it would be told nowhere."""
    task = asyncio.current_task()
    return isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel it, and wait until it has left what it used."""
    task.cancel()
    await asyncio.wait([task])
