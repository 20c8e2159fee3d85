"""Totals of colocation on a node: CPU time of reclaimed pods, run-queue latency of online pods with and without them.
The totals only grow; the agent saves them, so that they continue after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from api.histogram import SLOT_COUNT
from api.rates import runq_latency_delta, sum_runq_latencies
from api.snapshot import RunqLatency
from api.units import Count

MAX_NAMES = 64
"""Maximum number of namespaces and of rules with a total of their own."""
OTHER_NAMES = "_other"
"""Name of the total of all further namespaces or rules; Kubernetes allows no underscore in the name of a namespace."""
_NO_LATENCY = RunqLatency(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)


class OnlineTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which the run-queue latency of online pods was measured, their CPU time in it, and the latency."""

    duration_ns: Count = 0
    cpu_ns: Count = 0
    latency: RunqLatency = _NO_LATENCY
    """As the advisor evaluates it: without waits that the pods' own CPU quota caused. All online containers together."""


class ColocationTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one node, or of several. Times are in nanoseconds; CPU times are summed over CPUs."""

    since_wall_ns: Count
    """CLOCK_REALTIME of the first cycle."""
    duration_ns: Count = 0
    """Time that the cycles covered; the time in which no agent ran is missing."""
    reclaimable_ns: Count = 0
    """CPU time that reclaimed pods could use: within their limit, and not used by anything else. Zero unless the agent acts."""
    reclaimed_ns: Mapping[str, Count] = {}
    """CPU time that reclaimed pods used, by namespace."""
    interference_ns: Count = 0
    """Time that tasks of online pods waited while reclaimed pods had the CPU."""
    interference_duration_ns: Count = 0
    """Time in which `interference_ns` was measured."""
    busy: OnlineTotals = OnlineTotals()
    """Online pods while reclaimed pods were busy."""
    idle: OnlineTotals = OnlineTotals()
    """Online pods while reclaimed pods were idle, or the node had none."""
    reductions: Mapping[str, Count] = {}
    """Cycles that reduced the CPU quota or the CPUs of reclaimed pods, by rule."""
    evictions: Mapping[str, Count] = {}
    """Evictions of reclaimed pods, by rule; dry runs and notifications are not counted."""

    @property
    def used_ns(self) -> int:
        """CPU time that reclaimed pods of all namespaces used."""
        return sum(self.reclaimed_ns.values())


def sum_totals(nodes: Iterable[ColocationTotals]) -> ColocationTotals | None:
    """Return the totals of several nodes together, since the first of them; None without nodes."""
    result: ColocationTotals | None = None
    for node in nodes:
        result = node if result is None else _sum_two(result, node)
    return result


def totals_since(totals: ColocationTotals, earlier: ColocationTotals) -> ColocationTotals:
    """Return what was added to `earlier`; names of its totals have a zero where nothing was. Counters of an agent are these: a
    killed agent loses what it had not saved, and a counter that continued from the file would go back by that."""
    return msgspec.structs.replace(
        totals,
        duration_ns=totals.duration_ns - earlier.duration_ns,
        reclaimable_ns=totals.reclaimable_ns - earlier.reclaimable_ns,
        reclaimed_ns=_subtract_counts(totals.reclaimed_ns, earlier.reclaimed_ns),
        interference_ns=totals.interference_ns - earlier.interference_ns,
        interference_duration_ns=totals.interference_duration_ns - earlier.interference_duration_ns,
        busy=_subtract_online(totals.busy, earlier.busy),
        idle=_subtract_online(totals.idle, earlier.idle),
        reductions=_subtract_counts(totals.reductions, earlier.reductions),
        evictions=_subtract_counts(totals.evictions, earlier.evictions),
    )


def _subtract_counts(counts: Mapping[str, int], earlier: Mapping[str, int]) -> Mapping[str, int]:
    return {name: count - earlier.get(name, 0) for name, count in counts.items()}


def _subtract_online(totals: OnlineTotals, earlier: OnlineTotals) -> OnlineTotals:
    return OnlineTotals(
        duration_ns=totals.duration_ns - earlier.duration_ns,
        cpu_ns=totals.cpu_ns - earlier.cpu_ns,
        latency=runq_latency_delta(earlier.latency, totals.latency) or _NO_LATENCY,
    )


def _sum_two(a: ColocationTotals, b: ColocationTotals) -> ColocationTotals:
    return ColocationTotals(
        since_wall_ns=min(a.since_wall_ns, b.since_wall_ns),
        duration_ns=a.duration_ns + b.duration_ns,
        reclaimable_ns=a.reclaimable_ns + b.reclaimable_ns,
        reclaimed_ns=add_counts(a.reclaimed_ns, b.reclaimed_ns),
        interference_ns=a.interference_ns + b.interference_ns,
        interference_duration_ns=a.interference_duration_ns + b.interference_duration_ns,
        busy=_sum_online(a.busy, b.busy),
        idle=_sum_online(a.idle, b.idle),
        reductions=add_counts(a.reductions, b.reductions),
        evictions=add_counts(a.evictions, b.evictions),
    )


def _sum_online(a: OnlineTotals, b: OnlineTotals) -> OnlineTotals:
    return OnlineTotals(
        duration_ns=a.duration_ns + b.duration_ns,
        cpu_ns=a.cpu_ns + b.cpu_ns,
        latency=sum_runq_latencies((a.latency, b.latency)),
    )


def add_counts(before: Mapping[str, int], added: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sums by name; names beyond MAX_NAMES are added to OTHER_NAMES."""
    if not added:
        return before
    sums = dict(before)
    for name, count in added.items():
        key = name if name in sums or len(sums) < MAX_NAMES else OTHER_NAMES
        sums[key] = sums.get(key, 0) + count
    return sums
