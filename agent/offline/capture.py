"""Captures every text that the sensors read on this machine, for `dioptase capture` and for tests.
Which files these are is taken from the sensors themselves. No environment, command line or thread name is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from agent.sensors.cgroup.cgroup_files import CgroupFileSource, plan_sources
from agent.sensors.cgroup.cgroup_tree import CgroupNode, CgroupTree
from agent.sensors.cgroup.hierarchy import Hierarchy, parse_mountinfo
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.node import machine
from agent.sensors.node.machine import read_machine
from agent.sensors.node.node_cpu import CpuFrequencyReader
from agent.sensors.node.node_reader import NODE_SOURCES, NodeSource
from api.snapshot import Cadence

MAX_FILE_BYTES = 1 << 20
"""Maximum size of one text; the rest of a longer one is cut off."""
BOOT_ID_PATH = "sys/kernel/random/boot_id"


class CapturedFile(NamedTuple):
    """One file; `text` is None for a directory whose existence matters."""

    path: Path
    text: bytes | None


def capture_node(proc: Path, sys: Path) -> Iterator[CapturedFile]:
    """Yield the files that the node's sensors read."""
    files = _RecordingFiles(proc, sys)
    try:
        read_machine(files)
        sources: list[tuple[str, NodeSource]] = [
            *NODE_SOURCES[Cadence.TICK].items(),
            ("frequencies", CpuFrequencyReader()),
            *NODE_SOURCES[Cadence.SLOW].items(),
        ]
        for name, source in sources:
            files.begin(name)
            source(files)
        files.parse("self/mountinfo", parse_mountinfo)
        files.read_optional(proc / BOOT_ID_PATH)
        machine.read_topology(sys, lambda path: files.read_optional(path).decode("ascii", "replace").strip())
    finally:
        files.close()
    for path, text in files.noted.items():
        yield CapturedFile(path, None if text is None else text[:MAX_FILE_BYTES])


def capture_cgroups(hierarchy: Hierarchy, limit: int) -> Iterator[CapturedFile]:
    """Yield the files read of each cgroup, at most `limit` of them; cgroups removed meanwhile are left out."""
    plan = plan_sources(hierarchy)
    primary = os.open(hierarchy.primary, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for group in CgroupTree(primary, limit).walk():
            yield CapturedFile(_cgroup_directory(hierarchy.primary, group), None)
            yield from _capture_cgroup(plan, group)
    finally:
        os.close(primary)


def _capture_cgroup(plan: tuple[CgroupFileSource, ...], group: CgroupNode) -> Iterator[CapturedFile]:
    present: set[int] = set()
    for index, source in enumerate(plan):
        if source.fallback_for in present:
            continue
        path = _cgroup_directory(source.mount, group) / os.fsdecode(source.file)
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES)
        except OSError:
            continue
        present.add(index)
        yield CapturedFile(path, text)


def _cgroup_directory(mount: Path, group: CgroupNode) -> Path:
    return mount / os.fsdecode(group.rel)


class _RecordingFiles(ProcSysFiles):
    # Records every file that is read.
    def __init__(self, proc: Path, sys: Path) -> None:
        super().__init__(proc, sys)
        self.noted: dict[Path, bytes | None] = {}

    def text(self, path: Path) -> bytes:
        return self._note(path, super().text(path))

    def short_text(self, path: Path) -> bytes:
        return self._note(path, super().short_text(path))

    def exists(self, path: Path) -> bool:
        there = super().exists(path)
        if there and path.is_dir():
            self.noted.setdefault(path, None)
        return there

    def _note(self, path: Path, text: bytes) -> bytes:
        self.noted[path] = text
        return text
