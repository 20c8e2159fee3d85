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
"""After the grace a runtime kills, and takes a while for it."""
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class CriEvictor:
    """As agent.eviction.api_evictor.EvictionMethod says. To be used in a running event loop."""

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._socket, self._timeout_s = socket, timeout_s
        self._meant: dict[str, Mapping[str, str]] = {}
        """By the pod's uid, of tries that failed: the containers that ran then. Those that came since are others, and stay."""

    async def ask(self, pod: Pod, grace_s: float | None) -> MethodResponse:
        """Stop all containers of the pod that run, at the same time."""
        # One that is waited for takes one of few turns, whoever asked for hours.
        seconds = max(MIN_GRACE_S, math.ceil(min(grace_period_s(pod, grace_s), MAX_GRACE_S)))
        try:
            looked = await self._look()
            running = {name: one.id for (uid, name), one in looked.running.items() if uid == pod.uid}
            meant = self._meant.setdefault(pod.uid, running)
            ids = [id_ for id_ in meant.values() if id_ in running.values()]
            done = await asyncio.gather(*(self._stop(id_, seconds) for id_ in ids), return_exceptions=True)
            for failure in done:
                if failure is not None:
                    raise failure
        except MethodNotOffered as error:
            return MethodResponse(
                result=MethodResult.HELD, held=EvictionBlock.REFUSED, text=error.reason, wait_s=REFUSED_RETRY_S
            )
        except Unavailable as error:
            # Whoever refuses is just starting or removing that container.
            held = EvictionBlock.BUSY if isinstance(error, CallRefused) else EvictionBlock.UNREACHABLE
            return MethodResponse(result=MethodResult.HELD, held=held, text=error.reason)
        self.forget(pod)
        if pod.uid not in looked.sandboxes:
            return MethodResponse(result=MethodResult.GONE)
        return MethodResponse(
            result=MethodResult.DONE, text=f"Successfully kill container {', '.join(sorted(meant)) or '(none ran)'}"
        )

    def forget(self, pod: Pod) -> None:
        """As Way says: for the next wish all that runs then is meant."""
        self._meant.pop(pod.uid, None)

    async def look(self, pod: Pod) -> PodObservation | None:
        """Only whether the pod is there: nobody is told to end here."""
        try:
            return PodObservation(gone=pod.uid not in (await self._look()).sandboxes)
        except Unavailable:
            return None

    async def _look(self) -> RuntimeContainers:
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
