"""How this process has its memory: what glibc and Python's collector are told at the start."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h; 1.3 MiB less at 200 cgroups."""
_LARGE_BYTES = 128 << 10
_COLLECTIONS = (10_000, 10, 10)
"""Instead of (700, 10, 10)."""


def one() -> None:
    """Keep glibc from giving every thread a heap of its own, and have it give large blocks back when they are freed: the few
    threads here wait more than they allocate, and a scrape needs for a moment what it must not keep."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def few_collections() -> None:
    """Have the collector of cycles leave alone what lives as long as the agent, and come less often: a round makes tens of
    thousands of objects and no cycles, and one collection of everything stopped it for 60 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
