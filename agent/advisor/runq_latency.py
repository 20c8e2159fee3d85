"""Quantiles, breaches and starvation of the run-queue latency of online containers (api/runq_latency.py)."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

from agent.config.advisor import LatencyConfig
from api.histogram import count_above, quantile_ns
from api.measurements import RunqLatency
from api.rates import Rates, cgroups_by_container, runq_latency_delta
from api.runq_latency import cgroup_runq_latency
from api.snapshot import Snapshot


def max_latency(waits: Mapping[str, RunqLatency | None], config: LatencyConfig) -> tuple[str, float, int] | None:
    """Return the container with the highest quantile as (cgroup, latency in ns, number of waits); None without any
    wait."""
    latencies = [
        (wait_ns, cgroup, wait.count)
        for cgroup, wait in waits.items()
        if wait is not None and (wait_ns := latency_quantile_ns(wait, config.quantile)) is not None
    ]
    if not latencies:
        return None
    wait_ns, cgroup, count = max(latencies)
    return cgroup, wait_ns, count


def latency_quantile_ns(wait: RunqLatency, quantile: float) -> float | None:
    """Return the quantile in ns; if only the sum is known, the quantile of an exponential distribution of the same
    mean."""
    if wait.slots is not None:
        return quantile_ns(wait.slots, quantile)
    return wait.sum_ns / wait.count * -log(1 - quantile) if wait.count else None


def find_breaches(
    waits: Mapping[str, RunqLatency | None], limits_ns: Mapping[str, float], config: LatencyConfig
) -> dict[str, RunqLatency]:
    """Return the containers that breach their limits, by cgroup."""
    return {
        cgroup: wait
        for cgroup, wait in waits.items()
        if wait is not None and is_breach(wait, limits_ns[cgroup], config)
    }


def is_breach(wait: RunqLatency, limit_ns: float, config: LatencyConfig) -> bool:
    """Return whether more waits exceed the limit than the quantile allows, and at least `min_waits_above`."""
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
    """Return whether the waits between two polls, a fraction of a cycle apart, are a breach already."""
    # A breach implies at least half of this total: most polls end here.
    minimum = config.min_waits_above / 2
    changes = {
        cgroup: runq_latency_delta(then, wait)
        for cgroup, wait in after.items()
        if (then := before.get(cgroup)) is not None and wait.sum_ns - then.sum_ns >= minimum * limits_ns[cgroup]
    }
    return bool(find_breaches(changes, limits_ns, config))


_MIN_STARVED_THREADS = 0.5
"""Threads without CPU from which a container is starved: a thread that always runs is charged slightly less than a
core."""


class StarvedContainer(NamedTuple):
    """An online container with runnable threads and no wait that ended: the length of its waits is not known yet."""

    runnable: int
    """Number of runnable threads at the time of the snapshot."""
    cores: float
    """CPU use since the previous cycle."""


def find_starved(
    waits: Mapping[str, RunqLatency | None], snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> dict[str, StarvedContainer]:
    """Return by cgroup the containers with more runnable threads than CPU use and no wait that ended since the previous
    cycle.

    Throttled containers are omitted. Nothing is returned if runnable threads are not counted.
    """
    quiet = [cgroup for cgroup, wait in waits.items() if wait is not None and not wait.count]
    if change is None or not quiet:
        return {}
    runnable = {
        path: sample.threads_by_state.runnable
        for path, sample in snapshot.cgroups.items()
        if sample.threads_by_state is not None and sample.threads_by_state.runnable
    }
    starved = {}
    for cgroup, paths in cgroups_by_container({*quiet, *runnable}, quiet).items():
        threads = sum(runnable.get(path, 0) for path in paths)
        rates_of = [rate for path in paths if (rate := change.cgroups.get(path)) is not None]
        ended = [
            cgroup_runq_latency(snapshot.cgroups[path], change, previous) for path in paths if path in snapshot.cgroups
        ]
        if any(wait is not None and wait.count for wait in ended) or any(rate.throttled_periods for rate in rates_of):
            continue
        own = change.cgroups.get(cgroup)
        cores = (own.cpu_cores if own is not None else None) or 0.0
        if threads - cores >= _MIN_STARVED_THREADS:
            starved[cgroup] = StarvedContainer(threads, cores)
    return starved
