"""Opens the optional components of the agent that the settings request: cluster, kubelet, knobs.
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
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig
from agent.config.loader import (
    NodeCheck,
    SettingDocuments,
    build_config,
    find_runtime_socket,
    load_documents,
    merge_documents,
)
from agent.config.profiles import OBSERVE
from agent.eviction.evictor_by_qos_level import (
    API_METHODS,
    CONTAINER_METHOD,
    SIGNAL_METHOD,
    EvictorByQosLevel,
)
from agent.journal.forecast_file import ForecastFile
from agent.nri.lifecycle import NriLifecycle
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy, cgroup_exists, detect_hierarchy
from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import NoPods, StaticPods
from api import VERSION
from api.decision import ActMode
from api.diagnostics import DoctorCheck, EffectiveConfiguration
from api.interfaces import CycleSink, HealthReporter, PodSource, Probe, Unavailable
from api.units import NS_PER_S
from common.disk_writer import INLINE_WRITER, DiskWriter, FileWriter
from common.grpc_calls import CALL_COUNTS
from common.supervised_tasks import SupervisedTasks

if TYPE_CHECKING:
    from agent.dynamic_config.follow import CustomNodeConfigFollower, DynamicConfig
    from agent.eviction.eviction_records import EvictionRecords
    from agent.eviction.runner import EvictionRunner, PodDetails, PodEvictor
    from agent.katalyst.external_evictions import ExternalEvictionPlugins
    from agent.katalyst.peers import KatalystPeers
    from agent.qrm.actuator.node_knobs import NodeKnobs
    from agent.reporter.cnr_writer import CnrWriter
    from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller
    from api.node_resources import ReportedField
    from kube.client import KubeClient

EXECUTED_BY_PEER = ("advisor", "resource-plugins")
"""Sockets whose peer carries out the decisions of this agent, also in a dry run."""
StateLocation = tuple[Path, str]
"""The state directory and the boot ID."""
NODE_ORIGINALS, OOM_ORIGINALS, RESCTRL_GROUPS = "node-originals.json", "oom-originals.json", "fs/resctrl/dioptase-*"
"""The same names as in agent.qrm.actuator.sysfs_writer, oom_scores and resctrl_groups, which are imported only when needed."""


def load_node_settings(
    path: Path | None, probes: Collection[str], proc: Path | None, profile: str = OBSERVE
) -> tuple[SettingDocuments, AgentConfig]:
    """Return settings by source, and the configuration. With `proc`, settings that name cgroups default to the kubelet's.

    Raises ConfigError, and Unavailable without cgroups.
    """
    documents, config = load_documents(path, probes, profile)
    if proc is None:
        return documents, config
    from agent.config.node_check import kubelet_root_settings  # noqa: PLC0415 - only with a kubelet

    exists = partial(cgroup_exists, detect_hierarchy(proc).primary)
    documents = {**documents, "kubelet": kubelet_root_settings(config.kubelet.cgroup_root, exists)}
    return documents, build_config(merge_documents(documents), str(path or "the kubelet's cgroups"))


def open_knob_writer(config: AgentConfig, hierarchy: Hierarchy, *, kubelet: bool) -> KnobWriter:
    """Open the writer of knobs: by the CRI if the configuration says so, else by cgroup files. Raises Unavailable."""
    socket = find_runtime_socket(config.kubelet.runtime_socket) if kubelet and config.kubelet.writer == "cri" else None
    if socket is None:
        return KnobWriter(hierarchy)
    from agent.qrm.actuator.cri_writer import CriKnobWriter  # noqa: PLC0415 - gRPC is 12 MiB

    return CriKnobWriter(hierarchy, socket)


def open_evictor(
    config: AgentConfig, act: ActMode, hierarchy: Hierarchy, stack: AsyncExitStack, *, node: str, kubelet: bool
) -> EvictionRunner | None:
    """Open the eviction manager if a plugin is enabled, runs at a socket, or may be enabled by dynamic configuration.

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


def open_hardware_reporters(config: AgentConfig, sys: Path) -> tuple[HealthReporter, ...]:
    """Open the components that report which hardware support of an enabled feature is missing."""
    if not config.power.enable:
        return ()
    from agent.sensors.node.rapl import PowerCapSupport  # noqa: PLC0415 - few nodes enable it

    return (PowerCapSupport(sys, capping=config.power.capping),)


def node_checks(state_dir: Path) -> tuple[DoctorCheck, ...]:
    """Return the checks of this node for /api/v1/doctor; probes report their own health in the snapshot."""
    from agent.doctor import host_checks  # noqa: PLC0415 - rarely requested

    return host_checks.check_host(state_dir)


def open_forecast_file(
    config: AgentConfig, act: ActMode, state: StateLocation, stack: AsyncExitStack, disk: FileWriter
) -> ForecastFile | None:
    """Open the predictor's history if the calibrated forecast is in use. The agent must hold the lock of `state`."""
    if act is ActMode.OFF or config.forecast.method != "calibrated":
        return None
    file = ForecastFile(*state, disk)
    stack.callback(file.close)
    return file


def open_node_knobs(
    config: AgentConfig,
    act: ActMode,
    hierarchy: Hierarchy,
    state: StateLocation,
    sys: Path,
    disk: FileWriter = INLINE_WRITER,
) -> tuple[NodeKnobs | None, tuple[str, ...]]:
    """Open the knobs of disks, caches, processes and power limits if any is set, or an earlier agent left one changed.

    Return a warning instead if they cannot be opened.
    """
    journals = (state[0] / name for name in (NODE_ORIGINALS, OOM_ORIGINALS))
    left = act is ActMode.ON and (any(journal.exists() for journal in journals) or any(sys.glob(RESCTRL_GROUPS)))
    if act is ActMode.OFF or not (config.knobs.of_the_node or config.power.enable or left):
        return None, ()
    from agent.qrm.actuator import node_knobs  # noqa: PLC0415 - few nodes set any

    try:
        dry = act is not ActMode.ON
        return node_knobs.open_node_knobs(config.knobs, hierarchy, state, sys, dry=dry, disk=disk), ()
    except Unavailable as error:
        return None, (f"Disks, caches, OOM scores and power are left alone: {error.reason}: {error.remedy}.",)


class PodInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The pod source, and what the kubelet provides besides pods."""

    pods: PodSource
    ended_listing_ns: int = 0
    """For how long a container that ended may still be listed."""
    probes: tuple[Probe, ...] = ()
    reporters: tuple[HealthReporter, ...] = ()
    configuration: KubeletConfigPoller | None = None
    """The kubelet's configuration; None without a kubelet."""


async def open_kubelet(
    config: AgentConfig, context: PodParsingContext, hierarchy: Hierarchy, tasks: SupervisedTasks
) -> PodInputs:
    """Open the pods of the kubelet and the container runtime and the kubelet's configuration, and poll each once.

    A failed poll is reported as health, and repeated.
    """
    from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient  # noqa: PLC0415 - only with a kubelet
    from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller  # noqa: PLC0415
    from agent.sensors.pods.kubelet_managers import KubeletManagersProbe  # noqa: PLC0415
    from agent.sensors.pods.kubelet_pods import KubeletPodSource  # noqa: PLC0415
    from agent.sensors.pods.pod_join import PodJoinContext  # noqa: PLC0415

    kubelet, runtime, stack = config.kubelet, None, tasks.stack
    socket = find_runtime_socket(kubelet.runtime_socket)
    if socket is not None:
        from agent.sensors.pods.cri_client import ContainerRuntimeClient  # noqa: PLC0415 - gRPC is 12 MiB

        runtime = ContainerRuntimeClient(socket, kubelet.timeout_s)
        stack.push_async_callback(runtime.close)
    node = PodJoinContext(
        parsing=context, exists=partial(cgroup_exists, hierarchy.primary), cgroup_root=kubelet.cgroup_root
    )
    pods = KubeletPodSource(await stack.enter_async_context(KubeletClient(kubelet)), runtime, node, kubelet)
    pods.keep_manifests = bool(config.eviction.plugin_sockets)
    configuration = KubeletConfigPoller(await stack.enter_async_context(KubeletClient(kubelet, CONFIGZ_PATH)))
    await asyncio.gather(pods.poll(), configuration.poll())
    tasks.begin("polling the pods", pods.run)
    tasks.begin("polling the configuration of the kubelet", configuration.run)
    cpusets = config.advisor.policy == "canonical"
    return PodInputs(
        pods=pods,
        # The kubelet is polled at intervals, and answers late.
        ended_listing_ns=round(2 * (kubelet.interval_s + kubelet.timeout_s) * NS_PER_S),
        probes=(KubeletManagersProbe(Path(kubelet.root_dir), configuration, needs_cpusets=cpusets),),
        reporters=pods.reporters(),
        configuration=configuration,
    )


def open_nri_lifecycle(
    config: AgentConfig,
    act: ActMode,
    pods: PodSource,
    hierarchy: Hierarchy,
    context: PodParsingContext,
    state_dir: Path,
) -> NriLifecycle:
    """Open the NRI plugin if the pods come from a kubelet. An agent that acts holds the lock of `state_dir`."""
    if isinstance(pods, (StaticPods, NoPods)):
        return NriLifecycle(config, act, None, context, hierarchy, state_dir)
    from agent.sensors.pods.kubelet_pods import KubeletPodSource  # noqa: PLC0415

    assert isinstance(pods, KubeletPodSource)
    return NriLifecycle(config, act, pods, context, hierarchy, state_dir)


class BackgroundReporter(HealthReporter, Protocol):
    """A component that works in a task of its own and reports its health."""

    async def run(self) -> None: ...


class ReportingComponent(BackgroundReporter, CycleSink, Protocol):
    """A BackgroundReporter that takes cycles."""


class OpenedComponents(msgspec.Struct):
    """Opened components by what the agent does with them; a component may be in all three lists."""

    sinks: list[CycleSink] = []
    reporters: list[HealthReporter] = []
    background: list[BackgroundReporter] = []

    def add_sink(self, component: ReportingComponent) -> None:
        """Add a component that takes cycles, reports its health and works in a task."""
        self.sinks.append(component)
        self.add(component)

    def add(self, component: BackgroundReporter) -> None:
        """Add a component that reports its health and works in a task."""
        self.reporters.append(component)
        self.background.append(component)


class ClusterConnection:
    """The agent's connection to its cluster: reports, dynamic configuration, and Katalyst peers at sockets.

    Without a node name there is no API server, and without configured sockets there are no peers.
    """

    def __init__(self, node: str, state_dir: Path | None, kubelet: KubeletConfigPoller | None = None) -> None:
        """`state_dir` holds the dynamic configuration that was applied last; None if another agent has its lock. `kubelet` is
        the configuration of the kubelet; None without one."""
        self._node, self._state_dir, self._kubelet = node, state_dir, kubelet
        self._documents: SettingDocuments = {}
        self._config, self._started_wall_ns = AgentConfig(), time.time_ns()
        self._dynamic: DynamicConfig | None = None
        self._follower: CustomNodeConfigFollower | None = None
        self._client: KubeClient | None = None
        self._opened: list[OpenedComponents] = []
        self._annotations: Callable[[], Mapping[str, str] | None] = lambda: None
        self.peers: KatalystPeers | None = None
        """The Katalyst peers at sockets, after `join`."""

    def open(
        self, documents: SettingDocuments, config: AgentConfig, check_node: NodeCheck
    ) -> tuple[AgentConfig, tuple[str, ...]]:
        """Return the configuration of the documents and of the objects that were applied last, and warnings.

        Raises Unavailable.
        """
        self._documents, self._config = documents, config
        if not self._node:
            return config, ()
        from agent.dynamic_config.follow import DynamicConfig  # noqa: PLC0415 - the types of Katalyst's kinds
        from agent.dynamic_config.last_good import LastGoodFile  # noqa: PLC0415

        last_good = None if self._state_dir is None else LastGoodFile(self._state_dir, self._node)
        self._dynamic = DynamicConfig(documents, config, check_node, last_good)
        ignored = (f"node.annotations are ignored: those of Node {self._node} count; take them out of the settings.",)
        return self._dynamic.config, (*self._dynamic.messages, *(ignored if config.node.annotations else ()))

    async def join(
        self,
        config: AgentConfig,
        act: ActMode,
        evictor: EvictionRunner | None,
        tasks: SupervisedTasks,
        pods: object = None,
    ) -> tuple[CycleSink, ...]:
        """Connect to the API server and the peers, and return the sinks that report cycles there.

        The components of the eviction manager that need either, or the details of its pod source `pods`, are opened too.
        Raises Unavailable if no API server is named.
        """
        sockets = config.sockets
        if self._dynamic is not None:
            # A dry run takes no CPU back from reclaimed pods, so it reports none, unless a peer carries out the decisions.
            by_peer = act is ActMode.DRY_RUN and any(socket in EXECUTED_BY_PEER for socket in sockets.serve)
            await self._connect(self._dynamic, tasks.stack, reports_reclaimable=act is ActMode.ON or by_peer)
        if act is not ActMode.OFF and (sockets.serve or sockets.take):
            from agent.katalyst.peers import KatalystPeers  # noqa: PLC0415 - gRPC is 12 MiB, and most agents stand alone

            self.peers = KatalystPeers(config)
            self._opened.append(OpenedComponents([*self.peers.sinks], [*self.peers.sources]))
        if evictor is not None:
            from agent.eviction.runner import PodDetails  # noqa: PLC0415 - only agents that evict

            evictor.pod_details = pods if isinstance(pods, PodDetails) else None
            self._opened.append(
                open_eviction_components(
                    evictor, config, self._client, self._node, tasks.stack, kubelet=self._kubelet is not None
                )
            )
        return tuple(sink for opened in self._opened for sink in opened.sinks)

    async def _connect(self, dynamic: DynamicConfig, stack: AsyncExitStack, *, reports_reclaimable: bool) -> None:
        """Open the components that work with the API server, which is named as for kubectl and not contacted yet."""
        from agent.dynamic_config.follow import CustomNodeConfigFollower  # noqa: PLC0415
        from agent.reporter.events import EvictionEventWriter  # noqa: PLC0415
        from agent.reporter.extended_resources import ExtendedResources  # noqa: PLC0415
        from common.yaml_guard import check_yaml  # noqa: PLC0415
        from kube.client import KubeClient  # noqa: PLC0415
        from kube.kubeconfig import load_access  # noqa: PLC0415

        access = load_access(os.environ, check_yaml)
        client = await stack.enter_async_context(KubeClient(access, f"dioptase-agent/{VERSION}"))
        config, node = dynamic.config, self._node
        self._client, self._follower = client, CustomNodeConfigFollower(client, node, dynamic)
        opened, pollers = OpenedComponents(reporters=[self._follower]), list[BackgroundReporter]()
        if config.report.offered_in:
            from agent.katalyst.reporter_plugin_server import ReporterPluginServer  # noqa: PLC0415 - gRPC is 12 MiB

            offered_in = Path(config.report.offered_in)
            opened.add_sink(ReporterPluginServer(offered_in, reports_reclaimable=reports_reclaimable))
        else:
            cnr, pollers = open_cnr_writer(
                client, node, config, stack, self._kubelet, reports_reclaimable=reports_reclaimable
            )
            opened.add_sink(cnr)
        opened.add_sink(EvictionEventWriter(client, node))
        # By the settings file: an object of the cluster may disable power now and enable it later.
        if self._config.power.enable or self._config.overcommit.enable:
            from agent.dynamic_config.node_annotations import NodeAnnotations  # noqa: PLC0415 - few nodes enable either

            followed = NodeAnnotations(client, node, config)
            self._annotations = followed.latest
            opened.add(followed)
        if config.report.extended_resources:
            extended = ExtendedResources(client, node, reports_reclaimable=reports_reclaimable)
            stack.push_async_callback(extended.withdraw)
            opened.add_sink(extended)
        for poller in pollers:
            opened.add(poller)
        self._opened.append(opened)

    @property
    def reporters(self) -> tuple[HealthReporter, ...]:
        """The health of all these components, after `join`. They live on the event loop."""
        return tuple(reporter for opened in self._opened for reporter in opened.reporters)

    def start(self, apply_config: Callable[[AgentConfig], None], tasks: SupervisedTasks) -> None:
        """Start to report, and to pass each new dynamic configuration to `apply_config`."""
        for opened in self._opened:
            for component in opened.background:
                tasks.begin(component.name, component.run)
        if self._follower is not None:
            tasks.begin(self._follower.name, partial(self._follower.run, apply_config))
        if self.peers is not None:
            self.peers.start(tasks)

    def node_annotations(self) -> Mapping[str, str] | None:
        """Return the annotations of the Node that policies read, without API server those of the settings file.

        None while they are unknown. Any thread may call it.
        """
        if not self._node:
            return self._config.node.annotations
        return self._annotations()

    def socket_counters(self) -> Mapping[str, Any]:
        """Return AgentInfo's counters of gRPC calls and Katalyst peers. Any thread may call it."""
        calls: dict[str, Any] = {"calls": CALL_COUNTS.copy()}
        if self.peers is not None:
            calls |= {"advice_ages_s": self.peers.ages_s(), "peers": self.peers.peers()}
        return calls

    async def review(self, token: str, path: str) -> bool | None:
        """Return whether the token's account may get that path; None if the token is not valid. Raises Unavailable."""
        if self._client is None:
            raise Unavailable("the agent has not joined its cluster yet", "try again in a second")
        from kube.access_review import review_token  # noqa: PLC0415 - only with tokenReview

        return await review_token(self._client, token, path)

    @property
    def client(self) -> KubeClient | None:
        """The client of the API server, after `join`; None without an API server."""
        return self._client

    def requests(self) -> Mapping[tuple[str, str, str], int]:
        """Return the number of requests to the API server by method, resource and status. Any thread may call it."""
        return {} if self._client is None else self._client.requests.copy()

    def applied_objects(self) -> Mapping[tuple[str, ...], bool]:
        """Return whether each configuration object, by kind, key and hash, is applied; False for one that is not valid."""
        return {} if self._follower is None or self._dynamic is None else self._dynamic.object_states()

    def effective_configuration(self) -> EffectiveConfiguration:
        """Return every setting and its source."""
        if self._follower is not None:
            return self._follower.effective()
        from agent.dynamic_config.effective import effective_configuration  # noqa: PLC0415
        from agent.dynamic_config.merge import ResolvedConfig  # noqa: PLC0415 - rarely requested

        return effective_configuration(
            ResolvedConfig(self._config, {}, {}, {}, {}), self._documents, self._started_wall_ns
        )


NOTICES_TIMEOUT_S = 1.0
"""Time that the end of the agent waits for notices of soft evictions."""
POD_RESOURCES = "pod-resources/kubelet.sock"
"""Path of the socket below the kubelet's root directory."""


def open_cnr_writer(
    client: KubeClient,
    node: str,
    config: AgentConfig,
    stack: AsyncExitStack,
    kubelet: KubeletConfigPoller | None,
    *,
    reports_reclaimable: bool,
) -> tuple[CnrWriter, list[BackgroundReporter]]:
    """Open the writer of the node's CustomNodeResource and the components that collect its other inputs."""
    from agent.reporter.cnr_input_collector import CnrInputCollector  # noqa: PLC0415
    from agent.reporter.cnr_inputs import CnrInputs  # noqa: PLC0415
    from agent.reporter.cnr_writer import CnrWriter  # noqa: PLC0415

    report, allocations = config.report, None
    socket, default = report.pod_resources, Path(config.kubelet.root_dir) / POD_RESOURCES
    if socket is None and kubelet is not None and default.exists():
        socket = str(default)
    if socket:
        from agent.katalyst.pod_resources import PodResourcesListerClient  # noqa: PLC0415 - gRPC is 12 MiB

        allocations = PodResourcesListerClient(Path(socket))
        stack.push_async_callback(allocations.close)
    start = CnrInputs(cpu_flags=report.cpu_flags, zone_types=report.device_zones)
    collector = CnrInputCollector((Path("/proc"), Path("/sys")), start, kubelet, allocations)
    pollers: list[BackgroundReporter] = [collector]
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

        plugins = ReporterPlugins(Path(report.reporter_plugins), cnr.wake, trusted_uids=config.sockets.trusted_uids)
        fields = plugins.fields
        pollers.append(plugins)
    return cnr, pollers


def open_pod_evictor(config: EvictionConfig, hierarchy: Hierarchy, *, node: str, kubelet: bool) -> PodEvictor:
    """Open the pod evictor of the configured methods. Raises Unavailable for a method that cannot work on this node."""
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


def open_eviction_components(
    evictor: EvictionRunner,
    config: AgentConfig,
    client: KubeClient | None,
    node: str,
    stack: AsyncExitStack,
    *,
    kubelet: bool,
) -> OpenedComponents:
    """Open the components that the eviction manager needs in addition to its plugins.

    With `kubelet` the pods are those of a container runtime. Raises Unavailable.
    """
    from agent.eviction.plugins import rootfs_overuse, rootfs_pressure  # noqa: PLC0415 - only agents that evict
    from agent.eviction.soft_eviction_notifier import SoftEvictionNotifier  # noqa: PLC0415

    opened, settings, pod_evictor = OpenedComponents(), config.eviction, evictor.pod_evictor
    if pod_evictor is not None:
        evictor.notifier = SoftEvictionNotifier(None)
        if settings.notify_root:
            # This thread is separate, because that directory may be on another disk than the state directory.
            disk = DiskWriter("notices")
            stack.callback(disk.close, NOTICES_TIMEOUT_S)
            evictor.notifier = SoftEvictionNotifier(Path(settings.notify_root), disk=disk)
    if isinstance(pod_evictor, EvictorByQosLevel):
        _open_eviction_methods(pod_evictor, config, client)
        # The client of the API server was opened after the evictor; its tasks must end before the client is closed.
        stack.callback(pod_evictor.close)
        opened.reporters.append(pod_evictor.requests)
        if client is not None and settings.budget_lease:
            from agent.eviction.cluster_budget import open_cluster_budget  # noqa: PLC0415 - the client of the API server

            opened.sinks.append(open_cluster_budget(client, settings.budget_lease, node, pod_evictor.requests))
    if client is not None and pod_evictor is not None:
        from agent.reporter.node_taints import NodeTaints  # noqa: PLC0415 - without an API server there is no Node

        taints = NodeTaints(client, node)
        stack.push_async_callback(taints.withdraw)
        opened.add_sink(taints)
    details, records = evictor.pod_details, None
    if client is not None and details is not None:
        from agent.eviction.eviction_records import EvictionRecords  # noqa: PLC0415 - the client of the API server

        records = EvictionRecords(client, details.workload, evictor.needs_records)
        evictor.records = records.latest
        opened.add_sink(records)
    if settings.plugin_sockets:
        external = _open_external_plugins(config, details, records)
        evictor.external_findings = external.findings
        opened.add_sink(external)
    if kubelet and (socket := find_runtime_socket(config.kubelet.runtime_socket)) is not None:
        from agent.eviction.writable_layers import WritableLayers  # noqa: PLC0415 - gRPC is 12 MiB

        needed = partial(evictor.is_enabled, rootfs_pressure.NAME, rootfs_overuse.NAME)
        layers = WritableLayers(socket, config.kubelet.timeout_s, needed)
        evictor.rootfs = layers.use
        opened.add(layers)
    return opened


def _open_external_plugins(
    config: AgentConfig, details: PodDetails | None, records: EvictionRecords | None
) -> ExternalEvictionPlugins:
    """Open the clients of plugins at sockets, which receive what the kubelet and the API server have of pods."""
    from agent.katalyst.external_evictions import ExternalEvictionPlugins  # noqa: PLC0415 - gRPC is 12 MiB

    open_plugins = partial(ExternalEvictionPlugins, config.eviction, trusted_uids=config.sockets.trusted_uids)
    if details is None:
        return open_plugins()
    if records is None:
        return open_plugins(manifest=details.manifest)
    return open_plugins(manifest=details.manifest, records=records.load)


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
                    f"eviction.killer: {CONTAINER_METHOD}: there is no container runtime", "set kubelet.runtimeSocket"
                )
            evictor.eviction_methods[name] = CriEvictor(socket, config.kubelet.timeout_s)
