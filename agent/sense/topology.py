"""Online CPUs and where each sits, from sysfs.

What sysfs leaves out is one socket, one NUMA node, one third-level cache for each of them, a core per CPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from agent.sense.node_files import LONGEST_ATTRIBUTE_BYTES
from agent.smallfile import read_small
from api.cpus import Cpu, Topology, parse_cpu_list

_CPUS, _NODES = "devices/system/cpu", "devices/system/node"
_NUMBERED = re.compile(r"(?:cpu|node)([0-9]{1,4})", re.ASCII)


def online_text(sys: Path) -> str:
    """The kernel's list of online CPUs: cheap to read, and different whenever the topology is. Empty where it is missing."""
    return text(sys / _CPUS / "online")


def text(path: Path) -> str:
    """What a file of sysfs says; empty where there is none, and where it is longer than any of them."""
    try:
        said = read_small(path, LONGEST_ATTRIBUTE_BYTES)
    except OSError:
        return ""
    return said.decode("ascii", "replace").strip() if len(said) <= LONGEST_ATTRIBUTE_BYTES else ""


def read_topology(sys: Path, text: Callable[[Path], str] = text) -> Topology:
    """CPUs that are online now. Never empty: a node without sysfs still has the CPUs that Python counts."""
    numa = _numa_of_cpus(sys, text)
    return Topology(
        cpus=tuple(
            Cpu(
                id=cpu,
                core=_number(text(sys / _CPUS / f"cpu{cpu}/topology/core_id"), cpu),
                socket=_number(text(sys / _CPUS / f"cpu{cpu}/topology/physical_package_id"), 0),
                numa=numa.get(cpu, 0),
                l3=_number(text(sys / _CPUS / f"cpu{cpu}/cache/index3/id"), 0),
            )
            for cpu in _online(sys, text)
        )
    )


def _online(sys: Path, text: Callable[[Path], str]) -> tuple[int, ...]:
    listed = _cpu_list(text(sys / _CPUS / "online"))
    if listed:
        return listed
    present = sorted(_numbered(sys / _CPUS, "cpu"))
    # Without the list each CPU says for itself; CPU 0 usually cannot go offline and then has no such file.
    awake = tuple(cpu for cpu in present if text(sys / _CPUS / f"cpu{cpu}/online") != "0")
    return awake or tuple(range(os.cpu_count() or 1))


def _numa_of_cpus(sys: Path, text: Callable[[Path], str]) -> dict[int, int]:
    return {
        cpu: node
        for node in sorted(_numbered(sys / _NODES, "node"))
        for cpu in _cpu_list(text(sys / _NODES / f"node{node}/cpulist"))
    }


def _numbered(directory: Path, prefix: str) -> list[int]:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return [int(match[1]) for name in names if name.startswith(prefix) and (match := _NUMBERED.fullmatch(name))]


def _cpu_list(listed: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(listed)
    except ValueError:
        return ()


def _number(word: str, default: int) -> int:
    # -1 is what kernels say of a package or core that the firmware does not describe.
    return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else default
