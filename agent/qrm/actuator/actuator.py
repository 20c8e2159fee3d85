"""Applies the decisions of one cycle to cgroups and returns one outcome for each.
Each decision is clamped, dropped if the knob already has the value, journalled, written and read back. A knob is
written once its own original is on disk: the originals of a cycle are saved together, in another thread, and a knob
that the agent wrote before does not wait. A failure affects its own decision only. `cpu.idle` is written before
weights: leaving it resets the weight to the default, and setting it pins the weight. CPU lists grow from the top
down before others shrink from the bottom up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from agent.qrm.actuator.one_shot import OneShotWorker
from agent.qrm.actuator.originals import OriginalsJournal, weight_after_idle
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.plan import (
    CycleState,
    WritePlan,
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
from agent.qrm.actuator.restore import WEIGHT_PINNED, failure_outcome, key_of, still_needed
from agent.qrm.actuator.thread_slices import ThreadSlices
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, RawValue
from agent.qrm.knobs.knob_files import LIST_KNOBS, MEMSW_LIMIT_FILE, canonical, clamp_value
from agent.qrm.knobs.notation import MAX, UNLIMITED
from api.cpu import format_cpu_list, parse_cpu_list
from api.decision import ActMode, Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import ONE_SHOT_KNOBS, Knob

_OTHER_KNOBS = ONE_SHOT_KNOBS | {Knob.SLICE}
"""Knobs that are no files of the cgroup with a value to restore."""
NO_JOURNAL = "originals cannot be journalled, so nothing is changed: give the agent a writable --state-dir"


class Actuator:
    """Applies decisions to cgroups. Without a journal of originals it writes nothing."""

    def __init__(
        self,
        files: KnobWriter,
        originals: OriginalsJournal | None,
        act: ActMode,
        pending_originals: PendingOriginals | None = None,
        slices: ThreadSlices | None = None,
    ) -> None:
        """`pending_originals` holds originals of cgroups that the runtime creates with values of the agent. Without `slices`
        no slice of a thread is changed."""
        self._files, self.pending_originals = files, pending_originals or PendingOriginals()
        self._originals = originals
        self._act = act
        self._cache = RecheckCache()
        self._one_shot = OneShotWorker(files.hierarchy)
        self._slices = slices if slices is not None and slices.available else None
        self._available = AvailableKnobs(files, frozenset({Knob.SLICE} if self._slices is not None else ()))

    def apply(
        self, decisions: Sequence[Decision], now_ns: int | None = None, *, quota_exempt: Collection[str] = ()
    ) -> tuple[Outcome, ...]:
        """Return the outcome of each decision, in the order of the decisions; nothing with `ActMode.OFF`. With
        `now_ns`, unchanged decisions are answered from a cache and their knobs re-read every few seconds; without it
        every knob is read. Cgroups in `quota_exempt` may exceed the owner's quota (Koordinator's quota burst)."""
        if self._act is ActMode.OFF:
            return ()
        with self._files.one_cycle():
            if self._originals is not None:
                self._originals.retry()
                with suppress(Unavailable):  # they stay pending, and the decision on such a cgroup reports the reason
                    self.pending_originals.adopt(self._files, self._originals)
            return self._apply_uncached(decisions, now_ns, quota_exempt)

    def _apply_uncached(
        self, decisions: Sequence[Decision], now_ns: int | None, quota_exempt: Collection[str]
    ) -> tuple[Outcome, ...]:
        cached = self._cache.recall(decisions, now_ns)
        outcomes: dict[int, Outcome] = {}
        plans: dict[int, WritePlan] = {}
        state = CycleState(self._files.cpu_count(), frozenset(quota_exempt))
        for outcome in cached.values():
            state.set_value(outcome.decision.cgroup, outcome.decision.knob, outcome.after or "")
        uncached = [index for index in range(len(decisions)) if index not in cached]
        knob_indices = [index for index in uncached if decisions[index].knob not in _OTHER_KNOBS]
        for index in sorted(knob_indices, key=lambda i: planning_order(decisions[i])):
            planned = self.pending_originals.outcome_if_unwritten(decisions[index]) or self._plan(
                decisions[index], state
            )
            if isinstance(planned, Outcome):
                outcomes[index] = planned
            else:
                plans[index] = planned
        if self._act is ActMode.DRY_RUN:
            outcomes.update((index, plan.outcome(OutcomeStatus.DRY_RUN)) for index, plan in plans.items())
        elif plans:
            outcomes.update(self._journal_and_write(plans))
        outcomes.update(
            self._apply_slices({i: decisions[i] for i in uncached if decisions[i].knob is Knob.SLICE}, now_ns)
        )
        self._cache.note({index: decisions[index].value for index in outcomes}, outcomes, now_ns)
        outcomes.update(
            (index, self._submit_one_shot(decisions[index]))
            for index in uncached
            if decisions[index].knob in ONE_SHOT_KNOBS
        )
        outcomes.update(cached)
        return tuple(outcomes[index] for index in range(len(decisions)))

    def _apply_slices(self, decisions: Mapping[int, Decision], now_ns: int | None) -> Mapping[int, Outcome]:
        if self._slices is None or not decisions:
            return {}
        dry = self._act is ActMode.DRY_RUN
        return dict(zip(decisions, self._slices.apply(tuple(decisions.values()), now_ns or 0, dry=dry), strict=True))

    def on_journalled(self, wake: Callable[[], object]) -> None:
        """Have `wake` called, in the thread of the disk, when originals are on disk that writes have waited for."""
        if self._originals is not None:
            self._originals.on_commit = wake

    def before_originals(self, write: Callable[[], object]) -> None:
        """Have `write` called, in the thread of the disk, before originals are written."""
        if self._originals is not None:
            self._originals.before_commit = write

    def finished(self) -> tuple[Outcome, ...]:
        """Return the outcomes of one-shot operations that finished since the last call."""
        return self._one_shot.finished()

    @property
    def act(self) -> ActMode:
        """Mode: off, dry run or on."""
        return self._act

    @property
    def version(self) -> str:
        """Version of the cgroups it writes to: `v1` or `v2`."""
        return self._files.version

    def knobs(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        """Return the knobs that the kernel offers for each cgroup; they differ by controller and kernel version."""
        return self._available.of(cgroups)

    def previous_quota_cores(self, reclaimed: Collection[str]) -> float | None:
        """Return the CPU that the quotas of a killed agent allow these cgroups in total; None without such a quota."""
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
        """Restore every changed knob that has no decision any more: its pod ended, or the policy changed. Cgroups of
        `unseen` keep their values: a failed reading is no reason to restore."""
        if self._originals is None or self._act is not ActMode.ON:
            return ()
        entries, decided = self._originals.entries(), {(decision.cgroup, decision.knob) for decision in decisions}
        keep = still_needed(entries, decided, unseen, self._files.version)
        for entry in entries:
            if key_of(entry) not in keep:
                self._cache.forget(entry, entry.knob)
        outcomes = self._originals.restore(self._files, keep) if len(keep) < len(entries) else ()
        return (*outcomes, *self._release_slices(self._originals, decisions, unseen))

    def _release_slices(
        self, originals: OriginalsJournal, decisions: Sequence[Decision], unseen: Collection[str]
    ) -> tuple[Outcome, ...]:
        if self._slices is None:
            return ()
        sliced = {decision.cgroup for decision in decisions if decision.knob is Knob.SLICE}
        try:
            return self._slices.restore(sliced.union(unseen))
        except Unavailable as error:
            # The outcomes of the knobs of this release are facts, whether or not this file can be written.
            originals.report(error)
            return ()

    def _submit_one_shot(self, decision: Decision) -> Outcome:
        try:
            value = _requested_value(decision)
        except ValueError as error:
            return Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=str(error))
        except Unavailable as error:
            return failure_outcome(decision, error)
        if self._act is ActMode.DRY_RUN:
            return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN)
        return self._one_shot.submit(msgspec.structs.replace(decision, value=value))

    def _plan(self, decision: Decision, state: CycleState) -> WritePlan | Outcome:
        """Return the plan of a write, or the outcome if nothing has to be written."""
        cgroup, cgroup_id, knob = decision.cgroup, decision.cgroup_id, decision.knob
        before = clamped_from = None
        try:
            requested = _requested_value(decision)
            reading = self._files.read_with_context(cgroup, cgroup_id, knob)
            raw = reading.raw
            is_last_written = self._originals is not None and raw.texts == self._originals.last_written.get(
                (cgroup, knob)
            )
            if (
                is_last_written
                and not reading.context
                and (same := self._cache.unchanged_outcome(decision)) is not None
            ):
                state.set_value(cgroup, knob, same.after or "")
                return same
            before = self._files.decode(cgroup, knob, raw, reading.context)
            modified = not is_last_written and self._is_externally_modified(original_of(decision, knob, raw))
            exempt = knob is Knob.QUOTA and cgroup in state.quota_exempt
            own = (
                UNLIMITED
                if exempt
                else owner_value(decision, reading, before if modified else None, self._files, self._originals)
            )
            value = clamp_value(knob, requested, limits_of(decision, requested, before, self._files, state, own))
            if value != requested:
                decision, clamped_from = msgspec.structs.replace(decision, value=value), decision.value
            state.set_value(cgroup, knob, value)
            # A value that depends on another knob changes with that knob: this is no drift.
            drifted = not reading.context and self._cache.drifted(decision, before, value)
            plan = WritePlan(decision, before, raw, clamped_from, drifted)
            if knob is Knob.QUOTA and plan.changes:
                plan = msgspec.structs.replace(plan, burst=self._burst_to_lower(plan))
            if knob is Knob.WEIGHT and self._will_be_idle(decision, state):
                return plan.outcome(
                    OutcomeStatus.UNCHANGED, after=before, error=f"{WEIGHT_PINNED} until the group stops being idle"
                )
            if not plan.changes and not modified:
                self._adopt_present_value(decision, raw)
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

    def _journalled(self, decision: Decision, knob: Knob) -> OriginalValue | None:
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
        originals_by_plan = {index: self._originals_of(plan) for index, plan in plans.items()}
        try:
            self._originals.forget_vanished(self._files)
            notes = self._record(self._originals, originals_by_plan)
        except Unavailable as error:
            reason = f"{error.reason}: {error.remedy}"
            return {index: plan.outcome(OutcomeStatus.REFUSED, error=reason) for index, plan in plans.items()}
        keys = {index: [key_of(now) for now in originals_by_plan[index]] for index in plans if plans[index].changes}
        ready = self._originals.may_write(keys)
        changing = {index: plan for index, plan in plans.items() if index in ready}
        # A failing write may leave any value; it is recorded again when it has been read back.
        self._originals.last_written.forget([(plan.decision.cgroup, plan.decision.knob) for plan in changing.values()])
        for knob in LIST_KNOBS:
            self._widen([plan for plan in changing.values() if plan.decision.knob is knob])
        outcomes = {
            index: self._originals.deferred(plan.outcome(OutcomeStatus.UNCHANGED))
            if plan.changes
            else plan.outcome(OutcomeStatus.UNCHANGED, after=plan.before)
            for index, plan in plans.items()
            if index not in changing
        }
        for index in sorted(changing, key=lambda i: writing_order(changing[i])):
            outcomes[index] = self._write(changing[index])
        return {index: with_note(outcome, notes[index]) for index, outcome in outcomes.items()}

    def _record(
        self, originals: OriginalsJournal, originals_by_plan: Mapping[int, Sequence[OriginalValue]]
    ) -> dict[int, str]:
        """Journal the originals of these plans; return by plan a note on values that were modified externally."""
        modified_by_plan = {
            index: [now for now in nows if self._is_externally_modified(now)]
            for index, nows in originals_by_plan.items()
        }
        modified = [now for nows in modified_by_plan.values() for now in nows]
        originals.record(
            *(now for nows in originals_by_plan.values() for now in nows),
            replace={key_of(now) for now in modified},
            planned=True,
        )
        for now in modified:
            originals.last_written.record(now, now.raw.texts)
        return {
            index: "; ".join(
                f"{now.knob.value} was changed by another program to {self._files.decode(now.cgroup, now.knob, now.raw)}, "
                "which becomes its new original"
                for now in nows
            )
            for index, nows in modified_by_plan.items()
        }

    def _originals_of(self, plan: WritePlan) -> list[OriginalValue]:
        """Return the originals that a write changes. Setting cpu.idle changes the weight as well. While it is set,
        the weight file does not hold the owner's value."""
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

    def _burst_to_lower(self, plan: WritePlan) -> OriginalValue | None:
        """Return the burst of the cgroup if it exceeds the planned quota."""
        quota_us, decision = lowered_quota(plan), plan.decision
        if quota_us is None:
            return None
        try:
            raw = self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.BURST)
            higher = int(self._files.decode(decision.cgroup, Knob.BURST, raw)) > quota_us
        except Unavailable:
            return None  # cpu.max.burst exists since Linux 5.14
        return original_of(decision, Knob.BURST, raw) if higher else None

    def _remove_obstacles(self, plan: WritePlan) -> None:
        """Change the knobs that the kernel requires to be changed first. The kernel refuses a quota below the burst,
        and version 1 a memory limit above the limit of memory and swap."""
        decision = plan.decision
        if plan.burst is not None:
            quota_us = canonical(Knob.QUOTA, decision.value).split()[0]
            self._files.write(decision.cgroup, decision.cgroup_id, Knob.BURST, quota_us)
            self._note_moved(decision, Knob.BURST)
        swap_original = self._journalled(decision, Knob.SWAP_MAX)
        if swap_original is None or self._originals is None or self._originals.is_unwritten(key_of(swap_original)):
            return
        if self._files.version == "v1" and grows_memory(plan):
            swap_bytes = self._files.read(decision.cgroup, decision.cgroup_id, Knob.SWAP_MAX)
            memory_bytes = canonical(Knob.MEMORY_MAX, decision.value)
            # The swap limit keeps its value, which may have been written in this very cycle.
            texts = (
                {MEMSW_LIMIT_FILE: str(int(memory_bytes) + int(swap_bytes))}
                if MAX not in (memory_bytes, swap_bytes)
                else swap_original.raw.texts
            )
            self._files.write_raw(swap_original.cgroup, swap_original.cgroup_id, swap_original.knob, texts)
            self._note_moved(decision, Knob.SWAP_MAX)

    def _note_moved(self, decision: Decision, knob: Knob) -> None:
        self._cache.forget(decision, knob)
        raw = self._files.read_raw(decision.cgroup, decision.cgroup_id, knob)
        self._record_written(decision, knob, raw.texts)

    def _widen(self, plans: Sequence[WritePlan]) -> None:
        """Add the new CPUs or NUMA nodes of nested cpusets to the old ones, so that each can then shrink alone.
        Refusals are reported when the decision itself is written."""
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
            self._remove_obstacles(plan)
            # No other write of this cycle changes a quota; all other knobs are read again.
            current = plan.raw.texts if knob is Knob.QUOTA else None
            written = self._files.write(cgroup, cgroup_id, knob, decision.value, current)
            unchanged = {file: text for file, text in (current or {}).items() if file not in written}
            reading = self._files.read_with_context(cgroup, cgroup_id, knob, unchanged=unchanged)
            raw = reading.raw
            after = self._files.decode(cgroup, knob, raw, reading.context)
            error = self._restore_weight_after_idle(decision) if knob is Knob.IDLE and after == "0" else ""
            self._note_written(decision, raw)
        except (Unavailable, Vanished) as failure:
            return failure_outcome(decision, failure, before=plan.before, after=after, clamped_from=plan.clamped_from)
        if after != canonical(knob, decision.value):
            error = "the kernel shows another value than the one written: look for another program that writes it"
            return plan.outcome(OutcomeStatus.MISMATCH, after=after, error=error)
        return plan.outcome(OutcomeStatus.APPLIED, after=after, error=error)

    def _adopt_present_value(self, decision: Decision, raw: RawValue) -> None:
        """Record a value as the agent's own if a previous agent has already written it."""
        entry = self._journalled(decision, decision.knob)
        if self._act is not ActMode.ON or self._originals is None or entry is None:
            return
        if self._originals.is_unwritten(key_of(entry)):
            return
        if self._originals.last_written.get(key_of(entry)) is None:
            self._note_written(decision, raw)

    def _note_written(self, decision: Decision, raw: RawValue) -> None:
        """Record the value that the agent wrote, and the weight that writing cpu.idle set."""
        texts_by_knob = {decision.knob: raw.texts}
        if decision.knob is Knob.IDLE:
            texts_by_knob[Knob.WEIGHT] = (
                weight_after_idle(self._files, decision.cgroup)
                if decision.value == "1"
                else self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.WEIGHT).texts
            )
        for knob, texts in texts_by_knob.items():
            self._record_written(decision, knob, texts)

    def _record_written(self, decision: Decision, knob: Knob, texts: Mapping[str, str]) -> None:
        entry = self._journalled(decision, knob)
        if self._originals is not None and entry is not None:
            self._originals.last_written.record(entry, texts)

    def _restore_weight_after_idle(self, decision: Decision) -> str:
        # Leaving cpu.idle resets the weight (kernel/sched/fair.c, sched_group_set_idle()): write the original again.
        entry = self._journalled(decision, Knob.WEIGHT)
        try:
            if entry is not None:
                self._files.write_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.texts)
        except Unavailable as error:
            return f"the original weight could not be restored: {error.reason}: {error.remedy}"
        return ""


def _requested_value(decision: Decision) -> str:
    """Return the canonical value. Raises ValueError if it is invalid, Unavailable for the root cgroup."""
    if decision.cgroup == "/":
        raise Unavailable("/ is the root cgroup, which the agent never changes", "list only cgroups of pods")
    return canonical(decision.knob, decision.value)
