"""Lines of the log reach standard error in order, and a blocked reader does not block the agent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import pytest

from agent.journal import stderr
from agent.journal.stderr import StderrLog


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def say(handler: StderrLog, text: str) -> None:
    handler.handle(logging.LogRecord("test", logging.INFO, "", 0, text, (), None))


def fill(writing: int) -> int:
    """Write until the pipe is full, and return the number of bytes."""
    os.set_blocking(writing, False)
    filled = 0
    try:
        while True:
            filled += os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
        return filled


def read(reading: int, size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += os.read(reading, size - len(received))
    return received


def test_every_line_is_written_by_the_end_of_the_process(pipe: tuple[int, int]) -> None:
    handler = StderrLog(pipe[1])
    for number in range(500):
        say(handler, f"{number:03d} \udcff")
    handler.close()
    handler.close()
    written = os.read(pipe[0], 1 << 16).decode()
    assert written == "".join(f"{number:03d} \\udcff\n" for number in range(500))


def test_a_blocked_reader_stops_no_thread_and_dropped_lines_are_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "FLUSH_TIMEOUT_S", 0.05)
    reading, writing = pipe
    filled = fill(writing)
    handler = StderrLog(writing, max_lines=10)
    say(handler, "00")
    while not handler._queue.empty():  # the writing thread has taken it, and is blocked
        time.sleep(0.001)
    for number in range(1, 100):
        say(handler, f"{number:02d}")
    handler.close()
    assert read(reading, filled) == bytes(filled)
    retained = "".join(f"{number:02d}\n" for number in range(11))
    assert read(reading, len(retained)).decode() == retained
    say(handler, "again")
    warning = "WARNING 89 log lines were dropped: standard error was not read\nagain\n"
    assert read(reading, len(warning)).decode() == warning
    handler.close()


def test_a_closed_reader_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    handler = StderrLog(writing)
    say(handler, "unheard")
    handler.close()
    os.close(writing)
