"""Run-queue latency per cgroup: how long tasks were runnable before they got a CPU. Every task, every switch, unsampled.

What the numbers mean: the forms tp_btf and raw_tp take the scheduler's own run_delay and pcount (/proc/PID/schedstat), wait
by wait, on its own clock. Time throttled by a quota counts as waiting. A wait is whole even if the task was moved to
another CPU meanwhile. A task belongs to the cgroup whose CPU weight it has: where the cpu controller is not enabled
(version 2), to its nearest ancestor that has it; autogroups belong to the root.

What it cannot see: a wait that is still going on. And the scheduler's clock stands still between a wakeup that preempts at
once and the switch that it causes, so such a wait counts as 0, where the classic form, which stamps wakeups itself, shows
the few microseconds that the interrupt and the way out of idle take. docs/adding-a-probe.md compares them on one load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from api.facts import Wait
from api.histograms import SLOTS
from api.ports import Unavailable
from probes import bpf
from probes.btf import VMLINUX
from probes.groups import GroupTable, Lost, Overflow, places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load
from probes.maps import possible_cpus

NOTHING = Wait(sum_ns=0, count=0, slots=(0,) * SLOTS)
FORMS = ("tp_btf", "raw_tp", "classic")
"""In order of preference, which is that of their cost."""
SEATS = 1 << 17
"""Tasks that can be remembered between two events, by the low bits of their pid: 2 MiB."""
_GROUP_FIELDS = {
    "TASK_GROUP": [("task_struct", "sched_task_group", 8)],
    "CSS_SERIAL": [("task_group", "css.serial_nr", 8)],
    "CSS_CGROUP": [("task_group", "css.cgroup", 8)],
    "CGROUP_KN": [("cgroup", "kn", 8)],
    "KN_ID": [("kernfs_node", "id", 8)],
}
_STAMPED_FIELDS = {
    **_GROUP_FIELDS,
    "LAST_QUEUED": [("task_struct", "sched_info.last_queued", 8)],
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RQ": [("cfs_rq", "rq", 8)],
    "RQ_CLOCK": [("rq", "clock", 8)],
    "PID": [("task_struct", "pid", 4)],
    "PCOUNT": [("task_struct", "sched_info.pcount", 8)],
    "RUN_DELAY": [("task_struct", "sched_info.run_delay", 8)],
    "ON_RQ": [("task_struct", "on_rq", 4)],
}
# Sleeping tasks may stay queued since 152e11f6df29 (Linux 6.12).
_DELAYED_DEQUEUE = {"DELAYED": [("task_struct", "se.sched_delayed", 1)]}
_CLASSIC_FIELDS = {
    **_GROUP_FIELDS,
    "PID": [("task_struct", "pid", 4)],
    "ON_CPU": [("task_struct", "on_cpu", 4)],
    # Renamed and narrowed by 2f064a59a11f (Linux 5.14).
    "STATE": [("task_struct", "__state", 4), ("task_struct", "state", 8)],
}
_SWITCH = Program("on_switch", "sched_switch", "dtse_runqlat")
_STAMPED = [_SWITCH, Program("on_migrate", "sched_migrate_task", "dtse_rql_move", needs="DELAYED")]
_CLASSIC = [
    _SWITCH,
    Program("on_wakeup", "sched_wakeup", "dtse_rql_wakeup"),
    Program("on_wakeup", "sched_wakeup_new", "dtse_rql_new"),
]
_FORMS = {
    "tp_btf": Form(
        name="tp_btf",
        typed=True,
        fields=_STAMPED_FIELDS,
        optional=_DELAYED_DEQUEUE,
        programs=_STAMPED,
        constants={"TYPED": 1},
    ),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_STAMPED_FIELDS, optional=_DELAYED_DEQUEUE, programs=_STAMPED),
    "classic": Form(name="classic", typed=False, fields=_CLASSIC_FIELDS, programs=_CLASSIC, constants={"CLASSIC": 1}),
}


class RunqLat:
    """The running probe: a WaitSource (`api.ports`) with what a person may want to know beside it."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        table = GroupTable(loaded, "runqlat")
        self._table: GroupTable | None = table
        self._places = table.places
        self.form = loaded.form
        self.refused = loaded.refused
        """Forms that were tried before this one, and why the kernel did not take them."""
        self._overflow = Overflow()

    def read(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, Wait]:
        """Waits by cgroup id since the probe was opened; with all are those of cgroups that `live` does not have.

        Live cgroups without a place in the table have not waited yet; but where any cgroup found no place since the
        listing before this one, it may be theirs that was lost, and they are absent. Raises Unavailable once closed.
        """
        table = self._open_table()
        try:
            ids, rows = table.read(live, wanted, complete=complete)
            unsure = self._overflow.grew(table.lost().full, live)
        except OSError as error:
            raise Unavailable(
                f"the maps of runqlat cannot be read: {error.strerror}", "start the agent again"
            ) from error
        waits = decode(ids, rows.tolist())
        if not unsure:
            for number in live if wanted is None else live.keys() & wanted:
                waits.setdefault(number, NOTHING)
        return waits

    def problem(self) -> Unavailable | None:
        """Whether cgroups found no place in the table since the start, as of the latest read."""
        if not self._overflow.total:
            return None
        return Unavailable(
            f"{self._overflow.total} switches of cgroups that found no place in the table of {self._places}"
            " were not counted",
            "remove cgroups that nobody uses; where cgroup-limit is a problem too, raise maxCgroups: dead cgroups keep"
            " their places while the list of cgroups is not complete",
        )

    def lost(self) -> Lost:
        """Switches that were not counted, by reason."""
        return self._open_table().lost()

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while kernel statistics are on."""
        return self._loaded.stats()

    def descriptors(self) -> tuple[int, ...]:
        """All that keeps the probe in the kernel."""
        return self._loaded.descriptors

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._table = None
        self._loaded.close()

    def _open_table(self) -> GroupTable:
        if self._table is None:
            raise Unavailable("the probe runqlat is closed", "open it again")
        return self._table


def decode(ids: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, Wait]:
    """Pure: rows of `struct hist`, sum first, to waits by cgroup id."""
    return {
        number: Wait(sum_ns=row[0], count=sum(row[1:]), slots=tuple(row[1:]))
        for number, row in zip(ids, rows, strict=True)
    }


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "runqlat.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["runqlat", "groups", "owners", "lost"],
        constants={"SLOTS": SLOTS, "SEATS": SEATS, "PLACES": places_for(cpus, 8 * (1 + SLOTS))},
        btf=btf,
    )


def open_waits(*, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> RunqLat:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    loaded = load(job(forms, possible_cpus(), btf), child_python=child_python)
    try:
        return RunqLat(loaded)
    except BaseException:
        loaded.close()
        raise
