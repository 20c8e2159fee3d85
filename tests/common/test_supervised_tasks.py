"""A task that fails by a bug is restarted with backoff and reported until it has recovered."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest

from common.backoff import Backoff
from common.supervised_tasks import STEADY_S, SupervisedTasks

SOON = Backoff(first_s=0.001, max_s=0.002)


class Work:
    """Ends by these bugs, one after another, and then goes on."""

    def __init__(self, *bugs: Exception | None) -> None:
        self.bugs, self.began, self.left = list(bugs), 0, 0
        self.goes_on = asyncio.Event()

    async def run(self) -> None:
        self.began += 1
        try:
            if not self.bugs:
                self.goes_on.set()
                await asyncio.Event().wait()
            if (bug := self.bugs.pop(0)) is not None:
                raise bug
        finally:
            self.left += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_failed_task_is_restarted_and_each_bug_is_logged_once_with_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, work = Clock(), Work(ZeroDivisionError("a"), ZeroDivisionError("a"), KeyError("b"), ZeroDivisionError("a"))
    async with AsyncExitStack() as stack:
        tending = SupervisedTasks(stack, SOON, clock)
        tending.begin("cnr", work.run)
        assert tending.problem() is None
        async with asyncio.timeout(20):
            await work.goes_on.wait()
        problem = tending.problem()
        assert problem is not None
        assert problem.reason == "cnr failed because of a bug and was restarted: ZeroDivisionError: a"
        logged = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [type(record.exc_info[1]).__name__ for record in logged if record.exc_info and record.exc_info[1]] == [
            "ZeroDivisionError",
            "KeyError",
            "ZeroDivisionError",
        ]
        clock.now += STEADY_S - 1
        assert tending.problem() is not None
        clock.now += 1
        assert tending.problem() is None, "it has gone on for long enough"
    assert (work.began, work.left) == (5, 5), "and is over once the stack is left"


async def test_a_task_that_returns_is_restarted_without_affecting_others() -> None:
    short, long = Work(None), Work()
    async with AsyncExitStack() as stack:
        tending = SupervisedTasks(stack, SOON)
        tending.begin("short", short.run)
        tending.begin("long", long.run)
        async with asyncio.timeout(20):
            await short.goes_on.wait()
        problem = tending.problem()
        assert problem is not None
        assert problem.reason == "short failed because of a bug and was restarted: it returned"
        assert (short.began, long.began) == (2, 1)


async def test_waits_grow_from_failure_to_failure() -> None:
    waits: list[float] = []

    class Noted(Backoff, frozen=True):
        def wait_s(self, failures: int, jitter: float = 0.0) -> float:
            waits.append(failures)
            return 0.0

    work = Work(*[KeyError("x")] * 4)
    async with AsyncExitStack() as stack:
        SupervisedTasks(stack, Noted(first_s=1, max_s=1)).begin("work", work.run)
        async with asyncio.timeout(20):
            await work.goes_on.wait()
    assert waits == [1, 2, 3, 4]


async def test_a_cancelled_inner_task_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The awaited task is cancelled, not the supervised one."""
    began = 0
    goes_on = asyncio.Event()

    async def work() -> None:
        nonlocal began
        began += 1
        if began == 3:
            goes_on.set()
            await asyncio.Event().wait()
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner

    async with AsyncExitStack() as stack:
        tending = SupervisedTasks(stack, SOON)
        tending.begin("cnr", work)
        async with asyncio.timeout(20):
            await goes_on.wait()
        problem = tending.problem()
        assert problem is not None
        assert problem.reason == "cnr failed because of a bug and was restarted: CancelledError"
    assert began == 3, "it is not restarted after the stack is closed"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


async def test_a_task_in_backoff_ends_with_the_stack() -> None:
    work = Work(KeyError("x"))
    async with asyncio.timeout(20), AsyncExitStack() as stack:
        SupervisedTasks(stack, Backoff(first_s=1000, max_s=1000)).begin("work", work.run)
        while not work.left:
            await asyncio.sleep(0)
    assert work.began == 1
