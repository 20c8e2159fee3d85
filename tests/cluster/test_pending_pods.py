"""Why a reclaimed pod is Pending, with a real scheduler: no offer, too little of it, no such scheduler, and no right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cli.doctor import check_pending_pods
from cli.fleet.api_server import ApiServerOptions
from cli.fleet.pending_pods import PendingReason, ask_pending_reasons
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Refused, Server

pytestmark = pytest.mark.cluster
MILLICPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
NODE_STATUS = "/api/v1/nodes/node1/status"


@pytest.fixture
def pods(server: Server, workspace: str) -> Iterator[str]:
    """The path of the pods of a namespace; they are deleted at once, and the node offers nothing any more."""
    path = f"/api/v1/namespaces/{workspace}/pods"
    yield path
    for name in ("short", "astray", "first"):
        with suppress(Refused):
            server.ask("DELETE", f"{path}/{name}", {"gracePeriodSeconds": 0})
    server.ask("PATCH", NODE_STATUS, {"status": {"capacity": {MILLICPU: None}}}, MERGE)


def test_each_reason_is_named_with_its_numbers(own_cluster: Cluster, server: Server, pods: str) -> None:
    place = pods.split("/")[-2]

    def reason(name: str) -> PendingReason | None:
        access = ApiServerOptions(kubeconfig=own_cluster.kubeconfig).access()
        reasons = ask_pending_reasons(access, time.time())
        return next((each for each in reasons if f"{place}/{name}" in each.pods), None)

    def detail(name: str) -> str:
        pending = reason(name)
        return "" if pending is None else pending.detail

    def create(name: str, millicpu: str, **spec: str) -> None:
        pod = a_pod(name, "reclaimed_cores", resources={"limits": {MILLICPU: millicpu}})
        server.ask("POST", pods, {**pod, "spec": {**pod["spec"], **spec}})

    create("short", "2k")
    wait("no node offers it", lambda: detail("short") == "it requests 2000 of reclaimed_millicpu, which no node offers")
    server.ask("PATCH", NODE_STATUS, {"status": {"capacity": {MILLICPU: "1500"}}}, MERGE)
    create("first", "1k")
    wait("the first is placed", lambda: server.ask("GET", f"{pods}/first")["spec"].get("nodeName") == "node1", 60)
    wait("500 are left", lambda: detail("short").endswith("node1 has 500 left, 1500 short"), 60)
    create("astray", "100", schedulerName="katalyst-scheduler")
    expected = "no scheduler named katalyst-scheduler has tried to place it"
    wait("no scheduler", lambda: detail("astray") == expected, 60)
    checks = check_pending_pods({"KUBECONFIG": str(own_cluster.kubeconfig)})
    named = [check for check in checks if f"{place}/astray" in check.detail]
    assert [(check.ok, check.detail.endswith(expected), check.remedy.split(",")[0]) for check in named] == [
        (False, True, "remove spec.schedulerName")
    ]
