"""The eviction manager's ways out of this process: killers by their names, plugins at sockets, the Node's taints.

`open_killer` is called before the first round, `join` once the API server is known; both load only what the settings ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agent.config import Config
from agent.config.eviction import EvictionConfig, KillerName
from agent.eviction.evictor import Evictor
from agent.eviction.killer import Killer
from agent.eviction.notifier import Notifier
from agent.eviction.rootfs import OVERUSE_NAME, PRESSURE_NAME
from agent.eviction.signals import SignalKiller
from agent.hierarchy import Hierarchy
from agent.sense.running import find_socket
from agent.tending import Tending
from api.evictions import Held, KillEvent
from api.pods import Pod
from api.ports import Probe, Sink, Unavailable

if TYPE_CHECKING:
    from agent.eviction.ways import Way
    from kube.client import Client

SIGNALS, CONTAINERS = "signals", "container-killer"
FORMS = {"eviction-api-killer": "eviction", "deletion-api-killer": "deletion"}


class Beside(Sink, Probe, Protocol):
    """A part that works beside the rounds, is shown them, and says how it fares."""


class Killers:
    """A Killer that has each pod leave by the way that is set for its level."""

    def __init__(self, config: EvictionConfig, usual: KillerName, hierarchy: Hierarchy) -> None:
        from agent.eviction.asking import AskingKiller  # noqa: PLC0415 - nodes with a file of pods ask nobody

        self._usual, self._levels = usual, config.killers
        self.ways: dict[str, Way] = {}
        """By name; they are known once the API server is."""
        self.asking, self._signals = AskingKiller(lambda pod: self.ways[self._name(pod)]), SignalKiller(hierarchy)

    @property
    def leaving(self) -> frozenset[str]:
        """As Killer says."""
        return self.asking.leaving | self._signals.leaving

    @property
    def stuck(self) -> frozenset[str]:
        """As Killer says."""
        return self.asking.stuck | self._signals.stuck

    @property
    def held(self) -> Mapping[str, Held]:
        """As Killer says."""
        return self.asking.held

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """As Killer says."""
        killer: Killer = self._signals if self._name(pod) == SIGNALS else self.asking
        killer.evict(pod, grace_s, reason)

    def withdraw(self, pod: str, why: str) -> None:
        """As Killer says."""
        self.asking.withdraw(pod, why)

    def outcomes(self) -> Sequence[KillEvent]:
        """As Killer says."""
        return (*self.asking.outcomes(), *self._signals.outcomes())

    def close(self) -> None:
        """As Killer says."""
        self.asking.close()
        self._signals.close()

    def _name(self, pod: Pod) -> KillerName:
        return self._levels.get(pod.qos.value, self._usual)  # type: ignore[call-overload, no-any-return]


def open_killer(config: EvictionConfig, hierarchy: Hierarchy, *, node: str, kubelet: bool) -> Killer:
    """Whoever makes pods leave, by the settings. Raises Unavailable for one that cannot work on this node."""
    usual = config.killer or ("eviction-api-killer" if node and kubelet else "signals")
    names = {usual, *config.killers.values()}
    for name in sorted(names):
        lacking = [] if name == SIGNALS or kubelet else ["--kubelet"]
        lacking += ["--node"] if name in FORMS and not node else []
        if lacking:
            reason = f"eviction.killer: {name} needs {' and '.join(lacking)}"
            raise Unavailable(reason, f"start the agent with {' and '.join(lacking)}, or set it to {SIGNALS}")
    if names == {SIGNALS}:
        return SignalKiller(hierarchy)
    return Killers(config, usual, hierarchy)


async def join(
    evictor: Evictor, config: Config, client: Client | None, node: str, tending: Tending, *, kubelet: bool
) -> tuple[Beside, ...]:
    """The parts that work beside the rounds, begun; with `kubelet` the pods are those of a container runtime. Raises
    Unavailable."""
    parts: list[Beside] = []
    settings, stack = config.eviction, tending.stack
    acting = evictor.killer is not None
    if acting:
        evictor.notifier = Notifier(Path(settings.notify_root) if settings.notify_root else None)
    if isinstance(evictor.killer, Killers):
        _open_ways(evictor.killer, config, client)
        # Before the client of the API server is closed, which was opened after the killer.
        stack.callback(evictor.killer.close)
        parts.append(evictor.killer.asking)
    if client is not None and acting:
        from agent.report.node_taints import NodeTaints  # noqa: PLC0415 - without an API server there is no Node

        taints = NodeTaints(client, node)
        stack.push_async_callback(taints.withdraw)
        tending.begin(taints.name, taints.run)
        parts.append(taints)
    if settings.plugin_sockets:
        from agent.eviction.protocol.outside import Outside  # noqa: PLC0415 - gRPC is 12 MiB

        outside = Outside(settings)
        evictor.outside = outside.findings
        tending.begin(outside.name, outside.run)
        parts.append(outside)
    if kubelet and (socket := find_socket(config.kubelet.runtime_socket)) is not None:
        from agent.eviction.protocol.layers import Layers  # noqa: PLC0415 - gRPC is 12 MiB

        layers = Layers(socket, config.kubelet.timeout_s, lambda: evictor.wants(PRESSURE_NAME, OVERUSE_NAME))
        evictor.rootfs = layers.use
        tending.begin(layers.name, layers.run)
        parts.append(layers)
    return tuple(parts)


def _open_ways(killers: Killers, config: Config, client: Client | None) -> None:
    for name in {config.eviction.killer or "eviction-api-killer", *config.eviction.killers.values()}:
        if name in FORMS and client is not None:
            from agent.eviction.ways import ApiWay  # noqa: PLC0415 - the client of the API server

            killers.ways[name] = ApiWay(client, FORMS[name])  # type: ignore[arg-type]
        elif name == CONTAINERS:
            from agent.eviction.protocol.stopping import ContainerWay  # noqa: PLC0415 - gRPC is 12 MiB

            socket = find_socket(config.kubelet.runtime_socket)
            if socket is None:
                raise Unavailable(
                    f"eviction.killer: {CONTAINERS}: no container runtime is there", "set kubelet.runtimeSocket"
                )
            killers.ways[name] = ContainerWay(socket, config.kubelet.timeout_s)
