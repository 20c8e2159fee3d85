"""What is told of evictions: lines of a journal that `dioptase explain` and the page read, and of the agent's own log.

A victim of a dry run, and a pod that is only told, would come again and again for as long as the trouble lasts: they are said
once every ten minutes. The journal is a file of its own beside that of decisions, so that whoever reads those need not
know of it; without an eviction plugin there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agent.report.journal import DecisionJournal
from agent.report.ledger import Ledger
from api.decisions import Round
from api.evictions import EvictionEntry, Evictions, Met, Threshold, Victim

log = logging.getLogger("dioptase")

AGAIN_NS = 600 * 1_000_000_000
KEEP = 500
_Said = tuple[str, str, str, bool, bool]


class _News:
    """Which victims have not just been said."""

    def __init__(self) -> None:
        self._said: dict[_Said, int] = {}

    def of(self, finished: Round) -> Iterator[Victim]:
        """Those of this round that are to be said."""
        if finished.evictions is None or not finished.evictions.victims:
            return
        now_ns = finished.snapshot.taken_at_ns
        self._said = {key: at_ns for key, at_ns in self._said.items() if 0 <= now_ns - at_ns < AGAIN_NS}
        for victim in finished.evictions.victims:
            key = (victim.uid, victim.plugin, victim.scope, victim.dry_run, victim.notify)
            if key not in self._said:
                yield victim
            if victim.dry_run or victim.notify:
                self._said.setdefault(key, now_ns)


class EvictionJournal:
    """Sink of rounds and api.ports.EvictionRecord. Without a path it remembers and writes nothing."""

    def __init__(self, path: Path | None, *, keep: int = KEEP) -> None:
        self._news = _News()
        self._ledger = Ledger(path, EvictionEntry, "evictions", keep, lambda _: None)

    def publish(self, finished: Round) -> None:
        """Record what is new in this round. Never raises."""
        ledger, snapshot = self._ledger, finished.snapshot
        # What became of earlier victims was so before this round chose others.
        for kill in finished.kills:
            seq, at_ns = ledger.next, snapshot.wall_time_ns
            ledger.add(EvictionEntry(seq=seq, wall_time_ns=at_ns, round_seq=snapshot.seq, kill=kill))
        for victim in self._news.of(finished):
            seq, at_ns = ledger.next, snapshot.wall_time_ns
            ledger.add(EvictionEntry(seq=seq, wall_time_ns=at_ns, round_seq=snapshot.seq, victim=victim))
        ledger.flush()

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[EvictionEntry], bool] | None = None
    ) -> Sequence[EvictionEntry]:
        """As `api.ports.EvictionRecord` says. Any thread may ask."""
        return self._ledger.entries(after, limit, wanted)

    @property
    def writable(self) -> bool | None:
        """Whether entries reach the disk; None where there is no file."""
        return self._ledger.writable

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._ledger.close()


def open_journals(
    directory: Path | None, stack: AsyncExitStack, *, evicting: bool
) -> tuple[DecisionJournal, EvictionJournal | None]:
    """What is decided, and who had to leave where somebody may; in memory alone where there is no directory."""
    decisions, evictions = DecisionJournal(None if directory is None else directory / "decisions.jsonl"), None
    stack.callback(decisions.close)
    if evicting:
        evictions = EvictionJournal(None if directory is None else directory / "evictions.jsonl")
        stack.callback(evictions.close)
    return decisions, evictions


class EvictionLog:
    """Lines of the agent's log: thresholds that begin or cease to be met, conditions, victims, and what became of them."""

    def __init__(self) -> None:
        self._news = _News()
        self._met: dict[tuple[str, str, str], Met] = {}
        self._shown: frozenset[str] = frozenset()

    def publish(self, finished: Round) -> None:
        """Log what is new in this round. Never raises."""
        if finished.evictions is not None:
            self._tell(finished.evictions)
        for victim in self._news.of(finished):
            fate = "would have to leave" if victim.dry_run else "is told to leave" if victim.notify else "has to leave"
            log.warning("%s %s: %s", victim.pod, fate, victim.verdict.text)
        for kill in finished.kills:
            log.log(
                logging.WARNING if kill.warning else logging.INFO,
                "%s: %s: %s",
                kill.pod,
                kill.reason.value,
                kill.message,
            )

    def _tell(self, evictions: Evictions) -> None:
        now = {_name(each): each for each in evictions.thresholds if each.met is not Met.NOT_MET}
        for name, threshold in now.items():
            if self._met.get(name) is not threshold.met:
                log.warning("%s %s: %s", threshold.plugin, threshold.met.value, threshold.verdict.text)
        for name in self._met.keys() - now.keys():
            log.info("%s: no longer met", " ".join(filter(None, name)))
        self._met = {name: threshold.met for name, threshold in now.items()}
        shown = frozenset(each.condition.name for each in evictions.conditions)
        for condition in sorted(shown - self._shown):
            log.warning("condition %s is in force", condition)
        for condition in sorted(self._shown - shown):
            log.info("condition %s is over", condition)
        self._shown = shown


def _name(threshold: Threshold) -> tuple[str, str, str]:
    return (threshold.plugin, threshold.scope, threshold.subject)
