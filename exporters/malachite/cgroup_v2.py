"""Makes `cgroup/groups` for cgroup version 2, with memory.stat and memory.numa_stat. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from api.measurements import UNLIMITED, IoStat
from exporters.malachite.cgroup_documents import (
    CgroupInputs,
    CpusetFields,
    FsCounters,
    MemCounters,
    NetGroup,
    cpu_and_tasks,
    cpuset_fields,
    fs_counters,
    mem_counters,
    network_group,
)
from exporters.malachite.cgroup_v1 import DEFAULT_PERIOD_US, DeviceCounters
from exporters.malachite.wire import (
    NS_PER_US,
    LoadFields,
    MalachiteStruct,
    PressureFile,
    i64,
    in_unit,
    matching_fields,
    pressure_file,
    u64,
)

SPLIT_COUNTERS = ("workingset_refault", "workingset_activate")
"""Kernels from 5.9 on count anonymous memory and files apart (commit 170b04b7ae49); the documents want the sums too."""


class V2MemoryStat(MalachiteStruct, frozen=True):
    """Fields of memory.stat; names that this kernel lacks are omitted."""

    anon: int | None = None
    file: int | None = None
    kernel: int | None = None
    kernel_stack: int | None = None
    sock: int | None = None
    shmem: int | None = None
    file_mapped: int | None = None
    file_dirty: int | None = None
    file_writeback: int | None = None
    anon_thp: int | None = None
    inactive_anon: int | None = None
    active_anon: int | None = None
    inactive_file: int | None = None
    active_file: int | None = None
    unevictable: int | None = None
    slab_reclaimable: int | None = None
    slab_unreclaimable: int | None = None
    slab: int | None = None
    bgd_reclaim: int | None = None
    workingset_refault: int | None = None
    workingset_refault_anon: int | None = None
    workingset_refault_file: int | None = None
    workingset_activate: int | None = None
    workingset_activate_anon: int | None = None
    workingset_activate_file: int | None = None
    workingset_restore_anon: int | None = None
    workingset_restore_file: int | None = None
    workingset_nodereclaim: int | None = None
    pgfault: int | None = None
    pgmajfault: int | None = None
    pgrefill: int | None = None
    pgscan: int | None = None
    pgsteal: int | None = None
    pgscan_kswapd: int | None = None
    pgscan_direct: int | None = None
    pgsteal_kswapd: int | None = None
    pgsteal_direct: int | None = None
    pgactivate: int | None = None
    pgdeactivate: int | None = None
    pglazyfree: int | None = None
    pglazyfreed: int | None = None
    thp_fault_alloc: int | None = None
    thp_collapse_alloc: int | None = None


class V2NumaStat(MalachiteStruct, frozen=True):
    """Fields of memory.numa_stat of one NUMA node."""

    anon: int | None = None
    file: int | None = None
    kernel_stack: int | None = None
    shmem: int | None = None
    file_mapped: int | None = None
    file_dirty: int | None = None
    file_writeback: int | None = None
    anon_thp: int | None = None
    inactive_anon: int | None = None
    active_anon: int | None = None
    inactive_file: int | None = None
    active_file: int | None = None
    unevictable: int | None = None
    slab_reclaimable: int | None = None
    slab_unreclaimable: int | None = None
    workingset_refault: int | None = None
    workingset_activate: int | None = None
    workingset_nodereclaim: int | None = None


def memory_stat(stat: Mapping[str, int]) -> V2MemoryStat:
    """The node-wide file of a cgroup."""
    return V2MemoryStat(**matching_fields(V2MemoryStat, _with_sums(stat)))


def numa_stat(stat: Mapping[str, Mapping[int, int]]) -> dict[str, V2NumaStat]:
    """By node as the kernel writes it: `N0`."""
    nodes = sorted({node for by_node in stat.values() for node in by_node if u64(node) is not None})
    return {
        f"N{node}": V2NumaStat(
            **matching_fields(
                V2NumaStat, _with_sums({kind: values[node] for kind, values in stat.items() if node in values})
            )
        )
        for node in nodes
    }


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


class LocalEvents(MalachiteStruct, frozen=True):
    """Fields of memory.events.local."""

    low: int | None = None
    high: int | None = None
    max: int | None = None
    oom: int | None = None
    oom_kill: int | None = None


class V2MemoryFields(MalachiteStruct, frozen=True, kw_only=True):
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
    mem_stats: V2MemoryStat
    mem_numa_stats: dict[str, V2NumaStat]
    mem_pressure: PressureFile | None = None
    mem_local_events: LocalEvents
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


class V2CpuLevel(MalachiteStruct, frozen=True, rename={"v2": "V2"}):
    v2: V2CpuFields


class V2MemoryLevel(MalachiteStruct, frozen=True, rename={"v2": "V2"}):
    v2: V2MemoryFields


class V2CpusetLevel(MalachiteStruct, frozen=True, rename={"v2": "V2"}):
    v2: CpusetFields


class V2BlkioLevel(MalachiteStruct, frozen=True, rename={"v2": "V2"}):
    v2: V2BlkioFields


class V2CpuGroup(MalachiteStruct, frozen=True, rename={"cpu": "Cpu"}):
    cpu: V2CpuLevel


class V2MemoryGroup(MalachiteStruct, frozen=True, rename={"memory": "Memory"}):
    memory: V2MemoryLevel


class V2CpusetGroup(MalachiteStruct, frozen=True, rename={"cpuset": "CpuSet"}):
    cpuset: V2CpusetLevel


class V2BlkioGroup(MalachiteStruct, frozen=True, rename={"blkio": "BlkIO"}):
    blkio: V2BlkioLevel


class V2CgroupGroups(MalachiteStruct, frozen=True, rename="pascal", kw_only=True):
    """All of a cgroup; one whose controller does not know it is left out."""

    cpuacct: V2CpuGroup
    memory: V2MemoryGroup | None = None
    cpuset: V2CpusetGroup | None = None
    blkio: V2BlkioGroup
    net_cls: NetGroup | None = None


def v2_groups(inputs: CgroupInputs) -> V2CgroupGroups:
    """The documents of one cgroup."""
    memory, cpus = _memory(inputs), cpuset_fields(inputs)
    return V2CgroupGroups(
        cpuacct=V2CpuGroup(cpu=V2CpuLevel(v2=_cpu(inputs))),
        memory=None if memory is None else V2MemoryGroup(memory=V2MemoryLevel(v2=memory)),
        cpuset=None if cpus is None else V2CpusetGroup(cpuset=V2CpusetLevel(v2=cpus)),
        blkio=V2BlkioGroup(blkio=V2BlkioLevel(v2=_blkio(inputs))),
        net_cls=network_group(inputs),
    )


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


def _local_events(events: Mapping[str, int]) -> LocalEvents:
    local = {name.removeprefix("local."): count for name, count in events.items() if name.startswith("local.")}
    return LocalEvents(**matching_fields(LocalEvents, local))


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
