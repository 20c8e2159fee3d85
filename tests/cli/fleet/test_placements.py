"""`kubectl dioptase top` from what the API server has: reclaimed resources and harm of nodes, pending pods, placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import AgentReply
from cli.fleet.node_table import node_row, node_table
from cli.fleet.placements import (
    Placement,
    latest_placements,
    overview_lines,
    pending_of,
    pending_table,
    placement_table,
)
from cli.fleet.reclaimed_nodes import ReclaimedNode, reclaimed_nodes
from cli.fleet.reclaimed_pods import ClusterObjects, OfferingCnr, OfferingNode, PlacedPod, list_cluster_objects
from exporters.view.cycle_view import View, build_view
from kube.objects import format_timestamp
from tests.builders.api_server import FakeApiServer
from tests.builders.full_node import full_cycle

NOW_S = 1_800_000_000.0
GIB = 1 << 30
VIEW = build_view(full_cycle())
CNRS = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"


def at(age_s: float) -> str:
    return format_timestamp(NOW_S - age_s)


def pod(name: str, millicpu: str, node: str = "", age_s: float = 600, **fields: Any) -> PlacedPod:
    """A reclaimed pod that got its node `age_s` ago, or that its scheduler rejected since then."""
    requests = {RECLAIMED_CPU: millicpu, RECLAIMED_MEMORY: "1Gi"}
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(age_s)}
    if not node:
        condition |= {"status": "False", "reason": "Unschedulable", "message": fields.pop("message", "0/3 nodes: no.")}
    spec = {"nodeName": node, "containers": [{"resources": {"requests": requests}}]}
    return msgspec.convert(
        {
            "metadata": {"namespace": "team", "name": name, "creationTimestamp": at(age_s), **fields},
            "spec": {"schedulerName": "katalyst-scheduler", **spec},
            "status": {"phase": "Running" if node else "Pending", "conditions": [condition]},
        },
        PlacedPod,
    )


def cnr(name: str, millicpu: int, age_s: float = 20, **harm: str) -> OfferingCnr:
    usage = {"cpu": "1500m", "memory": str(3 * GIB)}
    metrics = {
        "updateTime": at(age_s),
        "nodeMetric": {"genericUsage": {"cpu": "3", **{f"dioptase.io/{key}": value for key, value in harm.items()}}},
        "groupMetric": [{"QoSLevel": "shared_cores"}, {"QoSLevel": "reclaimed_cores", "genericUsage": usage}],
    }
    offered = {RECLAIMED_CPU: str(millicpu), RECLAIMED_MEMORY: "8Gi"}
    status = {"resources": {"allocatable": offered}, "nodeMetricStatus": metrics}
    return msgspec.convert({"metadata": {"name": name}, "status": status}, OfferingCnr)


SCORED = {"dioptase.io/placement-score": "71.6"}
OBJECTS = ClusterObjects(
    pods=(
        pod("train-0", "1k", "worker-1", 45, annotations=SCORED),
        pod("train-1", "500", "worker-1", 4000),
        pod("train-2", "2k", "worker-2", 50),
        pod("train-3", "4k", age_s=900),
        pod("train-4", "4k", age_s=300),
        pod(
            "train-5",
            "100",
            age_s=60,
            message="0/3 nodes are available: 3 node(s) with a taint for the pod's QoS level.",
        ),
    ),
    nodes=tuple(OfferingNode(metadata=cnr(f"worker-{n}", 0).metadata) for n in (1, 2, 3)),
    cnrs=(
        cnr("worker-1", 2500, runq_latency_p99="4m", cpu_pressure="200m", memory_pressure="10m"),
        cnr("worker-2", 2000, runq_latency_p99="12500u", reclaimed_interference="100m"),
        cnr("worker-3", 3000, age_s=900, cpu_pressure="390m"),
    ),
)


def reply(node: str, view: View | None = VIEW, problem: str = "") -> AgentReply[View]:
    return AgentReply(AgentEndpoint(node=node, pod=f"agent-{node}", allocatable_cpu="3920m"), view, problem)


def test_requests_usage_and_harm_of_a_node_come_from_its_pods_and_its_cnr() -> None:
    nodes = reclaimed_nodes(OBJECTS, NOW_S)
    assert nodes["worker-1"] == ReclaimedNode(
        allocatable_cores=2.5,
        allocatable_bytes=8 * GIB,
        requested_cores=1.5,
        requested_bytes=2 * GIB,
        used_cores=1.5,
        used_bytes=3 * GIB,
        pods=2,
        harm={
            "dioptase.io/runq_latency_p99": 0.004,
            "dioptase.io/cpu_pressure": 0.2,
            "dioptase.io/memory_pressure": 0.01,
        },
        harm_share=0.5,
        worst_indicator="dioptase.io/cpu_pressure",
        report_age_s=20,
    )
    assert (nodes["worker-2"].harm_share, nodes["worker-2"].worst_indicator) == (1.25, "dioptase.io/runq_latency_p99")
    assert nodes["worker-3"] == ReclaimedNode(
        allocatable_cores=3, allocatable_bytes=8 * GIB, requested_cores=0, requested_bytes=0, pods=0, report_age_s=900
    ), "a report of 15 minutes ago says nothing about now"


def test_without_a_list_of_pods_or_cnrs_their_numbers_are_unknown_and_not_zero() -> None:
    nodes = reclaimed_nodes(msgspec.structs.replace(OBJECTS, pods=None), NOW_S)
    assert (nodes["worker-1"].pods, nodes["worker-1"].requested_cores, nodes["worker-1"].allocatable_cores) == (
        None, None, 2.5,
    )  # fmt: skip
    nodes = reclaimed_nodes(msgspec.structs.replace(OBJECTS, cnrs=None), NOW_S)
    assert (nodes["worker-1"].pods, nodes["worker-1"].allocatable_cores, nodes["worker-1"].harm_share) == (
        2,
        None,
        None,
    )


@pytest.mark.parametrize("width", [None, 100, 80])
def test_the_overview(width: int | None, golden: Callable[[str, str], None]) -> None:
    reclaimed = reclaimed_nodes(OBJECTS, NOW_S)
    replies = [reply("worker-1"), reply("worker-2"), reply("worker-3", None, "no answer in time")]
    lines = node_table([node_row(each, reclaimed) for each in replies], width)
    lines += overview_lines(OBJECTS, None, NOW_S, width, with_pending=True)
    if width is not None:
        assert max(map(cell_len, lines)) <= width
    golden(f"kubectl-top-overview-{'all' if width is None else width}.txt", "\n".join(lines) + "\n")


def test_a_name_that_is_too_long_for_the_terminal_leaves_the_least_columns() -> None:
    lines = node_table([node_row(reply("n" * 90), {})], 100)
    assert lines[0].split() == ["NODE", "STATUS"]


def test_an_unreachable_agents_row_has_what_the_api_server_has() -> None:
    row = node_row(reply("worker-2", None, "gone"), reclaimed_nodes(OBJECTS, NOW_S))
    assert (row.used_cores, row.headroom_cores, row.busy_cores) == (1.5, 2.0, None)


def test_pods_with_the_same_reason_are_one_line_with_the_age_of_the_oldest() -> None:
    lines = pending_table(pending_of(OBJECTS, NOW_S), NOW_S, None)
    assert [line.split()[:3] for line in lines[1:]] == [["team/train-3", "2", "15"], ["team/train-5", "1", "60"]]
    assert lines[1].endswith(
        "it requests 4000 of reclaimed_millicpu: worker-3 has 3000 left, 1000 short, worker-1 has 1000 left, 3000 short, "
        "worker-2 has 0 left, 4000 short"
    )
    assert pending_table((), NOW_S, None) == ["No reclaimed pod is pending."]


def test_reasons_beyond_the_limit_are_counted() -> None:
    lines = pending_table(pending_of(OBJECTS, NOW_S), NOW_S, None, 1)
    assert lines[-1] == "and 1 pod for 1 other reason: kubectl dioptase top pending"


def test_the_latest_placements_come_first_and_only_the_extender_scores() -> None:
    latest = latest_placements(OBJECTS.pods or ())
    assert [(each.pod, each.node, each.score) for each in latest] == [
        ("team/train-0", "worker-1", 71.6),
        ("team/train-2", "worker-2", None),
        ("team/train-1", "worker-1", None),
    ]
    assert [each.pod for each in latest_placements(OBJECTS.pods or (), {"worker-2"})] == ["team/train-2"]
    assert placement_table([], NOW_S) == ["No reclaimed pod has a node."]


@pytest.mark.parametrize("text", ["", "high", "nan", "-1", "101", "1e9"])
def test_a_score_that_a_user_wrote_is_none_if_it_cannot_be_one(text: str) -> None:
    (placement,) = latest_placements([pod("p", "1k", "n", annotations={"dioptase.io/placement-score": text})])
    assert placement.score is None


def test_control_characters_in_names_and_messages_move_no_cursor() -> None:
    hostile = pod("p\x1b[31m", "1", message="bad\nline\x1b[0m")
    lines = overview_lines(ClusterObjects(pods=(hostile,)), None, NOW_S, 100, with_pending=True)
    table = placement_table([Placement(pod="a\n", node="b\x1b", placed_s=NOW_S, scheduler="")], NOW_S)
    assert not any(character in "\n".join(lines) + "".join(table) for character in ("\x1b", "\nline"))


async def test_a_list_that_is_forbidden_leaves_the_others() -> None:
    server = FakeApiServer(
        {f"{CNRS}/n1": {"metadata": {"name": "n1"}}, "/api/v1/nodes/n1": {"metadata": {"name": "n1"}}}
    )
    server.refuse["/api/v1/pods"] = 403
    async with server.client() as client:
        objects = await list_cluster_objects(client)
    assert (objects.pods, len(objects.nodes or ()), len(objects.cnrs or ())) == (None, 1, 1)
    lines = overview_lines(objects, None, NOW_S, 100, with_pending=True)
    assert lines[1].startswith("not shown: ")
    assert (
        lines[2]
        == "  remedy: ask an administrator for the right to list pods, nodes and customnoderesources of the cluster"
    )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(None, [""]), (["n1", "n2"], ["spec.nodeName=n1,", "spec.nodeName=n2,"]), (["n"] * 17, [""])],
    ids=["all", "two", "many"],
)
async def test_of_few_selected_nodes_only_their_pods_are_listed(nodes: list[str] | None, expected: list[str]) -> None:
    server = FakeApiServer()
    async with server.client() as client:
        await list_cluster_objects(client, nodes)
    selectors = [each.query["fieldSelector"] for each in server.requests if each.path == "/api/v1/pods"]
    assert sorted(selectors) == [f"{prefix}status.phase!=Succeeded,status.phase!=Failed" for prefix in expected]
