"""What the agent costs: CPU a second and memory, with 10, 100 and 200 cgroups, each holding a sleeping process.

The cgroups lie below a directory of the bench's own and are all listed as pods, alternately online and reclaimed: every
one of them is read, judged, acted on and exported. Children are counted; the probe's compiler runs only at the start.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from agent.hierarchy import detect
from api.ports import Unavailable
from bench.machine import Machine, children_of, cpu_ns_of, end_cleanly_on_sigterm, memory_kib_of, this_machine
from bench.ready import wait_ready
from bench.residents import residents
from cli.child import AgentChild, AgentEnded, free_port
from exporters.view import View

RESULTS = Path(__file__).parent / "results"
PARENT = "dioptase-bench-cost"
COUNTS = (10, 100, 200)
SETTLE_S = 5.0
NS_PER_MS = 1_000_000
TEXT = (
    "{seconds:g} s for each number after {settle:g} s of settling; run-queue waits from {waits}. CPU is that of the agent and "
    "its children, in milliseconds for each second of running: one round, and the watch on online waits between rounds; "
    "`scraped` with /metrics and the latest view asked for once a second besides. 10 ms a second is 1 % of one CPU. Every "
    "cgroup is a pod with a container, half of them online, half reclaimed."
)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    cgroups: int
    act: str
    cpu_ms: float
    """CPU time for each second of running: one round, and the watch between rounds."""
    scraped_ms: float
    """The same while /metrics and the latest view are asked for once a second."""
    round_ms: float
    """Wall time of a round, median."""
    metrics_kib: float
    """Size of one exposition."""
    rss_mib: float
    """Of the agent and its children, after all of this."""
    peak_mib: float
    """Largest that the agent itself ever was, its start included."""
    children: int
    sources_ms: dict[str, float]
    """Wall time of each source within a round, mean: those that are not read in every round count with their share."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: Machine
    seconds: float
    waits: str
    """Where the agent had run-queue waits from."""
    rows: tuple[Cost, ...]


def pods_file(paths: Sequence[str]) -> str:
    """All of them as pods, alternately shared_cores and reclaimed_cores."""
    levels = ("shared_cores", "reclaimed_cores")
    pods = [
        {
            "name": f"p{index:03}",
            "annotations": {"katalyst.kubewharf.io/qos_level": levels[index % 2]},
            "containers": [{"name": "c", "cgroup": path}],
        }
        for index, path in enumerate(paths)
    ]
    return msgspec.yaml.encode({"pods": pods}).decode()


def measure(count: int, act: str, seconds: float) -> tuple[Cost, str]:
    """One row, and what the agent's source of waits says of itself."""
    with residents(PARENT, count) as paths, tempfile.TemporaryDirectory(prefix="dioptase-bench-") as name:
        directory = Path(name)
        (directory / "pods.yaml").write_text(pods_file(paths))
        options = ["--pods", str(directory / "pods.yaml"), "--state-dir", str(directory / "state"), "--act", act]
        with (directory / "agent.log").open("wb") as log:
            agent = AgentChild(options, port=free_port(), output=log)
        try:
            wait_ready(agent)
            time.sleep(SETTLE_S)
            quiet_ms = _cpu_ms_a_second(agent, seconds, ask=False)
            scraped_ms = _cpu_ms_a_second(agent, seconds, ask=True)
            views = msgspec.json.decode(agent.get("/api/v1/history?after=0", 10) or b"[]", type=list[View])
            row = Cost(
                cgroups=count,
                act=act,
                cpu_ms=quiet_ms,
                scraped_ms=scraped_ms,
                round_ms=median(view.round_ms for view in views),
                metrics_kib=len(agent.get("/metrics", 10) or b"") / 1024,
                rss_mib=sum(memory_kib_of(pid) for pid in _family(agent)) / 1024,
                peak_mib=memory_kib_of(agent.pid, "VmHWM") / 1024,
                children=len(_family(agent)) - 1,
                sources_ms=_sources_ms(views),
            )
            return row, next((f"{s.detail or s.error}" for s in views[-1].sources if s.name == "waits"), "unknown")
        finally:
            agent.stop()


def _sources_ms(views: Sequence[View]) -> dict[str, float]:
    """Mean over the rounds since the settling, the costliest first."""
    spent: dict[str, int] = {}
    later = [view for view in views if view.interval_ms is not None]
    for view in later:
        for source in view.sources:
            spent[source.name] = spent.get(source.name, 0) + source.duration_ns
    by_cost = sorted(spent.items(), key=lambda pair: -pair[1])
    return {name: duration_ns / NS_PER_MS / len(later) for name, duration_ns in by_cost if duration_ns}


def _family(agent: AgentChild) -> list[int]:
    return [agent.pid, *children_of(agent.pid)]


def _cpu_ms_a_second(agent: AgentChild, seconds: float, *, ask: bool) -> float:
    began, before = time.monotonic(), sum(map(cpu_ns_of, _family(agent)))
    while (left := began + seconds - time.monotonic()) > 0:
        if ask:
            for path in ("/metrics", "/api/v1/view"):
                agent.get(path, 10)
        time.sleep(min(1.0, left))
    used = sum(map(cpu_ns_of, _family(agent))) - before
    return used / NS_PER_MS / (time.monotonic() - began)


def markdown(results: Results) -> str:
    """The table."""
    out = [
        "## Cost of the agent",
        "",
        results.machine.line(),
        "",
        TEXT.format(seconds=results.seconds, settle=SETTLE_S, waits=results.waits),
        "",
        "| cgroups | act | CPU ms/s | scraped ms/s | round ms (median) | /metrics KiB | RSS MiB | peak MiB | children |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {row.cgroups} | {row.act} | {row.cpu_ms:.1f} | {row.scraped_ms:.1f} | {row.round_ms:.1f} | {row.metrics_kib:.0f} "
        f"| {row.rss_mib:.1f} | {row.peak_mib:.1f} | {row.children} |"
        for row in results.rows
    ]
    names = list(dict.fromkeys(name for row in reversed(results.rows) for name in row.sources_ms))
    out += [
        "",
        "Where a round goes: wall milliseconds of each source, mean. What is left of the round is judging, acting, exporting.",
        "",
        "| cgroups | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    out += [
        f"| {row.cgroups} | " + " | ".join(f"{row.sources_ms.get(name, 0):.2f}" for name in names) + " |"
        for row in results.rows
    ]
    return "\n".join([*out, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.agent_cost", description=__doc__)
    parser.add_argument("--counts", type=lambda text: tuple(map(int, text.split(","))), default=COUNTS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--act", choices=("off", "dry-run", "on"), default="on")
    parser.add_argument("--quick", action="store_true", help="10 cgroups, 3 s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for agent_cost.json and .md")
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    if args.quick:
        args.counts, args.seconds = (10,), 3.0
    rows, waits = [], "unknown"
    try:
        hierarchy = detect()
        for count in args.counts:
            row, waits = measure(count, args.act, args.seconds)
            rows.append(row)
            print(
                f"{count} cgroups: {row.cpu_ms:.1f} ms/s, {row.round_ms:.1f} ms a round, {row.rss_mib:.1f} MiB; "
                + ", ".join(f"{name} {ms:.2f}" for name, ms in row.sources_ms.items()),
                flush=True,
            )
    except (Unavailable, AgentEnded, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    machine = this_machine(hierarchy.mode)
    write(Results(machine=machine, seconds=args.seconds, waits=waits, rows=tuple(rows)), args.out)
    return 0


def write(results: Results, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "agent_cost.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (directory / "agent_cost.md").write_text(markdown(results))
    print(f"wrote {directory}/agent_cost.md and .json")


if __name__ == "__main__":
    sys.exit(main())
