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
    """Counters and limits of one cgroup; None if the kernel, the cgroup version or the privileges do not provide a value."""

    path: str
    id: int
    """Inode of the cgroup's directory, in the hierarchy of the cpu controller (v1) or the unified one (v2): its identity."""
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
    """CPU time by CPU number; cgroup v1 only."""
    limits: CgroupLimits = CgroupLimits()
    swap_bytes: int | None = None
    kernel_memory_bytes: int | None = None
    kernel_tcp_bytes: int | None = None
    memory_stat: Mapping[str, int] = {}
    """Contents of memory.stat in the kernel's names and units: bytes, pages or events."""
    numa_stat: Mapping[str, Mapping[int, int]] = {}
    """Contents of memory.numa_stat by kind and NUMA node: pages on v1, bytes on v2."""
    memory_events: Mapping[str, int] = {}
    """Contents of memory.events and, as `local.NAME`, of memory.events.local; on v1 only oom_kill."""
    io: Mapping[str, IoStat] = {}
    """By device number, `MAJOR:MINOR`."""
    files_read_at_ns: int | None = None
    """CLOCK_REALTIME when memory_stat, numa_stat, memory_events, io, swap_bytes and kernel*_bytes were read: up to 5 s older
    than the rest. Limits may be 30 s old, or as old as these values if the Malachite documents are served."""
    # From probes
    blame: Blame | None = None
    throttles: Durations | None = None
    """Each throttling of one run queue by the cgroup's own quota or that of an ancestor."""
    threads_by_state: ThreadStates | None = None
    load: LoadAverages | None = None
    reclaim: ReclaimLatency | None = None
    oom_kills: int | None = None
    numa_migrations: int | None = None
    """Tasks that the scheduler moved to a CPU of another NUMA node."""
    block_io: Mapping[str, BlockIo] = {}
    """By device number, `MAJOR:MINOR`."""
    net: SocketTraffic | None = None
    counters: CpuCounters | None = None
    wakeups: Wakeups | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of the whole machine."""

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
    """Time that tasks waited for each CPU (/proc/schedstat), cumulative."""
    timeslices: Mapping[int, int] = {}
    """Number of times that each CPU switched to a task (/proc/schedstat), cumulative; run_delay_ns sums their waits."""
    cpu_khz: Mapping[int, int] = {}
    meminfo: Mapping[str, int] = {}
    """Contents of /proc/meminfo in the kernel's names: bytes, but HugePages_* in pages."""
    vmstat: Mapping[str, int] = {}
    sysctl: Mapping[str, int] = {}
    """Kernel settings that policies and exporters need, in sysctl's names: `vm.watermark_scale_factor`."""
    netstat: Mapping[str, int] = {}
    """Contents of /proc/net/snmp, netstat and sockstat as `Tcp.RetransSegs`, `TcpExt.ListenDrops`, `sockstat.TCP.mem`."""
    tcp_states: Mapping[str, int] = {}
    """Number of TCP sockets by state, such as `close_wait`."""
    numa: Mapping[int, NumaNode] = {}
    zones: tuple[MemoryZone, ...] = ()
    fragmentation: Mapping[int, Mapping[int, int]] = {}
    """External fragmentation index x 1000 by NUMA node and order, as extfrag_index in debugfs."""
    free_blocks: Mapping[int, Mapping[int, int]] = {}
    """Free blocks of 2^order pages by NUMA node and order, summed over the node's zones (/proc/buddyinfo)."""
    disks: Mapping[str, Disk] = {}
    interfaces: Mapping[str, Interface] = {}
    filesystems: Mapping[str, Filesystem] = {}
    """By mount point; only file systems on a block device."""
    interrupts: Mapping[int, int] = {}
    """Interrupts of all kinds by CPU, cumulative."""
    power_uj: Mapping[str, int] = {}
    """RAPL energy counters by domain (`package-0`, `package-0/dram`), cumulative microjoules."""
    l3: tuple[L3Monitor, ...] = ()
    files_read_at_ns: int | None = None
    """CLOCK_REALTIME when the values that are not read every cycle were read: vmstat, sysctl, netstat, tcp_states, numa,
    zones, fragmentation, disks, interfaces, filesystems and interrupts."""
    kubelet: KubeletManagers | None = None
    """None if the pods are not listed by a kubelet, or its configuration is unknown."""
    annotations: Mapping[str, str] | None = None
    """Annotations of the Node object that power and overcommit advice read; None until the API server has answered."""
    # From probes
    kswapd: Mapping[int, Kswapd] = {}
    """By NUMA node."""
    softirq_ns: Mapping[int, Mapping[str, int]] = {}
    """Time in softirqs by CPU and vector (`NET_RX`), cumulative."""
    cpu_waits: Mapping[int, RunqLatency] = {}
    """Run-queue latency by CPU, measured by a probe like run_delay_ns and timeslices; without slots."""
    cpu_counters: Mapping[int, CpuCounters] = {}
    """Hardware counters by CPU, the idle task included."""
    oom_victims: tuple[OomVictim, ...] = ()
    """The latest OOM kills, oldest first."""


class RequestLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Latency histogram that a pod publishes about its own requests, read from its Prometheus endpoint."""

    bounds_s: tuple[float, ...]
    """Inclusive upper bounds in seconds, without +Inf."""
    buckets: tuple[int, ...]
    """Cumulative counts, one per bound plus one for +Inf."""
    sum_s: float
    sampled_at_ns: int


class ComponentHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading one sensor, probe or pod source in this cycle; a failure is reported like any other fact."""

    name: str
    ok: bool
    duration_ns: int = 0
    detail: str = ""
    """Variant in use, such as the attach type of a probe."""
    error: str = ""
    remedy: str = ""
    lost_events: int | None = None
    """Events not counted since the component was opened; None if none can be lost, or the number is unknown."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node at one instant. The advisor and every exporter receive this same object."""

    seq: int
    taken_at_ns: int
    """CLOCK_MONOTONIC."""
    wall_time_ns: int
    """CLOCK_REALTIME, for display only; no arithmetic is done on it."""
    boot_id: str
    topology: Topology
    node: NodeSample
    cgroups: Mapping[str, CgroupSample]
    pods: tuple[Pod, ...] = ()
    indicators: Mapping[str, RequestLatency] = {}
    """By pod key, `namespace/name`."""
    sources: tuple[ComponentHealth, ...] = ()

    @property
    def pods_fresh(self) -> bool:
        """Whether `pods` was read in this cycle. Otherwise it is an older list: without new pods, with deleted ones."""
        return all(source.ok for source in self.sources if source.name == "pods")


class Cadence(IntEnum):
    """How often a file is read. Long files, and files for which the kernel sums over CPUs, are not read every cycle."""

    TICK = 0
    SLOW = 1
    RARE = 2
    """Files that only administrators and agents change. They are not kept open either."""


CADENCE_PERIOD_NS = {Cadence.TICK: 0, Cadence.SLOW: 5_000_000_000, Cadence.RARE: 30_000_000_000}
