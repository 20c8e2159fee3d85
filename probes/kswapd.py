"""Who reclaims memory: kswapd in the background, per NUMA node, and tasks that have to do it themselves, per cgroup.

What the numbers mean. Of a NUMA node: `wakeups` are kswapd's runs over the node (pageoutrun of /proc/vmstat), `active_ns`
the time from such a wakeup to the last batch of pages it scanned or to its going to sleep, without the nap of a tenth of a
second before that; pages scanned and reclaimed are those of kswapd alone, batch by batch, so that they are known per node
(pgscan_kswapd and pgsteal_kswapd of /proc/vmstat are sums over the nodes). Of a cgroup: how often and how long its tasks
were held up by direct reclaim because the node had too little memory, and by reclaim because a memory cgroup was over its
limit (memory.max, memory.high, or a write to memory.reclaim); pages that both freed; and how often its tasks woke kswapd.

A task belongs to the cgroup whose CPU weight it has, as for run-queue waits. That is who waited; on version 1 the memory
cgroup that had to shrink may be another one, and on both versions it may be one above. Reclaim that kernel threads do
(memory.high's worker) is the root's.

What it cannot see: what kswapd did before its first wakeup after the probe was opened; reclaim that is still going on;
that an interrupt, not the task it interrupted, allocated when kswapd was woken; and, before Linux 6.7, what kswapd scans and
reclaims where the multi-generational LRU is on, which does not tell: its pages stay at 0 and its time at too little, and
`problem` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from api.cpus import parse_cpu_list
from api.facts import Durations, Kswapd, Reclaim
from api.histograms import SLOTS
from api.ports import Seen, Unavailable
from probes import fields
from probes.btf import VMLINUX
from probes.groups import MAX_PLACES
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.maps import Map, total
from probes.tabled import Tabled, durations

FORMS = ("tp_btf", "raw_tp")
"""In order of preference, which is that of their cost."""
SEATS = 1 << 15
"""Tasks that can be in reclaim at one time, by the low bits of their pid: 512 KiB."""
NONE = Durations(sum_ns=0, count=0, slots=(0,) * SLOTS)
NOTHING = Reclaim(direct=NONE, limit=NONE, reclaimed_pages=0, kswapd_wakeups=0)
MANY_RUNS = 10
"""Of kswapd without a page scanned: it may find that there is nothing to do, but not each time."""
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
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=fields.GROUP, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=fields.GROUP, programs=_PROGRAMS),
}


class KswapdProbe(Tabled):
    """The running probe (`api.ports.Probe`), with what a person may want to know beside it."""

    name = "kswapd"

    def __init__(self, loaded: Loaded, numa_nodes: Sequence[int]) -> None:
        super().__init__(loaded, self.name, "reclaims")
        self._nodes, self._numa = Map(*loaded.maps["nodes"], cpus=1), tuple(numa_nodes)
        self._latest: Mapping[int, Kswapd] = {}

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Counts since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        with self.reading():
            numa = self._latest = decode_nodes(self._numa, total(self._nodes.rows(self._numa)).tolist())
        return Seen(counted.filled("reclaim", decode(counted.by_cgroup()), live, NOTHING), {"kswapd": numa})

    def problem(self) -> Unavailable | None:
        """What could not be counted lately, as of the latest read."""
        return super().problem() or unseen(self._latest)


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, Reclaim]:
    """Pure: rows of `struct reclaim` by cgroup id."""
    limit = 1 + SLOTS
    return {
        number: Reclaim(
            direct=durations(row[:limit]),
            limit=durations(row[limit : 2 * limit]),
            reclaimed_pages=row[2 * limit],
            kswapd_wakeups=row[2 * limit + 1],
        )
        for number, row in rows.items()
    }


def decode_nodes(numa: Iterable[int], rows: Iterable[Sequence[int]]) -> dict[int, Kswapd]:
    """Pure: rows of `struct node`, one for each of the nodes."""
    return {
        nid: Kswapd(wakeups=wakeups, active_ns=active, scanned_pages=scanned, reclaimed_pages=reclaimed)
        for nid, (_, _, wakeups, active, scanned, reclaimed) in zip(numa, rows, strict=True)
    }


def unseen(numa: Mapping[int, Kswapd], lru_gen: Path = LRU_GEN) -> Unavailable | None:
    """Whether this kernel's kswapd scans without telling: by its runs, and by the mask of features in that file of sysfs."""
    runs = sum(node.wakeups for node in numa.values())
    if runs < MANY_RUNS or any(node.scanned_pages for node in numa.values()):
        return None
    try:
        on = int(lru_gen.read_text(), 16)
    except (OSError, ValueError):
        return None
    reason = f"kswapd ran {runs} times and no page was seen: the multi-generational LRU does not tell before Linux 6.7"
    return Unavailable(reason, "use Linux 6.7 or later; pgscan_kswapd of /proc/vmstat has the sum") if on else None


def nodes_with_memory(sys_root: Path = Path("/sys")) -> tuple[int, ...]:
    """NUMA nodes that have a kswapd; node 0 alone where the kernel knows nothing of nodes."""
    try:
        return parse_cpu_list((sys_root / "devices/system/node/has_memory").read_text()) or (0,)
    except (OSError, ValueError):
        return (0,)


def job(forms: Sequence[str], numa_nodes: Sequence[int], btf: Path = VMLINUX) -> Job:
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "kswapd.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["kswapd", "nodes", "groups", "owners", "lost"],
        remedy="use Linux 5.5 or later; without the probe, /proc/vmstat and memory.stat have sums (pgscan, allocstall)",
        constants={"SLOTS": SLOTS, "SEATS": SEATS, "PLACES": MAX_PLACES, "NODES": max(numa_nodes) + 1},
        btf=btf,
    )


def open_kswapd(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> KswapdProbe:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    numa_nodes = nodes_with_memory()
    return opened(job(forms, numa_nodes, btf), partial(KswapdProbe, numa_nodes=numa_nodes), child_python=child_python)
