"""Reads the table of pairs of cgroups, such as which cgroup waited for which, and resolves its entries to paths.
The table is mapped into memory, so a read needs no system call; entries of removed cgroups are freed by writing a
zero. What a pair shows never falls while its aggressor is listed; time of an aggressor that cannot be named moves to
the victim's unattributed rest, once and for good. The C side is probes/pairs.bpf.h.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from api.interfaces import Unavailable
from api.measurements import Blame
from probes import bpf
from probes.cgroup_table import RETIRED_TAG, ROOT_CGROUP_ID, CgroupTags, U64Array
from probes.loader import Loaded
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap, dtype_of, is_member, possible_cpus, sum_over_cpus

MAX_PAIR_TABLE_BYTES = 4 << 20
"""Bound of a table without histograms over all CPUs: all of it is looked through at each read."""
MAX_PAIR_BITS = 13
"""8,192 pairs on each CPU, up to 32 CPUs; larger machines have fewer on each."""
BLAME_PARTS = 3
"""Columns of a row that are parts of waits: struct parts of blame.bpf.h."""
PAIR_BYTES = 16
"""Of an entry without a histogram."""
_LOW_HALF = np.uint64(0xFFFFFFFF)
_NO_CGROUP = np.uint64(0)
"""No cgroup has this number."""
_ZERO = np.uint64(0)


def pair_bits(cpus: int, pair_bytes: int = PAIR_BYTES, max_bytes: int = MAX_PAIR_TABLE_BYTES) -> int:
    """Logarithm of the number of pairs on each CPU."""
    return min(MAX_PAIR_BITS, (max_bytes // (pair_bytes * cpus)).bit_length() - 1)


class PairEntries(NamedTuple):
    """Entries in use: where they are, halves of the two tags, and values. One pair has an entry on every CPU."""

    at: npt.NDArray[np.intp]
    victims: U64Array
    culprits: U64Array
    values: U64Array


NO_PAIR_ENTRIES = PairEntries(np.zeros(0, np.intp), *(np.zeros(0, np.uint64) for _ in range(3)))


class PairMap:
    """The map `pairs` of a loaded probe, in memory until `close`."""

    def __init__(self, loaded: Loaded) -> None:
        fd, description = loaded.maps["pairs"]
        layout, info = dtype_of(description.leaf), bpf.map_info(fd)
        if layout.itemsize != info.value_size:
            raise ValueError(f"map pairs: described as {layout.itemsize} bytes, the kernel has {info.value_size}")
        self.size = info.max_entries
        pages = -(-self.size * info.value_size // mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, pages * mmap.PAGESIZE)
        words = np.frombuffer(self._memory, np.uint64, self.size * layout.itemsize // 8).reshape(self.size, -1)
        self._keys, self._values = words[:, 0], words[:, 1] if words.shape[1] == PAIR_BYTES // 8 else words[:, 1:]
        self.shape = self._values.shape

    def read(self) -> PairEntries:
        at = np.flatnonzero(self._keys)
        keys, values = self._keys[at], self._values[at]
        return PairEntries(at, keys >> np.uint64(32), keys & _LOW_HALF, values)

    def clear(self, at: npt.NDArray[np.intp], values: U64Array) -> npt.NDArray[np.intp]:
        """Give those entries back that still have these values; returns which. What the kernel adds at this very moment is
        lost, but they are of cgroups that are gone."""
        at = at[_is_zero(self._values[at] - values)]
        self._values[at] = 0
        self._keys[at] = 0
        return at

    def close(self) -> None:
        """Idempotent."""
        self._keys = self._values = np.zeros(0, np.uint64)
        self._memory.close()


class ResolvedPairs(NamedTuple):
    """Values by cgroup id of the victim, cumulative: integers, or lists of them where an entry has a histogram."""

    by_path: dict[int, dict[str, Any]]
    unattributed: dict[int, Any]
    """Those of culprits that could not be named."""
    spent: npt.NDArray[np.bool_]
    """Which of the entries may be given back."""


class PairAccounts:
    """How much of each entry's value has moved over to the rest of its victim, for want of a name.

    What was told under a culprit's name goes with that name: if all of it moved when the culprit ends, the rest would jump
    by its whole history, and every rate with it.
    """

    def __init__(self, shape: int | tuple[int, ...]) -> None:
        self._base = np.zeros(shape, np.uint64)
        """By entry: what has moved already. The rest of it is its culprit's, as long as that has a name."""
        self._told = np.zeros(shape, np.uint64)
        """By entry: how far it has been told under its culprit's name."""
        self._moved: dict[int, Any] = {}
        """By victim."""

    def settle(self, pairs: PairEntries, owners: CgroupTags, live: Mapping[int, str]) -> ResolvedPairs:
        """`owners` are read after the pairs, and know all that live."""
        victims, culprits = (_cgroup_ids_of(half, owners) for half in (pairs.victims, pairs.culprits))
        new = pairs.values - self._base[pairs.at]
        present = victims != _NO_CGROUP
        named = present & is_member(culprits, (ROOT_CGROUP_ID, *live))
        unnamed = present & ~named
        untold = pairs.values - np.maximum(self._base[pairs.at], self._told[pairs.at])
        self._move(victims[unnamed].tolist(), untold[unnamed], set(owners.ids.tolist()))
        self._base[pairs.at[unnamed]] = pairs.values[unnamed]
        self._told[pairs.at[named]] = pairs.values[named]
        # Nothing new since the last time, and its culprit gone: nothing is going to be added to it any more.
        spent = ~present | (unnamed & (culprits == _NO_CGROUP) & _is_zero(new))
        by_path: dict[int, dict[str, Any]] = {}
        for victim, culprit, value in zip(*_sum_by_pair(victims[named], culprits[named], new[named]), strict=True):
            by_path.setdefault(victim, {})[live.get(culprit, "/")] = value
        return ResolvedPairs(by_path, {victim: moved.tolist() for victim, moved in self._moved.items()}, spent)

    def forget(self, at: npt.NDArray[np.intp]) -> None:
        """These entries were given back and begin at zero."""
        self._base[at] = self._told[at] = 0

    def _move(self, victims: list[int], values: U64Array, known: set[int]) -> None:
        self._moved = {victim: moved for victim, moved in self._moved.items() if victim in known}
        for victim, value in zip(victims, values, strict=True):
            self._moved[victim] = self._moved.get(victim, _ZERO) + value


class CgroupPairs:
    """The table of a running probe with its accounts. `events` are what it counts and `table` what it tells, in a person's
    words."""

    def __init__(self, loaded: Loaded, events: str, table: str) -> None:
        self._pairs = PairMap(loaded)
        self._accounts = PairAccounts(self._pairs.shape)
        self._crowded = BpfMap(*loaded.maps["crowded"], possible_cpus())
        self.overflowed_events = LostEventCounter()
        """Events, as of the latest read."""
        self._events, self._table = events, table

    def read(self) -> PairEntries:
        """What there is now, for `balance`."""
        self.overflowed_events.update(int(sum_over_cpus(self._crowded.rows([0]))[0, 0]))
        return self._pairs.read()

    def balance(self, pairs: PairEntries, owners: CgroupTags, live: Mapping[int, str]) -> ResolvedPairs:
        """The accounts with these pairs, which are the latest; entries that nobody needs any more are given back."""
        settled = self._accounts.settle(pairs, owners, live)
        self._accounts.forget(self._pairs.clear(pairs.at[settled.spent], pairs.values[settled.spent]))
        return settled

    def problem(self) -> Unavailable | None:
        """Whether any found no place in the table lately, as of the latest read."""
        return self.overflowed_events.problem(
            f"{self._events} found no place in the table of {self._table} and count as other",
            "remove cgroups that nobody uses; on a node that makes and removes hundreds of them a second this cannot be helped",
        )

    def close(self) -> None:
        """Idempotent."""
        self._pairs.close()


class RunqAggressors(CgroupPairs):
    """All that a running probe knows of who made whom wait."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded, "parts of waits", "who waits for whom")

    def settle(
        self, pairs: PairEntries, owners: CgroupTags, ids: Sequence[int], rows: U64Array, live: Mapping[int, str]
    ) -> dict[int, Blame]:
        """By cgroup id of the victim; `rows` are struct hist, whose last columns are struct parts."""
        settled = self.balance(pairs, owners, live)
        return {
            number: Blame(
                by_cgroup=settled.by_path.get(number, {}),
                throttled_ns=throttled,
                higher_class_ns=higher,
                other_ns=other + settled.unattributed.get(number, 0),
            )
            for number, (throttled, higher, other) in zip(ids, rows[:, -BLAME_PARTS:].tolist(), strict=True)
        }


def _cgroup_ids_of(halves: U64Array, owners: CgroupTags) -> U64Array:
    """Cgroup id by the low half of its tag; _NOBODY for a tag that is not known any more."""
    known = owners.tags != np.uint64(RETIRED_TAG)
    low, ids = owners.tags[known] & _LOW_HALF, owners.ids[known]
    if not len(low):
        return np.full(len(halves), _NO_CGROUP)
    order = np.argsort(low)
    low, ids = low[order], ids[order]
    at = np.minimum(np.searchsorted(low, halves), len(low) - 1)
    return np.where(low[at] == halves, ids[at], _NO_CGROUP)


def _is_zero(values: U64Array) -> npt.NDArray[np.bool_]:
    """Of each entry."""
    return np.equal(values if values.ndim == 1 else values.max(axis=1), 0)


def _sum_by_pair(victims: U64Array, culprits: U64Array, values: U64Array) -> tuple[list[int], list[int], list[Any]]:
    """Sums by pair of cgroups, from all CPUs and all tags of each."""
    order = np.lexsort((culprits, victims))
    victims, culprits, values = victims[order], culprits[order], values[order]
    first = np.ones(len(values), bool)
    first[1:] = (victims[1:] != victims[:-1]) | (culprits[1:] != culprits[:-1])
    starts = np.flatnonzero(first)
    sums = np.add.reduceat(values, starts) if len(starts) else values
    return victims[starts].tolist(), culprits[starts].tolist(), sums.tolist()
