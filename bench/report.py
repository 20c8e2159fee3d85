"""The cells of a colocation run as goals, tables and charts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from bench import tradeoff
from bench.medians import Group, Results, p99, units
from bench.modes import BY_NAME
from bench.plot import Point, chart
from bench.scenarios import BY_NAME as SCENARIOS

COLUMNS = (
    "mode", "p50 ms", "p99 ms (all rounds)", "p99.9 ms", "p99 / alone", "p99 / floor",
    "batch units/s", "/ floor", "lent", "node use", "us a request", "stolen", "lost",
)  # fmt: skip


def svg(results: Results) -> str:
    """p99 of every scenario, one line per mode."""
    names = results.scenarios()
    lines: dict[str, list[Point]] = {}
    for mode in results.modes():
        groups = [(x, found) for x, name in enumerate(names) if (found := results.group(mode, name))]
        lines[mode] = [Point(x, found.median(p99), *found.spread(p99)) for x, found in groups]
    title = "p99 latency of the online service beside twice as many burners as CPUs"
    return chart(title, "scenario", "p99, ms (median, bar: all rounds)", lines, dict(enumerate(names)))


def markdown(results: Results) -> str:
    """The whole section."""
    out = ["## Colocation", "", results.machine.line(), "", results.settings, ""]
    out += [f"- **{name}**: {BY_NAME[name].what}" for name in results.modes()]
    out += ["", "![p99 in each scenario](colocation.svg)", ""]
    if goals := tradeoff.verdicts(results):
        out += ["Goals:", "", *(goal.line() for goal in goals), ""]
    for scenario in results.scenarios():
        out += _table(results, scenario)
    out += tradeoff.markdown(results) + _reactions(results) + _waits(results) + _service(results)
    if results.failures:
        out += ["### Cells that failed", "", *(f"- {failure}" for failure in results.failures), ""]
    if results.left_out:
        out += ["### Repetitions for which there was no time", "", *(f"- {which}" for which in results.left_out), ""]
    return "\n".join(out)


def _table(results: Results, scenario: str) -> list[str]:
    out = [
        f"### Scenario {scenario}",
        "",
        f"{SCENARIOS[scenario].what}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for mode in results.modes(scenario):
        if (found := results.group(mode, scenario)) is None:
            continue
        low, high = found.spread(p99)
        lost = sum(cell.lost for cell in found.cells)
        out.append(
            f"| {mode} | {found.median(lambda c: c.p50_ms):.2f} | {found.median(p99):.2f} ({low:.2f} to {high:.2f}) "
            f"| {found.median(lambda c: c.p999_ms):.2f} | {_times(results.ratio(scenario, mode, 'alone', p99))} "
            f"| {_times(results.ratio(scenario, mode, 'floor', p99))} | {found.median(units):,.0f} "
            f"| {_times(results.ratio(scenario, mode, 'floor', units))} | {_lent(found)} "
            f"| {found.median(lambda c: c.node_use):.1%} | {found.median(lambda c: c.online_us):.0f} "
            f"| {found.median(lambda c: c.noise.stolen):.1%} | {lost} |"
        )
    return [*out, ""]


def _lent(found: Group) -> str:
    lent = [cell.lending.lent_cores for cell in found.cells if cell.lending is not None]
    return f"{median(lent):.2f}" if lent else ""


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


REACTION_COLUMNS = (
    "mode", "jumps", "to take back", "taken back p50", "p99", "most", "not within it", "quota smaller",
    "decided p50, most ms", "written p50, most ms", "what started the round",
)  # fmt: skip


def _reactions(results: Results) -> list[str]:
    if not results.reactions:
        return []
    out = [
        "### From a jump of the load to batch work's CPU taken back",
        "",
        "From the moment at which the load jumps from 10 % to 90 % of the node, until the CPU time that batch work had in the",
        "50 ms before has fallen by nine tenths of what it has to: by the scheduler, which the agent told who gives way, or by",
        "a quota. *Quota*: where the agent took back by a decision, which it does when online pods wait too long all the same,",
        "the journal's time of that round, and when the new value was seen in a cgroup file. *Steps*: 1.2 s long, at even",
        "distances; *bursts*: of random lengths and distances.",
        "",
        f"| {' | '.join(REACTION_COLUMNS)} |",
        "|---" * len(REACTION_COLUMNS) + "|",
    ]
    for found in results.reactions:
        kinds = ", ".join(f"{kind} {found.triggers.count(kind)}" for kind in sorted(set(found.triggers)))
        p50, late, most = (tradeoff.shown(tradeoff.quantile(found, q)) for q in (0.5, 0.99, 1.0))
        out.append(
            f"| {found.mode} | {found.steps} {found.kind} | {len(found.taken_ms) + found.never} | {p50} | {late} | {most} "
            f"| {found.never} | {len(found.decided_ms)} | {_middle_and_max(found.decided_ms)} "
            f"| {_middle_and_max(found.written_ms)} | {kinds} |"
        )
    return [*out, ""]


def _middle_and_max(values: Sequence[float]) -> str:
    return f"{median(values):.0f}, {max(values):.0f}" if values else ""


def _waits(results: Results) -> list[str]:
    if all(cell.waits is None for cell in results.cells):
        return []
    out = [
        "### Run-queue wait of the online cgroup",
        "",
        "Milliseconds, medians of all rounds; every switch, log2 histogram.",
        "",
        "| scenario | mode | mean | p50 | p99 | p99.9 |",
        "|---|---|---|---|---|---|",
    ]
    for scenario in results.scenarios():
        for mode in results.modes(scenario):
            found = results.group(mode, scenario)
            waits = [cell.waits for cell in found.cells if cell.waits is not None] if found else []
            if waits:
                columns = zip(*map(msgspec.structs.astuple, waits), strict=True)
                cells = [_middle([value for value in column if value is not None]) for column in columns]
                out.append(f"| {scenario} | {mode} | {' | '.join(cells)} |")
    return [*out, ""]


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.3f}" if values else ""


def _service(results: Results) -> list[str]:
    """Whether the instruments themselves are sound: cost of a request, share and lateness of the client."""
    out = [
        "### Instruments",
        "",
        "CPU time of the service per request (its cost plus socket calls), CPU of the client, how late the client sent on",
        "average, and how much of the node others used; medians of all modes.",
        "",
        "| scenario | service us per request (all cells) | client cores | client late us (largest) | others |",
        "|---|---|---|---|---|",
    ]
    for scenario in results.scenarios():
        cells = Group(tuple(cell for cell in results.cells if cell.scenario == scenario))
        low, high = cells.spread(lambda c: c.online_us)
        out.append(
            f"| {scenario} | {cells.median(lambda c: c.online_us):.0f} ({low:.0f} to {high:.0f}) "
            f"| {cells.median(lambda c: c.client_cores):.3f} "
            f"| {cells.median(lambda c: c.lag_us):.0f} ({cells.spread(lambda c: c.lag_us)[1]:.0f}) "
            f"| {cells.median(lambda c: c.noise.others):.1%} |"
        )
    return [*out, ""]
