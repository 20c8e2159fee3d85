"""Makes the parts that the documents of both cgroup versions share: inputs, sums over descendants, common fields.
Pure. CPU time, memory and block I/O of a cgroup include its descendants, so threads, loads, hardware counters,
traffic, reclaim and kills are added up in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from api.rates import delta
from api.snapshot import CgroupSample, CpuCounters, IoStat, LoadAverages, Snapshot, SocketTraffic, ThreadStates
from exporters.malachite.history import (
    CgroupFrame,
    CgroupIoRead,
    CounterFrame,
    MalachiteHistory,
    block_requests,
    io_read_at_ns,
)
from exporters.malachite.wire import MalachiteStruct, NumberList, finite, load_averages, number_list, u64, unix_seconds

CountedPart = TypeVar("CountedPart", SocketTraffic, IoStat)
T = TypeVar("T")
OOM_KILL = "oom_kill"


class ReclaimCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of times that tasks had to reclaim memory themselves, and the time in nanoseconds."""

    direct: int
    direct_ns: int
    limit: int
    limit_ns: int


class KillCount(msgspec.Struct, frozen=True):
    """Number of processes that the OOM killer terminated."""

    count: int


SummedPart = TypeVar(
    "SummedPart", ThreadStates, LoadAverages, CpuCounters, SocketTraffic, IoStat, ReclaimCounts, KillCount
)


class SubtreeSums:
    """Sums over a cgroup and its descendants by the path of the cgroup, made once for a snapshot.

    A probe omits cgroups without events, such as one that never used a socket: they count as zero while other cgroups have
    values. If no cgroup has a value, the probe does not run, and nothing is known.
    """

    def __init__(self, now: Snapshot, history: MalachiteHistory) -> None:
        samples = now.cgroups
        self.threads = sum_subtrees(ThreadStates, _parts(samples, lambda sample: sample.threads_by_state), samples)
        # Each average decays by the same factor in every step, so the average of a sum is the sum of the averages.
        self.load = sum_subtrees(LoadAverages, _parts(samples, lambda sample: sample.load), samples)
        self.counters = sum_subtrees(CpuCounters, _parts(samples, lambda sample: sample.counters), samples)
        net, blocks = _parts(samples, lambda sample: sample.net), _parts(samples, block_requests)
        self.net, self.blocks = sum_subtrees(SocketTraffic, net, samples), sum_subtrees(IoStat, blocks, samples)
        self.net_before = sum_subtrees(
            SocketTraffic, _earlier_counters(now, history, net, lambda past: past.net), samples
        )
        self.block_io_before = sum_subtrees(
            IoStat, _earlier_counters(now, history, blocks, lambda past: past.blocks), samples
        )
        self.reclaims = sum_subtrees(ReclaimCounts, _parts(samples, _reclaims), samples)
        self.kills = _kills(samples)


def _parts(samples: Mapping[str, CgroupSample], of: Callable[[CgroupSample], T | None]) -> dict[str, T]:
    return {path: part for path, sample in samples.items() if (part := of(sample)) is not None}


def sum_subtrees(
    kind: Callable[..., SummedPart], values: Mapping[str, SummedPart], paths: Iterable[str]
) -> dict[str, SummedPart]:
    """Add each value to those of all ancestors. Other cgroups have zero; the result is empty if there are no values."""
    fields: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    totals: dict[str, list[Any]] = {path: [0] * len(fields) for path in paths} if values else {}
    for path, value in values.items():
        amounts = [getattr(value, field) for field in fields]
        for ancestor in _ancestors(path):
            total = totals.get(ancestor)
            totals[ancestor] = (
                amounts if total is None else [_add_known(a, b) for a, b in zip(total, amounts, strict=True)]
            )
    return {path: kind(**dict(zip(fields, total, strict=True))) for path, total in totals.items()}


def _reclaims(sample: CgroupSample) -> ReclaimCounts | None:
    if sample.reclaim is None:
        return None
    direct, limit = sample.reclaim.direct, sample.reclaim.limit
    return ReclaimCounts(direct=direct.count, direct_ns=direct.sum_ns, limit=limit.count, limit_ns=limit.sum_ns)


def _kills(samples: Mapping[str, CgroupSample]) -> dict[str, KillCount]:
    """Return the kills by cgroup from the kernel's files, or from our probe if the kernel has no such files.

    memory.events includes descendants; version 1's memory.oom_control, which has only oom_kill, does not
    (mm/memcontrol.c, memcg_memory_event).
    """
    filed = {path: sample.memory_events for path, sample in samples.items() if OOM_KILL in sample.memory_events}
    counts = {path: KillCount(events[OOM_KILL]) for path, events in filed.items()}
    if counts and all(len(events) == 1 for events in filed.values()):
        return sum_subtrees(KillCount, counts, samples)
    probed = {path: KillCount(sample.oom_kills) for path, sample in samples.items() if sample.oom_kills is not None}
    return sum_subtrees(KillCount, probed, samples) | counts


def _add_known(a: Any, b: Any) -> Any:
    # A sum with an unknown part is unknown.
    return None if a is None or b is None else a + b


def _ancestors(path: str) -> Iterator[str]:
    yield path
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def _earlier_counters(
    now: Snapshot,
    history: MalachiteHistory,
    counted: Mapping[str, CountedPart],
    of: Callable[[CgroupFrame], CountedPart | None],
) -> dict[str, CountedPart]:
    """Return earlier counters of the same cgroups, so that new minus old of any sum is the growth of existing cgroups.

    A cgroup that was created since then began at zero; without an earlier reading, the growth is zero.
    """
    earlier = {}
    past = history.past
    for path, after in counted.items():
        reading = history.cgroup(now.cgroups[path])
        before = None if reading is None else of(reading[1])
        if reading is None or past is None:
            earlier[path] = after
        elif reading[0] is not past:
            earlier[path] = type(after)(**dict.fromkeys(after.__struct_fields__, 0))
        else:
            earlier[path] = after if before is None or _went_back(before, after) else before
    return earlier


def _went_back(before: CountedPart, after: CountedPart) -> bool:
    return any(getattr(before, field) > getattr(after, field) for field in after.__struct_fields__)


class CgroupLayout(msgspec.Struct, frozen=True):
    """Version and mount points of the cgroup hierarchies."""

    version: str
    """`V1` or `V2`, as in the documents."""
    root: str
    """Directory that contains all cgroups."""
    mounts: Mapping[str, str]
    """Mount point by controller; all the same on version 2."""

    def full_path(self, controller: str, path: str) -> str | None:
        mount = self.mounts.get(controller)
        return None if mount is None else mount + path.rstrip("/")


class CgroupInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup in the latest snapshot, with its earlier counters and the sums over its descendants."""

    sample: CgroupSample
    layout: CgroupLayout
    taken_at_ns: int
    wall_time_ns: int
    before: tuple[CounterFrame, CgroupFrame] | None = None
    io_before: CgroupIoRead | None = None
    threads: ThreadStates | None = None
    load: LoadAverages | None = None
    counters: CpuCounters | None = None
    net: SocketTraffic | None = None
    net_before: SocketTraffic | None = None
    blocks: IoStat | None = None
    block_io_before: IoStat | None = None
    reclaims: ReclaimCounts | None = None
    kills: KillCount | None = None

    @property
    def at(self) -> int | None:
        """Time of the values that are read in every cycle, in seconds since 1970."""
        return unix_seconds(self.wall_time_ns)

    @property
    def files_at(self) -> int | None:
        """Time of the files that are not read in every cycle, in seconds since 1970."""
        return unix_seconds(io_read_at_ns(self.sample, self.wall_time_ns))

    @property
    def io_at(self) -> int | None:
        """Time of the block I/O counters, in seconds since 1970."""
        return self.files_at if self.sample.io or self.blocks is None else self.at

    def cores(self, field: str) -> float | None:
        """CPU time per second in cores, by the field of CgroupFrame that counts it."""
        if self.before is None:
            return None
        frame, earlier = self.before
        elapsed = self.taken_at_ns - frame.taken_at_ns
        used = delta(getattr(earlier, field), getattr(self.sample, field))
        return None if used is None or elapsed <= 0 else finite(used / elapsed)


class CpusetFields(MalachiteStruct, frozen=True):
    """Effective CPUs and NUMA nodes."""

    full_path: str | None = None
    cpus: NumberList | None = None
    mems: NumberList | None = None
    update_time: int | None = None


class NetCounters(MalachiteStruct, frozen=True):
    """Packets and bytes of the cgroup's sockets, cumulative."""

    net_tcp_rx: int | None = None
    net_tcp_rx_bytes: int | None = None
    net_tcp_tx: int | None = None
    net_tcp_tx_bytes: int | None = None
    net_udp_rx: int | None = None
    net_udp_rx_bytes: int | None = None
    net_udp_tx: int | None = None
    net_udp_tx_bytes: int | None = None


class NetClsFields(MalachiteStruct, frozen=True, kw_only=True):
    """Sockets now and about five seconds ago."""

    full_path: str | None = None
    user_path: str
    bpf_net_data: NetCounters
    old_bpf_net_data: NetCounters
    update_time: int | None = None


class NetGroup(MalachiteStruct, frozen=True, rename={"net": "Net"}):
    """Document of net_cls, the only one without a level for the version."""

    net: NetClsFields


class CgroupGroups(MalachiteStruct, frozen=True, rename="pascal", kw_only=True):
    """Documents of one cgroup by controller; a controller that does not know the cgroup is left out."""

    cpuacct: dict[str, dict[str, MalachiteStruct]]
    """Fields by name of the document and version, `{"Cpu": {"V1": ...}}`, as in the three after it."""
    memory: dict[str, dict[str, MalachiteStruct]] | None = None
    cpuset: dict[str, dict[str, MalachiteStruct]] | None = None
    blkio: dict[str, dict[str, MalachiteStruct]] | None = None
    net_cls: NetGroup | None = None


class FsCounters(MalachiteStruct, frozen=True):
    """Operations and bytes of the cgroup on all block devices together, cumulative."""

    fs_read: int | None = None
    fs_read_bytes: int | None = None
    fs_write: int | None = None
    fs_write_bytes: int | None = None


class MemCounters(MalachiteStruct, frozen=True):
    """Number of OOM kills, and calls and nanoseconds of reclaim by tasks themselves."""

    mem_oom_cnt: int | None = None
    mem_reclaim_cnt: int | None = None
    mem_reclaim_time: int | None = None


def cgroup_inputs(
    sample: CgroupSample, now: Snapshot, history: MalachiteHistory, below: SubtreeSums, layout: CgroupLayout
) -> CgroupInputs:
    """Return the inputs of the documents of one cgroup."""
    return CgroupInputs(
        sample=sample,
        layout=layout,
        taken_at_ns=now.taken_at_ns,
        wall_time_ns=now.wall_time_ns,
        before=history.cgroup(sample),
        io_before=history.io(sample),
        threads=below.threads.get(sample.path),
        load=below.load.get(sample.path),
        counters=below.counters.get(sample.path),
        net=below.net.get(sample.path),
        net_before=below.net_before.get(sample.path),
        blocks=below.blocks.get(sample.path),
        block_io_before=below.block_io_before.get(sample.path),
        reclaims=below.reclaims.get(sample.path),
        kills=below.kills.get(sample.path),
    )


def cgroup_groups(
    inputs: CgroupInputs, cpu: MalachiteStruct, memory: MalachiteStruct | None, blkio: MalachiteStruct | None
) -> CgroupGroups:
    """Return the documents of one cgroup: the given ones, which differ between the versions, and the common ones."""

    def versioned(name: str, fields: MalachiteStruct | None) -> dict[str, dict[str, MalachiteStruct]] | None:
        return None if fields is None else {name: {inputs.layout.version: fields}}

    return CgroupGroups(
        cpuacct={"Cpu": {inputs.layout.version: cpu}},
        memory=versioned("Memory", memory),
        cpuset=versioned("CpuSet", _cpuset_fields(inputs)),
        blkio=versioned("BlkIO", blkio),
        net_cls=_network_group(inputs),
    )


def cpu_and_tasks(inputs: CgroupInputs) -> dict[str, Any]:
    """Return the fields that `Cpu` of both versions has: cores used, threads, load and hardware counters."""
    threads, counters = inputs.threads, inputs.counters
    return {
        "cpu_usage_ratio": inputs.cores("cpu_usage_ns"),
        "cpu_user_usage_ratio": inputs.cores("cpu_user_ns"),
        "cpu_sys_usage_ratio": inputs.cores("cpu_system_ns"),
        "task_nr_runnable": None if threads is None else u64(threads.runnable),
        "task_nr_unint": None if threads is None else u64(threads.uninterruptible),
        "task_nr_iowait": None if threads is None else u64(threads.iowait),
        "task_nr_sleeping": None if threads is None else u64(threads.sleeping),
        "load": load_averages(inputs.load),
        "cycles": None if counters is None else u64(counters.cycles),
        "instructions": None if counters is None else u64(counters.instructions),
        "l3_misses": None if counters is None else u64(counters.misses),
        "update_time": inputs.at,
    }


def _cpuset_fields(inputs: CgroupInputs) -> CpusetFields | None:
    """Return None if the cgroup has no cpuset."""
    cpus, mems = number_list(inputs.sample.limits.cpus), number_list(inputs.sample.limits.mems)
    if cpus is None and mems is None:
        return None
    return CpusetFields(
        full_path=inputs.layout.full_path("cpuset", inputs.sample.path),
        cpus=cpus,
        mems=mems,
        update_time=inputs.files_at,
    )


def _network_group(inputs: CgroupInputs) -> NetGroup | None:
    """Return None if the cgroup's sockets are not counted: the client would treat zeros as measured."""
    if inputs.net is None or inputs.net_before is None:
        return None
    return NetGroup(
        net=NetClsFields(
            full_path=inputs.layout.full_path("net_cls", inputs.sample.path),
            user_path=inputs.sample.path,
            bpf_net_data=_net_counters(inputs.net),
            old_bpf_net_data=_net_counters(inputs.net_before),
            update_time=inputs.at,
        )
    )


def fs_counters(inputs: CgroupInputs) -> tuple[FsCounters, FsCounters]:
    """Return block I/O now and about five seconds ago. The client subtracts without a check, so old never exceeds new.

    Version 1 counts nothing before a limit of a device is set (since Linux 6.10 throttling begins only then): if the files
    are empty, the requests counted by our probe are used.
    """
    if not inputs.sample.io and inputs.blocks is not None and inputs.block_io_before is not None:
        return sum_devices({"all": inputs.blocks}), sum_devices({"all": inputs.block_io_before})
    new = sum_devices(inputs.sample.io)
    old = new if inputs.io_before is None else sum_devices(inputs.io_before.io)
    backwards = any((getattr(old, f) or 0) > (getattr(new, f) or 0) for f in FsCounters.__struct_fields__)
    return new, new if backwards else old


def sum_devices(devices: Mapping[str, IoStat]) -> FsCounters:
    """Return the sum over all devices."""
    return FsCounters(
        fs_read=u64(sum(device.reads for device in devices.values())),
        fs_read_bytes=u64(sum(device.read_bytes for device in devices.values())),
        fs_write=u64(sum(device.writes for device in devices.values())),
        fs_write_bytes=u64(sum(device.write_bytes for device in devices.values())),
    )


def mem_counters(inputs: CgroupInputs) -> MemCounters:
    """Return kills and reclaim, including those of descendants."""
    kills, reclaims = inputs.kills, inputs.reclaims
    return MemCounters(
        mem_oom_cnt=None if kills is None else u64(kills.count),
        mem_reclaim_cnt=None if reclaims is None else u64(reclaims.direct + reclaims.limit),
        mem_reclaim_time=None if reclaims is None else u64(reclaims.direct_ns + reclaims.limit_ns),
    )


def values_by_node(stat: Mapping[str, Mapping[int, int]]) -> dict[int, dict[str, int]]:
    """Return the values of memory.numa_stat by NUMA node and name, from those by name and NUMA node."""
    nodes = sorted({node for by_node in stat.values() for node in by_node if u64(node) is not None})
    return {node: {name: by_node[node] for name, by_node in stat.items() if node in by_node} for node in nodes}


def _net_counters(of: SocketTraffic) -> NetCounters:
    return NetCounters(
        net_tcp_rx=u64(of.tcp_received_packets),
        net_tcp_rx_bytes=u64(of.tcp_received_bytes),
        net_tcp_tx=u64(of.tcp_sent_packets),
        net_tcp_tx_bytes=u64(of.tcp_sent_bytes),
        net_udp_rx=u64(of.udp_received_packets),
        net_udp_rx_bytes=u64(of.udp_received_bytes),
        net_udp_tx=u64(of.udp_sent_packets),
        net_udp_tx_bytes=u64(of.udp_sent_bytes),
    )
