"""A round as the parts of the node's CustomNodeResource that are ours. Pure.

What others keep there is not named and so stays: conditions (the controller's), taints of others, resource packages and pools.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from agent.report.amounts import bytes_of, cores_of, promised
from agent.report.beside import NOTHING, Beside
from agent.report.hardware import hardware_properties
from agent.report.shares import with_shares
from agent.report.usage import usage
from agent.report.zones import zones
from api.crds.node import (
    CustomNodeResourceStatus,
    Property,
    Resources,
    Taint,
)
from api.decisions import Act, Round
from api.evictions import TAINT_PREFIX, Evictions
from api.qos import QoSLevel

Identity = tuple[str, str, str]
"""Key, effect and level."""
EFFECTS = frozenset(("NoSchedule", "PreferNoSchedule", "NoExecute"))


class Ours(msgspec.Struct, frozen=True, kw_only=True):
    """What is ours of the object."""

    properties: tuple[Property, ...]
    taints: tuple[Taint, ...]
    status: CustomNodeResourceStatus | None
    """None while it is not known yet what can be lent: what an agent before this one said stands."""

    def spec_body(self) -> dict[str, Any]:
        """For a server-side apply of the object; taints go another way, for others have some too."""
        return {"spec": {"nodeResourceProperties": _plain(self.properties)}}

    def status_body(self) -> dict[str, Any]:
        """For one of its status. Nothing where that is not known."""
        return {} if self.status is None else {"status": _plain(self.status)}


def ours(finished: Round, *, metrics: bool, beside: Beside = NOTHING, lends: bool = True) -> Ours:
    """What there is to say of this round; with what is used, where that is wanted too, and with what the kubelet and the
    machine's files say `beside`. Unless it `lends`, as in a dry run, there is nothing for reclaimed pods: nobody would take it
    back from them."""
    return Ours(
        properties=(*_properties(finished), *hardware_properties(beside.hardware, flags=beside.cpu_flags)),
        taints=taints(finished.evictions),
        status=_status(finished, metrics, beside, lends=lends),
    )


def _properties(finished: Round) -> Iterator[Property]:
    node, topology = finished.snapshot.node, finished.snapshot.topology
    yield Property(property_name="numa", property_quantity=str(len(topology.numa_nodes)))
    yield Property(property_name="cpu", property_quantity=cores_of(len(topology.cpus)))
    if node.memory_total_bytes is not None:
        yield Property(property_name="memory", property_quantity=bytes_of(node.memory_total_bytes))
    speeds = [card.speed_mbit for card in node.interfaces.values() if card.speed_mbit and not card.bonded]
    if speeds:
        yield Property(property_name="nbw", property_quantity=str(max(speeds)))
    if node.machine.codename:
        yield Property(property_name="cpu_codename", property_values=(node.machine.codename,))
    if node.machine.is_vm is not None:
        yield Property(property_name="is_vm", property_values=(str(node.machine.is_vm).lower(),))


def _status(finished: Round, metrics: bool, beside: Beside, *, lends: bool) -> CustomNodeResourceStatus | None:
    advertised = None
    if finished.advice is None and finished.act is not Act.OFF and lends:
        return None
    if finished.advice is not None and lends:
        advertised = finished.advice.advertised
        if advertised is None or (advertised.cores is None and advertised.memory_bytes is None):
            return None
    lent = {} if advertised is None else promised(advertised.cores, advertised.memory_bytes)
    return CustomNodeResourceStatus(
        resources=Resources(allocatable=lent, capacity=lent) if lent else None,
        topology_zone=with_shares(zones(finished, advertised), finished.snapshot, beside),
        topology_policy=beside.policy,
        node_metric_status=usage(finished) if metrics else None,
    )


def taints(evictions: Evictions | None) -> tuple[Taint, ...]:
    """Conditions that are shown as taints for pods of one level; an effect is `reclaimed_cores/NoSchedule`."""
    found: dict[tuple[str, str], Taint] = {}
    for shown in () if evictions is None else evictions.conditions:
        if shown.condition.kind != "cnr":
            continue
        for said in shown.condition.effects:
            level, _, effect = said.rpartition("/")
            # Katalyst's schedulers look at those of reclaimed pods alone.
            if level == QoSLevel.RECLAIMED.value and effect in EFFECTS:
                key = f"{TAINT_PREFIX}{shown.condition.name}"
                found[key, effect] = Taint(key=key, effect=effect, qos_level=QoSLevel.RECLAIMED)
    return tuple(found[name] for name in sorted(found))


def with_taints(
    there: Iterable[Mapping[str, Any]], wanted: Iterable[Taint], written: Collection[Identity] = ()
) -> list[Mapping[str, Any]] | None:
    """The object's taints with `wanted` among them, without those of ours, and those `written` before, that are not wanted any
    more, and with those of others as they came; None where nothing changes."""
    there, wanted = list(there), list(wanted)
    names = {identity(one) for one in wanted}
    kept = [one for one in there if _identity(one) in names or not _ours(one, written)]
    known = {_identity(one) for one in kept}
    new = [msgspec.to_builtins(one) for one in wanted if identity(one) not in known]
    return None if len(kept) == len(there) and not new else [*kept, *new]


def identity(taint: Taint) -> Identity:
    """What makes it that one."""
    return taint.key, taint.effect, taint.qos_level.value


def _ours(taint: Mapping[str, Any], written: Collection[Identity]) -> bool:
    return str(taint.get("key", "")).startswith(TAINT_PREFIX) or _identity(taint) in written


def _plain(value: Any) -> Any:
    """As JSON has it: lists, where there are tuples here."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _identity(taint: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return (taint.get("key"), taint.get("effect"), taint.get("qosLevel"))
