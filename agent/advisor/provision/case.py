"""One region as its policy sees it: its need, what it had before, what is turned, and what is known of reclaimed pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil

import msgspec

from agent.advisor.estimation import numa_part, pod_cores
from agent.advisor.indicators import Indicators
from agent.advisor.inference import retarget
from agent.advisor.provision.policies import Case
from agent.advisor.provision.situation import ProvisionMemory, RegionMemory, Situation
from agent.advisor.regions import Bounds, Members, Node, bound_nodes
from agent.config import AdvisorConfig
from agent.config.provision import ProvisionConfig
from api.advice import Control, Region, RegionKind
from api.pods import Pod

NS_PER_MINUTE, MINUTES = 60_000_000_000, 24 * 60


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What all regions of a round have in common."""

    situation: Situation
    memory: ProvisionMemory
    advisor: AdvisorConfig
    config: ProvisionConfig
    node: Node
    indicators: Indicators
    numa_of: Mapping[int, int]
    smt: bool
    reclaim: Mapping[int, int] | None
    """CPUs of the reclaim pool as it is now, by NUMA node."""


def case_of(member: Members, limits: Bounds, need: float, before: int | None, turn: Turn) -> Case:
    """What a policy judges of a region."""
    region, situation = member.region, turn.situation
    quota = situation.reclaim_quota_cores.get(region.numa_nodes[0], 0.0) if region.bound and turn.config.quota else 0.0
    requirement = float(ceil(need) if before is None else before)
    use = [situation.reclaim_use_cores.get(numa) for numa in region.numa_nodes]
    reclaim = turn.node.cpus if turn.reclaim is None else turn.reclaim
    follows = set(policies_of(region, turn.config)) - {"none", "canonical"}
    signals = turn.indicators.signals(member, turn.config.targets) if follows else ()
    memory = turn.memory.regions.get(region.name, RegionMemory())
    unknown = set(memory.controllers) - {signal.name for signal in signals} if follows else set()
    if unknown:
        unknown &= turn.indicators.unknown(member, turn.config.targets)
    moved, retargeted = signals, None
    if signals and situation.inference.strategy != "none":
        minute = situation.snapshot.wall_time_ns // NS_PER_MINUTE % MINUTES
        moved, retargeted = retarget(
            signals, region.pods, situation.predictions, situation.inference, situation.now_ns, minute
        )
    return Case(
        region=region,
        bounds=limits,
        need=need,
        knob=(Control.RECLAIM_QUOTA, quota) if quota > 0 else (Control.REQUIREMENT, requirement),
        enable_reclaim=turn.advisor.enable_reclaim,
        signals=moved,
        unknown=frozenset(unknown),
        retargeted=retargeted,
        memory=memory,
        reclaim_cpus=sum(reclaim.get(numa, 0) for numa in region.numa_nodes),
        reclaim_use_cores=None if None in use else sum(cores for cores in use if cores is not None),
    )


def policies_of(region: Region, config: ProvisionConfig) -> tuple[str, ...]:
    """Names of the policies that are to be followed, the preferred one first."""
    return config.share_policies if region.kind is RegionKind.SHARE else config.dedicated_policies


def need_cores(member: Members, turn: Turn) -> float:
    """Canonical estimate of a region; of a dedicated pod that nothing may be lent of, its NUMA nodes."""
    situation, advisor = turn.situation, turn.advisor
    total = 0.0
    for pod in member.pods:
        lent = advisor.enable_reclaim and pod.key not in situation.not_reclaimable
        bound = bound_nodes(pod, turn.node.cpus)
        if member.region.kind is RegionKind.DEDICATED and member.region.bound:
            if lent:
                cores = pod_cores(pod, situation.snapshot, situation.needs, advisor, reclaimable=True)
            else:
                cores = float(sum(turn.node.cpus[numa] for numa in bound))
            total += cores * numa_part(member.region.numa_nodes[0], bound, assigned_cpus(pod, turn))
        else:
            total += pod_cores(pod, situation.snapshot, situation.needs, advisor, reclaimable=lent)
    return total


def assigned_cpus(pod: Pod, turn: Turn) -> Counter[int]:
    """A pod's CPUs by NUMA node."""
    cpus = {cpu for container in pod.containers for cpu in turn.situation.assigned.get(container.cgroup, ())}
    return Counter(turn.numa_of[cpu] for cpu in cpus if cpu in turn.numa_of)


def had_before(region: Region, request: float, turn: Turn) -> int | None:
    """What the region had until now; None where nobody knows."""
    known = turn.memory.regions.get(region.name)
    if known is not None and known.requirement is not None:
        return known.requirement
    pools = turn.situation.pools
    if region.exclusive:
        reclaimed = turn.reclaim or {}
        return max(sum(turn.node.available[numa] - reclaimed.get(numa, 0) for numa in region.numa_nodes), 0)
    if region.kind is RegionKind.DEDICATED or turn.config.overlap:
        return ceil(request)
    return len(pools[region.pool]) if region.pool in pools else None
