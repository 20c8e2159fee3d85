"""Counts the threads of each cgroup by state, and computes load averages from the counts.
Runnable threads run or wait for a CPU; uninterruptible ones sleep in state D, `iowait` of them for a disk; zombies
are not counted. Loads follow the kernel's arithmetic (api/load_average.py), sampled every five seconds. The form `iterator`
makes the kernel write 16 bytes per thread; the form `proc` reads two files per thread, costs a hundred times as much
and stops beyond 20,000 threads.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from api.interfaces import ProbeReading, Unavailable
from api.load_average import SAMPLE_INTERVAL_NS, FixedPointLoad, advance_averages
from api.measurements import LoadAverages, ThreadStates
from probes import bpf, kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load

MAX_THREADS = 20_000
"""Half a second of CPU."""
_DEAD_STATES = frozenset("ZXx")


class ProcWalk:
    """A Census (`probes.threads`) of the threads below `proc`."""

    form = "proc"

    def __init__(self, proc: Path) -> None:
        self._proc = proc

    def count(self, live: Mapping[int, str]) -> dict[int, ThreadStates]:
        """Threads by cgroup id. Raises Unavailable where /proc cannot be listed, or lists too much."""
        ids = {path: number for number, path in live.items()}
        counts: Counter[tuple[int, str]] = Counter()
        for walked, thread in enumerate(self._threads()):
            if walked == MAX_THREADS:
                raise Unavailable(
                    f"more than {MAX_THREADS} threads: reading them one by one would take too long",
                    "use the form `iterator`, which needs Linux 5.8 and the capabilities BPF and PERFMON",
                )
            try:
                letter = thread_state((thread / "stat").read_bytes())
                number = ids.get(thread_cgroup((thread / "cgroup").read_bytes()))
            except OSError:  # it has ended
                continue
            if number is not None and letter not in _DEAD_STATES:
                counts[number, letter] += 1
        return {
            number: ThreadStates(
                runnable=counts[number, "R"],
                uninterruptible=counts[number, "D"],
                iowait=None,
                sleeping=sum(n for (owner, letter), n in counts.items() if owner == number and letter not in "RD"),
            )
            for number in {owner for owner, _ in counts}
        }

    def close(self) -> None:
        """Nothing is kept open."""

    def _threads(self) -> Iterator[Path]:
        try:
            processes = [path for path in self._proc.iterdir() if path.name.isdigit()]
        except OSError as error:
            raise Unavailable(f"{self._proc} cannot be listed: {error.strerror}", "mount proc there") from error
        for process in processes:
            try:
                yield from (process / "task").iterdir()
            except OSError:
                continue


def thread_state(stat: bytes) -> str:
    """The letter of /proc/TID/stat, behind a name that may hold anything; a text without one is a thread that has ended."""
    _, closing, rest = stat.rpartition(b") ")
    return chr(rest[0]) if closing and rest else "X"


def thread_cgroup(text: bytes) -> str:
    """The path in the cpu controller's hierarchy, or in the unified one, of /proc/TID/cgroup."""
    unified = ""
    for line in text.splitlines():
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if b"cpu" in controllers.split(b","):
            return os.fsdecode(path)
        if number == b"0" and not controllers:
            unified = os.fsdecode(path)
    return unified


FORMS = ("iterator", "proc")
"""In order of preference, which is that of their cost."""
REST_FACTOR = 49
"""For each nanosecond of counting, so many without: 2 % of one CPU at most."""
NO_THREADS = ThreadStates(runnable=0, uninterruptible=0, iowait=0, sleeping=0)
_RECORD = np.dtype([("cgroup_id", "u8"), ("kind", "u8")])
_KINDS = 4
_PROGRAM = Program("on_task", "task", "dtse_threads", iterator=True)
_ITERATOR = Form(
    name="iterator",
    typed=True,
    fields={
        **kernel_fields.TASK_CGROUP_FIELDS,
        "SEQUENCE": [("bpf_iter_meta", "seq", 8)],
        # Renamed and narrowed by 2f064a59a11f (Linux 5.14).
        "STATE": [("task_struct", "__state", 4), ("task_struct", "state", 8)],
        "EXIT_STATE": [("task_struct", "exit_state", 4)],
        "IN_IOWAIT": [("task_struct", "in_iowait", 0)],
    },
    programs=[_PROGRAM],
    constants={"TYPED": 1},
)


class ThreadCounter(Protocol):
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


class ThreadsProbe:
    """The running probe (`api.interfaces.Probe`). `clock` tells nanoseconds, for the load averages."""

    name = "threads"
    lost_events = None

    def __init__(self, census: ThreadCounter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._census: ThreadCounter | None = census
        self.form, self._clock = census.form, clock
        self._sampled_at_ns = clock()
        self._states: Mapping[int, ThreadStates] = {}
        self._rests_until_ns = 0
        self._averages: dict[int, FixedPointLoad] = {}
        self._loads: dict[int, LoadAverages] = {}

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Threads of the live cgroups now, and their loads from their first sample on. Raises Unavailable once closed."""
        if self._census is None:
            raise Unavailable("the probe threads is closed", "open it again")
        if self._clock() >= self._rests_until_ns:
            self._count(self._census, live, complete=complete)
        states, loads = self._states, self._loads
        return ProbeReading(
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

    def _count(self, census: ThreadCounter, live: Mapping[int, str], *, complete: bool) -> None:
        began = self._clock()
        states = census.count(live)
        ended = self._clock()
        self._rests_until_ns = ended + REST_FACTOR * (ended - began)
        samples = (ended - self._sampled_at_ns) // SAMPLE_INTERVAL_NS
        if samples > 0:
            self._sampled_at_ns += samples * SAMPLE_INTERVAL_NS
            self._sample(live, states, samples, complete=complete)
        self._states = dict.fromkeys(live, NO_THREADS) | states

    def _sample(
        self, live: Mapping[int, str], states: Mapping[int, ThreadStates], samples: int, *, complete: bool
    ) -> None:
        # Of an incomplete listing, those with threads are known to live.
        kept = live.keys() if complete else live.keys() | (self._averages.keys() & states.keys())
        new = FixedPointLoad()
        # A cgroup that was not there at the sample before has lived through none of those that were missed.
        self._averages = {
            number: advance_averages(
                self._averages.get(number, new),
                states.get(number, NO_THREADS),
                samples if number in self._averages else 1,
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
        constants=kernel_fields.unified_macro(),
        btf=btf,
        remedy="use Linux 5.8 or later",
    )


def open_threads(
    *,
    forms: Sequence[str] = FORMS[:1],
    child_python: Path = CHILD_PYTHON,
    btf: Path = VMLINUX,
    proc: Path = Path("/proc"),
) -> ThreadsProbe:
    """Start the probe in the first form that works. Raises Unavailable with reason and remedy if none does."""
    problem = Unavailable("the probe threads was given no form", "choose one of " + ", ".join(FORMS))
    for form in forms:
        try:
            return ThreadsProbe(
                ProcWalk(proc) if form == "proc" else TaskIterator(load(job(btf), child_python=child_python))
            )
        except Unavailable as error:
            problem = error
    raise problem
