"""What is kept of one cgroup between two reads: its files, what they said last, and when to read which again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agent.sense.cadence import PERIOD_NS, Cadence
from agent.sense.fields import CALM, CLOCK, SHARES, SNAPSHOTS, Source, joined
from agent.sense.files import GONE, Budget, KeptFile
from agent.sense.tree import Group
from api.ports import Vanished
from api.samples import CgroupSample

LONGEST_PAUSE = 16
"""A file that is not there is looked for again after 1, 2, 4 ... 16 reads: a controller or a group may come later."""
_RARE_BYTES = 4096
_LATER = (Cadence.SLOW, Cadence.RARE)


class Plan:
    """The files to read in every cgroup, and the open mount points that they are named from."""

    def __init__(
        self, sources: Sequence[Source], mount_fds: Sequence[int], budget: Budget, *, fresh_limits: bool = False
    ) -> None:
        """A mount point that could not be opened is -1: its files are not read. `fresh_limits`: what is read rarely is read
        along with the slow files instead, each time."""
        self.sources, self.mount_fds, self.budget = sources, mount_fds, budget
        self.periods_ns = tuple(PERIOD_NS[Cadence.SLOW if fresh_limits else cadence] for cadence in _LATER)
        """Of the slow files and the rare ones."""
        self.indices = {
            cadence: [i for i, source in enumerate(sources) if source.cadence is cadence and mount_fds[i] >= 0]
            for cadence in Cadence
        }
        # Of what is read every tick, that which can wait until the clock has moved; the calm with the slow files as well.
        ticking = self.indices[Cadence.TICK]
        self.clock = next((i for i in ticking if CLOCK in sources[i].fields), None)
        rest = [i for i in ticking if self.clock not in (i, None)]
        self.calm = [i for i in rest if sources[i].file in CALM]
        self.following = [i for i in rest if sources[i].file in CALM | SHARES]
        self.leading = [i for i in ticking if i not in self.following]
        self.set = lru_cache(maxsize=512)(self._set)
        """Fields from the texts of the files that are read rarely: many cgroups are set alike."""

    def cell(self, index: int, group: Group) -> Cell:
        """The file of that source in this cgroup."""
        source = self.sources[index]
        spare = source.cadence is not Cadence.TICK
        name = group.below(source.file)
        return Cell(self.budget, name, self.mount_fds[index], keep=source.file not in SNAPSHOTS, spare=spare)

    def _set(self, texts: tuple[bytes | None, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index, text in zip(self.indices[Cadence.RARE], texts, strict=True):
            source = self.sources[index]
            if text is not None:
                found.update((field, parse(text)) for field, parse in zip(source.fields, source.parsers, strict=True))
        return joined(found)


class Cell(KeptFile):
    """One file of one cgroup, what it said last, and when to look for it again where it is not there."""

    __slots__ = ("failure", "pause", "resume_at", "still", "text", "values")

    def __init__(self, budget: Budget, name: bytes, dir_fd: int, *, keep: bool, spare: bool) -> None:
        super().__init__(budget, name, dir_fd, keep=keep, spare=spare, long=spare)
        self.text: bytes | None = None
        self.values: tuple[Any, ...] = ()
        """One for each field of the source; empty where the file says nothing."""
        self.still = False
        """Whether the text stays as it is as long as nothing happens: averages of pressure do not before they are zero."""
        self.pause = self.resume_at = 0
        self.failure = ""

    def refresh(self, source: Source, reads: int) -> bool:
        """Read it and return whether its values are others than before. `reads` counts the reader's reads."""
        if self._fd >= 0:
            # The way of nearly every call, without a further one: a file that is open, and short.
            try:
                text = os.pread(self._fd, self._first_bytes, 0)
            except OSError:
                pass  # told apart below
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
            self.pause = min(max(2 * self.pause, 1), LONGEST_PAUSE)
            self.resume_at = reads + self.pause
        known, self.text, self.values, self.still = self.text is not None, None, (), False
        return known

    def _take(self, text: bytes, source: Source) -> bool:
        self.text, self.still = text, text.count(b"avg") == text.count(b"=0.00 ")
        self.values = tuple([parse(text) for parse in source.parsers])
        return True


class Reading:
    """One cgroup."""

    __slots__ = (
        "_cells", "_due_ns", "_first_ns", "_kept", "_read_at_ns", "_refused", "_set", "_stirred", "failing", "sample"
    )  # fmt: skip

    def __init__(self, plan: Plan, now_ns: int, phase: float, *, at_once: bool) -> None:
        """`phase` from 0 to 1 says when within a period this cgroup's turn is; `at_once`: all is read now, too."""
        self._cells: list[Cell | None] = [None] * len(plan.sources)
        self.sample: CgroupSample | None = None
        self.failing = False
        """Whether `failures` may have something to tell."""
        self._stirred: list[int] = []
        """Sources of every tick whose texts were others than before when they were last looked at."""
        self._kept: dict[str, Any] = {}
        self._set: tuple[bytes | None, ...] = ()
        self._refused: list[str] = []
        self._read_at_ns: int | None = None
        self._first_ns = tuple(now_ns + int(phase * period) for period in plan.periods_ns)
        # The first time, rare files are read along with the slow ones: a new cgroup's limits are known within seconds.
        self._due_ns = [now_ns if at_once else self._first_ns[0]] * len(_LATER)

    def refresh(
        self, plan: Plan, group: Group, above: Reading | None, reads: int, now_ns: int, wall_time_ns: int
    ) -> CgroupSample:
        """Read what is due and return the sample: the same object where nothing is different. `above` is the reading of
        the group above, already refreshed."""
        self._stirred = self._visit(plan, group, reads, plan.leading, above)
        if plan.clock is not None:
            if plan.clock in self._stirred or not self._gives(plan.clock):
                self._stirred += self._visit(plan, group, reads, plan.following)
            elif self._due_ns[0] <= now_ns:
                self._stirred += self._visit(plan, group, reads, plan.calm)
        changed, later = bool(self._stirred), False
        for place, cadence in enumerate(_LATER):
            if self._due_ns[place] > now_ns:
                continue
            self._due_ns[place] = self._next(plan, place, now_ns)
            if cadence is Cadence.SLOW:
                later |= bool(self._visit(plan, group, reads, plan.indices[cadence]))
                self._read_at_ns, changed = wall_time_ns, True
            else:
                later |= self._visit_rare(plan, group)
        if later:
            self._kept = joined(self._values(plan, Cadence.SLOW)) | (plan.set(self._set) if self._set else {})
        if changed or later or self.sample is None or self.sample.path != group.path:
            now = self._values(plan, Cadence.TICK)
            self.sample = CgroupSample(
                path=group.path, id=group.id, files_read_at_ns=self._read_at_ns, **self._kept, **now
            )
        return self.sample

    def failures(self) -> list[str]:
        """Files that are there and cannot be read."""
        found = [cell.failure for cell in self._cells if cell is not None and cell.failure] + self._refused
        self.failing = bool(found)
        return found

    def close(self) -> None:
        """Close every file. Idempotent."""
        for cell in self._cells:
            if cell is not None:
                cell.close()

    def _visit(
        self, plan: Plan, group: Group, reads: int, indices: Sequence[int], above: Reading | None = None
    ) -> list[int]:
        changed: list[int] = []
        cells, sources = self._cells, plan.sources
        for index in indices:
            source = sources[index]
            cell = cells[index]
            if source.instead_of is not None and self._gives(source.instead_of):
                continue
            if cell is None:
                cell = cells[index] = plan.cell(index, group)
            elif source.summed and cell.still and above is not None and above.rests(index):
                continue
            if cell.refresh(source, reads):
                changed.append(index)
            if cell.failure:
                self.failing = True
        return changed

    def rests(self, index: int) -> bool:
        """Whether that source of every tick is there and was as before when it was last looked at."""
        cell = self._cells[index]
        return index not in self._stirred and cell is not None and cell.text is not None

    def _visit_rare(self, plan: Plan, group: Group) -> bool:
        # Files that are not kept open: nothing but their texts is remembered.
        self._refused = []
        texts = tuple(self._read_once(plan, index, group) for index in plan.indices[Cadence.RARE])
        self.failing |= bool(self._refused)
        changed, self._set = texts != self._set, texts
        return changed

    def _read_once(self, plan: Plan, index: int, group: Group) -> bytes | None:
        name = group.below(plan.sources[index].file)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=plan.mount_fds[index])
            plan.budget.opened += 1
            try:
                return os.read(fd, _RARE_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in GONE:
                self._refused.append(f"{name.decode(errors='backslashreplace')}: {error.strerror}")
            return None

    def _next(self, plan: Plan, place: int, now_ns: int) -> int:
        # Turns missed are not made up for, and the phase stays: no two cgroups come to share a turn for good.
        period, first = plan.periods_ns[place], self._first_ns[place]
        return first if first > now_ns else first + period * (1 + (now_ns - first) // period)

    def _values(self, plan: Plan, cadence: Cadence) -> dict[str, Any]:
        # Later cells are fallbacks: they only fill what earlier ones leave out.
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
