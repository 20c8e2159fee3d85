"""Finds where cgroup version 1, version 2 or both (hybrid) are mounted on this machine. The mount table decides, never
the kernel version. Every module that opens a cgroup file takes its directory from here."""

from __future__ import annotations

import os
from pathlib import Path

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
    for line in (proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(tail) < 3:
            continue
        mount_point = Path(unescape_mount(fields[4]))
        if tail[0] == "cgroup2" and v2 is None:
            v2 = mount_point
        elif tail[0] == "cgroup":
            for option in tail[2].split(","):
                if option in V1_CONTROLLERS:
                    v1.setdefault(option, mount_point)
    if "cpu" not in v1 and v2 is None:
        raise Unavailable(
            "no cgroup file system with a cpu controller is mounted",
            "mount one: mount -t cgroup2 none /sys/fs/cgroup",
        )
    return Hierarchy(v1=v1, v2=v2)


def unescape_mount(path: str) -> str:
    """Decode a path of mountinfo: blanks and backslashes are three octal digits (fs/proc_namespace.c, mangle)."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def cgroup_exists(mount: Path, cgroup: str) -> bool:
    return os.path.isdir(f"{mount}{cgroup}")  # noqa: PTH112 - thousands a second
