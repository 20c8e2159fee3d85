"""Counts of synced writes: their number and time by file, failed ones included, and the age of one that hangs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from common.state_file import replace_file
from common.sync_times import SYNC_TIMES, SyncTimes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_times_are_added_up_by_file_and_the_oldest_pending_one_is_shown() -> None:
    clock = Clock()
    times = SyncTimes(clock)
    with times.measure("originals.json"):
        clock.now_s += 4
        with times.measure("forecast_state"):
            clock.now_s += 2
            assert times.pending_s() == 6
        assert times.pending_s() == 6
    with suppress(OSError), times.measure("originals.json"):
        clock.now_s += 0.5
        raise OSError("full")
    assert times.counts() == {"originals.json": (2, 6.5), "forecast_state": (1, 2.0)}
    assert times.pending_s() == 0


def test_every_replaced_state_file_is_counted(tmp_path: Path) -> None:
    name = f"{tmp_path.name}.state"
    for _ in range(3):
        replace_file(tmp_path / name, b"content")
    assert SYNC_TIMES.counts()[name].writes == 3
