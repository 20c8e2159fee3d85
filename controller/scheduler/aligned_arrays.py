"""Arrays over the nodes that align or pin resources, one slot for each; all other nodes share slot 0. Pure.
Slot 0 has no zones, the policy NONE and no manager, so that every plugin accepts its nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controller.scheduler.numa_topology import ZoneState

FIRST_SLOTS = 8
RATIO_ONE = 1_000_000
"""A ratio of 1 in `cpu_ratio_ppm` and `memory_ratio_ppm`."""
_ZONE_COLUMNS = ("capacity", "allocatable", "allocated", "assumed")
_COLUMNS = {
    "reported": (np.bool_, (2,)),
    "policies": (np.int64, ()),
    "pod_level": (np.bool_, ()),
    "reported_pinned_cpus": (np.int64, ()),
    "pinned_cpus": (np.int64, ()),
    "cpu_ratio_ppm": (np.int64, ()),
    "memory_ratio_ppm": (np.int64, ()),
    "static_cpu": (np.bool_, ()),
    "static_memory": (np.bool_, ()),
}


class AlignedArrays:
    """Zones as in ZoneState, and the columns of OvercommittedNodes, by slot. Only NodeAlignment writes them."""

    capacity: NDArray[np.int64]
    allocatable: NDArray[np.int64]
    allocated: NDArray[np.int64]
    assumed: NDArray[np.int64]
    zones: NDArray[np.bool_]
    sockets: NDArray[np.int64]
    reported: NDArray[np.bool_]
    policies: NDArray[np.int64]
    pod_level: NDArray[np.bool_]
    reported_pinned_cpus: NDArray[np.int64]
    """Annotation guaranteed_cpus of the CustomNodeResource."""
    pinned_cpus: NDArray[np.int64]
    """CPUs that are pinned, or will be, for the pods of the node, assumed pods included."""
    cpu_ratio_ppm: NDArray[np.int64]
    memory_ratio_ppm: NDArray[np.int64]
    static_cpu: NDArray[np.bool_]
    static_memory: NDArray[np.bool_]

    def __init__(self) -> None:
        self._used, self._free = 1, list[int]()
        for name in _ZONE_COLUMNS:
            setattr(self, name, np.zeros((FIRST_SLOTS, 0, 2), np.int64))
        self.zones, self.sockets = np.zeros((FIRST_SLOTS, 0), np.bool_), np.zeros((FIRST_SLOTS, 0), np.int64)
        for name, (kind, shape) in _COLUMNS.items():
            setattr(self, name, np.zeros((FIRST_SLOTS, *shape), kind))
        self.clear(0)

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(int(getattr(self, name).nbytes) for name in (*_ZONE_COLUMNS, "zones", "sockets", *_COLUMNS))

    def add_slot(self) -> int:
        """Return a clear slot."""
        if self._free:
            return self._free.pop()
        if self._used >= len(self.policies):
            for name in (*_ZONE_COLUMNS, "zones", "sockets", *_COLUMNS):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self.clear(self._used)
        self._used += 1
        return self._used - 1

    def remove_slot(self, slot: int) -> None:
        """Clear a slot and give it to the next node that needs one."""
        self.clear(slot)
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Set a slot to no zones and no manager."""
        for name in (*_ZONE_COLUMNS, "zones", "sockets", *_COLUMNS):
            getattr(self, name)[slot] = 0
        self.cpu_ratio_ppm[slot] = self.memory_ratio_ppm[slot] = RATIO_ONE

    def widen(self, zone_count: int) -> None:
        """Extend each slot to this many zones."""
        if (missing := zone_count - self.zones.shape[1]) > 0:
            for name in (*_ZONE_COLUMNS, "zones", "sockets"):
                old = getattr(self, name)
                padding = [(0, 0), (0, missing), *[(0, 0)] * (old.ndim - 2)]
                setattr(self, name, np.pad(old, padding))

    def zone_state(self, slots: NDArray[np.int32]) -> ZoneState:
        """Return the zones of these slots."""
        return ZoneState(**{name: getattr(self, name)[slots] for name in ZoneState.__struct_fields__})
