"""Every cgroup of the machine, once a tick: the tree of the primary hierarchy and what each field's file says.

A cgroup is its inode: when a directory was removed and made again, the new one starts afresh under its own id, and no
sample mixes the two. A text that has not changed since the last read is not parsed again; an idle cgroup costs its
system calls and nothing else.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from agent.hierarchy import Hierarchy
from agent.sense.fields import SNAPSHOTS, Source, sources
from agent.sense.files import Budget, KeptFile
from agent.sense.tree import CgroupTree, Group
from api.ports import Unavailable, Vanished
from api.samples import CgroupSample, SourceStatus

LONGEST_PAUSE = 16
"""A file that is not there is looked for again after 1, 2, 4 ... 16 reads: a controller or a group may come later."""


class CgroupReader:
    """Samples of every cgroup of the primary hierarchy. Keeps files open; `close` gives them back."""

    def __init__(self, hierarchy: Hierarchy, *, limit: int = 4096) -> None:
        self._limit = limit
        self._budget = Budget()
        self._mounts: dict[Path, int] = {}
        self._readings: dict[int, _Reading] = {}
        self._reads = 0
        self._failures: list[str] = []
        self._closed_mounts: list[str] = []
        self._plan = sources(hierarchy)
        self._mount_fds = [self._open_mount(source.mount) for source in self._plan]
        primary = self._open_mount(hierarchy.primary)
        if primary < 0:
            remedy = "mount the cgroup file system there, and let the agent read it"
            raise Unavailable(self._closed_mounts[-1], remedy)
        self._tree = CgroupTree(primary, limit)

    @property
    def skipped(self) -> int:
        """Cgroups that were seen but not read because of the limit; what is below them is not even seen."""
        return self._tree.skipped

    def read(self) -> dict[str, CgroupSample]:
        """Every cgroup by path, the root as `/`; what vanishes meanwhile is absent. Raises Unavailable without a root."""
        self._reads += 1
        self._failures.clear()
        samples: dict[str, CgroupSample] = {}
        readings: dict[int, _Reading] = {}
        for group in self._tree.walk():
            reading = self._readings.pop(group.id, None) or _Reading(len(self._plan))
            opened = self._budget.opened
            sample = self._sample(group, reading)
            if self._budget.opened != opened and self._tree.inode(group) != group.id:
                # Opened by name while the directory was replaced: some of the numbers may be its successor's.
                reading.close()
                self._tree.drop(group)
                continue
            readings[group.id] = reading
            samples[group.path] = sample
        for gone in self._readings.values():
            gone.close()
        self._readings = readings
        if "/" not in samples:
            raise Unavailable("the root of the cgroup tree cannot be read", "mount it, and let the agent read it")
        return samples

    def problems(self) -> tuple[SourceStatus, ...]:
        """What the latest read had to leave out or to pay for, each with its remedy."""
        found = []
        failures = [*self._closed_mounts, *self._tree.denied, *self._failures]
        if failures:
            error = f"{len(failures)} cgroup files cannot be read, the first is {failures[0]}"
            denied = any(os.strerror(code) in failures[0] for code in (errno.EACCES, errno.EPERM))
            remedy = "run the agent as root" if denied else "see what else the kernel's log says of that file"
            found.append(SourceStatus(name="cgroup-files", ok=False, error=error, remedy=remedy))
        if self.skipped:
            error = f"at least {self.skipped} cgroups beyond the limit of {self._limit} are not read"
            found.append(SourceStatus(name="cgroup-limit", ok=False, error=error, remedy="raise maxCgroups"))
        if self._budget.short:
            error = f"only {self._budget.kept} cgroup files may stay open; opening the others each time costs CPU"
            found.append(SourceStatus(name="open-files", ok=False, error=error, remedy="raise the limit: ulimit -n"))
        return tuple(found)

    def close(self) -> None:
        """Close every descriptor. Idempotent; there is no reading afterwards."""
        for reading in self._readings.values():
            reading.close()
        self._readings.clear()
        while self._mounts:
            _, fd = self._mounts.popitem()
            if fd >= 0:
                os.close(fd)

    def _open_mount(self, mount: Path) -> int:
        # -1 where it cannot be opened: the fields of its files stay None.
        if mount not in self._mounts:
            try:
                self._mounts[mount] = os.open(mount, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                self._mounts[mount] = -1
                self._closed_mounts.append(f"{mount}: {error.strerror}")
        return self._mounts[mount]

    def _sample(self, group: Group, reading: _Reading) -> CgroupSample:
        changed = False
        for index, source in enumerate(self._plan):
            unneeded = source.instead_of is not None and reading.gives(source.instead_of)
            if unneeded or self._mount_fds[index] < 0:
                continue
            cell = reading.cells[index]
            if cell is None:
                keep = source.file not in SNAPSHOTS
                cell = _Cell(self._budget, group.below(source.file), self._mount_fds[index], keep=keep)
                reading.cells[index] = cell
            changed |= self._refresh(cell, source)
        if changed or reading.sample is None or reading.sample.path != group.path:
            reading.sample = CgroupSample(path=group.path, id=group.id, **reading.values())
        return reading.sample

    def _refresh(self, cell: _Cell, source: Source) -> bool:
        """Read one file and return whether its values are others than before."""
        if cell.resume_at <= self._reads:
            try:
                text = cell.read()
            except Vanished:
                cell.failure = ""
            except OSError as error:
                cell.failure = f"{cell.name}: {error.strerror}"
            else:
                cell.pause, cell.failure = 0, ""
                if text == cell.text:
                    return False
                cell.text = text
                cell.values = {field: parse(text) for field, parse in zip(source.fields, source.parsers, strict=True)}
                return True
            cell.pause = min(max(2 * cell.pause, 1), LONGEST_PAUSE)
            cell.resume_at = self._reads + cell.pause
        if cell.failure:
            self._failures.append(cell.failure)
        known, cell.text, cell.values = cell.text is not None, None, {}
        return known


class _Cell(KeptFile):
    # One file of one cgroup, what it said last, and when to look for it again where it is not there.
    __slots__ = ("failure", "pause", "resume_at", "text", "values")

    def __init__(self, budget: Budget, name: bytes, dir_fd: int, *, keep: bool) -> None:
        super().__init__(budget, name, dir_fd, keep=keep)
        self.text: bytes | None = None
        self.values: dict[str, Any] = {}
        self.pause = self.resume_at = 0
        self.failure = ""


class _Reading:
    # What is kept of one cgroup between two reads.
    __slots__ = ("cells", "sample")

    def __init__(self, files: int) -> None:
        self.cells: list[_Cell | None] = [None] * files
        self.sample: CgroupSample | None = None

    def values(self) -> dict[str, Any]:
        # Later cells are fallbacks: they only fill what earlier ones leave out.
        merged: dict[str, Any] = {}
        for cell in self.cells:
            if cell is not None:
                for field, value in cell.values.items():
                    if merged.get(field) is None:
                        merged[field] = value
        return merged

    def gives(self, index: int) -> bool:
        cell = self.cells[index]
        return cell is not None and bool(cell.values) and None not in cell.values.values()

    def close(self) -> None:
        for cell in self.cells:
            if cell is not None:
                cell.close()
