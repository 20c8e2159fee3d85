"""Cache and memory bandwidth by L3 cache, from the resctrl file system where it is mounted and the CPU monitors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import number
from api.facts import L3Monitor

_ROOT = "fs/resctrl"
_DOMAIN = re.compile(r"mon_L3_([0-9]{1,4})", re.ASCII)
_NO_GROUPS = {"info", "mon_data", "mon_groups"}
MOST_GROUPS = 64
"""Each reading of a counter interrupts a CPU of its domain."""
LACK = "there is no resctrl file system with monitors"
REMEDY = "mount -t resctrl resctrl /sys/fs/resctrl, on a CPU with cache or bandwidth monitoring"


def monitors(files: NodeFiles) -> dict[str, Any]:
    """Counters of the node (group ``), and of control and monitoring groups (`NAME`, `NAME/mon_groups/NAME`)."""
    root = files.sys / _ROOT
    found = []
    for group in _groups(files, root):
        data = root / group / "mon_data"
        for entry in files.names(data):
            match = _DOMAIN.fullmatch(entry)
            monitor = _monitor(files, data / entry, int(match[1]), group) if match else None
            if monitor is not None:
                found.append(monitor)
    if not found:
        files.lack(LACK, REMEDY)
    return {"l3": tuple(found)}


def _groups(files: NodeFiles, root: Path) -> list[str]:
    def parts() -> Iterator[str]:
        controls = ["", *(name for name in files.names(root) if name not in _NO_GROUPS and (root / name).is_dir())]
        yield from controls  # first: together they have all of the node's traffic
        for control in controls:
            below = f"{control}/mon_groups".lstrip("/")
            yield from (f"{below}/{name}" for name in files.names(root / below))

    return [group for _, group in zip(range(MOST_GROUPS), parts(), strict=False)]


def _monitor(files: NodeFiles, directory: Path, domain: int, group: str) -> L3Monitor | None:
    # A counter that the hardware cannot give now reads as `Unavailable` or `Error`.
    total = number(files.look(directory / "mbm_total_bytes"))
    local = number(files.look(directory / "mbm_local_bytes"))
    if total is None or local is None:
        return None
    occupancy = number(files.look(directory / "llc_occupancy"))
    name = parsers.name(group.encode(errors="surrogateescape"))
    return L3Monitor(id=domain, group=name, total_bytes=total, local_bytes=local, occupancy_bytes=occupancy)
