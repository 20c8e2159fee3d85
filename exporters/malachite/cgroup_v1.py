"""Makes `cgroup/groups` for cgroup version 1. Pure."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from api.snapshot import UNLIMITED, IoStat
from exporters.malachite.cgroup_documents import (
    CgroupGroups,
    CgroupInputs,
    FsCounters,
    MemCounters,
    cgroup_groups,
    cpu_and_tasks,
    fs_counters,
    mem_counters,
    values_by_node,
)
from exporters.malachite.wire import MAX_I64, LoadFields, MalachiteStruct, i64, known_values, u64, unix_seconds

NO_QUOTA, DEFAULT_PERIOD_US = -1, 100_000
UNLIMITED_V1_BYTES = MAX_I64 // mmap.PAGESIZE * mmap.PAGESIZE
"""Value that version 1 shows for no limit (PAGE_COUNTER_MAX pages)."""
V1_NUMA_PAGES = (
    "total", "file", "anon", "unevictable", "hierarchical_total", "hierarchical_file", "hierarchical_anon",
    "hierarchical_unevictable",
)  # fmt: skip
"""Names in memory.numa_stat, in pages; `hierarchical_*` include all descendants."""


class CpuTimesAt(MalachiteStruct, frozen=True):
    """CPU time in nanoseconds."""

    cpu_usage: int | None = None
    cpu_user_time: int | None = None
    cpu_sys_time: int | None = None
    update_time: int | None = None


class V1CpuFields(MalachiteStruct, frozen=True, kw_only=True):
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
    load: LoadFields | None = None
    cycles: int | None = None
    instructions: int | None = None
    l3_misses: int | None = None
    percpu_usage: tuple[int, ...] | None = None
    old_cpu_basic_info: CpuTimesAt | None = None
    new_cpu_basic_info: CpuTimesAt | None = None
    update_time: int | None = None


class V1MemoryStat(MalachiteStruct, frozen=True):
    """Fields of memory.stat: bytes, but events for pgfault, pgmajfault and allocstall; `total_*` include all
    descendants."""

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


class V1MemoryFields(V1MemoryStat, frozen=True, kw_only=True):
    """Limits and use of memory, in bytes."""

    full_path: str | None = None
    memory_limit_in_bytes: int | None = None
    memory_usage_in_bytes: int | None = None
    kern_memory_usage_in_bytes: int | None = None
    kern_tcp_memory_limit_in_bytes: int | None = None
    kern_tcp_memory_usage_in_bytes: int | None = None
    bpf_mem_data: MemCounters
    numa_stat: tuple[dict[str, int | str], ...] = ()
    update_time: int | None = None


class DeviceCounters(MalachiteStruct, frozen=True, rename={"data": "Data"}):
    """Counters of one device, by operation."""

    data: dict[str, int]


class V1BlkioFields(MalachiteStruct, frozen=True, kw_only=True):
    """Operations and bytes by device, `MAJOR:MINOR`, cumulative."""

    full_path: str | None = None
    user_path: str
    iops_details: dict[str, DeviceCounters]
    bps_details: dict[str, DeviceCounters]
    iops_total: int | None = None
    bps_total: int | None = None
    bpf_fs_data: FsCounters
    old_bpf_fs_data: FsCounters
    update_time: int | None = None


def v1_groups(inputs: CgroupInputs) -> CgroupGroups:
    """Return the documents of one cgroup."""
    return cgroup_groups(inputs, _cpu(inputs), _memory(inputs), _blkio(inputs))


def _cpu(of: CgroupInputs) -> V1CpuFields:
    sample, limits = of.sample, of.sample.limits
    quota, period = i64(limits.quota_us), i64(limits.period_us)
    per_cpu = sample.per_cpu_ns
    return V1CpuFields(
        full_path=of.layout.full_path("cpu", sample.path),
        # The client divides by the period. A kernel without these files has no quota.
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


def _times_before(of: CgroupInputs) -> CpuTimesAt | None:
    if of.before is None:
        return None
    frame, earlier = of.before
    return CpuTimesAt(
        cpu_usage=u64(earlier.cpu_usage_ns),
        cpu_user_time=u64(earlier.cpu_user_ns),
        cpu_sys_time=u64(earlier.cpu_system_ns),
        update_time=unix_seconds(frame.wall_time_ns),
    )


def _memory(of: CgroupInputs) -> V1MemoryFields | None:
    sample, limits = of.sample, of.sample.limits
    stat = dict(sample.memory_stat)
    if sample.memory_bytes is None and not stat:
        return None
    if sample.swap_bytes is not None:
        stat.setdefault("total_swap", sample.swap_bytes)
    if of.reclaims is not None:
        # Few kernels count allocstall per cgroup; our probe counts the same calls since it was loaded.
        stat.setdefault("total_allocstall", of.reclaims.direct)
    return V1MemoryFields(
        full_path=of.layout.full_path("memory", sample.path),
        memory_limit_in_bytes=_limit(limits.memory_max_bytes),
        memory_usage_in_bytes=u64(sample.memory_bytes),
        kern_memory_usage_in_bytes=u64(sample.kernel_memory_bytes),
        kern_tcp_memory_limit_in_bytes=_limit(limits.kernel_tcp_max_bytes),
        kern_tcp_memory_usage_in_bytes=u64(sample.kernel_tcp_bytes),
        bpf_mem_data=mem_counters(of),
        numa_stat=_numa(sample.numa_stat),
        update_time=of.files_at,
        **known_values(V1MemoryStat.__struct_fields__, stat),
    )


def _limit(limit: int | None) -> int | None:
    return UNLIMITED_V1_BYTES if limit == UNLIMITED else u64(limit)


def _numa(stat: Mapping[str, Mapping[int, int]]) -> tuple[dict[str, int | str], ...]:
    return tuple(
        {**known_values(V1_NUMA_PAGES, values), "numa_name": f"N{node}"}
        for node, values in values_by_node(stat).items()
    )


def _blkio(of: CgroupInputs) -> V1BlkioFields | None:
    io = of.sample.io
    if not io and of.blocks is None:
        return None  # not counted, or empty files, which do not show whether they would count
    new, old = fs_counters(of)
    return V1BlkioFields(
        full_path=of.layout.full_path("blkio", of.sample.path),
        user_path=of.sample.path,
        iops_details={
            device: DeviceCounters(data=_by_operation(io[device], "reads", "writes", "discards")) for device in io
        },
        bps_details={
            device: DeviceCounters(data=_by_operation(io[device], "read_bytes", "write_bytes", "discard_bytes"))
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
