"""Pods and containers of a node with their requests, limits, QoS level and enhancements.
The same structs serve every pod source: a static file, the kubelet or the container runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.annotations import ServiceProfile
from api.qos import Enhancements, QoSLevel

RECLAIMED_CPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
"""In thousandths of a CPU, as a whole number: `2k` is two CPUs."""
RECLAIMED_MEMORY = "resource.katalyst.kubewharf.io/reclaimed_memory"
NET_BANDWIDTH = "resource.katalyst.kubewharf.io/net_bandwidth"
"""In Mbit/s, both ways."""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One container: the cgroup that holds its tasks and what it asked for (None where it asked for nothing)."""

    name: str
    cgroup: str
    """Path below the root of every controller, with a leading slash and none at the end."""
    cpu_request_cores: float | None = None
    cpu_limit_cores: float | None = None
    memory_request_bytes: int | None = None
    memory_limit_bytes: int | None = None
    reclaimed_cpu_cores: float | None = None
    """Request of resource.katalyst.kubewharf.io/reclaimed_millicpu."""
    reclaimed_memory_bytes: int | None = None
    """Request of resource.katalyst.kubewharf.io/reclaimed_memory."""
    net_bandwidth_mbit: int | None = None
    """Request of resource.katalyst.kubewharf.io/net_bandwidth."""
    sidecar: bool = False
    """Whether it goes along with the pod's main container."""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod with its resolved QoS level; `uid` is what Kubernetes gave it, or `namespace/name` in a static file."""

    uid: str
    namespace: str
    name: str
    qos: QoSLevel
    containers: tuple[Container, ...]
    """Those that run."""
    waiting: tuple[Container, ...] = ()
    """Those that do not, and may: not begun yet, between two lives, or over while the pod is not. Their `cgroup` is empty."""
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    priority: int = 0
    """Kubernetes' own: of two pods the one with less gives way."""
    enhancements: Enhancements = Enhancements()
    bound_numa: tuple[int, ...] = ()
    """NUMA nodes that it was bound to (numa_bind_result); empty where to none."""
    profile: ServiceProfile = ServiceProfile()
    address: str | None = None
    """Where its ports answer: its own IP address, or that of loopback where it shares the node's network; None where nobody
    says it. Never what its annotations say."""
    grace_s: float | None = None
    """What it asks for to end in [terminationGracePeriodSeconds], or was given when it was told to
    [deletionGracePeriodSeconds]; None where nobody says it."""
    terminating: bool = msgspec.field(default=False, name="leaving")
    """Whether it was told to end, whoever did (deletionTimestamp): it runs on for a while, and need not be told again."""
    problems: tuple[str, ...] = ()
    """What its labels and annotations say that cannot be taken as said: annotation, reason, remedy and what holds instead."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"
