"""Journal of evictions, and the lines of the agent's log about thresholds, conditions and victims.
Dry-run victims and soft-eviction notices are repeated every ten minutes at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agent.journal.jsonl_log import JsonlLog
from api.decision import Cycle
from api.eviction import EvictionEntry, EvictionResult, EvictionThreshold, EvictionVictim, ThresholdMet

log = logging.getLogger("dioptase")

REPEAT_INTERVAL_NS = 600 * 1_000_000_000
MAX_ENTRIES = 500
_VictimKey = tuple[str, str, str, bool, bool]


class _NewVictims:
    """Which victims have not just been said."""

    def __init__(self) -> None:
        self._said: dict[_VictimKey, int] = {}

    def of(self, finished: Cycle) -> Iterator[EvictionVictim]:
        """Those of this round that are to be said."""
        if finished.evictions is None or not finished.evictions.victims:
            return
        now_ns = finished.snapshot.taken_at_ns
        self._said = {key: at_ns for key, at_ns in self._said.items() if 0 <= now_ns - at_ns < REPEAT_INTERVAL_NS}
        for victim in finished.evictions.victims:
            key = (victim.uid, victim.plugin, victim.scope, victim.dry_run, victim.notify)
            if key not in self._said:
                yield victim
            if victim.dry_run or victim.notify:
                self._said.setdefault(key, now_ns)


class EvictionJournal:
    """Sink of rounds and api.interfaces.EvictionRecord. Without a path it remembers and writes nothing."""

    def __init__(self, path: Path | None, *, keep: int = MAX_ENTRIES) -> None:
        self._news = _NewVictims()
        self._ledger = JsonlLog(path, EvictionEntry, "evictions", keep, lambda _: None)

    def publish(self, finished: Cycle) -> None:
        """Record what is new in this round. Never raises."""
        ledger, snapshot = self._ledger, finished.snapshot
        # What became of earlier victims was so before this round chose others.
        for kill in finished.kills:
            seq, at_ns = ledger.next, snapshot.wall_time_ns
            ledger.add(EvictionEntry(seq=seq, wall_time_ns=at_ns, cycle_seq=snapshot.seq, kill=kill))
        for victim in self._news.of(finished):
            seq, at_ns = ledger.next, snapshot.wall_time_ns
            ledger.add(EvictionEntry(seq=seq, wall_time_ns=at_ns, cycle_seq=snapshot.seq, victim=victim))
        ledger.flush()

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[EvictionEntry], bool] | None = None
    ) -> Sequence[EvictionEntry]:
        """As `api.interfaces.EvictionRecord` says. Any thread may ask."""
        return self._ledger.entries(after, limit, wanted)

    @property
    def writable(self) -> bool | None:
        """Whether entries reach the disk; None where there is no file."""
        return self._ledger.writable

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._ledger.close()


class EvictionLog:
    """Lines of the agent's log: thresholds that begin or cease to be met, conditions, victims, and what became of them."""

    def __init__(self) -> None:
        self._news = _NewVictims()
        self._met: dict[tuple[str, str, str], ThresholdMet] = {}
        self._shown: frozenset[str] = frozenset()

    def publish(self, finished: Cycle) -> None:
        """Log what is new in this round. Never raises."""
        if finished.evictions is not None:
            self._tell(finished.evictions)
        for victim in self._news.of(finished):
            fate = "would have to leave" if victim.dry_run else "is told to leave" if victim.notify else "has to leave"
            log.warning("%s %s: %s", victim.pod, fate, victim.reason.text)
        for kill in finished.kills:
            log.log(
                logging.WARNING if kill.warning else logging.INFO,
                "%s: %s: %s",
                kill.pod,
                kill.reason.value,
                kill.message,
            )

    def _tell(self, evictions: EvictionResult) -> None:
        now = {_threshold_name(each): each for each in evictions.thresholds if each.met is not ThresholdMet.NOT_MET}
        for name, threshold in now.items():
            if self._met.get(name) is not threshold.met:
                log.warning("%s %s: %s", threshold.plugin, threshold.met.value, threshold.reason.text)
        for name in self._met.keys() - now.keys():
            log.info("%s: no longer met", " ".join(filter(None, name)))
        self._met = {name: threshold.met for name, threshold in now.items()}
        shown = frozenset(each.condition.name for each in evictions.conditions)
        for condition in sorted(shown - self._shown):
            log.warning("condition %s is in force", condition)
        for condition in sorted(self._shown - shown):
            log.info("condition %s is over", condition)
        self._shown = shown


def _threshold_name(threshold: EvictionThreshold) -> tuple[str, str, str]:
    return (threshold.plugin, threshold.scope, threshold.subject)
