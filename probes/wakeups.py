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
from api.snapshot import Wakeups
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.cgroup_pairs import PAIR_BYTES, CgroupPairs, pair_bits
from probes.loader import CHILD_PYTHON, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import cpu_id_limit
from probes.per_cgroup_probe import NO_DURATIONS, PerCgroupProbe, cgroup_slots, decode_durations, table_job

FORMS = ("tp_btf", "raw_tp")
"""Forms in order of preference."""
TASK_SLOTS = 1 << 17
"""Number of tasks whose wakeup is kept until their switch, by the low bits of their pid: 2 MiB."""
MAX_WAKEUP_PAIR_BYTES = 16 << 20
"""Maximum size of the table of pairs over all CPUs."""
NO_WAKEUPS = Wakeups(by_cgroup={}, interrupt=NO_DURATIONS, kernel_thread=NO_DURATIONS, other=NO_DURATIONS)
_HIST = 1 + SLOT_COUNT
_CLASSES = 3
"""Number of histograms of struct woken."""
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
    # Per task (arm64, riscv), or per CPU (x86): there in one struct with others from 64701838bf05 (6.2) to 6.14.
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
_FORMS = tracepoint_forms(_PROGRAMS, _FIELDS, _PREEMPTION)


class WakeupsProbe(PerCgroupProbe):
    """The running probe: a Probe (`api.interfaces`)."""

    name = "wakeups"

    def __init__(self, loaded: Loaded) -> None:
        self._pairs = CgroupPairs(loaded, "wakeups", "wakers and woken cgroups")
        super().__init__(loaded, self.name, self.name)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return wakeups by cgroup id of the woken task since the probe was opened; only wakers in `live` are named.

        Raises Unavailable once closed.
        """
        with self.reading() as table:
            # Pairs first: a tag of a pair that is missing from the table read later then belongs to a removed cgroup.
            pairs = self._pairs.read()
            counted = self.count(live, complete=complete)
            resolved = self._pairs.resolve(pairs, table.tags, live)
        wakeups = {
            number: decode(row, resolved.by_path.get(number, {}), resolved.unattributed.get(number))
            for number, row in counted.by_cgroup().items()
        }
        return ProbeReading(counted.values_by_cgroup("wakeups", wakeups, live, NO_WAKEUPS))

    def problem(self) -> Unavailable | None:
        """Return what could not be counted lately, as of the latest read."""
        return super().problem() or self._pairs.problem()

    @property
    def lost_events(self) -> int | None:
        """Return the lost events of the table, and the wakeups that count as other because the table of pairs is full."""
        return (super().lost_events or 0) + self._pairs.overflowed_events.total

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._pairs.close()
        super().close()


def decode(row: Sequence[int], by_path: Mapping[str, Sequence[int]], unattributed: Sequence[int] | None) -> Wakeups:
    """Decode a row of `struct woken`, the rows of named wakers, and the sum of wakers without a path."""
    interrupt, kernel_thread, other = (row[at : at + _HIST] for at in range(0, _CLASSES * _HIST, _HIST))
    if unattributed is not None:
        other = [value + more for value, more in zip(other, unattributed, strict=True)]
    return Wakeups(
        by_cgroup={path: decode_durations(value) for path, value in by_path.items()},
        interrupt=decode_durations(interrupt),
        kernel_thread=decode_durations(kernel_thread),
        other=decode_durations(other),
    )


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """Return the loader's job; CPU numbers are below `cpus`."""
    return table_job(
        "wakeups",
        [_FORMS[name] for name in forms],
        cgroup_slots(cpus, 8 * _CLASSES * _HIST),
        headers=("cgroup_pairs.bpf.h",),
        maps=("pairs", "pairs_overflow"),
        task_slots=TASK_SLOTS,
        constants={
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
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, cpu_id_limit(), btf), WakeupsProbe, child_python=child_python)
