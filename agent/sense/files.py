"""Kernel files that are read every second: opened once, read from the start with one system call, reopened when needed.

Reading 1,600 cgroup files takes 25 ms with open, read and close, and 5 ms with descriptors that stay open. A kept
descriptor costs no memory of ours worth speaking of, but the kernel keeps a page for it once it has been read.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import ClassVar

from api.ports import Vanished

FIRST_READ_BYTES = 1024
"""Holds every file of a cgroup but the lists of tasks. A text that ends earlier is complete: seq_file hands out large
texts in pieces of a page less a record, never less."""
LONG_READ_BYTES = 8192
"""Holds memory.stat, and memory.numa_stat of a few nodes: files of a cgroup are one record, and come in one piece."""
LONGEST_TEXT_BYTES = 4 << 20
"""A kernel file that is longer is cut: 4 MiB are half a million thread ids."""
RESERVED = 512
"""Descriptors left for others in this process: sockets, probes, the actuator's directories, the journal."""
GONE = (errno.ENODEV, errno.ENOENT, errno.ESRCH)
"""What the kernel answers where there is no such file, cgroup or process, or no longer."""
_PIECE_BYTES = 1 << 16


class Budget:
    """How many files a reader may keep open. The soft limit is raised to the hard one when it runs short.

    When that does not suffice either, `take` says no and the file is opened for each read: slower, and never a failure.
    """

    kept_by_all: ClassVar[int] = 0
    """Of every budget together: the limit is the process's."""

    def __init__(self) -> None:
        self.kept = 0
        self.opened = 0
        """How many times a file was opened: grows when a name may have come to mean another file."""
        self.short = False
        """Whether the hard limit was reached, so that some files are opened for each read."""
        self._limit = _soft_limit() - RESERVED

    def take(self, *, spare: bool = False) -> bool:
        """Whether one more file may stay open; with `spare` only while half of the descriptors are free."""
        if spare and 2 * Budget.kept_by_all >= self._limit:
            return False
        if Budget.kept_by_all >= self._limit and not self.short:
            self._limit = _raise_limit() - RESERVED
            self.short = Budget.kept_by_all >= self._limit
        if Budget.kept_by_all >= self._limit:
            return False
        self.kept += 1
        Budget.kept_by_all += 1
        return True

    def give_back(self) -> None:
        """A kept file was closed."""
        self.kept -= 1
        Budget.kept_by_all -= 1


def _soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def _raise_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # Only the hard limit that is infinite while fs.nr_open is not, or a sandbox, says no here.
        return _soft_limit()
    return _soft_limit()


class KeptFile:
    """One file, named relative to a directory's descriptor. Closes itself when the last reference goes.

    With `keep` false it is opened for each read, which a few files need (`fields.SNAPSHOTS`); with `spare` it leaves the
    last descriptors to files that are read more often. `long` is for texts that may be longer than most.
    """

    __slots__ = ("_budget", "_dir_fd", "_fd", "_first_bytes", "_keep", "_name", "_spare")

    in_pieces: ClassVar[bool] = False
    """Whether a read that gives less than was asked for may yet not be the end of the text."""

    def __init__(
        self,
        budget: Budget,
        name: bytes,
        dir_fd: int | None = None,
        *,
        keep: bool = True,
        spare: bool = False,
        long: bool = False,
    ) -> None:
        self._budget, self._name, self._dir_fd, self._keep, self._spare = budget, name, dir_fd, keep, spare
        self._first_bytes = LONG_READ_BYTES if long else FIRST_READ_BYTES
        self._fd = -1

    @property
    def name(self) -> str:
        """For people: the name, whatever bytes it is made of."""
        return self._name.decode(errors="backslashreplace")

    def read(self) -> bytes:
        """The whole text, from its start. Raises Vanished when there is no such file any more, or another OSError."""
        if self._fd >= 0:
            try:
                text = os.pread(self._fd, self._first_bytes, 0)
            except OSError as error:
                self.close()
                if error.errno not in GONE:
                    raise
            else:
                return _rest(self._fd, text) if self.in_pieces or len(text) == self._first_bytes else text
        return self._read_anew()

    def close(self) -> None:
        """Give the descriptor back. Idempotent; the next read opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._budget.give_back()

    def __del__(self) -> None:
        self.close()

    def _read_anew(self) -> bytes:
        try:
            fd = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._dir_fd)
            self._budget.opened += 1
            try:
                text = os.pread(fd, self._first_bytes, 0)
                if self.in_pieces or len(text) == self._first_bytes:
                    text = _rest(fd, text)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            if error.errno in GONE:
                raise Vanished(f"{self.name}: {error.strerror}") from None
            raise
        if self._keep and self._budget.take(spare=self._spare):
            self._fd = fd
        else:
            os.close(fd)
        return text


class PiecedFile(KeptFile):
    """A file of several records that are long themselves, such as /proc/zoneinfo: it comes in pieces of any length."""

    __slots__ = ()
    in_pieces = True


def _rest(fd: int, text: bytes) -> bytes:
    pieces = [text]
    length = len(text)
    while pieces[-1] and length < LONGEST_TEXT_BYTES:
        pieces.append(os.pread(fd, _PIECE_BYTES, length))
        length += len(pieces[-1])
    return b"".join(pieces)
