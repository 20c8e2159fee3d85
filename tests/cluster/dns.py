"""The DNS of a cluster: CoreDNS next to the control plane, behind the Service whose address the kubelets give to pods."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from tests.cluster.binaries import compiled_program
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import PATIENCE
from tests.cluster.names import CONTROL, DNS_SERVICE
from tests.cluster.server import Refused

COREDNS = "coredns"
READY_PORT = 8181
_NAMESPACE, _SERVICE = "kube-system", "kube-dns"
# The plugin `forward` is missing: nothing of a cluster reaches a server beyond it, and a refusal is faster than a timeout.
_COREFILE = """cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {
    bind ADDRESS
    ready ADDRESS:PORT
    errors
    cache 5
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig KUBECONFIG
    }
}
"""


def serve_names(cluster: Cluster) -> None:
    """Start CoreDNS unless it runs, and wait until it answers. It knows the names of the cluster, and no others.

    Raises Missing and Late.
    """
    address = cluster.names.address(CONTROL)
    if COREDNS not in cluster.daemons.names():
        _create_service(cluster, address)
        corefile = cluster.names.run / "Corefile"
        corefile.write_text(_corefile(address, cluster.kubeconfig))
        words = (compiled_program(COREDNS), "-conf", corefile)
        cluster.daemons.start(COREDNS, cluster.names.space(CONTROL), words)
    elif cluster.daemons.pid(COREDNS) is None:
        # After a reboot, with the files on disk.
        cluster.daemons.again(COREDNS)
    url = f"http://{address}:{READY_PORT}/ready"

    def ready() -> bool:
        with urllib.request.urlopen(url, timeout=5 * PATIENCE) as answer:
            return bool(answer.status == 200)

    cluster.daemons.wait(COREDNS, ready, 30)


def _corefile(address: str, kubeconfig: Path) -> str:
    text = _COREFILE.replace("ADDRESS", address).replace("PORT", str(READY_PORT))
    return text.replace("KUBECONFIG", str(kubeconfig))


def _create_service(cluster: Cluster, address: str) -> None:
    """Create a Service without selector: its endpoint is no pod."""
    ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
    labels = {"k8s-app": _SERVICE, "kubernetes.io/service-name": _SERVICE}
    service = {
        "metadata": {"name": _SERVICE, "labels": {"k8s-app": _SERVICE}},
        "spec": {
            "clusterIP": DNS_SERVICE,
            "ports": [{"name": name, "protocol": protocol, "port": 53} for name, protocol in ports],
        },
    }
    endpoints = {
        "metadata": {"name": _SERVICE, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": name, "protocol": protocol, "port": 53} for name, protocol in ports],
    }
    for path, body in (
        (f"/api/v1/namespaces/{_NAMESPACE}/services", service),
        (f"/apis/discovery.k8s.io/v1/namespaces/{_NAMESPACE}/endpointslices", endpoints),
    ):
        try:
            cluster.server.ask("POST", path, body)
        except Refused as error:
            # Of a start that was interrupted.
            if error.status != 409:
                raise
