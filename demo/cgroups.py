"""Creates the demo's cgroups in every controller that the agent may write, and removes them completely.
A lock on the directory marks a running demo; the kernel drops it when the process ends. An unlocked leftover is
created again, unless it holds processes of another program, which raises CgroupInUse.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from api.interfaces import Unavailable

V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids")
"""Controllers of version 1; in version 2 cpuacct is part of cpu."""
COMPARED_KNOBS = (
    "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.idle", "cpu.weight", "cpu.max",
    "cpuset.cpus", "cpuset.mems", "memory.limit_in_bytes", "memory.high", "memory.max", "pids.max",
)  # fmt: skip
"""Files of both versions that an agent may change; those that exist are compared before and after the run."""
OWN_COMMANDS = (b"demo.online", b"demo.batch")
EMPTY_TIMEOUT_S = 5.0


class CgroupInUse(Unavailable):
    """The cgroups exist and contain processes; unlike missing rights, the demo cannot work around that."""


class DemoCgroups:
    """The cgroups of one demo, from `make` to `remove`."""

    def __init__(self, mounts: Sequence[Path], names: Sequence[str]) -> None:
        self.mounts = tuple(mounts)
        """Mount points below which each cgroup has a directory; the cpu controller's tree comes first."""
        self.names = tuple(names)
        self.notes: list[str] = []
        """Changes in addition to new directories, one sentence each."""
        self._lock: int | None = None
        self._enabled: list[str] = []
        self._neighbours: set[str] = set()
        self._knobs: dict[Path, str] = {}

    @classmethod
    def make(cls, v1: Mapping[str, Path], v2: Path | None, names: Sequence[str]) -> DemoCgroups:
        """Make empty cgroups of these names below every mount point that matters.

        `v1` has the mount point of each version 1 controller, `v2` that of the unified hierarchy. Raises CgroupInUse if
        a cgroup of such a name is in use, Unavailable if this machine or the user's rights do not allow it; then nothing
        new is left.
        """
        pure_v2 = "cpu" not in v1
        mounts = dict.fromkeys(v1[name] for name in V1_CONTROLLERS if name in v1)
        if v2 is not None:
            mounts = {v2: None, **mounts} if pure_v2 else {**mounts, v2: None}
        groups = cls(list(mounts), names)
        try:
            groups._clear_leftovers()
            if pure_v2:
                groups._enable_controllers()
            groups._fill()
        except Unavailable:
            groups._undo()
            raise
        except OSError as error:
            groups._undo()
            raise Unavailable(
                f"cgroups cannot be created: {error.filename}: {error.strerror}",
                "run as root on the host, or in a container with a writable /sys/fs/cgroup (privileged, or a rw mount)",
            ) from error
        return groups

    def directories(self, name: str) -> list[Path]:
        return [mount / name for mount in self.mounts]

    def procs(self, name: str) -> list[Path]:
        """Return the files to which a process writes its id to join `name` in every hierarchy."""
        return [directory / "cgroup.procs" for directory in self.directories(name)]

    def changed_knobs(self) -> dict[Path, tuple[str, str]]:
        """Return the knobs whose value differs from that at creation, by file: the value then and now."""
        now = self._read_knobs()
        return {path: (then, now.get(path, "")) for path, then in self._knobs.items() if now.get(path) != then}

    @property
    def knobs(self) -> int:
        """Return the number of files that `changed_knobs` compares."""
        return len(self._knobs)

    def remove(self) -> None:
        """Remove the directories once their processes have ended, and disable the controllers that were enabled.

        Raises Unavailable if processes remain after EMPTY_TIMEOUT_S.
        """
        for name in self.names:
            self._wait_empty(name)
            for directory in self.directories(name):
                if directory.exists():
                    directory.rmdir()
        self._unlock()
        self._disable_controllers()

    def _clear_leftovers(self) -> None:
        for name in self.names:
            left = [directory for directory in self.directories(name) if directory.exists()]
            if not left:
                continue
            lock = _lock_directory(left[0])
            try:
                self._evict_orphans(name)
                for directory in left:
                    directory.rmdir()
            finally:
                os.close(lock)
            self.notes.append(f"removed cgroup /{name}, left by a demo that was killed")

    def _fill(self) -> None:
        for directory in (path for name in self.names for path in self.directories(name)):
            directory.mkdir()
            if self._lock is None:
                self._lock = _lock_directory(directory)
            _inherit_cpuset(directory)
        self._knobs = self._read_knobs()

    def _read_knobs(self) -> dict[Path, str]:
        files = (
            directory / knob for name in self.names for directory in self.directories(name) for knob in COMPARED_KNOBS
        )
        return {file: file.read_text().strip() for file in files if file.exists()}

    def _evict_orphans(self, name: str) -> None:
        pids = _pids(self.procs(name))
        for pid in pids:
            command = _command(pid)
            if command is not None and not any(own in command.split(b"\0") for own in OWN_COMMANDS):
                shown = command.replace(b"\0", b" ").decode(errors="replace").strip()
                raise CgroupInUse(
                    f"cgroup /{name} holds a process that is not the demo's: {pid} ({shown})",
                    f"move it elsewhere or end it; the demo needs /{name} for itself",
                )
        for pid in pids:
            self.notes.append(f"ended process {pid}, left in /{name} by a demo that was killed")
            _kill(pid)
        self._wait_empty(name)

    def _wait_empty(self, name: str) -> None:
        deadline = time.monotonic() + EMPTY_TIMEOUT_S
        while pids := _pids(self.procs(name)):
            if time.monotonic() > deadline:
                raise Unavailable(f"processes {pids} do not leave cgroup /{name}", "end them and start again")
            time.sleep(0.02)

    def _enable_controllers(self) -> None:
        mount = self.mounts[0]
        offered = (mount / "cgroup.controllers").read_text().split()
        control = mount / "cgroup.subtree_control"
        if "cpu" not in offered:
            raise Unavailable(
                f"{mount}/cgroup.controllers does not offer cpu",
                "delegate the cpu controller to this cgroup, or run where the whole tree is visible",
            )
        self._neighbours = _children(mount)
        for controller in V1_CONTROLLERS:
            if controller in offered and controller not in control.read_text().split():
                control.write_text(f"+{controller}")
                self._enabled.append(controller)
                self.notes.append(f"enabled controller {controller} in {control}")
            elif controller not in offered and controller != "cpuacct":
                self.notes.append(f"{mount} does not offer controller {controller}: its knobs stay untouched")

    def _disable_controllers(self) -> None:
        if not self._enabled:
            return
        control = self.mounts[0] / "cgroup.subtree_control"
        enabled = ", ".join(self._enabled)
        if newcomers := _children(self.mounts[0]) - self._neighbours:
            self.notes.append(f"left {enabled} enabled in {control}: /{min(newcomers)} is new and may need them")
        else:
            for controller in self._enabled:
                control.write_text(f"-{controller}")
            self.notes.append(f"disabled {enabled} again in {control}")
        self._enabled = []

    def _undo(self) -> None:
        """Undo an incomplete attempt. Only locked directories belong to this demo."""
        if self._lock is not None:
            for name in self.names:
                for directory in self.directories(name):
                    if directory.exists():
                        directory.rmdir()
            self._unlock()
        self._disable_controllers()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock_directory(directory: Path) -> int:
    """Return a descriptor that locks this directory, if it still has its path. Raises CgroupInUse otherwise."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if directory.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # another process holds or has just removed it
    os.close(descriptor)
    raise CgroupInUse(f"another demo is running in cgroup {directory}", "end that one first, or wait for it")


def _inherit_cpuset(directory: Path) -> None:
    """Set CPUs and memory nodes of a new cpuset of version 1, which accepts no process without them."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file, parent = directory / name, directory.parent / name
        if file.exists() and parent.exists() and not file.read_text().strip():
            file.write_text(parent.read_text())


def _children(mount: Path) -> set[str]:
    return {entry.name for entry in mount.iterdir() if entry.is_dir()}


def _pids(procs: Iterable[Path]) -> list[int]:
    pids: set[int] = set()
    for file in procs:
        if file.exists():
            pids.update(map(int, file.read_text().split()))
    return sorted(pids)


def _command(pid: int) -> bytes | None:
    """Return the command line of a process; None if it has ended. Process 0 is outside our process namespace."""
    if pid == 0:
        return b"of another process namespace"
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
