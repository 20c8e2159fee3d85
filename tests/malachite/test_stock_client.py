"""Katalyst's provisioner, unchanged, against a live agent on real cgroups; what it stored against reads of the same files.

Two runs of the client: one while a pod computes, writes and talks (rates), one while all its processes are stopped
(every counter to the last unit). `Checks` counts what was compared.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.units import MIB, NS_PER_US
from tests.builders.waiting import until
from tests.malachite import stock_client
from tests.malachite.kernel_files import Files, cpus_of, disk, interface, meminfo, netstat, vmstat
from tests.malachite.node import (
    BEST_EFFORT,
    BURSTABLE,
    CONTAINER,
    LIMIT,
    PERIOD_US,
    QUOTA_US,
    READS_BACK_S,
    SHARES,
    UID,
    Checks,
    Node,
    Rest,
    Sample,
    ask,
)

pytestmark = [pytest.mark.live, pytest.mark.kernel]

OFF = 0.6


@pytest.fixture(scope="module")
def node(hierarchy: Hierarchy, program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    # On a disk, or there is no block I/O to see.
    directory = tmp_path_factory.mktemp("node")
    created = Node(hierarchy, directory)
    try:
        until(lambda: "Malachite's documents on" in created.agent.log, "the agent serves Malachite's documents")
        time.sleep(READS_BACK_S)
        yield created
    finally:
        created.close()


@pytest.fixture(scope="module")
def at_work(node: Node, program: Path) -> tuple[stock_client.Stored, Sample, Sample]:
    """Three cycles while the pod works, and what the files said before and after."""
    before = Sample(node.process.pid)
    stored = ask(program, rounds=3)
    return stored, before, Sample(node.process.pid)


@pytest.fixture(scope="module")
def at_rest(node: Node, program: Path, at_work: object) -> Rest:
    node.stop_work()
    return Rest(program)


def test_rates_of_a_container_at_work(at_work: tuple[stock_client.Stored, Sample, Sample]) -> None:
    """A rate over five of ten seconds is about that over all ten: stamps are whole seconds, and a busy machine is not steady.

    What this must tell apart is five times too little or too much: `old_*` a second before the new ones, or cumulative ones.
    """
    stored, before, after = at_work
    checks = Checks()
    assert after.rate(before, "writes") > 1, "the pod writes to a disk"
    usage = after.rate(before, "usage") / 1e9
    checks.near("cpu.usage", stored.container(UID, "cpu.usage.container"), usage, OFF / 2)
    checks.near(
        "cpu.usage.ratio", stored.container(UID, "cpu.usage.ratio.container"), usage * PERIOD_US / QUOTA_US, OFF / 2
    )
    for field, name in (
        ("periods", "cpu.nr.period.container.rate"),
        ("reads", "blkio.read.iops.container"),
        ("writes", "blkio.write.iops.container"),
        ("read_bytes", "blkio.read.bps.container"),
        ("written_bytes", "blkio.write.bps.container"),
        ("sent", "net.tcp.send.bps.container"),
        ("sent", "net.tcp.recv.bps.container"),
    ):
        checks.near(name, stored.container(UID, name), after.rate(before, field), OFF, slack=1.0)
    # Throttling depends on other processes of the machine at that time.
    for field, name in (("throttled", "cpu.nr.throttled"), ("throttled_us", "cpu.throttled.time")):
        most = getattr(after, field) - getattr(before, field)
        checks.between(name, stored.container(UID, f"{name}.container.rate"), most / 100, most / 4)
    for path in (BEST_EFFORT, f"{BEST_EFFORT}/pod{UID}"):
        checks.near(f"{path} cpu.usage", stored.cgroup(path, "cpu.usage.cgroup"), usage, OFF / 2)
        five_s = 5 * after.rate(before, "written_bytes")
        checks.near(f"{path} blkio", stored.cgroup(path, "blkio.write.bps.cgroup"), five_s, OFF)
        five_s = 5 * after.rate(before, "sent")
        checks.near(f"{path} net", stored.cgroup(path, "net.tcp.send.byte.cgroup"), five_s, OFF)
    numa = [
        stored.container_numa(UID, int(n), "cpu.usage.numa.container")
        for n in stored.keys("podContainerNumaMetricMap", UID, "c")
        if "cpu.usage.numa.container" in stored.keys("podContainerNumaMetricMap", UID, "c", n)
    ]
    checks.near("cpu.usage.numa", sum(numa), usage, OFF)
    checks.reason(at_least=18)


def test_every_counter_and_setting_of_a_container(at_rest: Rest) -> None:
    """Nothing runs: what the client has is what the files say, to the last unit."""
    at_rest.check(_compare_container, at_least=28)


def _compare_container(stored: stock_client.Stored, checks: Checks) -> None:
    files = Files(f"{BEST_EFFORT}/pod{UID}/{CONTAINER}")

    def same(name: str, read: float) -> None:
        checks.equal(name, stored.container(UID, f"{name}.container"), read)

    same("cpu.quota", QUOTA_US)
    same("cpu.period", PERIOD_US)
    same("cpu.limit", QUOTA_US / PERIOD_US)
    same("cpu.share", SHARES)
    same("cpu.nr.period", files.keyed("cpu", "cpu.stat", "nr_periods"))
    same("cpu.nr.throttled", files.keyed("cpu", "cpu.stat", "nr_throttled"))
    same("cpu.throttled.time", files.keyed("cpu", "cpu.stat", "throttled_time") // NS_PER_US)
    same("mem.limit", LIMIT)
    same("mem.usage", files.number("memory", "memory.usage_in_bytes"))
    same("mem.usage.kern", files.number("memory", "memory.kmem.usage_in_bytes"))
    same("mem.usage.user", LIMIT - files.number("memory", "memory.kmem.usage_in_bytes"))
    same("mem.tcp.limit", files.number("memory", "memory.kmem.tcp.limit_in_bytes"))
    for name, key in (
        ("mem.rss", "total_rss"), ("mem.cache", "total_cache"), ("mem.shmem", "total_shmem"), ("mem.swap", "total_swap"),
        ("mem.dirty", "dirty"), ("mem.writeback", "writeback"), ("mem.pgfault", "pgfault"),
        ("mem.pgmajfault", "pgmajfault"), ("mem.inactiveanon", "total_inactive_anon"),
        ("mem.inactivefile", "total_inactive_file"),
    ):  # fmt: skip
        same(name, files.memory(key))
    same("mem.oom", files.keyed("memory", "memory.oom_control", "oom_kill"))
    assert files.memory("total_rss") > 40 * MIB, "the pod uses the requested memory"
    for node in range(_numa_nodes()):
        for kind in ("total", "file", "anon"):
            name = f"mem.{kind}.numa.container"
            checks.equal(name, stored.container_numa(UID, node, name), 4096 * files.numa_pages(kind, node))
    counted = sum(stored.container_numa(UID, node, "cpu.usage.count.numa.container") for node in range(_numa_nodes()))
    checks.equal("cpu.usage.count.numa", counted, sum(files.per_cpu()))
    checks.equal("cpu.usage of what is stopped", stored.container(UID, "cpu.usage.container"), 0.0)


@pytest.mark.parametrize("path", [BEST_EFFORT, BURSTABLE, f"{BEST_EFFORT}/pod{UID}"])
def test_every_counter_and_setting_of_a_cgroup(at_rest: Rest, path: str) -> None:
    at_rest.check(functools.partial(_compare_cgroup, path), at_least=34)


def _compare_cgroup(path: str, stored: stock_client.Stored, checks: Checks) -> None:
    files = Files(path)

    def same(name: str, read: float) -> None:
        checks.equal(f"{path} {name}", stored.cgroup(path, f"{name}.cgroup"), read)

    same("cpu.quota", files.number("cpu", "cpu.cfs_quota_us"))
    same("cpu.period", files.number("cpu", "cpu.cfs_period_us"))
    same("cpu.share", files.number("cpu", "cpu.shares"))
    same("cpu.limit", files.number("cpu", "cpu.cfs_quota_us") / files.number("cpu", "cpu.cfs_period_us"))
    same("cpu.nr.throttled", files.keyed("cpu", "cpu.stat", "nr_throttled"))
    same("cpu.throttled.period", files.keyed("cpu", "cpu.stat", "nr_periods"))
    same("cpu.throttled.time", files.keyed("cpu", "cpu.stat", "throttled_time") // NS_PER_US)
    same("mem.limit", files.number("memory", "memory.limit_in_bytes"))
    same("mem.usage", files.number("memory", "memory.usage_in_bytes"))
    same("mem.usage.sys", files.number("memory", "memory.kmem.usage_in_bytes"))
    for name, key in (
        ("mem.rss", "total_rss"), ("mem.cache", "total_cache"), ("mem.shmem", "total_shmem"),
        ("mem.swap", "total_swap"), ("mem.dirty", "total_dirty"), ("mem.writeback", "total_writeback"),
        ("mem.pgfault", "total_pgfault"), ("mem.pgmajfault", "total_pgmajfault"),
        ("mem.activeanon", "total_active_anon"), ("mem.inactiveanon", "total_inactive_anon"),
        ("mem.activefile", "total_active_file"), ("mem.inactivefile", "total_inactive_file"),
    ):  # fmt: skip
        same(name, files.memory(key))
    same("mem.oom", files.keyed("memory", "memory.oom_control", "oom_kill"))
    for node in range(_numa_nodes()):
        for kind in ("total", "file", "anon"):
            name = f"mem.{kind}.numa.cgroup"
            pages = files.numa_pages(f"hierarchical_{kind}", node)
            checks.equal(f"{path} {name}", stored.cgroup_numa(path, node, name), 4096 * pages)
    for name in (
        "blkio.read.iops", "blkio.write.iops", "blkio.read.bps", "blkio.write.bps",
        "net.tcp.send.byte", "net.tcp.send.pps", "net.tcp.recv.byte", "net.tcp.recv.pps",
    ):  # fmt: skip
        same(name, 0)


Watched = tuple[str, Callable[[stock_client.Stored], float], Callable[[], float], float]
"""What, where the client has it, how to read it, and how far it may have gone meanwhile and come back."""


COUNTED = {
    "mem.kswapdsteal.system": lambda: vmstat("pgsteal_kswapd"),
    "mem.direct.pgsteal.system": lambda: vmstat("pgsteal_direct"),
    "mem.kswapd.pgscan.system": lambda: vmstat("pgscan_kswapd"),
    "mem.direct.pgscan.system": lambda: vmstat("pgscan_direct"),
    "mem.compact.stall.system": lambda: vmstat("compact_stall"),
    "net.tcp.delay_acks": lambda: netstat("TcpExt", "DelayedACKs"),
    "net.tcp.listen_overflows": lambda: netstat("TcpExt", "ListenOverflows"),
    "net.tcp.listen_drops": lambda: netstat("TcpExt", "ListenDrops"),
    "net.tcp.abort_on_memory": lambda: netstat("TcpExt", "TCPAbortOnMemory"),
    "net.tcp.req_q_full_drop": lambda: netstat("TcpExt", "TCPReqQFullDrop"),
    "net.tcp.retrans_segs": lambda: netstat("Tcp", "RetransSegs"),
    "net.tcp.out_segs": lambda: netstat("Tcp", "OutSegs"),
    "mem.scale.factor.system": lambda: int(Path("/proc/sys/vm/watermark_scale_factor").read_text()),
    "mem.sock.tcp_limit.system": lambda: int(Path("/proc/sys/net/ipv4/tcp_mem").read_text().split()[2]),
    "mem.sock.udp_limit.system": lambda: int(Path("/proc/sys/net/ipv4/udp_mem").read_text().split()[2]),
    "cpu.total.system": lambda: os.cpu_count() or 0,
}


SIZES = {
    "total": "MemTotal", "free": "MemFree", "available": "MemAvailable", "shmem": "Shmem", "buffer": "Buffers",
    "pagecache": "Cached", "slab.reclaimable": "SReclaimable", "active.anon": "Active(anon)",
    "inactive.anon": "Inactive(anon)", "active.file": "Active(file)", "inactive.file": "Inactive(file)",
    "swap.total": "SwapTotal", "swap.free": "SwapFree",
}  # fmt: skip


NUMA_SIZES = {
    "total": "MemTotal", "free": "MemFree", "used": "MemUsed", "shmem": "Shmem", "filepage": "FilePages",
    "inactivefile": "Inactive(file)",
}  # fmt: skip


RECEIVED = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed")


SENT = (*RECEIVED[:5], "colls", "carrier", "compressed")


def used() -> float:
    return meminfo("MemTotal") - sum(map(meminfo, ("MemFree", "Buffers", "Cached", "SReclaimable")))


def load(index: int) -> float:
    return float(Path("/proc/loadavg").read_text().split()[index])


def watched(stored: stock_client.Stored) -> Iterator[Watched]:
    """Everything to compare, of the devices, interfaces and NUMA nodes that the client knows."""
    for name, read in COUNTED.items():
        yield name, lambda s, name=name: s.node(name), read, 0.0
    for name, key in SIZES.items():
        yield key, lambda s, name=name: s.node(f"mem.{name}.system"), lambda key=key: meminfo(key), 64 * MIB
    yield "used", lambda s: s.node("mem.used.system"), used, 64 * MIB
    for index, span in enumerate(("1min", "5min", "15min")):
        yield span, lambda s, span=span: s.node(f"cpu.load.{span}.system"), lambda index=index: load(index), 0.5
    for node in range(_numa_nodes()):
        for name, key in NUMA_SIZES.items():
            read = functools.partial(meminfo, key, node)
            yield f"{node} {key}", lambda s, node=node, name=name: s.numa(node, f"mem.{name}.numa"), read, 64 * MIB
    for name in sorted(stored.keys("deviceMetricMap")):
        for index, metric in enumerate(("read", "write", "busy")):
            read = functools.partial(lambda name, index: disk(name)[index], name, index)
            yield f"{name} {metric}", lambda s, n=name, m=metric: s.device(n, f"io.{m}.system"), read, 0.0
    for name in sorted(stored.keys("networkMetricMap")):
        for way, prefix, kinds in ((0, "receive", RECEIVED), (1, "transmit", SENT)):
            for index, kind in enumerate(kinds):
                read = functools.partial(lambda name, way, index: interface(name)[way][index], name, way, index)
                metric = f"net.tcp.{prefix}_{kind}"
                yield f"{name} {metric}", lambda s, n=name, m=metric: s.network(n, m), read, 0.0


def test_the_node(node: Node, program: Path, at_rest: Rest) -> None:
    """The machine goes on working: what the client has lies between a read before and one after."""
    reads = list(watched(at_rest.stored))
    before = [read() for _, _, read, _ in reads]
    time.sleep(READS_BACK_S)
    stored = ask(program, rounds=1)
    checks = Checks()
    for (what, value, read, slack), then in zip(reads, before, strict=True):
        now = read()
        checks.between(what, value(stored), min(then, now) - slack, max(then, now) + slack)
    for name in stored.keys("deviceMetricMap"):
        assert (Path("/sys/block") / name).is_dir(), name
    cpus = os.cpu_count() or 0
    _check_cpus(stored, checks, cpus)
    mhz = [float(line.split(":")[1]) for line in Path("/proc/cpuinfo").read_text().splitlines() if "cpu MHz" in line]
    checks.near("scaling.cur.freq.khz", stored.node("scaling.cur.freq.khz"), 1000 * mhz[0], 0.5)
    assert stored.text("info.is.vm") is ("hypervisor" in Path("/proc/cpuinfo").read_text())
    checks.reason(at_least=60)


def _check_cpus(stored: stock_client.Stored, checks: Checks, cpus: int) -> None:
    assert sum(len(cpus_of(node)) for node in range(_numa_nodes())) == cpus
    for node in range(_numa_nodes()):
        high = meminfo("MemTotal", node) + 64 * MIB
        checks.between("mem.available.numa", stored.numa(node, "mem.available.numa"), 1, high)
        usage = [stored.cpu(cpu, "cpu.usage.ratio.cpu") for cpu in cpus_of(node)]
        checks.near("cpu.usage.numa", stored.numa(node, "cpu.usage.numa"), sum(usage), 0.001)
        checks.between("cpu.usage.numa.avg", stored.numa(node, "cpu.usage.numa.avg"), 0.0, 1.0)
    for cpu in range(cpus):
        checks.between("cpu.usage.ratio", stored.cpu(cpu, "cpu.usage.ratio.cpu"), 0.0, 1.0)
        checks.between("cpu.iowait.ratio", stored.cpu(cpu, "cpu.iowait.ratio.cpu"), 0.0, 1.0)
        checks.between("cpu.schedwait, microseconds", stored.cpu(cpu, "cpu.schedwait.cpu"), 0.1, 1_000_000)


def test_what_an_agent_has_set_it_reads_back(node: Node, program: Path) -> None:
    """With a turn of its own for each cgroup, and settings read every 15 s, some would still be what they were."""
    files = [group.file("cpu", "cpu.shares") for group in node.groups[1:4]]
    before = [file.read_text() for file in files]
    try:
        for file in files:
            file.write_text("3333")
        time.sleep(READS_BACK_S)
        stored = ask(program, rounds=1)
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    paths = [group.path for group in node.groups[1:4]]
    assert {path: stored.cgroup(path, "cpu.share.cgroup") for path in paths} == dict.fromkeys(paths, 3333)


def test_the_client_complains_of_nothing(at_work: tuple[stock_client.Stored, Sample, Sample], at_rest: Rest) -> None:
    """It logs what it cannot decode, what is missing, and what is out of date."""
    for stored in (at_work[0], at_rest.stored):
        loud = [line for line in stored.log.splitlines() if line.startswith(("E", "F")) or "outdated" in line]
        assert not loud, "\n".join(loud)
    assert at_rest.stored.count() > 250


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
