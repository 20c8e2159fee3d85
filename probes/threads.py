"""Threads of each cgroup by what they do right now, and load averages made of that.

What the numbers mean: runnable threads run or wait for a CPU; uninterruptible ones (D in ps) sleep and cannot be woken by
signals, `iowait` of them for a disk; all others sleep. Zombies are not counted. Threads are those of the cgroup itself,
without the groups below. Loads are the kernel's arithmetic (`api.load`), sampled every five seconds since the probe first saw
the cgroup: what /proc/loadavg would show of a node that began then and had only these threads.

What it cannot see: anything between two reads, and threads outside of its pid namespace (in a pod: set hostPID). They are not
counted again before 50 times as long has passed as that took: a node of 100,000 threads, each some 450 ns, has numbers
up to some two seconds old, and cgroups that were made since are absent.

Forms: `iterator` has the kernel write 16 bytes for each thread, and costs nothing between reads. `proc` reads two files for
each thread, costs a hundred times as much, does not know `iowait`, and is tried only where somebody asks for it.
docs/adding-a-probe.md has what both cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from api.facts import Load, ThreadStates
from api.load import SAMPLE_NS, Averages, advance
from api.ports import Seen, Unavailable
from probes import bpf, fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load
from probes.threads_proc import ProcWalk

FORMS = ("iterator", "proc")
"""In order of preference, which is that of their cost."""
REST = 49
"""For each nanosecond of counting, so many without: 2 % of one CPU at most."""
NOBODY = ThreadStates(runnable=0, uninterruptible=0, iowait=0, sleeping=0)
_RECORD = np.dtype([("cgroup_id", "u8"), ("kind", "u8")])
_KINDS = 4
_PROGRAM = Program("on_task", "task", "dtse_threads", iterator=True)
_ITERATOR = Form(
    name="iterator",
    typed=True,
    fields={
        **fields.MEMBER,
        "SEQUENCE": [("bpf_iter_meta", "seq", 8)],
        # Renamed and narrowed by 2f064a59a11f (Linux 5.14).
        "STATE": [("task_struct", "__state", 4), ("task_struct", "state", 8)],
        "EXIT_STATE": [("task_struct", "exit_state", 4)],
        "IN_IOWAIT": [("task_struct", "in_iowait", 0)],
    },
    programs=[_PROGRAM],
    constants={"TYPED": 1},
)


class Census(Protocol):
    """Whoever can count the threads of every cgroup."""

    form: str

    def count(self, live: Mapping[int, str]) -> dict[int, ThreadStates]:
        """By cgroup id; a cgroup without threads may be absent. Raises Unavailable."""

    def close(self) -> None: ...


class TaskIterator:
    """A Census by the kernel's task iterator."""

    form = "iterator"

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def count(self, live: Mapping[int, str]) -> dict[int, ThreadStates]:  # noqa: ARG002 - sees every cgroup
        try:
            return decode(self._loaded.records(_PROGRAM.name))
        except OSError as error:
            raise Unavailable(f"the task iterator cannot be read: {error.strerror}", "start the agent again") from error

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while kernel statistics are on."""
        return self._loaded.stats()

    def close(self) -> None:
        self._loaded.close()


class Threads:
    """The running probe (`api.ports.Probe`). `clock` tells nanoseconds, for the load averages."""

    name = "threads"
    lost_events = None

    def __init__(self, census: Census, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._census: Census | None = census
        self.form, self._clock = census.form, clock
        self._sampled_at_ns = clock()
        self._states: Mapping[int, ThreadStates] = {}
        self._rests_until_ns = 0
        self._averages: dict[int, Averages] = {}
        self._loads: dict[int, Load] = {}

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Threads of the live cgroups now, and their loads from their first sample on. Raises Unavailable once closed."""
        if self._census is None:
            raise Unavailable("the probe threads is closed", "open it again")
        if self._clock() >= self._rests_until_ns:
            self._count(self._census, live, complete=complete)
        states, loads = self._states, self._loads
        return Seen(
            cgroups={
                number: {"threads_by_state": states[number], "load": loads[number]}
                if number in loads
                else {"threads_by_state": states[number]}
                for number in live
                if number in states
            }
        )

    def problem(self) -> Unavailable | None:
        """None: it sees all threads there are, or raises."""

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        if self._census is not None:
            self._census.close()
        self._census = None

    def _count(self, census: Census, live: Mapping[int, str], *, complete: bool) -> None:
        began = self._clock()
        states = census.count(live)
        ended = self._clock()
        self._rests_until_ns = ended + REST * (ended - began)
        samples = (ended - self._sampled_at_ns) // SAMPLE_NS
        if samples > 0:
            self._sampled_at_ns += samples * SAMPLE_NS
            self._sample(live, states, samples, complete=complete)
        self._states = dict.fromkeys(live, NOBODY) | states

    def _sample(
        self, live: Mapping[int, str], states: Mapping[int, ThreadStates], samples: int, *, complete: bool
    ) -> None:
        # Of an incomplete listing, those with threads are known to live.
        kept = live.keys() if complete else live.keys() | (self._averages.keys() & states.keys())
        new = Averages()
        # A cgroup that was not there at the sample before has lived through none of those that were missed.
        self._averages = {
            number: advance(
                self._averages.get(number, new), states.get(number, NOBODY), samples if number in self._averages else 1
            )
            for number in kept
        }
        self._loads = {number: averages.load() for number, averages in self._averages.items()}


def decode(raw: bytes) -> dict[int, ThreadStates]:
    """Pure: records of the iterator, added up by cgroup id."""
    records = np.frombuffer(raw, _RECORD)
    ids, inverse = np.unique(records["cgroup_id"], return_inverse=True)
    cells = inverse * _KINDS + records["kind"].astype(np.int64)
    counts = np.bincount(cells, minlength=len(ids) * _KINDS).reshape(-1, _KINDS)
    return {
        number: ThreadStates(
            runnable=runnable, uninterruptible=uninterruptible + iowait, iowait=iowait, sleeping=sleeping
        )
        for number, (runnable, uninterruptible, iowait, sleeping) in zip(ids.tolist(), counts.tolist(), strict=True)
    }


def job(btf: Path = VMLINUX) -> Job:
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "kernel.bpf.h", here / "threads.bpf.c"],
        forms=[_ITERATOR],
        maps=[],
        constants=fields.unified(),
        btf=btf,
        remedy="use Linux 5.8 or later",
    )


def open_threads(
    *,
    forms: Sequence[str] = FORMS[:1],
    child_python: Path = CHILD_PYTHON,
    btf: Path = VMLINUX,
    proc: Path = Path("/proc"),
) -> Threads:
    """Start the probe in the first form that works. Raises Unavailable with reason and remedy if none does."""
    problem = Unavailable("the probe threads was given no form", "choose one of " + ", ".join(FORMS))
    for form in forms:
        try:
            return Threads(
                ProcWalk(proc) if form == "proc" else TaskIterator(load(job(btf), child_python=child_python))
            )
        except Unavailable as error:
            problem = error
    raise problem
