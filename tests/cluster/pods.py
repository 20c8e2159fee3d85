"""Running pods of a QoS level, and their cgroup files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.cgroups import ROOT
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.node import Node
from tests.cluster.objects import IDLING, a_pod
from tests.cluster.server import Server

IDLE = "cpu.idle"


class Pod:
    """One pod on one node."""

    def __init__(self, server: Server, namespace: str, name: str, node: Node) -> None:
        self._server, self.name, self._node = server, name, node
        self.path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.key = f"{namespace}/{name}"

    def read(self) -> Any:
        return self._server.ask("GET", self.path)

    @property
    def running(self) -> bool:
        statuses = self.read()["status"].get("containerStatuses", [])
        return bool(statuses) and all(statuse["ready"] for statuse in statuses)

    @property
    def untouched(self) -> bool:
        """Whether no container was restarted and the pod is not terminating."""
        result = self.read()
        restarts = [item["restartCount"] for item in result["status"]["containerStatuses"]]
        return not any(restarts) and "deletionTimestamp" not in result["metadata"] and self.running

    def cgroups(self, controller: str = "cpu") -> list[Path]:
        """Return the cgroups of the pod and of its containers."""
        root = ROOT / controller if (ROOT / controller).exists() else ROOT
        result = self.read()
        klass = {"BestEffort": "besteffort", "Burstable": "burstable"}.get(result["status"]["qosClass"], "")
        pod = root / self._node.cgroup_root.strip("/") / "kubepods" / klass / f"pod{result['metadata']['uid']}"
        return [pod, *(each for each in pod.iterdir() if each.is_dir())]

    @property
    def idle(self) -> bool:
        """Return whether a cgroup of the pod has cpu.idle set."""
        return any((group / IDLE).read_text() == "1\n" for group in self.cgroups())

    def knobs(self) -> dict[str, str]:
        """Return every writable CPU file by cgroup and name."""
        files = [file for group in self.cgroups() for file in group.glob("cpu.*") if file.name not in _READ_ONLY]
        return {f"{file.parent.name}/{file.name}": file.read_text() for file in sorted(files)}


_READ_ONLY = {"cpu.stat", "cpu.stat.local", "cpu.pressure"}
"""Files that only the kernel writes."""


def run(
    cluster: Cluster, namespace: str, name: str, level: str, command: str = IDLING,
    annotations: Mapping[str, str] | None = None, resources: Mapping[str, Any] | None = None, node: Node | None = None,
) -> Pod:  # fmt: skip
    """Create a pod of this level and wait until it runs; on the first node by default."""
    node = node or cluster.nodes[0]
    created = a_pod(name, level, command, resources)
    created["metadata"]["annotations"] |= annotations or {}
    created["spec"]["nodeName"] = node.name
    cluster.server.ask("POST", f"/api/v1/namespaces/{namespace}/pods", created)
    pod = Pod(cluster.server, namespace, name, node)
    wait(f"pod {name}", lambda: pod.running)
    return pod
