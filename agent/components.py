"""Opens the optional components of the agent that the settings request: cluster, eviction, kubelet, knobs.
Every component is imported inside the function that opens it, because gRPC, aiohttp and the API-server client cost
memory that most agents do not need.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig
from agent.config.loader import NodeCheck, build_config, find_runtime_socket, load_document
from agent.eviction.evictor_by_qos_level import (
    API_METHODS,
    CONTAINER_METHOD,
    SIGNAL_METHOD,
    EvictorByQosLevel,
)
from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.journal.forecast_file import ForecastFile
from agent.nri.null_runtime import NullRuntime
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy, cgroup_exists, detect_hierarchy
from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import NoPods, StaticPods
from api import VERSION
from api.decision import ActMode
from api.diagnostics import DoctorCheck, EffectiveConfiguration
from api.interfaces import CycleSink, PodSource, Probe, Unavailable
from common.grpc_calls import CALL_COUNTS
from common.supervised_tasks import SupervisedTasks

if TYPE_CHECKING:
    from agent.dynamic_config.follow import CustomNodeConfigFollower, DynamicConfig
    from agent.eviction.runner import EvictionRunner, PodEvictor
    from agent.katalyst.peers import KatalystPeers
    from agent.nri.lifecycle import NriLifecycle
    from agent.qrm.actuator.node_knobs import NodeKnobs
    from agent.reporter.cnr_writer import CnrWriter
    from api.node_resources import ReportedField
    from kube.client import KubeClient

NS_PER_S = 1_000_000_000
EXECUTED_BY_PEER = ("advisor", "resource-plugins")
"""Sockets whose peer carries out the decisions of this agent, also in a dry run."""
StateLocation = tuple[Path, str]
"""The state directory and the boot ID."""
NODE_ORIGINALS, OOM_ORIGINALS, RESCTRL_GROUPS = "node-originals.json", "oom-originals.json", "fs/resctrl/dioptase-*"
"""The same names as in agent.qrm.actuator.disk_settings, oom_scores and resctrl_groups, which are imported only when needed."""


def load_node_settings(
    path: Path | None, probes: Collection[str], proc: Path | None
) -> tuple[Mapping[str, Any], AgentConfig]:
    """Returns the settings file and the configuration. With `proc`, settings that name cgroups default to the kubelet's.

    Raises ConfigError, and Unavailable without cgroups.
    """
    document, config = load_document(path, probes)
    if proc is None:
        return document, config
    from agent.config.node_check import apply_kubelet_roots  # noqa: PLC0415 - only with a kubelet

    document = apply_kubelet_roots(
        document, config.kubelet.cgroup_root, partial(cgroup_exists, detect_hierarchy(proc).primary)
    )
    return document, build_config(document, str(path or "the kubelet's cgroups"))


def open_knob_writer(config: AgentConfig, hierarchy: Hierarchy, *, kubelet: bool) -> KnobWriter:
    """Opens the writer of knobs: by the CRI if the configuration says so, else by cgroup files. Raises Unavailable."""
    socket = find_runtime_socket(config.kubelet.runtime_socket) if kubelet and config.kubelet.writer == "cri" else None
    if socket is None:
        return KnobWriter(hierarchy)
    from agent.qrm.actuator.cri_writer import CriKnobWriter  # noqa: PLC0415 - gRPC is 12 MiB

    return CriKnobWriter(hierarchy, socket)


def open_evictor(
    config: AgentConfig, act: ActMode, hierarchy: Hierarchy, stack: AsyncExitStack, *, node: str, kubelet: bool
) -> EvictionRunner | None:
    """Opens the eviction manager if a plugin is enabled, runs at a socket, or may be enabled by dynamic configuration.

    It evicts pods only if the agent acts. Raises Unavailable.
    """
    if not (config.eviction.plugins or config.eviction.plugin_sockets or node) or act is ActMode.OFF:
        return None
    from agent.eviction.runner import EvictionRunner  # noqa: PLC0415

    pod_evictor = None
    if act is ActMode.ON:
        pod_evictor = open_pod_evictor(config.eviction, hierarchy, node=node, kubelet=kubelet)
        stack.callback(pod_evictor.close)
    return EvictionRunner(config, pod_evictor)


def open_hardware_probes(config: AgentConfig, sys: Path) -> tuple[Probe, ...]:
    """Opens the components that report which hardware support of an enabled feature is missing."""
    if not config.power.enable:
        return ()
    from agent.sensors.node.rapl import PowerCapSupport  # noqa: PLC0415 - few nodes enable it

    return (PowerCapSupport(sys, capping=config.power.capping),)


def node_checks(state_dir: Path) -> tuple[DoctorCheck, ...]:
    """Returns the checks of this node for /api/v1/doctor; probes report their own health in the snapshot."""
    from agent.doctor import host_checks  # noqa: PLC0415 - rarely requested

    return host_checks.check_host(state_dir)


def open_forecast_file(
    config: AgentConfig, act: ActMode, state: StateLocation, stack: AsyncExitStack
) -> ForecastFile | None:
    """Opens the predictor's history if the calibrated forecast is in use.

    The agent must hold the lock of the state directory.
    """
    if act is ActMode.OFF or config.forecast.method != "calibrated":
        return None
    file = ForecastFile(*state)
    stack.callback(file.close)
    return file


def open_node_knobs(
    config: AgentConfig, act: ActMode, hierarchy: Hierarchy, state: StateLocation, sys: Path
) -> tuple[NodeKnobs | None, tuple[str, ...]]:
    """Opens the knobs of disks, caches, processes and power limits if any is set, or an earlier agent left one changed.

    Returns a warning instead if they cannot be opened.
    """
    journals = (state[0] / name for name in (NODE_ORIGINALS, OOM_ORIGINALS))
    left = act is ActMode.ON and (any(journal.exists() for journal in journals) or any(sys.glob(RESCTRL_GROUPS)))
    if act is ActMode.OFF or not (config.knobs.of_the_node or config.power.enable or left):
        return None, ()
    from agent.qrm.actuator import node_knobs  # noqa: PLC0415 - few nodes set any

    try:
        return node_knobs.open_node_knobs(config.knobs, hierarchy, state, sys, dry=act is not ActMode.ON), ()
    except Unavailable as error:
        return None, (f"Disks, caches, OOM scores and power are left alone: {error.reason}: {error.remedy}.",)


async def open_kubelet(
    config: AgentConfig, context: PodParsingContext, hierarchy: Hierarchy, tasks: SupervisedTasks
) -> tuple[PodSource, tuple[Probe, ...]]:
    """Opens the pods of the kubelet and the container runtime, polls both once, and returns them with their health.

    A failed poll is reported as health, and repeated.
    """
    from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient  # noqa: PLC0415 - only with a kubelet
    from agent.sensors.pods.kubelet_managers import KubeletConfigPoller, KubeletManagersProbe  # noqa: PLC0415
    from agent.sensors.pods.kubelet_pods import KubeletPodSource  # noqa: PLC0415
    from agent.sensors.pods.pod_join import PodJoinContext  # noqa: PLC0415

    runtime, socket, stack = None, find_runtime_socket(config.kubelet.runtime_socket), tasks.stack
    if socket is not None:
        from agent.sensors.pods.cri_client import ContainerRuntimeClient  # noqa: PLC0415 - gRPC is 12 MiB

        runtime = ContainerRuntimeClient(socket, config.kubelet.timeout_s)
        stack.push_async_callback(runtime.close)
    kubelet = await stack.enter_async_context(KubeletClient(config.kubelet))
    node = PodJoinContext(
        parsing=context, exists=partial(cgroup_exists, hierarchy.primary), cgroup_root=config.kubelet.cgroup_root
    )
    pods = KubeletPodSource(kubelet, runtime, node, config.kubelet)
    managers = KubeletConfigPoller(await stack.enter_async_context(KubeletClient(config.kubelet, CONFIGZ_PATH)))
    await asyncio.gather(pods.poll(), managers.poll())
    tasks.begin("polling the pods", pods.run)
    tasks.begin("polling the configuration of the kubelet", managers.run)
    cpusets = config.advisor.policy == "canonical"
    return pods, (*pods.probes(), KubeletManagersProbe(Path(config.kubelet.root_dir), managers, needs_cpusets=cpusets))


def open_nri_lifecycle(
    config: AgentConfig,
    act: ActMode,
    pods: PodSource,
    hierarchy: Hierarchy,
    context: PodParsingContext,
    state_dir: Path,
) -> NriLifecycle | NullRuntime:
    """Opens the NRI plugin if the pods come from a kubelet. An agent that acts holds the lock of `state_dir`."""
    if isinstance(pods, (StaticPods, NoPods)):
        return NullRuntime()
    from agent.nri.lifecycle import NriLifecycle  # noqa: PLC0415 - only with a kubelet
    from agent.sensors.pods.kubelet_pods import KubeletPodSource  # noqa: PLC0415

    assert isinstance(pods, KubeletPodSource)
    return NriLifecycle(config, act, pods, context, hierarchy, state_dir)


def ended_container_listing_ns(config: AgentConfig) -> int:
    """Returns for how long a container that ended may still be listed: the kubelet is polled at intervals, and answers late."""
    return round(2 * (config.kubelet.interval_s + config.kubelet.timeout_s) * NS_PER_S)


class ClusterConnection:
    """The agent's connection to its cluster: reports, dynamic configuration, and Katalyst peers at sockets.

    Without a node name there is no API server, and without configured sockets there are no peers.
    """

    def __init__(self, node: str, state_dir: Path | None, *, kubelet: bool = False) -> None:
        """`state_dir` holds the dynamic configuration that was applied last; None if another agent has its lock. `kubelet` says
        whether a kubelet can be polled."""
        self._node, self._state_dir, self._kubelet = node, state_dir, kubelet
        self._file: Mapping[str, Any] = {}
        self._config, self._started_wall_ns = AgentConfig(), time.time_ns()
        self._dynamic: DynamicConfig | None = None
        self._components: ClusterComponents | None = None
        self.peers: KatalystPeers | None = None
        """The Katalyst peers at sockets, after `join`."""
        self._eviction_sources: tuple[Probe, ...] = ()

    def open(
        self, file: Mapping[str, Any], config: AgentConfig, check_node: NodeCheck
    ) -> tuple[AgentConfig, tuple[str, ...]]:
        """Returns the configuration of the file and of the objects that were applied last, and warnings. Raises Unavailable."""
        self._file, self._config = file, config
        if not self._node:
            return config, ()
        from agent.dynamic_config.follow import DynamicConfig  # noqa: PLC0415 - the types of Katalyst's kinds
        from agent.dynamic_config.last_good import LastGoodFile  # noqa: PLC0415

        last_good = None if self._state_dir is None else LastGoodFile(self._state_dir, self._node)
        self._dynamic = DynamicConfig(file, config, check_node, last_good)
        ignored = (f"node.annotations are ignored: those of Node {self._node} count; take them out of the settings.",)
        return self._dynamic.config, (*self._dynamic.messages, *(ignored if config.node.annotations else ()))

    async def join(
        self, config: AgentConfig, act: ActMode, evictor: EvictionRunner | None, tasks: SupervisedTasks
    ) -> tuple[CycleSink, ...]:
        """Connects to the API server and the peers, and returns the sinks that report cycles there.

        The components of the eviction manager that need either are opened too. Raises Unavailable if no API server is named.
        """
        sockets = config.sockets
        if act is not ActMode.OFF and (sockets.serve or sockets.take):
            from agent.katalyst.peers import KatalystPeers  # noqa: PLC0415 - gRPC is 12 MiB, and most agents stand alone

            self.peers = KatalystPeers(config)
        sinks: tuple[CycleSink, ...] = () if self.peers is None else self.peers.sinks
        if self._dynamic is not None:
            # A dry run takes no CPU back from reclaimed pods, so it reports none, unless a peer carries out the decisions.
            by_peer = any(socket in EXECUTED_BY_PEER for socket in sockets.serve)
            self._components = await connect_cluster(
                self._node,
                self._dynamic,
                tasks.stack,
                kubelet=self._kubelet,
                reports_reclaimable=act is ActMode.ON or (act is ActMode.DRY_RUN and by_peer),
            )
            sinks = (*self._components.sinks, *sinks)
        if evictor is not None:
            client = None if self._components is None else self._components.client
            eviction = await open_eviction_components(evictor, config, client, self._node, tasks, kubelet=self._kubelet)
            self._eviction_sources, sinks = eviction.sources, (*sinks, *eviction.sinks)
        return sinks

    @property
    def sources(self) -> tuple[Probe, ...]:
        """The health of all these components, after `join`. They live on the event loop."""
        peers = () if self.peers is None else self.peers.sources
        cluster = () if self._components is None else self._components.sources
        return (*cluster, *peers, *self._eviction_sources)

    def start(self, apply_config: Callable[[AgentConfig], None], tasks: SupervisedTasks) -> None:
        """Starts to report, and to pass each new dynamic configuration to `apply_config`."""
        if self._components is not None:
            self._components.start(apply_config, tasks)
        if self.peers is not None:
            self.peers.start(tasks)

    def node_annotations(self) -> Mapping[str, str] | None:
        """Returns the annotations of the Node that policies read, without API server those of the settings file.

        None while they are unknown. Any thread may call it.
        """
        if not self._node:
            return self._config.node.annotations
        return None if self._components is None else self._components.annotations()

    def socket_counters(self) -> Mapping[str, Any]:
        """Returns AgentInfo's counters of gRPC calls and Katalyst peers. Any thread may call it."""
        if self.peers is None:
            return {"calls": CALL_COUNTS.copy()}
        return {
            "calls": CALL_COUNTS.copy(),
            "advice_ages_s": self.peers.ages_s(),
            "peers": self.peers.peers(),
        }

    async def review(self, token: str, path: str) -> bool | None:
        """Returns whether the token's account may get that path; None if the token is not valid. Raises Unavailable."""
        if self._components is None:
            raise Unavailable("the agent has not joined its cluster yet", "try again in a second")
        from kube.access_review import review_token  # noqa: PLC0415 - only with tokenReview

        return await review_token(self._components.client, token, path)

    def requests(self) -> Mapping[tuple[str, str, str], int]:
        """Returns the number of requests to the API server by method, resource and status. Any thread may call it."""
        return {} if self._components is None else self._components.client.requests.copy()

    def applied_objects(self) -> Mapping[tuple[str, ...], bool]:
        """Returns whether each configuration object, by kind, key and hash, is applied; False for one that is not valid."""
        return {} if self._components is None else self._components.applied_objects()

    def effective_configuration(self) -> EffectiveConfiguration:
        """Returns every setting and its source."""
        if self._components is not None:
            return self._components.effective_configuration()
        from agent.dynamic_config.effective import effective_configuration  # noqa: PLC0415
        from agent.dynamic_config.merge import ResolvedConfig  # noqa: PLC0415 - rarely requested

        return effective_configuration(ResolvedConfig(self._config, {}, {}, {}, {}), self._file, self._started_wall_ns)


POD_RESOURCES = "pod-resources/kubelet.sock"
"""Path of the socket below the kubelet's root directory."""


class BackgroundProbe(Probe, Protocol):
    """A component that works in a task of its own and reports its health."""

    async def run(self) -> None: ...


class ReportingComponent(BackgroundProbe, CycleSink, Protocol):
    """A BackgroundProbe that reports cycles."""


class ClusterComponents(msgspec.Struct, frozen=True, kw_only=True):
    """The components that work with the API server while the agent runs."""

    sinks: tuple[CycleSink, ...]
    sources: tuple[Probe, ...]
    effective_configuration: Callable[[], EffectiveConfiguration]
    applied_objects: Callable[[], Mapping[tuple[str, ...], bool]]
    client: KubeClient
    annotations: Callable[[], Mapping[str, str] | None]
    """Annotations of the Node that policies read; None while they are unknown."""
    parts: tuple[BackgroundProbe, ...]
    follower: CustomNodeConfigFollower

    def start(self, apply_config: Callable[[AgentConfig], None], tasks: SupervisedTasks) -> None:
        """Starts the tasks; `apply_config` receives each new configuration."""
        for part in self.parts:
            tasks.begin(part.name, part.run)
        tasks.begin(self.follower.name, partial(self.follower.run, apply_config))


async def connect_cluster(
    node: str, dynamic: DynamicConfig, stack: AsyncExitStack, *, kubelet: bool, reports_reclaimable: bool
) -> ClusterComponents:
    """Opens the components that report to the API server, which is found as kubectl finds it and not contacted yet.

    `reports_reclaimable` says whether reclaimable resources are reported. Raises Unavailable if no API server is named.
    """
    from agent.dynamic_config.follow import CustomNodeConfigFollower  # noqa: PLC0415
    from agent.reporter.events import EvictionEventWriter  # noqa: PLC0415
    from agent.reporter.extended_resources import ExtendedResources  # noqa: PLC0415
    from common.yaml_guard import check_yaml  # noqa: PLC0415
    from kube.client import KubeClient  # noqa: PLC0415
    from kube.kubeconfig import load_access  # noqa: PLC0415

    access = load_access(os.environ, check_yaml)
    client = await stack.enter_async_context(KubeClient(access, f"dioptase-agent/{VERSION}"))
    config, follower = dynamic.config, CustomNodeConfigFollower(client, node, dynamic)
    writers: list[ReportingComponent] = []
    others: list[BackgroundProbe] = []
    if config.report.offered_in:
        from agent.katalyst.reporter_plugin_server import ReporterPluginServer  # noqa: PLC0415 - gRPC is 12 MiB

        writers.append(ReporterPluginServer(Path(config.report.offered_in), reports_reclaimable=reports_reclaimable))
    else:
        cnr, others = await open_cnr_writer(
            client, node, config, stack, kubelet=kubelet, reports_reclaimable=reports_reclaimable
        )
        writers.append(cnr)
    writers.append(EvictionEventWriter(client, node))
    annotations: Callable[[], Mapping[str, str] | None] = dict
    if config.power.enable or config.overcommit.enable:
        from agent.dynamic_config.node_annotations import NodeAnnotations  # noqa: PLC0415 - few nodes enable either

        followed = NodeAnnotations(client, node, config)
        others.append(followed)
        annotations = followed.latest
    if config.report.extended_resources:
        extended = ExtendedResources(client, node, reports_reclaimable=reports_reclaimable)
        stack.push_async_callback(extended.withdraw)
        writers.append(extended)
    return ClusterComponents(
        sinks=tuple(writers),
        sources=(follower, *writers, *others),
        effective_configuration=follower.effective,
        applied_objects=dynamic.object_states,
        client=client,
        annotations=annotations,
        parts=(*writers, *others),
        follower=follower,
    )


async def open_cnr_writer(
    client: KubeClient,
    node: str,
    config: AgentConfig,
    stack: AsyncExitStack,
    *,
    kubelet: bool,
    reports_reclaimable: bool,
) -> tuple[CnrWriter, list[BackgroundProbe]]:
    """Opens the writer of the node's CustomNodeResource and the components that collect its other inputs."""
    from agent.reporter.cnr_input_collector import CnrInputCollector  # noqa: PLC0415
    from agent.reporter.cnr_inputs import CnrInputs  # noqa: PLC0415
    from agent.reporter.cnr_writer import CnrWriter  # noqa: PLC0415
    from agent.sensors.pods.kubelet_client import (  # noqa: PLC0415 - only agents with a kubelet
        CONFIGZ_PATH,
        KubeletClient,
    )

    report, configz, shares = config.report, None, None
    if kubelet:
        configz = await stack.enter_async_context(KubeletClient(config.kubelet.named(node), CONFIGZ_PATH))
    socket, default = report.pod_resources, Path(config.kubelet.root_dir) / POD_RESOURCES
    if socket is None and kubelet and default.exists():
        socket = str(default)
    if socket:
        from agent.katalyst.pod_resources import PodResourcesListerClient  # noqa: PLC0415 - gRPC is 12 MiB

        shares = PodResourcesListerClient(Path(socket))
        stack.push_async_callback(shares.close)
    start = CnrInputs(cpu_flags=report.cpu_flags, zone_types=report.device_zones)
    collector = CnrInputCollector((Path("/proc"), Path("/sys")), start, configz, shares)
    others: list[BackgroundProbe] = [collector]
    fields: Callable[[], tuple[ReportedField, ...]] = tuple
    cnr = CnrWriter(
        client,
        node,
        metrics=report.node_metrics,
        inputs=lambda: msgspec.structs.replace(collector.inputs, fields=fields()),
        reports_reclaimable=reports_reclaimable,
    )
    if report.reporter_plugins:
        from agent.katalyst.reporter_plugins import ReporterPlugins  # noqa: PLC0415 - gRPC is 12 MiB

        reporters = ReporterPlugins(Path(report.reporter_plugins), cnr.wake)
        fields = reporters.fields
        others.append(reporters)
    return cnr, others


def open_pod_evictor(config: EvictionConfig, hierarchy: Hierarchy, *, node: str, kubelet: bool) -> PodEvictor:
    """Opens the pod evictor of the configured methods. Raises Unavailable for a method that cannot work on this node."""
    from agent.eviction.signals import SignalEvictor  # noqa: PLC0415

    default = config.killer or ("eviction-api-killer" if node and kubelet else "signals")
    names = {default, *config.killers.values()}
    for name in sorted(names):
        missing = [] if name == SIGNAL_METHOD or kubelet else ["--kubelet"]
        missing += ["--node"] if name in API_METHODS and not node else []
        if missing:
            reason = f"eviction.killer: {name} needs {' and '.join(missing)}"
            raise Unavailable(reason, f"start the agent with {' and '.join(missing)}, or set it to {SIGNAL_METHOD}")
    if names == {SIGNAL_METHOD}:
        return SignalEvictor(hierarchy)
    return EvictorByQosLevel(config, default, hierarchy)


class EvictionComponents(NamedTuple):
    """The components of the eviction manager that take cycles, and those that report health."""

    sinks: tuple[CycleSink, ...]
    sources: tuple[Probe, ...]


async def open_eviction_components(
    evictor: EvictionRunner,
    config: AgentConfig,
    client: KubeClient | None,
    node: str,
    tasks: SupervisedTasks,
    *,
    kubelet: bool,
) -> EvictionComponents:
    """Opens the components that the eviction manager needs in addition to its plugins, and starts their tasks.

    With `kubelet` the pods are those of a container runtime. Raises Unavailable.
    """
    from agent.eviction.plugins.rootfs_pressure import (  # noqa: PLC0415 - only agents that evict
        OVERUSE_NAME,
        PRESSURE_NAME,
    )
    from agent.eviction.soft_eviction_notifier import SoftEvictionNotifier  # noqa: PLC0415

    sinks: list[CycleSink] = []
    sources: list[Probe] = []
    settings, stack, pod_evictor = config.eviction, tasks.stack, evictor.pod_evictor
    if pod_evictor is not None:
        evictor.notifier = SoftEvictionNotifier(Path(settings.notify_root) if settings.notify_root else None)
    if isinstance(pod_evictor, EvictorByQosLevel):
        _open_eviction_methods(pod_evictor, config, client)
        # The client of the API server was opened after the evictor; its tasks must end before the client is closed.
        stack.callback(pod_evictor.close)
        sources.append(pod_evictor.requests)
    if client is not None and pod_evictor is not None:
        from agent.reporter.node_taints import NodeTaints  # noqa: PLC0415 - without an API server there is no Node

        taints = NodeTaints(client, node)
        stack.push_async_callback(taints.withdraw)
        tasks.begin(taints.name, taints.run)
        sinks.append(taints)
        sources.append(taints)
    if settings.plugin_sockets:
        from agent.katalyst.external_evictions import ExternalEvictionPlugins  # noqa: PLC0415 - gRPC is 12 MiB

        external = ExternalEvictionPlugins(settings)
        evictor.external_findings = external.findings
        tasks.begin(external.name, external.run)
        sinks.append(external)
        sources.append(external)
    if kubelet and (socket := find_runtime_socket(config.kubelet.runtime_socket)) is not None:
        from agent.eviction.writable_layers import WritableLayers  # noqa: PLC0415 - gRPC is 12 MiB

        needed = partial(evictor.is_enabled, PRESSURE_NAME, OVERUSE_NAME)
        layers = WritableLayers(socket, config.kubelet.timeout_s, needed)
        evictor.rootfs = layers.use
        tasks.begin(layers.name, layers.run)
        sources.append(layers)
    return EvictionComponents(tuple(sinks), tuple(sources))


def _open_eviction_methods(evictor: EvictorByQosLevel, config: AgentConfig, client: KubeClient | None) -> None:
    for name in {config.eviction.killer or "eviction-api-killer", *config.eviction.killers.values()}:
        if name in API_METHODS and client is not None:
            from agent.eviction.api_evictor import ApiEvictionMethod  # noqa: PLC0415 - the client of the API server

            evictor.eviction_methods[name] = ApiEvictionMethod(client, API_METHODS[name])  # type: ignore[arg-type]
        elif name == CONTAINER_METHOD:
            from agent.eviction.cri_evictor import CriEvictor  # noqa: PLC0415 - gRPC is 12 MiB

            socket = find_runtime_socket(config.kubelet.runtime_socket)
            if socket is None:
                raise Unavailable(
                    f"eviction.killer: {CONTAINER_METHOD}: no container runtime is there", "set kubelet.runtimeSocket"
                )
            evictor.eviction_methods[name] = CriEvictor(socket, config.kubelet.timeout_s)


def open_journals(
    directory: Path | None, stack: AsyncExitStack, *, evicting: bool
) -> tuple[DecisionJournal, EvictionJournal | None]:
    """Opens the journals of decisions and, if `evicting`, of evictions; without a directory they are kept in memory only."""
    decisions, evictions = DecisionJournal(None if directory is None else directory / "decisions.jsonl"), None
    stack.callback(decisions.close)
    if evicting:
        evictions = EvictionJournal(None if directory is None else directory / "evictions.jsonl")
        stack.callback(evictions.close)
    return decisions, evictions
