"""`dioptase value` in words: numbers of the node of two hours in tests/builders/full_node.py, and what is not known."""

from __future__ import annotations

import msgspec
import pytest

from api.colocation import ColocationTotals, OnlineTotals
from api.snapshot import RunqLatency
from cli import formats
from cli.colocation_report import NodeTotals, fleet_report, harm_ms, node_report, unknowns
from tests.builders.four_cpu_node import S, waits
from tests.builders.full_node import RICH_TOTALS

REPORT = NodeTotals(node="n1", act="on", totals=RICH_TOTALS)


def changed(**fields: object) -> ColocationTotals:
    return msgspec.structs.replace(RICH_TOTALS, **fields)


def test_a_node_in_full() -> None:
    """Two hours, so mean cores are half of the core-hours; 18,000 s are 5 core-hours, 36 s in 7,200 s are 5 ms/s."""
    head, *lines = node_report(REPORT)
    assert head.startswith("n1: 2.0 h measured since 2023-11-1")
    assert "\n".join(lines).splitlines() == [
        "",
        "CPU                     CORE-HOURS  MEAN CORES",
        "lent to reclaimed pods        5.00        2.50",
        "used by reclaimed pods        4.25        2.13  85 % of lent",
        "  default                     4.00        2.00",
        "  team-a                      0.25        0.13",
        "",
        "RUN-QUEUE LATENCY OF ONLINE PODS    TIME  ONLINE CORES    WAITS      P50      P99     MEAN",
        "with batch work                   90 min          1.50  540,000  6.22 µs   128 µs   183 µs",
        "without batch work                30 min          1.20  180,000  6.22 µs  60.8 µs  13.6 µs",
        "Online tasks waited 36.0 s for reclaimed pods: 5.00 ms a second.",
        "",
        "TAKEN BACK      RULE               TIMES",
        "CPU reductions  wait_above_target     12",
        "evictions       below_min              1",
    ]


def test_before_the_first_interval() -> None:
    for totals in (None, ColocationTotals(since_wall_ns=1)):
        assert node_report(NodeTotals(node="", totals=totals)) == [
            "No cycle has been counted yet: try again in a few seconds."
        ]


@pytest.mark.parametrize(
    ("totals", "acts", "expected"),
    [
        (RICH_TOTALS, ("on",), []),
        (RICH_TOTALS, ("off",), ["The agent runs with --act off, so it lends no CPU"]),
        (RICH_TOTALS, ("on", "dry-run", ""), ["1 of 3 agents runs with --act dry-run"]),
        (changed(reclaimed_ns={}), ("on",), ["No reclaimed pod has used CPU"]),
        (changed(idle=OnlineTotals()), ("on",), ["Reclaimed pods were busy in all the measured time"]),
        (changed(busy=OnlineTotals()), ("on",), ["Reclaimed pods were idle in all the measured time"]),
        (
            changed(busy=OnlineTotals(), idle=OnlineTotals()),
            ("on",),
            ["The run-queue latency of online pods was not measured"],
        ),
        (changed(interference_duration_ns=0), ("on",), ["The time that online pods waited for reclaimed pods was not"]),
        (
            changed(idle=OnlineTotals(duration_ns=S, cpu_ns=S, latency=waits({3: 9}, 1))),
            ("on",),
            ["The p99 without batch work is not reliable: 9 waits were measured, 1,000 are needed."],
        ),
        (
            changed(idle=msgspec.structs.replace(RICH_TOTALS.idle, cpu_ns=360 * S)),
            ("on",),
            ["Online pods used 1.50 cores with batch work and 0.20 cores without"],
        ),
    ],
)
def test_what_is_not_known_is_said(totals: ColocationTotals, acts: tuple[str, ...], expected: list[str]) -> None:
    actual = list(unknowns(totals, acts))
    assert len(actual) == len(expected), actual
    for sentence, start in zip(actual, expected, strict=True):
        assert sentence.startswith(start)


def test_unknown_numbers_are_dashes_and_not_zeros() -> None:
    totals = ColocationTotals(
        since_wall_ns=1, duration_ns=60 * S, busy=OnlineTotals(latency=RunqLatency(sum_ns=0, count=0, slots=(0,) * 27))
    )
    assert harm_ms(totals) is None
    lines = node_report(NodeTotals(node="n1", act="on", totals=totals))
    assert next(line for line in lines if line.startswith("without")).split() == [
        "without",
        "batch",
        "work",
        *[formats.ABSENT] * 6,
    ]
    assert "Nothing was taken back from reclaimed pods." in lines


def test_many_namespaces_are_summed() -> None:
    totals = changed(reclaimed_ns={f"team-{i:02}": (20 - i) * 3600 * S for i in range(13)} | {"_other": 3600 * S})
    lines = node_report(NodeTotals(node="n1", act="on", totals=totals))
    assert next(line for line in lines if "more" in line).split() == ["4", "more", "namespaces", "28.00", "14.00"]


def test_a_fleet_has_a_row_for_each_node_and_the_sum() -> None:
    other = NodeTotals(node="n2", act="off", totals=changed(reclaimed_ns={"default": 3600 * S}, idle=OnlineTotals()))
    lines = fleet_report([REPORT, other, NodeTotals(node="n3", problem="no agent runs here")])
    rows = {line.split()[0]: line for line in lines if line.startswith(("n1", "n2", "n3", "3 nodes"))}
    assert rows["n1"].split() == [
        "n1", "2.0", "h", "5.00", "4.25", "85", "%", "128", "µs", "60.8", "µs", "5.00", "12", "1", "on",
    ]  # fmt: skip
    assert "✕ no agent runs here" in rows["n3"]
    assert rows["3"].split()[:7] == ["3", "nodes", "4.0", "h", "10.00", "5.25", "53"]
    assert any(line.startswith("- 1 of 2 agents runs with --act off") for line in lines)
