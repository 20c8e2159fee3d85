"""`cgroup/groups` on version 2."""

from __future__ import annotations

from collections.abc import Mapping

from api.facts import UNLIMITED, IoStat
from exporters.malachite.cgroup_v1 import DEFAULT_PERIOD_US, Device
from exporters.malachite.cgroups import (
    CgroupView,
    Cpuset,
    FsData,
    MemData,
    NetGroup,
    cpuset,
    file_io,
    memory_events,
    network,
)
from exporters.malachite.memory_stat import MemoryStat, NumaStat, memory_stat, numa_stat
from exporters.malachite.wire import NS_PER_US, Loads, Stalls, Wire, i64, loads, named, scaled, stalls, u64


class CpuStats(Wire, frozen=True):
    """cpu.stat, in microseconds."""

    usage_usec: int | None = None
    user_usec: int | None = None
    system_usec: int | None = None
    nr_periods: int | None = None
    nr_throttled: int | None = None
    throttled_usec: int | None = None


class Cpu(Wire, frozen=True, kw_only=True):
    """The ratios are cores, in spite of their names; `max` is microseconds in each `max_period`."""

    full_path: str | None = None
    cpu_stats: CpuStats
    cpu_pressure: Stalls | None = None
    weight: int | None = None
    max: int
    max_period: int
    max_burst: int | None = None
    cpu_usage_ratio: float | None = None
    cpu_user_usage_ratio: float | None = None
    cpu_sys_usage_ratio: float | None = None
    task_nr_runnable: int | None = None
    task_nr_unint: int | None = None
    task_nr_iowait: int | None = None
    task_nr_sleeping: int | None = None
    load: Loads | None = None
    cycles: int | None = None
    instructions: int | None = None
    l3_misses: int | None = None
    update_time: int | None = None


class LocalEvents(Wire, frozen=True):
    """memory.events.local."""

    low: int | None = None
    high: int | None = None
    max: int | None = None
    oom: int | None = None
    oom_kill: int | None = None


class Memory(Wire, frozen=True, kw_only=True):
    """Bytes."""

    full_path: str | None = None
    user_path: str
    memory_usage_in_bytes: int | None = None
    max: int | None = None
    high: int | None = None
    low: int | None = None
    min: int | None = None
    swap_current: int | None = None
    swap_max: int | None = None
    mem_stats: MemoryStat
    mem_numa_stats: dict[str, NumaStat]
    mem_pressure: Stalls | None = None
    mem_local_events: LocalEvents
    bpf_mem_data: MemData
    update_time: int | None = None


class Blkio(Wire, frozen=True, kw_only=True):
    """io.stat by device, `MAJOR:MINOR`, cumulative; limits of I/O are not read."""

    full_path: str | None = None
    user_path: str
    io_stat: dict[str, Device]
    io_pressure: Stalls | None = None
    bpf_fs_data: FsData
    old_bpf_fs_data: FsData
    update_time: int | None = None


class CpuV2(Wire, frozen=True, rename={"v2": "V2"}):
    v2: Cpu


class MemoryV2(Wire, frozen=True, rename={"v2": "V2"}):
    v2: Memory


class CpusetV2(Wire, frozen=True, rename={"v2": "V2"}):
    v2: Cpuset


class BlkioV2(Wire, frozen=True, rename={"v2": "V2"}):
    v2: Blkio


class CpuGroup(Wire, frozen=True, rename={"cpu": "Cpu"}):
    cpu: CpuV2


class MemoryGroup(Wire, frozen=True, rename={"memory": "Memory"}):
    memory: MemoryV2


class CpusetGroup(Wire, frozen=True, rename={"cpuset": "CpuSet"}):
    cpuset: CpusetV2


class BlkioGroup(Wire, frozen=True, rename={"blkio": "BlkIO"}):
    blkio: BlkioV2


class Groups(Wire, frozen=True, rename="pascal", kw_only=True):
    """All of a cgroup; one whose controller does not know it is left out."""

    cpuacct: CpuGroup
    memory: MemoryGroup | None = None
    cpuset: CpusetGroup | None = None
    blkio: BlkioGroup
    net_cls: NetGroup | None = None


def groups(of: CgroupView) -> Groups:
    """The documents of one cgroup."""
    memory, cpus = _memory(of), cpuset(of)
    return Groups(
        cpuacct=CpuGroup(cpu=CpuV2(v2=_cpu(of))),
        memory=None if memory is None else MemoryGroup(memory=MemoryV2(v2=memory)),
        cpuset=None if cpus is None else CpusetGroup(cpuset=CpusetV2(v2=cpus)),
        blkio=BlkioGroup(blkio=BlkioV2(v2=_blkio(of))),
        net_cls=network(of),
    )


def _cpu(of: CgroupView) -> Cpu:
    sample, limits, threads, counters = of.sample, of.sample.limits, of.threads, of.counters
    quota, period = i64(limits.quota_us), i64(limits.period_us)
    return Cpu(
        full_path=of.layout.full_path("cpu", sample.path),
        cpu_stats=CpuStats(
            usage_usec=scaled(sample.cpu_usage_ns, NS_PER_US),
            user_usec=scaled(sample.cpu_user_ns, NS_PER_US),
            system_usec=scaled(sample.cpu_system_ns, NS_PER_US),
            nr_periods=u64(sample.periods),
            nr_throttled=u64(sample.throttled_periods),
            throttled_usec=scaled(sample.throttled_ns, NS_PER_US),
        ),
        cpu_pressure=stalls(sample.cpu_pressure),
        weight=i64(limits.weight),
        max=UNLIMITED if quota is None or quota < 0 else quota,
        max_period=DEFAULT_PERIOD_US if period is None or period <= 0 else period,
        max_burst=i64(limits.burst_us),
        cpu_usage_ratio=of.cores("cpu_usage_ns"),
        cpu_user_usage_ratio=of.cores("cpu_user_ns"),
        cpu_sys_usage_ratio=of.cores("cpu_system_ns"),
        task_nr_runnable=None if threads is None else u64(threads.runnable),
        task_nr_unint=None if threads is None else u64(threads.uninterruptible),
        task_nr_iowait=None if threads is None else u64(threads.iowait),
        task_nr_sleeping=None if threads is None else u64(threads.sleeping),
        load=loads(of.load),
        cycles=None if counters is None else u64(counters.cycles),
        instructions=None if counters is None else u64(counters.instructions),
        l3_misses=None if counters is None else u64(counters.misses),
        update_time=of.at,
    )


def _memory(of: CgroupView) -> Memory | None:
    sample, limits = of.sample, of.sample.limits
    if sample.memory_bytes is None and not sample.memory_stat:
        return None
    return Memory(
        full_path=of.layout.full_path("memory", sample.path),
        user_path=sample.path,
        memory_usage_in_bytes=u64(sample.memory_bytes),
        max=u64(limits.memory_max_bytes),
        high=u64(limits.memory_high_bytes),
        low=u64(limits.memory_low_bytes),
        min=u64(limits.memory_min_bytes),
        swap_current=u64(sample.swap_bytes),
        swap_max=u64(limits.swap_max_bytes),
        mem_stats=memory_stat(sample.memory_stat),
        mem_numa_stats=numa_stat(sample.numa_stat),
        mem_pressure=stalls(sample.memory_pressure),
        mem_local_events=_local_events(sample.memory_events),
        bpf_mem_data=memory_events(of),
        update_time=of.files_at,
    )


def _local_events(events: Mapping[str, int]) -> LocalEvents:
    local = {name.removeprefix("local."): count for name, count in events.items() if name.startswith("local.")}
    return LocalEvents(**named(LocalEvents, local))


def _blkio(of: CgroupView) -> Blkio:
    sample = of.sample
    new, old = file_io(of)
    return Blkio(
        full_path=of.layout.full_path("blkio", sample.path),
        user_path=sample.path,
        io_stat={device: Device(data=_io_stat(stat)) for device, stat in sample.io.items()},
        io_pressure=stalls(sample.io_pressure),
        bpf_fs_data=new,
        old_bpf_fs_data=old,
        update_time=of.io_at,
    )


def _io_stat(stat: IoStat) -> dict[str, int]:
    counted = {
        "rbytes": stat.read_bytes,
        "wbytes": stat.write_bytes,
        "rios": stat.reads,
        "wios": stat.writes,
        "dbytes": stat.discard_bytes,
        "dios": stat.discards,
    }
    return {name: count for name, count in counted.items() if u64(count) is not None}
