"""A machine with more CPUs than this one, for programs that only read: one socket, one NUMA node, two threads a core.

Its files are copies of this machine's, bind-mounted over them in a mount namespace of its own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

REAL = Path("/sys/devices/system")
_LIST = ("online", "present", "possible")
_MOUNTS = """set -e
mount --make-rprivate /
mount --bind "$0/cpu" /sys/devices/system/cpu
mount --bind "$0/node" /sys/devices/system/node
mount --bind "$0/cpuinfo" /proc/cpuinfo
exec "$@"
"""


def mount_command(tree: Path) -> tuple[str, ...]:
    """Return the prefix of a command that sees these files."""
    return ("unshare", "--mount", "sh", "-c", _MOUNTS, str(tree))


def write_topology(tree: Path, cpus: int) -> None:
    """Write the files below an empty folder."""
    every = f"0-{cpus - 1}\n"
    for cpu in range(cpus):
        there, core = tree / f"cpu/cpu{cpu}", cpu // 2
        pair = f"{core * 2}-{core * 2 + 1}\n"
        _copy(REAL / "cpu/cpu0", there, 3)
        result = {"core_id": f"{core}\n", "physical_package_id": "0\n"}
        result |= dict.fromkeys(("thread_siblings_list", "core_cpus_list"), pair)
        result |= dict.fromkeys(("core_siblings_list", "package_cpus_list"), every)
        for name, text in result.items():
            (there / "topology" / name).write_text(text)
        for cache in (there / "cache").glob("index*"):
            last = (cache / "level").read_text().strip() == "3"
            (cache / "shared_cpu_list").write_text(every if last else pair)
            (cache / "id").write_text("0\n" if last else f"{core}\n")
    for name in _LIST:
        (tree / "cpu" / name).write_text(every)
    (tree / "cpu/offline").write_text("\n")
    _copy(REAL / "node/node0", tree / "node/node0", 2)
    (tree / "node/node0/cpulist").write_text(every)
    for cpu in range(cpus):
        (tree / f"node/node0/cpu{cpu}").symlink_to(f"../../cpu/cpu{cpu}")
    for name in (*_LIST, "has_cpu", "has_memory", "has_normal_memory"):
        (tree / "node" / name).write_text("0\n")
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    (tree / "cpuinfo").write_text("".join(_entry(first, cpu) for cpu in range(cpus)))


def _entry(first: str, cpu: int) -> str:
    text = re.sub(r"(?m)^(processor|apicid|initial apicid)(\s*): .*", rf"\1\2: {cpu}", first)
    return re.sub(r"(?m)^core id(\s*): .*", rf"core id\1: {cpu // 2}", text) + "\n\n"


def _copy(source: Path, goal: Path, depth: int) -> None:
    """Copy the readable files down to this depth."""
    goal.mkdir(parents=True, exist_ok=True)
    for item in os.scandir(source):
        if item.is_dir(follow_symlinks=False):
            if depth:
                _copy(Path(item.path), goal / item.name, depth - 1)
        elif item.is_file(follow_symlinks=False):
            try:
                (goal / item.name).write_bytes(Path(item.path).read_bytes())
            except OSError:
                continue  # some cannot be read
