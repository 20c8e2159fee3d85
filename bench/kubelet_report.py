"""Goals and tables of a colocation run on the cgroups that a kubelet makes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from bench.colocation_modes import MODES_BY_NAME as MODES
from bench.colocation_report import (
    CellGroup,
    ColocationResults,
    cell_node_use,
    cell_p99,
    cell_units,
    instrument_table,
    missing_cells,
    reaction_table,
)
from bench.colocation_scenarios import SCENARIOS_BY_NAME as SCENARIOS
from bench.machine import markdown_table

MAX_P99_OF_BEST, MIN_UNITS_OF_STOCK, MIN_NODE_USE = 1.05, 0.97, 0.95
STOCK_FAILS_FROM = 3.0
"""A stock kubelet fails in a scenario where its p99 exceeds that of the service alone by this factor."""
MAX_P99_OF_FAILING_STOCK = 1 / 3


class ScenarioGoals(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent reached in one scenario, by medians; None where a mode was not measured or the goal does not apply."""

    of_best: float | None
    """The agent's p99 relative to the lower one of a stock kubelet's and the floor's."""
    stock_of_alone: float | None
    of_failing_stock: float | None
    """The agent's p99 relative to a stock kubelet's, where that fails."""
    units_of_stock: float | None
    """Batch work relative to a stock kubelet's, where that does not fail."""
    node_use: float | None
    """Busy share of the node, where a stock kubelet reaches the goal: a disk may be the limit instead."""

    def met(self) -> dict[str, bool]:
        """Return by goal whether it is met, for those that apply."""
        results = {
            "of_best": None if self.of_best is None else self.of_best <= MAX_P99_OF_BEST,
            "of_failing_stock": None
            if self.of_failing_stock is None
            else self.of_failing_stock <= MAX_P99_OF_FAILING_STOCK,
            "units_of_stock": None if self.units_of_stock is None else self.units_of_stock >= MIN_UNITS_OF_STOCK,
            "node_use": None if self.node_use is None else self.node_use >= MIN_NODE_USE,
        }
        return {name: result for name, result in results.items() if result is not None}


def evaluate_scenario(results: ColocationResults, scenario: str) -> ScenarioGoals:
    """Return what the agent reached in a scenario."""
    of_stock = results.ratio(scenario, "ours", "stock", cell_p99)
    of_floor = results.ratio(scenario, "ours", "floor", cell_p99)
    stock_of_alone = results.ratio(scenario, "stock", "alone", cell_p99)
    fails = stock_of_alone is not None and stock_of_alone > STOCK_FAILS_FROM
    stock, agent = results.group("stock", scenario), results.group("ours", scenario)
    is_busy = stock is not None and stock.median(cell_node_use) >= MIN_NODE_USE
    return ScenarioGoals(
        of_best=None if of_stock is None or of_floor is None else max(of_stock, of_floor),
        stock_of_alone=stock_of_alone,
        of_failing_stock=of_stock if fails else None,
        units_of_stock=None
        if fails or stock_of_alone is None
        else results.ratio(scenario, "ours", "stock", cell_units),
        node_use=agent.median(cell_node_use) if agent is not None and is_busy else None,
    )


SUMMARY_MODES = ("alone", "floor", "stock", "partition", "koordinator", "ours")
SUMMARY_HEADS = (
    "scenario (online-batch-work-load)",
    *(f"{mode} ms" for mode in SUMMARY_MODES[:-1]), "ours ms (all rounds)",
    "ours / better of stock and floor", "ours / stock that fails", "batch: partition", "koordinator", "ours / stock",
    "node busy",
)  # fmt: skip


def summary_table(results: ColocationResults) -> list[str]:
    """Render a line for each scenario: p99 of the service, batch work relative to a stock kubelet's, and the goals."""
    goals = {name: evaluate_scenario(results, name) for name in results.scenarios()}
    verdicts = [verdict for each in goals.values() for verdict in each.met().values()]
    rows = [_summary_row(results, name, each) for name, each in goals.items()]
    text = (
        "p99 latency of the service in milliseconds, medians, and batch work as a part of a stock kubelet's. Goals of the "
        f"agent (`ours`), of which {sum(verdicts)} of {len(verdicts)} are met: a p99 of at most {MAX_P99_OF_BEST:g} x the "
        "better of a stock kubelet (`stock`) and the best that the kernel gives (`floor`); at least "
        f"{MIN_UNITS_OF_STOCK:g} of a stock kubelet's batch work where its p99 is at most {STOCK_FAILS_FROM:g} x that without "
        f"batch work (`alone`), and at most a third of its p99 where it is more; at least {MIN_NODE_USE:.0%} of the node "
        f"busy, where a stock kubelet reaches that. {_noise_text(results)}"
    )
    return [text, "", *markdown_table(SUMMARY_HEADS, rows)]


def _summary_row(results: ColocationResults, scenario: str, goals: ScenarioGoals) -> list[str]:
    met = goals.met()
    p99s = [_milliseconds(results.group(mode, scenario), ranged=mode == "ours") for mode in SUMMARY_MODES]
    units = [results.ratio(scenario, mode, "stock", cell_units) for mode in ("partition", "koordinator")]
    done = results.ratio(scenario, "ours", "stock", cell_units)
    return [
        scenario, *p99s,
        _marked(goals.of_best, met.get("of_best")), _marked(goals.of_failing_stock, met.get("of_failing_stock")),
        *(_marked(value, None) for value in units), _marked(done, met.get("units_of_stock")),
        _marked(_node_use(results.group("ours", scenario)), met.get("node_use"), percent=True),
    ]  # fmt: skip


def _milliseconds(group: CellGroup | None, *, ranged: bool) -> str:
    if group is None:
        return ""
    low, high = group.spread(cell_p99)
    return f"{group.median(cell_p99):.1f}" + (f" ({low:.1f} to {high:.1f})" if ranged else "")


def _node_use(group: CellGroup | None) -> float | None:
    return None if group is None else group.median(cell_node_use)


def _marked(value: float | None, met: bool | None, *, percent: bool = False) -> str:
    """Return a value, marked if it misses its goal; empty for None."""
    if value is None:
        return ""
    text = f"{value:.0%}" if percent else f"{value:.2f}"
    return f"**{text} MISS**" if met is False else text


def _noise_text(results: ColocationResults) -> str:
    """Return how far rounds of the same mode and scenario are apart, and how many cells other work disturbed."""
    spreads = []
    for scenario in results.scenarios():
        for mode in results.modes(scenario):
            group = results.group(mode, scenario)
            if group is not None and len(group.cells) > 1 and (middle := group.median(cell_p99)):
                low, high = group.spread(cell_p99)
                spreads.append((high - low) / middle)
    disturbed = sum(cell.noise.level() >= 1 for cell in results.cells)
    during = (
        f"Other work on the machine disturbed {disturbed} of {len(results.cells)} cells. They are left out where the same "
        "mode has another one in the scenario."
    )
    if not spreads:
        return f"Each was measured once, so the noise is unknown. {during}"
    return (
        f"Noise: the rounds of one mode in one scenario are {median(spreads):.0%} of their median apart in half of the cases, "
        f"{max(spreads):.0%} at worst. {during}"
    )


DETAIL_COLUMNS = (
    "mode", "p50 ms", "p99 ms (all rounds)", "p99.9 ms", "p99 / alone", "p99 / stock", "batch units/s (all rounds)", "/ stock",
    "node busy", "agent cores", "us a request", "stolen", "lost",
)  # fmt: skip


def markdown(results: ColocationResults) -> str:
    """Render the section of RESULTS.md."""
    out = ["## Colocation on a kubelet's cgroups", "", results.machine.line(), ""]
    out += [*LAYOUT_TEXT, "", results.settings, ""]
    out += [f"- **{name}**: {MODES[name].what}" for name in results.modes()]
    out += ["", "![p99 in each scenario](colocation.svg)", "", *summary_table(results), ""]
    for scenario in results.scenarios():
        out += _detail_table(results, scenario)
    out += [*reaction_table(results), *instrument_table(results), *missing_cells(results)]
    return "\n".join(out)


LAYOUT_TEXT = (
    "Cgroups, weights and limits as a kubelet makes them: `kubepods` with the weight of the node's CPUs beside the system's",
    "cgroup, the class Burstable with the sum of its pods' requests, the class BestEffort with the least weight, pods and",
    "containers by their requests. The online pod requests (and, if Guaranteed, is limited to) 90 % of the node, 25 % if",
    "Burstable; the batch pod 5 % if Burstable. The agent runs in a Burstable pod with the chart's request, and knows the pods",
    "from their manifests. On cgroup version 1 the names are those of the driver cgroupfs, on version 2 systemd's.",
)


def _detail_table(results: ColocationResults, scenario: str) -> list[str]:
    rows: list[Sequence[str]] = []
    for mode in results.modes(scenario):
        if (group := results.group(mode, scenario)) is None:
            continue
        (low, high), (fewest, highest) = group.spread(cell_p99), group.spread(cell_units)
        agent = group.median(lambda c: c.agent_cores)
        rows.append(
            (
                mode, f"{group.median(lambda c: c.p50_ms):.2f}", f"{group.median(cell_p99):.2f} ({low:.2f} to {high:.2f})",
                f"{group.median(lambda c: c.p999_ms):.2f}", _marked(results.ratio(scenario, mode, "alone", cell_p99), None),
                _marked(results.ratio(scenario, mode, "stock", cell_p99), None),
                f"{group.median(cell_units):,.0f} ({fewest:,.0f} to {highest:,.0f})",
                _marked(results.ratio(scenario, mode, "stock", cell_units), None),
                f"{group.median(cell_node_use):.1%}", f"{agent:.3f}" if agent else "",
                f"{group.median(lambda c: c.online_us):.0f}", f"{group.median(lambda c: c.noise.stolen):.1%}",
                f"{sum(cell.lost for cell in group.cells)}",
            )
        )  # fmt: skip
    table = markdown_table(DETAIL_COLUMNS, rows)
    return [f"### Scenario {scenario}", "", f"{SCENARIOS[scenario].what}.", "", *table, ""]
