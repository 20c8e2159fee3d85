"""memory.stat and memory.numa_stat of version 2, as the documents have them: the kernel's own names, bytes and events."""

from __future__ import annotations

from collections.abc import Mapping

from exporters.malachite.wire import Wire, named, u64

SPLIT = ("workingset_refault", "workingset_activate")
"""Kernels from 5.9 on count anonymous memory and files apart (commit 170b04b7ae49); the documents want the sums too."""


class MemoryStat(Wire, frozen=True):
    """memory.stat; a name that this kernel does not have is left out."""

    anon: int | None = None
    file: int | None = None
    kernel: int | None = None
    kernel_stack: int | None = None
    sock: int | None = None
    shmem: int | None = None
    file_mapped: int | None = None
    file_dirty: int | None = None
    file_writeback: int | None = None
    anon_thp: int | None = None
    inactive_anon: int | None = None
    active_anon: int | None = None
    inactive_file: int | None = None
    active_file: int | None = None
    unevictable: int | None = None
    slab_reclaimable: int | None = None
    slab_unreclaimable: int | None = None
    slab: int | None = None
    bgd_reclaim: int | None = None
    workingset_refault: int | None = None
    workingset_refault_anon: int | None = None
    workingset_refault_file: int | None = None
    workingset_activate: int | None = None
    workingset_activate_anon: int | None = None
    workingset_activate_file: int | None = None
    workingset_restore_anon: int | None = None
    workingset_restore_file: int | None = None
    workingset_nodereclaim: int | None = None
    pgfault: int | None = None
    pgmajfault: int | None = None
    pgrefill: int | None = None
    pgscan: int | None = None
    pgsteal: int | None = None
    pgscan_kswapd: int | None = None
    pgscan_direct: int | None = None
    pgsteal_kswapd: int | None = None
    pgsteal_direct: int | None = None
    pgactivate: int | None = None
    pgdeactivate: int | None = None
    pglazyfree: int | None = None
    pglazyfreed: int | None = None
    thp_fault_alloc: int | None = None
    thp_collapse_alloc: int | None = None


class NumaStat(Wire, frozen=True):
    """memory.numa_stat of one NUMA node."""

    anon: int | None = None
    file: int | None = None
    kernel_stack: int | None = None
    shmem: int | None = None
    file_mapped: int | None = None
    file_dirty: int | None = None
    file_writeback: int | None = None
    anon_thp: int | None = None
    inactive_anon: int | None = None
    active_anon: int | None = None
    inactive_file: int | None = None
    active_file: int | None = None
    unevictable: int | None = None
    slab_reclaimable: int | None = None
    slab_unreclaimable: int | None = None
    workingset_refault: int | None = None
    workingset_activate: int | None = None
    workingset_nodereclaim: int | None = None


def memory_stat(stat: Mapping[str, int]) -> MemoryStat:
    """The node-wide file of a cgroup."""
    return MemoryStat(**named(MemoryStat, _with_sums(stat)))


def numa_stat(stat: Mapping[str, Mapping[int, int]]) -> dict[str, NumaStat]:
    """By node as the kernel writes it: `N0`."""
    nodes = sorted({node for by_node in stat.values() for node in by_node if u64(node) is not None})
    return {
        f"N{node}": NumaStat(
            **named(NumaStat, _with_sums({kind: values[node] for kind, values in stat.items() if node in values}))
        )
        for node in nodes
    }


def _with_sums(stat: Mapping[str, int]) -> dict[str, int]:
    summed = dict(stat)
    for name in SPLIT:
        parts = [stat[part] for part in (f"{name}_anon", f"{name}_file") if part in stat]
        if parts:
            summed.setdefault(name, sum(parts))
    return summed
