"""Pods and containers of a node with their requests, limits, QoS level and enhancements.
The same structs serve every pod source: a static file, the kubelet or the container runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.annotations import ServiceProfile
from api.qos import Enhancements, QoSLevel

RECLAIMED_CPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
"""Resource name of reclaimed CPU, in thousandths of a CPU: `2k` is two CPUs."""
RECLAIMED_MEMORY = "resource.katalyst.kubewharf.io/reclaimed_memory"
NET_BANDWIDTH = "resource.katalyst.kubewharf.io/net_bandwidth"
"""Resource name of network bandwidth in Mbit/s, reserved in both directions."""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One container: its cgroup and its requests and limits; None if it has none."""

    name: str
    cgroup: str
    """Path below the root of every controller, with a leading slash and without a trailing one."""
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
    """Whether this container starts and stops with the pod's main container."""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod with its resolved QoS level; `uid` is set by Kubernetes, or `namespace/name` in a static file."""

    uid: str
    namespace: str
    name: str
    qos: QoSLevel
    containers: tuple[Container, ...]
    """Running containers."""
    waiting: tuple[Container, ...] = ()
    """Containers that may still run: not started yet, between two restarts, or finished in an unfinished pod. No `cgroup`."""
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    priority: int = 0
    """Kubernetes' pod priority: of two pods the one with the lower priority is evicted first."""
    priority_class: str = ""
    """Name of its PriorityClass (priorityClassName), empty without one. It and the namespace decide about the pod's
    rights (`qos.rights`)."""
    enhancements: Enhancements = Enhancements()
    bound_numa: tuple[int, ...] = ()
    """NUMA nodes that the pod was bound to (numa_bind_result); empty if none."""
    profile: ServiceProfile = ServiceProfile()
    address: str | None = None
    """IP address at which the pod's ports answer, loopback if it shares the node's network; None if unknown. Never taken
    from an annotation, so that a pod cannot direct the agent to another host."""
    grace_s: float | None = None
    """Termination grace period: deletionGracePeriodSeconds if the pod is being deleted, else terminationGracePeriodSeconds;
    None if unknown."""
    placed_s: float | None = None
    """Time at which the pod got this node, in seconds since the epoch; None if the source of pods does not have it."""
    terminating: bool = msgspec.field(default=False, name="leaving")
    """Whether the pod is being deleted (deletionTimestamp is set). It keeps running for its grace period."""
    problems: tuple[str, ...] = ()
    """Invalid labels and annotations: each names the annotation, the reason, the value used instead and the remedy."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def request_weight(container: Container) -> float:
    """Return the weight by which reclaimed containers share the reclaimable CPU."""
    return container.reclaimed_cpu_cores or container.cpu_request_cores or 1.0
