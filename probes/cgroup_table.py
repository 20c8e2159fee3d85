"""Reads the table that gives each cgroup a slot in a probe's per-CPU array, and frees slots of removed cgroups.
Counters grow until their cgroup is missing from two complete listings in a row; then its slot is retired, and one
read later emptied and freed. Autogroups count as the root cgroup. A cgroup whose cpu controller was switched off and
on has several slots, which are added up. The C side is probes/common.bpf.h.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from probes import bpf
from probes.loader import Loaded
from probes.maps import BpfMap, is_member, possible_cpus, sum_over_cpus

MAX_ARRAY_BYTES = 64 << 20
"""Bound of a probe's per-CPU array over all CPUs, up to 128 of them,"""
MAX_ARRAY_BYTES_PER_CPU = 512 << 10
"""and for each CPU of a larger machine: pods do not become fewer there."""
MAX_CGROUP_SLOTS = 4096
ROOT_CGROUP_ID = 1
"""Inode of the root of every cgroup hierarchy (kernfs counts from 1), as in common.bpf.h."""
RETIRED_TAG = (1 << 64) - 1
"""Tag of a place that nobody owns and nobody may take yet; a serial number never comes near it."""

U64Array = npt.NDArray[np.uint64]


def cgroup_slots(cpus: int, value_bytes: int) -> int:
    """Places that fit: 4,096, or fewer on a large machine where values are large. The kernel takes the memory at once.

    | CPUs | run-queue waits with blame, 288 bytes | throttles, 240 | sockets, 72 | counters, 24 | wakeups, 672 |
    |---:|---|---|---|---|---|
    |  64 | 3,640 places, 64 MiB  | 4,096 places, 60 MiB  | 4,096 places, 18 MiB  | 4,096 places, 6 MiB | 1,560 places, 64 MiB |
    | 128 | 1,820 places, 64 MiB  | 2,184 places, 64 MiB  | 4,096 places, 36 MiB  | 4,096 places, 12 MiB | 780 places, 64 MiB |
    | 256 | 1,820 places, 128 MiB | 2,184 places, 128 MiB | 4,096 places, 72 MiB  | 4,096 places, 24 MiB | 780 places, 128 MiB |
    | 512 | 1,820 places, 256 MiB | 2,184 places, 256 MiB | 4,096 places, 144 MiB | 4,096 places, 48 MiB | 780 places, 256 MiB |

    A third of them can be used without a loss: 600 cgroups at any number of CPUs, but 260 for wakeups, which somebody has to
    ask for. docs/operations.md has what all of it comes to. With two fifths in use a few nodes in a
    hundred have one cgroup whose window of the table is full, with half of them a few nodes in ten.
    """
    return min(MAX_CGROUP_SLOTS, max(MAX_ARRAY_BYTES, MAX_ARRAY_BYTES_PER_CPU * cpus) // (value_bytes * cpus))


class LostEvents(msgspec.Struct, frozen=True):
    """Events that were not counted, by reason, in the order of common.bpf.h."""

    full: int
    """No place was left for the cgroup."""
    backwards: int
    """The wait was negative: two clocks disagreed."""
    asleep: int
    """The scheduler's stamp counted sleep as waiting, because the task was moved to another CPU in its sleep."""
    seat: int
    """Another task had taken the place that remembers this one: when it became runnable (classic form), woke or began to
    reclaim; or that the scheduler's stamp counts sleep, which the next wait of this one then includes. What it had waited
    before it was moved is forgotten without being counted here."""


class RemovedCgroupTracker:
    """Cgroups that were counted and that two different listings in a row did not have: they are gone, where one that a
    single listing lacks may have been made after it."""

    def __init__(self) -> None:
        self._listing: Mapping[int, str] | None = None
        self._missing: set[int] = set()

    def gone(self, counted: Iterable[int], live: Mapping[int, str]) -> set[int]:
        """Those that this complete listing is the second one without. The root is never gone; an empty listing says nothing."""
        if not live or live is self._listing:
            return set()
        self._listing = live
        missing = {number for number in counted if number not in live and number != ROOT_CGROUP_ID}
        gone = missing & self._missing
        self._missing = missing - gone
        return gone


class CgroupTags(NamedTuple):
    """Tags, and the cgroup that each belongs to; one whose controller was switched off and on again has several."""

    tags: U64Array
    ids: U64Array


class CgroupTable:
    """Counters by cgroup id. `name` is the probe's own map, whose values are 64-bit counters; `also` are other maps with a
    value for each place, which are emptied with it."""

    def __init__(self, loaded: Loaded, name: str, *, also: Sequence[str] = ()) -> None:
        cpus = possible_cpus()
        self._groups, self._owners, self._lost, self._values = (
            BpfMap(*loaded.maps[label], cpus) for label in ("groups", "owners", "lost", name)
        )
        self._emptied = [self._values, *(BpfMap(*loaded.maps[label], cpus) for label in also)]
        self.places = bpf.map_info(loaded.maps["groups"][0]).max_entries
        self.owners = CgroupTags(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        """As of the latest read."""
        self._absentees = RemovedCgroupTracker()
        self._retired: list[int] = []

    def read(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> tuple[list[int], npt.NDArray[np.uint64]]:
        """Ids of the wanted cgroups that have a place, or of all, and a row of counters for each.

        `live` has the cgroups that exist; where it is `complete`, the others are forgotten.
        """
        self._empty_retired()
        places, groups = self._groups.items()
        order = np.argsort(places)
        places, owners = places[order], groups[order]["cgroup_id"]
        self.owners = CgroupTags(groups[order]["tag"], owners)
        # A row costs many times what an entry of `groups` does: the kernel copies it from every CPU.
        kept = np.ones(len(places), bool) if wanted is None else is_member(owners, wanted)
        rows = self._values.totals(places[kept].tolist())
        ids, inverse = np.unique(owners[kept], return_inverse=True)
        summed = np.zeros((len(ids), rows.shape[1]), np.uint64)
        np.add.at(summed, inverse, rows)
        if complete:
            self._forget(live, places, owners)
        return ids.tolist(), summed

    def lost(self) -> LostEvents:
        return LostEvents(*(int(row[0]) for row in sum_over_cpus(self._lost.rows([0, 1, 2, 3]))))

    def _forget(self, live: Mapping[int, str], places: npt.NDArray[np.uint32], ids: npt.NDArray[np.uint64]) -> None:
        """Retire the places of cgroups that are gone."""
        gone = self._absentees.gone(ids.tolist(), live)
        if not gone:
            return
        for place, number in zip(places.tolist(), ids.tolist(), strict=True):
            if number in gone:
                self._groups.set(place, RETIRED_TAG.to_bytes(8, "little") + bytes(8))
                self._owners.set(place, bytes(8))
                self._retired.append(place)

    def _empty_retired(self) -> None:
        """Give places back. A program that was still counting there when they were retired has long finished."""
        for place in self._retired:
            self._owners.set(place, bytes(8))
            for values in self._emptied:
                values.set(place, b"")
            self._groups.delete(place)
        self._retired.clear()
