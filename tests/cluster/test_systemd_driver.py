"""A stock kubelet with the systemd cgroup driver on cgroup v2: systemd is the init of the guest.

Most clusters run this way. Slices and scopes belong to systemd, which writes weights that others have changed, so that the
agent, the kubelet and systemd share the same files.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cgroups import ROOT
from tests.cluster.cluster import CONSENT, Cluster, create_cluster
from tests.cluster.daemons import wait
from tests.cluster.names import HOME
from tests.cluster.node import SYSTEMD, Node
from tests.cluster.objects import a_pod
from tests.cluster.programs import CODE, Agent
from tests.cluster.service_accounts import LENDING, Account

pytestmark = pytest.mark.vm_systemd
BUSY = "while :; do :; done"
CLASS = ROOT / "kubepods.slice/kubepods-besteffort.slice"
PODS = {"web": ("shared_cores", {"requests": {"cpu": "200m"}}), "batch": ("reclaimed_cores", {})}
OUT = Path("/run/out")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node in the guest's memory; only the logs are copied out."""
    # The guest's root is an overlay, on which containerd can lay none of its own.
    HOME.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "cluster", HOME], check=True)
    try:
        made_one = create_cluster(1, cgroup_driver=SYSTEMD)
        made_one.kubectl("apply", "--server-side", "-f", CODE / "deploy/crds")
        yield made_one
    finally:
        for folder in HOME.glob("*/daemons"):
            shutil.copytree(folder, OUT / "daemons", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Node:
    return cluster.nodes[0]


@pytest.fixture(scope="module")
def cgroups(cluster: Cluster, node: Node) -> dict[str, Path]:
    """The containers' cgroups of an online and a reclaimed pod, both of which compute all the time."""
    for name, (level, resources) in PODS.items():
        pod = a_pod(name, level, BUSY, resources)
        pod["spec"]["nodeName"] = node.name
        cluster.server.ask("POST", f"/api/v1/namespaces/{CONSENT}/pods", pod)
    return {name: wait_for_cgroup(cluster, name) for name in PODS}


@pytest.fixture(scope="module")
def agent(cluster: Cluster, node: Node, cgroups: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Agent:
    """An agent that acts on the node; it finds the pods running."""
    folder = tmp_path_factory.mktemp("agent")
    account = Account(cluster, "dioptase-agent", CONSENT, folder, (LENDING,))
    made_one = Agent(cluster, node, account, folder, {"intervalS": 1}, ("--act", "on"))
    made_one.begin()
    return made_one


def read_pod(cluster: Cluster, name: str) -> Any:
    return cluster.server.ask("GET", f"/api/v1/namespaces/{CONSENT}/pods/{name}")


def wait_for_cgroup(cluster: Cluster, name: str) -> Path:
    """Return the scope of the pod's running container."""

    def container() -> str:
        statuses = read_pod(cluster, name)["status"].get("containerStatuses", [{}])
        return str(statuses[0]["containerID"]) if statuses[0].get("ready") else ""

    wait(f"pod {name}", container)
    identity = container().removeprefix("containerd://")
    (scope,) = ROOT.glob(f"kubepods.slice/**/cri-containerd-{identity}.scope")
    return scope


def restart_kubelet(cluster: Cluster, node: Node) -> None:
    """Kill the kubelet, start it again, and wait until it has reported the node as ready since."""
    path = f"/api/v1/nodes/{node.name}"
    cluster.daemons.end(node.kubelet, signal.SIGKILL)
    # Who was ready stays so for 40 s without a report.
    cluster.server.ask("DELETE", path)
    cluster.daemons.again(node.kubelet)
    cluster.daemons.wait(node.kubelet, lambda: cluster.ready(node.name), 90)


def test_slices_are_named_by_the_systemd_driver(cgroups: dict[str, Path]) -> None:
    assert [cgroups[name].relative_to(ROOT).parts[:2] for name in PODS] == [
        ("kubepods.slice", "kubepods-burstable.slice"),
        ("kubepods.slice", "kubepods-besteffort.slice"),
    ]


def test_a_kubelet_starts_beside_an_idle_class_and_gives_it_its_weight(cluster: Cluster, node: Node) -> None:
    """With the cgroupfs driver it does not start. systemd writes the weight, which clears cpu.idle, before the kubelet does."""
    (CLASS / "cpu.idle").write_text("1")
    with pytest.raises(OSError, match="Invalid argument"):
        (CLASS / "cpu.weight").write_text("1")
    restart_kubelet(cluster, node)
    wait("the kubelet has written the class's weight", lambda: (CLASS / "cpu.idle").read_text() == "0\n", 90)
    assert (CLASS / "cpu.weight").read_text() == "1\n"


def test_the_agent_finds_pods_of_the_systemd_driver(agent: Agent, cgroups: dict[str, Path]) -> None:
    wait("the batch pod is managed", lambda: (cgroups["batch"] / "cpu.idle").read_text() == "1\n")
    assert (cgroups["web"] / "cpu.idle").read_text() == "0\n"
    assert not {"kubelet", "cri", "pod-cgroups"} & set(agent.troubles()), agent.troubles()
