"""Keeps the tree of cgroup directories of one hierarchy between reads, by path and inode. A walk stats every directory
and lists only those whose link count changed. At most `limit` cgroups are tracked; preferred ones, those of pods,
always are."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from api.text import cgroup_name_to_text

MAX_RELISTS = 3
"""How often one walk looks for successors of cgroups that vanished during it; later ones wait for the next walk."""
MIN_COUNTED_LINKS = 2
"""A directory has 2 links and one per child (fs/kernfs/dir.c); file systems that do not count them report 1 and are
listed every time."""


class CgroupNode:
    """One cgroup. `rel` is its path below the mount in the kernel's bytes, `path` its path as text."""

    __slots__ = ("children", "id", "left_out", "links", "parent", "path", "rel")

    def __init__(self, rel: bytes, parent: CgroupNode | None) -> None:
        self.rel, self.parent, self.path = rel, parent, f"/{cgroup_name_to_text(rel)}"
        self.id = 0
        self.links = -1
        self.children: dict[bytes, CgroupNode] = {}
        self.left_out = 0

    def below(self, name: bytes) -> bytes:
        """Return the path below the mount of a name inside this cgroup."""
        return self.rel + b"/" + name if self.rel else name


class CgroupTree:
    """Cgroups below an open directory: at most `limit`, or as many as are preferred."""

    def __init__(self, mount_fd: int, limit: int) -> None:
        self.skipped = 0
        """Cgroups left out because of the limit: the deepest, among siblings the youngest, never preferred ones. Those
        below them are not counted."""
        self.denied: list[str] = []
        """Directories that the latest walk was not allowed to read."""
        self._mount_fd, self._limit = mount_fd, limit
        self._root = CgroupNode(b"", None)
        self._count = 1
        self._stale: list[CgroupNode] = []
        self._preferred: frozenset[bytes] = frozenset()
        self._tracked_preferred = 0

    def prefer(self, rels: Collection[bytes]) -> None:
        """Reserve room for these cgroups and their ancestors, by path below the mount: the limit removes others first."""
        self._preferred = frozenset(above for rel in rels for above in _path_and_ancestors(rel))
        self._tracked_preferred = sum(group.rel in self._preferred for group in self._below(self._root))
        if self._room() < 0:
            # Too many others are tracked already: list everything again, preferred ones first.
            self._forget_below(self._root)
            self._root.links = -1

    def walk(self) -> Iterator[CgroupNode]:
        """Yield every cgroup, parents first. The consumer passes a cgroup that vanished to `drop` before it continues."""
        self.denied.clear()
        yield from self._levels([self._root])
        for _ in range(MAX_RELISTS):
            if not self._stale:
                break
            stale, self._stale = dict.fromkeys(self._stale), []
            yield from self._levels([child for group in stale for child in self._list(group)])

    def inode(self, group: CgroupNode) -> int | None:
        """Return the inode at the cgroup's path; None without one."""
        status = self._stat(group)
        return status.st_ino if status is not None else None

    def drop(self, group: CgroupNode) -> None:
        """Forget a cgroup that vanished or was replaced; this walk looks for its successor."""
        self._forget_below(group)
        if group.parent is not None and group.parent.children.pop(_base_name(group), None) is not None:
            self._admit(group, -1)
            self._stale.append(group.parent)

    def _levels(self, level: list[CgroupNode]) -> Iterator[CgroupNode]:
        # Level by level, so that the limit removes the deepest.
        while level:
            below: list[CgroupNode] = []
            for group in level:
                if self._refresh(group):
                    yield group
                    below.extend(group.children.values())
            level = below

    def _refresh(self, group: CgroupNode) -> bool:
        status = self._stat(group)
        if status is None:
            return False
        if status.st_ino != group.id:
            self._forget_below(group)
            group.id, group.links = status.st_ino, -1
        room_again = group.left_out and self._room() > 0
        if status.st_nlink != group.links or status.st_nlink < MIN_COUNTED_LINKS or room_again:
            group.links = status.st_nlink
            self._list(group)
        return True

    def _stat(self, group: CgroupNode) -> os.stat_result | None:
        try:
            return os.stat(group.rel or b".", dir_fd=self._mount_fd, follow_symlinks=False)
        except PermissionError as error:
            self.denied.append(f"{group.path}: {error.strerror}")
        except OSError:
            self.drop(group)
        return None

    def _list(self, group: CgroupNode) -> list[CgroupNode]:
        # Bring the children up to date and return the new ones.
        try:
            present = _subdirectories(self._mount_fd, group.rel or b".")
        except PermissionError as error:
            self.denied.append(f"{group.path}: {error.strerror}")
            group.links = -1  # try again, and report it, at every walk
            return []
        except OSError:
            return []  # removed, or being removed: the next stat shows it
        for name in [name for name in group.children if name not in present]:
            removed = group.children.pop(name)
            self._forget_below(removed)
            self._admit(removed, -1)
        new = sorted((inode, name) for name, inode in present.items() if name not in group.children)
        preferred = [(inode, name) for inode, name in new if group.below(name) in self._preferred]
        others = [pair for pair in new if group.below(pair[1]) not in self._preferred] if preferred else new
        room = max(self._room(), 0)
        self._leave_out(group, max(len(others) - room, 0))
        fresh = {name: CgroupNode(group.below(name), group) for _, name in (*preferred, *others[:room])}
        for child in fresh.values():
            self._admit(child, 1)
        group.children.update(fresh)
        return list(fresh.values())

    def _room(self) -> int:
        # Number of cgroups that may be added without being preferred.
        return self._limit - self._count - (len(self._preferred) - self._tracked_preferred)

    def _admit(self, group: CgroupNode, by: int) -> None:
        self._count += by
        if group.rel in self._preferred:
            self._tracked_preferred += by

    def _below(self, group: CgroupNode) -> Iterator[CgroupNode]:
        for child in group.children.values():
            yield child
            yield from self._below(child)

    def _forget_below(self, group: CgroupNode) -> None:
        self._leave_out(group, 0)
        for child in group.children.values():
            self._forget_below(child)
            self._admit(child, -1)
        group.children.clear()

    def _leave_out(self, group: CgroupNode, count: int) -> None:
        self.skipped += count - group.left_out
        group.left_out = count


def _path_and_ancestors(rel: bytes) -> Iterator[bytes]:
    # Without the root.
    while rel:
        yield rel
        rel = rel.rpartition(b"/")[0]


def _base_name(group: CgroupNode) -> bytes:
    return group.rel.rpartition(b"/")[2]


def _subdirectories(mount_fd: int, rel: bytes) -> dict[bytes, int]:
    fd = os.open(rel, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=mount_fd)
    try:
        with os.scandir(fd) as entries:
            return {os.fsencode(entry.name): entry.inode() for entry in entries if entry.is_dir(follow_symlinks=False)}
    finally:
        os.close(fd)
