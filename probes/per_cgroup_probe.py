"""The base of probes that count per cgroup: job of the loader, slots of cgroups, read of the table, lost events, close.
A table gives each cgroup a slot in the probe's per-CPU array. Counters grow until their cgroup is missing from two complete
listings in a row; then its slot is retired, and emptied and freed at the next read. Autogroups count as the root
cgroup. A cgroup whose cpu controller was switched off and on has several slots, which are added up. Live cgroups without
events are reported with zero values only while no cgroup was refused a slot. The C side is probes/per_cgroup.bpf.h.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from api.histogram import SLOT_COUNT
from api.interfaces import Unavailable
from api.snapshot import Durations
from probes import bpf
from probes.btf import VMLINUX
from probes.loader import Form, Job, Loaded
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap, is_member, possible_cpus, sum_over_cpus

MAX_ARRAY_BYTES = 64 << 20
"""Maximum size of a probe's per-CPU array over all CPUs, for up to 128 CPUs."""
MAX_ARRAY_BYTES_PER_CPU = 512 << 10
"""Maximum size of the array for each CPU of a larger machine, which does not have fewer pods."""
MAX_CGROUP_SLOTS = 4096
ROOT_CGROUP_ID = 1
"""Inode of the root of every cgroup hierarchy (kernfs counts from 1), as in kernel.bpf.h."""
RETIRED_TAG = (1 << 64) - 1
"""Tag of a slot that has no cgroup and cannot be claimed yet; serial numbers never come near it."""

U64Array = npt.NDArray[np.uint64]


def cgroup_slots(cpus: int, value_bytes: int) -> int:
    """Return the number of slots that fit: 4,096, or fewer on a large machine with large values.

    The kernel allocates the memory at once.

    | CPUs | run-queue latency with blame, 288 bytes | throttles, 240 | sockets, 72 | counters, 24 | wakeups, 672 |
    |---:|---|---|---|---|---|
    |  64 | 3,640 slots, 64 MiB  | 4,096 slots, 60 MiB  | 4,096 slots, 18 MiB  | 4,096 slots, 6 MiB | 1,560 slots, 64 MiB |
    | 128 | 1,820 slots, 64 MiB  | 2,184 slots, 64 MiB  | 4,096 slots, 36 MiB  | 4,096 slots, 12 MiB | 780 slots, 64 MiB |
    | 256 | 1,820 slots, 128 MiB | 2,184 slots, 128 MiB | 4,096 slots, 72 MiB  | 4,096 slots, 24 MiB | 780 slots, 128 MiB |
    | 512 | 1,820 slots, 256 MiB | 2,184 slots, 256 MiB | 4,096 slots, 144 MiB | 4,096 slots, 48 MiB | 780 slots, 256 MiB |

    A third of the slots can be used without loss: 600 cgroups at any number of CPUs, but 260 for wakeups, which are loaded
    only on request. With two fifths in use, a few nodes in a hundred have a cgroup whose window of the table is full; with
    half of them, a few nodes in ten. docs/operations.md has the total memory.
    """
    return min(MAX_CGROUP_SLOTS, max(MAX_ARRAY_BYTES, MAX_ARRAY_BYTES_PER_CPU * cpus) // (value_bytes * cpus))


class LostEvents(msgspec.Struct, frozen=True):
    """Events that were not counted, by reason, in the order of per_cgroup.bpf.h."""

    full: int
    """Events of cgroups without a slot."""
    backwards: int
    """Waits with a negative length, because two clocks disagreed."""
    asleep: int
    """Waits whose stamp includes sleep, because the scheduler stamped the sleeping task when it was moved to another CPU."""
    task_slot: int = msgspec.field(name="seat")
    """Events whose task slot was overwritten by another task: the beginning of a wait (classic form), of a wakeup or of
    reclaim, or the mark that the scheduler's stamp includes sleep, which then counts as waiting."""


class RemovedCgroupTracker:
    """Finds counted cgroups that two different complete listings in a row lack.

    One listing is not enough: a cgroup may have been created after it was taken.
    """

    def __init__(self) -> None:
        self._listing: Mapping[int, str] | None = None
        self._missing: set[int] = set()

    def removed_in(self, counted: Iterable[int], live: Mapping[int, str]) -> set[int]:
        """Return the cgroups for which this complete listing is the second one without them; never the root.

        An empty listing and a repeated one give no result.
        """
        if not live or live is self._listing:
            return set()
        self._listing = live
        missing = {number for number in counted if number not in live and number != ROOT_CGROUP_ID}
        removed = missing & self._missing
        self._missing = missing - removed
        return removed


class CgroupTags(NamedTuple):
    """Tags and the cgroup id of each; a cgroup whose controller was switched off and on again has several."""

    tags: U64Array
    ids: U64Array


class CgroupTable:
    """Counters by cgroup id.

    `name` is the probe's own map, whose values are 64-bit counters. `also` names other maps with a value per slot, which
    are emptied together with it.
    """

    def __init__(self, loaded: Loaded, name: str, *, also: Sequence[str] = ()) -> None:
        cpus = possible_cpus()
        self._cgroups, self._tags, self._lost, self._values = (
            BpfMap(*loaded.maps[label], cpus) for label in ("cgroups_by_slot", "tags_by_slot", "lost", name)
        )
        self._emptied = [self._values, *(BpfMap(*loaded.maps[label], cpus) for label in also)]
        self.slots = bpf.map_info(loaded.maps["cgroups_by_slot"][0]).max_entries
        self.tags = CgroupTags(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        """Tags as of the latest read."""
        self._removed = RemovedCgroupTracker()
        self._retired: list[int] = []

    def read(
        self, live: Mapping[int, str], cgroup_ids: Collection[int] | None = None, *, complete: bool = True
    ) -> tuple[list[int], npt.NDArray[np.uint64]]:
        """Return the ids of `cgroup_ids` that have a slot, or of all cgroups, and a row of counters for each.

        `live` has the existing cgroups; if it is `complete`, slots of other cgroups are retired.
        """
        self._empty_retired()
        slots, cgroups = self._cgroups.items()
        order = np.argsort(slots)
        slots, owners = slots[order], cgroups[order]["cgroup_id"]
        self.tags = CgroupTags(cgroups[order]["tag"], owners)
        # A row costs many times as much as an entry of `cgroups_by_slot`: the kernel copies it from every CPU.
        selected = np.ones(len(slots), bool) if cgroup_ids is None else is_member(owners, cgroup_ids)
        rows = self._values.totals(slots[selected].tolist())
        ids, inverse = np.unique(owners[selected], return_inverse=True)
        summed = np.zeros((len(ids), rows.shape[1]), np.uint64)
        np.add.at(summed, inverse, rows)
        if complete:
            self._retire_removed(live, slots, owners)
        return ids.tolist(), summed

    def lost(self) -> LostEvents:
        """Return the events that were not counted, by reason."""
        return LostEvents(*(int(row[0]) for row in sum_over_cpus(self._lost.rows([0, 1, 2, 3]))))

    def _retire_removed(
        self, live: Mapping[int, str], slots: npt.NDArray[np.uint32], ids: npt.NDArray[np.uint64]
    ) -> None:
        removed = self._removed.removed_in(ids.tolist(), live)
        if not removed:
            return
        for slot, number in zip(slots.tolist(), ids.tolist(), strict=True):
            if number in removed:
                self._cgroups.set(slot, RETIRED_TAG.to_bytes(8, "little") + bytes(8))
                self._tags.set(slot, bytes(8))
                self._retired.append(slot)

    def _empty_retired(self) -> None:
        """Free the retired slots. A program that was still counting there when they were retired finished long ago."""
        for slot in self._retired:
            self._tags.set(slot, bytes(8))
            for values in self._emptied:
                values.set(slot, b"")
            self._cgroups.delete(slot)
        self._retired.clear()


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
