"""What a result was measured on, and the two things every bench reads of it."""

from __future__ import annotations

import datetime
import os
import platform
import signal
import sys
from pathlib import Path

import msgspec

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to judge whether two results may be compared."""

    date: str
    kernel: str
    cpu: str
    cpus: int
    hypervisor: bool
    cgroups: str
    python: str

    def line(self) -> str:
        """One sentence for the head of a table."""
        guest = ", virtual machine" if self.hypervisor else ""
        return (
            f"{self.date}, Linux {self.kernel}, {self.cpus} x {self.cpu}{guest}, cgroups {self.cgroups}, "
            f"Python {self.python}"
        )


def this_machine(cgroups: str) -> Machine:
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return Machine(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        kernel=platform.release(),
        cpu=named.get("model name", platform.machine()),
        cpus=len(os.sched_getaffinity(0)),
        hypervisor="hypervisor" in named.get("flags", "").split(),
        cgroups=cgroups,
        python=platform.python_version(),
    )


class NodeTimes(msgspec.Struct, frozen=True):
    """/proc/stat's first line in ticks: everything, what was not idle, and what the hypervisor took."""

    total: int
    busy: int
    stolen: int


def node_times() -> NodeTimes:
    with Path("/proc/stat").open() as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq
    return NodeTimes(busy + idle + iowait + steal, busy, steal)


def end_cleanly_on_sigterm() -> None:
    """Leave by an exception, as on Ctrl-C, so that every `finally` on the way removes what it made."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def cpu_ns_of(pid: int) -> int:
    """CPU time of all threads of one process, at the scheduler's precision."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def children_of(pid: int) -> list[int]:
    """Direct children of a process's main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory_kib_of(pid: int, field: str = "VmRSS") -> int:
    """One of the memory lines of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0
