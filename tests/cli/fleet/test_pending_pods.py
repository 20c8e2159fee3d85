"""Why reclaimed pods are Pending, from pods and nodes as the API server lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from api.interfaces import Unavailable
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from cli.doctor import check_pending_pods
from cli.fleet.findings import pending_findings
from cli.fleet.pending_pods import PendingReason, list_pending_reasons, pending_reason_of, pending_reasons
from cli.fleet.reclaimed_pods import OfferingCnr, OfferingNode, PlacedPod
from tests.builders.api_server import FakeApiServer

NOW_S = 1_800_000_000.0
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no."}


def pod(name: str, cpu: str = "1k", memory: str = "", phase: str = "Pending", **fields: Any) -> PlacedPod:
    requests = {RECLAIMED_CPU: cpu} | ({RECLAIMED_MEMORY: memory} if memory else {})
    spec = {"containers": [{"resources": {"requests": requests}}], **fields.pop("spec", {})}
    status = {"phase": phase, "conditions": [UNSCHEDULABLE], **fields.pop("status", {})}
    metadata = {"namespace": "default", "name": name, **fields}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, PlacedPod)


def node(name: str, cpu: str = "", memory: str = "", taint: str = "") -> OfferingNode:
    allocatable = ({RECLAIMED_CPU: cpu} if cpu else {}) | ({RECLAIMED_MEMORY: memory} if memory else {})
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    return msgspec.convert(
        {"metadata": {"name": name}, "spec": {"taints": taints}, "status": {"allocatable": allocatable}}, OfferingNode
    )


def only(pods: list[PlacedPod], nodes: list[OfferingNode]) -> PendingReason:
    (reason,) = pending_reasons(pods, nodes, NOW_S)
    return reason


def test_a_shortage_names_the_resource_the_amount_and_the_nodes() -> None:
    running = pod("first", cpu="1k", phase="Running", spec={"nodeName": "node1"})
    reason = only(
        [pod("batch", cpu="2k"), running], [node("node1", cpu="1500"), node("node2", cpu="1800"), node("node3")]
    )
    assert reason.pods == ("default/batch",)
    assert reason.detail == (
        "it requests 2000 of reclaimed_millicpu: node2 has 1800 left, 200 short, node1 has 500 left, 1500 short, "
        "node3 has 0 left, 2000 short"
    )
    assert (reason.ok, "request less" in reason.remedy) == (True, True)


def test_only_the_resource_that_is_short_is_named() -> None:
    reason = only([pod("batch", cpu="1k", memory="2Gi")], [node("node1", cpu="1500", memory="1Gi")])
    assert reason.detail == "it requests 2.00 GiB of reclaimed_memory: node1 has 1.00 GiB left, 1.00 GiB short"


def test_a_resource_that_no_node_offers_needs_a_setting() -> None:
    reason = only([pod("batch")], [node("node1"), node("node2")])
    assert reason.detail == "it requests 1000 of reclaimed_millicpu, which no node offers"
    assert (reason.ok, "agent.extendedResources=true" in reason.remedy) == (False, True)


def test_more_than_three_nodes_are_counted() -> None:
    reason = only([pod("batch")], [node(f"node{number}", cpu="100") for number in range(5)])
    assert reason.detail.endswith("node2 has 100 left, 900 short, and 2 more nodes")


def test_where_it_would_fit_the_scheduler_and_the_taint_are_named() -> None:
    plain = only([pod("batch")], [node("node1", cpu="2k")])
    assert (plain.detail, plain.remedy) == (
        "its scheduler reports: 0/2 nodes: no.",
        "run `kubectl describe pod` and read its events",
    )
    tainted = only([pod("batch")], [node("node1", cpu="2k", taint="node.katalyst.kubewharf.io/MemoryPressure")])
    assert tainted.remedy.startswith(
        "node1 has the taint node.katalyst.kubewharf.io/MemoryPressure:NoSchedule: wait, a taint ends five minutes"
    )


def test_a_pod_that_no_scheduler_has_tried_names_the_scheduler() -> None:
    spec, status = {"schedulerName": "katalyst-scheduler"}, {"conditions": []}
    reason = only([pod("batch", spec=spec, status=status)], [node("node1", cpu="2k")])
    assert reason.detail == "no scheduler named katalyst-scheduler has tried to place it"
    assert (reason.ok, reason.remedy) == (
        False,
        (
            "remove spec.schedulerName, so that the stock scheduler places the pod, or run a scheduler of that name by "
            "`helm upgrade` with `--set scheduler.enabled=true`"
        ),
    )
    young = pod("batch", spec=spec, status=status, creationTimestamp="2027-01-15T08:00:00Z")
    assert pending_reasons([young], [], NOW_S + 9) == ()
    assert len(pending_reasons([young], [], NOW_S + 11)) == 1


def test_a_placed_pod_that_does_not_start_names_the_reason_of_its_container() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    status = {"containerStatuses": [{"state": {"waiting": waiting}}]}
    reason = only([pod("batch", spec={"nodeName": "node1"}, status=status)], [node("node1", cpu="2k")])
    assert reason.detail == "placed on node1, but not started: ImagePullBackOff not found"
    starting = {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}
    assert pending_reasons([pod("batch", spec={"nodeName": "node1"}, status=starting)], [], NOW_S) == ()


def test_online_terminating_and_running_pods_are_left_out() -> None:
    online = pod("web", spec={"containers": []})
    annotated = pod("bare", spec={"containers": []}, annotations={"katalyst.kubewharf.io/qos_level": "reclaimed_cores"})
    leaving = pod("old", deletionTimestamp="2026-01-01T00:00:00Z")
    reasons = pending_reasons([online, annotated, leaving, pod("fine", phase="Running")], [node("node1")], NOW_S)
    assert [reason.pods for reason in reasons] == [("default/bare",)]


def test_a_pod_of_unknown_age_is_not_young() -> None:
    reason = only([pod("batch", status={"conditions": []}, creationTimestamp="garbage")], [node("node1", cpu="2k")])
    assert reason.detail == "no scheduler named default-scheduler has tried to place it"


def container(cpu: str, restart_policy: str = "") -> dict[str, Any]:
    return {"resources": {"requests": {RECLAIMED_CPU: cpu}}, "restartPolicy": restart_policy}


@pytest.mark.parametrize(
    ("init", "containers", "millicpu"),
    [
        ((), ("300", "200"), 500),
        ((container("400"), container("700")), ("300", "200"), 700),
        ((container("100", "Always"),), ("300", "200"), 600),
        ((container("100", "Always"), container("900"), container("50", "Always")), ("300",), 1000),
        ((container("900"), container("100", "Always")), ("300",), 900),
    ],
)
def test_requests_are_those_that_the_scheduler_computes(
    init: tuple[dict[str, Any], ...], containers: tuple[str, ...], millicpu: int
) -> None:
    spec = {"initContainers": init, "containers": [container(cpu) for cpu in containers]}
    reason = only([pod("batch", spec=spec)], [node("node1", cpu="1")])
    assert reason.detail.startswith(f"it requests {millicpu} of reclaimed_millicpu: node1 has 1 left")


def koordinator_pod(**metadata: Any) -> PlacedPod:
    requests = {"kubernetes.io/batch-cpu": "2k", "kubernetes.io/batch-memory": "1Gi"}
    return pod("spark", spec={"containers": [{"resources": {"requests": requests}}]}, **metadata)


def test_batch_resources_of_koordinator_are_reclaimed_and_compared_by_their_own_name() -> None:
    reason = only([koordinator_pod()], [node("node1", cpu="8k", memory="8Gi")])
    assert reason.detail == (
        "it requests 2000 of batch-cpu, which no node offers; it requests 1.00 GiB of batch-memory, which no node offers"
    )
    assert reason.ok is False
    assert reason.remedy.startswith("request resource.katalyst.kubewharf.io/reclaimed_millicpu and ")
    plain = pod("be", spec={"containers": []}, labels={"koordinator.sh/qosClass": "BE"})
    assert plain.is_pending_reclaimed
    for other in (
        koordinator_pod(labels={"koordinator.sh/qosClass": "LS"}),
        koordinator_pod(annotations={"katalyst.kubewharf.io/qos_level": "shared_cores"}),
    ):
        assert not other.is_pending_reclaimed


def cnr(name: str, cpu: str) -> OfferingCnr:
    status = {"resources": {"allocatable": {RECLAIMED_CPU: cpu}}}
    return msgspec.convert({"metadata": {"name": name}, "status": status}, OfferingCnr)


def test_a_pod_of_a_scheduler_with_the_extender_is_compared_with_what_custom_node_resources_offer() -> None:
    """Its Nodes need no extended resources, and the default scheduler's pods do not count by CustomNodeResources."""
    spec = {"schedulerName": "katalyst-scheduler"}
    running = pod("first", cpu="1500", phase="Running", spec={"nodeName": "node1"})
    (reason,) = pending_reasons([pod("batch", spec=spec), running], [node("node1")], NOW_S, [cnr("node1", "2k")])
    assert reason.detail == "it requests 1000 of reclaimed_millicpu: node1 has 500 left, 500 short"
    (reason,) = pending_reasons([pod("batch", spec=spec)], [node("node1")], NOW_S, [cnr("node1", "2k")])
    assert reason.detail == "its scheduler reports: 0/2 nodes: no."
    (reason,) = pending_reasons([pod("batch")], [node("node1")], NOW_S, [cnr("node1", "2k")])
    assert reason.detail == "it requests 1000 of reclaimed_millicpu, which no node offers"


def test_why_no_pod_is_preempted_is_left_out_of_the_schedulers_message() -> None:
    message = (
        "0/2 nodes are available: 2 node(s) had a taint. preemption: 0/2 nodes are available: 2 No preemption victims."
    )
    reason = only([pod("batch", status={"conditions": [{**UNSCHEDULABLE, "message": message}]})], [node("n", cpu="2k")])
    assert reason.detail == "its scheduler reports: 0/2 nodes are available: 2 node(s) had a taint."


def test_the_age_of_a_reason_is_that_of_its_oldest_pod() -> None:
    pods = [pod(f"job-{i}", creationTimestamp=f"2027-01-15T07:{50 + i}:00Z") for i in range(3)]
    assert only(pods, [node("node1", cpu="500")]).since_s == NOW_S - 600


def test_a_long_message_is_cut() -> None:
    condition = {**UNSCHEDULABLE, "message": "M" * 5_000}
    reason = only([pod("batch", status={"conditions": [condition]})], [node("node1", cpu="2k")])
    assert reason.detail == f"its scheduler reports: {'M' * 299}…"


def test_ten_reasons_are_printed_and_the_others_counted() -> None:
    conditions = [{**UNSCHEDULABLE, "message": f"m{number}"} for number in range(12)]
    pods = [pod(f"job-{number:02}", status={"conditions": [each]}) for number, each in enumerate(conditions)]
    reasons = pending_reasons(
        [*pods, pod("job-12", status={"conditions": conditions[:1]})], [node("node1", cpu="2k")], NOW_S
    )
    rows = pending_findings(reasons)
    assert [row.detail for row in rows[9:]] == ["default/job-09: its scheduler reports: m9", "and 2 more, of 2 pods"]
    assert rows[10].ok is True
    assert pending_reason_of("job-11", reasons) == reasons[11]


PODS_PATH, NODES_PATH = "/api/v1/pods", "/api/v1/nodes"


@pytest.mark.parametrize(("name", "requests", "expected"), [("web", {}, 1), ("batch", {RECLAIMED_CPU: "2k"}, 3)])
async def test_nodes_and_other_pods_are_listed_only_for_a_pending_reclaimed_pod(
    name: str, requests: dict[str, str], expected: int
) -> None:
    async def pods(request: web.Request) -> web.Response:
        phase = "Pending" if request.query["fieldSelector"] == "status.phase=Pending" else "Running"
        spec = {"containers": [{"resources": {"requests": requests if phase == "Pending" else {RECLAIMED_CPU: "1k"}}}]}
        item = {
            "metadata": {"namespace": "d", "name": name if phase == "Pending" else "first"},
            "spec": spec if phase == "Pending" else {**spec, "nodeName": "node1"},
            "status": {"phase": phase, "conditions": [UNSCHEDULABLE]},
        }
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [item]})

    server = FakeApiServer(
        {f"{NODES_PATH}/node1": {"metadata": {"name": "node1"}, "status": {"allocatable": {RECLAIMED_CPU: "1500"}}}}
    )
    server.handlers[PODS_PATH] = pods
    async with server.client() as client:
        reasons = await list_pending_reasons(client, NOW_S)
    assert len(server.requests) == expected
    assert [reason.detail for reason in reasons] == (
        ["it requests 2000 of reclaimed_millicpu: node1 has 500 left, 1500 short"] if requests else []
    )


def test_pods_with_the_same_reason_are_one_finding() -> None:
    reasons = pending_reasons([pod(f"job-{number}") for number in range(3)], [node("node1", cpu="500")], NOW_S)
    (row,) = pending_findings(reasons)
    assert row.detail.startswith("default/job-0 and 2 more: it requests 1000 of reclaimed_millicpu: node1 has 500 left")
    assert (row.name, row.ok) == ("pending pods", True)
    assert pending_reason_of("job-2", reasons) == pending_reason_of("default/job-0", reasons) == reasons[0]
    assert pending_reason_of("job-3", reasons) is None


def test_without_rights_doctor_says_what_was_not_checked(tmp_path: Path) -> None:
    (row,) = pending_findings(Unavailable("pods is forbidden", "ask an administrator"))
    assert (row.ok, row.detail, row.remedy) == (True, "not checked: pods is forbidden", "ask an administrator")
    (check,) = check_pending_pods({"HOME": str(tmp_path)})
    assert (check.ok, check.conclusive) == (True, False)
    assert check.detail.startswith("not checked: no API server is configured")
    assert check.remedy == "run `kubectl dioptase doctor` where kubectl works"
