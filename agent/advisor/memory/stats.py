"""Sizes and counters out of a snapshot, whichever cgroup version they come from. What is not known, or too old, is None."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import PAGESIZE

from agent.advisor.memory.situation import NS_PER_S, Unknown
from api.samples import CgroupSample, Snapshot

_NAMES = {
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
_ACTIVATE = ("workingset_activate_anon", "workingset_activate_file")
"""Kernels from 5.9 on count anonymous memory and files apart (commit 170b04b7ae49)."""


def fresh(read_at_ns: int | None, snapshot: Snapshot, stale_s: float) -> bool:
    """Whether files that were read then may be judged. A clock that was set makes them look old until they are read again."""
    return read_at_ns is None or abs(snapshot.wall_time_ns - read_at_ns) <= stale_s * NS_PER_S


def sample_of(snapshot: Snapshot, path: str, stale_s: float) -> CgroupSample | None:
    """The cgroup's sample; None if it is not there or was read too long ago."""
    sample = snapshot.cgroups.get(path)
    return sample if sample is not None and fresh(sample.files_read_at_ns, snapshot, stale_s) else None


def stat(sample: CgroupSample, name: str) -> int | None:
    """One line of memory.stat, by this module's name for it."""
    return next((sample.memory_stat[key] for key in _NAMES[name] if key in sample.memory_stat), None)


def activated(sample: CgroupSample) -> int | None:
    """Pages that were read back soon after they had been reclaimed and were wanted often, cumulative."""
    split = [sample.memory_stat[key] for key in _ACTIVATE if key in sample.memory_stat]
    return sum(split) if split else sample.memory_stat.get("workingset_activate")


def used_bytes(sample: CgroupSample) -> int | None:
    """Anonymous memory and page cache. Shared memory is part of the cache and is not counted again."""
    anon, file = stat(sample, "anon"), stat(sample, "file")
    return None if anon is None or file is None else anon + file


def cache_bytes(sample: CgroupSample) -> int | None:
    """Page cache that can be dropped: shared memory has nowhere to go but swap."""
    file, shmem = stat(sample, "file"), stat(sample, "shmem")
    return None if file is None else max(file - (shmem or 0), 0)


def on_numa(sample: CgroupSample, kind: str) -> Mapping[int, int] | None:
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


def reclaimed_on_numa(snapshot: Snapshot, path: str, members: tuple[str, ...], stale_s: float) -> dict[int, int]:
    """What the reclaim root, or its members where there is no such cgroup, has on each NUMA node. Raises Unknown."""
    result: dict[int, int] = {}
    for cgroup in (path,) if path else members:
        if cgroup not in snapshot.cgroups and not path:
            continue  # a container that is not there has no memory
        sample = sample_of(snapshot, cgroup, stale_s)
        sizes = None if sample is None else on_numa(sample, "total")
        if sizes is None:
            raise Unknown(f"memory of {cgroup} by NUMA node")
        for numa, size in sizes.items():
            result[numa] = result.get(numa, 0) + size
    return result


def node_total(snapshot: Snapshot) -> int:
    """Memory of the node. Raises Unknown."""
    total = snapshot.node.memory_total_bytes
    if not total:
        raise Unknown("the node's memory")
    return total


def node_size(snapshot: Snapshot, name: str) -> int:
    """A line of /proc/meminfo in bytes. Raises Unknown."""
    value = snapshot.node.meminfo.get(name)
    if value is None:
        raise Unknown(f"{name} of the node")
    return value


def numa_size(snapshot: Snapshot, numa: int, name: str, stale_s: float) -> int:
    """A line of a NUMA node's meminfo in bytes. Raises Unknown."""
    node = snapshot.node
    found = node.numa.get(numa)
    value = found.meminfo.get(name) if found and fresh(node.files_read_at_ns, snapshot, stale_s) else None
    if value is None:
        raise Unknown(f"{name} of NUMA node {numa}")
    return value


def scale_factor(snapshot: Snapshot) -> int:
    """vm.watermark_scale_factor, in ten-thousandths of a node's memory. Raises Unknown."""
    value = snapshot.node.sysctl.get("vm.watermark_scale_factor")
    if value is None:
        raise Unknown("vm.watermark_scale_factor")
    return value


def zone_low_bytes(snapshot: Snapshot, numa: int, stale_s: float) -> int:
    """Low watermarks of a NUMA node's zones together. Raises Unknown."""
    node = snapshot.node
    zones = [zone.low for zone in node.zones if zone.node == numa]
    if not zones or not fresh(node.files_read_at_ns, snapshot, stale_s):
        raise Unknown(f"watermarks of NUMA node {numa}")
    return sum(zones) * PAGESIZE


def human(size: float) -> str:
    """For people: `1.5 GiB`, `81.9 MiB`."""
    return f"{size / (1 << 30):.4g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.3g} MiB"


def counted(count: int, noun: str) -> str:
    """For people: `1 pod`, `2 pods`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
