"""Medians, goals, the trade-off curve and tables of a colocation run. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from bench.colocation_cell import CellResult
from bench.colocation_layouts import FLAT
from bench.colocation_modes import MODES_BY_NAME as MODES
from bench.colocation_scenarios import CURVE_SCENARIO
from bench.colocation_scenarios import SCENARIOS_BY_NAME as SCENARIOS
from bench.machine import BenchMachine, markdown_table

CellMetric = Callable[[CellResult], float]


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """How batch work lost its CPU after jumps of the online load; milliseconds from the first request of each jump."""

    mode: str
    kind: str
    """`steps` or `bursts`."""
    steps: int
    taken_ms: tuple[float, ...]
    """Time until batch work's CPU was taken back, by the scheduler or by the agent, for each step in which it was."""
    never: int
    """Number of steps in which it was not taken back."""
    decided_ms: tuple[float, ...]
    """Start of the cycle in which the agent decided a smaller quota, by the journal's time."""
    written_ms: tuple[float, ...]
    """Time of the first change of a cgroup file, polled every few milliseconds."""
    triggers: tuple[str, ...]


class CellGroup(msgspec.Struct, frozen=True):
    """The repetitions of one mode in one scenario."""

    cells: tuple[CellResult, ...]

    def median(self, of: CellMetric) -> float:
        return median(map(of, self.cells))

    def spread(self, of: CellMetric) -> tuple[float, float]:
        values = [of(cell) for cell in self.cells]
        return min(values), max(values)


class ColocationResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: BenchMachine
    settings: str
    layout: str = FLAT
    """Where the cgroups were: a key of bench.colocation.LAYOUTS."""
    cells: tuple[CellResult, ...]
    reactions: tuple[Reaction, ...] = ()
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Repetitions left out for lack of time."""

    def group(self, mode: str, scenario: str) -> CellGroup | None:
        """Return the cells of a mode in a scenario that other work did not disturb, else the least disturbed one; None if not
        measured."""
        cells = [cell for cell in self.cells if (cell.mode, cell.scenario) == (mode, scenario)]
        if not cells:
            return None
        quiet = tuple(cell for cell in cells if cell.noise.level() < 1)
        return CellGroup(quiet or (min(cells, key=lambda cell: cell.noise.level()),))

    def modes(self, scenario: str | None = None) -> list[str]:
        """Return the modes with a cell in this scenario, or in any, in the order of bench.colocation_modes."""
        there = {cell.mode for cell in self.cells if scenario in (None, cell.scenario)}
        return [name for name in MODES if name in there]

    def scenarios(self) -> list[str]:
        """Return the scenarios with a cell, in the order of bench.colocation_modes."""
        return [name for name in SCENARIOS if any(cell.scenario == name for cell in self.cells)]

    def ratio(self, scenario: str, mode: str, base: str, of: CellMetric) -> float | None:
        """Return the median of a mode divided by the median of another in the same scenario."""
        here, there = self.group(mode, scenario), self.group(base, scenario)
        if here is None or there is None or not there.median(of):
            return None
        return here.median(of) / there.median(of)


def cell_p99(cell: CellResult) -> float:
    return cell.p99_ms


def cell_units(cell: CellResult) -> float:
    return cell.units_per_s


def cell_node_use(cell: CellResult) -> float:
    return cell.node_use


MAX_P99_OF_FLOOR, MIN_UNITS_OF_FLOOR, MIN_NODE_USE = 1.05, 0.95, 0.95
MAX_P99_OF_ALONE = 1.10
REACTION_P50_MS, REACTION_P99_MS = 200.0, 1000.0


class ColocationGoal(msgspec.Struct, frozen=True):
    """One goal in one scenario, with its measured value."""

    met: bool
    text: str

    def line(self) -> str:
        return f"- {'PASS' if self.met else 'MISS'} {self.text}"


class TradeoffPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One mode on the trade-off curve."""

    mode: str
    target_ms: float | None
    batch: float
    """Batch work done, relative to the floor."""
    p99: float
    """Latency of the online service, relative to `alone`."""
    low: float
    high: float


def tradeoff_curve(results: ColocationResults, scenario: str = CURVE_SCENARIO) -> list[TradeoffPoint]:
    """Return a point per mode with batch work, least work first; empty if `alone` or `floor` was not measured."""
    points = []
    for mode in results.modes(scenario):
        batch = results.ratio(scenario, mode, "floor", cell_units)
        times = results.ratio(scenario, mode, "alone", cell_p99)
        group, alone = results.group(mode, scenario), results.group("alone", scenario)
        if not MODES[mode].batch or batch is None or times is None or group is None or alone is None:
            continue
        low, high = (value / alone.median(cell_p99) for value in group.spread(cell_p99))
        points.append(
            TradeoffPoint(mode=mode, target_ms=MODES[mode].target_ms, batch=batch, p99=times, low=low, high=high)
        )
    return sorted(points, key=lambda point: point.batch)


def tradeoff_markdown(results: ColocationResults) -> list[str]:
    """Render the table of the trade-off."""
    points = tradeoff_curve(results)
    if not points:
        return []
    out = [
        "### Reclaimed CPU against its cost",
        "",
        f"In `{CURVE_SCENARIO}`: batch work done as a part of the floor's, and the service's p99 relative to",
        "`alone`, both medians; the targets are the `targetWaitMs` of policy `latency`.",
        "",
        "![p99 against batch work done](colocation_flat.tradeoff.svg)",
        "",
    ]
    heads = ("mode", "target ms", "batch / floor", "p99 / alone (all rounds)", "within 1.10x alone")
    rows = [
        (
            point.mode, "" if point.target_ms is None else f"{point.target_ms:g}", f"{point.batch:.2f}",
            f"{point.p99:.2f} ({point.low:.2f} to {point.high:.2f})", "yes" if point.p99 <= MAX_P99_OF_ALONE else "no",
        )
        for point in points
    ]  # fmt: skip
    return [*out, *markdown_table(heads, rows), ""]


def evaluate_colocation_goals(results: ColocationResults) -> list[ColocationGoal]:
    """Evaluate all goals in the scenarios that were measured."""
    goals: list[ColocationGoal] = []
    for scenario in results.scenarios():
        goals += _goals_against_floor(results, scenario)
    goals += [goal for scenario in results.scenarios() for goal in _latency_policy_goal(results, scenario)]
    return goals + [goal for reaction in results.reactions for goal in _reaction_goal(reaction)]


def _goals_against_floor(results: ColocationResults, scenario: str) -> list[ColocationGoal]:
    times = results.ratio(scenario, "ours", "floor", cell_p99)
    done = results.ratio(scenario, "ours", "floor", cell_units)
    group = results.group("ours", scenario)
    if times is None or done is None or group is None:
        return []
    use = group.median(cell_node_use)
    return [
        ColocationGoal(
            times <= MAX_P99_OF_FLOOR,
            f"{scenario}: ours has a p99 of at most {MAX_P99_OF_FLOOR:g}x the floor's: {times:.2f}x",
        ),
        ColocationGoal(
            done >= MIN_UNITS_OF_FLOOR, f"{scenario}: and batch work of at least {MIN_UNITS_OF_FLOOR:g}x: {done:.2f}x"
        ),
        ColocationGoal(use >= MIN_NODE_USE, f"{scenario}: and uses at least {MIN_NODE_USE:.0%} of the node: {use:.1%}"),
    ]


def _latency_policy_goal(results: ColocationResults, scenario: str) -> list[ColocationGoal]:
    """Evaluate the target of policy `latency` with most batch work within the goal; otherwise the one nearest to the goal."""
    points = [point for point in tradeoff_curve(results, scenario) if point.target_ms is not None]
    if not points:
        return []
    within = [point for point in points if point.p99 <= MAX_P99_OF_ALONE]
    best = max(within, key=lambda p: p.batch) if within else min(points, key=lambda p: p.p99)
    text = (
        f"{scenario}: with a stricter target, a p99 of at most {MAX_P99_OF_ALONE:.2f}x alone: {best.p99:.2f}x with a target of "
        f"{best.target_ms:g} ms, at which batch work does {best.batch:.2f} of the floor's"
    )
    return [ColocationGoal(bool(within), text)]


def reaction_quantile(reaction: Reaction, q: float) -> float:
    """Return the quantile over all steps that had CPU to take back; steps in which that failed count as infinite."""
    every = sorted(reaction.taken_ms) + [math.inf] * reaction.never
    return every[min(math.ceil(q * len(every)) - 1, len(every) - 1)] if every else math.nan


def format_reaction_ms(value_ms: float) -> str:
    """Format milliseconds; infinite means longer than the step."""
    return "" if math.isnan(value_ms) else f"{value_ms:.0f} ms" if math.isfinite(value_ms) else "later than the step"


def _reaction_goal(reaction: Reaction) -> Sequence[ColocationGoal]:
    if not reaction.taken_ms and not reaction.never:
        return ()
    return [
        ColocationGoal(
            reaction_quantile(reaction, q) <= limit_ms,
            f"{reaction.mode}, {reaction.kind}: CPU is taken back within {limit_ms:g} ms in {words}: "
            f"{format_reaction_ms(reaction_quantile(reaction, q))} "
            f"({len(reaction.taken_ms) + reaction.never} of {reaction.steps} "
            "jumps had something to take)",
        )
        for q, limit_ms, words in ((0.5, REACTION_P50_MS, "the median"), (0.99, REACTION_P99_MS, "99 of 100"))
    ]


SCENARIO_COLUMNS = (
    "mode", "p50 ms", "p99 ms (all rounds)", "p99.9 ms", "p99 / alone", "p99 / floor",
    "batch units/s", "/ floor", "lent", "node use", "us a request", "stolen", "lost",
)  # fmt: skip


def markdown(results: ColocationResults) -> str:
    """Render the section of RESULTS.md."""
    out = ["## Colocation in two cgroups side by side", "", results.machine.line(), "", results.settings, ""]
    out += [f"- **{name}**: {MODES[name].what}" for name in results.modes()]
    out += ["", "![p99 in each scenario](colocation_flat.svg)", ""]
    if goals := evaluate_colocation_goals(results):
        out += ["Goals:", "", *(goal.line() for goal in goals), ""]
    for scenario in results.scenarios():
        out += _scenario_table(results, scenario)
    out += (
        tradeoff_markdown(results) + reaction_table(results) + _runq_latency_table(results) + instrument_table(results)
    )
    out += missing_cells(results)
    return "\n".join(out)


def missing_cells(results: ColocationResults) -> list[str]:
    """Render what failed, and what there was no time for."""
    out: list[str] = []
    if results.failures:
        out += ["### Cells that failed", "", *(f"- {failure}" for failure in results.failures), ""]
    if results.left_out:
        out += ["### Repetitions for which there was no time", "", *(f"- {which}" for which in results.left_out), ""]
    return out


def _scenario_table(results: ColocationResults, scenario: str) -> list[str]:
    rows = []
    for mode in results.modes(scenario):
        if (group := results.group(mode, scenario)) is None:
            continue
        low, high = group.spread(cell_p99)
        lost = sum(cell.lost for cell in group.cells)
        rows.append(
            (
                mode, f"{group.median(lambda c: c.p50_ms):.2f}", f"{group.median(cell_p99):.2f} ({low:.2f} to {high:.2f})",
                f"{group.median(lambda c: c.p999_ms):.2f}", _times(results.ratio(scenario, mode, "alone", cell_p99)),
                _times(results.ratio(scenario, mode, "floor", cell_p99)), f"{group.median(cell_units):,.0f}",
                _times(results.ratio(scenario, mode, "floor", cell_units)), _reclaimed_cell(group),
                f"{group.median(cell_node_use):.1%}", f"{group.median(lambda c: c.online_us):.0f}",
                f"{group.median(lambda c: c.noise.stolen):.1%}", f"{lost}",
            )
        )  # fmt: skip
    table = markdown_table(SCENARIO_COLUMNS, rows)
    return [f"### Scenario {scenario}", "", f"{SCENARIOS[scenario].what}.", "", *table, ""]


def _reclaimed_cell(group: CellGroup) -> str:
    reclaimable = [cell.lending.reclaimable_cores for cell in group.cells if cell.lending is not None]
    return f"{median(reclaimable):.2f}" if reclaimable else ""


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


REACTION_COLUMNS = (
    "mode", "jumps", "to take back", "taken back p50", "p99", "most", "not within it", "quota smaller",
    "decided p50, most ms", "written p50, most ms", "trigger of the cycle",
)  # fmt: skip


def reaction_table(results: ColocationResults) -> list[str]:
    if not results.reactions:
        return []
    out = [
        "### From a jump of the load to batch work's CPU taken back",
        "",
        "From the moment at which the load jumps from 10 % to 90 % of the node, until the CPU time of batch work in the last",
        "50 ms has fallen by nine tenths of the required amount: by the scheduler, according to the agent's priorities, or by",
        "a quota. *Quota*: cases in which the agent decided a smaller quota because online pods waited too long nevertheless:",
        "the journal's time of that cycle, and the time of the change in a cgroup file. *Steps*: 1.2 s long, at even",
        "distances; *bursts*: of random lengths and distances.",
        "",
    ]
    rows = []
    for reaction in results.reactions:
        kinds = ", ".join(f"{kind} {reaction.triggers.count(kind)}" for kind in sorted(set(reaction.triggers)))
        p50, late, highest = (format_reaction_ms(reaction_quantile(reaction, q)) for q in (0.5, 0.99, 1.0))
        rows.append(
            (
                reaction.mode, f"{reaction.steps} {reaction.kind}", f"{len(reaction.taken_ms) + reaction.never}",
                p50, late, highest, f"{reaction.never}", f"{len(reaction.decided_ms)}",
                _middle_and_max(reaction.decided_ms), _middle_and_max(reaction.written_ms), kinds,
            )
        )  # fmt: skip
    return [*out, *markdown_table(REACTION_COLUMNS, rows, text_columns=2), ""]


def _middle_and_max(values: Sequence[float]) -> str:
    return f"{median(values):.0f}, {max(values):.0f}" if values else ""


def _runq_latency_table(results: ColocationResults) -> list[str]:
    if all(cell.waits is None for cell in results.cells):
        return []
    out = [
        "### Run-queue wait of the online cgroup",
        "",
        "Milliseconds, medians of all rounds; every switch, log2 histogram.",
        "",
    ]
    rows = []
    for scenario in results.scenarios():
        for mode in results.modes(scenario):
            group = results.group(mode, scenario)
            waits = [cell.waits for cell in group.cells if cell.waits is not None] if group else []
            if waits:
                columns = zip(*map(msgspec.structs.astuple, waits), strict=True)
                cells = [_middle([value for value in column if value is not None]) for column in columns]
                rows.append((scenario, mode, *cells))
    return [*out, *markdown_table(("scenario", "mode", "mean", "p50", "p99", "p99.9"), rows, text_columns=2), ""]


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.3f}" if values else ""


def instrument_table(results: ColocationResults) -> list[str]:
    """Render the quality of the instruments: cost of a request, share and delay of the client."""
    out = [
        "### Instruments",
        "",
        "CPU time of the service per request (its cost plus socket calls), CPU of the client, how late the client sent on",
        "average, and how much of the node others used; medians of all modes.",
        "",
    ]
    heads = ("scenario", "service us per request (all cells)", "client cores", "client late us (largest)", "others")
    rows = []
    for scenario in results.scenarios():
        cells = CellGroup(tuple(cell for cell in results.cells if cell.scenario == scenario))
        low, high = cells.spread(lambda c: c.online_us)
        rows.append(
            (
                scenario, f"{cells.median(lambda c: c.online_us):.0f} ({low:.0f} to {high:.0f})",
                f"{cells.median(lambda c: c.client_cores):.3f}",
                f"{cells.median(lambda c: c.lag_us):.0f} ({cells.spread(lambda c: c.lag_us)[1]:.0f})",
                f"{cells.median(lambda c: c.noise.others):.1%}",
            )
        )  # fmt: skip
    return [*out, *markdown_table(heads, rows), ""]
