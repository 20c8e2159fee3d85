"""Each key is worked on at most once at a time, and is retried later when it failed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.backoff import Backoff
from kube.work_queue import KeySchedule, RateLimit, WorkQueue


def test_a_key_is_taken_once_however_often_it_was_added() -> None:
    order: KeySchedule[str] = KeySchedule()
    for key in ("a", "b", "a"):
        order.add(key)
    assert [order.take(0), order.take(0), order.take(0)] == ["a", "b", None]


def test_a_key_added_during_work_becomes_ready_afterwards() -> None:
    order: KeySchedule[str] = KeySchedule()
    order.add("a")
    assert order.take(0) == "a"
    order.add("a")
    assert order.take(0) is None, "never twice at a time"
    order.done("a")
    assert order.take(0) == "a"


def test_failures_wait_longer_each_time_and_success_forgets_them() -> None:
    order: KeySchedule[str] = KeySchedule(Backoff(first_s=1, max_s=4))
    waits = []
    for _ in range(4):
        order.add("a")
        order.take(0)
        waits.append(order.failed("a", 0))
    assert waits == [1, 2, 4, 4]
    order.add("a")
    order.take(0)
    order.done("a")
    order.add("a")
    order.take(0)
    assert order.failed("a", 0) == 1


def test_the_sooner_time_counts_and_an_addition_comes_first() -> None:
    order: KeySchedule[str] = KeySchedule()
    order.add_at("a", 10)
    order.add_at("a", 5)
    order.add_at("a", 20)
    assert (order.next_at(), len(order)) == (5, 1)
    assert [order.take(4), order.take(5), order.take(30)] == [None, "a", None]
    order.done("a")
    order.add_at("a", 50)
    order.add("a")
    assert order.take(31) == "a"
    order.done("a")
    assert (order.take(60), order.next_at()) == (None, None)


def test_a_key_that_becomes_due_during_work_is_not_lost() -> None:
    order: KeySchedule[str] = KeySchedule()
    order.add("a")
    order.take(0)
    order.add_at("a", 1)
    assert order.take(2) is None
    order.done("a")
    assert order.take(2) == "a"


@given(st.lists(st.tuples(st.sampled_from(["add", "at", "take", "done", "failed"]), st.sampled_from("abc"))))
def test_no_added_key_is_lost_or_worked_on_twice_at_once(steps: list[tuple[str, str]]) -> None:
    order: KeySchedule[str] = KeySchedule()
    retried: set[str] = set()
    working: set[str] = set()
    for now, (step, key) in enumerate(steps):
        if step == "add":
            order.add(key)
            retried.add(key)
        elif step == "at":
            order.add_at(key, now + 2)
            retried.add(key)
        elif step == "take" and (key_ := order.take(now)) is not None:
            assert key_ not in working
            working.add(key_)
            retried.discard(key_)
        elif step in ("done", "failed") and key in working:
            working.discard(key)
            order.done(key) if step == "done" else order.failed(key, now)
            retried |= {key} if step == "failed" else set()
    for key in list(working):
        order.done(key)
    left = set()
    while (key_ := order.take(10**9)) is not None:
        left.add(key_)
    assert left == retried


async def test_a_waiting_worker_is_woken_by_an_added_key() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    worker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add_after("late", 30)
    queue.add("a")
    assert await worker == "a"
    assert len(queue) == 1


async def test_a_limit_is_what_workers_wait_for() -> None:
    now = [0.0]
    queue: WorkQueue[int] = WorkQueue(lambda: now[0], RateLimit(per_s=1000, burst=1))
    queue.add(1)
    queue.add(2)
    began = asyncio.get_running_loop().time()
    assert [await queue.take(), await queue.take()] == [1, 2]
    assert asyncio.get_running_loop().time() - began >= 0.0009


async def test_two_workers_share_the_keys() -> None:
    queue: WorkQueue[int] = WorkQueue(asyncio.get_running_loop().time)
    workers = [asyncio.create_task(queue.take()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add(1)
    queue.add(2)
    assert sorted(await asyncio.gather(*workers)) == [1, 2]
    assert queue.failed(1) == pytest.approx(0.05, rel=0.6)
