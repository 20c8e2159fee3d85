"""Reports of nodes to a real API server, and their effect on a stock scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config.kubelet import KubeletConfig
from agent.katalyst.pod_resources import PodResourcesListerClient
from agent.katalyst.reporter_plugins import ReporterPlugins
from agent.reporter.cnr_input_collector import CnrInputCollector
from agent.reporter.cnr_inputs import CnrInputs
from agent.reporter.cnr_writer import FIELD_MANAGER, CnrWriter
from agent.reporter.extended_resources import ExtendedResources
from agent.sensors.pods.kubelet_client import KubeletClient
from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller
from api.advice import Headroom
from api.decision import ActMode, Cycle
from api.katalyst.cnr import CustomNodeResourceStatus
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from kube.client import KubeClient
from tests.agent.katalyst.test_reporter_plugins import killed, plugin
from tests.agent.reporter import two_socket_server
from tests.agent.reporter.test_cnr import ADVERTISED, advice, finished
from tests.builders.waiting import until, until_async
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.objects import a_pod
from tests.cluster.server import Refused, Server
from tests.live.agent_process import Agent

pytestmark = pytest.mark.cluster
CNRS = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"


def a_name() -> str:
    return f"test-{uuid.uuid4().hex[:10]}"


def this_machine() -> dict[str, Any]:
    """Return the zones according to util-linux and the kernel's files."""
    listed = subprocess.run(["lscpu", "-p=CPU,SOCKET,NODE"], check=True, capture_output=True, text=True).stdout
    cpus = [[int(word or 0) for word in line.split(",")] for line in listed.splitlines() if not line.startswith("#")]
    return {
        f"Socket/{socket}": {
            f"Numa/{node}": {
                "cpu": str(sum(result[2] == node for result in cpus)),
                "memory": str(int(_first(f"/sys/devices/system/node/node{node}/meminfo", "MemTotal:")) * 1024),
            }
            for node in {item[2] for item in cpus if item[1] == socket}
        }
        for socket in {cpu[1] for cpu in cpus}
    }


def _first(path: str, word: str) -> str:
    words = Path(path).read_text().split()
    return words[words.index(word) + 1]


async def test_an_agent_says_what_this_machine_is_and_what_its_plugins_say(
    definitions: Server, api_server: Cluster | ExternalCluster, tmp_path: Path
) -> None:
    name, settings = a_name(), tmp_path / "settings.yaml"
    settings.write_text(f"report: {{reporterPlugins: {tmp_path}, cpuFlags: true}}\n")
    options = ("--node", name, "--state-dir", str(tmp_path / "state"), "--config", str(settings))
    process = await plugin(tmp_path / "a.sock", "a", "7")
    with Agent(*options, env={"KUBECONFIG": str(api_server.kubeconfig)}) as agent:

        def text_of() -> bool:
            try:
                total = definitions.ask("GET", f"{CNRS}/{name}")
            except Refused:
                return False
            names = {entry["propertyName"] for entry in total["spec"]["nodeResourceProperties"]}
            return "status" in total and {"rack", "cis"} <= names

        until(text_of, lambda: f"the agent reports: {agent.log}", 60)
        result = definitions.ask("GET", f"{CNRS}/{name}")
        assert agent.end() == 0
    await killed(process)
    zones = {
        f"{socket['type']}/{socket['name']}": {
            f"{numa['type']}/{numa['name']}": numa["resources"]["capacity"] for numa in socket["children"]
        }
        for socket in result["status"]["topologyZone"]
    }
    assert zones == this_machine()
    assert result["status"]["topologyPolicy"] == "None"
    properties = {item["propertyName"]: item for item in result["spec"]["nodeResourceProperties"]}
    assert properties["cpu"]["propertyQuantity"] == str(os.cpu_count())
    assert properties["memory"]["propertyQuantity"] == str(int(_first("/proc/meminfo", "MemTotal:")) * 1024)
    assert properties["rack"]["propertyValues"] == ["7"]
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    assert properties["cpu_flags"]["propertyValues"] == [flags.partition(":")[2].strip().replace(" ", ",")]
    assert ("avx2" in properties["cis"]["propertyValues"]) == ("avx2" in Path("/proc/cpuinfo").read_text().split())
    managers = {
        (value["manager"], value["operation"], value.get("subresource"))
        for value in result["metadata"]["managedFields"]
    }
    assert managers == {(FIELD_MANAGER, "Apply", None), (FIELD_MANAGER, "Apply", "status")}
    definitions.ask("DELETE", f"{CNRS}/{name}")


async def test_what_a_plugin_says_is_gone_after_it_was_killed(
    definitions: Server, client: KubeClient, tmp_path: Path
) -> None:
    name = a_name()
    reporters = ReporterPlugins(tmp_path, lambda: None, retention_s=2)
    writer = CnrWriter(client, name, metrics=False, inputs=lambda: CnrInputs(fields=reporters.fields()))
    writer.publish(finished(evictions=None))
    clock = [time.monotonic()]

    async def look() -> None:
        clock[0] += 5
        await reporters.scan()
        await writer.sync(clock[0])

    def racks() -> list[str]:
        try:
            result = definitions.ask("GET", f"{CNRS}/{name}")
        except Refused:
            return ["no object"]
        listed = result["spec"]["nodeResourceProperties"]
        return [item["propertyValues"][0] for item in listed if item["propertyName"] == "rack"]

    process = await plugin(tmp_path / "a.sock", "a", "7")
    try:
        await until_async(lambda: racks() == ["7"], step=look)
        assert (writer.problem(), reporters.problem()) == (None, None)
        process.send_signal(signal.SIGSTOP)
        await look()
        assert racks() == ["7"], "it may only be slow"
        await killed(process)
        await until_async(lambda: racks() == [], step=look)
        assert reporters.problem() is not None
    finally:
        reporters.close()
        if process.returncode is None:
            await killed(process)
    assert len(definitions.ask("GET", f"{CNRS}/{name}")["spec"]["nodeResourceProperties"]) == 6, "ours stay"
    definitions.ask("DELETE", f"{CNRS}/{name}")


async def test_the_manager_of_a_conflicting_field_is_named(
    definitions: Server, client: KubeClient, api_server: Cluster | ExternalCluster
) -> None:
    name = a_name()
    head = {
        "apiVersion": "node.katalyst.kubewharf.io/v1alpha1",
        "kind": "CustomNodeResource",
        "metadata": {"name": name},
    }
    definitions.ask("POST", CNRS, head)
    body = json.dumps({**head, "status": {"topologyPolicy": "NumericPodLevel"}})
    words = ("apply", "--server-side", "--subresource=status", "--field-manager=another", "-f", "-")
    api_server.kubectl(*words, text=body)
    writer, now_s = CnrWriter(client, name, metrics=False), time.monotonic()
    writer.publish(finished(evictions=None))
    await writer.sync(now_s)
    problem = writer.problem()
    assert problem is not None
    assert problem.reason == (
        f"CustomNodeResource {name}: fields of other managers were overwritten by this agent: "
        ".status.topologyPolicy by another"
    )
    assert definitions.ask("GET", f"{CNRS}/{name}")["status"]["topologyPolicy"] == "None"
    await writer.sync(now_s + 451)
    assert writer.problem() is None, "it was reported once, and the other manager does not write again"
    definitions.ask("DELETE", f"{CNRS}/{name}")


async def test_a_server_of_48_cores_is_taken_as_it_is(definitions: Server, client: KubeClient, tmp_path: Path) -> None:
    name = a_name()
    two_socket_server.lay(tmp_path)
    writer = CnrWriter(client, name, metrics=False)
    cycle = Cycle(
        snapshot=two_socket_server.snapshot(tmp_path),
        previous=None,
        act=ActMode.ON,
        trigger="tick",
        advice=advice(ADVERTISED),
    )
    writer.publish(cycle)
    await writer.sync(time.monotonic())
    assert writer.problem() is None
    status = msgspec.convert(definitions.ask("GET", f"{CNRS}/{name}")["status"], CustomNodeResourceStatus)
    sockets = status.topology_zone or ()
    caches = [cache.name for socket in sockets for numa in socket.children or () for cache in numa.children or ()]
    assert ([socket.name for socket in sockets], caches) == (["0", "1"], ["0", "1", "2", "3"])
    definitions.ask("DELETE", f"{CNRS}/{name}")


def asking_for(name: str, millicores: int) -> dict[str, Any]:
    amounts = {RECLAIMED_CPU: str(millicores), RECLAIMED_MEMORY: "1Gi"}
    return a_pod(name, resources={"requests": amounts, "limits": amounts})


async def test_a_stock_scheduler_places_by_reported_headroom(
    cluster: Cluster | ExternalCluster, server: Server, client: KubeClient, workspace: str
) -> None:
    node = server.ask("GET", "/api/v1/nodes")["items"][0]["metadata"]["name"]
    extended, now_s = ExtendedResources(client, node), time.monotonic()
    pods = f"/api/v1/namespaces/{workspace}/pods"

    def reclaim(cores: float) -> None:
        extended.publish(finished(_headroom(cores)))

    def scheduled(name: str) -> tuple[str, str]:
        conditions = server.ask("GET", f"{pods}/{name}")["status"].get("conditions", [])
        item = next((item for item in conditions if item["type"] == "PodScheduled"), {})
        return item.get("status", ""), item.get("message", "")

    try:
        reclaim(5.123)
        await extended.sync(now_s)
        assert extended.problem() is None
        server.ask("POST", pods, asking_for("fits", 5000))
        wait("it is placed", lambda: scheduled("fits")[0] == "True")
        server.ask("POST", pods, asking_for("waits", 200))
        wait("it waits", lambda: scheduled("waits")[0] == "False")
        assert f"Insufficient {RECLAIMED_CPU}" in scheduled("waits")[1]
        wait("the kubelet runs it", lambda: server.ask("GET", f"{pods}/fits")["status"]["phase"] == "Running", 60)
        reclaim(6.0)
        await extended.sync(now_s + 10)
        assert extended.problem() is None
        allocatable = server.ask("GET", f"/api/v1/nodes/{node}")["status"]["allocatable"]
        assert allocatable[RECLAIMED_CPU] == "6k", "the API server writes quantities its own way"
        # There is more, and the pod need not be touched. The agent keeps syncing meanwhile.
        await until_async(
            lambda: scheduled("waits")[0] == "True", seconds=90, step=lambda: extended.sync(time.monotonic())
        )
    finally:
        await extended.withdraw()
    allocatable = server.ask("GET", f"/api/v1/nodes/{node}")["status"]["allocatable"]
    assert RECLAIMED_CPU not in allocatable


def _headroom(cores: float) -> Headroom:
    return msgspec.structs.replace(ADVERTISED, cores=cores)


async def test_a_real_kubelet_reports_its_policy_and_assignments(
    own_cluster: Cluster, cluster: Cluster, server: Server
) -> None:
    (node,) = own_cluster.nodes
    pki = own_cluster.control.authority
    config = KubeletConfig(
        url=f"https://{node.address}:10250",
        ca_file=str(pki.certificate("ca")),
        certificate_file=str(pki.certificate("admin")),
        key_file=str(pki.key("admin")),
        token_file="",
    )
    shares = PodResourcesListerClient(node.at("/var/lib/kubelet/pod-resources/kubelet.sock"))
    async with KubeletClient(config, "/configz") as kubelet:
        configuration = KubeletConfigPoller(kubelet)
        around = CnrInputCollector((Path("/proc"), Path("/sys")), CnrInputs(), configuration, shares)
        try:
            await configuration.poll()
            await around.poll()
        finally:
            await shares.close()
    assert around.problem() is None
    other = around.inputs
    assert other.policy == "None"
    assert other.node is not None
    # Without a CPU manager every CPU may be anybody's, and no device is there.
    assert set(other.node.cpus) <= set(range(os.cpu_count() or 1))
    assert other.node.devices == ()
    assert other.hardware.flags
