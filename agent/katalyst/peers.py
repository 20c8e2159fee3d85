"""Connects the cycle to Katalyst peers: takes their advice before it, and publishes its result after it.
It never blocks a cycle: the latest advice is looked up, and requests of peers are answered from the latest cycle.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agent.advisor.engine import ExternalAdvice, PolicyState
from agent.config.config import AgentConfig
from agent.katalyst import cpu_advice_codec, cpu_plugin_state, memory_advice_codec
from agent.katalyst.admission import CPU, MEMORY, build_admission_inputs
from agent.katalyst.advisor_client import AdvisorClient, qrm_plugin_services
from agent.katalyst.advisor_server import (
    CPU_ADVISOR_SOCKET,
    CPU_PLUGIN_SOCKET,
    MEMORY_ADVISOR_SOCKET,
    MEMORY_PLUGIN_SOCKET,
    PLUGIN_TIMEOUT_S,
    AdvisorServer,
)
from agent.katalyst.plugin_registration import (
    CHECK_INTERVAL_S,
    PluginEndpoint,
    PluginIdentity,
    PluginRegistration,
    SupervisedServers,
)
from agent.katalyst.pod_resources import KUBELET_POD_RESOURCES, PodResourcesServer
from agent.katalyst.resource_plugin import OPTIONS, ResourcePluginServer
from agent.qrm.cpuset.state import CpusetState
from agent.qrm.decisions.compose import PolicyResult
from api.advice import MemoryAdvice
from api.decision import Advice
from api.interfaces import CycleSink, Probe, ProbeReading, Unavailable
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.snapshot import Snapshot
from common.grpc_unix import GrpcServer, serve_on_socket
from common.supervised_tasks import SupervisedTasks

NS_PER_S = 1_000_000_000
_CPU_ADVISOR = cpu.DESCRIPTOR.services_by_name["CPUAdvisor"]
_MEMORY_ADVISOR = svc.DESCRIPTOR.services_by_name["AdvisorService"]


class ComponentStatus:
    """How one of them fares: a Probe that counts nothing."""

    lost_events: int | None = None

    def __init__(self, name: str, form: str, problem: Callable[[], Unavailable | None]) -> None:
        self.name, self.form, self.problem = name, form, problem

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - a Probe's
        return ProbeReading()

    def close(self) -> None:
        pass


class PeerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What neighbours are told of: the latest round that was judged."""

    snapshot: Snapshot
    advice: Advice | None
    cpus: CpusetState


class KatalystPeers:
    """All that the settings name. `start` begins, `before` and `after` stand around the judgement of a round."""

    def __init__(
        self, config: AgentConfig, now_ns: Callable[[], int] = time.monotonic_ns, kubelet: Path = KUBELET_POD_RESOURCES
    ) -> None:
        self._config, self._now_ns, self._kubelet = config, now_ns, kubelet
        told = config.sockets
        self._folder, self._plugins = Path(told.advisor_dir), Path(told.plugin_dir)
        self._latest: PeerInputs | None = None
        self._desk: AdvisorServer | None = None
        self._plugin_desk: ResourcePluginServer | None = None
        self._presences: tuple[PluginEndpoint, ...] = ()
        self._cpu: AdvisorClient[Advice] | None = None
        self._memory: AdvisorClient[MemoryAdvice] | None = None
        self._kept: dict[str, SupervisedServers] = {}
        self.sources: tuple[Probe, ...] = ()
        self.sinks: tuple[CycleSink, ...] = ()
        self._serve(told.serve)
        self._take(told.take)

    def start(self, tending: SupervisedTasks) -> None:
        """Be there, and ask."""
        for presence in self._presences:
            tending.begin(f"the plugin at {presence.path.name}", presence.run)
        for kind, remote in ((CPU, self._cpu), (MEMORY, self._memory)):
            if remote is not None:
                tending.begin(f"asking for advice on {kind}", remote.run)
        for name, kept in self._kept.items():
            tending.begin(f"the sockets of {name}", partial(_supervise, kept))

    def before(self, known: PolicyState) -> tuple[PolicyState, ExternalAdvice]:
        """What the next round is to know, and whose advice it carries out."""
        cpus = known.cpus
        if self._desk is not None:
            cpus = self._desk.cpus or cpus
        if self._plugin_desk is not None:
            cpus = self._plugin_desk.merged(cpus)
        if cpus is not known.cpus:
            known = msgspec.structs.replace(known, cpus=cpus)
        return known, ExternalAdvice(
            cpu=None if self._cpu is None else self._cpu.advice(),
            memory=None if self._memory is None else self._memory.advice(),
        )

    def after(self, snapshot: Snapshot, judged: PolicyResult, known: PolicyState, config: AgentConfig) -> None:
        """Take what a round made of it."""
        self._latest = PeerInputs(snapshot=snapshot, advice=judged.advice, cpus=known.cpus)
        if self._plugin_desk is not None:
            sizes = () if judged.advice is None else judged.advice.cpu.sizes
            self._plugin_desk.look(build_admission_inputs(snapshot, sizes, known.cpus, config.placing, known.allowed_cpus))

    def ages_s(self) -> Mapping[tuple[str, str], float]:
        """How long ago advice was last given or taken, by `given` or `taken` and resource. Any thread may ask."""
        now, found = self._now_ns(), dict[tuple[str, str], float]()
        if self._desk is not None:
            found |= {("given", kind): (now - at) / NS_PER_S for kind, at in dict(self._desk.answered_ns).items()}
        for kind, remote in ((CPU, self._cpu), (MEMORY, self._memory)):
            if remote is not None and remote.health.last_ns is not None:
                found["taken", kind] = (now - remote.health.last_ns) / NS_PER_S
        return found

    def peers(self) -> Mapping[str, int]:
        """How many answer or ask, by what they are to us. Any thread may ask."""
        found, now = Counter[str](), self._now_ns()
        if self._desk is not None:
            found["qrm-plugin"] = sum(
                now - at <= PLUGIN_TIMEOUT_S * NS_PER_S for at in dict(self._desk.asked_ns).values()
            )
        if self._cpu is not None or self._memory is not None:
            remotes = (one for one in (self._cpu, self._memory) if one is not None)
            found["advisor"] = sum(one.health.trusted(now) for one in remotes)
        if self._presences:
            found["plugin-manager"] = sum(one.known for one in self._presences)
        return found

    def _serve(self, named: tuple[str, ...]) -> None:
        told, sources = self._config.sockets, list[Probe]()
        if "advisor" in named:
            desk = AdvisorServer(self._config.memory.reclaim_root or "/kubepods/besteffort", self._folder)
            self._desk, self.sinks = desk, (desk,)
            kept = self._kept["advisor"] = SupervisedServers(desk.start)
            sources.append(ComponentStatus("advisor-sockets", str(self._folder), lambda: kept.problem or desk.problem))
        if "resource-plugins" in named or "pod-resources" in named:
            self._plugin_desk = ResourcePluginServer(self._config.qos.dialect())
        if self._plugin_desk is not None and "resource-plugins" in named:
            for resource in (CPU, MEMORY):
                introduced = PluginRegistration(PluginIdentity(kind="ResourcePlugin", name=resource))
                path = self._plugins / f"dioptase_{resource}.sock"
                presence = PluginEndpoint(path, introduced, self._plugin_desk.services(resource), OPTIONS)
                self._presences += (presence,)
                sources.append(ComponentStatus(f"resource-plugin-{resource}", str(path), _endpoint_problem(presence)))
        if self._plugin_desk is not None and "pod-resources" in named:
            lister, path = PodResourcesServer(self._plugin_desk, self._kubelet), Path(told.pod_resources)

            async def start() -> tuple[GrpcServer, ...]:
                return (await serve_on_socket(path, (lister.service(),)),)

            listing = self._kept["pod-resources"] = SupervisedServers(start)
            sources.append(ComponentStatus("pod-resources", str(path), lambda: listing.problem or lister.problem))
        self.sources += tuple(sources)

    def _take(self, named: tuple[str, ...]) -> None:
        if CPU in named:
            asked, taken = self._ask_cpu, self._take_cpu
            self._cpu = AdvisorClient(self._folder / CPU_ADVISOR_SOCKET, _CPU_ADVISOR, asked, taken, self._now_ns)
            self.sources += (_advisor_status("remote-advisor-cpu", self._folder / CPU_ADVISOR_SOCKET, self._cpu),)
        if MEMORY in named:
            path = self._folder / MEMORY_ADVISOR_SOCKET
            self._memory = AdvisorClient(path, _MEMORY_ADVISOR, self._ask_memory, self._take_memory, self._now_ns)
            self.sources += (_advisor_status("remote-advisor-memory", path, self._memory),)
        if named:
            kept = self._kept["qrm"] = SupervisedServers(self._serve_qrm)
            self.sources += (ComponentStatus("plugin-sockets", str(self._folder), lambda: kept.problem),)

    async def _serve_qrm(self) -> tuple[GrpcServer, ...]:
        """What older advisors ask a QRM plugin."""
        cpus, memory = qrm_plugin_services(self._checkpoint, lambda: self._ask_memory() or svc.GetAdviceRequest())
        first = await serve_on_socket(self._folder / CPU_PLUGIN_SOCKET, (cpus,))
        try:
            return first, await serve_on_socket(self._folder / MEMORY_PLUGIN_SOCKET, (memory,))
        except Unavailable:
            await first.stop()
            raise

    def _checkpoint(self) -> Any:
        return cpu_plugin_state.encode_checkpoint(CpusetState() if self._latest is None else self._latest.cpus)

    def _ask_cpu(self) -> Any:
        latest = self._latest
        return None if latest is None else cpu_plugin_state.encode_cpu_request(latest.cpus, latest.snapshot.pods)

    def _take_cpu(self, answer: Any) -> Advice:
        latest = self._latest
        assert latest is not None, "nothing is asked before a round"
        numas = Counter(one.numa for one in latest.snapshot.topology.cpus)
        before = None if latest.advice is None else latest.advice.reclaimable_cores
        return cpu_advice_codec.decode_cpu_advice(answer, latest.snapshot.pods, numas, before)

    def _ask_memory(self) -> Any:
        latest = self._latest
        return None if latest is None else memory_advice_codec.encode_memory_request(latest.snapshot.pods, latest.cpus)

    def _take_memory(self, answer: Any) -> MemoryAdvice:
        latest = self._latest
        assert latest is not None, "nothing is asked before a round"
        return memory_advice_codec.decode_memory_advice(
            answer, latest.snapshot.pods, memory_advice_codec.reclaimable_bytes_by_cgroup(latest.snapshot)
        )


def _endpoint_problem(presence: PluginEndpoint) -> Callable[[], Unavailable | None]:
    def problem() -> Unavailable | None:
        told = presence.registration
        if presence.problem is None and told.registered is False:
            return Unavailable(
                f"{presence.path} was not taken: {told.error}", "see the log of whoever watches its directory"
            )
        return presence.problem

    return problem


def _advisor_status(name: str, path: Path, remote: AdvisorClient[Any]) -> Probe:
    return ComponentStatus(name, str(path), lambda: remote.problem)


async def _supervise(kept: SupervisedServers) -> None:
    try:
        while True:
            await kept.look()
            await asyncio.sleep(CHECK_INTERVAL_S)
    finally:
        await kept.close()
