"""Connects the cycle to Katalyst peers: reads their advice before it, and publishes its result after it.
It never blocks a cycle: the latest advice is in memory, and requests of peers are answered from the latest cycle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.advisor.engine import ExternalAdvice, PolicyState
from agent.advisor.policy_result import PolicyResult
from agent.config.config import AgentConfig
from agent.katalyst import cpu_advice_codec, cpu_plugin_state, memory_advice_codec
from agent.katalyst.admission import build_admission_inputs
from agent.katalyst.advisor_client import AdvisorClient, qrm_plugin_services
from agent.katalyst.advisor_server import (
    CPU_ADVISOR_SOCKET,
    CPU_PLUGIN_SOCKET,
    MEMORY_ADVISOR_SOCKET,
    MEMORY_PLUGIN_SOCKET,
    PLUGIN_TIMEOUT_S,
    AdvisorServer,
)
from agent.katalyst.messages import CPU, MEMORY
from agent.katalyst.plugin_registration import PluginEndpoint, PluginIdentity, PluginRegistration, SupervisedServers
from agent.katalyst.pod_resources import KUBELET_POD_RESOURCES, PodResourcesServer
from agent.katalyst.resource_plugin import OPTIONS, ResourcePluginServer
from agent.qrm.cpuset.state import CpusetState
from api.advice import MemoryAdvice
from api.decision import Advice
from api.interfaces import CycleSink, HealthReporter, Unavailable
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.snapshot import Snapshot
from api.units import NS_PER_S
from common.supervised_tasks import SupervisedTasks

_CPU_ADVISOR = cpu.DESCRIPTOR.services_by_name["CPUAdvisor"]
_MEMORY_ADVISOR = svc.DESCRIPTOR.services_by_name["AdvisorService"]


class ComponentStatus:
    """Reports the health of one component."""

    lost_events = None

    def __init__(self, name: str, form: str, problem: Callable[[], Unavailable | None]) -> None:
        self.name, self.form, self.problem = name, form, problem


class PeerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Latest evaluated cycle, from which requests of peers are answered."""

    snapshot: Snapshot
    advice: Advice | None
    cpus: CpusetState


class KatalystPeers:
    """Opens the sockets named in the settings. `start` begins serving; `before` and `after` surround each evaluation."""

    def __init__(
        self, config: AgentConfig, now_ns: Callable[[], int] = time.monotonic_ns, kubelet: Path = KUBELET_POD_RESOURCES
    ) -> None:
        self._config, self._now_ns, self._kubelet = config, now_ns, kubelet
        sockets = config.sockets
        self._advisor_dir, self._plugin_dir = Path(sockets.advisor_dir), Path(sockets.plugin_dir)
        self._latest: PeerInputs | None = None
        self._advisor: AdvisorServer | None = None
        self._plugin: ResourcePluginServer | None = None
        self._endpoints: tuple[PluginEndpoint, ...] = ()
        self._cpu: AdvisorClient[Advice] | None = None
        self._memory: AdvisorClient[MemoryAdvice] | None = None
        self._servers: dict[str, SupervisedServers] = {}
        self.sources: tuple[HealthReporter, ...] = ()
        self.sinks: tuple[CycleSink, ...] = ()
        self._serve(sockets.serve)
        self._take(sockets.take)

    def start(self, tasks: SupervisedTasks) -> None:
        """Begin serving and polling."""
        for endpoint in self._endpoints:
            tasks.begin(f"the plugin at {endpoint.path.name}", endpoint.run)
        for kind, client in self._clients().items():
            tasks.begin(f"polling {kind} advice", client.run)
        for name, servers in self._servers.items():
            tasks.begin(f"the sockets of {name}", servers.run)

    def before(self, state: PolicyState) -> tuple[PolicyState, ExternalAdvice]:
        """Return the state with the peers' CPU allocations, and their advice, for the next evaluation."""
        cpus = state.cpus
        if self._advisor is not None:
            cpus = self._advisor.cpus or cpus
        if self._plugin is not None:
            cpus = self._plugin.merge_into(cpus)
        if cpus is not state.cpus:
            state = msgspec.structs.replace(state, cpus=cpus)
        return state, ExternalAdvice(
            cpu=None if self._cpu is None else self._cpu.advice(),
            memory=None if self._memory is None else self._memory.advice(),
        )

    def after(self, snapshot: Snapshot, result: PolicyResult, state: PolicyState, config: AgentConfig) -> None:
        """Take the result of an evaluation."""
        self._latest = PeerInputs(snapshot=snapshot, advice=result.advice, cpus=state.cpus)
        if self._plugin is not None:
            sizes = () if result.advice is None else result.advice.cpu.sizes
            self._plugin.update(build_admission_inputs(snapshot, sizes, state.cpus, config.placing, state.allowed_cpus))

    def ages_s(self) -> Mapping[tuple[str, str], float]:
        """Return the age of the latest advice in seconds, by `given` or `taken` and resource. Any thread may call it."""
        now, ages = self._now_ns(), dict[tuple[str, str], float]()
        if self._advisor is not None:
            ages |= {("given", kind): (now - at) / NS_PER_S for kind, at in dict(self._advisor.answered_ns).items()}
        for kind, client in self._clients().items():
            if client.health.last_ns is not None:
                ages["taken", kind] = (now - client.health.last_ns) / NS_PER_S
        return ages

    def peers(self) -> Mapping[str, int]:
        """Return the number of active peers by role. Any thread may call it."""
        counts, now = Counter[str](), self._now_ns()
        if self._advisor is not None:
            times = dict(self._advisor.requested_ns).values()
            counts["qrm-plugin"] = sum(now - at <= PLUGIN_TIMEOUT_S * NS_PER_S for at in times)
        if clients := self._clients():
            counts["advisor"] = sum(client.health.trusted(now) for client in clients.values())
        if self._endpoints:
            counts["plugin-manager"] = sum(endpoint.is_registered for endpoint in self._endpoints)
        return counts

    def _clients(self) -> dict[str, AdvisorClient[Any]]:
        clients = {CPU: self._cpu, MEMORY: self._memory}
        return {kind: client for kind, client in clients.items() if client is not None}

    def _serve(self, names: tuple[str, ...]) -> None:
        sources = list[HealthReporter]()
        if "advisor" in names:
            advisor = AdvisorServer(self._config.memory.reclaim_root or "/kubepods/besteffort", self._advisor_dir)
            self._advisor, self.sinks = advisor, (advisor,)
            servers = self._servers["advisor"] = SupervisedServers(advisor.sockets())
            form = str(self._advisor_dir)
            sources.append(ComponentStatus("advisor-sockets", form, lambda: servers.problem or advisor.problem))
        if "resource-plugins" in names or "pod-resources" in names:
            self._plugin = ResourcePluginServer(self._config.qos)
        if self._plugin is not None and "resource-plugins" in names:
            for resource in (CPU, MEMORY):
                registration = PluginRegistration(PluginIdentity(kind="ResourcePlugin", name=resource))
                path = self._plugin_dir / f"dioptase_{resource}.sock"
                endpoint = PluginEndpoint(path, registration, self._plugin.services(resource), OPTIONS)
                self._endpoints += (endpoint,)
                sources.append(ComponentStatus(f"resource-plugin-{resource}", str(path), _endpoint_problem(endpoint)))
        if self._plugin is not None and "pod-resources" in names:
            lister = PodResourcesServer(self._plugin, self._kubelet)
            path = Path(self._config.sockets.pod_resources)
            lister_servers = self._servers["pod-resources"] = SupervisedServers({path: (lister.service(),)})
            sources.append(
                ComponentStatus("pod-resources", str(path), lambda: lister_servers.problem or lister.problem)
            )
        self.sources += tuple(sources)

    def _take(self, names: tuple[str, ...]) -> None:
        if CPU in names:
            path = self._advisor_dir / CPU_ADVISOR_SOCKET
            cpu_client = AdvisorClient(
                path, _CPU_ADVISOR, self._encode_cpu, self._decode_cpu, self._now_ns, self._config.sockets.trusted_uids
            )
            self._cpu = cpu_client
            self.sources += (ComponentStatus("remote-advisor-cpu", str(path), lambda: cpu_client.problem),)
        if MEMORY in names:
            path = self._advisor_dir / MEMORY_ADVISOR_SOCKET
            memory_client = AdvisorClient(
                path,
                _MEMORY_ADVISOR,
                self._encode_memory,
                self._decode_memory,
                self._now_ns,
                self._config.sockets.trusted_uids,
            )
            self._memory = memory_client
            self.sources += (ComponentStatus("remote-advisor-memory", str(path), lambda: memory_client.problem),)
        if names:
            cpus, memory = qrm_plugin_services(
                self._encode_checkpoint, lambda: self._encode_memory() or svc.GetAdviceRequest()
            )
            sockets = {CPU_PLUGIN_SOCKET: (cpus,), MEMORY_PLUGIN_SOCKET: (memory,)}
            servers = SupervisedServers({self._advisor_dir / name: services for name, services in sockets.items()})
            self._servers["qrm"] = servers
            self.sources += (ComponentStatus("plugin-sockets", str(self._advisor_dir), lambda: servers.problem),)

    def _encode_checkpoint(self) -> Any:
        return cpu_plugin_state.encode_checkpoint(CpusetState() if self._latest is None else self._latest.cpus)

    def _encode_cpu(self) -> Any:
        latest = self._latest
        return None if latest is None else cpu_plugin_state.encode_cpu_request(latest.cpus, latest.snapshot.pods)

    def _decode_cpu(self, answer: Any) -> Advice:
        latest = self._latest
        assert latest is not None, "requests are sent only after a cycle"
        cpus_by_numa = Counter(logical.numa for logical in latest.snapshot.topology.cpus)
        before = None if latest.advice is None else latest.advice.reclaimable_cores
        return cpu_advice_codec.decode_cpu_advice(answer, latest.snapshot.pods, cpus_by_numa, before)

    def _encode_memory(self) -> Any:
        latest = self._latest
        return None if latest is None else memory_advice_codec.encode_memory_request(latest.snapshot.pods, latest.cpus)

    def _decode_memory(self, answer: Any) -> MemoryAdvice:
        latest = self._latest
        assert latest is not None, "requests are sent only after a cycle"
        return memory_advice_codec.decode_memory_advice(
            answer, latest.snapshot.pods, memory_advice_codec.reclaimable_bytes_by_cgroup(latest.snapshot)
        )


def _endpoint_problem(endpoint: PluginEndpoint) -> Callable[[], Unavailable | None]:
    def problem() -> Unavailable | None:
        registration = endpoint.registration
        if endpoint.problem is None and registration.registered is False:
            remedy = "see the log of the process that watches its directory"
            return Unavailable(f"{endpoint.path} was not registered: {registration.error}", remedy)
        return endpoint.problem

    return problem
