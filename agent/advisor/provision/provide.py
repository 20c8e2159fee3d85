"""One round of CPU provision: how large every pool is to be, and why. A pure function of situation, memory and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil

import msgspec

from agent.advisor.assembler import Mode, Want, assemble
from agent.advisor.indicators import Indicators
from agent.advisor.isolation import fits, isolate
from agent.advisor.provision.case import Turn, assigned_cpus, case_of, had_before, need_cores, policies_of
from agent.advisor.provision.dynamic_quota import dynamic_quota
from agent.advisor.provision.explain import Decided, explain, with_headroom
from agent.advisor.provision.policies import Answer, Case, Proposal, Settings, canonical, none
from agent.advisor.provision.rama import rama
from agent.advisor.provision.situation import ProvisionMemory, RegionMemory, Situation
from agent.advisor.regions import (
    Bounds,
    Members,
    bounds,
    node,
    regions,
    request_cores,
)
from agent.advisor.regulator import held, may_shrink, regulate
from agent.config import AdvisorConfig
from agent.config.provision import ProvisionConfig
from api.advice import UNBOUND, Control, CpuAdvice, PoolSize, RegionKind
from api.knobs import Verdict
from api.pods import Pod

RECLAIM_POOL, RESERVE_POOL = "reclaim", "reserve"
POLICIES: Mapping[str, Callable[[Case, Settings], Answer]] = {
    "none": none,
    "canonical": canonical,
    "rama": rama,
    "dynamic-quota": dynamic_quota,
}


def provision(
    situation: Situation, memory: ProvisionMemory, advisor: AdvisorConfig, config: ProvisionConfig
) -> tuple[CpuAdvice, ProvisionMemory]:
    """Regions, their policies' proposals, regulated, assembled to sizes of pools; and the memory for the next round.

    Where pods that are to be kept apart do not fit, the round is done over without keeping any apart. Nothing is advised
    of a node whose CPUs are not known.
    """
    topology, reclaim = situation.snapshot.topology, situation.pools.get(RECLAIM_POOL)
    if not topology.cpus:
        return CpuAdvice(), memory
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    turn = Turn(
        situation=situation,
        memory=memory,
        advisor=advisor,
        config=config,
        node=node(topology, situation.reserve, situation.forbidden, advisor, config),
        indicators=Indicators(situation),
        numa_of=numa_of,
        smt=topology.smt,
        reclaim=None if reclaim is None else Counter(numa_of[cpu] for cpu in reclaim if cpu in numa_of),
    )
    isolation = isolate(situation, memory, config.isolation)
    apart = dict(isolation.pods)
    decided = _decide_all(turn, apart)
    crowded = bool(apart) and not _fit(decided, turn)
    if crowded:
        apart = {}
        decided = _decide_all(turn, apart)
    mode = Mode(enable_reclaim=advisor.enable_reclaim, overlap=config.overlap, quota=config.quota)
    assembled = assemble([one.want for one in decided], turn.node, mode)
    reserve = sum(situation.reserve.get(numa, 0) for numa in turn.node.cpus)
    sizes = (PoolSize(pool=RESERVE_POOL, cpus=reserve), *assembled.sizes) if reserve else assembled.sizes
    note = "; pods with too many tasks are not kept apart, since there is no room" if crowded else ""
    advice = CpuAdvice(
        regions=tuple(with_headroom(explain(one, assembled, note), one, advisor) for one in decided),
        sizes=sizes,
        isolated=tuple(sorted(apart)),
    )
    return advice, ProvisionMemory(
        quotas={size.numa: size.quota_cores for size in sizes if size.pool == RECLAIM_POOL and size.quota_cores},
        regions={one.region.name: _remember(one, assembled.granted[one.region.name], situation) for one in decided},
        loads=isolation.loads,
        isolated=advice.isolated,
    )


def _decide_all(turn: Turn, apart: Mapping[str, Verdict]) -> list[Decided]:
    situation, config = turn.situation, turn.config

    def reclaimable(pod: Pod, pool: str) -> bool:
        off = pool in config.disable_reclaim_share_pools if pool else pod.key in situation.not_reclaimable
        return turn.advisor.enable_reclaim and not off

    def assigned_nodes(pod: Pod) -> tuple[int, ...]:
        return tuple(sorted(numa for numa in assigned_cpus(pod, turn) if numa in turn.node.cpus))

    found = regions(situation.snapshot.pods, tuple(turn.node.cpus), apart, assigned_nodes, reclaimable)
    limits = bounds(found, turn.node, turn.advisor, config)
    return [_decide(member, limits[member.region.name], turn, apart) for member in found]


def _decide(member: Members, limits: Bounds, turn: Turn, apart: Mapping[str, Verdict]) -> Decided:
    region = member.region
    request = request_cores(member)
    if region.kind is RegionKind.ISOLATION:
        upper, lower = ceil(limits.upper), ceil(limits.lower)
        proposal = Proposal(
            policy="canonical",
            controls={Control.ISOLATED_UPPER: upper, Control.ISOLATED_LOWER: lower},
            text=apart[member.pods[0].key].text,
        )
        want = Want(region=region, upper=upper, lower=lower, request=max(ceil(request), 1))
        need, cause = need_cores(member, turn), apart[member.pods[0].key]
        return Decided(region=region, bounds=limits, proposal=proposal, want=want, need=need, cause=cause)
    before = had_before(region, request, turn)
    need = need_cores(member, turn)
    case = case_of(member, limits, need, before, turn)
    proposal, skipped = _propose(case, turn)
    if case.retargeted is not None:
        proposal = msgspec.structs.replace(proposal, inputs={**proposal.inputs, **case.retargeted.inputs})
        skipped = (*skipped, case.retargeted.text.rstrip("."))
    if not proposal.controls:
        region = msgspec.structs.replace(region, reclaimable=False)
    if region.kind is RegionKind.SHARE and not region.reclaimable and _silent(member):
        request = max(request, need)  # pods that ask for nothing would have nothing
    regulated = regulate(
        proposal.controls.get(Control.REQUIREMENT, need),
        limits,
        before,
        turn.advisor,
        may_shrink=may_shrink(case.memory.last_ramp_down_ns, turn.situation.now_ns, turn.advisor),
        even=turn.smt and region.kind is RegionKind.SHARE and not turn.config.overlap,
    )
    if before is not None and region.pool in turn.situation.found:
        regulated = held(before, limits)
    quota = proposal.controls.get(Control.RECLAIM_QUOTA)
    governed = quota is not None and turn.config.quota and turn.config.overlap
    want = Want(
        region=region,
        # Where a quota limits reclaimed pods, they may run on all of its CPUs.
        requirement=1 if governed else max(regulated.cpus, 1),
        request=max(ceil(request), 1),
        quota=quota,
    )
    return Decided(
        region=region,
        bounds=limits,
        proposal=proposal,
        want=want,
        need=need,
        before=before,
        memory=case.memory,
        regulated=regulated,
        signals=case.signals,
        skipped=skipped,
    )


def _silent(member: Members) -> bool:
    return any(container.cpu_request_cores is None for pod in member.pods for container in pod.containers)


def _propose(case: Case, turn: Turn) -> tuple[Proposal, tuple[str, ...]]:
    """Of the first policy that can be followed; why those before it could not."""
    names, skipped = policies_of(case.region, turn.config), []
    settings = Settings(advisor=turn.advisor, gains=turn.config.gains)
    for name in (*names, "canonical"):
        answer = POLICIES[name](case, settings)
        if isinstance(answer, str):
            skipped.append(f"{name} is not followed: {answer}")
            continue
        reference = next((other for policy, other in turn.config.restrict.items() if policy == name), "")
        if reference in names:
            answer = _restricted(answer, POLICIES[reference](case, settings))
        return answer, tuple(skipped)
    raise AssertionError("canonical needs nothing and always answers")


def _restricted(proposal: Proposal, reference: Answer) -> Proposal:
    mine = proposal.controls.get(Control.RECLAIM_QUOTA)
    other = None if isinstance(reference, str) else reference.controls.get(Control.RECLAIM_QUOTA)
    if isinstance(reference, str) or mine is None or other is None or mine <= other:
        return proposal
    return msgspec.structs.replace(
        proposal,
        controls={**proposal.controls, Control.RECLAIM_QUOTA: other},
        text=f"{proposal.text}; {reference.policy} allows {other:.2f} cores",
    )


def _fit(decided: Sequence[Decided], turn: Turn) -> bool:
    needed: Counter[int] = Counter()
    taken: set[int] = set()
    for one in decided:
        region = one.region
        if region.bound:
            taken.update(region.numa_nodes)
        if region.exclusive:
            continue
        if region.kind is RegionKind.ISOLATION:
            cpus = one.want.upper
        elif region.kind is RegionKind.DEDICATED:
            cpus = one.want.request
        else:
            cpus = max(one.want.requirement, one.before or 0)
        needed[region.numa_nodes[0] if region.bound else UNBOUND] += cpus
    free: Collection[int] = [numa for numa in turn.node.cpus if numa not in taken]
    return fits(needed, turn.node.cpus, free)


def _remember(one: Decided, granted: int, situation: Situation) -> RegionMemory:
    if one.regulated is None:
        return RegionMemory()
    # Where nothing is lent the pool is larger than it would have to be: what it has is where shrinking starts from.
    requirement = one.regulated.cpus if one.region.reclaimable else granted
    shrunk = one.before is not None and requirement < one.before
    return RegionMemory(
        policy=one.proposal.policy,
        requirement=requirement,
        quota_cores=one.want.quota,
        # When an agent before this one did nobody knows: not longer ago than the start of this one.
        last_ramp_down_ns=situation.now_ns
        if shrunk or one.region.pool in situation.found
        else one.memory.last_ramp_down_ns,
        controllers=one.proposal.controllers,
    )
