"""The container runtime over a real socket: running containers, their cgroups, and invalid answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.config.loader import find_runtime_socket
from agent.sensors.pods.cri_client import (
    MAX_CONCURRENT_REQUESTS,
    MAX_STATUS_REQUESTS,
    ContainerRuntimeClient,
    container_cgroup,
    join_runtime_lists,
)
from api.interfaces import Unavailable
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import GrpcServer, GrpcService, HandlerRefusal, serve_on_socket

SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class Containerd:
    """A runtime that runs what a test says."""

    def __init__(self) -> None:
        self.containers: dict[str, wire.Container] = {}
        self.sandboxes: dict[str, wire.PodSandbox] = {}
        self.specs: dict[str, str] = {}
        self.status_requests: list[str] = []
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.hangs = False

    def run(self, pod: str, name: str, container_id: str, **changes: Any) -> None:
        box = f"box-{pod}"
        self.sandboxes[box] = wire.PodSandbox(
            id=box, metadata=wire.PodSandboxMetadata(name=pod, uid=f"uid-{pod}", namespace="shop")
        )
        fields = {"state": wire.CONTAINER_RUNNING, "created_at": 1, **changes}
        metadata = wire.ContainerMetadata(name=name)
        self.containers[container_id] = wire.Container(id=container_id, pod_sandbox_id=box, metadata=metadata, **fields)

    async def serve(self, path: Path, *, events: bool = True) -> GrpcServer:
        handlers = {
            "ListPodSandbox": self._boxes,
            "ListContainers": self._containers,
            "ContainerStatus": self._status,
            **({"GetContainerEvents": self._events} if events else {}),
        }
        return await serve_on_socket(path, (GrpcService(SERVICE, handlers),))

    async def _boxes(self, _request: Any, _words: Mapping[str, str]) -> wire.ListPodSandboxResponse:
        if self.hangs:
            await asyncio.sleep(60)
        return wire.ListPodSandboxResponse(items=list(self.sandboxes.values()))

    async def _containers(self, _request: Any, _words: Mapping[str, str]) -> wire.ListContainersResponse:
        return wire.ListContainersResponse(containers=list(self.containers.values()))

    async def _status(self, request: Any, _words: Mapping[str, str]) -> wire.ContainerStatusResponse:
        self.status_requests.append(request.container_id)
        if request.container_id not in self.containers:
            raise HandlerRefusal("not found")
        assert request.verbose
        path = self.specs.get(request.container_id, "")
        info = {"info": json.dumps({"pid": 7, "runtimeSpec": {"linux": {"cgroupsPath": path}}})}
        return wire.ContainerStatusResponse(info=info)

    async def _events(self, _request: Any, _words: Mapping[str, str]) -> AsyncIterator[wire.ContainerEventResponse]:
        while container_id := await self.events.get():
            yield wire.ContainerEventResponse(
                container_id=container_id, container_event_type=wire.CONTAINER_STARTED_EVENT
            )


async def test_running_containers_have_their_cgroup_which_is_requested_once(tmp_path: Path) -> None:
    containerd = Containerd()
    containerd.run("web", "main", "aa")
    containerd.run("web", "mesh", "bb")
    containerd.specs |= {"aa": "kubepods-poduid_web.slice:cri-containerd:aa", "bb": "/kubepods/poduid-web/bb"}
    server = await containerd.serve(tmp_path / "c.sock")
    runtime = ContainerRuntimeClient(tmp_path / "c.sock", 5)
    looked = await runtime.list_running()
    assert {key: (item.pod, item.id, item.cgroup) for key, item in looked.running.items()} == {
        ("uid-web", "main"): ("shop/web", "aa", "/kubepods.slice/kubepods-poduid_web.slice/cri-containerd-aa.scope"),
        ("uid-web", "mesh"): ("shop/web", "bb", "/kubepods/poduid-web/bb"),
    }
    assert looked.sandboxes == {"uid-web"}
    containerd.run("db", "main", "cc")
    again = await runtime.list_running()
    assert again.pods() == {"uid-web": "shop/web", "uid-db": "shop/db"}
    assert again.running["uid-db", "main"].cgroup == "", "it tells none of that one"
    await runtime.list_running()
    assert sorted(containerd.status_requests) == ["aa", "bb", "cc"]
    await runtime.close()
    await server.stop()


async def test_cgroups_of_a_thousand_containers_are_requested_in_several_polls(tmp_path: Path) -> None:
    containerd = Containerd()
    for number in range(1000):
        containerd.run(f"p{number}", "main", f"c{number:04}")
    server = await containerd.serve(tmp_path / "c.sock")
    runtime = ContainerRuntimeClient(tmp_path / "c.sock", 5)
    assert len((await runtime.list_running()).running) == 1000
    assert len(containerd.status_requests) == MAX_STATUS_REQUESTS
    await runtime.list_running()
    assert len(set(containerd.status_requests)) == 2 * MAX_STATUS_REQUESTS
    await runtime.close()
    await server.stop()


async def test_long_specifications_are_decoded_in_several_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod chooses the environment that the specification of its container repeats."""
    monkeypatch.setattr("agent.sensors.pods.cri_client.MAX_INFO_CHARS_PER_POLL", 100_000)
    containerd = Containerd()
    for number in range(40):
        containerd.run(f"p{number}", "main", f"c{number:02}")
        containerd.specs[f"c{number:02}"] = "/" + "x" * 20_000
    server = await containerd.serve(tmp_path / "c.sock")
    runtime = ContainerRuntimeClient(tmp_path / "c.sock", 5)
    counts = []
    for _ in range(8):
        await runtime.list_running()
        counts.append(len(containerd.status_requests))
    assert 5 <= counts[0] <= 4 + MAX_CONCURRENT_REQUESTS, "five reach the limit, and those under way end"
    assert counts[-1] == 40
    await runtime.close()
    await server.stop()


async def test_a_runtime_that_is_restarted_is_found_again_and_one_that_hangs_costs_a_deadline(tmp_path: Path) -> None:
    containerd = Containerd()
    containerd.run("web", "main", "aa")
    runtime = ContainerRuntimeClient(tmp_path / "c.sock", 0.5)
    with pytest.raises(Unavailable, match=r"c\.sock: RuntimeService\.\w+: no server answers"):
        await runtime.list_running()
    for _restart in range(2):
        server = await containerd.serve(tmp_path / "c.sock")
        for _attempt in range(100):
            try:
                assert len((await runtime.list_running()).running) == 1
                break
            except Unavailable:
                await asyncio.sleep(0.1)
        else:
            pytest.fail("the runtime is back, and was not found in ten seconds")
        await server.stop()
    server = await containerd.serve(tmp_path / "c.sock")
    containerd.hangs = True
    slow = ContainerRuntimeClient(tmp_path / "c.sock", 0.3)
    with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
        await slow.list_running()
    await slow.close()
    await runtime.close()
    await server.stop()


async def test_events_come_as_they_happen(tmp_path: Path) -> None:
    containerd = Containerd()
    server = await containerd.serve(tmp_path / "c.sock")
    runtime = ContainerRuntimeClient(tmp_path / "c.sock", 5)
    for container_id in ("aa", "bb", ""):
        containerd.events.put_nowait(container_id)
    assert [item async for item in runtime.events()] == ["aa", "bb"]
    await runtime.close()
    await server.stop()


def test_the_newer_of_two_containers_with_one_name_counts_and_one_without_pod_does_not() -> None:
    containerd = Containerd()
    containerd.run("web", "main", "new", created_at=2)
    containerd.run("web", "main", "old", created_at=1)
    containerd.run("web", "ended", "e", state=wire.CONTAINER_EXITED)
    containerd.run("web", "made", "m", state=wire.CONTAINER_CREATED)
    containerd.run("web", "evil", "../../x")
    containerd.run("../../etc", "main", "x")
    boxes = wire.ListPodSandboxResponse(items=list(containerd.sandboxes.values()))
    orphan = wire.Container(id="o", pod_sandbox_id="nobody", state=wire.CONTAINER_RUNNING)
    containers = wire.ListContainersResponse(containers=[*containerd.containers.values(), orphan])
    assert {key: item.id for key, item in join_runtime_lists(boxes, containers).running.items()} == {
        ("uid-web", "main"): "new"
    }


@pytest.mark.parametrize(
    ("info", "path"),
    [
        ({}, ""),
        ({"info": "no JSON"}, ""),
        ({"info": "[" * 100_000}, ""),
        ({"info": '{"runtimeSpec": null}'}, ""),
        ({"info": '{"runtimeSpec": {"linux": {"cgroupsPath": 7}}}'}, ""),
        ({"info": '{"runtimeSpec": {"linux": {"cgroupsPath": "/a/../../b"}}}'}, ""),
        ({"other": "{}", "info": '{"runtimeSpec": {"linux": {"cgroupsPath": "/a/b"}}}'}, "/a/b"),
        (
            {"sandboxID": "x", "info": '{"runtimeSpec": {"linux": {"cgroupsPath": "a.slice:crio:b"}}}'},
            "/a.slice/crio-b.scope",
        ),
    ],
)
def test_the_cgroup_in_a_containers_status(info: dict[str, str], path: str) -> None:
    assert container_cgroup(wire.ContainerStatusResponse(info=info)) == path


def test_numbers_of_fields_are_those_of_the_published_protocol() -> None:
    """By hand: tags are (number << 3 | type)."""
    container = wire.Container(id="a", pod_sandbox_id="b", state=wire.CONTAINER_RUNNING, created_at=5)
    container.metadata.name = "m"
    assert container.SerializeToString().hex() == "0a0161" + "120162" + "1a030a016d" + "3001" + "3805"
    box = wire.PodSandbox(id="a", state=wire.SANDBOX_NOTREADY)
    box.metadata.uid, box.metadata.namespace = "u", "n"
    assert box.SerializeToString().hex() == "0a0161" + "1206" + "120175" + "1a016e" + "1801"
    requests = wire.ContainerStatusRequest(container_id="a", verbose=True)
    assert requests.SerializeToString().hex() == "0a0161" + "1001"
    event = wire.ContainerEventResponse(container_id="a", container_event_type=wire.CONTAINER_STOPPED_EVENT)
    assert event.SerializeToString().hex() == "0a0161" + "1002"
    assert SERVICE.full_name == "runtime.v1.RuntimeService"


def test_the_socket_of_the_settings_comes_first_and_none_is_none() -> None:
    assert find_runtime_socket("unix:///run/x.sock") == Path("/run/x.sock")
    assert find_runtime_socket("/run/x.sock") == Path("/run/x.sock")
    assert find_runtime_socket("") is None
