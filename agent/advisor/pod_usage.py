"""CPU and memory that pods use, computed from one snapshot and its rates; None if a part of it is not measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from api.advice import NOT_NUMA_BOUND
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import Rates
from api.snapshot import CgroupSample, Snapshot

_NON_CACHE_COUNTERS = (
    ("total_inactive_anon", "total_active_anon", "total_unevictable"),  # version 1, all cgroups below included
    ("inactive_anon", "active_anon", "unevictable"),
)
"""Memory in use by Koordinator's definition: everything but the page cache."""


def reclaimed_cpu_by_numa(snapshot: Snapshot, change: Rates | None, bound: Collection[int]) -> dict[int, float | None]:
    """Return the CPU use of reclaimed pods by bound NUMA node and NOT_NUMA_BOUND; None if a part is not measured."""
    used: dict[int, float | None] = dict.fromkeys((*bound, NOT_NUMA_BOUND), None if change is None else 0.0)
    for pod in snapshot.pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        key = pod.bound_numa[0] if len(pod.bound_numa) == 1 and pod.bound_numa[0] in bound else NOT_NUMA_BOUND
        own, so_far = pod_cpu_cores(pod, snapshot, change, absent=0.0), used[key]
        used[key] = None if own is None or so_far is None else so_far + own
    return used


def pod_cpu_cores(pod: Pod, snapshot: Snapshot, change: Rates | None, *, absent: float | None) -> float | None:
    """Return the CPU use of a pod's containers; `absent` is the value of a container without a cgroup."""
    if change is None:
        return None
    cores = []
    for container in pod.containers:
        rate = change.cgroups.get(container.cgroup)
        if rate is not None:
            cores.append(rate.cpu_cores)
        else:
            cores.append(None if container.cgroup in snapshot.cgroups else absent)
    return sum_if_all_known(cores)


def non_cache_bytes(sample: CgroupSample | None) -> float | None:
    """Return the memory of a cgroup without its page cache, in bytes; None if it is not measured."""
    if sample is None:
        return None
    for names in _NON_CACHE_COUNTERS:
        if names[0] in sample.memory_stat:
            return float(sum(sample.memory_stat.get(name, 0) for name in names))
    return None


def sum_if_all_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values; None if one of them is None."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def sum_if_any(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are not None; None without such a value."""
    measured = [value for value in values if value is not None]
    return float(sum(measured)) if measured else None


def reclaimed_cgroups(snapshot: Snapshot) -> list[str]:
    """Return the cgroups of the containers of reclaimed pods."""
    return [c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers]


def reclaimed_use_cores(snapshot: Snapshot, change: Rates | None) -> float | None:
    """Return the CPU use of all reclaimed pods; None unless all of them are measured."""
    return reclaimed_cpu_by_numa(snapshot, change, ())[NOT_NUMA_BOUND]
