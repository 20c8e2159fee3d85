"""Katalyst's QoS levels, enhancements and the annotation keys that carry them (katalyst.kubewharf.io, v0.5).
Pure. An unknown or contradictory level raises ValueError; it never becomes a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

QOS_LEVEL_KEY = "katalyst.kubewharf.io/qos_level"
MEMORY_KEY = "katalyst.kubewharf.io/memory_enhancement"
CPU_KEY = "katalyst.kubewharf.io/cpu_enhancement"
NETWORK_KEY = "katalyst.kubewharf.io/network_enhancement"
NUMA_NUMBER_KEY = "katalyst.kubewharf.io/numa_number"
NUMA_IDS_KEY = "katalyst.kubewharf.io/numa_ids"
NUMA_BIND_RESULT_KEY = "katalyst.kubewharf.io/numa_bind_result"
NIC_SELECTION_KEY = "katalyst.kubewharf.io/nic_selection_result"
MAIN_CONTAINER_KEY = "kubernetes.io/main-container-name"


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


class AnnotationMapping(msgspec.Struct, frozen=True, kw_only=True):
    """Under which names the pods of a cluster say what Katalyst's annotations say (settings: agent/config/qos.py)."""

    selectors: Mapping[QoSLevel, Mapping[str, str]] = {}
    """Further annotations that put a pod into a level, with the values that do."""
    renamed: Mapping[str, str] = {}
    """Of MEMORY_KEY, CPU_KEY and NETWORK_KEY: another annotation of the same meaning. Katalyst's own counts more."""
    defaults: Mapping[str, str] = {}
    """Enhancements, by name, of pods that do not say them and whose level knows them."""
    numa_number_key: str = NUMA_NUMBER_KEY
    numa_ids_key: str = NUMA_IDS_KEY
    numa_bind_result_key: str = NUMA_BIND_RESULT_KEY


def explicit_qos_level(
    annotations: Mapping[str, str], selectors: Mapping[QoSLevel, Mapping[str, str]] | None = None
) -> QoSLevel | None:
    """The level that a pod states, in Katalyst's annotation or in one of `selectors`; None when it says nothing.

    Raises ValueError that names annotation and remedy where the value is unknown, or where two annotations disagree.
    """
    found: dict[QoSLevel, str] = {}
    wanted = {level: {QOS_LEVEL_KEY: level.value, **(selectors or {}).get(level, {})} for level in QoSLevel}
    for level, values in wanted.items():
        agree = [key for key, value in values.items() if annotations.get(key) == value]
        differ = [key for key, value in values.items() if annotations.get(key, value) != value]
        if agree and differ:
            raise ValueError(
                f"annotation {differ[0]}: {annotations[differ[0]]!r:.80} contradicts {agree[0]}, "
                f"which says {level.value}; remove one of the two"
            )
        if agree:
            found[level] = agree[0]
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ValueError(f"annotation {first} says {one.value} and {second} says {other.value}; remove one of the two")
    if not found:
        _raise_if_unknown(annotations, wanted)
    return next(iter(found), None)


def _raise_if_unknown(annotations: Mapping[str, str], wanted: Mapping[QoSLevel, Mapping[str, str]]) -> None:
    # As Katalyst has it, a key of the default level with a value that puts the pod nowhere is an error; of another
    # level it means: not that one.
    for key in wanted[QoSLevel.SHARED]:
        if key in annotations:
            known = ", ".join(dict.fromkeys(values[key] for values in wanted.values() if key in values))
            raise ValueError(f"annotation {key}: {annotations[key]!r:.80} is not a QoS level; use one of {known}")
