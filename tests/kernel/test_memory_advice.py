"""What memory advice makes of this kernel's own numbers: a process whose memory is known, and the node that it runs on."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.advisor.memory.memory_advisor import advise_memory
from agent.advisor.memory.memory_inputs import (
    MemoryAdvisorState,
    MemoryInputs,
    ReclaimRoot,
    bytes_by_numa,
    droppable_cache_bytes,
    read_stat,
    used_bytes,
    zone_low_bytes,
)
from agent.config.memory import MemoryConfig
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_reader import NodeReader
from api.advice import MemoryPressure
from api.knobs import Knob
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot
from api.units import GIB, MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel
HOLD = """
import mmap, sys, time
anon = bytearray(64 << 20)
for page in range(0, len(anon), 4096): anon[page] = 1
shared = mmap.mmap(-1, 16 << 20)
for page in range(0, len(shared), 4096): shared[page] = 1
with open(sys.argv[1], "wb") as file: file.write(bytes(48 << 20))
open(sys.argv[2], "w").close()
time.sleep(60)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[TestCgroup]:
    """64 MiB of its own, 16 shared, and 48 of cache unless the file is kept in memory itself."""
    with cgroup(require_writable_cgroups(), "advice") as groups:
        ready = tmp_path / "ready"
        groups.start([sys.executable, "-c", HOLD, str(tmp_path / "file"), str(ready)])
        until(ready.exists)
        yield groups


def look(group: TestCgroup, *pods: Pod) -> Snapshot:
    cgroups, node = CgroupReader(group.hierarchy), NodeReader(Path("/proc"), Path("/sys"))
    try:
        return Snapshot(
            seq=1,
            taken_at_ns=time.monotonic_ns(),
            wall_time_ns=time.time_ns(),
            boot_id="b",
            topology=read_topology(Path("/sys")),
            node=node.read(),
            cgroups=cgroups.read(),
            pods=pods,
        )
    finally:
        cgroups.close()
        node.close()


def test_memory_is_counted_once_and_by_kind(group: TestCgroup) -> None:
    sample = look(group).cgroups[group.path]
    used, cache, shmem = used_bytes(sample), droppable_cache_bytes(sample), read_stat(sample, "shmem")
    assert used is not None
    assert cache is not None
    assert shmem is not None
    assert 64 * MIB <= used - cache - shmem <= 84 * MIB
    assert shmem + cache >= 60 * MIB  # what was written may be on its way to the disk, but stays in memory
    assert shmem >= 16 * MIB
    assert used >= 124 * MIB
    nodes = bytes_by_numa(sample, "anon")
    assert nodes is not None
    # Version 1 lists shared memory with the anonymous one, where its pages are.
    assert 64 * MIB <= sum(nodes.values()) <= 104 * MIB


def test_a_round_on_this_machine(group: TestCgroup) -> None:
    """The same process as an online pod is taken off the promise; as a reclaimed one it is in the limit."""
    container = Container(name="c", cgroup=group.path)
    online = Pod(uid="u", namespace="default", name="web", qos=QoSLevel.SHARED, containers=(container,))
    config = MemoryConfig(reserved_for_allocate_bytes=GIB, min_critical_watermark_bytes=256 * MIB)
    snapshot = look(group, online)
    total = snapshot.node.memory_total_bytes
    assert total is not None
    of = MemoryInputs(snapshot=snapshot, now_ns=snapshot.taken_at_ns, root=ReclaimRoot(path=group.path))
    advice, _ = advise_memory(of, MemoryAdvisorState(), config)
    used = used_bytes(snapshot.cgroups[group.path])
    assert used is not None
    assert advice.headroom_bytes == pytest.approx(total - GIB - 1.1 * used)
    assert advice.condition.state is not MemoryPressure.UNKNOWN
    assert not [request for request in advice.knob_requests if request.knob is Knob.MEMORY_MAX], "no reclaimed pod runs"
    reclaimed = look(group, msgspec.structs.replace(online, qos=QoSLevel.RECLAIMED))
    root = ReclaimRoot(path=group.path, members=(f"{group.path}/c",))
    of = MemoryInputs(snapshot=reclaimed, now_ns=reclaimed.taken_at_ns, root=root)
    advice, _ = advise_memory(of, MemoryAdvisorState(), config)
    limit = next(int(request.value) for request in advice.knob_requests if request.knob is Knob.MEMORY_MAX)
    if len(snapshot.topology.numa_nodes) == 1:
        free, low = snapshot.node.numa[0].meminfo["MemFree"], zone_low_bytes(snapshot, 0, config.stale_s)
        assert 0 < low < GIB
        assert limit % mmap.PAGESIZE == 0
        assert limit == pytest.approx(used + free - max(low, 256 * MIB), abs=32 * MIB)  # numa_stat lags behind a little
