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

NS_PER_S = 1_000_000_000
PAGE_BYTES = mmap.PAGESIZE
MIN_TERMINATION_WAIT_S, GRACE_FACTOR, DEFAULT_GRACE_S = 10.0, 1.5, 30.0
"""A pod may take its grace and half of that again to go. Kubernetes gives 30 s to a pod that says nothing."""


MAX_GRACE_S = 600.0
"""Of what pods ask for themselves, be it hours, so much counts: the node is in trouble now."""


def grace_period_s(pod: Pod, grace_s: float | None) -> float:
    """Seconds that a pod is given by whoever ends it without the API server: its plugin's, else what it asks for itself."""
    if grace_s is not None:
        return grace_s
    return DEFAULT_GRACE_S if pod.grace_s is None else min(pod.grace_s, MAX_GRACE_S)


def exclusion_ns(victim: EvictionVictim, pods: Iterable[Pod]) -> int:
    """For so long, from when it was sent: whoever takes its own time to end is not sent once more in it, nor another one in its
    place."""
    pod = next((each for each in pods if each.uid == victim.uid), None)
    grace_s = victim.grace_s if pod is None else grace_period_s(pod, victim.grace_s)
    return termination_wait_ns(DEFAULT_GRACE_S if grace_s is None else grace_s)


def termination_wait_s(grace_s: float) -> float:
    """Until a pod with that grace should be gone."""
    return max(MIN_TERMINATION_WAIT_S, GRACE_FACTOR * grace_s)


def termination_wait_ns(grace_s: float) -> int:
    """The same, to be added to times."""
    return round(termination_wait_s(grace_s) * NS_PER_S)


def terminating_since_ns(pods: Iterable[Pod], before: Mapping[str, int], now_ns: int) -> dict[str, int]:
    """Since when the pods that were told to end are seen to be, by uid; `before` is what was said of them so far."""
    return {pod.uid: before.get(pod.uid, now_ns) for pod in pods if pod.terminating}


def overdue_pods(pods: Iterable[Pod], since_ns: Mapping[str, int], now_ns: int) -> frozenset[str]:
    """Of these those that should have been gone by now, whoever told them to end, `namespace/name`: whoever deletes a pod with
    a grace of a day keeps nobody else from leaving for so long."""
    return frozenset(
        pod.key
        for pod in pods
        if pod.uid in since_ns and now_ns - since_ns[pod.uid] >= termination_wait_ns(grace_period_s(pod, None))
    )


class RootfsUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the writable layers of one pod take up."""

    used_bytes: int
    inodes: int


class EvictionInputs(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything of one round. What nobody can tell is left at its default."""

    snapshot: Snapshot
    now_ns: int
    """CLOCK_MONOTONIC."""
    headroom: Headroom | None = None
    """What is promised to reclaimed pods on recent inputs, in all and by NUMA node."""
    advice: CpuAdvice | None = None
    """Which pod is in which pool."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs of each pool, as placed."""
    reclaimable_cores: float | None = None
    """What reclaimed pods may use in all, by a policy that lends so much wherever they run; None where pools limit them."""
    shared_limit_cpus: float | None = None
    """What all share pools together may grow to. Where it is given, a pool's load counts only while they cannot grow
    [enableReclaim without reservedResourceForAllocate]; else against the pool's size alone."""
    loads: Mapping[str, float] = {}
    """One-minute load of containers by cgroup, where the snapshot has none."""
    terminating: frozenset[str] = frozenset()
    """Pods on their way out, `namespace/name`, whoever sent them."""
    stuck: frozenset[str] = frozenset()
    """Pods that cannot be made to leave, or should have left long ago. They stay and count, and are no candidates."""
    held: frozenset[str] = frozenset()
    """Pods that could not be asked to leave yet, for whatever reason."""
    rootfs: Mapping[str, RootfsUse] = {}
    """By pod."""
    nics: Mapping[str, float] = {}
    """Bandwidth that each network card has to give, in Mbps; 0 where its link is down."""
    power: PowerAction | None = None
    """The answer to a power alert that stands; None where nobody answers any."""
    stale_s: float = 30.0

    @cached_property
    def running_pods(self) -> tuple[Pod, ...]:
        """Pods that run here and are not on the way out."""
        away = self.terminating - self.stuck
        return tuple(pod for pod in self.snapshot.pods if pod.key not in away and self._runs(pod))

    @cached_property
    def terminating_pods(self) -> tuple[Pod, ...]:
        """Pods that run here but are on the way out."""
        away = self.terminating - self.stuck
        return tuple(pod for pod in self.snapshot.pods if pod.key in away and self._runs(pod))

    def _runs(self, pod: Pod) -> bool:
        """A cgroup without tasks may hold page cache for long; nobody is there who could leave."""
        samples = (self.snapshot.cgroups.get(container.cgroup) for container in pod.containers)
        return any(sample is not None and sample.threads != 0 for sample in samples)

    @property
    def unknown(self) -> str:
        """What is not known as it is now, so that nobody is judged by it; empty where all is."""
        if not 0 <= self.now_ns - self.snapshot.taken_at_ns <= self.stale_s * NS_PER_S:
            return "the state of the node"
        return "" if self.snapshot.pods_fresh else "which pods are here now"

    @property
    def node_files_fresh(self) -> bool:
        """Whether what is not read every tick of the node (zones, vmstat, NUMA nodes, file systems) is recent."""
        return self._recent(self.snapshot.node.files_read_at_ns)

    def files_fresh(self, sample: CgroupSample) -> bool:
        """Whether memory.stat and memory.numa_stat of a cgroup are recent."""
        return self._recent(sample.files_read_at_ns)

    def _recent(self, read_at_ns: int | None) -> bool:
        if read_at_ns is None:
            return False
        return self.snapshot.wall_time_ns - read_at_ns <= self.stale_s * NS_PER_S


def fresh_headroom(reported_headroom: Headroom | None) -> Headroom | None:
    """What is promised on recent inputs; what only stands or decays because nothing new is known is None.

    What was said before goes down while nothing is known: a node must not be emptied by that.
    """
    if reported_headroom is None:
        return None
    if "cpu" in reported_headroom.stale:
        reported_headroom = msgspec.structs.replace(reported_headroom, cores=None, cores_by_numa={})
    if "memory" in reported_headroom.stale:
        reported_headroom = msgspec.structs.replace(reported_headroom, memory_bytes=None, memory_by_numa={})
    return reported_headroom


Reading = Callable[[CgroupSample], float | None]


def sum_over_containers(situation: EvictionInputs, pod: Pod, reading: Reading) -> float | None:
    """Sum over the pod's containers that are there; None unless it is known of each of them, and of one at least."""
    total, seen = 0.0, False
    for container in pod.containers:
        sample = situation.snapshot.cgroups.get(container.cgroup)
        if sample is None:
            continue
        value = reading(sample)
        if value is None:
            return None
        total, seen = total + value, True
    return total if seen else None


def memory_bytes(situation: EvictionInputs, pod: Pod) -> float | None:
    """What the kernel charges to the pod's containers [mem.usage.container]."""
    return sum_over_containers(situation, pod, lambda sample: sample.memory_bytes)


def rss_bytes(situation: EvictionInputs, pod: Pod) -> float | None:
    """Resident anonymous memory of the pod's containers [mem.rss.container]."""
    return sum_over_containers(situation, pod, lambda sample: _rss(situation, sample))


def _rss(situation: EvictionInputs, sample: CgroupSample) -> float | None:
    if not situation.files_fresh(sample):
        return None
    stat = sample.memory_stat
    # Version 1 has the groups below too under total_; version 2 counts them always and calls it anon.
    return next((stat[name] for name in ("total_rss", "rss", "anon") if name in stat), None)


def unreclaimable_bytes(situation: EvictionInputs, pod: Pod) -> float | None:
    """What is free only once the pod's containers are gone: anonymous, shared and locked memory, swap and kernel's not.

    Page cache is left out: of it MemAvailable says that it is free.
    """
    return sum_over_containers(situation, pod, lambda sample: _unreclaimable(situation, sample))


def _unreclaimable(situation: EvictionInputs, sample: CgroupSample) -> float | None:
    if not situation.files_fresh(sample):
        return None
    stat = sample.memory_stat
    # The kernel's lists, of which a page is on one: shared memory is on the anonymous ones, locked on the last.
    for prefix in ("total_", ""):
        lists = [stat.get(prefix + name) for name in ("inactive_anon", "active_anon", "unevictable")]
        known = [size for size in lists if size is not None]
        if len(known) == len(lists):
            return sum(known)
    return None


def numa_memory_bytes(situation: EvictionInputs, pod: Pod, node: int) -> float | None:
    """Memory of the pod's containers on one NUMA node [mem.total.numa.container]."""
    return sum_over_containers(situation, pod, lambda sample: _numa_memory(situation, sample, node))


def _numa_memory(situation: EvictionInputs, sample: CgroupSample, node: int) -> float | None:
    if not situation.files_fresh(sample):
        return None
    stat = sample.numa_stat
    for kind in ("hierarchical_total", "total"):  # version 1, in pages
        if kind in stat:
            return stat[kind].get(node, 0) * PAGE_BYTES
    if "anon" in stat and "file" in stat:
        return stat["anon"].get(node, 0) + stat["file"].get(node, 0)
    return None


def sum_requests(pod: Pod, amount: Callable[[Container], float | None]) -> float:
    """Sum of one request over the pod's containers; those that ask for nothing count 0."""
    return sum(amount(container) or 0.0 for container in pod.containers)


def requested_reclaimed_cores(pod: Pod) -> float:
    """CPU that a reclaimed pod requested; a static file may have it as an ordinary request."""
    asked = sum_requests(pod, lambda container: container.reclaimed_cpu_cores)
    return asked or sum_requests(pod, lambda container: container.cpu_request_cores)


def requested_reclaimed_memory(pod: Pod) -> float:
    """Memory that a reclaimed pod requested; a static file may have it as an ordinary request."""
    asked = sum_requests(pod, lambda container: container.reclaimed_memory_bytes)
    return asked or sum_requests(pod, lambda container: container.memory_request_bytes)


def reclaimed_pods(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """Those of reclaimed_cores."""
    return tuple(pod for pod in pods if pod.qos is QoSLevel.RECLAIMED)


def pool_by_pod(situation: EvictionInputs) -> dict[str, str]:
    """Pod to pool: by the advisor's regions, and reclaimed pods in `reclaim`."""
    found = {pod.key: "reclaim" for pod in situation.snapshot.pods if pod.qos is QoSLevel.RECLAIMED}
    if situation.advice is not None:
        for advised in situation.advice.regions:
            found.update(dict.fromkeys(advised.region.pods, advised.region.pool))
    return found
