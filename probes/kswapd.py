"""Counts memory reclaim: by kswapd per NUMA node, and by tasks that must reclaim themselves per cgroup.
A task belongs to the cgroup whose CPU weight it has, which on version 1 may differ from the memory cgroup that
shrinks. Reclaim by kernel threads counts as the root. Before Linux 6.7 kswapd with the multi-generational LRU reports
no scanned pages, which is reported as a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from api.cpu import parse_cpu_list
from api.histogram import SLOT_COUNT
from api.interfaces import ProbeReading, Unavailable
from api.snapshot import Kswapd, ReclaimLatency
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import BpfMap, sum_over_cpus
from probes.per_cgroup_probe import MAX_CGROUP_SLOTS, NO_DURATIONS, PerCgroupProbe, decode_durations, table_job

FORMS = ("tp_btf", "raw_tp")
"""Forms in order of preference, which is the order of their cost."""
TASK_SLOTS = 1 << 15
"""Number of tasks that can be in reclaim at one time, by the low bits of their pid: 512 KiB."""
NO_RECLAIM = ReclaimLatency(direct=NO_DURATIONS, limit=NO_DURATIONS, reclaimed_pages=0, kswapd_wakeups=0)
MIN_SILENT_RUNS = 10
"""Number of runs of kswapd without a scanned page that are reported: a single run may have nothing to do."""
LRU_GEN = Path("/sys/kernel/mm/lru_gen/enabled")
_NID = ("s32",)
_BATCH = ("s32", "u64", "u64")
_PAGES = ("u64",)
_PROGRAMS = [
    Program("on_wake", "mm_vmscan_kswapd_wake", "dtse_ksw_wake", arguments=_NID),
    Program("on_sleep", "mm_vmscan_kswapd_sleep", "dtse_ksw_sleep", arguments=_NID),
    Program("on_scan", "mm_vmscan_lru_shrink_inactive", "dtse_ksw_scan", arguments=_BATCH),
    Program("on_wakeup", "mm_vmscan_wakeup_kswapd", "dtse_ksw_wakeup", arguments=_NID),
    Program("on_begin", "mm_vmscan_direct_reclaim_begin", "dtse_ksw_begin"),
    Program("on_direct_end", "mm_vmscan_direct_reclaim_end", "dtse_ksw_end", arguments=_PAGES),
    Program("on_begin", "mm_vmscan_memcg_reclaim_begin", "dtse_ksw_mbegin"),
    Program("on_limit_end", "mm_vmscan_memcg_reclaim_end", "dtse_ksw_mend", arguments=_PAGES),
]
_FORMS = tracepoint_forms(_PROGRAMS, kernel_fields.TASK_GROUP_FIELDS)


class KswapdProbe(PerCgroupProbe):
    """The running probe (`api.interfaces.Probe`), with statistics for the command line."""

    name = "kswapd"

    def __init__(self, loaded: Loaded, numa_nodes: Sequence[int]) -> None:
        super().__init__(loaded, self.name, "reclaims")
        self._nodes, self._numa = BpfMap(*loaded.maps["nodes"], cpus=1), tuple(numa_nodes)
        self._latest: Mapping[int, Kswapd] = {}

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return counts since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        with self.reading():
            numa = self._latest = decode_nodes(self._numa, sum_over_cpus(self._nodes.rows(self._numa)).tolist())
        return ProbeReading(
            counted.values_by_cgroup("reclaim", decode(counted.by_cgroup()), live, NO_RECLAIM), {"kswapd": numa}
        )

    def problem(self) -> Unavailable | None:
        """Return what could not be counted lately, as of the latest read."""
        return super().problem() or silent_lru_gen(self._latest)


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, ReclaimLatency]:
    """Decode rows of `struct reclaim` by cgroup id."""
    limit = 1 + SLOT_COUNT
    return {
        number: ReclaimLatency(
            direct=decode_durations(row[:limit]),
            limit=decode_durations(row[limit : 2 * limit]),
            reclaimed_pages=row[2 * limit],
            kswapd_wakeups=row[2 * limit + 1],
        )
        for number, row in rows.items()
    }


def decode_nodes(numa: Iterable[int], rows: Iterable[Sequence[int]]) -> dict[int, Kswapd]:
    """Decode rows of `struct node`, one for each of the nodes."""
    return {
        nid: Kswapd(wakeups=wakeups, active_ns=active, scanned_pages=scanned, reclaimed_pages=reclaimed)
        for nid, (_, _, wakeups, active, scanned, reclaimed) in zip(numa, rows, strict=True)
    }


def silent_lru_gen(numa: Mapping[int, Kswapd], lru_gen: Path = LRU_GEN) -> Unavailable | None:
    """Return whether this kernel's kswapd reports no scanned pages, by its runs and the feature mask in `lru_gen`."""
    runs = sum(node.wakeups for node in numa.values())
    if runs < MIN_SILENT_RUNS or any(node.scanned_pages for node in numa.values()):
        return None
    try:
        on = int(lru_gen.read_text(), 16)
    except (OSError, ValueError):
        return None
    reason = f"kswapd ran {runs} times without a scanned page: before Linux 6.7 the multi-generational LRU reports none"
    return Unavailable(reason, "use Linux 6.7 or later; pgscan_kswapd of /proc/vmstat has the sum") if on else None


def nodes_with_memory(sys_root: Path = Path("/sys")) -> tuple[int, ...]:
    """Return the NUMA nodes that have a kswapd; only node 0 if the kernel lists no nodes."""
    try:
        return parse_cpu_list((sys_root / "devices/system/node/has_memory").read_text()) or (0,)
    except (OSError, ValueError):
        return (0,)


def job(forms: Sequence[str], numa_nodes: Sequence[int], btf: Path = VMLINUX) -> Job:
    """Return the loader's job."""
    return table_job(
        "kswapd",
        [_FORMS[name] for name in forms],
        MAX_CGROUP_SLOTS,
        maps=("nodes",),
        task_slots=TASK_SLOTS,
        constants={"NODES": max(numa_nodes) + 1},
        btf=btf,
        remedy="use Linux 5.5 or later; without the probe, /proc/vmstat and memory.stat have sums (pgscan, allocstall)",
    )


def open_kswapd(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> KswapdProbe:
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    numa_nodes = nodes_with_memory()
    return load_probe(
        job(forms, numa_nodes, btf), partial(KswapdProbe, numa_nodes=numa_nodes), child_python=child_python
    )
