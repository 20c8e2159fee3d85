"""Counts cycles, instructions and last-level cache misses per cgroup and CPU by hardware counters, unsampled.
Cycles are unhalted, instructions retired; a run on a CPU belongs to the cgroup of the task that leaves it, interrupts
included. Events are pinned, so nothing is multiplexed or estimated; CPUs that come online later are not counted and
are reported as a problem.
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
from api.measurements import CpuCounters
from probes import bpf, kernel_fields
from probes.btf import VMLINUX
from probes.cgroup_table import cgroup_slots
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap, Rows, possible_cpu_ids
from probes.per_cgroup_probe import PerCgroupProbe
from probes.perf_event import HARDWARE, PerfEvent, open_on_cpu, read_count
from probes.remedies import REMEDIES

FORMS = ("tp_btf", "raw_tp")
"""In order of preference, which is that of their cost."""
PerfEvents = Mapping[str, PerfEvent]
EVENTS: PerfEvents = {
    "cycles": PerfEvent(HARDWARE, 0),
    "instructions": PerfEvent(HARDWARE, 1),
    "misses": PerfEvent(HARDWARE, 3),
}
"""What is counted, by the map that keeps it: PERF_COUNT_HW_CPU_CYCLES, _INSTRUCTIONS and _CACHE_MISSES."""
OPTIONAL_EVENT = "misses"
_NO_COUNTERS = (
    "use a machine that shows its counters: hypervisors often hide them (KVM shows them with pmu=on, clouds mostly on their"
    " largest and metal sizes); cycles per instruction cannot be had otherwise"
)
_COUNTERS_TAKEN = (
    "end whoever else holds counters on all CPUs, such as perf, or the watchdog: sysctl kernel.nmi_watchdog=0"
)
_FIELDS: kernel_fields.KernelFields = {**kernel_fields.TASK_GROUP_FIELDS, "PID": [("task_struct", "pid", 4)]}
_PROGRAMS = [Program("on_switch", "sched_switch", "dtse_counters", arguments=kernel_fields.SCHED_SWITCH_ARGUMENTS)]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
}


class CountersProbe(PerCgroupProbe):
    """The running probe (`api.interfaces.Probe`). Raises Unavailable where an event cannot be had on every online CPU."""

    name = "counters"

    def __init__(self, loaded: Loaded, events: PerfEvents) -> None:
        super().__init__(loaded, self.name, "turns")
        self._cpus = possible_cpu_ids()
        self._turns = BpfMap(*loaded.maps["turns"], len(self._cpus))
        self._nothing = CpuCounters(cycles=0, instructions=0, misses=0 if OPTIONAL_EVENT in events else None)
        for cpu in online_cpus():
            _install_events(loaded, events, cpu)
        # Until now there was nothing to read.
        self._before = self._unread = self._read_turns()["unread"].tolist()
        self._without_counters = LostEventCounter()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Turns since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        turns = self._read_turns()
        self._unread = turns["unread"].tolist()
        self._without_counters.update(sum(self._unread) - sum(self._before))
        per_cpu = zip(self._cpus, turns["from"].tolist(), strict=True)
        return ProbeReading(
            counted.values_by_cgroup("counters", decode(counted.by_cgroup()), live, self._nothing),
            {"cpu_counters": decode({cpu: row for cpu, row in per_cpu if any(row)})},
        )

    def problem(self) -> Unavailable | None:
        """Turns without counters or without a place in the table lately, as of the latest read."""
        turns = zip(self._cpus, self._unread, self._before, strict=True)
        cpus = ", ".join(str(cpu) for cpu, now, before in turns if now > before)
        return (
            self._without_counters.problem(
                f"turns on CPUs whose counters could not be read were not counted: {cpus}",
                "start the agent again once all CPUs are online",
            )
            or super().problem()
        )

    @property
    def lost_events(self) -> int | None:
        """Turns without counters, and those of every probe with a table."""
        return (super().lost_events or 0) + self._without_counters.total

    def _read_turns(self) -> Rows:
        """struct turn by CPU."""
        with self.reading():
            turns: Rows = self._turns.rows([0])[0]
        return turns


def decode(rows: Mapping[int, Sequence[int]]) -> dict[int, CpuCounters]:
    """Pure: rows of `struct counts`, with or without misses."""
    return {
        number: CpuCounters(cycles=row[0], instructions=row[1], misses=row[2] if len(row) > 2 else None)
        for number, row in rows.items()
    }


def online_cpus(sys_root: Path = Path("/sys")) -> tuple[int, ...]:
    return parse_cpu_list((sys_root / "devices/system/cpu/online").read_text())


def countable_events(events: PerfEvents, cpu: int) -> PerfEvents:
    """Those of the events that can be counted at the same time on this CPU. Raises Unavailable without an indispensable one."""
    found: dict[str, PerfEvent] = {}
    with ExitStack() as stack:
        for name, event in events.items():
            try:
                fd = open_on_cpu(event, cpu)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    return events  # the kernel says more about what is missing when the program is loaded
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
                found[name] = event
    return found


def _no_count(name: str, cpu: int, counted: int | None) -> Unavailable:
    if counted is None:
        return Unavailable(f"the counters of CPU {cpu} are all taken: none is left for {name}", _COUNTERS_TAKEN)
    return Unavailable(f"the counter of {name} stands still on CPU {cpu}", _NO_COUNTERS)


def _install_events(loaded: Loaded, events: PerfEvents, cpu: int) -> None:
    """Have the map keep the events of this CPU, for as long as the map's descriptor is open."""
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
    """What the child is asked to do; `cpus` are the numbers of all possible ones."""
    here = Path(__file__).parent
    constants = {"SLOTS": 2, "SEATS": 1, "PLACES": cgroup_slots(len(cpus), 8 * len(events)), "CPUS": max(cpus) + 1}
    return Job(
        sources=[here / "common.bpf.h", here / "counters.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["counters", "groups", "owners", "lost", "turns", *events],
        constants=constants | ({"MISSES": 1} if OPTIONAL_EVENT in events else {}),
        btf=btf,
    )


def open_counters(
    *, forms: Sequence[str] = FORMS, events: PerfEvents = EVENTS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> CountersProbe:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none, or
    the machine has no such counters."""
    found = countable_events(events, online_cpus()[0])
    return load_probe(
        job(forms, possible_cpu_ids(), found, btf), partial(CountersProbe, events=found), child_python=child_python
    )
