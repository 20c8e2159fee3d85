"""Reads disk counters from /proc/diskstats and free space of local file systems. File systems that a remote server or a
process answers for are never queried: statvfs may hang on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from agent.sensors import parsers
from agent.sensors.cgroup.hierarchy import Mount, parse_mountinfo
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.parsers import MAX_COUNTER, number, scaled
from api.snapshot import Disk, Filesystem
from api.units import NS_PER_MS

SECTOR_BYTES = 512
"""Unit of /proc/diskstats, whatever the device's own sector (Documentation/admin-guide/iostats.rst)."""
_MIN_DISKSTATS_FIELDS = 14
_RAM_AND_LOOP_MAJORS = (b"1", b"7")
"""Major numbers of RAM disks and loop devices, of which the kernel creates some that are never used."""


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
    """Return every block device and partition, by its name under /sys/block (or /proc/diskstats)."""
    disks = {}
    for name, counts in (files.parse("diskstats", parse_diskstats) or {}).items():
        directory = files.sys / "block" / name.replace("/", "!")
        wbt = number(files.read_optional(directory / "queue/wbt_lat_usec"))
        disks[name] = Disk(**counts._asdict(), kind=_disk_kind(files, name, directory), wbt_lat_us=wbt)
    return {"disks": disks}


def parse_diskstats(text: bytes) -> dict[str, DiskCounters]:
    """Parse /proc/diskstats by name, without loop devices and RAM disks that were never used."""
    by_name = {}
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
            by_name[parsers.name(words[2])] = counts
    return by_name


def _disk_counters(words: list[bytes]) -> DiskCounters | None:
    reads, _, read_sectors, read_ms, writes, _, write_sectors, write_ms, in_flight, busy_ms = words[3:13]
    values = (
        number(reads), scaled(read_sectors, SECTOR_BYTES), scaled(read_ms, NS_PER_MS),
        number(writes), scaled(write_sectors, SECTOR_BYTES), scaled(write_ms, NS_PER_MS),
        scaled(busy_ms, NS_PER_MS), number(in_flight),
    )  # fmt: skip
    numbers = [value for value in values if value is not None]
    return DiskCounters((words[0] + b":" + words[1]).decode(), *numbers) if len(numbers) == len(values) else None


def _disk_kind(files: ProcSysFiles, name: str, directory: Path) -> str:
    # Partitions, loop devices and device-mapper have no device of their own and no kind.
    if not files.exists(directory / "device"):
        return ""
    if name.startswith("nvme"):
        return "NVME"
    if name.startswith("vd"):
        return "VIRTIO"
    return {b"1": "HDD", b"0": "SSD"}.get(files.read_optional(directory / "queue/rotational").strip(), "")


_REMOTE_TYPES = (
    "nfs", "cifs", "smb", "ceph", "9p", "afs", "lustre", "gluster", "autofs", "fuse", "virtiofs", "ocfs", "gfs",
)  # fmt: skip
"""Prefixes of file system types that a server or a process answers for; nothing below their mount points is queried."""
MAX_FILESYSTEMS = 200


def read_filesystems(files: ProcSysFiles) -> dict[str, Any]:
    """Return free space by mount point, in the agent's mount namespace; one mount point per device."""
    filesystems = {}
    for mount in local_mounts(files.parse("self/mountinfo", parse_mountinfo) or ()):
        try:
            space = os.statvfs(mount.point)
        except OSError:
            continue  # unmounted meanwhile, or access denied
        sizes = (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize, space.f_files, space.f_ffree)
        if space.f_blocks and max(sizes) <= MAX_COUNTER:
            size, available, inodes, free = sizes
            filesystems[mount.point] = Filesystem(
                size_bytes=size, available_bytes=available, inodes=inodes, free_inodes=free
            )
    return {"filesystems": filesystems}


def local_mounts(all_mounts: tuple[Mount, ...]) -> list[Mount]:
    """Choose the mount point to query per device: the root of the device rather than a part of it, and the first such
    mount."""
    remote_points = tuple(f"{mount.point.rstrip('/')}/" for mount in all_mounts if mount.kind.startswith(_REMOTE_TYPES))
    chosen: dict[str, Mount] = {}
    for mount in all_mounts:
        on_device = mount.source.startswith("/dev/") and not mount.kind.startswith(_REMOTE_TYPES)
        if not on_device or f"{mount.point}/".startswith(remote_points) or not mount.point.isprintable():
            continue
        previous = chosen.get(mount.device)
        if previous is None or (previous.root != "/" and mount.root == "/"):
            chosen[mount.device] = mount
    return list(chosen.values())[:MAX_FILESYSTEMS]
