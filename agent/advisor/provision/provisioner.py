"""Provisions CPU for one cycle: regions, the proposal of each region's policy, pool sizes, reasons.
If isolated pods do not fit, the provision is computed again without isolation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil

import msgspec
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState, ProvisionInputs, ProvisionState, RegionState
from agent.advisor.cpu_estimate import estimate_pod_cores, numa_share
from agent.advisor.headroom.headroom_policies import RegionNeed, region_headroom
from agent.advisor.pod_usage import reclaimed_cpu_by_numa
from agent.advisor.provision.load_isolation import fits_numa_nodes, isolate_pods
from agent.advisor.provision.pool_sizes import (
    RECLAIM_POOL,
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
from agent.config.advisor import AdvisorConfig, InferenceConfig, ProvisionConfig, ProvisionPolicyName
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
from api.knobs import Reason, ReasonInputs
from api.pod import Pod
from api.qos import QoSLevel
from api.quantity import format_count
from api.rates import Rates
from api.snapshot import Snapshot


def build_provision_inputs(
    snapshot: Snapshot, change: Rates | None, state: AdvisorState, inference: InferenceConfig, now_ns: int
) -> ProvisionInputs:
    """Return the inputs of this cycle; `now_ns` is CLOCK_MONOTONIC."""
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    measured = request_p99_ms(snapshot.indicators, state.requests, now_ns)
    return ProvisionInputs(
        now_ns=now_ns,
        snapshot=snapshot,
        previous=state.previous,
        change=change,
        needs=state.containers,
        reserve=_count_by_numa(state.pools.get("reserve", ()), numa_of),
        forbidden=_count_by_numa(state.pools.get("interrupt", ()), numa_of),
        assigned=state.cpus,
        pools=state.pools,
        restored_pools=frozenset(state.pools if state.previous is None else ()),
        reclaim_use_cores=_reclaimed_use_by_numa(snapshot, change, state, numa_of),
        reclaim_quota_cores=state.provision.quotas,
        indicators=measured,
        targets={pod.key: pod.profile.targets for pod in snapshot.pods if pod.profile.targets},
        predictions=predict_from_requests(snapshot.pods, measured, now_ns) if inference.strategy != "none" else None,
        inference=inference,
        runnable={
            path: float(sample.threads_by_state.runnable)
            for path in state.containers
            if (sample := snapshot.cgroups.get(path)) is not None and sample.threads_by_state is not None
        },
        pods_without_own_pool=state.refused,
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.reclaimable),
    )


def _reclaimed_use_by_numa(
    snapshot: Snapshot, change: Rates | None, state: AdvisorState, numa_of: Mapping[int, int]
) -> dict[int, float]:
    """CPU use of reclaimed pods where it is measured; the use of unbound pods is spread as their CPUs are."""
    if not state.pools.get("reclaim"):
        return {}
    used = reclaimed_cpu_by_numa(snapshot, change, snapshot.topology.numa_nodes)
    unbound = [pod for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED and len(pod.bound_numa) != 1]
    cpus = {cpu for pod in unbound for container in pod.containers for cpu in state.cpus.get(container.cgroup, ())}
    spread, unbound_cores = _count_by_numa(tuple(cpus or state.pools["reclaim"]), numa_of), used.pop(NOT_NUMA_BOUND)
    total, result = sum(spread.values()), {}
    for numa, own in used.items():
        part = spread.get(numa, 0) / total if total else 0.0
        more = unbound_cores * part if unbound_cores is not None else None if part else 0.0
        if own is not None and more is not None:
            result[numa] = own + more
    return result


def _count_by_numa(cpus: Sequence[int], numa_of: Mapping[int, int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for cpu in cpus:
        if cpu in numa_of:
            counts[numa_of[cpu]] = counts.get(numa_of[cpu], 0) + 1
    return counts


def propose_none(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:  # noqa: ARG001 - one signature
    """Propose nothing: the region keeps the requests of its pods and is not reclaimable."""
    return RegionProposal(policy="none", controls={}, text="no policy applies, so it keeps the requests of its pods")


def propose_canonical(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:  # noqa: ARG001
    """Propose the estimated need of its containers as the requirement."""
    count = len(inputs.region.containers)
    return RegionProposal(
        policy="canonical",
        controls={ControlKnob.REQUIREMENT: inputs.need},
        text=f"{format_count(count, 'container')} {'is' if count == 1 else 'are'} estimated to need "
        f"{inputs.need:.2f} cores",
    )


NS_PER_MINUTE, MINUTES_PER_DAY = 60_000_000_000, 24 * 60


class ProvisionContext(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs that all regions of a cycle share."""

    inputs: ProvisionInputs
    state: ProvisionState
    advisor: AdvisorConfig
    config: ProvisionConfig
    node: NumaCapacity
    indicators: ProvisionIndicators
    numa_of: Mapping[int, int]
    smt: bool
    reclaim: Mapping[int, int] | None
    """CPUs of the current reclaim pool, by NUMA node."""


def build_region_inputs(
    member: RegionMembers, limits: RegionBounds, need: float, before: int | None, context: ProvisionContext
) -> RegionInputs:
    """Return the inputs of a region's policy."""
    region, inputs = member.region, context.inputs
    quota = inputs.reclaim_quota_cores.get(region.numa_nodes[0], 0.0) if region.bound and context.config.quota else 0.0
    requirement = float(ceil(need) if before is None else before)
    use = [inputs.reclaim_use_cores.get(numa) for numa in region.numa_nodes]
    reclaim = context.node.cpus if context.reclaim is None else context.reclaim
    policies = set(region_policy_names(region, context.config)) - {"none", "canonical"}
    signals = context.indicators.signals(member, context.config.targets) if policies else ()
    state = context.state.regions.get(region.name, RegionState())
    unknown = set(state.controllers) - {signal.name for signal in signals} if policies else set()
    if unknown:
        unknown &= context.indicators.unknown(member, context.config.targets)
    moved, retargeted = signals, None
    if signals and inputs.inference.strategy != "none":
        minute = inputs.snapshot.wall_time_ns // NS_PER_MINUTE % MINUTES_PER_DAY
        moved, retargeted = adjust_targets(
            signals, region.pods, inputs.predictions, inputs.inference, inputs.now_ns, minute
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
        state=state,
        reclaim_cpus=sum(reclaim.get(numa, 0) for numa in region.numa_nodes),
        reclaim_use_cores=None if None in use else sum(cores for cores in use if cores is not None),
    )


def region_policy_names(region: Region, config: ProvisionConfig) -> tuple[ProvisionPolicyName, ...]:
    """Return the names of the configured policies, the preferred one first."""
    return config.share_policies if region.kind is RegionKind.SHARE else config.dedicated_policies


def region_need_cores(member: RegionMembers, context: ProvisionContext) -> float:
    """Return the canonical estimate of a region; of a dedicated pod that is not reclaimable, its NUMA nodes."""
    inputs, advisor = context.inputs, context.advisor
    total = 0.0
    for pod in member.pods:
        reclaimable = advisor.enable_reclaim and pod.key not in inputs.not_reclaimable
        bound = pod_bound_nodes(pod, context.node.cpus)
        if member.region.kind is RegionKind.DEDICATED and member.region.bound:
            cores = (
                estimate_pod_cores(pod, inputs.snapshot, inputs.needs, advisor, reclaimable=True)
                if reclaimable
                else float(sum(context.node.cpus[numa] for numa in bound))
            )
            total += cores * numa_share(member.region.numa_nodes[0], bound, assigned_cpus_by_numa(pod, context))
        else:
            total += estimate_pod_cores(pod, inputs.snapshot, inputs.needs, advisor, reclaimable=reclaimable)
    return total


def assigned_cpus_by_numa(pod: Pod, context: ProvisionContext) -> Counter[int]:
    """Return the number of a pod's CPUs by NUMA node."""
    cpus = {cpu for container in pod.containers for cpu in context.inputs.assigned.get(container.cgroup, ())}
    return Counter(context.numa_of[cpu] for cpu in cpus if cpu in context.numa_of)


def previous_requirement(region: Region, request: float, context: ProvisionContext) -> int | None:
    """Return the previous requirement of the region; None if there is none."""
    region_state = context.state.regions.get(region.name)
    if region_state is not None and region_state.requirement is not None:
        return region_state.requirement
    pools = context.inputs.pools
    if region.exclusive:
        reclaimed = context.reclaim or {}
        return max(sum(context.node.available[numa] - reclaimed.get(numa, 0) for numa in region.numa_nodes), 0)
    if region.kind is RegionKind.DEDICATED or context.config.overlap:
        return ceil(request)
    return len(pools[region.pool]) if region.pool in pools else None


class RegionEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of one region before pools are sized."""

    region: Region
    bounds: RegionBounds
    proposal: RegionProposal
    request: RegionRequest
    need: float = 0.0
    before: int | None = None
    state: RegionState = RegionState()
    regulated: RegulatedRequirement | None = None
    """None for an isolated pod: its size is not regulated."""
    signals: tuple[IndicatorState, ...] = ()
    skipped: tuple[str, ...] = ()
    cause: Reason | None = None
    """Reason of its isolation."""


def explain_region(evaluation: RegionEvaluation, assembled: PoolAssembly, note: str) -> RegionAdvice:
    """Return the advice for one region with its reason; `note` applies to all regions."""
    region, limits = evaluation.region, evaluation.bounds
    controls = dict(evaluation.proposal.controls)
    if evaluation.regulated is not None and controls:
        controls[ControlKnob.REQUIREMENT] = float(evaluation.regulated.cpus)
    inputs: ReasonInputs = {
        "cpus": assembled.granted[region.name],
        "lent_cpus": assembled.reclaimable_cpus[region.name],
        "request_cpus": evaluation.request.requested,
        "upper_cores": round(limits.upper, 3),
        "lower_cores": round(limits.lower, 3),
        "reserved_for_allocate_cores": round(limits.reserved_for_allocate, 3),
        "reserved_for_reclaim_cores": round(limits.reserved_for_reclaim, 3),
    }
    if evaluation.regulated is not None:
        inputs |= {
            "estimate_cores": round(evaluation.need, 3),
            "before_cpus": evaluation.before,
            "wanted_cpus": evaluation.regulated.unlimited,
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
    """Return the advice with the region's headroom by the headroom policy of its kind."""
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
    )
    cores, reason = region_headroom(need, policies[evaluation.region.kind])
    return replace(advice, headroom_cores=cores, headroom_reason=reason)


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
            f"with a reserve of {evaluation.bounds.reserved_for_allocate:.4g} that makes {regulated.unlimited} CPUs"
            + (f"; {regulated.limit}, so {regulated.cpus}" if regulated.limit else "")
        )
    if not evaluation.region.reclaimable and regulated is not None:
        parts.append(f"it is not reclaimable: its pods request {evaluation.request.requested}")
    parts.append(
        f"it gets {assembled.granted[name]}"
        + (", because all pools together request more CPUs than there are" if name in assembled.throttled else "")
        + (f", {assembled.reclaimable_cpus[name]} of them reclaimable" if assembled.reclaimable_cpus[name] else "")
    )
    return "; ".join((*parts, *evaluation.skipped))


RESERVE_POOL = "reserve"
PROVISION_POLICIES: Mapping[str, Callable[[RegionInputs, PolicySettings], PolicyAnswer]] = {
    "none": propose_none,
    "canonical": propose_canonical,
    "rama": propose_rama,
    "dynamic-quota": propose_dynamic_quota,
}


def provision_cpus(
    inputs: ProvisionInputs, state: ProvisionState, advisor: AdvisorConfig, config: ProvisionConfig
) -> tuple[CpuAdvice, ProvisionState]:
    """Build regions, evaluate their policies, regulate and assemble pool sizes; return the advice and the next state.

    If isolated pods do not fit, no pod is isolated. A node without a CPU topology gets empty advice.
    """
    topology, reclaim = inputs.snapshot.topology, inputs.pools.get(RECLAIM_POOL)
    if not topology.cpus:
        return CpuAdvice(), state
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    context = ProvisionContext(
        inputs=inputs,
        state=state,
        advisor=advisor,
        config=config,
        node=build_numa_capacity(topology, inputs.reserve, inputs.forbidden, advisor, config),
        indicators=ProvisionIndicators(inputs),
        numa_of=numa_of,
        smt=topology.smt,
        reclaim=None if reclaim is None else Counter(numa_of[cpu] for cpu in reclaim if cpu in numa_of),
    )
    isolation = isolate_pods(inputs, state, config.isolation)
    isolated = dict(isolation.pods)
    evaluations = _evaluate_regions(context, isolated)
    no_room = bool(isolated) and not _fits_with_isolation(evaluations, context)
    if no_room:
        isolated = {}
        evaluations = _evaluate_regions(context, isolated)
    mode = SharingMode(enable_reclaim=advisor.enable_reclaim, overlap=config.overlap, quota=config.quota)
    assembled = assemble_pools([evaluation.request for evaluation in evaluations], context.node, mode)
    reserve = sum(inputs.reserve.get(numa, 0) for numa in context.node.cpus)
    sizes = (PoolSize(pool=RESERVE_POOL, cpus=reserve), *assembled.sizes) if reserve else assembled.sizes
    note = "; overloaded pods are not isolated because there is no room" if no_room else ""
    advice = CpuAdvice(
        regions=tuple(
            add_region_headroom(explain_region(evaluation, assembled, note), evaluation, advisor)
            for evaluation in evaluations
        ),
        sizes=sizes,
        isolated=tuple(sorted(isolated)),
    )
    return advice, ProvisionState(
        quotas={size.numa: size.quota_cores for size in sizes if size.pool == RECLAIM_POOL and size.quota_cores},
        regions={
            evaluation.region.name: _update_region_state(evaluation, assembled.granted[evaluation.region.name], inputs)
            for evaluation in evaluations
        },
        loads=isolation.loads,
        isolated=advice.isolated,
    )


def _evaluate_regions(context: ProvisionContext, isolated: Mapping[str, Reason]) -> list[RegionEvaluation]:
    inputs, config = context.inputs, context.config

    def reclaimable(pod: Pod, pool: str) -> bool:
        disabled = pool in config.disable_reclaim_share_pools if pool else pod.key in inputs.not_reclaimable
        return context.advisor.enable_reclaim and not disabled

    def assigned_nodes(pod: Pod) -> tuple[int, ...]:
        return tuple(sorted(numa for numa in assigned_cpus_by_numa(pod, context) if numa in context.node.cpus))

    regions = build_regions(inputs.snapshot.pods, tuple(context.node.cpus), isolated, assigned_nodes, reclaimable)
    limits = compute_bounds(regions, context.node, context.advisor, config)
    return [_evaluate_region(member, limits[member.region.name], context, isolated) for member in regions]


def _evaluate_region(
    member: RegionMembers, limits: RegionBounds, context: ProvisionContext, isolated: Mapping[str, Reason]
) -> RegionEvaluation:
    region = member.region
    request = requested_cores(member)
    if region.kind is RegionKind.ISOLATION:
        upper, lower = ceil(limits.upper), ceil(limits.lower)
        proposal = RegionProposal(
            policy="canonical",
            controls={ControlKnob.ISOLATED_UPPER: upper, ControlKnob.ISOLATED_LOWER: lower},
            text=isolated[member.pods[0].key].text,
        )
        region_request = RegionRequest(region=region, upper=upper, lower=lower, requested=max(ceil(request), 1))
        need, cause = region_need_cores(member, context), isolated[member.pods[0].key]
        return RegionEvaluation(
            region=region, bounds=limits, proposal=proposal, request=region_request, need=need, cause=cause
        )
    before = previous_requirement(region, request, context)
    need = region_need_cores(member, context)
    inputs = build_region_inputs(member, limits, need, before, context)
    proposal, skipped = _propose_controls(inputs, context)
    if inputs.target_reason is not None:
        proposal = replace(proposal, inputs={**proposal.inputs, **inputs.target_reason.inputs})
        skipped = (*skipped, inputs.target_reason.text.rstrip("."))
    if not proposal.controls:
        region = replace(region, reclaimable=False)
    if region.kind is RegionKind.SHARE and not region.reclaimable and _lacks_requests(member):
        request = max(request, need)  # pods without requests would have no CPU
    regulated = regulate_requirement(
        proposal.controls.get(ControlKnob.REQUIREMENT, need),
        limits,
        before,
        context.advisor,
        may_shrink=is_shrink_allowed(inputs.state.last_ramp_down_ns, context.inputs.now_ns, context.advisor),
        even=context.smt and region.kind is RegionKind.SHARE and not context.config.overlap,
    )
    if before is not None and region.pool in context.inputs.restored_pools:
        regulated = hold_requirement(before, limits)
    quota = proposal.controls.get(ControlKnob.RECLAIM_QUOTA)
    has_quota = quota is not None and context.config.quota and context.config.overlap
    region_request = RegionRequest(
        region=region,
        # Reclaimed pods that a quota limits may run on all of its CPUs.
        requirement=1 if has_quota else max(regulated.cpus, 1),
        requested=max(ceil(request), 1),
        quota=quota,
    )
    return RegionEvaluation(
        region=region,
        bounds=limits,
        proposal=proposal,
        request=region_request,
        need=need,
        before=before,
        state=inputs.state,
        regulated=regulated,
        signals=inputs.signals,
        skipped=skipped,
    )


def _lacks_requests(member: RegionMembers) -> bool:
    return any(container.cpu_request_cores is None for pod in member.pods for container in pod.containers)


def _propose_controls(inputs: RegionInputs, context: ProvisionContext) -> tuple[RegionProposal, tuple[str, ...]]:
    """Return the proposal of the first policy that applies, and why those before it do not."""
    names, skipped = region_policy_names(inputs.region, context.config), list[str]()
    candidates: tuple[ProvisionPolicyName, ...] = (*names, "canonical")
    settings = PolicySettings(advisor=context.advisor, gains=context.config.gains)
    for name in candidates:
        answer = PROVISION_POLICIES[name](inputs, settings)
        if isinstance(answer, str):
            skipped.append(f"{name} does not apply: {answer}")
            continue
        reference = context.config.restrict.get(name)
        if reference is not None and reference in names:
            answer = _apply_restriction(answer, PROVISION_POLICIES[reference](inputs, settings))
        return answer, tuple(skipped)
    raise AssertionError("canonical needs nothing and always answers")


def _apply_restriction(proposal: RegionProposal, reference: PolicyAnswer) -> RegionProposal:
    own = proposal.controls.get(ControlKnob.RECLAIM_QUOTA)
    other = None if isinstance(reference, str) else reference.controls.get(ControlKnob.RECLAIM_QUOTA)
    if isinstance(reference, str) or own is None or other is None or own <= other:
        return proposal
    return replace(
        proposal,
        controls={**proposal.controls, ControlKnob.RECLAIM_QUOTA: other},
        text=f"{proposal.text}; {reference.policy} allows {other:.2f} cores",
    )


def _fits_with_isolation(evaluations: Sequence[RegionEvaluation], context: ProvisionContext) -> bool:
    needed: Counter[int] = Counter()
    bound_nodes: set[int] = set()
    for evaluation in evaluations:
        region = evaluation.region
        if region.bound:
            bound_nodes.update(region.numa_nodes)
        if region.exclusive:
            continue
        if region.kind is RegionKind.ISOLATION:
            cpus = evaluation.request.upper
        elif region.kind is RegionKind.DEDICATED:
            cpus = evaluation.request.requested
        else:
            cpus = max(evaluation.request.requirement, evaluation.before or 0)
        needed[region.numa_nodes[0] if region.bound else NOT_NUMA_BOUND] += cpus
    free: Collection[int] = [numa for numa in context.node.cpus if numa not in bound_nodes]
    return fits_numa_nodes(needed, context.node.cpus, free)


def _update_region_state(evaluation: RegionEvaluation, granted: int, inputs: ProvisionInputs) -> RegionState:
    if evaluation.regulated is None:
        return RegionState()
    # A pool that is not reclaimable is larger than required: shrinking starts from its actual size.
    requirement = evaluation.regulated.cpus if evaluation.region.reclaimable else granted
    shrunk = evaluation.before is not None and requirement < evaluation.before
    return RegionState(
        policy=evaluation.proposal.policy,
        requirement=requirement,
        quota_cores=evaluation.request.quota,
        # The last shrink of a previous agent is unknown: assume the start of this one.
        last_ramp_down_ns=inputs.now_ns
        if shrunk or evaluation.region.pool in inputs.restored_pools
        else evaluation.state.last_ramp_down_ns,
        controllers=evaluation.proposal.controllers,
    )
