"""Reads every cgroup of the primary hierarchy into CgroupSamples, once per cycle. A cgroup is identified by its inode:
a directory that was removed and created again starts a new sample. Unchanged texts are not parsed again. Files of
slower cadence are read every few seconds, each cgroup at a phase of its own, so that no cycle pays for all; those of
managed cgroups are read when first seen."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent.sensors.cgroup.cgroup_files import (
    CPU_USAGE_FIELD,
    CPU_USAGE_SPLIT_FILES,
    IDLE_STABLE_FILES,
    UNCACHEABLE_FILES,
    CgroupFileSource,
    join_fields,
    plan_sources,
)
from agent.sensors.cgroup.cgroup_tree import CgroupNode, CgroupTree
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.kernel_files import VANISHED_ERRNOS, DescriptorBudget, KernelFile
from api.interfaces import Unavailable, Vanished
from api.snapshot import CADENCE_PERIOD_NS, Cadence, CgroupSample, ComponentHealth
from api.text import cgroup_name_to_bytes

MAX_PAUSE_READS = 16
"""A missing file is looked for again after 1, 2, 4 ... 16 reads: a controller or a cgroup may come later."""
_MAX_RARE_BYTES = 4096
_SLOWER_CADENCES = (Cadence.SLOW, Cadence.RARE)


class CgroupReadPlan:
    """The files to read in every cgroup, and the open mount points to which their names are relative."""

    def __init__(
        self,
        sources: Sequence[CgroupFileSource],
        mount_fds: Sequence[int],
        budget: DescriptorBudget,
        *,
        fresh_limits: bool = False,
    ) -> None:
        """A mount point that could not be opened is -1: its files are not read. `fresh_limits` reads the rare files
        along with the slow ones."""
        self.sources, self.mount_fds, self.budget = sources, mount_fds, budget
        self.periods_ns = tuple(
            CADENCE_PERIOD_NS[Cadence.SLOW if fresh_limits else cadence] for cadence in _SLOWER_CADENCES
        )
        """Periods of the slow and of the rare files."""
        self.indices = {
            cadence: [i for i, source in enumerate(sources) if source.cadence is cadence and mount_fds[i] >= 0]
            for cadence in Cadence
        }
        # Some files of every cycle need a read only if the usage clock moved; the calm ones also with the slow files.
        ticking = self.indices[Cadence.TICK]
        self.clock = next((i for i in ticking if CPU_USAGE_FIELD in sources[i].fields), None)
        rest = [i for i in ticking if self.clock not in (i, None)]
        self.calm = [i for i in rest if sources[i].file in IDLE_STABLE_FILES]
        self.following = [i for i in rest if sources[i].file in IDLE_STABLE_FILES | CPU_USAGE_SPLIT_FILES]
        self.leading = [i for i in ticking if i not in self.following]
        self.set = lru_cache(maxsize=512)(self._set)
        """Fields from the texts of the rare files: many cgroups have the same settings."""

    def cell(self, index: int, group: CgroupNode) -> CachedCgroupFile:
        """Return the file of that source in this cgroup."""
        source = self.sources[index]
        spare = source.cadence is not Cadence.TICK
        name = group.below(source.file)
        return CachedCgroupFile(
            self.budget, name, self.mount_fds[index], keep=source.file not in UNCACHEABLE_FILES, spare=spare
        )

    def _set(self, texts: tuple[bytes | None, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index, text in zip(self.indices[Cadence.RARE], texts, strict=True):
            source = self.sources[index]
            if text is not None:
                values.update((field, parse(text)) for field, parse in zip(source.fields, source.parsers, strict=True))
        return join_fields(values)


class CachedCgroupFile(KernelFile):
    """One file of one cgroup, its last text, and when to look for it again if it is missing."""

    __slots__ = ("failure", "pause", "resume_at", "still", "text", "values")

    def __init__(self, budget: DescriptorBudget, name: bytes, dir_fd: int, *, keep: bool, spare: bool) -> None:
        super().__init__(budget, name, dir_fd, keep=keep, spare=spare, long=spare)
        self.text: bytes | None = None
        self.values: tuple[Any, ...] = ()
        """One value per field of the source; empty if the file gives none."""
        self.still = False
        """Whether the text cannot change while nothing happens: averages of pressure change until they are zero."""
        self.pause = self.resume_at = 0
        self.failure = ""

    def refresh(self, source: CgroupFileSource, reads: int) -> bool:
        """Read the file and return whether its values changed. `reads` counts the reader's reads."""
        if self._fd >= 0:
            # Nearly every call ends here, without another function call: the file is open and short.
            try:
                text = os.pread(self._fd, self._first_bytes, 0)
            except OSError:
                pass  # read() below distinguishes the errors
            else:
                if len(text) < self._first_bytes:
                    return text != self.text and self._take(text, source)
        if self.resume_at <= reads:
            try:
                text = self.read()
            except Vanished:
                self.failure = ""
            except OSError as error:
                self.failure = f"{self.name}: {error.strerror}"
            else:
                self.pause, self.failure = 0, ""
                return text != self.text and self._take(text, source)
            self.pause = min(max(2 * self.pause, 1), MAX_PAUSE_READS)
            self.resume_at = reads + self.pause
        existed, self.text, self.values, self.still = self.text is not None, None, (), False
        return existed

    def _take(self, text: bytes, source: CgroupFileSource) -> bool:
        self.text, self.still = text, text.count(b"avg") == text.count(b"=0.00 ")
        self.values = tuple([parse(text) for parse in source.parsers])
        return True


class CgroupReadState:
    """Open files and the last sample of one cgroup."""

    __slots__ = (
        "_cells", "_changed", "_due_ns", "_first_ns", "_read_at_ns", "_refused", "_set", "_slow_fields", "failing", "sample"
    )  # fmt: skip

    def __init__(self, plan: CgroupReadPlan, now_ns: int, phase: float, *, at_once: bool) -> None:
        """`phase`, from 0 to 1, is when within a period this cgroup's slow files are read; `at_once` reads all of them
        now, too."""
        self._cells: list[CachedCgroupFile | None] = [None] * len(plan.sources)
        self.sample: CgroupSample | None = None
        self.failing = False
        """Whether `failures` may return something."""
        self._changed: list[int] = []
        """Sources of every cycle whose texts had changed when they were last read."""
        self._slow_fields: dict[str, Any] = {}
        self._set: tuple[bytes | None, ...] = ()
        self._refused: list[str] = []
        self._read_at_ns: int | None = None
        self._first_ns = tuple(now_ns + int(phase * period) for period in plan.periods_ns)
        # First read the rare files along with the slow ones: a new cgroup's limits are then known within seconds.
        self._due_ns = [now_ns if at_once else self._first_ns[0]] * len(_SLOWER_CADENCES)

    def refresh(
        self,
        plan: CgroupReadPlan,
        group: CgroupNode,
        above: CgroupReadState | None,
        reads: int,
        now_ns: int,
        wall_time_ns: int,
    ) -> CgroupSample:
        """Read what is due and return the sample, the same object if nothing changed. `above` is the state of the
        parent cgroup, already refreshed."""
        self._changed = self._visit(plan, group, reads, plan.leading, above)
        if plan.clock is not None:
            if plan.clock in self._changed or not self._gives(plan.clock):
                self._changed += self._visit(plan, group, reads, plan.following)
            elif self._due_ns[0] <= now_ns:
                self._changed += self._visit(plan, group, reads, plan.calm)
        changed, slow_changed = bool(self._changed), False
        for place, cadence in enumerate(_SLOWER_CADENCES):
            if self._due_ns[place] > now_ns:
                continue
            self._due_ns[place] = self._next(plan, place, now_ns)
            if cadence is Cadence.SLOW:
                slow_changed |= bool(self._visit(plan, group, reads, plan.indices[cadence]))
                self._read_at_ns, changed = wall_time_ns, True
            else:
                slow_changed |= self._visit_rare(plan, group)
        if slow_changed:
            self._slow_fields = join_fields(self._values(plan, Cadence.SLOW)) | (
                plan.set(self._set) if self._set else {}
            )
        if changed or slow_changed or self.sample is None or self.sample.path != group.path:
            tick_fields = self._values(plan, Cadence.TICK)
            self.sample = CgroupSample(
                path=group.path, id=group.id, files_read_at_ns=self._read_at_ns, **self._slow_fields, **tick_fields
            )
        return self.sample

    def failures(self) -> list[str]:
        """Return files that exist and cannot be read."""
        failures = [cell.failure for cell in self._cells if cell is not None and cell.failure] + self._refused
        self.failing = bool(failures)
        return failures

    def close(self) -> None:
        """Close every file. Idempotent."""
        for cell in self._cells:
            if cell is not None:
                cell.close()

    def _visit(
        self,
        plan: CgroupReadPlan,
        group: CgroupNode,
        reads: int,
        indices: Sequence[int],
        above: CgroupReadState | None = None,
    ) -> list[int]:
        changed: list[int] = []
        cells, sources = self._cells, plan.sources
        for index in indices:
            source = sources[index]
            cell = cells[index]
            if source.fallback_for is not None and self._gives(source.fallback_for):
                continue
            if cell is None:
                cell = cells[index] = plan.cell(index, group)
            elif source.is_hierarchical and cell.still and above is not None and above.is_unchanged(index):
                continue
            if cell.refresh(source, reads):
                changed.append(index)
            if cell.failure:
                self.failing = True
        return changed

    def is_unchanged(self, index: int) -> bool:
        """Return whether that source of every cycle exists and had not changed when it was last read."""
        cell = self._cells[index]
        return index not in self._changed and cell is not None and cell.text is not None

    def _visit_rare(self, plan: CgroupReadPlan, group: CgroupNode) -> bool:
        # These files are not kept open; only their texts are retained.
        self._refused = []
        texts = tuple(self._read_once(plan, index, group) for index in plan.indices[Cadence.RARE])
        self.failing |= bool(self._refused)
        changed, self._set = texts != self._set, texts
        return changed

    def _read_once(self, plan: CgroupReadPlan, index: int, group: CgroupNode) -> bytes | None:
        name = group.below(plan.sources[index].file)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=plan.mount_fds[index])
            plan.budget.opened += 1
            try:
                return os.read(fd, _MAX_RARE_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in VANISHED_ERRNOS:
                self._refused.append(f"{name.decode(errors='backslashreplace')}: {error.strerror}")
            return None

    def _next(self, plan: CgroupReadPlan, place: int, now_ns: int) -> int:
        # Missed reads are skipped and the phase stays, so that no two cgroups end up with the same phase.
        period, first = plan.periods_ns[place], self._first_ns[place]
        return first if first > now_ns else first + period * (1 + (now_ns - first) // period)

    def _values(self, plan: CgroupReadPlan, cadence: Cadence) -> dict[str, Any]:
        # Later cells are fallbacks: they only fill fields that earlier ones leave out.
        merged: dict[str, Any] = {}
        for index in plan.indices[cadence]:
            cell = self._cells[index]
            if cell is not None and cell.values:
                for field, value in zip(plan.sources[index].fields, cell.values, strict=True):
                    if merged.get(field) is None:
                        merged[field] = value
        return merged

    def _gives(self, index: int) -> bool:
        cell = self._cells[index]
        return cell is not None and bool(cell.values) and None not in cell.values


_GOLDEN_RATIO_FRACTION = 0.618033988749895
"""The fractional parts of multiples of the golden ratio are evenly spread, whatever their number."""


class CgroupReader:
    """Reads samples of every cgroup of the primary hierarchy. Keeps files open; `close` closes them."""

    def __init__(self, hierarchy: Hierarchy, *, limit: int = 4096, fresh_limits: bool = False) -> None:
        """`fresh_limits`: limits are as old as `files_read_at_ns`, at three times the usual cost of reading them."""
        self._limit = limit
        self._budget = DescriptorBudget()
        self._mounts: dict[Path, int] = {}
        self._readings: dict[int, CgroupReadState] = {}
        self._reads = self._admitted = 0
        self._failures: list[str] = []
        self._closed_mounts: list[str] = []
        self._managed: frozenset[str] = frozenset()
        plan = plan_sources(hierarchy)
        fds = [self._open_mount(source.mount) for source in plan]
        self._plan = CgroupReadPlan(plan, fds, self._budget, fresh_limits=fresh_limits)
        primary = self._open_mount(hierarchy.primary)
        if primary < 0:
            remedy = "mount the cgroup file system there, and let the agent read it"
            raise Unavailable(self._closed_mounts[-1], remedy)
        self._tree = CgroupTree(primary, limit)

    @property
    def skipped(self) -> int:
        """Number of cgroups that were not read because of the limit, without those below them."""
        return self._tree.skipped

    def manage(self, paths: Iterable[str]) -> None:
        """Set the managed cgroups, by path: the limit leaves out others first, and all their files are read at once."""
        managed = frozenset(paths)
        if managed != self._managed:
            self._managed = managed
            self._tree.prefer(frozenset(cgroup_name_to_bytes(path).strip(b"/") for path in managed))

    def read(self, now_ns: int | None = None, wall_time_ns: int | None = None) -> dict[str, CgroupSample]:
        """Return every cgroup by path, the root as `/`, without those that vanish meanwhile. Raises Unavailable without
        a root.

        The clocks are CLOCK_MONOTONIC, which decides what is due, and CLOCK_REALTIME, which the samples record.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        wall_time_ns = time.time_ns() if wall_time_ns is None else wall_time_ns
        self._reads += 1
        self._failures.clear()
        samples: dict[str, CgroupSample] = {}
        readings: dict[int, CgroupReadState] = {}
        for group in self._tree.walk():
            reading = self._readings.pop(group.id, None) or self._admit(group, now_ns)
            opened = self._budget.opened
            above = readings.get(group.parent.id) if group.parent is not None else None
            sample = reading.refresh(self._plan, group, above, self._reads, now_ns, wall_time_ns)
            if reading.failing:
                self._failures.extend(reading.failures())
            if self._budget.opened != opened and self._tree.inode(group) != group.id:
                # A file was opened by name while the directory was replaced: some numbers may be its successor's.
                reading.close()
                self._tree.drop(group)
                continue
            readings[group.id] = reading
            samples[group.path] = sample
        for vanished in self._readings.values():
            vanished.close()
        self._readings = readings
        if "/" not in samples:
            raise Unavailable("the root of the cgroup tree cannot be read", "mount it, and let the agent read it")
        return samples

    def problems(self) -> tuple[ComponentHealth, ...]:
        """Return what the latest read left out or paid extra for, each with its remedy."""
        problems = []
        failures = [*self._closed_mounts, *self._tree.denied, *self._failures]
        if failures:
            error = f"{len(failures)} cgroup files cannot be read, the first is {failures[0]}"
            denied = any(os.strerror(code) in failures[0] for code in (errno.EACCES, errno.EPERM))
            remedy = "run the agent as root" if denied else "see the kernel's log for that file"
            problems.append(ComponentHealth(name="cgroup-files", ok=False, error=error, remedy=remedy))
        if self.skipped:
            error = f"at least {self.skipped} cgroups beyond the limit of {self._limit} are not read"
            problems.append(ComponentHealth(name="cgroup-limit", ok=False, error=error, remedy="raise maxCgroups"))
        if self._budget.short:
            error = f"only {self._budget.open_files} cgroup files may stay open; opening the others each time costs CPU"
            problems.append(
                ComponentHealth(name="open-files", ok=False, error=error, remedy="raise the limit: ulimit -n")
            )
        return tuple(problems)

    def close(self) -> None:
        """Close every descriptor. Idempotent; no read is possible afterwards."""
        for reading in self._readings.values():
            reading.close()
        self._readings.clear()
        while self._mounts:
            _, fd = self._mounts.popitem()
            if fd >= 0:
                os.close(fd)

    def _open_mount(self, mount: Path) -> int:
        # -1 if it cannot be opened: the fields of its files stay None.
        if mount not in self._mounts:
            try:
                self._mounts[mount] = os.open(mount, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                self._mounts[mount] = -1
                self._closed_mounts.append(f"{mount}: {error.strerror}")
        return self._mounts[mount]

    def _admit(self, group: CgroupNode, now_ns: int) -> CgroupReadState:
        self._admitted += 1
        at_once = self._reads == 1 or group.path in self._managed
        return CgroupReadState(self._plan, now_ns, self._admitted * _GOLDEN_RATIO_FRACTION % 1.0, at_once=at_once)
