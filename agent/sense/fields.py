"""Which file each field of a CgroupSample comes from, on versions 1 and 2, and how often: the one table that knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agent.hierarchy import Hierarchy
from agent.sense import group_files, parsers
from agent.sense.cadence import Cadence
from api.facts import Limits

Parse = Callable[[bytes], Any]


class Place(NamedTuple):
    """A file of a cgroup, how to read it, and the controller whose version 1 hierarchy has it; a file of version 2 that names
    one is not looked for where that controller belongs to version 1."""

    file: bytes
    parse: Parse
    controller: str = ""


class Row(NamedTuple):
    """Where a field is, in order of preference: version 1 where its controller is mounted, else the unified tree."""

    v1: tuple[Place, ...]
    v2: tuple[Place, ...]
    cadence: Cadence = Cadence.TICK


class Source(NamedTuple):
    """One file to read in each cgroup and the fields it gives."""

    mount: Path
    file: bytes
    cadence: Cadence
    fields: tuple[str, ...]
    parsers: tuple[Parse, ...]
    instead_of: int | None
    """Index of the preferred source of the same fields: this one is read only where that one gives nothing."""
    summed: bool
    """Whether it has part in the same file of the group above, which only grows: while that one stays as it was, so does
    this one."""


SNAPSHOTS = frozenset((b"tasks",))
"""Files to open for each read: version 1 makes the list of tasks at the first read after open and shows that same list
until nobody has read it for a second (kernel/cgroup/cgroup-v1.c, cgroup_pidlist_start)."""
CLOCK = "cpu_usage_ns"
"""The field that tells whether a task of the group, or of one below, has run."""
SHARES = frozenset((b"cpuacct.stat", b"cpuacct.usage_percpu"))
"""How that time is shared out: read when it has changed."""
CALM = frozenset(
    (b"cpu.stat", b"pids.current", b"tasks", b"cgroup.threads", b"memory.usage_in_bytes", b"memory.current")
)
"""What seldom changes while nobody in the group runs, for others may reclaim its memory or move a sleeping task: read when
somebody has run, and along with the slow files. Pressure is not among it: it counts those who wait and cannot run."""
SUMMED = frozenset((b"cpuacct.usage", b"cpu.pressure", b"memory.pressure", b"io.pressure"))
"""Not memory.current or pids.current, where one group's growth hides another's decline, nor cpu.stat of version 2, which
counts periods of the group's own quota."""
_US = parsers.NS_PER_US
_SLOW = Cadence.SLOW


def _limit(name: str, v1: tuple[Place, ...], v2: tuple[Place, ...]) -> dict[str, Row]:
    return {f"limits.{name}": Row(v1, v2, Cadence.RARE)}


TABLE: dict[str, Row] = {
    "cpu_usage_ns": Row(
        v1=(Place(b"cpuacct.usage", parsers.number, "cpuacct"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"usage_usec", _US)),),
    ),
    # cpuacct.usage_user counts whole ticks; cpuacct.stat and version 2 share the exact usage out in their proportion.
    "cpu_user_ns": Row(
        v1=(Place(b"cpuacct.stat", group_files.ticks(b"user"), "cpuacct"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"user_usec", _US)),),
    ),
    "cpu_system_ns": Row(
        v1=(Place(b"cpuacct.stat", group_files.ticks(b"system"), "cpuacct"),),
        v2=(Place(b"cpu.stat", parsers.keyed(b"system_usec", _US)),),
    ),
    "per_cpu_ns": Row(v1=(Place(b"cpuacct.usage_percpu", group_files.numbers, "cpuacct"),), v2=()),
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
    # Reading memory.stat or memory.numa_stat makes the kernel add up what its CPUs counted for the group.
    "memory_stat": Row(
        v1=(Place(b"memory.stat", parsers.flat, "memory"),), v2=(Place(b"memory.stat", parsers.flat),), cadence=_SLOW
    ),
    "swap_bytes": Row(
        v1=(Place(b"memory.stat", parsers.keyed(b"total_swap"), "memory"),),
        v2=(Place(b"memory.swap.current", parsers.number),),
        cadence=_SLOW,
    ),
    "kernel_memory_bytes": Row(
        v1=(Place(b"memory.kmem.usage_in_bytes", parsers.number, "memory"),),
        v2=(Place(b"memory.stat", parsers.keyed(b"kernel")),),
        cadence=_SLOW,
    ),
    # Version 2 does not tell TCP from other sockets: see `sock` in memory_stat there.
    "kernel_tcp_bytes": Row(
        v1=(Place(b"memory.kmem.tcp.usage_in_bytes", parsers.number, "memory"),), v2=(), cadence=_SLOW
    ),
    "numa_stat": Row(
        v1=(Place(b"memory.numa_stat", group_files.numa_stat, "memory"),),
        v2=(Place(b"memory.numa_stat", group_files.numa_stat),),
        cadence=_SLOW,
    ),
    "memory_events.all": Row(
        v1=(Place(b"memory.oom_control", group_files.oom_kills, "memory"),),
        v2=(Place(b"memory.events", parsers.flat),),
        cadence=_SLOW,
    ),
    "memory_events.local": Row(v1=(), v2=(Place(b"memory.events.local", parsers.flat, "memory"),), cadence=_SLOW),
    # The recursive files count the groups below too, as version 2 and all other totals here do; older kernels lack them.
    "io.bytes": Row(
        v1=(
            Place(b"blkio.throttle.io_service_bytes_recursive", group_files.blkio, "blkio"),
            Place(b"blkio.throttle.io_service_bytes", group_files.blkio, "blkio"),
        ),
        v2=(),
        cadence=_SLOW,
    ),
    "io.operations": Row(
        v1=(
            Place(b"blkio.throttle.io_serviced_recursive", group_files.blkio, "blkio"),
            Place(b"blkio.throttle.io_serviced", group_files.blkio, "blkio"),
        ),
        v2=(),
        cadence=_SLOW,
    ),
    "io.all": Row(v1=(), v2=(Place(b"io.stat", group_files.io_stat, "blkio"),), cadence=_SLOW),
    **_limit(
        "quota_us",
        (Place(b"cpu.cfs_quota_us", group_files.quota, "cpu"),),
        (Place(b"cpu.max", group_files.cpu_max_quota),),
    ),
    **_limit(
        "period_us",
        (Place(b"cpu.cfs_period_us", parsers.number, "cpu"),),
        (Place(b"cpu.max", group_files.cpu_max_period),),
    ),
    **_limit(
        "burst_us", (Place(b"cpu.cfs_burst_us", parsers.number, "cpu"),), (Place(b"cpu.max.burst", parsers.number),)
    ),
    **_limit("weight", (Place(b"cpu.shares", parsers.number, "cpu"),), (Place(b"cpu.weight", parsers.number),)),
    **_limit("idle", (Place(b"cpu.idle", group_files.flag, "cpu"),), (Place(b"cpu.idle", group_files.flag),)),
    **_limit(
        "cpus",
        (Place(b"cpuset.effective_cpus", group_files.ranges, "cpuset"),),
        (Place(b"cpuset.cpus.effective", group_files.ranges),),
    ),
    **_limit(
        "mems",
        (Place(b"cpuset.effective_mems", group_files.ranges, "cpuset"),),
        (Place(b"cpuset.mems.effective", group_files.ranges),),
    ),
    **_limit(
        "memory_max_bytes",
        (Place(b"memory.limit_in_bytes", group_files.limit, "memory"),),
        (Place(b"memory.max", group_files.limit),),
    ),
    **_limit("memory_high_bytes", (), (Place(b"memory.high", group_files.limit, "memory"),)),
    **_limit("memory_low_bytes", (), (Place(b"memory.low", group_files.limit, "memory"),)),
    **_limit("memory_min_bytes", (), (Place(b"memory.min", group_files.limit, "memory"),)),
    **_limit("swap_max_bytes", (), (Place(b"memory.swap.max", group_files.limit, "memory"),)),
    **_limit("kernel_tcp_max_bytes", (Place(b"memory.kmem.tcp.limit_in_bytes", group_files.limit, "memory"),), ()),
    **_limit("pids_max", (Place(b"pids.max", group_files.limit, "pids"),), (Place(b"pids.max", group_files.limit),)),
}
"""A row whose name has a dot is part of the field before it; `JOIN` makes one of the parts."""
JOIN: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "limits": lambda parts: Limits(**parts),
    "memory_events": group_files.join_events,
    "io": group_files.join_io,
}


def sources(hierarchy: Hierarchy) -> tuple[Source, ...]:
    """The files to read in each cgroup of this machine, each once, a fallback after what it stands in for."""
    files: dict[tuple[Path, bytes], list[tuple[str, Parse]]] = {}
    cadences: dict[tuple[Path, bytes], Cadence] = {}
    preferred: dict[tuple[Path, bytes], tuple[Path, bytes]] = {}
    for field, row in TABLE.items():
        before: tuple[Path, bytes] | None = None
        for mount, place in _places(row, hierarchy):
            key = (mount, place.file)
            files.setdefault(key, []).append((field, place.parse))
            cadences[key] = min(cadences.get(key, row.cadence), row.cadence)
            if before is not None:
                preferred[key] = before
            before = key
    order = list(files)
    return tuple(
        Source(
            mount=mount,
            file=file,
            cadence=cadences[mount, file],
            fields=tuple(field for field, _ in fields),
            parsers=tuple(parse for _, parse in fields),
            instead_of=order.index(preferred[mount, file]) if (mount, file) in preferred else None,
            summed=file in SUMMED,
        )
        for (mount, file), fields in files.items()
    )


def joined(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a CgroupSample from values by row: parts put together, and what is None left out."""
    fields: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        field, dot, part = name.partition(".")
        if value is None:
            continue
        if dot:
            parts.setdefault(field, {})[part] = value
        else:
            fields[field] = value
    fields.update((field, JOIN[field](found)) for field, found in parts.items())
    return fields


def _places(row: Row, hierarchy: Hierarchy) -> list[tuple[Path, Place]]:
    mounted = [(hierarchy.v1[place.controller], place) for place in row.v1 if place.controller in hierarchy.v1]
    if mounted or hierarchy.v2 is None:
        return mounted
    return [(hierarchy.v2, place) for place in row.v2 if place.controller not in hierarchy.v1]
