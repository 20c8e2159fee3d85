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
from typing import NamedTuple

import msgspec

from api.facts import Blame, Wait
from api.histograms import SLOTS
from api.ports import Unavailable
from probes import fields
from probes.btf import VMLINUX
from probes.groups import Owners, places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.maps import Map, cpu_numbers, possible_cpu_ids
from probes.pairs import NO_PAIRS, PARTS, Culprits, Pairs, pair_bits
from probes.tabled import Counted, Tabled, durations

NOTHING = Wait(sum_ns=0, count=0, slots=(0,) * SLOTS)
NOBODY = Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)
FORMS = ("tp_btf", "raw_tp", "classic")
"""In order of preference, which is that of their cost."""
SEATS = 1 << 17
"""Tasks that can be remembered between two events, by the low bits of their pid: 2 MiB."""
SPANS, STRETCHES = 16, 32
"""What each CPU remembers, to tell who had it during a wait: 2.5 KiB. Powers of two."""
_HOLD_BYTES = 40
_STAMPED_FIELDS = {
    **fields.GROUP,
    "LAST_QUEUED": [("task_struct", "sched_info.last_queued", 8)],
    "CFS_RQ": [("task_struct", "se.cfs_rq", 8)],
    "RQ": [("cfs_rq", "rq", 8)],
    "RQ_CLOCK": [("rq", "clock", 8)],
    "PID": [("task_struct", "pid", 4)],
    "PCOUNT": [("task_struct", "sched_info.pcount", 8)],
    "RUN_DELAY": [("task_struct", "sched_info.run_delay", 8)],
    "ON_RQ": [("task_struct", "on_rq", 4)],
}
_BLAME_FIELDS = {"PRIO": [("task_struct", "prio", 4)], "RQ_CPU": [("rq", "cpu", 4)]}
_THROTTLE = {
    "THROTTLED_SINCE": [("cfs_rq", "throttled_clock_self", 8)],
    "THROTTLED_NS": [("cfs_rq", "throttled_clock_self_time", 8)],
    # All that there is before 677ea015f231 (Linux 6.6), and nothing without CONFIG_CFS_BANDWIDTH.
    "THROTTLE_COUNT": [("cfs_rq", "throttle_count", 4)],
    # Tasks are throttled one by one since Linux 6.18.
    "BY_TASK": [("task_struct", "throttled", 1)],
}
# Sleeping tasks may stay queued since 152e11f6df29 (Linux 6.12).
_DELAYED_DEQUEUE = {"DELAYED": [("task_struct", "se.sched_delayed", 1)]}
_CLASSIC_FIELDS = {
    **fields.GROUP,
    "PID": [("task_struct", "pid", 4)],
    "ON_CPU": [("task_struct", "on_cpu", 4)],
    # Renamed and narrowed by 2f064a59a11f (Linux 5.14).
    "STATE": [("task_struct", "__state", 4), ("task_struct", "state", 8)],
}
_SWITCH = Program("on_switch", "sched_switch", "dtse_runqlat", arguments=fields.SWITCH)
_MOVE = Program("on_migrate", "sched_migrate_task", "dtse_rql_move", arguments=fields.TASK)
_STAMPED = [_SWITCH, msgspec.structs.replace(_MOVE, needs="DELAYED")]
_CLASSIC = [
    _SWITCH,
    Program("on_wakeup", "sched_wakeup", "dtse_rql_wakeup", arguments=fields.TASK),
    Program("on_wakeup", "sched_wakeup_new", "dtse_rql_new", arguments=fields.TASK),
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


class _Reading(NamedTuple):
    """Everything that the kernel side has, at one moment."""

    live: Mapping[int, str]
    pairs: Pairs
    owners: Owners
    counted: Counted


class RunqLat(Tabled):
    """The running probe: a WaitSource (`api.ports`) with what a person may want to know beside it."""

    def __init__(self, loaded: Loaded) -> None:
        self._culprits = Culprits(loaded) if "pairs" in loaded.maps else None
        super().__init__(loaded, "runqlat", "switches", also=("holds",) if self._culprits else ())
        self._latest: _Reading | None = None
        self._cpus = possible_cpu_ids()
        self._timelines = Map(*loaded.maps["timelines"], cpus=1) if self._culprits else None

    def read(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, Wait]:
        """Waits by cgroup id since the probe was opened; with all are those of cgroups that `live` does not have.

        Live cgroups without a place in the table have not waited yet; but where any cgroup found no place since the
        listing before this one, it may be theirs that was lost, and they are absent. Raises Unavailable once closed.
        """
        found = self._read(live, wanted, complete=complete)
        self._latest = found if wanted is None else None
        counted = found.counted
        waits = decode(counted.ids, counted.rows.tolist())
        if counted.certain:
            for number in live if wanted is None else live.keys() & wanted:
                waits.setdefault(number, NOTHING)
        return waits

    def blames(self, live: Mapping[int, str], *, complete: bool = True) -> Mapping[int, Blame]:
        """Whom those waits are to blame on, by cgroup id: exactly those of the latest `read` where that had the same `live`.

        Cgroups without a place as for `read`; culprits that `live` does not have are not named. Raises Unavailable once
        closed, and where the form does not know (`blaming`).
        """
        with self.reading():
            if self._culprits is None:
                raise Unavailable(
                    f"the form {self.form} does not tell who had the CPU", "use the form tp_btf or raw_tp"
                )
        latest, self._latest = self._latest, None
        found = latest if latest and latest.live is live else self._read(live, None, complete=complete)
        counted = found.counted
        blames = self._culprits.settle(found.pairs, found.owners, counted.ids, counted.rows, live)
        if counted.certain:
            for number in live:
                blames.setdefault(number, NOBODY)
        return blames

    def by_cpu(self) -> Mapping[int, Wait]:
        """Time waited for each CPU and waits that ended there, as /proc/schedstat has them: what a task had waited elsewhere
        before it was moved is that CPU's. Empty where nobody tells who had the CPU. Raises Unavailable once closed."""
        with self.reading():
            if self._timelines is None:
                return {}
            lines = self._timelines.rows(self._cpus)
            counted = zip(self._cpus, lines["waited_ns"].tolist(), lines["waits"].tolist(), strict=True)
        return {cpu: Wait(sum_ns=ns, count=waits) for cpu, ns, waits in counted}

    @property
    def blaming(self) -> bool:
        """Whether the program that runs also tells who had the CPU."""
        return self._culprits is not None

    def blame_problem(self) -> Unavailable | None:
        """What is wrong with `blames`, as of the latest read."""
        crowded = None if self._culprits is None else self._culprits.problem()
        return crowded or self.problem()

    @property
    def lost_blames(self) -> int | None:
        """Parts of waits that count as other because they found no place, as of the latest read."""
        return None if self._culprits is None else self._culprits.without_place.total

    def descriptors(self) -> tuple[int, ...]:
        """All that keeps the probe in the kernel."""
        return self._loaded.descriptors

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._latest = None
        if self._culprits is not None:
            self._culprits.close()
        super().close()

    def _read(self, live: Mapping[int, str], wanted: Collection[int] | None, *, complete: bool) -> _Reading:
        with self.reading() as table:
            # Pairs first: then every tag that is found there and not in the table is of a cgroup that is gone.
            pairs = self._culprits.read() if self._culprits and wanted is None else NO_PAIRS
            counted = self.count(live, wanted, complete=complete)
            return _Reading(live, pairs, table.owners, counted)


def decode(ids: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, Wait]:
    """Pure: rows of `struct hist`, sum first, to waits by cgroup id."""
    return {number: durations(row[: 1 + SLOTS]) for number, row in zip(ids, rows, strict=True)}


def _blaming(form: Form) -> Form:
    return msgspec.structs.replace(
        form,
        fields={**form.fields, **_BLAME_FIELDS},
        optional={**form.optional, **_THROTTLE},
        constants={**form.constants, "BLAME": 1, "PAIRS": 1},
        programs=[_SWITCH, _MOVE],
        maps=("pairs", "crowded", "holds", "timelines"),
    )


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX, *, blame: bool = False) -> Job:
    """What the child is asked to do; CPU numbers are below `cpus`. With `blame`, forms that can tell who had the CPU are tried
    with it and then without."""
    here = Path(__file__).parent
    tried: list[Form] = []
    for name in forms:
        if blame and name != "classic":
            tried.append(_blaming(_FORMS[name]))
        tried.append(_FORMS[name])
    value_bytes = 8 * (1 + SLOTS) + (8 * PARTS + _HOLD_BYTES if blame else 0)
    return Job(
        sources=[here / name for name in ("common.bpf.h", "pairs.bpf.h", "blame.bpf.h", "runqlat.bpf.c")],
        forms=tried,
        maps=["runqlat", "groups", "owners", "lost"],
        constants={
            "SLOTS": SLOTS,
            "SEATS": SEATS,
            "PLACES": places_for(cpus, value_bytes),
            "SPANS": SPANS,
            "STRETCHES": STRETCHES,
            "PAIR_BITS": pair_bits(cpus),
            "CPUS": cpus,
        },
        btf=btf,
    )


def open_waits(
    *, forms: Sequence[str] = FORMS, blame: bool = True, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> RunqLat:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return opened(job(forms, cpu_numbers(), btf, blame=blame), RunqLat, child_python=child_python)
