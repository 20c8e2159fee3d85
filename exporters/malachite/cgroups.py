"""What the documents of both cgroup versions share: where they come from, rates, cpuset, sockets and file I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.facts import CpuCounters, IoStat, Load, Net, ThreadStates
from api.rates import delta
from api.samples import CgroupSample, Snapshot
from exporters.malachite.past import CgroupPast, History, IoRead, Past, io_read_at_ns
from exporters.malachite.subtree import Kills, Reclaims, Subtree
from exporters.malachite.wire import Numbers, Wire, loads, numbers, real, seconds, u64


class Layout(msgspec.Struct, frozen=True):
    """Where this machine keeps cgroups."""

    version: str
    """`V1` or `V2`, as the documents say it."""
    root: str
    """Directory that all cgroups are below."""
    mounts: Mapping[str, str]
    """Mount point by controller; all the same on version 2."""

    def full_path(self, controller: str, path: str) -> str | None:
        mount = self.mounts.get(controller)
        return None if mount is None else mount + path.rstrip("/")


class CgroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup in the latest snapshot, with what came before and what is below it."""

    sample: CgroupSample
    layout: Layout
    taken_at_ns: int
    wall_time_ns: int
    before: tuple[Past, CgroupPast] | None = None
    io_before: IoRead | None = None
    threads: ThreadStates | None = None
    load: Load | None = None
    counters: CpuCounters | None = None
    net: Net | None = None
    net_before: Net | None = None
    blocks: IoStat | None = None
    blocks_before: IoStat | None = None
    reclaims: Reclaims | None = None
    kills: Kills | None = None

    @property
    def at(self) -> int | None:
        """When the values of every tick were read."""
        return seconds(self.wall_time_ns)

    @property
    def files_at(self) -> int | None:
        """When the files that are not read every tick were read."""
        return seconds(io_read_at_ns(self.sample, self.wall_time_ns))

    @property
    def io_at(self) -> int | None:
        """When block I/O was counted."""
        return self.files_at if self.sample.io or self.blocks is None else self.at

    def cores(self, field: str) -> float | None:
        """CPU time of that field of CgroupPast per second, in cores."""
        if self.before is None:
            return None
        frame, earlier = self.before
        elapsed = self.taken_at_ns - frame.taken_at_ns
        used = delta(getattr(earlier, field), getattr(self.sample, field))
        return None if used is None or elapsed <= 0 else real(used / elapsed)


class Cpuset(Wire, frozen=True):
    """CPUs and NUMA nodes in force."""

    full_path: str | None = None
    cpus: Numbers | None = None
    mems: Numbers | None = None
    update_time: int | None = None


class NetData(Wire, frozen=True):
    """Packets and bytes of the cgroup's sockets, cumulative."""

    net_tcp_rx: int | None = None
    net_tcp_rx_bytes: int | None = None
    net_tcp_tx: int | None = None
    net_tcp_tx_bytes: int | None = None
    net_udp_rx: int | None = None
    net_udp_rx_bytes: int | None = None
    net_udp_tx: int | None = None
    net_udp_tx_bytes: int | None = None


class NetCls(Wire, frozen=True, kw_only=True):
    """Sockets now and about five seconds ago."""

    full_path: str | None = None
    user_path: str
    bpf_net_data: NetData
    old_bpf_net_data: NetData
    update_time: int | None = None


class NetGroup(Wire, frozen=True, rename={"net": "Net"}):
    """The only group without a level for the version."""

    net: NetCls


class FsData(Wire, frozen=True):
    """Operations and bytes of the cgroup on all block devices together, cumulative."""

    fs_read: int | None = None
    fs_read_bytes: int | None = None
    fs_write: int | None = None
    fs_write_bytes: int | None = None


class MemData(Wire, frozen=True):
    """Events of memory: kills, and reclaim that tasks had to do themselves, in calls and nanoseconds."""

    mem_oom_cnt: int | None = None
    mem_reclaim_cnt: int | None = None
    mem_reclaim_time: int | None = None


def view(sample: CgroupSample, now: Snapshot, history: History, below: Subtree, layout: Layout) -> CgroupView:
    """Everything that the documents of one cgroup are made of."""
    return CgroupView(
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
        net_before=below.old_net.get(sample.path),
        blocks=below.blocks.get(sample.path),
        blocks_before=below.old_blocks.get(sample.path),
        reclaims=below.reclaims.get(sample.path),
        kills=below.kills.get(sample.path),
    )


def cpu_and_tasks(of: CgroupView) -> dict[str, Any]:
    """What `Cpu` of both versions has alike: cores used, threads, load and hardware counters."""
    threads, counters = of.threads, of.counters
    return {
        "cpu_usage_ratio": of.cores("cpu_usage_ns"),
        "cpu_user_usage_ratio": of.cores("cpu_user_ns"),
        "cpu_sys_usage_ratio": of.cores("cpu_system_ns"),
        "task_nr_runnable": None if threads is None else u64(threads.runnable),
        "task_nr_unint": None if threads is None else u64(threads.uninterruptible),
        "task_nr_iowait": None if threads is None else u64(threads.iowait),
        "task_nr_sleeping": None if threads is None else u64(threads.sleeping),
        "load": loads(of.load),
        "cycles": None if counters is None else u64(counters.cycles),
        "instructions": None if counters is None else u64(counters.instructions),
        "l3_misses": None if counters is None else u64(counters.misses),
        "update_time": of.at,
    }


def cpuset(of: CgroupView) -> Cpuset | None:
    """None where the cgroup has no cpuset."""
    cpus, mems = numbers(of.sample.limits.cpus), numbers(of.sample.limits.mems)
    if cpus is None and mems is None:
        return None
    return Cpuset(
        full_path=of.layout.full_path("cpuset", of.sample.path), cpus=cpus, mems=mems, update_time=of.files_at
    )


def network(of: CgroupView) -> NetGroup | None:
    """None where nobody counts the cgroup's sockets: the client would take zeros for the truth."""
    if of.net is None or of.net_before is None:
        return None
    return NetGroup(
        net=NetCls(
            full_path=of.layout.full_path("net_cls", of.sample.path),
            user_path=of.sample.path,
            bpf_net_data=_net(of.net),
            old_bpf_net_data=_net(of.net_before),
            update_time=of.at,
        )
    )


def file_io(of: CgroupView) -> tuple[FsData, FsData]:
    """Block I/O now and about five seconds ago. The client subtracts without a look, so old is never above new.

    Version 1 counts none before somebody has set a limit for a device (since Linux 6.10 throttling begins only then):
    where the files have nothing, our probe's requests stand in.
    """
    if not of.sample.io and of.blocks is not None and of.blocks_before is not None:
        return total({"all": of.blocks}), total({"all": of.blocks_before})
    new = total(of.sample.io)
    old = new if of.io_before is None else total(of.io_before.io)
    backwards = any((getattr(old, f) or 0) > (getattr(new, f) or 0) for f in FsData.__struct_fields__)
    return new, new if backwards else old


def total(devices: Mapping[str, IoStat]) -> FsData:
    """All devices together."""
    return FsData(
        fs_read=u64(sum(device.reads for device in devices.values())),
        fs_read_bytes=u64(sum(device.read_bytes for device in devices.values())),
        fs_write=u64(sum(device.writes for device in devices.values())),
        fs_write_bytes=u64(sum(device.write_bytes for device in devices.values())),
    )


def memory_events(of: CgroupView) -> MemData:
    """Kills and reclaim, those of the cgroups below included."""
    kills, reclaims = of.kills, of.reclaims
    return MemData(
        mem_oom_cnt=None if kills is None else u64(kills.count),
        mem_reclaim_cnt=None if reclaims is None else u64(reclaims.direct + reclaims.limit),
        mem_reclaim_time=None if reclaims is None else u64(reclaims.direct_ns + reclaims.limit_ns),
    )


def _net(of: Net) -> NetData:
    return NetData(
        net_tcp_rx=u64(of.tcp_received_packets),
        net_tcp_rx_bytes=u64(of.tcp_received_bytes),
        net_tcp_tx=u64(of.tcp_sent_packets),
        net_tcp_tx_bytes=u64(of.tcp_sent_bytes),
        net_udp_rx=u64(of.udp_received_packets),
        net_udp_rx_bytes=u64(of.udp_received_bytes),
        net_udp_tx=u64(of.udp_sent_packets),
        net_udp_tx_bytes=u64(of.udp_sent_bytes),
    )
