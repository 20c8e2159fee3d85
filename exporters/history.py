"""The last rounds as a person saw them, kept small: each is the JSON of its View, compressed.

A View of 200 managed containers is 75 kB of JSON and about 10 kB here (real numbers compress less than a test's), so
300 of them stay within a few MiB.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator

ROUNDS = 300
"""Five minutes of ticks."""


class History:
    """Newest last. Reading while a round is added sees a consistent state from before or after it."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self._views: deque[tuple[int, bytes]] = deque(maxlen=rounds)

    def add(self, seq: int, view_json: bytes) -> None:
        self._views.append((seq, zlib.compress(view_json, 1)))

    def after(self, seq: int) -> Iterator[bytes]:
        """The JSON of every kept View whose seq is greater, oldest first, one at a time."""
        return (zlib.decompress(packed) for known, packed in tuple(self._views) if known > seq)
