"""The node's NUMA nodes, from sysfs: which CPUs, how far from each other, what memory they have and what reclaim does there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import number
from api.cpus import parse_cpu_list
from api.facts import NumaNode


def nodes(files: NodeFiles) -> dict[str, Any]:
    """Every NUMA node by number. None on a kernel without CONFIG_NUMA, which has no such directory."""
    directories = dict(files.numbered(files.sys / "devices/system/node", "node"))
    if not directories:
        files.lack("sysfs has no NUMA nodes", "use a kernel with CONFIG_NUMA, and give the agent the host's /sys")
    return {"numa": {node: _node(files, directory, sorted(directories)) for node, directory in directories.items()}}


def _node(files: NodeFiles, directory: Path, online: list[int]) -> NumaNode:
    return NumaNode(
        cpus=cpus(files.look(directory / "cpulist")),
        distances=distances(files.look(directory / "distance"), online),
        meminfo=parsers.meminfo(files.look(directory / "meminfo")),
        vmstat=parsers.flat(files.look(directory / "vmstat")),
    )


def cpus(text: bytes) -> tuple[int, ...]:
    """A list of CPUs; empty for a node of memory alone, and for what is no list."""
    try:
        return parse_cpu_list(text.decode("ascii", "replace"))
    except ValueError:
        return ()


def distances(text: bytes, online: list[int]) -> dict[int, int]:
    """The distance of each online node, in their order: 10 is the node itself."""
    values = [number(word) for word in text.split()]
    if len(values) != len(online):
        return {}
    return {node: value for node, value in zip(online, values, strict=True) if value is not None}
