"""A few working pods on version 2, in cgroups like a kubelet's; they can be frozen."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup
from tests.malachite.node import WORK

BASE = "/kubepods"
WEB, DB, BATCH = f"{BASE}/burstable/pod-web/web", f"{BASE}/burstable/pod-db/db", f"{BASE}/besteffort/pod-batch/batch"
ABOVE = (BASE, f"{BASE}/burstable", f"{BASE}/besteffort", *(path.rpartition("/")[0] for path in (WEB, DB, BATCH)))
PATHS = frozenset({*ABOVE, WEB, DB, BATCH})
SETTINGS = {
    WEB: {
        "cpu.max": "50000 100000", "cpu.weight": "79", "cpuset.cpus": "2-3", "cpuset.mems": "1", "pids.max": "100",
        "memory.max": str(192 * MIB), "memory.high": str(160 * MIB), "memory.low": str(32 * MIB),
        "memory.swap.max": str(64 * MIB),
    },
    DB: {"memory.high": str(32 * MIB), "cpuset.mems": "0-1"},
    BATCH: {"cpu.idle": "1"},
}  # fmt: skip
"""`web` computes, uses the network and writes to the data disk; `db` holds twice its limit, partly in swap; `batch` uses the
remaining CPU."""
HELD = 64 * MIB
HOLD = f"""
import mmap, time
block = mmap.mmap(-1, {HELD}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for _ in range({HELD} >> 20): block.write(b"d" * (1 << 20))
time.sleep(3600)
"""
BLOCK, MESSAGE = 65536, 4096
WARM_S = 180.0


class Pods:
    """Pods that run from the start; the context manager removes everything at its end."""

    def __init__(self, hierarchy: Hierarchy, disk: Path) -> None:
        self.groups: dict[str, TestCgroup] = {}
        self._file = disk / f"dioptase-test-{os.getpid()}-pods"
        for path in ABOVE:
            self.groups[path] = TestCgroup(hierarchy, path)
            self.file(path, "cgroup.subtree_control").write_text("+cpu +cpuset +memory +io +pids")
        for path, settings in SETTINGS.items():
            self.groups[path] = TestCgroup(hierarchy, path)
            for name, value in settings.items():
                self.file(path, name).write_text(value)
        self.groups[WEB].start([sys.executable, "-c", WORK, str(self._file), str(BLOCK), str(MESSAGE)])
        self.groups[DB].start([sys.executable, "-c", HOLD])
        self.groups[BATCH].burn(1)

    def file(self, path: str, name: str) -> Path:
        return self.groups[path].file(name.partition(".")[0], name)

    def number(self, path: str, name: str) -> int:
        return int(self.file(path, name).read_text())

    def keyed(self, path: str, name: str) -> dict[str, int]:
        lines = (line.split() for line in self.file(path, name).read_text().splitlines())
        return {key: int(value) for key, value in lines}

    def at_work(self) -> bool:
        """Return whether all pods have done their work for a while."""
        return (
            self.keyed(WEB, "cpu.stat")["nr_throttled"] >= 20
            and "wbytes=" in self.file(WEB, "io.stat").read_text()
            and self.number(DB, "memory.swap.current") > HELD // 4
            and self.keyed(BATCH, "cpu.stat")["usage_usec"] > 2_000_000
        )

    def freeze(self) -> None:
        """Freeze all pods: of their files only averages and late accounting of the kernel still change."""
        until(self.at_work, seconds=WARM_S)
        self.file(BASE, "cgroup.freeze").write_text("1")
        until(lambda: self.keyed(BASE, "cgroup.events")["frozen"] == 1, seconds=WARM_S)

    def __enter__(self) -> Pods:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in reversed(self.groups.values()):
            group.close()
        self._file.unlink(missing_ok=True)
