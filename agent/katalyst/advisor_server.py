"""Serves CPU and memory advice at the sockets where a stock QRM plugin expects its advisor.
Each answer is computed from the latest cycle. A plugin reports its allocations in its request; later cycles use
them. Older plugins without GetAdvice get a stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from agent.katalyst import cpu_advice_codec, memory_advice_codec
from agent.katalyst.cpu_advice_codec import CpuAdviceInputs
from agent.katalyst.cpu_plugin_state import decode_plugin_state, request_from_checkpoint
from agent.katalyst.messages import MAX_ENTRIES, SUPPORTS_GET_ADVICE, UnusableMessage
from agent.katalyst.plugin_registration import SocketServices
from agent.qrm.cpuset.state import CpusetState, with_numa_bindings
from api.decision import Advice, Cycle
from api.interfaces import Unavailable
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.units import NS_PER_S
from common.grpc_unix import GrpcClient, GrpcHandler, GrpcService, HandlerRefusal

log = logging.getLogger(__name__)
QRM_ADVISOR_DIR = Path("/var/lib/katalyst/qrm_advisor")
CPU_ADVISOR_SOCKET, CPU_PLUGIN_SOCKET, MEMORY_ADVISOR_SOCKET, MEMORY_PLUGIN_SOCKET = (
    "cpu_advisor.sock", "cpu_plugin.sock", "memory_advisor.sock", "memory_plugin.sock"
)  # fmt: skip
STREAM_PERIOD_S = 5.0
"""Interval of the stream, as in Katalyst."""
MAX_CYCLE_AGE_S = 30.0
"""Maximum age of a cycle; without a newer one the plugin keeps its allocation."""
PLUGIN_TIMEOUT_S = 60.0
"""Time after the last request when a plugin counts as gone."""
UNLISTED_GRACE_S = 60.0
"""Time for which an added container is retained while no cycle lists its pod."""


class AdvisorServer:
    """Sink of cycles that answers from the latest one. `now_ns` is CLOCK_MONOTONIC."""

    def __init__(
        self,
        reclaim_root: str = "/kubepods/besteffort",
        directory: Path = QRM_ADVISOR_DIR,
        period_s: float = STREAM_PERIOD_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._root, self._directory, self._period_s, self._now_ns = reclaim_root, directory, period_s, now_ns
        self._cycle: Cycle | None = None
        self._cpus: CpusetState | None = None
        self._containers: dict[str, dict[tuple[str, str], Any]] = {"cpu": {}, "memory": {}}
        self._unlisted_ns: dict[str, int] = {}
        """Pods of added containers that are not listed, with the time since when."""
        self._streaming: set[str] = set()
        self.answered: Counter[str] = Counter()
        """Number of answers by `cpu` and `memory`."""
        self.problem: Unavailable | None = None
        """Why the last request was refused; None after an answer."""
        self.requested_ns: dict[str, int] = {}
        """Time of the last request by `cpu` and `memory`."""
        self.answered_ns: dict[str, int] = {}
        """Time of the last answer by `cpu` and `memory`."""

    def publish(self, cycle: Cycle) -> None:
        """Take a cycle, and drop added containers of pods that are gone without a RemovePod call."""
        self._cycle = cycle
        if not cycle.snapshot.pods_fresh:
            return
        now = self._now_ns()
        added = {uid for containers in self._containers.values() for uid, _name in containers}
        unlisted = added - {pod.uid for pod in cycle.snapshot.pods}
        self._unlisted_ns = {uid: self._unlisted_ns.get(uid, now) for uid in unlisted}
        removed = {uid for uid, since in self._unlisted_ns.items() if now - since > UNLISTED_GRACE_S * NS_PER_S}
        for kind in self._containers if removed else ():
            self._remove_pods(kind, removed)

    @property
    def cpus(self) -> CpusetState | None:
        """CPU allocations of the plugin's last request; None after PLUGIN_TIMEOUT_S without one."""
        requested_ns = self.requested_ns.get("cpu")
        return (
            None if requested_ns is None or self._now_ns() - requested_ns > PLUGIN_TIMEOUT_S * NS_PER_S else self._cpus
        )

    def cpu_service(self) -> GrpcService:
        """Return `cpuadvisor.CPUAdvisor`."""
        return GrpcService(
            cpu.DESCRIPTOR.services_by_name["CPUAdvisor"], self._handlers("cpu", self._advise_cpu, self._push_cpu)
        )

    def memory_service(self) -> GrpcService:
        """Return `advisorsvc.AdvisorService`, the memory advisor."""
        handlers = self._handlers("memory", self._advise_memory, self._push_memory)
        return GrpcService(svc.DESCRIPTOR.services_by_name["AdvisorService"], handlers)

    def sockets(self) -> SocketServices:
        """Return both services with the paths of their sockets."""
        return {
            self._directory / CPU_ADVISOR_SOCKET: (self.cpu_service(),),
            self._directory / MEMORY_ADVISOR_SOCKET: (self.memory_service(),),
        }

    def _handlers(self, kind: str, advise: Callable[[Any], Any], push: Callable[[], Any]) -> Mapping[str, GrpcHandler]:
        async def add(request: Any, metadata: Mapping[str, str]) -> Any:
            if not _supports_get_advice(metadata):
                if len(self._containers[kind]) >= MAX_ENTRIES:
                    raise HandlerRefusal(
                        f"{MAX_ENTRIES} containers were added and none removed; remove containers of deleted pods"
                    )
                self._containers[kind][request.pod_uid, request.container_name] = request
            return svc.AddContainerResponse()

        async def remove(request: Any, metadata: Mapping[str, str]) -> Any:
            if not _supports_get_advice(metadata):
                self._remove_pods(kind, {request.pod_uid})
            return svc.RemovePodResponse()

        async def get(request: Any, _metadata: Mapping[str, str]) -> Any:
            return self._answer(kind, advise, request)

        async def watch(_request: Any, _metadata: Mapping[str, str]) -> AsyncIterator[Any]:
            if kind in self._streaming:
                raise HandlerRefusal(f"another stream of {kind} advice is open; close it first")
            self._streaming.add(kind)
            try:
                while True:
                    await asyncio.sleep(self._period_s)
                    try:
                        yield await push()
                    except (HandlerRefusal, Unavailable) as error:
                        # The plugin keeps its allocation until the next message.
                        log.warning("no %s advice was sent: %s", kind, error)
            finally:
                self._streaming.discard(kind)

        return {"AddContainer": add, "RemovePod": remove, "GetAdvice": get, "ListAndWatch": watch}

    def _answer(self, kind: str, advise: Callable[[Any], Any], request: Any) -> Any:
        self.requested_ns[kind] = self._now_ns()
        try:
            answer = advise(request)
        except (UnusableMessage, HandlerRefusal) as error:
            self.problem = Unavailable(
                f"{kind} advice: {error}", "check the plugin's log, and that both list the same pods"
            )
            raise HandlerRefusal(str(error)) from None
        self.problem = None
        self.answered[kind] += 1
        self.answered_ns[kind] = self._now_ns()
        return answer

    def _remove_pods(self, kind: str, uids: Collection[str]) -> None:
        self._containers[kind] = {
            key: metadata for key, metadata in self._containers[kind].items() if key[0] not in uids
        }

    def _advise_cpu(self, request: Any) -> Any:
        self._cpus = decode_plugin_state(request)
        cycle, advice = self._latest()
        snapshot = cycle.snapshot
        cpus = Counter(logical.numa for logical in snapshot.topology.cpus)
        inputs = CpuAdviceInputs(
            sizes=advice.cpu.sizes,
            pods=with_numa_bindings(snapshot.pods, self._cpus),
            cpus_by_numa=dict(sorted(cpus.items())),
            headroom=advice.reported_headroom or advice.headroom,
            reclaim_root=self._root,
        )
        return cpu_advice_codec.encode_cpu_advice(request, inputs)

    def _advise_memory(self, request: Any) -> Any:
        cycle, advice = self._latest()
        if cycle.memory is None:
            raise HandlerRefusal("memory is not evaluated; set --act to dry-run or on")
        headroom = advice.reported_headroom or advice.headroom
        return memory_advice_codec.encode_memory_advice(request, cycle.memory, cycle.snapshot.pods, headroom)

    async def _push_cpu(self) -> Any:
        client = GrpcClient(self._directory / CPU_PLUGIN_SOCKET, cpu.DESCRIPTOR.services_by_name["CPUPlugin"])
        try:
            checkpoint = await client.call("GetCheckpoint", cpu.GetCheckpointRequest())
        finally:
            await client.close()
        answer = self._answer("cpu", self._advise_cpu, request_from_checkpoint(checkpoint, self._containers["cpu"]))
        return cpu.ListAndWatchResponse(
            entries=answer.entries,
            allow_shared_cores_overlap_reclaimed_cores=answer.allow_shared_cores_overlap_reclaimed_cores,
            extra_entries=answer.extra_entries,
        )

    async def _push_memory(self) -> Any:
        request = svc.GetAdviceRequest()
        for (uid, name), metadata in self._containers["memory"].items():
            request.entries[uid].entries[name].CopyFrom(metadata)
        client = GrpcClient(self._directory / MEMORY_PLUGIN_SOCKET, svc.DESCRIPTOR.services_by_name["QRMService"])
        try:
            for metadata in (await client.call("ListContainers", svc.Empty())).containers:
                request.entries[metadata.pod_uid].entries[metadata.container_name].CopyFrom(metadata)
        except Unavailable as error:
            if not request.entries:
                raise
            log.info("using containers of AddContainer calls: %s", error)
        finally:
            await client.close()
        answer = self._answer("memory", self._advise_memory, request)
        return svc.ListAndWatchResponse(pod_entries=answer.pod_entries, extra_entries=answer.extra_entries)

    def _latest(self) -> tuple[Cycle, Advice]:
        cycle = self._cycle
        if cycle is None:
            raise HandlerRefusal("no cycle has finished yet; retry in a few seconds")
        age_s = (self._now_ns() - cycle.snapshot.taken_at_ns) / NS_PER_S
        if age_s > MAX_CYCLE_AGE_S:
            raise HandlerRefusal(f"the latest cycle is {age_s:.0f} s old; see the log of dioptase")
        if cycle.advice is None:
            raise HandlerRefusal("there is no advice; set --act to dry-run or on, and select a policy with pools")
        if not cycle.advice.cpu.sizes:
            raise HandlerRefusal(f"policy {cycle.advice.policy} has no pools; set advisor.policy: canonical")
        return cycle, cycle.advice


def _supports_get_advice(metadata: Mapping[str, str]) -> bool:
    return all(metadata.get(key) == value for key, value in SUPPORTS_GET_ADVICE.items())
