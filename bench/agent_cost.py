"""Measures what the agent itself takes from a node with few pods: CPU of its start, CPU a minute, and the longest time for
which one of its threads runs in each second. The pods sleep; the agent acts, as shipped.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.interfaces import Unavailable
from api.units import NS_PER_S
from bench.colocation_cell import start_agent
from bench.colocation_layouts import CellCgroups, kubelet_cgroups, kubelet_root
from bench.machine import (
    TICKS_PER_S,
    BenchMachine,
    bench_parser,
    children_of,
    cpu_ns_of,
    end_cleanly_on_sigterm,
    markdown_table,
    memory_kib_of,
    this_machine,
    write_results,
)
from bench.scheduler_trace import LongestRun, SchedulerTrace, longest_runs, scheduler_trace
from cli.agent_process import AgentProcess
from demo.launch import launch_in_cgroups
from demo.workloads import allowed_cpu_count

SETTLE_S = 10.0
"""Time after the start without measurement: the first cycles create what later ones reuse."""
MAX_WORK_MS, MAX_START_S, MAX_CPU_S_PER_MINUTE = 2.0, 1.5, 0.6
"""Goals; CPU a minute is 1 % of a core."""


class AgentCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent took."""

    start_cpu_s: float
    """CPU until the first cycle is finished and every probe is loaded, with all children."""
    restart_cpu_s: float
    """The same with the state directory of the first start."""
    cpu_s_per_minute: float
    """CPU of the agent's threads and children; its BPF programs run in the tasks of others."""
    rss_mib: float
    longest: tuple[LongestRun, ...]
    """One for each second."""


class AgentCostResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: BenchMachine
    seconds: float
    cost: AgentCost


def started_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, of its children, and of those that have ended and were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # utime, stime, cutime and cstime (man 5 proc_pid_stat)
    ended = sum(map(int, fields[11:15])) / TICKS_PER_S
    return ended + sum(cpu_ns_of(child) for child in children_of(pid)) / NS_PER_S


def measure(seconds: float, groups: CellCgroups, trace: SchedulerTrace) -> AgentCost:
    """Start the agent twice, and measure the second one while it runs."""
    with tempfile.TemporaryDirectory(prefix="dioptase-bench-") as name:
        agent = start_agent(Path(name), groups, "")
        start_s = started_cpu_s(agent.pid)
        agent.stop()
        agent = start_agent(Path(name), groups, "")
        try:
            restart_s = started_cpu_s(agent.pid)
            time.sleep(SETTLE_S)
            return _steady_cost(seconds, agent, trace, (start_s, restart_s))
        finally:
            agent.stop()


def _steady_cost(
    seconds: float, agent: AgentProcess, trace: SchedulerTrace, starts_s: tuple[float, float]
) -> AgentCost:
    began, before_ns, threads = time.monotonic(), _family_ns(agent.pid), _threads(agent.pid)
    trace.start(threads)
    time.sleep(seconds)
    switches = trace.stop()
    used_s, minutes = (_family_ns(agent.pid) - before_ns) / NS_PER_S, (time.monotonic() - began) / 60
    return AgentCost(
        start_cpu_s=starts_s[0],
        restart_cpu_s=starts_s[1],
        cpu_s_per_minute=used_s / minutes,
        rss_mib=memory_kib_of(agent.pid) / 1024,
        longest=tuple(longest_runs(switches, threads | _threads(agent.pid))),
    )


def _family_ns(pid: int) -> int:
    return sum(cpu_ns_of(member) for member in (pid, *children_of(pid)))


def _threads(pid: int) -> set[int]:
    return {int(task.name) for member in (pid, *children_of(pid)) for task in Path(f"/proc/{member}/task").iterdir()}


def markdown(results: AgentCostResults) -> str:
    """Render the section of RESULTS.md."""
    cost = results.cost
    runs, works = [each.run_ms for each in cost.longest], [each.work_ms for each in cost.longest]
    rows = [
        ("CPU of the start, s", f"{cost.start_cpu_s:.2f}", _verdict(cost.start_cpu_s, MAX_START_S)),
        ("CPU of a restart, s", f"{cost.restart_cpu_s:.2f}", _verdict(cost.restart_cpu_s, MAX_START_S)),
        ("CPU a minute, s", f"{cost.cpu_s_per_minute:.2f}", _verdict(cost.cpu_s_per_minute, MAX_CPU_S_PER_MINUTE)),
        ("longest work of a second, ms", _spread(works), _verdict(max(works, default=0.0), MAX_WORK_MS)),
        ("longest run of a second, ms", _spread(runs), ""),
        ("memory, MiB", f"{cost.rss_mib:.0f}", ""),
    ]
    out = ["## Cost of the agent on a node with few pods", "", results.machine.line(), ""]
    out += [
        f"Two pods that sleep, and the agent in a third, as shipped, acting, for {results.seconds:g} s after {SETTLE_S:g} s.",
        "*Start*: until the first cycle is finished and every probe is loaded, with all children; *restart*: with the state",
        "directory of the first start. *Work*: CPU time of one thread between two sleeps, by the scheduler's tracepoint: that",
        "long it takes a CPU where nothing else runs. *Run*: between two switches, so that competitors shorten it. Median",
        "and maximum of all seconds.",
        "",
    ]
    return "\n".join([*out, *markdown_table(("what", "measured", "goal"), rows), ""])


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f}, at most {max(values):.2f}" if values else "none"


def _verdict(value: float, limit: float) -> str:
    return f"{'PASS' if value <= limit else 'MISS'} {limit:g}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("agent_cost", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured time")
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    try:
        hierarchy = detect_hierarchy()
        with ExitStack() as stack:
            stack.enter_context(kubelet_root(hierarchy, allowed_cpu_count()))
            trace = stack.enter_context(scheduler_trace(f"dioptase-bench-{os.getpid()}"))
            groups = stack.enter_context(
                kubelet_cgroups(hierarchy, allowed_cpu_count(), online="Burstable", batch="BestEffort")
            )
            for path in (groups.online, groups.batch):
                stack.callback(launch_in_cgroups(["sleep", "infinity"], procs=groups.procs(path)).kill)
            cost = measure(args.seconds, groups, trace)
    except Unavailable as error:
        print(f"bench: {error.reason}\n  remedy: {error.remedy}", file=sys.stderr)
        return 2
    results = AgentCostResults(machine=this_machine(hierarchy.mode), seconds=args.seconds, cost=cost)
    write_results(args.out, "agent_cost", markdown(results), results)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
