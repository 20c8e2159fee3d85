"""Keeps the counters of about five seconds ago, the interval at which Katalyst's agent polls, for rates.
The agent divides the difference between `old_*` and new counters by the time between its own two polls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from api.snapshot import CgroupSample, CpuCounters, CpuTimes, IoStat, NodeSample, RunqLatency, Snapshot, SocketTraffic
from api.units import NS_PER_S

CLIENT_INTERVAL_NS = 5 * NS_PER_S
TOLERANCE_NS = NS_PER_S // 2
"""Cycles are not exact: one that comes up to half a second early still counts as five seconds ago."""
RETRANSMITTED_SEGMENTS, SENT_SEGMENTS = "Tcp.RetransSegs", "Tcp.OutSegs"


class CgroupFrame(msgspec.Struct, frozen=True):
    """Counters of one cgroup in an earlier snapshot."""

    id: int
    cpu_usage_ns: int | None
    cpu_user_ns: int | None
    cpu_system_ns: int | None
    net: SocketTraffic | None
    blocks: IoStat | None
    wait: tuple[int, int] | None
    """Sum in nanoseconds and number of its run-queue waits."""


class CounterFrame(msgspec.Struct, frozen=True):
    """Counters of an earlier snapshot."""

    taken_at_ns: int
    wall_time_ns: int
    cpu: CpuTimes | None
    per_cpu: Mapping[int, CpuTimes]
    run_delay_ns: Mapping[int, int]
    timeslices: Mapping[int, int]
    cpu_waits: Mapping[int, RunqLatency]
    cpu_counters: Mapping[int, CpuCounters]
    power_uj: Mapping[str, int]
    cgroups: Mapping[str, CgroupFrame]


class TimedRead(msgspec.Struct, frozen=True):
    """Values that are not read in every cycle, with the time of reading."""

    read_at_ns: int


class CgroupIoRead(TimedRead, frozen=True):
    """Block I/O of one cgroup."""

    id: int
    io: Mapping[str, IoStat]


class TcpCountersRead(TimedRead, frozen=True):
    """TCP segments that the node has sent, and those of them that are retransmissions."""

    sent: int | None
    again: int | None


R = TypeVar("R", bound=TimedRead)


class MalachiteHistory(msgspec.Struct, frozen=True):
    """The latest snapshot, and the counters of earlier ones that rates need: a few hundred bytes per cgroup.

    It is immutable, so that requests on the event loop may read it while the cycle thread makes the next one.
    """

    latest: Snapshot | None = None
    frames: tuple[CounterFrame, ...] = ()
    """Counters of snapshots, oldest first."""
    io_reads: Mapping[str, tuple[CgroupIoRead, ...]] = {}
    """Block I/O by cgroup, oldest first."""
    tcp_reads: tuple[TcpCountersRead, ...] = ()
    """TCP counters, oldest first."""

    def after(self, snapshot: Snapshot) -> MalachiteHistory:
        """Return the history with the next snapshot.

        After a reboot, or if a clock was set back, earlier counters are dropped.
        """
        before, past = self.latest, self
        if before is not None and (before.boot_id != snapshot.boot_id or snapshot.taken_at_ns <= before.taken_at_ns):
            past = MalachiteHistory()
        frames = past.frames
        # Cycles that alarms trigger come faster than ticks; their counters are not needed.
        if not frames or snapshot.taken_at_ns - frames[-1].taken_at_ns >= TOLERANCE_NS:
            frames = (*frames, _counter_frame(snapshot))
        far = snapshot.taken_at_ns - CLIENT_INTERVAL_NS + TOLERANCE_NS
        while len(frames) > 1 and frames[1].taken_at_ns <= far:
            frames = frames[1:]
        netstat = snapshot.node.netstat
        tcp = TcpCountersRead(
            node_read_at_ns(snapshot), sent=netstat.get(SENT_SEGMENTS), again=netstat.get(RETRANSMITTED_SEGMENTS)
        )
        return MalachiteHistory(
            latest=snapshot,
            frames=frames,
            io_reads={
                path: past._io_reads_after(sample, snapshot.wall_time_ns) for path, sample in snapshot.cgroups.items()
            },
            tcp_reads=_trim_reads(past.tcp_reads, tcp),
        )

    @property
    def past(self) -> CounterFrame | None:
        """Counters of about five seconds before the latest snapshot, or the oldest since then."""
        return next(self._earlier(), None)

    @property
    def previous(self) -> CounterFrame | None:
        """Counters of the tick before the latest snapshot."""
        frames = list(self._earlier())
        return frames[-1] if frames else None

    def cgroup(self, sample: CgroupSample) -> tuple[CounterFrame, CgroupFrame] | None:
        """Return the counters of the same cgroup about five seconds ago, or the oldest since then."""
        for frame in self._earlier():
            past = frame.cgroups.get(sample.path)
            if past is not None and past.id == sample.id:
                return frame, past
        return None

    def io(self, sample: CgroupSample) -> CgroupIoRead | None:
        """Return the block I/O of the same cgroup, read about five seconds before the latest read of its files."""
        reads = self.io_reads.get(sample.path, ())
        return reads[0] if len(reads) > 1 else None

    @property
    def tcp(self) -> TcpCountersRead | None:
        """TCP counters read about five seconds before the latest ones."""
        return self.tcp_reads[0] if len(self.tcp_reads) > 1 else None

    def _earlier(self) -> Iterator[CounterFrame]:
        # Oldest first.
        if self.latest is not None:
            latest = self.latest.taken_at_ns
            yield from (frame for frame in self.frames if frame.taken_at_ns < latest)

    def _io_reads_after(self, sample: CgroupSample, wall_time_ns: int) -> tuple[CgroupIoRead, ...]:
        reads = self.io_reads.get(sample.path, ())
        if reads and reads[-1].id != sample.id:
            reads = ()
        return _trim_reads(reads, CgroupIoRead(io_read_at_ns(sample, wall_time_ns), sample.id, sample.io))


def block_requests(sample: CgroupSample) -> IoStat | None:
    """Return the block I/O of a cgroup's own tasks on all devices; None if no probe counts it."""
    if not sample.block_io:
        return None
    devices = sample.block_io.values()
    return IoStat(
        read_bytes=sum(device.read_bytes for device in devices),
        write_bytes=sum(device.write_bytes for device in devices),
        reads=sum(device.reads.count for device in devices),
        writes=sum(device.writes.count for device in devices),
    )


def io_read_at_ns(sample: CgroupSample, wall_time_ns: int) -> int:
    """Return when the files of a cgroup that are not read in every cycle were read; by default with the snapshot."""
    return wall_time_ns if sample.files_read_at_ns is None else sample.files_read_at_ns


def node_read_at_ns(snapshot: Snapshot) -> int:
    """Return when the files of the node that are not read in every cycle were read; by default with the snapshot."""
    read_at = snapshot.node.files_read_at_ns
    return snapshot.wall_time_ns if read_at is None else read_at


def _trim_reads(reads: tuple[R, ...], read: R) -> tuple[R, ...]:
    """Add a read, and return the reads since the newest one that is about five seconds older."""
    if reads and reads[-1].read_at_ns > read.read_at_ns:
        reads = ()  # the clock was set back
    if not reads or read.read_at_ns - reads[-1].read_at_ns >= TOLERANCE_NS:
        reads = (*reads, read)
    far = read.read_at_ns - CLIENT_INTERVAL_NS + TOLERANCE_NS
    while len(reads) > 1 and reads[1].read_at_ns <= far:
        reads = reads[1:]
    return reads


def _counter_frame(snapshot: Snapshot) -> CounterFrame:
    node: NodeSample = snapshot.node
    return CounterFrame(
        taken_at_ns=snapshot.taken_at_ns,
        wall_time_ns=snapshot.wall_time_ns,
        cpu=node.cpu,
        per_cpu=node.per_cpu,
        run_delay_ns=node.run_delay_ns,
        timeslices=node.timeslices,
        cpu_waits=node.cpu_waits,
        cpu_counters=node.cpu_counters,
        power_uj=node.power_uj,
        cgroups={path: _cgroup_frame(sample) for path, sample in snapshot.cgroups.items()},
    )


def _cgroup_frame(sample: CgroupSample) -> CgroupFrame:
    return CgroupFrame(
        id=sample.id,
        cpu_usage_ns=sample.cpu_usage_ns,
        cpu_user_ns=sample.cpu_user_ns,
        cpu_system_ns=sample.cpu_system_ns,
        net=sample.net,
        blocks=block_requests(sample),
        wait=None if sample.wait is None else (sample.wait.sum_ns, sample.wait.count),
    )
