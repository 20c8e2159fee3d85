"""Advisor server and client over real sockets, with the current and the older protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.qrm import CpuPlacementConfig
from agent.katalyst import cpu_advice_codec, cpu_plugin_state, memory_advice_codec
from agent.katalyst.advisor_client import AdvisorClient, AdvisorHealth, qrm_plugin_services
from agent.katalyst.advisor_server import CPU_PLUGIN_SOCKET, MEMORY_PLUGIN_SOCKET, AdvisorServer
from agent.katalyst.plugin_registration import serve_sockets
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetState
from api.advice import CpuAdvice
from api.decision import ActMode, Cycle
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.qos import QoSLevel
from api.snapshot import CgroupSample, ComponentHealth
from common.grpc_unix import CallRefused, GrpcClient, GrpcServer, GrpcService, serve_on_socket
from tests.agent.advisor.builders import snapshot
from tests.agent.katalyst.builders import blocks, node, pod, put, request
from tests.builders.settings import parse_config
from tests.builders.waiting import until_async

CPU = cpu.DESCRIPTOR.services_by_name["CPUAdvisor"]
MEMORY = svc.DESCRIPTOR.services_by_name["AdvisorService"]
S = 1_000_000_000
NODE = {0: 24, 1: 24}
WEB, BATCH = pod("web", cores=6), pod("batch", QoSLevel.RECLAIMED)
PODS = (WEB, BATCH)


def finished() -> Cycle:
    """Evaluate a web pod that requests 6 CPUs and uses 4, and a batch pod, on 48 CPUs."""
    config, state = parse_config(b"advisor: {policy: canonical}", "test.yaml"), PolicyState()
    result = None
    for second in range(70):
        shot = snapshot(second, PODS, cpus=node(), usage_s={})
        used = CgroupSample(path="/kubepods/web", id=7, cpu_usage_ns=second * 4 * S, memory_bytes=1 << 30)
        cgroups = {**shot.cgroups, "/kubepods/web": used, "/kubepods/batch": CgroupSample(path="/kubepods/batch", id=8)}
        shot = msgspec.structs.replace(shot, cgroups=cgroups)
        result, state = evaluate_policy(shot, config, state, shot.taken_at_ns)
    assert result is not None
    return Cycle(
        snapshot=shot, previous=None, act=ActMode.ON, trigger="tick", advice=result.advice, memory=result.memory
    )


CYCLE = finished()


def advisor_server(directory: Path, age_s: float = 1.0) -> AdvisorServer:
    now = CYCLE.snapshot.taken_at_ns + round(age_s * S)
    server = AdvisorServer(directory=directory, period_s=0.05, now_ns=lambda: now)
    server.publish(CYCLE)
    return server


async def stop(*servers: GrpcServer) -> None:
    for server in servers:
        await server.stop()


async def test_a_stock_plugin_is_answered(tmp_path: Path) -> None:
    server = advisor_server(tmp_path)
    servers = await serve_sockets(server.sockets())
    client = GrpcClient(tmp_path / "cpu_advisor.sock", CPU, metadata={"supports_get_advice": "true"})
    request_ = request()
    put(request_, WEB, "share")
    put(request_, BATCH, "reclaim")
    got = await client.call("GetAdvice", request_)
    sizes = {size.pool: size.cpus for size in CYCLE.advice.cpu.sizes} if CYCLE.advice else {}
    assert blocks(got, "share") == {-1: [sizes["share"]]}
    assert sizes["share"] + sizes["reclaim"] == 48
    assert blocks(got, "reclaim") == {-1: [sizes["reclaim"]]}
    assert got.entries["u-web"].entries["main"].owner_pool_name == "share"
    assert server.cpus is not None
    assert server.cpus.pod("u-web")["main"].request_quantity == 2.0
    memory = GrpcClient(tmp_path / "memory_advisor.sock", MEMORY)
    question = svc.GetAdviceRequest()
    question.entries["u-web"].entries["main"].pod_uid = "u-web"
    assert isinstance(await memory.call("GetAdvice", question), svc.GetAdviceResponse)
    assert server.answered == {"cpu": 1, "memory": 1}
    assert await client.call("RemovePod", svc.RemovePodRequest(pod_uid="u-web")) == svc.RemovePodResponse()
    await client.close()
    await memory.close()
    await stop(*servers)


UNSIZED = msgspec.structs.replace(
    CYCLE, advice=None if CYCLE.advice is None else msgspec.structs.replace(CYCLE.advice, cpu=CpuAdvice())
)
UNUSABLE = {
    "too old": (31.0, CYCLE, "the latest cycle is 31 s old"),
    "none": (1.0, None, "no cycle has finished yet"),
    "nothing evaluated": (1.0, msgspec.structs.replace(CYCLE, advice=None), "set --act to dry-run or on"),
    "no sizes": (1.0, UNSIZED, "policy canonical has no pools"),
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_without_advice_the_plugin_gets_the_reason(tmp_path: Path, name: str) -> None:
    age_s, headroom, text = UNUSABLE[name]
    server = AdvisorServer(directory=tmp_path, now_ns=lambda: CYCLE.snapshot.taken_at_ns + round(age_s * S))
    if headroom is not None:
        server.publish(headroom)
    servers = await serve_sockets(server.sockets())
    client = GrpcClient(tmp_path / "cpu_advisor.sock", CPU)
    with pytest.raises(CallRefused, match=text):
        await client.call("GetAdvice", request())
    assert server.problem is not None
    assert text in server.problem.reason
    await client.close()
    await stop(*servers)


async def test_containers_of_pods_that_no_cycle_lists_are_dropped(tmp_path: Path) -> None:
    """An older plugin that is killed or restarts never calls RemovePod for pods that are gone meanwhile."""
    now_ns = [CYCLE.snapshot.taken_at_ns]
    server = AdvisorServer(directory=tmp_path, now_ns=lambda: now_ns[0])
    servers = await serve_sockets(server.sockets())
    client = GrpcClient(tmp_path / "memory_advisor.sock", MEMORY)
    for uid in ("u-web", "u-gone"):
        await client.call("AddContainer", svc.ContainerMetadata(pod_uid=uid, container_name="main"))
    unlisted = (ComponentHealth(name="pods", ok=False, error="refused", remedy=""),)
    stale = msgspec.structs.replace(CYCLE, snapshot=msgspec.structs.replace(CYCLE.snapshot, sources=unlisted))
    for cycle, age_s, uids in (
        (CYCLE, 0, {"u-web", "u-gone"}),
        (CYCLE, 60, {"u-web", "u-gone"}),
        (stale, 120, {"u-web", "u-gone"}),
        (CYCLE, 121, {"u-web"}),
    ):
        now_ns[0] = CYCLE.snapshot.taken_at_ns + age_s * S
        server.publish(cycle)
        assert {uid for uid, _name in server._containers["memory"]} == uids, age_s
    await client.close()
    await stop(*servers)


def clients(tmp_path: Path, state: CpusetState, now_ns: list[int]) -> tuple[AdvisorClient[Any], AdvisorClient[Any]]:
    cpus = AdvisorClient(
        tmp_path / "cpu_advisor.sock",
        CPU,
        lambda: cpu_plugin_state.encode_cpu_request(state, PODS),
        lambda answer: cpu_advice_codec.decode_cpu_advice(answer, PODS, NODE, None),
        lambda: now_ns[0],
    )
    memory = AdvisorClient(
        tmp_path / "memory_advisor.sock",
        MEMORY,
        lambda: memory_advice_codec.encode_memory_request(PODS, state),
        lambda answer: memory_advice_codec.decode_memory_advice(answer, PODS, {}),
        lambda: now_ns[0],
    )
    return cpus, memory


def allocated_state() -> CpusetState:
    return allocate_cpusets((), PODS, node(), CpusetState(policy_name="dynamic"), CpuPlacementConfig(ramp_up_s=0), 5)[1]


@asynccontextmanager
async def polling(*clients: AdvisorClient[Any]) -> AsyncIterator[None]:
    """Poll the advisors while the block runs."""
    runs = [asyncio.create_task(client.run(0.02)) for client in clients]
    yield
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)


async def test_the_client_decodes_the_answers_of_the_server(tmp_path: Path) -> None:
    """Sizes and headroom of the cycle survive encoding and decoding."""
    servers = await serve_sockets(advisor_server(tmp_path).sockets())
    cpus, memory = clients(tmp_path, allocated_state(), [0])
    async with polling(cpus, memory):
        await until_async(lambda: cpus.advice() and memory.advice())
    answer, advice = cpus.advice(), CYCLE.advice
    assert answer is not None
    assert advice is not None
    assert {(item.pool, item.numa, item.cpus) for item in answer.cpu.sizes} == {
        (item.pool, item.numa, item.cpus) for item in advice.cpu.sizes
    }
    headroom = advice.reported_headroom or advice.headroom
    assert headroom is not None
    if headroom.cores_by_numa:
        assert answer.headroom is not None
        assert answer.headroom.cores_by_numa == pytest.approx(headroom.cores_by_numa)
    await stop(*servers)


class Older:
    """An advisor without GetAdvice: it gets AddContainer and RemovePod calls and sends a stream."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.removed: list[str] = []

    def services(self) -> tuple[GrpcService, GrpcService]:
        async def add(item: svc.ContainerMetadata, metadata: Mapping[str, str]) -> svc.AddContainerResponse:
            if "supports_get_advice" not in metadata:
                self.added.append(f"{item.pod_uid}/{item.container_name}")
            return svc.AddContainerResponse()

        async def remove(item: svc.RemovePodRequest, _metadata: Mapping[str, str]) -> svc.RemovePodResponse:
            self.removed.append(item.pod_uid)
            return svc.RemovePodResponse()

        async def watch(_empty: svc.Empty, _metadata: Mapping[str, str]) -> AsyncIterator[cpu.ListAndWatchResponse]:
            for share in (6, 7):
                answer = cpu.ListAndWatchResponse()
                for name, cpus in (("share", share), ("reclaim", 20)):
                    answer.entries[name].entries[""].owner_pool_name = name
                    part = answer.entries[name].entries[""].calculation_results_by_numas[-1]
                    part.blocks.add(result=cpus, block_id=name)
                yield answer
                await asyncio.sleep(0.1)
            await asyncio.sleep(60)

        handlers = {"AddContainer": add, "RemovePod": remove, "ListAndWatch": watch}
        return GrpcService(CPU, handlers), GrpcService(MEMORY, {})


async def test_the_stream_of_an_older_advisor_is_used(tmp_path: Path) -> None:
    older = Older()
    server = await serve_on_socket(tmp_path / "cpu_advisor.sock", older.services()[:1])
    pods = list(PODS)
    state = allocated_state()
    client_ = AdvisorClient(
        tmp_path / "cpu_advisor.sock",
        CPU,
        lambda: cpu_plugin_state.encode_cpu_request(state, tuple(pods)),
        lambda answer: cpu_advice_codec.decode_cpu_advice(answer, tuple(pods), NODE, None),
        lambda: 0,
    )

    def share() -> int:
        advice = client_.advice()
        return next(size.cpus for size in advice.cpu.sizes if size.pool == "share") if advice else 0

    async with polling(client_):
        await until_async(lambda: client_.advice() is not None)
        assert older.added == ["u-batch/main", "u-web/main"]
        pods.remove(BATCH)
        await until_async(lambda: share() == 7)
        await until_async(lambda: older.removed == ["u-batch"])
    await stop(server)


async def test_an_older_plugin_gets_a_stream(tmp_path: Path) -> None:
    """It adds containers, serves its checkpoint, and gets a stream of each kind; a second stream is refused."""
    server = advisor_server(tmp_path)
    servers = await serve_sockets(server.sockets())
    state = allocated_state()
    checkpoints, containers = qrm_plugin_services(
        lambda: cpu_plugin_state.encode_checkpoint(state),
        lambda: memory_advice_codec.encode_memory_request(PODS, state),
    )
    plugin_servers = (
        await serve_on_socket(tmp_path / CPU_PLUGIN_SOCKET, (checkpoints,)),
        await serve_on_socket(tmp_path / MEMORY_PLUGIN_SOCKET, (containers,)),
    )
    request_ = cpu_plugin_state.encode_cpu_request(state, PODS)
    client, other = GrpcClient(tmp_path / "cpu_advisor.sock", CPU), GrpcClient(tmp_path / "memory_advisor.sock", MEMORY)
    for item in PODS:
        await client.call("AddContainer", request_.entries[item.uid].entries["main"].metadata)
    stream = client.stream("ListAndWatch", svc.Empty())
    first = await asyncio.wait_for(anext(stream), 10)
    assert first.entries["u-web"].entries["main"].owner_pool_name == "share"
    assert blocks(first, "reclaim")
    second = client.stream("ListAndWatch", svc.Empty())
    with pytest.raises(CallRefused, match="another stream of cpu advice is open"):
        await anext(second)
    memory = other.stream("ListAndWatch", svc.Empty())
    assert isinstance(await asyncio.wait_for(anext(memory), 10), svc.ListAndWatchResponse)
    await stream.aclose()
    await memory.aclose()
    for _attempt in range(100):
        third = client.stream("ListAndWatch", svc.Empty())
        try:
            assert blocks(await asyncio.wait_for(anext(third), 10), "reclaim"), "the first one has left"
            break
        except CallRefused:
            await asyncio.sleep(0.05)
        finally:
            await third.aclose()
    else:
        pytest.fail("a stream that was closed still keeps others out")
    await client.call("RemovePod", svc.RemovePodRequest(pod_uid="u-web"))
    await client.close()
    await other.close()
    await stop(*servers, *plugin_servers)


async def test_an_invalid_answer_is_reported_and_the_previous_advice_stays_valid(tmp_path: Path) -> None:
    answer = cpu.GetAdviceResponse()
    answer.entries["reclaim"].entries[""].owner_pool_name = "reclaim"

    async def get(_request: Any, _metadata: Mapping[str, str]) -> cpu.GetAdviceResponse:
        return answer

    server = await serve_on_socket(tmp_path / "cpu_advisor.sock", (GrpcService(CPU, {"GetAdvice": get}),))
    now = [0]
    client_, _memory = clients(tmp_path, allocated_state(), now)
    async with polling(client_):
        await until_async(lambda: client_.advice() is not None)
        answer.entries["reclaim"].entries[""].calculation_results_by_numas[-1].blocks.add(result=500, block_id="x")
        await until_async(lambda: client_.problem is not None)
        assert client_.problem is not None
        assert "entries: blocks take 500 CPUs, the node has 48" in client_.problem.reason
        assert client_.advice() is not None
        now[0] = 301 * S
        assert client_.advice() is None
        await stop(server)
        await until_async(lambda: client_.problem is not None and "no server answers" in client_.problem.reason)


def test_trust_ends_after_five_minutes_and_returns_with_two_answers() -> None:
    health = AdvisorHealth(since_ns=0)
    assert not health.trusted(1)
    health = health.after_answer(10 * S)
    assert health.trusted(310 * S)
    assert not health.trusted(311 * S)
    health = health.after_answer(400 * S)
    assert not health.trusted(400 * S), "one answer after a long silence"
    assert not health.after_answer(521 * S).trusted(521 * S), "the next one came too late"
    assert health.after_answer(520 * S).trusted(520 * S)
    late = AdvisorHealth(since_ns=0).after_answer(301 * S)
    assert not late.trusted(301 * S)


def test_reclaimable_bytes_of_cgroups() -> None:
    """Containers: the page cache; other cgroups: memory not charged to a child; unmeasured cgroups are left out."""
    samples = (
        CgroupSample(path="/kubepods", id=1, memory_bytes=100),
        CgroupSample(path="/kubepods/web", id=2, memory_bytes=60, memory_stat={"file": 12, "anon": 40}),
        CgroupSample(path="/kubepods/batch", id=3, memory_bytes=10, memory_stat={"cache": 1, "total_cache": 2}),
        CgroupSample(path="/other", id=4, memory_bytes=50),
        CgroupSample(path="/other/x", id=5),
    )
    shot = msgspec.structs.replace(CYCLE.snapshot, cgroups={sample.path: sample for sample in samples})
    assert memory_advice_codec.reclaimable_bytes_by_cgroup(shot) == {
        "/kubepods": 30,
        "/kubepods/web": 12,
        "/kubepods/batch": 2,
    }
