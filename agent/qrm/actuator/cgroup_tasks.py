"""Lists processes or threads of a cgroup and of all cgroups below it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from agent.sensors.parsers import task_ids

_CHUNK_BYTES = 1 << 16
_LEAF_LINKS = 2


def list_task_ids(top: str, file: str) -> list[int]:
    """Return the ids in `file` (cgroup.procs, cgroup.threads, tasks) of the directory and of all below it. Directories that
    were removed, and threaded cgroups, whose cgroup.procs cannot be read, have none."""
    ids: list[int] = []
    # Not recursive: cgroups may be nested without a bound (cgroup.max.depth is `max`), and a pod can create its own.
    remaining = [top]
    while remaining:
        directory = remaining.pop()
        with suppress(OSError):
            ids += task_ids(_read(f"{directory}/{file}"))
        with suppress(OSError):
            remaining += _subdirectories(directory)
    return ids


def _subdirectories(directory: str) -> list[str]:
    # Most cgroups have none below; two links mean no subdirectory, and save listing all their files.
    if Path(directory).stat().st_nlink == _LEAF_LINKS:
        return []
    with os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, _CHUNK_BYTES)
        while data and (more := os.read(fd, _CHUNK_BYTES)):
            data += more
        return data
    finally:
        os.close(fd)
