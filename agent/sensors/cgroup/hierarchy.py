"""Finds where cgroup version 1, version 2 or both (hybrid) are mounted on this machine. The mount table decides, never
the kernel version. Every module that opens a cgroup file takes its directory from here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.interfaces import Unavailable

V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "blkio", "net_cls")


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """Mount points of the cgroup file systems. A relative cgroup path names the same cgroup below each of them."""

    v1: dict[str, Path]
    """Mount point of each version 1 controller; empty on a pure version 2 machine."""
    v2: Path | None
    """Mount point of the unified hierarchy; on a hybrid machine it has no controllers, but PSI and cpu.stat."""

    @property
    def mode(self) -> str:
        """Return `v1`, `v2` or `hybrid`."""
        if "cpu" not in self.v1:
            return "v2"
        return "v1" if self.v2 is None else "hybrid"

    @property
    def primary(self) -> Path:
        """Return the cpu controller's mount, whose directories are the cgroups and whose inodes identify them."""
        if "cpu" in self.v1:
            return self.v1["cpu"]
        assert self.v2 is not None
        return self.v2

    def controller(self, name: str) -> Path | None:
        """Return the mount point with the files of a controller: version 1's if it is mounted, else the unified one."""
        if name in self.v1:
            return self.v1[name]
        return self.v2 if self.mode == "v2" else None


def detect_hierarchy(proc: Path = Path("/proc")) -> Hierarchy:
    """Read the mount table of this process. Raises Unavailable if no hierarchy with a cpu controller is mounted."""
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for mount in parse_mountinfo((proc / "self/mountinfo").read_bytes()):
        if mount.kind == "cgroup2" and v2 is None:
            v2 = Path(mount.point)
        elif mount.kind == "cgroup":
            for option in mount.options.split(","):
                if option in V1_CONTROLLERS:
                    v1.setdefault(option, Path(mount.point))
    if "cpu" not in v1 and v2 is None:
        raise Unavailable(
            "no cgroup file system with a cpu controller is mounted",
            "mount one: mount -t cgroup2 none /sys/fs/cgroup",
        )
    return Hierarchy(v1=v1, v2=v2)


class Mount(NamedTuple):
    """One line of mountinfo."""

    device: str
    root: str
    point: str
    kind: str
    source: str
    options: str
    """Options of the file system; of version 1 they name its controllers."""


def parse_mountinfo(text: bytes) -> tuple[Mount, ...]:
    """Parse /proc/self/mountinfo, in order of mounting."""
    mounts = []
    for line in text.split(b"\n"):
        left, dash, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        if dash and len(fields) >= 5 and len(tail) >= 3:
            mounts.append(Mount(*(unescape_mount(os.fsdecode(word)) for word in (*fields[2:5], *tail[:3]))))
    return tuple(mounts)


def unescape_mount(path: str) -> str:
    """Decode a path of mountinfo: blanks and backslashes are three octal digits (fs/proc_namespace.c, mangle)."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def cgroup_exists(mount: Path, cgroup: str) -> bool:
    return os.path.isdir(f"{mount}{cgroup}")  # noqa: PTH112 - thousands a second
