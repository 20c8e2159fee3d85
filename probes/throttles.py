"""Single throttles by a CPU quota: how long each lasted, per cgroup. Unsampled.

What the numbers mean: a throttle is one CPU on which a cgroup with tasks to run was held back, from the moment that the first
of them had to stop until the quota was filled up again. One period has as many as CPUs were held back, so of a cgroup without
a quota above it their number is at least, and on one CPU exactly, nr_throttled of cpu.stat, and their sum its throttled_time.
The quota is the cgroup's own or one above it: both hold it back, and while both do at once it is one throttle, whereas cpu.stat
has the own one alone. A throttle is counted when a task of the cgroup runs on that CPU again. On Linux 6.6 to 6.17 those by a
quota above that follow each other before any task has run are counted as one; their sum is right.

The forms fentry and kprobe, for kernels before 6.6, count a throttle when it ends, and by the cgroup's own quota alone: their
sum is the throttled_time of cpu.stat, to the nanosecond. Before 6.6 both have throttles of a cgroup with nothing to run, too.

What it cannot see: a throttle that is still going on; in the forms tp_btf and raw_tp, those before the probe first saw the
cgroup run on that CPU, and of a cgroup without a quota of its own, the first one on each CPU by a quota above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from api.facts import Durations
from api.histograms import SLOTS
from api.ports import Seen
from probes import fields
from probes.btf import VMLINUX
from probes.groups import places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.maps import possible_cpus
from probes.tabled import Tabled, durations

FORMS = ("tp_btf", "raw_tp", "fentry", "kprobe")
"""In order of preference: the first two know of quotas above, too."""
NOTHING = Durations(sum_ns=0, count=0, slots=(0,) * SLOTS)
_FIELDS: fields.Fields = {
    **fields.GROUP,
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RUNTIME_ENABLED": [("cfs_rq", "runtime_enabled", 4)],
    # Since 677ea015f231 (Linux 6.6).
    "SELF_TIME": [("cfs_rq", "throttled_clock_self_time", 8)],
}
_ENDING_FIELDS: fields.Fields = {
    **fields.GROUP,
    "THROTTLED_CLOCK": [("cfs_rq", "throttled_clock", 8)],
    # A bitfield since Linux 6.18, which throttles task by task.
    "THROTTLED": [("cfs_rq", "throttled", 4)],
    "RQ": [("cfs_rq", "rq", 8)],
    "RQ_CLOCK": [("rq", "clock", 8)],
    "CFS_GROUP": [("cfs_rq", "tg", 8)],
}
_PROGRAMS = [Program("on_switch", "sched_switch", "dtse_throttles", arguments=fields.SWITCH)]
_ENDED = ("struct cfs_rq *",)
_ENDING = [
    Program("on_unthrottle", "unthrottle_cfs_rq", "dtse_thr_end", arguments=_ENDED, at="entry"),
    Program("on_unthrottled", "unthrottle_cfs_rq", "dtse_thr_ended", arguments=_ENDED, at="return"),
]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
    "fentry": Form(
        name="fentry", typed=True, fields=_ENDING_FIELDS, programs=_ENDING, constants={"TYPED": 1, "ENDING": 1}
    ),
    "kprobe": Form(
        name="kprobe",
        typed=False,
        fields={**_ENDING_FIELDS, **fields.ARGUMENT},
        programs=_ENDING,
        constants={"ENDING": 1},
    ),
}


class Throttles(Tabled):
    """The running probe (`api.ports.Probe`), with what a person may want to know beside it."""

    name = "throttles"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded, self.name, "throttles")

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Throttles since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        return Seen(counted.filled("throttles", decode(counted.by_cgroup()), live, NOTHING))


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, Durations]:
    """Pure: rows of `struct throttles` by cgroup id, sum first."""
    return {number: durations(row) for number, row in rows.items()}


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "throttles.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["throttles", "groups", "owners", "lost"],
        constants={"SLOTS": SLOTS, "SEATS": 1, "PLACES": places_for(cpus, 8 * (3 + SLOTS))},
        btf=btf,
        remedy="use Linux 6.6 or later, or one with fentry or kprobes; without the probe, cpu.stat has the number of throttled"
        " periods and their sum",
    )


def open_throttles(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> Throttles:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return opened(job(forms, possible_cpus(), btf), Throttles, child_python=child_python)
