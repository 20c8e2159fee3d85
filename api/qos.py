"""Katalyst's QoS levels and the pod annotations that carry them (katalyst.kubewharf.io, v0.5)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

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


def qos_level(annotations: Mapping[str, str]) -> QoSLevel:
    """The level a pod asks for: shared_cores when it says nothing; a value nobody knows is a ValueError, not a default."""
    value = annotations.get(QOS_LEVEL_KEY, QoSLevel.SHARED.value)
    try:
        return QoSLevel(value)
    except ValueError:
        known = ", ".join(level.value for level in QoSLevel)
        raise ValueError(f"annotation {QOS_LEVEL_KEY}: {value!r} is not a QoS level; use one of {known}") from None
