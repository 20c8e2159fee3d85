"""Shares counters between two processes without a lock: one writer, many readers, a file of 64-bit cells.
An aligned 8-byte store is atomic, so a reader sees the old or the new value. Also defines the latency buckets and
quantiles.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

BOUNDS_US: tuple[float, ...] = tuple(round(100 * 1.25**i, 1) for i in range(56))
"""Upper bounds of the latency buckets in microseconds: 100 us to 21 s, each a quarter wider than the last."""
BOUNDS_NS: tuple[int, ...] = tuple(int(bound * 1000) for bound in BOUNDS_US)
BUCKETS = len(BOUNDS_US) + 1
"""The last bucket has no upper bound."""


class ClientCell(IntEnum):
    """Cells of the client behind its buckets; all are counters but STARTED_NS and REALTIME."""

    SUM_NS = BUCKETS
    """Sum of the latencies of all requests in the buckets."""
    SENT = BUCKETS + 1
    ANSWERED = BUCKETS + 2
    LOST = BUCKETS + 3
    """Requests without a reply within the timeout; they are in the buckets with their age at that time."""
    LATE = BUCKETS + 4
    """Replies that came after the timeout; not counted a second time."""
    LAG_NS = BUCKETS + 5
    """Sum of the delays between the due time and the sending of requests: the client's own share of the latency."""
    STARTED_NS = BUCKETS + 6
    """CLOCK_REALTIME at which the schedule began; 0 before that."""
    REALTIME = BUCKETS + 7
    """1 if the client runs under SCHED_FIFO."""


CLIENT_CELLS = BUCKETS + len(ClientCell)


class SharedCounters:
    """Unsigned 64-bit cells in the file `path`; indexable like a list."""

    def __init__(self, path: Path, cells: int) -> None:
        with path.open("a+b") as file:
            file.truncate(8 * cells)
            self._map = mmap.mmap(file.fileno(), 8 * cells)
        self._cells = memoryview(self._map).cast("Q")

    def __getitem__(self, index: int) -> int:
        return self._cells[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._cells[index] = value

    def __len__(self) -> int:
        return len(self._cells)

    def values(self) -> list[int]:
        """Return a copy of every cell."""
        return self._cells.tolist()

    def close(self) -> None:
        self._cells.release()
        self._map.close()


def bucket_of(latency_ns: int) -> int:
    """Return the index of the bucket of a latency; upper bounds are inclusive."""
    return bisect_left(BOUNDS_NS, latency_ns)


def quantile_ms(buckets: Sequence[int], q: float) -> float | None:
    """Return the q-quantile in milliseconds, interpolated inside its bucket; None if the buckets are empty.

    In the last bucket it is the lower bound, because that bucket has no upper bound.
    """
    total = sum(buckets)
    if total == 0:
        return None
    rank, below = q * total, 0
    for index, count in enumerate(buckets[:-1]):
        if count and below + count >= rank:
            low = BOUNDS_US[index - 1] if index else 0.0
            return (low + (BOUNDS_US[index] - low) * (rank - below) / count) / 1000
        below += count
    return BOUNDS_US[-1] / 1000
