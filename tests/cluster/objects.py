"""Kubernetes objects in JSON."""

from __future__ import annotations

from typing import Any

from tests.cluster.images import SHELL


def a_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def a_pod(name: str, **labels: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": SHELL,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "trap exit TERM; while :; do sleep 1; done"],
    }
    spec = {"terminationGracePeriodSeconds": 2, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
