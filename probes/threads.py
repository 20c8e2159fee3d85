"""Counts the threads of each cgroup by state, and computes load averages from the counts.
Runnable threads run or wait for a CPU; uninterruptible ones sleep in state D, `iowait` of them for a disk; zombies
are not counted. Loads use the kernel's arithmetic (probes/load_average.py), sampled every five seconds. The kernel
writes 16 bytes per thread, a hundredth of the cost of reading /proc. The iterator waits 50 times as long as a read
takes before the next one: with 100,000 threads the numbers are up to two seconds old, and younger cgroups are absent.
Threads are those of the cgroup without its descendants; threads outside of the pid namespace are not visible (in a
pod, set hostPID).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from api.interfaces import ProbeReading, Unavailable
from api.snapshot import LoadAverages, ThreadStates
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.load_average import SAMPLE_INTERVAL_NS, FixedPointLoad, advance_averages
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load

PAUSE_FACTOR = 49
"""Pause after counting, as a multiple of its duration: at most 2 % of one CPU."""
NO_THREADS = ThreadStates(runnable=0, uninterruptible=0, iowait=0, sleeping=0)
_RECORD = np.dtype([("cgroup_id", "u8"), ("kind", "u8")])
_KINDS = 4
ITERATOR_NAME = "dtse_threads"
"""Name of the program in the kernel."""
_PROGRAM = Program("on_task", "task", ITERATOR_NAME, iterator=True)
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


class ThreadsProbe:
    """The running probe (`api.interfaces.Probe`)."""

    name, form = "threads", _ITERATOR.name
    lost_events = None

    def __init__(
        self, records: Callable[[], bytes], detach: Callable[[], None], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`records` returns the iterator's output, `detach` frees it; `clock` returns monotonic nanoseconds, for the loads."""
        self._records: Callable[[], bytes] | None = records
        self._detach, self._clock = detach, clock
        self._sampled_at_ns = clock()
        self._states: Mapping[int, ThreadStates] = {}
        self._paused_until_ns = 0
        self._averages: dict[int, FixedPointLoad] = {}
        self._loads: dict[int, LoadAverages] = {}

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return the current threads of the live cgroups, and their loads. Raises Unavailable once closed."""
        if self._records is None:
            raise Unavailable("the probe threads is closed", "open it again")
        if self._clock() >= self._paused_until_ns:
            self._count(self._records, live, complete=complete)
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
        """Return None: `read` counts all threads or raises."""

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        if self._records is not None:
            self._detach()
        self._records = None

    def _count(self, records: Callable[[], bytes], live: Mapping[int, str], *, complete: bool) -> None:
        start_ns = self._clock()
        try:
            states = decode(records())
        except OSError as error:
            raise Unavailable(f"the task iterator cannot be read: {error.strerror}", "start the agent again") from error
        end_ns = self._clock()
        self._paused_until_ns = end_ns + PAUSE_FACTOR * (end_ns - start_ns)
        samples = (end_ns - self._sampled_at_ns) // SAMPLE_INTERVAL_NS
        if samples > 0:
            self._sampled_at_ns += samples * SAMPLE_INTERVAL_NS
            self._sample(live, states, samples, complete=complete)
        self._states = dict.fromkeys(live, NO_THREADS) | states

    def _sample(
        self, live: Mapping[int, str], states: Mapping[int, ThreadStates], samples: int, *, complete: bool
    ) -> None:
        # A cgroup that an incomplete listing lacks exists if it has threads.
        existing = live.keys() if complete else live.keys() | (self._averages.keys() & states.keys())
        new = FixedPointLoad()
        # A cgroup without a previous sample did not exist during the missed samples.
        self._averages = {
            number: advance_averages(
                self._averages.get(number, new),
                states.get(number, NO_THREADS),
                samples if number in self._averages else 1,
            )
            for number in existing
        }
        self._loads = {number: averages.load() for number, averages in self._averages.items()}


def decode(raw: bytes) -> dict[int, ThreadStates]:
    """Decode records of the iterator, summed by cgroup id."""
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
    """Return the loader's job."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "kernel.bpf.h", here / "threads.bpf.c"],
        forms=[_ITERATOR],
        maps=[],
        constants=kernel_fields.unified_macro(),
        btf=btf,
        remedy="use Linux 5.8 or later",
    )


def open_threads(*, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> ThreadsProbe:
    """Start the probe. Raises Unavailable with reason and remedy."""
    return make_probe(load(job(btf), child_python=child_python))


def make_probe(loaded: Loaded, clock: Callable[[], int] = time.monotonic_ns) -> ThreadsProbe:
    """Return the probe of a loaded iterator, which it closes."""
    return ThreadsProbe(partial(loaded.records, ITERATOR_NAME), loaded.close, clock)
