"""Cgroups to watch: as many as wanted, each in every tree of the machine, with one process in it.

Side by side, or as a kubelet makes them: each container in the cgroup of a pod, and both with a limit of CPU and memory.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agent.hierarchy import unescape
from demo.cgroups import CONTROLLERS
from demo.launch import launch

LIMITS = {
    "cpu.cfs_quota_us": "100000",
    "cpu.max": "100000 100000",
    "memory.limit_in_bytes": "1073741824",
    "memory.max": "1073741824",
}
"""One CPU and 1 GiB, in the files of both versions."""


def asleep(_index: int) -> list[str]:
    """What runs in each cgroup unless something else is asked for."""
    return ["sleep", "infinity"]


@contextmanager
def residents(
    parent: str, count: int, program: Callable[[int], Sequence[str]] = asleep, *, in_pods: bool = False
) -> Iterator[list[str]]:
    """`count` cgroups below `parent`, each with the program that its number gets; their paths. All goes at the end.

    `in_pods`: each below a cgroup of its own, which makes twice as many.
    """
    mounts = _mounts()
    names = [f"{parent}/pod{index:03}/container" if in_pods else f"{parent}/{index:03}" for index in range(count)]
    groups = [parent, *(group for name in names for group in _down_to(name))]
    made: list[Path] = []
    processes: list[subprocess.Popen[bytes]] = []
    for mount in mounts:
        _clear(mount / parent)
    try:
        for group in groups:
            for mount in mounts:
                _make(mount / group, made, LIMITS if in_pods and group != parent else {}, leaf=group in names)
        for index, name in enumerate(names):
            processes.append(launch(program(index), procs=[mount / name / "cgroup.procs" for mount in mounts]))
        yield [f"/{name}" for name in names]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for directory in reversed(made):
            directory.rmdir()


def _down_to(name: str) -> list[str]:
    """The cgroups below the topmost one on the way to that one, itself the last."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(2, len(parts) + 1)]


def _mounts() -> list[Path]:
    # Every tree, also those that the agent does not read: cAdvisor asks the devices controller who lives in a cgroup.
    found: dict[int, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        if right.partition(" ")[0] in ("cgroup", "cgroup2"):
            mount = Path(unescape(left.split(" ")[4]))
            found.setdefault(mount.stat().st_dev, mount)
    return list(found.values())


def _clear(directory: Path) -> None:
    """Remove what a killed run left; where processes still live in it the kernel refuses, and so do we."""
    if directory.exists():
        for child in directory.iterdir():
            if child.is_dir():
                _clear(child)
        directory.rmdir()


def _make(directory: Path, made: list[Path], limits: Mapping[str, str], *, leaf: bool) -> None:
    directory.mkdir()
    made.append(directory)
    for name in ("cpuset.cpus", "cpuset.mems"):
        file, parent = directory / name, directory.parent / name
        if file.exists() and parent.exists() and not file.read_text().strip():
            file.write_text(parent.read_text())
    for name, value in limits.items():
        if (file := directory / name).exists():
            file.write_text(value)
    control = directory / "cgroup.subtree_control"
    if not leaf and control.exists():
        offered = (directory / "cgroup.controllers").read_text().split()
        control.write_text(" ".join(f"+{name}" for name in CONTROLLERS if name in offered))


def pods_file(paths: Sequence[str]) -> str:
    """All of them as pods, alternately shared_cores and reclaimed_cores."""
    levels = ("shared_cores", "reclaimed_cores")
    pods = [
        {
            "name": f"p{index:03}",
            "annotations": {"katalyst.kubewharf.io/qos_level": levels[index % 2]},
            "containers": [{"name": "c", "cgroup": path}],
        }
        for index, path in enumerate(paths)
    ]
    return msgspec.yaml.encode({"pods": pods}).decode()
