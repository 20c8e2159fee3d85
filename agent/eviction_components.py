"""Opens the eviction manager, its eviction methods, and the components that it needs in addition to its plugins.
Every component is imported inside the function that opens it, because gRPC and the API-server client cost memory that
most agents do not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig, EvictionMethodName
from agent.config.loader import find_runtime_socket
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode
from api.eviction import EvictionBlock, EvictionEvent
from api.interfaces import CycleSink, Probe, Unavailable
from api.pod import Pod
from common.supervised_tasks import SupervisedTasks

if TYPE_CHECKING:
    from agent.eviction.api_evictor import EvictionMethod
    from agent.eviction.eviction_records import EvictionRecords
    from agent.eviction.runner import EvictionRunner, PodDetails, PodEvictor
    from agent.katalyst.external_evictions import ExternalEvictionPlugins
    from kube.client import KubeClient

SIGNAL_METHOD, CONTAINER_METHOD = "signals", "container-killer"
API_METHODS = {"eviction-api-killer": "eviction", "deletion-api-killer": "deletion"}


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


class EvictorByQosLevel:
    """A PodEvictor (agent.eviction.runner) that evicts each pod by the method that is set for its QoS level."""

    def __init__(self, config: EvictionConfig, default: EvictionMethodName, hierarchy: Hierarchy) -> None:
        from agent.eviction.api_evictor import ApiEvictor  # noqa: PLC0415 - nodes with a pods file have no API server
        from agent.eviction.signals import SignalEvictor  # noqa: PLC0415

        self._default, self._by_level = default, config.killers
        self.eviction_methods: dict[str, EvictionMethod] = {}
        """Methods by name, set once the API server is known."""
        self.requests = ApiEvictor(lambda pod: self.eviction_methods[self.method_name(pod)])
        self._signals = SignalEvictor(hierarchy)

    @property
    def terminating(self) -> frozenset[str]:
        return self.requests.terminating | self._signals.terminating

    @property
    def stuck(self) -> frozenset[str]:
        return self.requests.stuck | self._signals.stuck

    @property
    def blocked(self) -> Mapping[str, EvictionBlock]:
        return self.requests.blocked

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Evicts the pod by the method of its QoS level, as PodEvictor says."""
        evictor: PodEvictor = self._signals if self.method_name(pod) == SIGNAL_METHOD else self.requests
        evictor.evict(pod, grace_s, reason)

    def cancel(self, pod: str, reason: str) -> None:
        self.requests.cancel(pod, reason)

    def outcomes(self) -> Sequence[EvictionEvent]:
        return (*self.requests.outcomes(), *self._signals.outcomes())

    def close(self) -> None:
        self.requests.close()
        self._signals.close()

    def method_name(self, pod: Pod) -> EvictionMethodName:
        """Returns the method that is set for the pod's QoS level."""
        return self._by_level.get(pod.qos.value, self._default)  # type: ignore[call-overload, no-any-return]


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
    from agent.eviction.plugins import rootfs_overuse, rootfs_pressure  # noqa: PLC0415 - only agents that evict
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
    details, records = evictor.pod_details, None
    if client is not None and details is not None:
        from agent.eviction.eviction_records import EvictionRecords  # noqa: PLC0415 - the client of the API server

        records = EvictionRecords(client, details.workload, evictor.needs_records)
        evictor.records = records.latest
        tasks.begin(records.name, records.run)
        sinks.append(records)
        sources.append(records)
    if settings.plugin_sockets:
        external = _open_external_plugins(settings, details, records)
        evictor.external_findings = external.findings
        tasks.begin(external.name, external.run)
        sinks.append(external)
        sources.append(external)
    if kubelet and (socket := find_runtime_socket(config.kubelet.runtime_socket)) is not None:
        from agent.eviction.writable_layers import WritableLayers  # noqa: PLC0415 - gRPC is 12 MiB

        needed = partial(evictor.is_enabled, rootfs_pressure.NAME, rootfs_overuse.NAME)
        layers = WritableLayers(socket, config.kubelet.timeout_s, needed)
        evictor.rootfs = layers.use
        tasks.begin(layers.name, layers.run)
        sources.append(layers)
    return EvictionComponents(tuple(sinks), tuple(sources))


def _open_external_plugins(
    settings: EvictionConfig, details: PodDetails | None, records: EvictionRecords | None
) -> ExternalEvictionPlugins:
    """Opens the clients of plugins at sockets, which receive what the kubelet and the API server have of pods."""
    from agent.katalyst.external_evictions import ExternalEvictionPlugins  # noqa: PLC0415 - gRPC is 12 MiB

    if details is None:
        return ExternalEvictionPlugins(settings)
    if records is None:
        return ExternalEvictionPlugins(settings, manifest=details.manifest)
    return ExternalEvictionPlugins(settings, manifest=details.manifest, records=records.load)


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
