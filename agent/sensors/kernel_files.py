"""Reads small kernel files below /proc, /sys and the cgroup mounts through descriptors that stay open.
Reading 1,600 cgroup files takes 25 ms with open, read and close, and 5 ms with `pread` on open descriptors.
`DescriptorBudget` bounds the open files of the process; beyond it files are opened for each read, which is slower
but never fails. `ProcSysFiles` also collects what could not be read, each with a remedy.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

from api.interfaces import Unavailable, Vanished

FIRST_READ_BYTES = 1024
"""Holds every file of a cgroup except lists of tasks. A shorter text is complete: seq_file returns less than requested
only at the end or after at least a page less one record (fs/seq_file.c, seq_read_iter)."""
LONG_READ_BYTES = 8192
"""Holds memory.stat, and memory.numa_stat of a few nodes: a cgroup file is one record and is returned in one piece."""
MAX_TEXT_BYTES = 4 << 20
"""Longer kernel files are truncated: 4 MiB are half a million thread ids."""
RESERVED_DESCRIPTORS = 512
"""Descriptors left for sockets, probes, the actuator's directories and the journal."""
VANISHED_ERRNOS = (errno.ENODEV, errno.ENOENT, errno.ESRCH)
"""Errors of the kernel for a file, cgroup or process that does not exist, or no longer exists."""
_PIECE_BYTES = 1 << 16


class DescriptorBudget:
    """Bounds how many files a reader may keep open, and raises the soft limit to the hard one when it runs short.

    If that is not enough, `take` returns False and the file is opened for each read, which is slower but never fails.
    """

    open_in_process: ClassVar[int] = 0
    """Open files of all budgets: the limit is per process."""

    def __init__(self) -> None:
        self.open_files = 0
        self.opened = 0
        """How many times a file was opened; when it grows, a name may refer to another file."""
        self.short = False
        """Whether the hard limit was reached, so that some files are opened for each read."""
        self._limit = _soft_limit() - RESERVED_DESCRIPTORS

    def take(self, *, spare: bool = False) -> bool:
        """Return whether one more file may stay open; with `spare` only while half of the descriptors are free."""
        if spare and 2 * DescriptorBudget.open_in_process >= self._limit:
            return False
        if DescriptorBudget.open_in_process >= self._limit and not self.short:
            self._limit = _raise_limit() - RESERVED_DESCRIPTORS
            self.short = DescriptorBudget.open_in_process >= self._limit
        if DescriptorBudget.open_in_process >= self._limit:
            return False
        self.open_files += 1
        DescriptorBudget.open_in_process += 1
        return True

    def give_back(self) -> None:
        """Release the descriptor of a file that was closed."""
        self.open_files -= 1
        DescriptorBudget.open_in_process -= 1


def _soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def _raise_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # Fails only if the hard limit is infinite and fs.nr_open is not (kernel/sys.c, do_prlimit), or in a sandbox.
        return _soft_limit()
    return _soft_limit()


class KernelFile:
    """One file, named relative to a directory's descriptor. Closes itself when the last reference goes.

    With `keep` false it is opened for each read, which `cgroup_files.UNCACHEABLE_FILES` need; with `spare` it leaves
    the last descriptors to files that are read more often. `long` is for texts that may be longer than most.
    """

    __slots__ = ("_budget", "_dir_fd", "_fd", "_first_bytes", "_keep", "_name", "_spare")

    in_pieces: ClassVar[bool] = False
    """Whether a short read may not be the end of the text."""

    def __init__(
        self,
        budget: DescriptorBudget,
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
        """The name for messages, whatever bytes it consists of."""
        return self._name.decode(errors="backslashreplace")

    def read(self) -> bytes:
        """Return the whole text. Raises Vanished if the file no longer exists, or another OSError."""
        if self._fd >= 0:
            try:
                text = os.pread(self._fd, self._first_bytes, 0)
            except OSError as error:
                self.close()
                if error.errno not in VANISHED_ERRNOS:
                    raise
            else:
                return _read_remainder(self._fd, text) if self.in_pieces or len(text) == self._first_bytes else text
        return self._reopen()

    def close(self) -> None:
        """Close the descriptor; the next read opens the file again. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._budget.give_back()

    def __del__(self) -> None:
        self.close()

    def _reopen(self) -> bytes:
        try:
            fd = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._dir_fd)
            self._budget.opened += 1
            try:
                text = os.pread(fd, self._first_bytes, 0)
                if self.in_pieces or len(text) == self._first_bytes:
                    text = _read_remainder(fd, text)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            if error.errno in VANISHED_ERRNOS:
                raise Vanished(f"{self.name}: {error.strerror}") from None
            raise
        if self._keep and self._budget.take(spare=self._spare):
            self._fd = fd
        else:
            os.close(fd)
        return text


class MultiReadKernelFile(KernelFile):
    """A file of several long records, such as /proc/zoneinfo, that the kernel returns in pieces of any length."""

    __slots__ = ()
    in_pieces = True


def _read_remainder(fd: int, text: bytes) -> bytes:
    pieces = [text]
    length = len(text)
    while pieces[-1] and length < MAX_TEXT_BYTES:
        pieces.append(os.pread(fd, _PIECE_BYTES, length))
        length += len(pieces[-1])
    return b"".join(pieces)


Value = TypeVar("Value")
HOST_PROC_REMEDY = "give the agent the host's /proc"
MAX_ATTRIBUTE_BYTES = 1 << 16
"""Limit of a sysfs file: an attribute has at most a page (Documentation/filesystems/sysfs.rst), the distance list of a
thousand nodes is shorter."""


class ProcSysFiles:
    """Readers of files below /proc and /sys. `close` closes their descriptors."""

    def __init__(self, proc: Path, sys: Path) -> None:
        self.proc, self.sys = proc, sys
        self._budget = DescriptorBudget()
        self._open_files: dict[Path, MultiReadKernelFile] = {}
        self._failures: dict[str, dict[str, str]] = {}
        self._lacks: dict[str, dict[str, Unavailable]] = {}
        self._source = ""

    def begin(self, source: str) -> None:
        """Start the reading of this source, and forget what it reported last time."""
        self._source = source
        self._failures[source], self._lacks[source] = {}, {}

    def parse(self, name: str, parse: Callable[[bytes], Value | None], remedy: str = HOST_PROC_REMEDY) -> Value | None:
        """Return the parsed text of a file below /proc; None, with a failure, if it is missing, refused or useless."""
        try:
            value = parse(self.text(self.proc / name)) or None
        except Vanished:
            self.fail(f"{name} is missing", remedy)
        except OSError as error:
            self.fail(f"{name}: {error.strerror}", remedy)
        else:
            if value is None:
                self.fail(f"{name} has an unexpected format", remedy)
            return value
        return None

    def read_optional(self, path: Path, *, keep: bool = False) -> bytes:
        """Return the text of a file that need not exist; empty if it cannot be read. `keep` keeps it open."""
        try:
            return self.text(path) if keep else self.short_text(path)
        except (Vanished, OSError):
            return b""  # reading `speed` of an interface that is down also fails (net/core/net-sysfs.c, speed_show)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def text(self, path: Path) -> bytes:
        """Return the text of a file and keep it open. Raises Vanished or OSError."""
        if path not in self._open_files:
            self._open_files[path] = MultiReadKernelFile(self._budget, os.fsencode(path), long=True)
        return self._open_files[path].read()

    def short_text(self, path: Path) -> bytes:
        """Return the text of a short file. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, MAX_ATTRIBUTE_BYTES)
        finally:
            os.close(fd)

    def numbered(self, directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
        """Yield the entries of a directory such as node0 and cpu12 by number, in order."""
        pattern = re.compile(rf"{prefix}([0-9]{{1,5}})", re.ASCII)
        matches = (pattern.fullmatch(name) for name in self.names(directory))
        for number, name in sorted((int(match[1]), match[0]) for match in matches if match):
            yield number, directory / name

    def names(self, directory: Path) -> list[str]:
        """Return the sorted names in a directory; none if it cannot be listed."""
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 - names alone, hundreds of them
        except OSError:
            return []

    def fail(self, error: str, remedy: str) -> None:
        """Report something missing that every machine has."""
        self._failures[self._source][error] = remedy

    def lack(self, reason: str, remedy: str) -> None:
        """Report something missing that many machines do not have."""
        self._lacks[self._source][reason] = Unavailable(reason, remedy)

    def failures(self) -> dict[str, str]:
        """Return remedies by error, of the latest reading of every source."""
        return {error: remedy for failures in self._failures.values() for error, remedy in failures.items()}

    def lacks(self) -> tuple[tuple[str, Unavailable], ...]:
        """Return what this machine does not have, with the source, of the latest reading of every source."""
        return tuple((source, lack) for source, lacks in self._lacks.items() for lack in lacks.values())

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for file in self._open_files.values():
            file.close()
