"""What a node can promise by Koordinator's sums (slo-controller): `batch` and `mid`, of one resource at a time.

    batch = capacity - margin - max(system use, reserved) - use or requests of everybody above batch
    mid   = what prediction says prod can spare, within what the node leaves, plus part of what nobody requested

Everything is in one unit, cores or bytes. Where Koordinator counts a pod that is not measured yet in one sum and not in
the other, both have it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from agent.config.headroom import KoordinatorConfig
from api.advice import Headroom
from api.cpus import Topology
from api.knobs import Verdict

Inputs = dict[str, float | int | str | None]


class Tier(StrEnum):
    """Koordinator's priority classes; the values are its own."""

    PROD = "koord-prod"
    MID = "koord-mid"
    BATCH = "koord-batch"
    FREE = "koord-free"

    @property
    def high(self) -> bool:
        """Whether batch has to leave room for it."""
        return self in (Tier.PROD, Tier.MID)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One pod, or what is measured of one that is gone (`request` None): its share of one resource."""

    tier: Tier
    request: float | None = None
    used: float | None = None
    """None where it is not measured yet."""
    exclusive: bool = False
    """LSE, and the resource is CPU: what it requested is gone, used or not."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one resource of the node."""

    capacity: float
    system_used: float | None
    """By the system and by host applications above batch; None where not known."""
    reserved: float = 0.0
    """The larger of what the kubelet and the node's annotation reserve."""
    demands: Sequence[Demand] = ()
    prod_reclaimable: float | None = None
    """What prediction says prod pods will not need of their requests."""
    node_used: float | None = None
    per_unit: float = 1.0
    """What one of the units is that amounts are told in,"""
    unit: str = ""
    """and how it is called, with a space before it."""

    def show(self, amount: float) -> str:
        """For a person."""
        return f"{round(amount / self.per_unit, 2):g}{self.unit}"


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """What can be promised of one resource; None where an input is missing."""

    value: float | None
    verdict: Verdict


def batch(budget: Budget, policy: str, reclaim_percent: float, threshold_percent: float | None = None) -> Amount:
    """Batch by policy `usage`, `request` or `maxUsageRequest`, with (100 - reclaim_percent) % kept as a margin."""
    high = [demand for demand in budget.demands if demand.tier.high]
    margin = budget.capacity * (100 - reclaim_percent) / 100
    system: float | None = budget.reserved
    if policy != "request":
        system = None if budget.system_used is None else max(budget.system_used, budget.reserved)
    parts = [_demand(demand, policy) for demand in high]
    known = [part for part in parts if part is not None]
    inputs: Inputs = {
        "capacity": budget.capacity,
        "margin": margin,
        "system": system,
        "high": sum(known),
        "policy": policy,
    }
    if system is None or len(known) < len(parts):
        lacks = "what the system uses" if system is None else "what every pod above batch needs"
        return _unknown("batch", lacks, inputs)
    value = max(budget.capacity - margin - system - sum(known), 0.0)
    show = budget.show
    text = (
        f"{show(budget.capacity)} - {show(margin)} margin - {show(system)} system"
        f" - {show(sum(known))} by pods above batch ({policy})"
    )
    if threshold_percent is not None:
        value = min(value, budget.capacity * (threshold_percent / 100))
        text += f", at most {threshold_percent:g} %"
    return Amount(
        value=value,
        verdict=Verdict(
            rule="koordinator_batch", text=f"Batch is {show(value)} = {text}.", threshold=margin, inputs=inputs
        ),
    )


def mid(
    budget: Budget, threshold_percent: float, unallocated_percent: float = 0.0, static_percent: float | None = None
) -> Amount:
    """Mid from what prod can spare, or a fixed share of the capacity where `static_percent` is given."""
    most, show = budget.capacity * (threshold_percent / 100), budget.show
    if static_percent is not None:
        value = min(budget.capacity * static_percent / 100, most)
        text = f"Mid is {show(value)}: {static_percent:g} % of {show(budget.capacity)}, at most {show(most)}."
        return Amount(value=value, verdict=Verdict(rule="koordinator_mid_static", text=text, threshold=most))
    requested = [demand.request for demand in budget.demands if demand.tier is Tier.PROD]
    inputs: Inputs = {
        "capacity": budget.capacity,
        "prod_reclaimable": budget.prod_reclaimable,
        "node_used": budget.node_used,
        "system": budget.system_used,
    }
    if budget.prod_reclaimable is None or budget.node_used is None:
        return _unknown("mid", "what prod can spare, or what the node uses,", inputs)
    spare = max(min(budget.prod_reclaimable, budget.capacity - budget.node_used), 0.0)
    unallocated = 0.0
    if unallocated_percent > 0:
        if budget.system_used is None:
            return _unknown("mid", "what the system uses", inputs)
        asked = sum(request or 0.0 for request in requested)  # a pod without a request has allocated nothing
        unallocated = max(budget.capacity - max(budget.system_used, budget.reserved) - asked, 0.0)
    value = min(spare + unallocated * unallocated_percent / 100, most)
    text = (
        f"Mid is {show(value)}: prod can spare {show(budget.prod_reclaimable)} and the node leaves"
        f" {show(budget.capacity - budget.node_used)}; {unallocated_percent:g} % of {show(unallocated)} unallocated;"
        f" at most {show(most)}."
    )
    inputs["unallocated"] = unallocated
    return Amount(value=value, verdict=Verdict(rule="koordinator_mid", text=text, threshold=most, inputs=inputs))


def koordinator(
    policy: str, cpu: Budget, memory: Budget | None, topology: Topology, config: KoordinatorConfig
) -> Headroom:
    """Headroom by policy `koordinator-batch` or `koordinator-mid`. CPU is laid on NUMA nodes in proportion to their CPUs."""
    cores = _of_cpu(policy, cpu, config)
    space = None if memory is None else _of_memory(policy, memory, config)
    sizes = {numa: sum(1 for c in topology.cpus if c.numa == numa) for numa in topology.numa_nodes}
    total = len(topology.cpus)
    inputs: Inputs = {f"cpu_{name}": value for name, value in cores.verdict.inputs.items()}
    text = f"CPU: {cores.verdict.text}"
    if space is not None:
        inputs |= {f"memory_{name}": value for name, value in space.verdict.inputs.items()}
        text += f" Memory: {space.verdict.text}"
    verdict = Verdict(rule=cores.verdict.rule, text=text, threshold=cores.verdict.threshold, inputs=inputs)
    found = cores.value
    return Headroom(
        cores=found,
        cores_by_numa={} if found is None else {numa: found * size / total for numa, size in sizes.items()},
        memory_bytes=None if space is None else space.value,
        verdict=verdict,
    )


def _of_cpu(policy: str, budget: Budget, config: KoordinatorConfig) -> Amount:
    if policy == "koordinator-mid":
        share = config.mid_static_cpu_percent
        return mid(budget, config.mid_cpu_threshold_percent, config.mid_unallocated_percent, share)
    return batch(budget, config.cpu_policy, config.cpu_reclaim_threshold_percent, config.batch_cpu_threshold_percent)


def _of_memory(policy: str, budget: Budget, config: KoordinatorConfig) -> Amount:
    if policy == "koordinator-mid":
        share = config.mid_static_memory_percent
        return mid(budget, config.mid_memory_threshold_percent, config.mid_unallocated_percent, share)
    most = config.batch_memory_threshold_percent
    return batch(budget, config.memory_policy, config.memory_reclaim_threshold_percent, most)


def _demand(demand: Demand, policy: str) -> float | None:
    """What a pod above batch takes; its request until it is measured, None where it has neither."""
    if policy == "request" or (demand.exclusive and demand.request is not None):
        return demand.request or 0.0
    if demand.used is None:
        return demand.request
    if policy == "maxUsageRequest":
        return max(demand.used, demand.request or 0.0)
    return demand.used


def _unknown(tier: str, lacks: str, inputs: Inputs) -> Amount:
    text = f"Not known: {lacks} on this node, so nothing new is promised as {tier}."
    return Amount(value=None, verdict=Verdict(rule=f"koordinator_{tier}_unknown", text=text, inputs=inputs))
