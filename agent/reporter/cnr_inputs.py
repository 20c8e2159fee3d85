"""Inputs of the CustomNodeResource besides the cycle: hardware, topology policy, pod resources, plugin fields.
It is pure. Formats amounts as Kubernetes quantities in one canonical spelling, so that an unchanged amount causes
no write.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.katalyst.meta import ResourceList
from api.node_resources import HardwareInventory, NodeAllocatable, PodAllocation, ReportedField
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY


def cores_quantity(cores: float) -> str:
    """`4`, or `500m`; parts of a thousandth are left out."""
    millicores = int(cores * 1000 + 1e-6)
    return str(millicores // 1000) if millicores % 1000 == 0 else f"{millicores}m"


def bytes_quantity(size: float) -> str:
    """Whole bytes."""
    return str(int(size))


def reclaimed_allocatable(cores: float | None, memory: float | None) -> ResourceList:
    """What is lent, under Katalyst's names, rounded down: a promise is never more than was found."""
    found: dict[str, str | int] = {}
    if cores is not None:
        found[RECLAIMED_CPU] = str(int(cores * 1000 + 1e-6))
    if memory is not None:
        found[RECLAIMED_MEMORY] = bytes_quantity(memory)
    return found


NO_TOPOLOGY_POLICY = "None"
"""[topologyPolicy] No pod is refused for the NUMA nodes that it would get."""


class CnrInputs(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as it was heard last."""

    fields: tuple[ReportedField, ...] = ()
    """Of plugins."""
    hardware: HardwareInventory = HardwareInventory()
    cpu_flags: bool = False
    """Whether all of them are told."""
    policy: str | None = NO_TOPOLOGY_POLICY
    """None while a kubelet that has one cannot be asked: then the object does not say it."""
    node: NodeAllocatable | None = None
    pods: tuple[PodAllocation, ...] = ()
    zone_types: Mapping[str, str] = {}
    """Types of the zones that devices are shown as, by resource; others are counted only."""


NO_CNR_INPUTS = CnrInputs()
