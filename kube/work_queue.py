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
"""Type of the keys; None is reserved for an empty queue."""
RETRY_BACKOFF = Backoff(first_s=0.05, max_s=60.0)


class KeySchedule(Generic[K]):
    """Queue without a clock: keys that are ready, in work, or delayed."""

    def __init__(self, backoff: Backoff = RETRY_BACKOFF) -> None:
        self._backoff = backoff
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._numbers = count()
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        """Number of keys that are ready or delayed, without those in work."""
        return len(self._ready) + len(self._due)

    def add(self, key: K) -> None:
        """Make a key ready. A key in work becomes ready again afterwards, because its object may have changed meanwhile."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        else:
            self._ready[key] = None

    def add_at(self, key: K, at_s: float) -> None:
        """Make a key ready at a time, or earlier if it was added with an earlier time."""
        if key in self._ready or (key in self._due and self._due[key][0] <= at_s):
            return
        number = next(self._numbers)
        self._due[key] = (at_s, number)
        heapq.heappush(self._heap, (at_s, number, key))

    def take(self, now_s: float) -> K | None:
        """Return the next ready key and mark it as in work; None if there is none."""
        self._wake(now_s)
        if not self._ready:
            return None
        key, _ = self._ready.popitem(last=False)
        self._working.add(key)
        return key

    def next_at(self) -> float | None:
        """Time at which the next delayed key becomes ready."""
        self._sweep()
        return self._heap[0][0] if self._heap else None

    def done(self, key: K) -> None:
        """Finish work on a key and reset its failures."""
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: K, now_s: float, jitter: float = 0.0) -> float:
        """Finish work on a key and retry it later; return the delay in seconds.

        It is shorter if the key was added meanwhile.
        """
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        self._finish(key)
        wait_s = self._backoff.wait_s(failures, jitter)
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
        # Superseded entries stay in the heap until they reach its top.
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)


class RateLimit(msgspec.Struct, frozen=True):
    """Rate in keys per second, and the burst allowed after a pause."""

    per_s: float
    burst: float


class WorkQueue(Generic[K]):
    """KeySchedule whose keys can be awaited by any number of workers."""

    def __init__(
        self, clock: Callable[[], float], limit: RateLimit | None = None, backoff: Backoff = RETRY_BACKOFF
    ) -> None:
        self._clock, self._schedule, self._changed = clock, KeySchedule[K](backoff), asyncio.Event()
        self._bucket = None if limit is None else TokenBucket(limit.per_s, limit.burst, clock())

    def __len__(self) -> int:
        return len(self._schedule)

    def add(self, key: K) -> None:
        """See KeySchedule.add."""
        self._schedule.add(key)
        self._changed.set()

    def add_after(self, key: K, wait_s: float) -> None:
        """See KeySchedule.add_at."""
        self._schedule.add_at(key, self._clock() + wait_s)
        self._changed.set()

    def done(self, key: K) -> None:
        """See KeySchedule.done."""
        self._schedule.done(key)
        self._changed.set()

    def failed(self, key: K) -> float:
        """See KeySchedule.failed."""
        wait_s = self._schedule.failed(key, self._clock(), random.random())
        self._changed.set()
        return wait_s

    async def take(self) -> K:
        """Wait for the next ready key, subject to the rate limit."""
        if self._bucket is not None and (pause_s := self._bucket.reserve(self._clock())):
            await asyncio.sleep(pause_s)
        while (key := self._schedule.take(self._clock())) is None:
            self._changed.clear()
            due = self._schedule.next_at()
            wait_s = None if due is None else max(0.0, due - self._clock())
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue
        return key
