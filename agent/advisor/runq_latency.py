"""Run-queue latency of online containers between two snapshots: own throttling removed, quantiles, breaches.
Latency below one millisecond is never attributed to throttling. A container whose cgroups are not all measured
has no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log
from typing import NamedTuple

from agent.advisor.cpu_estimate import online_containers
from agent.config.advisor import LatencyConfig
from api.histogram import BOUNDS_NS, count_above, quantile_ns, slot_of
from api.measurements import RunqLatency
from api.rates import Rates, cgroups_by_container, runq_latency_delta, sum_runq_latencies
from api.snapshot import CgroupSample, Snapshot

NS_PER_MS = 1_000_000


def exclude_throttling(
    wait: RunqLatency, throttled_ns: int, throttled_periods: int, threads: int, cpus: int
) -> RunqLatency:
    """The waits that are left when own throttling is taken out: that is the owner's doing, not batch work's.

    The kernel counts throttled time as waiting: of each thread that is held back, while it counts the throttled time itself
    once for each CPU. So up to `threads` waits in each throttled period, and in all the throttled time for each thread that
    shared a CPU, are taken out, the longest first and at each slot's lower bound. Waits below a millisecond stay.
    """
    if not throttled_ns or not throttled_periods:
        return wait
    left_ns = throttled_ns * ceil(max(threads, 1) / max(min(threads, cpus), 1))
    if wait.slots is None:
        return RunqLatency(sum_ns=max(wait.sum_ns - left_ns, 0), count=wait.count)
    slots, left, sum_ns = list(wait.slots), throttled_periods * max(threads, 1), wait.sum_ns
    for k in range(len(slots) - 1, slot_of(NS_PER_MS), -1):
        taken = min(slots[k], left, left_ns // BOUNDS_NS[k - 1])
        slots[k] -= taken
        left -= taken
        left_ns -= taken * BOUNDS_NS[k - 1]
        sum_ns -= taken * BOUNDS_NS[k - 1]
    return RunqLatency(sum_ns=max(sum_ns, 0), count=sum(slots), slots=tuple(slots))


def max_latency(waits: Mapping[str, RunqLatency | None], config: LatencyConfig) -> tuple[str, float, int] | None:
    """The container that waited longest at the quantile: (cgroup, wait in ns, number of waits); None if none waited."""
    seen = [
        (wait_ns, cgroup, wait.count)
        for cgroup, wait in waits.items()
        if wait is not None and (wait_ns := latency_quantile_ns(wait, config.quantile)) is not None
    ]
    if not seen:
        return None
    wait_ns, cgroup, count = max(seen)
    return cgroup, wait_ns, count


def latency_quantile_ns(wait: RunqLatency, quantile: float) -> float | None:
    """The quantile of a set of waits in ns; where only their sum is known, that of an exponential of the same mean."""
    if wait.slots is not None:
        return quantile_ns(wait.slots, quantile)
    return wait.sum_ns / wait.count * -log(1 - quantile) if wait.count else None


def find_breaches(
    waits: Mapping[str, RunqLatency | None], limits_ns: Mapping[str, float], config: LatencyConfig
) -> dict[str, RunqLatency]:
    """The containers of which each breaches its limit."""
    return {
        cgroup: wait
        for cgroup, wait in waits.items()
        if wait is not None and is_breach(wait, limits_ns[cgroup], config)
    }


def is_breach(wait: RunqLatency, limit_ns: float, config: LatencyConfig) -> bool:
    """Whether more waits were above the limit than the quantile allows, and at least min_waits_above."""
    if wait.slots is None:
        value = latency_quantile_ns(wait, config.quantile)
        return value is not None and value > limit_ns and wait.count >= config.min_waits_above
    longer = count_above(wait.slots, limit_ns)
    return longer >= config.min_waits_above and longer > (1 - config.quantile) * wait.count


def is_latency_alarm(
    before: Mapping[str, RunqLatency],
    after: Mapping[str, RunqLatency],
    limits_ns: Mapping[str, float],
    config: LatencyConfig,
) -> bool:
    """Whether the waits between two looks, a fraction of a round apart, are a breach already."""
    # So many waits of the limit's slot or longer are at least half of that together: most looks end here.
    least = config.min_waits_above / 2
    changes = {
        cgroup: runq_latency_delta(then, wait)
        for cgroup, wait in after.items()
        if (then := before.get(cgroup)) is not None and wait.sum_ns - then.sum_ns >= least * limits_ns[cgroup]
    }
    return bool(find_breaches(changes, limits_ns, config))


_MIN_STARVED_THREADS = 0.5
"""Threads: one that ran all the time did not use quite a whole core by the kernel's books."""


def online_runq_latency(
    snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> dict[str, RunqLatency | None]:
    """Waits of every online container since the previous round, by cgroup; None where they are not known.

    A container's tasks are those of its cgroup and of all below. One that is not there has nobody to protect, but where the
    whole tree could not be read nothing is known of any.
    """
    containers = [container.cgroup for container in online_containers(snapshot)]
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
    """Waits of these cgroups together, the container's own first, without what its own quota caused."""
    waits, throttled_ns, periods = [], 0, 0
    for path in paths:
        sample = snapshot.cgroups[path]
        if path != paths[0] and sample.periods is None:
            continue  # without a cpu controller its tasks are counted as those of the one above
        waits.append(_cgroup_latency(sample, change, previous))
        if change is not None and (rate := change.cgroups.get(path)) is not None:
            throttled_ns += rate.throttled_ns or 0
            periods += rate.throttled_periods or 0
    known = [wait for wait in waits if wait is not None]
    if len(known) < len(waits):
        return None
    threads = snapshot.cgroups[paths[0]].threads or 1
    return exclude_throttling(sum_runq_latencies(known), throttled_ns, periods, threads, len(snapshot.topology.cpus))


def _cgroup_latency(sample: CgroupSample, change: Rates | None, previous: Snapshot | None) -> RunqLatency | None:
    """Waits of one cgroup since the previous round; one that was made since then has waited all that it ever waited."""
    before = previous.cgroups.get(sample.path) if previous else None
    if change is not None and before is not None and before.id == sample.id:
        rate = change.cgroups.get(sample.path)
        return rate.wait if rate else None
    made_since = change is not None and previous is not None and "/" in previous.cgroups
    return sample.wait if made_since else None


class StarvedContainer(NamedTuple):
    """An online container that is runnable, and none of whose waits ended: how long they are is not known yet."""

    runnable: int
    """Threads, as the round saw them."""
    cores: float
    """What they used since the previous round."""


def find_starved(
    waits: Mapping[str, RunqLatency | None], snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> dict[str, StarvedContainer]:
    """The containers that have more runnable threads than they used CPU, while no wait of theirs ended since the previous
    round, by cgroup. Not those that their own quota held back; none where threads are not counted."""
    quiet = [cgroup for cgroup, wait in waits.items() if wait is not None and not wait.count]
    if change is None or not quiet:
        return {}
    runnable = {
        path: sample.threads_by_state.runnable
        for path, sample in snapshot.cgroups.items()
        if sample.threads_by_state is not None and sample.threads_by_state.runnable
    }
    found = {}
    for cgroup, paths in cgroups_by_container({*quiet, *runnable}, quiet).items():
        threads = sum(runnable.get(path, 0) for path in paths)
        rates_of = [rate for path in paths if (rate := change.cgroups.get(path)) is not None]
        ended = [
            _cgroup_latency(snapshot.cgroups[path], change, previous) for path in paths if path in snapshot.cgroups
        ]
        if any(wait is not None and wait.count for wait in ended) or any(rate.throttled_periods for rate in rates_of):
            continue
        own = change.cgroups.get(cgroup)
        cores = (own.cpu_cores if own is not None else None) or 0.0
        if threads - cores >= _MIN_STARVED_THREADS:
            found[cgroup] = StarvedContainer(threads, cores)
    return found
