"""Composition root of the node agent: reads options, opens components, runs the loop, restores at the end.
Everything that only some settings need is opened by `agent.components`. Errors are raised before anything on the node
is changed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent import components
from agent.config.config import AgentConfig
from agent.config.loader import ConfigError, NodeCheck, SettingDocuments
from agent.config.profiles import OBSERVE
from agent.handover import (
    OwnDaemonSet,
    end_before_first_cycle,
    end_handover,
    find_obstacle,
    hand_over,
    restore_earlier_values,
    restore_expired_handover,
)
from agent.journal.colocation_counter import ColocationCounter
from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.journal.log import CycleLog
from agent.journal.quota_verdict_file import QuotaVerdictFile
from agent.loop import Loop
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.journal_health import journal_reporters
from agent.qrm.actuator.originals import OriginalsJournal, restore_all
from agent.qrm.actuator.state_dir import read_boot_id
from agent.qrm.actuator.thread_slices import ThreadSlices, open_thread_slices
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
from agent.state_writers import StateWriters
from api import VERSION
from api.decision import ActMode
from api.interfaces import CycleSink, HealthReporter, PodSource, RunqLatencySource, Unavailable
from common.http.token_review import TokenReviewer
from common.http.web_config import WebConfig
from common.supervised_tasks import SupervisedTasks
from common.sync_times import SYNC_TIMES
from common.yaml_guard import check_yaml
from exporters.page.health import STALE_S
from exporters.page.web_server import AgentWebServer
from exporters.prometheus.families import AgentInfo
from probes import registry
from probes.blame import BlameProbe, shared_blame
from probes.deferred_loading import DeferredLoader
from probes.runqlat import open_runqlat

if TYPE_CHECKING:
    from agent.eviction.runner import EvictionRunner
    from agent.nri.lifecycle import NriLifecycle
    from agent.qrm.actuator.node_knobs import NodeKnobs
    from exporters.otel.sink import OtelSink
    from exporters.recording.recorder import Recorder

log = logging.getLogger("dioptase")
BLAME = BlameProbe.name
PROC, SYS = Path("/proc"), Path("/sys")
IO_THREADS = 8
"""Threads of the default executor, where asyncio resolves host names and the agent saves files and scans directories: each may
hang for seconds on a name server or a disk. They are started on demand. Cycles and HTTP bodies have executors of their own."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt (malloc.h). Together they save 1.3 MiB of RSS at 200 cgroups."""
_MMAP_THRESHOLD_BYTES = 128 << 10
_GC_THRESHOLDS = (10_000, 10, 10)
"""In place of Python's (700, 10, 10)."""


def limit_malloc_arenas() -> None:
    """Make glibc use one heap for all threads and return large blocks to the kernel when they are freed.

    The few threads of the agent allocate little, and a scrape needs its memory for a moment only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def reduce_gc_runs() -> None:
    """Exclude the objects that live as long as the agent from garbage collection, and make collections rarer.

    A cycle makes tens of thousands of objects and no reference cycles; one full collection took 60 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    node: str = ""
    """The name of the Node object that the agent reports on and takes dynamic configuration for; empty for neither."""
    profile: str = OBSERVE
    """Name in agent.config.profiles.PROFILES, whose settings apply below those of `config`."""
    pods: Path | None
    """The pods file. Without one, and without `kubelet`, the agent watches every cgroup and manages none."""
    act: ActMode
    hosts: tuple[str, ...]
    port: int
    state_dir: Path
    config: Path | None = None
    kubelet: bool = False
    """Whether the pods come from the kubelet and the container runtime instead of a file."""
    duration_s: float | None = None
    malachite: tuple[str, int] | None = None
    """Address of Malachite's HTTP documents."""
    web_config: Path | None = None
    record: Path | None = None
    record_max_mib: int
    daemon_set: OwnDaemonSet | None = None
    """The DaemonSet whose next pod on this node adopts the changed values; None to restore them at the end."""


def main(options: AgentOptions) -> int:
    """Run the agent until a signal or the duration ends it; return 1 if a value could not be restored, else 0.

    Raises ConfigError, PodsError and Unavailable before it changes anything. If an earlier agent handed its values over and the
    deadline of the handover has passed, a start that fails for any reason restores these values first.
    """
    try:
        return _run_agent(options)
    except Exception:
        restore_expired_handover(options.state_dir)
        raise
    except SystemExit:
        # SIGTERM before the loop handles it.
        if options.act is ActMode.ON:
            end_before_first_cycle(options.state_dir, is_followed=options.daemon_set is not None)
        raise


def _run_agent(options: AgentOptions) -> int:
    limit_malloc_arenas()
    # Until the event loop handles signals, SIGTERM during the compilation of a probe must run the clean-up too.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by cli.main
    documents, config = components.load_node_settings(
        options.config, registry.PROBE_NAMES, PROC if options.kubelet else None, options.profile
    )
    check_node = _open_node_check() if options.config is not None or options.node else _fits_every_node
    if options.config is not None and (mismatch := check_node(config)):
        raise ConfigError(f"{options.config}: {mismatch}")
    if config.exporters.token_review and not options.node:
        raise ConfigError(f"{options.config}: exporters.tokenReview: the API server reviews the tokens; add --node")
    # A pods file that is not valid is refused before anything else.
    return asyncio.run(_run(options, documents, config, _static_pods(options.pods, config), check_node))


def _fits_every_node(_defaults: AgentConfig) -> str:
    return ""


def _open_node_check() -> NodeCheck:
    """Return a check of settings against this node: the first that it cannot hold, or an empty text.

    The node is read here and only here: dynamic configuration checks on the event loop, several times per change.
    """
    from agent.config.node_check import check_against_node  # noqa: PLC0415 - the defaults fit every node

    reader = NodeReader(PROC, SYS)
    node = reader.read()
    reader.close()
    numa = {number: sample.meminfo["MemTotal"] for number, sample in node.numa.items() if "MemTotal" in sample.meminfo}
    topology, memory_bytes = read_topology(SYS), node.memory_total_bytes
    return lambda config: check_against_node(config, topology, memory_bytes, numa)


def _static_pods(path: Path | None, config: AgentConfig) -> PodSource:
    return NoPods() if path is None else StaticPods(path, _pod_parsing_context(config))


async def _open_pod_inputs(
    options: AgentOptions, config: AgentConfig, hierarchy: Hierarchy, pods: PodSource, tasks: SupervisedTasks
) -> components.PodInputs:
    if not options.kubelet:
        return components.PodInputs(pods=pods)
    named = msgspec.structs.replace(config, kubelet=config.kubelet.named(options.node))
    return await components.open_kubelet(named, _pod_parsing_context(config), hierarchy, tasks)


def _pod_parsing_context(config: AgentConfig) -> PodParsingContext:
    return PodParsingContext(
        dialect=config.qos.dialect(), numa_nodes=read_topology(SYS).numa_nodes or None, rights=config.qos.rights
    )


class _Parts(msgspec.Struct, kw_only=True):
    """What `_run` has opened before the exporters and the loop."""

    config: AgentConfig
    act: ActMode
    hierarchy: Hierarchy
    state: components.StateLocation
    inputs: components.PodInputs
    files: KnobWriter
    writers: StateWriters
    originals: OriginalsJournal | None
    cluster: components.ClusterConnection
    latencies: RunqLatencySource
    probes: DeferredLoader
    node_knobs: NodeKnobs | None
    slices: ThreadSlices | None
    evictor: EvictionRunner | None
    runtime: NriLifecycle
    totals: ColocationCounter
    act_warnings: tuple[str, ...]
    """Why `act` is less than was requested."""
    startup_warnings: tuple[str, ...]


async def _run(
    options: AgentOptions, documents: SettingDocuments, config: AgentConfig, pods: PodSource, check_node: NodeCheck
) -> int:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(IO_THREADS, "io"))
    async with AsyncExitStack() as stack:
        tasks = SupervisedTasks(stack)
        parts = await _open_parts(options, (documents, config, check_node), pods, tasks)
        act = parts.act
        directory = None if parts.originals is None else options.state_dir
        journals = parts.writers.open_journals(directory, stack, evicting=parts.evictor is not None)
        exporters = await _open_exporters(options, parts, journals, stack)
        exporters.sinks += await parts.cluster.join(parts.config, act, parts.evictor, tasks, parts.inputs.pods)
        indicators = PodIndicatorScraper()
        sensor = _open_sensor(options, parts, indicators, (exporters.reporters, (tasks,)), stack)
        if options.malachite is not None:
            exporters.thread_sinks.append(await _open_malachite(*options.malachite, parts.hierarchy, stack))
        # In threads, because these calls read and write files while the page and health are served.
        parts.startup_warnings += await asyncio.to_thread(restore_earlier_values, options.act, parts)
        loop = await asyncio.to_thread(_open_loop, options, parts, sensor, exporters, stack)
        parts.cluster.start(loop.apply_config, tasks)
        parts.runtime.start(lambda: loop.preview_inputs)
        stack.callback(parts.runtime.leave, parts.files)
        reduce_gc_runs()
        parts.probes.start()
        tasks.begin("scraping indicators of pods", partial(indicators.run, loop.pods))
        await asyncio.to_thread(end_handover, parts)
        unrestored = 0
        try:
            await _run_until_stopped(loop, options)
        finally:
            # In threads, so that the event loop can answer health requests.
            created = await asyncio.to_thread(parts.runtime.end, parts.files, parts.originals)
            successor = partial(find_obstacle, options.daemon_set, parts.cluster.client, options.node)
            if act is ActMode.ON and await hand_over(successor, parts, loop.latest, journals[0], created):
                parts.runtime.keep_values()
            elif act is ActMode.ON:
                others = tuple(part for part in (parts.slices, parts.node_knobs) if part is not None)
                unrestored = await asyncio.to_thread(
                    restore_all, parts.originals, parts.files, others, loop.latest, journals[0], created
                )
            elif options.act is ActMode.ON:
                log.warning("--act on was requested, but nothing was written. %s", " ".join(parts.act_warnings))
    return 1 if unrestored else 0


async def _open_parts(
    options: AgentOptions,
    settings: tuple[SettingDocuments, AgentConfig, NodeCheck],
    pods: PodSource,
    tasks: SupervisedTasks,
) -> _Parts:
    """Open all that the exporters and the loop need; nothing on the node is changed. Raises Unavailable."""
    documents, config, check_node = settings
    hierarchy, state, stack = detect_hierarchy(PROC), (options.state_dir, read_boot_id(PROC)), tasks.stack
    files = stack.enter_context(closing(components.open_knob_writer(config, hierarchy, kubelet=options.kubelet)))
    inputs = await _open_pod_inputs(options, config, hierarchy, pods, tasks)
    pods = inputs.pods
    writers = StateWriters()
    stack.callback(writers.close)
    originals, originals_warnings = writers.open_journal(*state, stack, required=options.act is ActMode.ON)
    state_dir = options.state_dir if originals else None
    totals = ColocationCounter(state_dir, time.time_ns(), writers.records)
    stack.callback(totals.close)
    cluster = components.ClusterConnection(options.node, state_dir, inputs.configuration)
    config, cluster_warnings = cluster.open(documents, config, check_node)
    act, act_warnings = _effective_act(options.act, files, originals, pods, config)
    latencies, probes, latency_warnings = _open_probes(config, hierarchy, stack, watching=isinstance(pods, NoPods))
    # By the settings file: an object of the cluster may disable power now and enable it later.
    disk, short_slices = writers.originals, settings[1].knobs.short_slices
    node_knobs, knob_warnings = components.open_node_knobs(settings[1], act, hierarchy, state, SYS, disk)
    slices, slice_warnings = open_thread_slices(act, hierarchy, state, enabled=short_slices, disk=disk)
    if originals is not None and act is ActMode.ON:
        originals.allocate_reserve(writers.records)
    return _Parts(
        config=config,
        act=act,
        hierarchy=hierarchy,
        state=state,
        inputs=inputs,
        files=files,
        writers=writers,
        originals=originals,
        cluster=cluster,
        latencies=latencies,
        probes=probes,
        node_knobs=node_knobs,
        slices=slices,
        evictor=components.open_evictor(config, act, hierarchy, stack, node=options.node, kubelet=options.kubelet),
        runtime=components.open_nri_lifecycle(config, act, pods, hierarchy, _pod_parsing_context(config), state[0]),
        totals=totals,
        act_warnings=act_warnings,
        startup_warnings=(
            *originals_warnings,
            *totals.messages,
            *cluster_warnings,
            *act_warnings,
            *latency_warnings,
            *knob_warnings,
            *slice_warnings,
        ),
    )


def _open_sensor(
    options: AgentOptions,
    parts: _Parts,
    indicators: PodIndicatorScraper,
    health: tuple[Sequence[HealthReporter], Sequence[HealthReporter]],
    stack: AsyncExitStack,
) -> Sensor:
    """Open the readers. `health` is that of exporters, and of components that live on the event loop."""
    # Malachite's documents are read back by a client right after it writes a limit, so limits must not come from a cache.
    cgroups = CgroupReader(parts.hierarchy, limit=parts.config.max_cgroups, fresh_limits=options.malachite is not None)
    stack.callback(cgroups.close)
    node = NodeReader(PROC, SYS)
    stack.callback(node.close)
    exporters, loop_reporters = health
    hardware = components.open_hardware_reporters(parts.config, SYS)
    journal = () if parts.act is not ActMode.ON else journal_reporters(parts.originals)
    return Sensor(
        cgroups=cgroups,
        node=node,
        sys=SYS,
        pods=parts.inputs.pods,
        waits=parts.latencies,
        indicators=indicators,
        probes=(*parts.probes.probes, *parts.inputs.probes),
        reporters=(*parts.inputs.reporters, *exporters, *hardware, *parts.runtime.reporters, *journal),
        loop_reporters=(*parts.cluster.reporters, *loop_reporters),
        annotations=parts.cluster.node_annotations,
        patience_ns=parts.inputs.ended_listing_ns,
    )


def _open_loop(
    options: AgentOptions, parts: _Parts, sensor: Sensor, exporters: _Exporters, stack: AsyncExitStack
) -> Loop:
    forecasts = verdicts = None
    if parts.originals is not None:
        forecasts = components.open_forecast_file(parts.config, options.act, parts.state, stack, parts.writers.records)
        verdicts = (
            QuotaVerdictFile(parts.state[0], os.uname().release, parts.writers.records)
            if parts.act is ActMode.ON
            else None
        )
    return Loop(
        config=parts.config,
        sensor=sensor,
        actuator=Actuator(parts.files, parts.originals, parts.act, parts.runtime.pending_originals, parts.slices),
        sinks=exporters.sinks,
        thread_sinks=exporters.thread_sinks,
        before_cycle=sensor.read_loop_reporters,
        triggers=_open_triggers(parts.hierarchy, stack),
        evictor=parts.evictor,
        node_knobs=parts.node_knobs,
        peers=parts.cluster.peers,
        checkpoint=CpusetCheckpoint(*parts.state, parts.writers.originals) if parts.act is ActMode.ON else None,
        forecasts=forecasts,
        quota_verdicts=verdicts,
        totals=parts.totals,
        startup_warnings=parts.startup_warnings,
    )


def _effective_act(
    requested: ActMode, files: KnobWriter, originals: OriginalsJournal | None, pods: PodSource, config: AgentConfig
) -> tuple[ActMode, tuple[str, ...]]:
    """Return the mode that is possible, and why it is not the requested one.

    Decisions run dry without write access, without a journal of originals, and if a peer's QRM plugin carries them out.
    """
    if requested is not ActMode.ON:
        return requested, ()
    if "advisor" in config.sockets.serve:
        return ActMode.DRY_RUN, ("Decisions run dry: sockets.serve has advisor, whose QRM plugin carries them out.",)
    try:
        managed = managed_cgroups(pods.read())
    except Unavailable:
        managed = frozenset()  # every cycle reports the reason; only the root is checked then
    obstacle = files.write_obstacle(managed)
    if obstacle is not None:
        return ActMode.DRY_RUN, (f"Decisions run dry: {obstacle.reason}: {obstacle.remedy}.",)
    if originals is None:
        return ActMode.DRY_RUN, ("Decisions run dry: original values cannot be journalled.",)
    return ActMode.ON, ()


def _open_latencies(hierarchy: Hierarchy, *, blame: bool, watching: bool) -> tuple[RunqLatencySource, tuple[str, ...]]:
    """Open the run-queue latency probe, or /proc/PID/schedstat if the kernel refuses it.

    schedstat costs a read per thread, so it is read for listed pods only.
    """
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
    """Open the run-queue latency source, and the loader of the other probes, which it loads later."""
    names = registry.DEFAULT_PROBES if config.probes is None else config.probes
    latencies, warnings = _open_latencies(hierarchy, blame=BLAME in names, watching=watching)
    stack.callback(latencies.close)
    openers = registry.openers(names, {BLAME: partial(shared_blame, latencies)})
    return latencies, stack.enter_context(closing(DeferredLoader(openers))), warnings


def _open_recorder(options: AgentOptions, stack: AsyncExitStack) -> Recorder | None:
    if options.record is None:
        return None
    from exporters.recording.recorder import Recorder  # noqa: PLC0415 - most agents record nothing

    recorder = Recorder(options.record, options.record_max_mib, VERSION)
    stack.callback(recorder.close)
    return recorder


class _Exporters(msgspec.Struct):
    """The sinks of cycles, and the exporters that report health of their own."""

    sinks: list[CycleSink]
    """Sinks that use objects of the event loop."""
    thread_sinks: list[CycleSink]
    """Sinks that write files or compute for milliseconds, published in the cycle thread, before `sinks`."""
    reporters: list[HealthReporter]


async def _open_exporters(
    options: AgentOptions,
    parts: _Parts,
    journals: tuple[DecisionJournal, EvictionJournal | None],
    stack: AsyncExitStack,
) -> _Exporters:
    (journal, evictions), recorder, cluster = journals, _open_recorder(options, stack), parts.cluster
    config = parts.config

    def agent_info() -> AgentInfo:
        return AgentInfo(
            interval_s=config.interval_s,
            runq_latency_target_s=config.advisor.latency.target_wait_ms / 1000,
            journal_writable=journal.writable if evictions is None else journal.writable and evictions.writable,
            otel_failures=None if spans is None else spans.failures,
            otel_dropped_spans=None if spans is None else spans.dropped_spans,
            traced=spans is not None and spans.traced,
            recording=None if recorder is None else recorder.state,
            earlier_totals=parts.totals.earlier,
            metric_profile=config.exporters.metric_profile,
            max_cgroups=config.exporters.max_cgroups,
            api_requests=cluster.requests(),
            nri_answers=parts.runtime.answers,
            syncs=SYNC_TIMES.counts(),
            sync_pending_s=SYNC_TIMES.pending_s(),
            applied_configs=cluster.applied_objects(),
            **cluster.socket_counters(),
        )

    spans = None
    reporters: list[HealthReporter] = [] if recorder is None else [recorder]
    if any(name.startswith("OTEL_") for name in os.environ):
        spans = _open_otel(agent_info, reporters)
    if spans is not None:
        stack.callback(spans.close)
    server = AgentWebServer(
        journal=journal,
        evictions=evictions,
        version=VERSION,
        node_name=options.node or socket.gethostname(),
        stale_s=max(STALE_S, 3 * config.interval_s),
        about=agent_info,
        configuration=cluster.effective_configuration,
        checks=partial(components.node_checks, options.state_dir),
        web_config=None if options.web_config is None else WebConfig(options.web_config, check_yaml),
        tokens=TokenReviewer(cluster.review) if config.exporters.token_review else None,
    )
    port = await server.start(options.hosts, options.port)
    stack.push_async_callback(server.stop)
    hosts = [f"[{host}]" if ":" in host else host for host in options.hosts]
    urls = ", ".join(f"http{'s' if server.encrypted else ''}://{host}:{port}" for host in hosts)
    log.info("page, API and metrics on %s", urls)
    thread_sinks = (journal, evictions, CycleLog(), spans, recorder, server)
    return _Exporters([], [sink for sink in thread_sinks if sink is not None], reporters)


def _open_otel(about: Callable[[], AgentInfo], reporters: list[HealthReporter]) -> OtelSink | None:
    """Open the OpenTelemetry exporter. If it cannot start, a component that reports the reason is added to `reporters`."""
    from exporters.otel import startup  # noqa: PLC0415 - most agents are scraped

    try:
        return startup.start_otel(os.environ, about)
    except Unavailable as error:
        # The node needs its agent with or without telemetry.
        log.error("nothing is sent to OpenTelemetry: %s: %s", error.reason, error.remedy)
        reporters.append(startup.OtelUnavailable(error))
        return None


async def _open_malachite(host: str, port: int, hierarchy: Hierarchy, stack: AsyncExitStack) -> CycleSink:
    """Serve Malachite's documents. Imported here because their types take 2 MiB."""
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
    """Open pressure triggers of online cgroups; None without a unified hierarchy, where run-queue latency has to do."""
    if hierarchy.v2 is None:
        return None
    triggers = PsiTriggerSet(hierarchy.v2, stall_us=STALL_US, window_us=WINDOW_US)
    stack.callback(triggers.close)
    return triggers


async def _run_until_stopped(loop: Loop, options: AgentOptions) -> None:
    """Run cycles until SIGTERM, SIGINT, SIGHUP (unless nohup ignores it) or the end of the duration."""
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            running.add_signal_handler(number, loop.stop)
    if options.duration_s is not None:
        running.call_later(options.duration_s, loop.stop)
    await loop.run()


def _no_command() -> int:
    """Refuse `python -m agent`: only the command line, which imports this module, reads options."""
    print("python -m agent is no command; run `dioptase agent`", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(_no_command())
