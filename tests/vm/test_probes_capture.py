"""`dioptase capture` on version 2 with two NUMA nodes: what is read from the archive is what the files said.

The archive stays in /run/out; those of both kernels are in tests/captures, where tests of every machine read them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from tests.captures import Captured
from tests.live.agent_process import DIOPTASE
from tests.vm.pods import BATCH, DB, PATHS, WEB, Pods
from tests.vm.workloads import DATA

pytestmark = pytest.mark.vm_probes


def test_pods_at_work_can_be_captured(hierarchy: Hierarchy, series: str, tmp_path: Path) -> None:
    archive = Path("/run/out") / f"v2-{series}.tar.gz"
    with Pods(hierarchy, DATA) as pods:
        pods.freeze()
        subprocess.run([DIOPTASE, "capture", "-o", str(archive)], check=True)
        captured = Captured(archive, tmp_path)
        snapshot = captured.snapshot()
        for path in (WEB, DB, BATCH):
            sample, stat = snapshot.cgroups[path], pods.keyed(path, "cpu.stat")
            assert sample.cpu_usage_ns == 1000 * stat["usage_usec"]
            assert sample.throttled_periods == stat["nr_throttled"]
            assert sample.memory_events["high"] == pods.keyed(path, "memory.events")["high"]
            assert sample.threads == pods.number(path, "pids.current")
    assert captured.manifest.kernel == f"Linux {os.uname().release}"
    assert (captured.manifest.mode, captured.manifest.left_out) == ("v2", 0)
    assert snapshot.cgroups.keys() == PATHS | {"/", "/system.slice"}
    assert not [status for status in snapshot.sources if not status.ok and status.name != "waits"]
    assert archive.stat().st_size < 200 * 1024
