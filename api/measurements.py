"""Kernel measurements that a snapshot consists of: run-queue latency, PSI, CPU times, I/O, limits.
Counters are cumulative since boot or creation. Field names are part of `/api/v1/snapshot` and of recordings.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

UNLIMITED = (1 << 64) - 1
"""A limit that is none: `max` in the files of version 2."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took, each time it happened, cumulative."""

    sum_ns: int
    count: int
    slots: tuple[int, ...] | None = None
    """Log2 histogram (`api.histogram`); None where the source knows sums only (/proc/PID/schedstat)."""


RunqLatency = Durations
"""Time that a cgroup's tasks spent runnable but not running."""


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Who had the CPU while tasks of a cgroup waited for it: cumulative nanoseconds of their waits, split."""

    by_cgroup: Mapping[str, int]
    """By path of the cgroup that ran meanwhile; the waiting cgroup itself is among them (its own tasks queue too). What
    was told of a cgroup goes with it when it is removed."""
    throttled_ns: int
    """Held back by the cgroup's own quota, or one above it: no neighbour's doing."""
    higher_class_ns: int
    """Real-time, deadline and stop tasks ran."""
    other_ns: int
    """The rest: an idle CPU on its way, cgroups that were gone before they could be told of, and what found no place in the
    table."""


class Wakeups(msgspec.Struct, frozen=True, kw_only=True):
    """Who woke the tasks of a cgroup, how often, and how long it took from there until they ran, cumulative."""

    by_cgroup: Mapping[str, Durations]
    """By path of the cgroup whose task woke them; the woken cgroup itself is among them. What was told of a cgroup goes with
    it when it is removed."""
    interrupt: Durations
    """Timers, devices, and packets from outside."""
    kernel_thread: Durations
    other: Durations
    """Cgroups that were gone before they could be told of, and what found no place in the table."""


class CpuCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What the CPU's own counters say, cumulative."""

    cycles: int
    """Unhalted."""
    instructions: int
    """Retired."""
    misses: int | None = None
    """Of the last level of cache; None where no third counter was free."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """One PSI file: cumulative stall time of some and of all tasks; `full` is absent for a node's CPU on old kernels."""

    some_us: int
    some_avg10: float
    full_us: int | None = None
    full_avg10: float | None = None
    some_avg60: float | None = None
    some_avg300: float | None = None
    full_avg60: float | None = None
    full_avg300: float | None = None


class CpuTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /proc/stat, in nanoseconds. Guest time is part of user and is not listed again."""

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
    """Threads by what they do right now, those of the cgroup itself, without the groups below."""

    runnable: int
    """Running or waiting for a CPU."""
    uninterruptible: int
    """Asleep and not to be woken by signals; `iowait` of them for a disk."""
    iowait: int | None
    """None where only /proc is read, which does not tell."""
    sleeping: int


class LoadAverages(msgspec.Struct, frozen=True, kw_only=True):
    """Exponentially damped averages over 1, 5 and 15 minutes, as the kernel makes them (kernel/sched/loadavg.c)."""

    one: float
    five: float
    fifteen: float
    runnable_one: float
    """The same of runnable tasks alone, without the uninterruptible ones."""
    runnable_five: float
    runnable_fifteen: float


class ReclaimLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a cgroup's tasks had to free themselves, cumulative."""

    direct: Durations
    """Node-wide direct reclaim: the allocation waited meanwhile."""
    limit: Durations
    """Reclaim because of the cgroup's own limit."""
    reclaimed_pages: int
    kswapd_wakeups: int
    """How often an allocation of this cgroup woke kswapd."""


class IoStat(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations of one device, cumulative (io.stat of v2, blkio.throttle.* of v1)."""

    read_bytes: int
    write_bytes: int
    reads: int
    writes: int
    discard_bytes: int = 0
    discards: int = 0


class BlockIo(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one device from issue to completion, as the block layer saw them, cumulative."""

    reads: Durations
    writes: Durations
    read_bytes: int
    write_bytes: int


class SocketTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What the tasks of a cgroup sent and received on sockets, cumulative, by protocol."""

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
    """What is set for a cgroup, in the kernel's own units; None where the hierarchy has no such file."""

    quota_us: int | None = None
    """CPU time in a period; -1 is no limit."""
    period_us: int | None = None
    burst_us: int | None = None
    weight: int | None = None
    """cpu.shares (v1: 2 to 262144) or cpu.weight (v2: 1 to 10000)."""
    idle: bool | None = None
    cpus: str | None = None
    """CPU list in force."""
    mems: str | None = None
    memory_max_bytes: int | None = None
    """`UNLIMITED` is no limit, as for the others."""
    memory_high_bytes: int | None = None
    memory_low_bytes: int | None = None
    memory_min_bytes: int | None = None
    swap_max_bytes: int | None = None
    kernel_tcp_max_bytes: int | None = None
    pids_max: int | None = None


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """One NUMA node."""

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
    """The kernel's background reclaim of one NUMA node, cumulative."""

    wakeups: int
    active_ns: int
    """On the clock, from each wakeup until it went to sleep again."""
    scanned_pages: int
    reclaimed_pages: int


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /proc/diskstats, cumulative, and what /sys/block says of the device."""

    number: str
    """`MAJOR:MINOR`."""
    reads: int
    read_bytes: int
    read_ns: int
    writes: int
    write_bytes: int
    write_ns: int
    busy_ns: int
    in_flight: int
    kind: str = ""
    """`HDD`, `SSD`, `NVME` or `VIRTIO`; empty where unknown, and for partitions."""
    wbt_lat_us: int | None = None


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface of /proc/net/dev, cumulative."""

    received: Mapping[str, int]
    """In the file's names: bytes, packets, errs, drop, fifo, frame, compressed, multicast."""
    sent: Mapping[str, int]
    """bytes, packets, errs, drop, fifo, colls, carrier, compressed."""
    duplex: str = ""
    speed_mbit: int | None = None
    carrier: bool | None = None
    """Whether a card has a link; None where that is not known, as of one that is switched off."""
    bonded: bool = False
    """Whether it is part of a bond, which has a speed of its own."""


class Filesystem(msgspec.Struct, frozen=True, kw_only=True):
    """Room on one file system."""

    size_bytes: int
    available_bytes: int
    inodes: int
    free_inodes: int


class OomVictim(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the kernel killed for memory."""

    wall_time_ns: int
    cgroup: str
    pid: int
    command: str


class L3Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of resctrl for one L3 cache and one group."""

    id: int
    group: str
    """A control group, empty for the default one, which has what is in no other: their sum is the cache's whole traffic. Or
    a monitoring group, `NAME/mon_groups/NAME`, whose counts are part of its control group's too."""
    total_bytes: int
    local_bytes: int
    occupancy_bytes: int | None = None

    @property
    def is_monitoring_group(self) -> bool:
        """Whether it is of a monitoring group."""
        return "mon_groups/" in self.group


class KubeletManagers(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the kubelet's resource managers hand something out."""

    cpu: str
    """Policy of its CPU manager: `none` or `static`, or `unknown` where nobody could be asked,"""
    memory: str
    """and of its memory manager."""
    exclusive: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
    """CPUs that containers have to themselves, by the pod's uid and the container's name."""
    bound: frozenset[str] = frozenset()
    """Uids of pods whose memory is bound to NUMA nodes."""

    @property
    def manages_cpusets(self) -> bool:
        """Whether it writes lists of CPUs, or may, as far as is known."""
        return self.cpu != "none"

    @property
    def mems(self) -> bool:
        """Whether it writes lists of NUMA nodes, or may."""
        return self.memory != "none"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the machine runs."""

    codename: str = ""
    """As Malachite spells it: `Intel_CascadeLake`, `AMD_K19Zen4`; empty where unknown."""
    is_vm: bool | None = None
