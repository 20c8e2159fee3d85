"""The runtime's end of the NRI socket, which sends the requests of a test; tests/cluster has a real runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.nri.frames import (
    PLUGIN_CONVERSATION,
    RUNTIME_CONVERSATION,
    FrameReader,
    MessageKind,
    NriMessage,
    encode_frame,
)
from api.proto import nri_pb2 as wire
from api.proto import ttrpc_pb2 as rpc

PLUGIN = wire.DESCRIPTOR.services_by_name["Plugin"]


class Runtime:
    """Serves one plugin at a time: `async with Runtime(path) as runtime`, then `await runtime.plugin()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.registered: list[tuple[str, str]] = []
        self.refuses = ""
        self.garbles: bytes | None = None
        """Bytes of a response to the plugin, in place of a message."""
        self.updates: list[wire.UpdateContainersRequest] = []
        self.updating: Callable[[], None] = lambda: None
        self._answers: dict[int, asyncio.Future[rpc.Response]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._there = asyncio.Event()
        self._next = 1
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Runtime:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        self.path.unlink(missing_ok=True)

    async def plugin(self) -> None:
        """Wait until a plugin has registered."""
        async with asyncio.timeout(10):
            await self._there.wait()

    async def ask(self, method: str, request: Any, service: str = PLUGIN.full_name) -> rpc.Response:
        number, self._next = self._next, self._next + 2
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = rpc.Request(service=service, method=method, payload=request.SerializeToString())
        self.write(
            encode_frame(NriMessage(PLUGIN_CONVERSATION, number, MessageKind.REQUEST, message.SerializeToString()))
        )
        async with asyncio.timeout(10):
            return await self._answers[number]

    async def create(self, request: wire.CreateContainerRequest) -> wire.CreateContainerResponse:
        answer = await self.ask("CreateContainer", request)
        assert answer.status.code == 0, answer.status.message
        response: wire.CreateContainerResponse = wire.CreateContainerResponse.FromString(answer.payload)
        return response

    async def created_cpu(self, request: wire.CreateContainerRequest) -> Any:
        """Create the container; return the CPU resources of its adjustment."""
        return (await self.create(request)).adjust.linux.resources.cpu

    async def synchronize(self, *containers: wire.Container) -> None:
        await self.ask("Synchronize", wire.SynchronizeRequest(containers=containers))

    def write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def forget(self) -> None:
        """Make `plugin` wait for the next registration."""
        self._there.clear()

    def hang_up(self) -> None:
        self.forget()
        if self._writer is not None:
            self._writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writer, frames = writer, FrameReader()
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                if message.conversation == PLUGIN_CONVERSATION:
                    self._answers.pop(message.call).set_result(rpc.Response.FromString(message.data))
                    continue
                request = rpc.Request.FromString(message.data)
                assert request.service == "nri.pkg.api.v1alpha1.Runtime"
                writer.write(
                    encode_frame(
                        NriMessage(RUNTIME_CONVERSATION, message.call, MessageKind.RESPONSE, self._response(request))
                    )
                )
        writer.close()

    def _response(self, request: Any) -> bytes:
        if self.garbles is not None:
            return self.garbles
        if request.method == "UpdateContainers":
            self.updates.append(wire.UpdateContainersRequest.FromString(request.payload))
            self.updating()
            answer = rpc.Response(payload=wire.UpdateContainersResponse().SerializeToString())
        else:
            assert request.method == "RegisterPlugin"
            register = wire.RegisterPluginRequest.FromString(request.payload)
            self.registered.append((register.plugin_idx, register.plugin_name))
            answer = rpc.Response(status=rpc.Status(code=2, message=self.refuses) if self.refuses else None)
            if not self.refuses:
                self._there.set()
        response: bytes = answer.SerializeToString()
        return response


POD = "/kubepods/uid-batch"
"""Not named as a kubelet names a pod's cgroup: there the priority is that of the pod, and the runtime gets no weight."""


def a_container(
    name: str = "batch", level: str = "reclaimed_cores", *, cgroup: str = "", **resources: Any
) -> wire.CreateContainerRequest:
    """Return the request to create the container of a pod, in the cgroup `POD`/name unless another is given."""
    request = wire.CreateContainerRequest()
    pod, container = request.pod, request.container
    pod.name, pod.uid, pod.namespace = name, f"uid-{name}", "shop"
    pod.annotations["katalyst.kubewharf.io/qos_level"] = level
    container.id, container.name = f"id-{name}", "main"
    container.linux.cgroups_path = cgroup or f"{POD}/{name}"
    cpu = container.linux.resources.cpu
    cpu.shares.value = resources.get("shares", 2)
    if "quota" in resources:
        cpu.quota.value, cpu.period.value = resources["quota"], 100_000
    return request
