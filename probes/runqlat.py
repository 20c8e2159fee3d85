"""Measures run-queue latency per cgroup: how long tasks are runnable before they get a CPU, unsampled.
The forms tp_btf and raw_tp read the scheduler's own run_delay and pcount (/proc/PID/schedstat) on the run queue's
clock, so time throttled by a quota counts as waiting. A task belongs to the cgroup whose CPU weight it has;
autogroups belong to the root. A wait counts when it ends. The clock stands still between a preempting wakeup and the
switch that it causes, so such a wait counts as 0; the classic form stamps wakeups itself and measures those microseconds
(docs/adding-a-probe.md compares both).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.histogram import SLOT_COUNT
from api.interfaces import Unavailable
from api.snapshot import Blame, RunqLatency
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.cgroup_pairs import BLAME_PARTS, NO_PAIR_ENTRIES, PairEntries, RunqAggressors, pair_bits
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.maps import BpfMap, cpu_id_limit, possible_cpu_ids
from probes.per_cgroup_probe import (
    CgroupCounters,
    CgroupTags,
    PerCgroupProbe,
    cgroup_slots,
    decode_durations,
    table_job,
)

NO_LATENCY = RunqLatency(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)
NO_BLAME = Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)
FORMS = ("tp_btf", "raw_tp", "classic")
"""Forms in order of preference, which is the order of their cost."""
TASK_SLOTS = 1 << 17
"""Number of tasks whose state is kept between two events, by the low bits of their pid: 2 MiB."""
TIMELINE_SPANS, TIMELINE_STRETCHES = 16, 32
"""History of runners of each CPU, in spans and condensed stretches: 2.5 KiB. Powers of two."""
_LAST_THROTTLE_BYTES = 40
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
    # The only field before 677ea015f231 (Linux 6.6); absent without CONFIG_CFS_BANDWIDTH.
    "THROTTLE_COUNT": [("cfs_rq", "throttle_count", 4)],
    # Since Linux 6.18 each task is throttled by itself.
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
    **tracepoint_forms(_STAMPED, _STAMPED_FIELDS, _DELAYED_DEQUEUE),
    "classic": Form(name="classic", typed=False, fields=_CLASSIC_FIELDS, programs=_CLASSIC, constants={"CLASSIC": 1}),
}


class _Reading(NamedTuple):
    """Contents of all maps of the probe at one read."""

    live: Mapping[int, str]
    pairs: PairEntries
    tags: CgroupTags
    counters: CgroupCounters


class RunqLatencyProbe(PerCgroupProbe):
    """The running probe (`api.interfaces.RunqLatencySource`), with the blame of its waits."""

    def __init__(self, loaded: Loaded) -> None:
        self._aggressors = RunqAggressors(loaded) if "pairs" in loaded.maps else None
        super().__init__(loaded, "runqlat", "switches", also=("last_throttles",) if self._aggressors else ())
        self._latest: _Reading | None = None
        self._cpus = possible_cpu_ids()
        self._timelines = BpfMap(*loaded.maps["timelines"], cpus=1) if self._aggressors else None

    def read(
        self, live: Mapping[int, str], cgroup_ids: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, RunqLatency]:
        """Return latency by cgroup id since the probe was opened; without `cgroup_ids` also of cgroups that `live` lacks.

        Live cgroups without a slot have not waited yet and get zeros. If any cgroup was refused a slot since the previous
        listing, it may be one of them, and they are absent. Raises Unavailable once closed.
        """
        reading = self._read(live, cgroup_ids, complete=complete)
        self._latest = reading if cgroup_ids is None else None
        counters = reading.counters
        latencies = decode(counters.ids, counters.rows.tolist())
        if counters.nothing_lost:
            for number in live if cgroup_ids is None else live.keys() & cgroup_ids:
                latencies.setdefault(number, NO_LATENCY)
        return latencies

    def read_blame(self, live: Mapping[int, str], *, complete: bool = True) -> Mapping[int, Blame]:
        """Return the parts of those waits by cgroup id, from the latest `read` if it had the same `live`.

        Cgroups without a slot are handled as in `read`; only aggressors in `live` are named. Raises Unavailable once
        closed, and if the form does not measure blame (`has_blame`).
        """
        with self.reading():
            if self._aggressors is None:
                raise Unavailable(f"the form {self.form} does not measure blame", "use the form tp_btf or raw_tp")
        latest, self._latest = self._latest, None
        reading = latest if latest and latest.live is live else self._read(live, None, complete=complete)
        counters = reading.counters
        blame = self._aggressors.blame_by_victim(reading.pairs, reading.tags, counters.ids, counters.rows, live)
        if counters.nothing_lost:
            for number in live:
                blame.setdefault(number, NO_BLAME)
        return blame

    def by_cpu(self) -> Mapping[int, RunqLatency]:
        """Return time waited on each CPU and the number of waits that ended there, as in /proc/schedstat.

        The part of a wait before the task was moved counts for the CPU that it left. Empty if the form does not measure
        blame. Raises Unavailable once closed.
        """
        with self.reading():
            if self._timelines is None:
                return {}
            lines = self._timelines.rows(self._cpus)
            rows = zip(self._cpus, lines["waited_ns"].tolist(), lines["waits"].tolist(), strict=True)
        return {cpu: RunqLatency(sum_ns=ns, count=waits) for cpu, ns, waits in rows}

    @property
    def has_blame(self) -> bool:
        """Return whether the loaded form measures blame."""
        return self._aggressors is not None

    def blame_problem(self) -> Unavailable | None:
        """Return the problem of `read_blame`, as of the latest read."""
        overflow = None if self._aggressors is None else self._aggressors.problem()
        return overflow or self.problem()

    @property
    def lost_blame_parts(self) -> int | None:
        """Return the number of parts of waits that count as other because the table of pairs is full, as of the latest read."""
        return None if self._aggressors is None else self._aggressors.overflowed_events.total

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that keep the probe in the kernel."""
        return self._loaded.descriptors

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._latest = None
        if self._aggressors is not None:
            self._aggressors.close()
        super().close()

    def _read(self, live: Mapping[int, str], cgroup_ids: Collection[int] | None, *, complete: bool) -> _Reading:
        with self.reading() as table:
            # Pairs first: a tag of a pair that is missing from the table read later then belongs to a removed cgroup.
            pairs = self._aggressors.read() if self._aggressors and cgroup_ids is None else NO_PAIR_ENTRIES
            counters = self.count(live, cgroup_ids, complete=complete)
            return _Reading(live, pairs, table.tags, counters)


def decode(ids: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, RunqLatency]:
    """Decode rows of `struct hist`, sum first, by cgroup id."""
    return {number: decode_durations(row[: 1 + SLOT_COUNT]) for number, row in zip(ids, rows, strict=True)}


def _with_blame(form: Form) -> Form:
    return msgspec.structs.replace(
        form,
        fields={**form.fields, **_BLAME_FIELDS},
        optional={**form.optional, **_THROTTLE},
        constants={**form.constants, "BLAME": 1, "PAIRS": 1},
        programs=[_SWITCH, _MOVE],
        maps=("pairs", "pairs_overflow", "last_throttles", "timelines"),
    )


def job(forms: Sequence[str], cpus: int, btf: Path = VMLINUX, *, blame: bool = False) -> Job:
    """Return the loader's job; CPU numbers are below `cpus`. With `blame`, each form is tried with it first, then without."""
    variants: list[Form] = []
    for name in forms:
        if blame and name != "classic":
            variants.append(_with_blame(_FORMS[name]))
        variants.append(_FORMS[name])
    value_bytes = 8 * (1 + SLOT_COUNT) + (8 * BLAME_PARTS + _LAST_THROTTLE_BYTES if blame else 0)
    return table_job(
        "runqlat",
        variants,
        cgroup_slots(cpus, value_bytes),
        headers=("cgroup_pairs.bpf.h", "blame.bpf.h"),
        task_slots=TASK_SLOTS,
        constants={
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
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, cpu_id_limit(), btf, blame=blame), RunqLatencyProbe, child_python=child_python)
