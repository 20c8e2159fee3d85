"""Which file each field of a CgroupSample comes from, on version 1 and on version 2: the one table that knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agent.hierarchy import Hierarchy
from agent.sense import parsers

Parse = Callable[[bytes], Any]


class Place(NamedTuple):
    """A file of a cgroup, how to read it, and for version 1 the controller whose hierarchy has it."""

    file: bytes
    parse: Parse
    controller: str = ""


class Row(NamedTuple):
    """Where a field is, in order of preference: version 1 where its controller is mounted, else the unified tree."""

    v1: tuple[Place, ...]
    v2: tuple[Place, ...]


class Source(NamedTuple):
    """One file to read in each cgroup and the fields it gives."""

    mount: Path
    file: bytes
    fields: tuple[str, ...]
    parsers: tuple[Parse, ...]
    instead_of: int | None
    """Index of the preferred source of the same fields: this one is read only where that one gives nothing."""


SNAPSHOTS = frozenset((b"tasks",))
"""Files to open for each read: version 1 makes the list of tasks at the first read after open and shows that same list
until nobody has read it for a second (kernel/cgroup/cgroup-v1.c, cgroup_pidlist_start)."""
_US = parsers.NS_PER_US
TABLE: dict[str, Row] = {
    "cpu_usage_ns": Row(
        v1=(Place(b"cpuacct.usage", parsers.number, "cpuacct"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"usage_usec", _US)),),
    ),
    "periods": Row(
        v1=(Place(b"cpu.stat", parsers.keyed(b"nr_periods"), "cpu"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"nr_periods")),),
    ),
    "throttled_periods": Row(
        v1=(Place(b"cpu.stat", parsers.keyed(b"nr_throttled"), "cpu"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"nr_throttled")),),
    ),
    "throttled_ns": Row(
        v1=(Place(b"cpu.stat", parsers.keyed(b"throttled_time"), "cpu"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"throttled_usec", _US)),),
    ),
    # pids.current counts the groups below too; the lists of tasks, read where the pids controller is missing, do not.
    "threads": Row(
        v1=(Place(b"pids.current", parsers.number, "pids"), Place(b"tasks", parsers.task_count, "cpu")),
        v2=(Place(b"pids.current", parsers.number), Place(b"cgroup.threads", parsers.task_count)),
    ),
    "memory_bytes": Row(
        v1=(Place(b"memory.usage_in_bytes", parsers.number, "memory"),),
        v2=(Place(b"memory.current", parsers.number),),
    ),
    # Version 1 has no PSI: on a hybrid machine it is that of the unified group at the same path, if there is one.
    "cpu_pressure": Row(v1=(), v2=(Place(b"cpu.pressure", parsers.pressure),)),
    "memory_pressure": Row(v1=(), v2=(Place(b"memory.pressure", parsers.pressure),)),
    "io_pressure": Row(v1=(), v2=(Place(b"io.pressure", parsers.pressure),)),
}


def sources(hierarchy: Hierarchy) -> tuple[Source, ...]:
    """The files to read in each cgroup of this machine, each once, a fallback after what it stands in for."""
    files: dict[tuple[Path, bytes], list[tuple[str, Parse]]] = {}
    preferred: dict[tuple[Path, bytes], tuple[Path, bytes]] = {}
    for field, row in TABLE.items():
        before: tuple[Path, bytes] | None = None
        for mount, place in _places(row, hierarchy):
            key = (mount, place.file)
            files.setdefault(key, []).append((field, place.parse))
            if before is not None:
                preferred[key] = before
            before = key
    order = list(files)
    return tuple(
        Source(
            mount=mount,
            file=file,
            fields=tuple(field for field, _ in fields),
            parsers=tuple(parse for _, parse in fields),
            instead_of=order.index(preferred[mount, file]) if (mount, file) in preferred else None,
        )
        for (mount, file), fields in files.items()
    )


def _places(row: Row, hierarchy: Hierarchy) -> list[tuple[Path, Place]]:
    mounted = [(hierarchy.v1[place.controller], place) for place in row.v1 if place.controller in hierarchy.v1]
    if mounted or hierarchy.v2 is None:
        return mounted
    return [(hierarchy.v2, place) for place in row.v2]
