"""Real cgroups, burners and reasons to skip, shared by the tests that need a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy

JOIN = """import os, sys
for procs in sys.argv[1].split(":"):
    open(procs, "w").write(str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""
JOIN_AND_RUN = 'set -e; IFS=:; for procs in $0; do echo $$ > "$procs"; done; unset IFS; exec "$@"'
"""The same for a shell, which starts faster."""
BURN = "import time\nwhile True: pass"


def require_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: run the tests as root")


def require_writable_cgroups() -> Hierarchy:
    """Return the machine's hierarchy; skip the test with the reason if cgroups cannot be created."""
    require_root()
    hierarchy = detect_hierarchy()
    probe = hierarchy.primary / f"dioptase-test-{os.getpid()}-probe"
    try:
        probe.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made below {hierarchy.primary}: {error.strerror}")
    probe.rmdir()
    return hierarchy


class TestCgroup:
    """One cgroup path in every controller, with its processes."""

    __test__ = False

    def __init__(self, hierarchy: Hierarchy, path: str) -> None:
        self.hierarchy, self.path = hierarchy, path
        mounts = {str(mount): mount for mount in hierarchy.v1.values()}
        if hierarchy.v2 is not None:
            mounts[str(hierarchy.v2)] = hierarchy.v2
        self.dirs = [mount / path.lstrip("/") for mount in mounts.values()]
        self.processes: list[subprocess.Popen[bytes]] = []
        for directory in self.dirs:
            directory.mkdir(parents=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                file, parent = directory / name, directory.parent / name
                if file.exists() and parent.exists() and not file.read_text().strip():
                    file.write_text(parent.read_text())

    @property
    def id(self) -> int:
        return (self.hierarchy.primary / self.path.lstrip("/")).stat().st_ino

    def file(self, controller: str, name: str) -> Path:
        mount = self.hierarchy.controller(controller)
        assert mount is not None
        return mount / self.path.lstrip("/") / name

    def limit_cpu(self, quota_us: int, period_us: int = 100_000) -> None:
        """Give it this quota and the greatest weight: other load on the machine, the virtual machines of the gate above all,
        must not keep its processes from using up the quota in each period."""
        v2 = self.hierarchy.mode == "v2"
        values = (
            {"cpu.max": f"{quota_us} {period_us}", "cpu.weight": "10000"}
            if v2
            else {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{quota_us}", "cpu.shares": "262144"}
        )
        for name, value in values.items():
            self.file("cpu", name).write_text(f"{value}\n")

    def start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process inside this cgroup; it joins before execve."""
        procs = [str(directory / "cgroup.procs") for directory in self.dirs]
        process = subprocess.Popen(["sh", "-c", JOIN_AND_RUN, ":".join(procs), *argv])
        self.processes.append(process)
        return process

    def burn(self, count: int = 1) -> list[subprocess.Popen[bytes]]:
        """Start processes that use all the CPU they get."""
        return [self.start([sys.executable, "-c", BURN]) for _ in range(count)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in filter(None, (process.stdin, process.stdout)):
                stream.close()
        for directory in self.dirs:
            if directory.exists():
                directory.rmdir()


@contextmanager
def cgroup(hierarchy: Hierarchy, name: str) -> Iterator[TestCgroup]:
    """Yield the cgroup `/dioptase-test-PID-NAME`; it is removed with its processes."""
    group = TestCgroup(hierarchy, f"/dioptase-test-{os.getpid()}-{name}")
    try:
        yield group
    finally:
        group.close()


def limit_memory(group: TestCgroup, limit_bytes: int) -> None:
    """Limit memory to this many bytes, without swap."""
    if group.hierarchy.mode == "v2":
        group.file("memory", "memory.max").write_text(str(limit_bytes))
        swap = group.file("memory", "memory.swap.max")
        if swap.exists():
            swap.write_text("0")
        return
    group.file("memory", "memory.limit_in_bytes").write_text(str(limit_bytes))
    group.file("memory", "memory.swappiness").write_text("0")
