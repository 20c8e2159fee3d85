"""Measures run-queue latency per cgroup: how long tasks are runnable before they get a CPU, unsampled.
The forms tp_btf and raw_tp read the scheduler's own run_delay and pcount (/proc/PID/schedstat) on the run queue's
clock, so time throttled by a quota counts as waiting. A task belongs to the cgroup whose CPU weight it has;
autogroups belong to the root. A wait that still goes on is not counted. The clock stands still between a preempting
wakeup and the switch it causes, so such a wait counts as 0; the classic form stamps wakeups itself and shows those
microseconds (docs/adding-a-probe.md compares both).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.histogram import SLOT_COUNT
from api.interfaces import Unavailable
from api.measurements import Blame, RunqLatency
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.cgroup_pairs import BLAME_PARTS, NO_PAIR_ENTRIES, PairEntries, RunqAggressors, pair_bits
from probes.cgroup_table import CgroupTags, cgroup_slots
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe
from probes.maps import BpfMap, cpu_id_limit, possible_cpu_ids
from probes.per_cgroup_probe import CgroupCounters, PerCgroupProbe, decode_durations

NO_LATENCY = RunqLatency(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)
NO_BLAME = Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)
FORMS = ("tp_btf", "raw_tp", "classic")
"""In order of preference, which is that of their cost."""
TASK_SLOTS = 1 << 17
"""Tasks that can be remembered between two events, by the low bits of their pid: 2 MiB."""
TIMELINE_SPANS, TIMELINE_STRETCHES = 16, 32
"""What each CPU remembers, to tell who had it during a wait: 2.5 KiB. Powers of two."""
_HOLD_BYTES = 40
_STAMPED_FIELDS = {
    **kernel_fields.TASK_GROUP_FIELDS,
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
    **kernel_fields.TASK_GROUP_FIELDS,
    "PID": [("task_struct", "pid", 4)],
    "ON_CPU": [("task_struct", "on_cpu", 4)],
    # Renamed and narrowed by 2f064a59a11f (Linux 5.14).
    "STATE": [("task_struct", "__state", 4), ("task_struct", "state", 8)],
}
_SWITCH = Program("on_switch", "sched_switch", "dtse_runqlat", arguments=kernel_fields.SCHED_SWITCH_ARGUMENTS)
_MOVE = Program("on_migrate", "sched_migrate_task", "dtse_rql_move", arguments=kernel_fields.TASK_ARGUMENTS)
_STAMPED = [_SWITCH, msgspec.structs.replace(_MOVE, needs="DELAYED")]
_CLASSIC = [
    _SWITCH,
    Program("on_wakeup", "sched_wakeup", "dtse_rql_wakeup", arguments=kernel_fields.TASK_ARGUMENTS),
    Program("on_wakeup", "sched_wakeup_new", "dtse_rql_new", arguments=kernel_fields.TASK_ARGUMENTS),
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
    pairs: PairEntries
    owners: CgroupTags
    counted: CgroupCounters


class RunqLatencyProbe(PerCgroupProbe):
    """The running probe: a WaitSource (`api.interfaces`) with what a person may want to know beside it."""

    def __init__(self, loaded: Loaded) -> None:
        self._culprits = RunqAggressors(loaded) if "pairs" in loaded.maps else None
        super().__init__(loaded, "runqlat", "switches", also=("holds",) if self._culprits else ())
        self._latest: _Reading | None = None
        self._cpus = possible_cpu_ids()
        self._timelines = BpfMap(*loaded.maps["timelines"], cpus=1) if self._culprits else None

    def read(
        self, live: Mapping[int, str], wanted: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, RunqLatency]:
        """Waits by cgroup id since the probe was opened; with all are those of cgroups that `live` does not have.

        Live cgroups without a place in the table have not waited yet; but where any cgroup found no place since the
        listing before this one, it may be theirs that was lost, and they are absent. Raises Unavailable once closed.
        """
        found = self._read(live, wanted, complete=complete)
        self._latest = found if wanted is None else None
        counted = found.counted
        waits = decode(counted.ids, counted.rows.tolist())
        if counted.nothing_lost:
            for number in live if wanted is None else live.keys() & wanted:
                waits.setdefault(number, NO_LATENCY)
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
        if counted.nothing_lost:
            for number in live:
                blames.setdefault(number, NO_BLAME)
        return blames

    def by_cpu(self) -> Mapping[int, RunqLatency]:
        """Time waited for each CPU and waits that ended there, as /proc/schedstat has them: what a task had waited elsewhere
        before it was moved is that CPU's. Empty where nobody tells who had the CPU. Raises Unavailable once closed."""
        with self.reading():
            if self._timelines is None:
                return {}
            lines = self._timelines.rows(self._cpus)
            counted = zip(self._cpus, lines["waited_ns"].tolist(), lines["waits"].tolist(), strict=True)
        return {cpu: RunqLatency(sum_ns=ns, count=waits) for cpu, ns, waits in counted}

    @property
    def has_blame(self) -> bool:
        """Whether the program that runs also tells who had the CPU."""
        return self._culprits is not None

    def blame_problem(self) -> Unavailable | None:
        """What is wrong with `blames`, as of the latest read."""
        crowded = None if self._culprits is None else self._culprits.problem()
        return crowded or self.problem()

    @property
    def lost_blame_parts(self) -> int | None:
        """Parts of waits that count as other because they found no place, as of the latest read."""
        return None if self._culprits is None else self._culprits.overflowed_events.total

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
            pairs = self._culprits.read() if self._culprits and wanted is None else NO_PAIR_ENTRIES
            counted = self.count(live, wanted, complete=complete)
            return _Reading(live, pairs, table.owners, counted)


def decode(ids: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, RunqLatency]:
    """Pure: rows of `struct hist`, sum first, to waits by cgroup id."""
    return {number: decode_durations(row[: 1 + SLOT_COUNT]) for number, row in zip(ids, rows, strict=True)}


def _with_blame(form: Form) -> Form:
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
            tried.append(_with_blame(_FORMS[name]))
        tried.append(_FORMS[name])
    value_bytes = 8 * (1 + SLOT_COUNT) + (8 * BLAME_PARTS + _HOLD_BYTES if blame else 0)
    return Job(
        sources=[here / name for name in ("common.bpf.h", "pairs.bpf.h", "blame.bpf.h", "runqlat.bpf.c")],
        forms=tried,
        maps=["runqlat", "groups", "owners", "lost"],
        constants={
            "SLOTS": SLOT_COUNT,
            "SEATS": TASK_SLOTS,
            "PLACES": cgroup_slots(cpus, value_bytes),
            "SPANS": TIMELINE_SPANS,
            "STRETCHES": TIMELINE_STRETCHES,
            "PAIR_BITS": pair_bits(cpus),
            "CPUS": cpus,
        },
        btf=btf,
    )


def open_runqlat(
    *, forms: Sequence[str] = FORMS, blame: bool = True, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> RunqLatencyProbe:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return load_probe(job(forms, cpu_id_limit(), btf, blame=blame), RunqLatencyProbe, child_python=child_python)
