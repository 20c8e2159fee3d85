"""Pods resolve the names of Services by CoreDNS at the address that the kubelet gives to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.dns import serve_names
from tests.cluster.names import DNS_SERVICE
from tests.cluster.objects import a_pod
from tests.cluster.server import Server
from tests.cluster.test_nodes import phase

pytestmark = pytest.mark.cluster


@pytest.fixture
def named(own_cluster: Cluster, workspace: str, server: Server) -> Iterator[str]:
    """A namespace with a pod `client` and a Service `web` for a pod of the same name."""
    serve_names(own_cluster)
    pods = f"/api/v1/namespaces/{workspace}/pods"
    server.ask("POST", pods, a_pod("client"))
    server.ask("POST", pods, a_pod("web", app="web"))
    spec = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}
    services = f"/api/v1/namespaces/{workspace}/services"
    server.ask("POST", services, {"metadata": {"name": "web"}, "spec": spec})
    server.ask("POST", services, {"metadata": {"name": "pods"}, "spec": {**spec, "clusterIP": "None"}})
    for name in ("client", "web"):
        wait(f"the pod {name}", lambda name=name: phase(server, workspace, name) == "Running")
    return workspace


def resolve(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """Return the addresses of a name, as the pod `client` resolves it; none if the DNS answers that there is no such name."""
    command = f"nslookup -type=a {name} || true"
    answer = cluster.kubectl("exec", "--namespace", namespace, "client", "--", "sh", "-c", command)
    addresses = re.findall(r"^Address: (\S+)$", answer.partition("\n\n")[2], re.M)
    assert addresses or "NXDOMAIN" in answer, answer
    return addresses


def test_a_pod_resolves_the_name_of_a_service(own_cluster: Cluster, named: str, server: Server) -> None:
    assert f"nameserver {DNS_SERVICE}\n" in own_cluster.kubectl(
        "exec", "--namespace", named, "client", "--", "cat", "/etc/resolv.conf"
    )
    service = server.ask("GET", f"/api/v1/namespaces/{named}/services/web")["spec"]["clusterIP"]
    pod = server.ask("GET", f"/api/v1/namespaces/{named}/pods/web")["status"]["podIP"]
    suffix = f"{named}.svc.cluster.local"
    wait("the Service's name", lambda: resolve(own_cluster, named, f"web.{suffix}"), 30)
    assert resolve(own_cluster, named, f"web.{suffix}") == [service]
    wait("the pod's name", lambda: resolve(own_cluster, named, f"pods.{suffix}"), 30)
    assert resolve(own_cluster, named, f"pods.{suffix}") == [pod], "of a Service without an address: its pods"
    assert resolve(own_cluster, named, "kubernetes.default.svc.cluster.local") == ["10.96.0.1"]
    assert resolve(own_cluster, named, f"none.{suffix}") == []
