"""Nodes and pods in rows: numbers of a cycle, sums, interference, and unknown values."""

from __future__ import annotations

import msgspec
import pytest

from cli import formats
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import AgentReply
from cli.fleet.node_table import (
    NODE_SORTS,
    POD_SORTS,
    NodeRow,
    interference_ms,
    node_row,
    node_status,
    node_table,
    pod_rows,
    pod_table,
    problem_text,
)
from cli.tables import TableHeading, format_node_names, format_table
from exporters.view.cycle_view import BlameView, RunqLatencyView, View, build_view
from exporters.view.decision_view import eviction_view
from tests.builders.four_cpu_node import BATCH, bare_cycle
from tests.builders.full_node import RICH_EVICTIONS, full_cycle

VIEW = build_view(full_cycle())
BATCH_CGROUP = BATCH.containers[0].cgroup


def reply(node: str = "n1", view: View | None = VIEW, problem: str = "", cpu: str = "3920m") -> AgentReply[View]:
    return AgentReply(AgentEndpoint(node=node, pod=f"agent-{node}", allocatable_cpu=cpu), view, problem)


def blamed(*culprits: tuple[str, float], rest_ms: float = 0.0) -> BlameView:
    return BlameView(culprits=culprits, rest_ms=rest_ms, throttled_ms=7, higher_class_ms=0, other_ms=0)


def test_a_row_has_the_numbers_of_the_round() -> None:
    row = node_row(reply())
    assert (row.cpus, row.allocatable_cores, row.reclaimable_cores, row.used_cores) == (4, 3.92, 2.5, 2.25)
    assert row.advertised_cores == pytest.approx(0.5)
    assert (row.wait_pod, row.pools, row.act, row.failed) == ("default/web", {"reclaim": 2, "share": 4}, "on", ("psi",))


def test_a_node_with_a_shortage_lists_conditions_and_evictions() -> None:
    changed = eviction_view(msgspec.structs.replace(full_cycle(), evictions=RICH_EVICTIONS))
    assert changed is not None
    row = node_row(reply(view=msgspec.structs.replace(VIEW, evictions=changed)))
    assert node_status(row) == f"✕ on, {VIEW.action}"
    assert problem_text(row) == (
        "MemoryPressure · terminating: default/batch · eviction blocked: default/needed (budget) · without psi"
    )
    many = msgspec.structs.replace(row, conditions=(), held={}, terminating=tuple(f"a/{i}" for i in range(5)))
    assert "terminating: a/0, a/1, a/2, 2 more ·" in problem_text(many)
    calm = msgspec.structs.replace(VIEW, evictions=None)
    assert problem_text(node_row(reply(view=calm))) == "without psi"
    well = msgspec.structs.replace(calm, sources=())
    assert (node_status(node_row(reply(view=well))), problem_text(node_row(reply(view=well)))) == (
        f"on, {VIEW.action}",
        "",
    )


def test_an_unreachable_agent_has_the_reason_and_the_clusters_data() -> None:
    row = node_row(reply(view=None, problem="gone"))
    assert row == NodeRow(node="n1", pod="agent-n1", problem="gone", allocatable_cores=3.92)


def test_a_first_round_has_no_rates_and_no_advice() -> None:
    row = node_row(reply(view=build_view(bare_cycle()), cpu=""))
    assert (row.allocatable_cores, row.busy_cores, row.reclaimable_cores, row.harm_ms, row.wait_p99_us) == (None,) * 5
    assert node_table([row])[1].split()[1:] == ["0", *formats.ABSENT * 14, "off,", "no", "advice"]


@pytest.mark.parametrize(
    ("blame", "expected"),
    [
        (None, None),
        (blamed(), 0.0),
        (blamed((BATCH_CGROUP, 12.5), ("/other", 3.0), rest_ms=9.0), 12.5),
        (blamed((f"{BATCH_CGROUP}/inner", 2.0), (BATCH_CGROUP, 1.0)), 3.0),
        (blamed((f"{BATCH_CGROUP}-not", 2.0)), 0.0),
    ],
)
def test_interference_counts_waits_for_reclaimed_pods(blame: BlameView | None, expected: float | None) -> None:
    web, batch = (msgspec.structs.replace(c, blame=blame) for c in sorted(VIEW.containers, key=lambda c: -len(c.qos)))
    web, batch = (web, batch) if web.qos == "shared_cores" else (batch, web)
    assert interference_ms(web, VIEW) == expected
    assert interference_ms(batch, VIEW) is None, "reclaimed pods are meant to wait"


def test_sums_skip_unknown_values() -> None:
    rows = [node_row(reply("n1")), node_row(reply("n2")), node_row(reply("n3", None, "gone"))]
    last, *problems = node_table(rows)[4:]
    assert last.split()[:7] == ["3", "nodes", "8", "11.76", "7.50", "5.00", "4.50"]
    assert last.endswith("✕ 1 unknown")
    assert problems[1:] == ["✕ n3: gone"]
    assert len(node_table([node_row(reply(view=msgspec.structs.replace(VIEW, evictions=None, sources=())))])) == 2, (
        "one node needs no sum"
    )


def test_the_wait_is_that_which_policies_evaluate() -> None:
    """A container's own throttling is no wait that reclaimed pods cause: explain has the number without it, so this has too."""
    (web,) = (each for each in VIEW.containers if each.pod == "default/web")
    assert (web.wait, web.evaluated_wait) != (None, None)
    measured = RunqLatencyView(count=10, mean_us=1.0, p50_us=1.0, p99_us=9000.0, slots=None)
    evaluated = msgspec.structs.replace(measured, p99_us=700.0, p50_us=2.0)

    def of(**waits: RunqLatencyView | None) -> AgentReply[View]:
        return reply(view=msgspec.structs.replace(VIEW, containers=(msgspec.structs.replace(web, **waits),)))

    both = of(wait=measured, evaluated_wait=evaluated)
    assert node_row(both).wait_p99_us == 700
    assert [(row.wait_p50_us, row.wait_p99_us) for row in pod_rows(both)] == [(2.0, 700.0)]
    assert node_row(of(wait=measured, evaluated_wait=None)).wait_p99_us == 9000


@pytest.mark.parametrize(
    ("by", "expected"),
    [("name", "abc"), ("cpu", "cab"), ("lent", "bac"), ("wait", "abc"), ("harm", "cba")],
)
def test_the_largest_nodes_come_first(by: str, expected: str) -> None:
    rows = [
        NodeRow(node="b", busy_cores=None, reclaimable_cores=3, harm_ms=1.0),
        NodeRow(node="c", busy_cores=2.0, reclaimable_cores=None, harm_ms=2.0),
        NodeRow(node="a", busy_cores=1.0, reclaimable_cores=2, harm_ms=None),
    ]
    assert "".join(row.node for row in sorted(rows, key=NODE_SORTS[by])) == expected


def test_names_from_outside_move_no_cursor() -> None:
    text = "\n".join(node_table([node_row(reply("n\x1b[31m", None, "bad\nline"))]))
    assert "\x1b" not in text
    assert text.count("\n") == 2


def test_pods_are_chosen_by_name_and_sorted() -> None:
    assert [row.pod for row in pod_rows(reply(), ("web", "other/batch"))] == ["default/web"]
    rows = pod_rows(reply())
    assert [row.pod for row in sorted(rows, key=POD_SORTS["cpu"])] == ["default/batch", "default/web"]
    assert [row.pod for row in sorted(rows, key=POD_SORTS["harm"])] == ["default/web", "default/batch"]
    assert pod_rows(reply(view=None)) == []
    assert pod_table([])[0].split()[:4] == ["NODE", "POD", "CONTAINER", "QOS"]


@pytest.mark.parametrize(
    ("names", "of", "expected"),
    [
        (("a",), 1, "a"),
        (("a", "b"), 2, "all 2 nodes"),
        (("a", "b", "c", "d"), 5, "a, b, c, d"),
        (("a", "b", "c", "d", "e"), 9, "a, b, c and 2 more"),
        ((), 3, ""),
    ],
)
def test_many_nodes_are_named_shortly(names: tuple[str, ...], of: int, expected: str) -> None:
    assert format_node_names(names, of) == expected


def test_wide_letters_keep_columns_in_line() -> None:
    assert format_table([TableHeading("A"), TableHeading("N", right=True)], [["名", "1"], ["x", "10"]]) == [
        "A    N",
        "名   1",
        "x   10",
    ]
