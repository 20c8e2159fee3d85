"""Adds up what the kernel counts per cgroup alone, for a container whose processes are in cgroups below its own.
Pure. CPU, memory and pressure of a cgroup include its descendants; run-queue latency, blame, thread states, reclaim
and throttles do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from api.measurements import Blame, Durations, ReclaimLatency, ThreadStates
from api.rates import sum_runq_latencies
from api.snapshot import CgroupSample

T = TypeVar("T")


def sum_descendants(
    paths: Sequence[str], now: Mapping[str, CgroupSample], before: Mapping[str, CgroupSample]
) -> tuple[CgroupSample, CgroupSample | None]:
    """The container's sample, now and before, with what all these cgroups have together; the first is its own.

    What grows is added up of those cgroups that are there both times, so one that came or went is no jump. Where one of them
    is not known the sum is not.
    """
    own, earlier = now[paths[0]], before.get(paths[0])
    if len(paths) == 1 or earlier is None:
        return own, earlier
    stayed = [path for path in paths if (then := before.get(path)) is not None and then.id == now[path].id]
    grown = [_summed_counters([samples[path] for path in stayed], paths) for samples in (now, before)]
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


def _all_known(found: Sequence[T | None]) -> list[T] | None:
    known = [value for value in found if value is not None]
    return known if known and len(known) == len(found) else None


def _sum_durations(found: Sequence[Durations | None]) -> Durations | None:
    known = _all_known(found)
    return None if known is None else sum_runq_latencies(known)


def _sum_thread_states(found: Sequence[ThreadStates | None]) -> ThreadStates | None:
    known = _all_known(found)
    if known is None:
        return None
    disks = _all_known([states.iowait for states in known])
    return ThreadStates(
        runnable=sum(states.runnable for states in known),
        uninterruptible=sum(states.uninterruptible for states in known),
        iowait=None if disks is None else sum(disks),
        sleeping=sum(states.sleeping for states in known),
    )


def _sum_blame(found: Sequence[Blame | None], own: Collection[str]) -> Blame | None:
    """Whom the container waited for; its parts that waited for one another waited for itself."""
    known = _all_known(found)
    if known is None:
        return None
    itself, by_cgroup = next(iter(own)), dict[str, int]()
    for blame in known:
        for culprit, ns in blame.by_cgroup.items():
            owner = itself if culprit in own else culprit
            by_cgroup[owner] = by_cgroup.get(owner, 0) + ns
    return Blame(
        by_cgroup=by_cgroup,
        throttled_ns=sum(blame.throttled_ns for blame in known),
        higher_class_ns=sum(blame.higher_class_ns for blame in known),
        other_ns=sum(blame.other_ns for blame in known),
    )


def _sum_reclaim_counters(found: Sequence[ReclaimLatency | None]) -> ReclaimLatency | None:
    known = _all_known(found)
    if known is None:
        return None
    return ReclaimLatency(
        direct=sum_runq_latencies([reclaim.direct for reclaim in known]),
        limit=sum_runq_latencies([reclaim.limit for reclaim in known]),
        reclaimed_pages=sum(reclaim.reclaimed_pages for reclaim in known),
        kswapd_wakeups=sum(reclaim.kswapd_wakeups for reclaim in known),
    )
