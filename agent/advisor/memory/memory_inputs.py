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

NS_PER_S = 1_000_000_000


class InputMissing(Exception):
    """An input is missing; the text names it."""


class ReclaimRoot(msgspec.Struct, frozen=True, kw_only=True):
    """Where reclaimed pods are kept together."""

    path: str = ""
    """The cgroup above all of them; empty where there is none, and then nothing can limit them together."""
    members: tuple[str, ...] = ()
    """Cgroups that make up its use where there is no such cgroup: those of the reclaimed containers."""


class MemoryInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known in a round."""

    snapshot: Snapshot
    now_ns: int
    """CLOCK_MONOTONIC."""
    root: ReclaimRoot = ReclaimRoot()
    numa_roots: Mapping[int, str] = {}
    """By NUMA node: the cgroup above the reclaimed pods that are bound to it."""
    enable_reclaim: bool = True
    not_reclaimable: Collection[str] = ()
    """Pods, `namespace/name`, that lend nothing although the node lends."""
    ramping: Collection[str] = ()
    """Cgroups of containers that are still taken at their requests."""
    forbidden_numa: tuple[int, ...] = ()
    """NUMA nodes of which nothing may be lent (disableReclaimSharePools)."""
    profiles: Mapping[str, OffloadingLayerConfig] = {}
    """Settings of offloading by pod, from its service profile."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Cgroups above reclaimed pods alone: of all of them, and of those that are bound to one NUMA node."""
        return tuple(sorted({self.root.path, *self.numa_roots.values()} - {""}))

    def lends(self, pod: Pod) -> bool:
        """Whether what the pod leaves idle may be lent."""
        return self.enable_reclaim and pod.key not in self.not_reclaimable


def reclaimable_numa_nodes(inputs: MemoryInputs) -> tuple[int, ...]:
    """NUMA nodes of which something may be lent: not those that a pod has for itself and does not lend.

    Raises Unknown where it is not known which ones that are.
    """
    taken = set(inputs.forbidden_numa)
    for pod in inputs.snapshot.pods:
        if pod.enhancements.numa_exclusive and pod.qos.online and not inputs.lends(pod):
            if not pod.bound_numa:
                raise InputMissing(f"the NUMA nodes that {pod.key} has for itself")
            taken.update(pod.bound_numa)
    return tuple(numa for numa in inputs.snapshot.topology.numa_nodes if numa not in taken)


def has_elapsed(now_ns: int, then_ns: int | None, seconds: float) -> bool:
    """Whether so much time has passed. A time in the future is of an earlier boot: that one has passed."""
    return then_ns is None or not 0 <= now_ns - then_ns < seconds * NS_PER_S


class CacheDropRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Cache that a container was told to drop."""

    cgroup_id: int
    at_ns: int
    read_at_ns: int | None
    """The reading that it was told on: until there is another one, what it gave is not seen yet."""
    bytes: int


class OffloadState(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup that gives up memory bit by bit: what was read and asked at the last interval's end."""

    cgroup_id: int
    at_ns: int
    read_at_ns: int | None
    target_bytes: float = 0.0
    scanned: int | None = None
    stolen: int | None = None
    activated: int | None = None
    stall_us: int | None = None
    size_bytes: float | None = None
    """Policy `senpai`: the size that is aimed at."""


class SwapRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a cgroup that gives up memory may swap out: memory.swap.max as it was last asked for."""

    cgroup_id: int
    value: str


class MemoryAdvisorState(msgspec.Struct, frozen=True, kw_only=True):
    """All that memory advice knows of the past."""

    headroom_bytes: float | None = None
    guard_bytes: Mapping[str, int] = {}
    """By cgroup: the limit that was last asked for."""
    asked: Mapping[str, CacheDropRequest] = {}
    """By cgroup."""
    offloaded: Mapping[str, OffloadState] = {}
    """By cgroup."""
    swap: Mapping[str, SwapRequest] = {}
    """By cgroup."""
    dying_ns: int | None = None
    """When what removed cgroups left behind was last reclaimed."""


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
"""memory.stat of version 1, with the cgroups below, and of version 2."""
_ACTIVATE_COUNTERS = ("workingset_activate_anon", "workingset_activate_file")
"""Kernels from 5.9 on count anonymous memory and files apart (commit 170b04b7ae49)."""


def is_fresh(read_at_ns: int | None, snapshot: Snapshot, stale_s: float) -> bool:
    """Whether files that were read then may be judged. A clock that was set makes them look old until they are read again."""
    return read_at_ns is None or abs(snapshot.wall_time_ns - read_at_ns) <= stale_s * NS_PER_S


def fresh_sample(snapshot: Snapshot, path: str, stale_s: float) -> CgroupSample | None:
    """The cgroup's sample; None if it is not there or was read too long ago."""
    sample = snapshot.cgroups.get(path)
    return sample if sample is not None and is_fresh(sample.files_read_at_ns, snapshot, stale_s) else None


def read_stat(sample: CgroupSample, name: str) -> int | None:
    """One line of memory.stat, by this module's name for it."""
    return next((sample.memory_stat[key] for key in _MEMORY_STAT_NAMES[name] if key in sample.memory_stat), None)


def activated_pages(sample: CgroupSample) -> int | None:
    """Pages that were read back soon after they had been reclaimed and were wanted often, cumulative."""
    split = [sample.memory_stat[key] for key in _ACTIVATE_COUNTERS if key in sample.memory_stat]
    return sum(split) if split else sample.memory_stat.get("workingset_activate")


def used_bytes(sample: CgroupSample) -> int | None:
    """Anonymous memory and page cache. Shared memory is part of the cache and is not counted again."""
    anon, file = read_stat(sample, "anon"), read_stat(sample, "file")
    return None if anon is None or file is None else anon + file


def droppable_cache_bytes(sample: CgroupSample) -> int | None:
    """Page cache that can be dropped: shared memory has nowhere to go but swap."""
    file, shmem = read_stat(sample, "file"), read_stat(sample, "shmem")
    return None if file is None else max(file - (shmem or 0), 0)


def bytes_by_numa(sample: CgroupSample, kind: str) -> Mapping[int, int] | None:
    """Bytes by NUMA node, cgroups below included: `anon`, `cache` that can be dropped, or `total`."""
    found = sample.numa_stat
    if "total" in found:  # version 1 counts pages; its `file` has no shared memory in it
        name = "file" if kind == "cache" else kind
        pages = found.get(f"hierarchical_{name}", found.get(name))
        return None if pages is None else {numa: count * PAGESIZE for numa, count in pages.items()}
    if "anon" not in found or "file" not in found:
        return None
    anon, file = found["anon"], found["file"]
    if kind == "anon":
        return anon
    if kind == "cache":
        shmem = found.get("shmem", {})
        return {numa: max(size - shmem.get(numa, 0), 0) for numa, size in file.items()}
    fixed = found.get("unevictable", {})
    return {numa: anon.get(numa, 0) + file.get(numa, 0) + fixed.get(numa, 0) for numa in anon.keys() | file.keys()}


def reclaimed_bytes_by_numa(snapshot: Snapshot, path: str, members: tuple[str, ...], stale_s: float) -> dict[int, int]:
    """What the reclaim root, or its members where there is no such cgroup, has on each NUMA node. Raises Unknown."""
    result: dict[int, int] = {}
    for cgroup in (path,) if path else members:
        if cgroup not in snapshot.cgroups and not path:
            continue  # a container that is not there has no memory
        sample = fresh_sample(snapshot, cgroup, stale_s)
        sizes = None if sample is None else bytes_by_numa(sample, "total")
        if sizes is None:
            raise InputMissing(f"memory of {cgroup} by NUMA node")
        for numa, size in sizes.items():
            result[numa] = result.get(numa, 0) + size
    return result


def node_memory_bytes(snapshot: Snapshot) -> int:
    """Memory of the node. Raises Unknown."""
    total = snapshot.node.memory_total_bytes
    if not total:
        raise InputMissing("the node's memory")
    return total


def node_meminfo(snapshot: Snapshot, name: str) -> int:
    """A line of /proc/meminfo in bytes. Raises Unknown."""
    value = snapshot.node.meminfo.get(name)
    if value is None:
        raise InputMissing(f"{name} of the node")
    return value


def numa_meminfo(snapshot: Snapshot, numa: int, name: str, stale_s: float) -> int:
    """A line of a NUMA node's meminfo in bytes. Raises Unknown."""
    node = snapshot.node
    found = node.numa.get(numa)
    value = found.meminfo.get(name) if found and is_fresh(node.files_read_at_ns, snapshot, stale_s) else None
    if value is None:
        raise InputMissing(f"{name} of NUMA node {numa}")
    return value


def watermark_scale_factor(snapshot: Snapshot) -> int:
    """vm.watermark_scale_factor, in ten-thousandths of a node's memory. Raises Unknown."""
    value = snapshot.node.sysctl.get("vm.watermark_scale_factor")
    if value is None:
        raise InputMissing("vm.watermark_scale_factor")
    return value


def zone_low_bytes(snapshot: Snapshot, numa: int, stale_s: float) -> int:
    """Low watermarks of a NUMA node's zones together. Raises Unknown."""
    node = snapshot.node
    zones = [zone.low for zone in node.zones if zone.node == numa]
    if not zones or not is_fresh(node.files_read_at_ns, snapshot, stale_s):
        raise InputMissing(f"watermarks of NUMA node {numa}")
    return sum(zones) * PAGESIZE


def format_bytes(size: float) -> str:
    """For people: `1.5 GiB`, `81.9 MiB`."""
    return f"{size / (1 << 30):.4g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.3g} MiB"


def format_count(count: int, noun: str) -> str:
    """For people: `1 pod`, `2 pods`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
