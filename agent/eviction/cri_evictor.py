"""Evicts by stopping the containers of a pod through the container runtime; the pod object remains.
The call is CRI StopContainer. The kubelet restarts the containers according to the pod's restart policy. It must
be used in a running event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

from agent.eviction.api_evictor import MIN_GRACE_S, REFUSED_RETRY_S, MethodResponse, MethodResult, PodObservation
from agent.eviction.eviction_inputs import MAX_GRACE_S, grace_period_s
from agent.sensors.pods.cri_client import join_runtime_lists
from agent.sensors.pods.pod_join import RuntimeContainers
from api.eviction import EvictionBlock
from api.interfaces import Unavailable
from api.pod import Pod
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import CallRefused, GrpcClient, MethodNotOffered

KILL_SLACK_S = 10.0
"""Added to the grace as deadline of the call: the runtime sends SIGKILL after the grace and waits for the exit."""
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class CriEvictor:
    """An EvictionMethod (agent.eviction.api_evictor) that stops the containers of a pod. Used on a running event loop."""

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._socket, self._timeout_s = socket, timeout_s
        self._targets: dict[str, Mapping[str, str]] = {}
        """Container ids by name, by the pod's uid, of requests that failed. Containers that started later are not stopped."""

    async def evict(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        """Stop all running containers of the pod at the same time, as EvictionMethod says."""
        # A pod occupies one of MAX_CONCURRENT_REQUESTS while it stops, so a grace of hours is cut.
        seconds = max(MIN_GRACE_S, math.ceil(min(grace_period_s(pod, grace_s), MAX_GRACE_S)))
        try:
            runtime = await self._list_containers()
            running = {name: container.id for (uid, name), container in runtime.running.items() if uid == pod.uid}
            targets = self._targets.setdefault(pod.uid, running)
            ids = [id_ for id_ in targets.values() if id_ in running.values()]
            results = await asyncio.gather(*(self._stop(id_, seconds) for id_ in ids), return_exceptions=True)
            for failure in results:
                if failure is not None:
                    raise failure
        except MethodNotOffered as error:
            return MethodResponse(
                result=MethodResult.BLOCKED, block=EvictionBlock.REFUSED, text=error.reason, wait_s=REFUSED_RETRY_S
            )
        except Unavailable as error:
            # A runtime refuses while it starts or removes that container.
            block = EvictionBlock.BUSY if isinstance(error, CallRefused) else EvictionBlock.UNREACHABLE
            return MethodResponse(result=MethodResult.BLOCKED, block=block, text=error.reason)
        self.forget(pod)
        if pod.uid not in runtime.sandboxes:
            return MethodResponse(result=MethodResult.ABSENT)
        return MethodResponse(
            result=MethodResult.DONE, text=f"Successfully kill container {', '.join(sorted(targets)) or '(none ran)'}"
        )

    def forget(self, pod: Pod) -> None:
        """Drop the list of containers, as EvictionMethod says: the next request stops all that run then."""
        self._targets.pop(pod.uid, None)

    async def observe(self, pod: Pod) -> PodObservation | None:
        """Return whether the pod's sandbox exists; a pod is never terminating by this method."""
        try:
            return PodObservation(absent=pod.uid not in (await self._list_containers()).sandboxes)
        except Unavailable:
            return None

    async def _list_containers(self) -> RuntimeContainers:
        peer = GrpcClient(self._socket, _SERVICE, self._timeout_s)
        try:
            sandboxes, containers = await asyncio.gather(
                peer.call("ListPodSandbox", wire.ListPodSandboxRequest()),
                peer.call("ListContainers", wire.ListContainersRequest()),
            )
        finally:
            await peer.close()
        return join_runtime_lists(sandboxes, containers)

    async def _stop(self, container_id: str, seconds: int) -> None:
        peer = GrpcClient(self._socket, _SERVICE, seconds + KILL_SLACK_S)
        try:
            await peer.call("StopContainer", wire.StopContainerRequest(container_id=container_id, timeout=seconds))
        finally:
            await peer.close()
