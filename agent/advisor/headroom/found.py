"""What can be promised to reclaimed pods in this round, by the policy that the settings name. Pure.

Whoever sizes the pools: the policy of headroom is chosen by itself. What becomes of what is found here, and when, is for the
reporter to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from agent.advisor.estimation import lends, need_cores
from agent.advisor.headroom.assembler import PoolSituation, assemble, refusal
from agent.advisor.headroom.exclusion import Lendable, bound_nodes
from agent.advisor.headroom.foretold import FORECAST, foretold_cores, lent_by_pools
from agent.advisor.headroom.gather import (
    cpu_budget,
    memory_budget,
    prod_spare_bytes,
    prod_spare_cores,
    reclaimed_use,
)
from agent.advisor.headroom.kept import idle_cores, lent_nodes, on_numa
from agent.advisor.headroom.koordinator import koordinator
from agent.advisor.headroom.region import region_cores
from agent.advisor.pool_sizes import apportion, node_cpus
from agent.advisor.state import Memory
from agent.config import AdvisorConfig
from api.advice import Headroom, PoolSize
from api.knobs import Verdict
from api.rates import Rates
from api.samples import Snapshot

_DIGITS = 6


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """What the round has come to before anything is promised."""

    need_cores: float
    """What online pods need, estimated; those that lend nothing no less than they requested."""
    sizes: Sequence[PoolSize] = ()
    """What the pools are to be from now on; only quotas are looked at, since CPUs are those of the placement before."""
    lent_cores: float | None = None
    """What priority lets reclaimed pods have now; None where CPUs of their own or a quota limit them."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A round as a policy of headroom sees it."""

    snapshot: Snapshot
    change: Rates | None
    """None in the first round."""
    config: AdvisorConfig
    memory: Memory
    """What the advisor remembers after this round's provision."""
    lending: Lending
    where: Lendable
    """NUMA nodes that may be lent."""


def find(snapshot: Snapshot, change: Rates | None, config: AdvisorConfig, memory: Memory, lending: Lending) -> Headroom:
    """What can be promised in all and by NUMA node; amounts are None where inputs are missing.

    Memory is said by Koordinator's policies alone; of the others `with_memory` adds it.
    """
    where = lent_nodes(snapshot, memory, config)
    if no := refusal(snapshot.topology.numa_nodes, where, enable_reclaim=config.enable_reclaim):
        return no
    case = Case(snapshot=snapshot, change=change, config=config, memory=memory, lending=lending, where=where)
    return _without(POLICIES[policy_of(config)](case), where)


def policy_of(config: AdvisorConfig) -> str:
    """The policy of headroom: the one that is set, or the one that goes with the way of lending."""
    if config.headroom.policy is not None:
        return config.headroom.policy
    return "common" if config.policy == "canonical" else "estimate"


def with_memory(
    found: Headroom, memory_bytes: float | None, by_numa: Mapping[int, float], config: AdvisorConfig
) -> Headroom:
    """The same with what memory advice says can be promised, where the policy of headroom says nothing of memory."""
    if policy_of(config) in SAY_MEMORY:
        return found
    return msgspec.structs.replace(found, memory_bytes=memory_bytes, memory_by_numa=by_numa)


def _common(case: Case) -> Headroom:
    """Katalyst's assembler: what the reclaim pool, as it was placed last, has idle, and what reclaimed pods use of it."""
    snapshot, change, config = case.snapshot, case.change, case.config
    topology = snapshot.topology
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    cpus: dict[int, tuple[int, ...]] = {}
    for cpu in case.memory.pools.get("reclaim", ()):
        if cpu in numa_of:
            cpus[numa_of[cpu]] = (*cpus.get(numa_of[cpu], ()), cpu)
    bound = bound_nodes(snapshot.pods, case.memory.cpus, topology)
    situation = PoolSituation(
        topology=topology,
        cpus=cpus if change is not None else {},
        busy=change.node.per_cpu_busy_ratio if change is not None else {},
        use_cores=reclaimed_use(snapshot, change, bound),
        quota_cores=_quotas(case, bound),
        bound=bound,
        lendable=case.where,
        last_cores=case.memory.advertised_by_numa,
    )
    return assemble(situation, config.headroom)


def _quotas(case: Case, bound: Sequence[int]) -> dict[int, float]:
    """The most that reclaimed pods may use of each bound NUMA node and of UNBOUND; absent where nothing limits them."""
    lent = case.lending.lent_cores
    if lent is None:
        return {
            size.numa: size.quota_cores
            for size in case.lending.sizes
            if size.pool == "reclaim" and size.quota_cores is not None
        }
    return apportion(lent, node_cpus(case.snapshot.topology), bound)


def _estimate(case: Case) -> Headroom:
    """What the estimated need of online pods leaves of the node, and never more than is lent now.

    By NUMA node in proportion to what the pods there leave.
    """
    topology, config = case.snapshot.topology, case.config
    need, lent = case.lending.need_cores, case.lending.lent_cores
    cpus, nodes = len(topology.cpus), len(topology.numa_nodes)
    keep, burst = config.reclaim_reserve_cores(cpus, nodes), config.reserve_cores(cpus)
    left = region_cores(cpus - keep, need, burst, keep)
    cores = left if lent is None else min(left, lent)
    text = (
        f"{cores:.2f} cores can be promised: of {cpus} CPUs online pods need {need:.2f} by estimate"
        f" and {burst:g} are kept for their bursts"
    )
    if whole := [pod.key for pod in case.snapshot.pods if pod.qos.online and not lends(pod, config)]:
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
        verdict=Verdict(rule="estimate", text=f"{text}.", threshold=float(cpus), inputs=inputs),
    )


def _free_by_numa(case: Case) -> dict[int, float]:
    """CPUs of each NUMA node less what its online pods need."""
    sizes, snapshot, memory = node_cpus(case.snapshot.topology), case.snapshot, case.memory
    if len(sizes) < 2:
        return {numa: float(size) for numa, size in sizes.items()}
    need = on_numa(snapshot, memory, lambda pod: need_cores(pod, snapshot, memory.containers, case.config))
    return {numa: max(size - need[numa], 0.0) for numa, size in sizes.items()}


def _forecast(case: Case) -> Headroom:
    """What the foretold peak leaves; by NUMA node as the estimate has it."""
    topology, config, lending = case.snapshot.topology, case.config, case.lending
    otherwise = (_common if config.policy == "canonical" else _estimate)(case)
    lent = lent_by_pools(lending.sizes, topology.numa_nodes) if lending.lent_cores is None else lending.lent_cores
    cpus = len(topology.cpus)
    reserve = config.reserve_cores(cpus) + idle_cores(case.snapshot, case.memory, config)
    cores, verdict = foretold_cores(float(cpus), reserve, case.memory.forecasts, otherwise, lent)
    weights = _free_by_numa(case)
    total = sum(weights.values())
    by_numa = {numa: (cores or 0.0) * weight / total if total > 0 else 0.0 for numa, weight in weights.items()}
    return Headroom(cores=cores, cores_by_numa={} if cores is None else by_numa, verdict=verdict)


def _koordinator(case: Case) -> Headroom:
    snapshot, config = case.snapshot, case.config
    policy = policy_of(config)
    reserve = float(len(case.memory.pools.get("reserve", ())))
    spare = prod_spare_cores(snapshot, case.change, case.memory.containers, config)
    cpu = cpu_budget(snapshot, case.change, reserve, spare)
    space = memory_budget(snapshot, prod_spare_bytes(snapshot))
    found = koordinator(policy, cpu, space, snapshot.topology, config.headroom.koordinator)
    if found.memory_bytes is None:
        return found
    sizes = {numa: snapshot.node.numa[numa].meminfo.get("MemTotal", 0) for numa in sorted(snapshot.node.numa)}
    total = sum(sizes.values())
    parts = {numa: found.memory_bytes * size / total for numa, size in sizes.items()} if total else {}
    return msgspec.structs.replace(found, memory_by_numa=parts)


POLICIES: Mapping[str, Callable[[Case], Headroom]] = {
    "common": _common,
    "estimate": _estimate,
    FORECAST: _forecast,
    "koordinator-batch": _koordinator,
    "koordinator-mid": _koordinator,
}
SAY_MEMORY = frozenset({"koordinator-batch", "koordinator-mid"})
"""Policies that say of memory too what can be promised."""


def _without(found: Headroom, where: Lendable) -> Headroom:
    """The same without the NUMA nodes that must not be lent; the totals are what is left."""
    if not where.refused:
        return found
    cores, memory = (
        {numa: 0.0 if numa in where.refused else amount for numa, amount in parts.items()}
        for parts in (found.cores_by_numa, found.memory_by_numa)
    )
    text = found.verdict.text
    refused = [f"NUMA node {numa} is not lent: {why}." for numa, why in where.refused.items()]
    return msgspec.structs.replace(
        found,
        cores=None if found.cores is None else round(sum(cores.values()), _DIGITS),
        cores_by_numa=cores,
        # Which NUMA nodes an amount of memory is on may not be known: then none of it can be said to be elsewhere.
        memory_bytes=None if found.memory_bytes is None or not memory else sum(memory.values()),
        memory_by_numa=memory,
        verdict=msgspec.structs.replace(
            found.verdict, text=" ".join([text, *(line for line in refused if line not in text)])
        ),
    )
