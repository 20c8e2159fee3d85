"""Neighbours at sockets, as the loop and the exporters see them: what their advice is, what a round tells them, how they fare.

Loaded, and gRPC with it, only where the settings name one (`sockets`). Nothing here keeps a round waiting: what a neighbour
said last is looked up, and what he asks is answered between rounds, from the latest one.
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

from agent.config import Config
from agent.kept import Kept
from agent.policy import Judged, Remembered, Told
from agent.qrm.placing.state import CpuState
from agent.qrm.protocol import cpu_state, cpu_taken, memory_answer, memory_taken
from agent.qrm.protocol.admitting import situation_of
from agent.qrm.protocol.advisor_client import Remote, plugin_services
from agent.qrm.protocol.advisor_server import (
    CPU_ADVISOR,
    CPU_PLUGIN,
    GONE_S,
    MEMORY_ADVISOR,
    MEMORY_PLUGIN,
    AdvisorDesk,
)
from agent.qrm.protocol.asked import CPU, MEMORY
from agent.qrm.protocol.pod_resources import KUBELET
from agent.qrm.protocol.pod_resources_server import PodResourcesDesk
from agent.qrm.protocol.registration import CHECK_S, Card, Introduced, Presence
from agent.qrm.protocol.resource_plugin import OPTIONS, PluginDesk
from agent.rpc import Server, serve
from agent.tending import Tending
from api.decisions import Advice
from api.memory_advice import MemoryAdvice
from api.ports import Probe, Seen, Sink, Unavailable
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.samples import Snapshot

S = 1_000_000_000
_CPU_ADVISOR = cpu.DESCRIPTOR.services_by_name["CPUAdvisor"]
_MEMORY_ADVISOR = svc.DESCRIPTOR.services_by_name["AdvisorService"]


class Standing:
    """How one of them fares: a Probe that counts nothing."""

    lost_events: int | None = None

    def __init__(self, name: str, form: str, problem: Callable[[], Unavailable | None]) -> None:
        self.name, self.form, self.problem = name, form, problem

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - a Probe's
        return Seen()

    def close(self) -> None:
        pass


class Latest(msgspec.Struct, frozen=True, kw_only=True):
    """What neighbours are told of: the latest round that was judged."""

    snapshot: Snapshot
    advice: Advice | None
    cpus: CpuState


class Neighbours:
    """All that the settings name. `start` begins, `before` and `after` stand around the judgement of a round."""

    def __init__(self, config: Config, now_ns: Callable[[], int] = time.monotonic_ns, kubelet: Path = KUBELET) -> None:
        self._config, self._now_ns, self._kubelet = config, now_ns, kubelet
        told = config.sockets
        self._folder, self._plugins = Path(told.advisor_dir), Path(told.plugin_dir)
        self._latest: Latest | None = None
        self._desk: AdvisorDesk | None = None
        self._plugin_desk: PluginDesk | None = None
        self._presences: tuple[Presence, ...] = ()
        self._cpu: Remote[Advice] | None = None
        self._memory: Remote[MemoryAdvice] | None = None
        self._kept: dict[str, Kept] = {}
        self.sources: tuple[Probe, ...] = ()
        self.sinks: tuple[Sink, ...] = ()
        self._serve(told.serve)
        self._take(told.take)

    def start(self, tending: Tending) -> None:
        """Be there, and ask."""
        for presence in self._presences:
            tending.begin(f"the plugin at {presence.path.name}", presence.run)
        for kind, remote in ((CPU, self._cpu), (MEMORY, self._memory)):
            if remote is not None:
                tending.begin(f"asking for advice on {kind}", remote.run)
        for name, kept in self._kept.items():
            tending.begin(f"the sockets of {name}", partial(_keep, kept))

    def before(self, known: Remembered) -> tuple[Remembered, Told]:
        """What the next round is to know, and whose advice it carries out."""
        cpus = known.cpus
        if self._desk is not None:
            cpus = self._desk.cpus or cpus
        if self._plugin_desk is not None:
            cpus = self._plugin_desk.merged(cpus)
        if cpus is not known.cpus:
            known = msgspec.structs.replace(known, cpus=cpus)
        return known, Told(
            cpu=None if self._cpu is None else self._cpu.advice(),
            memory=None if self._memory is None else self._memory.advice(),
        )

    def after(self, snapshot: Snapshot, judged: Judged, known: Remembered, config: Config) -> None:
        """Take what a round made of it."""
        self._latest = Latest(snapshot=snapshot, advice=judged.advice, cpus=known.cpus)
        if self._plugin_desk is not None:
            sizes = () if judged.advice is None else judged.advice.cpu.sizes
            self._plugin_desk.look(situation_of(snapshot, sizes, known.cpus, config.placing, known.ceiling))

    def ages_s(self) -> Mapping[tuple[str, str], float]:
        """How long ago advice was last given or taken, by `given` or `taken` and resource. Any thread may ask."""
        now, found = self._now_ns(), dict[tuple[str, str], float]()
        if self._desk is not None:
            found |= {("given", kind): (now - at) / S for kind, at in dict(self._desk.answered_ns).items()}
        for kind, remote in ((CPU, self._cpu), (MEMORY, self._memory)):
            if remote is not None and remote.health.last_ns is not None:
                found["taken", kind] = (now - remote.health.last_ns) / S
        return found

    def peers(self) -> Mapping[str, int]:
        """How many answer or ask, by what they are to us. Any thread may ask."""
        found, now = Counter[str](), self._now_ns()
        if self._desk is not None:
            found["qrm-plugin"] = sum(now - at <= GONE_S * S for at in dict(self._desk.asked_ns).values())
        if self._cpu is not None or self._memory is not None:
            remotes = (one for one in (self._cpu, self._memory) if one is not None)
            found["advisor"] = sum(one.health.trusted(now) for one in remotes)
        if self._presences:
            found["plugin-manager"] = sum(one.known for one in self._presences)
        return found

    def _serve(self, named: tuple[str, ...]) -> None:
        told, sources = self._config.sockets, list[Probe]()
        if "advisor" in named:
            desk = AdvisorDesk(self._config.memory.reclaim_root or "/kubepods/besteffort", self._folder)
            self._desk, self.sinks = desk, (desk,)
            kept = self._kept["advisor"] = Kept(desk.start)
            sources.append(Standing("advisor-sockets", str(self._folder), lambda: kept.problem or desk.problem))
        if "resource-plugins" in named or "pod-resources" in named:
            self._plugin_desk = PluginDesk(self._config.qos.dialect())
        if self._plugin_desk is not None and "resource-plugins" in named:
            for resource in (CPU, MEMORY):
                introduced = Introduced(Card(kind="ResourcePlugin", name=resource))
                path = self._plugins / f"dioptase_{resource}.sock"
                presence = Presence(path, introduced, self._plugin_desk.services(resource), OPTIONS)
                self._presences += (presence,)
                sources.append(Standing(f"resource-plugin-{resource}", str(path), _presence_problem(presence)))
        if self._plugin_desk is not None and "pod-resources" in named:
            lister, path = PodResourcesDesk(self._plugin_desk, self._kubelet), Path(told.pod_resources)

            async def start() -> tuple[Server, ...]:
                return (await serve(path, (lister.service(),)),)

            listing = self._kept["pod-resources"] = Kept(start)
            sources.append(Standing("pod-resources", str(path), lambda: listing.problem or lister.problem))
        self.sources += tuple(sources)

    def _take(self, named: tuple[str, ...]) -> None:
        if CPU in named:
            asked, taken = self._ask_cpu, self._take_cpu
            self._cpu = Remote(self._folder / CPU_ADVISOR, _CPU_ADVISOR, asked, taken, self._now_ns)
            self.sources += (_remote_source("remote-advisor-cpu", self._folder / CPU_ADVISOR, self._cpu),)
        if MEMORY in named:
            path = self._folder / MEMORY_ADVISOR
            self._memory = Remote(path, _MEMORY_ADVISOR, self._ask_memory, self._take_memory, self._now_ns)
            self.sources += (_remote_source("remote-advisor-memory", path, self._memory),)
        if named:
            kept = self._kept["qrm"] = Kept(self._serve_qrm)
            self.sources += (Standing("plugin-sockets", str(self._folder), lambda: kept.problem),)

    async def _serve_qrm(self) -> tuple[Server, ...]:
        """What older advisors ask a QRM plugin."""
        cpus, memory = plugin_services(self._checkpoint, lambda: self._ask_memory() or svc.GetAdviceRequest())
        first = await serve(self._folder / CPU_PLUGIN, (cpus,))
        try:
            return first, await serve(self._folder / MEMORY_PLUGIN, (memory,))
        except Unavailable:
            await first.stop()
            raise

    def _checkpoint(self) -> Any:
        return cpu_state.checkpoint_of(CpuState() if self._latest is None else self._latest.cpus)

    def _ask_cpu(self) -> Any:
        latest = self._latest
        return None if latest is None else cpu_state.request_of(latest.cpus, latest.snapshot.pods)

    def _take_cpu(self, answer: Any) -> Advice:
        latest = self._latest
        assert latest is not None, "nothing is asked before a round"
        numas = Counter(one.numa for one in latest.snapshot.topology.cpus)
        before = None if latest.advice is None else latest.advice.lent_cores
        return cpu_taken.taken(answer, latest.snapshot.pods, numas, before)

    def _ask_memory(self) -> Any:
        latest = self._latest
        return None if latest is None else memory_answer.request_of(latest.snapshot.pods, latest.cpus)

    def _take_memory(self, answer: Any) -> MemoryAdvice:
        latest = self._latest
        assert latest is not None, "nothing is asked before a round"
        return memory_taken.taken(answer, latest.snapshot.pods, memory_taken.left_in(latest.snapshot))


def _presence_problem(presence: Presence) -> Callable[[], Unavailable | None]:
    def problem() -> Unavailable | None:
        told = presence.introduced
        if presence.problem is None and told.registered is False:
            return Unavailable(
                f"{presence.path} was not taken: {told.error}", "see the log of whoever watches its directory"
            )
        return presence.problem

    return problem


def _remote_source(name: str, path: Path, remote: Remote[Any]) -> Probe:
    return Standing(name, str(path), lambda: remote.problem)


async def _keep(kept: Kept) -> None:
    try:
        while True:
            await kept.look()
            await asyncio.sleep(CHECK_S)
    finally:
        await kept.close()
