"""What the waits of online containers say: own throttling taken out, the worst container, breaches of a limit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log

from agent.config import LatencyConfig
from api.facts import Wait
from api.histograms import BOUNDS_NS, above, quantile_ns, slot_of
from api.rates import wait_delta

NS_PER_MS = 1_000_000


def contention(wait: Wait, throttled_ns: int, throttled_periods: int, threads: int, cpus: int) -> Wait:
    """The waits that are left when own throttling is taken out: that is the owner's doing, not batch work's.

    The kernel counts throttled time as waiting: of each thread that is held back, while it counts the throttled time itself
    once for each CPU. So up to `threads` waits in each throttled period, and in all the throttled time for each thread that
    shared a CPU, are taken out, the longest first and at each slot's lower bound. Waits below a millisecond stay.
    """
    if not throttled_ns or not throttled_periods:
        return wait
    left_ns = throttled_ns * ceil(max(threads, 1) / max(min(threads, cpus), 1))
    if wait.slots is None:
        return Wait(sum_ns=max(wait.sum_ns - left_ns, 0), count=wait.count)
    slots, left, sum_ns = list(wait.slots), throttled_periods * max(threads, 1), wait.sum_ns
    for k in range(len(slots) - 1, slot_of(NS_PER_MS), -1):
        taken = min(slots[k], left, left_ns // BOUNDS_NS[k - 1])
        slots[k] -= taken
        left -= taken
        left_ns -= taken * BOUNDS_NS[k - 1]
        sum_ns -= taken * BOUNDS_NS[k - 1]
    return Wait(sum_ns=max(sum_ns, 0), count=sum(slots), slots=tuple(slots))


def worst(waits: Mapping[str, Wait | None], config: LatencyConfig) -> tuple[str, float, int] | None:
    """The container that waited longest at the quantile: (cgroup, wait in ns, number of waits); None if none waited."""
    seen = [
        (wait_ns, cgroup, wait.count)
        for cgroup, wait in waits.items()
        if wait is not None and (wait_ns := wait_at(wait, config.quantile)) is not None
    ]
    if not seen:
        return None
    wait_ns, cgroup, count = max(seen)
    return cgroup, wait_ns, count


def wait_at(wait: Wait, quantile: float) -> float | None:
    """The quantile of a set of waits in ns; where only their sum is known, that of an exponential of the same mean."""
    if wait.slots is not None:
        return quantile_ns(wait.slots, quantile)
    return wait.sum_ns / wait.count * -log(1 - quantile) if wait.count else None


def breaching(
    waits: Mapping[str, Wait | None], limits_ns: Mapping[str, float], config: LatencyConfig
) -> dict[str, Wait]:
    """The containers of which each breaches its limit."""
    return {
        cgroup: wait for cgroup, wait in waits.items() if wait is not None and breaches(wait, limits_ns[cgroup], config)
    }


def breaches(wait: Wait, limit_ns: float, config: LatencyConfig) -> bool:
    """Whether more waits were above the limit than the quantile allows, and at least min_waits_above."""
    if wait.slots is None:
        value = wait_at(wait, config.quantile)
        return value is not None and value > limit_ns and wait.count >= config.min_waits_above
    longer = above(wait.slots, limit_ns)
    return longer >= config.min_waits_above and longer > (1 - config.quantile) * wait.count


def alarmed(
    before: Mapping[str, Wait], after: Mapping[str, Wait], limits_ns: Mapping[str, float], config: LatencyConfig
) -> bool:
    """Whether the waits between two looks, a fraction of a round apart, are a breach already."""
    # So many waits of the limit's slot or longer are at least half of that together: most looks end here.
    least = config.min_waits_above / 2
    changes = {
        cgroup: wait_delta(then, wait)
        for cgroup, wait in after.items()
        if (then := before.get(cgroup)) is not None and wait.sum_ns - then.sum_ns >= least * limits_ns[cgroup]
    }
    return bool(breaching(changes, limits_ns, config))
