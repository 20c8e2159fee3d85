"""Provides the base of probes that count per cgroup: job of the loader, read of the table, lost events, close.
Reading raises Unavailable where the kernel refuses a map or the probe is closed. Live cgroups without events are reported
with zero values only while no cgroup was refused a slot.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.histogram import SLOT_COUNT
from api.interfaces import Unavailable
from api.measurements import Durations
from probes import bpf
from probes.btf import VMLINUX
from probes.cgroup_table import CgroupTable, LostEvents, U64Array
from probes.loader import Form, Job, Loaded
from probes.lost_events import LostEventCounter

MISSED_RUNS_INTERVAL_S = 5.0
"""Interval between two reads of the runs that the kernel skipped: each read is a system call per program."""
NO_DURATIONS = Durations(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)


def table_job(  # noqa: PLR0913 - the fields of a Job
    name: str,
    forms: Sequence[Form],
    slots: int,
    *,
    headers: Sequence[str] = (),
    maps: Sequence[str] = (),
    task_slots: int = 1,
    constants: Mapping[str, int] = {},
    btf: Path = VMLINUX,
    remedy: str = "",
) -> Job:
    """Return the loader's job of a probe with a table of `slots` cgroups: NAME.bpf.c with its `headers`.

    `maps` are the probe's maps besides the table, `task_slots` the tasks whose state it stores between two events.
    """
    here = Path(__file__).parent
    return Job(
        sources=[here / file for file in ("per_cgroup.bpf.h", *headers, f"{name}.bpf.c")],
        forms=forms,
        maps=[name, "cgroups_by_slot", "tags_by_slot", "lost", *maps],
        constants={"HIST_SLOTS": SLOT_COUNT, "TASK_SLOTS": task_slots, "CGROUP_SLOTS": slots, **constants},
        btf=btf,
        remedy=remedy,
    )


@contextmanager
def open_maps(name: str, *, is_open: bool) -> Iterator[None]:
    """Guard reads of a probe's maps: Unavailable if the probe is closed or the kernel refuses a read."""
    if not is_open:
        raise Unavailable(f"the probe {name} is closed", "open it again")
    try:
        yield
    except OSError as error:
        raise Unavailable(f"the maps of {name} cannot be read: {error.strerror}", "start the agent again") from error


class CgroupCounters(NamedTuple):
    """Cgroup ids and a row of counters for each."""

    ids: list[int]
    rows: U64Array
    nothing_lost: bool
    """Whether live cgroups without a row have counted nothing. False if any cgroup was refused a slot since the previous
    listing: it may be one of them."""

    def by_cgroup(self) -> dict[int, list[int]]:
        """Return the rows as Python integers by cgroup id."""
        return dict(zip(self.ids, self.rows.tolist(), strict=True))

    def values_by_cgroup(
        self, field: str, values: Mapping[int, object], live: Mapping[int, str], zero: object
    ) -> dict[int, Mapping[str, object]]:
        """Return the values for `api.interfaces.ProbeReading`, with `zero` for live cgroups that have counted nothing."""
        absent: Mapping[str, object] = {field: zero}
        by_cgroup = dict.fromkeys(live if self.nothing_lost else (), absent)
        by_cgroup.update((number, {field: value}) for number, value in values.items())
        return by_cgroup


class PerCgroupProbe:
    """One loaded probe with its table.

    `name` is the table's map, `events` names in plain words what it counts, `also` is as for `CgroupTable`.
    """

    def __init__(self, loaded: Loaded, name: str, events: str, *, also: Sequence[str] = ()) -> None:
        self._loaded, self._label, self._events = loaded, name, events
        self._table: CgroupTable | None = CgroupTable(loaded, name, also=also)
        self._slots = self._table.slots
        self._overflow = LostEventCounter()
        self._lost = self._missed = 0
        self._missed_read_at = -MISSED_RUNS_INTERVAL_S
        self.form = loaded.form
        self.refused = loaded.refused
        """Forms that were tried before this one, and why the kernel refused them."""

    def count(
        self, live: Mapping[int, str], cgroup_ids: Collection[int] | None = None, *, complete: bool = True
    ) -> CgroupCounters:
        """Return the counters of `cgroup_ids` or of all cgroups. Raises Unavailable once closed."""
        with self.reading() as table:
            ids, rows = table.read(live, cgroup_ids, complete=complete)
            lost, now = table.lost(), time.monotonic()
            self._lost = sum(msgspec.structs.astuple(lost))
            if now - self._missed_read_at >= MISSED_RUNS_INTERVAL_S:
                self._missed, self._missed_read_at = sum(program.missed for program in self.stats().values()), now
            return CgroupCounters(ids, rows, not self._overflow.grew_since_listing(lost.full, live))

    @contextmanager
    def reading(self) -> Iterator[CgroupTable]:
        """Yield the table for reads of the probe's maps. Raises Unavailable once closed, and if the kernel refuses a read."""
        with open_maps(self._label, is_open=self._table is not None):
            assert self._table is not None
            yield self._table

    def problem(self) -> Unavailable | None:
        """Return whether cgroups were refused a slot lately, as of the latest read."""
        return self._overflow.problem(
            f"{self._events} were not counted: their cgroups have no slot in the table of {self._slots}",
            "remove unused cgroups; if cgroup-limit is reported as a problem too, raise maxCgroups: slots of removed cgroups"
            " are not freed while the list of cgroups is incomplete",
        )

    @property
    def lost_events(self) -> int | None:
        """Return the events that were not counted since the start, for any reason (`lost`), as of the latest read.

        Includes runs that the kernel skipped because they interrupted another run of the program (since Linux 6.2; earlier
        kernels skip none), as of at most some seconds ago.
        """
        return self._lost + self._missed

    def lost(self) -> LostEvents:
        """Return the events that were not counted, by reason."""
        with self.reading() as table:
            return table.lost()

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Return runs and run time of each program; they grow only while kernel statistics are on."""
        return self._loaded.stats()

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._table = None
        self._loaded.close()


def decode_durations(row: Sequence[int]) -> Durations:
    """Decode a sum in nanoseconds followed by the slots of a histogram."""
    return Durations(sum_ns=row[0], count=sum(row[1:]), slots=tuple(row[1:]))
