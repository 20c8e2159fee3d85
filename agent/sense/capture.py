"""Every text that the sources read, as it is now: what `dioptase capture` writes, and tests read a Snapshot from.

The sources themselves say which files those are. Nothing is looked at that they do not look at: no environment, no
command line, no thread's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from agent.hierarchy import Hierarchy
from agent.sense import filesystems, topology
from agent.sense.cadence import Cadence
from agent.sense.fields import Source, sources
from agent.sense.machine import read_machine
from agent.sense.node import SOURCES, NodeSource
from agent.sense.node_files import NodeFiles
from agent.sense.proc_cpu import Frequencies
from agent.sense.tree import CgroupTree, Group

LONGEST_BYTES = 1 << 20
"""Of one text: the rest of a longer one is cut off."""
BOOT_ID = "sys/kernel/random/boot_id"


class Text(NamedTuple):
    """One file; `text` is None for a directory that matters by being there."""

    path: Path
    text: bytes | None


def node(proc: Path, sys: Path) -> Iterator[Text]:
    """What the machine's own sources read."""
    files = _Noting(proc, sys)
    try:
        read_machine(files)
        every: list[tuple[str, NodeSource]] = [
            *SOURCES[Cadence.TICK].items(),
            ("frequencies", Frequencies()),
            *SOURCES[Cadence.SLOW].items(),
        ]
        for name, source in every:
            files.begin(name)
            source(files)
        files.parse("self/mountinfo", filesystems.mounts)
        files.look(proc / BOOT_ID)
        topology.read_topology(sys, lambda path: files.look(path).decode("ascii", "replace").strip())
    finally:
        files.close()
    for path, text in files.noted.items():
        yield Text(path, None if text is None else text[:LONGEST_BYTES])


def cgroups(hierarchy: Hierarchy, limit: int) -> Iterator[Text]:
    """What is read of each cgroup, at most `limit` of them; those that go meanwhile are left out."""
    plan = sources(hierarchy)
    primary = os.open(hierarchy.primary, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for group in CgroupTree(primary, limit).walk():
            yield Text(_below(hierarchy.primary, group), None)
            yield from _group(plan, group)
    finally:
        os.close(primary)


def _group(plan: tuple[Source, ...], group: Group) -> Iterator[Text]:
    there: set[int] = set()
    for index, source in enumerate(plan):
        if source.instead_of in there:
            continue
        path = _below(source.mount, group) / os.fsdecode(source.file)
        try:
            with path.open("rb") as file:
                text = file.read(LONGEST_BYTES)
        except OSError:
            continue
        there.add(index)
        yield Text(path, text)


def _below(mount: Path, group: Group) -> Path:
    return mount / os.fsdecode(group.rel)


class _Noting(NodeFiles):
    # Files of a node that also notes what is read.
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
