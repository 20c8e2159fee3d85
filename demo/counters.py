"""Numbers that two processes share without a lock: one writer, any readers, an anonymous-looking file of unsigned 64-bit cells.

A cell is written by one process only, and an aligned 8-byte store is atomic on every machine that runs this, so a
reader sees the old value or the new one and never a mixture.
"""

from __future__ import annotations

import mmap
from pathlib import Path

BOUNDS_US: tuple[float, ...] = tuple(round(100 * 1.25**i, 1) for i in range(56))
"""Upper bounds of the latency buckets in microseconds: 100 us to 21 s, each a quarter wider than the last."""


class Counters:
    """`len` unsigned 64-bit cells backed by `path`; indexable like a list."""

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
        """A copy of every cell."""
        return self._cells.tolist()

    def close(self) -> None:
        self._cells.release()
        self._map.close()
