"""Reads from the scheduler's tracepoint how long the threads of a process run without a pause."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.interfaces import Unavailable

TRACEFS = Path("/sys/kernel/tracing")
BUFFER_KIB = 4096
"""Of each CPU: some 40,000 switches."""
_SWITCH = re.compile(
    r"\[(?P<cpu>\d+)\]\s.*?\s(?P<at>\d+\.\d+): sched_switch: .*?prev_pid=(?P<before>\d+) prev_prio=\d+ "
    r"prev_state=(?P<state>\S+) ==> .*?next_pid=(?P<next>\d+) next_prio="
)


class Switch(NamedTuple):
    """One context switch."""

    at_us: int
    cpu: int
    previous: int
    """Id of the thread that ran until then."""
    preempted: bool
    """Whether the previous thread could have gone on."""
    following: int


class LongestRun(msgspec.Struct, frozen=True):
    """The longest uses of a CPU by one thread in one second, in milliseconds."""

    run_ms: float
    """Between two switches."""
    work_ms: float
    """CPU time between two sleeps: what one run is where nothing else wants the CPU."""


def parse_switches(trace: str) -> list[Switch]:
    """Parse the text of a tracefs file `trace`, in its order."""
    return [
        Switch(
            at_us=round(float(match["at"]) * 1e6),
            cpu=int(match["cpu"]),
            previous=int(match["before"]),
            preempted=match["state"].startswith("R"),
            following=int(match["next"]),
        )
        for match in _SWITCH.finditer(trace)
    ]


def longest_runs(switches: Sequence[Switch], threads: Collection[int]) -> list[LongestRun]:
    """Return the longest run and work of these threads in each second in which one of them ran. A run counts in the second in
    which it ends; one that began before the trace does not count."""
    began_us: dict[int, int] = {}
    worked_us: dict[int, int] = {}
    by_second: dict[int, tuple[int, int]] = {}
    for switch in switches:
        thread = switch.previous
        if thread in began_us:
            run_us = switch.at_us - began_us.pop(thread)
            work_us = worked_us.pop(thread, 0) + run_us
            if switch.preempted:
                worked_us[thread] = work_us
            second = switch.at_us // 1_000_000
            longest = by_second.get(second, (0, 0))
            by_second[second] = max(longest[0], run_us), max(longest[1], work_us)
        if switch.following in threads:
            began_us[switch.following] = switch.at_us
    return [LongestRun(run_us / 1000, work_us / 1000) for run_us, work_us in by_second.values()]


class SchedulerTrace:
    """Records the context switches of some threads, and of those that they start."""

    def __init__(self, instance: Path) -> None:
        self._instance = instance

    def start(self, threads: Collection[int]) -> None:
        """Begin an empty trace of these threads."""
        (self._instance / "trace").write_text("")
        (self._instance / "set_event_pid").write_text(" ".join(map(str, threads)))
        (self._instance / "tracing_on").write_text("1")

    def stop(self) -> list[Switch]:
        """End the trace; returns its switches in order. Raises Unavailable if the kernel has overwritten some."""
        (self._instance / "tracing_on").write_text("0")
        for file in self._instance.glob("per_cpu/cpu*/stats"):
            fields = dict(line.split(": ", 1) for line in file.read_text().splitlines() if ": " in line)
            if int(fields["overrun"]):
                raise Unavailable("the kernel's trace buffer overflowed", "measure a shorter time: --seconds")
        return parse_switches((self._instance / "trace").read_text())


@contextmanager
def scheduler_trace(name: str) -> Iterator[SchedulerTrace]:
    """Create a trace instance of the kernel, which disturbs no other user of tracing; removes it at the end.

    Raises Unavailable if tracefs cannot be used.
    """
    try:
        with _tracefs() as root:
            instance = root / "instances" / name
            instance.mkdir()
            try:
                (instance / "tracing_on").write_text("0")
                (instance / "buffer_size_kb").write_text(str(BUFFER_KIB))
                # One clock for all CPUs: a thread that migrates is preempted on one and continues on another.
                (instance / "trace_clock").write_text("mono")
                (instance / "options/event-fork").write_text("1")
                (instance / "events/sched/sched_switch/enable").write_text("1")
                yield SchedulerTrace(instance)
            finally:
                instance.rmdir()
    except OSError as error:
        raise Unavailable(
            f"the kernel's tracing cannot be used: {error.filename}: {error.strerror}", "run as root on the host"
        ) from error


@contextmanager
def _tracefs() -> Iterator[Path]:
    """Yield the directory of tracefs; mount it for the time being where it is not mounted."""
    if (TRACEFS / "instances").is_dir():
        yield TRACEFS
        return
    with tempfile.TemporaryDirectory(prefix="dioptase-bench-") as directory:
        mounted = subprocess.run(
            ["mount", "-t", "tracefs", "tracefs", directory], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            raise Unavailable(f"tracefs cannot be mounted: {mounted.stderr.strip()}", "run as root on the host")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)
