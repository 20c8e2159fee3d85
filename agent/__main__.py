"""Composition root of the node agent: options in, objects made and joined, the loop run, everything put back at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agent import heap, optional
from agent.config import Config
from agent.hierarchy import V1_CONTROLLERS, Hierarchy, detect
from agent.loop import Loop
from agent.putting_back import put_back
from agent.qrm.actuator import Actuator
from agent.qrm.checkpoint import Checkpoint
from agent.qrm.cpu import managed
from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import Locked, Originals, boot_id, open_originals
from agent.report.evictions import EvictionJournal, open_journals
from agent.report.journal import DecisionJournal
from agent.report.log import RoundLog
from agent.sense.cgroups import CgroupReader
from agent.sense.documents import check
from agent.sense.indicators import Indicators
from agent.sense.node import NodeReader
from agent.sense.pods import NoPods, StaticPods
from agent.sense.podspec import Door
from agent.sense.psi import STALL_US, WINDOW_US
from agent.sense.schedstat import SchedstatWaits
from agent.sense.sensor import Sensor
from agent.sense.topology import read_topology
from agent.sense.triggers import TriggerSet
from agent.settings import ConfigError
from agent.tending import Tending
from api import VERSION
from api.decisions import Act
from api.ports import PodSource, Probe, Sink, Unavailable, WaitSource
from exporters.families import About
from exporters.http import Server
from exporters.pulse import STALE_S
from exporters.tokens import Tokens
from exporters.webconfig import WebConfig
from probes import registry
from probes.background import Background
from probes.blame import Blames, beside
from probes.runqlat import open_waits

if TYPE_CHECKING:
    from agent.runtime_side import RuntimeSide
    from exporters.otlp import OtelSink
    from exporters.recorder import Recorder

log = logging.getLogger("dioptase")
BLAME = Blames.name
READERS = 2
"""Threads that answer scrapes: more would only keep more memory, for they compute and share one interpreter."""
PROC, SYS = Path("/proc"), Path("/sys")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    node: str = ""
    """Its name in the cluster, where it reports and obeys; empty where it does neither."""
    pods: Path | None
    """None watches every cgroup and manages none, but for those of `kubelet`."""
    act: Act
    host: str
    port: int
    state_dir: Path
    config: Path | None = None
    kubelet: bool = False
    """Whether the pods are those of the kubelet and the container runtime, instead of a file's."""
    duration_s: float | None = None
    malachite: tuple[str, int] | None = None
    """Where Malachite's documents are served."""
    web_config: Path | None = None
    record: Path | None = None
    record_max_mib: int


def main(options: Options) -> int:
    """Run the agent until a signal or the duration ends it; the exit status is 1 if something could not be put back.

    Raises ConfigError, PodsError and Unavailable before anything was changed.
    """
    heap.one()
    # Until the loop takes signals over, an end while the probe compiles must clean up as well; nothing was changed yet.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    document, config = optional.settings(options.config, registry.NAMES, PROC if options.kubelet else None)
    if options.config is not None and (found := _misfit(config)):
        raise ConfigError(f"{options.config}: {found}")
    if config.exporters.token_review and not options.node:
        raise ConfigError(
            f"{options.config}: exporters.tokenReview: it is the API server that knows tokens; give --node too"
        )
    # A file that cannot hold is refused before anything else.
    return asyncio.run(_run(options, document, config, _pods(options.pods, config)))


def _misfit(config: Config) -> str:
    """What the settings keep back and this node lacks; empty where it lacks nothing."""
    from agent.fitting import misfit  # noqa: PLC0415 - the defaults fit everywhere

    reader = NodeReader(PROC, SYS)
    node = reader.read()
    reader.close()
    numa = {number: one.meminfo["MemTotal"] for number, one in node.numa.items() if "MemTotal" in one.meminfo}
    return misfit(config, read_topology(SYS), node.memory_total_bytes, numa)


def _pods(path: Path | None, config: Config) -> PodSource:
    """The pods of this node. What they ask for is held against the NUMA nodes that there are."""
    return NoPods() if path is None else StaticPods(path, _door(config))


async def _asked(
    options: Options, config: Config, hierarchy: Hierarchy, pods: PodSource, tending: Tending
) -> tuple[PodSource, tuple[Probe, ...], int]:
    """Whoever lists the pods, how those fare whom he asks, and for how long he may list what has ended (ns)."""
    if not options.kubelet:
        return pods, (), 0
    asked = msgspec.structs.replace(config, kubelet=config.kubelet.named(options.node))
    source, probes = await optional.open_kubelet(asked, _door(config), hierarchy, tending)
    return source, probes, optional.patience_ns(config)


def _door(config: Config) -> Door:
    return Door(dialect=config.qos.dialect(), numa_nodes=read_topology(SYS).numa_nodes or None)


async def _run(options: Options, file: Mapping[str, Any], config: Config, pods: PodSource) -> int:
    hierarchy, state = detect(PROC), (options.state_dir, boot_id(PROC))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(READERS, "reader"))
    async with AsyncExitStack() as stack:
        tending = Tending(stack)
        files = stack.enter_context(closing(optional.open_knobs(config, hierarchy, kubelet=options.kubelet)))
        pods, asking, patience_ns = await _asked(options, config, hierarchy, pods, tending)
        originals, state_missing = _open_originals(options, stack)
        cluster = optional.Cluster(options.node, options.state_dir if originals else None, kubelet=options.kubelet)
        config, told_missing = cluster.open(file, config, _misfit)
        act, act_missing = _effective(options.act, files, originals, pods, config)
        waits, probes, waits_missing = _open_probes(config, hierarchy, stack, watching=isinstance(pods, NoPods))
        node_knobs, knobs_missing = optional.open_node_knobs(config, act, hierarchy, state, SYS)
        evictor = optional.open_evictor(config, act, hierarchy, stack, node=options.node, kubelet=options.kubelet)
        journals = open_journals(None if originals is None else options.state_dir, stack, evicting=evictor is not None)
        indicators, recorder = Indicators(), _open_recorder(options, stack)
        cgroups, node = _open_readers(options, config, hierarchy, stack)
        runtime = optional.runtime_side(config, act, pods, hierarchy, _door(config), state[0])
        sinks, reporting = await _open_exporters(options, config, (*journals, recorder), (cluster, runtime), stack)
        sinks += await cluster.join(config, act, evictor, tending)
        more = (*cluster.sources, *optional.hardware(config, SYS), *runtime.probes, tending)
        sensor = Sensor(
            cgroups=cgroups,
            node=node,
            sys=SYS,
            pods=pods,
            waits=waits,
            indicators=indicators,
            probes=(*probes.probes, *asking, *reporting, *more),
            reclaim_root=config.memory.reclaim_root,
            patience_ns=patience_ns,
        )
        if options.malachite is not None:
            sinks.append(await _open_malachite(*options.malachite, hierarchy, stack))
        loop = Loop(
            config=config,
            sensor=sensor,
            actuator=Actuator(files, originals, act, runtime.foretold),
            sinks=sinks,
            triggers=_triggers(hierarchy, stack),
            evictor=evictor,
            node_knobs=node_knobs,
            neighbours=cluster.neighbours,
            checkpoint=Checkpoint(*state) if act is Act.ON else None,
            forecasts=optional.open_forecasts(config, options.act, state, stack) if originals is not None else None,
            banner=(*state_missing, *told_missing, *act_missing, *waits_missing, *knobs_missing),
        )
        cluster.start(loop.obey, tending)
        runtime.start(lambda: loop.basis)
        stack.callback(runtime.leave, files)
        heap.few_collections()
        probes.start()
        tending.begin("asking pods for indicators", partial(indicators.run, loop.pods))
        try:
            await _until_told(loop, options)
        finally:
            made = runtime.end(files, originals)
            left = put_back(originals, files, node_knobs, loop.latest, journals[0], made) if act is Act.ON else 0
            _say_what_was_not_done(options.act, act, act_missing)
    return 1 if left else 0


def _say_what_was_not_done(asked: Act, act: Act, missing: Sequence[str]) -> None:
    if act is not asked:
        log.warning("--act on was asked for, and nothing was written. %s", " ".join(missing))


def _open_readers(
    options: Options, config: Config, hierarchy: Hierarchy, stack: AsyncExitStack
) -> tuple[CgroupReader, NodeReader]:
    # Who asks for Malachite's documents reads back what it has just set, under a time that is to be true.
    cgroups = CgroupReader(hierarchy, limit=config.max_cgroups, fresh_limits=options.malachite is not None)
    stack.callback(cgroups.close)
    node = NodeReader(PROC, SYS)
    stack.callback(node.close)
    return cgroups, node


def _open_originals(options: Options, stack: AsyncExitStack) -> tuple[Originals | None, tuple[str, ...]]:
    """The journal of originals. Only an agent that holds the lock goes on to act; watching needs none."""
    try:
        originals = open_originals(options.state_dir, boot_id(PROC))
    except Locked:
        if options.act is Act.ON:
            raise
        return None, ()
    except Unavailable as error:
        return None, (f"{error.reason}: {error.remedy}.",)
    stack.callback(originals.close)
    left = len(originals.entries())
    found = (f"An earlier agent left {left} values changed; they are put back when this one ends with --act on.",)
    return originals, (*originals.messages, *(found if left else ()))


def _effective(
    asked: Act, files: KnobFiles, originals: Originals | None, pods: PodSource, config: Config
) -> tuple[Act, tuple[str, ...]]:
    """What can really be done: without write access, without a journal of originals, or as another's hands, nothing is."""
    if asked is not Act.ON:
        return asked, ()
    if "advisor" in config.sockets.serve:
        return Act.DRY_RUN, ("Decisions run dry: sockets.serve has advisor, whose QRM plugin carries them out.",)
    try:
        ours = managed(pods.read())
    except Unavailable:
        ours = frozenset()  # the rounds say why; the root alone tells then
    obstacle = files.obstacle(ours)
    if obstacle is not None:
        return Act.DRY_RUN, (f"Decisions run dry: {obstacle.reason}: {obstacle.remedy}.",)
    if originals is None:
        return Act.DRY_RUN, ("Decisions run dry: original values cannot be journalled.",)
    return Act.ON, ()


def _open_waits(hierarchy: Hierarchy, *, blame: bool, watching: bool) -> tuple[WaitSource, tuple[str, ...]]:
    """The probe, or /proc/PID/schedstat where the kernel refuses it: of pods alone, for it costs a read for every thread."""
    try:
        return open_waits(blame=blame), ()
    except Unavailable as error:
        coarse = "Run-queue waits come from schedstat, as sums without a distribution, and of listed pods only"
        none = "There are no run-queue waits: without BPF they come from schedstat, of listed pods only"
        return SchedstatWaits(PROC, hierarchy), (f"{none if watching else coarse}: {error.reason}: {error.remedy}.",)


def _open_probes(
    config: Config, hierarchy: Hierarchy, stack: AsyncExitStack, *, watching: bool
) -> tuple[WaitSource, Background, tuple[str, ...]]:
    """Waits, and the other probes, which are loaded later."""
    chosen = registry.USUAL if config.probes is None else config.probes
    waits, missing = _open_waits(hierarchy, blame=BLAME in chosen, watching=watching)
    stack.callback(waits.close)
    openers = registry.openers(chosen, {BLAME: partial(beside, waits)})
    return waits, stack.enter_context(closing(Background(openers))), missing


def _open_recorder(options: Options, stack: AsyncExitStack) -> Recorder | None:
    if options.record is None:
        return None
    from exporters.recorder import Recorder  # noqa: PLC0415 - most agents record nothing

    recorder = Recorder(options.record, options.record_max_mib, VERSION)
    stack.callback(recorder.close)
    return recorder


async def _open_exporters(
    options: Options,
    config: Config,
    kept: tuple[DecisionJournal, EvictionJournal | None, Recorder | None],
    told: tuple[optional.Cluster, optional.Nobody | RuntimeSide],
    stack: AsyncExitStack,
) -> tuple[list[Sink], list[Probe]]:
    """Whoever is shown the rounds, and those of them that are sources too, because they say how they fare."""
    (journal, evictions, recorder), (cluster, runtime) = kept, told

    def about() -> About:
        return About(
            interval_s=config.interval_s,
            target_wait_s=config.advisor.latency.target_wait_ms / 1000,
            journal_writable=journal.writable if evictions is None else journal.writable and evictions.writable,
            otel_failures=None if spans is None else spans.failures,
            otel_dropped_spans=None if spans is None else spans.dropped_spans,
            traced=spans is not None and spans.traced,
            recording=None if recorder is None else recorder.state,
            max_cgroups=config.exporters.max_cgroups,
            api_requests=cluster.requests(),
            nri_answers=runtime.answers,
            obeyed=cluster.obeyed(),
            **cluster.exchanged(),
        )

    spans = None
    reporting: list[Probe] = [] if recorder is None else [recorder]
    if any(name.startswith("OTEL_") for name in os.environ):
        spans = _open_otel(about, reporting)
    if spans is not None:
        stack.callback(spans.close)
    stale_s = max(STALE_S, 3 * config.interval_s)
    secured = None if options.web_config is None else WebConfig(options.web_config, check)
    server = Server(
        journal=journal,
        evictions=evictions,
        version=VERSION,
        stale_s=stale_s,
        about=about,
        configuration=cluster.told,
        checks=partial(optional.node_checks, options.state_dir),
        web_config=secured,
        tokens=Tokens(cluster.review) if config.exporters.token_review else None,
    )
    port = await server.start(options.host, options.port)
    stack.push_async_callback(server.stop)
    host = f"[{options.host}]" if ":" in options.host else options.host
    log.info("page, API and metrics on http%s://%s:%d", "s" if server.encrypted else "", host, port)
    sinks: list[Sink | None] = [journal, evictions, server, RoundLog(), spans, recorder]
    return [sink for sink in sinks if sink is not None], reporting


def _open_otel(about: Callable[[], About], reporting: list[Probe]) -> OtelSink | None:
    """OpenTelemetry, if the environment asks for it; why it cannot be is a source of its own."""
    from exporters import otel  # noqa: PLC0415 - most agents are scraped

    try:
        return otel.start(os.environ, about)
    except Unavailable as error:
        # Telemetry is no reason to leave a node without its agent.
        log.error("nothing is sent to OpenTelemetry: %s: %s", error.reason, error.remedy)
        reporting.append(otel.Refused(error))
        return None


async def _open_malachite(host: str, port: int, hierarchy: Hierarchy, stack: AsyncExitStack) -> Sink:
    """Malachite's documents, which most agents never need: their types are 2 MiB."""
    from exporters.malachite.cgroups import Layout  # noqa: PLC0415
    from exporters.malachite.server import Malachite  # noqa: PLC0415

    version, mounts = "V1", {name: str(mount) for name, mount in hierarchy.v1.items()}
    if hierarchy.mode == "v2":
        version, mounts = "V2", dict.fromkeys(V1_CONTROLLERS, str(hierarchy.v2))
    root = hierarchy.primary if version == "V2" else hierarchy.primary.parent
    server = Malachite(Layout(version, str(root), mounts))
    bound = await server.start(host, port)
    stack.push_async_callback(server.stop)
    log.info("Malachite's documents on http://%s:%d", f"[{host}]" if ":" in host else host, bound)
    return server


def _triggers(hierarchy: Hierarchy, stack: AsyncExitStack) -> TriggerSet | None:
    """Pressure triggers of online cgroups where there is a unified hierarchy; without one, waits have to do."""
    if hierarchy.v2 is None:
        return None
    triggers = TriggerSet(hierarchy.v2, stall_us=STALL_US, window_us=WINDOW_US)
    stack.callback(triggers.close)
    return triggers


async def _until_told(loop: Loop, options: Options) -> None:
    """Run rounds until SIGTERM, SIGINT, a terminal that closes (unless nohup has us ignore that) or the duration."""
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            running.add_signal_handler(number, loop.stop)
    if options.duration_s is not None:
        running.call_later(options.duration_s, loop.stop)
    await loop.run()


def _no_command() -> int:
    """Options are read by the command line, which knows this module and not the other way round."""
    print("python -m agent is no command; run `dioptase agent`", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(_no_command())
