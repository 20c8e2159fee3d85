"""Kernel measurements that a snapshot consists of: run-queue latency, PSI, CPU times, I/O, limits.
Counters are cumulative since boot or creation. Field names are part of `/api/v1/snapshot` and of recordings.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

UNLIMITED = (1 << 64) - 1
"""Value of a limit that is not set: `max` in the files of cgroup v2."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Number, sum and distribution of durations, cumulative."""

    sum_ns: int
    count: int
    slots: tuple[int, ...] | None = None
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
    """In uninterruptible sleep for reasons other than a disk."""
    iowait: int | None
    """In uninterruptible sleep for a disk; None if only /proc is read, which does not distinguish it."""
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
