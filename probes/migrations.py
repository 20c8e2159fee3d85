"""Tasks that the scheduler moved to a CPU of another NUMA node, per cgroup: their memory stayed behind.

What the numbers mean: every move counts, whoever asked for it (load balancing, a wakeup elsewhere, a changed cpuset or
affinity, NUMA balancing). A new task's first CPU is no move. A task belongs to the cgroup whose CPU weight it has. Moves from
and to CPUs that came online after the probe was opened are not counted.

Where all CPUs are on one node there is nothing to count: nothing is attached, the form says so, and the field stays absent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from api.cpus import parse_cpu_list
from api.ports import Seen, Unavailable
from probes import bpf, fields
from probes.btf import VMLINUX
from probes.groups import MAX_PLACES, Lost
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.maps import Map
from probes.tabled import Tabled

FORMS = ("tp_btf", "raw_tp")
"""In order of preference, which is that of their cost."""
ONE_NODE = "one NUMA node, nothing to count"
_FIELDS: fields.Fields = {
    **fields.GROUP,
    # Moved into thread_info by bcf9033e5449 (Linux 5.16).
    "TASK_CPU": [("task_struct", "thread_info.cpu", 4), ("task_struct", "cpu", 4)],
}
_PROGRAMS = [Program("on_migrate", "sched_migrate_task", "dtse_migrations", arguments=(*fields.TASK, "s32"))]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
}


class Migrations:
    """The running probe (`api.ports.Probe`); `loaded` is None where there is nothing to count."""

    name = "migrations"

    def __init__(self, loaded: Loaded | None, cpu_nodes: Mapping[int, int]) -> None:
        self._table: Tabled | None = None
        self._open, self.form = True, ONE_NODE
        if loaded is not None:
            self._table, self.form = Tabled(loaded, "migrations", "migrations"), loaded.form
            table = Map(*loaded.maps["cpu_nodes"], cpus=1)
            for cpu, node in cpu_nodes.items():
                table.set(cpu, (node + 1).to_bytes(4, sys.byteorder))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Moves since the probe was opened. Raises Unavailable once closed."""
        if not self._open:
            raise Unavailable("the probe migrations is closed", "open it again")
        if self._table is None:
            return Seen()
        counted = self._table.count(live, complete=complete)
        moves = {number: moves for number, (moves,) in counted.by_cgroup().items()}
        return Seen(counted.filled("numa_migrations", moves, live, 0))

    def problem(self) -> Unavailable | None:
        return self._table.problem() if self._table is not None else None

    @property
    def lost_events(self) -> int | None:
        return self._table.lost_events if self._table is not None else None

    def lost(self) -> Lost:
        """Moves that were not counted, by reason."""
        return self._table.lost() if self._table is not None else Lost(full=0, backwards=0, asleep=0, seat=0)

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
        constants={"SLOTS": 2, "SEATS": 1, "PLACES": MAX_PLACES, "CPUS": cpus},
        btf=btf,
        remedy="use Linux 5.5 or later; without the probe, numa_pages_migrated of /proc/vmstat is a sum for the node",
    )


def open_migrations(
    *,
    forms: Sequence[str] = FORMS,
    child_python: Path = CHILD_PYTHON,
    btf: Path = VMLINUX,
    cpu_nodes: Mapping[int, int] | None = None,
) -> Migrations:
    """Start the probe where there is more than one node. Raises Unavailable with reason and remedy if no form runs.

    `cpu_nodes` says which CPU is on which node; by default the kernel does.
    """
    nodes = numa_nodes_of_cpus() if cpu_nodes is None else cpu_nodes
    if len(set(nodes.values())) < 2:
        return Migrations(None, nodes)
    return opened(job(forms, max(nodes) + 1, btf), partial(Migrations, cpu_nodes=nodes), child_python=child_python)
