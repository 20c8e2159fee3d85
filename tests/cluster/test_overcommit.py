"""Overcommit ratios of Node objects without kubelets on a real API server, with exactly the chart's rights; the webhook that
applies them is not part of this test, so its annotations with the original amounts are written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import audit
from tests.cluster.audit import AuditedRequest
from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.daemons import wait
from tests.cluster.katalyst import CNRS, is_deleted
from tests.cluster.programs import Controller
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import Account

pytestmark = pytest.mark.cluster
K = "katalyst.kubewharf.io/"
NODES = "/api/v1/nodes"
GROUP = "overcommit.katalyst.kubewharf.io"
CONFIGS = f"/apis/{GROUP}/v1alpha1/nodeovercommitconfigs"
RULES = (
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]},
    {"apiGroups": [GROUP], "resources": ["nodeovercommitconfigs"], "verbs": ["list", "watch"]},
    {"apiGroups": [GROUP], "resources": ["nodeovercommitconfigs/status"], "verbs": ["patch"]},
)
"""Rules that the chart adds with `overcommit` in controller.settings.controllers (tests/deploy/test_rendered_chart.py)."""
SETTINGS = {"controllers": ["lifecycle", "overcommit"], "health": {"enabled": False}}
ORIGINAL = {
    f"{K}original_allocatable_cpu": "15600m", f"{K}original_capacity_cpu": "16",
    f"{K}original_allocatable_memory": "30Gi", f"{K}original_capacity_memory": "32Gi",
}  # fmt: skip
POOL = f"{K}overcommit_node_pool"


@pytest.fixture
def controller(
    own_cluster: Cluster, definitions: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    folder = tmp_path_factory.mktemp("overcommit")
    account = Account(own_cluster, "dioptase-controller", CONSENT, folder, RULES)
    controller = Controller(own_cluster, account, folder, 3, SETTINGS)
    controller.begin()
    wait("the leader", lambda: controller.leads)
    yield controller
    controller.end()
    account.forget()


@pytest.fixture
def node(definitions: Server, controller: Controller) -> Iterator[str]:
    """Create a Node of the pool `batch`, with what the webhook and the agent write."""
    metadata = {"name": "overcommitted", "labels": {POOL: "batch"}, "annotations": ORIGINAL}
    definitions.ask("POST", NODES, {"metadata": metadata})
    wait("its CustomNodeResource", lambda: not is_deleted(definitions, f"{CNRS}/overcommitted"))
    yield "overcommitted"
    definitions.ask("DELETE", f"{NODES}/overcommitted")


def a_config(name: str, pool: str, **ratios: str) -> dict[str, Any]:
    spec = {"nodeOvercommitSelectorVal": pool, "resourceOvercommitRatio": ratios}
    return {"apiVersion": f"{GROUP}/v1alpha1", "kind": "NodeOvercommitConfig", "metadata": {"name": name}, "spec": spec}


def written(server: Server, node: str) -> dict[str, str]:
    """Return the annotations of a Node that the controller wrote, without their prefix."""
    annotations = server.ask("GET", f"{NODES}/{node}")["metadata"].get("annotations", {})
    assert {key: annotations.get(key) for key in ORIGINAL} == ORIGINAL
    return {key.removeprefix(K): text for key, text in annotations.items() if "overcommit" in key}


def matched(server: Server, name: str) -> list[str]:
    return list(server.ask("GET", f"{CONFIGS}/{name}").get("status", {}).get("matchedNodeList", []))


def test_ratios_follow_configuration_and_agent_and_go_with_them(
    own_cluster: Cluster, definitions: Server, controller: Controller, node: str
) -> None:
    server = definitions
    assert written(server, node) == {}
    server.ask("POST", CONFIGS, a_config("batch", "batch", cpu="1.2", memory="1.5"))
    expected = {
        "dioptase.io/overcommit-config": "batch", "cpu_overcommit_ratio": "1.2", "memory_overcommit_ratio": "1.5",
        "overcommit_allocatable_cpu": "18720m", "overcommit_capacity_cpu": "19200m",
        "overcommit_allocatable_memory": "45Gi", "overcommit_capacity_memory": "48Gi",
    }  # fmt: skip
    wait("the ratios", lambda: written(server, node) == expected)
    wait("the status", lambda: matched(server, "batch") == [node])
    # What the agent recommends bounds the ratio, and the CPUs that its static CPU manager pins are not multiplied.
    recommended = {"cpu_overcommit_ratio": "1.10", "overcommit_cpu_manager": "static", "guaranteed_cpus": "6"}
    annotations = {f"{K}{key}": text for key, text in recommended.items()}
    server.ask("PATCH", f"{CNRS}/{node}", {"metadata": {"annotations": annotations}}, MERGE)
    bounded = {
        "realtime_cpu_overcommit_ratio": "1.10", "overcommit_allocatable_cpu": "16560m", "overcommit_capacity_cpu": "17",
    }  # fmt: skip
    wait("the recommended ratio", lambda: written(server, node) == expected | bounded)
    server.ask("PATCH", f"{CNRS}/{node}", {"metadata": {"annotations": dict.fromkeys(annotations)}}, MERGE)
    wait("the ratio without it", lambda: written(server, node) == expected)
    server.ask("PATCH", f"{NODES}/{node}", {"metadata": {"labels": {POOL: None}}}, MERGE)
    wait("nothing is left without the label", lambda: written(server, node) == {})
    wait("the status", lambda: matched(server, "batch") == [])
    server.ask("PATCH", f"{NODES}/{node}", {"metadata": {"labels": {POOL: "batch"}}}, MERGE)
    wait("the ratios", lambda: written(server, node) == expected)
    controller.end()
    server.ask("DELETE", f"{CONFIGS}/batch")
    assert written(server, node) == expected
    controller.again()
    controller.ready()
    wait("nothing is left without the object", lambda: written(server, node) == {})
    used = list(audit.entries(own_cluster.names.run, f"{CONSENT}/dioptase-controller"))
    assert {entry.request for entry in used} >= {
        AuditedRequest("", "nodes", "patch"),
        AuditedRequest(GROUP, "nodeovercommitconfigs", "list"),
        AuditedRequest(GROUP, "nodeovercommitconfigs", "watch"),
        AuditedRequest(GROUP, "nodeovercommitconfigs/status", "patch"),
    }
    assert [entry for entry in used if entry.status == 403] == []


def test_a_newer_configuration_wins_and_invalid_ratios_are_reported(
    definitions: Server, controller: Controller, node: str
) -> None:
    server = definitions
    server.ask("POST", CONFIGS, a_config("z-older", "batch", cpu="2"))
    wait("the ratio", lambda: written(server, node).get("cpu_overcommit_ratio") == "2")
    older = server.ask("GET", f"{CONFIGS}/z-older")["metadata"]["creationTimestamp"]
    names = ["a-newer0"]
    server.ask("POST", CONFIGS, a_config(names[0], "batch", cpu="0.5"))
    # Creation times have a resolution of one second; equal ones are ordered by name.
    while server.ask("GET", f"{CONFIGS}/{names[-1]}")["metadata"]["creationTimestamp"] == older:
        names.append(f"a-newer{len(names)}")
        server.ask("POST", CONFIGS, a_config(names[-1], "batch", cpu="0.5"))
    newer = names[-1]
    wait("the newer ratio", lambda: written(server, node)["dioptase.io/overcommit-config"] == newer)
    assert written(server, node)["cpu_overcommit_ratio"] == "1"
    assert written(server, node)["overcommit_allocatable_cpu"] == "15600m"
    wait("the status of both", lambda: (matched(server, newer), matched(server, "z-older")) == ([node], []))

    def warnings() -> set[tuple[str, str]]:
        events = server.ask("GET", "/api/v1/namespaces/default/events")["items"]
        return {
            (event["involvedObject"]["name"], event["reason"])
            for event in events
            if event["involvedObject"]["kind"] == "NodeOvercommitConfig"
        }

    wait("the events", lambda: warnings() >= {(newer, "InvalidRatio"), ("z-older", "Superseded")})
    for name in (*names, "z-older"):
        server.ask("DELETE", f"{CONFIGS}/{name}")
    wait("nothing is left", lambda: written(server, node) == {})
