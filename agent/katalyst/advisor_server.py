"""Serves CPU and memory advice at the sockets where a stock QRM plugin expects its advisor.
Each answer is made from the latest cycle. A plugin reports its allocations in its request; later cycles use them.
Older plugins without GetAdvice get a stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from agent.katalyst import cpu_advice_codec, memory_advice_codec
from agent.katalyst.cpu_advice_codec import CpuAdviceInputs
from agent.katalyst.cpu_plugin_state import decode_plugin_state, request_from_checkpoint
from agent.katalyst.messages import MAX_ENTRIES, SUPPORTS_GET_ADVICE, UnusableMessage
from agent.qrm.cpuset.state import CpusetState, with_numa_bindings
from api.decision import Advice, Cycle
from api.interfaces import Unavailable
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from common.grpc_unix import GrpcClient, GrpcHandler, GrpcServer, GrpcService, HandlerRefusal, serve_on_socket

log = logging.getLogger(__name__)
QRM_ADVISOR_DIR = Path("/var/lib/katalyst/qrm_advisor")
CPU_ADVISOR_SOCKET, CPU_PLUGIN_SOCKET, MEMORY_ADVISOR_SOCKET, MEMORY_PLUGIN_SOCKET = (
    "cpu_advisor.sock", "cpu_plugin.sock", "memory_advisor.sock", "memory_plugin.sock"
)  # fmt: skip
STREAM_PERIOD_S = 5.0
"""Between two answers of a stream, as Katalyst has it."""
MAX_CYCLE_AGE_S = 30.0
"""A round that is older says nothing of now: the plugin keeps what it has."""
PLUGIN_TIMEOUT_S = 60.0
"""A plugin that has not asked for so long is gone."""
NS_PER_S = 1_000_000_000


class AdvisorServer:
    """A sink of rounds, and the answers that are made of them. `now_ns` is CLOCK_MONOTONIC."""

    def __init__(
        self,
        reclaim_root: str = "/kubepods/besteffort",
        directory: Path = QRM_ADVISOR_DIR,
        period_s: float = STREAM_PERIOD_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._root, self._directory, self._period_s, self._now_ns = reclaim_root, directory, period_s, now_ns
        self._round: Cycle | None = None
        self._cpus: CpusetState | None = None
        self._containers: dict[str, dict[tuple[str, str], Any]] = {"cpu": {}, "memory": {}}
        self._streaming: set[str] = set()
        self.answered: Counter[str] = Counter()
        """Answers given, by `cpu` and `memory`."""
        self.problem: Unavailable | None = None
        """Why the last question was not answered; None where it was."""
        self.asked_ns: dict[str, int] = {}
        """When a plugin asked last, by `cpu` and `memory`,"""
        self.answered_ns: dict[str, int] = {}
        """and when it was last given advice."""

    def publish(self, finished: Cycle) -> None:
        """Take a round."""
        self._round = finished

    @property
    def cpus(self) -> CpusetState | None:
        """Who has which CPUs, as the plugin says it; None where it has said nothing for long."""
        asked_ns = self.asked_ns.get("cpu")
        return None if asked_ns is None or self._now_ns() - asked_ns > PLUGIN_TIMEOUT_S * NS_PER_S else self._cpus

    def cpu_service(self) -> GrpcService:
        """`cpuadvisor.CPUAdvisor`."""
        return GrpcService(
            cpu.DESCRIPTOR.services_by_name["CPUAdvisor"], self._handlers("cpu", self._advise_cpu, self._push_cpu)
        )

    def memory_service(self) -> GrpcService:
        """`advisorsvc.AdvisorService`, which is memory's."""
        handlers = self._handlers("memory", self._advise_memory, self._push_memory)
        return GrpcService(svc.DESCRIPTOR.services_by_name["AdvisorService"], handlers)

    async def start(self) -> tuple[GrpcServer, ...]:
        """Both services at their sockets. Raises Unavailable where one cannot be; the other is then stopped again."""
        first = await serve_on_socket(self._directory / CPU_ADVISOR_SOCKET, (self.cpu_service(),))
        try:
            return first, await serve_on_socket(self._directory / MEMORY_ADVISOR_SOCKET, (self.memory_service(),))
        except Unavailable:
            await first.stop()
            raise

    def _handlers(self, kind: str, advise: Callable[[Any], Any], push: Callable[[], Any]) -> Mapping[str, GrpcHandler]:
        async def add(request: Any, words: Mapping[str, str]) -> Any:
            if not _supports_get_advice(words):
                if len(self._containers[kind]) >= MAX_ENTRIES:
                    raise HandlerRefusal(
                        f"{MAX_ENTRIES} containers are known, and none is removed; remove pods that are gone"
                    )
                self._containers[kind][request.pod_uid, request.container_name] = request
            return svc.AddContainerResponse()

        async def remove(request: Any, words: Mapping[str, str]) -> Any:
            if not _supports_get_advice(words):
                known = self._containers[kind]
                self._containers[kind] = {key: one for key, one in known.items() if key[0] != request.pod_uid}
            return svc.RemovePodResponse()

        async def get(request: Any, _words: Mapping[str, str]) -> Any:
            return self._told(kind, advise, request)

        async def watch(_request: Any, _words: Mapping[str, str]) -> AsyncIterator[Any]:
            if kind in self._streaming:
                raise HandlerRefusal(f"another stream of {kind} advice is running; close that one")
            self._streaming.add(kind)
            try:
                while True:
                    await asyncio.sleep(self._period_s)
                    try:
                        yield await push()
                    except (HandlerRefusal, Unavailable) as error:
                        # The plugin keeps what it has, and is told again when there is something to tell.
                        log.warning("no %s advice is pushed: %s", kind, error)
            finally:
                self._streaming.discard(kind)

        return {"AddContainer": add, "RemovePod": remove, "GetAdvice": get, "ListAndWatch": watch}

    def _told(self, kind: str, advise: Callable[[Any], Any], request: Any) -> Any:
        self.asked_ns[kind] = self._now_ns()
        try:
            made = advise(request)
        except (UnusableMessage, HandlerRefusal) as error:
            self.problem = Unavailable(
                f"{kind} advice: {error}", "see what the plugin asked, and whether both know the same pods"
            )
            raise HandlerRefusal(str(error)) from None
        self.problem = None
        self.answered[kind] += 1
        self.answered_ns[kind] = self._now_ns()
        return made

    def _advise_cpu(self, request: Any) -> Any:
        self._cpus = decode_plugin_state(request)
        finished, advice = self._latest()
        snapshot = finished.snapshot
        cpus = Counter(one.numa for one in snapshot.topology.cpus)
        offer = CpuAdviceInputs(
            sizes=advice.cpu.sizes,
            pods=with_numa_bindings(snapshot.pods, self._cpus),
            cpus_by_numa=dict(sorted(cpus.items())),
            headroom=advice.reported_headroom or advice.headroom,
            reclaim_root=self._root,
        )
        return cpu_advice_codec.encode_cpu_advice(request, offer)

    def _advise_memory(self, request: Any) -> Any:
        finished, advice = self._latest()
        if finished.memory is None:
            raise HandlerRefusal("memory is not judged; switch act to dry-run or on")
        headroom = advice.reported_headroom or advice.headroom
        return memory_advice_codec.encode_memory_advice(request, finished.memory, finished.snapshot.pods, headroom)

    async def _push_cpu(self) -> Any:
        peer = GrpcClient(self._directory / CPU_PLUGIN_SOCKET, cpu.DESCRIPTOR.services_by_name["CPUPlugin"])
        try:
            checkpoint = await peer.call("GetCheckpoint", cpu.GetCheckpointRequest())
        finally:
            await peer.close()
        made = self._told("cpu", self._advise_cpu, request_from_checkpoint(checkpoint, self._containers["cpu"]))
        return cpu.ListAndWatchResponse(
            entries=made.entries,
            allow_shared_cores_overlap_reclaimed_cores=made.allow_shared_cores_overlap_reclaimed_cores,
            extra_entries=made.extra_entries,
        )

    async def _push_memory(self) -> Any:
        request = svc.GetAdviceRequest()
        for (uid, name), one in self._containers["memory"].items():
            request.entries[uid].entries[name].CopyFrom(one)
        peer = GrpcClient(self._directory / MEMORY_PLUGIN_SOCKET, svc.DESCRIPTOR.services_by_name["QRMService"])
        try:
            for one in (await peer.call("ListContainers", svc.Empty())).containers:
                request.entries[one.pod_uid].entries[one.container_name].CopyFrom(one)
        except Unavailable as error:
            if not request.entries:
                raise
            log.info("containers are those that were added: %s", error)
        finally:
            await peer.close()
        made = self._told("memory", self._advise_memory, request)
        return svc.ListAndWatchResponse(pod_entries=made.pod_entries, extra_entries=made.extra_entries)

    def _latest(self) -> tuple[Cycle, Advice]:
        finished = self._round
        if finished is None:
            raise HandlerRefusal("no round is finished yet; ask again in a moment")
        age_s = (self._now_ns() - finished.snapshot.taken_at_ns) / NS_PER_S
        if age_s > MAX_CYCLE_AGE_S:
            raise HandlerRefusal(f"the latest round is {age_s:.0f} s old; see the log of dioptase")
        if finished.advice is None:
            raise HandlerRefusal("nothing is judged; switch act to dry-run or on, and choose a policy that sizes pools")
        if not finished.advice.cpu.sizes:
            raise HandlerRefusal(f"policy {finished.advice.policy} sizes no pools yet; with policy canonical it does")
        return finished, finished.advice


def _supports_get_advice(words: Mapping[str, str]) -> bool:
    return all(words.get(key) == value for key, value in SUPPORTS_GET_ADVICE.items())
