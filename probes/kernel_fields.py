"""Names the kernel fields that several probes read, by the macros of kernel.bpf.h and per_cgroup.bpf.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

KernelFields = Mapping[str, Sequence[tuple[str, str, int]]]

TASK_GROUP_FIELDS: KernelFields = {
    "TASK_GROUP": [("task_struct", "sched_task_group", 8)],
    "CSS_SERIAL": [("task_group", "css.serial_nr", 8)],
    "CSS_CGROUP": [("task_group", "css.cgroup", 8)],
    "CGROUP_KN": [("cgroup", "kn", 8)],
    "KN_ID": [("kernfs_node", "id", 8)],
}
"""Fields of the cgroup whose CPU weight a task has: tag and directory."""
TASK_CGROUP_FIELDS: KernelFields = {
    **{macro: TASK_GROUP_FIELDS[macro] for macro in ("TASK_GROUP", "CSS_CGROUP", "CGROUP_KN", "KN_ID")},
    "TASK_CSS_SET": [("task_struct", "cgroups", 8)],
    "CSS_SET_CGROUP": [("css_set", "dfl_cgrp", 8)],
}
"""Fields of the cgroup that a task is in, with or without the cpu controller."""

KPROBE_ARGUMENT_FIELDS: KernelFields = {"ARGUMENT_AT": [("pt_regs", "di", 8), ("pt_regs", "regs", 31 * 8)]}
"""Register with the first argument of a probed function, on x86 and arm64."""

PREEMPT_RT_FIELDS: KernelFields = {"SOFTIRQ_OF_TASK": [("task_struct", "softirq_disable_cnt", 4)]}
"""Field that only PREEMPT_RT kernels have, where softirqs run in threads and can be preempted by others."""

TASK_ARGUMENTS = ("struct task_struct *",)
SCHED_SWITCH_ARGUMENTS = ("u8", *TASK_ARGUMENTS, *TASK_ARGUMENTS)
"""First arguments of tracepoints: one task, and those of `sched_switch`. Release candidates of Linux 5.18 had another number
before the tasks (from fa2c3254d7cf to 9c2136be0878)."""
SOFTIRQ_ARGUMENTS = ("u32",)
"""The kind of softirq."""


def unified_macro(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the macro UNIFIED if the cpu controller is in the version 2 hierarchy, according to /proc/self/cgroup."""
    try:
        lines = (proc / "self/cgroup").read_bytes().splitlines()
    except OSError:
        lines = []
    version_1 = any(b"cpu" in line.split(b":", 2)[1].split(b",") for line in lines if line.count(b":") >= 2)
    return {} if version_1 else {"UNIFIED": 1}
