"""Describes the machine of a result, reads CPU time and memory of processes, and waits until an agent is ready.
An agent is ready when it has finished a cycle and every probe is loaded or refused.
"""

from __future__ import annotations

import datetime
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from cli.agent_process import AgentExited
from exporters.view.cycle_view import View
from probes.deferred_loading import LOADING

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchMachine(msgspec.Struct, frozen=True, kw_only=True):
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


def this_machine(cgroups: str) -> BenchMachine:
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return BenchMachine(
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


PROBES_TIMEOUT_S = 120.0
READY_POLL_INTERVAL_S = 0.2


class StartedAgent(Protocol):
    """An agent as far as it is waited for; cli.agent_process.AgentProcess is one."""

    def wait_healthy(self) -> None:
        """Return when it has finished a round."""

    def get(self, path: str, timeout_s: float = 2.0) -> bytes | None:
        """The body at that path; None where there is no good answer now."""


def wait_until_ready(agent: StartedAgent, clock: Callable[[], float] = time.monotonic) -> None:
    """Return when no source says any more that it is loading. Raises AgentEnded where that does not come about."""
    agent.wait_healthy()
    deadline = clock() + PROBES_TIMEOUT_S
    while still := _is_loading(agent.get("/api/v1/view")):
        if clock() > deadline:
            raise AgentExited(f"still not loaded after {PROBES_TIMEOUT_S:.0f} s: {', '.join(still)}")
        time.sleep(READY_POLL_INTERVAL_S)


def _is_loading(view_json: bytes | None) -> list[str]:
    if view_json is None:
        return ["the agent does not answer"]
    return [source.name for source in msgspec.json.decode(view_json, type=View).sources if source.detail == LOADING]
