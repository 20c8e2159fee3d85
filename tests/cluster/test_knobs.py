"""Acting on a stock kubelet: limits hold from a container's first instruction on, external changes are repaired and counted,
and everything is restored at the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.nri.session import connect_nri
from api.cpu import parse_cpu_list
from api.proto import nri_pb2 as nri
from tests.cluster.agents import ROOT, Agent
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.node import SOCKET, Node
from tests.cluster.objects import IDLING, a_pod
from tests.cluster.server import Server

pytestmark = pytest.mark.cluster
MEMORY = "katalyst.kubewharf.io/memory_enhancement"
V1 = Path("/sys/fs/cgroup/cpu").exists()
CPUS = Path("/sys/devices/system/cpu/online").read_text().strip()
ALL = set(parse_cpu_list(CPUS))
POLICY = {
    "policy": "canonical",
    "minShareCores": 1,
    "reservedForAllocateCores": 0.5,
    "rampUpS": 0,
    "minRampDownPeriodS": 0,
    "maxRampDownCores": 8,
}
RIGHTS = {"qos": {"rights": {"systemCores": {"namespaces": ["*"]}}}}
CANONICAL = {"advisor": POLICY, "placing": {"rampUpS": 0}, "intervalS": 0.5, **RIGHTS}
NO_NRI = {"kubelet": {"nriSocket": ""}}
FILES = ("cpuset/cpuset.cpus", "cpu/cpu.shares", "cpu/cpu.cfs_quota_us")
# What its own first instructions find; the files are those of its own cgroup.
TELL = "cat " + " ".join(f"/sys/fs/cgroup/{file}" for file in FILES)
LEVELS = {
    "web": ("shared_cores", "burstable", {"cpu": "200m"}),
    "db": ("dedicated_cores", "", {"cpu": "1", "memory": "32Mi"}),
    "batch": ("reclaimed_cores", "besteffort", {}),
    "log": ("system_cores", "burstable", {"cpu": "100m"}),
}


class Pods:
    """The pods of one test, on one node."""

    def __init__(self, node: Node, server: Server, namespace: str, cluster: Cluster) -> None:
        self.node, self._server, self._namespace, self._cluster = node, server, namespace, cluster
        self._uids: dict[str, str] = {}

    def run(self, name: str) -> None:
        """Create a pod and wait until it runs; its name, without a number at the end, selects its level in LEVELS."""
        level, qos, requests = LEVELS[name.rstrip("0123456789")]
        guaranteed = not qos
        resources = {"requests": requests, **({"limits": requests} if guaranteed else {})}
        pod = a_pod(name, level, f"{TELL}; {IDLING}", resources)
        if guaranteed:
            pod["metadata"]["annotations"][MEMORY] = '{"numa_binding": "true"}'
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        self._uids[name] = self._server.ask("POST", path, pod)["metadata"]["uid"]
        wait(f"pod {name}", lambda: self._server.ask("GET", f"{path}/{name}")["status"]["phase"] == "Running")

    def read_output(self, name: str) -> list[str]:
        """Return CPUs, shares and quota as the container's first instructions read them."""
        logs = ("logs", "--namespace", self._namespace, name)
        wait(f"what {name} says", lambda: self._cluster.kubectl(*logs).count("\n") >= len(FILES))
        return self._cluster.kubectl(*logs).split()

    def file(self, name: str, file: str) -> Path:
        controller, _, knob = file.partition("/")
        parts = [self.node.cgroup_root.strip("/"), "kubepods", LEVELS[name.rstrip("0123456789")][1]]
        pod = Path("/sys/fs/cgroup", controller, *filter(None, parts), f"pod{self._uids[name]}")
        # The sandbox has a cgroup too, with the one program that sleeps for ever.
        (result,) = (path for path in pod.iterdir() if path.is_dir() and _runs(path, b"sh"))
        return result / knob

    def lives(self, name: str) -> bool:
        """Return whether the container runs."""
        try:
            return self.file(name, FILES[0]).exists()
        except (ValueError, OSError):
            return False

    def now(self, name: str) -> list[str]:
        return [self.file(name, file).read_text().strip() for file in FILES]

    def idle(self, name: str) -> bool:
        """Return whether cpu.idle of the pod's cgroup is set."""
        return (self.file(name, "cpu/cpu.idle").parents[1] / "cpu.idle").read_text().strip() == "1"

    def id(self, name: str) -> str:
        return self.file(name, FILES[0]).parent.name

    def cpus(self, name: str) -> set[int]:
        """Return the CPUs that the pod may use."""
        return set(parse_cpu_list(self.now(name)[0]))


def _runs(group: Path, program: bytes) -> bool:
    pids = (group / "cgroup.procs").read_text().split()
    return bool(pids) and Path(f"/proc/{pids[0]}/cmdline").read_bytes().startswith(program + b"\0")


def with_sections(*documents: dict[str, Any]) -> dict[str, Any]:
    return {key: value for document in documents for key, value in document.items()}


@pytest.fixture
def node(own_cluster: Cluster, cluster: Cluster | ExternalCluster) -> Node:
    if not V1:
        pytest.skip("reads files of version 1; tests/vm has version 2")
    return own_cluster.nodes[0]


@pytest.fixture
def pods(node: Node, server: Server, workspace: str, own_cluster: Cluster) -> Iterator[Pods]:
    yield Pods(node, server, workspace, own_cluster)
    # The next test's pods have the node for themselves.
    own_cluster.kubectl(
        "delete", "pods", "--namespace", workspace, "--all", "--grace-period=0", "--force", "--wait=true"
    )


@contextmanager
def agent_with(pods: Pods, tmp_path: Path, settings: dict[str, Any], *names: str) -> Iterator[Agent]:
    """Run an agent, and start these pods once its NRI plugin is registered."""
    with Agent(pods.node, tmp_path, settings) as agent:
        wait("the NRI plugin", lambda: agent.source("nri"))
        for name in names:
            pods.run(name)
        yield agent


def apart(pods: Pods, text: str, other: str) -> bool:
    """Return whether the CPUs of two pods are disjoint."""
    return not pods.cpus(text) & pods.cpus(other)


def repairs(agent: Agent) -> float:
    return sum(value for name, value in agent.metrics().items() if name.startswith("dioptase_knob_repairs_total"))


def test_limits_hold_before_the_first_instruction_and_are_put_back(pods: Pods, tmp_path: Path) -> None:
    with agent_with(pods, tmp_path, CANONICAL, "web", "batch") as agent:
        assert pods.read_output("web")[0] == pods.now("web")[0]
        assert pods.read_output("batch")[0] == pods.now("batch")[0]
        assert apart(pods, "web", "batch")
        pods.run("db")
        alone = set(parse_cpu_list(pods.read_output("db")[0]))
        assert len(alone) == 1, "dedicated: the others have to go, and go within a round"
        wait("the others", lambda: apart(pods, "db", "web") and apart(pods, "db", "batch") and pods.cpus("db") == alone)
        assert agent.end() == 0
        text = agent.log_tail()
    assert [pods.now(name)[0] for name in ("web", "batch", "db")] == [CPUS] * 3
    created = re.findall(r"pod\S+: cpuset\.cpus (\S+) -> (\S+) \(applied\) Restored the value", text)
    assert all(after == CPUS for _, after in created), "nothing was taken back while it ran"
    # From now on, updating a container through the runtime makes the runtime write all values that it has.
    for name in ("web", "batch", "db"):
        pods.node.run(*_update(pods, name, cpu_shares=64))
    assert [pods.now(name)[:2] for name in ("web", "batch", "db")] == [[CPUS, "64"]] * 3


def test_a_dedicated_pod_keeps_its_cpus_while_it_is_restarted(pods: Pods, tmp_path: Path) -> None:
    with agent_with(pods, tmp_path, CANONICAL, "batch", "db"):
        wait("the others", lambda: apart(pods, "db", "batch"))
        alone, observed = pods.cpus("db"), set[int]()
        for life in (1, 2):  # the second time the kubelet waits for ten seconds, in which there is no container
            before = pods.id("db")
            pid = int(pods.file("db", "cpu/cgroup.procs").read_text().split()[0])
            os.kill(pid, signal.SIGKILL)

            def again(before: str = before) -> bool:
                observed.update(pods.cpus("batch"))
                return pods.lives("db") and pods.id("db") != before

            wait(f"life {life + 1}", again, 60)
            assert set(parse_cpu_list(pods.read_output("db")[0])) == pods.cpus("db") == alone
        assert not observed & alone, "exclusive in the meantime"


def test_what_only_the_runtime_knows_of_a_killed_agent_is_put_back_by_the_next(pods: Pods, tmp_path: Path) -> None:
    with agent_with(pods, tmp_path, CANONICAL, "web", "batch") as agent:
        given = pods.read_output("batch")[0]
        assert given == pods.now("batch")[0] != CPUS
        agent.kill()
        (agent.state / "originals.json").unlink()  # as if it had been killed before its first round
        agent.start()
        wait("the runtime's word", lambda: agent.source("nri"))
        wait("a round", lambda: agent.source("kubelet"))
        assert agent.end() == 0
        assert "NRI: annotation" not in agent.log_tail()
    assert pods.now("batch")[0] == CPUS


@contextmanager
def another_plugin(node: Node, index: str, **cpu: Any) -> Iterator[None]:
    """Register another NRI plugin, which sets these CPU fields of every new container."""

    def synchronized(request: Any) -> nri.SynchronizeResponse:
        there.set()
        return nri.SynchronizeResponse(more=request.more)

    async def stay() -> None:
        response = nri.CreateContainerResponse()
        response.adjust.linux.resources.cpu.CopyFrom(nri.LinuxCPU(**cpu))
        handlers = {
            "Configure": lambda _request: nri.ConfigureResponse(events=1 << (nri.CREATE_CONTAINER - 1)),
            "Synchronize": synchronized,
            "CreateContainer": lambda _request: response,
            "StateChange": lambda _request: nri.Empty(),
        }
        session = await connect_nri(node.at("/run/nri/nri.sock"), handlers, 5.0)
        reading = asyncio.create_task(session.run())
        register = nri.RegisterPluginRequest(plugin_name="another", plugin_idx=index)
        await session.call("RegisterPlugin", register)
        await asyncio.to_thread(over.wait)
        await session.close()
        await reading

    there, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(stay()))
    thread.start()
    try:
        assert there.wait(20)
        yield
    finally:
        over.set()
        thread.join(20)


def test_two_plugins_that_set_the_same_keep_no_pod_from_starting(pods: Pods, tmp_path: Path) -> None:
    least = {"intervalS": 0.5, "advisor": {"enableReclaim": False}}
    quota = nri.OptionalInt64(value=150_000)
    with Agent(pods.node, tmp_path, least) as agent, another_plugin(pods.node, "10", quota=quota):
        wait("the runtime's questions", lambda: agent.source("nri"))
        pods.run("batch")
        assert pods.read_output("batch")[2] == "150000", "at the second try, as the other one wants it"
        assert agent.metrics()['dioptase_nri_containers_total{answer="refused"}'] == 1
        wait("cpu.idle", lambda: pods.idle("batch"))


def test_lists_of_another_plugin_stay_and_no_container_is_rejected(pods: Pods, tmp_path: Path) -> None:
    with Agent(pods.node, tmp_path, CANONICAL) as agent, another_plugin(pods.node, "98", cpus="1"):
        wait("the runtime's questions", lambda: agent.source("nri"))
        pods.run("web")
        assert pods.read_output("web")[0] == "1"
        assert agent.metrics()['dioptase_nri_containers_total{answer="refused"}'] == 0


def test_system_pods_have_the_reserved_cpus(pods: Pods, tmp_path: Path) -> None:
    reserved = {"placing": {"rampUpS": 0, "reservedCpuList": "0"}}
    with agent_with(pods, tmp_path, with_sections(CANONICAL, reserved), "log", "batch"):
        assert pods.read_output("log")[0] == "0"
        assert set(parse_cpu_list(pods.read_output("batch")[0])) < ALL - {0} or len(ALL) == 2
        assert apart(pods, "log", "batch")


def test_without_nri_a_round_gives_them_the_same_and_repairs_external_changes(pods: Pods, tmp_path: Path) -> None:
    with Agent(pods.node, tmp_path, with_sections(CANONICAL, NO_NRI)) as agent:
        pods.run("web")
        pods.run("batch")
        assert (pods.read_output("batch")[0], agent.source("nri")) == (CPUS, None), "a while as the kubelet made it"
        wait("the round", lambda: apart(pods, "web", "batch"))
        before, given = repairs(agent), pods.now("batch")[0]
        # As the kubelet does when it changes a container: all that the runtime knows of it is written again.
        pods.node.run(*_update(pods, "batch", cpuset_cpus=CPUS))
        assert pods.now("batch")[0] == CPUS
        wait("the repair", lambda: pods.now("batch")[0] == given, 15)
        wait("its count", lambda: repairs(agent) > before, 5)
        agent.kill()
        assert pods.now("batch")[0] == given
        agent.start()
        wait("a round", lambda: agent.source("kubelet"))
        assert agent.end() == 0
    assert (pods.now("web")[0], pods.now("batch")[0]) == (CPUS, CPUS)


def test_latency_gives_the_pod_of_batch_work_the_priority_and_not_its_class(pods: Pods, tmp_path: Path) -> None:
    with agent_with(pods, tmp_path, {"intervalS": 0.5}, "web", "batch") as agent:
        assert pods.read_output("batch")[:2] == [CPUS, "2"], "as the kubelet requested"
        wait("cpu.idle", lambda: pods.idle("batch"))
        idle = pods.file("batch", "cpu/cpu.idle")
        assert idle.read_text().strip() == "0", "its containers have no other siblings"
        assert "cgroupDriver: systemd" in agent.ask("/api/v1/view")
        root = idle.parents[2]
        assert (root / "cpu.idle").read_text().strip() == "0"
        # As the kubelet does when it starts, which the kernel refuses of an idle group.
        (root / "cpu.shares").write_text((root / "cpu.shares").read_text())
        pods.node.run(*_update(pods, "web", cpu_shares=512))
        assert pods.now("web")[1] == "512", "of online pods nothing is decided"
        assert agent.end() == 0
    assert not pods.idle("batch")
    assert (pods.now("batch")[1], pods.now("web")[1]) == ("2", "512"), "as the kubelet requested"


@pytest.mark.long
def test_the_runtime_may_be_the_writer_and_then_knows_what_it_wrote(pods: Pods, tmp_path: Path) -> None:
    writer = {"kubelet": {"nriSocket": "", "writer": "cri"}}
    with Agent(pods.node, tmp_path, with_sections(CANONICAL, writer)) as agent:
        pods.run("web")
        pods.run("batch")
        wait("the round", lambda: apart(pods, "web", "batch"))
        given = pods.now("batch")[0]
        pods.node.run(*_update(pods, "batch", cpu_shares=4))
        assert pods.now("batch")[:2] == [given, "4"], "its list of CPUs is what the runtime knows, and stays"
        assert repairs(agent) == 0
    assert pods.now("batch")[0] == CPUS


@pytest.mark.long
def test_containerd_may_be_restarted(pods: Pods, tmp_path: Path, own_cluster: Cluster) -> None:
    with agent_with(pods, tmp_path, CANONICAL, "web") as agent:
        own_cluster.daemons.end(pods.node.containerd)
        wait("the loss", lambda: agent.source("nri") is False)
        own_cluster.daemons.again(pods.node.containerd)
        wait("the runtime's questions", lambda: agent.source("nri"), 30)
        wait("the node", lambda: own_cluster.ready(pods.node.name))
        pods.run("batch")
        assert set(parse_cpu_list(pods.read_output("batch")[0])) < ALL


@pytest.mark.long
def test_there_is_no_conflict_with_a_static_cpu_manager(pods: Pods, tmp_path: Path) -> None:
    """A file is believed that says more than the kubelet: its own is put where another one is said to have its directory."""
    kubelet = tmp_path / "kubelet"
    kubelet.mkdir()
    real = json.loads(pods.node.at("/var/lib/kubelet/cpu_manager_state").read_text())
    assert real["policyName"] == "none"
    static = real | {"policyName": "static", "defaultCpuSet": CPUS}
    (kubelet / "cpu_manager_state").write_text(json.dumps(static))
    with Agent(pods.node, tmp_path, with_sections(CANONICAL, {"kubelet": {"rootDir": str(kubelet)}})) as agent:
        wait("the runtime's questions", lambda: agent.source("nri"))
        assert agent.source("kubelet-managers") is False
        pods.run("web")
        pods.run("batch")
        cpus, weight, quota = pods.read_output("batch")
        assert (cpus, weight) == (CPUS, "2"), (
            "priority belongs to the pod's cgroup: the container has the kubelet's weight"
        )
        assert 0 < int(quota) < len(ALL) * 100_000
        wait("its quota", lambda: 0 < int(pods.now("batch")[2]) < len(ALL) * 100_000)
        assert [pods.now(name)[0] for name in ("web", "batch")] == [CPUS, CPUS]


def test_doctor_says_what_can_be_talked_to(pods: Pods, tmp_path: Path) -> None:
    agent = Agent(pods.node, tmp_path, {})
    code = "from cli.main import main; main()"
    words = (
        "env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-c",
        code,
        "doctor",
        "--json",
        "--kubelet",
        "--config",
        agent.config,
    )
    document = json.loads(pods.node.run("sh", "-c", '"$@" || true', "sh", *words))
    by_name = {check["name"]: check for check in document}
    assert {name: by_name[name]["ok"] for name in ("kubelet", "container runtime", "optional: NRI")} == {
        "kubelet": True,
        "container runtime": True,
        "optional: NRI": True,
    }
    assert "containers start with their limits" in by_name["optional: NRI"]["detail"]
    for manager in ("CPU", "memory"):
        assert by_name[f"kubelet's {manager} manager"]["detail"].startswith("none, by ")


def _update(pods: Pods, name: str, **linux: object) -> tuple[str, ...]:
    """Return a command for the node that updates a container as the kubelet does."""
    code = """
import asyncio, sys
from pathlib import Path
from common.grpc_unix import GrpcClient
from api.proto import cri_runtime_pb2 as wire
async def change():
    peer = GrpcClient(Path(sys.argv[1]), wire.DESCRIPTOR.services_by_name["RuntimeService"])
    linux = wire.LinuxContainerResources(**eval(sys.argv[3]))
    await peer.call("UpdateContainerResources", wire.UpdateContainerResourcesRequest(container_id=sys.argv[2], linux=linux))
    await peer.close()
asyncio.run(change())
"""
    return ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code, SOCKET, pods.id(name), repr(linux))
