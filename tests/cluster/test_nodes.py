"""Nodes are stock: pods run in their cgroups, sockets are at their paths, and programs come back after they were killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.node import SOCKET
from tests.cluster.objects import a_pod
from tests.cluster.server import Server

pytestmark = pytest.mark.cluster
CGROUPS = Path("/sys/fs/cgroup")


def phase(server: Server, namespace: str, name: str) -> str:
    pod = server.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
    statuses = pod["status"].get("containerStatuses", [])
    return str(pod["status"]["phase"]) if statuses and all(statuse["ready"] for statuse in statuses) else "not ready"


def test_a_pod_runs_in_cgroups_of_its_class_and_is_reached(
    own_cluster: Cluster, server: Server, workspace: str
) -> None:
    pod = a_pod("web")
    pod["spec"]["containers"][0] |= {
        "command": ["sh", "-c", "while :; do echo hello | nc -l -p 8080; done"],
        "resources": {"requests": {"cpu": "200m", "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": "64Mi"}},
    }
    created = server.ask("POST", f"/api/v1/namespaces/{workspace}/pods", pod)
    wait("the pod", lambda: phase(server, workspace, "web") == "Running")
    (node,) = own_cluster.nodes
    below = CGROUPS / "cpu" if (CGROUPS / "cpu").exists() else CGROUPS
    group = below / node.cgroup_root.strip("/") / "kubepods/burstable" / f"pod{created['metadata']['uid']}"
    file = "cpu.cfs_quota_us" if (group / "cpu.cfs_quota_us").exists() else "cpu.max"
    assert (group / file).read_text().split()[0] == "50000"
    address = server.ask("GET", f"/api/v1/namespaces/{workspace}/pods/web")["status"]["podIP"]
    assert address.startswith(own_cluster.names.pods("node1").rpartition(".")[0])
    assert node.run("busybox", "nc", "-w", "5", address, "8080") == "hello\n"
    assert own_cluster.kubectl("exec", "--namespace", workspace, "web", "--", "echo", "from within") == "from within\n"


def test_sockets_and_folders_are_at_their_usual_paths(own_cluster: Cluster, cluster: Cluster | ExternalCluster) -> None:
    (node,) = own_cluster.nodes
    for path in (SOCKET, "/run/nri/nri.sock", "/var/lib/kubelet/pod-resources/kubelet.sock"):
        node.run("test", "-S", path)
        assert node.at(path).is_socket()
    assert node.run("test", "-d", "/var/lib/kubelet/plugins_registry") == ""
    assert not Path("/var/lib/kubelet/pod-resources").exists(), "on this machine there is nothing of it"


def test_kubelet_lists_its_pods_at_its_read_endpoint(own_cluster: Cluster, server: Server, workspace: str) -> None:
    server.ask("POST", f"/api/v1/namespaces/{workspace}/pods", a_pod("web"))
    wait("the pod", lambda: phase(server, workspace, "web") == "Running")
    (node,) = own_cluster.nodes
    document = json.loads(node.run("busybox", "wget", "-q", "-O", "-", f"http://{node.address}:10255/pods"))
    assert "web" in {pod["metadata"]["name"] for pod in document["items"]}


@pytest.mark.parametrize("program", ["kubelet", "containerd"])
def test_a_pod_outlives_the_program_that_started_it(
    own_cluster: Cluster, server: Server, workspace: str, program: str
) -> None:
    server.ask("POST", f"/api/v1/namespaces/{workspace}/pods", a_pod("web"))
    wait("the pod", lambda: phase(server, workspace, "web") == "Running")
    own_cluster.daemons.end(f"node1-{program}")
    own_cluster.daemons.again(f"node1-{program}")
    server.ask("POST", f"/api/v1/namespaces/{workspace}/pods", a_pod("next"))
    wait("the next one", lambda: phase(server, workspace, "next") == "Running", 120)
    statuses = server.ask("GET", f"/api/v1/namespaces/{workspace}/pods/web")["status"]["containerStatuses"]
    assert [statuse["restartCount"] for statuse in statuses] == [0]


@pytest.mark.long
def test_pods_of_two_nodes_reach_each_other_and_services(two_nodes: Cluster) -> None:
    server = two_nodes.server
    assert [node.name for node in two_nodes.nodes] == ["node1", "node2"]
    assert all(two_nodes.ready(node.name) for node in two_nodes.nodes)
    pods = "/api/v1/namespaces/default/pods"
    for number in (1, 2):
        pod = a_pod(f"on{number}", command=f"while :; do echo from {number} | nc -l -p 8080; done", on=str(number))
        pod["spec"]["nodeName"] = f"node{number}"
        server.ask("POST", pods, pod)
    service = {
        "metadata": {"name": "two"},
        "spec": {"selector": {"on": "2"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    created = server.ask("POST", "/api/v1/namespaces/default/services", service)
    for number in (1, 2):
        wait("the pods", lambda number=number: phase(server, "default", f"on{number}") == "Running")
    address = server.ask("GET", f"{pods}/on2")["status"]["podIP"]
    ask = ("exec", "on1", "--", "nc", "-w", "5")
    assert two_nodes.kubectl(*ask, address, "8080") == "from 2\n"
    wait("the service", lambda: two_nodes.kubectl(*ask, created["spec"]["clusterIP"], "80") == "from 2\n")


@pytest.mark.long
def test_only_one_node_of_a_machine_has_the_usual_cgroups(two_nodes: Cluster) -> None:
    roots = [node.cgroup_root for node in two_nodes.nodes]
    assert len(set(roots)) == 2
    assert roots[1] == f"/dioptase-{two_nodes.names.number}-node2"
