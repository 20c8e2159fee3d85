"""Builds the agent's part of the CustomNodeResource: properties, taints, allocatable and node metrics.
It is pure. Fields of other owners are not named, so that they stay: conditions, foreign taints, resource packages
and pools.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from agent.reporter.cnr_inputs import NO_CNR_INPUTS, CnrInputs, bytes_quantity, cores_quantity, reclaimed_allocatable
from agent.reporter.topology_zones import add_pod_resources, topology_zones
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
from api.katalyst.meta import ResourceList
from api.node_resources import HardwareInventory, NetworkInterfaceCard
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import Rates, compute_rates
from api.snapshot import Snapshot
from kube.objects import format_timestamp

INSTRUCTION_SETS = {"avx2": "avx2", "avx512f": "avx512"}
"""Flags, and what `cis` calls the sets that they begin."""


class _NicProperty(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """As Katalyst's scheduler plugins and network plugin read it."""

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
    """Instruction sets and cards, and the CPU's `flags` where they are wanted; nothing of what is not known."""
    if hardware.flags:
        known = tuple(name for flag, name in INSTRUCTION_SETS.items() if flag in hardware.flags)
        yield NodeResourceProperty(property_name="cis", property_values=known)
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


def node_metric_status(finished: Cycle) -> NodeMetricStatus:
    """Of the node, of each NUMA node, and of the pods of each level that has some."""
    snapshot = finished.snapshot
    change = None if finished.previous is None else compute_rates(finished.previous, snapshot)
    node, per_cpu = snapshot.node, {} if change is None else change.node.per_cpu_busy_ratio
    memory = None
    if node.memory_total_bytes is not None and node.memory_available_bytes is not None:
        memory = node.memory_total_bytes - node.memory_available_bytes
    busy_cores = None if change is None else change.node.busy_cores
    by_numa = []
    for numa in snapshot.topology.numa_nodes:
        meminfo = node.numa[numa].meminfo if numa in node.numa else {}
        used = meminfo["MemTotal"] - meminfo["MemFree"] if meminfo.keys() >= {"MemTotal", "MemFree"} else None
        known = [per_cpu[cpu.id] for cpu in snapshot.topology.cpus if cpu.numa == numa and cpu.id in per_cpu]
        if amounts := _usage_quantities(sum(known) if known else None, used):
            by_numa.append(NumaUsage(numa_id=numa, usage=amounts))
    return NodeMetricStatus(
        update_time=format_timestamp(snapshot.wall_time_ns / 1e9),
        node_metric=NodeMetric(
            generic_usage=_usage_quantities(busy_cores, memory) or None, numa_usage=tuple(by_numa) or None
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


def _pods_usage(pods: Iterable[Pod], snapshot: Snapshot, change: Rates | None) -> ResourceList:
    cores = memory = None
    for path in (container.cgroup for pod in pods for container in pod.containers):
        own = change.cgroups[path].cpu_cores if change is not None and path in change.cgroups else None
        size = snapshot.cgroups[path].memory_bytes if path in snapshot.cgroups else None
        cores = cores if own is None else (cores or 0.0) + own
        memory = memory if size is None else (memory or 0) + size
    return _usage_quantities(cores, memory)


def _usage_quantities(cores: float | None, memory: float | None) -> ResourceList:
    found: dict[str, str | int] = {}
    if cores is not None:
        found["cpu"] = cores_quantity(cores)
    if memory is not None:
        found["memory"] = bytes_quantity(memory)
    return found


TaintIdentity = tuple[str, str, str]
"""Key, effect and level."""
EFFECTS = frozenset(("NoSchedule", "PreferNoSchedule", "NoExecute"))


class CnrReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is ours of the object."""

    properties: tuple[NodeResourceProperty, ...]
    taints: tuple[QosTaint, ...]
    status: CustomNodeResourceStatus | None
    """None while it is not known yet what can be lent: what an agent before this one said stands."""

    def spec_body(self) -> dict[str, Any]:
        """For a server-side apply of the object; taints go another way, for others have some too."""
        return {"spec": {"nodeResourceProperties": _to_json_types(self.properties)}}

    def status_body(self) -> dict[str, Any]:
        """For one of its status. Nothing where that is not known."""
        return {} if self.status is None else {"status": _to_json_types(self.status)}


def build_cnr_report(
    finished: Cycle, *, metrics: bool, inputs: CnrInputs = NO_CNR_INPUTS, lends: bool = True
) -> CnrReport:
    """What there is to say of this round; with what is used, where that is wanted too, and with what the kubelet and the
    machine's files say `beside`. Unless it `lends`, as in a dry run, there is nothing for reclaimed pods: nobody would take it
    back from them."""
    return CnrReport(
        properties=(*_properties(finished), *hardware_properties(inputs.hardware, flags=inputs.cpu_flags)),
        taints=condition_taints(finished.evictions),
        status=_status(finished, metrics, inputs, lends=lends),
    )


def _properties(finished: Cycle) -> Iterator[NodeResourceProperty]:
    node, topology = finished.snapshot.node, finished.snapshot.topology
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


def _status(finished: Cycle, metrics: bool, beside: CnrInputs, *, lends: bool) -> CustomNodeResourceStatus | None:
    advertised = None
    if finished.advice is None and finished.act is not ActMode.OFF and lends:
        return None
    if finished.advice is not None and lends:
        advertised = finished.advice.reported_headroom
        if advertised is None or (advertised.cores is None and advertised.memory_bytes is None):
            return None
    lent = {} if advertised is None else reclaimed_allocatable(advertised.cores, advertised.memory_bytes)
    return CustomNodeResourceStatus(
        resources=ZoneResources(allocatable=lent, capacity=lent) if lent else None,
        topology_zone=add_pod_resources(topology_zones(finished, advertised), finished.snapshot, beside),
        topology_policy=beside.policy,
        node_metric_status=node_metric_status(finished) if metrics else None,
    )


def condition_taints(evictions: EvictionResult | None) -> tuple[QosTaint, ...]:
    """Conditions that are shown as taints for pods of one level; an effect is `reclaimed_cores/NoSchedule`."""
    found: dict[tuple[str, str], QosTaint] = {}
    for shown in () if evictions is None else evictions.conditions:
        if shown.condition.kind != "cnr":
            continue
        for said in shown.condition.effects:
            level, _, effect = said.rpartition("/")
            # Katalyst's schedulers look at those of reclaimed pods alone.
            if level == QoSLevel.RECLAIMED.value and effect in EFFECTS:
                key = f"{TAINT_PREFIX}{shown.condition.name}"
                found[key, effect] = QosTaint(key=key, effect=effect, qos_level=QoSLevel.RECLAIMED)
    return tuple(found[name] for name in sorted(found))


def merge_cnr_taints(
    there: Iterable[Mapping[str, Any]], wanted: Iterable[QosTaint], written: Collection[TaintIdentity] = ()
) -> list[Mapping[str, Any]] | None:
    """The object's taints with `wanted` among them, without those of ours, and those `written` before, that are not wanted any
    more, and with those of others as they came; None where nothing changes."""
    there, wanted = list(there), list(wanted)
    names = {taint_identity(one) for one in wanted}
    kept = [one for one in there if _raw_taint_identity(one) in names or not _is_own_taint(one, written)]
    known = {_raw_taint_identity(one) for one in kept}
    new = [msgspec.to_builtins(one) for one in wanted if taint_identity(one) not in known]
    return None if len(kept) == len(there) and not new else [*kept, *new]


def taint_identity(taint: QosTaint) -> TaintIdentity:
    """What makes it that one."""
    return taint.key, taint.effect, taint.qos_level.value


def _is_own_taint(taint: Mapping[str, Any], written: Collection[TaintIdentity]) -> bool:
    return str(taint.get("key", "")).startswith(TAINT_PREFIX) or _raw_taint_identity(taint) in written


def _to_json_types(value: Any) -> Any:
    """As JSON has it: lists, where there are tuples here."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _raw_taint_identity(taint: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return (taint.get("key"), taint.get("effect"), taint.get("qosLevel"))
