"""Knobs of containers written by the container runtime itself (CRI UpdateContainerResources), as far as it has a word for them.

Whoever changes a container through the runtime later (the kubelet when it resizes a pod in place, `crictl update`) has the
runtime apply all that it believes the container to have: what was only written to files is then reset, and has to be found and
written again. What the runtime was told stays. It costs some 30 ms a call instead of 30 us, so that a round asks it for a
second at most: after that, and while it does not answer, files are written as ever.
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

from agent.hierarchy import Hierarchy
from agent.qrm.knobs import KnobFiles
from agent.qrm.places import CFS_PERIOD, CFS_QUOTA, LIMIT
from agent.rpc import Peer, Refused
from api.knobs import Knob
from api.ports import Unavailable
from api.proto import cri_runtime_pb2 as wire

log = logging.getLogger(__name__)
ROUND_S = 1.0
CALL_S = 1.0
"""So that a round with a runtime that hangs is longer by two seconds at the most."""
AGAIN_S = 10.0
"""After a failure the runtime is left alone for so long."""
NO_LIMIT = -1
"""Of a memory limit; a zero anywhere says that the runtime is to leave what there is."""
_ID = re.compile(r"/(?:cri-containerd-|crio-)?([0-9a-f]{64})(?:\.scope)?")
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


def spoken(cgroup: str, knob: Knob, texts: Mapping[str, str]) -> wire.UpdateContainerResourcesRequest | None:
    """The runtime's word for these texts of version 1's files or version 2's; None where it has none. Pure."""
    found = _ID.search(cgroup[cgroup.rfind("/") :])
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
    elif knob is Knob.MEMORY_MAX and (text := plain.get(LIMIT) or plain.get("memory.max", "")).isdecimal():
        resources.memory_limit_in_bytes = int(text) if int(text) < 1 << 62 else NO_LIMIT
    elif knob is Knob.MEMORY_MAX and plain.get("memory.max") == "max":
        resources.memory_limit_in_bytes = NO_LIMIT
    if not resources.ByteSize():
        return None
    return wire.UpdateContainerResourcesRequest(container_id=found[1], linux=resources)


class KnobsByRuntime(KnobFiles):
    """The same files; containers' are written by their runtime. Calls are made in a thread of its own, and waited for."""

    def __init__(self, hierarchy: Hierarchy, socket: Path) -> None:
        super().__init__(hierarchy)
        self.told = self.refused = 0
        """Writes by the runtime so far, and those that it did not do."""
        self._left_s, self._silent_until = ROUND_S, 0.0
        self._missed: dict[int, wire.LinuxContainerResources] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cri-writes", daemon=True)
        self._thread.start()
        self._peer = asyncio.run_coroutine_threadsafe(_peer(socket), self._loop).result()

    @contextmanager
    def one_round(self) -> Iterator[None]:
        """As for files; and what of its time the runtime may use anew."""
        self._left_s = ROUND_S
        with super().one_round():
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
        request = spoken(cgroup, knob, texts)
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
            asyncio.run_coroutine_threadsafe(self._peer.close(), self._loop).result(CALL_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_S)
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
            if not isinstance(error, Refused):  # it answers, and has a reason that concerns this container
                self._silent_until = began + AGAIN_S
            log.warning("%s: files are written instead: %s: %s", cgroup, error.reason, error.remedy)
            return False
        finally:
            self._left_s -= time.monotonic() - began


async def _peer(socket: Path) -> Peer:
    return Peer(socket, _SERVICE, CALL_S)
