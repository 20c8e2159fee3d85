"""Bounded log of JSON lines: the latest entries in memory, and on disk in a file and its predecessor `NAME.1`.
After a write error entries stay in memory until the disk accepts them; a line torn by a crash is dropped on open.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from api.decision import JournalEntry
from api.eviction import EvictionEntry
from api.text import to_json
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file that is read: more than `keep` entries can take."""
Entry = TypeVar("Entry", JournalEntry, EvictionEntry)


class JsonlLog(Generic[Entry]):
    """Entries of one kind, numbered from 1 across restarts. Without a path they are only in memory."""

    def __init__(
        self,
        path: Path | None,
        kind: type[Entry],
        what: str,
        keep: int,
        on_load: Callable[[Entry], None] = lambda _: None,
        disk: FileWriter = INLINE_WRITER,
    ) -> None:
        """`what` names the entries in messages; `on_load` is called with each entry of earlier agents."""
        # Encoded lines take less memory than objects (1.2 MiB instead of 2 to 2.7 MiB for 2,000) and are rarely read.
        self._lines: deque[bytes] = deque(maxlen=keep)
        self._decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(kind)
        self._what, self._disk = what, disk
        self.next_seq = 1
        """Number of the next entry."""
        self._unwritten: deque[bytes] = deque(maxlen=keep)
        self._file = _RotatedFile(path, keep) if path is not None else None
        self.problem = ""
        """Why entries cannot be written, with the file name; empty otherwise."""
        if self._file is not None:
            self._load(self._file, on_load)

    def add(self, entry: Entry) -> None:
        """Add an entry; `flush` writes it to disk."""
        line = to_json(entry) + b"\n"
        self.next_seq = entry.seq + 1
        self._lines.append(line)
        if self._file is not None:
            self._unwritten.append(line)

    def flush(self) -> None:
        """Have new entries written to disk. Never raises: an error is logged once and shown in `problem`."""
        if self._file is not None and self._unwritten:
            self._disk.submit(self._file.path.name, partial(self._write, self._file))

    def entries(
        self, after: int = 0, limit: int = 200, matches: Callable[[Entry], bool] | None = None
    ) -> Sequence[Entry]:
        """Return the newest `limit` matching entries with a seq greater than `after`, oldest first. Any thread may call it."""
        newest: list[Entry] = []
        for line in reversed(tuple(self._lines)):
            if len(newest) >= limit or (entry := self._decoder.decode(line)).seq <= after:
                break
            if matches is None or matches(entry):
                newest.append(entry)
        return newest[::-1]

    @property
    def writable(self) -> bool | None:
        """Whether entries reach the disk; None without a file."""
        return None if self._file is None else not self.problem

    def close(self) -> None:
        """Have the file closed after the entries are written. Idempotent."""
        if self._file is not None:
            self.flush()
            self._disk.submit(f"{self._file.path.name} close", self._file.close)

    def _write(self, file: _RotatedFile) -> None:
        try:
            while self._unwritten:
                line = self._unwritten[0]
                file.append(line)
                # A full queue may have dropped it meanwhile.
                if self._unwritten[0] is line:
                    self._unwritten.popleft()
        except OSError as error:
            if not self.problem:
                text = "%s stay in memory: %s: %s; free space or make it writable"
                log.error(text, self._what, file.path, error.strerror)
            self.problem = f"{file.path}: {error.strerror}"
        else:
            if self.problem:
                log.info("%s are on disk again: %s", self._what, file.path)
            self.problem = ""

    def _load(self, file: _RotatedFile, on_load: Callable[[Entry], None]) -> None:
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
            self._lines.append(line)
            self.next_seq = max(self.next_seq, entry.seq + 1)
            on_load(entry)
        if damaged:
            log.warning("%s: %d damaged lines were left out", file.path, damaged)


class _RotatedFile:
    """Two files of at most `keep` lines each. A partly written line is truncated."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self._older = path.with_name(path.name + ".1")
        self._count = 0
        self._fd: int | None = None

    def read(self) -> list[bytes]:
        """Return the lines of both files, oldest first."""
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
    """Open for appending, and truncate an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_RDWR does not block on a named pipe; read_small_file then refuses it.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        content = read_small_file(path, MAX_FILE_BYTES)
        if not content.endswith(b"\n"):
            os.ftruncate(fd, content.rfind(b"\n") + 1)
    except OSError:
        os.close(fd)
        raise
    return fd
