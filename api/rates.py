"""Rates per cgroup and node from two consecutive snapshots, and run-queue latency of online containers as evaluated.
A cgroup that was recreated, or a counter that decreased, has no rate for that interval. Identity is the cgroup's inode.
The evaluated latency is without the containers' own throttling; latency below one millisecond is never attributed to
throttling, and a container whose cgroups are not all measured has no value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import ceil

import msgspec

from api.cpu import Cpu
from api.histogram import BOUNDS_NS, slot_of
from api.qos import QoSLevel
from api.snapshot import CgroupSample, CpuTimes, Pressure, RunqLatency, Snapshot
from api.units import NS_PER_MS, NS_PER_US


class CgroupRates(msgspec.Struct, frozen=True, kw_only=True):
    """Change of one cgroup over an interval; ratios and cores are per second of wall time."""

    interval_ns: int
    cpu_cores: float | None = None
    throttled_periods_ratio: float | None = None
    """Share of the elapsed CFS periods that were throttled; 0 if none elapsed."""
    throttled_periods: int | None = None
    throttled_ns: int | None = None
    wait: RunqLatency | None = None
    """Waits that ended within the interval."""
    wait_cores: float | None = None
    """Mean number of tasks waiting for a CPU. With cpu_cores it gives the mean number of runnable tasks (Little's law)."""
    cpu_pressure_ratio: float | None = None
    memory_pressure_ratio: float | None = None
    io_pressure_ratio: float | None = None


class NodeRates(msgspec.Struct, frozen=True, kw_only=True):
    """Change of the machine over an interval."""

    interval_ns: int
    busy_cores: float | None = None
    steal_cores: float | None = None
    per_cpu_busy_ratio: Mapping[int, float] = {}
    cpu_pressure_ratio: float | None = None
    memory_pressure_ratio: float | None = None
    io_pressure_ratio: float | None = None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the node, and by path of every cgroup that is in both snapshots with the same inode."""

    node: NodeRates
    cgroups: Mapping[str, CgroupRates]


def delta(before: int | None, after: int | None) -> int | None:
    """Growth of a counter; None if either value is unknown or the counter decreased."""
    if before is None or after is None or after < before:
        return None
    return after - before


def runq_latency_delta(before: RunqLatency | None, after: RunqLatency | None) -> RunqLatency | None:
    """Waits that ended between two samples of the same cgroup."""
    if before is None or after is None:
        return None
    sum_ns, count = delta(before.sum_ns, after.sum_ns), delta(before.count, after.count)
    if sum_ns is None or count is None:
        return None
    slots = None
    if before.slots is not None and after.slots is not None:
        if not count and not sum_ns:
            return _zero_runq_latency(len(after.slots))
        slots = tuple(b - a for a, b in zip(before.slots, after.slots, strict=True))
        if min(slots) < 0:
            return None
    return RunqLatency(sum_ns=sum_ns, count=count, slots=slots)


@cache
def _zero_runq_latency(slots: int) -> RunqLatency:
    return RunqLatency(sum_ns=0, count=0, slots=(0,) * slots)


def sum_runq_latencies(waits: Sequence[RunqLatency]) -> RunqLatency:
    """Sum of these distributions; without slots if one of them has none."""
    if len(waits) == 1:
        return waits[0]
    distributions = [wait.slots for wait in waits if wait.slots is not None]
    complete = bool(distributions) and len(distributions) == len(waits)
    slots = tuple(map(sum, zip(*distributions, strict=True))) if complete else None
    return RunqLatency(sum_ns=sum(wait.sum_ns for wait in waits), count=sum(wait.count for wait in waits), slots=slots)


def cgroups_by_container(cgroups: Collection[str], containers: Iterable[str]) -> dict[str, list[str]]:
    """Map each container cgroup that exists to its own path followed by the paths of its descendants.

    A cgroup below two containers belongs to the nearest one.
    """
    groups = {path: [path] for path in containers if path in cgroups}
    if not groups:
        return groups
    # The cgroups of a directory are beside each other in a listing, and have the same container above them.
    directory = container = ""
    for path in cgroups:
        above = path.rpartition("/")[0]
        if above != directory:
            directory = container = above
            while container and container not in groups:
                container = container.rpartition("/")[0]
        if container and path not in groups:
            groups[container].append(path)
    return groups


def compute_rates(previous: Snapshot, current: Snapshot) -> Rates | None:
    """Rates between two snapshots of one boot; None if no time passed between them or the machine restarted."""
    interval_ns = current.taken_at_ns - previous.taken_at_ns
    if interval_ns <= 0 or previous.boot_id != current.boot_id:
        return None
    cgroups = _CgroupRatesByPath(previous.cgroups, current.cgroups, interval_ns)
    return Rates(node=_node_rates(previous, current, interval_ns), cgroups=cgroups)


class _CgroupRatesByPath(Mapping[str, CgroupRates]):
    """The rates of every cgroup that is in both snapshots, each computed at its first use.

    Policies use the containers only, and an agent without a viewer uses none: all rates of 400 cgroups take 1.4 ms of each
    cycle. Any thread may read it: two threads compute the same value.
    """

    def __init__(self, before: Mapping[str, CgroupSample], after: Mapping[str, CgroupSample], interval_ns: int) -> None:
        self._before, self._after, self._interval_ns = before, after, interval_ns
        self._computed: dict[str, CgroupRates] = {}

    def __getitem__(self, path: str) -> CgroupRates:
        rates = self._computed.get(path)
        if rates is None:
            before, after = self._before[path], self._after[path]
            if before.id != after.id:
                raise KeyError(path)
            rates = self._computed[path] = _cgroup_rates(before, after, self._interval_ns)
        return rates

    def __iter__(self) -> Iterator[str]:
        for path, after in self._after.items():
            if (before := self._before.get(path)) is not None and before.id == after.id:
                yield path

    def __len__(self) -> int:
        return sum(1 for _ in self)


def rates_since(previous: Snapshot | None, current: Snapshot, shared: Rates | None = None) -> Rates | None:
    """Return `shared` if these are the rates since `previous`, and compute them otherwise; None without a previous snapshot."""
    if previous is None:
        return None
    if shared is not None and shared.node.interval_ns == current.taken_at_ns - previous.taken_at_ns:
        return shared
    return compute_rates(previous, current)


def with_busy_limit(rates: Rates | None, cpus: int) -> Rates | None:
    """Return the rates of a node of which only so many CPUs count: the busy cores are at most these; 0 CPUs are unknown."""
    if rates is None or rates.node.busy_cores is None or not 0 < cpus < rates.node.busy_cores:
        return rates
    return msgspec.structs.replace(rates, node=msgspec.structs.replace(rates.node, busy_cores=float(cpus)))


def _cgroup_rates(before: CgroupSample, after: CgroupSample, interval_ns: int) -> CgroupRates:
    usage = delta(before.cpu_usage_ns, after.cpu_usage_ns)
    periods = delta(before.periods, after.periods)
    throttled = delta(before.throttled_periods, after.throttled_periods)
    wait = runq_latency_delta(before.wait, after.wait)
    return CgroupRates(
        interval_ns=interval_ns,
        cpu_cores=None if usage is None else usage / interval_ns,
        throttled_periods_ratio=None if periods is None or throttled is None else throttled / max(periods, 1),
        throttled_periods=throttled,
        throttled_ns=delta(before.throttled_ns, after.throttled_ns),
        wait=wait,
        wait_cores=None if wait is None else wait.sum_ns / interval_ns,
        cpu_pressure_ratio=_pressure_ratio(before.cpu_pressure, after.cpu_pressure, interval_ns),
        memory_pressure_ratio=_pressure_ratio(before.memory_pressure, after.memory_pressure, interval_ns),
        io_pressure_ratio=_pressure_ratio(before.io_pressure, after.io_pressure, interval_ns),
    )


def _node_rates(previous: Snapshot, current: Snapshot, interval_ns: int) -> NodeRates:
    before, after = previous.node, current.node
    busy = steal = None
    if before.cpu is not None and after.cpu is not None:
        busy = delta(before.cpu.busy_ns, after.cpu.busy_ns)
        steal = delta(before.cpu.steal_ns, after.cpu.steal_ns)
    per_cpu = {
        cpu: ratio
        for cpu, times in after.per_cpu.items()
        if cpu in before.per_cpu and (ratio := _busy_ratio(before.per_cpu[cpu], times)) is not None
    }
    return NodeRates(
        interval_ns=interval_ns,
        busy_cores=None if busy is None else _capped_at_cpus(current.topology.cpus, busy / interval_ns),
        steal_cores=None if steal is None else steal / interval_ns,
        per_cpu_busy_ratio=per_cpu,
        cpu_pressure_ratio=_pressure_ratio(before.cpu_pressure, after.cpu_pressure, interval_ns),
        memory_pressure_ratio=_pressure_ratio(before.memory_pressure, after.memory_pressure, interval_ns),
        io_pressure_ratio=_pressure_ratio(before.io_pressure, after.io_pressure, interval_ns),
    )


def _capped_at_cpus(cpus: Sequence[Cpu], cores: float) -> float:
    # The timestamps are taken before the files are read, and /proc/stat counts whole ticks. If a busy machine delays the
    # second read, a short interval contains more CPU time than its CPUs can provide.
    return min(cores, float(len(cpus))) if cpus else cores


def _busy_ratio(before: CpuTimes, after: CpuTimes) -> float | None:
    busy, total = delta(before.busy_ns, after.busy_ns), delta(before.total_ns, after.total_ns)
    return None if busy is None or not total else busy / total


def _pressure_ratio(before: Pressure | None, after: Pressure | None, interval_ns: int) -> float | None:
    if before is None or after is None:
        return None
    stalled_us = delta(before.some_us, after.some_us)
    return None if stalled_us is None else stalled_us * NS_PER_US / interval_ns


def exclude_throttling(
    wait: RunqLatency, throttled_ns: int, throttled_periods: int, threads: int, cpus: int
) -> RunqLatency:
    """Remove the latency that a container's own CPU quota caused, which reclaimed pods have no part in.

    The kernel counts the throttled time of every held thread as waiting (`sched_info`), but `throttled_usec` once per
    CPU. Therefore up to `threads` waits per throttled period are removed, and in total the throttled time of every
    thread that shared a CPU, longest first and at each slot's lower bound. Waits below a millisecond stay.
    """
    if not throttled_ns or not throttled_periods:
        return wait
    left_ns = throttled_ns * ceil(max(threads, 1) / max(min(threads, cpus), 1))
    if wait.slots is None:
        return RunqLatency(sum_ns=max(wait.sum_ns - left_ns, 0), count=wait.count)
    slots, left, sum_ns = list(wait.slots), throttled_periods * max(threads, 1), wait.sum_ns
    for k in range(len(slots) - 1, slot_of(NS_PER_MS), -1):
        removed = min(slots[k], left, left_ns // BOUNDS_NS[k - 1])
        slots[k] -= removed
        left -= removed
        left_ns -= removed * BOUNDS_NS[k - 1]
        sum_ns -= removed * BOUNDS_NS[k - 1]
    return RunqLatency(sum_ns=max(sum_ns, 0), count=sum(slots), slots=tuple(slots))


def online_runq_latency(
    snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> dict[str, RunqLatency | None]:
    """Return the waits of every online container since the previous cycle, by cgroup; None if they are not measured.

    A container's tasks are those of its cgroup and of all descendants. A missing cgroup is omitted, unless the whole
    tree could not be read: then no container has a value.
    """
    containers = [container.cgroup for pod in snapshot.pods if pod.qos.online for container in pod.containers]
    inside = cgroups_by_container(snapshot.cgroups, containers)
    readable = "/" in snapshot.cgroups
    return {
        container: _container_latency(inside[container], snapshot, change, previous) if container in inside else None
        for container in containers
        if container in inside or not readable
    }


def _container_latency(
    paths: Sequence[str], snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> RunqLatency | None:
    """Return the waits of these cgroups together, the container's own first, without those that its own quota caused."""
    waits, throttled_ns, periods = [], 0, 0
    for path in paths:
        sample = snapshot.cgroups[path]
        if path != paths[0] and sample.periods is None:
            continue  # without a cpu controller, its tasks are charged to the cgroup above
        waits.append(cgroup_runq_latency(sample, change, previous))
        if change is not None and (rate := change.cgroups.get(path)) is not None:
            throttled_ns += rate.throttled_ns or 0
            periods += rate.throttled_periods or 0
    measured = [wait for wait in waits if wait is not None]
    if len(measured) < len(waits):
        return None
    threads = snapshot.cgroups[paths[0]].threads or 1
    return exclude_throttling(sum_runq_latencies(measured), throttled_ns, periods, threads, len(snapshot.topology.cpus))


def cgroup_runq_latency(sample: CgroupSample, change: Rates | None, previous: Snapshot | None) -> RunqLatency | None:
    """Return the waits of one cgroup since the previous cycle; all of them if the cgroup was created since then."""
    before = previous.cgroups.get(sample.path) if previous else None
    if change is not None and before is not None and before.id == sample.id:
        rate = change.cgroups.get(sample.path)
        return rate.wait if rate else None
    is_new = change is not None and previous is not None and "/" in previous.cgroups
    return sample.wait if is_new else None


def reclaimed_interference_ns(snapshot: Snapshot, change: Rates | None, previous: Snapshot | None) -> int | None:
    """Return the time that tasks of online containers waited since the previous cycle while reclaimed pods had the CPU,
    summed over tasks; None if the probe `blame` measured no online container."""
    online = [container.cgroup for pod in snapshot.pods if pod.qos.online for container in pod.containers]
    if change is None or previous is None or not online:
        return None
    reclaimed = {
        container.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for container in pod.containers
    }
    total = None
    for paths in cgroups_by_container(snapshot.cgroups, online).values():
        for path in paths:
            before, now = previous.cgroups.get(path), snapshot.cgroups[path]
            if now.blame is None or before is None or before.blame is None or before.id != now.id:
                continue
            total = total or 0
            for aggressor, waited_ns in now.blame.by_cgroup.items():
                if _is_inside(aggressor, reclaimed):
                    total += delta(before.blame.by_cgroup.get(aggressor, 0), waited_ns) or 0
    return total


def _is_inside(path: str, cgroups: Collection[str]) -> bool:
    """Return whether the path is one of these cgroups, or below one."""
    while path and path not in cgroups:
        path = path.rpartition("/")[0]
    return bool(path)
