"""The killer that has the container runtime stop a pod's containers (CRI StopContainer), and leaves the pod where it is.

The kubelet starts them again where it is to: for trouble that a new start ends, or for pods that are nobody's but this node's.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from agent.eviction.situation import USUAL_GRACE_S
from agent.eviction.ways import LEAST_GRACE_S, REFUSED_WAIT_S, Answer, Fate, Sight
from agent.rpc import NotOffered, Peer, Refused
from agent.sense.cri import joined
from api.evictions import Held
from api.pods import Pod
from api.ports import Unavailable
from api.proto import cri_runtime_pb2 as wire

SLACK_S = 10.0
"""After the grace a runtime kills, and takes a while for it."""
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class ContainerWay:
    """As agent.eviction.ways.Way says. To be used in a running event loop."""

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._socket, self._timeout_s = socket, timeout_s

    async def ask(self, pod: Pod, grace_s: float | None) -> Answer:
        """Stop all containers of the pod that run, at the same time; a pod without any is gone as far as this goes."""
        seconds = max(LEAST_GRACE_S, math.ceil(USUAL_GRACE_S if grace_s is None else grace_s))
        try:
            ids = await self._running(pod)
            await asyncio.gather(*(self._stop(id_, seconds) for id_ in ids.values()))
        except Unavailable as error:
            refused = isinstance(error, Refused | NotOffered)
            held = Held.REFUSED if refused else Held.UNREACHABLE
            return Answer(fate=Fate.HELD, held=held, text=error.reason, wait_s=REFUSED_WAIT_S if refused else None)
        if not ids:
            return Answer(fate=Fate.GONE)
        return Answer(fate=Fate.DONE, text=f"Successfully kill container {', '.join(sorted(ids))}")

    async def look(self, pod: Pod) -> Sight | None:
        """Only whether anything of it runs: nobody is told to end here."""
        try:
            return Sight(gone=not await self._running(pod))
        except Unavailable:
            return None

    async def _running(self, pod: Pod) -> dict[str, str]:
        peer = Peer(self._socket, _SERVICE, self._timeout_s)
        try:
            sandboxes, containers = await asyncio.gather(
                peer.call("ListPodSandbox", wire.ListPodSandboxRequest()),
                peer.call("ListContainers", wire.ListContainersRequest()),
            )
        finally:
            await peer.close()
        running = joined(sandboxes, containers).running
        return {name: one.id for (uid, name), one in running.items() if uid == pod.uid}

    async def _stop(self, container_id: str, seconds: int) -> None:
        peer = Peer(self._socket, _SERVICE, seconds + SLACK_S)
        try:
            await peer.call("StopContainer", wire.StopContainerRequest(container_id=container_id, timeout=seconds))
        finally:
            await peer.close()
