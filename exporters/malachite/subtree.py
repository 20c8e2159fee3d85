"""Sums over a cgroup and all below it, for what our probes count for each cgroup's own tasks alone.

CPU time, memory and block I/O of a cgroup include its descendants, and a pod or a QoS class has no tasks of its own: so
the documents show threads, load averages, hardware counters, network traffic, reclaim and kills in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from api.facts import CpuCounters, IoStat, Load, Net, ThreadStates
from api.samples import CgroupSample, Snapshot
from exporters.malachite.past import CgroupPast, History, requests

Counted = TypeVar("Counted", Net, IoStat)
OOM_KILL = "oom_kill"


class Reclaims(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that tasks had to free themselves: how often, and how long in nanoseconds."""

    direct: int
    direct_ns: int
    limit: int
    limit_ns: int


class Kills(msgspec.Struct, frozen=True):
    """Processes killed for memory."""

    count: int


Summed = TypeVar("Summed", ThreadStates, Load, CpuCounters, Net, IoStat, Reclaims, Kills)


class Subtree:
    """Sums by path of the cgroup at the top, made once for a snapshot.

    A probe leaves out a cgroup that it has nothing of, such as one that never used a socket: while it counts for others,
    that is zero. Where it counts for nobody it does not run, and nothing is known.
    """

    def __init__(self, now: Snapshot, history: History) -> None:
        samples = now.cgroups
        threads = {path: sample.threads_by_state for path, sample in samples.items() if sample.threads_by_state}
        self.threads = sums(ThreadStates, threads, samples)
        # Each average decays by the same factor in every step, so the average of a sum is the sum of the averages.
        self.load = sums(Load, {path: sample.load for path, sample in samples.items() if sample.load}, samples)
        counters = {path: sample.counters for path, sample in samples.items() if sample.counters}
        self.counters = sums(CpuCounters, counters, samples)
        net = {path: sample.net for path, sample in samples.items() if sample.net}
        blocks = {path: counted for path, sample in samples.items() if (counted := requests(sample))}
        self.net, self.blocks = sums(Net, net, samples), sums(IoStat, blocks, samples)
        self.old_net = sums(Net, _before(now, history, net, lambda past: past.net), samples)
        self.old_blocks = sums(IoStat, _before(now, history, blocks, lambda past: past.blocks), samples)
        reclaims = {path: held for path, sample in samples.items() if (held := _reclaims(sample))}
        self.reclaims, self.kills = sums(Reclaims, reclaims, samples), _kills(samples)


def sums(kind: Callable[..., Summed], values: Mapping[str, Summed], paths: Iterable[str]) -> dict[str, Summed]:
    """Add each value to those of all cgroups above it; zero for the others, nothing where there are no values."""
    fields: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    totals: dict[str, list[Any]] = {path: [0] * len(fields) for path in paths} if values else {}
    for path, value in values.items():
        amounts = [getattr(value, field) for field in fields]
        for ancestor in _upwards(path):
            known = totals.get(ancestor)
            totals[ancestor] = amounts if known is None else [_plus(a, b) for a, b in zip(known, amounts, strict=True)]
    return {path: kind(**dict(zip(fields, total, strict=True))) for path, total in totals.items()}


def _reclaims(sample: CgroupSample) -> Reclaims | None:
    if sample.reclaim is None:
        return None
    direct, limit = sample.reclaim.direct, sample.reclaim.limit
    return Reclaims(direct=direct.count, direct_ns=direct.sum_ns, limit=limit.count, limit_ns=limit.sum_ns)


def _kills(samples: Mapping[str, CgroupSample]) -> dict[str, Kills]:
    """From the kernel's files where it has them, else from our probe.

    memory.events has those of the groups below in it already; version 1's memory.oom_control, which has nothing but oom_kill,
    does not (mm/memcontrol.c, memcg_memory_event).
    """
    filed = {path: sample.memory_events for path, sample in samples.items() if OOM_KILL in sample.memory_events}
    known = {path: Kills(events[OOM_KILL]) for path, events in filed.items()}
    if known and all(len(events) == 1 for events in filed.values()):
        return sums(Kills, known, samples)
    probed = {path: Kills(sample.oom_kills) for path, sample in samples.items() if sample.oom_kills is not None}
    return sums(Kills, probed, samples) | known


def _plus(one: Any, other: Any) -> Any:
    # What is not known of one is not known of the sum.
    return None if one is None or other is None else one + other


def _upwards(path: str) -> Iterator[str]:
    yield path
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def _before(
    now: Snapshot, history: History, counted: Mapping[str, Counted], of: Callable[[CgroupPast], Counted | None]
) -> dict[str, Counted]:
    """The same cgroups' counters earlier, so that new minus old of any sum is what those there now have counted since.

    One that is new since then began at zero; where nobody counted yet, only what comes next is known.
    """
    found = {}
    past = history.past
    for path, after in counted.items():
        known = history.cgroup(now.cgroups[path])
        before = None if known is None else of(known[1])
        if known is None or past is None:
            found[path] = after
        elif known[0] is not past:
            found[path] = type(after)(**dict.fromkeys(after.__struct_fields__, 0))
        else:
            found[path] = after if before is None or _went_back(before, after) else before
    return found


def _went_back(before: Counted, after: Counted) -> bool:
    return any(getattr(before, field) > getattr(after, field) for field in after.__struct_fields__)
