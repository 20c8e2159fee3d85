"""Reads disk counters from /proc/diskstats and free space of local file systems.
File systems that a remote server or a process answers for are never queried: statvfs may hang on them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from agent.sensors import parsers
from agent.sensors.cgroup.hierarchy import unescape_mount
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.parsers import MAX_COUNTER, number, scaled
from api.measurements import Disk, Filesystem

SECTOR_BYTES = 512
"""Of /proc/diskstats, whatever the device's own."""
_NS_PER_MS = 1_000_000
_MIN_DISKSTATS_FIELDS = 14
_RAM_AND_LOOP_MAJORS = (b"1", b"7")
"""Major numbers of RAM disks and loops: the kernel has a handful ready that nobody uses."""


class DiskCounters(NamedTuple):
    """One line of /proc/diskstats."""

    number: str
    reads: int
    read_bytes: int
    read_ns: int
    writes: int
    write_bytes: int
    write_ns: int
    busy_ns: int
    in_flight: int


def read_disks(files: ProcSysFiles) -> dict[str, Any]:
    """Every block device and partition, by its name under /sys/block (or /proc/diskstats)."""
    found = {}
    for name, counts in (files.parse("diskstats", parse_diskstats) or {}).items():
        directory = files.sys / "block" / name.replace("/", "!")
        wbt = number(files.look(directory / "queue/wbt_lat_usec"))
        found[name] = Disk(**counts._asdict(), kind=_disk_kind(files, name, directory), wbt_lat_us=wbt)
    return {"disks": found}


def parse_diskstats(text: bytes) -> dict[str, DiskCounters]:
    """/proc/diskstats by name. Loops and RAM disks that were never used are left out."""
    found = {}
    for line in text.split(b"\n"):
        words = line.split()
        if (
            len(words) < _MIN_DISKSTATS_FIELDS
            or not words[0].isdigit()
            or not words[1].isdigit()
            or len(words[0] + words[1]) > 14
        ):
            continue
        counts = _disk_counters(words)
        if counts is not None and (words[0] not in _RAM_AND_LOOP_MAJORS or counts.reads or counts.writes):
            found[parsers.name(words[2])] = counts
    return found


def _disk_counters(words: list[bytes]) -> DiskCounters | None:
    reads, _, read_sectors, read_ms, writes, _, write_sectors, write_ms, in_flight, busy_ms = words[3:13]
    values = (
        number(reads), scaled(read_sectors, SECTOR_BYTES), scaled(read_ms, _NS_PER_MS),
        number(writes), scaled(write_sectors, SECTOR_BYTES), scaled(write_ms, _NS_PER_MS),
        scaled(busy_ms, _NS_PER_MS), number(in_flight),
    )  # fmt: skip
    known = [value for value in values if value is not None]
    return DiskCounters((words[0] + b":" + words[1]).decode(), *known) if len(known) == len(values) else None


def _disk_kind(files: ProcSysFiles, name: str, directory: Path) -> str:
    # What has no device of its own - partitions, loops, device-mapper - is of no kind.
    if not files.exists(directory / "device"):
        return ""
    if name.startswith("nvme"):
        return "NVME"
    if name.startswith("vd"):
        return "VIRTIO"
    return {b"1": "HDD", b"0": "SSD"}.get(files.look(directory / "queue/rotational").strip(), "")


_REMOTE_TYPES = (
    "nfs",
    "cifs",
    "smb",
    "ceph",
    "9p",
    "afs",
    "lustre",
    "gluster",
    "autofs",
    "fuse",
    "virtiofs",
    "ocfs",
    "gfs",
)
"""How the types of file systems begin that a server, or a process, answers for. Below their mount points nothing is asked."""
MAX_FILESYSTEMS = 200


class Mount(NamedTuple):
    """One line of mountinfo."""

    device: str
    root: str
    point: str
    kind: str
    source: str


def read_filesystems(files: ProcSysFiles) -> dict[str, Any]:
    """Room by mount point, of the agent's mount namespace. One mount point of each device."""
    found = {}
    for mount in local_mounts(files.parse("self/mountinfo", parse_mountinfo) or ()):
        try:
            room = os.statvfs(mount.point)
        except OSError:
            continue  # unmounted meanwhile, or not for us
        sizes = (room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, room.f_files, room.f_ffree)
        if room.f_blocks and max(sizes) <= MAX_COUNTER:
            size, available, inodes, free = sizes
            found[mount.point] = Filesystem(size_bytes=size, available_bytes=available, inodes=inodes, free_inodes=free)
    return {"filesystems": found}


def parse_mountinfo(text: bytes) -> tuple[Mount, ...]:
    """/proc/self/mountinfo, in order of mounting."""
    found = []
    for line in text.split(b"\n"):
        left, dash, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        if dash and len(fields) >= 6 and len(tail) >= 2:
            words = (fields[2], fields[3], fields[4], tail[0], tail[1])
            found.append(Mount(*(unescape_mount(os.fsdecode(word)) for word in words)))
    return tuple(found)


def local_mounts(all_mounts: tuple[Mount, ...]) -> list[Mount]:
    """Where to ask: the whole of a device rather than a part of it, and the first such mount."""
    far = tuple(f"{mount.point.rstrip('/')}/" for mount in all_mounts if mount.kind.startswith(_REMOTE_TYPES))
    chosen: dict[str, Mount] = {}
    for mount in all_mounts:
        on_device = mount.source.startswith("/dev/") and not mount.kind.startswith(_REMOTE_TYPES)
        if not on_device or f"{mount.point}/".startswith(far) or not mount.point.isprintable():
            continue
        known = chosen.get(mount.device)
        if known is None or (known.root != "/" and mount.root == "/"):
            chosen[mount.device] = mount
    return list(chosen.values())[:MAX_FILESYSTEMS]
