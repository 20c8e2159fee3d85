"""Shortens the EEVDF slice of the threads of reclaimed containers, and restores the kernel's default.
Threads that have set a slice of their own are not changed. Children inherit the slice (kernel/fork.c copies sched_entity),
so after the first pass only threads that were not seen before are read. The journal names the containers before the first
thread of each is changed. A slice of the agent is recognized by its value, so that every thread is restored, also one that
was forked after the agent was killed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from agent.qrm.actuator.boot_journal import BootJournal, JournalBody, json_codec
from agent.qrm.actuator.cgroup_tasks import list_task_ids
from agent.qrm.actuator.restore import RESTORE_REASON
from agent.qrm.actuator.sched_attr import DEFAULT_SLICE, SLICE_POLICIES, SchedulerCalls, ThreadScheduling
from agent.qrm.actuator.writer import is_cgroup_path
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode, Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob
from api.units import NS_PER_S
from common.disk_writer import INLINE_WRITER, FileWriter

FILE_NAME = "slice-originals.json"
PERMISSION_REMEDY = "add SYS_NICE to agent.capabilities, or run the agent as root with CAP_SYS_NICE"
NO_SLICES = "this kernel does not let a thread choose its slice: use Linux 6.12 or newer"
HIDDEN_REMEDY = "run the agent in the host's PID namespace (hostPID)"
REFUSAL_PERIOD_NS = 60_000_000_000
"""Time after which the agent tries a container again whose threads it was not permitted to change."""
SLICE_RANGE_NS = range(100_000, 100_000_001)
"""Slices that a thread can have of its own (kernel/sched/fair.c, __setparam_fair(): 0.1 to 100 ms)."""
_RECHECK_PARTS = 4
"""Seconds in which each thread is read once, so that a slice that something else has reset is found within 5 s."""
_PASSES = 5
"""A thread that is started during a restore still has the slice of its parent, and is restored in the next pass."""


class Scheduler(Protocol):
    """System calls on threads: agent.qrm.actuator.sched_attr.SchedulerCalls."""

    def read(self, thread: int) -> ThreadScheduling | None: ...
    def set_slice(self, thread: int, nice: int, slice_ns: int) -> None: ...
    def default_slice_ns(self) -> int | None: ...


class SlicedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A container whose threads may have a slice of the agent."""

    cgroup: str
    cgroup_id: int
    slice_ns: int


class _Body(JournalBody[SlicedContainer], frozen=True, kw_only=True):
    entries: tuple[SlicedContainer, ...] = msgspec.field(name="containers")


def _is_valid(entry: SlicedContainer) -> bool:
    """Return whether the agent can have written the entry."""
    return is_cgroup_path(entry.cgroup) and entry.cgroup != "/" and entry.slice_ns in SLICE_RANGE_NS


class _Check(NamedTuple):
    outcome: Outcome
    """DRY_RUN means that `due` has to be written."""
    due: frozenset[int] = frozenset()
    """Threads with the default slice."""
    default_ns: int = 0


class ThreadSlices:
    """Sets and restores the slices of the threads of containers."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        scheduler: Scheduler,
        state_dir: Path,
        boot_id: str,
        disk: FileWriter = INLINE_WRITER,
    ) -> None:
        """Raise Unavailable if the journal cannot be read."""
        self._root, self._scheduler = hierarchy.primary, scheduler
        self._file = "tasks" if "cpu" in hierarchy.v1 else "cgroup.threads"
        self._journal = BootJournal(
            state_dir / FILE_NAME,
            boot_id,
            json_codec(_Body, lambda entry: entry.cgroup, _is_valid),
            damage_remedy="restart the pods that it names, which gives their threads the default slice, then delete it",
            disk=disk,
        )
        self._sliced: dict[str, frozenset[int]] = {}
        """Threads that have the agent's slice, by container."""
        self._refused: dict[str, tuple[int, Outcome]] = {}
        """Refusals, and the time of the next attempt."""
        self.available = scheduler.default_slice_ns() is not None
        """Whether the kernel honours slices."""

    def entries(self) -> tuple[SlicedContainer, ...]:
        """Return every container with threads that may still have a slice of the agent."""
        return self._journal.entries()

    def apply(self, decisions: Sequence[Decision], now_ns: int = 0, *, dry: bool = False) -> tuple[Outcome, ...]:
        """Give the decided slice to all threads with the default slice; return an outcome for each decision."""
        default_ns = self._scheduler.default_slice_ns() if decisions else None
        checks = [self._check(decision, default_ns, now_ns) for decision in decisions]
        return self._journal.write_due(
            [check.outcome for check in checks],
            lambda index: self._record(decisions[index]),
            lambda index: self._write(checks[index], now_ns),
            dry=dry,
        )

    def restore(self, keep: Collection[str] = ()) -> tuple[Outcome, ...]:
        """Give the threads of all other containers the default slice; refused ones stay in the journal. Raises
        Unavailable."""
        if self._journal.by_key.keys() <= set(keep):
            self._journal.save()  # again, if an earlier write failed
            return ()
        outcomes = self._journal.restore_each(keep, self._restore)
        for memory in (self._sliced, self._refused):
            for cgroup in memory.keys() - self._journal.by_key.keys():
                del memory[cgroup]
        return outcomes

    def _check(self, decision: Decision, default_ns: int | None, now_ns: int) -> _Check:
        cgroup, slice_ns = decision.cgroup, int(decision.value)
        next_attempt_ns, refusal = self._refused.get(cgroup, (0, None))
        if refusal is not None and now_ns < next_attempt_ns:
            return _Check(replace(refusal, decision=decision))
        threads = self._threads(cgroup, decision.cgroup_id)
        if threads is None:
            return _Check(Outcome(decision=decision, status=OutcomeStatus.VANISHED, error=f"{cgroup} is gone"))
        if default_ns is None:
            error = f"{cgroup}: {NO_SLICES}"
            return _Check(Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=error))
        entry = self._journal.by_key.get(cgroup)
        same = entry is not None and (entry.cgroup_id, entry.slice_ns) == (decision.cgroup_id, slice_ns)
        sliced = self._sliced.get(cgroup, frozenset()) & threads if same else frozenset()
        # Something else may have reset a slice since: a part of the threads is read again each second.
        second = now_ns // NS_PER_S
        sliced = frozenset(thread for thread in sliced if (thread + second) % _RECHECK_PARTS)
        due = set()
        for thread in threads - sliced:
            scheduling = self._scheduler.read(thread)
            if scheduling is None or scheduling.policy not in SLICE_POLICIES:
                continue
            if scheduling.slice_ns == slice_ns:
                sliced |= {thread}
            elif scheduling.slice_ns == default_ns:
                due.add(thread)
        self._sliced[cgroup] = sliced
        if due:
            outcome = Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before=str(default_ns))
            return _Check(outcome, frozenset(due), default_ns)
        if not threads and self._has_hidden_threads(cgroup):
            error = f"{cgroup}: the threads are not visible: {HIDDEN_REMEDY}"
            return _Check(Outcome(decision=decision, status=OutcomeStatus.REFUSED, error=error))
        held = decision.value if sliced else None
        return _Check(Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=held, after=held))

    def _record(self, decision: Decision) -> None:
        previous = self._journal.by_key.get(decision.cgroup)
        entry = SlicedContainer(cgroup=decision.cgroup, cgroup_id=decision.cgroup_id, slice_ns=int(decision.value))
        if previous is not None and previous != entry:
            # A slice that the agent wrote with another value is not the thread's own, so it must be restored.
            self._restore(previous)
        self._journal.by_key[decision.cgroup] = entry

    def _write(self, check: _Check, now_ns: int) -> Outcome | None:
        """Set the slices; None if the entry of the container is not on disk yet."""
        decision, slice_ns = check.outcome.decision, int(check.outcome.decision.value)
        if not self._journal.is_durable(decision.cgroup):
            return None
        changed, refused = self._set(check.due, check.default_ns, slice_ns)
        threads = self._threads(decision.cgroup, decision.cgroup_id) or frozenset()
        # Restore a thread that has left the container meanwhile, and an unrelated thread that has its number now.
        self._set(changed - threads, slice_ns, DEFAULT_SLICE)
        self._sliced[decision.cgroup] |= changed & threads
        if not refused:
            return replace(check.outcome, status=OutcomeStatus.APPLIED, after=decision.value)
        status = OutcomeStatus.MISMATCH if changed else OutcomeStatus.REFUSED
        outcome = replace(
            check.outcome,
            status=status,
            after=check.outcome.before,
            error=_refusal(refused, f"a slice of {decision.value} ns"),
        )
        # Every attempt walks all threads, and the permission does not come back while the agent runs.
        self._refused[decision.cgroup] = (now_ns + REFUSAL_PERIOD_NS, outcome)
        return outcome

    def _restore(self, entry: SlicedContainer) -> Outcome:
        default = str(DEFAULT_SLICE)
        decision = Decision(
            cgroup=entry.cgroup,
            cgroup_id=entry.cgroup_id,
            pod="",
            knob=Knob.SLICE,
            value=default,
            reason=RESTORE_REASON,
        )
        before, refused = None, list[int]()
        for _ in range(_PASSES):
            threads = self._threads(entry.cgroup, entry.cgroup_id)
            if threads is None:
                return Outcome(decision=decision, status=OutcomeStatus.VANISHED, error=f"{entry.cgroup} is gone")
            changed, refused = self._set(threads, entry.slice_ns, DEFAULT_SLICE)
            if changed or refused:
                before = str(entry.slice_ns)
            if not changed:
                break
        if refused:
            error = _refusal(refused, "the default slice")
            return Outcome(decision=decision, status=OutcomeStatus.REFUSED, before=before, error=error)
        status = OutcomeStatus.UNCHANGED if before is None else OutcomeStatus.APPLIED
        return Outcome(decision=decision, status=status, before=before, after=default)

    def _threads(self, cgroup: str, cgroup_id: int) -> frozenset[int] | None:
        """Return the threads of the cgroup and of all below it; None if it was removed or replaced."""
        top = f"{self._root}{cgroup}"
        try:
            if os.stat(top).st_ino != cgroup_id:  # noqa: PTH116 - hundreds a second
                return None
        except OSError:
            return None
        return frozenset(list_task_ids(top, self._file))

    def _has_hidden_threads(self, cgroup: str) -> bool:
        # The kernel lists 0 for a task outside of the reader's PID namespace.
        try:
            return bool((Path(f"{self._root}{cgroup}") / self._file).read_text())
        except OSError:
            return False

    def _set(self, threads: Collection[int], before_ns: int, slice_ns: int) -> tuple[frozenset[int], list[int]]:
        """Set the slice of those of these threads that have the slice `before_ns`; return them, and those that the kernel
        refused. Each is read immediately before its call, which also sets nice: `nice` may have changed it meanwhile."""
        changed, refused = set(), []
        for thread in threads:
            scheduling = self._scheduler.read(thread)
            if scheduling is None or scheduling.policy not in SLICE_POLICIES or scheduling.slice_ns != before_ns:
                continue
            try:
                self._scheduler.set_slice(thread, scheduling.nice, slice_ns)
            except PermissionError:
                refused.append(thread)
            else:
                changed.add(thread)
        return frozenset(changed), refused


def open_thread_slices(
    act: ActMode,
    hierarchy: Hierarchy,
    state: tuple[Path, str],
    *,
    enabled: bool,
    disk: FileWriter = INLINE_WRITER,
) -> tuple[ThreadSlices | None, tuple[str, ...]]:
    """Open the slices of threads if the agent may change them, or if an earlier agent left some changed. `state` is the state
    directory and the boot id. If the journal cannot be read, return a warning instead."""
    left = act is ActMode.ON and (state[0] / FILE_NAME).exists()
    if act is ActMode.OFF or not (enabled or left):
        return None, ()
    try:
        slices = ThreadSlices(hierarchy, SchedulerCalls(), *state, disk)
    except Unavailable as error:
        return None, (f"Slices of threads are not changed: {error.reason}: {error.remedy}.",)
    if enabled and not slices.available:
        return slices, (f"knobs.shortSlices has no effect: {NO_SLICES}.",)
    return slices, ()


def _refusal(refused: Sequence[int], value: str) -> str:
    count = len(refused)
    subject = f"thread {refused[0]}" if count == 1 else f"{count} threads, the first is {refused[0]},"
    return f"{subject} cannot be given {value}: {PERMISSION_REMEDY}"
