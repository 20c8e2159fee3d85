"""Applies the decisions of one cycle to cgroups and returns one outcome for each.
Each decision is clamped, dropped if the knob already has the value, journalled, written and read back. The
original values of a cycle are on disk (one fsync) before its first write. A failure affects its own decision
only. `cpu.idle` is written before weights: leaving it resets the weight to the default, and setting it pins the
weight. CPU lists grow from the top down before others shrink from the bottom up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from agent.qrm.actuator.one_shot import OneShotWorker
from agent.qrm.actuator.originals import OriginalsJournal, weight_after_idle
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.plan import (
    CycleState,
    WritePlan,
    failure_outcome,
    grows_memory,
    limits_of,
    lowered_quota,
    nested_cgroups,
    original_of,
    owner_value,
    planning_order,
    with_note,
    writing_order,
)
from agent.qrm.actuator.recheck_cache import AvailableKnobs, RecheckCache
from agent.qrm.actuator.restore import WEIGHT_PINNED, key_of, still_needed
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, RawValue
from agent.qrm.knobs.knob_files import LIST_KNOBS, MEMSW_LIMIT_FILE, canonical, clamp_value
from agent.qrm.knobs.notation import MAX, UNLIMITED
from api.cpu import format_cpu_list, parse_cpu_list
from api.decision import ActMode, Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import ONE_SHOT_KNOBS, Knob

NO_JOURNAL = "originals cannot be journalled, so nothing is changed: give the agent a writable --state-dir"


class Actuator:
    """Applies decisions. Without a journal of originals it writes nothing."""

    def __init__(
        self,
        files: KnobWriter,
        originals: OriginalsJournal | None,
        act: ActMode,
        foretold: PendingOriginals | None = None,
    ) -> None:
        """`foretold` are originals of cgroups that were made with values of ours."""
        self._files, self.foretold = files, foretold or PendingOriginals()
        self._originals = originals
        self._act = act
        self._seen = RecheckCache()
        self._once = OneShotWorker(files.hierarchy)
        self._offered = AvailableKnobs(files)

    def apply(
        self, decisions: Sequence[Decision], now_ns: int | None = None, *, quota_exempt: Collection[str] = ()
    ) -> tuple[Outcome, ...]:
        """What came of each decision, in the order in which they were given; nothing at all with `Act.OFF`.

        With the time, knobs that are decided as before are looked at every few seconds only, without it every time. Cgroups
        to `loosen` may have a quota above the owner's: Koordinator's burst means just that.
        """
        if self._act is ActMode.OFF:
            return ()
        with self._files.one_cycle():
            if self._originals is not None:
                with suppress(Unavailable):  # they stay told, and a decision on one of them tells why
                    self.foretold.adopt(self._files, self._originals)
            return self._applied(decisions, now_ns, quota_exempt)

    def _applied(
        self, decisions: Sequence[Decision], now_ns: int | None, quota_exempt: Collection[str]
    ) -> tuple[Outcome, ...]:
        recalled = self._seen.recall(decisions, now_ns)
        outcomes: dict[int, Outcome] = {}
        plans: dict[int, WritePlan] = {}
        state = CycleState(self._files.cpu_count(), frozenset(quota_exempt))
        for outcome in recalled.values():
            state.settle(outcome.decision.cgroup, outcome.decision.knob, outcome.after or "")
        asked = [index for index in range(len(decisions)) if index not in recalled]
        settings = [index for index in asked if decisions[index].knob not in ONE_SHOT_KNOBS]
        for index in sorted(settings, key=lambda i: planning_order(decisions[i])):
            planned = self.foretold.outcome_if_unwritten(decisions[index]) or self._plan(decisions[index], state)
            if isinstance(planned, Outcome):
                outcomes[index] = planned
            else:
                plans[index] = planned
        if self._act is ActMode.DRY_RUN:
            outcomes.update((index, plan.outcome(OutcomeStatus.DRY_RUN)) for index, plan in plans.items())
        elif plans:
            outcomes.update(self._journal_and_write(plans))
        self._seen.note({index: decisions[index].value for index in outcomes}, outcomes, now_ns)
        outcomes.update(
            (index, self._do(decisions[index])) for index in asked if decisions[index].knob in ONE_SHOT_KNOBS
        )
        outcomes.update(recalled)
        return tuple(outcomes[index] for index in range(len(decisions)))

    def finished(self) -> tuple[Outcome, ...]:
        """What came of earlier decisions that were to be done once, since this was last asked."""
        return self._once.finished()

    @property
    def act(self) -> ActMode:
        """How far this actuator goes."""
        return self._act

    @property
    def version(self) -> str:
        """Of the cgroups that it writes to: `v1` or `v2`."""
        return self._files.version

    def knobs(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        """What the kernel has for each of these cgroups: one may lack what another has (controllers, cpu.idle)."""
        return self._offered.of(cgroups)

    def previous_quota_cores(self, reclaimed: Collection[str]) -> float | None:
        """CPU that an earlier agent's quotas allow these cgroups in all, where it was killed and left some; None where
        nothing limits."""
        total = None
        for entry in self._originals.entries() if self._originals else ():
            if entry.knob is not Knob.QUOTA or entry.cgroup not in reclaimed:
                continue
            try:
                quota, period = self._files.read(entry.cgroup, entry.cgroup_id, Knob.QUOTA).split()
            except (Unavailable, Vanished):
                continue
            if quota == "max":
                return None
            total = (total or 0.0) + int(quota) / int(period)
        return total

    def release(self, decisions: Sequence[Decision], unseen: Collection[str]) -> tuple[Outcome, ...]:
        """Give back every knob that was changed and that nobody decides on any more: its pod left, or the policy changed.

        Cgroups that this round could not see keep what they have: not seeing is no reason to lend.
        """
        if self._originals is None or self._act is not ActMode.ON:
            return ()
        entries, decided = self._originals.entries(), {(decision.cgroup, decision.knob) for decision in decisions}
        keep = still_needed(entries, decided, unseen, self._files.version)
        for entry in entries:
            if key_of(entry) not in keep:
                self._seen.forget(entry, entry.knob)
        return self._originals.restore(self._files, keep) if len(keep) < len(entries) else ()

    def _do(self, decision: Decision) -> Outcome:
        """Have something done that is not set."""
        try:
            if decision.cgroup == "/":
                raise Unavailable("/ is the whole machine", "decide on cgroups of pods only")
            value = canonical(decision.knob, decision.value)
        except ValueError as error:
            return Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=str(error))
        except Unavailable as error:
            return failure_outcome(decision, error)
        if self._act is ActMode.DRY_RUN:
            return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN)
        return self._once.submit(msgspec.structs.replace(decision, value=value))

    def _plan(self, decision: Decision, state: CycleState) -> WritePlan | Outcome:
        """What has to be written for a decision, or the outcome where nothing has."""
        cgroup, cgroup_id, knob = decision.cgroup, decision.cgroup_id, decision.knob
        before = clamped_from = None
        try:
            if cgroup == "/":
                raise Unavailable("/ is the whole machine", "decide on cgroups of pods only")
            asked = canonical(knob, decision.value)
            reading = self._files.look(cgroup, cgroup_id, knob)
            raw = reading.raw
            ours = self._originals is not None and raw.texts == self._originals.last_written.left((cgroup, knob))
            if ours and not reading.beside and (same := self._seen.unchanged_outcome(decision)) is not None:
                state.settle(cgroup, knob, same.after or "")
                return same
            before = self._files.decode(cgroup, knob, raw, reading.beside)
            foreign = not ours and self._is_externally_modified(original_of(decision, knob, raw))
            loosened = knob is Knob.QUOTA and cgroup in state.quota_exempt
            own = (
                UNLIMITED
                if loosened
                else owner_value(decision, reading, before if foreign else None, self._files, self._originals)
            )
            value = clamp_value(knob, asked, limits_of(decision, asked, before, self._files, state, own))
            if value != asked:
                decision, clamped_from = msgspec.structs.replace(decision, value=value), decision.value
            state.settle(cgroup, knob, value)
            # What depends on another knob has moved with that one.
            drifted = not reading.beside and self._seen.drifted(decision, before, value)
            plan = WritePlan(decision, before, raw, clamped_from, drifted)
            if knob is Knob.QUOTA and plan.changes:
                plan = msgspec.structs.replace(plan, burst=self._burst_above(plan))
            if knob is Knob.WEIGHT and self._will_be_idle(decision, state):
                return plan.outcome(
                    OutcomeStatus.UNCHANGED, after=before, error=f"{WEIGHT_PINNED} until the group stops being idle"
                )
            if not plan.changes and not foreign:
                self._recognise(decision, raw)
                return plan.outcome(OutcomeStatus.UNCHANGED, after=before)
        except ValueError as error:
            return Outcome(decision=decision, status=OutcomeStatus.REFUSED, before=before, error=str(error))
        except (Unavailable, Vanished) as error:
            return failure_outcome(decision, error, before=before)
        return plan

    def _is_externally_modified(self, now: OriginalValue) -> bool:
        if self._originals is None:
            return False
        entry = self._originals.find(now.cgroup, now.cgroup_id, now.knob)
        return entry is not None and self._originals.last_written.is_externally_modified(entry, now, self._files)

    def _known_original(self, decision: Decision, knob: Knob) -> OriginalValue | None:
        return self._originals.find(decision.cgroup, decision.cgroup_id, knob) if self._originals else None

    def _will_be_idle(self, decision: Decision, state: CycleState) -> bool:
        if decision.cgroup not in state.idle:
            state.idle[decision.cgroup] = self._is_idle(decision)
        return state.idle[decision.cgroup]

    def _is_idle(self, decision: Decision) -> bool:
        try:
            return self._files.read(decision.cgroup, decision.cgroup_id, Knob.IDLE) == "1"
        except Unavailable:
            return False

    def _journal_and_write(self, plans: Mapping[int, WritePlan]) -> dict[int, Outcome]:
        if self._originals is None:
            return {index: plan.outcome(OutcomeStatus.REFUSED, error=NO_JOURNAL) for index, plan in plans.items()}
        try:
            self._originals.forget_vanished(self._files)
            notes = self._record(self._originals, plans)
        except Unavailable as error:
            reason = f"{error.reason}: {error.remedy}"
            return {index: plan.outcome(OutcomeStatus.REFUSED, error=reason) for index, plan in plans.items()}
        changing = {index: plan for index, plan in plans.items() if plan.changes}
        # Until it is read back, nobody can say what a write has left there.
        self._originals.last_written.forget([(plan.decision.cgroup, plan.decision.knob) for plan in changing.values()])
        for knob in LIST_KNOBS:
            self._widen([plan for plan in changing.values() if plan.decision.knob is knob])
        outcomes = {
            index: plan.outcome(OutcomeStatus.UNCHANGED, after=plan.before)
            for index, plan in plans.items()
            if index not in changing
        }
        for index in sorted(changing, key=lambda i: writing_order(changing[i])):
            outcomes[index] = self._write(changing[index])
        return {index: with_note(outcome, notes[index]) for index, outcome in outcomes.items()}

    def _record(self, originals: OriginalsJournal, plans: Mapping[int, WritePlan]) -> dict[int, str]:
        """Journal what these plans are going to change; for each, what of it somebody else has written meanwhile."""
        found = {index: self._originals_of(plan) for index, plan in plans.items()}
        foreign = {index: [now for now in nows if self._is_externally_modified(now)] for index, nows in found.items()}
        theirs = [now for nows in foreign.values() for now in nows]
        originals.record(*(now for nows in found.values() for now in nows), replace={key_of(now) for now in theirs})
        for now in theirs:
            originals.last_written.note(now, now.raw.texts)
        return {
            index: "; ".join(
                f"{now.knob.value} was changed by someone else to {self._files.decode(now.cgroup, now.knob, now.raw)}: "
                "taken as its new original"
                for now in nows
            )
            for index, nows in foreign.items()
        }

    def _originals_of(self, plan: WritePlan) -> list[OriginalValue]:
        """What a write is going to change: setting cpu.idle changes the weight too, and while it is set the file of the
        weight does not hold the owner's."""
        decision = plan.decision
        own = original_of(decision, decision.knob, plan.raw)
        try:
            if decision.knob is Knob.WEIGHT and self._is_idle(decision):
                return []
            if decision.knob is Knob.IDLE and plan.before == "0":
                weight = self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.WEIGHT)
                return [own, original_of(decision, Knob.WEIGHT, weight)]
        except Vanished:
            return []
        return [own] if plan.burst is None else [own, plan.burst]

    def _burst_above(self, plan: WritePlan) -> OriginalValue | None:
        """The burst of the group, where it is more than the quota that it is getting."""
        quota_us, decision = lowered_quota(plan), plan.decision
        if quota_us is None:
            return None
        try:
            raw = self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.BURST)
            higher = int(self._files.decode(decision.cgroup, Knob.BURST, raw)) > quota_us
        except Unavailable:
            return None  # before Linux 5.14 there is none
        return original_of(decision, Knob.BURST, raw) if higher else None

    def _make_way(self, plan: WritePlan) -> None:
        """Move what is in the way of a write: the kernel takes no quota below the burst, and version 1 no memory above what
        memory and swap may have together."""
        decision = plan.decision
        if plan.burst is not None:
            quota_us = canonical(Knob.QUOTA, decision.value).split()[0]
            self._files.write(decision.cgroup, decision.cgroup_id, Knob.BURST, quota_us)
            self._moved(decision, Knob.BURST)
        swap = self._known_original(decision, Knob.SWAP_MAX)
        if swap is not None and self._files.version == "v1" and grows_memory(plan):
            held = self._files.read(decision.cgroup, decision.cgroup_id, Knob.SWAP_MAX)
            grown = canonical(Knob.MEMORY_MAX, decision.value)
            # What it may swap stays what it is, and may have been written a moment ago.
            kept = {MEMSW_LIMIT_FILE: str(int(grown) + int(held))} if MAX not in (grown, held) else swap.raw.texts
            self._files.write_raw(swap.cgroup, swap.cgroup_id, swap.knob, kept)
            self._moved(decision, Knob.SWAP_MAX)

    def _moved(self, decision: Decision, knob: Knob) -> None:
        self._seen.forget(decision, knob)
        entry = self._known_original(decision, knob)
        if self._originals is not None and entry is not None:
            raw = self._files.read_raw(decision.cgroup, decision.cgroup_id, knob)
            self._originals.last_written.note(entry, raw.texts)

    def _widen(self, plans: Sequence[WritePlan]) -> None:
        """Give cpusets that lie in one another the new CPUs or NUMA nodes on top of the old, so that each can then move alone.

        Refusals show when the decision itself is written.
        """
        touching = nested_cgroups([plan.decision.cgroup for plan in plans])
        for plan in sorted(plans, key=lambda p: p.decision.cgroup.count("/")):
            cgroup, value = plan.decision.cgroup, plan.decision.value
            if not value or cgroup not in touching:
                continue
            both = format_cpu_list((*parse_cpu_list(plan.before), *parse_cpu_list(value)))
            try:
                if both not in (plan.before, value):
                    self._files.write(cgroup, plan.decision.cgroup_id, plan.decision.knob, both)
            except (Unavailable, Vanished):
                continue

    def _write(self, plan: WritePlan) -> Outcome:
        decision = plan.decision
        cgroup, cgroup_id, knob = decision.cgroup, decision.cgroup_id, decision.knob
        after = None
        try:
            self._make_way(plan)
            # Nothing of this round moves a quota before it is written; the others are read once more.
            current = plan.raw.texts if knob is Knob.QUOTA else None
            wrote = self._files.write(cgroup, cgroup_id, knob, decision.value, current)
            known = {file: text for file, text in (current or {}).items() if file not in wrote}
            reading = self._files.look(cgroup, cgroup_id, knob, known=known)
            raw = reading.raw
            after = self._files.decode(cgroup, knob, raw, reading.beside)
            error = self._give_weight_back(decision) if knob is Knob.IDLE and after == "0" else ""
            self._remember(decision, raw)
        except (Unavailable, Vanished) as failure:
            return failure_outcome(decision, failure, before=plan.before, after=after, clamped_from=plan.clamped_from)
        if after != canonical(knob, decision.value):
            error = "the kernel shows another value than the one written: look for another program that writes it"
            return plan.outcome(OutcomeStatus.MISMATCH, after=after, error=error)
        return plan.outcome(OutcomeStatus.APPLIED, after=after, error=error)

    def _recognise(self, decision: Decision, raw: RawValue) -> None:
        """A wanted value that an agent before this one left there is as good as written now."""
        entry = self._known_original(decision, decision.knob)
        if (
            self._act is ActMode.ON
            and self._originals
            and entry
            and not self._originals.last_written.has_written(entry)
        ):
            self._remember(decision, raw)

    def _remember(self, decision: Decision, raw: RawValue) -> None:
        """What the agent left in this knob, and through cpu.idle in the weight."""
        left = {decision.knob: raw.texts}
        if decision.knob is Knob.IDLE:
            left[Knob.WEIGHT] = (
                weight_after_idle(self._files, decision.cgroup)
                if decision.value == "1"
                else self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.WEIGHT).texts
            )
        for knob, texts in left.items():
            entry = self._known_original(decision, knob)
            if self._originals is not None and entry is not None:
                self._originals.last_written.note(entry, texts)

    def _give_weight_back(self, decision: Decision) -> str:
        # The kernel has just reset the weight; unless a decision on it follows, the original is what the owner wanted.
        entry = self._known_original(decision, Knob.WEIGHT)
        try:
            if entry is not None:
                self._files.write_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.texts)
        except Unavailable as error:
            return f"the weight from before could not be put back: {error.reason}: {error.remedy}"
        return ""
