"""Two nodes, each with its own agent, which applies its own configuration, reports itself, and writes only its own pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.daemons import wait
from tests.cluster.katalyst import ADMINS, CNRS, KCCS, a_kcc, an_admin, within
from tests.cluster.pods import run
from tests.cluster.programs import CODE, Agent, Controller
from tests.cluster.server import MERGE
from tests.cluster.service_accounts import Account

pytestmark = pytest.mark.cluster
SETTING = "eviction.reclaimed.cpuThreshold"
SETTINGS = {"report": {"periodS": 1, "windowS": 3}}


def threshold(times: float) -> dict[str, Any]:
    key = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
    return {"evictionConfig": {"reclaimedResourcesEvictionConfig": {"evictionThreshold": {key: times}}}}


@pytest.fixture
def agents(two_nodes: Cluster, tmp_path: Path) -> Iterator[list[Agent]]:
    """An agent on each node, and the controller."""
    two_nodes.kubectl("apply", "--server-side", "-f", CODE / "deploy/crds")
    two_nodes.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", CODE / "deploy/crds")
    controller = Controller(two_nodes, Account(two_nodes, "dioptase-controller", CONSENT, tmp_path), tmp_path)
    account = Account(two_nodes, "dioptase-agent", CONSENT, tmp_path)
    created = [Agent(two_nodes, node, account, tmp_path, SETTINGS, ("--act", "on")) for node in two_nodes.nodes]
    controller.begin()
    for item in created:
        item.begin()
    yield created
    for item in (*created, controller):
        item.end()


def applied_setting(agent: Agent) -> tuple[str, str]:
    """Return value and object of the setting."""
    result = next(item for item in agent.ask("/api/v1/config")["settings"] if item["name"] == SETTING)
    return result["value"], result.get("object", "")


@pytest.mark.long
def test_each_applies_its_own_configuration_to_its_own_pods(two_nodes: Cluster, agents: list[Agent]) -> None:
    server, admins, kccs = two_nodes.server, within(CONSENT, ADMINS), within(CONSENT, KCCS)
    wait("accounts", lambda: server.ask("GET", f"/api/v1/namespaces/{CONSENT}/serviceaccounts/default"))
    pods = [
        run(two_nodes, CONSENT, f"batch{n}", "reclaimed_cores", node=node) for n, node in enumerate(two_nodes.nodes)
    ]
    server.ask("PATCH", "/api/v1/nodes/node2", {"metadata": {"labels": {"kind": "small"}}}, MERGE)
    server.ask("POST", kccs, a_kcc(nodeLabelSelectorAllowedKeyList=[{"priority": 1, "keyList": ["kind"]}]))
    server.ask("POST", admins, an_admin("everybody", threshold(3)))
    server.ask("POST", admins, an_admin("small", threshold(2), nodeLabelSelector="kind=small", priority=1))
    first, second = agents
    wait("node1 applies the object for all", lambda: applied_setting(first) == ("3", f"{CONSENT}/everybody"))
    wait("node2 applies its own object", lambda: applied_setting(second) == ("2", f"{CONSENT}/small"))

    # While a rollout waits after its first nodes, a node that comes to it waits too.
    def rolled_out() -> bool:
        conditions = server.ask("GET", f"{admins}/everybody")["status"]["conditions"]
        return ("RolledOut", "Complete") in {(item["type"], item["reason"]) for item in conditions}

    wait("the rollout to node1 alone is complete", rolled_out)
    server.ask("PATCH", "/api/v1/nodes/node2", {"metadata": {"labels": {"kind": None}}}, MERGE)
    wait("a label that goes is another configuration", lambda: applied_setting(second) == ("3", f"{CONSENT}/everybody"))
    for node in ("node1", "node2"):
        wait(
            "it reports itself", lambda node=node: "resources" in server.ask("GET", f"{CNRS}/{node}").get("status", {})
        )
    wait("both pods give way", lambda: all(pod.idle for pod in pods))
    keys = {pod.key for pod in pods}
    observed = [{item["pod"] for item in agent.view()["containers"]} & keys for agent in agents]
    assert observed == [{pod.key} for pod in pods]
    first.end()
    assert [pod.idle for pod in pods] == [False, True]
    first.again()
    first.ready()
    for item in ("everybody", "small"):
        server.ask("DELETE", f"{admins}/{item}")
    server.ask("DELETE", f"{kccs}/all")
    wait("both have default values", lambda: [applied_setting(agent) for agent in agents] == [("5", "")] * 2)
    for pod in pods:
        server.ask("DELETE", pod.path)
