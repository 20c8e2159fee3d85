"""The table of who waited for whom that blame.bpf.h keeps, and the accounts that are made of it.

The table is mapped into this process: it is read without a system call, and entries of cgroups that are gone are given back
by writing a zero. `Accounts` makes sure that what people see of a cgroup never falls while it lives: time that a culprit took
and that can no longer be named (it was removed, or is not listed) moves over to the rest, once and for good.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from api.facts import Blame
from api.ports import Unavailable
from probes import bpf
from probes.groups import RETIRED, ROOT_ID, Numbers, Owners
from probes.loader import Loaded
from probes.losses import Losses
from probes.maps import Map, among, dtype_of, possible_cpus, total

MAX_BYTES = 4 << 20
"""Bound of the table over all CPUs: all of it is looked through at each read."""
MAX_BITS = 13
"""8,192 pairs on each CPU, up to 32 CPUs; larger machines have fewer on each."""
PARTS = 3
"""Columns of a row that are parts of waits: struct parts of blame.bpf.h."""
_PAIR_BYTES = 16
_LOW = np.uint64(0xFFFFFFFF)
_NOBODY = np.uint64(0)
"""No cgroup has this number."""


def pair_bits(cpus: int) -> int:
    """Logarithm of the number of pairs on each CPU."""
    return min(MAX_BITS, (MAX_BYTES // (_PAIR_BYTES * cpus)).bit_length() - 1)


class Pairs(NamedTuple):
    """Entries in use: where they are, halves of the two tags, and nanoseconds. One pair has an entry on every CPU."""

    at: npt.NDArray[np.intp]
    victims: Numbers
    culprits: Numbers
    ns: Numbers


NO_PAIRS = Pairs(np.zeros(0, np.intp), *(np.zeros(0, np.uint64) for _ in range(3)))


class PairTable:
    """The map `pairs` of a loaded probe, in memory until `close`."""

    def __init__(self, loaded: Loaded) -> None:
        fd, description = loaded.maps["pairs"]
        layout, info = dtype_of(description.leaf), bpf.map_info(fd)
        if layout.itemsize != info.value_size:
            raise ValueError(f"map pairs: described as {layout.itemsize} bytes, the kernel has {info.value_size}")
        self.size = info.max_entries
        pages = -(-self.size * info.value_size // mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, pages * mmap.PAGESIZE)
        table = np.frombuffer(self._memory, layout, self.size)
        self._keys, self._ns = table["key"], table["ns"]

    def read(self) -> Pairs:
        at = np.flatnonzero(self._keys)
        keys, ns = self._keys[at], self._ns[at]
        return Pairs(at, keys >> np.uint64(32), keys & _LOW, ns)

    def clear(self, at: npt.NDArray[np.intp], ns: Numbers) -> npt.NDArray[np.intp]:
        """Give those entries back that still have these values; returns which. What the kernel adds at this very moment is
        lost, but they are of cgroups that are gone."""
        at = at[self._ns[at] == ns]
        self._ns[at] = 0
        self._keys[at] = 0
        return at

    def close(self) -> None:
        """Idempotent."""
        self._keys = self._ns = np.zeros(0, np.uint64)
        self._memory.close()


class Settled(NamedTuple):
    """Waits by cgroup id of the victim, cumulative."""

    by_path: dict[int, dict[str, int]]
    unnamed_ns: Mapping[int, int]
    """Time of culprits that could not be named."""
    spent: npt.NDArray[np.bool_]
    """Which of the entries may be given back."""


class Accounts:
    """How much of each entry's time has moved over to the rest of its victim, for want of a name.

    What was told under a culprit's name goes with that name: if all of it moved when the culprit ends, the rest would jump
    by its whole history, and every rate with it.
    """

    def __init__(self, size: int) -> None:
        self._base = np.zeros(size, np.uint64)
        """By entry: what has moved already. The rest of it is its culprit's, as long as that has a name."""
        self._told = np.zeros(size, np.uint64)
        """By entry: how far it has been told under its culprit's name."""
        self._moved: dict[int, int] = {}
        """By victim."""

    def settle(self, pairs: Pairs, owners: Owners, live: Mapping[int, str]) -> Settled:
        """`owners` are read after the pairs, and know all that live."""
        victims, culprits = (_owners_of(half, owners) for half in (pairs.victims, pairs.culprits))
        new = pairs.ns - self._base[pairs.at]
        present = victims != _NOBODY
        named = present & among(culprits, (ROOT_ID, *live))
        unnamed = present & ~named
        untold = pairs.ns - np.maximum(self._base, self._told)[pairs.at]
        self._move(victims[unnamed].tolist(), untold[unnamed].tolist(), set(owners.ids.tolist()))
        self._base[pairs.at[unnamed]] = pairs.ns[unnamed]
        self._told[pairs.at[named]] = pairs.ns[named]
        # Nothing new since the last time, and its culprit gone: nothing is going to be added to it any more.
        spent = ~present | (unnamed & (culprits == _NOBODY) & (new == 0))
        by_path: dict[int, dict[str, int]] = {}
        for victim, culprit, ns in zip(*_add_up(victims[named], culprits[named], new[named]), strict=True):
            by_path.setdefault(victim, {})[live.get(culprit, "/")] = ns
        return Settled(by_path, self._moved, spent)

    def forget(self, at: npt.NDArray[np.intp]) -> None:
        """These entries were given back and begin at zero."""
        self._base[at] = self._told[at] = 0

    def _move(self, victims: list[int], sums: list[int], known: set[int]) -> None:
        self._moved = {victim: ns for victim, ns in self._moved.items() if victim in known}
        for victim, ns in zip(victims, sums, strict=True):
            self._moved[victim] = self._moved.get(victim, 0) + ns


class Culprits:
    """All that a running probe knows of who made whom wait."""

    def __init__(self, loaded: Loaded) -> None:
        self._pairs = PairTable(loaded)
        self._accounts = Accounts(self._pairs.size)
        self._crowded = Map(*loaded.maps["crowded"], possible_cpus())
        self.without_place = Losses()
        """Parts of waits, as of the latest read."""

    def read(self) -> Pairs:
        """What there is now, for `settle`."""
        self.without_place.update(int(total(self._crowded.rows([0]))[0, 0]))
        return self._pairs.read()

    def settle(
        self, pairs: Pairs, owners: Owners, ids: Sequence[int], rows: Numbers, live: Mapping[int, str]
    ) -> dict[int, Blame]:
        """By cgroup id of the victim; `rows` are struct hist, whose last columns are struct parts."""
        settled = self._accounts.settle(pairs, owners, live)
        self._accounts.forget(self._pairs.clear(pairs.at[settled.spent], pairs.ns[settled.spent]))
        return {
            number: Blame(
                by_cgroup=settled.by_path.get(number, {}),
                throttled_ns=throttled,
                higher_class_ns=higher,
                other_ns=other + settled.unnamed_ns.get(number, 0),
            )
            for number, (throttled, higher, other) in zip(ids, rows[:, -PARTS:].tolist(), strict=True)
        }

    def problem(self) -> Unavailable | None:
        """Whether parts of waits found no place in the table lately, as of the latest read."""
        return self.without_place.problem(
            "parts of waits found no place in the table of who waits for whom and count as other",
            "remove cgroups that nobody uses; on a node that makes and removes hundreds of them a second this cannot be helped",
        )

    def close(self) -> None:
        """Idempotent."""
        self._pairs.close()


def _owners_of(halves: Numbers, owners: Owners) -> Numbers:
    """Cgroup id by the low half of its tag; _NOBODY for a tag that is not known any more."""
    known = owners.tags != np.uint64(RETIRED)
    low, ids = owners.tags[known] & _LOW, owners.ids[known]
    if not len(low):
        return np.full(len(halves), _NOBODY)
    order = np.argsort(low)
    low, ids = low[order], ids[order]
    at = np.minimum(np.searchsorted(low, halves), len(low) - 1)
    return np.where(low[at] == halves, ids[at], _NOBODY)


def _add_up(victims: Numbers, culprits: Numbers, ns: Numbers) -> tuple[list[int], list[int], list[int]]:
    """Sums by pair of cgroups, from all CPUs and all tags of each."""
    order = np.lexsort((culprits, victims))
    victims, culprits, ns = victims[order], culprits[order], ns[order]
    first = np.ones(len(ns), bool)
    first[1:] = (victims[1:] != victims[:-1]) | (culprits[1:] != culprits[:-1])
    starts = np.flatnonzero(first)
    sums = np.add.reduceat(ns, starts) if len(starts) else ns
    return victims[starts].tolist(), culprits[starts].tolist(), sums.tolist()
