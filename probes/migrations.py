"""Counts tasks that the scheduler moved to a CPU of another NUMA node, per cgroup: their memory stays behind.
Every move counts, whatever caused it; the first CPU of a new task does not. A task belongs to the cgroup whose CPU
weight it has. On a machine with one NUMA node nothing is attached, the form says so, and the field stays absent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from api.cpu import parse_cpu_list
from api.interfaces import ProbeReading, Unavailable
from probes import bpf, kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import BpfMap
from probes.per_cgroup_probe import MAX_CGROUP_SLOTS, LostEvents, PerCgroupProbe, table_job

FORMS = ("tp_btf", "raw_tp")
"""Forms in order of preference, which is the order of their cost."""
ONE_NODE = "one NUMA node, nothing to count"
_FIELDS: kernel_fields.KernelFields = {
    **kernel_fields.TASK_GROUP_FIELDS,
    # Moved into thread_info by bcf9033e5449 (Linux 5.16).
    "TASK_CPU": [("task_struct", "thread_info.cpu", 4), ("task_struct", "cpu", 4)],
}
_PROGRAMS = [
    Program("on_migrate", "sched_migrate_task", "dtse_migrations", arguments=(*kernel_fields.TASK_ARGUMENTS, "s32"))
]
_FORMS = tracepoint_forms(_PROGRAMS, _FIELDS)


class MigrationsProbe:
    """The running probe (`api.interfaces.Probe`); `loaded` is None on a machine with one NUMA node."""

    name = "migrations"

    def __init__(self, loaded: Loaded | None, cpu_nodes: Mapping[int, int]) -> None:
        self._table: PerCgroupProbe | None = None
        self._open, self.form = True, ONE_NODE
        if loaded is not None:
            self._table, self.form = PerCgroupProbe(loaded, "migrations", "migrations"), loaded.form
            table = BpfMap(*loaded.maps["cpu_nodes"], cpus=1)
            for cpu, node in cpu_nodes.items():
                table.set(cpu, (node + 1).to_bytes(4, sys.byteorder))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return moves since the probe was opened. Raises Unavailable once closed."""
        if not self._open:
            raise Unavailable("the probe migrations is closed", "open it again")
        if self._table is None:
            return ProbeReading()
        counted = self._table.count(live, complete=complete)
        moves = {number: moves for number, (moves,) in counted.by_cgroup().items()}
        return ProbeReading(counted.values_by_cgroup("numa_migrations", moves, live, 0))

    def problem(self) -> Unavailable | None:
        return self._table.problem() if self._table is not None else None

    @property
    def lost_events(self) -> int | None:
        return self._table.lost_events if self._table is not None else None

    def lost(self) -> LostEvents:
        """Return the moves that were not counted, by reason."""
        return self._table.lost() if self._table is not None else LostEvents(full=0, backwards=0, asleep=0, task_slot=0)

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Return runs and run time of each program; they grow only while kernel statistics are on."""
        return self._table.stats() if self._table is not None else {}

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._open = False
        if self._table is not None:
            self._table.close()


def numa_nodes_of_cpus(sys_root: Path = Path("/sys")) -> dict[int, int]:
    """Return the NUMA node of each online CPU; empty if the kernel lists no nodes."""
    nodes: dict[int, int] = {}
    for directory in (sys_root / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_cpu_list((directory / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        nodes.update(dict.fromkeys(cpus, int(directory.name.removeprefix("node"))))
    return nodes


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """Return the loader's job; CPU numbers are below `cpus`."""
    return table_job(
        "migrations",
        [_FORMS[name] for name in forms],
        MAX_CGROUP_SLOTS,
        maps=("cpu_nodes",),
        constants={"CPUS": cpus},
        btf=btf,
        remedy="use Linux 5.5 or later; without the probe, numa_pages_migrated of /proc/vmstat is a sum for the node",
    )


def open_migrations(
    *,
    forms: Sequence[str] = FORMS,
    child_python: Path = CHILD_PYTHON,
    btf: Path = VMLINUX,
    cpu_nodes: Mapping[int, int] | None = None,
) -> MigrationsProbe:
    """Start the probe if there are several NUMA nodes. Raises Unavailable with reason and remedy if no form runs.

    `cpu_nodes` has the node of each CPU; by default sysfs does.
    """
    nodes = numa_nodes_of_cpus() if cpu_nodes is None else cpu_nodes
    if len(set(nodes.values())) < 2:
        return MigrationsProbe(None, nodes)
    return load_probe(
        job(forms, max(nodes) + 1, btf), partial(MigrationsProbe, cpu_nodes=nodes), child_python=child_python
    )
