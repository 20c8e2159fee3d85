"""Inputs and state of memory advice, and sizes and counters read from a snapshot for both cgroup versions.
Values that are unknown or too old are None, or raise `InputMissing` with the name of the input. Sizes are
bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from mmap import PAGESIZE

import msgspec

from agent.config.memory import OffloadingLayerConfig
from api.pod import Pod
from api.snapshot import CgroupSample, Snapshot
from api.units import NS_PER_S


class InputMissing(Exception):
    """An input is missing; the text names it."""


class ReclaimRoot(msgspec.Struct, frozen=True, kw_only=True):
    """The cgroup above the reclaimed pods."""

    path: str = ""
    """Path of the cgroup above all of them; empty if there is none, and then nothing limits them together."""
    members: tuple[str, ...] = ()
    """Cgroups of the reclaimed containers, whose sum is the use if there is no such cgroup."""


class MemoryInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of memory advice in one cycle."""

    snapshot: Snapshot
    now_ns: int
    """CLOCK_MONOTONIC."""
    root: ReclaimRoot = ReclaimRoot()
    numa_roots: Mapping[int, str] = {}
    """By NUMA node: the cgroup above the reclaimed pods that are bound to it."""
    enable_reclaim: bool = True
    not_reclaimable: Collection[str] = ()
    """Pods, `namespace/name`, that are not reclaimable although the node is."""
    ramping: Collection[str] = ()
    """Cgroups of containers that still count with their requests."""
    forbidden_numa: tuple[int, ...] = ()
    """NUMA nodes that are not reclaimable (disableReclaimSharePools)."""
    profiles: Mapping[str, OffloadingLayerConfig] = {}
    """Offloading settings by pod, from its service profile."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the cgroups that contain only reclaimed pods: of all of them, and of those bound to one NUMA node."""
        return tuple(sorted({self.root.path, *self.numa_roots.values()} - {""}))

    def is_reclaimable(self, pod: Pod) -> bool:
        """Return whether idle memory of the pod is reclaimable."""
        return self.enable_reclaim and pod.key not in self.not_reclaimable


def reclaimable_numa_nodes(inputs: MemoryInputs) -> tuple[int, ...]:
    """Return the reclaimable NUMA nodes: all but those of exclusive pods that are not reclaimable.

    Raises InputMissing if the NUMA nodes of such a pod are not known.
    """
    excluded = set(inputs.forbidden_numa)
    for pod in inputs.snapshot.pods:
        if pod.enhancements.numa_exclusive and pod.qos.online and not inputs.is_reclaimable(pod):
            if not pod.bound_numa:
                raise InputMissing(f"the NUMA nodes that {pod.key} uses exclusively")
            excluded.update(pod.bound_numa)
    return tuple(numa for numa in inputs.snapshot.topology.numa_nodes if numa not in excluded)


def has_elapsed(now_ns: int, then_ns: int | None, seconds: float) -> bool:
    """Return whether the time has passed. A time in the future is of an earlier boot and counts as passed."""
    return then_ns is None or not 0 <= now_ns - then_ns < seconds * NS_PER_S


class CacheDropRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to drop page cache of a container."""

    cgroup_id: int
    at_ns: int
    read_at_ns: int | None
    """The reading before the request: its effect is visible from the next reading on."""
    bytes: int


class OffloadState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one cgroup that releases memory: readings and request at the end of the last interval."""

    cgroup_id: int
    at_ns: int
    read_at_ns: int | None
    target_bytes: float = 0.0
    scanned: int | None = None
    stolen: int | None = None
    activated: int | None = None
    stall_us: int | None = None
    size_bytes: float | None = None
    """Policy `senpai`: the target size."""


class SwapRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last requested memory.swap.max of a cgroup that releases memory."""

    cgroup_id: int
    value: str


class MemoryAdvisorState(msgspec.Struct, frozen=True, kw_only=True):
    """State of memory advice."""

    headroom_bytes: float | None = None
    guard_bytes: Mapping[str, int] = {}
    """By cgroup: the last requested limit."""
    cache_drops: Mapping[str, CacheDropRequest] = {}
    """By cgroup."""
    offloaded: Mapping[str, OffloadState] = {}
    """By cgroup."""
    swap: Mapping[str, SwapRequest] = {}
    """By cgroup."""
    dying_ns: int | None = None
    """When memory of removed cgroups was last reclaimed."""


_MEMORY_STAT_NAMES = {
    "anon": ("total_rss", "anon"),
    "file": ("total_cache", "file"),
    "shmem": ("total_shmem", "shmem"),
    "mapped": ("total_mapped_file", "file_mapped"),
    "inactive_anon": ("total_inactive_anon", "inactive_anon"),
    "inactive_file": ("total_inactive_file", "inactive_file"),
    "active_file": ("total_active_file", "active_file"),
    "pgscan": ("pgscan",),
    "pgsteal": ("pgsteal",),
}
"""Names in memory.stat of version 1, with descendants, and of version 2."""
_ACTIVATE_COUNTERS = ("workingset_activate_anon", "workingset_activate_file")
"""Kernels from 5.9 on count anonymous and file pages separately (commit 170b04b7ae49)."""


def is_fresh(read_at_ns: int | None, snapshot: Snapshot, stale_s: float) -> bool:
    """Return whether files read at that time are recent enough. A clock change makes them look old until they are read
    again."""
    return read_at_ns is None or abs(snapshot.wall_time_ns - read_at_ns) <= stale_s * NS_PER_S


def fresh_sample(snapshot: Snapshot, path: str, stale_s: float) -> CgroupSample | None:
    """Return the cgroup's sample; None if it is missing or too old."""
    sample = snapshot.cgroups.get(path)
    return sample if sample is not None and is_fresh(sample.files_read_at_ns, snapshot, stale_s) else None


def read_stat(sample: CgroupSample, name: str) -> int | None:
    """Return one counter of memory.stat, by this module's name for it."""
    return next((sample.memory_stat[key] for key in _MEMORY_STAT_NAMES[name] if key in sample.memory_stat), None)


def activated_pages(sample: CgroupSample) -> int | None:
    """Return the cumulative number of pages that were read back soon after reclaim and became active."""
    split = [sample.memory_stat[key] for key in _ACTIVATE_COUNTERS if key in sample.memory_stat]
    return sum(split) if split else sample.memory_stat.get("workingset_activate")


def used_bytes(sample: CgroupSample) -> int | None:
    """Return anonymous memory plus page cache. Shared memory is part of the cache and is not added again."""
    anon, file = read_stat(sample, "anon"), read_stat(sample, "file")
    return None if anon is None or file is None else anon + file


def droppable_cache_bytes(sample: CgroupSample) -> int | None:
    """Return the page cache that can be dropped; shared memory can only be swapped."""
    file, shmem = read_stat(sample, "file"), read_stat(sample, "shmem")
    return None if file is None else max(file - (shmem or 0), 0)


def bytes_by_numa(sample: CgroupSample, kind: str) -> Mapping[int, int] | None:
    """Return bytes by NUMA node, descendants included: `anon`, droppable `cache`, or `total`."""
    stat = sample.numa_stat
    if "total" in stat:  # version 1 counts pages; its `file` has no shared memory in it
        name = "file" if kind == "cache" else kind
        pages = stat.get(f"hierarchical_{name}", stat.get(name))
        return None if pages is None else {numa: count * PAGESIZE for numa, count in pages.items()}
    if "anon" not in stat or "file" not in stat:
        return None
    anon, file = stat["anon"], stat["file"]
    if kind == "anon":
        return anon
    if kind == "cache":
        shmem = stat.get("shmem", {})
        return {numa: max(size - shmem.get(numa, 0), 0) for numa, size in file.items()}
    fixed = stat.get("unevictable", {})
    return {numa: anon.get(numa, 0) + file.get(numa, 0) + fixed.get(numa, 0) for numa in anon.keys() | file.keys()}


def reclaimed_bytes_by_numa(snapshot: Snapshot, path: str, members: tuple[str, ...], stale_s: float) -> dict[int, int]:
    """Return the memory of the reclaim root, or of its members without such a cgroup, by NUMA node. Raises InputMissing."""
    result: dict[int, int] = {}
    for cgroup in (path,) if path else members:
        if cgroup not in snapshot.cgroups and not path:
            continue  # a container without a cgroup has no memory
        sample = fresh_sample(snapshot, cgroup, stale_s)
        sizes = None if sample is None else bytes_by_numa(sample, "total")
        if sizes is None:
            raise InputMissing(f"memory of {cgroup} by NUMA node")
        for numa, size in sizes.items():
            result[numa] = result.get(numa, 0) + size
    return result


def node_memory_bytes(snapshot: Snapshot) -> int:
    """Return the memory of the node. Raises InputMissing."""
    total = snapshot.node.memory_total_bytes
    if not total:
        raise InputMissing("the node's memory")
    return total


def node_meminfo(snapshot: Snapshot, name: str) -> int:
    """Return a line of /proc/meminfo in bytes. Raises InputMissing."""
    value = snapshot.node.meminfo.get(name)
    if value is None:
        raise InputMissing(f"{name} of the node")
    return value


def numa_meminfo(snapshot: Snapshot, numa: int, name: str, stale_s: float) -> int:
    """Return a line of a NUMA node's meminfo in bytes. Raises InputMissing."""
    node = snapshot.node
    sample = node.numa.get(numa)
    value = sample.meminfo.get(name) if sample and is_fresh(node.files_read_at_ns, snapshot, stale_s) else None
    if value is None:
        raise InputMissing(f"{name} of NUMA node {numa}")
    return value


def watermark_scale_factor(snapshot: Snapshot) -> int:
    """Return vm.watermark_scale_factor, in ten-thousandths of a node's memory. Raises InputMissing."""
    value = snapshot.node.sysctl.get("vm.watermark_scale_factor")
    if value is None:
        raise InputMissing("vm.watermark_scale_factor")
    return value


def zone_low_bytes(snapshot: Snapshot, numa: int, stale_s: float) -> int:
    """Return the sum of the low watermarks of a NUMA node's zones. Raises InputMissing."""
    node = snapshot.node
    zones = [zone.low for zone in node.zones if zone.node == numa]
    if not zones or not is_fresh(node.files_read_at_ns, snapshot, stale_s):
        raise InputMissing(f"watermarks of NUMA node {numa}")
    return sum(zones) * PAGESIZE
