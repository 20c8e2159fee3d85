"""Headroom of one resource by Koordinator's formulas `batch` and `mid` (slo-controller), in cores or bytes.
batch = capacity - margin - max(system use, reserved) - use or requests of pods above batch. mid =
min(reclaimable by prediction, what the node leaves) plus a part of what is not requested. A pod that is not
measured yet counts in both sums; in Koordinator it counts in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from agent.advisor.advisor_state import ContainerDemand
from agent.advisor.cpu_estimate import estimate_container_cores
from agent.advisor.pod_usage import non_cache_bytes, pod_cpu_cores, sum_if_all_known, sum_if_any
from agent.config.advisor import AdvisorConfig, KoordinatorHeadroomConfig
from api.advice import Headroom
from api.cpu import Topology
from api.knobs import Reason, ReasonInputs
from api.pod import Pod
from api.qos import QoSLevel
from api.quantity import format_bytes, format_cores
from api.rates import Rates
from api.snapshot import Snapshot


class KoordinatorTier(StrEnum):
    """Koordinator's priority classes, with its values."""

    PROD = "koord-prod"
    MID = "koord-mid"
    BATCH = "koord-batch"
    FREE = "koord-free"

    @property
    def high(self) -> bool:
        """Return whether batch has to leave room for it."""
        return self in (KoordinatorTier.PROD, KoordinatorTier.MID)


class KoordinatorDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One pod, or the use of a terminated pod (`request` None), for one resource."""

    tier: KoordinatorTier
    request: float | None = None
    used: float | None = None
    """None if it is not measured yet."""
    exclusive: bool = False
    """An LSE pod and its CPU, which counts as its request, used or not."""


class KoordinatorBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of one resource of the node."""

    capacity: float
    system_used: float | None
    """Use by the system and by host applications above batch; None if it is not measured."""
    reserved: float = 0.0
    """The larger of the kubelet's reservation and the node annotation's."""
    demands: Sequence[KoordinatorDemand] = ()
    prod_reclaimable: float | None = None
    """Part of the requests that prod pods will not use, by prediction."""
    node_used: float | None = None
    show: Callable[[float], str] = format_cores
    """Formats an amount as text."""


class KoordinatorAmount(msgspec.Struct, frozen=True, kw_only=True):
    """Headroom of one resource; None if an input is missing."""

    value: float | None
    reason: Reason


def batch_amount(
    budget: KoordinatorBudget, policy: str, reclaim_percent: float, threshold_percent: float | None = None
) -> KoordinatorAmount:
    """Return batch by policy `usage`, `request` or `maxUsageRequest`, with (100 - reclaim_percent) % reserved as a margin."""
    high = [demand for demand in budget.demands if demand.tier.high]
    margin = budget.capacity * (100 - reclaim_percent) / 100
    system: float | None = budget.reserved
    if policy != "request":
        system = None if budget.system_used is None else max(budget.system_used, budget.reserved)
    parts = [_demand_amount(demand, policy) for demand in high]
    amounts = [part for part in parts if part is not None]
    inputs: ReasonInputs = {
        "capacity": budget.capacity,
        "margin": margin,
        "system": system,
        "high": sum(amounts),
        "policy": policy,
    }
    if system is None or len(amounts) < len(parts):
        lacks = "the use of the system" if system is None else "the need of every pod above batch"
        return _unknown_amount("batch", lacks, inputs)
    value = max(budget.capacity - margin - system - sum(amounts), 0.0)
    show = budget.show
    text = (
        f"{show(budget.capacity)} - {show(margin)} margin - {show(system)} system"
        f" - {show(sum(amounts))} by pods above batch ({policy})"
    )
    if threshold_percent is not None:
        value = min(value, budget.capacity * (threshold_percent / 100))
        text += f", at most {threshold_percent:g} %"
    return KoordinatorAmount(
        value=value,
        reason=Reason(
            rule="koordinator_batch", text=f"Batch is {show(value)} = {text}.", threshold=margin, inputs=inputs
        ),
    )


def mid_amount(
    budget: KoordinatorBudget,
    threshold_percent: float,
    unallocated_percent: float = 0.0,
    static_percent: float | None = None,
) -> KoordinatorAmount:
    """Return mid from the spare CPU or memory of prod, or a fixed share of the capacity with `static_percent`."""
    maximum, show = budget.capacity * (threshold_percent / 100), budget.show
    if static_percent is not None:
        value = min(budget.capacity * static_percent / 100, maximum)
        text = f"Mid is {show(value)}: {static_percent:g} % of {show(budget.capacity)}, at most {show(maximum)}."
        reason = Reason(rule="koordinator_mid_static", text=text, threshold=maximum)
        return KoordinatorAmount(value=value, reason=reason)
    inputs: ReasonInputs = {
        "capacity": budget.capacity,
        "prod_reclaimable": budget.prod_reclaimable,
        "node_used": budget.node_used,
        "system": budget.system_used,
    }
    if budget.prod_reclaimable is None or budget.node_used is None:
        return _unknown_amount("mid", "the spare amount of prod, or the use of the node,", inputs)
    spare = max(min(budget.prod_reclaimable, budget.capacity - budget.node_used), 0.0)
    unallocated = 0.0
    if unallocated_percent > 0:
        if budget.system_used is None:
            return _unknown_amount("mid", "the use of the system", inputs)
        # A pod without a request has allocated nothing.
        requested = sum(demand.request or 0.0 for demand in budget.demands if demand.tier is KoordinatorTier.PROD)
        unallocated = max(budget.capacity - max(budget.system_used, budget.reserved) - requested, 0.0)
    value = min(spare + unallocated * unallocated_percent / 100, maximum)
    text = (
        f"Mid is {show(value)}: prod can spare {show(budget.prod_reclaimable)} and the node leaves"
        f" {show(budget.capacity - budget.node_used)}; {unallocated_percent:g} % of {show(unallocated)} unallocated;"
        f" at most {show(maximum)}."
    )
    inputs["unallocated"] = unallocated
    return KoordinatorAmount(
        value=value, reason=Reason(rule="koordinator_mid", text=text, threshold=maximum, inputs=inputs)
    )


def koordinator_headroom(
    policy: str,
    cpu: KoordinatorBudget,
    memory: KoordinatorBudget | None,
    topology: Topology,
    config: KoordinatorHeadroomConfig,
) -> Headroom:
    """Return the headroom by `koordinator-batch` or `koordinator-mid`; CPU is split over NUMA nodes by their CPUs."""
    cores = _cpu_amount(policy, cpu, config)
    memory_amount = None if memory is None else _memory_amount(policy, memory, config)
    sizes = {numa: sum(1 for c in topology.cpus if c.numa == numa) for numa in topology.numa_nodes}
    total = len(topology.cpus)
    inputs: ReasonInputs = {f"cpu_{name}": value for name, value in cores.reason.inputs.items()}
    text = f"CPU: {cores.reason.text}"
    if memory_amount is not None:
        inputs |= {f"memory_{name}": value for name, value in memory_amount.reason.inputs.items()}
        text += f" Memory: {memory_amount.reason.text}"
    reason = Reason(rule=cores.reason.rule, text=text, threshold=cores.reason.threshold, inputs=inputs)
    amount = cores.value
    return Headroom(
        cores=amount,
        cores_by_numa={} if amount is None else {numa: amount * size / total for numa, size in sizes.items()},
        memory_bytes=None if memory_amount is None else memory_amount.value,
        reason=reason,
    )


def _cpu_amount(policy: str, budget: KoordinatorBudget, config: KoordinatorHeadroomConfig) -> KoordinatorAmount:
    if policy == "koordinator-mid":
        share = config.mid_static_cpu_percent
        return mid_amount(budget, config.mid_cpu_threshold_percent, config.mid_unallocated_percent, share)
    return batch_amount(
        budget, config.cpu_policy, config.cpu_reclaim_threshold_percent, config.batch_cpu_threshold_percent
    )


def _memory_amount(policy: str, budget: KoordinatorBudget, config: KoordinatorHeadroomConfig) -> KoordinatorAmount:
    if policy == "koordinator-mid":
        share = config.mid_static_memory_percent
        return mid_amount(budget, config.mid_memory_threshold_percent, config.mid_unallocated_percent, share)
    threshold = config.batch_memory_threshold_percent
    return batch_amount(budget, config.memory_policy, config.memory_reclaim_threshold_percent, threshold)


def _demand_amount(demand: KoordinatorDemand, policy: str) -> float | None:
    """Amount that a pod above batch takes: its request until it is measured; None without either."""
    if policy == "request" or (demand.exclusive and demand.request is not None):
        return demand.request or 0.0
    if demand.used is None:
        return demand.request
    if policy == "maxUsageRequest":
        return max(demand.used, demand.request or 0.0)
    return demand.used


def _unknown_amount(tier: str, lacks: str, inputs: ReasonInputs) -> KoordinatorAmount:
    text = f"Not known: {lacks} on this node. No new headroom is computed for {tier}."
    return KoordinatorAmount(value=None, reason=Reason(rule=f"koordinator_{tier}_unknown", text=text, inputs=inputs))


_QOS_CLASS_LABEL, _PRIORITY_CLASS_LABEL = "koordinator.sh/qosClass", "koordinator.sh/priority-class"
_TIER_BY_PRIORITY = (
    (9000, 9999, KoordinatorTier.PROD),
    (7000, 7999, KoordinatorTier.MID),
    (5000, 5999, KoordinatorTier.BATCH),
    (3000, 3999, KoordinatorTier.FREE),
)
_TIER_BY_LABEL: Mapping[str | None, KoordinatorTier] = {tier.value: tier for tier in KoordinatorTier}

_PEAK_MARGIN = 1.1
"""Use may grow by a tenth (safetyMarginPercent of koordlet's prediction)."""


def koordinator_cpu_budget(
    snapshot: Snapshot, change: Rates | None, reserved_cores: float, prod_reclaimable_cores: float | None = None
) -> KoordinatorBudget:
    """Return the node's CPU for Koordinator's sums; the use of pods that are not measured counts as the system's."""
    busy = None if change is None else change.node.busy_cores
    used = [(pod, pod_cpu_cores(pod, snapshot, change, absent=None)) for pod in snapshot.pods]
    demands = [
        _build_demand(
            pod,
            sum_if_any(c.cpu_request_cores for c in pod.containers),
            cores,
            exclusive=pod.labels.get(_QOS_CLASS_LABEL) == "LSE",
        )
        for pod, cores in used
    ]
    return KoordinatorBudget(
        capacity=float(len(snapshot.topology.cpus)),
        system_used=None if busy is None else max(busy - sum(cores or 0.0 for _, cores in used), 0.0),
        reserved=reserved_cores,
        demands=demands,
        prod_reclaimable=prod_reclaimable_cores,
        node_used=busy,
    )


def koordinator_memory_budget(
    snapshot: Snapshot, prod_reclaimable_bytes: float | None = None
) -> KoordinatorBudget | None:
    """Return the node's memory without page cache for Koordinator's sums; None if the node's memory is not known."""
    total, available = snapshot.node.memory_total_bytes, snapshot.node.memory_available_bytes
    if total is None:
        return None
    busy = None if available is None else float(total - available)
    used = [
        (pod, sum_if_all_known(non_cache_bytes(snapshot.cgroups.get(c.cgroup)) for c in pod.containers))
        for pod in snapshot.pods
    ]
    demands = [
        _build_demand(pod, sum_if_any(c.memory_request_bytes for c in pod.containers), size) for pod, size in used
    ]
    return KoordinatorBudget(
        capacity=float(total),
        system_used=None if busy is None else max(busy - sum(size or 0.0 for _, size in used), 0.0),
        demands=demands,
        show=format_bytes,
        prod_reclaimable=prod_reclaimable_bytes,
        node_used=busy,
    )


def _build_demand(pod: Pod, request: float | None, used: float | None, *, exclusive: bool = False) -> KoordinatorDemand:
    """A pod in Koordinator's sums; a pod that is not reclaimable counts at least with its request."""
    if used is not None and not pod.profile.reclaimable:
        used = max(used, request or 0.0)
    return KoordinatorDemand(tier=koordinator_tier(pod), request=request, used=used, exclusive=exclusive)


def prod_spare_cores(
    snapshot: Snapshot, change: Rates | None, needs: Mapping[str, ContainerDemand], config: AdvisorConfig
) -> float | None:
    """Return the CPU that prod pods request and will not need by estimate; None in the first cycle.

    Koordinator has a predictor for it. A pod that is not measured or not reclaimable has no spare CPU.
    """
    if change is None:
        return None
    return sum(
        max(container.cpu_request_cores - estimate_container_cores(container, needs.get(container.cgroup), config), 0.0)
        for pod in snapshot.pods
        if koordinator_tier(pod) is KoordinatorTier.PROD and pod.profile.reclaimable
        for container in pod.containers
        if container.cpu_request_cores is not None
    )


def prod_spare_bytes(snapshot: Snapshot) -> float:
    """Return the memory that prod pods request above their use without page cache, with Koordinator's margin."""
    spare = 0.0
    for pod in snapshot.pods:
        if koordinator_tier(pod) is KoordinatorTier.PROD and pod.profile.reclaimable:
            for container in pod.containers:
                used = non_cache_bytes(snapshot.cgroups.get(container.cgroup))
                if used is not None and container.memory_request_bytes is not None:
                    spare += max(container.memory_request_bytes - used * _PEAK_MARGIN, 0.0)
    return spare


def koordinator_tier(pod: Pod) -> KoordinatorTier:
    """Return Koordinator's class of a pod: by label, by priority, else batch for reclaimed_cores and prod for the others."""
    label = pod.labels.get(_PRIORITY_CLASS_LABEL)
    if label in _TIER_BY_LABEL:
        return _TIER_BY_LABEL[label]
    for low, high, tier in _TIER_BY_PRIORITY:
        if low <= pod.priority <= high:
            return tier
    return KoordinatorTier.BATCH if pod.qos is QoSLevel.RECLAIMED else KoordinatorTier.PROD
