"""Provisions CPU for one cycle: regions, the proposal of each region's policy, pool sizes, reasons.
If isolated pods do not fit, the provision is computed again without isolation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil

import msgspec

from agent.advisor.advisor_state import AdvisorState, ProvisionInputs, ProvisionState, RegionState
from agent.advisor.cpu_estimate import estimate_pod_cores, numa_share
from agent.advisor.headroom.headroom_policies import ProfileScore, RegionNeed, region_headroom
from agent.advisor.pod_usage import reclaimed_cpu_by_numa
from agent.advisor.provision.load_isolation import fits_numa_nodes, isolate_pods
from agent.advisor.provision.pool_sizes import (
    PoolAssembly,
    RegionRequest,
    RegulatedRequirement,
    SharingMode,
    assemble_pools,
    hold_requirement,
    is_shrink_allowed,
    regulate_requirement,
)
from agent.advisor.provision.region_indicators import (
    ProvisionIndicators,
    adjust_targets,
    predict_from_requests,
    request_p99_ms,
)
from agent.advisor.provision.region_policies import (
    PolicyAnswer,
    PolicySettings,
    RegionInputs,
    RegionProposal,
    propose_dynamic_quota,
    propose_rama,
)
from agent.advisor.provision.regions import (
    NumaCapacity,
    RegionBounds,
    RegionMembers,
    build_numa_capacity,
    build_regions,
    compute_bounds,
    pod_bound_nodes,
    requested_cores,
)
from agent.config.advisor import AdvisorConfig, InferenceConfig, ProvisionConfig
from api.advice import (
    NOT_NUMA_BOUND,
    ControlKnob,
    CpuAdvice,
    IndicatorState,
    PoolSize,
    Region,
    RegionAdvice,
    RegionKind,
)
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import Rates
from api.snapshot import Snapshot


def build_provision_inputs(
    snapshot: Snapshot, change: Rates | None, memory: AdvisorState, inference: InferenceConfig, now_ns: int
) -> ProvisionInputs:
    """What is known in this round; `now_ns` is CLOCK_MONOTONIC."""
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    measured = request_p99_ms(snapshot.indicators, memory.requests, now_ns)
    return ProvisionInputs(
        now_ns=now_ns,
        snapshot=snapshot,
        previous=memory.previous,
        change=change,
        needs=memory.containers,
        reserve=_count_by_numa(memory.pools.get("reserve", ()), numa_of),
        forbidden=_count_by_numa(memory.pools.get("interrupt", ()), numa_of),
        assigned=memory.cpus,
        pools=memory.pools,
        found=frozenset(memory.pools if memory.previous is None else ()),
        reclaim_use_cores=_reclaimed_use_by_numa(snapshot, change, memory, numa_of),
        reclaim_quota_cores=memory.provision.quotas,
        indicators=measured,
        targets={pod.key: pod.profile.targets for pod in snapshot.pods if pod.profile.targets},
        predictions=predict_from_requests(snapshot.pods, measured, now_ns) if inference.strategy != "none" else None,
        inference=inference,
        runnable={
            path: float(sample.threads_by_state.runnable)
            for path in memory.containers
            if (sample := snapshot.cgroups.get(path)) is not None and sample.threads_by_state is not None
        },
        together=memory.refused,
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.lends),
    )


def _reclaimed_use_by_numa(
    snapshot: Snapshot, change: Rates | None, memory: AdvisorState, numa_of: Mapping[int, int]
) -> dict[int, float]:
    """CPU that reclaimed pods use, where it is known. What those use that are bound to no node is spread as their CPUs are."""
    if not memory.pools.get("reclaim"):
        return {}
    used = reclaimed_cpu_by_numa(snapshot, change, snapshot.topology.numa_nodes)
    unbound = [pod for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED and len(pod.bound_numa) != 1]
    cpus = {cpu for pod in unbound for container in pod.containers for cpu in memory.cpus.get(container.cgroup, ())}
    where, anywhere = _count_by_numa(tuple(cpus or memory.pools["reclaim"]), numa_of), used.pop(NOT_NUMA_BOUND)
    total, found = sum(where.values()), {}
    for numa, own in used.items():
        part = where.get(numa, 0) / total if total else 0.0
        more = anywhere * part if anywhere is not None else None if part else 0.0
        if own is not None and more is not None:
            found[numa] = own + more
    return found


def _count_by_numa(cpus: Sequence[int], numa_of: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for cpu in cpus:
        if cpu in numa_of:
            found[numa_of[cpu]] = found.get(numa_of[cpu], 0) + 1
    return found


def propose_none(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:  # noqa: ARG001 - every policy has this form
    """Nobody says what the region needs: it keeps what its pods asked for, and nothing is lent of it."""
    return RegionProposal(policy="none", controls={}, text="no policy looks at it, so it keeps what its pods asked for")


def propose_canonical(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:  # noqa: ARG001
    """The requirement is the estimated need of its containers."""
    count = len(inputs.region.containers)
    return RegionProposal(
        policy="canonical",
        controls={ControlKnob.REQUIREMENT: inputs.need},
        text=f"{count} container{'' if count == 1 else 's'} {'is' if count == 1 else 'are'} estimated to need "
        f"{inputs.need:.2f} cores",
    )


NS_PER_MINUTE, MINUTES_PER_DAY = 60_000_000_000, 24 * 60


class ProvisionContext(msgspec.Struct, frozen=True, kw_only=True):
    """What all regions of a round have in common."""

    situation: ProvisionInputs
    memory: ProvisionState
    advisor: AdvisorConfig
    config: ProvisionConfig
    node: NumaCapacity
    indicators: ProvisionIndicators
    numa_of: Mapping[int, int]
    smt: bool
    reclaim: Mapping[int, int] | None
    """CPUs of the reclaim pool as it is now, by NUMA node."""


def build_region_inputs(
    member: RegionMembers, limits: RegionBounds, need: float, before: int | None, context: ProvisionContext
) -> RegionInputs:
    """What a policy judges of a region."""
    region, situation = member.region, context.situation
    quota = (
        situation.reclaim_quota_cores.get(region.numa_nodes[0], 0.0) if region.bound and context.config.quota else 0.0
    )
    requirement = float(ceil(need) if before is None else before)
    use = [situation.reclaim_use_cores.get(numa) for numa in region.numa_nodes]
    reclaim = context.node.cpus if context.reclaim is None else context.reclaim
    follows = set(region_policy_names(region, context.config)) - {"none", "canonical"}
    signals = context.indicators.signals(member, context.config.targets) if follows else ()
    memory = context.memory.regions.get(region.name, RegionState())
    unknown = set(memory.controllers) - {signal.name for signal in signals} if follows else set()
    if unknown:
        unknown &= context.indicators.unknown(member, context.config.targets)
    moved, retargeted = signals, None
    if signals and situation.inference.strategy != "none":
        minute = situation.snapshot.wall_time_ns // NS_PER_MINUTE % MINUTES_PER_DAY
        moved, retargeted = adjust_targets(
            signals, region.pods, situation.predictions, situation.inference, situation.now_ns, minute
        )
    return RegionInputs(
        region=region,
        bounds=limits,
        need=need,
        knob=(ControlKnob.RECLAIM_QUOTA, quota) if quota > 0 else (ControlKnob.REQUIREMENT, requirement),
        enable_reclaim=context.advisor.enable_reclaim,
        signals=moved,
        unknown=frozenset(unknown),
        target_reason=retargeted,
        memory=memory,
        reclaim_cpus=sum(reclaim.get(numa, 0) for numa in region.numa_nodes),
        reclaim_use_cores=None if None in use else sum(cores for cores in use if cores is not None),
    )


def region_policy_names(region: Region, config: ProvisionConfig) -> tuple[str, ...]:
    """Names of the policies that are to be followed, the preferred one first."""
    return config.share_policies if region.kind is RegionKind.SHARE else config.dedicated_policies


def region_need_cores(member: RegionMembers, context: ProvisionContext) -> float:
    """Canonical estimate of a region; of a dedicated pod that nothing may be lent of, its NUMA nodes."""
    situation, advisor = context.situation, context.advisor
    total = 0.0
    for pod in member.pods:
        lent = advisor.enable_reclaim and pod.key not in situation.not_reclaimable
        bound = pod_bound_nodes(pod, context.node.cpus)
        if member.region.kind is RegionKind.DEDICATED and member.region.bound:
            cores = estimate_pod_cores(pod, situation.snapshot, situation.needs, advisor, reclaimable=True) if lent else float(sum(context.node.cpus[numa] for numa in bound))
            total += cores * numa_share(member.region.numa_nodes[0], bound, assigned_cpus_by_numa(pod, context))
        else:
            total += estimate_pod_cores(pod, situation.snapshot, situation.needs, advisor, reclaimable=lent)
    return total


def assigned_cpus_by_numa(pod: Pod, context: ProvisionContext) -> Counter[int]:
    """A pod's CPUs by NUMA node."""
    cpus = {cpu for container in pod.containers for cpu in context.situation.assigned.get(container.cgroup, ())}
    return Counter(context.numa_of[cpu] for cpu in cpus if cpu in context.numa_of)


def previous_requirement(region: Region, request: float, context: ProvisionContext) -> int | None:
    """What the region had until now; None where nobody knows."""
    known = context.memory.regions.get(region.name)
    if known is not None and known.requirement is not None:
        return known.requirement
    pools = context.situation.pools
    if region.exclusive:
        reclaimed = context.reclaim or {}
        return max(sum(context.node.available[numa] - reclaimed.get(numa, 0) for numa in region.numa_nodes), 0)
    if region.kind is RegionKind.DEDICATED or context.config.overlap:
        return ceil(request)
    return len(pools[region.pool]) if region.pool in pools else None


FULL_SCORE = ProfileScore(value=100.0)
"""How a service fares of which nobody says that it fares badly; Katalyst's answer too."""


class RegionEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one region before pools are sized."""

    region: Region
    bounds: RegionBounds
    proposal: RegionProposal
    want: RegionRequest
    need: float = 0.0
    before: int | None = None
    memory: RegionState = RegionState()
    regulated: RegulatedRequirement | None = None
    """None of a pod that is kept apart: its size is not regulated."""
    signals: tuple[IndicatorState, ...] = ()
    skipped: tuple[str, ...] = ()
    cause: Reason | None = None
    """Why it is kept apart."""


def explain_region(evaluation: RegionEvaluation, assembled: PoolAssembly, note: str) -> RegionAdvice:
    """The advice for one region, with its verdict; `note` is about all of them."""
    region, limits = evaluation.region, evaluation.bounds
    controls = dict(evaluation.proposal.controls)
    if evaluation.regulated is not None and controls:
        controls[ControlKnob.REQUIREMENT] = float(evaluation.regulated.cpus)
    inputs: dict[str, float | int | str | None] = {
        "cpus": assembled.granted[region.name],
        "lent_cpus": assembled.lent[region.name],
        "request_cpus": evaluation.want.request,
        "upper_cores": round(limits.upper, 3),
        "lower_cores": round(limits.lower, 3),
        "reserved_for_allocate_cores": round(limits.reserved_for_allocate, 3),
        "reserved_for_reclaim_cores": round(limits.reserved_for_reclaim, 3),
    }
    if evaluation.regulated is not None:
        inputs |= {
            "estimate_cores": round(evaluation.need, 3),
            "before_cpus": evaluation.before,
            "wanted_cpus": evaluation.regulated.wanted,
        }
    if evaluation.cause is not None:
        inputs |= evaluation.cause.inputs
    return RegionAdvice(
        region=region,
        policy=evaluation.proposal.policy,
        controls=controls,
        upper_cores=limits.upper,
        lower_cores=limits.lower,
        signals=evaluation.signals,
        reason=Reason(
            rule=_region_rule(evaluation),
            text=f"{region.name}: {_region_text(evaluation, assembled)}{note}.",
            threshold=limits.upper if evaluation.cause is None else evaluation.cause.threshold,
            inputs=inputs | dict(evaluation.proposal.inputs),
        ),
    )


def add_region_headroom(advice: RegionAdvice, evaluation: RegionEvaluation, advisor: AdvisorConfig) -> RegionAdvice:
    """The same with what the region leaves to reclaimed pods, by the policy of headroom for its kind."""
    limits = evaluation.bounds
    policies = {
        RegionKind.SHARE: advisor.headroom.share_region,
        RegionKind.ISOLATION: advisor.headroom.isolation_region,
        RegionKind.DEDICATED: advisor.headroom.dedicated_region,
    }
    need = RegionNeed(
        name=evaluation.region.name,
        upper_cores=limits.upper,
        estimate_cores=evaluation.need,
        reserved_for_allocate_cores=limits.reserved_for_allocate,
        reserved_for_reclaim_cores=limits.reserved_for_reclaim,
        reclaimable=evaluation.region.reclaimable,
        score=FULL_SCORE,
    )
    cores, verdict = region_headroom(need, policies[evaluation.region.kind])
    return msgspec.structs.replace(advice, headroom_cores=cores, headroom_reason=verdict)


def _region_rule(evaluation: RegionEvaluation) -> str:
    if evaluation.cause is not None:
        return evaluation.cause.rule
    if not evaluation.region.reclaimable and evaluation.proposal.controls:
        return "provision_not_reclaimable"
    return f"provision_{evaluation.proposal.policy.replace('-', '_')}"


def _region_text(evaluation: RegionEvaluation, assembled: PoolAssembly) -> str:
    name = evaluation.region.name
    parts = [evaluation.proposal.text]
    regulated = evaluation.regulated
    if regulated is not None and evaluation.proposal.controls:
        parts.append(
            f"with a reserve of {evaluation.bounds.reserved_for_allocate:.4g} that makes {regulated.wanted} CPUs"
            + (f"; {regulated.limit}, so {regulated.cpus}" if regulated.limit else "")
        )
    if not evaluation.region.reclaimable and regulated is not None:
        parts.append(f"nothing of it is lent: it asked for {evaluation.want.request}")
    parts.append(
        f"it gets {assembled.granted[name]}"
        + (", since all pools together ask for more than there is" if name in assembled.throttled else "")
        + (f", of which {assembled.lent[name]} are lent" if assembled.lent[name] else "")
    )
    return "; ".join((*parts, *evaluation.skipped))


RECLAIM_POOL, RESERVE_POOL = "reclaim", "reserve"
PROVISION_POLICIES: Mapping[str, Callable[[RegionInputs, PolicySettings], PolicyAnswer]] = {
    "none": propose_none,
    "canonical": propose_canonical,
    "rama": propose_rama,
    "dynamic-quota": propose_dynamic_quota,
}


def provision_cpus(
    inputs: ProvisionInputs, memory: ProvisionState, advisor: AdvisorConfig, config: ProvisionConfig
) -> tuple[CpuAdvice, ProvisionState]:
    """Regions, their policies' proposals, regulated, assembled to sizes of pools; and the memory for the next round.

    Where pods that are to be kept apart do not fit, the round is done over without keeping any apart. Nothing is advised
    of a node whose CPUs are not known.
    """
    topology, reclaim = inputs.snapshot.topology, inputs.pools.get(RECLAIM_POOL)
    if not topology.cpus:
        return CpuAdvice(), memory
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    turn = ProvisionContext(
        situation=inputs,
        memory=memory,
        advisor=advisor,
        config=config,
        node=build_numa_capacity(topology, inputs.reserve, inputs.forbidden, advisor, config),
        indicators=ProvisionIndicators(inputs),
        numa_of=numa_of,
        smt=topology.smt,
        reclaim=None if reclaim is None else Counter(numa_of[cpu] for cpu in reclaim if cpu in numa_of),
    )
    isolation = isolate_pods(inputs, memory, config.isolation)
    apart = dict(isolation.pods)
    decided = _evaluate_regions(turn, apart)
    crowded = bool(apart) and not _fits_with_isolation(decided, turn)
    if crowded:
        apart = {}
        decided = _evaluate_regions(turn, apart)
    mode = SharingMode(enable_reclaim=advisor.enable_reclaim, overlap=config.overlap, quota=config.quota)
    assembled = assemble_pools([one.want for one in decided], turn.node, mode)
    reserve = sum(inputs.reserve.get(numa, 0) for numa in turn.node.cpus)
    sizes = (PoolSize(pool=RESERVE_POOL, cpus=reserve), *assembled.sizes) if reserve else assembled.sizes
    note = "; pods with too many tasks are not kept apart, since there is no room" if crowded else ""
    advice = CpuAdvice(
        regions=tuple(add_region_headroom(explain_region(one, assembled, note), one, advisor) for one in decided),
        sizes=sizes,
        isolated=tuple(sorted(apart)),
    )
    return advice, ProvisionState(
        quotas={size.numa: size.quota_cores for size in sizes if size.pool == RECLAIM_POOL and size.quota_cores},
        regions={
            one.region.name: _update_region_state(one, assembled.granted[one.region.name], inputs) for one in decided
        },
        loads=isolation.loads,
        isolated=advice.isolated,
    )


def _evaluate_regions(context: ProvisionContext, apart: Mapping[str, Reason]) -> list[RegionEvaluation]:
    situation, config = context.situation, context.config

    def reclaimable(pod: Pod, pool: str) -> bool:
        off = pool in config.disable_reclaim_share_pools if pool else pod.key in situation.not_reclaimable
        return context.advisor.enable_reclaim and not off

    def assigned_nodes(pod: Pod) -> tuple[int, ...]:
        return tuple(sorted(numa for numa in assigned_cpus_by_numa(pod, context) if numa in context.node.cpus))

    found = build_regions(situation.snapshot.pods, tuple(context.node.cpus), apart, assigned_nodes, reclaimable)
    limits = compute_bounds(found, context.node, context.advisor, config)
    return [_evaluate_region(member, limits[member.region.name], context, apart) for member in found]


def _evaluate_region(
    member: RegionMembers, limits: RegionBounds, context: ProvisionContext, apart: Mapping[str, Reason]
) -> RegionEvaluation:
    region = member.region
    request = requested_cores(member)
    if region.kind is RegionKind.ISOLATION:
        upper, lower = ceil(limits.upper), ceil(limits.lower)
        proposal = RegionProposal(
            policy="canonical",
            controls={ControlKnob.ISOLATED_UPPER: upper, ControlKnob.ISOLATED_LOWER: lower},
            text=apart[member.pods[0].key].text,
        )
        want = RegionRequest(region=region, upper=upper, lower=lower, request=max(ceil(request), 1))
        need, cause = region_need_cores(member, context), apart[member.pods[0].key]
        return RegionEvaluation(region=region, bounds=limits, proposal=proposal, want=want, need=need, cause=cause)
    before = previous_requirement(region, request, context)
    need = region_need_cores(member, context)
    case = build_region_inputs(member, limits, need, before, context)
    proposal, skipped = _propose_controls(case, context)
    if case.target_reason is not None:
        proposal = msgspec.structs.replace(proposal, inputs={**proposal.inputs, **case.target_reason.inputs})
        skipped = (*skipped, case.target_reason.text.rstrip("."))
    if not proposal.controls:
        region = msgspec.structs.replace(region, reclaimable=False)
    if region.kind is RegionKind.SHARE and not region.reclaimable and _lacks_requests(member):
        request = max(request, need)  # pods that ask for nothing would have nothing
    regulated = regulate_requirement(
        proposal.controls.get(ControlKnob.REQUIREMENT, need),
        limits,
        before,
        context.advisor,
        may_shrink=is_shrink_allowed(case.memory.last_ramp_down_ns, context.situation.now_ns, context.advisor),
        even=context.smt and region.kind is RegionKind.SHARE and not context.config.overlap,
    )
    if before is not None and region.pool in context.situation.found:
        regulated = hold_requirement(before, limits)
    quota = proposal.controls.get(ControlKnob.RECLAIM_QUOTA)
    governed = quota is not None and context.config.quota and context.config.overlap
    want = RegionRequest(
        region=region,
        # Where a quota limits reclaimed pods, they may run on all of its CPUs.
        requirement=1 if governed else max(regulated.cpus, 1),
        request=max(ceil(request), 1),
        quota=quota,
    )
    return RegionEvaluation(
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


def _lacks_requests(member: RegionMembers) -> bool:
    return any(container.cpu_request_cores is None for pod in member.pods for container in pod.containers)


def _propose_controls(inputs: RegionInputs, context: ProvisionContext) -> tuple[RegionProposal, tuple[str, ...]]:
    """Of the first policy that can be followed; why those before it could not."""
    names, skipped = region_policy_names(inputs.region, context.config), []
    settings = PolicySettings(advisor=context.advisor, gains=context.config.gains)
    for name in (*names, "canonical"):
        answer = PROVISION_POLICIES[name](inputs, settings)
        if isinstance(answer, str):
            skipped.append(f"{name} is not followed: {answer}")
            continue
        reference = next((other for policy, other in context.config.restrict.items() if policy == name), "")
        if reference in names:
            answer = _apply_restriction(answer, PROVISION_POLICIES[reference](inputs, settings))
        return answer, tuple(skipped)
    raise AssertionError("canonical needs nothing and always answers")


def _apply_restriction(proposal: RegionProposal, reference: PolicyAnswer) -> RegionProposal:
    mine = proposal.controls.get(ControlKnob.RECLAIM_QUOTA)
    other = None if isinstance(reference, str) else reference.controls.get(ControlKnob.RECLAIM_QUOTA)
    if isinstance(reference, str) or mine is None or other is None or mine <= other:
        return proposal
    return msgspec.structs.replace(
        proposal,
        controls={**proposal.controls, ControlKnob.RECLAIM_QUOTA: other},
        text=f"{proposal.text}; {reference.policy} allows {other:.2f} cores",
    )


def _fits_with_isolation(evaluations: Sequence[RegionEvaluation], context: ProvisionContext) -> bool:
    needed: Counter[int] = Counter()
    taken: set[int] = set()
    for one in evaluations:
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
        needed[region.numa_nodes[0] if region.bound else NOT_NUMA_BOUND] += cpus
    free: Collection[int] = [numa for numa in context.node.cpus if numa not in taken]
    return fits_numa_nodes(needed, context.node.cpus, free)


def _update_region_state(evaluation: RegionEvaluation, granted: int, inputs: ProvisionInputs) -> RegionState:
    if evaluation.regulated is None:
        return RegionState()
    # Where nothing is lent the pool is larger than it would have to be: what it has is where shrinking starts from.
    requirement = evaluation.regulated.cpus if evaluation.region.reclaimable else granted
    shrunk = evaluation.before is not None and requirement < evaluation.before
    return RegionState(
        policy=evaluation.proposal.policy,
        requirement=requirement,
        quota_cores=evaluation.want.quota,
        # When an agent before this one did nobody knows: not longer ago than the start of this one.
        last_ramp_down_ns=inputs.now_ns
        if shrunk or evaluation.region.pool in inputs.found
        else evaluation.memory.last_ramp_down_ns,
        controllers=evaluation.proposal.controllers,
    )
