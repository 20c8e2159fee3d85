"""The cells of a colocation run as medians, ratios, a Markdown table and a chart. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from bench.cell import Measured
from bench.machine import Machine
from bench.modes import BY_NAME
from bench.plot import Point, chart

COLUMNS = (
    "mode", "p50 ms", "p99 ms (all rounds)", "p99.9 ms", "p99 / alone", "p99 / floor",
    "batch units/s", "/ floor", "lent", "node use", "stolen", "lost",
)  # fmt: skip


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent did about load spikes in one mode, in milliseconds from the first request of each."""

    mode: str
    spikes: int
    decided_ms: tuple[float, ...]
    """Start of the round that decided, for each spike that changed anything (the journal's time)."""
    written_ms: tuple[float, ...]
    """When the first changed value was seen in a cgroup file, polled every few milliseconds."""
    triggers: tuple[str, ...]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: Machine
    settings: str
    cells: tuple[Measured, ...]
    reactions: tuple[Reaction, ...] = ()
    failures: tuple[str, ...] = ()


class Group(msgspec.Struct, frozen=True):
    """The rounds of one mode at one load."""

    cells: tuple[Measured, ...]

    def median(self, of: Callable[[Measured], float]) -> float:
        return median(map(of, self.cells))

    def spread(self, of: Callable[[Measured], float]) -> tuple[float, float]:
        values = [of(cell) for cell in self.cells]
        return min(values), max(values)


def group(results: Results, mode: str, load: float) -> Group | None:
    cells = tuple(cell for cell in results.cells if (cell.mode, cell.load) == (mode, load))
    return Group(cells) if cells else None


def modes_of(results: Results) -> list[str]:
    """Modes with at least one cell, in the order in which BY_NAME has them."""
    return [name for name in BY_NAME if any(cell.mode == name for cell in results.cells)]


def loads_of(results: Results) -> list[float]:
    return sorted({cell.load for cell in results.cells})


def ratio(results: Results, load: float, mode: str, base: str, of: Callable[[Measured], float]) -> float | None:
    """Median of one mode over the median of another at the same load."""
    here, there = group(results, mode, load), group(results, base, load)
    if here is None or there is None or not there.median(of):
        return None
    return here.median(of) / there.median(of)


def p99(cell: Measured) -> float:
    return cell.p99_ms


def units(cell: Measured) -> float:
    return cell.units_per_s


def svg(results: Results) -> str:
    """p99 against load, one line per mode."""
    lines: dict[str, list[Point]] = {}
    for mode in modes_of(results):
        groups = [(load, found) for load in loads_of(results) if (found := group(results, mode, load))]
        lines[mode] = [Point(100 * load, found.median(p99), *found.spread(p99)) for load, found in groups]
    title = "p99 latency of the online service beside twice as many burners as CPUs"
    return chart(title, "online load, % of the node", "p99, ms (median, bar: all rounds)", lines)


def markdown(results: Results) -> str:
    out = ["## Colocation", "", results.machine.line(), "", results.settings, ""]
    out += [f"- **{name}**: {BY_NAME[name].what}" for name in modes_of(results)]
    out += ["", "![p99 against load](colocation.svg)", ""]
    for load in loads_of(results):
        out += _table(results, load)
    out += _reactions(results) + _waits(results) + _service(results)
    if results.failures:
        out += ["### Cells that failed", "", *(f"- {failure}" for failure in results.failures), ""]
    return "\n".join(out)


def _table(results: Results, load: float) -> list[str]:
    out = [
        f"### Online load {load:.0%} of the node",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for mode in modes_of(results):
        if (found := group(results, mode, load)) is None:
            continue
        low, high = found.spread(p99)
        lost = sum(cell.lost for cell in found.cells)
        out.append(
            f"| {mode} | {found.median(lambda c: c.p50_ms):.2f} | {found.median(p99):.2f} ({low:.2f} to {high:.2f}) "
            f"| {found.median(lambda c: c.p999_ms):.2f} | {_times(ratio(results, load, mode, 'alone', p99))} "
            f"| {_times(ratio(results, load, mode, 'floor', p99))} | {found.median(units):,.0f} "
            f"| {_times(ratio(results, load, mode, 'floor', units))} | {_lent(found)} "
            f"| {found.median(lambda c: c.node_use):.1%} "
            f"| {found.median(lambda c: c.noise.stolen):.1%} | {lost} |"
        )
    return [*out, ""]


def _lent(found: Group) -> str:
    lent = [cell.lending.lent_cores for cell in found.cells if cell.lending is not None]
    return f"{median(lent):.2f}" if lent else ""


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _reactions(results: Results) -> list[str]:
    if not results.reactions:
        return []
    out = [
        "### From a load spike to the first change",
        "",
        "From the moment at which the load jumps from 10 % to 95 % of the node to the start of the round that took CPU back",
        "(the journal's time) and to the moment when the changed value was seen in a cgroup file (polled every 5 ms by a",
        "process that competes for the same CPUs). A spike with which cpu.idle copes alone is answered with no change.",
        "",
        "| mode | spikes | answered with a change | decided p50 / max ms | written p50 / max ms | what started the round |",
        "|---|---|---|---|---|---|",
    ]
    for reaction in results.reactions:
        kinds = ", ".join(f"{kind} {reaction.triggers.count(kind)}" for kind in sorted(set(reaction.triggers)))
        out.append(
            f"| {reaction.mode} | {reaction.spikes} | {len(reaction.written_ms)} | {_middle_and_max(reaction.decided_ms)} "
            f"| {_middle_and_max(reaction.written_ms)} | {kinds} |"
        )
    return [*out, ""]


def _middle_and_max(values: Sequence[float]) -> str:
    return f"{median(values):.0f} / {max(values):.0f}" if values else ""


def _waits(results: Results) -> list[str]:
    if all(cell.waits is None for cell in results.cells):
        return []
    out = [
        "### Run-queue wait of the online cgroup",
        "",
        "Milliseconds, medians of all rounds; every switch, log2 histogram.",
        "",
        "| load | mode | mean | p50 | p99 | p99.9 |",
        "|---|---|---|---|---|---|",
    ]
    for load in loads_of(results):
        for mode in modes_of(results):
            found = group(results, mode, load)
            waits = [cell.waits for cell in found.cells if cell.waits is not None] if found else []
            if waits:
                columns = zip(*map(msgspec.structs.astuple, waits), strict=True)
                cells = [_middle([value for value in column if value is not None]) for column in columns]
                out.append(f"| {load:.0%} | {mode} | {' | '.join(cells)} |")
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
        "| load | service us per request (all cells) | client cores | client late us (largest) | others |",
        "|---|---|---|---|---|",
    ]
    for load in loads_of(results):
        cells = Group(tuple(cell for cell in results.cells if cell.load == load))
        low, high = cells.spread(lambda c: c.online_us)
        out.append(
            f"| {load:.0%} | {cells.median(lambda c: c.online_us):.0f} ({low:.0f} to {high:.0f}) "
            f"| {cells.median(lambda c: c.client_cores):.3f} "
            f"| {cells.median(lambda c: c.lag_us):.0f} ({cells.spread(lambda c: c.lag_us)[1]:.0f}) "
            f"| {cells.median(lambda c: c.noise.others):.1%} |"
        )
    return [*out, ""]
