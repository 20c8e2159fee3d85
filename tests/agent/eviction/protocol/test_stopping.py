"""The killer that stops containers, over a real socket: those of the very pod that run, with its grace, and nobody else's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.eviction.protocol.stopping import ContainerWay
from agent.eviction.ways import Fate
from agent.rpc import Refusal, Server, Service, serve
from api.evictions import Held
from api.pods import Pod
from api.proto import cri_runtime_pb2 as wire
from api.qos import QoSLevel
from tests.agent.sense.test_cri import SERVICE, Containerd


class Runtime(Containerd):
    """One that also stops."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[tuple[str, int]] = []
        self.refuses = False

    async def begin(self, path: Path, *, stops: bool = True) -> Server:
        handlers: dict[str, Any] = {"ListPodSandbox": self._boxes, "ListContainers": self._containers}
        if stops:
            handlers["StopContainer"] = self._stop
        return await serve(path, (Service(SERVICE, handlers),))

    async def _stop(self, request: Any, _words: Mapping[str, str]) -> wire.StopContainerResponse:
        if self.refuses:
            raise Refusal("container is in removing state")
        self.stopped.append((request.container_id, request.timeout))
        return wire.StopContainerResponse()


def pod(name: str = "web", uid: str = "uid-web") -> Pod:
    return Pod(uid=uid, namespace="shop", name=name, qos=QoSLevel.RECLAIMED, containers=())


def runtime() -> Runtime:
    made = Runtime()
    made.run("web", "main", "aa")
    made.run("web", "mesh", "bb")
    made.run("web", "init", "cc", state=wire.CONTAINER_EXITED)
    made.run("other", "main", "dd")
    return made


@pytest.mark.parametrize(("grace_s", "sent"), [(None, 30), (0.0, 1), (7.2, 8)])
async def test_containers_of_the_pod_that_run_are_stopped_with_its_grace(
    tmp_path: Path, grace_s: float | None, sent: int
) -> None:
    made = runtime()
    server = await made.begin(tmp_path / "c.sock")
    answer = await ContainerWay(tmp_path / "c.sock", 5).ask(pod(), grace_s)
    assert (answer.fate, answer.text) == (Fate.DONE, "Successfully kill container main, mesh")
    assert sorted(made.stopped) == [("aa", sent), ("bb", sent)]
    await server.stop()


async def test_a_pod_of_another_uid_is_gone_as_far_as_this_goes(tmp_path: Path) -> None:
    made = runtime()
    server = await made.begin(tmp_path / "c.sock")
    way = ContainerWay(tmp_path / "c.sock", 5)
    assert (await way.ask(pod(uid="uid-before"), None)).fate is Fate.GONE
    seen = await way.look(pod(uid="uid-before"))
    assert seen is not None
    assert seen.gone
    seen = await way.look(pod())
    assert seen is not None
    assert not seen.gone
    assert made.stopped == []
    await server.stop()


@pytest.mark.parametrize(
    ("trouble", "held"),
    [("refuses", Held.REFUSED), ("cannot", Held.REFUSED), ("away", Held.UNREACHABLE), ("hangs", Held.UNREACHABLE)],
)
async def test_a_runtime_that_will_not_or_is_away_holds_the_pod(tmp_path: Path, trouble: str, held: Held) -> None:
    made = runtime()
    made.refuses, made.hangs = trouble == "refuses", trouble == "hangs"
    server = await made.begin(tmp_path / "c.sock", stops=trouble != "cannot")
    path = tmp_path / ("away.sock" if trouble == "away" else "c.sock")
    way = ContainerWay(path, 0.5)
    answer = await way.ask(pod(), None)
    assert (answer.fate, answer.held) == (Fate.HELD, held)
    if held is Held.UNREACHABLE:
        assert await way.look(pod()) is None
    await server.stop()
