"""Journal of evictions, and the lines of the agent's log about thresholds, conditions and victims.
Dry-run victims and soft-eviction notices are repeated every ten minutes at most.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from agent.journal.jsonl_log import JsonlLog
from api.decision import Cycle
from api.eviction import EvictionEntry, EvictionEvent, EvictionResult, EvictionThreshold, EvictionVictim, ThresholdMet
from api.units import NS_PER_S
from common.disk_writer import INLINE_WRITER, FileWriter

log = logging.getLogger("dioptase")

REPEAT_INTERVAL_NS = 600 * NS_PER_S
MAX_ENTRIES = 500
_VictimKey = tuple[str, str, str, bool, bool]


class _NewVictims:
    """Filters victims: dry-run victims and soft-eviction notices repeat only after REPEAT_INTERVAL_NS."""

    def __init__(self) -> None:
        self._reported: dict[_VictimKey, int] = {}

    def select(self, cycle: Cycle) -> Iterator[EvictionVictim]:
        """Yield the victims of a cycle that are to be reported."""
        if cycle.evictions is None or not cycle.evictions.victims:
            return
        now_ns = cycle.snapshot.taken_at_ns
        self._reported = {
            key: at_ns for key, at_ns in self._reported.items() if 0 <= now_ns - at_ns < REPEAT_INTERVAL_NS
        }
        for victim in cycle.evictions.victims:
            key = (victim.uid, victim.plugin, victim.scope, victim.dry_run, victim.notify)
            if key not in self._reported:
                yield victim
            if victim.dry_run or victim.notify:
                self._reported.setdefault(key, now_ns)


class EvictionJournal(JsonlLog[EvictionEntry]):
    """Sink of cycles and api.interfaces.EvictionRecord."""

    def __init__(self, path: Path | None, *, keep: int = MAX_ENTRIES, disk: FileWriter = INLINE_WRITER) -> None:
        super().__init__(path, EvictionEntry, "evictions", keep, disk=disk)
        self._new_victims = _NewVictims()

    def publish(self, cycle: Cycle) -> None:
        """Record the eviction steps and new victims of a cycle. Never raises."""
        # The steps belong to victims of earlier cycles, so that they precede the victims of this one.
        for kill in cycle.kills:
            self.add(self._entry(cycle, kill=kill))
        for victim in self._new_victims.select(cycle):
            self.add(self._entry(cycle, victim=victim))
        self.flush()

    def _entry(
        self, cycle: Cycle, *, kill: EvictionEvent | None = None, victim: EvictionVictim | None = None
    ) -> EvictionEntry:
        snapshot = cycle.snapshot
        return EvictionEntry(
            seq=self.next_seq, wall_time_ns=snapshot.wall_time_ns, cycle_seq=snapshot.seq, kill=kill, victim=victim
        )


class EvictionLog:
    """Logs changes of thresholds and conditions, new victims, and the steps of evictions."""

    def __init__(self) -> None:
        self._new_victims = _NewVictims()
        self._met: dict[tuple[str, str, str], ThresholdMet] = {}
        self._conditions: frozenset[str] = frozenset()

    def publish(self, cycle: Cycle) -> None:
        """Log what is new in this cycle. Never raises."""
        if cycle.evictions is not None:
            self._log_changes(cycle.evictions)
        for victim in self._new_victims.select(cycle):
            action = "would be evicted" if victim.dry_run else "is notified" if victim.notify else "is evicted"
            log.warning("%s %s: %s", victim.pod, action, victim.reason.text)
        for kill in cycle.kills:
            log.log(
                logging.WARNING if kill.warning else logging.INFO,
                "%s: %s: %s",
                kill.pod,
                kill.reason.value,
                kill.message,
            )

    def _log_changes(self, evictions: EvictionResult) -> None:
        now = {_threshold_name(each): each for each in evictions.thresholds if each.met is not ThresholdMet.NOT_MET}
        for name, threshold in now.items():
            if self._met.get(name) is not threshold.met:
                log.warning("%s %s: %s", threshold.plugin, threshold.met.value, threshold.reason.text)
        for name in self._met.keys() - now.keys():
            log.info("%s: no longer met", " ".join(filter(None, name)))
        self._met = {name: threshold.met for name, threshold in now.items()}
        conditions = frozenset(each.condition.name for each in evictions.conditions)
        for condition in sorted(conditions - self._conditions):
            log.warning("condition %s is active", condition)
        for condition in sorted(self._conditions - conditions):
            log.info("condition %s is no longer active", condition)
        self._conditions = conditions


def _threshold_name(threshold: EvictionThreshold) -> tuple[str, str, str]:
    return (threshold.plugin, threshold.scope, threshold.subject)
