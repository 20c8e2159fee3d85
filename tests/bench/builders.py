"""Cells and results of a colocation run for the tests of bench.colocation, its report and its figures."""

from __future__ import annotations

from bench.colocation_cell import CellResult, MeasurementNoise
from bench.colocation_report import ColocationResults, Reaction
from bench.colocation_scenarios import CURVE_SCENARIO
from bench.machine import BenchMachine

MACHINE = BenchMachine(
    date="2026-01-02 03:04 UTC", kernel="6.18.0", cpu="Some CPU", cpus=2, hypervisor=True, cgroups="v2", python="3.11.2"
)


def cell(
    mode: str, p99_ms: float, units: float, *, scenario: str = CURVE_SCENARIO, node_use: float = 0.97
) -> CellResult:
    return CellResult(
        mode=mode, scenario=scenario, round=1, seconds=8, requests=1000, lost=0, p50_ms=0.6, p99_ms=p99_ms, p999_ms=9,
        units_per_s=units, node_use=node_use, online_us=520, client_cores=0.05, lag_us=30, noise=MeasurementNoise(0.01, 0.002),
    )  # fmt: skip


def results(*cells: CellResult, reactions: tuple[Reaction, ...] = ()) -> ColocationResults:
    return ColocationResults(machine=MACHINE, settings="as ever", cells=cells, reactions=reactions)


CURVE = results(
    cell("alone", 4.0, 0),
    cell("floor", 8.0, 1000),
    cell("ours", 8.2, 990),
    cell("ours-protect", 4.4, 600),
    cell("ours-1ms", 4.2, 100),
    cell("canonical", 40.0, 800),
)
