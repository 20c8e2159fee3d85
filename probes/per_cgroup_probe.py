"""Provides the base of probes that count per cgroup: read the table, report lost events, close.
Reading raises Unavailable where the kernel refuses a map or the probe is closed. Values of live cgroups that counted
nothing are filled in only while no cgroup was refused a slot.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from api.interfaces import Unavailable
from api.measurements import Durations
from probes import bpf
from probes.cgroup_table import CgroupTable, LostEvents, U64Array
from probes.loader import Loaded
from probes.lost_events import LostEventCounter

MISSED_RUNS_INTERVAL_S = 5.0
"""How often the kernel is asked which runs of a program it left out: a system call for each."""


class CgroupCounters(NamedTuple):
    """Cgroup ids and a row of counters for each."""

    ids: list[int]
    rows: U64Array
    nothing_lost: bool
    """Whether live cgroups that are not among them have counted nothing. They have, unless any cgroup found no place since
    the listing before this one: it may be theirs that was lost."""

    def by_cgroup(self) -> dict[int, list[int]]:
        """Rows as Python's own numbers."""
        return dict(zip(self.ids, self.rows.tolist(), strict=True))

    def values_by_cgroup(
        self, field: str, values: Mapping[int, object], live: Mapping[int, str], nothing: object
    ) -> dict[int, Mapping[str, object]]:
        """The values for `api.interfaces.ProbeReading`, with `nothing` for live cgroups that have counted nothing."""
        absent: Mapping[str, object] = {field: nothing}
        found = dict.fromkeys(live if self.nothing_lost else (), absent)
        found.update((number, {field: value}) for number, value in values.items())
        return found


class PerCgroupProbe:
    """One loaded probe with its table. `name` is the table's map, `events` what it counts, in a person's words; `also` as
    for `GroupTable`."""

    def __init__(self, loaded: Loaded, name: str, events: str, *, also: Sequence[str] = ()) -> None:
        self._loaded, self._label, self._events = loaded, name, events
        self._table: CgroupTable | None = CgroupTable(loaded, name, also=also)
        self._places = self._table.places
        self._overflow = LostEventCounter()
        self._lost = self._missed = 0
        self._asked_at = -MISSED_RUNS_INTERVAL_S
        self.form = loaded.form
        self.refused = loaded.refused
        """Forms that were tried before this one, and why the kernel did not take them."""

    def count(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> CgroupCounters:
        """Counters of the wanted cgroups or of all. Raises Unavailable once closed."""
        with self.reading() as table:
            ids, rows = table.read(live, wanted, complete=complete)
            lost, now = table.lost(), time.monotonic()
            self._lost = sum(msgspec.structs.astuple(lost))
            if now - self._asked_at >= MISSED_RUNS_INTERVAL_S:
                self._missed, self._asked_at = sum(program.missed for program in self.stats().values()), now
            return CgroupCounters(ids, rows, not self._overflow.grew_since_listing(lost.full, live))

    @contextmanager
    def reading(self) -> Iterator[CgroupTable]:
        """The table, for reads of the probe's maps: where the kernel refuses one, that is Unavailable."""
        if self._table is None:
            raise Unavailable(f"the probe {self._label} is closed", "open it again")
        try:
            yield self._table
        except OSError as error:
            raise Unavailable(
                f"the maps of {self._label} cannot be read: {error.strerror}", "start the agent again"
            ) from error

    def problem(self) -> Unavailable | None:
        """Whether cgroups found no place in the table lately, as of the latest read."""
        return self._overflow.problem(
            f"{self._events} of cgroups that found no place in the table of {self._places} were not counted",
            "remove cgroups that nobody uses; where cgroup-limit is a problem too, raise maxCgroups: dead cgroups keep"
            " their places while the list of cgroups is not complete",
        )

    @property
    def lost_events(self) -> int | None:
        """For whatever reason (`lost`), since the start, as of the latest read; and, as of some seconds ago at most, runs that
        the kernel left out because they came in the middle of another one (since Linux 6.2; before, none was)."""
        return self._lost + self._missed

    def lost(self) -> LostEvents:
        """Events that were not counted, by reason."""
        with self.reading() as table:
            return table.lost()

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while kernel statistics are on."""
        return self._loaded.stats()

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._table = None
        self._loaded.close()


def decode_durations(row: Sequence[int]) -> Durations:
    """Pure: a sum in nanoseconds, and then the slots of a histogram."""
    return Durations(sum_ns=row[0], count=sum(row[1:]), slots=tuple(row[1:]))
