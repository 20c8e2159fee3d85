"""Writes `oom_score_adj` of the processes of containers, and journals and restores their original values.
A process is identified by its PID and start time. A value that was modified externally is left alone. Raising a
score needs write permission; lowering it needs CAP_SYS_RESOURCE (fs/proc/base.c, __set_oom_adj()).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agent.qrm.actuator.boot_journal import BootJournal, JournalBody, json_codec
from agent.qrm.actuator.cgroup_tasks import list_task_ids
from agent.qrm.actuator.restore import RESTORE_REASON
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob
from common.disk_writer import INLINE_WRITER, FileWriter

_MAX_STAT_BYTES = 4096
_SCORE_FILE = "oom_score_adj"
_PARENT_WORD, _START_WORD = 1, 19
"""Words of /proc/PID/stat after the command name, which may contain anything; proc(5) counts them as 4 and 22."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State of one process."""

    pid: int
    start: int
    """Clock ticks since boot; together with the PID it identifies the process."""
    parent: int
    score: int


class ProcessTable:
    """Processes of one /proc and one cgroup tree. A process that has ended is never an error."""

    def __init__(self, proc: Path, root: Path) -> None:
        self._proc, self._root = proc, root

    def pids(self, cgroup: str, cgroup_id: int) -> tuple[int, ...]:
        """Return the processes of the cgroup and of all below it; none if another cgroup has its path now."""
        top = f"{self._root}{cgroup}"
        with suppress(OSError):
            if Path(top).stat().st_ino == cgroup_id:
                return tuple(list_task_ids(top, "cgroup.procs"))
        return ()

    def score(self, pid: int) -> int | None:
        """Return `oom_score_adj`; None if the process has ended. One read, because most scores are as decided."""
        try:
            return int(_read(f"{self._proc}/{pid}/{_SCORE_FILE}", _MAX_STAT_BYTES))
        except (OSError, ValueError):
            return None

    def info(self, pid: int) -> ProcessInfo | None:
        """Return the state of the process; None if it has ended."""
        try:
            with self._opened(pid) as (fd, start, parent):
                score = int(_read(_SCORE_FILE, _MAX_STAT_BYTES, fd))
                return ProcessInfo(pid=pid, start=start, parent=parent, score=score)
        except (OSError, ValueError):
            return None

    def write(self, pid: int, start: int, score: int) -> bool:
        """Write the score if the process still exists; return whether it does. Raises PermissionError."""
        try:
            # A file opened relative to the directory belongs to the process that the directory was opened of.
            with self._opened(pid) as (fd, current_start, _):
                if current_start != start:
                    return False
                file = os.open(_SCORE_FILE, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, dir_fd=fd)
                try:
                    os.write(file, str(score).encode())
                finally:
                    os.close(file)
                return True
        except PermissionError:
            raise
        except (OSError, ValueError):
            return False

    @contextmanager
    def _opened(self, pid: int) -> Iterator[tuple[int, int, int]]:
        """Yield a descriptor of the process's directory, its start time and its parent."""
        fd = os.open(self._proc / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            words = _read("stat", _MAX_STAT_BYTES, fd).rpartition(b")")[2].split()
            if len(words) <= _START_WORD:
                raise ValueError("stat is cut off")
            yield fd, int(words[_START_WORD]), int(words[_PARENT_WORD])
        finally:
            os.close(fd)


def _read(path: str, max_bytes: int, directory: int | None = None) -> bytes:
    # The kernel returns a file of up to one page in one read.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, max_bytes)
    finally:
        os.close(fd)


FILE_NAME = "oom-originals.json"
LOWERING_HINT = (
    "lowering a score needs CAP_SYS_RESOURCE, and root for processes of other users: grant both to the agent"
)
_PASSES = 5
"""A process that is forked during a restore still has its parent's score, and is restored in the next pass."""


class ProcessScore(msgspec.Struct, frozen=True, kw_only=True):
    """Original score of one process."""

    pid: int
    start: int
    score: int


class ContainerScores(msgspec.Struct, frozen=True, kw_only=True):
    """A container with processes whose score was written or is about to be, and their original scores."""

    cgroup: str
    cgroup_id: int
    score: int
    """Score that the agent writes."""
    originals: tuple[ProcessScore, ...] = msgspec.field(default=(), name="had")

    def original(self, process: ProcessInfo) -> int | None:
        """Return the original of the process, of its parent, or the most frequent one. None if the process does not
        have the agent's score."""
        by_pid = {original.pid: original for original in self.originals}
        own = by_pid.get(process.pid)
        if own is not None and own.start == process.start:
            return own.score
        if process.score != self.score or not self.originals:
            return None
        parent = by_pid.get(process.parent)
        return parent.score if parent else Counter(original.score for original in self.originals).most_common(1)[0][0]


class _Body(JournalBody[ContainerScores], frozen=True, kw_only=True):
    entries: tuple[ContainerScores, ...] = msgspec.field(name="containers")


class OomScores:
    """Writes `oom_score_adj` of the processes of containers, with a journal of the original scores."""

    def __init__(
        self, processes: ProcessTable, state_dir: Path, boot_id: str, disk: FileWriter = INLINE_WRITER
    ) -> None:
        """Raise Unavailable if the journal cannot be read."""
        self._processes = processes
        self._journal = BootJournal(
            state_dir / FILE_NAME,
            boot_id,
            json_codec(_Body, lambda entry: entry.cgroup),
            damage_remedy="compare oom_score_adj of the processes it names with what they should have, then delete it",
            disk=disk,
        )

    def entries(self) -> tuple[ContainerScores, ...]:
        """Return every container with processes that may still differ from their originals."""
        return self._journal.entries()

    def apply(self, decisions: Sequence[Decision], *, dry: bool = False) -> tuple[Outcome, ...]:
        """Write the scores that differ, after journalling the originals of all; return an outcome for each decision."""
        checks = [self._check(decision) for decision in decisions]
        return self._journal.write_due(
            [outcome for outcome, _ in checks],
            lambda index: self._record(decisions[index], checks[index][1]),
            lambda index: self._write(*checks[index]),
            dry=dry,
        )

    def restore(self, keep: Collection[str] = ()) -> tuple[Outcome, ...]:
        """Restore the processes of all other containers; refused ones stay in the journal. Raises Unavailable."""
        return self._journal.restore_each(keep, self._restore)

    def _check(self, decision: Decision) -> tuple[Outcome, tuple[int, ...]]:
        """Compare the scores with the decision; DRY_RUN means that the returned processes have to be written."""
        pids = self._processes.pids(decision.cgroup, decision.cgroup_id)
        scores = {pid: score for pid in pids if (score := self._processes.score(pid)) is not None}
        differing = tuple(pid for pid, score in scores.items() if score != int(decision.value))
        before = _distinct(scores.values())
        if differing:
            return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before=before), differing
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before), ()

    def _record(self, decision: Decision, differing: Sequence[int]) -> None:
        """Add the originals of processes about to be written; of all processes for a new container or score."""
        cgroup, score = decision.cgroup, int(decision.value)
        previous = self._journal.by_key.get(cgroup)
        entry = ContainerScores(cgroup=cgroup, cgroup_id=decision.cgroup_id, score=score)
        same = previous is not None and (previous.score, previous.cgroup_id) == (score, entry.cgroup_id)
        if previous is not None and same:
            entry = previous
        elif previous is not None:
            # The processes have another score of the agent, which is no original: restore what was before it.
            self._restore(previous)
        originals = {original.pid: original for original in entry.originals}
        for pid in differing if same else self._processes.pids(cgroup, decision.cgroup_id):
            process = self._processes.info(pid)
            if process is not None:
                inherited = previous is not None and process.score == previous.score
                own = previous.original(process) if previous is not None and inherited else None
                originals[pid] = ProcessScore(pid=pid, start=process.start, score=process.score if own is None else own)
        alive = tuple(original for pid, original in originals.items() if self._processes.score(pid) is not None)
        self._journal.by_key[cgroup] = replace(entry, originals=alive)

    def _write(self, outcome: Outcome, differing: Sequence[int]) -> Outcome | None:
        """Write the scores of the processes whose originals are on disk; None if none of them is."""
        decision = outcome.decision
        entry, durable = self._journal.by_key[decision.cgroup], self._journal.durable(decision.cgroup)
        if durable is None or (durable.cgroup_id, durable.score) != (entry.cgroup_id, entry.score):
            return None
        starts = {original.pid: original.start for original in durable.originals if original in entry.originals}
        if starts.keys().isdisjoint(differing):
            return None
        refused = self._set({pid: (starts[pid], int(decision.value)) for pid in differing if pid in starts})
        after = _distinct(score for pid in differing if (score := self._processes.score(pid)) is not None)
        if not refused:
            return replace(outcome, status=OutcomeStatus.APPLIED, after=after)
        status = OutcomeStatus.REFUSED if len(refused) == len(differing) else OutcomeStatus.MISMATCH
        return replace(outcome, status=status, after=after, error=_error(refused, decision.value))

    def _restore(self, entry: ContainerScores) -> Outcome:
        before: dict[int, int] = {}
        refused: list[int] = []
        for _ in range(_PASSES):
            due = self._due(entry)
            before |= {pid: process.score for pid, (process, _) in due.items() if pid not in before}
            refused = self._set({pid: (process.start, score) for pid, (process, score) in due.items()})
            if len(refused) == len(due):
                break
        originals = _distinct(original.score for original in entry.originals)
        decision = Decision(
            cgroup=entry.cgroup,
            cgroup_id=entry.cgroup_id,
            pod="",
            knob=Knob.OOM_SCORE_ADJ,
            value=originals,
            reason=RESTORE_REASON,
        )
        held = _distinct(before.values())
        if refused:
            error = _error(refused, originals)
            return Outcome(decision=decision, status=OutcomeStatus.REFUSED, before=held, error=error)
        status = OutcomeStatus.APPLIED if before else OutcomeStatus.UNCHANGED
        return Outcome(decision=decision, status=status, before=held or None, after=originals)

    def _due(self, entry: ContainerScores) -> dict[int, tuple[ProcessInfo, int]]:
        """Return processes, in the container or once there, that have the agent's score, with their originals."""
        pids = {*self._processes.pids(entry.cgroup, entry.cgroup_id), *(original.pid for original in entry.originals)}
        due = {}
        for pid in sorted(pids):
            if self._processes.score(pid) != entry.score or (process := self._processes.info(pid)) is None:
                continue
            original = entry.original(process)
            if original is not None and original != process.score:
                due[pid] = process, original
        return due

    def _set(self, scores: Mapping[int, tuple[int, int]]) -> list[int]:
        """Write start time and score by process; return the processes that the kernel refused."""
        refused = []
        for pid, (start, score) in scores.items():
            try:
                self._processes.write(pid, start, score)
            except PermissionError:
                refused.append(pid)
        return refused


def _distinct(scores: Iterable[int]) -> str:
    # Each value once: a container may have many processes.
    return " ".join(map(str, sorted(set(scores))))


def _error(refused: Sequence[int], value: str) -> str:
    count = len(refused)
    subject = f"process {refused[0]}" if count == 1 else f"{count} processes, the first is {refused[0]},"
    return f"{subject} cannot be given {value}: {LOWERING_HINT}"
