"""Measures the writable layers of each pod through the container runtime (CRI ListContainerStats).
The runtime is asked only while an eviction plugin needs the numbers, because it reads the cgroup of every
container for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.eviction.eviction_inputs import RootfsUse
from api.decision import Cycle
from api.interfaces import ProbeReading, Unavailable
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import GrpcClient

POLL_INTERVAL_S = 10.0
MAX_AGE_S = 60.0
"""What was told longer ago says nothing of now."""
POD_UID_LABEL = "io.kubernetes.pod.uid"
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class WritableLayers:
    """A source of its own (api.interfaces.Probe). `wanted` says whether anybody wants to know."""

    name, form = "writable-layers", "cri"
    lost_events = None

    def __init__(
        self,
        socket: Path,
        timeout_s: float,
        wanted: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._timeout_s, self._wanted, self._clock = socket, timeout_s, wanted, clock
        self._use: Mapping[str, RootfsUse] = {}
        self._at_s: float | None = None
        self._trouble: Unavailable | None = None

    def publish(self, finished: Cycle) -> None:
        """Nothing: the runtime knows its containers."""

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why nobody knows; None where it is known, or nobody wants to."""
        return self._trouble if self._wanted() else None

    def close(self) -> None:
        """Nothing to give back: `run` is cancelled by who runs it."""

    def use(self) -> Mapping[str, RootfsUse]:
        """By the pods' uids; empty where it was not told lately. Never waits."""
        fresh = self._at_s is not None and self._clock() - self._at_s <= MAX_AGE_S
        return self._use if fresh else {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._wanted():
                await self.look()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def look(self) -> None:
        """Ask once. Never raises for what the runtime does."""
        peer = GrpcClient(self._socket, _SERVICE, self._timeout_s)
        try:
            answer = await peer.call("ListContainerStats", wire.ListContainerStatsRequest())
        except Unavailable as error:
            self._trouble = error
        else:
            self._use, self._at_s, self._trouble = usage_by_pod(answer), self._clock(), None
        finally:
            await peer.close()


def usage_by_pod(answer: Any) -> dict[str, RootfsUse]:
    """Sums over the containers of each pod, by its uid. Pure. A layer that nobody has looked at yet counts nothing."""
    found: dict[str, RootfsUse] = {}
    for each in answer.stats:
        uid, layer = each.attributes.labels.get(POD_UID_LABEL, ""), each.writable_layer
        if uid and layer.timestamp > 0:
            before = found.get(uid, RootfsUse(used_bytes=0, inodes=0))
            found[uid] = RootfsUse(
                used_bytes=before.used_bytes + layer.used_bytes.value, inodes=before.inodes + layer.inodes_used.value
            )
    return found
