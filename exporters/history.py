"""The last rounds as a person saw them, kept small: each is the JSON of its View, compressed.

A View of a few containers takes 1 kB here, one of 200 managed containers that all wait for one another about 13 kB. Five
minutes are kept, or as many rounds as fit into a MiB: the agent's memory is worth more than a large node's fifth minute.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator

ROUNDS = 300
"""Five minutes of ticks."""
MAX_BYTES = 1 << 20
LEVEL = 6
"""A quarter smaller than 1, for 1 ms more with 200 containers."""


class History:
    """Newest last. Reading while a round is added sees a consistent state from before or after it."""

    def __init__(self, rounds: int = ROUNDS, max_bytes: int = MAX_BYTES) -> None:
        self._views: deque[tuple[int, bytes]] = deque()
        self._rounds, self._max_bytes = rounds, max_bytes
        self._bytes = 0

    def add(self, seq: int, view_json: bytes) -> None:
        """Keep this round; the oldest make room. The newest is kept however large it is."""
        packed = zlib.compress(view_json, LEVEL)
        self._views.append((seq, packed))
        self._bytes += len(packed)
        while len(self._views) > 1 and (len(self._views) > self._rounds or self._bytes > self._max_bytes):
            self._bytes -= len(self._views.popleft()[1])

    def after(self, seq: int) -> Iterator[bytes]:
        """The JSON of every kept View whose seq is greater, oldest first, one at a time."""
        return (zlib.decompress(packed) for known, packed in tuple(self._views) if known > seq)
