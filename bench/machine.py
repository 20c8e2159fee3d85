"""Describes the machine of a result, reads CPU time and memory of processes, and waits until an agent is ready.
An agent is ready when it has finished a cycle and every probe is loaded or refused.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cli.agent_process import AgentExited
from exporters.view.cycle_view import View
from probes.deferred_loading import LOADING

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a machine, to judge whether two results are comparable."""

    date: str
    kernel: str
    cpu: str
    cpus: int
    hypervisor: bool
    cgroups: str
    python: str

    def line(self) -> str:
        """Return one line for the head of a section."""
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
    """First line of /proc/stat in ticks: total, not idle, and stolen by the hypervisor."""

    total: int
    busy: int
    stolen: int


def node_times() -> NodeTimes:
    with Path("/proc/stat").open() as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq
    return NodeTimes(busy + idle + iowait + steal, busy, steal)


def end_cleanly_on_sigterm() -> None:
    """Exit by an exception on SIGTERM, as on Ctrl-C, so that every `finally` cleans up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def cpu_ns_of(pid: int) -> int:
    """Return the CPU time of all threads of a process, with the scheduler's precision."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process's main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory_kib_of(pid: int, field: str = "VmRSS") -> int:
    """Return a memory field of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


PROBES_TIMEOUT_S = 120.0
READY_POLL_INTERVAL_S = 0.2


class StartedAgent(Protocol):
    """The parts of an agent process that `wait_until_ready` uses; `cli.agent_process.AgentProcess` implements it."""

    def wait_healthy(self) -> None:
        """Return when the agent has finished a cycle."""

    def get(self, path: str, timeout_s: float = 2.0) -> bytes | None:
        """Return the body at that path, or None without a response of status 200."""


def wait_until_ready(agent: StartedAgent, clock: Callable[[], float] = time.monotonic) -> None:
    """Return when no source reports that it is loading. Raises AgentExited on exit or timeout."""
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


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Return the lines of a Markdown table; columns after the first `text_columns` are aligned right."""
    alignment = ["---"] * text_columns + ["---:"] * (len(heads) - text_columns)
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], f"|{'|'.join(alignment)}|", *lines[1:]]


RESULTS = Path(__file__).parent / "results"
"""Default directory of every benchmark's results."""


def bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m bench.NAME`, with the option --out."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"directory of the results ({name}.md and others)")
    return parser


def name_list(values: Mapping[str, object]) -> Callable[[str], tuple[str, ...]]:
    """Return the argparse type of a comma-separated list of keys of `values`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in values]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(values)}")
        return names

    return parse


def report_faults(faults: Sequence[str]) -> int:
    """Print why a run failed; return the exit status."""
    for fault in faults:
        print(f"bench: {fault}", file=sys.stderr)
    return 1 if faults else 0


def write_results(directory: Path, name: str, text: str, results: object = None) -> None:
    """Write the section NAME.md and, if given, the results as NAME.json."""
    directory.mkdir(parents=True, exist_ok=True)
    if results is not None:
        (directory / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (directory / f"{name}.md").write_text(text)
