"""Simulates a day of generated load under each policy and reports how long that takes and what it yields."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from agent.config.config import AgentConfig
from agent.offline.replay import PolicyScore, ScoreCounters
from agent.offline.simulation import workloads
from agent.offline.simulation.simulator import run_simulation
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.interfaces import Unavailable
from bench.machine import (
    BenchMachine,
    bench_parser,
    end_cleanly_on_sigterm,
    markdown_table,
    this_machine,
    write_results,
)

POLICIES = ("latency", "canonical")
HORIZON_S = 600.0
SEED = 1


class SimulatedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated machine."""

    cpus: int
    numa: int
    services: int
    kinds: tuple[str, ...]


NODES = (
    SimulatedNode(cpus=48, numa=1, services=4, kinds=("diurnal",)),
    SimulatedNode(cpus=48, numa=2, services=8, kinds=("diurnal", "bursty", "step", "ramp")),
    SimulatedNode(cpus=256, numa=8, services=16, kinds=("diurnal", "bursty", "step", "ramp")),
)


class DayRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one policy on one simulated machine."""

    node: SimulatedNode
    policy: str
    wall_s: float
    faster: float
    """Simulated seconds per second."""
    score: PolicyScore


class DayResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: BenchMachine
    hours: float
    interval_s: float
    rows: tuple[DayRow, ...]


def measure(node: SimulatedNode, policy: str, hours: float, interval_s: float) -> DayRow:
    """Simulate one policy on one machine."""
    plan = workloads.build_node(node.cpus, node.numa, node.kinds, online=node.services, seed=SEED)
    config = msgspec.convert({"advisor": {"policy": policy}}, AgentConfig)
    tally, began = ScoreCounters(HORIZON_S), time.monotonic()
    for _, fact, mark in run_simulation(plan, config, seconds=3600 * hours, interval_s=interval_s):
        tally.add(fact, mark)
    wall_s = time.monotonic() - began
    return DayRow(node=node, policy=policy, wall_s=wall_s, faster=3600 * hours / wall_s, score=tally.score())


COLUMNS = (
    "CPUs", "NUMA nodes", "services", "loads", "policy", "cycles", "took s", "times faster", "reclaimable", "used",
    "online wait p99 ms", "harm ms/s", "short ms/s", "headroom", "exceeded", "values written",
)  # fmt: skip
TEXT = (
    "{hours:g} hours of generated load on simulated nodes, a cycle every {interval_s:g} s, by each "
    "policy: `dioptase simulate`, "
    "{took_s:,.0f} s for all of them here. *Harm* is the time that online pods waited for batch work, "
    "*short* the CPU that they "
    "needed beyond their own pool; headroom is exceeded where online pods used more within {horizon_s:g} s than it left. A "
    "simulated node has no caches and no memory: it compares policies, and predicts no machine."
)


def markdown(results: DayResults) -> str:
    """Render the section of RESULTS.md."""
    took_s = sum(row.wall_s for row in results.rows)
    text = TEXT.format(hours=results.hours, interval_s=results.interval_s, took_s=took_s, horizon_s=HORIZON_S)
    out = ["## A day in minutes", "", results.machine.line(), "", text, ""]
    return "\n".join([*out, *markdown_table(COLUMNS, map(_cells, results.rows), text_columns=5), ""])


def _cells(row: DayRow) -> tuple[str, ...]:
    node, score = row.node, row.score
    return (
        f"{node.cpus}", f"{node.numa}", f"{node.services}", ", ".join(node.kinds), row.policy, f"{score.rounds:,}",
        f"{row.wall_s:.0f}", f"{row.faster:,.0f}", f"{score.reclaimable_cores:.1f}", f"{score.batch_cores:.1f}",
        _number(score.wait_p99_ms), f"{score.harm_ms_per_s:.0f}", f"{score.short_ms_per_s:.0f}",
        _number(score.headroom_cores), "" if score.missed_ratio is None else f"{score.missed_ratio:.1%}",
        f"{score.changes:,}",
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("day", __doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two cycles")
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    try:
        cgroups = detect_hierarchy().mode
    except Unavailable:
        cgroups = "none"  # nothing here needs them
    rows = []
    for node in NODES:
        for policy in POLICIES:
            rows.append(measure(node, policy, args.hours, args.interval))
            print(
                f"{node.cpus} CPUs, {policy}: {rows[-1].wall_s:.0f} s, {rows[-1].faster:,.0f} times faster", flush=True
            )
    results = DayResults(machine=this_machine(cgroups), hours=args.hours, interval_s=args.interval, rows=tuple(rows))
    write_results(args.out, "day", markdown(results), results)
    print(f"wrote {args.out}/day.md and .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
