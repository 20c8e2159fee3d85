"""Knobs written by the runtime: in its words, within its time, and by files where it does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.qrm.actuator import cri_writer
from agent.qrm.actuator.cri_writer import CriKnobWriter, update_request
from api.knobs import Knob
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import GrpcService, HandlerRefusal, serve_on_socket
from tests.agent.qrm.actuator.trees import Tree

ID = "0123456789abcdef" * 4
GROUP = f"/kubepods/burstable/poduid/{ID}"
SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


@pytest.mark.parametrize(
    ("knob", "texts", "said"),
    [
        (Knob.CPUSET, {"cpuset.cpus": "0-1\n"}, {"cpuset_cpus": "0-1"}),
        (Knob.CPUSET, {"cpuset.cpus": "\n"}, None),
        (Knob.MEMS, {"cpuset.mems": "1", "cpuset.memory_migrate": "1"}, {"cpuset_mems": "1"}),
        (Knob.WEIGHT, {"cpu.shares": "205"}, {"cpu_shares": 205}),
        (Knob.WEIGHT, {"cpu.weight": "20"}, None),
        (Knob.QUOTA, {"cpu.cfs_quota_us": "5000", "cpu.cfs_period_us": "10000"}, {"cpu_quota": 5000, "cpu_period": 10000}),
        (Knob.QUOTA, {"cpu.cfs_quota_us": "-1"}, {"cpu_quota": -1}),
        (Knob.QUOTA, {"cpu.max": "max 100000"}, {"cpu_quota": -1, "cpu_period": 100_000}),
        (Knob.QUOTA, {"cpu.max": "5000 10000"}, {"cpu_quota": 5000, "cpu_period": 10_000}),
        (Knob.MEMORY_MAX, {"memory.limit_in_bytes": "4096"}, {"memory_limit_in_bytes": 4096}),
        (Knob.MEMORY_MAX, {"memory.limit_in_bytes": "9223372036854771712"}, {"memory_limit_in_bytes": -1}),
        (Knob.MEMORY_MAX, {"memory.max": "max"}, {"memory_limit_in_bytes": -1}),
        (Knob.IDLE, {"cpu.idle": "1"}, None),
    ],
)  # fmt: skip
def test_texts_in_the_runtimes_words(knob: Knob, texts: dict[str, str], said: dict[str, Any] | None) -> None:
    request = update_request(GROUP, knob, texts)
    assert (request is None) is (said is None)
    if said is not None:
        assert request == wire.UpdateContainerResourcesRequest(
            container_id=ID, linux=wire.LinuxContainerResources(**said)
        )


@pytest.mark.parametrize(
    ("cgroup", "known"),
    [
        (GROUP, True),
        (f"/kubepods.slice/kubepods-poduid.slice/cri-containerd-{ID}.scope", True),
        (f"/kubepods.slice/crio-{ID}.scope", True),
        ("/kubepods/burstable/poduid", False),
        (f"{GROUP}/below", False),
        ("/kubepods/besteffort", False),
    ],
)
def test_only_containers_are_the_runtimes(cgroup: str, known: bool) -> None:
    assert (update_request(cgroup, Knob.CPUSET, {"cpuset.cpus": "0"}) is not None) is known


class Containerd:
    """It writes the weight into the tree's file, as runc does; served from a thread, for callers here wait."""

    def __init__(self, tree: Tree, socket: Path) -> None:
        self.asked: list[wire.UpdateContainerResourcesRequest] = []
        self.says, self.takes_s, self.writes = "", 0.0, True
        self.puts_back: dict[str, str] = {}
        self._tree, self._socket = tree, socket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    async def _serve(self) -> Any:
        return await serve_on_socket(self._socket, (GrpcService(SERVICE, {"UpdateContainerResources": self._update}),))

    async def _update(self, request: Any, _words: Mapping[str, str]) -> wire.UpdateContainerResourcesResponse:
        self.asked.append(request)
        await asyncio.sleep(self.takes_s)
        for file, text in self.puts_back.items():
            self._tree.file(GROUP, file).write_text(text)
        if self.says:
            raise HandlerRefusal(self.says)
        if self.writes and request.linux.cpu_shares:
            self._tree.file(GROUP, "cpu.shares").write_text(f"{request.linux.cpu_shares}\n")
        return wire.UpdateContainerResourcesResponse()

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Stage:
    def __init__(self, folder: Path) -> None:
        self.tree = Tree(folder / "cgroup", "v1")
        for path in ("/kubepods", "/kubepods/burstable", "/kubepods/burstable/poduid", GROUP):
            self.tree.make(path)
        self.containerd = Containerd(self.tree, folder / "c.sock")
        self.files = CriKnobWriter(self.tree.hierarchy, folder / "c.sock")

    def write(self, weight: str) -> str:
        self.files.write(GROUP, self.tree.id(GROUP), Knob.WEIGHT, weight)
        return self.tree.file(GROUP, "cpu.shares").read_text().strip()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.files.close()
    made.files.close()
    made.containerd.end()


def test_the_runtime_writes_and_nobody_writes_again(stage: Stage) -> None:
    assert stage.write("20") == "205"
    assert [(one.container_id, one.linux.cpu_shares) for one in stage.containerd.asked] == [(ID, 205)]
    assert (stage.files.runtime_writes, stage.files.runtime_failures) == (1, 0)


def test_what_it_has_no_word_for_is_written_here(stage: Stage) -> None:
    stage.files.write(GROUP, stage.tree.id(GROUP), Knob.IDLE, "1")
    assert stage.tree.file(GROUP, "cpu.idle").read_text().strip() == "1"
    assert stage.containerd.asked == []


def test_a_runtime_that_says_yes_and_does_nothing_is_not_believed(stage: Stage) -> None:
    stage.containerd.writes = False
    assert stage.write("20") == "205"
    assert len(stage.containerd.asked) == 1


def test_one_that_refuses_a_container_is_asked_for_the_next(stage: Stage) -> None:
    stage.containerd.says = "container is not running"
    assert (stage.write("20"), stage.write("30")) == ("205", "307")
    assert (len(stage.containerd.asked), stage.files.runtime_failures) == (2, 2)


def test_one_that_hangs_is_left_alone_for_a_while(stage: Stage) -> None:
    stage.containerd.takes_s = cri_writer.CALL_TIMEOUT_S + 0.5
    with stage.files.one_cycle():
        assert stage.write("20") == "205"
    with stage.files.one_cycle():
        assert stage.write("30") == "307"
    assert (len(stage.containerd.asked), stage.files.runtime_failures) == (1, 1)


def test_a_round_gives_it_a_second_and_no_more(stage: Stage) -> None:
    stage.containerd.takes_s = cri_writer.CYCLE_BUDGET_S * 0.6
    with stage.files.one_cycle():
        for weight in ("20", "30", "40"):
            stage.write(weight)
    assert len(stage.containerd.asked) == 2
    assert stage.tree.file(GROUP, "cpu.shares").read_text().strip() == "410"
    with stage.files.one_cycle():
        stage.write("50")
    assert len(stage.containerd.asked) == 3


def test_what_it_missed_it_hears_with_the_next_word_about_that_container(stage: Stage) -> None:
    """It writes all that it believes: a weight of an earlier round would look like somebody else's."""
    assert stage.write("20") == "205"
    stage.containerd.says = "busy"
    assert stage.write("30") == "307"
    stage.containerd.says = ""
    stage.files.write(GROUP, stage.tree.id(GROUP), Knob.CPUSET, "0")
    said = stage.containerd.asked[-1].linux
    assert (said.cpuset_cpus, said.cpu_shares) == ("0", 307)
    stage.files.write(GROUP, stage.tree.id(GROUP), Knob.CPUSET, "1")
    assert stage.containerd.asked[-1].linux == wire.LinuxContainerResources(cpuset_cpus="1"), (
        "it knows the weight by now"
    )


def test_what_it_wrote_before_it_said_no_is_found(stage: Stage) -> None:
    """As runc, which puts back all of what it believed when one of several writes fails."""
    group = stage.tree.id(GROUP)
    stage.files.write_raw(GROUP, group, Knob.QUOTA, {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "50000"})
    before = stage.files.read_raw(GROUP, group, Knob.QUOTA).texts
    stage.containerd.says, stage.containerd.puts_back = "no", {"cpu.cfs_period_us": "100000\n"}
    wanted = {"cpu.cfs_quota_us": "25000", "cpu.cfs_period_us": "50000"}
    stage.files.write_raw(GROUP, group, Knob.QUOTA, wanted, before)
    assert stage.files.read(GROUP, group, Knob.QUOTA) == "25000 50000"
