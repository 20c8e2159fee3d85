"""`cgroup/groups` on version 1."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from api.facts import UNLIMITED, IoStat
from exporters.malachite.cgroups import (
    CgroupView,
    Cpuset,
    FsData,
    MemData,
    NetGroup,
    cpu_and_tasks,
    cpuset,
    file_io,
    memory_events,
    network,
)
from exporters.malachite.wire import MAX_I64, Loads, Wire, i64, named, seconds, u64

NO_QUOTA, DEFAULT_PERIOD_US = -1, 100_000
MOST_BYTES = MAX_I64 // mmap.PAGESIZE * mmap.PAGESIZE
"""What version 1 shows for no limit (PAGE_COUNTER_MAX pages)."""


class CpuTimesAt(Wire, frozen=True):
    """CPU time in nanoseconds."""

    cpu_usage: int | None = None
    cpu_user_time: int | None = None
    cpu_sys_time: int | None = None
    update_time: int | None = None


class Cpu(Wire, frozen=True, kw_only=True):
    """The ratios are cores, in spite of their names; throttled time is in nanoseconds."""

    full_path: str | None = None
    cfs_quota_us: int
    cfs_period_us: int
    cpu_shares: int | None = None
    cpu_usage_ratio: float | None = None
    cpu_user_usage_ratio: float | None = None
    cpu_sys_usage_ratio: float | None = None
    cpu_nr_throttled: int | None = None
    cpu_nr_periods: int | None = None
    cpu_throttled_time: int | None = None
    task_nr_runnable: int | None = None
    task_nr_unint: int | None = None
    task_nr_iowait: int | None = None
    task_nr_sleeping: int | None = None
    load: Loads | None = None
    cycles: int | None = None
    instructions: int | None = None
    l3_misses: int | None = None
    percpu_usage: tuple[int, ...] | None = None
    old_cpu_basic_info: CpuTimesAt | None = None
    new_cpu_basic_info: CpuTimesAt | None = None
    update_time: int | None = None


class NumaPages(Wire, frozen=True):
    """Pages of one NUMA node; `hierarchical_*` with all cgroups below."""

    total: int | None = None
    file: int | None = None
    anon: int | None = None
    unevictable: int | None = None
    hierarchical_total: int | None = None
    hierarchical_file: int | None = None
    hierarchical_anon: int | None = None
    hierarchical_unevictable: int | None = None


class NumaStat(NumaPages, frozen=True, kw_only=True):
    """Which node they are of: `N0`."""

    numa_name: str


class MemoryStat(Wire, frozen=True):
    """memory.stat: bytes, but events for pgfault, pgmajfault and allocstall; `total_*` with all cgroups below."""

    cache: int | None = None
    rss: int | None = None
    shmem: int | None = None
    dirty: int | None = None
    writeback: int | None = None
    kswapd_steal: int | None = None
    pgfault: int | None = None
    pgmajfault: int | None = None
    allocstall: int | None = None
    total_cache: int | None = None
    total_rss: int | None = None
    total_shmem: int | None = None
    total_dirty: int | None = None
    total_writeback: int | None = None
    total_kswapd_steal: int | None = None
    total_pgfault: int | None = None
    total_pgmajfault: int | None = None
    total_allocstall: int | None = None
    total_swap: int | None = None
    total_active_anon: int | None = None
    total_inactive_anon: int | None = None
    total_active_file: int | None = None
    total_inactive_file: int | None = None


class Memory(MemoryStat, frozen=True, kw_only=True):
    """The other files of the controller, in bytes."""

    full_path: str | None = None
    memory_limit_in_bytes: int | None = None
    memory_usage_in_bytes: int | None = None
    kern_memory_usage_in_bytes: int | None = None
    kern_tcp_memory_limit_in_bytes: int | None = None
    kern_tcp_memory_usage_in_bytes: int | None = None
    bpf_mem_data: MemData
    numa_stat: tuple[NumaStat, ...] = ()
    update_time: int | None = None


class Device(Wire, frozen=True, rename={"data": "Data"}):
    """Counters of one device, by operation."""

    data: dict[str, int]


class Blkio(Wire, frozen=True, kw_only=True):
    """Operations and bytes by device, `MAJOR:MINOR`, cumulative."""

    full_path: str | None = None
    user_path: str
    iops_details: dict[str, Device]
    bps_details: dict[str, Device]
    iops_total: int | None = None
    bps_total: int | None = None
    bpf_fs_data: FsData
    old_bpf_fs_data: FsData
    update_time: int | None = None


class CpuV1(Wire, frozen=True, rename={"v1": "V1"}):
    v1: Cpu


class MemoryV1(Wire, frozen=True, rename={"v1": "V1"}):
    v1: Memory


class CpusetV1(Wire, frozen=True, rename={"v1": "V1"}):
    v1: Cpuset


class BlkioV1(Wire, frozen=True, rename={"v1": "V1"}):
    v1: Blkio


class CpuGroup(Wire, frozen=True, rename={"cpu": "Cpu"}):
    cpu: CpuV1


class MemoryGroup(Wire, frozen=True, rename={"memory": "Memory"}):
    memory: MemoryV1


class CpusetGroup(Wire, frozen=True, rename={"cpuset": "CpuSet"}):
    cpuset: CpusetV1


class BlkioGroup(Wire, frozen=True, rename={"blkio": "BlkIO"}):
    blkio: BlkioV1


class Groups(Wire, frozen=True, rename="pascal"):
    """All of a cgroup; one whose controller does not know it is left out."""

    cpuacct: CpuGroup
    memory: MemoryGroup | None = None
    cpuset: CpusetGroup | None = None
    blkio: BlkioGroup | None = None
    net_cls: NetGroup | None = None


def groups(of: CgroupView) -> Groups:
    """The documents of one cgroup."""
    memory, cpus, blocks = _memory(of), cpuset(of), _blkio(of)
    return Groups(
        cpuacct=CpuGroup(cpu=CpuV1(v1=_cpu(of))),
        memory=None if memory is None else MemoryGroup(memory=MemoryV1(v1=memory)),
        cpuset=None if cpus is None else CpusetGroup(cpuset=CpusetV1(v1=cpus)),
        blkio=None if blocks is None else BlkioGroup(blkio=BlkioV1(v1=blocks)),
        net_cls=network(of),
    )


def _cpu(of: CgroupView) -> Cpu:
    sample, limits = of.sample, of.sample.limits
    quota, period = i64(limits.quota_us), i64(limits.period_us)
    per_cpu = sample.per_cpu_ns
    return Cpu(
        full_path=of.layout.full_path("cpu", sample.path),
        # The client divides by the period. A kernel without these files knows no quota.
        cfs_quota_us=NO_QUOTA if quota is None else quota,
        cfs_period_us=DEFAULT_PERIOD_US if period is None or period <= 0 else period,
        cpu_shares=u64(limits.weight),
        cpu_nr_throttled=u64(sample.throttled_periods),
        cpu_nr_periods=u64(sample.periods),
        cpu_throttled_time=u64(sample.throttled_ns),
        percpu_usage=None if per_cpu is None or any(u64(ns) is None for ns in per_cpu) else per_cpu,
        old_cpu_basic_info=_times_before(of),
        new_cpu_basic_info=CpuTimesAt(
            cpu_usage=u64(sample.cpu_usage_ns),
            cpu_user_time=u64(sample.cpu_user_ns),
            cpu_sys_time=u64(sample.cpu_system_ns),
            update_time=of.at,
        ),
        **cpu_and_tasks(of),
    )


def _times_before(of: CgroupView) -> CpuTimesAt | None:
    if of.before is None:
        return None
    frame, earlier = of.before
    return CpuTimesAt(
        cpu_usage=u64(earlier.cpu_usage_ns),
        cpu_user_time=u64(earlier.cpu_user_ns),
        cpu_sys_time=u64(earlier.cpu_system_ns),
        update_time=seconds(frame.wall_time_ns),
    )


def _memory(of: CgroupView) -> Memory | None:
    sample, limits = of.sample, of.sample.limits
    stat = dict(sample.memory_stat)
    if sample.memory_bytes is None and not stat:
        return None
    if sample.swap_bytes is not None:
        stat.setdefault("total_swap", sample.swap_bytes)
    if of.reclaims is not None:
        # A kernel that counts them itself is rare; our probe sees the same calls since it was loaded.
        stat.setdefault("total_allocstall", of.reclaims.direct)
    return Memory(
        full_path=of.layout.full_path("memory", sample.path),
        memory_limit_in_bytes=_limit(limits.memory_max_bytes),
        memory_usage_in_bytes=u64(sample.memory_bytes),
        kern_memory_usage_in_bytes=u64(sample.kernel_memory_bytes),
        kern_tcp_memory_limit_in_bytes=_limit(limits.kernel_tcp_max_bytes),
        kern_tcp_memory_usage_in_bytes=u64(sample.kernel_tcp_bytes),
        bpf_mem_data=memory_events(of),
        numa_stat=_numa(sample.numa_stat),
        update_time=of.files_at,
        **named(MemoryStat, stat),
    )


def _limit(limit: int | None) -> int | None:
    return MOST_BYTES if limit == UNLIMITED else u64(limit)


def _numa(stat: Mapping[str, Mapping[int, int]]) -> tuple[NumaStat, ...]:
    nodes = sorted({node for by_node in stat.values() for node in by_node if u64(node) is not None})
    return tuple(
        NumaStat(
            numa_name=f"N{node}",
            **named(NumaPages, {kind: by_node[node] for kind, by_node in stat.items() if node in by_node}),
        )
        for node in nodes
    )


def _blkio(of: CgroupView) -> Blkio | None:
    io = of.sample.io
    if not io and of.blocks is None:
        return None  # nobody counts, or files that have nothing leave open whether they would have
    new, old = file_io(of)
    return Blkio(
        full_path=of.layout.full_path("blkio", of.sample.path),
        user_path=of.sample.path,
        iops_details={device: Device(data=_by_operation(io[device], "reads", "writes", "discards")) for device in io},
        bps_details={
            device: Device(data=_by_operation(io[device], "read_bytes", "write_bytes", "discard_bytes"))
            for device in io
        },
        iops_total=u64((new.fs_read or 0) + (new.fs_write or 0)),
        bps_total=u64((new.fs_read_bytes or 0) + (new.fs_write_bytes or 0)),
        bpf_fs_data=new,
        old_bpf_fs_data=old,
        update_time=of.io_at,
    )


def _by_operation(stat: IoStat, *fields: str) -> dict[str, int]:
    counted = {name: getattr(stat, field) for name, field in zip(("Read", "Write", "Discard"), fields, strict=True)}
    return {name: count for name, count in counted.items() if u64(count) is not None}
