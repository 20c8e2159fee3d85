"""Facts: what the node looked like at one instant. Counters are cumulative since boot or creation; `api.rates` subtracts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.cpus import Topology
from api.pods import Pod


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative time that a cgroup's tasks spent runnable but not running."""

    sum_ns: int
    count: int
    slots: tuple[int, ...] | None = None
    """Log2 histogram (`api.histograms`); None where the source knows sums only (/proc/PID/schedstat)."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """One PSI file: cumulative stall time of some and of all tasks; `full` is absent for a node's CPU on old kernels."""

    some_us: int
    some_avg10: float
    full_us: int | None = None
    full_avg10: float | None = None


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


class CgroupSample(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup. None means that the kernel, the hierarchy or our privileges do not give the value."""

    path: str
    id: int
    """Inode of its directory in the cpu controller's hierarchy (v1) or the unified one (v2): its identity."""
    cpu_usage_ns: int | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_ns: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None
    wait: Wait | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as a whole."""

    cpu: CpuTimes | None = None
    per_cpu: Mapping[int, CpuTimes] = {}
    load: tuple[float, float, float] | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None


class Indicator(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod says of itself: the latency histogram of its requests, read from its own Prometheus endpoint."""

    bounds_s: tuple[float, ...]
    """Inclusive upper bounds in seconds, without +Inf."""
    buckets: tuple[int, ...]
    """Cumulative counts, one per bound and a last one for +Inf."""
    sum_s: float
    sampled_at_ns: int


class SourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one source of a snapshot fared: failures are facts too."""

    name: str
    ok: bool
    duration_ns: int = 0
    detail: str = ""
    """What it runs on, for example the form of a probe."""
    error: str = ""
    remedy: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of the node at one instant; the advisor and every exporter see this same object."""

    seq: int
    taken_at_ns: int
    """CLOCK_MONOTONIC."""
    wall_time_ns: int
    """CLOCK_REALTIME, for people; no arithmetic is done on it."""
    boot_id: str
    topology: Topology
    node: NodeSample
    cgroups: Mapping[str, CgroupSample]
    pods: tuple[Pod, ...] = ()
    indicators: Mapping[str, Indicator] = {}
    """By pod key."""
    sources: tuple[SourceStatus, ...] = ()
