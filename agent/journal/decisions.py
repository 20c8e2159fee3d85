"""Journal of decisions: what was decided, why, and its outcome, for `dioptase explain` and the page.
An outcome that repeats in every cycle, such as a dry run or a refusal, is recorded once until it changes; so is a repair.
Unchanged values are not recorded, except the CPU quota in the cycle in which a trial shows that it helps.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from agent.journal.jsonl_log import JsonlLog
from agent.journal.repeated_repairs import RepeatedRepairs
from api.advice import QUOTA_HELPED
from api.decision import Cycle, JournalEntry, Outcome, OutcomeStatus
from api.knobs import Knob
from common.disk_writer import INLINE_WRITER, FileWriter

REPEATED_STATUSES = frozenset(
    {OutcomeStatus.DRY_RUN, OutcomeStatus.REFUSED, OutcomeStatus.VANISHED, OutcomeStatus.MISMATCH}
)
"""Outcomes that repeat in every cycle while their cause lasts."""
NRI_TRIGGER = "nri"
"""Trigger of outcomes of the runtime between cycles."""
OutcomeKey = tuple[int, OutcomeStatus, str]


class DecisionJournal(JsonlLog[JournalEntry]):
    """Sink of cycles and api.interfaces.DecisionRecord."""

    def __init__(self, path: Path | None, *, keep: int = 2000, disk: FileWriter = INLINE_WRITER) -> None:
        self._last: OrderedDict[tuple[str, str], OutcomeKey] = OrderedDict()
        self._pods: OrderedDict[str, str] = OrderedDict()
        self._max_keys = 4 * keep
        self._repairs = RepeatedRepairs(self._max_keys)
        super().__init__(path, JournalEntry, "decisions", keep, self._remember_pod, disk)

    def publish(self, cycle: Cycle) -> None:
        """Record the new outcomes of a cycle. Never raises: write errors are logged once and shown in `problem`."""
        for trigger, outcomes in ((NRI_TRIGGER, cycle.runtime_outcomes), (cycle.trigger, cycle.outcomes)):
            for outcome in outcomes:
                if self._is_new(outcome):
                    self._record(cycle, trigger, outcome)
        self.flush()

    def _is_new(self, outcome: Outcome) -> bool:
        decision = outcome.decision
        knob = (decision.cgroup, decision.knob.value)
        now: OutcomeKey = (decision.cgroup_id, outcome.status, decision.value)
        before = self._last.pop(knob, None)
        self._last[knob] = now
        if len(self._last) > self._max_keys:
            self._last.popitem(last=False)
        if self._repairs.includes(outcome):
            return False
        if outcome.status is OutcomeStatus.UNCHANGED:
            # A trial has shown that this quota helps: nothing is written, but it is the reason why the quota stays.
            return decision.knob is Knob.QUOTA and decision.reason.rule == QUOTA_HELPED
        return outcome.status not in REPEATED_STATUSES or before != now

    def _record(self, cycle: Cycle, trigger: str, outcome: Outcome) -> None:
        outcome = self._with_pod(outcome)
        self.add(
            JournalEntry(
                seq=self.next_seq,
                wall_time_ns=cycle.snapshot.wall_time_ns,
                cycle_seq=cycle.snapshot.seq,
                trigger=trigger,
                policy=cycle.advice.policy if cycle.advice else "",
                outcome=outcome,
            )
        )

    def _with_pod(self, outcome: Outcome) -> Outcome:
        """Return the outcome with its pod; restored originals get that of the latest decision on the cgroup."""
        cgroup, pod = outcome.decision.cgroup, outcome.decision.pod
        if not pod:
            decision = msgspec.structs.replace(outcome.decision, pod=self._pods.get(cgroup, ""))
            return msgspec.structs.replace(outcome, decision=decision)
        self._pods[cgroup] = pod
        self._pods.move_to_end(cgroup)
        if len(self._pods) > self._max_keys:
            self._pods.popitem(last=False)
        return outcome

    def _remember_pod(self, entry: JournalEntry) -> None:
        self._pods[entry.outcome.decision.cgroup] = entry.outcome.decision.pod
