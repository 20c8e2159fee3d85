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
"""Maximum length of the queue, about 200 kB; a burst of decisions on a full node stays below."""
FLUSH_TIMEOUT_S = 1.0
"""Time that the exit of the process waits for the reader."""


class StderrLog(logging.Handler):
    """Logging handler that never blocks on the reader of standard error."""

    def __init__(self, descriptor: int = 2, max_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._queue: queue.Queue[str | None] = queue.Queue(max_lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record, or count it as dropped."""
        line = self.format(record)
        if self._dropped:
            line = f"WARNING {self._dropped} log lines were dropped: standard error was not read\n{line}"
        try:
            self._queue.put_nowait(line + "\n")
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the queued lines unless the reader blocks. Idempotent; logging calls it when the process exits."""
        super().close()
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=FLUSH_TIMEOUT_S)
            self._thread.join(FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            data = line.encode(errors="backslashreplace")
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # The reader closed the pipe.
                continue
