"""Counts writes of state files that are synced to disk, and the time that they take. Metrics and an alert read the counts.
The age of a write under way is reported too, because a disk that hangs completes no write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class SyncCount(NamedTuple):
    """Completed and failed writes of one file."""

    writes: int
    seconds: float


class SyncTimes:
    """Counts by file name. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._counts: dict[str, SyncCount] = {}
        self._under_way: dict[object, float] = {}

    @contextmanager
    def measure(self, file: str) -> Iterator[None]:
        """Count the block as one write of this file, also if it fails."""
        token, started_s = object(), self._clock()
        with self._lock:
            self._under_way[token] = started_s
        try:
            yield
        finally:
            elapsed_s = self._clock() - started_s
            with self._lock:
                del self._under_way[token]
                writes, seconds = self._counts.get(file, SyncCount(0, 0.0))
                self._counts[file] = SyncCount(writes + 1, seconds + elapsed_s)

    def counts(self) -> Mapping[str, SyncCount]:
        """Return the counts since the start, by file name."""
        with self._lock:
            return dict(self._counts)

    def pending_s(self) -> float:
        """Return the age of the oldest write that is under way; 0 if there is none."""
        with self._lock:
            oldest_s = min(self._under_way.values(), default=None)
        return 0.0 if oldest_s is None else max(self._clock() - oldest_s, 0.0)


SYNC_TIMES = SyncTimes()
"""The counts of this process."""
