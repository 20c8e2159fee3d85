"""Runs the commands of docs/big-node.md: a whole cluster in a guest with 48 CPUs, two NUMA nodes and version 2 cgroups."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster import images
from tests.cluster.cgroups import ROOT, USUAL
from tests.cluster.cluster import CONSENT, Cluster, create_cluster
from tests.cluster.doc_commands import blocks, follow, steps
from tests.cluster.names import HOME
from tests.cluster.programs import CODE, Agent
from tests.cluster.server import Server
from tests.cluster.service_accounts import LENDING, Account

pytestmark = pytest.mark.vm_cluster
PAGE = (CODE / "docs/big-node.md").read_text()
BUSYBOX = "docker.io/library/busybox:1.36"
SYSTEM_CPUS = "0-3"
OUT = Path("/run/out")
TABLES = {"filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}
COLUMNS = "reclaimed_millicpu | reclaimed_memory | CPUs by pod | memory in use"


def patch_early() -> None:
    """Make the kernel patch its code now, for the first quota and the first packet filter. Emulated CPUs (QEMU 7.2) may hang
    in the temporary trap; no other CPU runs that code yet."""
    limited = ROOT / "limited"
    limited.mkdir()
    (limited / "cpu.max").write_text("50000 100000")
    for program in ("iptables", "ip6tables"):
        for table, chains in TABLES.items():
            for chain in chains:
                subprocess.run([program, "-t", table, "-A", chain, "-j", "ACCEPT"], check=True)


@pytest.fixture
def cluster(capsys: pytest.CaptureFixture[str]) -> Iterator[Cluster]:
    """A cluster of one node in the guest's memory; only the logs are copied out."""
    patch_early()
    (ROOT / "system.slice/cpuset.cpus").write_text(SYSTEM_CPUS)
    # The guest's root is an overlay, on which containerd can lay none of its own.
    HOME.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "cluster", HOME], check=True)
    try:
        made_one = create_cluster(1)
        with capsys.disabled():
            print(f"\nnode ready after {uptime()} s", flush=True)
        made_one.kubectl("apply", "--server-side", "-f", CODE / "deploy/crds")
        yield made_one
    finally:
        for folder in HOME.glob("*/daemons"):
            shutil.copytree(folder, OUT / "daemons", dirs_exist_ok=True)


@pytest.fixture
def agent(cluster: Cluster, tmp_path: Path) -> Agent:
    """An agent that acts on the node, with the page's settings."""
    node = cluster.nodes[0]
    archive = tmp_path / "busybox.tar"
    images.write(archive, {BUSYBOX: ()})
    node.load(archive)
    settings = next(text for _, kind, text in blocks(PAGE) if kind == "yaml")
    account = Account(cluster, "dioptase-agent", CONSENT, tmp_path, (LENDING,))
    made_one = Agent(cluster, node, account, tmp_path, msgspec.yaml.decode(settings), ("--act", "on"))
    made_one.begin()
    return made_one


def row(server: Server, node: str) -> str:
    """Return the current amounts of the API server and the kernel as a row of a printed table."""
    reclaimable = resource(server, node)["status"]["resources"]["allocatable"]
    amounts = [reclaimable[f"resource.katalyst.kubewharf.io/reclaimed_{name}"] for name in ("millicpu", "memory")]
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    used_kib = int(meminfo["MemTotal"].split()[0]) - int(meminfo["MemAvailable"].split()[0])
    pods = ", ".join(f"{name} {cpus}" for name, cpus in sorted(cpus_by_pod(server).items()))
    return " | ".join((*amounts, pods or "none", f"{used_kib >> 10} MiB"))


def uptime() -> str:
    """Return the seconds since the kernel booted."""
    return Path("/proc/uptime").read_text().split(".")[0]


def resident_kib(agent: Agent) -> int:
    """Return the resident memory of the agent's process."""
    status = Path(f"/proc/{agent.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def resource(server: Server, node: str) -> Any:
    """Return the node's CustomNodeResource."""
    return server.ask("GET", f"/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/{node}")


def cpus_by_pod(server: Server) -> dict[str, str]:
    """Return the effective CPUs of the pods' containers by pod."""
    pods = server.ask("GET", "/api/v1/namespaces/default/pods")["items"]
    return {pod["metadata"]["name"]: (group(pod) / "cpuset.cpus.effective").read_text().strip() for pod in pods}


def group(pod: Any) -> Path:
    """Return the cgroup of the pod's container."""
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    (result,) = (ROOT / USUAL).glob(f"**/pod{pod['metadata']['uid']}/{container}")
    return result


def zones(node: Any) -> dict[str, str]:
    """Return the CPUs by socket and NUMA node in a CustomNodeResource."""
    return {
        f"{socket['name']}/{numa['name']}": numa["resources"]["capacity"]["cpu"]
        for socket in node["status"]["topologyZone"]
        for numa in socket["children"]
    }


def test_44k_42k_and_40k_on_48_cpus(
    cluster: Cluster, agent: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, node = cluster.server, cluster.nodes[0].name
    path = f"{cluster.programs['kubectl'].parent}:/usr/bin:/bin"
    world = {"PATH": path, "KUBECONFIG": str(cluster.kubeconfig), "NODE": node, "HOME": str(tmp_path)}
    messages = [f"agent ready after {uptime()} s, {resident_kib(agent)} KiB", f"| seconds | line | {COLUMNS} |"]
    for step in steps(PAGE):
        follow(step, world, CODE, 60)
        numbers = row(server, node) if re.match(r"\d+k\n", step.answer or "") else ""
        messages.append(f"| {uptime()} | {step.line} | {numbers} |")
        with capsys.disabled():
            # What comes late is seen to come.
            print(*messages, sep="\n", flush=True)
        messages.clear()
    assert zones(resource(server, node)) == {"0/0": "24", "1/1": "24"}
    assert cpus_by_pod(server) == {"shared-normal-pod": "0-7", "reclaimed-normal-pod": "8-47"}
    agent.end()
    # The kubelet sets none, and what a cgroup has not set is what the one above it has.
    assert cpus_by_pod(server) == {"shared-normal-pod": "0-47", "reclaimed-normal-pod": "0-47"}
