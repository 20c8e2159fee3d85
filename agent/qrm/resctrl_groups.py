"""Writes resctrl groups and moves processes into them, where the file system is mounted.

Nothing has to be journalled: only groups of our own name are made and written, and removing one gives its processes back
to the default group. The kernel forks children into their parent's group, so only processes that came otherwise are moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.qrm.resctrl import PREFIX, Caches, Group, parse_schemata
from agent.smallfile import read_small
from api.ports import Unavailable

_LARGEST = 1 << 20


class ResctrlGroups:
    """The groups below one mount point."""

    def __init__(self, root: Path = Path("/sys/fs/resctrl")) -> None:
        self._root = root

    def caches(self) -> Caches:
        """What the default group has. Raises Unavailable where there is no resctrl."""
        try:
            return parse_schemata(_text(self._root / "schemata"))
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"{self._root} cannot be read: {error}",
                f"mount -t resctrl resctrl {self._root}, on a CPU with cache allocation",
            ) from None

    def apply(self, wanted: Iterable[Group], members: Mapping[str, Iterable[int]]) -> tuple[str, ...]:
        """Make these groups, give them their shares and move those processes in, by name of group; remove other groups of
        ours. What failed, one sentence each."""
        found, names = [], set()
        for group in wanted:
            names.add(group.name)
            directory = self._root / group.name
            try:
                directory.mkdir(exist_ok=True)
                if _has(directory) != parse_schemata(group.schemata):
                    _write(directory / "schemata", group.schemata)
            except (OSError, ValueError) as error:
                found.append(f"{directory}: {error}: see {self._root}/info/last_cmd_status")
                continue
            found += _move(directory, members.get(group.name, ()))
        return (*found, *self._remove(names))

    def restore(self) -> tuple[str, ...]:
        """Remove every group of ours. What failed, one sentence each."""
        return self._remove(set())

    def _remove(self, but: set[str]) -> tuple[str, ...]:
        found = []
        for directory in sorted(self._root.glob(f"{PREFIX}*")) if self._root.is_dir() else ():
            if directory.name in but:
                continue
            try:
                self.remove(directory)
            except OSError as error:
                found.append(f"{directory} cannot be removed: {error.strerror}")
        return tuple(found)

    def remove(self, directory: Path) -> None:
        """The kernel removes a group's files with it."""
        directory.rmdir()


def _has(directory: Path) -> Caches | None:
    try:
        return parse_schemata(_text(directory / "schemata"))
    except (FileNotFoundError, ValueError):
        return None


def _move(directory: Path, pids: Iterable[int]) -> list[str]:
    found = []
    try:
        there = set(map(int, _text(directory / "tasks").split()))
    except FileNotFoundError:
        there = set()
    for pid in sorted(set(pids) - there):
        try:
            # One at a time: the kernel takes no more, and a process that has ended must not hold up the others.
            _write(directory / "tasks", f"{pid}\n")
        except ProcessLookupError:
            continue
        except OSError as error:
            found.append(f"process {pid} cannot be moved to {directory}: {error.strerror}")
    return found


def _text(path: Path) -> str:
    return read_small(path, _LARGEST).decode("ascii")


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
