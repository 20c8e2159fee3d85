"""Rows and the Markdown section of bench.cycle_cost. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from bench.machine import BenchMachine

SCALING_STAGES = "latency, growing"
"""As after a breach: more is lent in every round, so that every batch job has a new quota."""


class LatencySpread(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> LatencySpread:
        ordered = sorted(values_ms)
        return cls(median=statistics.median(ordered), p99=ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)])


class CycleCostRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one node."""

    pods: int
    cpus: int
    numa: int
    policy: str
    goal_ms: float
    rounds: int
    whole: LatencySpread
    cpu: LatencySpread
    """CPU time of the thread."""
    stages: Mapping[str, LatencySpread]
    written: LatencySpread
    """Knobs written in a round: a number, not a time."""

    @property
    def reason(self) -> str:
        return "PASS" if self.whole.p99 < self.goal_ms else "MISS"


class ApplyCost(msgspec.Struct, frozen=True, kw_only=True):
    """`apply` alone, on real cgroups."""

    what: str
    knobs: int
    spread: LatencySpread


class CycleCostResults(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: BenchMachine
    rows: tuple[CycleCostRow, ...]
    applied: tuple[ApplyCost, ...]


def markdown(results: CycleCostResults) -> str:
    """The section of bench/RESULTS.md."""
    stages = tuple(results.rows[0].stages) if results.rows else ()
    out = ["## Cost of a round", "", results.machine.line(), ""]
    out += [
        "Milliseconds, median and p99, of the agent's own rounds on nodes that are only computed, whose cgroups are ordinary",
        "files in memory. Half of the pods are online, with loads that come and go, some of them in pools or on CPUs of their",
        "own; the others are batch jobs. Everything that is on by default; sensing and showing are measured elsewhere.",
        "`CPU` is the round's own CPU time, which suffers less from others on this machine; `written` is how many knobs a",
        f"round changes; `{SCALING_STAGES}` is the time after a breach, when every batch job has a new quota in every round.",
        "The goal is for p99.",
        "",
        "| node | policy | round | goal | CPU | written | " + " | ".join(stages) + " |",
        "|---|---|---:|---|---:|---:|" + "---:|" * len(stages),
    ]
    for row in results.rows:
        parts = [f"{row.stages[name].median:.1f}, {row.stages[name].p99:.1f}" for name in stages]
        out.append(
            f"| {row.pods} pods, {row.cpus} CPUs, {row.numa} NUMA nodes | {row.policy} "
            f"| {row.whole.median:.1f}, {row.whole.p99:.1f} | {row.reason} {row.goal_ms:g} "
            f"| {row.cpu.median:.1f}, {row.cpu.p99:.1f} | {row.written.median:g}, {row.written.p99:g} "
            f"| {' | '.join(parts)} |"
        )
    if results.applied:
        out += [
            "",
            "`apply` alone, with the kernel's own cgroups on this machine, without tasks:",
            "",
            "| what is decided | knobs | median ms | p99 ms |",
            "|---|---:|---:|---:|",
            *(f"| {a.what} | {a.knobs} | {a.spread.median:.1f} | {a.spread.p99:.1f} |" for a in results.applied),
        ]
    return "\n".join(out) + "\n"
