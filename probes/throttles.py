"""Single throttles by a CPU quota: how long each lasted, per cgroup. Every one, unsampled.

What the numbers mean: a throttle is one CPU on which a cgroup with tasks to run was held back, from the moment that the first
of them had to stop until the quota was filled up again. One period has as many as CPUs were held back, so their number is at
least, and on one CPU exactly, nr_throttled of cpu.stat, and their sum is its throttled_time. The quota is the cgroup's own or
one above it: both hold it back. A throttle is counted when a task of the cgroup runs on that CPU again.

What it cannot see: a throttle that is still going on; those before the probe first saw the cgroup run on that CPU; and of
a cgroup without a quota of its own, the first one on each CPU by a quota above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.facts import Durations
from api.histograms import SLOTS
from api.ports import Seen, Unavailable
from probes import bpf, fields
from probes.btf import VMLINUX
from probes.groups import Lost, places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load
from probes.maps import possible_cpus
from probes.tabled import Tabled

FORMS = ("tp_btf", "raw_tp")
"""In order of preference, which is that of their cost."""
NOTHING = Durations(sum_ns=0, count=0, slots=(0,) * SLOTS)
_FIELDS: fields.Fields = {
    **fields.GROUP,
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RUNTIME_ENABLED": [("cfs_rq", "runtime_enabled", 4)],
    # Since 677ea015f231 (Linux 6.6).
    "SELF_TIME": [("cfs_rq", "throttled_clock_self_time", 8)],
}
_PASSED = ("u8", "struct task_struct *", "struct task_struct *")
_PROGRAMS = [Program("on_switch", "sched_switch", "dtse_throttles", arguments=_PASSED)]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
}


class Throttles:
    """The running probe (`api.ports.Probe`), with what a person may want to know beside it."""

    name = "throttles"

    def __init__(self, loaded: Loaded) -> None:
        self._table = Tabled(loaded, "throttles", "throttles")
        self.form, self.refused = loaded.form, loaded.refused

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Throttles since the probe was opened. Raises Unavailable once closed."""
        rows, certain = self._table.rows(live, complete=complete)
        cgroups = {number: {"throttles": throttles} for number, throttles in decode(rows).items()}
        if certain:
            nothing = {"throttles": NOTHING}
            for number in live:
                cgroups.setdefault(number, nothing)
        return Seen(cgroups=cgroups)

    def problem(self) -> Unavailable | None:
        return self._table.problem()

    def lost(self) -> Lost:
        """Switches that were not looked at, by reason."""
        return self._table.lost()

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while kernel statistics are on."""
        return self._table.stats()

    def close(self) -> None:
        self._table.close()


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, Durations]:
    """Pure: rows of `struct throttles` by cgroup id, sum first."""
    return {number: Durations(sum_ns=row[0], count=sum(row[1:]), slots=tuple(row[1:])) for number, row in rows.items()}


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "throttles.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["throttles", "groups", "owners", "lost"],
        constants={"SLOTS": SLOTS, "SEATS": 1, "PLACES": places_for(cpus, 8 * (3 + SLOTS))},
        btf=btf,
        remedy="use Linux 6.6 or later; without the probe, cpu.stat has the number of throttled periods and their sum",
    )


def open_throttles(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> Throttles:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    loaded = load(job(forms, possible_cpus(), btf), child_python=child_python)
    try:
        return Throttles(loaded)
    except BaseException:
        loaded.close()
        raise
