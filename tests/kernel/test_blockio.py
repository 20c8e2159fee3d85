"""Block requests against what a program requested: exactly so many direct reads and writes of exactly so many bytes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from api.histogram import SLOT_COUNT
from api.snapshot import BlockIo, Durations
from probes.blockio import FORMS, BlockIoProbe, decode, open_blockio
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from tests.kernel.open_probes import probe_fixture, started_in
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

BLOCK = 64 << 10
NONE = BlockIo(
    reads=Durations(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT),
    writes=Durations(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT),
    read_bytes=0,
    write_bytes=0,
)
DIRECT = """
import json, mmap, os, sys, time
path, way, blocks, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
file = os.open(path, os.O_DIRECT | (os.O_RDONLY if way == "read" else os.O_WRONLY))
buffer = mmap.mmap(-1, size)
buffer.write(b"x" * size)
call = os.preadv if way == "read" else os.pwritev
took = 0
for block in range(blocks):
    start = time.monotonic_ns()
    assert call(file, [buffer], block * size) == size
    took += time.monotonic_ns() - start
charged = [line.split()[1] for line in open("/proc/self/io") if line.startswith(f"{way}_bytes")]
print(json.dumps([took, int(charged[0])]))
"""
"""Direct I/O of so many blocks, one after another; prints how many nanoseconds the calls took together, and how many bytes
the kernel has charged to the process.
"""
BUFFERED = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY)
os.pwrite(file, b"y" * int(sys.argv[2]), 0)
print("dirty", flush=True)
"""


source = probe_fixture(open_blockio, FORMS)


@pytest.fixture
def group() -> Iterator[TestCgroup]:
    with cgroup(require_writable_cgroups(), "io") as created:
        yield created


@contextmanager
def loop_device(directory: Path, size: int) -> Iterator[Path]:
    """A block device of our own, on a file in memory."""
    backing = directory / f"dioptase-test-{os.getpid()}.img"
    backing.write_bytes(b"z" * size)
    try:
        created = subprocess.run(
            ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, check=False
        )
        if created.returncode:
            pytest.skip(f"no loop device can be had: {created.stderr.strip()}")
        try:
            yield Path(created.stdout.strip())
        finally:
            subprocess.run(["losetup", "--detach", created.stdout.strip()], check=True)
    finally:
        backing.unlink()


@pytest.fixture
def loop() -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("there is no /dev/shm for the file behind a loop device")
    with loop_device(memory, 256 * BLOCK) as device:
        yield device


def number_of(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def io_of(source: BlockIoProbe, group_id: int, device: str) -> BlockIo:
    values = source.read({}).cgroups.get(group_id, {}).get("block_io", {})
    assert isinstance(values, dict)
    counters = values.get(device, NONE)
    assert isinstance(counters, BlockIo)
    return counters


def direct(group: TestCgroup, path: Path, way: str, blocks: int, size: int = BLOCK) -> tuple[int, int]:
    """Nanoseconds that the calls took, and the bytes in the kernel's own books of the process."""
    worker = started_in(group, DIRECT, str(path), way, str(blocks), str(size))
    assert worker.stdout is not None
    with worker.stdout:
        took, charged = json.loads(worker.stdout.readline())
    assert worker.wait() == 0
    return took, charged


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_hundred_direct_blocks_are_a_hundred_requests(
    source: BlockIoProbe, group: TestCgroup, loop: Path, way: str
) -> None:
    """100 x 64 KiB on a device without a scheduler: count and bytes are exact; the times are inside those of the calls."""
    device = number_of(loop.stat().st_rdev)
    assert io_of(source, group.id, device) == NONE
    took, _ = direct(group, loop, way, 100)
    counters = io_of(source, group.id, device)
    own_bytes, other = (counters.reads, counters.writes) if way == "read" else (counters.writes, counters.reads)
    assert (own_bytes.count, other.count) == (100, 0)
    assert (counters.read_bytes, counters.write_bytes) == ((100 * BLOCK, 0) if way == "read" else (0, 100 * BLOCK))
    assert own_bytes.slots is not None
    assert sum(own_bytes.slots) == 100
    assert took / 10 <= own_bytes.sum_ns <= took
    assert source.problem() is None


def test_two_cgroups_on_one_device_are_distinguished(source: BlockIoProbe, group: TestCgroup, loop: Path) -> None:
    device = number_of(loop.stat().st_rdev)
    with cgroup(group.hierarchy, "io2") as second:
        direct(group, loop, "read", 30)
        direct(second, loop, "read", 7, 4096)
        assert io_of(source, group.id, device).read_bytes == 30 * BLOCK
        assert io_of(source, second.id, device).read_bytes == 7 * 4096
        assert io_of(source, second.id, device).reads.count == 7


def disk_file(tmp_path: Path, size: int) -> tuple[Path, str]:
    """A written file on a real disk and the disk's number, or a skip."""
    file = tmp_path / "file"
    with file.open("wb") as out:
        out.write(b"z" * size)
        os.fsync(out.fileno())
    major, minor = os.major(file.stat().st_dev), os.minor(file.stat().st_dev)
    sys_entry = Path(f"/sys/dev/block/{major}:{minor}").resolve()
    if major == 0 or not sys_entry.is_dir():
        pytest.skip(f"{tmp_path} is on no block device: run with --basetemp on a disk")
    disk = sys_entry.parent if (sys_entry / "partition").exists() else sys_entry
    if not (disk / "queue").is_dir() or list((disk / "slaves").glob("*")):
        pytest.skip(f"{disk.name} has no requests of its own")
    return file, (disk / "dev").read_text().strip()


def test_a_file_on_a_disk_with_a_scheduler(source: BlockIoProbe, group: TestCgroup, tmp_path: Path) -> None:
    """Direct reads of 4 MiB: all bytes, once. The process may have read a page of Python from the disk as well."""
    file, device = disk_file(tmp_path, 64 * BLOCK)
    took, charged = direct(group, file, "read", 64)
    counters = io_of(source, group.id, device)
    assert counters.read_bytes == pytest.approx(64 * BLOCK, abs=BLOCK)
    assert counters.read_bytes <= charged, "which has what it read of Python from other disks, too"
    assert counters.reads.count >= 64
    # What it read of Python was not timed, so the mean is what can be held against the calls.
    assert 0 < counters.reads.sum_ns / counters.reads.count <= 1.5 * took / 64


def test_what_is_written_back_later_is_the_roots_on_version_1(
    source: BlockIoProbe, group: TestCgroup, tmp_path: Path
) -> None:
    """On version 2 it is the writer's; a task of version 1 dirties pages, and a kernel thread writes them."""
    if group.hierarchy.v1.get("cpu") is None:
        pytest.skip("the cpu controller is on version 2, where the kernel charges the writer")
    size = 8 << 20
    file, device = disk_file(tmp_path, size)
    before = io_of(source, ROOT_CGROUP_ID, device).write_bytes
    writer = started_in(group, BUFFERED, str(file), str(size))
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == b"dirty\n"
    assert writer.wait() == 0
    os.sync()
    assert io_of(source, group.id, device).write_bytes == 0
    assert io_of(source, ROOT_CGROUP_ID, device).write_bytes - before >= size


def test_cgroups_that_are_gone_are_forgotten(source: BlockIoProbe, group: TestCgroup, loop: Path) -> None:
    direct(group, loop, "read", 3)
    live = {ROOT_CGROUP_ID: "/", group.id: group.path}
    for _ in range(3):
        assert group.id in source.read(dict(live)).cgroups
    for _ in range(3):
        source.read({ROOT_CGROUP_ID: "/"}, complete=False)
    assert group.id in source.read(dict(live)).cgroups, "an incomplete listing drops no cgroup"
    assert group.id in source.read({ROOT_CGROUP_ID: "/"}).cgroups
    source.read({ROOT_CGROUP_ID: "/"})
    assert group.id not in source.read({ROOT_CGROUP_ID: "/"}).cgroups


def test_a_row_is_reads_and_then_writes() -> None:
    reads, writes = [10, 4096, 1, *[0] * (SLOT_COUNT - 1)], [30, 512, 0, 2, *[0] * (SLOT_COUNT - 2)]
    counters = decode([*reads, *writes])
    assert (counters.reads.sum_ns, counters.reads.count, counters.read_bytes) == (10, 1, 4096)
    assert (counters.writes.sum_ns, counters.writes.count, counters.write_bytes) == (30, 2, 512)


def test_unchanged_rows_are_not_decoded_again(source: BlockIoProbe, group: TestCgroup, loop: Path) -> None:
    device = number_of(loop.stat().st_rdev)
    direct(group, loop, "read", 3)
    first = io_of(source, group.id, device)
    assert io_of(source, group.id, device) is first
    direct(group, loop, "read", 1)
    assert io_of(source, group.id, device).reads.count == 4
