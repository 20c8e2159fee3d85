"""The killer that has the container runtime stop a pod's containers (CRI StopContainer), and leaves the pod where it is.

The kubelet starts them again where it is to: for trouble that a new start ends, or for pods that are nobody's but this node's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

from agent.eviction.situation import MOST_GRACE_S, grace_of
from agent.eviction.ways import LEAST_GRACE_S, REFUSED_WAIT_S, Answer, Fate, Sight
from agent.rpc import NotOffered, Peer, Refused
from agent.sense.cri import joined
from agent.sense.running import Looked
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
        self._meant: dict[str, Mapping[str, str]] = {}
        """By the pod's uid, of tries that failed: the containers that ran then. Those that came since are others, and stay."""

    async def ask(self, pod: Pod, grace_s: float | None) -> Answer:
        """Stop all containers of the pod that run, at the same time."""
        # One that is waited for takes one of few turns, whoever asked for hours.
        seconds = max(LEAST_GRACE_S, math.ceil(min(grace_of(pod, grace_s), MOST_GRACE_S)))
        try:
            looked = await self._look()
            running = {name: one.id for (uid, name), one in looked.running.items() if uid == pod.uid}
            meant = self._meant.setdefault(pod.uid, running)
            ids = [id_ for id_ in meant.values() if id_ in running.values()]
            done = await asyncio.gather(*(self._stop(id_, seconds) for id_ in ids), return_exceptions=True)
            for failure in done:
                if failure is not None:
                    raise failure
        except NotOffered as error:
            return Answer(fate=Fate.HELD, held=Held.REFUSED, text=error.reason, wait_s=REFUSED_WAIT_S)
        except Unavailable as error:
            # Whoever refuses is just starting or removing that container.
            held = Held.BUSY if isinstance(error, Refused) else Held.UNREACHABLE
            return Answer(fate=Fate.HELD, held=held, text=error.reason)
        self.forget(pod)
        if pod.uid not in looked.sandboxes:
            return Answer(fate=Fate.GONE)
        return Answer(fate=Fate.DONE, text=f"Successfully kill container {', '.join(sorted(meant)) or '(none ran)'}")

    def forget(self, pod: Pod) -> None:
        """As Way says: for the next wish all that runs then is meant."""
        self._meant.pop(pod.uid, None)

    async def look(self, pod: Pod) -> Sight | None:
        """Only whether the pod is there: nobody is told to end here."""
        try:
            return Sight(gone=pod.uid not in (await self._look()).sandboxes)
        except Unavailable:
            return None

    async def _look(self) -> Looked:
        peer = Peer(self._socket, _SERVICE, self._timeout_s)
        try:
            sandboxes, containers = await asyncio.gather(
                peer.call("ListPodSandbox", wire.ListPodSandboxRequest()),
                peer.call("ListContainers", wire.ListContainersRequest()),
            )
        finally:
            await peer.close()
        return joined(sandboxes, containers)

    async def _stop(self, container_id: str, seconds: int) -> None:
        peer = Peer(self._socket, _SERVICE, seconds + SLACK_S)
        try:
            await peer.call("StopContainer", wire.StopContainerRequest(container_id=container_id, timeout=seconds))
        finally:
            await peer.close()
