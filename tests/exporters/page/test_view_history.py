"""What is remembered of past rounds: bounded by number and by size, newest always there."""

from __future__ import annotations

import random

from exporters.page.web_server import ViewHistory


def retained(history: ViewHistory, after: int = 0) -> list[bytes]:
    return list(history.after(after))


def test_the_oldest_rounds_make_room() -> None:
    history = ViewHistory(cycles=3)
    for seq in range(1, 6):
        history.add(seq, b"%d" % seq)
    assert retained(history) == [b"3", b"4", b"5"]
    assert retained(history, after=4) == [b"5"]


def test_size_bounds_what_is_kept_but_never_the_newest() -> None:
    noise = random.Random(1)
    history = ViewHistory(max_bytes=10_000)
    for seq in range(1, 8):
        history.add(seq, noise.randbytes(3_000))
    assert len(retained(history)) == 3
    history.add(8, noise.randbytes(50_000))
    assert [len(view) for view in retained(history)] == [50_000]
