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
async def test_containers_of_the_pod_that_run_are_stopped_with_its_grace(
    tmp_path: Path, own_s: float | None, grace_s: float | None, sent: int
) -> None:
    fake = runtime()
    server = await fake.begin(tmp_path / "c.sock")
    answer = await CriEvictor(tmp_path / "c.sock", 5).evict(pod(own_s=own_s), grace_s)
    assert (answer.result, answer.text) == (MethodResult.DONE, "Successfully kill container main, mesh")
    assert sorted(fake.stopped) == [("aa", sent), ("bb", sent)]
    await server.stop()


async def test_a_pod_of_another_uid_is_gone_as_far_as_this_goes(tmp_path: Path) -> None:
    fake = runtime()
    server = await fake.begin(tmp_path / "c.sock")
    way = CriEvictor(tmp_path / "c.sock", 5)
    assert (await way.evict(pod(uid="uid-before"), None)).result is MethodResult.ABSENT
    observation = await way.observe(pod(uid="uid-before"))
    assert observation is not None
    assert observation.absent
    observation = await way.observe(pod())
    assert observation is not None
    assert not observation.absent
    assert fake.stopped == []
    await server.stop()


async def test_a_container_that_came_while_the_runtime_refused_stays(tmp_path: Path) -> None:
    """It was stopped all the same, and the kubelet has started the next one."""
    fake = runtime()
    fake.refuses = True
    server = await fake.begin(tmp_path / "c.sock")
    way = CriEvictor(tmp_path / "c.sock", 5)
    assert (await way.evict(pod(), 5)).result is MethodResult.BLOCKED
    fake.refuses = False
    del fake.containers["aa"]
    fake.run("web", "main", "ee")
    assert (await way.evict(pod(), 5)).result is MethodResult.DONE
    assert fake.stopped == [("bb", 5)]
    assert (await way.evict(pod(), 5)).result is MethodResult.DONE
    assert sorted(fake.stopped) == [("bb", 5), ("bb", 5), ("ee", 5)], "for another wish all that runs is meant"
    await server.stop()


async def test_a_wish_that_was_given_up_leaves_nothing_of_it_to_the_next(tmp_path: Path) -> None:
    """The runtime refuses, the trouble ends and the pod stays; an hour later it has other containers and has to leave."""
    fake = runtime()
    fake.refuses = True
    server = await fake.begin(tmp_path / "c.sock")
    way = CriEvictor(tmp_path / "c.sock", 5)
    killer = ApiEvictor(lambda _: way)
    killer.evict(pod(), 5, "trouble")
    while not killer.blocked:
        await asyncio.sleep(0.01)
    killer.cancel("shop/web", "it is over")
    while killer.blocked:
        await asyncio.sleep(0.01)
    assert [each.reason for each in killer.outcomes()] == [EvictionEventReason.FAILED, EvictionEventReason.CANCELLED]
    fake.refuses = False
    for old in ("aa", "bb"):
        del fake.containers[old]
    fake.run("web", "main", "ee")
    answer = await way.evict(pod(), 5)
    assert (answer.text, fake.stopped) == ("Successfully kill container main", [("ee", 5)])
    killer.close()
    await server.stop()


async def test_a_pod_of_which_nothing_runs_now_is_there_still(tmp_path: Path) -> None:
    fake = runtime()
    for item in ("aa", "bb"):
        del fake.containers[item]
    server = await fake.begin(tmp_path / "c.sock")
    way = CriEvictor(tmp_path / "c.sock", 5)
    answer = await way.evict(pod(), 5)
    assert (answer.result, answer.text, fake.stopped) == (
        MethodResult.DONE,
        "Successfully kill container (none ran)",
        [],
    )
    observation = await way.observe(pod())
    assert observation is not None
    assert not observation.absent
    await server.stop()


@pytest.mark.parametrize(
    ("trouble", "held"),
    [
        ("refuses", EvictionBlock.BUSY),
        ("cannot", EvictionBlock.REFUSED),
        ("away", EvictionBlock.UNREACHABLE),
        ("hangs", EvictionBlock.UNREACHABLE),
    ],
)
async def test_a_runtime_that_will_not_or_is_away_holds_the_pod(
    tmp_path: Path, trouble: str, held: EvictionBlock
) -> None:
    fake = runtime()
    fake.refuses, fake.hangs = trouble == "refuses", trouble == "hangs"
    server = await fake.begin(tmp_path / "c.sock", stops=trouble != "cannot")
    path = tmp_path / ("away.sock" if trouble == "away" else "c.sock")
    way = CriEvictor(path, 0.5)
    answer = await way.evict(pod(), None)
    assert (answer.result, answer.block) == (MethodResult.BLOCKED, held)
    if held is EvictionBlock.UNREACHABLE:
        assert await way.observe(pod()) is None
    await server.stop()
