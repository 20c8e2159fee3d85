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
    """Return whole cores as `4`, others in millicores as `500m`, rounded down."""
    millicores = int(cores * 1000 + 1e-6)
    return str(millicores // 1000) if millicores % 1000 == 0 else f"{millicores}m"


def bytes_quantity(size: float) -> str:
    """Return whole bytes, rounded down."""
    return str(int(size))


def reclaimed_allocatable(cores: float | None, memory: float | None) -> ResourceList:
    """Return reclaimable CPU (millicores) and memory (bytes) by Katalyst's resource names, rounded down so that they never
    exceed the headroom."""
    amounts: dict[str, str | int] = {}
    if cores is not None:
        amounts[RECLAIMED_CPU] = str(int(cores * 1000 + 1e-6))
    if memory is not None:
        amounts[RECLAIMED_MEMORY] = bytes_quantity(memory)
    return amounts


NO_TOPOLOGY_POLICY = "None"
"""[topologyPolicy] The kubelet admits every pod, whatever its NUMA nodes."""


class CnrInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Latest answers of the sources besides the cycle."""

    fields: tuple[ReportedField, ...] = ()
    """Fields of reporter plugins."""
    hardware: HardwareInventory = HardwareInventory()
    cpu_flags: bool = False
    """Whether all CPU flags are reported."""
    policy: str | None = NO_TOPOLOGY_POLICY
    """Topology policy; None until the kubelet answers, and then left out of the object."""
    node: NodeAllocatable | None = None
    pods: tuple[PodAllocation, ...] = ()
    zone_types: Mapping[str, str] = {}
    """Zone types of devices by resource name; devices of other resources are only counted."""


NO_CNR_INPUTS = CnrInputs()
