"""A runtime's end of the NRI socket, that asks what a test says; tests/cluster has the real one."""

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
    """One plugin at a time. `async with Runtime(path) as runtime`; then `await runtime.plugin()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.registered: list[tuple[str, str]] = []
        self.refuses = ""
        self.garbles: bytes | None = None
        """What it answers instead of a message."""
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
        """Until one has registered."""
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

    def write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def forget(self) -> None:
        """Wait for the next one to register."""
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
                if self.garbles is not None:
                    writer.write(
                        encode_frame(NriMessage(RUNTIME_CONVERSATION, message.call, MessageKind.RESPONSE, self.garbles))
                    )
                    continue
                if request.method == "UpdateContainers":
                    self.updates.append(wire.UpdateContainersRequest.FromString(request.payload))
                    self.updating()
                    answer = rpc.Response(payload=wire.UpdateContainersResponse().SerializeToString())
                    writer.write(
                        encode_frame(
                            NriMessage(
                                RUNTIME_CONVERSATION, message.call, MessageKind.RESPONSE, answer.SerializeToString()
                            )
                        )
                    )
                    continue
                assert request.method == "RegisterPlugin"
                register = wire.RegisterPluginRequest.FromString(request.payload)
                self.registered.append((register.plugin_idx, register.plugin_name))
                status = rpc.Status(code=2, message=self.refuses) if self.refuses else None
                response = rpc.Response(status=status).SerializeToString()
                writer.write(
                    encode_frame(NriMessage(RUNTIME_CONVERSATION, message.call, MessageKind.RESPONSE, response))
                )
                if not self.refuses:
                    self._there.set()
        writer.close()


def a_container(name: str, level: str, *, cgroup: str, **resources: Any) -> wire.CreateContainerRequest:
    """The request of a pod of one container, below /kubepods."""
    request = wire.CreateContainerRequest()
    pod, container = request.pod, request.container
    pod.name, pod.uid, pod.namespace = name, f"uid-{name}", "shop"
    pod.annotations["katalyst.kubewharf.io/qos_level"] = level
    container.id, container.name = f"id-{name}", "main"
    container.linux.cgroups_path = cgroup
    cpu = container.linux.resources.cpu
    cpu.shares.value = resources.get("shares", 2)
    if "quota" in resources:
        cpu.quota.value, cpu.period.value = resources["quota"], 100_000
    return request
