"""Measures the writable layers of each pod through the container runtime (CRI ListContainerStats).
The runtime is polled only while an eviction plugin needs the numbers, because it reads the cgroup of every
container for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.eviction.eviction_inputs import RootfsUse
from api.interfaces import Unavailable
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import GrpcClient

POLL_INTERVAL_S = 10.0
MAX_AGE_S = 60.0
"""An older response is not used."""
POD_UID_LABEL = "io.kubernetes.pod.uid"
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class WritableLayers:
    """Reports its health. `is_needed` returns whether a plugin needs the numbers."""

    name, form = "writable-layers", "cri"
    lost_events = None

    def __init__(
        self,
        socket: Path,
        timeout_s: float,
        is_needed: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._timeout_s, self._is_needed, self._clock = socket, timeout_s, is_needed, clock
        self._use: Mapping[str, RootfsUse] = {}
        self._at_s: float | None = None
        self._problem: Unavailable | None = None

    def problem(self) -> Unavailable | None:
        """Return why the numbers are not available; None if they are, or are not needed."""
        return self._problem if self._is_needed() else None

    def use(self) -> Mapping[str, RootfsUse]:
        """Return the use by the pods' uids; empty without a recent response. Never waits. Any thread may call it."""
        fresh = self._at_s is not None and self._clock() - self._at_s <= MAX_AGE_S
        return self._use if fresh else {}

    async def run(self) -> None:
        """Poll the runtime until cancelled."""
        while True:
            if self._is_needed():
                await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self) -> None:
        """Poll the runtime once. Never raises for an error of the runtime."""
        client = GrpcClient(self._socket, _SERVICE, self._timeout_s)
        try:
            response = await client.call("ListContainerStats", wire.ListContainerStatsRequest())
        except Unavailable as error:
            self._problem = error
        else:
            self._use, self._at_s, self._problem = usage_by_pod(response), self._clock(), None
        finally:
            await client.close()


def usage_by_pod(response: Any) -> dict[str, RootfsUse]:
    """Return the sums over the containers of each pod, by its uid. Pure. A layer without a measurement counts 0."""
    usage: dict[str, RootfsUse] = {}
    for each in response.stats:
        uid, layer = each.attributes.labels.get(POD_UID_LABEL, ""), each.writable_layer
        if uid and layer.timestamp > 0:
            before = usage.get(uid, RootfsUse(used_bytes=0, inodes=0))
            usage[uid] = RootfsUse(
                used_bytes=before.used_bytes + layer.used_bytes.value, inodes=before.inodes + layer.inodes_used.value
            )
    return usage
