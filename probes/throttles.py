"""Measures single throttles by a CPU quota: how long each lasted, per cgroup, unsampled.
A throttle is one CPU on which a cgroup with runnable tasks was held back by its own quota or one above it. It is
counted when a task of the cgroup runs on that CPU again. The forms fentry and kprobe (before Linux 6.6) measure only the
cgroup's own quota, and their sum equals throttled_time of cpu.stat. A throttle counts when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.histogram import SLOT_COUNT
from api.interfaces import ProbeReading
from api.snapshot import Durations
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import possible_cpus
from probes.per_cgroup_probe import NO_DURATIONS, PerCgroupProbe, cgroup_slots, decode_durations, table_job

FORMS = ("tp_btf", "raw_tp", "fentry", "kprobe")
"""Forms in order of preference: the first two also measure throttles by quotas of ancestors."""
_FIELDS: kernel_fields.KernelFields = {
    **kernel_fields.TASK_GROUP_FIELDS,
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RUNTIME_ENABLED": [("cfs_rq", "runtime_enabled", 4)],
    # Since 677ea015f231 (Linux 6.6).
    "SELF_TIME": [("cfs_rq", "throttled_clock_self_time", 8)],
}
_UNTHROTTLE_FIELDS: kernel_fields.KernelFields = {
    **kernel_fields.TASK_GROUP_FIELDS,
    "THROTTLED_CLOCK": [("cfs_rq", "throttled_clock", 8)],
    # A bitfield since Linux 6.18, which throttles task by task.
    "THROTTLED": [("cfs_rq", "throttled", 4)],
    "RQ": [("cfs_rq", "rq", 8)],
    "RQ_CLOCK": [("rq", "clock", 8)],
    "CFS_GROUP": [("cfs_rq", "tg", 8)],
}
_PROGRAMS = [Program("on_switch", "sched_switch", "dtse_throttles", arguments=kernel_fields.SCHED_SWITCH_ARGUMENTS)]
_UNTHROTTLE_ARGUMENTS = ("struct cfs_rq *",)
_UNTHROTTLE_PROGRAMS = [
    Program("on_unthrottle", "unthrottle_cfs_rq", "dtse_thr_end", arguments=_UNTHROTTLE_ARGUMENTS, at="entry"),
    Program("on_unthrottled", "unthrottle_cfs_rq", "dtse_thr_ended", arguments=_UNTHROTTLE_ARGUMENTS, at="return"),
]
_FORMS = {
    **tracepoint_forms(_PROGRAMS, _FIELDS),
    "fentry": Form(
        name="fentry",
        typed=True,
        fields=_UNTHROTTLE_FIELDS,
        programs=_UNTHROTTLE_PROGRAMS,
        constants={"TYPED": 1, "ENDING": 1},
    ),
    "kprobe": Form(
        name="kprobe",
        typed=False,
        fields={**_UNTHROTTLE_FIELDS, **kernel_fields.KPROBE_ARGUMENT_FIELDS},
        programs=_UNTHROTTLE_PROGRAMS,
        constants={"ENDING": 1},
    ),
}


class ThrottlesProbe(PerCgroupProbe):
    """The running probe (`api.interfaces.Probe`), with statistics for the command line."""

    name = "throttles"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded, self.name, "throttles")

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return throttles since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        return ProbeReading(counted.values_by_cgroup("throttles", decode(counted.by_cgroup()), live, NO_DURATIONS))


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, Durations]:
    """Decode rows of `struct throttles` by cgroup id, sum first."""
    return {number: decode_durations(row) for number, row in rows.items()}


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """Return the loader's job."""
    return table_job(
        "throttles",
        [_FORMS[name] for name in forms],
        cgroup_slots(cpus, 8 * (3 + SLOT_COUNT)),
        btf=btf,
        remedy="use Linux 6.6 or later, or one with fentry or kprobes; without the probe, cpu.stat has the number of throttled"
        " periods and their sum",
    )


def open_throttles(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> ThrottlesProbe:
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, possible_cpus(), btf), ThrottlesProbe, child_python=child_python)
