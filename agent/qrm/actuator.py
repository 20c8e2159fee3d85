"""The only writer: decisions of one round into the kernel, shyly, and what came of each.

Every decision is clamped, dropped where the knob has that value already, journalled, written and read back. Originals
of a round are on disk, with one fsync, before its first write. A failure concerns its own decision only.

Order: cpu.idle before the weight of any cgroup, because leaving it resets the weight to its default (the actuator then
puts the original back at once), and setting it pins the weight: a weight decided for an idle group is reported
UNCHANGED with the reason, since nothing was written and nothing failed; it takes effect when the group stops being
idle. Cpusets grow from the top down before others shrink from the bottom up, so that none is ever outside the one above.

A value that is neither what the agent left there nor the original was written by somebody else: it becomes the original
before anything is written over it, and the outcome says so. A program that keeps fighting costs one journal a round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from agent.qrm.bounds import Limits, bound
from agent.qrm.hands import weight_after_idle
from agent.qrm.knobs import KnobFiles, Original, RawValue, canonical
from agent.qrm.originals import Originals
from agent.qrm.restore import ORDER, PINNED, key_of
from agent.qrm.table import TABLE, UNLIMITED
from api.cpus import format_cpu_list, parse_cpu_list
from api.decisions import Act, Decision, Outcome, Status
from api.knobs import Knob
from api.ports import Unavailable, Vanished

ASK_KNOBS_EVERY = 60
NO_JOURNAL = "originals cannot be journalled, so nothing is changed: give the agent a writable --state-dir"


@dataclass(frozen=True)
class _Plan:
    """A decision that changes a knob, or only its original because somebody else has set the knob so already."""

    decision: Decision
    before: str
    raw: RawValue
    clamped_from: str | None

    @property
    def changes(self) -> bool:
        return self.before != canonical(self.decision.knob, self.decision.value)

    def outcome(self, status: Status, *, after: str | None = None, error: str = "") -> Outcome:
        return Outcome(
            decision=self.decision,
            status=status,
            before=self.before,
            after=after,
            error=error,
            clamped_from=self.clamped_from,
        )


@dataclass
class _RoundState:
    """What this round has settled so far that later decisions depend on."""

    cpu_count: int
    idle: dict[str, bool] = field(default_factory=dict)
    cpus: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Actuator:
    """Applies decisions. Without a journal of originals it writes nothing."""

    def __init__(self, files: KnobFiles, originals: Originals | None, act: Act) -> None:
        self._files = files
        self._originals = originals
        self._act = act
        self._knobs_asked = 0
        self._complete: Mapping[str, frozenset[Knob]] = {}

    def apply(self, decisions: Sequence[Decision]) -> tuple[Outcome, ...]:
        """What came of each decision, in the order in which they were given; nothing at all with `Act.OFF`."""
        if self._act is Act.OFF:
            return ()
        outcomes: dict[int, Outcome] = {}
        plans: dict[int, _Plan] = {}
        state = _RoundState(self._files.cpu_count())
        for index in sorted(range(len(decisions)), key=lambda i: _planning_order(decisions[i])):
            planned = self._plan(decisions[index], state)
            if isinstance(planned, Outcome):
                outcomes[index] = planned
            else:
                plans[index] = planned
        if self._act is Act.DRY_RUN:
            outcomes.update((index, plan.outcome(Status.DRY_RUN)) for index, plan in plans.items())
        elif plans:
            outcomes.update(self._journal_and_write(plans))
        return tuple(outcomes[index] for index in range(len(decisions)))

    @property
    def act(self) -> Act:
        """How far this actuator goes."""
        return self._act

    def knobs(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        """What the kernel has for each of these cgroups: one may lack what another has (controllers, cpu.idle).

        A cgroup that lacks something is asked anew in every round, one that has all of it now and then.
        """
        self._knobs_asked += 1
        complete = {} if self._knobs_asked % ASK_KNOBS_EVERY == 0 else self._complete
        known = {cgroup: complete.get(cgroup) or self._available(cgroup) for cgroup in cgroups}
        self._complete = {cgroup: knobs for cgroup, knobs in known.items() if len(knobs) == len(TABLE)}
        return known

    def _available(self, cgroup: str) -> frozenset[Knob]:
        return frozenset(knob for knob in TABLE if self._files.available(knob, cgroup))

    def inherited_cores(self) -> float | None:
        """CPU that an earlier agent's quotas allow in all, where it was killed and left some; None where nothing limits."""
        total = None
        for entry in self._originals.entries() if self._originals else ():
            if entry.knob is not Knob.QUOTA:
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
        if self._originals is None or self._act is not Act.ON:
            return ()
        decided = {(decision.cgroup, decision.knob) for decision in decisions}
        keys = [key_of(entry) for entry in self._originals.entries()]
        keep = {key for key in keys if key in decided or key[0] in unseen}
        # A weight was recorded because cpu.idle changes it; it belongs to that decision (`put_back` keeps it too).
        keep |= {(cgroup, Knob.WEIGHT) for cgroup, knob in keep if knob is Knob.IDLE}
        return self._originals.restore(self._files, keep) if set(keys) - keep else ()

    def _plan(self, decision: Decision, state: _RoundState) -> _Plan | Outcome:
        """What has to be written for a decision, or the outcome where nothing has."""
        cgroup, cgroup_id, knob = decision.cgroup, decision.cgroup_id, decision.knob
        before = clamped_from = None
        try:
            if cgroup == "/":
                raise Unavailable("/ is the whole machine", "decide on cgroups of pods only")
            asked = canonical(knob, decision.value)
            raw = self._files.read_raw(cgroup, cgroup_id, knob)
            before = self._files.decode(cgroup, knob, raw)
            foreign = self._is_foreign(_original(decision, knob, raw))
            own_quota = self._own_quota(decision, before, foreign) if knob is Knob.QUOTA else UNLIMITED
            value = bound(knob, asked, self._limits(decision, state, own_quota))
            if value != asked:
                decision, clamped_from = msgspec.structs.replace(decision, value=value), decision.value
            if knob is Knob.CPUSET and value:
                state.cpus[cgroup] = parse_cpu_list(value)
            if knob is Knob.IDLE:
                state.idle[cgroup] = value == "1"
            plan = _Plan(decision, before, raw, clamped_from)
            if knob is Knob.WEIGHT and self._will_be_idle(decision, state):
                return plan.outcome(Status.UNCHANGED, after=before, error=f"{PINNED} until the group stops being idle")
            if not plan.changes and not foreign:
                self._recognise(decision, raw)
                return plan.outcome(Status.UNCHANGED, after=before)
        except ValueError as error:
            return Outcome(decision=decision, status=Status.REFUSED, before=before, error=str(error))
        except (Unavailable, Vanished) as error:
            return _failed(decision, error, before=before)
        return plan

    def _limits(self, decision: Decision, state: _RoundState, own_quota: str) -> Limits:
        ceiling = None
        if decision.knob is Knob.CPUSET:
            above = decision.cgroup.rpartition("/")[0]
            ceiling = state.cpus.get(above) or self._files.ceiling(decision.cgroup)
        return Limits(
            ceiling=ceiling,
            cpu_count=state.cpu_count,
            inherits=self._files.hierarchy.mode == "v2",
            own_quota=own_quota,
        )

    def _own_quota(self, decision: Decision, current: str, foreign: bool) -> str:
        """What the owner set: the journalled original, or what is there now if the agent did not write that."""
        entry = self._known(decision, decision.knob)
        return current if entry is None or foreign else self._files.decode(entry.cgroup, entry.knob, entry.raw)

    def _is_foreign(self, now: Original) -> bool:
        if self._originals is None:
            return False
        entry = self._originals.find(now.cgroup, now.cgroup_id, now.knob)
        return entry is not None and self._originals.hands.is_foreign(entry, now, self._files)

    def _known(self, decision: Decision, knob: Knob) -> Original | None:
        return self._originals.find(decision.cgroup, decision.cgroup_id, knob) if self._originals else None

    def _will_be_idle(self, decision: Decision, state: _RoundState) -> bool:
        if decision.cgroup not in state.idle:
            state.idle[decision.cgroup] = self._is_idle(decision)
        return state.idle[decision.cgroup]

    def _is_idle(self, decision: Decision) -> bool:
        try:
            return self._files.read(decision.cgroup, decision.cgroup_id, Knob.IDLE) == "1"
        except Unavailable:
            return False

    def _journal_and_write(self, plans: Mapping[int, _Plan]) -> dict[int, Outcome]:
        if self._originals is None:
            return {index: plan.outcome(Status.REFUSED, error=NO_JOURNAL) for index, plan in plans.items()}
        try:
            self._originals.forget_vanished(self._files)
            notes = self._record(self._originals, plans)
        except Unavailable as error:
            reason = f"{error.reason}: {error.remedy}"
            return {index: plan.outcome(Status.REFUSED, error=reason) for index, plan in plans.items()}
        changing = {index: plan for index, plan in plans.items() if plan.changes}
        # Until it is read back, nobody can say what a write has left there.
        self._originals.hands.forget([(plan.decision.cgroup, plan.decision.knob) for plan in changing.values()])
        self._widen([plan for plan in changing.values() if plan.decision.knob is Knob.CPUSET])
        outcomes = {
            index: plan.outcome(Status.UNCHANGED, after=plan.before)
            for index, plan in plans.items()
            if index not in changing
        }
        for index in sorted(changing, key=lambda i: _writing_order(changing[i])):
            outcomes[index] = self._write(changing[index])
        return {index: _with_note(outcome, notes[index]) for index, outcome in outcomes.items()}

    def _record(self, originals: Originals, plans: Mapping[int, _Plan]) -> dict[int, str]:
        """Journal what these plans are going to change; for each, what of it somebody else has written meanwhile."""
        found = {index: self._originals_of(plan) for index, plan in plans.items()}
        foreign = {index: [now for now in nows if self._is_foreign(now)] for index, nows in found.items()}
        theirs = [now for nows in foreign.values() for now in nows]
        originals.record(*(now for nows in found.values() for now in nows), replace={key_of(now) for now in theirs})
        for now in theirs:
            originals.hands.note(now, now.raw.texts)
        return {
            index: "; ".join(
                f"{now.knob.value} was changed by someone else to {self._files.decode(now.cgroup, now.knob, now.raw)}: "
                "taken as its new original"
                for now in nows
            )
            for index, nows in foreign.items()
        }

    def _originals_of(self, plan: _Plan) -> list[Original]:
        """What a write is going to change: setting cpu.idle changes the weight too, and while it is set the file of the
        weight does not hold the owner's."""
        decision = plan.decision
        own = _original(decision, decision.knob, plan.raw)
        try:
            if decision.knob is Knob.WEIGHT and self._is_idle(decision):
                return []
            if decision.knob is Knob.IDLE and plan.before == "0":
                weight = self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.WEIGHT)
                return [own, _original(decision, Knob.WEIGHT, weight)]
        except Vanished:
            return []
        return [own]

    def _widen(self, plans: Sequence[_Plan]) -> None:
        """Give cpusets that lie in one another the new CPUs on top of the old, so that each can then move on its own.

        Refusals show when the decision itself is written.
        """
        paths = [plan.decision.cgroup for plan in plans]
        for plan in sorted(plans, key=lambda p: p.decision.cgroup.count("/")):
            cgroup, value = plan.decision.cgroup, plan.decision.value
            if not value or not any(_inside(cgroup, other) or _inside(other, cgroup) for other in paths):
                continue
            both = format_cpu_list((*parse_cpu_list(plan.before), *parse_cpu_list(value)))
            try:
                if both not in (plan.before, value):
                    self._files.write(cgroup, plan.decision.cgroup_id, Knob.CPUSET, both)
            except (Unavailable, Vanished):
                continue

    def _write(self, plan: _Plan) -> Outcome:
        decision = plan.decision
        cgroup, cgroup_id, knob = decision.cgroup, decision.cgroup_id, decision.knob
        after = None
        try:
            self._files.write(cgroup, cgroup_id, knob, decision.value)
            raw = self._files.read_raw(cgroup, cgroup_id, knob)
            after = self._files.decode(cgroup, knob, raw)
            error = self._give_weight_back(decision) if knob is Knob.IDLE and after == "0" else ""
            self._remember(decision, raw)
        except (Unavailable, Vanished) as failure:
            return _failed(decision, failure, before=plan.before, after=after, clamped_from=plan.clamped_from)
        if after != canonical(knob, decision.value):
            error = "the kernel shows another value than the one written: look for another program that writes it"
            return plan.outcome(Status.MISMATCH, after=after, error=error)
        return plan.outcome(Status.APPLIED, after=after, error=error)

    def _recognise(self, decision: Decision, raw: RawValue) -> None:
        """A wanted value that an agent before this one left there is as good as written now."""
        entry = self._known(decision, decision.knob)
        if self._act is Act.ON and self._originals and entry and not self._originals.hands.knows(entry):
            self._remember(decision, raw)

    def _remember(self, decision: Decision, raw: RawValue) -> None:
        """What the agent left in this knob, and through cpu.idle in the weight."""
        left = {decision.knob: raw.texts}
        if decision.knob is Knob.IDLE:
            left[Knob.WEIGHT] = (
                weight_after_idle(self._files)
                if decision.value == "1"
                else self._files.read_raw(decision.cgroup, decision.cgroup_id, Knob.WEIGHT).texts
            )
        for knob, texts in left.items():
            entry = self._known(decision, knob)
            if self._originals is not None and entry is not None:
                self._originals.hands.note(entry, texts)

    def _give_weight_back(self, decision: Decision) -> str:
        # The kernel has just reset the weight; unless a decision on it follows, the original is what the owner wanted.
        entry = self._known(decision, Knob.WEIGHT)
        try:
            if entry is not None:
                self._files.write_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.texts)
        except Unavailable as error:
            return f"the weight from before could not be put back: {error.reason}: {error.remedy}"
        return ""


def _planning_order(decision: Decision) -> tuple[int, int]:
    # Parents first: a cpuset is clamped to what the one above will have.
    return ORDER.index(decision.knob), decision.cgroup.count("/")


def _writing_order(plan: _Plan) -> tuple[int, bool, int]:
    """Knob by knob; among cpusets those that only gain CPUs first, from the top down, then the others, from the bottom."""
    decision, depth = plan.decision, plan.decision.cgroup.count("/")
    grows = decision.knob is not Knob.CPUSET or set(parse_cpu_list(plan.before)) <= set(parse_cpu_list(decision.value))
    return ORDER.index(decision.knob), not grows, depth if grows else -depth


def _inside(cgroup: str, other: str) -> bool:
    return cgroup.startswith(f"{other}/")


def _with_note(outcome: Outcome, note: str) -> Outcome:
    return msgspec.structs.replace(outcome, error="; ".join(filter(None, (note, outcome.error))))


def _original(decision: Decision, knob: Knob, raw: RawValue) -> Original:
    return Original(cgroup=decision.cgroup, cgroup_id=decision.cgroup_id, knob=knob, raw=raw)


def _failed(
    decision: Decision,
    error: Unavailable | Vanished,
    *,
    before: str | None = None,
    after: str | None = None,
    clamped_from: str | None = None,
) -> Outcome:
    vanished = isinstance(error, Vanished)
    return Outcome(
        decision=decision,
        status=Status.VANISHED if vanished else Status.REFUSED,
        before=before,
        after=after,
        error=f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else str(error),
        clamped_from=clamped_from,
    )
