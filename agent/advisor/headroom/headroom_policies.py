"""Computes the CPU headroom of one cycle by the policy `common`, `estimate`, `forecast` or Koordinator's.
`common` is Katalyst's headroom assembler: idle CPU of the reclaim pool plus what reclaimed pods use, oversold
while utilisation is below its target. Region policies are Katalyst's none, canonical and numa-dedicated. Units
are cores. Amounts are None if an input is missing. The reporter decides when a change is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil, floor

import msgspec
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.cpu_estimate import estimate_pod_need, is_pod_reclaimable
from agent.advisor.headroom.forecast_headroom import FORECAST_POLICY, forecast_cores
from agent.advisor.headroom.koordinator_headroom import (
    koordinator_cpu_budget,
    koordinator_headroom,
    koordinator_memory_budget,
    prod_spare_bytes,
    prod_spare_cores,
)
from agent.advisor.headroom.reclaim_exclusion import (
    ReclaimableNodes,
    numa_nodes_of_bound_pods,
    online_cores_by_numa,
    reclaimable_nodes,
    unreclaimable_idle_cores,
)
from agent.advisor.pod_usage import reclaimed_cpu_by_numa
from agent.advisor.provision.pool_sizes import apportion_cores, pool_reclaimable_cores
from agent.advisor.provision.regions import cpus_per_numa_node
from agent.config.advisor import AdvisorConfig, CpuUtilBasedConfig, HeadroomConfig
from api.advice import NOT_NUMA_BOUND, Headroom, PoolSize
from api.cpu import Topology
from api.knobs import Reason, ReasonInputs
from api.rates import Rates
from api.snapshot import Snapshot


class RegionNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a region's headroom policy; all in cores."""

    name: str
    upper_cores: float
    """Maximum size of the region."""
    estimate_cores: float | None
    """Need of its containers; None if it is not known."""
    reserved_for_allocate_cores: float = 0.0
    reserved_for_reclaim_cores: float = 0.0
    reclaimable: bool = True
    """Whether idle CPU of this region is reclaimable; False while reclaim is disabled on the node or for its pod."""


def region_headroom_cores(
    upper: float, estimate: float, reserved_for_allocate: float, reserved_for_reclaim: float
) -> float:
    """Region policy `canonical`: return what the online pods of a region leave of its upper bound."""
    return max(upper - estimate - reserved_for_allocate + reserved_for_reclaim, 0.0)


def region_headroom(need: RegionNeed, policy: str) -> tuple[float | None, Reason]:
    """Return the headroom of one region in cores by the named policy; None if an input is missing. Raises KeyError."""
    return _REGION_POLICIES[policy](need)


def _none_region_headroom(need: RegionNeed) -> tuple[float | None, Reason]:
    return 0.0, Reason(rule="region_none", text=f"Policy none: region {need.name} is not reclaimable.")


def _canonical_region_headroom(need: RegionNeed) -> tuple[float | None, Reason]:
    inputs = _region_reason_inputs(need)
    if need.estimate_cores is None:
        text = f"The need of region {need.name} is not known, so its headroom is not known."
        return None, Reason(rule="region_unknown", text=text, inputs=inputs)
    cores = region_headroom_cores(
        need.upper_cores, need.estimate_cores, need.reserved_for_allocate_cores, need.reserved_for_reclaim_cores
    )
    text = (
        f"Region {need.name} leaves {cores:.2f} cores: upper bound {need.upper_cores:.2f},"
        f" less {need.estimate_cores:.2f} needed and {need.reserved_for_allocate_cores:.2f} reserved,"
        f" plus {need.reserved_for_reclaim_cores:.2f} reserved for reclaimed pods."
    )
    return cores, Reason(rule="region_canonical", text=text, threshold=need.upper_cores, inputs=inputs)


def _dedicated_region_headroom(need: RegionNeed) -> tuple[float | None, Reason]:
    """The canonical value. Katalyst scales it by the score of the service profile, which is always full here."""
    if not need.reclaimable:
        text = f"Reclaim is disabled for the pod of region {need.name}: it is not reclaimable."
        return 0.0, Reason(rule="region_reclaim_off", text=text, inputs=_region_reason_inputs(need))
    cores, reason = _canonical_region_headroom(need)
    return cores, reason if cores is None else replace(reason, rule="region_numa_dedicated")


_REGION_POLICIES: Mapping[str, Callable[[RegionNeed], tuple[float | None, Reason]]] = {
    "none": _none_region_headroom,
    "canonical": _canonical_region_headroom,
    "numa-dedicated": _dedicated_region_headroom,
    "numa-exclusive": _dedicated_region_headroom,  # Katalyst's older name of it
}


def _region_reason_inputs(need: RegionNeed) -> ReasonInputs:
    return {
        "upper_cores": need.upper_cores,
        "estimate_cores": None if need.estimate_cores is None else round(need.estimate_cores, 3),
        "reserved_for_allocate_cores": need.reserved_for_allocate_cores,
        "reserved_for_reclaim_cores": need.reserved_for_reclaim_cores,
    }


_DIGITS = 6
"""Decimals to which cores are rounded before they are rounded up or down: 10.000000000000002 counts as 10."""


class ReclaimPoolInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The reclaim pool and its use. Keys are NUMA nodes, and NOT_NUMA_BOUND for nodes without bound pods."""

    topology: Topology
    cpus: Mapping[int, tuple[int, ...]]
    """CPUs of the reclaim pool by NUMA node; empty if there is no such pool yet."""
    busy: Mapping[int, float]
    """Busy ratio by CPU; a missing CPU counts as fully busy."""
    use_cores: Mapping[int, float | None]
    """CPU use of reclaimed pods by bound NUMA node and NOT_NUMA_BOUND; missing or None if it is not measured."""
    quota_cores: Mapping[int, float] = {}
    """CPU quota of the cgroup above those pods, if it has one."""
    bound: Collection[int] = ()
    """NUMA nodes with bound pods (`numa_nodes_of_bound_pods`)."""
    reclaimable_nodes: ReclaimableNodes
    last_cores: Mapping[int, float] = {}
    """Currently reported headroom by NUMA node."""


def assemble_headroom(inputs: ReclaimPoolInputs, config: HeadroomConfig) -> Headroom:
    """Return the CPU headroom in total and by NUMA node; None if an input is missing."""
    numa_nodes = inputs.topology.numa_nodes
    if not inputs.cpus:
        return _unknown_headroom("There is no reclaim pool yet.", {})
    whole_cores = config.rounds(len(inputs.topology.cpus))
    nodes = [numa for numa in sorted(inputs.cpus) if numa in inputs.reclaimable_nodes.numa_nodes]
    groups: list[tuple[int, tuple[int, ...]]] = [(numa, (numa,)) for numa in nodes if numa in inputs.bound]
    if unbound := tuple(numa for numa in nodes if numa not in inputs.bound):
        groups.append((NOT_NUMA_BOUND, unbound))
    by_numa = dict.fromkeys(numa_nodes, 0.0)
    reason_inputs: ReasonInputs = {}
    texts = []
    for key, members in groups:
        group = _compute_group(inputs, config, key, members)
        reason_inputs.update({f"{_group_label(key)}_{name}": value for name, value in group.inputs.items()})
        texts.append(group.text)
        if group.cores is None:
            return _unknown_headroom(group.text, reason_inputs)
        by_numa.update(
            _split_group(group.cores, key, members, inputs.topology, whole_cores=whole_cores, util=config.util.enable)
        )
    total = round(sum(by_numa.values()), _DIGITS)
    excluded = [
        f"NUMA node {numa} is not reclaimable: {why}." for numa, why in inputs.reclaimable_nodes.refused.items()
    ]
    text = " ".join([f"CPU headroom is {total:g} cores.", *texts, *excluded])
    rule = "util_based" if config.util.enable else "pool_supply"
    threshold = config.util.target if config.util.enable else None
    return Headroom(
        cores=total,
        cores_by_numa=by_numa,
        reason=Reason(rule=rule, text=text, threshold=threshold, inputs=reason_inputs),
    )


def headroom_refusal(nodes: Sequence[int], reclaimable: ReclaimableNodes, *, enable_reclaim: bool) -> Headroom | None:
    """Return the headroom while no new one may be computed: reclaim is disabled, or CPUs of a pod are unknown; else None."""
    if not enable_reclaim:
        reason = Reason(rule="reclaim_off", text="Reclaim is disabled: the headroom is 0.")
        return Headroom(cores=0.0, cores_by_numa=dict.fromkeys(nodes, 0.0), memory_bytes=0.0, reason=reason)
    if reclaimable.unknown:
        pods = ", ".join(reclaimable.unknown)
        return _unknown_headroom(
            f"Reclaim is disabled on the NUMA nodes of {pods}, whose CPUs are not known.", {"pods": pods}
        )
    return None


class GroupHeadroom(msgspec.Struct, frozen=True, kw_only=True):
    """Headroom of one group of NUMA nodes before rounding."""

    cores: float | None
    text: str
    inputs: ReasonInputs


def _compute_group(
    inputs: ReclaimPoolInputs, config: HeadroomConfig, key: int, members: tuple[int, ...]
) -> GroupHeadroom:
    cpus = [cpu for numa in members for cpu in inputs.cpus[numa]]
    capacity = sum(1 for cpu in inputs.topology.cpus if cpu.numa in members)
    used = inputs.use_cores.get(key)
    name = "The NUMA nodes without bound pods" if key == NOT_NUMA_BOUND else f"NUMA node {key}"
    if used is None:
        return GroupHeadroom(
            cores=None, text=f"{name}: the CPU use of reclaimed pods is not measured.", inputs={"use_cores": None}
        )
    busy = sum(inputs.busy.get(cpu, 1.0) for cpu in cpus)
    quota = inputs.quota_cores.get(key)
    supply = min(max(len(cpus) - busy, 0.0) + used, capacity if quota is None else min(quota, capacity))
    reason_inputs: ReasonInputs = {
        "cpus": len(cpus),
        "busy_cores": round(busy, 3),
        "use_cores": round(used, 3),
        "quota_cores": quota,
        "supply_cores": round(supply, 3),
    }
    text = (
        f"{name}: {len(cpus)} CPUs, {busy:.2f} busy, {used:.2f} of that by reclaimed pods, supply {supply:.2f} cores."
    )
    if not config.util.enable:
        return GroupHeadroom(cores=supply, text=text, inputs=reason_inputs)
    last = sum(inputs.last_cores.get(numa, 0.0) for numa in members)
    cores = utilisation_headroom(supply, used, last, capacity, config.util)
    reason_inputs |= {"last_cores": round(last, 3), "capacity_cores": capacity, "promised_cores": round(cores, 3)}
    util = used / supply if supply > 0 else 0.0
    text += f" Utilisation is {util:.2f}, target {config.util.target:g}; previous headroom {last:.2f}, new"
    return GroupHeadroom(cores=cores, text=f"{text} {cores:.2f}.", inputs=reason_inputs)


def utilisation_headroom(supply: float, used: float, last: float, capacity: float, config: CpuUtilBasedConfig) -> float:
    """Return the headroom for a supply and its use in cores, where `last` is the previously reported headroom."""
    if supply <= 0:
        return 0.0
    util = used / supply
    over = 0.0
    if config.target > util:
        over = supply * (config.target - util)
    elif 0 < config.maximum < util:
        over = supply * (config.maximum - util)
    return min(max(last + over, supply), supply * config.max_oversold_rate, capacity * config.max_capacity_rate)


def _split_group(
    cores: float, key: int, members: tuple[int, ...], topology: Topology, *, whole_cores: bool, util: bool
) -> dict[int, float]:
    """Cores of one group by NUMA node. Whole cores as in Katalyst, and never more than the node's CPUs.

    A bound node is rounded up without utilisation; the others are rounded up together with it, and down one by one.
    """
    cores = round(cores, _DIGITS)
    sizes = cpus_per_numa_node(topology)
    if key != NOT_NUMA_BOUND:
        return {key: float(ceil(cores)) if whole_cores and not util else cores}
    if util:
        total = sum(sizes[numa] for numa in members)
        cores = ceil(cores) if whole_cores else cores
        shares = {numa: cores * sizes[numa] / total for numa in members}
    else:
        shares = {numa: min(cores / len(members), float(sizes[numa])) for numa in members}
    return {numa: float(floor(round(share, _DIGITS))) if whole_cores else share for numa, share in shares.items()}


def _unknown_headroom(text: str, inputs: ReasonInputs) -> Headroom:
    return Headroom(reason=Reason(rule="headroom_unknown", text=f"{text} No new headroom is computed.", inputs=inputs))


def _group_label(key: int) -> str:
    return "unbound" if key == NOT_NUMA_BOUND else f"numa{key}"


class CpuAllowance(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the CPU policy, before any headroom."""

    need_cores: float
    """Estimated need of online pods, at least the requests of pods that are not reclaimable."""
    sizes: Sequence[PoolSize] = ()
    """New pool sizes; only their quotas count, since the CPUs are those of the previous allocation."""
    reclaimable_cores: float | None = None
    """Current CPU quota of reclaimed pods with sharing by priority; None if pools or pool quotas limit them."""


class HeadroomInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a headroom policy."""

    snapshot: Snapshot
    change: Rates | None
    """None in the first cycle."""
    config: AdvisorConfig
    state: AdvisorState
    """State of the advisor after this cycle's provision."""
    allowance: CpuAllowance
    reclaimable_nodes: ReclaimableNodes


def compute_headroom(
    snapshot: Snapshot, change: Rates | None, config: AdvisorConfig, state: AdvisorState, allowance: CpuAllowance
) -> Headroom:
    """Return the headroom in total and by NUMA node; amounts are None if inputs are missing.

    Only Koordinator's policies set memory; for the others `merge_memory_headroom` adds it.
    """
    nodes = reclaimable_nodes(snapshot, state, config)
    if refusal := headroom_refusal(snapshot.topology.numa_nodes, nodes, enable_reclaim=config.enable_reclaim):
        return refusal
    inputs = HeadroomInputs(
        snapshot=snapshot, change=change, config=config, state=state, allowance=allowance, reclaimable_nodes=nodes
    )
    return _exclude_numa_nodes(HEADROOM_POLICIES[headroom_policy(config)](inputs), nodes)


def headroom_policy(config: AdvisorConfig) -> str:
    """Return the configured headroom policy, or the default of the CPU policy."""
    if config.headroom.policy is not None:
        return config.headroom.policy
    return "common" if config.policy == "canonical" else "estimate"


def merge_memory_headroom(
    headroom: Headroom, memory_bytes: float | None, by_numa: Mapping[int, float], config: AdvisorConfig
) -> Headroom:
    """Return the headroom with the memory advice, unless the headroom policy sets memory itself."""
    if headroom_policy(config) in MEMORY_POLICIES:
        return headroom
    return replace(headroom, memory_bytes=memory_bytes, memory_by_numa=by_numa)


def _common_headroom(inputs: HeadroomInputs) -> Headroom:
    """Katalyst's assembler: idle CPU of the reclaim pool by the latest allocation, plus the use of reclaimed pods."""
    snapshot, change, config = inputs.snapshot, inputs.change, inputs.config
    topology = snapshot.topology
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    cpus: dict[int, tuple[int, ...]] = {}
    for cpu in inputs.state.pools.get("reclaim", ()):
        if cpu in numa_of:
            cpus[numa_of[cpu]] = (*cpus.get(numa_of[cpu], ()), cpu)
    bound = numa_nodes_of_bound_pods(snapshot.pods, inputs.state.cpus, topology)
    pool_inputs = ReclaimPoolInputs(
        topology=topology,
        cpus=cpus if change is not None else {},
        busy=change.node.per_cpu_busy_ratio if change is not None else {},
        use_cores=reclaimed_cpu_by_numa(snapshot, change, bound),
        quota_cores=_reclaim_quotas(inputs, bound),
        bound=bound,
        reclaimable_nodes=inputs.reclaimable_nodes,
        last_cores=inputs.state.reported_by_numa,
    )
    return assemble_headroom(pool_inputs, config.headroom)


def _reclaim_quotas(inputs: HeadroomInputs, bound: Sequence[int]) -> dict[int, float]:
    """Maximum use of reclaimed pods by bound NUMA node and NOT_NUMA_BOUND; absent without a limit."""
    reclaimable = inputs.allowance.reclaimable_cores
    if reclaimable is None:
        return {
            size.numa: size.quota_cores
            for size in inputs.allowance.sizes
            if size.pool == "reclaim" and size.quota_cores is not None
        }
    return apportion_cores(reclaimable, cpus_per_numa_node(inputs.snapshot.topology), bound)


def _estimate_headroom(inputs: HeadroomInputs) -> Headroom:
    """What the estimated need of online pods and the system leave of the node, and at most the current quota of reclaimed pods.

    By NUMA node in proportion to what they leave there. As in Koordinator, the system counts with the larger of its use and its
    reserved CPUs; the reserve for bursts of online pods covers neither, as little as Koordinator's margin does.
    """
    topology, config = inputs.snapshot.topology, inputs.config
    need, reclaimable, system = inputs.allowance.need_cores, inputs.allowance.reclaimable_cores, _system_cores(inputs)
    if system is None:
        return _unknown_headroom("The CPU use of the system is not measured yet.", {"need_cores": round(need, 3)})
    cpus, nodes = len(topology.cpus), len(topology.numa_nodes)
    reclaim_reserve, reserve = config.reclaim_reserve_cores(cpus, nodes), config.reserve_cores(cpus)
    left = region_headroom_cores(cpus - system - reclaim_reserve, need, reserve, reclaim_reserve)
    cores = left if reclaimable is None else min(left, reclaimable)
    text = (
        f"CPU headroom is {cores:.2f} cores: of {cpus} CPUs, online pods need {need:.2f} by estimate,"
        f" {_system_text(inputs, system)} and {reserve:g} are reserved for bursts of online pods"
    )
    if unreclaimable := [
        pod.key for pod in inputs.snapshot.pods if pod.qos.online and not is_pod_reclaimable(pod, config)
    ]:
        text += f"; {', '.join(unreclaimable)} is not reclaimable and counts with its requests"
    if reclaimable is not None and reclaimable < left:
        text += f"; at most the {reclaimable:.2f} that reclaimed pods may use now"
    reason_inputs = {
        "cpus": cpus,
        "need_cores": round(need, 3),
        "system_cores": round(system, 3),
        "reserved_for_allocate_cores": reserve,
        "reserved_for_reclaim_cores": reclaim_reserve,
        "lent_cores": reclaimable,
    }
    return Headroom(
        cores=cores,
        cores_by_numa=_split_by_weight(cores, _free_by_numa(inputs, system)),
        reason=Reason(rule="estimate", text=f"{text}.", threshold=float(cpus), inputs=reason_inputs),
    )


def _system_cores(inputs: HeadroomInputs) -> float | None:
    """The larger of the system's CPU use and its reserved CPUs, which already cover that use; None if it is not measured."""
    use = inputs.state.system_use
    if not inputs.config.headroom.system_use:
        return _system_reserve_cores(inputs)
    return None if use is None else max(use.cores, _system_reserve_cores(inputs))


def _system_reserve_cores(inputs: HeadroomInputs) -> float:
    """CPUs of the pools `reserve` and `interrupt`, which no online or reclaimed pod gets."""
    return float(sum(len(inputs.state.pools.get(pool, ())) for pool in ("reserve", "interrupt")))


def _system_text(inputs: HeadroomInputs, system: float) -> str:
    reserve = _system_reserve_cores(inputs)
    if system > reserve or (inputs.config.headroom.system_use and not reserve):
        return f"processes outside of online and reclaimed pods use {system:.2f}"
    return f"{reserve:g} are reserved for processes outside of online and reclaimed pods"


def _free_by_numa(inputs: HeadroomInputs, system_cores: float) -> dict[int, float]:
    """What is left of each NUMA node; the system runs anywhere, in proportion to the CPUs."""
    sizes, snapshot, state = cpus_per_numa_node(inputs.snapshot.topology), inputs.snapshot, inputs.state
    if len(sizes) < 2:
        return {numa: float(size) for numa, size in sizes.items()}
    need = online_cores_by_numa(
        snapshot, state, lambda pod: estimate_pod_need(pod, snapshot, state.containers, inputs.config)
    )
    free_ratio = 1 - system_cores / sum(sizes.values())
    return {numa: max(size * free_ratio - need[numa], 0.0) for numa, size in sizes.items()}


def _split_by_weight(amount: float, weights: Mapping[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {numa: amount * weight / total if total > 0 else 0.0 for numa, weight in weights.items()}


def _forecast_headroom(inputs: HeadroomInputs) -> Headroom:
    topology, config, allowance = inputs.snapshot.topology, inputs.config, inputs.allowance
    fallback = (_common_headroom if config.policy == "canonical" else _estimate_headroom)(inputs)
    reclaimable = (
        pool_reclaimable_cores(allowance.sizes, topology.numa_nodes)
        if allowance.reclaimable_cores is None
        else allowance.reclaimable_cores
    )
    cpus, use = len(topology.cpus), inputs.state.system_use
    system_use = 0.0 if use is None else use.cores
    system = max(system_use, _system_reserve_cores(inputs))
    # The predicted peak contains what the system and pods that are not reclaimable use, and not what they leave idle.
    idle = unreclaimable_idle_cores(inputs.snapshot, inputs.state, config) + system - system_use
    reserve = config.reserve_cores(cpus) + idle
    cores, reason = forecast_cores(float(cpus), reserve, inputs.state.forecasts, fallback, reclaimable)
    by_numa = {} if cores is None else _split_by_weight(cores, _free_by_numa(inputs, system))
    return Headroom(cores=cores, cores_by_numa=by_numa, reason=reason)


def _koordinator_headroom(inputs: HeadroomInputs) -> Headroom:
    snapshot, config = inputs.snapshot, inputs.config
    policy = headroom_policy(config)
    reserve = float(len(inputs.state.pools.get("reserve", ())))
    spare = prod_spare_cores(snapshot, inputs.change, inputs.state.containers, config)
    cpu = koordinator_cpu_budget(snapshot, inputs.change, reserve, spare)
    memory = koordinator_memory_budget(snapshot, prod_spare_bytes(snapshot))
    headroom = koordinator_headroom(policy, cpu, memory, snapshot.topology, config.headroom.koordinator)
    if headroom.memory_bytes is None:
        return headroom
    sizes = {numa: float(snapshot.node.numa[numa].meminfo.get("MemTotal", 0)) for numa in sorted(snapshot.node.numa)}
    return replace(
        headroom, memory_by_numa=_split_by_weight(headroom.memory_bytes, sizes) if any(sizes.values()) else {}
    )


HEADROOM_POLICIES: Mapping[str, Callable[[HeadroomInputs], Headroom]] = {
    "common": _common_headroom,
    "estimate": _estimate_headroom,
    FORECAST_POLICY: _forecast_headroom,
    "koordinator-batch": _koordinator_headroom,
    "koordinator-mid": _koordinator_headroom,
}
MEMORY_POLICIES = frozenset({"koordinator-batch", "koordinator-mid"})
"""Policies that set the headroom of memory too."""


def _exclude_numa_nodes(headroom: Headroom, nodes: ReclaimableNodes) -> Headroom:
    if not nodes.refused:
        return headroom
    cores, memory = (
        {numa: 0.0 if numa in nodes.refused else amount for numa, amount in parts.items()}
        for parts in (headroom.cores_by_numa, headroom.memory_by_numa)
    )
    text = headroom.reason.text
    excluded = [f"NUMA node {numa} is not reclaimable: {why}." for numa, why in nodes.refused.items()]
    return replace(
        headroom,
        cores=None if headroom.cores is None else round(sum(cores.values()), _DIGITS),
        cores_by_numa=cores,
        # Memory without a split by NUMA node may be on the excluded nodes.
        memory_bytes=None if headroom.memory_bytes is None or not memory else sum(memory.values()),
        memory_by_numa=memory,
        reason=replace(headroom.reason, text=" ".join([text, *(line for line in excluded if line not in text)])),
    )
