"""Reclaim that can be computed: what does not fit into a memory limit is reclaimed, and the reader waits for that."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from api.interfaces import ProbeReading
from api.snapshot import Kswapd, ReclaimLatency
from api.units import MIB
from probes.kswapd import FORMS, NO_RECLAIM, KswapdProbe, nodes_with_memory, open_kswapd
from tests.kernel.open_probes import probe_fixture
from tests.kernel.real_cgroups import TestCgroup, cgroup, limit_memory, require_writable_cgroups

pytestmark = pytest.mark.kernel

PAGE = os.sysconf("SC_PAGE_SIZE")
READ = """
import sys
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 20): pass
"""


probe = probe_fixture(open_kswapd, FORMS)


def reclaim_of(observed: ProbeReading, group: TestCgroup) -> ReclaimLatency:
    counts = observed.cgroups[group.id]["reclaim"]
    assert isinstance(counts, ReclaimLatency)
    return counts


def uncached_file(path: Path, size: int) -> Path:
    """A file on a disk whose pages are not in memory: the reader is charged for them."""
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(b"\xa5" * MIB)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def on_disk(path: Path) -> bool:
    return path.stat().st_dev >> 8 != 0


def test_reading_128_mib_within_32_reclaims_the_other_96(probe: KswapdProbe, tmp_path: Path) -> None:
    """Every page read is charged and at most 32 MiB stay, so at least 96 MiB are reclaimed, and never more than were read
    (and a little for what the reader itself needs). A neighbour has nothing to do with it."""
    if not on_disk(tmp_path):
        pytest.skip(f"{tmp_path} is not on a disk: its pages cannot be reclaimed")
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "reads") as group, cgroup(hierarchy, "neighbour") as neighbour:
        limit_memory(group, 32 * MIB)
        file = uncached_file(tmp_path / "data", 128 * MIB)
        live = {group.id: group.path, neighbour.id: neighbour.path}
        before = reclaim_of(probe.read(live), group)
        assert before == NO_RECLAIM
        started = time.monotonic_ns()
        assert neighbour.start([sys.executable, "-c", "pass"]).wait() == 0
        assert group.start([sys.executable, "-c", READ, str(file)]).wait() == 0
        elapsed = time.monotonic_ns() - started
        observed = probe.read(live)
        reclaim = reclaim_of(observed, group)
        assert reclaim_of(observed, neighbour) == NO_RECLAIM
    assert 96 * MIB // PAGE <= reclaim.reclaimed_pages <= 132 * MIB // PAGE
    assert reclaim.limit.count > 0
    assert reclaim.limit.slots is not None
    assert sum(reclaim.limit.slots) == reclaim.limit.count
    # Each reclaim asks for 32 pages at least, and gets them: clean pages of a file without other users.
    assert reclaim.limit.count <= reclaim.reclaimed_pages / 32
    assert 0 < reclaim.limit.sum_ns < elapsed
    assert probe.lost().full == probe.lost().task_slot == 0
    assert probe.problem() is None


def test_every_numa_node_with_memory_has_its_kswapd(probe: KswapdProbe) -> None:
    kswapd = probe.read({}).node["kswapd"]
    assert isinstance(kswapd, dict)
    assert tuple(kswapd) == nodes_with_memory()
    assert all(isinstance(each, Kswapd) for each in kswapd.values())
