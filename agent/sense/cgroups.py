"""Every cgroup of the machine, once a tick: the tree of the primary hierarchy and what each field's file says.

A cgroup is its inode: when a directory was removed and made again, the new one starts afresh under its own id, and no
sample mixes the two. A text that has not changed since the last read is not parsed again; an idle cgroup costs its
system calls and nothing else. Files that cost more are read every few seconds, each cgroup's in a turn of its own, so
that no tick pays for all: those of managed cgroups when first seen, of others by the end of a period.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from agent.hierarchy import Hierarchy
from agent.sense.fields import sources
from agent.sense.files import Budget
from agent.sense.reading import Plan, Reading
from agent.sense.tree import CgroupTree, Group
from api.names import to_bytes
from api.ports import Unavailable
from api.samples import CgroupSample, SourceStatus

_TURN = 0.618033988749895
"""Multiples of the golden ratio, less their whole part, spread evenly whatever their number."""


class CgroupReader:
    """Samples of every cgroup of the primary hierarchy. Keeps files open; `close` gives them back."""

    def __init__(self, hierarchy: Hierarchy, *, limit: int = 4096, fresh_limits: bool = False) -> None:
        """`fresh_limits`: limits are as old as `files_read_at_ns` says, at three times the usual cost of reading them."""
        self._limit = limit
        self._budget = Budget()
        self._mounts: dict[Path, int] = {}
        self._readings: dict[int, Reading] = {}
        self._reads = self._admitted = 0
        self._failures: list[str] = []
        self._closed_mounts: list[str] = []
        self._managed: frozenset[str] = frozenset()
        plan = sources(hierarchy)
        fds = [self._open_mount(source.mount) for source in plan]
        self._plan = Plan(plan, fds, self._budget, fresh_limits=fresh_limits)
        primary = self._open_mount(hierarchy.primary)
        if primary < 0:
            remedy = "mount the cgroup file system there, and let the agent read it"
            raise Unavailable(self._closed_mounts[-1], remedy)
        self._tree = CgroupTree(primary, limit)

    @property
    def skipped(self) -> int:
        """Cgroups that were seen but not read because of the limit; what is below them is not even seen."""
        return self._tree.skipped

    def manage(self, paths: Iterable[str]) -> None:
        """The cgroups that matter most, by path: the limit leaves out others first, and all their files are read at once."""
        managed = frozenset(paths)
        if managed != self._managed:
            self._managed = managed
            self._tree.prefer(frozenset(to_bytes(path).strip(b"/") for path in managed))

    def read(self, now_ns: int | None = None, wall_time_ns: int | None = None) -> dict[str, CgroupSample]:
        """Every cgroup by path, the root as `/`; what vanishes meanwhile is absent. Raises Unavailable without a root.

        The clocks are CLOCK_MONOTONIC, which decides whose turn it is, and CLOCK_REALTIME, which is noted in the samples.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        wall_time_ns = time.time_ns() if wall_time_ns is None else wall_time_ns
        self._reads += 1
        self._failures.clear()
        samples: dict[str, CgroupSample] = {}
        readings: dict[int, Reading] = {}
        for group in self._tree.walk():
            reading = self._readings.pop(group.id, None) or self._admit(group, now_ns)
            opened = self._budget.opened
            above = readings.get(group.parent.id) if group.parent is not None else None
            sample = reading.refresh(self._plan, group, above, self._reads, now_ns, wall_time_ns)
            if reading.failing:
                self._failures.extend(reading.failures())
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

    def _admit(self, group: Group, now_ns: int) -> Reading:
        self._admitted += 1
        at_once = self._reads == 1 or group.path in self._managed
        return Reading(self._plan, now_ns, self._admitted * _TURN % 1.0, at_once=at_once)
