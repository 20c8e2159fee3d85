"""Composition root of the node agent: reads options, opens components, runs the loop, restores at the end.
Everything that only some settings need is opened by `agent.components`. Raises before anything on the node is
changed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
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

from agent import components
from agent.components import open_journals
from agent.config.config import AgentConfig
from agent.config.loader import ConfigError
from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.journal.log import CycleLog
from agent.loop import Loop
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.originals import OriginalsJournal, StateDirLocked
from agent.qrm.actuator.shutdown import restore_all
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter
from agent.qrm.decisions.cpu import managed_cgroups
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import V1_CONTROLLERS, Hierarchy, detect_hierarchy
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import NoPods, StaticPods
from agent.sensors.snapshot import Sensor
from agent.sensors.triggers.psi_triggers import STALL_US, WINDOW_US, PsiTriggerSet
from api import VERSION
from api.decision import ActMode
from api.interfaces import CycleSink, PodSource, Probe, RunqLatencySource, Unavailable
from common.http.token_review import TokenReviewer
from common.http.web_config import WebConfig
from common.supervised_tasks import SupervisedTasks
from common.yaml_guard import check_yaml
from exporters.page.health import STALE_S
from exporters.page.web_server import AgentWebServer
from exporters.prometheus.families import AgentInfo
from probes import registry
from probes.blame import BlameProbe, shared_blame
from probes.deferred_loading import DeferredLoader
from probes.runqlat import open_runqlat

if TYPE_CHECKING:
    from agent.nri.lifecycle import NriLifecycle
    from exporters.otel.sink import OtelSink
    from exporters.recording.recorder import Recorder

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h; 1.3 MiB less at 200 cgroups."""
_MMAP_THRESHOLD_BYTES = 128 << 10
_GC_THRESHOLDS = (10_000, 10, 10)
"""Instead of (700, 10, 10)."""


def limit_malloc_arenas() -> None:
    """Keep glibc from giving every thread a heap of its own, and have it give large blocks back when they are freed: the few
    threads here wait more than they allocate, and a scrape needs for a moment what it must not keep."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def reduce_gc_runs() -> None:
    """Have the collector of cycles leave alone what lives as long as the agent, and come less often: a round makes tens of
    thousands of objects and no cycles, and one collection of everything stopped it for 60 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


log = logging.getLogger("dioptase")
BLAME = BlameProbe.name
READER_THREADS = 2
"""Threads that answer scrapes: more would only keep more memory, for they compute and share one interpreter."""
PROC, SYS = Path("/proc"), Path("/sys")


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    node: str = ""
    """Its name in the cluster, where it reports and obeys; empty where it does neither."""
    pods: Path | None
    """None watches every cgroup and manages none, but for those of `kubelet`."""
    act: ActMode
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


def main(options: AgentOptions) -> int:
    """Run the agent until a signal or the duration ends it; the exit status is 1 if something could not be put back.

    Raises ConfigError, PodsError and Unavailable before anything was changed.
    """
    limit_malloc_arenas()
    # Until the loop takes signals over, an end while the probe compiles must clean up as well; nothing was changed yet.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    document, config = components.load_node_settings(
        options.config, registry.PROBE_NAMES, PROC if options.kubelet else None
    )
    if options.config is not None and (found := _node_mismatch(config)):
        raise ConfigError(f"{options.config}: {found}")
    if config.exporters.token_review and not options.node:
        raise ConfigError(
            f"{options.config}: exporters.tokenReview: it is the API server that knows tokens; give --node too"
        )
    # A file that cannot hold is refused before anything else.
    return asyncio.run(_run(options, document, config, _static_pods(options.pods, config)))


def _node_mismatch(config: AgentConfig) -> str:
    """What the settings keep back and this node lacks; empty where it lacks nothing."""
    from agent.config.node_check import check_against_node  # noqa: PLC0415 - the defaults fit everywhere

    reader = NodeReader(PROC, SYS)
    node = reader.read()
    reader.close()
    numa = {number: one.meminfo["MemTotal"] for number, one in node.numa.items() if "MemTotal" in one.meminfo}
    return check_against_node(config, read_topology(SYS), node.memory_total_bytes, numa)


def _static_pods(path: Path | None, config: AgentConfig) -> PodSource:
    """The pods of this node. What they ask for is held against the NUMA nodes that there are."""
    return NoPods() if path is None else StaticPods(path, _pod_parsing_context(config))


async def _open_pod_source(
    options: AgentOptions, config: AgentConfig, hierarchy: Hierarchy, pods: PodSource, tending: SupervisedTasks
) -> tuple[PodSource, tuple[Probe, ...], int]:
    """Whoever lists the pods, how those fare whom he asks, and for how long he may list what has ended (ns)."""
    if not options.kubelet:
        return pods, (), 0
    asked = msgspec.structs.replace(config, kubelet=config.kubelet.named(options.node))
    source, probes = await components.open_kubelet(asked, _pod_parsing_context(config), hierarchy, tending)
    return source, probes, components.ended_container_listing_ns(config)


def _pod_parsing_context(config: AgentConfig) -> PodParsingContext:
    return PodParsingContext(dialect=config.qos.dialect(), numa_nodes=read_topology(SYS).numa_nodes or None)


async def _run(options: AgentOptions, file: Mapping[str, Any], config: AgentConfig, pods: PodSource) -> int:
    hierarchy, state = detect_hierarchy(PROC), (options.state_dir, read_boot_id(PROC))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(READER_THREADS, "reader"))
    async with AsyncExitStack() as stack:
        tending = SupervisedTasks(stack)
        files = stack.enter_context(closing(components.open_knob_writer(config, hierarchy, kubelet=options.kubelet)))
        pods, asking, patience_ns = await _open_pod_source(options, config, hierarchy, pods, tending)
        originals, state_missing = _open_originals(options, stack)
        cluster = components.ClusterConnection(
            options.node, options.state_dir if originals else None, kubelet=options.kubelet
        )
        config, told_missing = cluster.open(file, config, _node_mismatch)
        act, act_missing = _effective_act(options.act, files, originals, pods, config)
        waits, probes, waits_missing = _open_probes(config, hierarchy, stack, watching=isinstance(pods, NoPods))
        node_knobs, knobs_missing = components.open_node_knobs(config, act, hierarchy, state, SYS)
        evictor = components.open_evictor(config, act, hierarchy, stack, node=options.node, kubelet=options.kubelet)
        journals = open_journals(None if originals is None else options.state_dir, stack, evicting=evictor is not None)
        indicators, recorder = PodIndicatorScraper(), _open_recorder(options, stack)
        cgroups, node = _open_readers(options, config, hierarchy, stack)
        runtime = components.open_nri_lifecycle(config, act, pods, hierarchy, _pod_parsing_context(config), state[0])
        sinks, reporting = await _open_exporters(options, config, (*journals, recorder), (cluster, runtime), stack)
        sinks += await cluster.join(config, act, evictor, tending)
        more = (*cluster.sources, *components.open_hardware_probes(config, SYS), *runtime.probes, tending)
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
            triggers=_open_triggers(hierarchy, stack),
            evictor=evictor,
            node_knobs=node_knobs,
            neighbours=cluster.neighbours,
            checkpoint=CpusetCheckpoint(*state) if act is ActMode.ON else None,
            forecasts=components.open_forecast_file(config, options.act, state, stack)
            if originals is not None
            else None,
            startup_warnings=(*state_missing, *told_missing, *act_missing, *waits_missing, *knobs_missing),
        )
        cluster.start(loop.apply_config, tending)
        runtime.start(lambda: loop.preview_inputs)
        stack.callback(runtime.leave, files)
        reduce_gc_runs()
        probes.start()
        tending.begin("asking pods for indicators", partial(indicators.run, loop.pods))
        try:
            await _run_until_stopped(loop, options)
        finally:
            made = runtime.end(files, originals)
            left = restore_all(originals, files, node_knobs, loop.latest, journals[0], made) if act is ActMode.ON else 0
            _log_act_downgrade(options.act, act, act_missing)
    return 1 if left else 0


def _log_act_downgrade(asked: ActMode, act: ActMode, missing: Sequence[str]) -> None:
    if act is not asked:
        log.warning("--act on was asked for, and nothing was written. %s", " ".join(missing))


def _open_readers(
    options: AgentOptions, config: AgentConfig, hierarchy: Hierarchy, stack: AsyncExitStack
) -> tuple[CgroupReader, NodeReader]:
    # Who asks for Malachite's documents reads back what it has just set, under a time that is to be true.
    cgroups = CgroupReader(hierarchy, limit=config.max_cgroups, fresh_limits=options.malachite is not None)
    stack.callback(cgroups.close)
    node = NodeReader(PROC, SYS)
    stack.callback(node.close)
    return cgroups, node


def _open_originals(options: AgentOptions, stack: AsyncExitStack) -> tuple[OriginalsJournal | None, tuple[str, ...]]:
    """The journal of originals. Only an agent that holds the lock goes on to act; watching needs none."""
    try:
        originals = open_originals(options.state_dir, read_boot_id(PROC))
    except StateDirLocked:
        if options.act is ActMode.ON:
            raise
        return None, ()
    except Unavailable as error:
        return None, (f"{error.reason}: {error.remedy}.",)
    stack.callback(originals.close)
    left = len(originals.entries())
    found = (f"An earlier agent left {left} values changed; they are put back when this one ends with --act on.",)
    return originals, (*originals.messages, *(found if left else ()))


def _effective_act(
    asked: ActMode, files: KnobWriter, originals: OriginalsJournal | None, pods: PodSource, config: AgentConfig
) -> tuple[ActMode, tuple[str, ...]]:
    """What can really be done: without write access, without a journal of originals, or as another's hands, nothing is."""
    if asked is not ActMode.ON:
        return asked, ()
    if "advisor" in config.sockets.serve:
        return ActMode.DRY_RUN, ("Decisions run dry: sockets.serve has advisor, whose QRM plugin carries them out.",)
    try:
        ours = managed_cgroups(pods.read())
    except Unavailable:
        ours = frozenset()  # the rounds say why; the root alone tells then
    obstacle = files.write_obstacle(ours)
    if obstacle is not None:
        return ActMode.DRY_RUN, (f"Decisions run dry: {obstacle.reason}: {obstacle.remedy}.",)
    if originals is None:
        return ActMode.DRY_RUN, ("Decisions run dry: original values cannot be journalled.",)
    return ActMode.ON, ()


def _open_waits(hierarchy: Hierarchy, *, blame: bool, watching: bool) -> tuple[RunqLatencySource, tuple[str, ...]]:
    """The probe, or /proc/PID/schedstat where the kernel refuses it: of pods alone, for it costs a read for every thread."""
    try:
        return open_runqlat(blame=blame), ()
    except Unavailable as error:
        coarse = "Run-queue waits come from schedstat, as sums without a distribution, and of listed pods only"
        none = "There are no run-queue waits: without BPF they come from schedstat, of listed pods only"
        return SchedstatRunqLatency(PROC, hierarchy), (
            f"{none if watching else coarse}: {error.reason}: {error.remedy}.",
        )


def _open_probes(
    config: AgentConfig, hierarchy: Hierarchy, stack: AsyncExitStack, *, watching: bool
) -> tuple[RunqLatencySource, DeferredLoader, tuple[str, ...]]:
    """Waits, and the other probes, which are loaded later."""
    chosen = registry.DEFAULT_PROBES if config.probes is None else config.probes
    waits, missing = _open_waits(hierarchy, blame=BLAME in chosen, watching=watching)
    stack.callback(waits.close)
    openers = registry.openers(chosen, {BLAME: partial(shared_blame, waits)})
    return waits, stack.enter_context(closing(DeferredLoader(openers))), missing


def _open_recorder(options: AgentOptions, stack: AsyncExitStack) -> Recorder | None:
    if options.record is None:
        return None
    from exporters.recording.recorder import Recorder  # noqa: PLC0415 - most agents record nothing

    recorder = Recorder(options.record, options.record_max_mib, VERSION)
    stack.callback(recorder.close)
    return recorder


async def _open_exporters(
    options: AgentOptions,
    config: AgentConfig,
    kept: tuple[DecisionJournal, EvictionJournal | None, Recorder | None],
    told: tuple[components.ClusterConnection, components.NullRuntime | NriLifecycle],
    stack: AsyncExitStack,
) -> tuple[list[CycleSink], list[Probe]]:
    """Whoever is shown the rounds, and those of them that are sources too, because they say how they fare."""
    (journal, evictions, recorder), (cluster, runtime) = kept, told

    def about() -> AgentInfo:
        return AgentInfo(
            interval_s=config.interval_s,
            runq_latency_target_s=config.advisor.latency.target_wait_ms / 1000,
            journal_writable=journal.writable if evictions is None else journal.writable and evictions.writable,
            otel_failures=None if spans is None else spans.failures,
            otel_dropped_spans=None if spans is None else spans.dropped_spans,
            traced=spans is not None and spans.traced,
            recording=None if recorder is None else recorder.state,
            max_cgroups=config.exporters.max_cgroups,
            api_requests=cluster.requests(),
            nri_answers=runtime.answers,
            applied_configs=cluster.obeyed(),
            **cluster.socket_counters(),
        )

    spans = None
    reporting: list[Probe] = [] if recorder is None else [recorder]
    if any(name.startswith("OTEL_") for name in os.environ):
        spans = _open_otel(about, reporting)
    if spans is not None:
        stack.callback(spans.close)
    stale_s = max(STALE_S, 3 * config.interval_s)
    secured = None if options.web_config is None else WebConfig(options.web_config, check_yaml)
    server = AgentWebServer(
        journal=journal,
        evictions=evictions,
        version=VERSION,
        stale_s=stale_s,
        about=about,
        configuration=cluster.told,
        checks=partial(components.node_checks, options.state_dir),
        web_config=secured,
        tokens=TokenReviewer(cluster.review) if config.exporters.token_review else None,
    )
    port = await server.start(options.host, options.port)
    stack.push_async_callback(server.stop)
    host = f"[{options.host}]" if ":" in options.host else options.host
    log.info("page, API and metrics on http%s://%s:%d", "s" if server.encrypted else "", host, port)
    sinks: list[CycleSink | None] = [journal, evictions, server, CycleLog(), spans, recorder]
    return [sink for sink in sinks if sink is not None], reporting


def _open_otel(about: Callable[[], AgentInfo], reporting: list[Probe]) -> OtelSink | None:
    """OpenTelemetry, if the environment asks for it; why it cannot be is a source of its own."""
    from exporters.otel import startup  # noqa: PLC0415 - most agents are scraped

    try:
        return startup.start_otel(os.environ, about)
    except Unavailable as error:
        # Telemetry is no reason to leave a node without its agent.
        log.error("nothing is sent to OpenTelemetry: %s: %s", error.reason, error.remedy)
        reporting.append(startup.OtelUnavailable(error))
        return None


async def _open_malachite(host: str, port: int, hierarchy: Hierarchy, stack: AsyncExitStack) -> CycleSink:
    """Malachite's documents, which most agents never need: their types are 2 MiB."""
    from exporters.malachite.cgroup_documents import CgroupLayout  # noqa: PLC0415
    from exporters.malachite.server import MalachiteServer  # noqa: PLC0415

    version, mounts = "V1", {name: str(mount) for name, mount in hierarchy.v1.items()}
    if hierarchy.mode == "v2":
        version, mounts = "V2", dict.fromkeys(V1_CONTROLLERS, str(hierarchy.v2))
    root = hierarchy.primary if version == "V2" else hierarchy.primary.parent
    server = MalachiteServer(CgroupLayout(version, str(root), mounts))
    bound = await server.start(host, port)
    stack.push_async_callback(server.stop)
    log.info("Malachite's documents on http://%s:%d", f"[{host}]" if ":" in host else host, bound)
    return server


def _open_triggers(hierarchy: Hierarchy, stack: AsyncExitStack) -> PsiTriggerSet | None:
    """Pressure triggers of online cgroups where there is a unified hierarchy; without one, waits have to do."""
    if hierarchy.v2 is None:
        return None
    triggers = PsiTriggerSet(hierarchy.v2, stall_us=STALL_US, window_us=WINDOW_US)
    stack.callback(triggers.close)
    return triggers


async def _run_until_stopped(loop: Loop, options: AgentOptions) -> None:
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
