"""A machine that gives everything that a document can show, on version 1 or 2, with numbers to compute by hand.

Two NUMA nodes of two CPUs. Counters are straight lines through zero: N a second have the value N * seq at that second.
A container `/kubepods/besteffort/pod1/c1` uses 1.5 cores (1.25 user, 0.25 system), reads 16 and writes 32 blocks of 64 KiB a
second, and sends 3 and receives 2 packets of 1000 bytes; `/kubepods/besteffort/pod1/c2` and its pod only are there.
"""

from __future__ import annotations

from api.cpu import Cpu, Topology
from api.decision import ActMode, Cycle
from api.snapshot import (
    UNLIMITED,
    CgroupLimits,
    CgroupSample,
    CpuTimes,
    Disk,
    Durations,
    Interface,
    IoStat,
    L3Monitor,
    LoadAverages,
    Machine,
    MemoryZone,
    NodeSample,
    NumaNode,
    Pressure,
    ReclaimLatency,
    Snapshot,
    SocketTraffic,
    ThreadStates,
)
from api.units import GIB, KIB, MIB
from exporters.malachite.cgroup_documents import CgroupLayout
from exporters.malachite.history import MalachiteHistory

S, MS, US = 1_000_000_000, 1_000_000, 1000
BOOTED_AT_NS = 1_700_000_000 * S + 250 * MS
"""A quarter of a second after a whole one: what is rounded must be rounded down."""
POD = "/kubepods/besteffort/pod1"
BUSY, IDLE = f"{POD}/c1", f"{POD}/c2"
V1 = CgroupLayout(
    "V1", "/sys/fs/cgroup", {name: f"/sys/fs/cgroup/{name}" for name in ("cpu", "memory", "cpuset", "blkio")}
)
V2 = CgroupLayout(
    "V2", "/sys/fs/cgroup", dict.fromkeys(("cpu", "memory", "cpuset", "blkio", "net_cls"), "/sys/fs/cgroup")
)
V1_STAT = {
    "cache": 2 * MIB, "rss": 3 * MIB, "shmem": 4096, "dirty": 8192, "writeback": 0, "pgfault": 0, "pgmajfault": 0,
    "total_cache": 20 * MIB, "total_rss": 30 * MIB, "total_shmem": 4096, "total_dirty": 12288, "total_writeback": 4096,
    "total_swap": MIB, "total_active_anon": 10 * MIB, "total_inactive_anon": 20 * MIB, "total_active_file": 5 * MIB,
    "total_inactive_file": 15 * MIB, "hierarchical_memory_limit": 512 * MIB,
}  # fmt: skip
V2_STAT = {
    "anon": 30 * MIB, "file": 20 * MIB, "kernel": 3 * MIB, "kernel_stack": 131072, "sock": 4096, "shmem": 8192,
    "file_mapped": 5 * MIB, "file_dirty": 12288, "file_writeback": 4096, "inactive_anon": 20 * MIB,
    "active_anon": 10 * MIB, "inactive_file": 15 * MIB, "active_file": 5 * MIB, "unevictable": 0, "slab": MIB,
    "workingset_refault_anon": 3, "workingset_refault_file": 4, "workingset_activate_anon": 1,
    "workingset_activate_file": 1, "pgscan": 700, "pgsteal": 600, "pgscan_kswapd": 500, "pgsteal_kswapd": 450,
    "pgscan_direct": 200, "pgsteal_direct": 150, "pagetables": 4096,
}  # fmt: skip


def cpu_times(cores: int, seconds: int) -> CpuTimes:
    """Of each core's second: 50 % user, 5 % nice, 20 % system, 1 % irq, 2 % softirq, 2 % steal, 10 % iowait, 10 % idle."""
    unit = 10 * MS * cores * seconds
    return CpuTimes(
        user_ns=50 * unit, nice_ns=5 * unit, system_ns=20 * unit, irq_ns=unit, softirq_ns=2 * unit, steal_ns=2 * unit,
        iowait_ns=10 * unit, idle_ns=10 * unit,
    )  # fmt: skip


def pressure(percent: float) -> Pressure:
    return Pressure(
        some_us=123_456, some_avg10=percent, some_avg60=percent / 2, some_avg300=percent / 4,
        full_us=23_456, full_avg10=percent / 8, full_avg60=percent / 16, full_avg300=0.0,
    )  # fmt: skip


def node(seconds: int) -> NodeSample:
    """Node 0 has CPUs 0 and 1 and 12 GiB, node 1 the others and 4 GiB; the whole machine has 24 GiB."""
    columns = {"errs": 1, "drop": 2, "fifo": 3}
    received = columns | {"bytes": 1000 * seconds, "packets": 10 * seconds, "frame": 4, "compressed": 5, "multicast": 6}
    sent = columns | {"bytes": 500 * seconds, "packets": 5 * seconds, "colls": 4, "carrier": 5, "compressed": 6}
    sizes = {
        "MemTotal": 24 * GIB, "MemFree": 16 * GIB, "MemAvailable": 20 * GIB, "Buffers": GIB, "Cached": 4 * GIB,
        "SReclaimable": GIB, "Shmem": 8 * MIB, "Dirty": 40 * KIB, "Writeback": 4 * KIB, "SwapTotal": 2 * GIB,
        "SwapFree": GIB, "Active(anon)": GIB, "Inactive(anon)": 512 * MIB, "Active(file)": 2 * GIB,
        "Inactive(file)": 3 * GIB,
    }  # fmt: skip

    def numa(cpus: tuple[int, ...], total: int) -> NumaNode:
        of = {
            "MemTotal": total, "MemFree": total // 2, "MemUsed": total // 2, "FilePages": total // 4, "Shmem": MIB,
            "Active(anon)": MIB, "Inactive(anon)": 2 * MIB, "Active(file)": 4 * MIB, "Inactive(file)": 8 * MIB,
            "KReclaimable": 4 * MIB,
        }  # fmt: skip
        return NumaNode(cpus=cpus, meminfo=of)

    return NodeSample(
        cpu=cpu_times(4, seconds),
        per_cpu={number: cpu_times(1, seconds) for number in range(4)},
        load=(1.5, 1.25, 1.0),
        cpu_pressure=Pressure(some_us=1000, some_avg10=1.0, some_avg60=0.5, some_avg300=0.25),
        machine=Machine(codename="Intel_CascadeLake", is_vm=False),
        procs_running=3,
        procs_blocked=1,
        run_delay_ns={number: (number + 1) * 50 * MS * seconds for number in range(4)},
        timeslices=dict.fromkeys(range(4), 100 * seconds),
        cpu_khz={1: 2_400_000, 0: 2_500_000},
        meminfo=sizes,
        vmstat={name: index * seconds for index, name in enumerate(
            ("pgsteal_kswapd", "pgsteal_direct", "pgscan_kswapd", "pgscan_direct", "compact_stall"), start=1)},
        sysctl={"vm.watermark_scale_factor": 10, "net.ipv4.tcp_mem.max": 571_000, "net.ipv4.udp_mem.max": 1_142_000},
        netstat={
            "Tcp.OutSegs": 1000 * seconds, "Tcp.RetransSegs": 5 * seconds, "TcpExt.DelayedACKs": 1,
            "TcpExt.ListenOverflows": 2, "TcpExt.ListenDrops": 3, "TcpExt.TCPAbortOnMemory": 4,
            "TcpExt.TCPReqQFullDrop": 5, "TcpExt.TCPTimeouts": 6, "TcpExt.TCPMemoryPressures": 7,
            "TcpExt.TCPMemoryPressuresChrono": 8, "sockstat.TCP.mem": 9, "sockstat.UDP.mem": 10,
        },
        tcp_states={"close_wait": 11},
        numa={0: numa((0, 1), 12 * GIB), 1: numa((2, 3), 4 * GIB)},
        zones=(MemoryZone(node=0, name="Normal", free=1_572_864, min=128, low=256, high=384, managed=3_145_728),),
        free_blocks={0: {0: 1024, 9: 0, 10: 3}, 1: {0: 512, 9: 1, 10: 0}},
        disks={
            "vda": Disk(number="254:0", reads=20 * seconds, read_bytes=0, read_ns=0, writes=40 * seconds, write_bytes=0,
                        write_ns=0, busy_ns=15_999_999 * seconds, in_flight=0, kind="VIRTIO", wbt_lat_us=2000),
            "vda1": Disk(number="254:1", reads=seconds, read_bytes=0, read_ns=0, writes=0, write_bytes=0,
                         write_ns=0, busy_ns=0, in_flight=0),
        },
        interfaces={"eth0": Interface(received=received, sent=sent, duplex="full", speed_mbit=10_000),
                    "lo": Interface(received=received, sent=sent)},
        power_uj={"package-0": 60_000_000 * seconds, "package-0/core": 40_000_000 * seconds,
                  "package-0/dram": 5_500_000 * seconds},
        l3=(L3Monitor(id=0, group="", total_bytes=3000 * seconds, local_bytes=2000 * seconds, occupancy_bytes=MIB),
            L3Monitor(id=0, group="shared-50", total_bytes=300 * seconds, local_bytes=200 * seconds, occupancy_bytes=1)),
        files_read_at_ns=BOOTED_AT_NS + seconds * S,
    )  # fmt: skip


def limits(layout: CgroupLayout) -> CgroupLimits:
    """Half a core, CPUs 0 to 2, 512 MiB; no other limits."""
    shared = {"quota_us": 50_000, "period_us": 100_000, "cpus": "0-2", "mems": "0-1", "memory_max_bytes": 512 * MIB}
    if layout.version == "V1":
        return CgroupLimits(**shared, weight=1024, kernel_tcp_max_bytes=UNLIMITED)
    return CgroupLimits(
        **shared, weight=79, burst_us=10_000, memory_high_bytes=UNLIMITED, memory_low_bytes=MIB, memory_min_bytes=0,
        swap_max_bytes=UNLIMITED,
    )  # fmt: skip


def busy(layout: CgroupLayout, seconds: int) -> CgroupSample:
    """The container with everything."""
    item = layout.version == "V1"
    faults = {"pgfault": 300 * seconds, "pgmajfault": 3 * seconds}
    stat = V1_STAT | faults | {f"total_{k}": 2 * v for k, v in faults.items()} if item else V2_STAT | faults
    pages = {"total": {0: 300, 1: 20}, "file": {0: 200, 1: 10}, "anon": {0: 100, 1: 10}, "unevictable": {0: 0, 1: 0}}
    numa = pages | {f"hierarchical_{kind}": {n: 2 * v for n, v in of.items()} for kind, of in pages.items()}
    return CgroupSample(
        path=BUSY, id=11, cpu_usage_ns=1500 * MS * seconds, cpu_user_ns=1250 * MS * seconds,
        cpu_system_ns=250 * MS * seconds, per_cpu_ns=(1000 * MS * seconds, 500 * MS * seconds, 0, 0) if item else None,
        periods=10 * seconds, throttled_periods=2 * seconds, throttled_ns=40 * MS * seconds, threads=8,
        memory_bytes=64 * MIB, swap_bytes=MIB, kernel_memory_bytes=3 * MIB, kernel_tcp_bytes=4096 if item else None,
        cpu_pressure=None if item else pressure(8.0), memory_pressure=None if item else pressure(4.0),
        io_pressure=None if item else pressure(2.0), limits=limits(layout), memory_stat=stat,
        numa_stat=numa if item else {"anon": {0: 20 * MIB, 1: 10 * MIB}, "file": {0: 20 * MIB}, "unevictable": {0: 0}},
        memory_events={"oom_kill": 2} if item else {"oom_kill": 2, "local.max": 5, "local.oom": 1, "local.oom_kill": 1},
        io={"254:0": IoStat(read_bytes=MIB * seconds, write_bytes=2 * MIB * seconds, reads=16 * seconds,
                            writes=32 * seconds, discard_bytes=4096, discards=1)},
        files_read_at_ns=BOOTED_AT_NS + seconds * S - 400 * MS,
        threads_by_state=ThreadStates(runnable=2, uninterruptible=1, iowait=1, sleeping=5),
        load=LoadAverages(load1=2.5, load5=2.0, load15=1.5, runnable1=2.25, runnable5=1.75, runnable15=1.25),
        reclaim=ReclaimLatency(direct=Durations(sum_ns=1000 * seconds, count=seconds),
                        limit=Durations(sum_ns=3000 * seconds, count=2 * seconds), reclaimed_pages=0, kswapd_wakeups=0),
        net=SocketTraffic(tcp_sent_bytes=3000 * seconds, tcp_received_bytes=2000 * seconds, tcp_sent_packets=3 * seconds,
                tcp_received_packets=2 * seconds, udp_sent_bytes=100 * seconds, udp_received_bytes=0,
                udp_sent_packets=seconds, udp_received_packets=0, tcp_retransmits=0),
    )  # fmt: skip


def snapshot(seconds: int, layout: CgroupLayout = V1) -> Snapshot:
    """The machine at that second."""
    quiet = CgroupSample(
        path=IDLE, id=12, cpu_usage_ns=5 * MS, files_read_at_ns=BOOTED_AT_NS + seconds * S,
        threads_by_state=ThreadStates(runnable=1, uninterruptible=0, iowait=0, sleeping=0),
        load=LoadAverages(load1=0.5, load5=0.5, load15=0.5, runnable1=0.5, runnable5=0.5, runnable15=0.5),
    )  # fmt: skip
    above = [
        CgroupSample(path=path, id=number, files_read_at_ns=BOOTED_AT_NS + seconds * S)
        for number, path in enumerate(("/", "/kubepods", "/kubepods/besteffort", POD), start=1)
    ]
    samples = (*above, busy(layout, seconds), quiet)
    return Snapshot(
        seq=seconds,
        taken_at_ns=seconds * S,
        wall_time_ns=BOOTED_AT_NS + seconds * S,
        boot_id="5b2d4d0c-0000-4000-8000-000000000000",
        topology=Topology(cpus=tuple(Cpu(id=n, core=n, socket=0, numa=n // 2) for n in range(4))),
        node=node(seconds),
        cgroups={sample.path: sample for sample in samples},
    )


def history(*seconds: int, layout: CgroupLayout = V1) -> MalachiteHistory:
    """All these seconds seen, one after the other."""
    observed = MalachiteHistory()
    for second in seconds:
        observed = observed.after(snapshot(second, layout))
    return observed


def finished(shown: Snapshot) -> Cycle:
    return Cycle(snapshot=shown, previous=None, act=ActMode.OFF, trigger="tick")
