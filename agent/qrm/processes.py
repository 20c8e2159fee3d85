"""Processes by number and start, and their oom_score_adj. A number alone may be another's by the time that it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from agent.sense.parsers import task_ids

_SHORT, _LARGEST = 4096, 1 << 16
_LEAF = 2
_FILE = "oom_score_adj"
_PARENT, _START = 1, 19
"""Words of /proc/PID/stat after the name, which may hold anything: proc(5) counts them as 4 and 22."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One process as it is now."""

    pid: int
    start: int
    """In clock ticks since boot: with the number, this process and no other."""
    parent: int
    score: int


class Processes:
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
            found += task_ids(_read(f"{directory}/cgroup.procs", _LARGEST))
        with suppress(OSError):
            # Most have nothing below, and as many files as it takes long to list: two links are a directory without others.
            if Path(directory).stat().st_nlink != _LEAF:
                for entry in os.scandir(directory):
                    if entry.is_dir(follow_symlinks=False):
                        self._collect(entry.path, found)

    def score(self, pid: int) -> int | None:
        """Its oom_score_adj; None where it has ended. One read, for most processes are as they should be."""
        try:
            return int(_read(f"{self._proc}/{pid}/{_FILE}", _SHORT))
        except (OSError, ValueError):
            return None

    def look(self, pid: int) -> Seen | None:
        """All of it; None where it has ended."""
        try:
            with self._opened(pid) as (fd, start, parent):
                return Seen(pid=pid, start=start, parent=parent, score=int(_read(_FILE, _SHORT, fd)))
        except (OSError, ValueError):
            return None

    def write(self, pid: int, start: int, score: int) -> bool:
        """Whether that very process was there to have it. Raises PermissionError where the kernel does not allow it."""
        try:
            # What is opened through the directory is of the process that the directory was opened of.
            with self._opened(pid) as (fd, found, _):
                if found != start:
                    return False
                file = os.open(_FILE, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, dir_fd=fd)
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
            words = _read("stat", _SHORT, fd).rpartition(b")")[2].split()
            if len(words) <= _START:
                raise ValueError("stat is cut off")
            yield fd, int(words[_START]), int(words[_PARENT])
        finally:
            os.close(fd)


def _read(path: str, most: int, directory: int | None = None) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        # What the kernel writes for a whole file at once, it gives at once: only lists may be longer than a page.
        data = os.read(fd, most)
        while most > _SHORT and (more := os.read(fd, most)):
            data += more
        return data
    finally:
        os.close(fd)
