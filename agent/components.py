"""Opens the optional components of the agent that the settings request: cluster, eviction, kubelet, knobs.
Every component is imported inside the function that opens it, because gRPC, aiohttp and the API-server client cost
memory that most agents do not need. Nothing here may block a cycle.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig, EvictionMethodName
from agent.config.loader import build_config, find_runtime_socket, load_document
from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.journal.forecast_file import ForecastFile
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy, cgroup_exists, detect_hierarchy
from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import NoPods, StaticPods
from api import VERSION
from api.decision import ActMode, Outcome
from api.diagnostics import DoctorCheck, EffectiveConfiguration
from api.eviction import EvictionBlock, EvictionEvent
from api.interfaces import CycleSink, PodSource, Probe, Unavailable
from api.pod import Pod
from common.grpc_calls import CALL_COUNTS
from common.supervised_tasks import SupervisedTasks

if TYPE_CHECKING:
    from agent.advisor.preview import PreviewInputs
    from agent.dynamic_config.follow import CustomNodeConfigFollower, DynamicConfig
    from agent.eviction.api_evictor import EvictionMethod
    from agent.eviction.runner import EvictionRunner, PodEvictor
    from agent.katalyst.peers import KatalystPeers
    from agent.nri.lifecycle import NriLifecycle
    from agent.qrm.actuator.node_knobs import NodeKnobs
    from agent.qrm.actuator.originals import OriginalsJournal
    from agent.qrm.actuator.pending_originals import PendingOriginals
    from agent.reporter.cnr_writer import CnrWriter
    from api.node_resources import ReportedField
    from kube.client import KubeClient

NS_PER_S = 1_000_000_000
EXECUTED_BY_PEER = ("advisor", "resource-plugins")
"""Sockets whose other side does what is decided here, whether or not this agent does too."""
StateLocation = tuple[Path, str]
"""The state directory, and the id of this boot."""
NODE_ORIGINALS, OOM_ORIGINALS, RESCTRL_GROUPS = "node-originals.json", "oom-originals.json", "fs/resctrl/dioptase-*"
"""As agent.qrm.actuator.disk_settings, oom_scores and resctrl have them, which are loaded only where they are needed."""


def load_node_settings(
    path: Path | None, probes: Collection[str], proc: Path | None
) -> tuple[Mapping[str, Any], AgentConfig]:
    """What the settings file says, and the settings. With `proc`, whose mounts have the cgroups, those that name cgroups
    are, unless set, the kubelet's. Raises ConfigError, and Unavailable where there are no cgroups."""
    document, config = load_document(path, probes)
    if proc is None:
        return document, config
    from agent.config.node_check import apply_kubelet_roots  # noqa: PLC0415 - where pods are not a kubelet's, there are none of its cgroups

    document = apply_kubelet_roots(
        document, config.kubelet.cgroup_root, partial(cgroup_exists, detect_hierarchy(proc).primary)
    )
    return document, build_config(document, str(path or "the kubelet's cgroups"))


def open_knob_writer(config: AgentConfig, hierarchy: Hierarchy, *, kubelet: bool) -> KnobWriter:
    """Whoever writes the knobs. Raises Unavailable."""
    socket = find_runtime_socket(config.kubelet.runtime_socket) if kubelet and config.kubelet.writer == "cri" else None
    if socket is None:
        return KnobWriter(hierarchy)
    from agent.qrm.actuator.cri_writer import CriKnobWriter  # noqa: PLC0415 - gRPC is 12 MiB

    return CriKnobWriter(hierarchy, socket)


def open_evictor(
    config: AgentConfig, act: ActMode, hierarchy: Hierarchy, stack: AsyncExitStack, *, node: str, kubelet: bool
) -> EvictionRunner | None:
    """The eviction manager, if a plugin is named, asked at a socket, or may be named while the agent runs, because the cluster
    tells it its settings; it asks nobody to leave unless the agent acts. Raises Unavailable."""
    if not (config.eviction.plugins or config.eviction.plugin_sockets or node) or act is ActMode.OFF:
        return None
    from agent.eviction.runner import EvictionRunner  # noqa: PLC0415

    killer = None
    if act is ActMode.ON:
        killer = open_pod_evictor(config.eviction, hierarchy, node=node, kubelet=kubelet)
        stack.callback(killer.close)
    return EvictionRunner(config, killer)


def open_hardware_probes(config: AgentConfig, sys: Path) -> tuple[Probe, ...]:
    """Sources that say what the machine lacks for what the settings ask of it."""
    if not config.power.enable:
        return ()
    from agent.sensors.node.rapl import PowerCapSupport  # noqa: PLC0415 - few nodes ask for it

    return (PowerCapSupport(sys),)


def node_checks(state_dir: Path) -> tuple[DoctorCheck, ...]:
    """What this node can and cannot do, for whoever asks over HTTP; the probes say themselves how they fare, as sources."""
    from agent.doctor import host_checks  # noqa: PLC0415 - few ask

    return host_checks.check_host(state_dir)


def open_forecast_file(
    config: AgentConfig, act: ActMode, state: StateLocation, stack: AsyncExitStack
) -> ForecastFile | None:
    """The predictor's history, where this agent judges and keeps score; it must have the state directory to itself."""
    if act is ActMode.OFF or config.forecast.method != "calibrated":
        return None
    kept = ForecastFile(*state)
    stack.callback(kept.close)
    return kept


def open_node_knobs(
    config: AgentConfig, act: ActMode, hierarchy: Hierarchy, state: StateLocation, sys: Path
) -> tuple[NodeKnobs | None, tuple[str, ...]]:
    """Settings of disks, caches and processes, where there are any or an earlier agent had some; why they are left alone."""
    journals = (state[0] / name for name in (NODE_ORIGINALS, OOM_ORIGINALS))
    left = act is ActMode.ON and (any(journal.exists() for journal in journals) or any(sys.glob(RESCTRL_GROUPS)))
    if act is ActMode.OFF or not (config.knobs.of_the_node or left):
        return None, ()
    from agent.qrm.actuator import node_knobs  # noqa: PLC0415 - few nodes set any

    try:
        return node_knobs.open_node_knobs(config.knobs, hierarchy, state, sys, dry=act is not ActMode.ON), ()
    except Unavailable as error:
        return None, (f"Disks, caches and OOM scores are left alone: {error.reason}: {error.remedy}.",)


async def open_kubelet(
    config: AgentConfig, door: PodParsingContext, hierarchy: Hierarchy, tending: SupervisedTasks
) -> tuple[PodSource, tuple[Probe, ...]]:
    """The pods of the kubelet and of the container runtime, and how both fare, who were asked once already; what cannot be
    asked now is asked again, and shown."""
    from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient  # noqa: PLC0415 - the others have their pods from a file, or none
    from agent.sensors.pods.kubelet_managers import KubeletConfigPoller, KubeletManagersProbe  # noqa: PLC0415
    from agent.sensors.pods.kubelet_pods import KubeletPodSource  # noqa: PLC0415
    from agent.sensors.pods.pod_join import PodJoinContext  # noqa: PLC0415

    runtime, socket, stack = None, find_runtime_socket(config.kubelet.runtime_socket), tending.stack
    if socket is not None:
        from agent.sensors.pods.cri_client import ContainerRuntimeClient  # noqa: PLC0415 - gRPC is 12 MiB

        runtime = ContainerRuntimeClient(socket, config.kubelet.timeout_s)
        stack.push_async_callback(runtime.close)
    kubelet = await stack.enter_async_context(KubeletClient(config.kubelet))
    node = PodJoinContext(
        door=door, exists=partial(cgroup_exists, hierarchy.primary), cgroup_root=config.kubelet.cgroup_root
    )
    pods = KubeletPodSource(kubelet, runtime, node, config.kubelet)
    managers = KubeletConfigPoller(await stack.enter_async_context(KubeletClient(config.kubelet, CONFIGZ_PATH)))
    await asyncio.gather(pods.run_cycle(), managers.look())
    tending.begin("asking for pods", pods.run)
    tending.begin("asking for the kubelet's managers", managers.run)
    wants = config.advisor.policy == "canonical"
    return pods, (*pods.probes(), KubeletManagersProbe(Path(config.kubelet.root_dir), managers, wants_cpusets=wants))


class NullRuntime:
    """RuntimeSide where the pods are a file's."""

    pending_originals: PendingOriginals | None = None
    probes: tuple[Probe, ...] = ()
    answers: Mapping[str, int] = {}

    def start(self, preview_inputs: Callable[[], PreviewInputs | None]) -> None: ...

    def end(self, files: KnobWriter, originals: OriginalsJournal | None) -> tuple[Outcome, ...]:  # noqa: ARG002 - as the other's
        return ()

    def leave(self, files: KnobWriter) -> None: ...


def open_nri_lifecycle(
    config: AgentConfig, act: ActMode, pods: PodSource, hierarchy: Hierarchy, door: PodParsingContext, state_dir: Path
) -> NriLifecycle | NullRuntime:
    """The kubelet's and the runtime's part in acting, where the pods are theirs; who acts has that directory to himself."""
    if isinstance(pods, (StaticPods, NoPods)):
        return NullRuntime()
    from agent.nri.lifecycle import NriLifecycle  # noqa: PLC0415 - what speaks to them
    from agent.sensors.pods.kubelet_pods import KubeletPodSource  # noqa: PLC0415

    assert isinstance(pods, KubeletPodSource)
    return NriLifecycle(config, act, pods, door, hierarchy, state_dir)


def ended_container_listing_ns(config: AgentConfig) -> int:
    """How long a container that ended may still be listed with the kubelet's pods: it is asked now and then, and slow."""
    return round(2 * (config.kubelet.interval_s + config.kubelet.timeout_s) * NS_PER_S)


class ClusterConnection:
    """The cluster's side of the agent: who is reported to, and obeyed, and the neighbours at sockets. Without a node's name,
    and where the settings name no socket, there is nobody."""

    def __init__(self, node: str, state_dir: Path | None, *, kubelet: bool = False) -> None:
        """What was obeyed last is remembered in `state_dir`; nowhere, where somebody else has it. `kubelet` says whether there
        is one to ask."""
        self._node, self._state_dir, self._kubelet = node, state_dir, kubelet
        self._file: Mapping[str, Any] = {}
        self._config, self._started_wall_ns = AgentConfig(), time.time_ns()
        self._rules: DynamicConfig | None = None
        self._joined: ClusterComponents | None = None
        self.neighbours: KatalystPeers | None = None
        """Those at sockets, once they were joined."""
        self._evicting: tuple[CycleComponent, ...] = ()

    def open(
        self, file: Mapping[str, Any], config: AgentConfig, fits: Callable[[AgentConfig], str]
    ) -> tuple[AgentConfig, tuple[str, ...]]:
        """The settings that come of the file and of what was obeyed last, and what of that was lost. Raises Unavailable."""
        self._file, self._config = file, config
        if not self._node:
            return config, ()
        from agent.dynamic_config.follow import DynamicConfig  # noqa: PLC0415 - the types of Katalyst's kinds
        from agent.dynamic_config.last_good import LastGoodFile  # noqa: PLC0415

        saved = None if self._state_dir is None else LastGoodFile(self._state_dir, self._node)
        self._rules = DynamicConfig(file, config, fits, saved)
        return self._rules.config, self._rules.messages

    async def join(
        self, config: AgentConfig, act: ActMode, evictor: EvictionRunner | None, tending: SupervisedTasks
    ) -> tuple[CycleSink, ...]:
        """Who is shown the rounds, to report them, with what the eviction manager has beside them. Raises Unavailable where no
        API server is named."""
        told = config.sockets
        if act is not ActMode.OFF and (told.serve or told.take):
            from agent.katalyst.peers import KatalystPeers  # noqa: PLC0415 - gRPC is 12 MiB, and most agents stand alone

            self.neighbours = KatalystPeers(config)
        sinks: tuple[CycleSink, ...] = () if self.neighbours is None else self.neighbours.sinks
        if self._rules is not None:
            # In a dry run nobody takes back what is lent, unless decisions are carried out by those who ask for them.
            lends = act is ActMode.ON or (act is ActMode.DRY_RUN and any(one in EXECUTED_BY_PEER for one in told.serve))
            self._joined = await connect_cluster(
                self._node, self._rules, tending.stack, kubelet=self._kubelet, lends=lends
            )
            sinks = (*self._joined.sinks, *sinks)
        if evictor is not None:
            client = None if self._joined is None else self._joined.client
            self._evicting = await open_eviction_components(
                evictor, config, client, self._node, tending, kubelet=self._kubelet
            )
        return (*sinks, *self._evicting)

    @property
    def sources(self) -> tuple[Probe, ...]:
        """How that goes, once it was joined."""
        beside = (*(() if self.neighbours is None else self.neighbours.sources), *self._evicting)
        return beside if self._joined is None else (*self._joined.sources, *beside)

    def start(self, apply_config: Callable[[AgentConfig], None], tending: SupervisedTasks) -> None:
        """Begin to report and to obey."""
        if self._joined is not None:
            self._joined.start(apply_config, tending)
        if self.neighbours is not None:
            self.neighbours.start(tending)

    def socket_counters(self) -> Mapping[str, Any]:
        """What exporters say of sockets: all calls, and what came of those of the neighbours. Any thread may ask."""
        if self.neighbours is None:
            return {"calls": CALL_COUNTS.copy()}
        return {
            "calls": CALL_COUNTS.copy(),
            "advice_ages_s": self.neighbours.ages_s(),
            "peers": self.neighbours.peers(),
        }

    async def review(self, token: str, path: str) -> bool | None:
        """Whether the account of this token may get that path; None: it is nobody's. Raises Unavailable."""
        if self._joined is None:
            raise Unavailable("the agent has not joined its cluster yet", "ask again in a second")
        from kube.access_review import review_token  # noqa: PLC0415 - only some are asked for

        return await review_token(self._joined.client, token, path)

    def requests(self) -> Mapping[tuple[str, str, str], int]:
        """To the API server so far, by method, resource and status. Any thread may ask."""
        return {} if self._joined is None else self._joined.client.requests.copy()

    def obeyed(self) -> Mapping[tuple[str, ...], bool]:
        """By kind, key and hash: the objects that are obeyed, and those that cannot be."""
        return {} if self._joined is None else self._joined.obeyed()

    def told(self) -> EffectiveConfiguration:
        """Every setting, and where it came from."""
        if self._joined is not None:
            return self._joined.told()
        from agent.dynamic_config.effective import effective_configuration  # noqa: PLC0415
        from agent.dynamic_config.merge import ResolvedConfig  # noqa: PLC0415 - few ask

        return effective_configuration(ResolvedConfig(self._config, {}, {}, {}, {}), self._file, self._started_wall_ns)


POD_RESOURCES = "pod-resources/kubelet.sock"
"""Below the kubelet's root."""


class BackgroundProbe(Probe, Protocol):
    """Works in a task of its own, and says how it goes."""

    async def run(self) -> None: ...


class ReportingComponent(BackgroundProbe, CycleSink, Protocol):
    """The same of one that is shown the rounds."""


class ClusterComponents(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that work while the agent runs: each sink and source is one of them."""

    sinks: tuple[CycleSink, ...]
    sources: tuple[Probe, ...]
    told: Callable[[], EffectiveConfiguration]
    obeyed: Callable[[], Mapping[tuple[str, ...], bool]]
    client: KubeClient
    parts: tuple[BackgroundProbe, ...]
    follower: CustomNodeConfigFollower

    def start(self, apply_config: Callable[[AgentConfig], None], tending: SupervisedTasks) -> None:
        """Begin; `obey` is given the settings whenever they change."""
        for part in self.parts:
            tending.begin(part.name, part.run)
        tending.begin(self.follower.name, partial(self.follower.run, apply_config))


async def connect_cluster(
    node: str, rules: DynamicConfig, stack: AsyncExitStack, *, kubelet: bool, lends: bool
) -> ClusterComponents:
    """Find the API server as kubectl does; whether it answers is seen later. `kubelet` is asked too, where there is one;
    `lends` says whether somebody takes back what is lent. Raises Unavailable where no API server is named."""
    from agent.dynamic_config.follow import CustomNodeConfigFollower  # noqa: PLC0415
    from agent.reporter.events import EvictionEventWriter  # noqa: PLC0415
    from agent.reporter.extended_resources import ExtendedResources  # noqa: PLC0415
    from common.yaml_guard import check_yaml  # noqa: PLC0415
    from kube.client import KubeClient  # noqa: PLC0415
    from kube.kubeconfig import load_access  # noqa: PLC0415

    access = load_access(os.environ, check_yaml)
    client = await stack.enter_async_context(KubeClient(access, f"dioptase-agent/{VERSION}"))
    config, follower = rules.config, CustomNodeConfigFollower(client, node, rules)
    writers: list[ReportingComponent] = []
    others: list[BackgroundProbe] = []
    if config.report.offered_in:
        from agent.katalyst.reporter_plugin_server import ReporterPluginServer  # noqa: PLC0415 - gRPC is 12 MiB

        writers.append(ReporterPluginServer(Path(config.report.offered_in), reports_reclaimable=lends))
    else:
        cnr, others = await open_cnr_writer(client, node, config, stack, kubelet=kubelet, lends=lends)
        writers.append(cnr)
    writers.append(EvictionEventWriter(client, node))
    if config.report.extended_resources:
        extended = ExtendedResources(client, node, reports_reclaimable=lends)
        stack.push_async_callback(extended.withdraw)
        writers.append(extended)
    return ClusterComponents(
        sinks=tuple(writers),
        sources=(follower, *writers, *others),
        told=follower.told,
        obeyed=rules.obeyed,
        client=client,
        parts=(*writers, *others),
        follower=follower,
    )


async def open_cnr_writer(
    client: KubeClient, node: str, config: AgentConfig, stack: AsyncExitStack, *, kubelet: bool, lends: bool
) -> tuple[CnrWriter, list[BackgroundProbe]]:
    """Who writes the node's CustomNodeResource, and whom he asks what to say beside the rounds: their `run` is to be run."""
    from agent.reporter.cnr_input_collector import CnrInputCollector  # noqa: PLC0415
    from agent.reporter.cnr_inputs import CnrInputs  # noqa: PLC0415
    from agent.reporter.cnr_writer import CnrWriter  # noqa: PLC0415
    from agent.sensors.pods.kubelet_client import (  # noqa: PLC0415 - only agents with a kubelet
        CONFIGZ_PATH,
        KubeletClient,
    )

    report, asked, shares = config.report, None, None
    if kubelet:
        asked = await stack.enter_async_context(KubeletClient(config.kubelet.named(node), CONFIGZ_PATH))
    socket, usual = report.pod_resources, Path(config.kubelet.root_dir) / POD_RESOURCES
    if socket is None and kubelet and usual.exists():
        socket = str(usual)
    if socket:
        from agent.katalyst.pod_resources import PodResourcesListerClient  # noqa: PLC0415 - gRPC is 12 MiB

        shares = PodResourcesListerClient(Path(socket))
        stack.push_async_callback(shares.close)
    start = CnrInputs(cpu_flags=report.cpu_flags, zone_types=report.device_zones)
    around = CnrInputCollector((Path("/proc"), Path("/sys")), start, asked, shares)
    others: list[BackgroundProbe] = [around]
    fields: Callable[[], tuple[ReportedField, ...]] = tuple
    cnr = CnrWriter(
        client,
        node,
        metrics=report.node_metrics,
        inputs=lambda: msgspec.structs.replace(around.inputs, fields=fields()),
        reports_reclaimable=lends,
    )
    if report.reporter_plugins:
        from agent.katalyst.reporter_plugins import ReporterPlugins  # noqa: PLC0415 - gRPC is 12 MiB

        reporters = ReporterPlugins(Path(report.reporter_plugins), cnr.wake)
        fields = reporters.fields
        others.append(reporters)
    return cnr, others


SIGNAL_METHOD, CONTAINER_METHOD = "signals", "container-killer"
API_METHODS = {"eviction-api-killer": "eviction", "deletion-api-killer": "deletion"}


class CycleComponent(CycleSink, Probe, Protocol):
    """A part that works beside the rounds, is shown them, and says how it fares."""


class EvictorByQosLevel:
    """A Killer that has each pod leave by the way that is set for its level."""

    def __init__(self, config: EvictionConfig, usual: EvictionMethodName, hierarchy: Hierarchy) -> None:
        from agent.eviction.api_evictor import ApiEvictor  # noqa: PLC0415 - nodes with a file of pods ask nobody
        from agent.eviction.signals import SignalEvictor  # noqa: PLC0415

        self._usual, self._levels = usual, config.killers
        self.eviction_methods: dict[str, EvictionMethod] = {}
        """By name; they are known once the API server is."""
        self.asking, self._signals = (
            ApiEvictor(lambda pod: self.eviction_methods[self._name(pod)]),
            SignalEvictor(hierarchy),
        )

    @property
    def terminating(self) -> frozenset[str]:
        """As Killer says."""
        return self.asking.terminating | self._signals.terminating

    @property
    def stuck(self) -> frozenset[str]:
        """As Killer says."""
        return self.asking.stuck | self._signals.stuck

    @property
    def held(self) -> Mapping[str, EvictionBlock]:
        """As Killer says."""
        return self.asking.held

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """As Killer says."""
        killer: PodEvictor = self._signals if self._name(pod) == SIGNAL_METHOD else self.asking
        killer.evict(pod, grace_s, reason)

    def withdraw(self, pod: str, why: str) -> None:
        """As Killer says."""
        self.asking.withdraw(pod, why)

    def outcomes(self) -> Sequence[EvictionEvent]:
        """As Killer says."""
        return (*self.asking.outcomes(), *self._signals.outcomes())

    def close(self) -> None:
        """As Killer says."""
        self.asking.close()
        self._signals.close()

    def _name(self, pod: Pod) -> EvictionMethodName:
        return self._levels.get(pod.qos.value, self._usual)  # type: ignore[call-overload, no-any-return]


def open_pod_evictor(config: EvictionConfig, hierarchy: Hierarchy, *, node: str, kubelet: bool) -> PodEvictor:
    """Whoever makes pods leave, by the settings. Raises Unavailable for one that cannot work on this node."""
    from agent.eviction.signals import SignalEvictor  # noqa: PLC0415

    usual = config.killer or ("eviction-api-killer" if node and kubelet else "signals")
    names = {usual, *config.killers.values()}
    for name in sorted(names):
        lacking = [] if name == SIGNAL_METHOD or kubelet else ["--kubelet"]
        lacking += ["--node"] if name in API_METHODS and not node else []
        if lacking:
            reason = f"eviction.killer: {name} needs {' and '.join(lacking)}"
            raise Unavailable(reason, f"start the agent with {' and '.join(lacking)}, or set it to {SIGNAL_METHOD}")
    if names == {SIGNAL_METHOD}:
        return SignalEvictor(hierarchy)
    return EvictorByQosLevel(config, usual, hierarchy)


async def open_eviction_components(
    evictor: EvictionRunner,
    config: AgentConfig,
    client: KubeClient | None,
    node: str,
    tending: SupervisedTasks,
    *,
    kubelet: bool,
) -> tuple[CycleComponent, ...]:
    """The parts that work beside the rounds, begun; with `kubelet` the pods are those of a container runtime. Raises
    Unavailable."""
    from agent.eviction.plugins.rootfs_pressure import (  # noqa: PLC0415 - only agents that evict
        OVERUSE_NAME,
        PRESSURE_NAME,
    )
    from agent.eviction.soft_eviction_notifier import SoftEvictionNotifier  # noqa: PLC0415

    parts: list[CycleComponent] = []
    settings, stack = config.eviction, tending.stack
    acting = evictor.killer is not None
    if acting:
        evictor.notifier = SoftEvictionNotifier(Path(settings.notify_root) if settings.notify_root else None)
    if isinstance(evictor.killer, EvictorByQosLevel):
        _open_eviction_methods(evictor.killer, config, client)
        # Before the client of the API server is closed, which was opened after the killer.
        stack.callback(evictor.killer.close)
        parts.append(evictor.killer.asking)
    if client is not None and acting:
        from agent.reporter.node_taints import NodeTaints  # noqa: PLC0415 - without an API server there is no Node

        taints = NodeTaints(client, node)
        stack.push_async_callback(taints.withdraw)
        tending.begin(taints.name, taints.run)
        parts.append(taints)
    if settings.plugin_sockets:
        from agent.katalyst.external_evictions import ExternalEvictionPlugins  # noqa: PLC0415 - gRPC is 12 MiB

        outside = ExternalEvictionPlugins(settings)
        evictor.external_findings = outside.findings
        tending.begin(outside.name, outside.run)
        parts.append(outside)
    if kubelet and (socket := find_runtime_socket(config.kubelet.runtime_socket)) is not None:
        from agent.eviction.writable_layers import WritableLayers  # noqa: PLC0415 - gRPC is 12 MiB

        layers = WritableLayers(socket, config.kubelet.timeout_s, lambda: evictor.wants(PRESSURE_NAME, OVERUSE_NAME))
        evictor.rootfs = layers.use
        tending.begin(layers.name, layers.run)
        parts.append(layers)
    return tuple(parts)


def _open_eviction_methods(killers: EvictorByQosLevel, config: AgentConfig, client: KubeClient | None) -> None:
    for name in {config.eviction.killer or "eviction-api-killer", *config.eviction.killers.values()}:
        if name in API_METHODS and client is not None:
            from agent.eviction.api_evictor import ApiEvictionMethod  # noqa: PLC0415 - the client of the API server

            killers.eviction_methods[name] = ApiEvictionMethod(client, API_METHODS[name])  # type: ignore[arg-type]
        elif name == CONTAINER_METHOD:
            from agent.eviction.cri_evictor import CriEvictor  # noqa: PLC0415 - gRPC is 12 MiB

            socket = find_runtime_socket(config.kubelet.runtime_socket)
            if socket is None:
                raise Unavailable(
                    f"eviction.killer: {CONTAINER_METHOD}: no container runtime is there", "set kubelet.runtimeSocket"
                )
            killers.eviction_methods[name] = CriEvictor(socket, config.kubelet.timeout_s)


def open_journals(
    directory: Path | None, stack: AsyncExitStack, *, evicting: bool
) -> tuple[DecisionJournal, EvictionJournal | None]:
    """What is decided, and who had to leave where somebody may; in memory alone where there is no directory."""
    decisions, evictions = DecisionJournal(None if directory is None else directory / "decisions.jsonl"), None
    stack.callback(decisions.close)
    if evicting:
        evictions = EvictionJournal(None if directory is None else directory / "evictions.jsonl")
        stack.callback(evictions.close)
    return decisions, evictions
