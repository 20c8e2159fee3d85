"""Gives the processes of containers their oom_score_adj and puts back what they had, safe against a crash in between.

A process starts with what its parent has. So only those that came otherwise are written, with a journal of what they had;
and what a process got from one that was written is put back to what that one had. Whatever somebody else has written since
is theirs and is left alone. Raising takes the right to write the file; going below what a privileged process last set takes
CAP_SYS_RESOURCE (fs/proc/base.c, __set_oom_adj()).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from agent.durable import replace_file, sync_directory
from agent.qrm.processes import Processes, Seen
from agent.qrm.restore import VERDICT
from agent.smallfile import read_small
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob
from api.ports import Unavailable

FILE_NAME = "oom-originals.json"
LOWERING = "to lower it takes CAP_SYS_RESOURCE, and root where it is another user's: give the agent that"
_LARGEST = 64 << 20
_PASSES = 5
"""A process that is started while others are put back still has their value, and is seen in the next pass."""


class Had(msgspec.Struct, frozen=True, kw_only=True):
    """What one process had."""

    pid: int
    start: int
    score: int


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """One container whose processes were written, or are about to be."""

    cgroup: str
    cgroup_id: int
    score: int
    had: tuple[Had, ...] = ()

    def original(self, seen: Seen) -> int | None:
        """What that process had: its own, its parent's, or what most had; None where it got nothing from here."""
        by_pid = {had.pid: had for had in self.had}
        own = by_pid.get(seen.pid)
        if own is not None and own.start == seen.start:
            return own.score
        if seen.score != self.score or not self.had:
            return None
        parent = by_pid.get(seen.parent)
        return parent.score if parent else Counter(had.score for had in self.had).most_common(1)[0][0]


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    containers: tuple[Given, ...]


class OomScores:
    """The writer and its journal. Only one process may use a state directory; Originals locks it."""

    def __init__(self, processes: Processes, state_dir: Path, boot_id: str) -> None:
        """Raises Unavailable where the journal cannot be read."""
        self._processes = processes
        self._path, self._boot_id = state_dir / FILE_NAME, boot_id
        self._given: dict[str, Given] = {}
        self._unsaved = False
        self._load()

    def entries(self) -> tuple[Given, ...]:
        """Every container with processes that may still differ from their originals."""
        return tuple(self._given.values())

    def apply(self, decisions: Sequence[Decision], *, dry: bool = False) -> tuple[Outcome, ...]:
        """Write what differs; every original is on disk before the first of them is written. What came of each decision."""
        found = [self._look(decision) for decision in decisions]
        due = [index for index, (outcome, _) in enumerate(found) if outcome.status is Status.DRY_RUN]
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
                outcomes[index] = msgspec.structs.replace(outcomes[index], status=Status.REFUSED, error=text)
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
            if outcome.status is not Status.REFUSED:
                del self._given[cgroup]
                self._unsaved = True
        self._save()
        return tuple(outcomes)

    def _look(self, decision: Decision) -> tuple[Outcome, tuple[int, ...]]:
        """Whether all are as decided, and who is not; DRY_RUN stands for what has to be written."""
        pids = self._processes.listed(decision.cgroup, decision.cgroup_id)
        scores = {pid: score for pid in pids if (score := self._processes.score(pid)) is not None}
        differ = tuple(pid for pid, score in scores.items() if score != int(decision.value))
        shown = _shown(scores)
        if differ:
            return Outcome(decision=decision, status=Status.DRY_RUN, before=shown), differ
        return Outcome(decision=decision, status=Status.UNCHANGED, before=shown, after=shown), ()

    def _note(self, decision: Decision, differ: Sequence[int]) -> None:
        """Have the originals of those that are about to be written, and of all where a container is new."""
        cgroup, score = decision.cgroup, int(decision.value)
        known = self._given.get(cgroup)
        same = known is not None and (known.score, known.cgroup_id) == (score, decision.cgroup_id)
        if known is not None and not same:
            # They had another value from here, which is nobody's original: begin anew from what was before it.
            self._restore(known)
        given = known if known is not None and same else Given(cgroup=cgroup, cgroup_id=decision.cgroup_id, score=score)
        had = {had.pid: had for had in given.had}
        for pid in differ if same else self._processes.listed(cgroup, decision.cgroup_id):
            seen = self._processes.look(pid)
            if seen is not None:
                got = known is not None and seen.score == known.score
                own = known.original(seen) if known is not None and got else None
                had[pid] = Had(pid=pid, start=seen.start, score=seen.score if own is None else own)
        alive = tuple(one for pid, one in had.items() if self._processes.score(pid) is not None)
        self._given[cgroup] = msgspec.structs.replace(given, had=alive)
        self._unsaved = self._unsaved or self._given[cgroup] != known

    def _write(self, found: Outcome, differ: Sequence[int]) -> Outcome:
        decision = found.decision
        starts = {had.pid: had.start for had in self._given[decision.cgroup].had}
        refused = self._set({pid: (starts[pid], int(decision.value)) for pid in differ if pid in starts})
        scores = {pid: self._processes.score(pid) for pid in differ}
        after = _shown({pid: score for pid, score in scores.items() if score is not None})
        if not refused:
            return msgspec.structs.replace(found, status=Status.APPLIED, after=after)
        status = Status.REFUSED if len(refused) == len(differ) else Status.MISMATCH
        return msgspec.structs.replace(found, status=status, after=after, error=_error(refused, decision.value))

    def _restore(self, given: Given) -> Outcome:
        before: dict[int, int] = {}
        refused: list[int] = []
        for _ in range(_PASSES):
            due = self._due(given)
            before |= {pid: seen.score for pid, (seen, _) in due.items() if pid not in before}
            refused = self._set({pid: (seen.start, score) for pid, (seen, score) in due.items()})
            if len(refused) == len(due):
                break
        originals = _shown({had.pid: had.score for had in given.had})
        decision = Decision(
            cgroup=given.cgroup,
            cgroup_id=given.cgroup_id,
            pod="",
            knob=Knob.OOM_SCORE_ADJ,
            value=originals,
            verdict=VERDICT,
        )
        if refused:
            error = _error(refused, originals)
            return Outcome(decision=decision, status=Status.REFUSED, before=_shown(before), error=error)
        status = Status.APPLIED if before else Status.UNCHANGED
        return Outcome(decision=decision, status=status, before=_shown(before) or None, after=originals)

    def _due(self, given: Given) -> dict[int, tuple[Seen, int]]:
        """Processes that have what was given, in the container or once there, and what they had."""
        pids = {*self._processes.listed(given.cgroup, given.cgroup_id), *(had.pid for had in given.had)}
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
            body = msgspec.json.decode(read_small(self._path, _LARGEST), type=_Body)
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


def _shown(scores: Mapping[int, int]) -> str:
    """The values that there are, each once: a container may have many processes."""
    return " ".join(map(str, sorted(set(scores.values()))))


def _error(refused: Sequence[int], value: str) -> str:
    count = len(refused)
    whom = f"process {refused[0]}" if count == 1 else f"{count} processes, the first is {refused[0]},"
    return f"{whom} cannot be given {value}: {LOWERING}"
