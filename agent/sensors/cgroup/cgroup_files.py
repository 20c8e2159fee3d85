"""Maps each field of a CgroupSample to its cgroup files, on versions 1 and 2, with the parser and the read cadence.
Pure. `FIELD_TABLE` is the only place that names these files. Parsers are total, as in `agent.sensors.parsers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from agent.sensors import parsers
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.snapshot import UNLIMITED, Cadence, CgroupLimits, IoStat
from api.units import NS_PER_S, NS_PER_US

V1_UNLIMITED_BYTES = 0x7FFF_FFFF_FFFF_0000
"""Version 1 writes no limit as the largest number of whole pages (PAGE_COUNTER_MAX), here of up to 64 KiB."""
_NS_PER_TICK = NS_PER_S // os.sysconf("SC_CLK_TCK")
_MAX_NUMA_NODES = 1024
_RANGES = b"0123456789-,"
_IO_STAT = {
    b"rbytes": "read_bytes",
    b"wbytes": "write_bytes",
    b"rios": "reads",
    b"wios": "writes",
    b"dbytes": "discard_bytes",
    b"dios": "discards",
}
_REQUIRED_IO_FIELDS = {"read_bytes", "write_bytes", "reads", "writes"}
"""Kernels before 4.20 have no discards."""
_BLKIO = {
    b"Read": ("read_bytes", "reads"),
    b"Write": ("write_bytes", "writes"),
    b"Discard": ("discard_bytes", "discards"),
}


def user_hz_line(key: bytes) -> Callable[[bytes], int | None]:
    """Return a parser of one line of cpuacct.stat from USER_HZ to nanoseconds."""
    return parsers.keyed(key, _NS_PER_TICK)


def numbers(text: bytes) -> tuple[int, ...] | None:
    """Parse cpuacct.usage_percpu: one number for each possible CPU."""
    words = text.split()
    if not words or not b"".join(words).isdigit() or max(map(len, words)) >= parsers.SAFE_DIGITS:
        return None
    return tuple(map(int, words))


def limit(text: bytes) -> int | None:
    """Parse memory.max, pids.max or memory.limit_in_bytes; UNLIMITED for `max` and version 1's spelling of it."""
    value = UNLIMITED if text.strip() == b"max" else parsers.number(text)
    return UNLIMITED if value is not None and value >= V1_UNLIMITED_BYTES else value


def quota(text: bytes) -> int | None:
    """Parse cpu.cfs_quota_us: microseconds in a period, -1 for no limit."""
    return -1 if text.strip() == b"-1" else parsers.number(text)


def cpu_max_quota(text: bytes) -> int | None:
    """Parse the first word of cpu.max; -1 for `max`."""
    words = text.split()
    if len(words) != 2:
        return None
    return -1 if words[0] == b"max" else parsers.number(words[0])


def cpu_max_period(text: bytes) -> int | None:
    """Parse the second word of cpu.max."""
    words = text.split()
    return parsers.number(words[1]) if len(words) == 2 else None


def flag(text: bytes) -> bool | None:
    """Parse cpu.idle, 1 or 0."""
    return {b"1": True, b"0": False}.get(text.strip())


def id_list(text: bytes) -> str | None:
    """Parse a kernel list of CPUs or memory nodes, `0-3,8`; empty if the cgroup may use none."""
    line = text.strip()
    return None if line.translate(None, _RANGES) else line.decode("ascii")


def numa_stat(text: bytes) -> dict[str, Mapping[int, int]]:
    """Parse memory.numa_stat by kind and node: `total=9 N0=4 N1=5` of version 1, `anon N0=4 N1=5` of version 2."""
    by_kind: dict[str, Mapping[int, int]] = {}
    for line in text.split(b"\n"):
        kind, _, rest = line.partition(b" ")
        by_node = _numa_amounts(rest)
        if by_node and kind:
            by_kind[parsers.name(kind.partition(b"=")[0])] = by_node
    return by_kind


@lru_cache(maxsize=1024)
def _numa_amounts(words: bytes) -> Mapping[int, int]:
    # Cached because most are `N0=0 N1=0`, in every cgroup.
    amounts = {}
    for word in words.split()[:_MAX_NUMA_NODES]:
        node, _, amount = word.partition(b"=")
        number, value = parsers.number(node[1:]), parsers.number(amount)
        if node.startswith(b"N") and number is not None and value is not None:
            amounts[number] = value
    return amounts


def oom_kills(text: bytes) -> dict[str, int] | None:
    """Parse memory.oom_control of version 1, which has the count since Linux 4.13."""
    kills = parsers.keyed(b"oom_kill")(text)
    return None if kills is None else {"oom_kill": kills}


def join_events(parts: Mapping[str, Any]) -> dict[str, int]:
    """Join memory.events and memory.events.local, with `local.` before the latter's names."""
    local = parts.get("local", {})
    return {**parts.get("all", {}), **{f"local.{name}": count for name, count in local.items()}}


def io_stat(text: bytes) -> dict[str, IoStat]:
    """Parse io.stat of version 2 by used device: `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6`."""
    by_device: dict[str, IoStat] = {}
    for line in text.split(b"\n"):
        device, *words = line.split() or (b"",)
        values = {}
        for word in words:
            key, _, amount = word.partition(b"=")
            value = parsers.number(amount)
            if key in _IO_STAT and value is not None:
                values[_IO_STAT[key]] = value
        if _is_device(device) and values.keys() >= _REQUIRED_IO_FIELDS:
            by_device[device.decode()] = IoStat(**values)
    return by_device


def blkio(text: bytes) -> dict[str, dict[bytes, int]]:
    """Parse blkio.throttle.io_service_bytes or io_serviced of version 1 by device and kind: `254:0 Read 4096`."""
    by_device: dict[str, dict[bytes, int]] = {}
    for line in text.split(b"\n"):
        words = line.split()
        if len(words) == 3 and words[1] in _BLKIO and _is_device(words[0]):
            value = parsers.number(words[2])
            if value is not None:
                by_device.setdefault(words[0].decode(), {})[words[1]] = value
    return by_device


def join_io(parts: Mapping[str, Any]) -> dict[str, IoStat]:
    """Return io.stat as it is, or version 1's bytes and operations joined by device."""
    if "all" in parts:
        return dict(parts["all"])
    by_device: dict[str, IoStat] = {}
    for device, amounts in parts.get("bytes", {}).items():
        operations = parts.get("operations", {}).get(device, {})
        values = {_BLKIO[kind][0]: amount for kind, amount in amounts.items()}
        values |= {_BLKIO[kind][1]: count for kind, count in operations.items()}
        if values.keys() >= _REQUIRED_IO_FIELDS:
            by_device[device] = IoStat(**values)
    return by_device


def _is_device(word: bytes) -> bool:
    major, colon, minor = word.partition(b":")
    return bool(colon) and major.isdigit() and minor.isdigit() and len(word) <= 16


Parse = Callable[[bytes], Any]


class CgroupFileSpec(NamedTuple):
    """A file of a cgroup, its parser, and the controller whose version 1 hierarchy has it. A version 2 file with a
    controller is not read if that controller is mounted as version 1."""

    file: bytes
    parse: Parse
    controller: str = ""


class FieldSources(NamedTuple):
    """The files of a field in order of preference: version 1 if its controller is mounted, else the unified tree."""

    v1: tuple[CgroupFileSpec, ...]
    v2: tuple[CgroupFileSpec, ...]
    cadence: Cadence = Cadence.TICK


class CgroupFileSource(NamedTuple):
    """One file to read in each cgroup and the fields it gives."""

    mount: Path
    file: bytes
    cadence: Cadence
    fields: tuple[str, ...]
    parsers: tuple[Parse, ...]
    fallback_for: int | None
    """Index of the preferred source of the same fields: this one is read only if that one gives nothing."""
    is_hierarchical: bool
    """Whether the parent's file includes this one and only grows: while the parent's is unchanged, so is this one."""


UNCACHEABLE_FILES = frozenset((b"tasks",))
"""Files to open for each read: version 1 builds the list of tasks at the first read after open and returns the same
list until it was not read for a second (kernel/cgroup/cgroup-v1.c, cgroup_pidlist_start)."""
CPU_USAGE_FIELD = "cpu_usage_ns"
"""The field that changes when a task of the cgroup, or of one below, has run."""
CPU_USAGE_SPLIT_FILES = frozenset((b"cpuacct.stat", b"cpuacct.usage_percpu"))
"""Files that split that time: read when it has changed."""
IDLE_STABLE_FILES = frozenset(
    (b"cpu.stat", b"pids.current", b"tasks", b"cgroup.threads", b"memory.usage_in_bytes", b"memory.current")
)
"""Files that rarely change while no task of the cgroup runs (reclaim and task migration may change them): read after a
task ran, and along with the slow files. Pressure files are not among them: they count tasks that wait and cannot run."""
HIERARCHICAL_FILES = frozenset((b"cpuacct.usage", b"cpu.pressure", b"memory.pressure", b"io.pressure"))
"""Not memory.current or pids.current, in which one cgroup's growth hides another's decline, nor cpu.stat of version 2,
which counts periods of the cgroup's own quota."""
_US = NS_PER_US


Files = CgroupFileSpec | tuple[CgroupFileSpec, ...]


def _rows(cadence: Cadence, *rows: tuple[str, Files, Files], prefix: str = "") -> dict[str, FieldSources]:
    """Return rows of the table. A row has the field, its file or files of version 1, and those of version 2."""
    return {f"{prefix}{field}": FieldSources(_in_tuple(v1), _in_tuple(v2), cadence) for field, v1, v2 in rows}


def _in_tuple(files: Files) -> tuple[CgroupFileSpec, ...]:
    return (files,) if isinstance(files, CgroupFileSpec) else files


_file, _keyed = CgroupFileSpec, parsers.keyed
FIELD_TABLE: dict[str, FieldSources] = {
    **_rows(
        Cadence.TICK,
        ("cpu_usage_ns", _file(b"cpuacct.usage", parsers.number, "cpuacct"), _file(b"cpu.stat", _keyed(b"usage_usec", _US))),
        # cpuacct.usage_user counts whole ticks; cpuacct.stat and version 2 split the exact usage in proportion to the ticks.
        ("cpu_user_ns", _file(b"cpuacct.stat", user_hz_line(b"user"), "cpuacct"),
         _file(b"cpu.stat", _keyed(b"user_usec", _US))),
        ("cpu_system_ns", _file(b"cpuacct.stat", user_hz_line(b"system"), "cpuacct"),
         _file(b"cpu.stat", _keyed(b"system_usec", _US))),
        ("per_cpu_ns", _file(b"cpuacct.usage_percpu", numbers, "cpuacct"), ()),
        ("periods", _file(b"cpu.stat", _keyed(b"nr_periods"), "cpu"), _file(b"cpu.stat", _keyed(b"nr_periods"))),
        ("throttled_periods", _file(b"cpu.stat", _keyed(b"nr_throttled"), "cpu"), _file(b"cpu.stat", _keyed(b"nr_throttled"))),
        ("throttled_ns", _file(b"cpu.stat", _keyed(b"throttled_time"), "cpu"),
         _file(b"cpu.stat", _keyed(b"throttled_usec", _US))),
        # pids.current includes the cgroups below; the lists of tasks, read without the pids controller, do not.
        ("threads", (_file(b"pids.current", parsers.number, "pids"), _file(b"tasks", parsers.task_count, "cpu")),
         (_file(b"pids.current", parsers.number), _file(b"cgroup.threads", parsers.task_count))),
        ("memory_bytes", _file(b"memory.usage_in_bytes", parsers.number, "memory"), _file(b"memory.current", parsers.number)),
        # Version 1 has no PSI: on a hybrid machine, the unified cgroup at the same path has it, if it exists.
        ("cpu_pressure", (), _file(b"cpu.pressure", parsers.pressure)),
        ("memory_pressure", (), _file(b"memory.pressure", parsers.pressure)),
        ("io_pressure", (), _file(b"io.pressure", parsers.pressure)),
    ),
    **_rows(
        Cadence.SLOW,
        # Reading memory.stat or memory.numa_stat flushes the per-CPU counters (mm/memcontrol.c, mem_cgroup_flush_stats).
        ("memory_stat", _file(b"memory.stat", parsers.flat, "memory"), _file(b"memory.stat", parsers.flat)),
        ("swap_bytes", _file(b"memory.stat", _keyed(b"total_swap"), "memory"), _file(b"memory.swap.current", parsers.number)),
        ("kernel_memory_bytes", _file(b"memory.kmem.usage_in_bytes", parsers.number, "memory"),
         _file(b"memory.stat", _keyed(b"kernel"))),
        # Version 2 does not separate TCP from other sockets: see `sock` in memory_stat there.
        ("kernel_tcp_bytes", _file(b"memory.kmem.tcp.usage_in_bytes", parsers.number, "memory"), ()),
        ("numa_stat", _file(b"memory.numa_stat", numa_stat, "memory"), _file(b"memory.numa_stat", numa_stat)),
        ("memory_events.all", _file(b"memory.oom_control", oom_kills, "memory"), _file(b"memory.events", parsers.flat)),
        ("memory_events.local", (), _file(b"memory.events.local", parsers.flat, "memory")),
        # The recursive files include the cgroups below, as version 2 and all other totals do; older kernels lack them.
        ("io.bytes", (_file(b"blkio.throttle.io_service_bytes_recursive", blkio, "blkio"),
                      _file(b"blkio.throttle.io_service_bytes", blkio, "blkio")), ()),
        ("io.operations", (_file(b"blkio.throttle.io_serviced_recursive", blkio, "blkio"),
                           _file(b"blkio.throttle.io_serviced", blkio, "blkio")), ()),
        ("io.all", (), _file(b"io.stat", io_stat, "blkio")),
    ),
    **_rows(
        Cadence.RARE,
        ("quota_us", _file(b"cpu.cfs_quota_us", quota, "cpu"), _file(b"cpu.max", cpu_max_quota)),
        ("period_us", _file(b"cpu.cfs_period_us", parsers.number, "cpu"), _file(b"cpu.max", cpu_max_period)),
        ("burst_us", _file(b"cpu.cfs_burst_us", parsers.number, "cpu"), _file(b"cpu.max.burst", parsers.number)),
        ("weight", _file(b"cpu.shares", parsers.number, "cpu"), _file(b"cpu.weight", parsers.number)),
        ("idle", _file(b"cpu.idle", flag, "cpu"), _file(b"cpu.idle", flag)),
        ("cpus", _file(b"cpuset.effective_cpus", id_list, "cpuset"), _file(b"cpuset.cpus.effective", id_list)),
        ("mems", _file(b"cpuset.effective_mems", id_list, "cpuset"), _file(b"cpuset.mems.effective", id_list)),
        ("memory_max_bytes", _file(b"memory.limit_in_bytes", limit, "memory"), _file(b"memory.max", limit)),
        ("memory_high_bytes", (), _file(b"memory.high", limit, "memory")),
        ("memory_low_bytes", (), _file(b"memory.low", limit, "memory")),
        ("memory_min_bytes", (), _file(b"memory.min", limit, "memory")),
        ("swap_max_bytes", (), _file(b"memory.swap.max", limit, "memory")),
        ("kernel_tcp_max_bytes", _file(b"memory.kmem.tcp.limit_in_bytes", limit, "memory"), ()),
        ("pids_max", _file(b"pids.max", limit, "pids"), _file(b"pids.max", limit)),
        prefix="limits.",
    ),
}  # fmt: skip
"""A row whose name has a dot is part of the field before the dot; `PART_JOINERS` joins the parts."""
PART_JOINERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "limits": lambda parts: CgroupLimits(**parts),
    "memory_events": join_events,
    "io": join_io,
}


def plan_sources(hierarchy: Hierarchy) -> tuple[CgroupFileSource, ...]:
    """Return the files to read in each cgroup of this machine, each once, a fallback after its preferred file."""
    files: dict[tuple[Path, bytes], list[tuple[str, Parse]]] = {}
    cadences: dict[tuple[Path, bytes], Cadence] = {}
    preferred: dict[tuple[Path, bytes], tuple[Path, bytes]] = {}
    for field, row in FIELD_TABLE.items():
        before: tuple[Path, bytes] | None = None
        for mount, place in _available_files(row, hierarchy):
            key = (mount, place.file)
            files.setdefault(key, []).append((field, place.parse))
            cadences[key] = min(cadences.get(key, row.cadence), row.cadence)
            if before is not None:
                preferred[key] = before
            before = key
    order = list(files)
    return tuple(
        CgroupFileSource(
            mount=mount,
            file=file,
            cadence=cadences[mount, file],
            fields=tuple(field for field, _ in fields),
            parsers=tuple(parse for _, parse in fields),
            fallback_for=order.index(preferred[mount, file]) if (mount, file) in preferred else None,
            is_hierarchical=file in HIERARCHICAL_FILES,
        )
        for (mount, file), fields in files.items()
    )


def join_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a CgroupSample from values by row: parts joined, None left out."""
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
    fields.update((field, PART_JOINERS[field](values_by_part)) for field, values_by_part in parts.items())
    return fields


def _available_files(row: FieldSources, hierarchy: Hierarchy) -> list[tuple[Path, CgroupFileSpec]]:
    mounted = [(hierarchy.v1[place.controller], place) for place in row.v1 if place.controller in hierarchy.v1]
    if mounted or hierarchy.v2 is None:
        return mounted
    return [(hierarchy.v2, place) for place in row.v2 if place.controller not in hierarchy.v1]
