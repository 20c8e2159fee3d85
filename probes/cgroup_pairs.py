"""Reads the table of pairs of cgroups (victim, aggressor), and resolves its entries to paths.
The table is mapped into memory, so a read needs no system call; entries of removed cgroups are freed by writing a
zero. The value of a pair never falls while its aggressor is listed; time of an aggressor that cannot be resolved to a path
moves to the victim's unattributed rest for good. The C side is probes/cgroup_pairs.bpf.h.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from api.interfaces import Unavailable
from api.snapshot import Blame
from probes import bpf
from probes.loader import Loaded
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap, dtype_of, is_member, possible_cpus, sum_over_cpus
from probes.per_cgroup_probe import RETIRED_TAG, ROOT_CGROUP_ID, CgroupTags, U64Array

MAX_PAIR_TABLE_BYTES = 4 << 20
"""Maximum size of a table without histograms over all CPUs: each read scans all of it."""
MAX_PAIR_BITS = 13
"""8,192 pairs on each of up to 32 CPUs; larger machines have fewer per CPU."""
BLAME_PARTS = 3
"""Number of columns of a row that are parts of waits: struct parts of blame.bpf.h."""
PAIR_BYTES = 16
"""Size of an entry without a histogram."""
_LOW_HALF = np.uint64(0xFFFFFFFF)
_NO_CGROUP = np.uint64(0)
"""Id that no cgroup has."""
_ZERO = np.uint64(0)


def pair_bits(cpus: int, pair_bytes: int = PAIR_BYTES, max_bytes: int = MAX_PAIR_TABLE_BYTES) -> int:
    """Return the logarithm of the number of pairs per CPU."""
    return min(MAX_PAIR_BITS, (max_bytes // (pair_bytes * cpus)).bit_length() - 1)


class PairEntries(NamedTuple):
    """Entries in use: positions, low halves of the two tags, and values. A pair can have an entry on every CPU."""

    at: npt.NDArray[np.intp]
    victims: U64Array
    aggressors: U64Array
    values: U64Array


NO_PAIR_ENTRIES = PairEntries(np.zeros(0, np.intp), *(np.zeros(0, np.uint64) for _ in range(3)))


class PairMap:
    """The map `pairs` of a loaded probe, mapped into memory until `close`."""

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
        """Free the entries that still have these values, and return their positions.

        A value that the kernel adds at the same moment is lost, but only for removed cgroups.
        """
        at = at[_is_zero(self._values[at] - values)]
        self._values[at] = 0
        self._keys[at] = 0
        return at

    def close(self) -> None:
        """Idempotent."""
        self._keys = self._values = np.zeros(0, np.uint64)
        self._memory.close()


class ResolvedPairs(NamedTuple):
    """Cumulative values by cgroup id of the victim: integers, or lists of integers if entries have a histogram."""

    by_path: dict[int, dict[str, Any]]
    unattributed: dict[int, Any]
    """Values whose aggressors could not be resolved to a path."""
    reclaimable: npt.NDArray[np.bool_]
    """Mask of the entries that may be freed."""


class PairAccounts:
    """Divides the value of each entry between its aggressor's path and the unattributed rest of its victim.

    A value reported under the aggressor's path stays there: if all of it moved when the aggressor is removed, the rest
    would jump by its whole history, and so would every rate.
    """

    def __init__(self, shape: int | tuple[int, ...]) -> None:
        self._base = np.zeros(shape, np.uint64)
        """Value of each entry that has moved already. The remainder belongs to the aggressor while it has a path."""
        self._reported = np.zeros(shape, np.uint64)
        """Value of each entry that was reported under its aggressor's path."""
        self._moved: dict[int, Any] = {}
        """Moved values by victim."""

    def resolve(self, pairs: PairEntries, tags: CgroupTags, live: Mapping[int, str]) -> ResolvedPairs:
        """Resolve entries to paths. `tags` must be read after `pairs`, so that they contain all live cgroups."""
        victims, aggressors = (_cgroup_ids_of(half, tags) for half in (pairs.victims, pairs.aggressors))
        new = pairs.values - self._base[pairs.at]
        present = victims != _NO_CGROUP
        named = present & is_member(aggressors, (ROOT_CGROUP_ID, *live))
        unnamed = present & ~named
        unreported = pairs.values - np.maximum(self._base[pairs.at], self._reported[pairs.at])
        self._move(victims[unnamed].tolist(), unreported[unnamed], set(tags.ids.tolist()))
        self._base[pairs.at[unnamed]] = pairs.values[unnamed]
        self._reported[pairs.at[named]] = pairs.values[named]
        # Unchanged since the previous read, and the aggressor has been removed: the kernel adds nothing to it any more.
        reclaimable = ~present | (unnamed & (aggressors == _NO_CGROUP) & _is_zero(new))
        by_path: dict[int, dict[str, Any]] = {}
        for victim, aggressor, value in zip(*_sum_by_pair(victims[named], aggressors[named], new[named]), strict=True):
            by_path.setdefault(victim, {})[live.get(aggressor, "/")] = value
        unattributed = {victim: moved.tolist() for victim, moved in self._moved.items()}
        return ResolvedPairs(by_path, unattributed, reclaimable)

    def forget(self, at: npt.NDArray[np.intp]) -> None:
        """Reset entries that were freed."""
        self._base[at] = self._reported[at] = 0

    def _move(self, victims: list[int], values: U64Array, listed: set[int]) -> None:
        self._moved = {victim: moved for victim, moved in self._moved.items() if victim in listed}
        for victim, value in zip(victims, values, strict=True):
            self._moved[victim] = self._moved.get(victim, _ZERO) + value


class CgroupPairs:
    """The table of a running probe with its accounts; `events` and `table` name its contents in messages."""

    def __init__(self, loaded: Loaded, events: str, table: str) -> None:
        self._pairs = PairMap(loaded)
        self._accounts = PairAccounts(self._pairs.shape)
        self._overflow = BpfMap(*loaded.maps["pairs_overflow"], possible_cpus())
        self.overflowed_events = LostEventCounter()
        """Events that found no entry, as of the latest read."""
        self._events, self._table = events, table

    def read(self) -> PairEntries:
        """Return the current entries, for `resolve`."""
        self.overflowed_events.update(int(sum_over_cpus(self._overflow.rows([0]))[0, 0]))
        return self._pairs.read()

    def resolve(self, pairs: PairEntries, tags: CgroupTags, live: Mapping[int, str]) -> ResolvedPairs:
        """Resolve the latest entries to paths, and free those that are not needed any more."""
        resolved = self._accounts.resolve(pairs, tags, live)
        self._accounts.forget(self._pairs.clear(pairs.at[resolved.reclaimable], pairs.values[resolved.reclaimable]))
        return resolved

    def problem(self) -> Unavailable | None:
        """Return whether events found no entry in the table lately, as of the latest read."""
        return self.overflowed_events.problem(
            f"{self._events} count as other: the table of {self._table} is full",
            "remove unused cgroups; a node that creates and removes hundreds of cgroups per second always loses some",
        )

    def close(self) -> None:
        """Idempotent."""
        self._pairs.close()


class RunqAggressors(CgroupPairs):
    """The pairs of a running run-queue latency probe: time that a victim waited while the aggressor ran."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded, "parts of waits", "victims and aggressors")

    def blame_by_victim(
        self, pairs: PairEntries, tags: CgroupTags, ids: Sequence[int], rows: U64Array, live: Mapping[int, str]
    ) -> dict[int, Blame]:
        """Return the parts of waits by cgroup id of the victim; `rows` are struct hist, which ends with struct parts."""
        resolved = self.resolve(pairs, tags, live)
        return {
            number: Blame(
                by_cgroup=resolved.by_path.get(number, {}),
                throttled_ns=throttled,
                higher_class_ns=higher,
                other_ns=other + resolved.unattributed.get(number, 0),
            )
            for number, (throttled, higher, other) in zip(ids, rows[:, -BLAME_PARTS:].tolist(), strict=True)
        }


def _cgroup_ids_of(halves: U64Array, tags: CgroupTags) -> U64Array:
    """Return the cgroup id for each low half of a tag; _NO_CGROUP for a tag that is not in the table any more."""
    current = tags.tags != np.uint64(RETIRED_TAG)
    low, ids = tags.tags[current] & _LOW_HALF, tags.ids[current]
    if not len(low):
        return np.full(len(halves), _NO_CGROUP)
    order = np.argsort(low)
    low, ids = low[order], ids[order]
    at = np.minimum(np.searchsorted(low, halves), len(low) - 1)
    return np.where(low[at] == halves, ids[at], _NO_CGROUP)


def _is_zero(values: U64Array) -> npt.NDArray[np.bool_]:
    return np.equal(values if values.ndim == 1 else values.max(axis=1), 0)


def _sum_by_pair(victims: U64Array, aggressors: U64Array, values: U64Array) -> tuple[list[int], list[int], list[Any]]:
    """Sum values by pair of cgroups, over all CPUs and all tags of each cgroup."""
    order = np.lexsort((aggressors, victims))
    victims, aggressors, values = victims[order], aggressors[order], values[order]
    first = np.ones(len(values), bool)
    first[1:] = (victims[1:] != victims[:-1]) | (aggressors[1:] != aggressors[:-1])
    starts = np.flatnonzero(first)
    sums = np.add.reduceat(values, starts) if len(starts) else values
    return victims[starts].tolist(), aggressors[starts].tolist(), sums.tolist()
