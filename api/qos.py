"""Katalyst's QoS levels and the pod annotations that carry them (katalyst.kubewharf.io, v0.5)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

QOS_LEVEL_KEY = "katalyst.kubewharf.io/qos_level"


class QoSLevel(StrEnum):
    """How a pod's CPUs relate to those of other pods; the values are Katalyst's."""

    SHARED = "shared_cores"
    DEDICATED = "dedicated_cores"
    RECLAIMED = "reclaimed_cores"
    SYSTEM = "system_cores"

    @property
    def online(self) -> bool:
        """Whether the node lends this level's idle CPU and must give it back on demand."""
        return self in (QoSLevel.SHARED, QoSLevel.DEDICATED)


class BurstPolicy(StrEnum):
    """cpu_burst_policy: whether CPU that was not used may be saved up and used beyond the quota."""

    DEFAULT = "default"
    """As the node's configuration has it."""
    CLOSED = "closed"
    STATIC = "static"
    DYNAMIC = "dynamic"


class Enhancements(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks for beyond its level: the values of memory_, cpu_ and network_enhancement, read and checked."""

    numa_binding: bool = False
    """All of its memory and CPU on as few NUMA nodes as hold it."""
    numa_exclusive: bool = False
    """And those nodes for itself; dedicated_cores alone."""
    numa_share: bool = True
    """Whether other pods may share its NUMA nodes."""
    numa_ids: tuple[int, ...] | None = None
    """Exactly these nodes."""
    numa_number: int | None = None
    """So many nodes; numa_ids counts more."""
    align_by_socket: bool = False
    distribute_evenly: bool = False
    """distribute_evenly_across_numa."""
    full_cores: bool = False
    """full_pcpus_pairing: whole physical cores."""
    cpuset_pool: str = ""
    """Name of its pool, where that is not `share`."""
    suppression_tolerance_rate: float | None = None
    """How many times what reclaimed pods get their requests may be before it is evicted; None bears everything."""
    burst_policy: BurstPolicy = BurstPolicy.DEFAULT
    burst_percent: float | None = None
    """Of the quota, 0 to 100."""
    rss_overuse_threshold: float | None = None
    """Resident memory over requests from which it may be evicted; None is the node's."""
    oom_priority: int = 0
    """The OOM killer takes the lowest first; within the bounds of its level, never with 300."""
    namespace_type: str = ""
    """host_ns, host_ns_preferred, anti_host_ns or anti_host_ns_preferred."""
    affinity_restricted: bool = False
    """topology_affinity_restricted: near its network card or nowhere."""


def qos_level(annotations: Mapping[str, str]) -> QoSLevel:
    """The level a pod asks for: shared_cores when it says nothing; a value nobody knows is a ValueError, not a default."""
    value = annotations.get(QOS_LEVEL_KEY, QoSLevel.SHARED.value)
    try:
        return QoSLevel(value)
    except ValueError:
        known = ", ".join(level.value for level in QoSLevel)
        raise ValueError(f"annotation {QOS_LEVEL_KEY}: {value!r} is not a QoS level; use one of {known}") from None
