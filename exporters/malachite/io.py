"""`system/io`: the disks of /sys/block, without their partitions. All counters are since boot."""

from __future__ import annotations

import re

from api.facts import Disk
from api.samples import Snapshot
from exporters.malachite.past import History, node_read_at_ns
from exporters.malachite.wire import NS_PER_MS, Wire, i64, scaled, seconds, u64

_PARTITION = re.compile(r"(?:(?P<numbered>.*\d)p|(?P<lettered>(?:sd|vd|xvd|hd)[a-z]+))\d+$")
"""vda1 is a part of vda, nvme0n1p2 of nvme0n1: a name that ends in a digit takes a p before the number. sdp1 is of sdp."""


class DiskIo(Wire, frozen=True):
    """One disk: operations, and milliseconds in which it had some to do."""

    primary_device_id: int
    secondary_device_id: int
    device_name: str
    io_read: int | None = None
    io_write: int | None = None
    io_busy: int | None = None
    disk_type: str | None = None
    wbt_lat_usec: int | None = None


class Io(Wire, frozen=True):
    """The document."""

    disk_io: tuple[DiskIo, ...]
    update_time: int | None = None


def io(now: Snapshot, _history: History) -> Io:
    """Every disk by the name that it has below /sys/block."""
    disks = now.node.disks
    shown = (_disk(name, disk) for name, disk in sorted(disks.items()) if not is_partition(name, disks.keys()))
    return Io(
        disk_io=tuple(disk for disk in shown if disk is not None),
        update_time=seconds(node_read_at_ns(now)),
    )


def is_partition(name: str, names: object) -> bool:
    """Whether the disk that this name is a part of is there too."""
    found = _PARTITION.fullmatch(name)
    return found is not None and hasattr(names, "__contains__") and (found["numbered"] or found["lettered"]) in names


def _disk(name: str, disk: Disk) -> DiskIo | None:
    major, _, minor = disk.number.partition(":")
    if not (major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit() and len(disk.number) < 20):
        return None
    return DiskIo(
        primary_device_id=int(major),
        secondary_device_id=int(minor),
        device_name=name,
        io_read=u64(disk.reads),
        io_write=u64(disk.writes),
        io_busy=scaled(disk.busy_ns, NS_PER_MS),
        disk_type=disk.kind or None,
        wbt_lat_usec=i64(disk.wbt_lat_us),
    )
