"""The cgroups of this machine by number, for commands that run without an agent."""

from __future__ import annotations

import os
from pathlib import Path

from agent.hierarchy import detect
from api.ports import Unavailable

ROOT_ID = 1


def cgroup_paths() -> dict[int, str]:
    """Path of every cgroup by its inode; empty where no hierarchy is mounted."""
    try:
        root = detect(Path("/proc")).primary
    except (Unavailable, OSError):
        return {}
    found: dict[int, str] = {}
    for directory, _, _ in os.walk(root):
        try:
            found[Path(directory).stat().st_ino] = directory[len(str(root)) :] or "/"
        except FileNotFoundError:
            continue
    return found
