"""The bounded record of what was decided, why, and what came of it: JSON lines that `dioptase explain` and the page read.

Every line is one JournalEntry. Nothing is recorded of a knob that already had its value, and a decision that keeps
failing, or keeps being only a dry run, is recorded once until something else becomes of that knob. On disk there are at
most two files, `NAME` and the older `NAME.1`, of `keep` lines each. A line torn by a crash is dropped when the file is
next opened. A disk that refuses costs no decision: the entries stay in memory and are written when it accepts again.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agent.smallfile import read_small
from api.decisions import JournalEntry, Outcome, Round, Status
from api.text import to_json

log = logging.getLogger(__name__)

ONCE = frozenset({Status.DRY_RUN, Status.REFUSED, Status.VANISHED, Status.MISMATCH})
"""Outcomes that come again every round for as long as their cause lasts."""
LARGEST_BYTES = 64 << 20
"""More than `keep` entries can take; a larger file is not ours."""
Seen = tuple[int, Status, str]
_DECODER = msgspec.json.Decoder(JournalEntry)


class DecisionJournal:
    """Sink of rounds and api.ports.Journal. Without a path it remembers and writes nothing."""

    def __init__(self, path: Path | None, *, keep: int = 2000) -> None:
        # As lines: 2,000 of them are 1.2 MiB, and 2 to 2.7 as objects, for a question that is asked now and then.
        self._kept: deque[bytes] = deque(maxlen=keep)
        self._last: OrderedDict[tuple[str, str], Seen] = OrderedDict()
        self._pods: OrderedDict[str, str] = OrderedDict()
        self._next = 1
        self._unwritten: deque[bytes] = deque(maxlen=keep)
        self._file = _Lines(path, keep) if path is not None else None
        self.problem = ""
        """Why entries are not on disk at the moment, with the file's name; empty while all is well."""
        if self._file is not None:
            self._load(self._file)

    def publish(self, finished: Round) -> None:
        """Record what is new in this round. Never raises: a disk's refusal is logged once and shown in `problem`."""
        for outcome in finished.outcomes:
            if self._is_news(outcome):
                self._record(finished, outcome)
        if self._file is not None and self._unwritten:
            self._write(self._file)

    def entries(
        self, after: int = 0, limit: int = 200, wanted: Callable[[JournalEntry], bool] | None = None
    ) -> Sequence[JournalEntry]:
        """As `api.ports.Journal` says. Any thread may ask."""
        newest: list[JournalEntry] = []
        for line in reversed(tuple(self._kept)):
            if len(newest) >= limit or (entry := _DECODER.decode(line)).seq <= after:
                break
            if wanted is None or wanted(entry):
                newest.append(entry)
        return newest[::-1]

    @property
    def writable(self) -> bool | None:
        """Whether entries reach the disk; None where there is no file."""
        return None if self._file is None else not self.problem

    def close(self) -> None:
        """Give the file back. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _is_news(self, outcome: Outcome) -> bool:
        decision = outcome.decision
        knob = (decision.cgroup, decision.knob.value)
        now: Seen = (decision.cgroup_id, outcome.status, decision.value)
        before = self._last.pop(knob, None)
        self._last[knob] = now
        if len(self._last) > 4 * (self._kept.maxlen or 0):
            self._last.popitem(last=False)
        return outcome.status is not Status.UNCHANGED and (outcome.status not in ONCE or before != now)

    def _record(self, finished: Round, outcome: Outcome) -> None:
        outcome = self._with_pod(outcome)
        entry = JournalEntry(
            seq=self._next,
            wall_time_ns=finished.snapshot.wall_time_ns,
            round_seq=finished.snapshot.seq,
            trigger=finished.trigger,
            policy=finished.advice.policy if finished.advice else "",
            outcome=outcome,
        )
        line = to_json(entry) + b"\n"
        self._next += 1
        self._kept.append(line)
        if self._file is not None:
            self._unwritten.append(line)

    def _with_pod(self, outcome: Outcome) -> Outcome:
        """Originals know no pods: what is put back is of the pod that the cgroup was of when it was last decided on."""
        cgroup, pod = outcome.decision.cgroup, outcome.decision.pod
        if not pod:
            decision = msgspec.structs.replace(outcome.decision, pod=self._pods.get(cgroup, ""))
            return msgspec.structs.replace(outcome, decision=decision)
        self._pods[cgroup] = pod
        self._pods.move_to_end(cgroup)
        if len(self._pods) > 4 * (self._kept.maxlen or 0):
            self._pods.popitem(last=False)
        return outcome

    def _write(self, file: _Lines) -> None:
        try:
            while self._unwritten:
                file.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self.problem:
                log.error("decisions stay in memory: %s: %s; make room or make it writable", file.path, error.strerror)
            self.problem = f"{file.path}: {error.strerror}"
        else:
            if self.problem:
                log.info("decisions are on disk again: %s", file.path)
            self.problem = ""

    def _load(self, file: _Lines) -> None:
        try:
            lines = file.read()
        except OSError as error:
            log.error("earlier decisions cannot be read: %s: %s; make it readable", file.path, error.strerror)
            self.problem = f"{file.path}: {error.strerror}"
            return
        damaged = 0
        for line in lines:
            try:
                entry = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                damaged += 1
                continue
            self._kept.append(line)
            self._pods[entry.outcome.decision.cgroup] = entry.outcome.decision.pod
            self._next = max(self._next, entry.seq + 1)
        if damaged:
            log.warning("%s: %d damaged lines were left out", file.path, damaged)


class _Lines:
    """Two files of at most `keep` lines each. A line that was not written whole is taken back."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self._older = path.with_name(path.name + ".1")
        self._count = 0
        self._fd: int | None = None

    def read(self) -> list[bytes]:
        """The lines of both files, oldest first."""
        older = read_small(self._older, LARGEST_BYTES).splitlines() if self._older.exists() else []
        newer = read_small(self.path, LARGEST_BYTES).splitlines() if self.path.exists() else []
        self._count = len(newer)
        return older + newer

    def append(self, line: bytes) -> None:
        if self._count >= self._keep:
            self.close()
            if self.path.exists():
                self.path.replace(self._older)
            self._count = 0
        if self._fd is None:
            self._fd = _open_whole(self.path)
        end = os.lseek(self._fd, 0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._count += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open_whole(path: Path) -> int:
    """Open for appending, and cut off what a crash left behind the last complete line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_RDWR never waits for the other end of a pipe; read_small then refuses it.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        content = read_small(path, LARGEST_BYTES)
        if not content.endswith(b"\n"):
            os.ftruncate(fd, content.rfind(b"\n") + 1)
    except OSError:
        os.close(fd)
        raise
    return fd
