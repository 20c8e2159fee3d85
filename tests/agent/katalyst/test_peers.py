"""Katalyst peers over real sockets: an agent that advises, one that consumes advice, and missing peers."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from agent.config.config import AgentConfig
from agent.katalyst.peers import KatalystPeers
from agent.katalyst.pod_resources import PodResourcesListerClient
from agent.loop import Loop
from api.cpu import parse_cpu_list
from api.interfaces import Unavailable
from api.knobs import Knob
from api.proto import pod_resources_pb2
from api.proto import resource_plugin_pb2 as plugin
from api.qos import QoSLevel
from api.snapshot import CgroupSample, NumaNode, Snapshot
from common.grpc_calls import CALL_COUNTS
from common.grpc_unix import GrpcClient, GrpcService, serve_on_socket
from common.supervised_tasks import SupervisedTasks
from tests.agent.advisor.builders import snapshot
from tests.agent.katalyst.builders import node, pod
from tests.agent.test_loop import Scripted
from tests.builders.settings import parse_config
from tests.builders.waiting import until_async

WEB, BATCH = pod("web", cores=6), pod("batch", QoSLevel.RECLAIMED)
BOUND = pod("bound", QoSLevel.DEDICATED, cores=8, bound=(1,))
GI = 1 << 30


def snapshot_at(seq: int) -> Snapshot:
    """Return 48 CPUs on 2 NUMA nodes without measurements, so that requests are used."""
    shot = snapshot(seq, (WEB, BATCH, BOUND), cpus=node(), usage_s={})
    numa = {number: NumaNode(meminfo={"MemTotal": 64 * GI}) for number in (0, 1)}
    sample = msgspec.structs.replace(shot.node, numa=numa)
    cgroups = {
        f"/kubepods/{name}": CgroupSample(path=f"/kubepods/{name}", id=50 + index)
        for index, name in enumerate(("web", "batch", "bound"))
    }
    return msgspec.structs.replace(shot, taken_at_ns=time.monotonic_ns(), node=sample, cgroups=shot.cgroups | cgroups)


def settings(folder: Path, sockets: str) -> AgentConfig:
    text = f"""
advisor: {{policy: canonical}}
placing: {{rampUpS: 0}}
sockets:
  {sockets}
  advisorDir: {folder}/advisor
  pluginDir: {folder}/plugins
  podResources: {folder}/pods/kubelet.sock
"""
    return parse_config(text.encode(), "test.yaml")


class Agent:
    """A loop with its peers; the node is scripted, the sockets are real."""

    def __init__(self, config: AgentConfig, kubelet: Path) -> None:
        self.peers = KatalystPeers(config, kubelet=kubelet)
        self.script = Scripted(snapshot_at)
        script = cast(Any, self.script)
        sinks = (*self.peers.sinks, script)
        self.loop = Loop(config=config, sensor=script, actuator=script, sinks=sinks, peers=self.peers)

    def problem(self, name: str) -> str:
        (shot,) = (item for item in self.peers.sources if item.name == name)
        error = shot.problem()
        return "" if error is None else error.reason


@pytest.fixture
def short() -> Iterator[Path]:
    """Return a directory with a short path: socket paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@asynccontextmanager
async def running(folder: Path, sockets: str) -> AsyncIterator[Agent]:
    async with AsyncExitStack() as stack:
        agent = Agent(settings(folder, sockets), folder / "no-kubelet.sock")
        agent.loop.run_cycle("tick")
        agent.peers.start(SupervisedTasks(stack))
        yield agent


async def test_one_agent_applies_the_advice_of_another(short: Path) -> None:
    before = CALL_COUNTS["served", "cpuadvisor.CPUAdvisor.GetAdvice", "OK"]
    async with running(short, "serve: [advisor]") as advisor, running(short, "take: [cpu, memory]") as consumer:
        advice = advisor.loop.run_cycle("tick").advice
        assert advice is not None
        await until_async(lambda: consumer.peers.peers() == {"advisor": 2})
        finished = consumer.loop.run_cycle("tick")
        assert finished.advice is not None
        assert (finished.advice.policy, advice.policy) == ("katalyst", "canonical")
        assert finished.memory is not None
        assert finished.memory.policy == "katalyst"
        share, reclaim = (next(s for s in advice.cpu.sizes if s.pool == name) for name in ("share", "reclaim"))
        # Exactly the sizes of the advisor, from the 24 CPUs without the bound pod.
        desired = {(item.cgroup, item.knob): item.value for item in consumer.script.decided}
        assert len(parse_cpu_list(desired["/kubepods/web", Knob.CPUSET])) == share.cpus
        assert len(parse_cpu_list(desired["/kubepods/bound", Knob.CPUSET])) == 8
        assert set(parse_cpu_list(desired["/kubepods/bound", Knob.CPUSET])) <= set(range(24, 48))
        assert set(parse_cpu_list(desired["/kubepods/batch", Knob.CPUSET])).isdisjoint(
            parse_cpu_list(desired["/kubepods/web", Knob.CPUSET])
        )
        assert len(parse_cpu_list(desired["/kubepods/batch", Knob.CPUSET])) >= reclaim.cpus
        assert advisor.peers.peers() == {"qrm-plugin": 2}
        # The advisor's next cycle starts from the plugin's allocations.
        state, external = advisor.peers.before(cast(Any, advisor.loop)._policy_state)
        assert state.cpus.pod("u-bound")["main"].cpus == set(parse_cpu_list(desired["/kubepods/bound", Knob.CPUSET]))
        assert (external.cpu, external.memory) == (None, None)
        assert set(advisor.peers.ages_s()) == {("given", "cpu"), ("given", "memory")}
        assert all(0 <= age < 20 for age in consumer.peers.ages_s().values())
        assert [consumer.problem(f"remote-advisor-{kind}") for kind in ("cpu", "memory")] == ["", ""]
        assert CALL_COUNTS["served", "cpuadvisor.CPUAdvisor.GetAdvice", "OK"] > before
    assert list((short / "advisor").iterdir()) == [], "every socket is removed at the end"


@pytest.mark.parametrize("peer_kind", ["absent", "noise"])
async def test_a_missing_or_invalid_advisor_is_replaced_by_the_built_in_policy(short: Path, peer_kind: str) -> None:
    folder = short / "advisor"
    folder.mkdir()

    async def noise(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(4096))
        writer.close()

    server = None if peer_kind == "absent" else await asyncio.start_unix_server(noise, folder / "cpu_advisor.sock")
    async with running(short, "take: [cpu]") as consumer:
        await until_async(lambda: consumer.problem("remote-advisor-cpu"))
        assert f"{folder}/cpu_advisor.sock: CPUAdvisor.GetAdvice: no server answers" in consumer.problem(
            "remote-advisor-cpu"
        )
        finished = consumer.loop.run_cycle("tick")
        assert finished.advice is not None
        assert finished.advice.policy == "canonical"
        assert consumer.peers.peers() == {"advisor": 0}
    if server is not None:
        server.close()


async def test_a_foreign_process_at_the_socket_is_reported(short: Path) -> None:
    (short / "advisor").mkdir()
    other = await asyncio.start_unix_server(lambda _r, writer: writer.close(), short / "advisor/memory_advisor.sock")
    async with running(short, "serve: [advisor]") as advisor:
        await until_async(lambda: advisor.problem("advisor-sockets"))
        assert advisor.problem("advisor-sockets").endswith("memory_advisor.sock is served by another process")
        assert not (short / "advisor/cpu_advisor.sock").exists(), "both sockets or none"
    other.close()
    assert (short / "advisor/memory_advisor.sock").exists(), "a foreign socket stays"


async def test_allocations_are_listed_by_numa_node(short: Path) -> None:
    async with running(short, "serve: [pod-resources]") as agent:
        path = short / "pods/kubelet.sock"
        await until_async(path.exists)
        client = PodResourcesListerClient(path)
        pods = {item.key: item for item in await client.pods()}
        assert set(pods) == {"ns/web", "ns/batch", "ns/bound"}
        cpus, memory = pods["ns/bound"].containers[0].resources
        assert [(part.node, part.value) for part in cpus.parts] == [(1, 8.0)]
        assert [(part.node, part.value) for part in memory.parts] == [(1, GI)]
        total = await client.node()
        assert total is not None
        assert [(item.name, item.capacity_total) for item in total.resources] == [("cpu", 48.0), ("memory", 128 * GI)]
        assert [(part.node, part.value) for part in total.resources[1].capacity_parts] == [(0, 64 * GI), (1, 64 * GI)]
        assert agent.problem("pod-resources") == ""
        await client.close()


async def test_devices_come_from_the_kubelet(short: Path) -> None:
    async def listed(_request: Any, _words: Any) -> Any:
        answer = pod_resources_pb2.ListPodResourcesResponse()
        container = answer.pod_resources.add(name="web", namespace="ns").containers.add(name="main")
        container.devices.add(resource_name="nvidia.com/gpu", device_ids=["g1"])
        return answer

    service = GrpcService(pod_resources_pb2.DESCRIPTOR.services_by_name["PodResourcesLister"], {"List": listed})
    kubelet = await serve_on_socket(short / "no-kubelet.sock", (service,))
    async with running(short, "serve: [pod-resources]") as agent:
        await until_async((short / "pods/kubelet.sock").exists)
        client = PodResourcesListerClient(short / "pods/kubelet.sock")
        pods = {item.key: item for item in await client.pods()}
        assert [item.ids for item in pods["ns/web"].containers[0].devices] == [("g1",)]
        assert pods["ns/batch"].containers[0].devices == ()
        await client.node()
        assert "GetAllocatableResources is not offered" in agent.problem("pod-resources")
        await client.close()
    await kubelet.stop()


async def test_removed_plugin_sockets_are_created_and_registered_again(short: Path) -> None:
    folder, announced = short / "plugins", list[str]()

    async def register(request: Any, _words: Any) -> Any:
        announced.append(f"{request.resource_name} at {request.endpoint}")
        return plugin.Empty()

    async with running(short, "serve: [resource-plugins]") as agent:
        await until_async(lambda: len(list(folder.glob("*.sock"))) == 2)
        assert agent.peers.peers() == {"plugin-manager": 0}
        for socket in folder.glob("*.sock"):
            socket.unlink()
        service = GrpcService(plugin.DESCRIPTOR.services_by_name["Registration"], {"Register": register})
        manager = await serve_on_socket(folder / "kubelet.sock", (service,))
        await until_async(lambda: len(announced) == 2)
        assert sorted(announced) == ["cpu at dioptase_cpu.sock", "memory at dioptase_memory.sock"]
        assert agent.peers.peers() == {"plugin-manager": 2}
        client = GrpcClient(folder / "dioptase_cpu.sock", plugin.DESCRIPTOR.services_by_name["ResourcePlugin"])
        answer = await client.call("GetResourcesAllocation", plugin.GetResourcesAllocationRequest())
        bound = answer.pod_resources["u-bound"].container_resources["main"].resource_allocation["cpu"]
        assert len(parse_cpu_list(bound.allocation_result)) == 8
        # Admitted between cycles and used by the next one.
        request = plugin.ResourceRequest(pod_uid="u-new", pod_namespace="ns", pod_name="new", container_name="main")
        request.container_type, request.resource_name = plugin.MAIN, "cpu"
        request.resource_requests["cpu"] = 2
        await client.call("Allocate", request)
        state, _external = agent.peers.before(cast(Any, agent.loop)._policy_state)
        assert state.cpus.pod("u-new")["main"].owner_pool_name == "share"
        await client.close()
        await manager.stop()
    with pytest.raises(Unavailable):
        await GrpcClient(folder / "dioptase_cpu.sock", plugin.DESCRIPTOR.services_by_name["ResourcePlugin"]).call(
            "GetResourcePluginOptions", plugin.Empty()
        )
