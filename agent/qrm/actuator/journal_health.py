"""Reports whether original values can be journalled, and whether space is reserved for that on a full disk.
While they cannot, reclaimable CPU and the reported headroom do not grow, and `/readyz` answers 503 (exporters/page/health.py).
"""

from __future__ import annotations

from agent.qrm.actuator.originals import OriginalsJournal
from api.interfaces import HealthReporter, Unavailable
from api.snapshot import ORIGINALS

STALLED_S = 90.0
"""Time after which a commit that has not ended counts as a failure. A disk that takes 30 s for a sync is slow, and works."""


class JournalHealth:
    """HealthReporter of the journal of originals."""

    name, form, lost_events = ORIGINALS, "file", None

    def __init__(self, originals: OriginalsJournal) -> None:
        self._originals = originals

    def problem(self) -> Unavailable | None:
        """Return why originals cannot be journalled; None while they can."""
        if self._originals.problem is not None:
            return self._originals.problem
        stalled_s = self._originals.stalled_s()
        if stalled_s < STALLED_S:
            return None
        return Unavailable(
            f"original values cannot be journalled: {self._originals.path} has not been written for {stalled_s:.0f} s",
            "check the disk of the state directory, or choose another with --state-dir",
        )


class ReserveHealth:
    """HealthReporter of the space that is reserved for the journal."""

    name, form, lost_events = "originals-reserve", "file", None

    def __init__(self, originals: OriginalsJournal) -> None:
        self._originals = originals

    def problem(self) -> Unavailable | None:
        """Return why the space is missing, or why it is in use; None otherwise."""
        return self._originals.reserve_problem


def journal_reporters(originals: OriginalsJournal | None) -> tuple[HealthReporter, ...]:
    """Return the reporters of an agent that acts, which has a journal."""
    return () if originals is None else (JournalHealth(originals), ReserveHealth(originals))
