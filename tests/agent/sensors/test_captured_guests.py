"""Two machines of version 2 alone, with two NUMA nodes and swap, that tests/vm/test_probes_capture.py boots and captures.

On both, three pods stand still after some work: `web` has half a CPU on node 1, holds 40 MiB and writes to the second disk;
`db` holds 64 MiB where memory.high lets it have 32, the rest in swap on the first disk; `batch` burned CPU with cpu.idle.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import msgspec
import pytest

from api.snapshot import UNLIMITED, CgroupLimits, CgroupSample, IoStat, Machine, Snapshot
from api.units import MIB
from tests.captures import CAPTURES, Captured

TOP = "/kubepods"
WEB, DB, BATCH = f"{TOP}/burstable/pod-web/web", f"{TOP}/burstable/pod-db/db", f"{TOP}/besteffort/pod-batch/batch"
LEAVES = (WEB, DB, BATCH)
SWAP, DATA = "254:0", "254:16"


class Expected(NamedTuple):
    """Expected values of one machine's files."""

    kernel: str
    web_cpu_ns: tuple[int, int, int]
    web_periods: tuple[int, int, int]
    web_memory: tuple[int, int, int]
    web_node_1: int
    db_memory: tuple[int, int, int]
    db_high: int
    db_swapped: IoStat
    batch_cpu_ns: int
    batch_weight: int
    stats: int
    zones: list[tuple[int, str, int]]


MACHINES = {
    "v2-6.1": Expected(
        kernel="Linux 6.1.0-56-amd64",
        web_cpu_ns=(2_131_683_000, 1_378_790_000, 752_892_000),
        web_periods=(47, 42, 1_720_200_000),
        web_memory=(48_283_648, 47_976_448, 241_664),
        web_node_1=47_976_448,
        db_memory=(32_956_416, 23_326_720, 49_930_240),
        db_high=16,
        db_swapped=IoStat(read_bytes=208_896, write_bytes=49_930_240, reads=51, writes=12_190),
        batch_cpu_ns=3_731_785_000,
        batch_weight=0,
        stats=51,
        zones=[(0, "DMA", 145), (0, "DMA32", 13_998), (1, "DMA32", 4330), (1, "Normal", 9685)],
    ),
    "v2-6.12": Expected(
        kernel="Linux 6.12.117+deb12-amd64",
        web_cpu_ns=(2_923_137_000, 1_736_936_000, 1_186_200_000),
        web_periods=(63, 58, 2_501_717_000),
        web_memory=(48_553_984, 48_017_408, 245_760),
        web_node_1=48_017_408,
        db_memory=(32_038_912, 30_724_096, 42_541_056),
        db_high=18,
        db_swapped=IoStat(read_bytes=303_104, write_bytes=42_536_960, reads=74, writes=10_385),
        batch_cpu_ns=5_469_765_000,
        batch_weight=1,
        stats=65,
        zones=[(0, "DMA", 145), (0, "DMA32", 14_037), (1, "DMA32", 4317), (1, "Normal", 9657)],
    ),
}


@pytest.fixture(scope="module", params=MACHINES)
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Expected, Captured, Snapshot]:
    captured = Captured(CAPTURES / f"{request.param}.tar.gz", tmp_path_factory.mktemp(request.param))
    return MACHINES[request.param], captured, captured.snapshot()


def test_all_of_it_is_there(machine: tuple[Expected, Captured, Snapshot]) -> None:
    reported, captured, snapshot = machine
    assert captured.manifest.kernel == reported.kernel
    assert (captured.manifest.mode, captured.hierarchy.mode, captured.hierarchy.v1) == ("v2", "v2", {})
    above = {path.rpartition("/")[0] for path in LEAVES}
    assert snapshot.cgroups.keys() == {
        "/",
        "/system.slice",
        TOP,
        f"{TOP}/burstable",
        f"{TOP}/besteffort",
        *above,
        *LEAVES,
    }
    assert not [status for status in snapshot.sources if not status.ok and status.name != "waits"]
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


def test_a_pod_with_half_a_cpu_on_one_node(machine: tuple[Expected, Captured, Snapshot]) -> None:
    reported, _, snapshot = machine
    web = snapshot.cgroups[WEB]
    assert (web.cpu_usage_ns, web.cpu_user_ns, web.cpu_system_ns) == reported.web_cpu_ns
    assert (web.periods, web.throttled_periods, web.throttled_ns) == reported.web_periods
    assert (web.memory_bytes, web.memory_stat["anon"], web.kernel_memory_bytes) == reported.web_memory
    assert (web.swap_bytes, web.threads, web.per_cpu_ns) == (0, 2, None)
    assert web.numa_stat["anon"] == {0: 0, 1: reported.web_node_1}
    assert web.limits == CgroupLimits(
        quota_us=50_000, period_us=100_000, burst_us=0, weight=79, idle=False, cpus="2-3", mems="1",
        memory_max_bytes=192 * MIB, memory_high_bytes=160 * MIB, memory_low_bytes=32 * MIB, memory_min_bytes=0,
        swap_max_bytes=64 * MIB, pids_max=100,
    )  # fmt: skip
    assert web.io.keys() == {DATA}


def test_a_pod_half_of_which_is_in_swap(machine: tuple[Expected, Captured, Snapshot]) -> None:
    reported, _, snapshot = machine
    db = snapshot.cgroups[DB]
    assert (db.memory_bytes, db.memory_stat["anon"], db.swap_bytes) == reported.db_memory
    assert (db.memory_events["high"], db.memory_events["max"], db.memory_events["oom_kill"]) == (reported.db_high, 0, 0)
    assert db.io == {SWAP: reported.db_swapped}
    assert db.limits.memory_high_bytes == 32 * MIB
    assert (db.limits.memory_max_bytes, db.limits.swap_max_bytes, db.limits.cpus) == (UNLIMITED, UNLIMITED, "0-3")
    assert db.memory_pressure is not None
    assert db.memory_pressure.some_us > 0


def test_a_pod_with_what_is_left(machine: tuple[Expected, Captured, Snapshot]) -> None:
    reported, _, snapshot = machine
    batch = snapshot.cgroups[BATCH]
    assert (batch.cpu_usage_ns, batch.periods, batch.limits.idle) == (reported.batch_cpu_ns, 0, True)
    assert batch.limits.weight == reported.batch_weight, "as the kernel says of a cgroup with cpu.idle"


def summed(samples: list[CgroupSample], of: Callable[[CgroupSample], int | None]) -> int:
    return sum(value for value in map(of, samples) if value is not None)


def test_what_is_above_is_the_sum_of_what_is_below(machine: tuple[Expected, Captured, Snapshot]) -> None:
    """Exactly in pages and bytes; in microseconds but for the rounding of each."""
    reported, _, snapshot = machine
    top, leaves = snapshot.cgroups[TOP], [snapshot.cgroups[path] for path in LEAVES]
    assert len(top.memory_stat) == reported.stats
    assert top.memory_stat["anon"] == summed(leaves, lambda leaf: leaf.memory_stat["anon"])
    assert top.swap_bytes == summed(leaves, lambda leaf: leaf.swap_bytes)
    assert top.memory_events["high"] == summed(leaves, lambda leaf: leaf.memory_events["high"])
    assert top.memory_events["local.high"] == 0
    for node in (0, 1):
        assert top.numa_stat["anon"][node] == summed(leaves, lambda leaf, node=node: leaf.numa_stat["anon"][node])  # type: ignore[misc]
    assert top.io == reduce(operator.or_, (dict(leaf.io) for leaf in leaves))
    assert top.cpu_usage_ns is not None
    assert 0 <= top.cpu_usage_ns - summed(leaves, lambda leaf: leaf.cpu_usage_ns) < 10_000
    assert top.threads == summed(leaves, lambda leaf: leaf.threads) == 4


def test_the_node(machine: tuple[Expected, Captured, Snapshot]) -> None:
    reported, _, snapshot = machine
    node = snapshot.node
    assert node.machine == Machine(codename="", is_vm=True, cgroup_version="v2")
    assert {number: numa.cpus for number, numa in node.numa.items()} == {0: (0, 1), 1: (2, 3)}
    assert [node.numa[number].distances for number in (0, 1)] == [{0: 10, 1: 21}, {0: 21, 1: 10}]
    assert [(zone.node, zone.name, zone.low) for zone in node.zones] == reported.zones
    assert node.run_delay_ns.keys() == {0, 1, 2, 3}, "this kernel has CONFIG_SCHEDSTATS"
    assert node.disks["vdb"].write_bytes is not None
    assert node.fragmentation.keys() == {0, 1}
