"""State of one node at one instant: the Snapshot that the advisor and every exporter receive.
Counters are cumulative since boot or since the cgroup was created; `api.rates` computes differences. None means
that the kernel, the cgroup version or missing privileges do not provide the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from api.cpu import Topology
from api.measurements import (
    Blame,
    BlockIo,
    CgroupLimits,
    CpuCounters,
    CpuTimes,
    Disk,
    Durations,
    Filesystem,
    Interface,
    IoStat,
    Kswapd,
    KubeletManagers,
    L3Monitor,
    LoadAverages,
    Machine,
    MemoryZone,
    NumaNode,
    OomVictim,
    Pressure,
    ReclaimLatency,
    RunqLatency,
    SocketTraffic,
    ThreadStates,
    Wakeups,
)
from api.pod import Pod


class CgroupSample(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup. None means that the kernel, the hierarchy or our privileges do not give the value."""

    path: str
    id: int
    """Inode of its directory in the cpu controller's hierarchy (v1) or the unified one (v2): its identity."""
    cpu_usage_ns: int | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_ns: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None
    wait: RunqLatency | None = None
    # From files
    cpu_user_ns: int | None = None
    cpu_system_ns: int | None = None
    per_cpu_ns: tuple[int, ...] | None = None
    """CPU time by CPU number; only version 1 has it."""
    limits: CgroupLimits = CgroupLimits()
    swap_bytes: int | None = None
    kernel_memory_bytes: int | None = None
    kernel_tcp_bytes: int | None = None
    memory_stat: Mapping[str, int] = {}
    """memory.stat in the kernel's names: bytes, pages or events as the kernel counts them."""
    numa_stat: Mapping[str, Mapping[int, int]] = {}
    """memory.numa_stat by kind and node: pages on version 1, bytes on version 2."""
    memory_events: Mapping[str, int] = {}
    """memory.events and, as `local.NAME`, memory.events.local; of version 1 oom_kill alone."""
    io: Mapping[str, IoStat] = {}
    """By device, `MAJOR:MINOR`."""
    files_read_at_ns: int | None = None
    """CLOCK_REALTIME when memory_stat, numa_stat, memory_events, io, swap_bytes and kernel*_bytes were read, which may be
    older than the rest, by some 5 s; limits may be 30 s old, or as old as these where Malachite's documents are served."""
    # From probes
    blame: Blame | None = None
    throttles: Durations | None = None
    """Single throttles by the cgroup's own quota or one above it, each on one CPU."""
    threads_by_state: ThreadStates | None = None
    load: LoadAverages | None = None
    reclaim: ReclaimLatency | None = None
    oom_kills: int | None = None
    numa_migrations: int | None = None
    """Tasks that the scheduler moved to a CPU of another NUMA node."""
    block_io: Mapping[str, BlockIo] = {}
    """By device, `MAJOR:MINOR`."""
    net: SocketTraffic | None = None
    counters: CpuCounters | None = None
    wakeups: Wakeups | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as a whole."""

    cpu: CpuTimes | None = None
    per_cpu: Mapping[int, CpuTimes] = {}
    load: tuple[float, float, float] | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None
    # From files
    machine: Machine = Machine()
    procs_running: int | None = None
    procs_blocked: int | None = None
    run_delay_ns: Mapping[int, int] = {}
    """By CPU: time that tasks waited for it (/proc/schedstat), cumulative."""
    timeslices: Mapping[int, int] = {}
    """By CPU: how often a task got it (/proc/schedstat), cumulative; run_delay_ns is the sum of their waits."""
    cpu_khz: Mapping[int, int] = {}
    meminfo: Mapping[str, int] = {}
    """/proc/meminfo in the kernel's names: bytes, but HugePages_* in pages."""
    vmstat: Mapping[str, int] = {}
    sysctl: Mapping[str, int] = {}
    """Settings that readers need, in sysctl's names: `vm.watermark_scale_factor`."""
    netstat: Mapping[str, int] = {}
    """/proc/net/snmp, netstat and sockstat as `Tcp.RetransSegs`, `TcpExt.ListenDrops`, `sockstat.TCP.mem`."""
    tcp_states: Mapping[str, int] = {}
    """Sockets by state, such as `close_wait`."""
    numa: Mapping[int, NumaNode] = {}
    zones: tuple[MemoryZone, ...] = ()
    fragmentation: Mapping[int, Mapping[int, int]] = {}
    """By NUMA node and order: external fragmentation index x 1000, as extfrag_index shows it."""
    free_blocks: Mapping[int, Mapping[int, int]] = {}
    """By NUMA node and order: free blocks of 2^order pages in all of its zones (/proc/buddyinfo)."""
    disks: Mapping[str, Disk] = {}
    interfaces: Mapping[str, Interface] = {}
    filesystems: Mapping[str, Filesystem] = {}
    """By mount point; only those on a device."""
    interrupts: Mapping[int, int] = {}
    """By CPU, all kinds together, cumulative."""
    power_uj: Mapping[str, int] = {}
    """RAPL energy counters by domain (`package-0`, `package-0/dram`), cumulative microjoules."""
    l3: tuple[L3Monitor, ...] = ()
    files_read_at_ns: int | None = None
    """CLOCK_REALTIME when those of the above that are not read every tick were read: vmstat, sysctl, netstat, tcp_states,
    numa, zones, fragmentation, disks, interfaces, filesystems and interrupts."""
    kubelet: KubeletManagers | None = None
    """None where the pods are not a kubelet's, or nothing is known of it."""
    # From probes
    kswapd: Mapping[int, Kswapd] = {}
    """By NUMA node."""
    softirq_ns: Mapping[int, Mapping[str, int]] = {}
    """By CPU and vector (`NET_RX`), cumulative."""
    cpu_waits: Mapping[int, RunqLatency] = {}
    """By CPU: time that tasks waited for it and how often one got it, like run_delay_ns and timeslices; without slots."""
    cpu_counters: Mapping[int, CpuCounters] = {}
    """By CPU: all that ran there, the idle task included."""
    oom_victims: tuple[OomVictim, ...] = ()
    """The latest ones, oldest first."""


class RequestLatency(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod says of itself: the latency histogram of its requests, read from its own Prometheus endpoint."""

    bounds_s: tuple[float, ...]
    """Inclusive upper bounds in seconds, without +Inf."""
    buckets: tuple[int, ...]
    """Cumulative counts, one per bound and a last one for +Inf."""
    sum_s: float
    sampled_at_ns: int


class ComponentHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one source of a snapshot fared: failures are facts too."""

    name: str
    ok: bool
    duration_ns: int = 0
    detail: str = ""
    """What it runs on, for example the form of a probe."""
    error: str = ""
    remedy: str = ""
    lost_events: int | None = None
    """What it could not count since it began; None where nothing can be lost, or nothing is known of it."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of the node at one instant; the advisor and every exporter see this same object."""

    seq: int
    taken_at_ns: int
    """CLOCK_MONOTONIC."""
    wall_time_ns: int
    """CLOCK_REALTIME, for people; no arithmetic is done on it."""
    boot_id: str
    topology: Topology
    node: NodeSample
    cgroups: Mapping[str, CgroupSample]
    pods: tuple[Pod, ...] = ()
    indicators: Mapping[str, RequestLatency] = {}
    """By pod key."""
    sources: tuple[ComponentHealth, ...] = ()

    @property
    def pods_fresh(self) -> bool:
        """Whether `pods` are those of now. Else they are those that were known last, if any: some may be new that nobody lists,
        and some may have gone."""
        return all(source.ok for source in self.sources if source.name == "pods")


class Cadence(IntEnum):
    """How often a file is read. Files that are long, or make the kernel add up its CPUs first, need not be read each time."""

    TICK = 0
    SLOW = 1
    RARE = 2
    """What people and agents set. Not kept open either."""


CADENCE_PERIOD_NS = {Cadence.TICK: 0, Cadence.SLOW: 5_000_000_000, Cadence.RARE: 30_000_000_000}
