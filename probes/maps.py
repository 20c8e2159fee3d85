"""Reads BPF maps as numpy arrays, decoded by the layout that BCC read from the C source.
Only this module and the probes above it import numpy. Values of a per-CPU map have one more axis, the possible CPUs.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from api.cpu import parse_cpu_list
from api.text import quote
from probes import bpf
from probes.loader import MapDescription

# The thread pool of OpenBLAS costs megabytes, and nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

MAX_READ_BYTES = 1 << 20
"""Maximum size of one system call: bounds the memory of a read on a machine with hundreds of CPUs."""
BRIDGE_BYTES = 12 << 10
"""Size of a gap of unused elements that is read along instead of starting another system call: both take 10 us."""
_ENOTSUPP = 524
_NO_BATCH = frozenset({errno.EINVAL, errno.EOPNOTSUPP, _ENOTSUPP})
_SCALARS = {
    "char": "i1", "signed char": "i1", "unsigned char": "u1", "_Bool": "u1",
    "short": "i2", "unsigned short": "u2", "int": "i4", "unsigned int": "u4",
    "long": "i8", "unsigned long": "u8", "long long": "i8", "unsigned long long": "u8",
}  # fmt: skip

Rows = npt.NDArray[Any]


def dtype_of(description: Any) -> np.dtype[Any]:
    """Return the numpy type of a key or leaf description of BCC. Raises ValueError for bitfields and unions."""
    if isinstance(description, str):
        if description not in _SCALARS:
            raise ValueError(f"C type {quote(description)} is not supported")
        return np.dtype(_SCALARS[description])
    name, members, *how = description
    if how not in (["struct"], ["struct_packed"]):
        raise ValueError(f"C type {name}: only structs can be read, not {how or 'this'}")
    return np.dtype([_member(name, *member) for member in members], align=how == ["struct"])


def _member(struct_name: str, name: str, kind: Any, *more: Any) -> tuple[Any, ...]:
    if not more:
        return name, dtype_of(kind)
    if isinstance(more[0], list):
        return name, dtype_of(kind), tuple(more[0])
    if more[0] in ("struct", "struct_packed"):
        return name, dtype_of([name, kind, more[0]])
    raise ValueError(f"struct {struct_name}: member {quote(name)} is a bitfield or union, which cannot be read")


def possible_cpu_ids(sys_root: Path = Path("/sys")) -> tuple[int, ...]:
    """Return the CPUs whose values a per-CPU map has, in the order of the values."""
    return parse_cpu_list((sys_root / "devices/system/cpu/possible").read_text())


def possible_cpus(sys_root: Path = Path("/sys")) -> int:
    """Return the number of values of each element of a per-CPU map."""
    return len(possible_cpu_ids(sys_root))


def cpu_id_limit(sys_root: Path = Path("/sys")) -> int:
    """Return the highest CPU number plus one: more than the number of CPUs if the firmware leaves numbers out.

    It is the length of arrays that a program indexes by CPU number.
    """
    return max(possible_cpu_ids(sys_root)) + 1


class BpfMap:
    """One map. The descriptor belongs to the loaded probe, which closes it."""

    def __init__(self, fd: int, description: MapDescription, cpus: int) -> None:
        info = bpf.map_info(fd)
        self._fd, self._info, self._batch = fd, info, True
        self.key, self.value = dtype_of(description.key), dtype_of(description.leaf)
        if (self.key.itemsize, self.value.itemsize) != (info.key_size, info.value_size):
            raise ValueError(
                f"map {description.name}: described as {self.key.itemsize} and {self.value.itemsize} bytes,"
                f" the kernel has {info.key_size} and {info.value_size}"
            )
        per_cpu = info.type in bpf.PER_CPU
        self._copies = cpus if per_cpu else 1
        self._shape = (cpus,) if per_cpu else ()
        padding = -self.value.itemsize % 8 if per_cpu else 0
        self._cell = np.dtype([("value", self.value), ("padding", "u1", padding)])

    def items(self) -> tuple[Rows, Rows]:
        """Return all keys and values of a hash map, in no order."""
        return self._join(self._chunks(None, None))

    def rows(self, indexes: Sequence[int]) -> Rows:
        """Return the values of these elements of an array map; `indexes` are sorted and without repeats."""
        keys, values = self._join(self._ranges(indexes))
        return values if len(keys) == len(indexes) else values[is_member(keys, indexes)]

    def totals(self, indexes: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Return the same rows summed over CPUs, chunk by chunk: unsummed rows of 500 cgroups and 200 CPUs take 30 MiB."""
        parts = [(np.empty(0, self.key), np.empty((0, self.value.itemsize // 8), np.uint64))]
        parts += [(keys, sum_over_cpus(cells["value"])) for keys, cells in self._ranges(indexes)]
        keys, sums = (np.concatenate(column) for column in zip(*parts, strict=True))
        return sums if len(keys) == len(indexes) else sums[is_member(keys, indexes)]

    def set(self, key: int, value: bytes) -> None:
        """Set one element to the same value on all CPUs."""
        cell = value + bytes(self._cell.itemsize - len(value))
        bpf.update(self._fd, np.array(key, self.key).tobytes(), cell * self._copies)

    def delete(self, key: int | tuple[int, ...]) -> None:
        """Remove one element of a hash map, if present; a struct key is a tuple of its members."""
        bpf.delete(self._fd, np.array(key, self.key).tobytes())

    def _ranges(self, indexes: Sequence[int]) -> Iterator[tuple[Rows, Rows]]:
        """Yield keys and cells of these elements, and of some unused ones between them."""
        for first, last in _contiguous_runs(indexes, max(1, BRIDGE_BYTES // (self._cell.itemsize * self._copies))):
            yield from self._chunks(np.array(first - 1, self.key).tobytes() if first else None, last - first + 1)

    def _join(self, chunks: Iterable[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
        pairs = [(np.empty(0, self.key), np.empty((0, *self._shape), self._cell)), *chunks]
        return np.concatenate([keys for keys, _ in pairs]), np.concatenate([cells for _, cells in pairs])["value"]

    def _chunks(self, before: bytes | None, limit: int | None) -> Iterator[tuple[Rows, Rows]]:
        """Yield keys and cells after the position `before`, up to the end of the map or `limit`."""
        if self._batch:
            try:
                yield from self._batches(before, limit)
            except OSError as error:
                if error.errno not in _NO_BATCH:
                    raise
                self._batch = False
        if not self._batch:
            yield from self._singles(before, limit)

    def _batches(self, before: bytes | None, limit: int | None) -> Iterator[tuple[Rows, Rows]]:
        room = max(1, MAX_READ_BYTES // (self._cell.itemsize * self._copies + self.key.itemsize))
        room = min(room, self._info.max_entries)
        left, last = limit, False
        while not last and left != 0:
            count = room if left is None else min(room, left)
            keys, cells = np.empty(count, self.key), np.empty((count, *self._shape), self._cell)
            after = ctypes.create_string_buffer(max(self.key.itemsize, 8))
            try:
                copied, last = bpf.lookup_batch(self._fd, before, after, keys.ctypes.data, cells.ctypes.data, count)
            except OSError as error:
                if error.errno != errno.ENOSPC or room >= self._info.max_entries:
                    raise
                room = min(2 * room, self._info.max_entries)  # a hash bucket has more elements than `room`
                continue
            yield keys[:copied], cells[:copied]
            before, left = after.raw, None if left is None else left - copied

    def _singles(self, before: bytes | None, limit: int | None) -> Iterator[tuple[Rows, Rows]]:
        """Yield elements one by one, for kernels without batch calls (before 5.6; before 5.13 for a per-CPU array)."""
        key, size = before, self._cell.itemsize * self._copies
        for _ in range(self._info.max_entries if limit is None else limit):
            key = bpf.next_key(self._fd, key, self.key.itemsize)
            if key is None:
                return
            try:
                raw = bpf.lookup(self._fd, key, size)
            except FileNotFoundError:
                continue
            yield np.frombuffer(key, self.key), np.frombuffer(raw, self._cell).reshape((1, *self._shape))


def is_member(values: npt.NDArray[Any], members: Collection[int]) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are in `members`; np.isin would load 1.4 MiB of masked arrays (through np.unique)."""
    ordered = np.sort(np.fromiter(members, values.dtype, len(members)))
    if not len(ordered):
        return np.zeros(len(values), bool)
    mask: npt.NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return mask


def sum_over_cpus(values: Rows) -> npt.NDArray[np.uint64]:
    """Sum values made of 64-bit counters over the CPUs of a per-CPU map; return one row per element."""
    counters = np.ascontiguousarray(values).view(np.uint64).reshape(*values.shape, values.dtype.itemsize // 8)
    summed: npt.NDArray[np.uint64] = counters if values.ndim == 1 else counters.sum(axis=1, dtype=np.uint64)
    return summed


def _contiguous_runs(indexes: Sequence[int], bridge: int) -> Iterator[tuple[int, int]]:
    """Yield first and last of each range of indexes that lie at most `bridge` apart."""
    if not indexes:
        return
    start = previous = indexes[0]
    for index in indexes:
        if index - previous > bridge:
            yield start, previous
            start = index
        previous = index
    yield start, previous
