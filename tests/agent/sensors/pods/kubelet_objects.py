"""Pods as the kubelet lists them, and a node's cgroups, for the tests of what the agent learns from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QOS = "katalyst.kubewharf.io/qos_level"


def pod(name: str, uid: str = "", /, **changes: Any) -> dict[str, Any]:
    """One pod of one container `main` that runs with the id `NAME-main`; `changes` go into its parts by their names."""
    metadata = {
        "name": name, "namespace": "shop", "uid": uid or f"uid-{name}", "creationTimestamp": None,
        "annotations": {"kubernetes.io/config.source": "api", "kubernetes.io/config.seen": "2026-01-01T00:00:00Z"},
        "managedFields": [{"manager": "x", "fieldsV1": {"f:a": {}}}],
    }  # fmt: skip
    spec: dict[str, Any] = {"containers": [container("main")], "nodeName": "n1", "priority": 0}
    status: dict[str, Any] = {
        "phase": "Running", "qosClass": "Burstable", "containerStatuses": [status_of("main", f"containerd://{name}-main")],
    }  # fmt: skip
    for key, value in changes.items():
        if key == "annotations":
            metadata["annotations"] = {**metadata["annotations"], **value}  # type: ignore[dict-item]
        elif key in ("labels", "deletionTimestamp", "deletionGracePeriodSeconds", "namespace"):
            metadata[key] = value
        else:
            (status if key.endswith("tatuses") or key in ("phase", "qosClass", "podIP") else spec)[key] = value
    return {"metadata": metadata, "spec": spec, "status": status}


def container(name: str, **changes: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": "500m", "memory": "64Mi", "ephemeral-storage": "1Gi"}, "limits": {"cpu": "0"}}
    return {"name": name, "image": "x", "resources": resources, **changes}


def status_of(name: str, container_id: str, state: str = "running") -> dict[str, Any]:
    return {"name": name, "containerID": container_id, "state": {state: {}}, "restartCount": 0}


def listing(*pods: dict[str, Any]) -> bytes:
    return json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": list(pods) or None}).encode()


class Cgroups:
    """The cgroups of a node of the cgroupfs driver, as directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "kubepods").mkdir()

    def exists(self, path: str) -> bool:
        return (self.root / path[1:]).is_dir()

    def make(self, uid: str, container_id: str, qos: str = "burstable") -> str:
        path = f"/kubepods/{qos}/pod{uid}/{container_id}"
        (self.root / path[1:]).mkdir(parents=True)
        return path

    def remove(self, path: str) -> None:
        (self.root / path[1:]).rmdir()
