"""Evictions from a real node through the API server: budgets are respected, each pod is evicted once, with its reason."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import wait
from tests.cluster.node import SOCKET
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Refused, Server
from tests.live.agent_process import Agent

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
RSS, MEMORY = "rss-overuse-eviction-plugin", "system-memory-pressure-eviction-plugin"
TAINT = "node.katalyst.kubewharf.io/MemoryPressure"
CreatedPod = Mapping[str, Any]


def settings(cluster: Cluster, **eviction: object) -> dict[str, Any]:
    """Return the settings of an agent that only evicts, as early as possible."""
    (node,) = cluster.nodes
    return {
        "intervalS": 0.5,
        "advisor": {"policy": "none"},
        "probes": [],
        "kubelet": {
            "url": f"http://{node.address}:10255",
            "runtimeSocket": str(node.at(SOCKET)),
            "cgroupRoot": node.cgroup_root,
            "intervalS": 0.2,
        },
        "eviction": {"intervalS": 0.5, **eviction},
    }


class Node:
    """The agent on the cluster's node, restarted several times with the same state."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster, self._directory = cluster, directory

    def agent(self, **eviction: object) -> Agent:
        (node,) = self._cluster.nodes
        path = self._directory / "settings.yaml"
        path.write_bytes(msgspec.yaml.encode(settings(self._cluster, **eviction)))
        return Agent(
            "--kubelet", "--node", node.name, "--act", "on", "--config", str(path), "--state-dir",
            str(self._directory / "state"), env={"KUBECONFIG": str(self._cluster.kubeconfig)},
        )  # fmt: skip


@pytest.fixture
def node(own_cluster: Cluster, cluster: object, tmp_path: Path) -> Node:
    return Node(own_cluster, tmp_path)


def reclaimed(name: str, memory: str = "1Mi", **labels: str) -> dict[str, Any]:
    """Return a reclaimed pod whose use exceeds a small share of its request."""
    return a_pod(name, "reclaimed_cores", resources={"requests": {"memory": memory}}, **labels)


def create_running_pod(server: Server, namespace: str, pod: dict[str, Any]) -> CreatedPod:
    """Create a pod and wait until it is ready."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    created: CreatedPod = server.ask("POST", path, pod)

    def ready() -> bool:
        result = server.ask("GET", f"{path}/{pod['metadata']['name']}")["status"]
        return any(item["type"] == "Ready" and item["status"] == "True" for item in result.get("conditions", ()))

    wait("the pod", ready)
    return created


def there(server: Server, created: CreatedPod) -> CreatedPod | None:
    """Return this pod, by its uid; None if it does not exist."""
    meta = created["metadata"]
    try:
        result: CreatedPod = server.ask("GET", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}")
    except Refused as error:
        if error.status != 404:
            raise
        return None
    return result if result["metadata"]["uid"] == meta["uid"] else None


def stays(server: Server, created: CreatedPod) -> bool:
    """Whether the pod exists and is not terminating."""
    result = there(server, created)
    return result is not None and "deletionTimestamp" not in result["metadata"]


def kills(agent: Agent, created: CreatedPod) -> list[tuple[str, str]]:
    """Return reasons and messages of the pod's eviction events so far."""
    meta = created["metadata"]
    entries = json.loads(agent.get(f"/api/v1/evictions?pod={meta['namespace']}/{meta['name']}"))
    return [(entry["kill"]["reason"], entry["kill"]["message"]) for entry in entries if entry["kill"]]


def reasons(agent: Agent, created: CreatedPod) -> list[str]:
    return [reason for reason, _ in kills(agent, created)]


def events(cluster: Cluster, created: CreatedPod) -> list[CreatedPod]:
    """Return the agent's events of the pod in the API."""
    meta = created["metadata"]
    text = cluster.kubectl(
        "get", "events", "--namespace", meta["namespace"], "--sort-by=.lastTimestamp", "--output=json",
        f"--field-selector=involvedObject.uid={meta['uid']}",
    )  # fmt: skip
    return [load for load in json.loads(text)["items"] if load["source"].get("component") == "dioptase-agent"]


def guarded(server: Server, namespace: str, **labels: str) -> str:
    """Create a budget that protects these pods, wait until it is in force, and return its path."""
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": labels}}
    server.ask("POST", budgets, {"metadata": {"name": "all"}, "spec": spec})
    wait("the budget", lambda: server.ask("GET", f"{budgets}/all").get("status", {}).get("currentHealthy") == 1)
    return f"{budgets}/all"


@pytest.fixture
def in_system(server: Server, node: Node) -> Iterator[CreatedPod]:
    created = create_running_pod(server, "kube-system", reclaimed("test-in-system", app="pressed"))
    yield created
    if there(server, created) is not None:
        server.ask("DELETE", "/api/v1/namespaces/kube-system/pods/test-in-system")


def test_memory_pressure_sends_reclaimed_pods_away_but_for_critical_and_spared_ones_and_taints_the_node(
    own_cluster: Cluster, server: Server, workspace: str, node: Node, in_system: CreatedPod
) -> None:
    """As in Katalyst: the namespace protects no pod, and a DaemonSet's pod is replaced."""
    critical = reclaimed("critical", app="pressed")
    critical["spec"]["priorityClassName"] = "system-cluster-critical"
    online = a_pod("online", app="pressed")
    staying = [
        create_running_pod(server, workspace, pod) for pod in (critical, reclaimed("spared", spare="me"), online)
    ]
    leaves = [create_running_pod(server, workspace, reclaimed("batch", app="pressed")), in_system]
    template = reclaimed("daemon", app="daemon")
    body = {
        "metadata": {"name": "daemon"},
        "spec": {
            "selector": {"matchLabels": {"app": "daemon"}},
            "template": {"metadata": {**template["metadata"], "name": None}, "spec": template["spec"]},
        },
    }
    server.ask("POST", f"/apis/apps/v1/namespaces/{workspace}/daemonsets", body)
    pods = f"/api/v1/namespaces/{workspace}/pods?labelSelector=app%3Ddaemon"

    def daemons() -> list[CreatedPod]:
        mades: list[CreatedPod] = server.ask("GET", pods)["items"]
        return [result for result in mades if result["status"]["phase"] == "Running"]

    wait("the DaemonSet's pod", lambda: len(daemons()) == 1)
    leaves.append(daemons()[0])
    (name,) = [item.name for item in own_cluster.nodes]

    def taints() -> list[Any]:
        mades: list[Any] = server.ask("GET", f"/api/v1/nodes/{name}")["spec"].get("taints", [])
        return [(value["key"], value["effect"]) for value in mades]

    short = {"freeMinimumBytes": 1 << 39, "coolDownS": 0.1, "graceS": 1}
    with node.agent(plugins=[MEMORY], systemMemory=short, skippedLabels=["spare"], burst=3) as agent:
        wait("they leave", lambda: all(there(server, leave) is None for leave in leaves), 120)
        wait("the taint", lambda: (TAINT, "NoSchedule") in taints())
        batch = leaves[0]
        wait("the events arrive", lambda: len(events(own_cluster, batch)) >= 2)
        first = events(own_cluster, batch)[0]
        assert (first["reason"], first["type"], first["action"]) == ("EvictCreated", "Normal", "Evicting")
        assert (
            f"Successfully create eviction; reason: plugin {MEMORY} met threshold in scope SystemMemory"
            in first["message"]
        )
        numbers = first["message"].partition(" [")[2]
        assert numbers.startswith(f"{MEMORY}; observed ")
        assert "< threshold 512.00 GiB" in numbers
        assert f"pod{batch['metadata']['uid']}" in numbers
        assert "since 20" in numbers
        wait(
            "nothing is left to send away", lambda: json.loads(agent.get("/api/v1/view"))["evictions"]["victims"] == []
        )
        assert [entry["metadata"]["name"] for entry in staying if not stays(server, entry)] == []
        assert agent.end() == 0
    assert taints() == []
    server.ask("DELETE", f"/apis/apps/v1/namespaces/{workspace}/daemonsets/daemon")


def test_a_pod_that_fills_the_file_system_is_evicted_by_the_method_of_its_level(
    own_cluster: Cluster, server: Server, workspace: str, node: Node
) -> None:
    """Containers of reclaimed pods are stopped, and the kubelet starts them again; shared pods are deleted, whatever budgets
    say. What layers hold the runtime tells, which looks every ten seconds."""
    fills = "trap exit TERM; dd if=/dev/zero of=/full bs=1M count=64; while :; do sleep 1; done"
    stopped, deleted, idle = reclaimed("stopped"), a_pod("deleted", command=fills, app="deleted"), reclaimed("idle")
    stopped["spec"]["containers"][0]["command"][-1] = fills
    writer, needed, small = (create_running_pod(server, workspace, pod) for pod in (stopped, deleted, idle))
    guarded(server, workspace, app="deleted")
    plugin = "rootfs-pressure-eviction-plugin"
    full = {"mount": "/", "minimumFree": {"number": 1 << 50}, "podMinimum": {"number": 32 << 20}, "graceS": 1}
    killers = {"reclaimed_cores": "container-killer", "shared_cores": "deletion-api-killer"}
    with node.agent(plugins=[plugin], rootfsPressure=full, killers=killers) as agent:
        wait("one is deleted", lambda: there(server, needed) is None)
        wait("that is known", lambda: reasons(agent, needed) == ["EvictCreated", "EvictSucceeded"])

        def restarts() -> int:
            result = there(server, writer)
            assert result is not None
            return int(result["status"]["containerStatuses"][0]["restartCount"])

        wait("one is stopped and comes again", lambda: restarts() >= 1)

        def values() -> bool:
            # A busy runtime may refuse at first, and stop it all the same.
            texts = [message for reason, message in kills(agent, writer) if reason == "ContainerStopped"]
            assert texts, kills(agent, writer)
            return texts[0].startswith(f"Successfully kill container main; reason: plugin {plugin} met threshold")

        wait("that is known", values)
        wait(
            "an event says so",
            lambda: "ContainerStopping" in [event["action"] for event in events(own_cluster, writer)],
        )
        assert stays(server, writer)
        assert stays(server, small)
        assert agent.end() == 0


@pytest.mark.long
def test_no_pod_is_evicted_while_the_server_is_away_and_each_once_afterwards(
    own_cluster: Cluster, server: Server, workspace: str, node: Node, tmp_path: Path
) -> None:
    """A pod that its budget needs, whose agent goes on; and one whose agent is killed between decision and eviction."""
    web = create_running_pod(server, workspace, reclaimed("web", app="web"))
    batch = create_running_pod(server, workspace, reclaimed("batch", app="batch"))
    budget = guarded(server, workspace, app="web")
    (tmp_path / "other").mkdir()
    other = Node(own_cluster, tmp_path / "other")
    request = {"plugins": [RSS], "rss": {"ratio": 0.01, "labels": {"app": "batch"}}}
    with node.agent(plugins=[RSS], rss={"ratio": 0.01, "labels": {"app": "web"}}) as agent:
        wait("it is refused", lambda: reasons(agent, web) == ["EvictFailed"])
        assert "Cannot evict pod as it would violate the pod's disruption budget" in kills(agent, web)[0][1]
        assert 'dioptase_eviction_held_pods{why="budget"} 1' in agent.get("/metrics")
        wait("an event says so", lambda: [event["reason"] for event in events(own_cluster, web)] == ["EvictFailed"])

        own_cluster.daemons.end(API_SERVER)
        try:
            with other.agent(**request) as killed:
                wait("it is to be evicted, and the server is away", lambda: reasons(killed, batch) == ["EvictFailed"])
                killed.end(signal.SIGKILL)
            wait("there is no answer", lambda: 'held_pods{why="unreachable"} 1' in agent.get("/metrics"))
        finally:
            own_cluster.daemons.again(API_SERVER)
            own_cluster.control.ready()
        assert [stays(server, item) for item in (web, batch)] == [True, True]

        with other.agent(**request) as second:
            # The kubelet, which ends the pod, reconnects to a server that was away with growing delays.
            wait("the second agent evaluates again", lambda: there(server, batch) is None, 150)
            wait("that is known", lambda: reasons(second, batch)[-1:] == ["EvictSucceeded"])
            # A kubelet that reconnects late ends the pod after its grace period.
            timely = [reason for reason in reasons(second, batch) if reason != "EvictExceededGracePeriod"]
            assert timely == ["EvictFailed", "EvictCreated", "EvictSucceeded"], "the first by the killed one"
            wait("events say so", lambda: len(events(own_cluster, batch)) == 2)
            assert second.end() == 0

        assert stays(server, web)
        server.ask("PATCH", budget, {"spec": {"minAvailable": 0}}, MERGE)
        wait("it leaves", lambda: there(server, web) is None, 150)
        wait("that is known", lambda: reasons(agent, web)[-1:] == ["EvictSucceeded"])
        assert reasons(agent, web).count("EvictCreated") == 1
        assert 'dioptase_eviction_held_pods{why="budget"} 0' in agent.get("/metrics")
        wait("events say so", lambda: [result["reason"] for result in events(own_cluster, web)][-1] == "EvictSucceeded")
        assert agent.end() == 0
