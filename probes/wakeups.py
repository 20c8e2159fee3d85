"""Counts which cgroup wakes which, and the time from each wakeup until the woken task runs.
Every wakeup counts once, where the waker runs. Wakeups in interrupts count as an interrupt's, except packets that a
task sends over loopback or to another network namespace of the node: those count as the sender's. PREEMPT_RT kernels
are refused. It costs time at each wakeup and switch, so the agent loads it only where the setting `probes` names it
(docs/adding-a-probe.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.histogram import SLOT_COUNT
from api.interfaces import ProbeReading, Unavailable
from api.measurements import Durations, Wakeups
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.cgroup_pairs import PAIR_BYTES, CgroupPairs, pair_bits
from probes.cgroup_table import cgroup_slots
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe
from probes.maps import cpu_id_limit
from probes.per_cgroup_probe import PerCgroupProbe, decode_durations

FORMS = ("tp_btf", "raw_tp")
"""In order of preference."""
TASK_SLOTS = 1 << 17
"""Tasks that can be remembered between their wakeup and their switch, by the low bits of their pid: 2 MiB."""
MAX_WAKEUP_PAIR_BYTES = 16 << 20
"""Bound of the table of pairs over all CPUs."""
NO_DURATIONS = Durations(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)
NO_WAKEUPS = Wakeups(by_cgroup={}, interrupt=NO_DURATIONS, kernel_thread=NO_DURATIONS, other=NO_DURATIONS)
_HIST = 1 + SLOT_COUNT
_CLASSES = 3
"""Histograms of struct woken."""
_FIELDS = {
    **kernel_fields.TASK_GROUP_FIELDS,
    "PID": [("task_struct", "pid", 4)],
    "FLAGS": [("task_struct", "flags", 4)],
    "ON_CPU": [("task_struct", "on_cpu", 4)],
    "ON_RQ": [("task_struct", "on_rq", 4)],
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RQ": [("cfs_rq", "rq", 8)],
}
_PREEMPTION = {
    **kernel_fields.PREEMPT_RT_FIELDS,
    # Of each task (arm64, riscv), or of each CPU: x86, in one struct with others from 64701838bf05 (6.2) to 6.14.
    "PREEMPT_COUNT": [
        ("task_struct", "thread_info.preempt.count", 4),
        ("task_struct", "thread_info.preempt_count", 4),
    ],
    "CPU_PREEMPT_COUNT": [("", "__preempt_count", 4), ("", "pcpu_hot", 64)],
    "HOT_PREEMPT_COUNT": [("pcpu_hot", "preempt_count", 4)],
    "RUNQUEUES": [("", "runqueues", 0)],
}
_PROGRAMS = [
    Program("on_waking", "sched_waking", "dtse_waking", arguments=kernel_fields.TASK_ARGUMENTS),
    Program("on_new", "sched_wakeup_new", "dtse_wake_new", arguments=kernel_fields.TASK_ARGUMENTS),
    Program("on_switch", "sched_switch", "dtse_wake_run", arguments=kernel_fields.SCHED_SWITCH_ARGUMENTS),
    Program("on_raise", "softirq_raise", "dtse_wake_ask", arguments=kernel_fields.SOFTIRQ_ARGUMENTS),
    Program("on_softirq", "softirq_entry", "dtse_wake_in", arguments=kernel_fields.SOFTIRQ_ARGUMENTS),
    Program("on_softirq_end", "softirq_exit", "dtse_wake_out", arguments=kernel_fields.SOFTIRQ_ARGUMENTS),
]
_FORMS = {
    "tp_btf": Form(
        name="tp_btf",
        typed=True,
        fields=_FIELDS,
        optional=_PREEMPTION,
        programs=_PROGRAMS,
        constants={"TYPED": 1},
    ),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, optional=_PREEMPTION, programs=_PROGRAMS),
}


class WakeupsProbe(PerCgroupProbe):
    """The running probe: a Probe (`api.interfaces`)."""

    name = "wakeups"

    def __init__(self, loaded: Loaded) -> None:
        self._ledger = CgroupPairs(loaded, "wakeups", "who wakes whom")
        super().__init__(loaded, self.name, self.name)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Wakeups by cgroup id of the woken since the probe was opened. Wakers that `live` does not have are not named.
        Raises Unavailable once closed."""
        with self.reading() as table:
            # Pairs first: then every tag that is found there and not in the table is of a cgroup that is gone.
            pairs = self._ledger.read()
            counted = self.count(live, complete=complete)
            settled = self._ledger.balance(pairs, table.owners, live)
        found = {
            number: decode(row, settled.by_path.get(number, {}), settled.unattributed.get(number))
            for number, row in counted.by_cgroup().items()
        }
        return ProbeReading(counted.values_by_cgroup("wakeups", found, live, NO_WAKEUPS))

    def problem(self) -> Unavailable | None:
        """What could not be counted lately, as of the latest read."""
        return super().problem() or self._ledger.problem()

    @property
    def lost_events(self) -> int | None:
        """Those of every probe with a table, and wakeups that count as other because they found no place."""
        return (super().lost_events or 0) + self._ledger.overflowed_events.total

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._ledger.close()
        super().close()


def decode(row: Sequence[int], by_path: Mapping[str, Sequence[int]], unattributed: Sequence[int] | None) -> Wakeups:
    """Pure: a row of `struct woken`, and the rows of wakers, named and without a name, to wakeups."""
    interrupt, kernel_thread, other = (row[at : at + _HIST] for at in range(0, _CLASSES * _HIST, _HIST))
    if unattributed is not None:
        other = [known + more for known, more in zip(other, unattributed, strict=True)]
    return Wakeups(
        by_cgroup={path: decode_durations(value) for path, value in by_path.items()},
        interrupt=decode_durations(interrupt),
        kernel_thread=decode_durations(kernel_thread),
        other=decode_durations(other),
    )


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do; CPU numbers are below `cpus`."""
    here = Path(__file__).parent
    return Job(
        sources=[here / name for name in ("common.bpf.h", "pairs.bpf.h", "wakeups.bpf.c")],
        forms=[_FORMS[name] for name in forms],
        maps=["wakeups", "groups", "owners", "lost", "pairs", "crowded"],
        constants={
            "SLOTS": SLOT_COUNT,
            "SEATS": TASK_SLOTS,
            "PLACES": cgroup_slots(cpus, 8 * _CLASSES * _HIST),
            "CPUS": cpus,
            "PAIRS": 1,
            "PAIR_BITS": pair_bits(cpus, PAIR_BYTES + 8 * SLOT_COUNT, MAX_WAKEUP_PAIR_BYTES),
            "PAIR_SLOTS": SLOT_COUNT,
        },
        btf=btf,
        remedy="boot Linux 5.10 or later without PREEMPT_RT, with its per-CPU variables in BTF (CONFIG_DEBUG_INFO_BTF, pahole"
        " 1.18 or later)",
    )


def open_wakeups(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> WakeupsProbe:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return load_probe(job(forms, cpu_id_limit(), btf), WakeupsProbe, child_python=child_python)
