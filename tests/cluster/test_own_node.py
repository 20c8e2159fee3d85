"""The admission policy that restricts an agent to its own node, on a real API server, with a token of the agent's pod."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.image_and_chart import CHART, helm
from tests.cluster.objects import a_pod
from tests.cluster.server import APPLY, MERGE, Server

pytestmark = pytest.mark.cluster
NAMESPACE, AGENT, POLICY = "test-own-node", "dioptase-agent", "dioptase-agent-own-node"
NODES = ("own-node-here", "own-node-there")
CNR = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
Ask = Callable[[str, str, object], tuple[int, str]]
"""Sends a patch with the agent's token, given path, kind and body; returns status and message."""


@pytest.fixture(scope="module")
def policy(own_cluster: Cluster, definitions: Server) -> Iterator[Server]:
    """The API server with the chart's policy, the agent's role and two nodes."""
    templates = [f"--show-only=templates/agent-{name}.yaml" for name in ("rbac", "policy")]
    values = ("--set", "agent.extendedResources=true")
    created = helm(own_cluster, "template", "dioptase", CHART, "--namespace", NAMESPACE, *templates, *values)
    definitions.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    own_cluster.kubectl("apply", "-f", "-", text=created)
    for name in NODES:
        definitions.ask("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    yield definitions
    for name in NODES:
        definitions.refusal("DELETE", f"{CNR}/{name}")
        definitions.ask("DELETE", f"/api/v1/nodes/{name}")
    own_cluster.kubectl("delete", "-f", "-", text=created)
    definitions.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


def asker(cluster: Cluster, server: Server, bound: object) -> Ask:
    """Return a client with a token of the agent's account."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{AGENT}/token"
    token = server.ask(
        "POST", path, {"spec": {"expirationSeconds": 600, **({"boundObjectRef": bound} if bound else {})}}
    )
    context = ssl.create_default_context(cafile=str(cluster.control.authority.certificate("ca")))
    address = urlsplit(cluster.names.server)

    def ask(path: str, kind: str, body: object) -> tuple[int, str]:
        connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=30)
        headers = {"Authorization": f"Bearer {token['status']['token']}", "Content-Type": kind}
        connection.request("PATCH", path, json.dumps(body), headers)
        answer = connection.getresponse()
        document: dict[str, Any] = json.loads(answer.read())
        connection.close()
        return answer.status, document.get("message", "")

    return ask


@pytest.fixture(scope="module")
def agent(own_cluster: Cluster, policy: Server) -> Ask:
    """The agent of the first node: its pod object exists, without a kubelet."""
    pod = a_pod("agent")
    pod["spec"] |= {"serviceAccountName": AGENT, "nodeName": NODES[0]}
    created = policy.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
    return asker(
        own_cluster, policy, {"kind": "Pod", "apiVersion": "v1", "name": "agent", "uid": created["metadata"]["uid"]}
    )


def writes(node: str) -> list[tuple[str, str, object]]:
    """Return the writes of an agent to the objects of a node."""
    query = "?fieldManager=dioptase-agent&force=true"
    cnr = {
        "apiVersion": "node.katalyst.kubewharf.io/v1alpha1",
        "kind": "CustomNodeResource",
        "metadata": {"name": node},
    }
    amounts = {"resource.katalyst.kubewharf.io/reclaimed_millicpu": "1k"}
    taint = {"key": "node.katalyst.kubewharf.io/MemoryPressure", "effect": "NoSchedule"}
    return [
        (f"{CNR}/{node}{query}", APPLY, cnr | {"spec": {"nodeResourceProperties": []}}),
        (f"{CNR}/{node}/status{query}", APPLY, cnr | {"status": {"resources": {"allocatable": amounts}}}),
        (f"/api/v1/nodes/{node}", MERGE, {"spec": {"taints": [taint]}}),
        (f"/api/v1/nodes/{node}/status", MERGE, {"status": {"capacity": amounts}}),
    ]


def test_an_agent_writes_of_its_own_node_and_of_no_other(agent: Ask, policy: Server) -> None:
    here, there = NODES
    text = f"ValidatingAdmissionPolicy '{POLICY}' with binding '{POLICY}' denied request: "
    text += f"the agent of node {here} may not write of {there}"

    def held() -> bool:
        # The API server takes its time with a new policy.
        return text in agent(*writes(there)[0])[1]

    wait("the policy", held, 30)
    # What is patched below its root has to be there.
    kind = {"apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource"}
    policy.refusal("POST", CNR, kind | {"metadata": {"name": there}})
    assert [status for status, _ in (agent(*item) for item in writes(here))] in ([201, 200, 200, 200], [200] * 4)
    refused = [agent(*write) for write in writes(there)]
    assert [(status, text in message) for status, message in refused] == [(403, True)] * 4


def test_a_token_of_the_agent_that_is_of_no_pod_writes_nothing(
    agent: Ask, own_cluster: Cluster, policy: Server
) -> None:
    wait("the policy", lambda: agent(*writes(NODES[1])[0])[0] == 403, 30)
    status, text = asker(own_cluster, policy, None)(*writes(NODES[0])[2])
    assert (status, "the token of this agent is of no pod, and so of no node" in text) == (403, True)


def test_others_are_not_held_to_it(agent: Ask, policy: Server) -> None:
    wait("the policy", lambda: agent(*writes(NODES[1])[0])[0] == 403, 30)
    path, kind, body = writes(NODES[1])[2]
    assert policy.refusal("PATCH", path, body, kind) is None
