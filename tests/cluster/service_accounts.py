"""Service accounts of the product's programs on a cluster: exactly the rights that the chart's roles grant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from deploy import chart
from tests.cluster.audit import AuditedRequest
from tests.cluster.cluster import Cluster
from tests.cluster.server import Refused

RBAC = "rbac.authorization.k8s.io"
LENDING = {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}
"""Rule that the chart adds with agent.extendedResources."""


def shipped(name: str) -> list[tuple[str, Any]]:
    """Return kind and rules of every role of this account, from the chart with default values."""
    created = [msgspec.yaml.decode(text) for text in chart.KUSTOMIZE_BASE.read_text().split("\n---\n")[1:]]
    roles = [item for item in created if item["kind"] in ("ClusterRole", "Role") and item["metadata"]["name"] == name]
    return [(role["kind"], role["rules"]) for role in roles]


def granted_by(rules: Iterable[Mapping[str, Sequence[str]]]) -> set[AuditedRequest]:
    """Return every verb on every resource that these rules grant."""
    return {
        AuditedRequest(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


class Account:
    """One service account, created if missing, with a token and a kubeconfig for programs outside of pods."""

    def __init__(
        self, cluster: Cluster, name: str, namespace: str, folder: Path, more: Sequence[Mapping[str, Any]] = (), *,
        bound: bool = False,
    ) -> None:  # fmt: skip
        """Create the account and its roles, unless they are `bound` already; `more` are additional rules for the cluster."""
        self._cluster, self._name, self._namespace, self._more = cluster, name, namespace, more
        self.token, self.kubeconfig = folder / f"{name}.token", folder / f"{name}.kubeconfig"
        self.authority = cluster.control.authority.certificate("ca")
        if not bound:
            self._grant()
        self._write()

    def _grant(self) -> None:
        self._make("/api/v1", f"namespaces/{self._namespace}/serviceaccounts", self._name, {})
        name = {"kind": "ServiceAccount", "name": self._name, "namespace": self._namespace}
        for kind, rules in shipped(self._name):
            where = f"namespaces/{self._namespace}/" if kind == "Role" else ""
            more = self._more if kind == "ClusterRole" else ()
            self._make(f"/apis/{RBAC}/v1", f"{where}{kind.lower()}s", self._role, {"rules": [*rules, *more]})
            what = {"apiGroup": RBAC, "kind": kind, "name": self._role}
            body = {"subjects": [name], "roleRef": what}
            self._make(f"/apis/{RBAC}/v1", f"{where}{kind.lower()}bindings", self._role, body)

    @property
    def _role(self) -> str:
        return f"{self._name}-{self._namespace}"

    def forget(self) -> None:
        """Delete the cluster-wide objects, which the deletion of the namespace would leave."""
        for kind in ("clusterrolebindings", "clusterroles"):
            self._cluster.server.ask("DELETE", f"/apis/{RBAC}/v1/{kind}/{self._role}")

    def _make(self, api: str, kind: str, name: str, body: Mapping[str, Any]) -> None:
        try:
            self._cluster.server.ask("POST", f"{api}/{kind}", {"metadata": {"name": name}, **body})
        except Refused as error:
            if error.status != 409:
                raise

    def _write(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{self._name}/token"
        created = self._cluster.server.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        self.token.write_text(created["status"]["token"])
        cluster = {"server": self._cluster.names.server, "certificate-authority": str(self.authority)}
        text = {
            "apiVersion": "v1", "kind": "Config", "current-context": "one",
            "clusters": [{"name": "one", "cluster": cluster}],
            "users": [{"name": "one", "user": {"tokenFile": str(self.token)}}],
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": self._namespace}}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(text))
