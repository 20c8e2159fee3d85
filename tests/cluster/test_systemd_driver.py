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
SOURCES_OF_PODS = ("kubelet", "container-runtime", "pod-cgroups", "pod-siblings")


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
    before = read_heartbeat(cluster, node)
    cluster.daemons.end(node.kubelet, signal.SIGKILL)
    cluster.daemons.again(node.kubelet)
    cluster.daemons.wait(node.kubelet, lambda: cluster.ready(node.name) and read_heartbeat(cluster, node) != before, 90)


def read_heartbeat(cluster: Cluster, node: Node) -> str:
    """Return the time of the kubelet's latest status report, which it also sends at its start."""
    conditions = cluster.server.ask("GET", f"/api/v1/nodes/{node.name}")["status"]["conditions"]
    return str(next(item["lastHeartbeatTime"] for item in conditions if item["type"] == "Ready"))


def sources_of_pods_are_healthy(agent: Agent) -> bool:
    """Return True. Raises AssertionError with the errors of the failed sources."""
    errors = {name: text for name, text in agent.troubles().items() if name in SOURCES_OF_PODS}
    assert not errors
    return True


def test_slices_are_named_by_the_systemd_driver(cgroups: dict[str, Path]) -> None:
    assert [cgroups[name].relative_to(ROOT).parts[:2] for name in PODS] == [
        ("kubepods.slice", "kubepods-burstable.slice"),
        ("kubepods.slice", "kubepods-besteffort.slice"),
    ]


def test_a_kubelet_starts_while_its_class_is_idle_and_writes_the_weight(cluster: Cluster, node: Node) -> None:
    """With the cgroupfs driver it does not start. systemd writes the weight, which clears cpu.idle, before the kubelet does."""
    (CLASS / "cpu.idle").write_text("1")
    with pytest.raises(OSError, match="Invalid argument"):
        (CLASS / "cpu.weight").write_text("1")
    restart_kubelet(cluster, node)
    wait("the kubelet has written the class's weight", lambda: (CLASS / "cpu.idle").read_text() == "0\n", 90)
    assert (CLASS / "cpu.weight").read_text() == "1\n"


def test_the_agent_finds_pods_of_the_systemd_driver(agent: Agent, cgroups: dict[str, Path]) -> None:
    """The priority belongs to the pod's cgroup, and to that of the class while it contains only reclaimed pods."""
    idle = {"pod": cgroups["batch"].parent, "class": CLASS}
    wait(
        "the pod and its class are idle",
        lambda: all((path / "cpu.idle").read_text() == "1\n" for path in idle.values()),
    )
    web = cgroups["web"]
    assert {(path / "cpu.idle").read_text() for path in (web, web.parent, web.parent.parent)} == {"0\n"}
    wait("the sources of pods are healthy", lambda: sources_of_pods_are_healthy(agent))
