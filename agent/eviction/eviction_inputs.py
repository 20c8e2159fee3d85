"""Inputs of the eviction plugins: the snapshot, headroom, pools, and the pods that are running or terminating.
It is pure. A reading that is missing or older than `stale_s` is None, so that no plugin evaluates an outdated
number. Memory is in bytes, CPU in cores, times in nanoseconds of CLOCK_MONOTONIC unless the field says otherwise.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import msgspec

from api.advice import CpuAdvice, Headroom, PowerAction
from api.eviction import EvictionVictim
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, Snapshot
from api.units import NS_PER_S

PAGE_BYTES = mmap.PAGESIZE
MIN_TERMINATION_WAIT_S, GRACE_FACTOR, DEFAULT_GRACE_S = 10.0, 1.5, 30.0
"""A pod should be gone after 1.5 times its grace, and not before 10 s. Kubernetes' default grace is 30 s."""


MAX_GRACE_S = 600.0
"""Maximum of a pod's own grace that is waited for: the pressure on the node is now."""


def grace_period_s(pod: Pod, grace_s: float | None) -> float:
    """Return the grace period of an eviction without the API server: the plugin's, else the pod's own up to MAX_GRACE_S."""
    if grace_s is not None:
        return grace_s
    return DEFAULT_GRACE_S if pod.grace_s is None else min(pod.grace_s, MAX_GRACE_S)


def exclusion_ns(victim: EvictionVictim, pods: Iterable[Pod]) -> int:
    """Return for how long a victim is excluded: it is not evicted again, and no other pod in its place."""
    pod = next((each for each in pods if each.uid == victim.uid), None)
    grace_s = victim.grace_s if pod is None else grace_period_s(pod, victim.grace_s)
    return termination_wait_ns(DEFAULT_GRACE_S if grace_s is None else grace_s)


def termination_wait_s(grace_s: float) -> float:
    """Return the seconds after which a pod with that grace should be gone."""
    return max(MIN_TERMINATION_WAIT_S, GRACE_FACTOR * grace_s)


def termination_wait_ns(grace_s: float) -> int:
    """Return `termination_wait_s` in nanoseconds."""
    return round(termination_wait_s(grace_s) * NS_PER_S)


def terminating_since_ns(pods: Iterable[Pod], before: Mapping[str, int], now_ns: int) -> dict[str, int]:
    """Return since when each terminating pod is terminating, by uid; `before` is the result of the previous cycle."""
    return {pod.uid: before.get(pod.uid, now_ns) for pod in pods if pod.terminating}


def overdue_pods(pods: Iterable[Pod], since_ns: Mapping[str, int], now_ns: int) -> frozenset[str]:
    """Return the pods, `namespace/name`, that should be gone by now, by any deletion.

    A pod that is deleted with a grace of a day must not prevent other evictions for a day.
    """
    return frozenset(
        pod.key
        for pod in pods
        if pod.uid in since_ns and now_ns - since_ns[pod.uid] >= termination_wait_ns(grace_period_s(pod, None))
    )


class RootfsUse(msgspec.Struct, frozen=True, kw_only=True):
    """The disk use of one pod's writable layers."""

    used_bytes: int
    inodes: int


class EvictionBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Number of evictions of a workload from `time_s` (Unix time) on, for `duration_s`."""

    time_s: int
    duration_s: int
    count: int


class PodEvictionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Katalyst's EvictionRecord of one pod: recent evictions of its workload, and the state of its disruption budget."""

    has_budget: bool = False
    """Whether a PodDisruptionBudget selects the pod; without one the numbers of pods are 0."""
    buckets: tuple[EvictionBucket, ...] = ()
    """Oldest first; empty if the pod has no controller."""
    disruptions_allowed: int = 0
    current_healthy: int = 0
    desired_healthy: int = 0
    expected_pods: int = 0


class EvictionInputs(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All inputs of one cycle. A value that is not available has its default."""

    snapshot: Snapshot
    now_ns: int
    """CLOCK_MONOTONIC."""
    headroom: Headroom | None = None
    """Headroom for reclaimed pods that is based on recent inputs, in total and by NUMA node."""
    advice: CpuAdvice | None = None
    """The advice whose regions say which pod is in which pool."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs assigned to each pool."""
    reclaimable_cores: float | None = None
    """Cores that reclaimed pods may use in total, by the latency policy; None if pools limit them."""
    shared_limit_cpus: float | None = None
    """CPUs to which all share pools together may grow. If given, a pool's load counts only while they cannot grow (Katalyst:
    enableReclaim without reservedResourceForAllocate); else it counts against the pool's size alone."""
    loads: Mapping[str, float] = {}
    """One-minute load of containers by cgroup, for those without one in the snapshot."""
    terminating: frozenset[str] = frozenset()
    """Terminating pods, `namespace/name`, by any deletion."""
    stuck: frozenset[str] = frozenset()
    """Pods that cannot be evicted or exceeded their deadline. They count as running, and are no candidates."""
    held: frozenset[str] = frozenset()
    """Pods whose eviction is blocked for any reason."""
    rootfs: Mapping[str, RootfsUse] = {}
    """Use of writable layers by pod, `namespace/name`."""
    nics: Mapping[str, float] = {}
    """Bandwidth of each network card in Mbit/s; 0 while its link is down."""
    records: Mapping[str, PodEvictionRecord] = {}
    """Eviction records by pod uid; without a pod whose budgets are not available."""
    power: PowerAction | None = None
    """The response to a power alert that is in force; None without one."""
    stale_s: float = 30.0

    @cached_property
    def running_pods(self) -> tuple[Pod, ...]:
        """Pods that run here and are not terminating."""
        away = self.terminating - self.stuck
        return tuple(pod for pod in self.snapshot.pods if pod.key not in away and self._runs(pod))

    @cached_property
    def terminating_pods(self) -> tuple[Pod, ...]:
        """Pods that run here and are terminating."""
        away = self.terminating - self.stuck
        return tuple(pod for pod in self.snapshot.pods if pod.key in away and self._runs(pod))

    def _runs(self, pod: Pod) -> bool:
        """Return whether a container has tasks. A cgroup without tasks may hold page cache, which no eviction frees."""
        samples = (self.snapshot.cgroups.get(container.cgroup) for container in pod.containers)
        return any(sample is not None and sample.threads != 0 for sample in samples)

    @property
    def unknown(self) -> str:
        """What is too old to evaluate plugins; empty if everything is recent."""
        if not 0 <= self.now_ns - self.snapshot.taken_at_ns <= self.stale_s * NS_PER_S:
            return "the state of the node"
        return "" if self.snapshot.pods_fresh else "which pods are here now"

    @property
    def node_files_fresh(self) -> bool:
        """Whether the node files that are not read in every cycle (zones, vmstat, NUMA nodes, file systems) are recent."""
        return self._recent(self.snapshot.node.files_read_at_ns)

    def files_fresh(self, sample: CgroupSample) -> bool:
        """Return whether memory.stat and memory.numa_stat of a cgroup are recent."""
        return self._recent(sample.files_read_at_ns)

    def _recent(self, read_at_ns: int | None) -> bool:
        if read_at_ns is None:
            return False
        return self.snapshot.wall_time_ns - read_at_ns <= self.stale_s * NS_PER_S


def fresh_headroom(reported_headroom: Headroom | None) -> Headroom | None:
    """Return the headroom without the resources whose inputs are stale.

    Reported headroom decays while inputs are missing, which must not evict every reclaimed pod of the node.
    """
    if reported_headroom is None:
        return None
    if "cpu" in reported_headroom.stale:
        reported_headroom = msgspec.structs.replace(reported_headroom, cores=None, cores_by_numa={})
    if "memory" in reported_headroom.stale:
        reported_headroom = msgspec.structs.replace(reported_headroom, memory_bytes=None, memory_by_numa={})
    return reported_headroom


Reading = Callable[[CgroupSample], float | None]


def sum_over_containers(inputs: EvictionInputs, pod: Pod, reading: Reading) -> float | None:
    """Return the sum over the pod's existing containers; None unless it is available for each, and for at least one."""
    total, measured = 0.0, False
    for container in pod.containers:
        sample = inputs.snapshot.cgroups.get(container.cgroup)
        if sample is None:
            continue
        value = reading(sample)
        if value is None:
            return None
        total, measured = total + value, True
    return total if measured else None


def memory_bytes(inputs: EvictionInputs, pod: Pod) -> float | None:
    """Return the memory that is charged to the pod's containers (Katalyst's mem.usage.container)."""
    return sum_over_containers(inputs, pod, lambda sample: sample.memory_bytes)


def rss_bytes(inputs: EvictionInputs, pod: Pod) -> float | None:
    """Return the anonymous memory of the pod's containers (Katalyst's mem.rss.container)."""
    return sum_over_containers(inputs, pod, lambda sample: _rss(inputs, sample))


def _rss(inputs: EvictionInputs, sample: CgroupSample) -> float | None:
    if not inputs.files_fresh(sample):
        return None
    stat = sample.memory_stat
    # cgroup v1 includes descendants only in total_rss; v2 always includes them, in anon.
    return next((stat[name] for name in ("total_rss", "rss", "anon") if name in stat), None)


def unreclaimable_bytes(inputs: EvictionInputs, pod: Pod) -> float | None:
    """Return the memory that becomes free only when the pod's containers end: anonymous, shared and locked memory.

    Swap and kernel memory are not included, nor is page cache, which MemAvailable counts as free.
    """
    return sum_over_containers(inputs, pod, lambda sample: _unreclaimable(inputs, sample))


def _unreclaimable(inputs: EvictionInputs, sample: CgroupSample) -> float | None:
    if not inputs.files_fresh(sample):
        return None
    stat = sample.memory_stat
    # A page is on exactly one LRU list: shared memory is on the anonymous lists, locked memory on `unevictable`.
    for prefix in ("total_", ""):
        lists = [stat.get(prefix + name) for name in ("inactive_anon", "active_anon", "unevictable")]
        sizes = [size for size in lists if size is not None]
        if len(sizes) == len(lists):
            return sum(sizes)
    return None


def numa_memory_bytes(inputs: EvictionInputs, pod: Pod, node: int) -> float | None:
    """Return the memory of the pod's containers on one NUMA node (Katalyst's mem.total.numa.container)."""
    return sum_over_containers(inputs, pod, lambda sample: _numa_memory(inputs, sample, node))


def _numa_memory(inputs: EvictionInputs, sample: CgroupSample, node: int) -> float | None:
    if not inputs.files_fresh(sample):
        return None
    stat = sample.numa_stat
    for kind in ("hierarchical_total", "total"):  # version 1, in pages
        if kind in stat:
            return stat[kind].get(node, 0) * PAGE_BYTES
    if "anon" in stat and "file" in stat:
        return stat["anon"].get(node, 0) + stat["file"].get(node, 0)
    return None


def sum_requests(pod: Pod, amount: Callable[[Container], float | None]) -> float:
    """Return the sum of one request over the pod's containers; a missing request counts 0."""
    return sum(amount(container) or 0.0 for container in pod.containers)


def requested_reclaimed_cores(pod: Pod) -> float:
    """Return the CPU request of a reclaimed pod; a pods file may give it as an ordinary request."""
    requested = sum_requests(pod, lambda container: container.reclaimed_cpu_cores)
    return requested or sum_requests(pod, lambda container: container.cpu_request_cores)


def requested_reclaimed_memory(pod: Pod) -> float:
    """Return the memory request of a reclaimed pod; a pods file may give it as an ordinary request."""
    requested = sum_requests(pod, lambda container: container.reclaimed_memory_bytes)
    return requested or sum_requests(pod, lambda container: container.memory_request_bytes)


def reclaimed_pods(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """Return the pods of QoS level reclaimed_cores."""
    return tuple(pod for pod in pods if pod.qos is QoSLevel.RECLAIMED)


def pool_by_pod(inputs: EvictionInputs) -> dict[str, str]:
    """Return the pool of each pod: that of its region, and `reclaim` for reclaimed pods."""
    pools = {pod.key: "reclaim" for pod in inputs.snapshot.pods if pod.qos is QoSLevel.RECLAIMED}
    if inputs.advice is not None:
        for advised in inputs.advice.regions:
            pools.update(dict.fromkeys(advised.region.pods, advised.region.pool))
    return pools
