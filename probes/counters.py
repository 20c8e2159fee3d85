"""Cycles, instructions and last-level cache misses per cgroup and CPU, by the CPUs' own counters: every turn, unsampled.

What the numbers mean: unhalted cycles and retired instructions, in user space, kernel and hypervisor, of the turns of a
cgroup's tasks, interrupts in between included. Cycles by instructions is how well a workload gets on with caches and memory
that it shares (CPI). Misses are PERF_COUNT_HW_CACHE_MISSES, where a third counter is free. A task belongs to the cgroup whose
CPU weight it has, when it leaves the CPU. What is given by CPU is all that it counted, the idle task included.

What it cannot see: a turn that is still going on, so the numbers of a task that nobody interrupts for seconds come late and
at once; and CPUs that came online after the start, whose turns `problem` tells of. The events are pinned, so they are never
multiplexed and nothing is estimated; they leave as many counters fewer to others, and take none from those who pinned first.

It costs no descriptors beyond the probe's own: the map keeps the events. docs/adding-a-probe.md says what a switch costs.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from api.cpus import parse_cpu_list
from api.facts import CpuCounters
from api.ports import Seen, Unavailable
from probes import bpf, fields
from probes.btf import VMLINUX
from probes.groups import places_for
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.losses import Losses
from probes.maps import Map, Rows, possible_cpu_ids
from probes.perf_event import HARDWARE, Event, count, open_on_cpu
from probes.remedies import REMEDIES
from probes.tabled import Tabled

FORMS = ("tp_btf", "raw_tp")
"""In order of preference, which is that of their cost."""
Events = Mapping[str, Event]
EVENTS: Events = {"cycles": Event(HARDWARE, 0), "instructions": Event(HARDWARE, 1), "misses": Event(HARDWARE, 3)}
"""What is counted, by the map that keeps it: PERF_COUNT_HW_CPU_CYCLES, _INSTRUCTIONS and _CACHE_MISSES."""
OPTIONAL = "misses"
_NO_COUNTERS = (
    "use a machine that shows its counters: hypervisors often hide them (KVM shows them with pmu=on, clouds mostly on their"
    " largest and metal sizes); cycles per instruction cannot be had otherwise"
)
_TAKEN = "end whoever else holds counters on all CPUs, such as perf, or the watchdog: sysctl kernel.nmi_watchdog=0"
_FIELDS: fields.Fields = {**fields.GROUP, "PID": [("task_struct", "pid", 4)]}
_PROGRAMS = [Program("on_switch", "sched_switch", "dtse_counters", arguments=fields.SWITCH)]
_FORMS = {
    "tp_btf": Form(name="tp_btf", typed=True, fields=_FIELDS, programs=_PROGRAMS, constants={"TYPED": 1}),
    "raw_tp": Form(name="raw_tp", typed=False, fields=_FIELDS, programs=_PROGRAMS),
}


class Counters(Tabled):
    """The running probe (`api.ports.Probe`). Raises Unavailable where an event cannot be had on every online CPU."""

    name = "counters"

    def __init__(self, loaded: Loaded, events: Events) -> None:
        super().__init__(loaded, self.name, "turns")
        self._cpus = possible_cpu_ids()
        self._turns = Map(*loaded.maps["turns"], len(self._cpus))
        self._nothing = CpuCounters(cycles=0, instructions=0, misses=0 if OPTIONAL in events else None)
        for cpu in online_cpus():
            _put(loaded, events, cpu)
        # Until now there was nothing to read.
        self._before = self._unread = self._read_turns()["unread"].tolist()
        self._without_counters = Losses()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Turns since the probe was opened. Raises Unavailable once closed."""
        counted = self.count(live, complete=complete)
        turns = self._read_turns()
        self._unread = turns["unread"].tolist()
        self._without_counters.update(sum(self._unread) - sum(self._before))
        per_cpu = zip(self._cpus, turns["from"].tolist(), strict=True)
        return Seen(
            counted.filled("counters", decode(counted.by_cgroup()), live, self._nothing),
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


def countable(events: Events, cpu: int) -> Events:
    """Those of the events that can be counted at the same time on this CPU. Raises Unavailable without an indispensable one."""
    found: dict[str, Event] = {}
    with ExitStack() as stack:
        for name, event in events.items():
            try:
                fd = open_on_cpu(event, cpu)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    return events  # the kernel says more about what is missing when the program is loaded
                if name != OPTIONAL:
                    raise Unavailable(
                        f"this machine has no hardware counters: {error.strerror}", _NO_COUNTERS
                    ) from error
                continue
            stack.callback(os.close, fd)
            counted = count(fd)
            if name != OPTIONAL and not counted:
                raise _useless(name, cpu, counted)
            if counted is not None:
                found[name] = event
    return found


def _useless(name: str, cpu: int, counted: int | None) -> Unavailable:
    if counted is None:
        return Unavailable(f"the counters of CPU {cpu} are all taken: none is left for {name}", _TAKEN)
    return Unavailable(f"the counter of {name} stands still on CPU {cpu}", _NO_COUNTERS)


def _put(loaded: Loaded, events: Events, cpu: int) -> None:
    """Have the map keep the events of this CPU, for as long as the map's descriptor is open."""
    for name, event in events.items():
        try:
            fd = open_on_cpu(event, cpu)
        except OSError as error:
            raise Unavailable(
                f"{name} cannot be counted on CPU {cpu}: {error.strerror}", REMEDIES["perf_event"]
            ) from error
        try:
            if count(fd) is None:
                raise _useless(name, cpu, None)
            bpf.update(loaded.maps[name][0], cpu.to_bytes(4, sys.byteorder), fd.to_bytes(4, sys.byteorder))
        finally:
            os.close(fd)


def job(forms: Sequence[str], cpus: Sequence[int], events: Events, btf: Path = VMLINUX) -> Job:
    """What the child is asked to do; `cpus` are the numbers of all possible ones."""
    here = Path(__file__).parent
    constants = {"SLOTS": 2, "SEATS": 1, "PLACES": places_for(len(cpus), 8 * len(events)), "CPUS": max(cpus) + 1}
    return Job(
        sources=[here / "common.bpf.h", here / "counters.bpf.c"],
        forms=[_FORMS[name] for name in forms],
        maps=["counters", "groups", "owners", "lost", "turns", *events],
        constants=constants | ({"MISSES": 1} if OPTIONAL in events else {}),
        btf=btf,
    )


def open_counters(
    *, forms: Sequence[str] = FORMS, events: Events = EVENTS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> Counters:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none, or
    the machine has no such counters."""
    found = countable(events, online_cpus()[0])
    return opened(
        job(forms, possible_cpu_ids(), found, btf), partial(Counters, events=found), child_python=child_python
    )
