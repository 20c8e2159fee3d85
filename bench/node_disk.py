"""A small ext4 file system inside a node of a test cluster that can be filled and slowed down."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.node import Node

SIZE_MIB = 32
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_iops_device")
"""Limit of writes a second by device. Version 1 throttles the root cgroup as well, with the kernel's own threads."""


class NodeDisk:
    """An ext4 file system on a loop device, mounted in the mount namespace of the node; its image is in memory."""

    def __init__(self, node: Node, mount: str) -> None:
        """Raises OSError without blkio of version 1, and CalledProcessError."""
        if not THROTTLE.exists():
            raise OSError(f"{THROTTLE}: not there; only cgroup version 1 throttles all writes to a device")
        self._node, self._mount = node, mount
        self._image = Path("/dev/shm") / f"dioptase-{node.name}-{node.address}.img"
        subprocess.run(["truncate", "-s", f"{SIZE_MIB}M", self._image], check=True)
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", self._image], check=True)
        node.run("mount", "-o", "loop", self._image, mount)
        node.run("chmod", "700", mount)
        device = node.run("findmnt", "--noheadings", "--output", "SOURCE", mount).split()[-1]  # of several, the topmost
        self._number = (Path("/sys/class/block") / Path(device).name / "dev").read_text().strip()

    @contextmanager
    def slow(self, writes_per_s: int) -> Iterator[None]:
        """Let only this many writes pass per second, for the time of the block."""
        THROTTLE.write_text(f"{self._number} {writes_per_s}")
        try:
            yield
        finally:
            THROTTLE.write_text(f"{self._number} 0")

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the file system to the last block, for the time of the block."""
        ballast = f"{self._mount}/ballast"
        self._node.run("sh", "-c", f"cat /dev/zero > {ballast} 2>/dev/null; test -s {ballast}")
        try:
            yield
        finally:
            self._node.run("rm", "-f", ballast)

    def close(self) -> None:
        self._node.run("umount", "--lazy", self._mount)
        self._image.unlink()
