"""Katalyst's QoS levels, enhancements and the annotation keys that carry them (katalyst.kubewharf.io, v0.5).
An unknown or contradictory level raises ValueError; it never becomes a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from api.text import quote

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
        """Whether idle CPU of this level may be reclaimed and must be returned on demand."""
        return self in (QoSLevel.SHARED, QoSLevel.DEDICATED)


class BurstPolicy(StrEnum):
    """Values of cpu_burst_policy: whether a container may accumulate unused CPU time and use it beyond its quota."""

    DEFAULT = "default"
    """Use the policy in the node's configuration."""
    CLOSED = "closed"
    STATIC = "static"
    DYNAMIC = "dynamic"


class Enhancements(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed and validated values of the memory_, cpu_ and network_enhancement annotations of one pod."""

    numa_binding: bool = False
    """Place all memory and CPUs of the pod on as few NUMA nodes as can hold them."""
    numa_exclusive: bool = False
    """Give these NUMA nodes to this pod only; dedicated_cores only."""
    numa_share: bool = True
    """Whether other pods may share its NUMA nodes."""
    numa_ids: tuple[int, ...] | None = None
    """NUMA nodes to use, exactly these."""
    numa_number: int | None = None
    """Number of NUMA nodes to use; numa_ids takes precedence."""
    align_by_socket: bool = False
    distribute_evenly: bool = False
    """Katalyst's distribute_evenly_across_numa."""
    full_cores: bool = False
    """Katalyst's full_pcpus_pairing: allocate complete physical cores."""
    cpuset_pool: str = ""
    """Name of the pod's CPU pool if it is not `share`."""
    suppression_tolerance_rate: float | None = None
    """Ratio of requested to available reclaimed CPU above which the pod is evicted; None tolerates any ratio."""
    burst_policy: BurstPolicy = BurstPolicy.DEFAULT
    burst_percent: float | None = None
    """Percentage of the quota, 0 to 100."""
    rss_overuse_threshold: float | None = None
    """Ratio of resident memory to requests from which the pod may be evicted; None uses the node's threshold."""
    oom_priority: int = 0
    """The OOM killer selects the lowest priority first. Bounded by the level's range; 300 exempts the pod."""


class AnnotationMapping(msgspec.Struct, frozen=True, kw_only=True):
    """Annotation names of this cluster that stand for Katalyst's annotations (settings: agent/config/qos.py)."""

    selectors: Mapping[QoSLevel, Mapping[str, str]] = {}
    """Additional annotations, with their values, that assign a pod to a level."""
    renamed: Mapping[str, str] = {}
    """Alternative names of MEMORY_KEY, CPU_KEY and NETWORK_KEY. Katalyst's own annotation takes precedence."""
    defaults: Mapping[str, str] = {}
    """Enhancements, by name, of pods that do not set them and whose level supports them."""
    numa_number_key: str = NUMA_NUMBER_KEY
    numa_ids_key: str = NUMA_IDS_KEY
    numa_bind_result_key: str = NUMA_BIND_RESULT_KEY


def explicit_qos_level(
    annotations: Mapping[str, str], selectors: Mapping[QoSLevel, Mapping[str, str]] | None = None
) -> QoSLevel | None:
    """Return the level stated by Katalyst's annotation or by one of `selectors`; None if the pod states none.

    Raises ValueError that names annotation and remedy if the value is unknown, or if two annotations disagree.
    """
    levels: dict[QoSLevel, str] = {}
    accepted = {level: {QOS_LEVEL_KEY: level.value, **(selectors or {}).get(level, {})} for level in QoSLevel}
    for level, values in accepted.items():
        agree = [key for key, value in values.items() if annotations.get(key) == value]
        differ = [key for key, value in values.items() if annotations.get(key, value) != value]
        if agree and differ:
            raise ValueError(
                f"annotation {differ[0]}: {quote(annotations[differ[0]])} contradicts {agree[0]}, "
                f"which says {level.value}; remove one of the two"
            )
        if agree:
            levels[level] = agree[0]
    if len(levels) > 1:
        (level, key), (other_level, other_key) = list(levels.items())[:2]
        raise ValueError(
            f"annotation {key} says {level.value} and {other_key} says {other_level.value}; remove one of the two"
        )
    if not levels:
        _raise_if_unknown(annotations, accepted)
    return next(iter(levels), None)


def _raise_if_unknown(annotations: Mapping[str, str], accepted: Mapping[QoSLevel, Mapping[str, str]]) -> None:
    # As in Katalyst, an unknown value of a key of the default level is an error; an unknown value of a key of another
    # level means that the pod does not have that level.
    for key in accepted[QoSLevel.SHARED]:
        if key in annotations:
            choices = ", ".join(dict.fromkeys(values[key] for values in accepted.values() if key in values))
            raise ValueError(f"annotation {key}: {quote(annotations[key])} is not a QoS level; use one of {choices}")
