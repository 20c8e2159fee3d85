"""Creates cgroups for benchmarks in every hierarchy, and removes them, also if the benchmark is killed.
A child process, `python -m bench.cgroup_tree DIRECTORY...`, removes the tree when its standard input ends: the kernel closes
the other end with the benchmark, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.sensors.cgroup.hierarchy import unescape_mount
from api.interfaces import Unavailable
from demo.launch import ROOT

V2_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids")
EMPTY_TIMEOUT_S = 15.0
"""After this time processes that have not left are killed. An agent restores all values first, which takes seconds."""


def cgroup_mounts(proc: Path = Path("/proc")) -> list[Path]:
    """Return the mount point of every cgroup hierarchy, as a container runtime uses all of them."""
    mounts: dict[int, Path] = {}
    for line in (proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        if right.partition(" ")[0] in ("cgroup", "cgroup2"):
            mount = Path(unescape_mount(left.split(" ")[4]))
            mounts.setdefault(mount.stat().st_dev, mount)
    return list(mounts.values())


def make_cgroup(directory: Path, values: Mapping[str, str], *, leaf: bool) -> None:
    """Create a cgroup in one hierarchy, with the CPUs of its parent and those of `values` whose file exists.

    Unless it is a leaf, its children get the controllers of version 2. Raises OSError.
    """
    directory.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        # A cpuset of version 1 accepts no process before it has CPUs and memory nodes.
        file, parent = directory / name, directory.parent / name
        if file.exists() and parent.exists() and not file.read_text().strip():
            file.write_text(parent.read_text())
    for name, value in values.items():
        if (file := directory / name).exists():
            file.write_text(value)
    if not leaf:
        enable_controllers(directory)


def enable_controllers(directory: Path) -> None:
    """Enable the controllers of version 2 that are available for the children of a cgroup; nothing on version 1."""
    control = directory / "cgroup.subtree_control"
    if control.exists():
        offered = (directory / "cgroup.controllers").read_text().split()
        missing = set(offered) - set(control.read_text().split())
        control.write_text(" ".join(f"+{name}" for name in V2_CONTROLLERS if name in missing))


def remove_tree(directories: Sequence[Path], timeout_s: float = EMPTY_TIMEOUT_S) -> None:
    """Remove these cgroups with all below them once they are empty; after the timeout their processes are killed."""
    deadline = time.monotonic() + timeout_s
    tree = [path for directory in directories if directory.exists() for path in _cgroups_below(directory)]
    while pids := {pid for path in tree for pid in _pids(path)}:
        if time.monotonic() > deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for path in tree:
        path.rmdir()


def _cgroups_below(directory: Path) -> list[Path]:
    """Return the cgroup and all below it, children first."""
    children = [child for child in directory.iterdir() if child.is_dir()]
    return [*(path for child in children for path in _cgroups_below(child)), directory]


def _pids(directory: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(pid) for pid in (directory / "cgroup.procs").read_text().split()]
    return []


@contextmanager
def own_cgroup(name: str, values: Mapping[str, str], mounts: Sequence[Path]) -> Iterator[list[Path]]:
    """Create a cgroup for everything that this process creates, in every hierarchy; yields its directories. Removes it with
    all below it at the end, also if this process is killed, and before that what an earlier run has left.

    Controllers of version 2 that it enables in the root stay enabled. Raises Unavailable if another run uses it, or if cgroups
    cannot be created.
    """
    directories = [mount / name for mount in mounts]
    guard: subprocess.Popen[bytes] | None = None
    try:
        if directories[0].exists():
            os.close(_lock(directories[0]))
        remove_tree(directories, timeout_s=0.0)
        for mount, directory in zip(mounts, directories, strict=True):
            enable_controllers(mount)
            make_cgroup(directory, values, leaf=False)
        lock = _lock(directories[0])
        command = [sys.executable, "-m", "bench.cgroup_tree", *map(str, directories)]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd=ROOT)
    except OSError as error:
        remove_tree(directories, timeout_s=0.0)
        raise Unavailable(
            f"cgroups cannot be created: {error.filename}: {error.strerror}",
            "run as root on the host, or in a container with a writable /sys/fs/cgroup",
        ) from error
    try:
        yield directories
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        if guard.wait():
            remove_tree(directories)
        os.close(lock)


def _lock(directory: Path) -> int:
    """Return a descriptor that locks a directory until it is closed. Raises Unavailable if another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Unavailable(f"another run uses the cgroup {directory}", "end that one first, or wait for it") from None
    return descriptor


def main(directories: Sequence[str]) -> int:
    """Remove the directories once standard input ends."""
    # Ctrl-C in a terminal and SIGTERM to the group are for the benchmark; its end is what counts.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove_tree([Path(directory) for directory in directories])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
