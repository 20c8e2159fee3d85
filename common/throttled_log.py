"""Logs the same problem once a minute and counts the suppressed lines."""

from __future__ import annotations

import logging
import time

LOG_INTERVAL_S = 60.0


class ThrottledLog:
    """One trouble's voice. `clear` it when the trouble is over, so that the next is heard at once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s = 0.0
        self._kept_back = 0

    def warn(self, what: str) -> None:
        """Into the log, unless it has just been said; then it is counted."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._kept_back += 1
            return
        more = f" ({self._kept_back} more such lines were kept back)" if self._kept_back else ""
        self._log.warning("%s%s", what, more)
        self._next_s, self._kept_back = now_s + LOG_INTERVAL_S, 0

    def clear(self) -> None:
        self._next_s, self._kept_back = 0.0, 0
