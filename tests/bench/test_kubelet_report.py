"""The goals on a kubelet's layout, and the table of the README."""

from __future__ import annotations

import msgspec
import pytest

from bench.__main__ import with_summary
from bench.colocation_cell import CellResult, MeasurementNoise
from bench.colocation_report import ColocationResults, cell_p99
from bench.kubelet_report import evaluate_scenario, markdown, summary_table
from tests.bench.builders import cell, results

NAME = "burstable-burstable-cpu-60"


def measured(
    stock_ms: float, floor_ms: float, agent: tuple[float, float, float], stock_use: float = 0.99
) -> ColocationResults:
    """Return results with 2 ms alone and 1,000 units of a stock kubelet; `agent` has p99, units and busy share."""
    p99_ms, units, node_use = agent
    return results(
        cell("alone", 2.0, 0, scenario=NAME),
        cell("floor", floor_ms, 990, scenario=NAME),
        cell("stock", stock_ms, 1000, scenario=NAME, node_use=stock_use),
        cell("ours", p99_ms, units, scenario=NAME, node_use=node_use),
    )


@pytest.mark.parametrize(
    ("result", "met"),
    [
        # A stock kubelet is fine: the agent may cost no more than 5 % of p99 and 3 % of batch work.
        (measured(6.0, 5.0, (5.25, 970, 0.95)), {"of_best": True, "units_of_stock": True, "node_use": True}),
        (measured(5.0, 6.0, (5.26, 969, 0.949)), {"of_best": False, "units_of_stock": False, "node_use": False}),
        # It fails from 3 x alone on: batch work does not count, the rescue does.
        (measured(6.1, 2.0, (2.03, 500, 0.96)), {"of_best": True, "of_failing_stock": True, "node_use": True}),
        (measured(60.0, 5.0, (21.0, 500, 0.96)), {"of_best": False, "of_failing_stock": False, "node_use": True}),
        # The disk is the limit, not the CPU.
        (measured(5.0, 5.0, (5.0, 1000, 0.5), stock_use=0.6), {"of_best": True, "units_of_stock": True}),
    ],
    ids=["good", "all missed", "rescued", "not rescued", "disk"],
)
def test_goals_depend_on_what_a_stock_kubelet_gives(result: ColocationResults, met: dict[str, bool]) -> None:
    assert evaluate_scenario(result, NAME).met() == met


def test_without_a_stock_kubelet_there_is_no_goal() -> None:
    result = results(cell("alone", 2.0, 0, scenario=NAME), cell("ours", 2.0, 1, scenario=NAME))
    assert evaluate_scenario(result, NAME).met() == {}


def test_the_table_shows_misses_and_the_noise() -> None:
    result = measured(60.0, 5.0, (21.0, 500, 0.96))
    loud = msgspec.structs.replace(cell("partition", 3.0, 450, scenario=NAME), noise=MeasurementNoise(0.2, 0.001))
    result = results(*result.cells, cell("ours", 23.0, 520, scenario=NAME), loud)
    text, _, *table = summary_table(result)
    assert "of which 1 of 3 are met" in text
    assert (
        "the rounds of one mode in one scenario are 9% of their median apart in half of the cases, 9% at worst" in text
    )
    assert "Other work on the machine disturbed 1 of 6 cells. They are left out" in text
    assert table[-1] == (
        f"| {NAME} | 2.0 | 5.0 | 60.0 | 3.0 |  | 22.0 (21.0 to 23.0) | **4.40 MISS** | **0.37 MISS** | 0.45 |  | 0.51 | 96% |"
    )
    section = markdown(result)
    assert "| ours | 0.60 | 22.00 (21.00 to 23.00) | 9.00 | 11.00 | 0.37 | 510 (500 to 520) | 0.51 |" in section
    assert "Online Burstable, batch Burstable; 60 % of the node, steadily; batch computes." in section


def test_disturbed_cells_count_only_where_there_is_no_other() -> None:
    def disturbed(mode: str, p99_ms: float, others: float) -> CellResult:
        return msgspec.structs.replace(cell(mode, p99_ms, 1, scenario=NAME), noise=MeasurementNoise(others, 0.0))

    quiet = cell("ours", 5.0, 1, scenario=NAME)
    loud = [disturbed("ours", 90.0, 0.03), disturbed("stock", 7.0, 0.04), disturbed("stock", 8.0, 0.05)]
    result = results(quiet, *loud)
    medians = {mode: group.median(cell_p99) for mode in ("ours", "stock") if (group := result.group(mode, NAME))}
    assert medians == {"ours": 5.0, "stock": 7.0}


def test_the_table_replaces_what_is_between_the_marks_of_the_readme() -> None:
    begin, end = "<!-- bench/results/colocation.summary.md -->", "<!-- end -->"
    assert with_summary(f"a\n{begin}\nold\n{end}\nb\n", "new\n") == f"a\n{begin}\nnew\n{end}\nb\n"
    assert with_summary("no marks\n", "new\n") == "no marks\n"
