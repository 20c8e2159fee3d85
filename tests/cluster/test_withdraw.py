"""`dioptase withdraw` on a real API server, with the rights in docs/controller.md: it ends the writers first, and removes all
that agents and controllers wrote, except the objects."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from controller.kcc.ownership import FINALIZER as KCC_FINALIZER
from controller.kcc.targets import FINALIZER
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.katalyst import ADMINS, CNRS, KCCS, a_kcc, an_admin, is_deleted, lending, within
from tests.cluster.objects import a_pod
from tests.cluster.programs import as_account
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import RBAC, Account

pytestmark = pytest.mark.cluster
NODE = "/api/v1/nodes/withdrawn"
CNR = f"{CNRS}/withdrawn"
MILLICPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
FOREIGN_TAINT = {"key": "theirs", "effect": "NoSchedule"}
PRESSURE = {"key": "node.katalyst.kubewharf.io/MemoryPressure", "effect": "NoSchedule"}
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
CONFIGURATIONS = [
    KCCS, ADMINS, "authconfigurations", "irqtuningconfigurations", "memorybandwidthconfigurations",
    "powermanagementconfigurations", "strategygroupconfigurations", "strategygroups",
    "transparentmemoryoffloadingconfigurations",
]  # fmt: skip
OTHERS = "tests.example.org/kept"
RATIOS = {"dioptase.io/overcommit-config": "batch", "katalyst.kubewharf.io/cpu_overcommit_ratio": "2"}
ORIGINAL = {"katalyst.kubewharf.io/original_allocatable_cpu": "8"}


class Withdrawing(Account):
    """An account with exactly the rights in docs/controller.md."""

    def _grant(self) -> None:
        super()._grant()
        rules = [
            ("", ["nodes"], ["list", "patch"]),
            ("", ["nodes/status"], ["patch"]),
            ("apps", ["daemonsets", "deployments"], ["get", "delete"]),
            ("node.katalyst.kubewharf.io", ["customnoderesources"], ["list", "patch"]),
            ("node.katalyst.kubewharf.io", ["customnoderesources/status"], ["patch"]),
            ("config.katalyst.kubewharf.io", CONFIGURATIONS, ["list", "patch"]),
        ]
        texts = [{"apiGroups": [group], "resources": kinds, "verbs": verbs} for group, kinds, verbs in rules]
        name = {"kind": "ServiceAccount", "name": self._name, "namespace": self._namespace}
        what = {"apiGroup": RBAC, "kind": "ClusterRole", "name": self._role}
        self._make(f"/apis/{RBAC}/v1", "clusterroles", self._role, {"rules": texts})
        self._make(f"/apis/{RBAC}/v1", "clusterrolebindings", self._role, {"subjects": [name], "roleRef": what})


def workload(kind: str) -> dict[str, Any]:
    """Return a DaemonSet or a Deployment."""
    template = a_pod(kind.lower(), app=kind)
    return {
        "metadata": {"name": kind.lower()},
        "spec": {
            "selector": {"matchLabels": {"app": kind}},
            "template": {"metadata": {"labels": {"app": kind}}, "spec": template["spec"]},
        },
    }


def withdraw(account: Account, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*as_account(account), "withdraw", *options], capture_output=True, text=True, check=False, timeout=300
    )


def taints(server: Server, path: str) -> list[str]:
    return [item["key"] for item in server.ask("GET", path)["spec"].get("taints", [])]


def test_nothing_stays_but_the_objects(
    cluster: Cluster, own_cluster: Cluster, definitions: Server, workspace: str, tmp_path: Path
) -> None:
    server, account = definitions, Withdrawing(own_cluster, "withdraw", workspace, tmp_path)
    apps = f"/apis/apps/v1/namespaces/{workspace}"
    for kind in ("DaemonSet", "Deployment"):
        server.ask("POST", f"{apps}/{kind.lower()}s", workload(kind))
    pods = f"/api/v1/namespaces/{workspace}/pods"
    wait("both run", lambda: [item["status"]["phase"] for item in server.ask("GET", pods)["items"]] == ["Running"] * 2)
    amounts = {"cpu": "8", MILLICPU: "4000"}
    annotations = {"dioptase.io/node-taints": f"{PRESSURE['key']}:NoSchedule", **RATIOS, **ORIGINAL}
    metadata = {"name": "withdrawn", "annotations": annotations}
    server.ask("POST", "/api/v1/nodes", {"metadata": metadata, "spec": {"taints": [FOREIGN_TAINT, PRESSURE]}})
    server.ask("PATCH", f"{NODE}/status", {"status": {"capacity": amounts, "allocatable": amounts}}, MERGE)
    server.ask("POST", CNRS, {
        "apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource",
        "metadata": {"name": "withdrawn"},
        "spec": {"taints": [{**PRESSURE, "qosLevel": "reclaimed_cores"}, UNSCHEDULABLE]},
    })  # fmt: skip
    status = {"resources": {"allocatable": {MILLICPU: "4000"}}, "topologyPolicy": "None"}
    server.ask("PATCH", f"{CNR}/status", {"status": status}, MERGE)
    kccs, admins = within(workspace, KCCS), within(workspace, ADMINS)
    for path, created, finalizer in (
        (kccs, a_kcc(), KCC_FINALIZER),
        (admins, an_admin("all", lending("1")), FINALIZER),
    ):
        created["metadata"]["finalizers"] = [OTHERS, finalizer]
        server.ask("POST", path, created)
    try:
        ended = withdraw(account, *(f"--stop={kind}/{workspace}/{kind}" for kind in ("daemonset", "deployment")))
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        assert server.ask("GET", pods)["items"] == [], "they have ended, and were waited for"
        for kind in ("daemonset", "deployment"):
            assert is_deleted(server, f"{apps}/{kind}s/{kind}")
        assert "theirs" in taints(server, NODE)
        assert PRESSURE["key"] not in taints(server, NODE)
        assert (
            server.ask("GET", NODE)["metadata"]["annotations"].keys().isdisjoint(annotations.keys() - ORIGINAL.keys())
        )
        assert server.ask("GET", NODE)["metadata"]["annotations"].items() >= ORIGINAL.items()
        for part in ("capacity", "allocatable"):
            assert server.ask("GET", NODE)["status"][part] == {"cpu": "8"}
        assert taints(server, CNR) == []
        assert server.ask("GET", CNR)["status"] == {"topologyPolicy": "None"}
        for path in (f"{kccs}/all", f"{admins}/all"):
            assert server.ask("GET", path)["metadata"]["finalizers"] == [OTHERS]
        again = withdraw(account, f"--stop=daemonset/{workspace}/daemonset")
        assert (again.returncode, again.stderr) == (0, "")
        refused = withdraw(account, f"--stop=deployment/kube-system/{'x' * 300}")
        assert refused.returncode == 2
    finally:
        for path in (f"{kccs}/all", f"{admins}/all"):
            server.ask("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
            server.ask("DELETE", path)
        server.ask("DELETE", CNR)
        server.ask("DELETE", NODE)
        account.forget()
