"""Lists running containers and their cgroups from the container runtime over CRI. The runtime knows a container before
the kubelet reports it. The cgroup is read once per container from the OCI specification in a verbose ContainerStatus.
Imports gRPC (12 MiB): import this module lazily."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from agent.sensors.cgroup.pod_cgroup_paths import is_valid_id, parse_cgroups_path
from agent.sensors.pods.pod_join import RunningContainer, RuntimeContainers
from api.interfaces import Unavailable
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import GrpcClient, MethodNotOffered

MAX_STATUS_REQUESTS = 128
"""Containers whose cgroups are requested in one poll; the others follow in the next."""
MAX_CONCURRENT_REQUESTS = 8
MAX_INFO_CHARS = 4 << 20
MAX_INFO_CHARS_PER_POLL = 16 << 20
"""Maximum characters of OCI specifications that one poll decodes. They contain the environment, whose size the pod's owner
chooses."""
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class _Linux(msgspec.Struct, frozen=True, rename="camel"):
    cgroups_path: str = ""


class _OciSpec(msgspec.Struct, frozen=True):
    linux: _Linux = _Linux()


class _Info(msgspec.Struct, frozen=True, rename="camel"):
    runtime_spec: _OciSpec | None = None


_INFO = msgspec.json.Decoder(_Info)


class ContainerRuntimeClient:
    """Client of one runtime's socket, used in one event loop."""

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self.socket = socket
        self._peer = GrpcClient(socket, _SERVICE, timeout_s)
        self._cgroups: dict[str, str] = {}
        self._info_chars = 0
        self.events_unavailable: Unavailable | None = None
        """Why the runtime offers no events, once that was tried."""

    async def list_running(self) -> RuntimeContainers:
        """Return the running containers, without a cgroup if it cannot be read. Raises Unavailable."""
        sandboxes, containers = await asyncio.gather(
            self._peer.call("ListPodSandbox", wire.ListPodSandboxRequest()),
            self._peer.call("ListContainers", wire.ListContainersRequest()),
        )
        listed = join_runtime_lists(sandboxes, containers)
        ids = {container.id for container in listed.running.values()}
        self._cgroups = {id_: path for id_, path in self._cgroups.items() if id_ in ids}
        new = sorted(ids - self._cgroups.keys())[:MAX_STATUS_REQUESTS]
        slots, self._info_chars = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS), 0
        await asyncio.gather(*(self._request_cgroup(id_, slots) for id_ in new))
        running = {
            key: msgspec.structs.replace(container, cgroup=self._cgroups.get(container.id, ""))
            for key, container in listed.running.items()
        }
        return msgspec.structs.replace(listed, running=running)

    async def events(self) -> AsyncIterator[str]:
        """Yield the id of each container that starts or ends, until the runtime closes the stream. Raises Unavailable."""
        try:
            async for event in self._peer.stream("GetContainerEvents", wire.GetEventsRequest()):
                yield event.container_id
        except MethodNotOffered as error:
            self.events_unavailable = Unavailable(error.reason, "set kubelet.events: false; it is polled anyway")
            raise

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._peer.close()

    async def _request_cgroup(self, container_id: str, slots: asyncio.Semaphore) -> None:
        request = wire.ContainerStatusRequest(container_id=container_id, verbose=True)
        async with slots:
            if self._info_chars >= MAX_INFO_CHARS_PER_POLL:
                return  # the next poll goes on with it
            try:
                answer = await self._peer.call("ContainerStatus", request)
            except Unavailable:
                return  # it may have ended; otherwise the next poll requests it again
        self._info_chars += sum(map(len, answer.info.values()))
        self._cgroups[container_id] = container_cgroup(answer)


def join_runtime_lists(sandboxes: Any, containers: Any) -> RuntimeContainers:
    """Join two answers. Pure. Containers without a pod or with an invalid name are left out."""
    pods = {box.id: box.metadata for box in sandboxes.items if all(map(is_valid_id, _pod_names(box.metadata)))}
    ready = frozenset(box.metadata.uid for box in sandboxes.items if box.id in pods and box.state == wire.SANDBOX_READY)
    running: dict[tuple[str, str], RunningContainer] = {}
    for container in containers.containers:
        pod = pods.get(container.pod_sandbox_id)
        if pod is None or container.state != wire.CONTAINER_RUNNING:
            continue
        if not is_valid_id(container.id) or not is_valid_id(container.metadata.name):
            continue
        key = (pod.uid, container.metadata.name)
        if (other := running.get(key)) is not None and other.created_at_ns >= container.created_at:
            continue
        running[key] = RunningContainer(
            pod_uid=pod.uid,
            pod=f"{pod.namespace}/{pod.name}",
            name=container.metadata.name,
            id=container.id,
            created_at_ns=container.created_at,
        )
    return RuntimeContainers(running=running, sandboxes=ready)


def _pod_names(metadata: Any) -> tuple[str, str, str]:
    return metadata.uid, metadata.namespace, metadata.name


def container_cgroup(answer: Any) -> str:
    """Return the cgroup in a verbose ContainerStatus; empty without a readable one. Pure."""
    for text in answer.info.values():
        if len(text) > MAX_INFO_CHARS:
            continue
        try:
            spec = _INFO.decode(text).runtime_spec
            if spec is not None and spec.linux.cgroups_path:
                return parse_cgroups_path(spec.linux.cgroups_path)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return ""
