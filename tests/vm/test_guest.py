"""The machine itself, whether made by tests/vm or Vagrant: what the other tests here rely on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import cgroup

pytestmark = pytest.mark.vm
NODES = Path("/sys/devices/system/node")
HOG = "import time\nkept = bytearray(b'x' * (96 << 20))\nprint(flush=True)\ntime.sleep(600)"


def test_version_2_is_the_only_hierarchy_and_offers_every_controller() -> None:
    hierarchy = detect_hierarchy()
    assert (hierarchy.mode, hierarchy.v1) == ("v2", {})
    assert {"cpu", "cpuset", "memory", "io", "pids"} <= set(
        (hierarchy.primary / "cgroup.subtree_control").read_text().split()
    )


def test_two_nodes_share_the_cpus_and_are_apart() -> None:
    cpus = [(NODES / f"node{node}/cpulist").read_text().strip() for node in (0, 1)]
    assert cpus == ["0-1", "2-3"]
    near, far = map(int, (NODES / "node0/distance").read_text().split())
    assert near < far


def test_memory_beyond_its_limit_goes_to_swap() -> None:
    """96 MiB in a cgroup that may have 32: the rest is in swap, and the kernel says whose it is."""
    with cgroup(detect_hierarchy(), "swapping") as group:
        group.file("memory", "memory.high").write_text(str(32 * MIB))
        group.start(["/usr/bin/python3", "-c", HOG])
        swapped = group.file("memory", "memory.swap.current")
        until(lambda: int(swapped.read_text()) >= 60 * MIB, "60 MiB are in swap", 120)
        assert int(group.file("memory", "memory.current").read_text()) <= 40 * MIB


def test_there_is_a_disk_to_spare() -> None:
    """Known by its serial number, as limits of I/O know it: letters change."""
    (disk,) = [path for path in Path("/sys/block").glob("vd*") if (path / "serial").read_text().strip() == "data"]
    assert Path("/run/data").stat().st_dev == os.makedev(*map(int, (disk / "dev").read_text().split(":")))
    assert shutil.disk_usage("/run/data").free > 256 * MIB
