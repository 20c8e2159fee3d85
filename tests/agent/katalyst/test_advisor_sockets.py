"""Advisor and plugin over real sockets, each of them ours once, a stock peer's way, and an older one's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.loader import parse_config
from agent.config.qrm import CpuPlacementConfig
from agent.katalyst import cpu_advice_codec, cpu_plugin_state, memory_advice_codec
from agent.katalyst.advisor_client import AdvisorClient, AdvisorHealth, qrm_plugin_services
from agent.katalyst.advisor_server import CPU_PLUGIN_SOCKET, MEMORY_PLUGIN_SOCKET, AdvisorServer
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetState
from api.advice import CpuAdvice
from api.decision import ActMode, Cycle
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.qos import QoSLevel
from api.snapshot import CgroupSample
from common.grpc_unix import CallRefused, GrpcClient, GrpcServer, GrpcService, serve_on_socket
from tests.agent.advisor.builders import snapshot
from tests.agent.katalyst.builders import blocks, node, pod, put, request

CPU = cpu.DESCRIPTOR.services_by_name["CPUAdvisor"]
MEMORY = svc.DESCRIPTOR.services_by_name["AdvisorService"]
S = 1_000_000_000
NODE = {0: 24, 1: 24}
WEB, BATCH = pod("web", cores=6), pod("batch", QoSLevel.RECLAIMED)
PODS = (WEB, BATCH)


def finished() -> Cycle:
    """What the advisor makes of a web pod that asks for 6 CPUs and uses 4, and a batch pod, on 48 CPUs."""
    config, known = parse_config(b"advisor: {policy: canonical}", "test.yaml"), PolicyState()
    judged = None
    for second in range(70):
        seen = snapshot(second, PODS, cpus=node(), usage_s={})
        used = CgroupSample(path="/kubepods/web", id=7, cpu_usage_ns=second * 4 * S, memory_bytes=1 << 30)
        cgroups = {**seen.cgroups, "/kubepods/web": used, "/kubepods/batch": CgroupSample(path="/kubepods/batch", id=8)}
        seen = msgspec.structs.replace(seen, cgroups=cgroups)
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
    assert judged is not None
    return Cycle(
        snapshot=seen, previous=None, act=ActMode.ON, trigger="tick", advice=judged.advice, memory=judged.memory
    )


ROUND = finished()


def desk(directory: Path, age_s: float = 1.0) -> AdvisorServer:
    now = ROUND.snapshot.taken_at_ns + round(age_s * S)
    made = AdvisorServer(directory=directory, period_s=0.05, now_ns=lambda: now)
    made.publish(ROUND)
    return made


async def stop(*servers: GrpcServer) -> None:
    for server in servers:
        await server.stop()


async def test_a_stock_plugin_is_answered(tmp_path: Path) -> None:
    ours = desk(tmp_path)
    servers = await ours.start()
    peer = GrpcClient(tmp_path / "cpu_advisor.sock", CPU, metadata={"supports_get_advice": "true"})
    asked = request()
    put(asked, WEB, "share")
    put(asked, BATCH, "reclaim")
    got = await peer.call("GetAdvice", asked)
    sizes = {size.pool: size.cpus for size in ROUND.advice.cpu.sizes} if ROUND.advice else {}
    assert blocks(got, "share") == {-1: [sizes["share"]]}
    assert sizes["share"] + sizes["reclaim"] == 48
    assert blocks(got, "reclaim") == {-1: [sizes["reclaim"]]}
    assert got.entries["u-web"].entries["main"].owner_pool_name == "share"
    assert ours.cpus is not None
    assert ours.cpus.pod("u-web")["main"].request_quantity == 2.0
    memory = GrpcClient(tmp_path / "memory_advisor.sock", MEMORY)
    question = svc.GetAdviceRequest()
    question.entries["u-web"].entries["main"].pod_uid = "u-web"
    assert isinstance(await memory.call("GetAdvice", question), svc.GetAdviceResponse)
    assert ours.answered == {"cpu": 1, "memory": 1}
    assert await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u-web")) == svc.RemovePodResponse()
    await peer.close()
    await memory.close()
    await stop(*servers)


UNSIZED = msgspec.structs.replace(
    ROUND, advice=None if ROUND.advice is None else msgspec.structs.replace(ROUND.advice, cpu=CpuAdvice())
)
OLD_ROUND = {
    "too old": (31.0, ROUND, "the latest round is 31 s old"),
    "none": (1.0, None, "no round is finished yet"),
    "nothing judged": (1.0, msgspec.structs.replace(ROUND, advice=None), "switch act to dry-run or on"),
    "no sizes": (1.0, UNSIZED, "policy canonical sizes no pools yet"),
}


@pytest.mark.parametrize("name", OLD_ROUND)
async def test_without_advice_the_plugin_is_told_why(tmp_path: Path, name: str) -> None:
    age_s, told, text = OLD_ROUND[name]
    ours = AdvisorServer(directory=tmp_path, now_ns=lambda: ROUND.snapshot.taken_at_ns + round(age_s * S))
    if told is not None:
        ours.publish(told)
    servers = await ours.start()
    peer = GrpcClient(tmp_path / "cpu_advisor.sock", CPU)
    with pytest.raises(CallRefused, match=text):
        await peer.call("GetAdvice", request())
    assert ours.problem is not None
    assert text in ours.problem.reason
    await peer.close()
    await stop(*servers)


def remotes(tmp_path: Path, state: CpusetState, now_ns: list[int]) -> tuple[AdvisorClient[Any], AdvisorClient[Any]]:
    cpus = AdvisorClient(
        tmp_path / "cpu_advisor.sock",
        CPU,
        lambda: cpu_plugin_state.encode_cpu_request(state, PODS),
        lambda said: cpu_advice_codec.decode_cpu_advice(said, PODS, NODE, None),
        lambda: now_ns[0],
    )
    memory = AdvisorClient(
        tmp_path / "memory_advisor.sock",
        MEMORY,
        lambda: memory_advice_codec.encode_memory_request(PODS, state),
        lambda said: memory_advice_codec.decode_memory_advice(said, PODS, {}),
        lambda: now_ns[0],
    )
    return cpus, memory


def placed() -> CpusetState:
    return allocate_cpusets((), PODS, node(), CpusetState(policy_name="dynamic"), CpuPlacementConfig(ramp_up_s=0), 5)[1]


async def until(what: Any, seconds: float = 20.0) -> None:
    for _step in range(round(seconds / 0.02)):
        if what():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it did not come about")


async def test_our_qrm_takes_our_advisor_for_a_stock_one(tmp_path: Path) -> None:
    """What goes out comes back: sizes and headroom of the round."""
    servers = await desk(tmp_path).start()
    cpus, memory = remotes(tmp_path, placed(), [0])
    runs = [asyncio.create_task(cpus.run(0.02)), asyncio.create_task(memory.run(0.02))]
    await until(lambda: cpus.advice() and memory.advice())
    said, advice = cpus.advice(), ROUND.advice
    assert said is not None
    assert advice is not None
    assert {(one.pool, one.numa, one.cpus) for one in said.cpu.sizes} == {
        (one.pool, one.numa, one.cpus) for one in advice.cpu.sizes
    }
    told = advice.reported_headroom or advice.headroom
    assert told is not None
    if told.cores_by_numa:
        assert said.headroom is not None
        assert said.headroom.cores_by_numa == pytest.approx(told.cores_by_numa)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    await stop(*servers)


class Older:
    """An advisor that takes no questions: it is told who is there, asks who has what, and says what it wants."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.removed: list[str] = []

    def services(self) -> tuple[GrpcService, GrpcService]:
        async def add(one: svc.ContainerMetadata, words: Mapping[str, str]) -> svc.AddContainerResponse:
            if "supports_get_advice" not in words:
                self.added.append(f"{one.pod_uid}/{one.container_name}")
            return svc.AddContainerResponse()

        async def remove(one: svc.RemovePodRequest, _words: Mapping[str, str]) -> svc.RemovePodResponse:
            self.removed.append(one.pod_uid)
            return svc.RemovePodResponse()

        async def watch(_empty: svc.Empty, _words: Mapping[str, str]) -> AsyncIterator[cpu.ListAndWatchResponse]:
            for share in (6, 7):
                said = cpu.ListAndWatchResponse()
                for name, cpus in (("share", share), ("reclaim", 20)):
                    said.entries[name].entries[""].owner_pool_name = name
                    part = said.entries[name].entries[""].calculation_results_by_numas[-1]
                    part.blocks.add(result=cpus, block_id=name)
                yield said
                await asyncio.sleep(0.1)
            await asyncio.sleep(60)

        handlers = {"AddContainer": add, "RemovePod": remove, "ListAndWatch": watch}
        return GrpcService(CPU, handlers), GrpcService(MEMORY, {})


async def test_an_older_advisor_is_listened_to(tmp_path: Path) -> None:
    older = Older()
    server = await serve_on_socket(tmp_path / "cpu_advisor.sock", older.services()[:1])
    pods = list(PODS)
    state = placed()
    remote = AdvisorClient(
        tmp_path / "cpu_advisor.sock",
        CPU,
        lambda: cpu_plugin_state.encode_cpu_request(state, tuple(pods)),
        lambda said: cpu_advice_codec.decode_cpu_advice(said, tuple(pods), NODE, None),
        lambda: 0,
    )
    run = asyncio.create_task(remote.run(0.02))
    await until(lambda: remote.advice() is not None)
    assert older.added == ["u-batch/main", "u-web/main"]
    pods.remove(BATCH)

    def share() -> int:
        advice = remote.advice()
        return next(size.cpus for size in advice.cpu.sizes if size.pool == "share") if advice else 0

    await until(lambda: share() == 7)
    assert older.removed == ["u-batch"]
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await stop(server)


async def test_an_older_plugin_is_told(tmp_path: Path) -> None:
    """It adds containers, serves its checkpoint, and gets a stream of each kind; a second one is refused."""
    ours = desk(tmp_path)
    servers = await ours.start()
    state = placed()
    checkpoints, containers = qrm_plugin_services(
        lambda: cpu_plugin_state.encode_checkpoint(state),
        lambda: memory_advice_codec.encode_memory_request(PODS, state),
    )
    theirs = (
        await serve_on_socket(tmp_path / CPU_PLUGIN_SOCKET, (checkpoints,)),
        await serve_on_socket(tmp_path / MEMORY_PLUGIN_SOCKET, (containers,)),
    )
    asked = cpu_plugin_state.encode_cpu_request(state, PODS)
    peer, other = GrpcClient(tmp_path / "cpu_advisor.sock", CPU), GrpcClient(tmp_path / "memory_advisor.sock", MEMORY)
    for one in PODS:
        await peer.call("AddContainer", asked.entries[one.uid].entries["main"].metadata)
    stream = peer.stream("ListAndWatch", svc.Empty())
    first = await asyncio.wait_for(anext(stream), 10)
    assert first.entries["u-web"].entries["main"].owner_pool_name == "share"
    assert blocks(first, "reclaim")
    second = peer.stream("ListAndWatch", svc.Empty())
    with pytest.raises(CallRefused, match="another stream of cpu advice is running"):
        await anext(second)
    memory = other.stream("ListAndWatch", svc.Empty())
    assert isinstance(await asyncio.wait_for(anext(memory), 10), svc.ListAndWatchResponse)
    await stream.aclose()
    await memory.aclose()
    for _attempt in range(100):
        third = peer.stream("ListAndWatch", svc.Empty())
        try:
            assert blocks(await asyncio.wait_for(anext(third), 10), "reclaim"), "the first one has left"
            break
        except CallRefused:
            await asyncio.sleep(0.05)
        finally:
            await third.aclose()
    else:
        pytest.fail("a stream that was closed still keeps others out")
    await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u-web"))
    await peer.close()
    await other.close()
    await stop(*servers, *theirs)


async def test_an_advisor_that_hangs_or_lies_is_said_and_what_stood_stands(tmp_path: Path) -> None:
    said = cpu.GetAdviceResponse()
    said.entries["reclaim"].entries[""].owner_pool_name = "reclaim"

    async def get(_request: Any, _words: Mapping[str, str]) -> cpu.GetAdviceResponse:
        return said

    server = await serve_on_socket(tmp_path / "cpu_advisor.sock", (GrpcService(CPU, {"GetAdvice": get}),))
    now = [0]
    remote, _memory = remotes(tmp_path, placed(), now)
    run = asyncio.create_task(remote.run(0.02))
    await until(lambda: remote.advice() is not None)
    said.entries["reclaim"].entries[""].calculation_results_by_numas[-1].blocks.add(result=500, block_id="x")
    await until(lambda: remote.problem is not None)
    assert remote.problem is not None
    assert "entries: blocks take 500 CPUs, the node has 48" in remote.problem.reason
    assert remote.advice() is not None
    now[0] = 301 * S
    assert remote.advice() is None
    await stop(server)
    await until(lambda: remote.problem is not None and "no server answers" in remote.problem.reason)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def test_trust_is_lost_in_five_minutes_and_won_in_two_answers() -> None:
    health = AdvisorHealth(since_ns=0)
    assert not health.trusted(1)
    health = health.heard(10 * S)
    assert health.trusted(310 * S)
    assert not health.trusted(311 * S)
    health = health.heard(400 * S)
    assert not health.trusted(400 * S), "one answer after a long silence"
    assert not health.heard(521 * S).trusted(521 * S), "the next one came too late"
    assert health.heard(520 * S).trusted(520 * S)
    late = AdvisorHealth(since_ns=0).heard(301 * S)
    assert not late.trusted(301 * S)


def test_what_a_cgroup_can_give_up() -> None:
    """A container its cache, a group what no member is charged with, nobody what is not measured."""
    samples = (
        CgroupSample(path="/kubepods", id=1, memory_bytes=100),
        CgroupSample(path="/kubepods/web", id=2, memory_bytes=60, memory_stat={"file": 12, "anon": 40}),
        CgroupSample(path="/kubepods/batch", id=3, memory_bytes=10, memory_stat={"cache": 1, "total_cache": 2}),
        CgroupSample(path="/other", id=4, memory_bytes=50),
        CgroupSample(path="/other/x", id=5),
    )
    seen = msgspec.structs.replace(ROUND.snapshot, cgroups={sample.path: sample for sample in samples})
    assert memory_advice_codec.reclaimable_bytes_by_cgroup(seen) == {
        "/kubepods": 30,
        "/kubepods/web": 12,
        "/kubepods/batch": 2,
    }
