"""Fake hosts: a tree of files declared in one expression and made real below tmp_path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent.hierarchy import Hierarchy

PRESSURE = "some avg10=1.50 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
V1_CPU_STAT = "nr_periods 40\nnr_throttled 8\nthrottled_time 320000000\nnr_bursts 0\nburst_time 0\n"
V2_CPU_STAT = (
    "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\nnice_usec 0\n"
    "nr_periods 40\nnr_throttled 8\nthrottled_usec 320000\nnr_bursts 0\nburst_usec 0\n"
)


def make(root: Path, files: Mapping[str, str]) -> None:
    """Write every file, making the directories on the way."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def v1(root: Path, groups: tuple[str, ...]) -> Hierarchy:
    """Version 1 with one mount per controller. Every group has used 1.5 s, 64 KiB and runs 3 threads."""
    texts = {
        "cpu": {"cpu.stat": V1_CPU_STAT, "tasks": "11\n12\n"},
        "cpuacct": {"cpuacct.usage": "1500000000\n"},
        "memory": {"memory.usage_in_bytes": "65536\n"},
        "pids": {"pids.current": "3\n"},
    }
    for controller, files in texts.items():
        (root / controller).mkdir(parents=True, exist_ok=True)
        for group in groups:
            make(root / controller / group, files)
    return Hierarchy(v1={controller: root / controller for controller in texts}, v2=None)


def v2(root: Path, groups: tuple[str, ...]) -> Hierarchy:
    """Version 2: the same numbers as `v1`, and 7 ms, 8 ms and 9 ms of pressure on CPU, memory and I/O."""
    (root / "unified").mkdir(parents=True, exist_ok=True)
    for group in groups:
        make(
            root / "unified" / group,
            {
                "cpu.stat": V2_CPU_STAT,
                "cgroup.threads": "11\n12\n",
                "memory.current": "65536\n",
                "pids.current": "3\n",
                "cpu.pressure": PRESSURE.format(7000, 70),
                "memory.pressure": PRESSURE.format(8000, 80),
                "io.pressure": PRESSURE.format(9000, 90),
            },
        )
    return Hierarchy(v1={}, v2=root / "unified")


def hybrid(root: Path, groups: tuple[str, ...], unified: tuple[str, ...]) -> Hierarchy:
    """Version 1 with the unified tree beside it, which has only some of the groups."""
    return Hierarchy(v1=v1(root, groups).v1, v2=v2(root, unified).v2)
