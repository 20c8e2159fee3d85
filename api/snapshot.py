"""State of one node at one instant: the Snapshot that the advisor and every exporter receive, and its measurements.
Counters are cumulative since boot or since the cgroup was created; api.rates computes differences. None means that the
kernel, the cgroup version or missing privileges do not provide the value. Field names are part of `/api/v1/snapshot` and of
recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated

import msgspec

from api.cpu import Topology
from api.histogram import SLOT_COUNT
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.text import make_printable
from api.units import Count

UNLIMITED = (1 << 64) - 1
"""Value of a limit that is not set: `max` in the files of cgroup v2."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Number, sum and distribution of durations, cumulative."""

    sum_ns: Count
    count: Count
    slots: Annotated[tuple[Count, ...], msgspec.Meta(min_length=SLOT_COUNT, max_length=SLOT_COUNT)] | None = None
    """Log2 histogram (`api.histogram`); None if the source has sums only (/proc/PID/schedstat)."""


RunqLatency = Durations
"""Time that tasks of a cgroup were runnable but not running."""


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Run-queue latency of a cgroup in nanoseconds, divided by what occupied the CPU meanwhile, cumulative."""

    by_cgroup: Mapping[str, int]
    """By path of the cgroup that ran meanwhile, including the waiting cgroup itself (its tasks also queue behind each other).
    The entry of a removed cgroup is dropped."""
    throttled_ns: int
    """Throttled by the CPU quota of the cgroup or of an ancestor, not caused by another cgroup."""
    higher_class_ns: int
    """Real-time, deadline and stop tasks ran."""
    other_ns: int
    """Remainder: an idle CPU still waking up, cgroups removed before they were read, and entries that exceeded the size of
    the map."""


class Wakeups(msgspec.Struct, frozen=True, kw_only=True):
    """Wakeups of a cgroup's tasks by waker, with the latency from wakeup to running, cumulative."""

    by_cgroup: Mapping[str, Durations]
    """By path of the waker's cgroup, including the woken cgroup itself. The entry of a removed cgroup is dropped."""
    interrupt: Durations
    """Woken by timers, devices, and packets from outside."""
    kernel_thread: Durations
    other: Durations
    """Woken by cgroups removed before they were read, or not counted because the map was full."""


class CpuCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware performance counters, cumulative."""

    cycles: int
    """Unhalted cycles."""
    instructions: int
    """Retired instructions."""
    misses: int | None = None
    """Misses of the last-level cache; None if no third hardware counter was available."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """One PSI file: cumulative stall time of some and of all tasks; `full` is None for a node's CPU on old kernels."""

    some_us: int
    some_avg10: float
    full_us: int | None = None
    full_avg10: float | None = None
    some_avg60: float | None = None
    some_avg300: float | None = None
    full_avg60: float | None = None
    full_avg300: float | None = None


class CpuTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /proc/stat, in nanoseconds. Guest time is included in user_ns."""

    user_ns: int
    nice_ns: int
    system_ns: int
    idle_ns: int
    iowait_ns: int
    irq_ns: int
    softirq_ns: int
    steal_ns: int

    @property
    def busy_ns(self) -> int:
        return self.user_ns + self.nice_ns + self.system_ns + self.irq_ns + self.softirq_ns

    @property
    def total_ns(self) -> int:
        return self.busy_ns + self.idle_ns + self.iowait_ns + self.steal_ns


class ThreadStates(msgspec.Struct, frozen=True, kw_only=True):
    """Current number of threads by scheduler state, of the cgroup itself without its descendants."""

    runnable: int
    """Running or waiting for a CPU."""
    uninterruptible: int
    """In uninterruptible sleep (state D), those of `iowait` included."""
    iowait: int | None
    """Those of `uninterruptible` that wait for a disk; None if only /proc is read, which does not distinguish it."""
    sleeping: int


class LoadAverages(msgspec.Struct, frozen=True, kw_only=True):
    """Exponentially damped averages over 1, 5 and 15 minutes, as in kernel/sched/loadavg.c."""

    load1: float = msgspec.field(name="one")
    load5: float = msgspec.field(name="five")
    load15: float = msgspec.field(name="fifteen")
    runnable1: float = msgspec.field(name="runnable_one")
    """Average of runnable tasks only, without uninterruptible ones."""
    runnable5: float = msgspec.field(name="runnable_five")
    runnable15: float = msgspec.field(name="runnable_fifteen")


class ReclaimLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Memory reclaim done by the tasks of a cgroup themselves, cumulative."""

    direct: Durations
    """Direct reclaim because the node was short of memory; the allocation was delayed."""
    limit: Durations
    """Reclaim because of the cgroup's own limit."""
    reclaimed_pages: int
    kswapd_wakeups: int
    """Number of times an allocation of this cgroup woke kswapd."""


class IoStat(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations on one device, cumulative (io.stat on v2, blkio.throttle.* on v1)."""

    read_bytes: int
    write_bytes: int
    reads: int
    writes: int
    discard_bytes: int = 0
    discards: int = 0


class BlockIo(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to one device from issue to completion in the block layer, cumulative."""

    reads: Durations
    writes: Durations
    read_bytes: int
    write_bytes: int


class SocketTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Payload sent and received on sockets by the tasks of a cgroup, by protocol, cumulative."""

    tcp_sent_bytes: int
    tcp_received_bytes: int
    tcp_sent_packets: int
    tcp_received_packets: int
    udp_sent_bytes: int
    udp_received_bytes: int
    udp_sent_packets: int
    udp_received_packets: int
    tcp_retransmits: int


class CgroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a cgroup in the kernel's own units; None if the hierarchy has no such file."""

    quota_us: int | None = None
    """CPU time per period; -1 means no limit."""
    period_us: int | None = None
    burst_us: int | None = None
    weight: int | None = None
    """Value of cpu.shares (v1: 2 to 262144) or cpu.weight (v2: 1 to 10000)."""
    idle: bool | None = None
    cpus: str | None = None
    """Effective CPU list."""
    mems: str | None = None
    memory_max_bytes: int | None = None
    """`UNLIMITED` means no limit, as in the other limits."""
    memory_high_bytes: int | None = None
    memory_low_bytes: int | None = None
    memory_min_bytes: int | None = None
    swap_max_bytes: int | None = None
    kernel_tcp_max_bytes: int | None = None
    pids_max: int | None = None


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs, distances and memory of one NUMA node."""

    cpus: tuple[int, ...] = ()
    distances: Mapping[int, int] = {}
    meminfo: Mapping[str, int] = {}
    """Bytes, in the kernel's names (`MemFree`)."""
    vmstat: Mapping[str, int] = {}


class MemoryZone(msgspec.Struct, frozen=True, kw_only=True):
    """One memory zone of /proc/zoneinfo, in pages."""

    node: int
    name: str
    free: int
    min: int
    low: int
    high: int
    managed: int


class Kswapd(msgspec.Struct, frozen=True, kw_only=True):
    """Background reclaim of one NUMA node, cumulative."""

    wakeups: int
    active_ns: int
    """Wall-clock time between each wakeup and the next sleep."""
    scanned_pages: int
    reclaimed_pages: int


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /proc/diskstats, cumulative, with attributes from /sys/block."""

    number: str
    """Device number, `MAJOR:MINOR`."""
    reads: int
    read_bytes: int
    read_ns: int
    writes: int
    write_bytes: int
    write_ns: int
    busy_ns: int
    in_flight: int
    kind: str = ""
    """`HDD`, `SSD`, `NVME` or `VIRTIO`; empty if unknown, and for partitions."""
    wbt_lat_us: int | None = None


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface of /proc/net/dev, cumulative."""

    received: Mapping[str, int]
    """By column of the file: bytes, packets, errs, drop, fifo, frame, compressed, multicast."""
    sent: Mapping[str, int]
    """By column of the file: bytes, packets, errs, drop, fifo, colls, carrier, compressed."""
    duplex: str = ""
    speed_mbit: int | None = None
    carrier: bool | None = None
    """Whether the card has a link; None if unknown, for example if the interface is down."""
    bonded: bool = False
    """Whether the interface belongs to a bond, which has a speed of its own."""


class Filesystem(msgspec.Struct, frozen=True, kw_only=True):
    """Size and free space of one file system."""

    size_bytes: int
    available_bytes: int
    inodes: int
    free_inodes: int


class OomVictim(msgspec.Struct, frozen=True, kw_only=True):
    """Process that the OOM killer terminated."""

    wall_time_ns: int
    cgroup: str
    pid: int
    command: str


class L3Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of resctrl for one L3 cache and one group."""

    id: int
    group: str
    """A control group, empty for the default one; their sum is the total traffic of the cache. Or a monitoring group,
    `NAME/mon_groups/NAME`, whose counts are included in its control group's."""
    total_bytes: int
    local_bytes: int
    occupancy_bytes: int | None = None

    @property
    def is_monitoring_group(self) -> bool:
        return "mon_groups/" in self.group


class KubeletManagers(msgspec.Struct, frozen=True, kw_only=True):
    """Resource managers of the kubelet that assign CPUs or NUMA nodes to containers."""

    cpu: str
    """Policy of the CPU manager: `none`, `static`, or `unknown` if the kubelet could not be queried."""
    memory: str
    """Policy of the memory manager: `none`, `static` or `unknown`."""
    exclusive: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
    """Exclusive CPUs of containers, by pod uid and container name."""
    bound: frozenset[str] = frozenset()
    """Uids of pods whose memory is bound to NUMA nodes."""

    @property
    def manages_cpusets(self) -> bool:
        """Whether the kubelet writes cpuset.cpus, or may because its policy is unknown."""
        return self.cpu != "none"

    @property
    def mems(self) -> bool:
        """Whether the kubelet writes cpuset.mems, or may because its policy is unknown."""
        return self.memory != "none"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that do not change while the machine runs."""

    codename: str = ""
    """Microarchitecture in Malachite's spelling: `Intel_CascadeLake`, `AMD_K19Zen4`; empty if unknown."""
    is_vm: bool | None = None
    cgroup_version: str = ""
    """`v1`, `v2` or `hybrid` (controllers of version 1 beside an empty unified hierarchy); empty if unknown."""
    systemd_version: int | None = None
    """Version of systemd if it is process 1; None if another program is, or if its memory map is not readable."""


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


ABSENT = "absent"
"""Detail of a component that this node cannot have: it does not work, and no alert fires."""


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

    def __post_init__(self) -> None:
        make_printable(self, "error", "remedy")


ORIGINALS = "originals"
"""Name of the component that journals original values; absent in an agent that does not act."""


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

    @property
    def can_journal(self) -> bool:
        """Whether original values can be journalled. Otherwise no knob of a new container can be changed, so that the agent
        could not take back what it lends."""
        return all(source.ok for source in self.sources if source.name == ORIGINALS)


class Cadence(IntEnum):
    """How often a file is read. Long files, and files for which the kernel sums over CPUs, are not read every cycle."""

    TICK = 0
    SLOW = 1
    RARE = 2
    """Files that only administrators and agents change. They are not kept open either."""


CADENCE_PERIOD_NS = {Cadence.TICK: 0, Cadence.SLOW: 5_000_000_000, Cadence.RARE: 30_000_000_000}


def reclaimed_containers(snapshot: Snapshot) -> list[Container]:
    """Return the containers of reclaimed pods that have a cgroup."""
    return [
        container
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        if container.cgroup in snapshot.cgroups
    ]
