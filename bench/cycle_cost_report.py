"""Rows and the Markdown section of bench.cycle_cost. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from bench.machine import BenchMachine, markdown_table

SCALING_STAGES = "latency, growing"
"""Growth after a breach: the reclaimable CPU changes in every cycle, and with it the quota of every batch job."""


class LatencySpread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and 99th percentile in milliseconds."""

    median: float
    p99: float

    def cell(self) -> str:
        return f"{self.median:.1f}, {self.p99:.1f}"

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> LatencySpread:
        ordered = sorted(values_ms)
        return cls(median=statistics.median(ordered), p99=ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)])


class CycleCostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one policy on one node."""

    pods: int
    cpus: int
    numa: int
    policy: str
    goal_ms: float
    rounds: int
    total: LatencySpread = msgspec.field(name="whole")
    cpu: LatencySpread
    """CPU time of the thread."""
    stages: Mapping[str, LatencySpread]
    written: LatencySpread
    """Number of knobs written in a cycle, not a time."""

    @property
    def reason(self) -> str:
        return "PASS" if self.total.p99 < self.goal_ms else "MISS"


class ApplyCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of `apply` alone, on real cgroups."""

    what: str
    knobs: int
    spread: LatencySpread


class CycleCostResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: BenchMachine
    rows: tuple[CycleCostRow, ...]
    applied: tuple[ApplyCost, ...]


def markdown(results: CycleCostResults) -> str:
    """Render the section of bench/RESULTS.md."""
    stages = tuple(results.rows[0].stages) if results.rows else ()
    out = ["## Cost of a cycle", "", results.machine.line(), ""]
    out += [
        "Milliseconds, median and p99, of the agent's own cycles on simulated nodes, whose cgroups are ordinary files in",
        "memory. Half of the pods are online, with varying loads, some of them in pools or on CPUs of their own; the others",
        "are batch jobs. All default features are on; sensors and exporters are measured elsewhere.",
        "`CPU` is the cycle's own CPU time, which depends less on other work on this machine; `written` is how many knobs a",
        f"cycle changes; `{SCALING_STAGES}` is the time after a breach, when every batch job has a new quota in every cycle.",
        "The goal is for p99.",
        "",
    ]
    rows = [
        (
            f"{row.pods} pods, {row.cpus} CPUs, {row.numa} NUMA nodes", row.policy, row.total.cell(),
            f"{row.reason} {row.goal_ms:g}", row.cpu.cell(), f"{row.written.median:g}, {row.written.p99:g}",
            *(row.stages[name].cell() for name in stages),
        )
        for row in results.rows
    ]  # fmt: skip
    out += markdown_table(("node", "policy", "cycle", "goal", "CPU", "written", *stages), rows, text_columns=2)
    if results.applied:
        out += ["", "`apply` alone, with the kernel's own cgroups on this machine, without tasks:", ""]
        costs = [(a.what, f"{a.knobs}", f"{a.spread.median:.1f}", f"{a.spread.p99:.1f}") for a in results.applied]
        out += markdown_table(("what is decided", "knobs", "median ms", "p99 ms"), costs)
    return "\n".join(out) + "\n"
