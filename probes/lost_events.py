"""Counts the events that a probe could not count, and says whether that is a problem now.
Past losses stay a number (`dioptase_source_lost_events_total`); they are a problem while they grow and for a minute
afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from api.interfaces import Unavailable

RECENT_S = 60.0
"""Time after the latest loss for which it is reported as a problem."""


class LostEventCounter:
    """Events of one kind that were not counted. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._grew_at: float | None = None
        self._at_listing = 0
        self._since_listing = False
        self._listing: Mapping[int, str] | None = None

    def update(self, total: int) -> None:
        """Set the number of events since the probe was opened."""
        if total != self.total:
            self.total, self._grew_at = total, self._clock()

    def grew_since_listing(self, total: int, live: Mapping[int, str]) -> bool:
        """Update, and return whether events were lost since the previous listing; the same listing may be passed repeatedly."""
        self.update(total)
        if live is not self._listing:
            self._since_listing, self._at_listing, self._listing = total != self._at_listing, total, live
        return self._since_listing or total != self._at_listing

    def problem(self, what: str, remedy: str) -> Unavailable | None:
        """Return the problem if the number has grown within RECENT_S; its reason is the number followed by `what`."""
        if self._grew_at is None or self._clock() - self._grew_at >= RECENT_S:
            return None
        return Unavailable(f"{self.total} {what}", remedy)
