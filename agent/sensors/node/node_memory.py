"""Reads the node's memory: meminfo, vmstat, sysctls, zone watermarks, fragmentation and NUMA nodes. Amounts are bytes
where the kernel gives kB, and pages for zones and free blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.sensors import parsers
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.node.machine import parse_cpus
from agent.sensors.parsers import number
from api.snapshot import MemoryZone, NumaNode

_SYSCTL_NAMES = {
    "vm/watermark_scale_factor": ("vm.watermark_scale_factor",),
    "vm/min_free_kbytes": ("vm.min_free_kbytes",),
    "vm/swappiness": ("vm.swappiness",),
    "kernel/numa_balancing": ("kernel.numa_balancing",),
    # Vectors of three, in pages: their parts by the names of Documentation/networking/ip-sysctl.rst.
    "net/ipv4/tcp_mem": ("net.ipv4.tcp_mem.min", "net.ipv4.tcp_mem.pressure", "net.ipv4.tcp_mem.max"),
    "net/ipv4/udp_mem": ("net.ipv4.udp_mem.min", "net.ipv4.udp_mem.pressure", "net.ipv4.udp_mem.max"),
}
_ZONE_KEYS = {b"free": "free", b"min": "min", b"low": "low", b"high": "high", b"managed": "managed"}
_MAX_ORDERS = 32
ALLOCATION_SUCCEEDS = -1000
"""The fragmentation index of an order with free blocks: no allocation of it fails."""


def read_meminfo(files: ProcSysFiles) -> dict[str, Any]:
    """Read /proc/meminfo, in bytes."""
    meminfo = files.parse("meminfo", parsers.meminfo) or {}
    return {
        "meminfo": meminfo,
        "memory_total_bytes": meminfo.get("MemTotal"),
        "memory_available_bytes": meminfo.get("MemAvailable"),
    }


def read_vmstat(files: ProcSysFiles) -> dict[str, Any]:
    """Read /proc/vmstat: events since boot, and pages by use."""
    return {"vmstat": files.parse("vmstat", parsers.flat) or {}}


def read_vm_settings(files: ProcSysFiles) -> dict[str, Any]:
    """Read the sysctls that the other values depend on; a kernel without one leaves it out."""
    sysctls: dict[str, int] = {}
    for path, names in _SYSCTL_NAMES.items():
        values = [number(word) for word in files.read_optional(files.proc / f"sys/{path}", keep=True).split()]
        if len(values) == len(names):
            sysctls.update((name, value) for name, value in zip(names, values, strict=True) if value is not None)
    return {"sysctl": sysctls}


def read_zones(files: ProcSysFiles) -> dict[str, Any]:
    """Read watermarks from /proc/zoneinfo, and from /proc/buddyinfo the external fragmentation of each node's largest
    zone."""
    zones = files.parse("zoneinfo", parse_zoneinfo) or ()
    free = files.parse("buddyinfo", parse_buddyinfo) or {}
    return {
        "zones": zones,
        "fragmentation": external_fragmentation(zones, free),
        "free_blocks": free_blocks_by_node(free),
    }


def parse_zoneinfo(text: bytes) -> tuple[MemoryZone, ...]:
    """Parse the zones that have pages; incomplete ones are left out."""
    zones: list[MemoryZone] = []
    zone: tuple[int, str] | None = None
    values: dict[str, int] = {}
    for line in text.split(b"\n"):
        if line.startswith(b"Node "):
            zone, values = _zone_of(line.removesuffix(b":")), {}
            continue
        words = line.split()
        if words[:2] == [b"pages", b"free"]:
            words = words[1:]
        if zone is None or len(words) != 2 or words[0] not in _ZONE_KEYS:
            continue
        value = number(words[1])
        if value is not None:
            values.setdefault(_ZONE_KEYS[words[0]], value)
        if len(values) == len(_ZONE_KEYS):
            if values["managed"]:
                zones.append(MemoryZone(node=zone[0], name=zone[1], **values))
            zone = None
    return tuple(zones)


def parse_buddyinfo(text: bytes) -> dict[tuple[int, str], tuple[int, ...]]:
    """Parse /proc/buddyinfo: free blocks by order, of each zone by node and name."""
    blocks = {}
    for line in text.split(b"\n"):
        words = line.split()
        zone = _zone_of(b" ".join(words[:4]))
        counts = [number(word) for word in words[4:]]
        numbers = [count for count in counts if count is not None]
        if zone is not None and 0 < len(numbers) == len(counts) <= _MAX_ORDERS:
            blocks[zone] = tuple(numbers)
    return blocks


def free_blocks_by_node(free: Mapping[tuple[int, str], Sequence[int]]) -> dict[int, dict[int, int]]:
    """Sum the free blocks of a node's zones, by order."""
    by_node: dict[int, dict[int, int]] = {}
    for (node, _), counts in free.items():
        total = by_node.setdefault(node, {})
        for order, count in enumerate(counts):
            total[order] = min(total.get(order, 0) + count, parsers.MAX_COUNTER)
    return by_node


def external_fragmentation(
    present: Sequence[MemoryZone], free: Mapping[tuple[int, str], Sequence[int]]
) -> dict[int, dict[int, int]]:
    """Return the external fragmentation index x 1000 by node and order, of the node's largest zone.

    It is the reason why an allocation would fail: towards 0 lack of memory, towards 1000 fragmentation of free memory;
    -1000 if it would succeed. Debugfs shows the same numbers by zone, but may not be mounted.
    """
    largest: dict[int, MemoryZone] = {}
    for zone in present:
        if zone.node not in largest or zone.managed > largest[zone.node].managed:
            largest[zone.node] = zone
    return {
        node: dict(
            enumerate(fragmentation_index(free[node, zone.name], order) for order in range(len(free[node, zone.name])))
        )
        for node, zone in largest.items()
        if (node, zone.name) in free
    }


def fragmentation_index(free: Sequence[int], order: int) -> int:
    """Return the kernel's index (mm/vmstat.c, __fragmentation_index)."""
    blocks = sum(free)
    if not blocks:
        return 0
    if any(free[order:]):
        return ALLOCATION_SUCCEEDS
    pages = sum(count << of for of, count in enumerate(free))
    return 1000 - (1000 + pages * 1000 // (1 << order)) // blocks


def _zone_of(line: bytes) -> tuple[int, str] | None:
    # `Node 0, zone   Normal`
    words = line.split()
    if len(words) != 4 or words[0] != b"Node" or words[2] != b"zone":
        return None
    node = number(words[1].removesuffix(b","))
    return None if node is None else (node, parsers.name(words[3]))


def read_numa_nodes(files: ProcSysFiles) -> dict[str, Any]:
    """Return every NUMA node by number; none on a kernel without CONFIG_NUMA."""
    directories = dict(files.numbered(files.sys / "devices/system/node", "node"))
    if not directories:
        files.lack("sysfs has no NUMA nodes", "use a kernel with CONFIG_NUMA, and give the agent the host's /sys")
    return {
        "numa": {
            node: _read_numa_node(files, directory, sorted(directories)) for node, directory in directories.items()
        }
    }


def _read_numa_node(files: ProcSysFiles, directory: Path, online: list[int]) -> NumaNode:
    return NumaNode(
        cpus=parse_cpus(files.read_optional(directory / "cpulist").decode("ascii", "replace")),
        distances=parse_numa_distances(files.read_optional(directory / "distance"), online),
        meminfo=parsers.meminfo(files.read_optional(directory / "meminfo")),
        vmstat=parsers.flat(files.read_optional(directory / "vmstat")),
    )


def parse_numa_distances(text: bytes, online: list[int]) -> dict[int, int]:
    """Parse the distance to each online node, in their order; 10 is the node itself."""
    values = [number(word) for word in text.split()]
    if len(values) != len(online):
        return {}
    return {node: value for node, value in zip(online, values, strict=True) if value is not None}
