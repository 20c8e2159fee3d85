"""Maintains AlignedArrays from Nodes, CustomNodeResources and pods: zones, the amounts that pods have of them, and pinned CPUs.
Pure.

A pod that a kubelet will align is charged to every zone of its node until the CustomNodeResource lists the pod, because it may
get any of them. Assumed and bound pods are charged alike, so that a new process computes the same charges. The charge ends with
the assumption or with the pod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from api.overcommit import (
    OVERCOMMIT_KEYS,
    STATIC_CPU_MANAGER,
    STATIC_MEMORY_MANAGER,
    effective_ratio,
)
from controller.scheduler.aligned_arrays import RATIO_ONE
from controller.scheduler.node_arrays import NodeArrays
from controller.scheduler.node_zones import NodeZones, parse_node_zones
from controller.scheduler.numa_topology import PluginPolicy, TopologyRules, assumed_charge, is_aligned
from controller.scheduler.pod_alignment import MAX_PINNED_CPUS, PodAlignment
from controller.scheduler.scheduler_kinds import (
    CnrAnnotations,
    CnrZone,
    SchedulerCnr,
    SchedulerNodeAnnotations,
    ZonedCnrStatus,
)

MAX_ZONE_AMOUNT = (1 << 53) - 1
"""Largest amount of a zone: the plugins compute with floats, which are exact up to this number."""
MAX_RATIO_PPM = 1000 * RATIO_ONE
ValueT = TypeVar("ValueT")
_NO_ANNOTATIONS = SchedulerNodeAnnotations()
_NO_MANAGERS = CnrAnnotations()


class NodeAlignment:
    """Writes `nodes.aligned`, one slot for each row that has zones or whose overcommitted resources are pinned."""

    def __init__(self, nodes: NodeArrays, rules: TopologyRules | None, holds_zones: Callable[[str], bool]) -> None:
        """Without `rules`, zones are ignored. `holds_zones` returns whether the pod with a uid is dedicated_cores or unknown.
        With the dynamic policy only the allocations of these pods count, because other pods share their CPUs."""
        self._nodes, self._rules, self._holds_zones = nodes, rules, holds_zones
        self._zones: dict[int, NodeZones] = {}
        self._reported: dict[int, tuple[tuple[CnrZone, ...] | None, str]] = {}
        """Zones and policy from which `_zones` were parsed."""
        self._pods: dict[int, dict[str, PodAlignment]] = {}
        self._nodes_marks: dict[int, SchedulerNodeAnnotations] = {}
        self._managers: dict[int, CnrAnnotations] = {}
        self._hidden_uid = ""

    @property
    def has_rules(self) -> bool:
        """Whether zones are read."""
        return self._rules is not None

    def set_node(self, row: int, annotations: SchedulerNodeAnnotations | None) -> None:
        """Set the annotations of a Node; None after its deletion."""
        _store(self._nodes_marks, row, annotations, _NO_ANNOTATIONS)
        self._refresh(row)

    def set_cnr(self, row: int, cnr: SchedulerCnr | None) -> None:
        """Set zones and managers; None after the deletion. Raises ValueError, with the field, for invalid zones, which are then
        left out."""
        managers = _NO_MANAGERS if cnr is None else cnr.metadata.annotations
        status = cnr.status if cnr is not None and self._rules is not None else None
        reported = (status.topology_zone, status.topology_policy) if isinstance(status, ZonedCnrStatus) else (None, "")
        is_same = managers == self._managers.get(row, _NO_MANAGERS) and reported == self._reported.get(row)
        # Most changes are of measured usage. The equal zones are stored, so that the former object is freed.
        self._reported[row] = reported
        if is_same and row in self._zones:
            return
        _store(self._managers, row, managers, _NO_MANAGERS)
        self._zones.pop(row, None)
        try:
            if reported[0] and (zones := parse_node_zones(reported[0], reported[1])) is not None:
                self._zones[row] = zones
        finally:
            if row not in self._zones:
                del self._reported[row]
            self._refresh(row)

    def add(self, row: int, uid: str, alignment: PodAlignment | None) -> None:
        """Count a pod on a node, assumed or bound."""
        if alignment is not None:
            self._pods.setdefault(row, {})[uid] = alignment
        self._refresh_for(row, uid, alignment)

    def remove(self, row: int, uid: str) -> None:
        """Stop counting a pod whose assumption ended or that ended itself."""
        pods = self._pods.get(row, {})
        alignment = pods.pop(uid, None)
        if not pods:
            self._pods.pop(row, None)
        self._refresh_for(row, uid, alignment)

    def remove_row(self, row: int) -> None:
        """Remove all data of a row that no node uses any more."""
        for each in (self._zones, self._reported, self._pods, self._nodes_marks, self._managers):
            each.pop(row, None)
        self._refresh(row)

    def hide(self, row: int, uid: str) -> None:
        """Leave this pod out of its row, until an empty uid is given."""
        self._hidden_uid = uid
        self._refresh(row)

    def _refresh_for(self, row: int, uid: str, alignment: PodAlignment | None) -> None:
        zones = self._zones.get(row)
        if alignment is not None or (zones is not None and uid in zones.consumers):
            self._refresh(row)

    def _refresh(self, row: int) -> None:
        """Compute the slot of a row. A row without zones and without pinned overcommitted resources has no slot."""
        arrays, zones = self._nodes.aligned, self._zones.get(row)
        marks, managers = self._nodes_marks.get(row, _NO_ANNOTATIONS), self._managers.get(row, _NO_MANAGERS)
        has_manager = managers.cpu_manager == STATIC_CPU_MANAGER or managers.memory_manager == STATIC_MEMORY_MANAGER
        slot = int(self._nodes.aligned_slot[row])
        if zones is None and not (has_manager and marks != _NO_ANNOTATIONS):
            if slot:
                arrays.remove_slot(slot)
                self._nodes.aligned_slot[row] = 0
            return
        if not slot:
            slot = self._nodes.aligned_slot[row] = arrays.add_slot()
        arrays.clear(slot)
        self._fill_overcommitment(slot, row, marks, managers)
        if zones is not None and self._rules is not None:
            self._fill_zones(slot, row, zones, self._rules)

    def _fill_overcommitment(
        self, slot: int, row: int, marks: SchedulerNodeAnnotations, managers: CnrAnnotations
    ) -> None:
        arrays, pods = self._nodes.aligned, self._pods.get(row, {})
        annotations = msgspec.to_builtins(marks)
        arrays.cpu_ratio_ppm[slot], arrays.memory_ratio_ppm[slot] = (
            min(int(effective_ratio(annotations, OVERCOMMIT_KEYS[name]) * RATIO_ONE), MAX_RATIO_PPM)
            for name in ("cpu", "memory")
        )
        arrays.static_cpu[slot] = managers.cpu_manager == STATIC_CPU_MANAGER
        arrays.static_memory[slot] = managers.memory_manager == STATIC_MEMORY_MANAGER
        # An invalid number counts as 0, as in Katalyst; the CPUs that the node's pods pin count in any case.
        text = managers.guaranteed_cpus
        is_number = text.isascii() and text.isdigit() and len(text) <= 7
        arrays.reported_pinned_cpus[slot] = min(int(text), MAX_PINNED_CPUS) if is_number else 0
        pinned = sum(each.pinned_cpus for uid, each in pods.items() if uid != self._hidden_uid)
        arrays.pinned_cpus[slot] = min(pinned, MAX_PINNED_CPUS)

    def _fill_zones(self, slot: int, row: int, zones: NodeZones, rules: TopologyRules) -> None:
        arrays, pods, count = self._nodes.aligned, self._pods.get(row, {}), len(zones.sockets)
        arrays.widen(count)
        arrays.zones[slot, :count], arrays.sockets[slot, :count] = True, zones.sockets
        arrays.capacity[slot, :count] = np.minimum(zones.capacity, MAX_ZONE_AMOUNT)
        allocatable = arrays.allocatable[slot, :count] = np.minimum(zones.allocatable, MAX_ZONE_AMOUNT)
        arrays.reported[slot], arrays.pod_level[slot] = zones.reported, zones.pod_level
        arrays.policies[slot] = zones.policy
        allocated = arrays.allocated[slot]
        for uid, shares in zones.consumers.items():
            if uid == self._hidden_uid or not (rules.plugin is PluginPolicy.NATIVE or self._holds_zones(uid)):
                continue
            for zone, amounts in shares:
                is_exclusive = rules.plugin is PluginPolicy.DYNAMIC and uid in pods and pods[uid].exclusive
                added = allocatable[zone] if is_exclusive else np.minimum(amounts, MAX_ZONE_AMOUNT)
                allocated[zone] = np.minimum(allocated[zone] + added, MAX_ZONE_AMOUNT)
        assumed = arrays.assumed[slot, :count]
        for uid, alignment in pods.items():
            if (
                uid not in zones.consumers
                and uid != self._hidden_uid
                and is_aligned(pod := alignment.topology_pod(), rules)
            ):
                assumed[:] = np.minimum(assumed + assumed_charge(allocatable, pod, rules), MAX_ZONE_AMOUNT)


def _store(values: dict[int, ValueT], row: int, value: ValueT | None, empty: ValueT) -> None:
    """Store a value of a row, unless it is empty as those of most nodes are."""
    if value is None or value == empty:
        values.pop(row, None)
    else:
        values[row] = value
