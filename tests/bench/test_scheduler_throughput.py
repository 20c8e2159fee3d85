"""The table of the throughput of both schedulers: rates, CPU time by program, the goal and the ratio."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from bench.scheduler_throughput import ThroughputRow, ThroughputRun, markdown


def a_row(scheduler: str, created: float, bound: float, cpu_ms: Mapping[str, float]) -> ThroughputRow:
    return ThroughputRow(
        scheduler=scheduler, pods=4000, created_per_s=created, bound_per_s=bound, p50_ms=12.3, p99_ms=45.6,
        cpu_ms=cpu_ms, overfilled_nodes=0,
    )  # fmt: skip


EXTENDED, STOCK = {"API server": 2.5, "extender": 4.0}, {"API server": 2.0}
RUN = ThroughputRun(
    machine="a machine", nodes=1000, rate=200,
    rows=(
        a_row("extended", 200.0, 199.5, EXTENDED), a_row("extended", 0, 250.0, EXTENDED),
        a_row("stock", 200.0, 200.0, STOCK), a_row("stock", 0, 500.0, STOCK),
    ),
)  # fmt: skip


def test_each_run_has_its_rates_and_the_cpu_time_of_each_program() -> None:
    lines = markdown(RUN).splitlines()
    assert "| extended | 4000 | 200 | 200 | 12 | 46 | 0 | 2.50 | 4.00 |" in lines
    assert "| extended | 4000 | existed | 250 | 12 | 46 | 0 | 2.50 | 4.00 |" in lines
    assert "| stock | 4000 | existed | 500 | 12 | 46 | 0 | 2.00 |  |" in lines
    assert "- Of pods that exist when it starts, the stock scheduler binds 2.0 times as many a second." in lines


@pytest.mark.parametrize(
    ("created", "bound", "verdict"),
    [
        (200.0, 199.5, "met, 200 of 200"),
        (200.0, 150.0, "missed, 150 of 200"),
        (20.0, 20.0, "not tested, because fewer were created, 20 of 20"),
    ],
)
def test_the_goal_is_200_pods_a_second(created: float, bound: float, verdict: str) -> None:
    first = msgspec.structs.replace(RUN.rows[0], created_per_s=created, bound_per_s=bound)
    run = msgspec.structs.replace(RUN, rows=(first, *RUN.rows[1:]))
    assert f"- Goal: 200 pods a second with the extender: {verdict} created a second." in markdown(run).splitlines()
