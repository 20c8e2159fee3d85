"""Sums values that the kernel counts without descendants, for a container whose processes are in cgroups below its own.
Pure. CPU, memory and pressure of a cgroup include its descendants; run-queue latency, blame, thread states, reclaim
and throttles do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from api.rates import sum_runq_latencies
from api.snapshot import Blame, CgroupSample, Durations, ReclaimLatency, ThreadStates

T = TypeVar("T")


def sum_descendants(
    paths: Sequence[str], now: Mapping[str, CgroupSample], before: Mapping[str, CgroupSample]
) -> tuple[CgroupSample, CgroupSample | None]:
    """Return the container's sample, now and before, with the sums of all these cgroups; the first path is its own.

    Counters are summed over the cgroups of both snapshots, so that a created or removed cgroup causes no jump. If a value
    of one cgroup is unknown, so is the sum.
    """
    own, earlier = now[paths[0]], before.get(paths[0])
    if len(paths) == 1 or earlier is None:
        return own, earlier
    common = [path for path in paths if (then := before.get(path)) is not None and then.id == now[path].id]
    grown = [_summed_counters([samples[path] for path in common], paths) for samples in (now, before)]
    states = _sum_thread_states([now[path].threads_by_state for path in paths])
    threads = None if states is None else states.runnable + states.uninterruptible + states.sleeping
    changed = {**grown[0], "threads_by_state": states, "threads": own.threads if threads is None else threads}
    return msgspec.structs.replace(own, **changed), msgspec.structs.replace(earlier, **grown[1])


def _summed_counters(samples: Sequence[CgroupSample], own: Collection[str]) -> dict[str, object]:
    return {
        "wait": _sum_durations([sample.wait for sample in samples]),
        "throttles": _sum_durations([sample.throttles for sample in samples]),
        "blame": _sum_blame([sample.blame for sample in samples], own),
        "reclaim": _sum_reclaim_counters([sample.reclaim for sample in samples]),
    }


def _all_known(values: Sequence[T | None]) -> list[T] | None:
    complete = [value for value in values if value is not None]
    return complete if complete and len(complete) == len(values) else None


def _sum_durations(values: Sequence[Durations | None]) -> Durations | None:
    complete = _all_known(values)
    return None if complete is None else sum_runq_latencies(complete)


def _sum_thread_states(values: Sequence[ThreadStates | None]) -> ThreadStates | None:
    complete = _all_known(values)
    if complete is None:
        return None
    disks = _all_known([states.iowait for states in complete])
    return ThreadStates(
        runnable=sum(states.runnable for states in complete),
        uninterruptible=sum(states.uninterruptible for states in complete),
        iowait=None if disks is None else sum(disks),
        sleeping=sum(states.sleeping for states in complete),
    )


def _sum_blame(values: Sequence[Blame | None], own: Collection[str]) -> Blame | None:
    """Return the blame of the container; waits of its cgroups for one another count as its own."""
    complete = _all_known(values)
    if complete is None:
        return None
    itself, by_cgroup = next(iter(own)), dict[str, int]()
    for blame in complete:
        for aggressor, ns in blame.by_cgroup.items():
            owner = itself if aggressor in own else aggressor
            by_cgroup[owner] = by_cgroup.get(owner, 0) + ns
    return Blame(
        by_cgroup=by_cgroup,
        throttled_ns=sum(blame.throttled_ns for blame in complete),
        higher_class_ns=sum(blame.higher_class_ns for blame in complete),
        other_ns=sum(blame.other_ns for blame in complete),
    )


def _sum_reclaim_counters(values: Sequence[ReclaimLatency | None]) -> ReclaimLatency | None:
    complete = _all_known(values)
    if complete is None:
        return None
    return ReclaimLatency(
        direct=sum_runq_latencies([reclaim.direct for reclaim in complete]),
        limit=sum_runq_latencies([reclaim.limit for reclaim in complete]),
        reclaimed_pages=sum(reclaim.reclaimed_pages for reclaim in complete),
        kswapd_wakeups=sum(reclaim.kswapd_wakeups for reclaim in complete),
    )
