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
"""The cgroup whose CPU weight a task has: a place in the table, and its directory."""
TASK_CGROUP_FIELDS: KernelFields = {
    **{macro: TASK_GROUP_FIELDS[macro] for macro in ("TASK_GROUP", "CSS_CGROUP", "CGROUP_KN", "KN_ID")},
    "TASK_CSS_SET": [("task_struct", "cgroups", 8)],
    "CSS_SET_CGROUP": [("css_set", "dfl_cgrp", 8)],
}
"""The cgroup that a task is in, whether it has the cpu controller or not."""

KPROBE_ARGUMENT_FIELDS: KernelFields = {"ARGUMENT_AT": [("pt_regs", "di", 8), ("pt_regs", "regs", 31 * 8)]}
"""Where a kprobe finds the first argument of its function: a register of x86, the first of those of arm64."""

PREEMPT_RT_FIELDS: KernelFields = {"SOFTIRQ_OF_TASK": [("task_struct", "softirq_disable_cnt", 4)]}
"""There on PREEMPT_RT kernels alone, where softirqs run in threads, and others may run in the middle of them."""

TASK_ARGUMENTS = ("struct task_struct *",)
SCHED_SWITCH_ARGUMENTS = ("u8", *TASK_ARGUMENTS, *TASK_ARGUMENTS)
"""What tracepoints pass first: one task, and those of `sched_switch`. In release candidates of Linux 5.18 another number stood
before the tasks (from fa2c3254d7cf to 9c2136be0878)."""
SOFTIRQ_ARGUMENTS = ("u32",)
"""The kind of softirq."""


def unified_macro(proc: Path = Path("/proc")) -> dict[str, int]:
    """The macro UNIFIED where the cpu controller is in the version 2 hierarchy, as far as this process's own file tells."""
    try:
        lines = (proc / "self/cgroup").read_bytes().splitlines()
    except OSError:
        lines = []
    version_1 = any(b"cpu" in line.split(b":", 2)[1].split(b",") for line in lines if line.count(b":") >= 2)
    return {} if version_1 else {"UNIFIED": 1}
