"""Logs a recurring problem once a minute and counts the suppressed lines."""

from __future__ import annotations

import logging
import time

LOG_INTERVAL_S = 60.0


class ThrottledLog:
    """Log of one problem. Call `clear` when the problem is solved, so that its next occurrence is logged at once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s = 0.0
        self._suppressed = 0

    def warn(self, message: str, *, with_traceback: bool = False) -> None:
        """Log a warning, or count it if one was logged within the last minute.

        `with_traceback` adds the exception that is being handled.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._suppressed += 1
            return
        suffix = f" ({self._suppressed} similar lines were suppressed)" if self._suppressed else ""
        self._log.warning("%s%s", message, suffix, exc_info=with_traceback)
        self._next_s, self._suppressed = now_s + LOG_INTERVAL_S, 0

    def clear(self) -> None:
        self._next_s, self._suppressed = 0.0, 0
