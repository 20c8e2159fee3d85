"""Journal of decisions: what was decided, why, and its outcome, for `dioptase explain` and the page.
An outcome that repeats in every cycle, such as a dry run or a refusal, is recorded once until it changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agent.journal.jsonl_log import JsonlLog
from api.decision import Cycle, JournalEntry, Outcome, OutcomeStatus

REPEATED_STATUSES = frozenset(
    {OutcomeStatus.DRY_RUN, OutcomeStatus.REFUSED, OutcomeStatus.VANISHED, OutcomeStatus.MISMATCH}
)
"""Outcomes that come again every round for as long as their cause lasts."""
NRI_TRIGGER = "nri"
"""Trigger of what the runtime did between rounds."""
OutcomeKey = tuple[int, OutcomeStatus, str]


class DecisionJournal:
    """Sink of rounds and api.interfaces.DecisionRecord. Without a path it remembers and writes nothing."""

    def __init__(self, path: Path | None, *, keep: int = 2000) -> None:
        self._last: OrderedDict[tuple[str, str], OutcomeKey] = OrderedDict()
        self._pods: OrderedDict[str, str] = OrderedDict()
        self._most = 4 * keep
        """Knobs and pods that are remembered."""
        self._ledger = JsonlLog(path, JournalEntry, "decisions", keep, self._loaded)

    def publish(self, finished: Cycle) -> None:
        """Record what is new in this round. Never raises: a disk's refusal is logged once and shown in `problem`."""
        for trigger, outcomes in ((NRI_TRIGGER, finished.runtime_outcomes), (finished.trigger, finished.outcomes)):
            for outcome in outcomes:
                if self._is_news(outcome):
                    self._record(finished, trigger, outcome)
        self._ledger.flush()

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[JournalEntry], bool] | None = None
    ) -> Sequence[JournalEntry]:
        """As `api.interfaces.DecisionRecord` says. Any thread may ask."""
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
        now: OutcomeKey = (decision.cgroup_id, outcome.status, decision.value)
        before = self._last.pop(knob, None)
        self._last[knob] = now
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return outcome.status is not OutcomeStatus.UNCHANGED and (
            outcome.status not in REPEATED_STATUSES or before != now
        )

    def _record(self, finished: Cycle, trigger: str, outcome: Outcome) -> None:
        outcome = self._with_pod(outcome)
        self._ledger.add(
            JournalEntry(
                seq=self._ledger.next,
                wall_time_ns=finished.snapshot.wall_time_ns,
                cycle_seq=finished.snapshot.seq,
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
