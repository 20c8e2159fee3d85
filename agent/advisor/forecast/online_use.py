"""What online work uses of the node: all that is no reclaimed pod's, the system included. Pure."""

from __future__ import annotations

from typing import NamedTuple

from agent.advisor.headroom.gather import not_cache
from api.qos import QoSLevel
from api.rates import delta
from api.samples import Snapshot


class Spent(NamedTuple):
    """CPU time, and the time in which it was spent. Nanoseconds."""

    online_ns: int
    """May be a little below 0, because the node counts in ticks and cgroups do not."""
    interval_ns: int


def online_cpu(previous: Snapshot | None, snapshot: Snapshot) -> Spent | None:
    """CPU time of the node between two snapshots less that of reclaimed pods; None unless both are known in full.

    A reclaimed cgroup that went meanwhile took what it last used with it: counted as online, the end of each batch job would
    be a peak.
    """
    if previous is None or previous.boot_id != snapshot.boot_id:
        return None
    interval_ns = snapshot.taken_at_ns - previous.taken_at_ns
    if interval_ns <= 0 or previous.node.cpu is None or snapshot.node.cpu is None:
        return None
    online_ns = delta(previous.node.cpu.busy_ns, snapshot.node.cpu.busy_ns)
    for path in _reclaimed(previous) | _reclaimed(snapshot):
        before, after = previous.cgroups.get(path), snapshot.cgroups.get(path)
        if before is None and after is None:
            continue
        if after is None or (before is not None and before.id != after.id):
            return None
        used_ns = delta(0 if before is None else before.cpu_usage_ns, after.cpu_usage_ns)
        if used_ns is None or online_ns is None:
            return None
        online_ns -= used_ns
    return None if online_ns is None else Spent(online_ns, interval_ns)


def online_memory(snapshot: Snapshot) -> float | None:
    """Bytes of the node that could not be had without swapping, less those of reclaimed pods; None unless all are known."""
    total, available = snapshot.node.memory_total_bytes, snapshot.node.memory_available_bytes
    if total is None or available is None:
        return None
    used = float(total - available)
    for path in _reclaimed(snapshot):
        sample = snapshot.cgroups.get(path)
        theirs = 0.0 if sample is None else not_cache(sample)
        if theirs is None:
            return None
        used -= theirs
    return max(used, 0.0)


def _reclaimed(snapshot: Snapshot) -> set[str]:
    return {c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers}
