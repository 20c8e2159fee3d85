"""In-place resizes of pods on a node with an agent that acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import pods
from tests.cluster.agents import Agent
from tests.cluster.binaries import MINOR
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.pods import Pod

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
STRATEGIC = "application/strategic-merge-patch+json"
SHARES = {"200m": 204, "500m": 512}
"""Content of cpu.shares by request: pkg/kubelet/cm/helpers_linux.go, MilliCPUToShares()."""


def test_a_resize_of_an_online_pod_is_applied_while_the_agent_acts(
    own_cluster: Cluster, cluster: object, workspace: str, tmp_path: Path
) -> None:
    if MINOR < "1.33":
        pytest.skip(f"Kubernetes {MINOR} has no resizes unless InPlacePodVerticalScaling is enabled")
    (node,) = own_cluster.nodes
    with Agent(node, tmp_path, {"intervalS": 0.5}):
        web = pods.run(own_cluster, workspace, "web", "shared_cores", resources={"requests": {"cpu": "200m"}})
        batch = pods.run(own_cluster, workspace, "batch", "reclaimed_cores")
        wait("the agent acts", lambda: batch.idle)
        assert weight(web) in (SHARES["200m"], weight_of(SHARES["200m"]))
        body = {"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "500m"}}}]}}
        own_cluster.server.ask("PATCH", f"{web.path}/resize", body, STRATEGIC)
        wait("the weight of 500 millicpu", lambda: weight(web) in (SHARES["500m"], weight_of(SHARES["500m"])), 30)
        wait("the status", lambda: requests(web) == {"cpu": "500m"}, 60)
        assert web.untouched
        assert batch.idle
        assert not web.idle


def weight(pod: Pod) -> int:
    """Return the weight of the pod's cgroup: cpu.shares of version 1 or cpu.weight of version 2."""
    group = pod.cgroups()[0]
    (file,) = (group / name for name in ("cpu.shares", "cpu.weight") if (group / name).exists())
    return int(file.read_text())


def weight_of(shares: int) -> int:
    """Return the weight of version 2 for these shares (KEP-2254: [2, 262144] to [1, 10000])."""
    return 1 + (shares - 2) * 9999 // 262142


def requests(pod: Pod) -> Any:
    """Return the requests that the kubelet has applied to the container."""
    return pod.read()["status"]["containerStatuses"][0].get("resources", {}).get("requests")
