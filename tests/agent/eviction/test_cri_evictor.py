"""Eviction by stopping containers, over a real socket: the running containers of that pod, with its grace."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.eviction.api_evictor import ApiEvictor, MethodResult
from agent.eviction.cri_evictor import CriEvictor
from api.eviction import EvictionBlock, EvictionEventReason
from api.pod import Pod
from api.proto import cri_runtime_pb2 as wire
from api.qos import QoSLevel
from common.grpc_unix import GrpcServer, GrpcService, HandlerRefusal, serve_on_socket
from tests.agent.sensors.pods.test_cri_client import SERVICE, Containerd


class Runtime(Containerd):
    """One that also stops."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[tuple[str, int]] = []
        self.refuses = False

    async def begin(self, path: Path, *, stops: bool = True) -> GrpcServer:
        handlers: dict[str, Any] = {"ListPodSandbox": self._boxes, "ListContainers": self._containers}
        if stops:
            handlers["StopContainer"] = self._stop
        return await serve_on_socket(path, (GrpcService(SERVICE, handlers),))

    async def _stop(self, request: Any, _words: Mapping[str, str]) -> wire.StopContainerResponse:
        if self.refuses:
            raise HandlerRefusal("container is in removing state")
        self.stopped.append((request.container_id, request.timeout))
        return wire.StopContainerResponse()


def pod(name: str = "web", uid: str = "uid-web", own_s: float | None = None) -> Pod:
    return Pod(uid=uid, namespace="shop", name=name, qos=QoSLevel.RECLAIMED, containers=(), grace_s=own_s)


def runtime() -> Runtime:
    fake = Runtime()
    fake.run("web", "main", "aa")
    fake.run("web", "mesh", "bb")
    fake.run("web", "init", "cc", state=wire.CONTAINER_EXITED)
    fake.run("other", "main", "dd")
    return fake


@pytest.mark.parametrize(
    ("own_s", "grace_s", "sent"),
    [
        (None, None, 30),
        (None, 0.0, 1),
        (None, 7.2, 8),
        (90.0, None, 90),
        (90.0, 5.0, 5),
        (5.0, 60.0, 60),
        (0.0, None, 1),
        (1e9, None, 600),
        (None, 2.0**31, 600),
    ],
)
async def test_running_containers_of_the_pod_are_stopped_with_its_grace(
    tmp_path: Path, own_s: float | None, grace_s: float | None, sent: int
) -> None:
    fake = runtime()
    server = await fake.begin(tmp_path / "c.sock")
    answer = await CriEvictor(tmp_path / "c.sock", 5).evict(pod(own_s=own_s), grace_s)
    assert (answer.result, answer.text) == (MethodResult.DONE, "Successfully kill container main, mesh")
    assert sorted(fake.stopped) == [("aa", sent), ("bb", sent)]
    await server.stop()


async def test_a_pod_without_a_sandbox_of_its_uid_is_absent(tmp_path: Path) -> None:
    fake = runtime()
    server = await fake.begin(tmp_path / "c.sock")
    method = CriEvictor(tmp_path / "c.sock", 5)
    assert (await method.evict(pod(uid="uid-before"), None)).result is MethodResult.ABSENT
    observation = await method.observe(pod(uid="uid-before"))
    assert observation is not None
    assert observation.absent
    observation = await method.observe(pod())
    assert observation is not None
    assert not observation.absent
    assert fake.stopped == []
    await server.stop()


async def test_a_container_started_after_the_first_request_is_not_stopped(tmp_path: Path) -> None:
    """It was stopped all the same, and the kubelet has started the next one."""
    fake = runtime()
    fake.refuses = True
    server = await fake.begin(tmp_path / "c.sock")
    method = CriEvictor(tmp_path / "c.sock", 5)
    assert (await method.evict(pod(), 5)).result is MethodResult.BLOCKED
    fake.refuses = False
    del fake.containers["aa"]
    fake.run("web", "main", "ee")
    assert (await method.evict(pod(), 5)).result is MethodResult.DONE
    assert fake.stopped == [("bb", 5)]
    assert (await method.evict(pod(), 5)).result is MethodResult.DONE
    assert sorted(fake.stopped) == [("bb", 5), ("bb", 5), ("ee", 5)], "another eviction stops all running containers"
    await server.stop()


async def test_a_cancelled_eviction_leaves_no_state_to_the_next(tmp_path: Path) -> None:
    """The runtime refuses and the eviction is cancelled; the next eviction of the pod finds other containers."""
    fake = runtime()
    fake.refuses = True
    server = await fake.begin(tmp_path / "c.sock")
    method = CriEvictor(tmp_path / "c.sock", 5)
    evictor = ApiEvictor(lambda _: method)
    evictor.evict(pod(), 5, "trouble")
    while not evictor.blocked:
        await asyncio.sleep(0.01)
    evictor.cancel("shop/web", "it is over")
    while evictor.blocked:
        await asyncio.sleep(0.01)
    assert [each.reason for each in evictor.outcomes()] == [EvictionEventReason.FAILED, EvictionEventReason.CANCELLED]
    fake.refuses = False
    for old in ("aa", "bb"):
        del fake.containers[old]
    fake.run("web", "main", "ee")
    answer = await method.evict(pod(), 5)
    assert (answer.text, fake.stopped) == ("Successfully kill container main", [("ee", 5)])
    evictor.close()
    await server.stop()


async def test_a_pod_without_running_containers_still_exists(tmp_path: Path) -> None:
    fake = runtime()
    for item in ("aa", "bb"):
        del fake.containers[item]
    server = await fake.begin(tmp_path / "c.sock")
    method = CriEvictor(tmp_path / "c.sock", 5)
    answer = await method.evict(pod(), 5)
    assert (answer.result, answer.text, fake.stopped) == (
        MethodResult.DONE,
        "Successfully kill container (none ran)",
        [],
    )
    observation = await method.observe(pod())
    assert observation is not None
    assert not observation.absent
    await server.stop()


@pytest.mark.parametrize(
    ("trouble", "blocked"),
    [
        ("refuses", EvictionBlock.BUSY),
        ("cannot", EvictionBlock.REFUSED),
        ("away", EvictionBlock.UNREACHABLE),
        ("hangs", EvictionBlock.UNREACHABLE),
    ],
)
async def test_a_refusing_or_unreachable_runtime_blocks_the_eviction(
    tmp_path: Path, trouble: str, blocked: EvictionBlock
) -> None:
    fake = runtime()
    fake.refuses, fake.hangs = trouble == "refuses", trouble == "hangs"
    server = await fake.begin(tmp_path / "c.sock", stops=trouble != "cannot")
    path = tmp_path / ("away.sock" if trouble == "away" else "c.sock")
    method = CriEvictor(path, 0.5)
    answer = await method.evict(pod(), None)
    assert (answer.result, answer.block) == (MethodResult.BLOCKED, blocked)
    if blocked is EvictionBlock.UNREACHABLE:
        assert await method.observe(pod()) is None
    await server.stop()
