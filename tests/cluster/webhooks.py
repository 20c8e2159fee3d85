"""The chart's webhooks on a cluster without pods of the controller: its objects, and replicas that the API server reaches
through the Service as it reaches pods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.cluster.audit import AuditedRequest
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.image_and_chart import CHART, helm
from tests.cluster.names import CONTROL
from tests.cluster.programs import Controller
from tests.cluster.server import Refused
from tests.cluster.service_accounts import Account, granted_by, shipped

RELEASE = "dioptase"
NAME = f"{RELEASE}-webhooks"
WEBHOOK_PORT = 9500
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
CONFIGURATIONS = (
    f"{ADMISSION}/mutatingwebhookconfigurations/{NAME}",
    f"{ADMISSION}/validatingwebhookconfigurations/{NAME}",
)


class WebhookInstallation:
    """The chart's objects of the webhooks in one namespace, and replicas of the controller that serve them."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self._folder = cluster, namespace, folder
        templates = [f"--show-only=templates/{name}.yaml" for name in ("webhooks", "controller-rbac")]
        created = helm(
            cluster, "template", RELEASE, CHART, "--namespace", namespace, "--set", "webhooks.enabled=true", *templates
        )
        self._objects = [msgspec.yaml.decode(text) for text in created.split("\n---\n") if text.strip()]
        self.replicas: list[Controller] = []
        self.addresses: list[tuple[str, int]] = []
        self._account: Account | None = None

    def begin(self, replicas: int = 1) -> None:
        """Create the objects and start the replicas."""
        server = self.cluster.server
        if server.refusal("GET", f"/api/v1/namespaces/{self.namespace}"):
            server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        for item in self._objects:
            if item["kind"] == "Service":
                # Controllers of the cluster would replace the addresses below by those of pods.
                item["spec"].pop("selector")
            for webhook in item.get("webhooks", ()):
                # A busy machine must not look like a lost review: the tests are about certificates and replicas.
                webhook["timeoutSeconds"] = 30
        self._apply(self._objects)
        self._account = Account(self.cluster, f"{RELEASE}-controller", self.namespace, self._folder)
        ports = [WEBHOOK_PORT + number for number in range(1, replicas + 1)]
        self.route(ports)
        self.addresses = [(self.cluster.names.address(CONTROL), port) for port in ports]
        self.replicas = [self.replica(number, port) for number, port in enumerate(ports, 11)]
        for replica in self.replicas:
            replica.begin()

    def replica(self, number: int, port: int, **more: Any) -> Controller:
        """Return a replica that serves the chart's webhooks at a port; `more` are further settings of the webhooks."""
        assert self._account is not None
        served = [webhook["clientConfig"]["service"]["path"].lstrip("/") for webhook in self._webhooks()]
        names = {"service": NAME, "configuration": NAME, "secret": NAME}
        settings = {"controllers": [], "webhooks": {"serve": served, "port": port, **names, **more}}
        return Controller(self.cluster, self._account, self._folder, number, settings)

    def end(self) -> None:
        """Stop the replicas and remove everything that belongs to the whole cluster."""
        for replica in self.replicas:
            if replica.pid:
                replica.end()
        for path in CONFIGURATIONS:
            self.cluster.server.refusal("DELETE", path)
        if self._account is not None:
            self._account.forget()
        self.cluster.server.refusal("DELETE", f"/api/v1/namespaces/{self.namespace}")

    def rights(self) -> set[AuditedRequest]:
        """Return what the chart's roles grant the controller with the webhooks."""
        return granted_by(rule for item in self._objects for rule in item.get("rules", ()))

    def webhook_rights(self) -> set[AuditedRequest]:
        """Return what the chart grants for the webhooks only."""
        return self.rights() - granted_by(rule for _, rules in shipped("dioptase-controller") for rule in rules)

    def published(self) -> bool:
        """Return whether every webhook has the bundle of the Secret."""
        bundle = self.secret().get("ca.crt")
        return bool(bundle) and self.bundles() == {bundle}

    def failures(self) -> str:
        """Return what the API server logged about reviews that failed."""
        log = self.cluster.daemons.log(API_SERVER).read_text(errors="replace")
        return "\n".join(line for line in log.splitlines() if "failed calling webhook" in line.lower())[-3000:]

    def secret(self) -> Mapping[str, str]:
        """Return the data of the Secret with the certificate, in base64."""
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{NAME}"
        return dict(self.cluster.server.ask("GET", path).get("data") or {})

    def bundles(self) -> set[str]:
        """Return every `caBundle` of the webhook configurations."""
        bundles = set()
        for path in CONFIGURATIONS:
            try:
                configuration = self.cluster.server.ask("GET", path)
            except Refused:
                continue
            bundles |= {webhook["clientConfig"].get("caBundle", "") for webhook in configuration["webhooks"]}
        return bundles

    def _webhooks(self) -> list[Any]:
        return [webhook for item in self._objects for webhook in item.get("webhooks", ())]

    def route(self, ports: Sequence[int]) -> None:
        """Give the Service the addresses of the replicas at these ports, and no others. API servers before 1.33 read Endpoints,
        later ones EndpointSlices."""
        address = self.cluster.names.address(CONTROL)
        named = [{"name": "webhooks", "port": port, "protocol": "TCP"} for port in ports]
        slices: list[Any] = [
            {
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {
                    "name": f"{NAME}-{port['port']}", "namespace": self.namespace,
                    "labels": {"kubernetes.io/service-name": NAME},
                },
                "endpoints": [{"addresses": [address], "conditions": {"ready": True}}], "ports": [port],
            }
            for port in named
        ]  # fmt: skip
        endpoints = {
            "apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": NAME, "namespace": self.namespace},
            "subsets": [{"addresses": [{"ip": address}], "ports": [port]} for port in named],
        }  # fmt: skip
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        for item in self.cluster.server.ask("GET", path)["items"]:
            if item["metadata"]["name"] not in [each["metadata"]["name"] for each in slices]:
                self.cluster.server.ask("DELETE", f"{path}/{item['metadata']['name']}")
        self._apply([endpoints, *slices])

    def _apply(self, objects: Sequence[Any]) -> None:
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        words = ("apply", "--server-side", "--force-conflicts", "--validate=false", "-f", "-")
        self.cluster.kubectl(*words, text=listed)
