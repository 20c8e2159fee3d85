"""Kubernetes objects in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cluster.images import SHELL


def a_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


QOS = "katalyst.kubewharf.io/qos_level"
IDLING = "trap exit TERM; while :; do sleep 1; done"
"""Shell script that waits for SIGTERM."""


def a_pod(
    name: str, level: str = "", command: str = IDLING, resources: Mapping[str, Any] | None = None, **labels: str
) -> dict[str, Any]:
    """Return a pod that runs a shell script; `level` is its QoS level, by default without an annotation."""
    container = {
        "name": "main", "image": SHELL, "imagePullPolicy": "Never", "command": ["sh", "-c", command],
        "resources": dict(resources or {}),
    }  # fmt: skip
    spec = {"terminationGracePeriodSeconds": 2, "containers": [container]}
    metadata = {"name": name, "labels": labels, "annotations": {QOS: level} if level else {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
