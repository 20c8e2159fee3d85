"""Log handler that writes to standard error from its own thread, so that no reader can block the agent.
Lines that do not fit into the queue are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading

MAX_QUEUED_LINES = 1000
"""Lines: some 200 kB, which a burst of decisions on a full node does not reach."""
FLUSH_TIMEOUT_S = 1.0
"""What the end of the process waits for whoever reads."""


class StderrLog(logging.Handler):
    """A handler that never waits for a reader."""

    def __init__(self, descriptor: int = 2, most_waiting: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str | None] = queue.Queue(most_waiting)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, or count it as dropped. The handler's lock is held."""
        line = self.format(record)
        if self._dropped:
            line = f"WARNING {self._dropped} lines of the log were dropped: nobody read them\n{line}"
        try:
            self._waiting.put_nowait(line + "\n")
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what waits, if somebody reads it in time. Idempotent; logging calls it at the end of the process."""
        super().close()
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=FLUSH_TIMEOUT_S)
            self._thread.join(FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            left = line.encode(errors="backslashreplace")
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # whoever read is gone; the next line may find another end
                continue
