"""Measures what run-queue probes cost per context switch: ours, bcc's and bpftrace's on one load in one run."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from bench.event_loads import SwitchLoad
from bench.machine import memory_kib_of, this_machine
from probes import bpf
from probes.btf import Btf
from probes.compiler import stub_tree

BPFTRACE_TOOL = Path("/usr/sbin/runqlat.bt")
BCC_TOOL = "runqlat-bpfcc"
_SCHED_H = """#pragma once
#include <linux/types.h>
#define TASK_RUNNING 0
enum {{ PIDTYPE_PID }};
struct rq;
struct ns_common {{ char before_inum[{ns_common_inum}]; unsigned int inum; }};
struct pid_namespace {{ char before_ns[{pid_namespace_ns}]; struct ns_common ns; }};
struct upid {{ int nr; struct pid_namespace *ns; }};
struct pid {{
  union {{
    struct {{ char before_level[{pid_level}]; unsigned int level; }};
    struct {{ char before_numbers[{pid_numbers}]; struct upid numbers[1]; }};
  }};
}};
struct task_struct {{
  union {{
    struct {{ char before_pid[{task_struct_pid}]; int pid; }};
    struct {{ char before_tgid[{task_struct_tgid}]; int tgid; }};
    struct {{ char before_state[{task_struct___state}]; unsigned int __state; }};
    struct {{ char before_thread_pid[{task_struct_thread_pid}]; struct pid *thread_pid; }};
  }};
}};
"""
_FIELDS = (
    ("ns_common", "inum"), ("pid_namespace", "ns"), ("pid", "level"), ("pid", "numbers"),
    ("task_struct", "pid"), ("task_struct", "tgid"), ("task_struct", "__state"), ("task_struct", "thread_pid"),
)  # fmt: skip


def bcc_headers(root: Path) -> Path:
    """Create a header tree with the few structs that bcc's runqlat uses, laid out as in the running kernel."""
    types = Btf.read()
    stub_tree(root)
    for name in ("linux/nsproxy.h", "linux/pid_namespace.h", "linux/init_task.h", "uapi/linux/ptrace.h"):
        (root / "include" / name).write_text("")
    offsets = {f"{struct}_{member}": types.field(struct, member).offset for struct, member in _FIELDS}
    (root / "include/linux/sched.h").write_text(_SCHED_H.format(**offsets))
    return root


def bpftrace_program(path: Path) -> Path:
    """Copy bpftrace's `runqlat.bt` without the header that defines TASK_RUNNING, which is 0."""
    if not BPFTRACE_TOOL.exists() or shutil.which(BCC_TOOL) is None:
        raise SystemExit("the tools to compare with are missing: apt-get install bpftrace bpfcc-tools")
    path.write_text(BPFTRACE_TOOL.read_text().replace("#include <linux/sched.h>", "#define TASK_RUNNING 0"))
    return path


def bcc_error_without_headers() -> str:
    """Return the error of bcc's tool when it runs without headers."""
    env = {name: value for name, value in os.environ.items() if name != "BCC_KERNEL_SOURCE"}
    command = [BCC_TOOL, "1", "1"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=env)
    lines = [line for line in run.stdout.splitlines() if "kernel headers" in line]
    return lines[0].split(". ")[0] + "." if lines else "it runs."


def tool_versions() -> str:
    """Return Debian's versions of both tools."""
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}, ", "bpfcc-tools", "bpftrace"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.rstrip(", ")


ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "probe_cost.md"
SETTLE_S, RATE_S, STATS_S = 1.0, 2.0, 1.0
EMPTY = """
import time
from pathlib import Path
from probes.loader import Form, Job, Program, load
import sys
form = Form(name="empty", typed=True, fields={}, programs=[Program("on_switch", "sched_switch", "dtse_empty")])
with load(Job(sources=[Path(sys.argv[1])], forms=[form], maps=[], constants={})):
    time.sleep(600)
"""
BLAME = """
import sys, time
from cli.probe.commands import cgroup_paths
from probes.blame import open_blame
probe = open_blame(forms=(sys.argv[1],))
while True:
    probe.read(cgroup_paths())
    time.sleep(1)
"""
TEXT = """## Probe cost per context switch

{machine}; {tools}. `python -m bench.probe_cost --rounds {rounds}`: medians of {rounds} shuffled rounds. The load is one pair of
processes on each CPU, each pair in a cgroup of its own, that passes a byte back and forth: {trips:,.0f} round trips a second
without a probe, and nothing but wakeups and switches.

| probe | ns a switch | range | program runs a switch | ns beyond empty programs | load slowed by | memory | start |
|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

- *ns a switch*: run time of all programs of the tool by the kernel's BPF statistics, over the node's context switches. The
  statistics take the time before and after each run; the empty program shows what that alone comes to, and the fifth column
  is the rest.
- *with blame*: the same program also splits each wait among the cgroups that held the CPU in the meantime.
- *load slowed by*: round trips lost against no probe in the same round, statistics off.
- bcc and bpftrace keep one histogram for the node, or one per pid namespace; neither keeps one per cgroup.
- bcc's tool by itself prints here: `{without_headers}` It runs unmodified on a header tree made from the kernel's BTF. In
  bpftrace's program the line `#include <linux/sched.h>` is replaced by the one constant that it is needed for.
"""
NO_TOOL, NO_PROGRAM = "no probe", "empty program"


@dataclass(frozen=True)
class ToolMeasurement:
    """Measurement of one tool in one round."""

    trips_per_s: float
    ns_per_switch: float
    runs_per_switch: float
    rss_mib: float
    start_s: float


@dataclass
class RunqlatTool:
    """A tool and its measurements."""

    name: str
    argv: list[str] | None
    env: dict[str, str] = field(default_factory=dict)
    visits: list[ToolMeasurement] = field(default_factory=list)


def runqlat_tools(scratch: Path) -> list[RunqlatTool]:
    probe_command = [sys.executable, "-c", "from cli.main import main; main()", "probe", "runqlat", "--json", "--form"]
    blame = [sys.executable, "-c", BLAME]
    empty = scratch / "empty.bpf.c"
    empty.write_text("int on_switch(u64 *ctx) { return 0; }\n")
    headers = {"BCC_KERNEL_SOURCE": str(bcc_headers(scratch / "headers"))}
    mount = "mount -t tracefs none /sys/kernel/tracing && exec bpftrace "
    script = shlex.quote(str(bpftrace_program(scratch / "runqlat.bt")))
    return [
        RunqlatTool(NO_TOOL, None),
        RunqlatTool(NO_PROGRAM, [sys.executable, "-c", EMPTY, str(empty)]),
        RunqlatTool("dioptase, tp_btf, per cgroup", [*probe_command, "tp_btf"]),
        RunqlatTool("dioptase, tp_btf, with blame", [*blame, "tp_btf"]),
        RunqlatTool("dioptase, raw_tp, per cgroup", [*probe_command, "raw_tp"]),
        RunqlatTool("dioptase, raw_tp, with blame", [*blame, "raw_tp"]),
        RunqlatTool("dioptase, classic, per cgroup", [*probe_command, "classic"]),
        RunqlatTool("bcc runqlat, whole node", ["runqlat-bpfcc", "1"], headers),
        RunqlatTool("bcc runqlat --pidnss, per pid namespace", ["runqlat-bpfcc", "--pidnss", "1"], headers),
        RunqlatTool("bpftrace runqlat.bt, whole node", ["unshare", "-m", "sh", "-c", mount + script]),
    ]


def program_ids(pid: int) -> set[int]:
    """Return the ids of the BPF programs that a process holds."""
    ids = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            with contextlib.suppress(FileNotFoundError):
                ids |= {int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("prog_id:")}
    return ids


@contextlib.contextmanager
def running_tool(contestant: RunqlatTool) -> Iterator[tuple[int | None, set[int], float]]:
    """Start the tool; yields its pid, the ids of its programs and the seconds until all were loaded."""
    if contestant.argv is None:
        yield None, set(), 0.0
        return
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen(
            contestant.argv, cwd=ROOT, env={**os.environ, **contestant.env}, stdout=output, stderr=output
        )
        try:
            ids, ready_at = set[int](), started
            while time.monotonic() - ready_at < SETTLE_S or not ids:
                if process.poll() is not None or time.monotonic() - started > 60:
                    output.seek(0)
                    raise SystemExit(f"{contestant.name} did not start:\n{output.read().decode()[-2000:]}")
                now = program_ids(process.pid)
                if now != ids:
                    ids, ready_at = now, time.monotonic()
                time.sleep(0.02)
            yield process.pid, ids, ready_at - started
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def context_switches() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("ctxt"))


def bpf_run_totals(ids: set[int]) -> tuple[int, int]:
    infos = [info for info in bpf.programs() if info.id in ids]
    return sum(info.run_time_ns for info in infos), sum(info.run_count for info in infos)


def measure_tool(contestant: RunqlatTool, load: SwitchLoad) -> ToolMeasurement:
    with running_tool(contestant) as (pid, ids, start_s):
        trips, at = load.round_trips(), time.monotonic()
        time.sleep(RATE_S)
        rate = (load.round_trips() - trips) / (time.monotonic() - at)
        statistics = bpf.enable_stats()
        before, switches = bpf_run_totals(ids), context_switches()
        time.sleep(STATS_S)
        after, switches = bpf_run_totals(ids), context_switches() - switches
        os.close(statistics)
        rss_kib = 0 if pid is None else memory_kib_of(pid)
    return ToolMeasurement(
        rate, (after[0] - before[0]) / switches, (after[1] - before[1]) / switches, rss_kib / 1024, start_s
    )


def markdown(all_of: list[RunqlatTool], rounds: int) -> str:
    """Render the section of bench/RESULTS.md."""
    machine = this_machine(detect_hierarchy(Path("/proc")).mode)
    nothing = next(c for c in all_of if c.name == NO_TOOL)
    empty = next(c for c in all_of if c.name == NO_PROGRAM)
    empty_ns = median(v.ns_per_switch / v.runs_per_switch for v in empty.visits)
    return TEXT.format(
        machine=machine.line(),
        tools=tool_versions(),
        rounds=rounds,
        trips=round(median(v.trips_per_s for v in nothing.visits), -2),
        rows="\n".join(tool_row(c, nothing, empty_ns) for c in all_of if c is not nothing),
        without_headers=bcc_error_without_headers(),
    )


def tool_row(contestant: RunqlatTool, nothing: RunqlatTool, empty_ns: float) -> str:
    """Render one line of the table: medians, and the range of the first."""
    visits = contestant.visits
    cost, runs = [v.ns_per_switch for v in visits], median(v.runs_per_switch for v in visits)
    slower = median(1 - v.trips_per_s / n.trips_per_s for v, n in zip(visits, nothing.visits, strict=True))
    cells = (
        contestant.name,
        f"{median(cost):.0f}",
        f"{min(cost):.0f} to {max(cost):.0f}",
        f"{runs:.2f}",
        f"{median(cost) - empty_ns * runs:.0f}",
        f"{100 * slower:.1f} %",
        f"{median(v.rss_mib for v in visits):.0f} MiB",
        f"{median(v.start_s for v in visits):.1f} s",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, default=RESULT, help="where the section goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, SwitchLoad(tuple(sorted(os.sched_getaffinity(0)))) as load:
        everyone = runqlat_tools(Path(scratch))
        for turn in range(options.rounds):
            order = everyone.copy()
            random.shuffle(order)
            for contestant in order:
                contestant.visits.append(measure_tool(contestant, load))
                print(f"round {turn + 1}: {contestant.name}: {contestant.visits[-1]}", file=sys.stderr)
    text = markdown(everyone, options.rounds)
    print(text)
    options.write.parent.mkdir(parents=True, exist_ok=True)
    options.write.write_text(text)


if __name__ == "__main__":
    main()
