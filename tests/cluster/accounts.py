"""Who our programs are on a cluster: service accounts that may what the docs on configuration and the controller say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.server import Refused

CONFIG, NODE = "config.katalyst.kubewharf.io", "node.katalyst.kubewharf.io"
Rule = tuple[str, Sequence[str], Sequence[str]]
"""A group, resources of it, and verbs."""
AGENT: Sequence[Rule] = (
    ("", ("nodes/proxy",), ("get",)),
    ("", ("nodes/status",), ("patch",)),
    ("", ("events",), ("create",)),
    ("", ("pods/eviction",), ("create",)),
    ("", ("pods",), ("get",)),
    ("", ("nodes",), ("get", "patch")),
    (CONFIG, ("customnodeconfigs",), ("list", "watch")),
    (CONFIG, ("adminqosconfigurations", "transparentmemoryoffloadingconfigurations", "strategygroups",
              "powermanagementconfigurations"), ("get",)),
    (NODE, ("customnoderesources",), ("get", "create", "patch")),
    (NODE, ("customnoderesources/status",), ("patch",)),
)  # fmt: skip
CONTROLLER: Sequence[Rule] = (
    ("", ("nodes",), ("get", "list", "watch")),
    ("", ("nodes/status",), ("patch",)),
    ("", ("pods",), ("list", "watch")),
    ("", ("pods/eviction",), ("create",)),
    ("coordination.k8s.io", ("leases",), ("get", "create", "patch")),
    (NODE, ("customnoderesources",), ("list", "watch", "create", "patch", "delete")),
    (CONFIG, ("customnodeconfigs",), ("list", "watch", "create", "patch", "delete")),
    (CONFIG, ("*",), ("list", "watch", "patch", "delete")),
)
WITHDRAW: Sequence[Rule] = (
    ("", ("nodes",), ("list", "patch")),
    ("", ("nodes/status",), ("patch",)),
    ("apps", ("daemonsets", "deployments"), ("get", "delete")),
    (NODE, ("customnoderesources",), ("list", "patch")),
    (NODE, ("customnoderesources/status",), ("patch",)),
    (CONFIG, ("katalystcustomconfigs", "adminqosconfigurations", "authconfigurations", "irqtuningconfigurations",
              "memorybandwidthconfigurations", "powermanagementconfigurations", "strategygroupconfigurations",
              "strategygroups", "transparentmemoryoffloadingconfigurations"), ("list", "patch")),
)  # fmt: skip
ROLES: Mapping[str, Sequence[Rule]] = {
    "dioptase-agent": AGENT, "dioptase-controller": CONTROLLER, "dioptase-withdraw": WITHDRAW,
}  # fmt: skip


class Account:
    """One service account, made where it is missing, with a token and a kubeconfig file for programs outside of pods."""

    def __init__(self, cluster: Cluster, name: str, namespace: str, folder: Path) -> None:
        self._cluster, self._name, self._namespace = cluster, name, namespace
        self.token, self.kubeconfig = folder / f"{name}.token", folder / f"{name}.kubeconfig"
        self.authority = cluster.control.authority.certificate("ca")
        self._grant(ROLES[name])
        self._write()

    def _grant(self, rules: Sequence[Rule]) -> None:
        role = f"{self._name}-{self._namespace}"
        self._make("/api/v1", f"namespaces/{self._namespace}/serviceaccounts", self._name, {})
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        said = [{"apiGroups": [group], "resources": list(kinds), "verbs": list(verbs)} for group, kinds, verbs in rules]
        self._make(rbac, "clusterroles", role, {"rules": said})
        who = {"kind": "ServiceAccount", "name": self._name, "namespace": self._namespace}
        what = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        self._make(rbac, "clusterrolebindings", role, {"subjects": [who], "roleRef": what})

    def forget(self) -> None:
        """Remove what is not in its namespace, and so does not go with it."""
        for kind in ("clusterrolebindings", "clusterroles"):
            path = f"/apis/rbac.authorization.k8s.io/v1/{kind}/{self._name}-{self._namespace}"
            self._cluster.server.ask("DELETE", path)

    def _make(self, api: str, kind: str, name: str, body: Mapping[str, Any]) -> None:
        try:
            self._cluster.server.ask("POST", f"{api}/{kind}", {"metadata": {"name": name}, **body})
        except Refused as error:
            if error.status != 409:
                raise

    def _write(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{self._name}/token"
        made = self._cluster.server.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        self.token.write_text(made["status"]["token"])
        cluster = {"server": self._cluster.names.server, "certificate-authority": str(self.authority)}
        said = {
            "apiVersion": "v1", "kind": "Config", "current-context": "one",
            "clusters": [{"name": "one", "cluster": cluster}],
            "users": [{"name": "one", "user": {"tokenFile": str(self.token)}}],
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": self._namespace}}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(said))
