"""Room on the node's file systems: those on a device of this machine. Asking one on another machine may hang for ever."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from agent.hierarchy import unescape
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import LARGEST
from api.facts import Filesystem

_MAY_HANG = (
    "nfs",
    "cifs",
    "smb",
    "ceph",
    "9p",
    "afs",
    "lustre",
    "gluster",
    "autofs",
    "fuse",
    "virtiofs",
    "ocfs",
    "gfs",
)
"""How the types of file systems begin that a server, or a process, answers for. Below their mount points nothing is asked."""
MOST = 200


class Mount(NamedTuple):
    """One line of mountinfo."""

    device: str
    root: str
    point: str
    kind: str
    source: str


def filesystems(files: NodeFiles) -> dict[str, Any]:
    """Room by mount point, of the agent's mount namespace. One mount point of each device."""
    found = {}
    for mount in local(files.parse("self/mountinfo", mounts) or ()):
        try:
            room = os.statvfs(mount.point)
        except OSError:
            continue  # unmounted meanwhile, or not for us
        sizes = (room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, room.f_files, room.f_ffree)
        if room.f_blocks and max(sizes) <= LARGEST:
            size, available, inodes, free = sizes
            found[mount.point] = Filesystem(size_bytes=size, available_bytes=available, inodes=inodes, free_inodes=free)
    return {"filesystems": found}


def mounts(text: bytes) -> tuple[Mount, ...]:
    """/proc/self/mountinfo, in order of mounting."""
    found = []
    for line in text.split(b"\n"):
        left, dash, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        if dash and len(fields) >= 6 and len(tail) >= 2:
            words = (fields[2], fields[3], fields[4], tail[0], tail[1])
            found.append(Mount(*(unescape(os.fsdecode(word)) for word in words)))
    return tuple(found)


def local(all_mounts: tuple[Mount, ...]) -> list[Mount]:
    """Where to ask: the whole of a device rather than a part of it, and the first such mount."""
    far = tuple(f"{mount.point.rstrip('/')}/" for mount in all_mounts if mount.kind.startswith(_MAY_HANG))
    chosen: dict[str, Mount] = {}
    for mount in all_mounts:
        on_device = mount.source.startswith("/dev/") and not mount.kind.startswith(_MAY_HANG)
        if not on_device or f"{mount.point}/".startswith(far) or not mount.point.isprintable():
            continue
        known = chosen.get(mount.device)
        if known is None or (known.root != "/" and mount.root == "/"):
            chosen[mount.device] = mount
    return list(chosen.values())[:MOST]
