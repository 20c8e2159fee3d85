"""What is kept of one cgroup between two reads: its files, what they said last, and when to read which again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.sense.fields import PERIOD_NS, SNAPSHOTS, Cadence, Source, joined
from agent.sense.files import Budget, KeptFile
from agent.sense.tree import Group
from api.ports import Vanished
from api.samples import CgroupSample

LONGEST_PAUSE = 16
"""A file that is not there is looked for again after 1, 2, 4 ... 16 reads: a controller or a group may come later."""


class Plan:
    """The files to read in every cgroup, and the open mount points that they are named from."""

    def __init__(self, sources: Sequence[Source], mount_fds: Sequence[int], budget: Budget) -> None:
        """A mount point that could not be opened is -1: its files are not read."""
        self.sources, self.budget = sources, budget
        self.mount_fds = mount_fds
        self.indices = {
            cadence: [i for i, source in enumerate(sources) if source.cadence is cadence and mount_fds[i] >= 0]
            for cadence in Cadence
        }

    def cell(self, index: int, group: Group) -> Cell:
        """The file of that source in this cgroup."""
        source = self.sources[index]
        return Cell(
            self.budget,
            group.below(source.file),
            self.mount_fds[index],
            keep=source.file not in SNAPSHOTS and source.cadence is not Cadence.RARE,
            spare=source.cadence is not Cadence.TICK,
        )


class Cell(KeptFile):
    """One file of one cgroup, what it said last, and when to look for it again where it is not there."""

    __slots__ = ("failure", "pause", "resume_at", "text", "values")

    def __init__(self, budget: Budget, name: bytes, dir_fd: int, *, keep: bool, spare: bool) -> None:
        super().__init__(budget, name, dir_fd, keep=keep, spare=spare, long=spare)
        self.text: bytes | None = None
        self.values: dict[str, Any] = {}
        self.pause = self.resume_at = 0
        self.failure = ""

    def refresh(self, source: Source, reads: int) -> bool:
        """Read it and return whether its values are others than before. `reads` counts the reader's reads."""
        if self.resume_at <= reads:
            try:
                text = self.read()
            except Vanished:
                self.failure = ""
            except OSError as error:
                self.failure = f"{self.name}: {error.strerror}"
            else:
                self.pause, self.failure = 0, ""
                if text == self.text:
                    return False
                self.text = text
                self.values = {field: parse(text) for field, parse in zip(source.fields, source.parsers, strict=True)}
                return True
            self.pause = min(max(2 * self.pause, 1), LONGEST_PAUSE)
            self.resume_at = reads + self.pause
        known, self.text, self.values = self.text is not None, None, {}
        return known


class Reading:
    """One cgroup."""

    __slots__ = ("_due_ns", "_first_ns", "_kept", "_read_at_ns", "cells", "failing", "sample")

    def __init__(self, plan: Plan, now_ns: int, phase: float, *, at_once: bool) -> None:
        """`phase` from 0 to 1 says when within a period this cgroup's turn is; `at_once`: all is read now, too."""
        self.cells: list[Cell | None] = [None] * len(plan.sources)
        self.sample: CgroupSample | None = None
        self.failing = False
        """Whether `failures` may have something to tell."""
        self._kept: dict[str, Any] = {}
        self._read_at_ns: int | None = None
        turns = {cadence: now_ns + int(phase * PERIOD_NS[cadence]) for cadence in (Cadence.SLOW, Cadence.RARE)}
        self._first_ns = turns
        # The first time, rare files are read along with the slow ones: a new cgroup's limits are known within seconds.
        self._due_ns = dict.fromkeys(turns, now_ns if at_once else turns[Cadence.SLOW])

    def refresh(self, plan: Plan, group: Group, reads: int, now_ns: int, wall_time_ns: int) -> CgroupSample:
        """Read what is due and return the sample: the same object where nothing is different."""
        changed = self._visit(plan, group, reads, Cadence.TICK)
        later = False
        for cadence, due_ns in self._due_ns.items():
            if due_ns > now_ns:
                continue
            self._due_ns[cadence] = self._next(cadence, now_ns)
            later |= self._visit(plan, group, reads, cadence)
            if cadence is Cadence.SLOW:
                self._read_at_ns, changed = wall_time_ns, True
        if later:
            self._kept = joined(self._values(plan, Cadence.SLOW, Cadence.RARE))
        if changed or later or self.sample is None or self.sample.path != group.path:
            now = self._values(plan, Cadence.TICK)
            self.sample = CgroupSample(
                path=group.path, id=group.id, files_read_at_ns=self._read_at_ns, **self._kept, **now
            )
        return self.sample

    def failures(self) -> list[str]:
        """Files that are there and cannot be read."""
        found = [cell.failure for cell in self.cells if cell is not None and cell.failure]
        self.failing = bool(found)
        return found

    def close(self) -> None:
        """Close every file. Idempotent."""
        for cell in self.cells:
            if cell is not None:
                cell.close()

    def _visit(self, plan: Plan, group: Group, reads: int, cadence: Cadence) -> bool:
        changed = False
        for index in plan.indices[cadence]:
            source = plan.sources[index]
            if source.instead_of is not None and self._gives(source.instead_of):
                continue
            cell = self.cells[index]
            if cell is None:
                cell = self.cells[index] = plan.cell(index, group)
            changed |= cell.refresh(source, reads)
            self.failing |= bool(cell.failure)
        return changed

    def _next(self, cadence: Cadence, now_ns: int) -> int:
        # Turns missed are not made up for, and the phase stays: no two cgroups come to share a turn for good.
        period = PERIOD_NS[cadence]
        first = self._first_ns[cadence]
        return first if first > now_ns else first + period * (1 + (now_ns - first) // period)

    def _values(self, plan: Plan, *cadences: Cadence) -> dict[str, Any]:
        # Later cells are fallbacks: they only fill what earlier ones leave out.
        merged: dict[str, Any] = {}
        for cadence in cadences:
            for index in plan.indices[cadence]:
                cell = self.cells[index]
                if cell is not None:
                    for field, value in cell.values.items():
                        if merged.get(field) is None:
                            merged[field] = value
        return merged

    def _gives(self, index: int) -> bool:
        cell = self.cells[index]
        return cell is not None and bool(cell.values) and None not in cell.values.values()
