"""The bounded record of what was decided, why, and what came of it: JSON lines that `dioptase explain` and the page read.

Every line is one JournalEntry. Nothing is recorded of a knob that already had its value, and a decision that keeps
failing, or keeps being only a dry run, is recorded once until something else becomes of that knob.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agent.report.ledger import Ledger
from api.decisions import JournalEntry, Outcome, Round, Status

ONCE = frozenset({Status.DRY_RUN, Status.REFUSED, Status.VANISHED, Status.MISMATCH})
"""Outcomes that come again every round for as long as their cause lasts."""
BY_RUNTIME = "nri"
"""Trigger of what the runtime did between rounds."""
Seen = tuple[int, Status, str]


class DecisionJournal:
    """Sink of rounds and api.ports.Journal. Without a path it remembers and writes nothing."""

    def __init__(self, path: Path | None, *, keep: int = 2000) -> None:
        self._last: OrderedDict[tuple[str, str], Seen] = OrderedDict()
        self._pods: OrderedDict[str, str] = OrderedDict()
        self._most = 4 * keep
        """Knobs and pods that are remembered."""
        self._ledger = Ledger(path, JournalEntry, "decisions", keep, self._loaded)

    def publish(self, finished: Round) -> None:
        """Record what is new in this round. Never raises: a disk's refusal is logged once and shown in `problem`."""
        for trigger, outcomes in ((BY_RUNTIME, finished.made), (finished.trigger, finished.outcomes)):
            for outcome in outcomes:
                if self._is_news(outcome):
                    self._record(finished, trigger, outcome)
        self._ledger.flush()

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[JournalEntry], bool] | None = None
    ) -> Sequence[JournalEntry]:
        """As `api.ports.Journal` says. Any thread may ask."""
        return self._ledger.entries(after, limit, wanted)

    @property
    def problem(self) -> str:
        """Why entries are not on disk at the moment, with the file's name; empty while all is well."""
        return self._ledger.problem

    @property
    def writable(self) -> bool | None:
        """Whether entries reach the disk; None where there is no file."""
        return self._ledger.writable

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._ledger.close()

    def _is_news(self, outcome: Outcome) -> bool:
        decision = outcome.decision
        knob = (decision.cgroup, decision.knob.value)
        now: Seen = (decision.cgroup_id, outcome.status, decision.value)
        before = self._last.pop(knob, None)
        self._last[knob] = now
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return outcome.status is not Status.UNCHANGED and (outcome.status not in ONCE or before != now)

    def _record(self, finished: Round, trigger: str, outcome: Outcome) -> None:
        outcome = self._with_pod(outcome)
        self._ledger.add(
            JournalEntry(
                seq=self._ledger.next,
                wall_time_ns=finished.snapshot.wall_time_ns,
                round_seq=finished.snapshot.seq,
                trigger=trigger,
                policy=finished.advice.policy if finished.advice else "",
                outcome=outcome,
            )
        )

    def _with_pod(self, outcome: Outcome) -> Outcome:
        """Originals know no pods: what is put back is of the pod that the cgroup was of when it was last decided on."""
        cgroup, pod = outcome.decision.cgroup, outcome.decision.pod
        if not pod:
            decision = msgspec.structs.replace(outcome.decision, pod=self._pods.get(cgroup, ""))
            return msgspec.structs.replace(outcome, decision=decision)
        self._pods[cgroup] = pod
        self._pods.move_to_end(cgroup)
        if len(self._pods) > self._most:
            self._pods.popitem(last=False)
        return outcome

    def _loaded(self, entry: JournalEntry) -> None:
        self._pods[entry.outcome.decision.cgroup] = entry.outcome.decision.pod
