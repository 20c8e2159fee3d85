"""Writes `oom_score_adj` of the processes of containers, and journals and restores their original values.
A process is identified by its PID and start time. A value that was modified externally is left alone. Raising a
score needs write permission; lowering it needs CAP_SYS_RESOURCE (fs/proc/base.c, __set_oom_adj()).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from agent.qrm.actuator.restore import RESTORE_REASON
from agent.sensors.parsers import task_ids
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob
from common.files import read_small_file
from common.state_file import replace_file, sync_directory

_MAX_STAT_BYTES, _MAX_LIST_BYTES = 4096, 1 << 16
_LEAF_LINKS = 2
_SCORE_FILE = "oom_score_adj"
_PARENT_WORD, _START_WORD = 1, 19
"""Words of /proc/PID/stat after the name, which may hold anything: proc(5) counts them as 4 and 22."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process as it is now."""

    pid: int
    start: int
    """In clock ticks since boot: with the number, this process and no other."""
    parent: int
    score: int


class ProcessTable:
    """Those of one /proc and one cgroup tree. What has ended meanwhile is nowhere an error."""

    def __init__(self, proc: Path, root: Path) -> None:
        self._proc, self._root = proc, root

    def listed(self, cgroup: str, cgroup_id: int) -> tuple[int, ...]:
        """Those in that cgroup and below; none where another cgroup has taken its path."""
        top = f"{self._root}{cgroup}"
        found: list[int] = []
        with suppress(OSError):
            if Path(top).stat().st_ino == cgroup_id:
                self._collect(top, found)
        return tuple(found)

    def _collect(self, directory: str, found: list[int]) -> None:
        # It may go meanwhile, or have threads only.
        with suppress(OSError):
            found += task_ids(_read(f"{directory}/cgroup.procs", _MAX_LIST_BYTES))
        with suppress(OSError):
            # Most have nothing below, and as many files as it takes long to list: two links are a directory without others.
            if Path(directory).stat().st_nlink != _LEAF_LINKS:
                for entry in os.scandir(directory):
                    if entry.is_dir(follow_symlinks=False):
                        self._collect(entry.path, found)

    def score(self, pid: int) -> int | None:
        """Its oom_score_adj; None where it has ended. One read, for most processes are as they should be."""
        try:
            return int(_read(f"{self._proc}/{pid}/{_SCORE_FILE}", _MAX_STAT_BYTES))
        except (OSError, ValueError):
            return None

    def look(self, pid: int) -> ProcessInfo | None:
        """All of it; None where it has ended."""
        try:
            with self._opened(pid) as (fd, start, parent):
                return ProcessInfo(
                    pid=pid, start=start, parent=parent, score=int(_read(_SCORE_FILE, _MAX_STAT_BYTES, fd))
                )
        except (OSError, ValueError):
            return None

    def write(self, pid: int, start: int, score: int) -> bool:
        """Whether that very process was there to have it. Raises PermissionError where the kernel does not allow it."""
        try:
            # What is opened through the directory is of the process that the directory was opened of.
            with self._opened(pid) as (fd, found, _):
                if found != start:
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
        """A descriptor of its directory, its start and its parent."""
        fd = os.open(self._proc / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            words = _read("stat", _MAX_STAT_BYTES, fd).rpartition(b")")[2].split()
            if len(words) <= _START_WORD:
                raise ValueError("stat is cut off")
            yield fd, int(words[_START_WORD]), int(words[_PARENT_WORD])
        finally:
            os.close(fd)


def _read(path: str, most: int, directory: int | None = None) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        # What the kernel writes for a whole file at once, it gives at once: only lists may be longer than a page.
        data = os.read(fd, most)
        while most > _MAX_STAT_BYTES and (more := os.read(fd, most)):
            data += more
        return data
    finally:
        os.close(fd)


FILE_NAME = "oom-originals.json"
LOWERING_HINT = "to lower it takes CAP_SYS_RESOURCE, and root where it is another user's: give the agent that"
_MAX_FILE_BYTES = 64 << 20
_PASSES = 5
"""A process that is started while others are put back still has their value, and is seen in the next pass."""


class ProcessScore(msgspec.Struct, frozen=True, kw_only=True):
    """What one process had."""

    pid: int
    start: int
    score: int


class ContainerScores(msgspec.Struct, frozen=True, kw_only=True):
    """One container whose processes were written, or are about to be."""

    cgroup: str
    cgroup_id: int
    score: int
    process_scores: tuple[ProcessScore, ...] = msgspec.field(default=(), name="had")

    def original(self, seen: ProcessInfo) -> int | None:
        """What that process had: its own, its parent's, or what most had; None where it got nothing from here."""
        by_pid = {had.pid: had for had in self.process_scores}
        own = by_pid.get(seen.pid)
        if own is not None and own.start == seen.start:
            return own.score
        if seen.score != self.score or not self.process_scores:
            return None
        parent = by_pid.get(seen.parent)
        return parent.score if parent else Counter(had.score for had in self.process_scores).most_common(1)[0][0]


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    containers: tuple[ContainerScores, ...]


class OomScores:
    """The writer and its journal. Only one process may use a state directory; Originals locks it."""

    def __init__(self, processes: ProcessTable, state_dir: Path, boot_id: str) -> None:
        """Raises Unavailable where the journal cannot be read."""
        self._processes = processes
        self._path, self._boot_id = state_dir / FILE_NAME, boot_id
        self._given: dict[str, ContainerScores] = {}
        self._unsaved = False
        self._load()

    def entries(self) -> tuple[ContainerScores, ...]:
        """Every container with processes that may still differ from their originals."""
        return tuple(self._given.values())

    def apply(self, decisions: Sequence[Decision], *, dry: bool = False) -> tuple[Outcome, ...]:
        """Write what differs; every original is on disk before the first of them is written. What came of each decision."""
        found = [self._look(decision) for decision in decisions]
        due = [index for index, (outcome, _) in enumerate(found) if outcome.status is OutcomeStatus.DRY_RUN]
        outcomes = [outcome for outcome, _ in found]
        if dry or not due:
            return tuple(outcomes)
        try:
            # All at once: each time the journal is written, the disk is waited for.
            for index in due:
                self._note(decisions[index], found[index][1])
            self._save()
        except Unavailable as error:
            text = f"{error.reason}: {error.remedy}"
            for index in due:
                outcomes[index] = msgspec.structs.replace(outcomes[index], status=OutcomeStatus.REFUSED, error=text)
            return tuple(outcomes)
        for index in due:
            outcomes[index] = self._write(outcomes[index], found[index][1])
        return tuple(outcomes)

    def restore(self, keep: Collection[str] = ()) -> tuple[Outcome, ...]:
        """Put back what the processes of all other containers had; what cannot be stays in the journal."""
        outcomes = []
        for cgroup, given in tuple(self._given.items()):
            if cgroup in keep:
                continue
            outcome = self._restore(given)
            outcomes.append(outcome)
            if outcome.status is not OutcomeStatus.REFUSED:
                del self._given[cgroup]
                self._unsaved = True
        self._save()
        return tuple(outcomes)

    def _look(self, decision: Decision) -> tuple[Outcome, tuple[int, ...]]:
        """Whether all are as decided, and who is not; DRY_RUN stands for what has to be written."""
        pids = self._processes.listed(decision.cgroup, decision.cgroup_id)
        scores = {pid: score for pid in pids if (score := self._processes.score(pid)) is not None}
        differ = tuple(pid for pid, score in scores.items() if score != int(decision.value))
        shown = _distinct_scores(scores)
        if differ:
            return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before=shown), differ
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=shown, after=shown), ()

    def _note(self, decision: Decision, differ: Sequence[int]) -> None:
        """Have the originals of those that are about to be written, and of all where a container is new."""
        cgroup, score = decision.cgroup, int(decision.value)
        known = self._given.get(cgroup)
        same = known is not None and (known.score, known.cgroup_id) == (score, decision.cgroup_id)
        if known is not None and not same:
            # They had another value from here, which is nobody's original: begin anew from what was before it.
            self._restore(known)
        given = (
            known
            if known is not None and same
            else ContainerScores(cgroup=cgroup, cgroup_id=decision.cgroup_id, score=score)
        )
        had = {had.pid: had for had in given.process_scores}
        for pid in differ if same else self._processes.listed(cgroup, decision.cgroup_id):
            seen = self._processes.look(pid)
            if seen is not None:
                got = known is not None and seen.score == known.score
                own = known.original(seen) if known is not None and got else None
                had[pid] = ProcessScore(pid=pid, start=seen.start, score=seen.score if own is None else own)
        alive = tuple(one for pid, one in had.items() if self._processes.score(pid) is not None)
        self._given[cgroup] = msgspec.structs.replace(given, process_scores=alive)
        self._unsaved = self._unsaved or self._given[cgroup] != known

    def _write(self, found: Outcome, differ: Sequence[int]) -> Outcome:
        decision = found.decision
        starts = {had.pid: had.start for had in self._given[decision.cgroup].process_scores}
        refused = self._set({pid: (starts[pid], int(decision.value)) for pid in differ if pid in starts})
        scores = {pid: self._processes.score(pid) for pid in differ}
        after = _distinct_scores({pid: score for pid, score in scores.items() if score is not None})
        if not refused:
            return msgspec.structs.replace(found, status=OutcomeStatus.APPLIED, after=after)
        status = OutcomeStatus.REFUSED if len(refused) == len(differ) else OutcomeStatus.MISMATCH
        return msgspec.structs.replace(found, status=status, after=after, error=_error(refused, decision.value))

    def _restore(self, given: ContainerScores) -> Outcome:
        before: dict[int, int] = {}
        refused: list[int] = []
        for _ in range(_PASSES):
            due = self._due(given)
            before |= {pid: seen.score for pid, (seen, _) in due.items() if pid not in before}
            refused = self._set({pid: (seen.start, score) for pid, (seen, score) in due.items()})
            if len(refused) == len(due):
                break
        originals = _distinct_scores({had.pid: had.score for had in given.process_scores})
        decision = Decision(
            cgroup=given.cgroup,
            cgroup_id=given.cgroup_id,
            pod="",
            knob=Knob.OOM_SCORE_ADJ,
            value=originals,
            reason=RESTORE_REASON,
        )
        if refused:
            error = _error(refused, originals)
            return Outcome(
                decision=decision, status=OutcomeStatus.REFUSED, before=_distinct_scores(before), error=error
            )
        status = OutcomeStatus.APPLIED if before else OutcomeStatus.UNCHANGED
        return Outcome(decision=decision, status=status, before=_distinct_scores(before) or None, after=originals)

    def _due(self, given: ContainerScores) -> dict[int, tuple[ProcessInfo, int]]:
        """Processes that have what was given, in the container or once there, and what they had."""
        pids = {*self._processes.listed(given.cgroup, given.cgroup_id), *(had.pid for had in given.process_scores)}
        found = {}
        for pid in sorted(pids):
            if self._processes.score(pid) != given.score or (seen := self._processes.look(pid)) is None:
                continue
            original = given.original(seen)
            if original is not None and original != seen.score:
                found[pid] = seen, original
        return found

    def _set(self, wanted: Mapping[int, tuple[int, int]]) -> list[int]:
        """By process its start and what it is to have; whom the kernel refused it."""
        refused = []
        for pid, (start, score) in wanted.items():
            try:
                self._processes.write(pid, start, score)
            except PermissionError:
                refused.append(pid)
        return refused

    def _load(self) -> None:
        try:
            body = msgspec.json.decode(read_small_file(self._path, _MAX_FILE_BYTES), type=_Body)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise Unavailable(
                f"{self._path} cannot be read: {error}",
                "compare oom_score_adj of the processes it names with what they should have, then delete it",
            ) from None
        # No process has outlived another boot.
        if body.boot_id == self._boot_id:
            self._given = {given.cgroup: given for given in body.containers}

    def _save(self) -> None:
        if not self._unsaved:
            return
        try:
            if self._given:
                body = _Body(boot_id=self._boot_id, containers=self.entries())
                replace_file(self._path, msgspec.json.encode(body) + b"\n")
            else:
                self._path.unlink(missing_ok=True)
                sync_directory(self._path.parent)
        except OSError as error:
            raise Unavailable(
                f"original values cannot be journalled in {self._path}: {error.strerror}",
                "make room and make it writable",
            ) from None
        self._unsaved = False


def _distinct_scores(scores: Mapping[int, int]) -> str:
    """The values that there are, each once: a container may have many processes."""
    return " ".join(map(str, sorted(set(scores.values()))))


def _error(refused: Sequence[int], value: str) -> str:
    count = len(refused)
    whom = f"process {refused[0]}" if count == 1 else f"{count} processes, the first is {refused[0]},"
    return f"{whom} cannot be given {value}: {LOWERING_HINT}"
