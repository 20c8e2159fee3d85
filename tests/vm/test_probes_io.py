"""Block I/O on the data disk: requests in both forms, the kernel's io.stat, and a limit that is felt as pressure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.snapshot import BlockIo
from tests.kernel.open_probes import started_in
from tests.kernel.real_cgroups import TestCgroup, cgroup
from tests.kernel.test_blockio import direct
from tests.vm.conftest import Programs
from tests.vm.workloads import DATA, io, number_of

pytestmark = pytest.mark.vm_probes

BLOCK, BLOCKS = 64 << 10, 48
RATE = 1 << 20
"""Bytes a second."""
DIRTY = """
import sys
with open(sys.argv[1], "xb") as file:
    file.write(b"y" * int(sys.argv[2]))
print("dirty", flush=True)
"""
"""Makes a file: the kernel charges the writing back of a file to the cgroup that first wrote it, and changes its mind
slowly."""


def block_io(programs: Programs, group: TestCgroup, device: str) -> BlockIo:
    """What both forms have seen of this disk."""
    live = {group.id: group.path}
    results = [probe.read(live).cgroups[group.id]["block_io"][device] for probe in programs("blockio").values()]
    counts = [(each.read_bytes, each.write_bytes, each.reads.count, each.writes.count) for each in results]
    assert len(counts) == 2
    assert counts[0] == counts[1]
    assert isinstance(results[0], BlockIo)
    return results[0]


def stalled_us(group: TestCgroup) -> int:
    some = group.file("io", "io.pressure").read_text().splitlines()[0]
    return int(some.rpartition("total=")[2])


def written(size: int) -> Path:
    file = DATA / f"dioptase-test-{os.getpid()}"
    with file.open("wb") as out:
        out.write(b"z" * size)
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def test_direct_requests_are_those_of_io_stat_in_both_forms(programs: Programs, hierarchy: Hierarchy) -> None:
    device = number_of("data")
    programs("blockio")
    file = written(BLOCK * BLOCKS)
    reader = CgroupReader(hierarchy)
    with cgroup(hierarchy, "disk") as group:
        direct(group, file, "read", BLOCKS)
        direct(group, file, "write", BLOCKS)
        result, stat = block_io(programs, group, device), io(group, device)
        sample = reader.read()[group.path].io[device]
    reader.close()
    file.unlink()
    assert (result.read_bytes, result.write_bytes) == (stat["rbytes"], stat["wbytes"])
    assert result.write_bytes >= BLOCK * BLOCKS
    assert result.read_bytes >= BLOCK * BLOCKS
    assert result.reads.count >= BLOCKS
    assert result.writes.count >= BLOCKS
    assert (sample.read_bytes, sample.write_bytes) == (stat["rbytes"], stat["wbytes"])
    assert (sample.reads, sample.writes) == (stat["rios"], stat["wios"])


def test_what_is_written_back_later_is_the_writers(programs: Programs, hierarchy: Hierarchy) -> None:
    """On version 2 the kernel charges the cgroup that dirtied the pages, though a kernel thread writes them."""
    device = number_of("data")
    programs("blockio")
    size, file = 4 << 20, DATA / f"dioptase-test-{os.getpid()}-dirty"
    with cgroup(hierarchy, "dirty") as group:
        writer = started_in(group, DIRTY, str(file), str(size))
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"dirty\n"
        assert writer.wait() == 0
        os.sync()
        result, stat = block_io(programs, group, device), io(group, device)
    file.unlink()
    assert result.write_bytes >= size
    assert result.write_bytes == stat["wbytes"]


def test_a_limit_of_the_disk_is_felt_as_pressure(programs: Programs, hierarchy: Hierarchy) -> None:
    """Three megabytes at one a second stall their writer for most of three seconds; the same without a limit, for less."""
    device = number_of("data")
    programs("blockio")
    file = written(BLOCK * BLOCKS)
    with cgroup(hierarchy, "limited") as limited, cgroup(hierarchy, "free") as free:
        limited.file("io", "io.max").write_text(f"{device} wbps={RATE}\n")
        for group in (free, limited):
            direct(group, file, "write", BLOCKS)
            assert block_io(programs, group, device).write_bytes == io(group, device)["wbytes"] >= BLOCK * BLOCKS
        stalls_us = stalled_us(free), stalled_us(limited)
    file.unlink()
    assert stalls_us[1] > 1_500_000
    assert stalls_us[1] > 3 * stalls_us[0], stalls_us
