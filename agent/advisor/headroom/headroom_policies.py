"""Computes the CPU headroom of one cycle by the policy `common`, `estimate`, `forecast` or Koordinator's.
`common` is Katalyst's headroom assembler: idle CPU of the reclaim pool plus what reclaimed pods use, oversold
while utilisation is below its target. Region policies are Katalyst's none, canonical and numa-dedicated. Units
are cores. Amounts are None if an input is missing. The reporter decides when a change is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil, floor

import msgspec

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
from agent.advisor.provision.pool_sizes import apportion_cores, cpus_per_numa_node, pool_reclaimable_cores
from agent.config.advisor import AdvisorConfig, CpuUtilBasedConfig, HeadroomConfig
from api.advice import NOT_NUMA_BOUND, Headroom, PoolSize
from api.cpu import Topology
from api.knobs import Reason
from api.rates import Rates
from api.snapshot import Snapshot


class ProfileScore(msgspec.Struct, frozen=True, kw_only=True):
    """How well a service fares by its profile (SPD): at `least` nothing of its pod may be lent, at `most` all that is left."""

    value: float
    least: float = 0.0
    most: float = 100.0


class RegionNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a headroom policy looks at; all in cores."""

    name: str
    upper_cores: float
    """What the region may grow to."""
    estimate_cores: float | None
    """What its containers need; None where that is not known."""
    reserved_for_allocate_cores: float = 0.0
    reserved_for_reclaim_cores: float = 0.0
    reclaimable: bool = True
    """Whether what this region leaves may be lent; False while reclaim is off on the node or for its pod."""
    score: ProfileScore | None = None


def region_headroom_cores(
    upper: float, estimate: float, reserved_for_allocate: float, reserved_for_reclaim: float
) -> float:
    """Region policy `canonical`: what the online pods of a region leave of its upper bound."""
    return max(upper - estimate - reserved_for_allocate + reserved_for_reclaim, 0.0)


def region_headroom(need: RegionNeed, policy: str) -> tuple[float | None, Reason]:
    """Cores that one region leaves by the policy of this name; None where an input is missing. KeyError for an unknown name."""
    return _REGION_POLICIES[policy](need)


def _none_region_headroom(need: RegionNeed) -> tuple[float | None, Reason]:
    return 0.0, Reason(rule="region_none", text=f"Policy none: region {need.name} lends nothing.")


def _canonical_region_headroom(need: RegionNeed) -> tuple[float | None, Reason]:
    inputs = _region_reason_inputs(need)
    if need.estimate_cores is None:
        text = f"What region {need.name} needs is not known, so what it leaves is not either."
        return None, Reason(rule="region_unknown", text=text, inputs=inputs)
    cores = region_headroom_cores(
        need.upper_cores, need.estimate_cores, need.reserved_for_allocate_cores, need.reserved_for_reclaim_cores
    )
    text = (
        f"Region {need.name} leaves {cores:.2f} cores: {need.upper_cores:.2f} at most, less {need.estimate_cores:.2f} needed"
        f" and {need.reserved_for_allocate_cores:.2f} reserved,"
        f" plus {need.reserved_for_reclaim_cores:.2f} that reclaimed pods keep."
    )
    return cores, Reason(rule="region_canonical", text=text, threshold=need.upper_cores, inputs=inputs)


def _dedicated_region_headroom(need: RegionNeed) -> tuple[float | None, Reason]:
    """The canonical value, in proportion to how well the pod fares."""
    if not need.reclaimable:
        text = f"Reclaim is off for the pod of region {need.name}: it lends nothing."
        return 0.0, Reason(rule="region_reclaim_off", text=text, inputs=_region_reason_inputs(need))
    cores, verdict = _canonical_region_headroom(need)
    if cores is None:
        return None, verdict
    score = need.score
    if score is None or score.most <= score.least:
        text = f"How well the pod of region {need.name} fares is not known, so nothing can be said of what it leaves."
        return None, Reason(rule="region_score_unknown", text=text, inputs=_region_reason_inputs(need))
    share = min(max((score.value - score.least) / (score.most - score.least), 0.0), 1.0)
    by = f"By its score of {score.value:g}, of {score.least:g} to {score.most:g},"
    text = f"{verdict.text} {by} {cores * share:.2f} cores are lent."
    inputs = {**_region_reason_inputs(need), "score": score.value, "canonical_cores": round(cores, 3)}
    return cores * share, Reason(rule="region_numa_dedicated", text=text, threshold=score.least, inputs=inputs)


_REGION_POLICIES: Mapping[str, Callable[[RegionNeed], tuple[float | None, Reason]]] = {
    "none": _none_region_headroom,
    "canonical": _canonical_region_headroom,
    "numa-dedicated": _dedicated_region_headroom,
    "numa-exclusive": _dedicated_region_headroom,  # Katalyst's older name of it
}


def _region_reason_inputs(need: RegionNeed) -> dict[str, float | int | str | None]:
    return {
        "upper_cores": need.upper_cores,
        "estimate_cores": None if need.estimate_cores is None else round(need.estimate_cores, 3),
        "reserved_for_allocate_cores": need.reserved_for_allocate_cores,
        "reserved_for_reclaim_cores": need.reserved_for_reclaim_cores,
    }


_DIGITS = 6
"""Cores are rounded to a millionth before they are rounded to whole ones: 10.000000000000002 is ten."""

Inputs = dict[str, float | int | str | None]


class ReclaimPoolInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The reclaim pool and what is known of its use. Keys are NUMA nodes, and UNBOUND for all that nobody is bound to."""

    topology: Topology
    cpus: Mapping[int, tuple[int, ...]]
    """CPUs of the reclaim pool by NUMA node; empty where there is no such pool yet."""
    busy: Mapping[int, float]
    """Busy ratio by CPU; one that is missing counts as fully busy."""
    use_cores: Mapping[int, float | None]
    """CPU that reclaimed pods use, of each bound NUMA node and of UNBOUND; missing or None is not known."""
    quota_cores: Mapping[int, float] = {}
    """Limit of the cgroup above those pods, where it has one."""
    bound: Collection[int] = ()
    """`exclusion.bound_nodes`."""
    lendable: ReclaimableNodes
    last_cores: Mapping[int, float] = {}
    """What is advertised now, by NUMA node (ReporterMemory.advertised.cores_by_numa)."""


def assemble_headroom(situation: ReclaimPoolInputs, config: HeadroomConfig) -> Headroom:
    """CPU that can be promised in all and by NUMA node; None where an input is missing. Memory is for others to say."""
    nodes = situation.topology.numa_nodes
    if not situation.cpus:
        return _unknown_headroom("There is no reclaim pool yet.", {})
    whole = config.rounds(len(situation.topology.cpus))
    here = [numa for numa in sorted(situation.cpus) if numa in situation.lendable.numa_nodes]
    groups: list[tuple[int, tuple[int, ...]]] = [(numa, (numa,)) for numa in here if numa in situation.bound]
    if rest := tuple(numa for numa in here if numa not in situation.bound):
        groups.append((NOT_NUMA_BOUND, rest))
    by_numa = dict.fromkeys(nodes, 0.0)
    inputs: Inputs = {}
    texts = []
    for key, members in groups:
        found = _compute_group(situation, config, key, members)
        inputs.update({f"{_group_label(key)}_{name}": value for name, value in found.inputs.items()})
        texts.append(found.text)
        if found.cores is None:
            return _unknown_headroom(found.text, inputs)
        by_numa.update(
            _split_group(found.cores, key, members, situation.topology, whole=whole, util=config.util.enable)
        )
    total = round(sum(by_numa.values()), _DIGITS)
    refused = [f"NUMA node {numa} is not lent: {why}." for numa, why in situation.lendable.refused.items()]
    text = " ".join([f"{total:g} cores can be promised.", *texts, *refused])
    rule = "util_based" if config.util.enable else "pool_supply"
    threshold = config.util.target if config.util.enable else None
    return Headroom(
        cores=total, cores_by_numa=by_numa, reason=Reason(rule=rule, text=text, threshold=threshold, inputs=inputs)
    )


def headroom_refusal(nodes: Sequence[int], lendable: ReclaimableNodes, *, enable_reclaim: bool) -> Headroom | None:
    """Why nothing, or nothing new, is promised whatever the policy; None where nothing stands in the way."""
    if not enable_reclaim:
        verdict = Reason(rule="reclaim_off", text="Reclaim is off: nothing is promised.")
        return Headroom(cores=0.0, cores_by_numa=dict.fromkeys(nodes, 0.0), memory_bytes=0.0, reason=verdict)
    if lendable.unknown:
        pods = ", ".join(lendable.unknown)
        return _unknown_headroom(
            f"Reclaim is off around {pods}, but where their CPUs are is not known.", {"pods": pods}
        )
    return None


class GroupHeadroom(msgspec.Struct, frozen=True, kw_only=True):
    """What one group of NUMA nodes can be promised for, before it is rounded."""

    cores: float | None
    text: str
    inputs: Inputs


def _compute_group(
    situation: ReclaimPoolInputs, config: HeadroomConfig, key: int, members: tuple[int, ...]
) -> GroupHeadroom:
    cpus = [cpu for numa in members for cpu in situation.cpus[numa]]
    capacity = sum(1 for cpu in situation.topology.cpus if cpu.numa in members)
    used = situation.use_cores.get(key)
    name = "The NUMA nodes without bound pods" if key == NOT_NUMA_BOUND else f"NUMA node {key}"
    if used is None:
        return GroupHeadroom(
            cores=None, text=f"{name}: what reclaimed pods use there is not known.", inputs={"use_cores": None}
        )
    busy = sum(situation.busy.get(cpu, 1.0) for cpu in cpus)
    quota = situation.quota_cores.get(key)
    supply = min(max(len(cpus) - busy, 0.0) + used, capacity if quota is None else min(quota, capacity))
    inputs: Inputs = {
        "cpus": len(cpus),
        "busy_cores": round(busy, 3),
        "use_cores": round(used, 3),
        "quota_cores": quota,
        "supply_cores": round(supply, 3),
    }
    text = f"{name}: {len(cpus)} CPUs, {busy:.2f} busy, {used:.2f} of that reclaimed, supply {supply:.2f} cores."
    if not config.util.enable:
        return GroupHeadroom(cores=supply, text=text, inputs=inputs)
    last = sum(situation.last_cores.get(numa, 0.0) for numa in members)
    cores = utilisation_headroom(supply, used, last, capacity, config.util)
    inputs |= {"last_cores": round(last, 3), "capacity_cores": capacity, "promised_cores": round(cores, 3)}
    util = used / supply if supply > 0 else 0.0
    text += f" Of that {util:.2f} is used, against a target of {config.util.target:g}; {last:.2f} was promised:"
    return GroupHeadroom(cores=cores, text=f"{text} {cores:.2f}.", inputs=inputs)


def utilisation_headroom(supply: float, used: float, last: float, capacity: float, config: CpuUtilBasedConfig) -> float:
    """Cores to promise for a supply of so many, of which so many are used, where `last` was promised before."""
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
    cores: float, key: int, members: tuple[int, ...], topology: Topology, *, whole: bool, util: bool
) -> dict[int, float]:
    """One group's cores by NUMA node. Whole cores as Katalyst has them, and never more than the node's CPUs.

    A bound node is rounded up, without utilisation; what the others share is rounded up with it and down for each of them.
    """
    cores = round(cores, _DIGITS)
    sizes = {numa: sum(1 for cpu in topology.cpus if cpu.numa == numa) for numa in members}
    if key != NOT_NUMA_BOUND:
        return {key: float(ceil(cores)) if whole and not util else cores}
    if util:
        total = sum(sizes.values())
        cores = ceil(cores) if whole else cores
        shares = {numa: cores * size / total for numa, size in sizes.items()}
    else:
        shares = {numa: min(cores / len(members), float(sizes[numa])) for numa in members}
    return {numa: float(floor(round(share, _DIGITS))) if whole else share for numa, share in shares.items()}


def _unknown_headroom(text: str, inputs: Inputs) -> Headroom:
    return Headroom(reason=Reason(rule="headroom_unknown", text=f"{text} Nothing new is promised.", inputs=inputs))


def _group_label(key: int) -> str:
    return "unbound" if key == NOT_NUMA_BOUND else f"numa{key}"


_TOTAL_DIGITS = 6


class CpuAllowance(msgspec.Struct, frozen=True, kw_only=True):
    """What the round has come to before anything is promised."""

    need_cores: float
    """What online pods need, estimated; those that lend nothing no less than they requested."""
    sizes: Sequence[PoolSize] = ()
    """What the pools are to be from now on; only quotas are looked at, since CPUs are those of the placement before."""
    reclaimable_cores: float | None = None
    """What priority lets reclaimed pods have now; None where CPUs of their own or a quota limit them."""


class HeadroomInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A round as a policy of headroom sees it."""

    snapshot: Snapshot
    change: Rates | None
    """None in the first round."""
    config: AdvisorConfig
    memory: AdvisorState
    """What the advisor remembers after this round's provision."""
    lending: CpuAllowance
    where: ReclaimableNodes
    """NUMA nodes that may be lent."""


def compute_headroom(
    snapshot: Snapshot, change: Rates | None, config: AdvisorConfig, memory: AdvisorState, lending: CpuAllowance
) -> Headroom:
    """What can be promised in all and by NUMA node; amounts are None where inputs are missing.

    Memory is said by Koordinator's policies alone; of the others `with_memory` adds it.
    """
    where = reclaimable_nodes(snapshot, memory, config)
    if no := headroom_refusal(snapshot.topology.numa_nodes, where, enable_reclaim=config.enable_reclaim):
        return no
    case = HeadroomInputs(snapshot=snapshot, change=change, config=config, memory=memory, lending=lending, where=where)
    return _exclude_numa_nodes(HEADROOM_POLICIES[headroom_policy(config)](case), where)


def headroom_policy(config: AdvisorConfig) -> str:
    """The policy of headroom: the one that is set, or the one that goes with the way of lending."""
    if config.headroom.policy is not None:
        return config.headroom.policy
    return "common" if config.policy == "canonical" else "estimate"


def merge_memory_headroom(
    found: Headroom, memory_bytes: float | None, by_numa: Mapping[int, float], config: AdvisorConfig
) -> Headroom:
    """The same with what memory advice says can be promised, where the policy of headroom says nothing of memory."""
    if headroom_policy(config) in MEMORY_POLICIES:
        return found
    return msgspec.structs.replace(found, memory_bytes=memory_bytes, memory_by_numa=by_numa)


def _common_headroom(inputs: HeadroomInputs) -> Headroom:
    """Katalyst's assembler: what the reclaim pool, as it was placed last, has idle, and what reclaimed pods use of it."""
    snapshot, change, config = inputs.snapshot, inputs.change, inputs.config
    topology = snapshot.topology
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    cpus: dict[int, tuple[int, ...]] = {}
    for cpu in inputs.memory.pools.get("reclaim", ()):
        if cpu in numa_of:
            cpus[numa_of[cpu]] = (*cpus.get(numa_of[cpu], ()), cpu)
    bound = numa_nodes_of_bound_pods(snapshot.pods, inputs.memory.cpus, topology)
    situation = ReclaimPoolInputs(
        topology=topology,
        cpus=cpus if change is not None else {},
        busy=change.node.per_cpu_busy_ratio if change is not None else {},
        use_cores=reclaimed_cpu_by_numa(snapshot, change, bound),
        quota_cores=_reclaim_quotas(inputs, bound),
        bound=bound,
        lendable=inputs.where,
        last_cores=inputs.memory.reported_by_numa,
    )
    return assemble_headroom(situation, config.headroom)


def _reclaim_quotas(inputs: HeadroomInputs, bound: Sequence[int]) -> dict[int, float]:
    """The most that reclaimed pods may use of each bound NUMA node and of UNBOUND; absent where nothing limits them."""
    lent = inputs.lending.reclaimable_cores
    if lent is None:
        return {
            size.numa: size.quota_cores
            for size in inputs.lending.sizes
            if size.pool == "reclaim" and size.quota_cores is not None
        }
    return apportion_cores(lent, cpus_per_numa_node(inputs.snapshot.topology), bound)


def _estimate_headroom(case: HeadroomInputs) -> Headroom:
    """What the estimated need of online pods leaves of the node, and never more than is lent now.

    By NUMA node in proportion to what the pods there leave.
    """
    topology, config = case.snapshot.topology, case.config
    need, lent = case.lending.need_cores, case.lending.reclaimable_cores
    cpus, nodes = len(topology.cpus), len(topology.numa_nodes)
    keep, burst = config.reclaim_reserve_cores(cpus, nodes), config.reserve_cores(cpus)
    left = region_headroom_cores(cpus - keep, need, burst, keep)
    cores = left if lent is None else min(left, lent)
    text = (
        f"{cores:.2f} cores can be promised: of {cpus} CPUs online pods need {need:.2f} by estimate"
        f" and {burst:g} are kept for their bursts"
    )
    if whole := [pod.key for pod in case.snapshot.pods if pod.qos.online and not is_pod_reclaimable(pod, config)]:
        text += f"; of {', '.join(whole)} nothing is lent, so all that is requested counts"
    if lent is not None and lent < left:
        text += f"; no more than the {lent:.2f} that are lent now"
    inputs = {
        "cpus": cpus,
        "need_cores": round(need, 3),
        "reserved_for_allocate_cores": burst,
        "reserved_for_reclaim_cores": keep,
        "lent_cores": lent,
    }
    weights = _free_by_numa(case)
    total = sum(weights.values())
    return Headroom(
        cores=cores,
        cores_by_numa={numa: cores * weight / total if total > 0 else 0.0 for numa, weight in weights.items()},
        reason=Reason(rule="estimate", text=f"{text}.", threshold=float(cpus), inputs=inputs),
    )


def _free_by_numa(inputs: HeadroomInputs) -> dict[int, float]:
    """CPUs of each NUMA node less what its online pods need."""
    sizes, snapshot, memory = cpus_per_numa_node(inputs.snapshot.topology), inputs.snapshot, inputs.memory
    if len(sizes) < 2:
        return {numa: float(size) for numa, size in sizes.items()}
    need = online_cores_by_numa(
        snapshot, memory, lambda pod: estimate_pod_need(pod, snapshot, memory.containers, inputs.config)
    )
    return {numa: max(size - need[numa], 0.0) for numa, size in sizes.items()}


def _forecast_headroom(inputs: HeadroomInputs) -> Headroom:
    """What the foretold peak leaves; by NUMA node as the estimate has it."""
    topology, config, lending = inputs.snapshot.topology, inputs.config, inputs.lending
    otherwise = (_common_headroom if config.policy == "canonical" else _estimate_headroom)(inputs)
    lent = (
        pool_reclaimable_cores(lending.sizes, topology.numa_nodes)
        if lending.reclaimable_cores is None
        else lending.reclaimable_cores
    )
    cpus = len(topology.cpus)
    reserve = config.reserve_cores(cpus) + unreclaimable_idle_cores(inputs.snapshot, inputs.memory, config)
    cores, verdict = forecast_cores(float(cpus), reserve, inputs.memory.forecasts, otherwise, lent)
    weights = _free_by_numa(inputs)
    total = sum(weights.values())
    by_numa = {numa: (cores or 0.0) * weight / total if total > 0 else 0.0 for numa, weight in weights.items()}
    return Headroom(cores=cores, cores_by_numa={} if cores is None else by_numa, reason=verdict)


def _koordinator_headroom(inputs: HeadroomInputs) -> Headroom:
    snapshot, config = inputs.snapshot, inputs.config
    policy = headroom_policy(config)
    reserve = float(len(inputs.memory.pools.get("reserve", ())))
    spare = prod_spare_cores(snapshot, inputs.change, inputs.memory.containers, config)
    cpu = koordinator_cpu_budget(snapshot, inputs.change, reserve, spare)
    space = koordinator_memory_budget(snapshot, prod_spare_bytes(snapshot))
    found = koordinator_headroom(policy, cpu, space, snapshot.topology, config.headroom.koordinator)
    if found.memory_bytes is None:
        return found
    sizes = {numa: snapshot.node.numa[numa].meminfo.get("MemTotal", 0) for numa in sorted(snapshot.node.numa)}
    total = sum(sizes.values())
    parts = {numa: found.memory_bytes * size / total for numa, size in sizes.items()} if total else {}
    return msgspec.structs.replace(found, memory_by_numa=parts)


HEADROOM_POLICIES: Mapping[str, Callable[[HeadroomInputs], Headroom]] = {
    "common": _common_headroom,
    "estimate": _estimate_headroom,
    FORECAST_POLICY: _forecast_headroom,
    "koordinator-batch": _koordinator_headroom,
    "koordinator-mid": _koordinator_headroom,
}
MEMORY_POLICIES = frozenset({"koordinator-batch", "koordinator-mid"})
"""Policies that say of memory too what can be promised."""


def _exclude_numa_nodes(found: Headroom, where: ReclaimableNodes) -> Headroom:
    """The same without the NUMA nodes that must not be lent; the totals are what is left."""
    if not where.refused:
        return found
    cores, memory = (
        {numa: 0.0 if numa in where.refused else amount for numa, amount in parts.items()}
        for parts in (found.cores_by_numa, found.memory_by_numa)
    )
    text = found.reason.text
    refused = [f"NUMA node {numa} is not lent: {why}." for numa, why in where.refused.items()]
    return msgspec.structs.replace(
        found,
        cores=None if found.cores is None else round(sum(cores.values()), _TOTAL_DIGITS),
        cores_by_numa=cores,
        # Which NUMA nodes an amount of memory is on may not be known: then none of it can be said to be elsewhere.
        memory_bytes=None if found.memory_bytes is None or not memory else sum(memory.values()),
        memory_by_numa=memory,
        reason=msgspec.structs.replace(
            found.reason, text=" ".join([text, *(line for line in refused if line not in text)])
        ),
    )
