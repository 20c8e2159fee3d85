"""Pods as the agent sees them, whoever lists them: a static file, the kubelet or the container runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

import msgspec

from api.profiles import ServiceProfile
from api.qos import Enhancements, QoSLevel

RECLAIMED_CPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
"""In thousandths of a CPU, as a whole number: `2k` is two CPUs."""
RECLAIMED_MEMORY = "resource.katalyst.kubewharf.io/reclaimed_memory"
NET_BANDWIDTH = "resource.katalyst.kubewharf.io/net_bandwidth"
"""In Mbit/s, both ways."""
_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2}|)", re.ASCII)
_SCALE = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("0.001"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip


def parse_quantity(text: str) -> Decimal:
    """The number that a Kubernetes quantity stands for: `500m` is 0.5, `1Gi` is 1073741824, `1e3` is 1000. Never negative.

    Raises ValueError that quotes the text.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.80} is not a quantity; write a number such as 2, 0.5, 500m or 1Gi")
    scale = _SCALE.get(match[2])
    return Decimal(match[1]) * (Decimal(f"1{match[2]}") if scale is None else scale)


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
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    priority: int = 0
    """Kubernetes' own: of two pods the one with less gives way."""
    enhancements: Enhancements = Enhancements()
    bound_numa: tuple[int, ...] = ()
    """NUMA nodes that it was bound to (numa_bind_result); empty where to none."""
    profile: ServiceProfile = ServiceProfile()
    leaving: bool = False
    """Whether it was told to end, whoever did (deletionTimestamp): it runs on for a while, and need not be told again."""
    problems: tuple[str, ...] = ()
    """What its labels and annotations say that cannot be taken as said: annotation, reason, remedy and what holds instead."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"
