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
"""So that a round with a runtime that hangs is longer by two seconds at the most."""
RETRY_AFTER_S = 10.0
"""After a failure the runtime is left alone for so long."""
NO_LIMIT = -1
"""Of a memory limit; a zero anywhere says that the runtime is to leave what there is."""
_CONTAINER_ID = re.compile(r"/(?:cri-containerd-|crio-)?([0-9a-f]{64})(?:\.scope)?")
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


def update_request(cgroup: str, knob: Knob, texts: Mapping[str, str]) -> wire.UpdateContainerResourcesRequest | None:
    """The runtime's word for these texts of version 1's files or version 2's; None where it has none. Pure."""
    found = _CONTAINER_ID.search(cgroup[cgroup.rfind("/") :])
    if found is None:
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
    return wire.UpdateContainerResourcesRequest(container_id=found[1], linux=resources)


class CriKnobWriter(KnobWriter):
    """The same files; containers' are written by their runtime. Calls are made in a thread of its own, and waited for."""

    def __init__(self, hierarchy: Hierarchy, socket: Path) -> None:
        super().__init__(hierarchy)
        self.told = self.refused = 0
        """Writes by the runtime so far, and those that it did not do."""
        self._left_s, self._silent_until = CYCLE_BUDGET_S, 0.0
        self._missed: dict[int, wire.LinuxContainerResources] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cri-writes", daemon=True)
        self._thread.start()
        self._peer = asyncio.run_coroutine_threadsafe(_open_peer(socket), self._loop).result()

    @contextmanager
    def one_cycle(self) -> Iterator[None]:
        """As for files; and what of its time the runtime may use anew."""
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
        """As for files. Those that the runtime writes are not written again if they hold what they are to hold by then."""
        request = update_request(cgroup, knob, texts)
        if request is not None and self.alive(cgroup, cgroup_id):
            told = self._tell(cgroup, cgroup_id, request)
            if told is not None:
                current = None  # whether it says yes or no: it may have written more than it was asked for
            held = self.look(cgroup, cgroup_id, knob).raw.texts if told else {}
            if told and all(held.get(file, "").strip() == text.strip() for file, text in texts.items()):
                return frozenset(held)
        return super().write_raw(cgroup, cgroup_id, knob, texts, current)

    def alive(self, cgroup: str, cgroup_id: int) -> bool:
        """As for files; what was kept for the runtime of one that is gone is forgotten."""
        lives = super().alive(cgroup, cgroup_id)
        if not lives:
            self._missed.pop(cgroup_id, None)
        return lives

    def close(self) -> None:
        """Idempotent."""
        super().close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._peer.close(), self._loop).result(CALL_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
            self._loop.close()

    def _tell(self, cgroup: str, cgroup_id: int, request: wire.UpdateContainerResourcesRequest) -> bool | None:
        """Whether the runtime has written it; None where it was not asked. With it goes what it missed of that container: it
        writes all that it believes, and an earlier value of the agent's would look like somebody else's."""
        began, missed = time.monotonic(), self._missed.pop(cgroup_id, wire.LinuxContainerResources())
        missed.MergeFrom(request.linux)
        request.linux.CopyFrom(missed)
        if self._left_s <= 0 or began < self._silent_until:
            self._missed[cgroup_id] = missed
            return None
        calling = asyncio.run_coroutine_threadsafe(self._peer.call("UpdateContainerResources", request), self._loop)
        try:
            calling.result()  # the call itself has a deadline
            self.told += 1
            return True
        except Unavailable as error:
            self.refused += 1
            self._missed[cgroup_id] = missed
            if not isinstance(error, CallRefused):  # it answers, and has a reason that concerns this container
                self._silent_until = began + RETRY_AFTER_S
            log.warning("%s: files are written instead: %s: %s", cgroup, error.reason, error.remedy)
            return False
        finally:
            self._left_s -= time.monotonic() - began


async def _open_peer(socket: Path) -> GrpcClient:
    return GrpcClient(socket, _SERVICE, CALL_TIMEOUT_S)
