"""The node's disks: /proc/diskstats, and what /sys/block says of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import number, scaled
from api.facts import Disk

SECTOR_BYTES = 512
"""Of /proc/diskstats, whatever the device's own."""
_NS_PER_MS = 1_000_000
_FIELDS = 14
_HARDLY_DISKS = (b"1", b"7")
"""Major numbers of RAM disks and loops: the kernel has a handful ready that nobody uses."""


class Counts(NamedTuple):
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


def disks(files: NodeFiles) -> dict[str, Any]:
    """Every block device and partition, by its name under /sys/block (or /proc/diskstats)."""
    found = {}
    for name, counts in (files.parse("diskstats", disk_lines) or {}).items():
        directory = files.sys / "block" / name.replace("/", "!")
        wbt = number(files.look(directory / "queue/wbt_lat_usec"))
        found[name] = Disk(**counts._asdict(), kind=_kind(files, name, directory), wbt_lat_us=wbt)
    return {"disks": found}


def disk_lines(text: bytes) -> dict[str, Counts]:
    """/proc/diskstats by name. Loops and RAM disks that were never used are left out."""
    found = {}
    for line in text.split(b"\n"):
        words = line.split()
        if len(words) < _FIELDS or not words[0].isdigit() or not words[1].isdigit() or len(words[0] + words[1]) > 14:
            continue
        counts = _counts(words)
        if counts is not None and (words[0] not in _HARDLY_DISKS or counts.reads or counts.writes):
            found[parsers.name(words[2])] = counts
    return found


def _counts(words: list[bytes]) -> Counts | None:
    reads, _, read_sectors, read_ms, writes, _, write_sectors, write_ms, in_flight, busy_ms = words[3:13]
    values = (
        number(reads), scaled(read_sectors, SECTOR_BYTES), scaled(read_ms, _NS_PER_MS),
        number(writes), scaled(write_sectors, SECTOR_BYTES), scaled(write_ms, _NS_PER_MS),
        scaled(busy_ms, _NS_PER_MS), number(in_flight),
    )  # fmt: skip
    known = [value for value in values if value is not None]
    return Counts((words[0] + b":" + words[1]).decode(), *known) if len(known) == len(values) else None


def _kind(files: NodeFiles, name: str, directory: Path) -> str:
    # What has no device of its own - partitions, loops, device-mapper - is of no kind.
    if not files.exists(directory / "device"):
        return ""
    if name.startswith("nvme"):
        return "NVME"
    if name.startswith("vd"):
        return "VIRTIO"
    return {b"1": "HDD", b"0": "SSD"}.get(files.look(directory / "queue/rotational").strip(), "")
