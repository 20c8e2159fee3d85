"""Writes knobs of containers through the container runtime (CRI UpdateContainerResources).
The runtime re-applies its own values when a container is updated (in-place resize, `crictl update`); values
written through it survive this. A call takes about 30 ms, so each cycle has a time budget; beyond it, or while
the runtime does not answer, files are written directly.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agent.qrm.actuator.writer import KnobWriter
from agent.qrm.knobs.knob_files import CFS_PERIOD, CFS_QUOTA, MEMORY_LIMIT_FILE
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.interfaces import Unavailable
from api.knobs import Knob
from api.proto import cri_runtime_pb2 as wire
from common.grpc_unix import CallRefused, GrpcClient

log = logging.getLogger(__name__)
CYCLE_BUDGET_S = 1.0
CALL_TIMEOUT_S = 1.0
"""With a runtime that hangs, a cycle is longer by at most two seconds."""
RETRY_AFTER_S = 10.0
"""After a failure the runtime is not called for this time."""
NO_LIMIT = -1
"""Memory limit that means none; zero in any field means that the runtime leaves the value unchanged."""
_CONTAINER_ID = re.compile(r"/(?:cri-containerd-|crio-)?([0-9a-f]{64})(?:\.scope)?")
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


def update_request(cgroup: str, knob: Knob, texts: Mapping[str, str]) -> wire.UpdateContainerResourcesRequest | None:
    """Return the request for these texts of version 1's or version 2's files; None if the CRI has none. Pure."""
    container_id = _CONTAINER_ID.search(cgroup[cgroup.rfind("/") :])
    if container_id is None:
        return None
    plain = {file: text.strip() for file, text in texts.items()}
    resources = wire.LinuxContainerResources()
    if knob is Knob.CPUSET:
        resources.cpuset_cpus = plain.get("cpuset.cpus", "")
    elif knob is Knob.MEMS:
        resources.cpuset_mems = plain.get("cpuset.mems", "")
    elif knob is Knob.WEIGHT and plain.get("cpu.shares", "").isdecimal():
        resources.cpu_shares = int(plain["cpu.shares"])
    elif knob is Knob.QUOTA and plain.get(CFS_QUOTA, "").lstrip("-").isdecimal():
        resources.cpu_quota = int(plain[CFS_QUOTA])
        resources.cpu_period = int(plain.get(CFS_PERIOD, "0"))
    elif knob is Knob.QUOTA and "cpu.max" in plain:
        quota, _, period = plain["cpu.max"].partition(" ")
        resources.cpu_quota = -1 if quota == "max" else int(quota)
        resources.cpu_period = int(period or "0")
    elif knob is Knob.MEMORY_MAX and (text := plain.get(MEMORY_LIMIT_FILE) or plain.get("memory.max", "")).isdecimal():
        resources.memory_limit_in_bytes = int(text) if int(text) < 1 << 62 else NO_LIMIT
    elif knob is Knob.MEMORY_MAX and plain.get("memory.max") == "max":
        resources.memory_limit_in_bytes = NO_LIMIT
    if not resources.ByteSize():
        return None
    return wire.UpdateContainerResourcesRequest(container_id=container_id[1], linux=resources)


class CriKnobWriter(KnobWriter):
    """A KnobWriter that writes container knobs through their runtime, in calls from a thread of its own."""

    def __init__(self, hierarchy: Hierarchy, socket: Path) -> None:
        super().__init__(hierarchy)
        self.runtime_writes = self.runtime_failures = 0
        """Writes by the runtime, and calls that failed."""
        self._left_s, self._retry_at_s = CYCLE_BUDGET_S, 0.0
        self._missed: dict[int, wire.LinuxContainerResources] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cri-writes", daemon=True)
        self._thread.start()
        self._peer = asyncio.run_coroutine_threadsafe(_open_peer(socket), self._loop).result()

    @contextmanager
    def one_cycle(self) -> Iterator[None]:
        """As in KnobWriter; also renews the time budget of the runtime."""
        self._left_s = CYCLE_BUDGET_S
        with super().one_cycle():
            yield

    def write_raw(
        self,
        cgroup: str,
        cgroup_id: int,
        knob: Knob,
        texts: Mapping[str, str],
        current: Mapping[str, str] | None = None,
    ) -> frozenset[str]:
        """As in KnobWriter. Files that the runtime has written to the requested texts are not written again."""
        request = update_request(cgroup, knob, texts)
        if request is not None and self.alive(cgroup, cgroup_id):
            written = self._call_runtime(cgroup, cgroup_id, request)
            if written is not None:
                current = None  # even after a refusal the runtime may have written some of the files
            held = self.read_with_context(cgroup, cgroup_id, knob).raw.texts if written else {}
            if written and all(held.get(file, "").strip() == text.strip() for file, text in texts.items()):
                return frozenset(held)
        return super().write_raw(cgroup, cgroup_id, knob, texts, current)

    def alive(self, cgroup: str, cgroup_id: int) -> bool:
        """As in KnobWriter; drops pending requests of a removed cgroup."""
        lives = super().alive(cgroup, cgroup_id)
        if not lives:
            self._missed.pop(cgroup_id, None)
        return lives

    def close(self) -> None:
        """As in KnobWriter; also stops the thread. Idempotent."""
        super().close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._peer.close(), self._loop).result(CALL_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
            self._loop.close()

    def _call_runtime(self, cgroup: str, cgroup_id: int, request: wire.UpdateContainerResourcesRequest) -> bool | None:
        """Return whether the runtime has written the request; None if it was not called. The request includes those
        that the runtime missed: it writes all values it knows of, and would overwrite the agent's value with an
        earlier one."""
        start_s, resources = time.monotonic(), self._missed.pop(cgroup_id, wire.LinuxContainerResources())
        resources.MergeFrom(request.linux)
        request.linux.CopyFrom(resources)
        if self._left_s <= 0 or start_s < self._retry_at_s:
            self._missed[cgroup_id] = resources
            return None
        call = asyncio.run_coroutine_threadsafe(self._peer.call("UpdateContainerResources", request), self._loop)
        try:
            call.result()  # the call has a deadline of its own
            self.runtime_writes += 1
            return True
        except Unavailable as error:
            self.runtime_failures += 1
            self._missed[cgroup_id] = resources
            if not isinstance(error, CallRefused):  # a refusal concerns this container alone
                self._retry_at_s = start_s + RETRY_AFTER_S
            log.warning("%s: files are written instead: %s: %s", cgroup, error.reason, error.remedy)
            return False
        finally:
            self._left_s -= time.monotonic() - start_s


async def _open_peer(socket: Path) -> GrpcClient:
    return GrpcClient(socket, _SERVICE, CALL_TIMEOUT_S)
