"""Makes `cgroup/groups` for cgroup version 2, with memory.stat and memory.numa_stat. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from api.snapshot import UNLIMITED, IoStat
from api.units import NS_PER_US
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
from exporters.malachite.cgroup_v1 import DEFAULT_PERIOD_US, DeviceCounters
from exporters.malachite.wire import (
    LoadFields,
    MalachiteStruct,
    PressureFile,
    i64,
    in_unit,
    known_values,
    pressure_file,
    u64,
)

SPLIT_COUNTERS = ("workingset_refault", "workingset_activate")
"""Counters that kernels from 5.9 on keep apart for anonymous memory and files (commit 170b04b7ae49). The documents need
the sums too."""
V2_MEMORY_STAT = (
    "anon", "file", "kernel", "kernel_stack", "sock", "shmem", "file_mapped", "file_dirty", "file_writeback",
    "anon_thp", "inactive_anon", "active_anon", "inactive_file", "active_file", "unevictable", "slab_reclaimable",
    "slab_unreclaimable", "slab", "bgd_reclaim", "workingset_refault", "workingset_refault_anon",
    "workingset_refault_file", "workingset_activate", "workingset_activate_anon", "workingset_activate_file",
    "workingset_restore_anon", "workingset_restore_file", "workingset_nodereclaim", "pgfault", "pgmajfault",
    "pgrefill", "pgscan", "pgsteal", "pgscan_kswapd", "pgscan_direct", "pgsteal_kswapd", "pgsteal_direct",
    "pgactivate", "pgdeactivate", "pglazyfree", "pglazyfreed", "thp_fault_alloc", "thp_collapse_alloc",
)  # fmt: skip
"""Names in memory.stat that the documents have; those that this kernel lacks are left out."""
V2_NUMA_STAT = (
    "anon", "file", "kernel_stack", "shmem", "file_mapped", "file_dirty", "file_writeback", "anon_thp",
    "inactive_anon", "active_anon", "inactive_file", "active_file", "unevictable", "slab_reclaimable",
    "slab_unreclaimable", "workingset_refault", "workingset_activate", "workingset_nodereclaim",
)  # fmt: skip
"""Names in memory.numa_stat that the documents have for each NUMA node."""
LOCAL_EVENTS = ("low", "high", "max", "oom", "oom_kill")
"""Names in memory.events.local."""


def memory_stat(stat: Mapping[str, int]) -> dict[str, int]:
    """Return the values of memory.stat by name."""
    return known_values(V2_MEMORY_STAT, _with_sums(stat))


def numa_stat(stat: Mapping[str, Mapping[int, int]]) -> dict[str, dict[str, int]]:
    """Return the values of memory.numa_stat by NUMA node, `N0`, and name."""
    return {f"N{node}": known_values(V2_NUMA_STAT, _with_sums(values)) for node, values in values_by_node(stat).items()}


def _with_sums(stat: Mapping[str, int]) -> dict[str, int]:
    summed = dict(stat)
    for name in SPLIT_COUNTERS:
        parts = [stat[part] for part in (f"{name}_anon", f"{name}_file") if part in stat]
        if parts:
            summed.setdefault(name, sum(parts))
    return summed


class CpuStats(MalachiteStruct, frozen=True):
    """Fields of cpu.stat, in microseconds."""

    usage_usec: int | None = None
    user_usec: int | None = None
    system_usec: int | None = None
    nr_periods: int | None = None
    nr_throttled: int | None = None
    throttled_usec: int | None = None


class V2CpuFields(MalachiteStruct, frozen=True, kw_only=True):
    """The ratios are cores, in spite of their names; `max` is microseconds in each `max_period`."""

    full_path: str | None = None
    cpu_stats: CpuStats
    cpu_pressure: PressureFile | None = None
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
    load: LoadFields | None = None
    cycles: int | None = None
    instructions: int | None = None
    l3_misses: int | None = None
    update_time: int | None = None


class V2MemoryFields(MalachiteStruct, frozen=True, kw_only=True):
    """Limits, use and pressure of memory, in bytes."""

    full_path: str | None = None
    user_path: str
    memory_usage_in_bytes: int | None = None
    max: int | None = None
    high: int | None = None
    low: int | None = None
    min: int | None = None
    swap_current: int | None = None
    swap_max: int | None = None
    mem_stats: dict[str, int]
    mem_numa_stats: dict[str, dict[str, int]]
    mem_pressure: PressureFile | None = None
    mem_local_events: dict[str, int]
    bpf_mem_data: MemCounters
    update_time: int | None = None


class V2BlkioFields(MalachiteStruct, frozen=True, kw_only=True):
    """Counters of io.stat by device, `MAJOR:MINOR`; limits of I/O are not read."""

    full_path: str | None = None
    user_path: str
    io_stat: dict[str, DeviceCounters]
    io_pressure: PressureFile | None = None
    bpf_fs_data: FsCounters
    old_bpf_fs_data: FsCounters
    update_time: int | None = None


def v2_groups(inputs: CgroupInputs) -> CgroupGroups:
    """Return the documents of one cgroup."""
    return cgroup_groups(inputs, _cpu(inputs), _memory(inputs), _blkio(inputs))


def _cpu(of: CgroupInputs) -> V2CpuFields:
    sample, limits = of.sample, of.sample.limits
    quota, period = i64(limits.quota_us), i64(limits.period_us)
    return V2CpuFields(
        full_path=of.layout.full_path("cpu", sample.path),
        cpu_stats=CpuStats(
            usage_usec=in_unit(sample.cpu_usage_ns, NS_PER_US),
            user_usec=in_unit(sample.cpu_user_ns, NS_PER_US),
            system_usec=in_unit(sample.cpu_system_ns, NS_PER_US),
            nr_periods=u64(sample.periods),
            nr_throttled=u64(sample.throttled_periods),
            throttled_usec=in_unit(sample.throttled_ns, NS_PER_US),
        ),
        cpu_pressure=pressure_file(sample.cpu_pressure),
        weight=i64(limits.weight),
        max=UNLIMITED if quota is None or quota < 0 else quota,
        max_period=DEFAULT_PERIOD_US if period is None or period <= 0 else period,
        max_burst=i64(limits.burst_us),
        **cpu_and_tasks(of),
    )


def _memory(of: CgroupInputs) -> V2MemoryFields | None:
    sample, limits = of.sample, of.sample.limits
    if sample.memory_bytes is None and not sample.memory_stat:
        return None
    return V2MemoryFields(
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
        mem_pressure=pressure_file(sample.memory_pressure),
        mem_local_events=_local_events(sample.memory_events),
        bpf_mem_data=mem_counters(of),
        update_time=of.files_at,
    )


def _local_events(events: Mapping[str, int]) -> dict[str, int]:
    local = {name.removeprefix("local."): count for name, count in events.items() if name.startswith("local.")}
    return known_values(LOCAL_EVENTS, local)


def _blkio(of: CgroupInputs) -> V2BlkioFields:
    sample = of.sample
    new, old = fs_counters(of)
    return V2BlkioFields(
        full_path=of.layout.full_path("blkio", sample.path),
        user_path=sample.path,
        io_stat={device: DeviceCounters(data=_io_stat(stat)) for device, stat in sample.io.items()},
        io_pressure=pressure_file(sample.io_pressure),
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
