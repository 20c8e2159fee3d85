"""Acting on a stock kubelet: what policies decide is in the kernel's files, from a container's first instruction on, and it is
put back at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agents import Agent
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.existing import Existing
from tests.cluster.node import Node
from tests.cluster.objects import a_pod
from tests.cluster.server import Server

pytestmark = pytest.mark.cluster
QOS = "katalyst.kubewharf.io/qos_level"
V1 = Path("/sys/fs/cgroup/cpu").exists()
SETTINGS = {
    "advisor": {"policy": "canonical", "minShareCores": 1, "rampUpS": 0, "minRampDownPeriodS": 0},
    "intervalS": 0.5,
}


def group(node: Node, controller: str, qos: str, uid: str) -> Path:
    top = Path("/sys/fs/cgroup") / (controller if V1 else "") / node.cgroup_root.strip("/") / "kubepods"
    (found,) = (
        path for path in (top / qos / f"pod{uid}").iterdir() if path.is_dir() and len(path.name) == 64 and busy(path)
    )
    return found


def busy(path: Path) -> bool:
    """A sandbox sleeps in its group too: it is told by its command."""
    pids = (path / "cgroup.procs").read_text().split()
    return bool(pids) and b"2147483647" not in Path(f"/proc/{pids[0]}/cmdline").read_bytes()


def text(path: Path) -> str:
    return path.read_text().strip()


def run(server: Server, namespace: str, name: str, level: str, **spec: Any) -> str:
    """Its uid, once it runs."""
    pod = a_pod(name)
    pod["metadata"]["annotations"] = {QOS: level}
    pod["spec"]["containers"][0] |= spec
    uid: str = server.ask("POST", f"/api/v1/namespaces/{namespace}/pods", pod)["metadata"]["uid"]
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    wait(f"pod {name}", lambda: server.ask("GET", path)["status"]["phase"] in ("Running", "Succeeded"))
    return uid


@pytest.fixture
def node(ours: Cluster, cluster: Cluster | Existing) -> Node:
    return ours.nodes[0]


def knobs(node: Node, qos: str, uid: str) -> dict[str, str]:
    return {
        "cpuset": text(group(node, "cpuset", qos, uid) / "cpuset.cpus"),
        "shares": text(group(node, "cpu", qos, uid) / "cpu.shares"),
        "quota": text(group(node, "cpu", qos, uid) / "cpu.cfs_quota_us"),
    }


def test_look(node: Node, server: Server, workspace: str, tmp_path: Path, ours: Cluster) -> None:
    with Agent(node, tmp_path, dict(SETTINGS)) as agent:
        uids = {}
        for name, level, qos in (("web", "shared_cores", "besteffort"), ("batch", "reclaimed_cores", "besteffort")):
            uids[name] = run(
                server,
                workspace,
                name,
                level,
                command=[
                    "sh",
                    "-c",
                    "cat /sys/fs/cgroup/cpuset/cpuset.cpus /sys/fs/cgroup/cpu/cpu.shares /sys/fs/cgroup/cpu/cpu.cfs_quota_us; trap exit TERM; while :; do sleep 1; done",
                ],
            )
        import time

        time.sleep(3)
        for name in uids:
            print(name, knobs(node, "besteffort", uids[name]), ours.kubectl("logs", "--namespace", workspace, name))
        print(agent.said())
        print({k: v for k, v in agent.metrics().items() if "source" in k and ("nri" in k or "kube" in k)})
        view = json.loads(agent.ask("/api/v1/decisions"))
        print(json.dumps(view)[:3000])
    for name in uids:
        print(name, knobs(node, "besteffort", uids[name]))
    print(agent.said())
    raise AssertionError
