"""Knobs written by the runtime: requests, time budget, and files where the runtime does not answer."""

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
    ("knob", "texts", "expected"),
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
def test_texts_become_fields_of_the_request(knob: Knob, texts: dict[str, str], expected: dict[str, Any] | None) -> None:
    request = update_request(GROUP, knob, texts)
    assert (request is None) is (expected is None)
    if expected is not None:
        assert request == wire.UpdateContainerResourcesRequest(
            container_id=ID, linux=wire.LinuxContainerResources(**expected)
        )


@pytest.mark.parametrize(
    ("cgroup", "is_container"),
    [
        (GROUP, True),
        (f"/kubepods.slice/kubepods-poduid.slice/cri-containerd-{ID}.scope", True),
        (f"/kubepods.slice/crio-{ID}.scope", True),
        ("/kubepods/burstable/poduid", False),
        (f"{GROUP}/below", False),
        ("/kubepods/besteffort", False),
    ],
)
def test_only_container_cgroups_become_requests(cgroup: str, is_container: bool) -> None:
    assert (update_request(cgroup, Knob.CPUSET, {"cpuset.cpus": "0"}) is not None) is is_container


class Containerd:
    """Writes the weight to the tree's file, as runc does; served from a thread, because callers wait."""

    def __init__(self, tree: Tree, socket: Path) -> None:
        self.requests: list[wire.UpdateContainerResourcesRequest] = []
        self.refusal, self.takes_s, self.writes = "", 0.0, True
        self.puts_back: dict[str, str] = {}
        self._tree, self._socket = tree, socket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    async def _serve(self) -> Any:
        return await serve_on_socket(self._socket, (GrpcService(SERVICE, {"UpdateContainerResources": self._update}),))

    async def _update(self, request: Any, _words: Mapping[str, str]) -> wire.UpdateContainerResourcesResponse:
        self.requests.append(request)
        await asyncio.sleep(self.takes_s)
        for file, text in self.puts_back.items():
            self._tree.file(GROUP, file).write_text(text)
        if self.refusal:
            raise HandlerRefusal(self.refusal)
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
    instance = Stage(tmp_path)
    yield instance
    instance.files.close()
    instance.files.close()
    instance.containerd.end()


def test_a_value_written_by_the_runtime_is_not_written_again(stage: Stage) -> None:
    assert stage.write("20") == "205"
    assert [(request.container_id, request.linux.cpu_shares) for request in stage.containerd.requests] == [(ID, 205)]
    assert (stage.files.runtime_writes, stage.files.runtime_failures) == (1, 0)


def test_a_knob_that_the_cri_lacks_is_written_to_its_file(stage: Stage) -> None:
    stage.files.write(GROUP, stage.tree.id(GROUP), Knob.IDLE, "1")
    assert stage.tree.file(GROUP, "cpu.idle").read_text().strip() == "1"
    assert stage.containerd.requests == []


def test_a_runtime_that_accepts_and_writes_nothing_is_detected(stage: Stage) -> None:
    stage.containerd.writes = False
    assert stage.write("20") == "205"
    assert len(stage.containerd.requests) == 1


def test_a_refusal_for_one_container_does_not_stop_calls_for_others(stage: Stage) -> None:
    stage.containerd.refusal = "container is not running"
    assert (stage.write("20"), stage.write("30")) == ("205", "307")
    assert (len(stage.containerd.requests), stage.files.runtime_failures) == (2, 2)


def test_a_runtime_that_hangs_is_not_called_for_a_while(stage: Stage) -> None:
    stage.containerd.takes_s = cri_writer.CALL_TIMEOUT_S + 0.5
    with stage.files.one_cycle():
        assert stage.write("20") == "205"
    with stage.files.one_cycle():
        assert stage.write("30") == "307"
    assert (len(stage.containerd.requests), stage.files.runtime_failures) == (1, 1)


def test_each_cycle_has_a_time_budget_of_one_second(stage: Stage) -> None:
    stage.containerd.takes_s = cri_writer.CYCLE_BUDGET_S * 0.6
    with stage.files.one_cycle():
        for weight in ("20", "30", "40"):
            stage.write(weight)
    assert len(stage.containerd.requests) == 2
    assert stage.tree.file(GROUP, "cpu.shares").read_text().strip() == "410"
    with stage.files.one_cycle():
        stage.write("50")
    assert len(stage.containerd.requests) == 3


def test_missed_values_are_sent_with_the_next_request_for_the_container(stage: Stage) -> None:
    """The runtime writes all its values: a weight of an earlier cycle would look like an external change."""
    assert stage.write("20") == "205"
    stage.containerd.refusal = "busy"
    assert stage.write("30") == "307"
    stage.containerd.refusal = ""
    stage.files.write(GROUP, stage.tree.id(GROUP), Knob.CPUSET, "0")
    expected = stage.containerd.requests[-1].linux
    assert (expected.cpuset_cpus, expected.cpu_shares) == ("0", 307)
    stage.files.write(GROUP, stage.tree.id(GROUP), Knob.CPUSET, "1")
    assert stage.containerd.requests[-1].linux == wire.LinuxContainerResources(cpuset_cpus="1"), (
        "the runtime has the weight by now"
    )


def test_files_written_before_a_refusal_are_read_again(stage: Stage) -> None:
    """Like runc, which restores its previous values when one of several writes fails."""
    group = stage.tree.id(GROUP)
    stage.files.write_raw(GROUP, group, Knob.QUOTA, {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "50000"})
    before = stage.files.read_raw(GROUP, group, Knob.QUOTA).texts
    stage.containerd.refusal, stage.containerd.puts_back = "no", {"cpu.cfs_period_us": "100000\n"}
    texts = {"cpu.cfs_quota_us": "25000", "cpu.cfs_period_us": "50000"}
    stage.files.write_raw(GROUP, group, Knob.QUOTA, texts, before)
    assert stage.files.read(GROUP, group, Knob.QUOTA) == "25000 50000"
