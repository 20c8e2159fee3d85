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
from probes.cgroup_table import MAX_CGROUP_SLOTS, LostEvents
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe
from probes.maps import BpfMap
from probes.per_cgroup_probe import PerCgroupProbe

FORMS = ("tp_btf", "raw_tp")
"""In order of preference, which is that of their cost."""
ONE_NODE = "one NUMA node, nothing to count"
_FIELDS: kernel_fields.KernelFields = {
    **kernel_fields.TASK_GROUP_FIELDS,
    # Moved into thread_info by bcf9033e5449 (Linux 5.16).
    "TASK_CPU": [("task_struct", "thread_info.cpu", 4), ("task_struct", "cpu", 4)],
}
_PROGRAMS = [
    Program("on_migrate", "sched_migrate_task", "dtse_migrations", arguments=(*kernel_fields.TASK_ARGUMENTS, "s32"))
]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
}


class MigrationsProbe:
    """The running probe (`api.interfaces.Probe`); `loaded` is None where there is nothing to count."""

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
        """Moves since the probe was opened. Raises Unavailable once closed."""
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
        """Moves that were not counted, by reason."""
        return self._table.lost() if self._table is not None else LostEvents(full=0, backwards=0, asleep=0, seat=0)

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while kernel statistics are on."""
        return self._table.stats() if self._table is not None else {}

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._open = False
        if self._table is not None:
            self._table.close()


def numa_nodes_of_cpus(sys_root: Path = Path("/sys")) -> dict[int, int]:
    """Node by CPU, of the CPUs that are online; empty where the kernel knows nothing of nodes."""
    found: dict[int, int] = {}
    for directory in (sys_root / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_cpu_list((directory / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        found.update(dict.fromkeys(cpus, int(directory.name.removeprefix("node"))))
    return found


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do; CPU numbers are below `cpus`."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "migrations.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["migrations", "cpu_nodes", "groups", "owners", "lost"],
        constants={"SLOTS": 2, "SEATS": 1, "PLACES": MAX_CGROUP_SLOTS, "CPUS": cpus},
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
    """Start the probe where there is more than one node. Raises Unavailable with reason and remedy if no form runs.

    `cpu_nodes` says which CPU is on which node; by default the kernel does.
    """
    nodes = numa_nodes_of_cpus() if cpu_nodes is None else cpu_nodes
    if len(set(nodes.values())) < 2:
        return MigrationsProbe(None, nodes)
    return load_probe(
        job(forms, max(nodes) + 1, btf), partial(MigrationsProbe, cpu_nodes=nodes), child_python=child_python
    )
