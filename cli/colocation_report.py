"""Formats `dioptase value` and `kubectl dioptase value`: gain and cost of colocation, and what was not measured. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from api.colocation import OTHER_NAMES, ColocationTotals, OnlineTotals, sum_totals
from api.histogram import quantile_ns
from api.text import printable
from api.units import NS_PER_MS, NS_PER_S, NS_PER_US
from cli import formats
from cli.tables import TableHeading, format_table

NS_PER_HOUR = 3600 * NS_PER_S
MIN_WAITS = 1000
"""Minimum number of waits for a reliable 99th percentile: ten of 1,000 waits are longer than it."""
MAX_LOAD_RATIO = 1.5
"""Maximum ratio between the CPU use of online pods with and without batch work at which their latencies are comparable."""
MAX_NAMESPACES = 10


class NodeTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one node, or the reason why there are none."""

    node: str
    act: str = ""
    totals: ColocationTotals | None = None
    problem: str = ""


def node_report(report: NodeTotals) -> list[str]:
    """Return the lines for one node."""
    totals = report.totals
    if totals is None or not totals.duration_ns:
        return ["No cycle has been counted yet: try again in a few seconds."]
    name = f"{printable(report.node)}: " if report.node else ""
    covered = f"{formats.age(totals.duration_ns / NS_PER_S)} measured since {_date(totals.since_wall_ns)}"
    return [f"{name}{covered}", "", *_sections(totals), *_notes(unknowns(totals, (report.act,)))]


def fleet_report(nodes: Sequence[NodeTotals]) -> list[str]:
    """Return a table of the nodes, and the sections for all of them together."""
    right = ("MEASURED", "LENT", "USED", "OF LENT", "P99 WITH", "P99 WITHOUT", "HARM", "REDUCTIONS", "EVICTIONS")
    heads = [TableHeading("NODE"), *(TableHeading(head, right=True) for head in right), TableHeading("STATUS")]
    answers = [report.totals for report in nodes if report.totals is not None]
    fleet = sum_totals(answers)
    rows = [_node_cells(report) for report in nodes]
    if len(nodes) > 1 and fleet is not None:
        rows.append(_node_cells(NodeTotals(node=f"{len(nodes)} nodes", totals=fleet)))
    lines = format_table(heads, rows)
    lines += [
        "",
        "LENT and USED are in core-hours. HARM is the time that online tasks waited while reclaimed pods used the CPU, in",
        "milliseconds a second. P99 is the run-queue latency of online pods with and without batch work.",
    ]
    if fleet is None or not fleet.duration_ns:
        return lines
    acts = tuple(report.act for report in nodes if report.totals is not None)
    return [*lines, "", *_sections(fleet, "CORES A NODE"), *_notes(unknowns(fleet, acts))]


def unknowns(totals: ColocationTotals, acts: Sequence[str]) -> Iterator[str]:
    """Yield one sentence for each thing that the totals cannot show, with the remedy. `acts` are the modes of the agents."""
    idle_agents = [act for act in acts if act and act != "on"]
    if idle_agents:
        which = "The agent" if len(acts) == 1 else f"{len(idle_agents)} of {len(acts)} agents"
        verb = "runs" if len(idle_agents) == 1 else "run"
        mode = printable(idle_agents[0])
        pronoun = "it lends" if len(idle_agents) == 1 else "they lend"
        yield f"{which} {verb} with --act {mode}, so {pronoun} no CPU: use profile colocate, or --act on."
    if not totals.used_ns:
        yield "No reclaimed pod has used CPU: give a batch pod the QoS level reclaimed_cores (docs/first-steps.md)."
    busy, idle = totals.busy, totals.idle
    if not busy.duration_ns and not idle.duration_ns:
        yield "The run-queue latency of online pods was not measured: run `dioptase doctor` for the reason (source waits)."
        return
    if not busy.duration_ns:
        yield "Reclaimed pods were idle in all the measured time, so the latency with batch work is unknown: run a batch pod."
    if not idle.duration_ns:
        yield (
            "Reclaimed pods were busy in all the measured time, so the latency without batch work is unknown: suspend the "
            "batch jobs for ten minutes."
        )
    for name, online in (("with", busy), ("without", idle)):
        if online.duration_ns and online.latency.count < MIN_WAITS:
            yield (
                f"The p99 {name} batch work is not reliable: {formats.integer(online.latency.count)} waits were measured, "
                f"{formats.integer(MIN_WAITS)} are needed. Measure longer."
            )
    pair = sorted(each for each in (_mean_cores(busy), _mean_cores(idle)) if each is not None)
    if len(pair) == 2 and pair[1] > MAX_LOAD_RATIO * pair[0]:
        yield (
            f"Online pods used {formats.cores(_mean_cores(busy))} cores with batch work and "
            f"{formats.cores(_mean_cores(idle))} cores without. This difference in load changes the latency too: compare "
            "times of similar load."
        )
    if not totals.interference_duration_ns:
        yield (
            "The time that online pods waited for reclaimed pods was not measured, because the probe blame does not run: "
            "run `dioptase doctor` for the reason."
        )


def harm_ms(totals: ColocationTotals) -> float | None:
    """Return the time that online tasks waited for reclaimed pods in milliseconds a second; None if it was not measured."""
    measured = totals.interference_duration_ns
    return None if not measured else totals.interference_ns / measured * NS_PER_S / NS_PER_MS


def core_hours(cpu_ns: int) -> str:
    """Format a CPU time in hours of one CPU."""
    return formats.cores(cpu_ns / NS_PER_HOUR)


def p99_us(online: OnlineTotals) -> float | None:
    """Return the 99th percentile of the latency in microseconds; None without waits."""
    return _quantile_us(online, 0.99)


def _sections(totals: ColocationTotals, mean_heading: str = "MEAN CORES") -> list[str]:
    return [*_cpu_lines(totals, mean_heading), "", *_latency_lines(totals), "", *_taken_back_lines(totals)]


def _cpu_lines(totals: ColocationTotals, mean_heading: str) -> list[str]:
    used, reclaimable = totals.used_ns, totals.reclaimable_ns
    share = f"{formats.percent(used / reclaimable)} of lent" if reclaimable else ""
    rows = [
        _cpu_row("lent to reclaimed pods", reclaimable, totals),
        [*_cpu_row("used by reclaimed pods", used, totals)[:3], share],
    ]
    named = sorted(totals.reclaimed_ns.items(), key=lambda item: (-item[1], item[0]))
    rows += [_cpu_row(f"  {_namespace(name)}", ns, totals) for name, ns in named[:MAX_NAMESPACES]]
    if rest := named[MAX_NAMESPACES:]:
        rows.append(_cpu_row(f"  {len(rest)} more namespaces", sum(ns for _, ns in rest), totals))
    heads = [TableHeading("CPU"), TableHeading("CORE-HOURS", right=True), TableHeading(mean_heading, right=True)]
    return format_table([*heads, TableHeading("")], rows)


def _cpu_row(name: str, cpu_ns: int, totals: ColocationTotals) -> list[str]:
    return [name, core_hours(cpu_ns), formats.cores(cpu_ns / totals.duration_ns), ""]


def _latency_lines(totals: ColocationTotals) -> list[str]:
    heads = ["TIME", "ONLINE CORES", "WAITS", "P50", "P99", "MEAN"]
    rows = [_latency_row("with batch work", totals.busy), _latency_row("without batch work", totals.idle)]
    title = TableHeading("RUN-QUEUE LATENCY OF ONLINE PODS")
    table = format_table([title, *(TableHeading(head, right=True) for head in heads)], rows)
    harm = harm_ms(totals)
    if harm is None:
        return table
    waited = formats.duration(totals.interference_ns / NS_PER_US)
    return [*table, f"Online tasks waited {waited} for reclaimed pods: {formats.figures(harm)} ms a second."]


def _latency_row(name: str, online: OnlineTotals) -> list[str]:
    wait = online.latency
    return [
        name,
        formats.age(online.duration_ns / NS_PER_S) if online.duration_ns else formats.ABSENT,
        formats.cores(_mean_cores(online)),
        formats.integer(wait.count) if online.duration_ns else formats.ABSENT,
        formats.duration(_quantile_us(online, 0.5)),
        formats.duration(p99_us(online)),
        formats.duration(wait.sum_ns / wait.count / NS_PER_US if wait.count else None),
    ]


def _taken_back_lines(totals: ColocationTotals) -> list[str]:
    rows = [["CPU reductions", rule, count] for rule, count in _ranked(totals.reductions)]
    rows += [["evictions", rule, count] for rule, count in _ranked(totals.evictions)]
    if not rows:
        return ["Nothing was taken back from reclaimed pods."]
    return format_table([TableHeading("TAKEN BACK"), TableHeading("RULE"), TableHeading("TIMES", right=True)], rows)


def _ranked(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(printable(rule), formats.integer(count)) for rule, count in ranked]


def _node_cells(report: NodeTotals) -> list[str]:
    totals = report.totals
    if totals is None:
        problem = f"✕ {printable(report.problem) or 'its agent reports no totals: update the agent'}"
        return [printable(report.node), *[formats.ABSENT] * 9, problem]
    harm, reclaimable, used = harm_ms(totals), totals.reclaimable_ns, totals.used_ns
    return [
        printable(report.node),
        formats.age(totals.duration_ns / NS_PER_S),
        core_hours(reclaimable),
        core_hours(used),
        formats.percent(used / reclaimable) if reclaimable else formats.ABSENT,
        formats.duration(p99_us(totals.busy)),
        formats.duration(p99_us(totals.idle)),
        formats.ABSENT if harm is None else formats.figures(harm),
        formats.integer(sum(totals.reductions.values())),
        formats.integer(sum(totals.evictions.values())),
        printable(report.act),
    ]


def _notes(sentences: Iterator[str]) -> list[str]:
    lines = [f"- {sentence}" for sentence in sentences]
    return ["", *lines] if lines else []


def _namespace(name: str) -> str:
    return "other namespaces" if name == OTHER_NAMES else printable(name)


def _mean_cores(online: OnlineTotals) -> float | None:
    return online.cpu_ns / online.duration_ns if online.duration_ns else None


def _quantile_us(online: OnlineTotals, q: float) -> float | None:
    slots = online.latency.slots
    value = None if slots is None else quantile_ns(slots, q)
    return None if value is None else value / NS_PER_US


def _date(wall_ns: int) -> str:
    """Format a local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_ns / NS_PER_S))
    except (OverflowError, ValueError, OSError):
        return formats.ABSENT
