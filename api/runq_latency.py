"""Run-queue latency of online containers as the advisor evaluates it: without the containers' own throttling.
Pure. The advisor and the exporters share it, so that the page and /metrics show the evaluated numbers next to the raw ones.
Latency below one millisecond is never attributed to throttling. A container whose cgroups are not all measured has no
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from api.histogram import BOUNDS_NS, slot_of
from api.measurements import RunqLatency
from api.rates import Rates, cgroups_by_container, sum_runq_latencies
from api.snapshot import CgroupSample, Snapshot

NS_PER_MS = 1_000_000


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
