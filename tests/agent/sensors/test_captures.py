"""Two real machines as they were: one of version 1 with the unified tree, one of version 2 with two NUMA nodes.

On both, `/dioptase-capture/burstable/pod7d/web` holds 48 MiB, runs three threads that burn CPU under a quota of half a CPU,
and `/dioptase-capture/besteffort/batch` burns CPU with cpu.idle. On the second, `web` has written 4 MiB past the page cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.sensors.node.node_reader import NodeReader
from api.snapshot import UNLIMITED, CgroupLimits, IoStat, Machine, Snapshot
from api.units import MIB
from tests.agent.sensors.hostile_texts import damaged
from tests.captures import CAPTURES, Captured

BASE = "/dioptase-capture"
PATHS = {
    "/", BASE, f"{BASE}/burstable", f"{BASE}/burstable/pod7d", f"{BASE}/burstable/pod7d/web",
    f"{BASE}/besteffort", f"{BASE}/besteffort/batch",
}  # fmt: skip
WEB, BATCH = f"{BASE}/burstable/pod7d/web", f"{BASE}/besteffort/batch"
Unpack = Callable[[str], Captured]


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    previous: dict[str, Captured] = {}

    def give(name: str) -> Captured:
        if name not in previous:
            previous[name] = Captured(CAPTURES / f"{name}.tar.gz", tmp_path_factory.mktemp(name))
        return previous[name]

    return give


def sound(snapshot: Snapshot) -> None:
    """All of it is there and can be written down."""
    assert snapshot.cgroups.keys() == PATHS
    wrong = [status for status in snapshot.sources if not status.ok and status.name != "waits"]
    assert not wrong
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


def test_a_hybrid_machine(unpack: Unpack) -> None:
    captured = unpack("v1-hybrid")
    snapshot = captured.snapshot()
    sound(snapshot)
    assert (captured.manifest.mode, captured.hierarchy.mode) == ("hybrid", "hybrid")
    web, batch = snapshot.cgroups[WEB], snapshot.cgroups[BATCH]
    assert (web.cpu_usage_ns, web.cpu_user_ns, web.cpu_system_ns) == (1_397_893_667, 1_350_000_000, 40_000_000)
    assert web.per_cpu_ns == (940_150_415, 457_743_252)
    assert (web.threads, web.memory_bytes, web.periods, web.throttled_periods) == (4, 51_118_080, 51, 0)
    assert (web.kernel_memory_bytes, web.kernel_tcp_bytes, web.swap_bytes) == (208_896, 0, 0)
    assert web.limits == CgroupLimits(
        quota_us=50_000, period_us=100_000, burst_us=0, weight=2048, idle=False, cpus="0-1", mems="0",
        memory_max_bytes=256 * MIB, kernel_tcp_max_bytes=UNLIMITED, pids_max=100,
    )  # fmt: skip
    assert (len(web.memory_stat), web.memory_stat["total_rss"]) == (42, 50_651_136)
    assert web.numa_stat["hierarchical_anon"] == {0: 12_366}
    assert web.numa_stat["hierarchical_anon"][0] * captured.manifest.page_bytes <= web.memory_stat["total_rss"]
    assert web.memory_events == {"oom_kill": 0}
    assert web.cpu_pressure is not None
    assert (web.cpu_pressure.some_us, web.cpu_pressure.some_avg60) == (2_738_356, 3.4)
    assert (batch.limits.idle, batch.limits.weight) == (True, 3)
    assert (snapshot.cgroups["/"].limits.quota_us, snapshot.cgroups["/"].limits.pids_max) == (-1, None)


def test_the_node_of_a_hybrid_machine(unpack: Unpack) -> None:
    node = unpack("v1-hybrid").snapshot().node
    assert node.machine == Machine(codename="AMD_K1AZen5", is_vm=True, cgroup_version="hybrid")
    assert node.cpu_khz == {0: 2_596_120, 1: 2_596_120}
    assert node.run_delay_ns == {}, "this kernel has no CONFIG_SCHEDSTATS"
    assert [zone.name for zone in node.zones] == ["DMA", "DMA32", "Normal"]
    assert [zone.managed for zone in node.zones] == [3840, 772_917, 1_605_632]
    assert node.numa[0].cpus == (0, 1)
    assert node.disks["vda"].kind == "VIRTIO"
    assert node.sysctl["net.ipv4.tcp_mem.max"] == 575_802
    assert "loop1" not in node.disks


def test_a_version_2_machine(unpack: Unpack) -> None:
    captured = unpack("v2")
    snapshot = captured.snapshot()
    sound(snapshot)
    assert (captured.manifest.mode, captured.hierarchy.mode, captured.hierarchy.v1) == ("v2", "v2", {})
    web, batch, root = snapshot.cgroups[WEB], snapshot.cgroups[BATCH], snapshot.cgroups["/"]
    assert (web.cpu_usage_ns, web.cpu_user_ns, web.cpu_system_ns) == (9_829_150_000, 5_894_571_000, 3_934_578_000)
    assert (web.threads, web.memory_bytes, web.swap_bytes) == (4, 52_424_704, 0)
    assert (web.periods, web.throttled_periods, web.throttled_ns) == (209, 126, 4_237_212_000)
    assert (web.per_cpu_ns, web.kernel_tcp_bytes, web.kernel_memory_bytes) == (None, None, 233_472)
    assert web.limits == CgroupLimits(
        quota_us=50_000, period_us=100_000, burst_us=0, weight=79, idle=False, cpus="0-1", mems="0-1",
        memory_max_bytes=256 * MIB, memory_high_bytes=200 * MIB, memory_low_bytes=32 * MIB, memory_min_bytes=0,
        swap_max_bytes=64 * MIB, pids_max=100,
    )  # fmt: skip
    assert (len(web.memory_stat), web.memory_stat["anon"]) == (51, 50_647_040)
    assert web.numa_stat["anon"] == {0: 28_672, 1: 50_618_368}
    assert sum(web.numa_stat["anon"].values()) == web.memory_stat["anon"]
    assert web.memory_events["local.oom_group_kill"] == 0
    assert web.io == {"254:16": IoStat(read_bytes=0, write_bytes=4 * MIB, reads=0, writes=5)}
    assert (batch.limits.idle, batch.limits.quota_us, batch.limits.swap_max_bytes) == (True, -1, UNLIMITED)
    assert (root.memory_bytes, root.limits.quota_us, root.limits.mems) == (None, None, "0-1")


def test_the_node_of_a_version_2_machine(unpack: Unpack) -> None:
    node = unpack("v2").snapshot().node
    assert node.machine == Machine(codename="", is_vm=True, cgroup_version="v2")
    assert {number: numa.cpus for number, numa in node.numa.items()} == {0: (0,), 1: (1,)}
    assert node.numa[0].distances == {0: 10, 1: 20}
    zones = [(zone.node, zone.name, zone.low) for zone in node.zones]
    assert zones == [(0, "DMA", 161), (0, "DMA32", 10_121), (1, "DMA32", 10_836)]
    assert node.disks["vdb"].write_bytes == 4 * MIB
    assert node.fragmentation.keys() == {0, 1}


@pytest.mark.parametrize("name", ["v1-hybrid", "v2"])
def test_a_capture_is_small(name: str) -> None:
    assert (CAPTURES / f"{name}.tar.gz").stat().st_size < 200 * 1024


@pytest.mark.parametrize("name", ["v1-hybrid", "v2"])
@settings(suppress_health_check=list(HealthCheck), max_examples=50)
@given(data=st.data())
def test_a_damaged_text_costs_what_it_says_and_nothing_raises(unpack: Unpack, name: str, data: st.DataObject) -> None:
    captured = unpack(name)
    files = sorted(path for path in captured.root.rglob("*") if path.is_file() and path.name != "manifest.json")
    path = data.draw(st.sampled_from([path for path in files if path.name != "mountinfo"]))
    text = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(text)))
        snapshot = captured.snapshot()
    finally:
        path.write_bytes(text)
    bugs = [status for status in snapshot.sources if "bug" in status.remedy]
    assert not bugs
    assert snapshot.cgroups.keys() == PATHS
    msgspec.json.encode(snapshot)


def test_values_of_this_machine_are_not_used_for_another(unpack: Unpack) -> None:
    captured = unpack("v1-hybrid")
    reader = NodeReader(captured.root / "proc", captured.root / "sys", live=False)
    sample: Any = reader.read()
    reader.close()
    assert (sample.filesystems, sample.tcp_states) == ({}, {})
