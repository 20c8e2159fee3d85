"""Evicts each pod by the method that is configured for its QoS level: signals, the container runtime or the API server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent.config.eviction import EvictionConfig, EvictionMethodName
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.eviction import EvictionBlock, EvictionEvent
from api.pod import Pod

if TYPE_CHECKING:
    from agent.eviction.api_evictor import EvictionMethod
    from agent.eviction.runner import PodEvictor

SIGNAL_METHOD, CONTAINER_METHOD = "signals", "container-killer"
API_METHODS = {"eviction-api-killer": "eviction", "deletion-api-killer": "deletion"}


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
        """Evict the pod by the method of its QoS level, as PodEvictor says."""
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
        """Return the method that is set for the pod's QoS level."""
        return self._by_level.get(pod.qos.value, self._default)  # type: ignore[call-overload, no-any-return]
