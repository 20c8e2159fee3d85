"""The cgroups of nodes: one node of this machine has the usual /kubepods, every other one its own root; all are removed.

Works with version 1, version 2 and hybrid hierarchies: whatever is mounted below the root.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.names import Names

ROOT = Path("/sys/fs/cgroup")
USUAL = "kubepods"
_FILLED = ("cpuset.cpus", "cpuset.mems")
"""Files of version 1 that a new cgroup needs before it accepts a process."""
KNOBS = ("cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.idle", "cpu.weight", "cpu.max", "cpuset.cpus")


def knobs_of_pods(cgroup_root: str) -> dict[str, str]:
    """Return the knobs of every cgroup of the pods of a node, by path."""
    tops = [ROOT / controller / cgroup_root.strip("/") / USUAL for controller in ("cpu", "cpuset", "")]
    return {
        str(path): path.read_text() for top in tops if top.exists() for name in KNOBS for path in top.glob(f"**/{name}")
    }


def prepare(names: Names, node: str, root: Path = ROOT) -> str:
    """Return kubelet's `cgroupRoot`: `/` if the usual place is free."""
    if _claim_usual(names, root):
        return "/"
    own = names.cgroup(node)
    for hierarchy in hierarchies(root):
        created = hierarchy / own
        created.mkdir(exist_ok=True)
        for file in _FILLED:
            if (hierarchy / file).exists():
                (created / file).write_text((hierarchy / file).read_text())
        if (hierarchy / "cgroup.controllers").exists():
            _delegate(hierarchy)
    return f"/{own}"


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Return the mount point of each hierarchy."""
    tops = [root, *(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())]
    if (root / "cgroup.procs").exists():
        return [root]
    return sorted(path for path in tops if (path / "cgroup.procs").exists())


def mine(names: Names, root: Path = ROOT) -> list[Path]:
    """Return the topmost cgroups of a cluster."""
    results = [path for hierarchy in hierarchies(root) for path in hierarchy.glob(f"dioptase-{names.number}-*")]
    if _owner(names) == str(names.number):
        results += [hierarchy / USUAL for hierarchy in hierarchies(root) if (hierarchy / USUAL).exists()]
    return results


def remove(names: Names, root: Path = ROOT, seconds: float = 30) -> None:
    """End every process in the cgroups of a cluster and remove the cgroups. Raises OSError if one remains."""
    until = time.monotonic() + seconds
    while tops := mine(names, root):
        for top in tops:
            try:
                for cgroup in _below(top):
                    _kill(cgroup)
                    cgroup.rmdir()
            except OSError:
                # A process takes its time to end, and has its cgroup until then; or the cgroup has just gone.
                if time.monotonic() > until:
                    raise
        time.sleep(0.05)
    if _owner(names) == str(names.number):
        _link(names).unlink()


def _below(top: Path) -> Iterator[Path]:
    """Yield the cgroup and all below it, the deepest first."""
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)


def _kill(cgroup: Path) -> None:
    for pid in (cgroup / "cgroup.procs").read_text().split():
        # 0 is a process that this namespace cannot see.
        if int(pid) > 0:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _link(names: Names) -> Path:
    return names.home / USUAL


def _owner(names: Names) -> str:
    try:
        return str(_link(names).readlink())
    except OSError:
        return ""


def _claim_usual(names: Names, root: Path) -> bool:
    """Claim the usual /kubepods for this cluster; return whether that succeeded. One node can use it."""
    if any((hierarchy / USUAL).exists() for hierarchy in hierarchies(root)):
        return False
    try:
        _link(names).symlink_to(str(names.number))
    except FileExistsError:
        return False
    return True


def _delegate(hierarchy: Path) -> None:
    controllers = (hierarchy / "cgroup.controllers").read_text().split()
    for controller in controllers:
        try:
            (hierarchy / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            # One that cannot be had: kubelet says which it misses.
            continue
