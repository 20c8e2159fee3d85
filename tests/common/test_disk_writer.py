"""The thread that writes files: callers never wait, only the newest content of a file is written, and the end is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.disk_writer import INLINE_WRITER, DiskWriter


class Disk:
    """A disk whose first write takes until `release`."""

    def __init__(self) -> None:
        self.started, self.release = threading.Event(), threading.Event()
        self.written: list[str] = []

    def hang(self) -> None:
        self.started.set()
        assert self.release.wait(20)
        self.written.append("hang")


@contextmanager
def hanging() -> Iterator[tuple[Disk, DiskWriter]]:
    disk, writer = Disk(), DiskWriter("test")
    try:
        assert writer.submit("hang", disk.hang) is False
        assert disk.started.wait(20)
        yield disk, writer
    finally:
        disk.release.set()
        assert writer.drain(20)


def test_of_the_writes_of_one_file_that_wait_only_the_newest_runs_and_it_keeps_its_place() -> None:
    with hanging() as (disk, writer):
        for number in range(100):
            writer.submit("originals", lambda number=number: disk.written.append(f"originals {number}"))
            writer.submit("totals", lambda number=number: disk.written.append(f"totals {number}"))
        assert disk.written == []
    assert disk.written == ["hang", "originals 99", "totals 99"]


def test_a_write_submitted_while_it_runs_runs_again() -> None:
    with hanging() as (disk, writer):
        writer.submit("hang", lambda: disk.written.append("again"))
    assert disk.written == ["hang", "again"]


def test_the_end_does_not_wait_for_a_disk_that_hangs() -> None:
    with hanging() as (disk, writer):
        writer.submit("totals", lambda: disk.written.append("totals"))
        assert not writer.drain(0.0)
        assert not writer.close(0.0)
    assert disk.written == ["hang"], "what had not started is not written after the lock is gone"


def test_a_defect_in_one_write_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    writer, written = DiskWriter("test"), list[int]()
    writer.submit("broken", lambda: written.append(1 // 0))
    writer.submit("sound", lambda: written.append(1))
    assert writer.close(20)
    assert written == [1]
    assert "ZeroDivisionError" in caplog.text


def test_without_a_thread_the_write_has_ended_on_return() -> None:
    written: list[int] = []
    assert INLINE_WRITER.submit("file", lambda: written.append(1)) is True
    assert written == [1]
