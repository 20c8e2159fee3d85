"""Writes files in a thread of its own, so that neither the event loop nor a cycle waits for a disk.
open(), rename() and write() can wait for a disk as well as fsync(): ext4 and xfs hold them up while they commit their own
journal (fs/jbd2/transaction.c, start_this_handle()).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class FileWriter(Protocol):
    """Runs functions that write files."""

    def submit(self, name: str, write: Callable[[], None]) -> bool:
        """Run the function now or later; return whether it has ended. It must report its failures itself, and write what
        is newest when it runs: of two functions with the same name that still wait, only the later one runs."""


class InlineWriter:
    """Runs each function at once: for commands such as `dioptase reset`, which have nothing else to do."""

    def submit(self, _name: str, write: Callable[[], None]) -> bool:
        """Run the function and return True."""
        write()
        return True


INLINE_WRITER = InlineWriter()


class DiskWriter:
    """Runs functions one after another in a thread. The thread is a daemon, so that a disk that hangs does not delay the end of
    the process."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the thread."""
        self.name = name
        self._queue: dict[str, Callable[[], None]] = {}
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, name: str, write: Callable[[], None]) -> bool:
        """Queue the function and return False. A queued one with the same name is replaced and keeps its place."""
        with self._changed:
            self._queue[name] = write
            self._changed.notify_all()
        return False

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything submitted has ended; return whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait as `drain` does, then end the thread. What still waits by then is not written. Idempotent."""
        done = self.drain(0.0 if self._closed else timeout_s)
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if done:
            self._thread.join()
        return done

    def _run(self) -> None:
        while (write := self._next()) is not None:
            try:
                write()
            except Exception:
                log.exception("a state file cannot be written; the agent continues")
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.pop(next(iter(self._queue)))
