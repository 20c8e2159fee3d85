"""Builds the agent's part of the CustomNodeResource: properties, taints, allocatable and node metrics.
It is pure. Fields of other owners are not named, so that they stay: conditions, foreign taints, resource packages
and pools.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from agent.reporter.cnr_inputs import NO_CNR_INPUTS, CnrInputs, bytes_quantity, cores_quantity, reclaimed_allocatable
from agent.reporter.overcommit_annotations import overcommit_annotations
from agent.reporter.topology_zones import add_pod_resources, topology_zones
from api.cycle_harm import harm_indicators
from api.decision import ActMode, Cycle
from api.eviction import TAINT_PREFIX, EvictionResult
from api.katalyst.cnr import (
    CustomNodeResourceStatus,
    GroupMetric,
    NodeMetric,
    NodeMetricStatus,
    NodeResourceProperty,
    NumaUsage,
    QosTaint,
    ZoneResources,
)
from api.katalyst.harm import RUNQ_LATENCY_P99
from api.katalyst.meta import ResourceList
from api.node_resources import HardwareInventory, NetworkInterfaceCard
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import Rates
from api.snapshot import Snapshot
from api.units import NS_PER_S
from kube.objects import format_timestamp

INSTRUCTION_SETS = {"avx2": "avx2", "avx512f": "avx512"}
"""CPU flags and the names of their instruction sets in the property `cis`."""


class _NicProperty(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Network interface in the format that Katalyst's scheduler and network plugins read."""

    ns_name: str = msgspec.field(name="NSName", default="")
    ns_inode: int = msgspec.field(name="NSInode", default=0)
    ns_abs_dir: str = msgspec.field(name="NSAbsDir", default="")
    name: str
    if_index: int
    speed: int
    numa_node: int
    enable: bool
    addr: None = None
    pci_addr: str = msgspec.field(name="PCIAddr")


def hardware_properties(hardware: HardwareInventory, *, flags: bool = False) -> Iterator[NodeResourceProperty]:
    """Yield instruction sets, network cards and, with `flags`, all CPU flags. Unknown hardware yields nothing."""
    if hardware.flags:
        sets = tuple(name for flag, name in INSTRUCTION_SETS.items() if flag in hardware.flags)
        yield NodeResourceProperty(property_name="cis", property_values=sets)
        if flags:
            yield NodeResourceProperty(property_name="cpu_flags", property_values=(",".join(hardware.flags),))
    if hardware.cards:
        yield NodeResourceProperty(
            property_name="topology", property_values=tuple(_nic_property(card) for card in hardware.cards)
        )


def _nic_property(card: NetworkInterfaceCard) -> str:
    wire = _NicProperty(
        name=card.name,
        if_index=card.index,
        speed=card.speed_mbit,
        numa_node=card.numa,
        enable=card.enabled,
        pci_addr=card.pci,
    )
    return msgspec.json.encode(wire).decode()


def node_metric_status(cycle: Cycle) -> NodeMetricStatus:
    """Return CPU and memory usage of the node, of each NUMA node, and of the pods of each QoS level, and with the node's usage
    the indicators of harm of api/katalyst/harm.py."""
    snapshot, change = cycle.snapshot, cycle.rates
    node, per_cpu = snapshot.node, {} if change is None else change.node.per_cpu_busy_ratio
    memory = None
    if node.memory_total_bytes is not None and node.memory_available_bytes is not None:
        memory = node.memory_total_bytes - node.memory_available_bytes
    busy_cores = None if change is None else change.node.busy_cores
    by_numa = []
    for numa in snapshot.topology.numa_nodes:
        meminfo = node.numa[numa].meminfo if numa in node.numa else {}
        used = meminfo["MemTotal"] - meminfo["MemFree"] if meminfo.keys() >= {"MemTotal", "MemFree"} else None
        busy = [per_cpu[cpu.id] for cpu in snapshot.topology.cpus if cpu.numa == numa and cpu.id in per_cpu]
        if amounts := _usage_quantities(sum(busy) if busy else None, used):
            by_numa.append(NumaUsage(numa_id=numa, usage=amounts))
    return NodeMetricStatus(
        update_time=format_timestamp(snapshot.wall_time_ns / NS_PER_S),
        node_metric=NodeMetric(
            generic_usage={**_usage_quantities(busy_cores, memory), **_harm_quantities(cycle)} or None,
            numa_usage=tuple(by_numa) or None,
        ),
        group_metric=tuple(
            GroupMetric(
                qos_level=level,
                generic_usage=_pods_usage(pods, snapshot, change) or None,
                pod_list=tuple(sorted(pod.key for pod in pods)),
            )
            for level in QoSLevel
            if (pods := [pod for pod in snapshot.pods if pod.qos is level])
        )
        or None,
    )


def _harm_quantities(cycle: Cycle) -> ResourceList:
    """Return what the scheduler of the cluster weighs as harm to online pods; only what is measured."""
    return {name: _harm_quantity(name, value) for name, value in harm_indicators(cycle).items()}


def _harm_quantity(name: str, value: float) -> str:
    """Return latency in millionths of a second, shares in thousandths, rounded down."""
    unit, scale = ("u", 1_000_000) if name == RUNQ_LATENCY_P99 else ("m", 1000)
    # A value such as 0.029 is slightly less than 29 thousandths in binary.
    return f"{int(value * scale + 1e-6)}{unit}"


def _pods_usage(pods: Iterable[Pod], snapshot: Snapshot, change: Rates | None) -> ResourceList:
    cores = memory = None
    for path in (container.cgroup for pod in pods for container in pod.containers):
        own = change.cgroups[path].cpu_cores if change is not None and path in change.cgroups else None
        size = snapshot.cgroups[path].memory_bytes if path in snapshot.cgroups else None
        cores = cores if own is None else (cores or 0.0) + own
        memory = memory if size is None else (memory or 0) + size
    return _usage_quantities(cores, memory)


def _usage_quantities(cores: float | None, memory: float | None) -> ResourceList:
    amounts: dict[str, str | int] = {}
    if cores is not None:
        amounts["cpu"] = cores_quantity(cores)
    if memory is not None:
        amounts["memory"] = bytes_quantity(memory)
    return amounts


TaintIdentity = tuple[Any, Any, Any]
"""Key, effect and QoS level; the level is None for taints of a Node."""
EFFECTS = frozenset(("NoSchedule", "PreferNoSchedule", "NoExecute"))


class CnrReport(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's own fields of the CustomNodeResource."""

    properties: tuple[NodeResourceProperty, ...]
    taints: tuple[QosTaint, ...]
    annotations: Mapping[str, str]
    status: CustomNodeResourceStatus | None
    """None while the headroom is unknown: then the status of the previous agent stays."""

    def spec_body(self) -> dict[str, Any]:
        """Return the body of a server-side apply of the object, without taints, which have several owners."""
        metadata = {"metadata": {"annotations": dict(self.annotations)}} if self.annotations else {}
        return {**metadata, "spec": {"nodeResourceProperties": _to_json_types(self.properties)}}

    def status_body(self) -> dict[str, Any]:
        """Return the body of a server-side apply of the status; empty while it is unknown."""
        return {} if self.status is None else {"status": _to_json_types(self.status)}


def build_cnr_report(
    cycle: Cycle, *, metrics: bool, inputs: CnrInputs = NO_CNR_INPUTS, reports_reclaimable: bool = True
) -> CnrReport:
    """Return the report of a cycle; with `metrics` it includes usage.

    Without `reports_reclaimable`, as in a dry run, nothing is reported as reclaimable or overcommitted, because nothing
    would throttle the reclaimed pods.
    """
    return CnrReport(
        properties=(*_properties(cycle), *hardware_properties(inputs.hardware, flags=inputs.cpu_flags)),
        taints=condition_taints(cycle.evictions),
        annotations=overcommit_annotations(cycle) if reports_reclaimable else {},
        status=_status(cycle, metrics, inputs, reports_reclaimable=reports_reclaimable),
    )


def _properties(cycle: Cycle) -> Iterator[NodeResourceProperty]:
    node, topology = cycle.snapshot.node, cycle.snapshot.topology
    yield NodeResourceProperty(property_name="numa", property_quantity=str(len(topology.numa_nodes)))
    yield NodeResourceProperty(property_name="cpu", property_quantity=cores_quantity(len(topology.cpus)))
    if node.memory_total_bytes is not None:
        yield NodeResourceProperty(property_name="memory", property_quantity=bytes_quantity(node.memory_total_bytes))
    speeds = [card.speed_mbit for card in node.interfaces.values() if card.speed_mbit and not card.bonded]
    if speeds:
        yield NodeResourceProperty(property_name="nbw", property_quantity=str(max(speeds)))
    if node.machine.codename:
        yield NodeResourceProperty(property_name="cpu_codename", property_values=(node.machine.codename,))
    if node.machine.is_vm is not None:
        yield NodeResourceProperty(property_name="is_vm", property_values=(str(node.machine.is_vm).lower(),))


def _status(
    cycle: Cycle, metrics: bool, inputs: CnrInputs, *, reports_reclaimable: bool
) -> CustomNodeResourceStatus | None:
    headroom = None
    if cycle.advice is None and cycle.act is not ActMode.OFF and reports_reclaimable:
        return None
    if cycle.advice is not None and reports_reclaimable:
        headroom = cycle.advice.reported_headroom
        if headroom is None or (headroom.cores is None and headroom.memory_bytes is None):
            return None
    reclaimable = {} if headroom is None else reclaimed_allocatable(headroom.cores, headroom.memory_bytes)
    return CustomNodeResourceStatus(
        resources=ZoneResources(allocatable=reclaimable, capacity=reclaimable) if reclaimable else None,
        topology_zone=add_pod_resources(topology_zones(cycle, headroom), cycle.snapshot, inputs),
        topology_policy=inputs.policy,
        node_metric_status=node_metric_status(cycle) if metrics else None,
    )


def condition_taints(evictions: EvictionResult | None) -> tuple[QosTaint, ...]:
    """Return active conditions of kind `cnr` as taints. Their effects have the form `reclaimed_cores/NoSchedule`."""
    taints: dict[tuple[str, str], QosTaint] = {}
    for active in () if evictions is None else evictions.conditions:
        if active.condition.kind != "cnr":
            continue
        for text in active.condition.effects:
            level, _, effect = text.rpartition("/")
            # Katalyst's scheduler plugins evaluate only taints of reclaimed pods.
            if level == QoSLevel.RECLAIMED.value and effect in EFFECTS:
                key = f"{TAINT_PREFIX}{active.condition.name}"
                taints[key, effect] = QosTaint(key=key, effect=effect, qos_level=QoSLevel.RECLAIMED)
    return tuple(taints[name] for name in sorted(taints))


def merge_taints(
    current: Iterable[Mapping[str, Any]],
    desired: Iterable[Mapping[str, Any]],
    formerly_written: Collection[TaintIdentity] = (),
) -> list[Mapping[str, Any]] | None:
    """Return the list with the desired taints; None if it does not change.

    The agent owns taints below Katalyst's prefix and those in `formerly_written`; it removes them when they are no longer
    desired. Taints of other owners stay as they are, and so do additional fields of desired ones.
    """
    current, desired = list(current), list(desired)
    names = {_taint_identity(taint) for taint in desired}
    retained = [
        taint
        for taint in current
        if (name := _taint_identity(taint)) in names
        or not (str(taint.get("key", "")).startswith(TAINT_PREFIX) or name in formerly_written)
    ]
    present = {_taint_identity(taint) for taint in retained}
    added = [taint for taint in desired if _taint_identity(taint) not in present]
    return None if len(retained) == len(current) and not added else [*retained, *added]


def taint_identity(taint: QosTaint) -> TaintIdentity:
    return taint.key, taint.effect, taint.qos_level.value


def _taint_identity(taint: Mapping[str, Any]) -> TaintIdentity:
    return taint.get("key"), taint.get("effect"), taint.get("qosLevel")


def _to_json_types(value: Any) -> Any:
    """Convert structs and tuples to mappings and lists, so that bodies compare equal to decoded JSON."""
    return msgspec.json.decode(msgspec.json.encode(value))
