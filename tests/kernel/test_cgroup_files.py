"""Files of a cgroup that are not read every tick, on this kernel: what is set, and what a known workload did."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from api.snapshot import UNLIMITED, CgroupSample
from api.units import MIB
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel
S, PAGE = 1000000000, os.sysconf("SC_PAGE_SIZE")
WORK = """
import sys, time
held = bytearray(64 << 20)
for page in range(0, len(held), 4096): held[page] = 1
while time.process_time() < 0.5: pass
open(sys.argv[1], "w").close()
time.sleep(60)
"""
WRITE = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
import mmap
page = mmap.mmap(-1, 1 << 20)
for _ in range(8): os.write(fd, page)
os.fsync(fd)
"""
LIMITS = {
    "v1": {
        "cpu.cfs_quota_us": "150000",
        "cpu.shares": "300",
        "cpu.idle": "0",
        "memory.limit_in_bytes": str(256 * MIB),
        "pids.max": "77",
    },
    "v2": {"cpu.max": "150000 100000", "cpu.weight": "300", "memory.max": str(256 * MIB), "pids.max": "77"},
}


@pytest.fixture
def group() -> Iterator[TestCgroup]:
    with cgroup(require_writable_cgroups(), "files") as group_:
        yield group_


def look(group: TestCgroup) -> CgroupSample:
    reader = CgroupReader(group.hierarchy)
    sample = reader.read()[group.path]
    reader.close()
    return sample


def work(group: TestCgroup, ready: Path) -> None:
    process = group.start([sys.executable, "-c", WORK, str(ready)])
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.02)


def test_limits_are_those_that_were_set(group: TestCgroup) -> None:
    for name, value in LIMITS["v2" if group.hierarchy.mode == "v2" else "v1"].items():
        path = group.file(name.split(".")[0], name)
        if path.exists():
            path.write_text(value)
    limits = look(group).limits
    assert (limits.quota_us, limits.period_us, limits.weight) == (150_000, 100_000, 300)
    assert (limits.memory_max_bytes, limits.pids_max) == (256 * MIB, 77)
    assert limits.idle in (False, None)
    assert limits.cpus
    assert limits.mems


def test_a_group_without_limits_says_so(group: TestCgroup) -> None:
    limits = look(group).limits
    assert (limits.quota_us, limits.memory_max_bytes, limits.pids_max) == (-1, UNLIMITED, UNLIMITED)


def test_memory_is_reported_by_kind_and_by_numa_node(group: TestCgroup, tmp_path: Path) -> None:
    """64 MiB of anonymous memory, in an interpreter that takes less than 32 MiB more."""
    work(group, tmp_path / "ready")
    sample = look(group)
    v2 = group.hierarchy.mode == "v2"
    anonymous = sample.memory_stat["anon" if v2 else "total_rss"]
    by_node = sample.numa_stat["anon" if v2 else "hierarchical_anon"]
    assert 64 * MIB <= anonymous < 96 * MIB
    assert sum(by_node.values()) * (1 if v2 else PAGE) == pytest.approx(anonymous, abs=2 * MIB)
    assert sample.memory_events["oom_kill"] == 0
    assert sample.swap_bytes in (0, None)
    assert sample.memory_bytes is not None
    assert sample.kernel_memory_bytes is None or 0 < sample.kernel_memory_bytes < sample.memory_bytes


def test_cpu_time_is_reported_by_mode_and_by_cpu(group: TestCgroup, tmp_path: Path) -> None:
    """Half a second of work, less what the interpreter did before it joined: user and system make the whole, as do the CPUs."""
    work(group, tmp_path / "ready")
    time.sleep(0.1)
    sample = look(group)
    assert sample.cpu_usage_ns is not None
    assert sample.cpu_user_ns is not None
    assert sample.cpu_system_ns is not None
    assert sample.cpu_usage_ns >= 0.4 * S
    assert sample.cpu_user_ns + sample.cpu_system_ns == pytest.approx(sample.cpu_usage_ns, abs=0.03 * S)
    if sample.per_cpu_ns is not None:
        assert len(sample.per_cpu_ns) >= (os.cpu_count() or 1)
        assert sum(sample.per_cpu_ns) == pytest.approx(sample.cpu_usage_ns, abs=0.01 * S)


def test_io_is_counted_by_device(group: TestCgroup, tmp_path: Path) -> None:
    """Eight writes of a MiB past the page cache."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    if not Path(f"/sys/dev/block/{number}").exists():
        pytest.skip(f"{tmp_path} is on no block device")
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct I/O on {tmp_path}: {error.strerror}")
    written = group.start([sys.executable, "-c", WRITE, str(tmp_path / "data")])
    assert written.wait() == 0
    io = look(group).io
    if not io:
        pytest.skip(
            "I/O is not counted: enable io in cgroup.subtree_control; version 1 counts none since Linux 6.10 without limits"
        )
    assert 8 * MIB <= io[number].write_bytes < 10 * MIB
    assert io[number].writes >= 8
