"""Work queue of keys: each key at most once at a time, retried with backoff, limited in rate."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

import msgspec

from common.backoff import Backoff, TokenBucket

K = TypeVar("K", bound=Hashable)
"""Anything but None, which stands for no key."""
RETRY_BACKOFF = Backoff(first_s=0.05, max_s=60.0)


class KeySchedule(Generic[K]):
    """The queue without its clock: what is ready, what is being worked on, what has to wait. Pure."""

    def __init__(self, pace: Backoff = RETRY_BACKOFF) -> None:
        self._pace = pace
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._numbers = count()
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        """Ready or waiting, but not those that are being worked on."""
        return len(self._ready) + len(self._due)

    def add(self, key: K) -> None:
        """Ready now. One that is being worked on is taken up again afterwards: it may have changed meanwhile."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        else:
            self._ready[key] = None

    def add_at(self, key: K, at_s: float) -> None:
        """Ready then, or sooner if that was said before."""
        if key in self._ready or (key in self._due and self._due[key][0] <= at_s):
            return
        number = next(self._numbers)
        self._due[key] = (at_s, number)
        heapq.heappush(self._heap, (at_s, number, key))

    def take(self, now_s: float) -> K | None:
        """The next key, which is being worked on from now; None where none is ready."""
        self._wake(now_s)
        if not self._ready:
            return None
        key, _ = self._ready.popitem(last=False)
        self._working.add(key)
        return key

    def next_at(self) -> float | None:
        """When the first of those that wait is due."""
        self._sweep()
        return self._heap[0][0] if self._heap else None

    def done(self, key: K) -> None:
        """It went well: earlier failures are forgotten."""
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: K, now_s: float, jitter: float = 0.0) -> float:
        """Take it up later, after how many seconds is returned; sooner where something was added meanwhile."""
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        self._finish(key)
        wait_s = self._pace.wait_s(failures, jitter)
        self.add_at(key, now_s + wait_s)
        return wait_s

    def _finish(self, key: K) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _wake(self, now_s: float) -> None:
        self._sweep()
        while self._heap and self._heap[0][0] <= now_s:
            _, _, key = heapq.heappop(self._heap)
            self.add(key)
            self._sweep()

    def _sweep(self) -> None:
        # Entries that were overtaken stay in the heap until they come to its top.
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)


class RateLimit(msgspec.Struct, frozen=True):
    """So many keys a second, and so many at once after a pause."""

    per_s: float
    burst: float


class WorkQueue(Generic[K]):
    """An `Order` whose keys can be waited for, by any number of workers."""

    def __init__(
        self, clock: Callable[[], float], limit: RateLimit | None = None, pace: Backoff = RETRY_BACKOFF
    ) -> None:
        self._clock, self._order, self._changed = clock, KeySchedule[K](pace), asyncio.Event()
        self._bucket = None if limit is None else TokenBucket(limit.per_s, limit.burst, clock())

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: K) -> None:
        """See Order.add."""
        self._order.add(key)
        self._changed.set()

    def add_after(self, key: K, wait_s: float) -> None:
        """See Order.add_at."""
        self._order.add_at(key, self._clock() + wait_s)
        self._changed.set()

    def done(self, key: K) -> None:
        """See Order.done."""
        self._order.done(key)
        self._changed.set()

    def failed(self, key: K) -> float:
        """See Order.failed."""
        wait_s = self._order.failed(key, self._clock(), random.random())
        self._changed.set()
        return wait_s

    async def take(self) -> K:
        """The next key, once one is ready and the limit allows it."""
        if self._bucket is not None and (pause_s := self._bucket.reserve(self._clock())):
            await asyncio.sleep(pause_s)
        while (key := self._order.take(self._clock())) is None:
            self._changed.clear()
            due = self._order.next_at()
            wait_s = None if due is None else max(0.0, due - self._clock())
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue
        return key
