"""Counts cycles, instructions and last-level cache misses per cgroup and CPU by hardware counters, unsampled.
Cycles are unhalted, instructions retired; a run on a CPU belongs to the cgroup of the task that leaves it, interrupts
included. Events are pinned, so nothing is multiplexed or estimated. CPUs that come online later are not counted, which
is reported as a problem.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from api.cpu import parse_cpu_list
from api.interfaces import ProbeReading, Unavailable
from api.snapshot import CpuCounters
from probes import bpf, kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Job, Loaded, Program, load_probe, tracepoint_forms
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap, Rows, possible_cpu_ids
from probes.per_cgroup_probe import PerCgroupProbe, cgroup_slots, table_job
from probes.perf_event import HARDWARE, PerfEvent, open_on_cpu, read_count
from probes.remedies import REMEDIES

FORMS = ("tp_btf", "raw_tp")
"""Forms in order of preference, which is the order of their cost."""
PerfEvents = Mapping[str, PerfEvent]
EVENTS: PerfEvents = {
    "cycles": PerfEvent(HARDWARE, 0),
    "instructions": PerfEvent(HARDWARE, 1),
    "misses": PerfEvent(HARDWARE, 3),
}
"""Events by the map that keeps them: PERF_COUNT_HW_CPU_CYCLES, _INSTRUCTIONS and _CACHE_MISSES."""
OPTIONAL_EVENT = "misses"
_NO_COUNTERS = (
    "use a machine with visible counters: hypervisors often hide them (KVM shows them with pmu=on, clouds mostly on their"
    " largest and metal sizes); cycles per instruction are not available otherwise"
)
_COUNTERS_BUSY = "end other users of the counters, such as perf, or the watchdog: sysctl kernel.nmi_watchdog=0"
_FIELDS: kernel_fields.KernelFields = {**kernel_fields.TASK_GROUP_FIELDS, "PID": [("task_struct", "pid", 4)]}
_PROGRAMS = [Program("on_switch", "sched_switch", "dtse_counters", arguments=kernel_fields.SCHED_SWITCH_ARGUMENTS)]
_FORMS = tracepoint_forms(_PROGRAMS, _FIELDS)


class CountersProbe(PerCgroupProbe):
    """The running probe (`api.interfaces.Probe`). Raises Unavailable if an event is not available on every online CPU."""

    name = "counters"

    def __init__(self, loaded: Loaded, events: PerfEvents) -> None:
        super().__init__(loaded, self.name, "runs on a CPU")
        self._cpus = possible_cpu_ids()
        self._runs = BpfMap(*loaded.maps["runs_on_cpu"], len(self._cpus))
        self._zero = CpuCounters(cycles=0, instructions=0, misses=0 if OPTIONAL_EVENT in events else None)
        for cpu in online_cpus():
            _install_events(loaded, events, cpu)
        # Runs before the events were installed had no counters to read, which is no loss.
        self._before = self._unread = self._read_runs()["unread"].tolist()
        self._without_counters = LostEventCounter()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return counters since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        runs = self._read_runs()
        self._unread = runs["unread"].tolist()
        self._without_counters.update(sum(self._unread) - sum(self._before))
        per_cpu = zip(self._cpus, runs["from"].tolist(), strict=True)
        return ProbeReading(
            counted.values_by_cgroup("counters", decode(counted.by_cgroup()), live, self._zero),
            {"cpu_counters": decode({cpu: row for cpu, row in per_cpu if any(row)})},
        )

    def problem(self) -> Unavailable | None:
        """Return runs without counters or without a slot in the table lately, as of the latest read."""
        unread = zip(self._cpus, self._unread, self._before, strict=True)
        cpus = ", ".join(str(cpu) for cpu, now, before in unread if now > before)
        return (
            self._without_counters.problem(
                f"runs were not counted: the counters of these CPUs cannot be read: {cpus}",
                "start the agent again once all CPUs are online",
            )
            or super().problem()
        )

    @property
    def lost_events(self) -> int | None:
        """Return the lost events of the table, and the runs without counters."""
        return (super().lost_events or 0) + self._without_counters.total

    def _read_runs(self) -> Rows:
        """Return struct run by CPU."""
        with self.reading():
            runs: Rows = self._runs.rows([0])[0]
        return runs


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, CpuCounters]:
    """Decode rows of `struct counts`, with or without misses."""
    return {
        number: CpuCounters(cycles=row[0], instructions=row[1], misses=row[2] if len(row) > 2 else None)
        for number, row in rows.items()
    }


def online_cpus(sys_root: Path = Path("/sys")) -> tuple[int, ...]:
    return parse_cpu_list((sys_root / "devices/system/cpu/online").read_text())


def countable_events(events: PerfEvents, cpu: int) -> PerfEvents:
    """Return the events that this CPU can count at the same time. Raises Unavailable if a required one is missing."""
    countable: dict[str, PerfEvent] = {}
    with ExitStack() as stack:
        for name, event in events.items():
            try:
                fd = open_on_cpu(event, cpu)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    return events  # loading the program gives a better error
                if name != OPTIONAL_EVENT:
                    raise Unavailable(
                        f"this machine has no hardware counters: {error.strerror}", _NO_COUNTERS
                    ) from error
                continue
            stack.callback(os.close, fd)
            counted = read_count(fd)
            if name != OPTIONAL_EVENT and not counted:
                raise _no_count(name, cpu, counted)
            if counted is not None:
                countable[name] = event
    return countable


def _no_count(name: str, cpu: int, counted: int | None) -> Unavailable:
    if counted is None:
        return Unavailable(f"all counters of CPU {cpu} are in use: none is left for {name}", _COUNTERS_BUSY)
    return Unavailable(f"the counter of {name} on CPU {cpu} does not grow", _NO_COUNTERS)


def _install_events(loaded: Loaded, events: PerfEvents, cpu: int) -> None:
    """Put the events of this CPU into their maps, which keep them open until the map is closed."""
    for name, event in events.items():
        try:
            fd = open_on_cpu(event, cpu)
        except OSError as error:
            raise Unavailable(
                f"{name} cannot be counted on CPU {cpu}: {error.strerror}", REMEDIES["perf_event"]
            ) from error
        try:
            if read_count(fd) is None:
                raise _no_count(name, cpu, None)
            bpf.update(loaded.maps[name][0], cpu.to_bytes(4, sys.byteorder), fd.to_bytes(4, sys.byteorder))
        finally:
            os.close(fd)


def job(forms: Sequence[str], cpus: Sequence[int], events: PerfEvents, btf: Path = VMLINUX) -> Job:
    """Return the loader's job; `cpus` are the numbers of all possible CPUs."""
    return table_job(
        "counters",
        [_FORMS[name] for name in forms],
        cgroup_slots(len(cpus), 8 * len(events)),
        maps=("runs_on_cpu", *events),
        constants={"CPUS": max(cpus) + 1, **({"MISSES": 1} if OPTIONAL_EVENT in events else {})},
        btf=btf,
    )


def open_counters(
    *, forms: Sequence[str] = FORMS, events: PerfEvents = EVENTS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> CountersProbe:
    """Start the probe in the first form that the kernel accepts.

    Raises Unavailable with reason and remedy if it accepts none, or if the machine has no such counters.
    """
    countable = countable_events(events, online_cpus()[0])
    return load_probe(
        job(forms, possible_cpu_ids(), countable, btf),
        partial(CountersProbe, events=countable),
        child_python=child_python,
    )
