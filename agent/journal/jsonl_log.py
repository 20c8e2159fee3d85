"""Bounded log of JSON lines: the latest entries in memory, and on disk in a file and its predecessor `NAME.1`.
A write error keeps the entries in memory until the disk accepts them; a line torn by a crash is dropped on open.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from api.decision import JournalEntry
from api.eviction import EvictionEntry
from api.text import to_json
from common.files import read_small_file

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""More than `keep` entries can take; a larger file is not ours."""
Entry = TypeVar("Entry", JournalEntry, EvictionEntry)


class JsonlLog(Generic[Entry]):
    """Entries of one kind, numbered from 1 on across restarts. Without a path it remembers and writes nothing."""

    def __init__(
        self, path: Path | None, kind: type[Entry], what: str, keep: int, loaded: Callable[[Entry], None]
    ) -> None:
        """`what` is their name in the log; `loaded` is told each entry of earlier agents."""
        # As lines: 2,000 of them are 1.2 MiB, and 2 to 2.7 as objects, for a question that is asked now and then.
        self._kept: deque[bytes] = deque(maxlen=keep)
        self._decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(kind)
        self._what = what
        self.next = 1
        """Number of the entry that comes next."""
        self._unwritten: deque[bytes] = deque(maxlen=keep)
        self._file = _RotatedFile(path, keep) if path is not None else None
        self.problem = ""
        """Why entries are not on disk at the moment, with the file's name; empty while all is well."""
        if self._file is not None:
            self._load(self._file, loaded)

    def add(self, entry: Entry) -> None:
        """Keep it; it is on disk after the next `flush`."""
        line = to_json(entry) + b"\n"
        self.next = entry.seq + 1
        self._kept.append(line)
        if self._file is not None:
            self._unwritten.append(line)

    def flush(self) -> None:
        """Write what is not on disk. Never raises: a disk's refusal is logged once and shown in `problem`."""
        if self._file is not None and self._unwritten:
            self._write(self._file)

    def entries(self, after: int, limit: int, wanted: Callable[[Entry], bool] | None) -> Sequence[Entry]:
        """The newest `limit` entries that are wanted and have a seq greater than `after`, oldest first. Any thread may ask."""
        newest: list[Entry] = []
        for line in reversed(tuple(self._kept)):
            if len(newest) >= limit or (entry := self._decoder.decode(line)).seq <= after:
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

    def _write(self, file: _RotatedFile) -> None:
        try:
            while self._unwritten:
                file.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self.problem:
                text = "%s stay in memory: %s: %s; make room or make it writable"
                log.error(text, self._what, file.path, error.strerror)
            self.problem = f"{file.path}: {error.strerror}"
        else:
            if self.problem:
                log.info("%s are on disk again: %s", self._what, file.path)
            self.problem = ""

    def _load(self, file: _RotatedFile, loaded: Callable[[Entry], None]) -> None:
        try:
            lines = file.read()
        except OSError as error:
            text = "earlier %s cannot be read: %s: %s; make it readable"
            log.error(text, self._what, file.path, error.strerror)
            self.problem = f"{file.path}: {error.strerror}"
            return
        damaged = 0
        for line in lines:
            try:
                entry = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                damaged += 1
                continue
            self._kept.append(line)
            self.next = max(self.next, entry.seq + 1)
            loaded(entry)
        if damaged:
            log.warning("%s: %d damaged lines were left out", file.path, damaged)


class _RotatedFile:
    """Two files of at most `keep` lines each. A line that was not written whole is taken back."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self._older = path.with_name(path.name + ".1")
        self._count = 0
        self._fd: int | None = None

    def read(self) -> list[bytes]:
        """The lines of both files, oldest first."""
        older = read_small_file(self._older, MAX_FILE_BYTES).splitlines() if self._older.exists() else []
        newer = read_small_file(self.path, MAX_FILE_BYTES).splitlines() if self.path.exists() else []
        self._count = len(newer)
        return older + newer

    def append(self, line: bytes) -> None:
        if self._count >= self._keep:
            self.close()
            if self.path.exists():
                self.path.replace(self._older)
            self._count = 0
        if self._fd is None:
            self._fd = _open_append(self.path)
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


def _open_append(path: Path) -> int:
    """Open for appending, and cut off what a crash left behind the last complete line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_RDWR never waits for the other end of a pipe; read_small then refuses it.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        content = read_small_file(path, MAX_FILE_BYTES)
        if not content.endswith(b"\n"):
            os.ftruncate(fd, content.rfind(b"\n") + 1)
    except OSError:
        os.close(fd)
        raise
    return fd
