"""Evaluates one policy for one cycle: CPU and memory advice, cpusets, knob requests, headroom, next state.
The agent's loop, a shadow policy, a replay and the NRI preview all call `evaluate_policy`. Pure. Advice of an
external advisor replaces the computed advice, while the state of the computed advice is still updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from agent.advisor import latency
from agent.advisor.advisor_state import AdvisorState, QuotaTrialState
from agent.advisor.cpu_estimate import estimate_online_cores, exponential_average, update_demand
from agent.advisor.forecast.node_forecast import ForecastState, update_forecasts
from agent.advisor.headroom.forecast_headroom import FORECAST_POLICY, apply_memory_forecast
from agent.advisor.headroom.headroom_policies import (
    CpuAllowance,
    compute_headroom,
    headroom_policy,
    merge_memory_headroom,
)
from agent.advisor.headroom.headroom_reporter import (
    ReporterState,
    limit_to_requests,
    node_capacity,
    report_headroom,
)
from agent.advisor.headroom.reclaim_exclusion import max_reclaimable_cores, reclaimable_nodes
from agent.advisor.interference import measure_interference, update_weights
from agent.advisor.latency import (
    NO_JOURNAL,
    NO_JOURNAL_TEXT,
    PODS_UNKNOWN,
    LatencyInputs,
    LatencyResult,
    find_breaches,
    find_starved,
)
from agent.advisor.memory.memory_advisor import advise_memory, build_memory_inputs, writable_cgroups
from agent.advisor.memory.memory_inputs import MemoryAdvisorState, MemoryInputs
from agent.advisor.pod_usage import reclaimed_cgroups, reclaimed_use_cores
from agent.advisor.policy_result import PolicyResult
from agent.advisor.provision.pool_sizes import RECLAIM_POOL, apportion_cores, pool_reclaimable_cores
from agent.advisor.provision.provisioner import build_provision_inputs, provision_cpus
from agent.advisor.provision.region_indicators import update_request_windows
from agent.advisor.provision.regions import cpus_per_numa_node
from agent.advisor.quota_trial import QuotaTrialInputs, current_verdict, online_workloads, run_quota_trial
from agent.advisor.system_use import update_system_use
from agent.config.advisor import AdvisorConfig, InferenceConfig
from agent.config.config import AgentConfig
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.allowed_cpus import (
    AllowedCpus,
    allowed_cpus_of,
    restrict_to_allowed,
    unshareable_cpus,
    with_allowed_cpus_note,
    without_kubelet_exclusive,
)
from agent.qrm.cpuset.state import (
    FALLBACK,
    CpusetAllocation,
    CpusetState,
    pods_as_allocated,
    with_numa_bindings,
    with_pending_containers,
)
from agent.qrm.decisions.cpu_priority import idle_class_obstacles, reclaimed_qos_classes
from agent.qrm.decisions.knob_requests import KnobRequests, KnobRequestState, build_knob_requests
from api.advice import NOT_NUMA_BOUND, CpuAdvice, Headroom, MemoryAdvice, NodeAdvice, PoolSize, QuotaVerdict
from api.cpu import Topology
from api.decision import Advice
from api.knobs import Reason
from api.rates import Rates, online_runq_latency, rates_since, with_busy_limit
from api.snapshot import Snapshot
from api.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from agent.advisor.node_advice import NodeAdviceState

RECLAIMED_USE_WINDOW_S = 1.0
_NON_ONLINE_POOLS = ("reclaim", "reserve", "interrupt")
INFERENCE_OFF = InferenceConfig()
NO_ONLINE_PODS = Reason(rule="nothing_online", text="No online pod runs on this node: all of its CPU is reclaimable.")


def advise_cpu(
    snapshot: Snapshot,
    config: AdvisorConfig,
    state: AdvisorState,
    now_ns: int,
    inference: InferenceConfig = INFERENCE_OFF,
    rates: Rates | None = None,
) -> tuple[Advice | None, AdvisorState]:
    """Estimate the CPU need of online pods and the reclaimable rest; return the advice and the state for the next cycle.

    The advice is None with policy `none`. `now_ns` is CLOCK_MONOTONIC; a clock that went backwards stops growth. `rates` are
    those since `state.previous`; without them they are computed.
    """
    change = rates_since(state.previous, snapshot, rates)
    state = replace(
        state,
        containers=update_demand(snapshot, change, state, config),
        system_use=update_system_use(state.previous, snapshot, change, state.system_use),
        evaluated_latency={},
    )
    need = estimate_online_cores(snapshot, state, config)
    if config.policy == "none":
        advice = None
    elif config.policy == "canonical":
        cpu, state = _size_pools(snapshot, change, config, inference, state, now_ns)
        advice, state = _advise_by_canonical(snapshot, change, need, config, state, cpu)
    else:
        overlapping = replace(config, provision=replace(config.provision, overlap=True))
        cpu, state = _size_pools(snapshot, change, overlapping, inference, state, now_ns)
        advice, state = _advise_by_latency(snapshot, change, need, config, state, now_ns)
        sizes = _overlap_pools(cpu.sizes, snapshot.topology, advice.reclaimable_cores)
        regions = tuple(replace(region, reason=_mark_as_hypothetical(region.reason)) for region in cpu.regions)
        advice = replace(advice, cpu=replace(cpu, sizes=sizes, regions=regions))
    requests = update_request_windows(snapshot.indicators, state.requests, now_ns)
    return advice, replace(state, previous=snapshot, requests=requests)


def _advise_by_latency(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, state: AdvisorState, now_ns: int
) -> tuple[Advice, AdvisorState]:
    """Online and reclaimed pods share CPUs by priority; the measured run-queue latency sets the CPU quota of reclaimed pods."""
    state = replace(state, baseline_latency_ns=_drop_replaced_cgroups(state, snapshot))
    inputs = _build_latency_inputs(snapshot, change, need, config, state, now_ns)
    result = latency.evaluate_latency(inputs, state, config.latency)
    if config.latency.quota_trials:
        trial_inputs = _build_trial_inputs(inputs, snapshot, change, config, state)
        result, trial = run_quota_trial(trial_inputs, result, state.quota_trial, config.latency)
        state = replace(state, quota_trial=trial)
    weights = _update_weights(result, inputs, snapshot, config, state)
    headroom = compute_headroom(
        snapshot, change, config, state, CpuAllowance(need_cores=need, reclaimable_cores=result.reclaimable_cores)
    )
    advice = Advice(
        policy="latency",
        requirement_cores=need,
        headroom=headroom,
        reclaimable_cores=result.reclaimable_cores,
        idle=True,
        claims=weights,
        action=result.action,
        reason=result.reason,
        quota_verdict=current_verdict(state.quota_trial, state.quota_trial.key, snapshot.wall_time_ns),
    )
    return advice, replace(
        state,
        reclaimable_cores=result.level_cores,
        weights=weights,
        reclaimed_use_cores=inputs.reclaimed_use_cores,
        harmful_cores=result.harmful_cores,
        evaluated_latency=inputs.waits,
        baseline_latency_ns=result.baseline_latency_ns,
        minimum_since_ns=result.minimum_since_ns,
        last_breach_ns=result.last_breach_ns,
        last_wait_ns=result.last_wait_ns,
    )


def _build_latency_inputs(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, state: AdvisorState, now_ns: int
) -> LatencyInputs:
    elapsed_ns = change.node.interval_ns if change else 0
    used = reclaimed_use_cores(snapshot, change)
    if used is not None:
        used = exponential_average(state.reclaimed_use_cores, used, elapsed_ns / NS_PER_S, RECLAIMED_USE_WINDOW_S)
    waits = online_runq_latency(snapshot, change, state.previous)
    half_ns = config.latency.target_wait_ms * NS_PER_MS / 2
    suspects = find_breaches(waits, dict.fromkeys(waits, half_ns), config.latency)
    return LatencyInputs(
        now_ns=now_ns,
        elapsed_ns=elapsed_ns,
        node_cpus=len(snapshot.topology.ids),
        waits=waits,
        reclaimed_use_cores=used,
        requirement_cores=need,
        enable_reclaim=config.enable_reclaim,
        blames=measure_interference(suspects, reclaimed_cgroups(snapshot), snapshot, state.previous),
        starved=find_starved(waits, snapshot, change, state.previous),
        max_cores=max_reclaimable_cores(snapshot, reclaimable_nodes(snapshot, state, config), state, config),
        pods_fresh=snapshot.pods_fresh,
        can_journal=snapshot.can_journal,
    )


def _build_trial_inputs(
    inputs: LatencyInputs, snapshot: Snapshot, change: Rates | None, config: AdvisorConfig, state: AdvisorState
) -> QuotaTrialInputs:
    key, workloads = online_workloads(snapshot.pods)
    return QuotaTrialInputs(
        now_ns=inputs.now_ns,
        wall_time_ns=snapshot.wall_time_ns,
        elapsed_ns=inputs.elapsed_ns,
        node_cpus=inputs.node_cpus,
        maximum_cores=latency.max_quota_cores(inputs, config.latency),
        in_force_cores=state.reclaimable_cores,
        used_cores=reclaimed_use_cores(snapshot, change),
        waits=inputs.waits,
        key=key,
        workloads=workloads,
    )


def _update_weights(
    result: LatencyResult, inputs: LatencyInputs, snapshot: Snapshot, config: AdvisorConfig, state: AdvisorState
) -> dict[str, float]:
    """Weights of reclaimed containers after this cycle: aggressors lose weight on a shrink, all recover on growth."""
    before = float(inputs.node_cpus) if state.reclaimable_cores is None else state.reclaimable_cores
    growth = config.latency.grow_ratio_per_s * inputs.elapsed_ns / NS_PER_S
    return update_weights(
        state.weights,
        reclaimed_cgroups(snapshot),
        inputs.blames,
        shrink_ratio=1 - result.level_cores / before if result.action == "shrink" else 0.0,
        recovered_ratio=growth if result.action == "grow" else 0.0,
    )


def _drop_replaced_cgroups(state: AdvisorState, snapshot: Snapshot) -> dict[str, float]:
    """Baseline latencies without those of cgroups that were replaced by another one of the same path."""
    before = state.previous.cgroups if state.previous is not None else {}
    return {
        path: ns
        for path, ns in state.baseline_latency_ns.items()
        if path not in snapshot.cgroups or path not in before or snapshot.cgroups[path].id == before[path].id
    }


def _size_pools(
    snapshot: Snapshot,
    change: Rates | None,
    config: AdvisorConfig,
    inference: InferenceConfig,
    state: AdvisorState,
    now_ns: int,
) -> tuple[CpuAdvice, AdvisorState]:
    inputs = build_provision_inputs(snapshot, change, state, inference, now_ns)
    cpu, provision_state = provision_cpus(inputs, state.provision, config, config.provision)
    sizes = _add_share_pool(cpu.sizes, snapshot, config)
    return replace(cpu, sizes=sizes), replace(state, provision=provision_state)


def _add_share_pool(sizes: Sequence[PoolSize], snapshot: Snapshot, config: AdvisorConfig) -> tuple[PoolSize, ...]:
    """The sizes with a share pool of Katalyst's minimum size, if there is none: online pods may start at any time."""
    if any(size.pool == "share" for size in sizes):
        return tuple(sizes)
    cpus, nodes = len(snapshot.topology.cpus), len(snapshot.topology.numa_nodes)
    result: list[PoolSize] = []
    for size in sizes:
        limit = size.cpus if config.provision.overlap else size.cpus - config.reclaim_reserve_cores(cpus, nodes)
        if size.pool != "reclaim" or size.numa != NOT_NUMA_BOUND or limit < 1:
            result.append(size)
        elif config.provision.overlap:
            result += (PoolSize(pool="share", cpus=size.cpus), replace(size, cpus=0, overlap={"share": size.cpus}))
        else:
            share = min(max(config.min_share_cores, ceil(config.reserve_cores(cpus))), limit)
            result += (PoolSize(pool="share", cpus=share), replace(size, cpus=size.cpus - share))
    return tuple(result)


def _overlap_pools(sizes: Sequence[PoolSize], topology: Topology, reclaimable_cores: float) -> tuple[PoolSize, ...]:
    """Sizes for sharing by priority: reclaimed pods may run on every CPU within a quota of `reclaimable_cores`.

    Share pools get the CPUs that no other pool has, in proportion to their sizes.
    """
    cpus = len(topology.cpus)
    quotas = apportion_cores(
        reclaimable_cores, cpus_per_numa_node(topology), {s.numa for s in sizes if s.pool == "reclaim"}
    )
    sizes = [replace(s, cpus=0, quota_cores=quotas.get(s.numa)) if s.pool == "reclaim" else s for s in sizes]
    shared = {s.pool: s.cpus for s in sizes if s.numa == NOT_NUMA_BOUND and s.pool not in _NON_ONLINE_POOLS}
    room = cpus - sum(s.cpus for s in sizes if s.pool not in shared)
    total = sum(shared.values())
    widened = {pool: max(own * room // total, own) for pool, own in shared.items()} if total else {}
    return tuple(
        replace(s, overlap=widened if s.numa == NOT_NUMA_BOUND else s.overlap)
        if s.pool == "reclaim"
        else replace(s, cpus=widened.get(s.pool, s.cpus))
        for s in sizes
    )


def _mark_as_hypothetical(reason: Reason) -> Reason:
    """The reason of a pool size that is not applied: with policy `latency`, the measured latency sets the quota instead."""
    return replace(reason, text=f"If pools were sized by need: {reason.text}")


def _advise_by_canonical(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, state: AdvisorState, cpu: CpuAdvice
) -> tuple[Advice, AdvisorState]:
    """Katalyst's policy: the regions' policies size the online pools, and the remaining CPUs are reclaimable."""
    reclaimable = pool_reclaimable_cores(cpu.sizes, snapshot.topology.numa_nodes) or 0.0
    before = reclaimable if state.reclaimable_cores is None else state.reclaimable_cores
    can_grow = snapshot.pods_fresh and snapshot.can_journal
    frozen = reclaimable > before and not can_grow and bool(state.sizes)
    if frozen:
        # A stale list may lack online pods that need this CPU. Without a journal the CPU could not be taken back from new
        # reclaimed pods.
        cpu, reclaimable = replace(cpu, sizes=state.sizes), before
    headroom = compute_headroom(snapshot, change, config, state, CpuAllowance(need_cores=need, sizes=cpu.sizes))
    reason = max((region.reason for region in cpu.regions), key=lambda r: len(r.inputs), default=NO_ONLINE_PODS)
    if len(cpu.regions) > 1:
        reason = replace(reason, text=" ".join(region.reason.text for region in cpu.regions))
    if frozen and not snapshot.pods_fresh:
        text = f"{reason.text} The list of pods is stale and may miss new pods: reclaimable CPU does not grow."
        reason = replace(reason, rule=PODS_UNKNOWN, text=text)
    elif frozen:
        reason = replace(reason, rule=NO_JOURNAL, text=f"{reason.text} Here, {NO_JOURNAL_TEXT}.")
    action = "freeze" if frozen else "shrink" if reclaimable < before else "grow" if reclaimable > before else "hold"
    advice = Advice(
        policy="canonical",
        cpu=cpu,
        requirement_cores=need,
        headroom=headroom,
        reclaimable_cores=reclaimable,
        idle=False,
        action=action,
        reason=reason,
    )
    return advice, replace(state, reclaimable_cores=reclaimable, sizes=cpu.sizes)


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """State that a policy keeps from one cycle to the next."""

    advisor: AdvisorState = AdvisorState()
    memory: MemoryAdvisorState = MemoryAdvisorState()
    reporter: ReporterState = ReporterState()
    cpus: CpusetState = CpusetState()
    knob_requests: KnobRequestState = KnobRequestState()
    node: NodeAdviceState | None = None
    forecasts: ForecastState = ForecastState()
    allowed_cpus: AllowedCpus | None = None


class ExternalAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice of external advisors, which replaces the computed advice; None if there is none or it is not valid."""

    cpu: Advice | None = None
    memory: MemoryAdvice | None = None


def without_quota_trials(config: AgentConfig) -> AgentConfig:
    """Return the configuration of a policy whose quota is not in force, so that it cannot be tested."""
    advisor = replace(config.advisor, latency=replace(config.advisor.latency, quota_trials=False))
    return replace(config, advisor=advisor)


def restore_policy_state(
    cpus: CpusetState, reclaimable_cores: float | None = None, verdicts: tuple[QuotaVerdict, ...] = ()
) -> PolicyState:
    """State of a restarted agent: the previous agent's CPU assignment, pool sizes, CPU quota of reclaimed pods, and verdicts of
    quota trials.

    Pools of a policy that lets reclaimed pods overlap the others are not restored: their sizes carry no information.
    """
    pools = {} if cpus.overlap else cpus.pools()
    trial = QuotaTrialState(verdicts=verdicts)
    advisor = AdvisorState(reclaimable_cores=reclaimable_cores, pools=pools, quota_trial=trial)
    return PolicyState(advisor=advisor, cpus=cpus)


_NO_EXTERNAL_ADVICE = ExternalAdvice()
HEADROOM_PODS_UNKNOWN = Headroom(
    reason=Reason(rule=PODS_UNKNOWN, text="The list of pods is stale: no new headroom is computed.")
)
"""Headroom while the list of pods is stale: the reporter holds the reported value for a while, then lowers it."""


def evaluate_policy(
    snapshot: Snapshot,
    config: AgentConfig,
    state: PolicyState,
    now_ns: int,
    external_advice: ExternalAdvice = _NO_EXTERNAL_ADVICE,
    rates: Rates | None = None,
) -> tuple[PolicyResult, PolicyState]:
    """Evaluate one cycle; return its result and the state for the next. `now_ns` is CLOCK_MONOTONIC.

    External advice replaces the computed advice, whose state is updated all the same. `rates` are those since the previous
    cycle; without them, and after a cycle that failed, they are computed.
    """
    rates = rates_since(state.advisor.previous, snapshot, rates)
    node_snapshot = replace(snapshot, pods=with_numa_bindings(snapshot.pods, state.cpus))
    # CPUs that no pod may use are neither needed nor reclaimable. Memory and power concern the whole node.
    allowed = allowed_cpus_of(node_snapshot, state.allowed_cpus)
    restricted = restrict_to_allowed(node_snapshot, allowed)
    snapshot = without_kubelet_exclusive(restricted)
    forecasts = update_forecasts(state.advisor.previous, snapshot, state.forecasts, config.forecast, now_ns)
    allowed_rates = with_busy_limit(rates, len(snapshot.topology.cpus))
    advice, advisor = _advise_allocated_pods(snapshot, allowed_rates, config, state, forecasts, now_ns)
    advice = advice and (external_advice.cpu or advice)
    advice, advisor, placement, cpus = _assign_cpus(advice, advisor, snapshot, state.cpus, config, now_ns)
    memory_inputs = build_memory_inputs(node_snapshot, advisor, config, now_ns)
    memory, memory_state = _advise_memory(memory_inputs, state.memory, forecasts, config, external_advice.memory)
    advice, reporter = _report(advice, memory, snapshot, state.reporter, config, now_ns)
    if advice is not None and advice.reported_headroom is not None:
        advisor = replace(advisor, reported_by_numa=advice.reported_headroom.cores_by_numa)
    knob_requests, knob_state = _request_knobs(restricted, snapshot, rates, config, state.knob_requests)
    if advice is not None:
        # A pod shows one reason: the missing CPUs take precedence over the missing bandwidth.
        rejected = {**knob_requests.bandwidth.rejected, **advice.rejected}
        noted = with_allowed_cpus_note(advice.reason, allowed, len(node_snapshot.topology.cpus))
        advice = replace(advice, cards=knob_requests.bandwidth.cards, rejected=rejected, reason=noted)
    node, node_state = _advise_node(node_snapshot, rates, advisor, config, state, now_ns)
    result = PolicyResult(
        advice=advice,
        placement=placement,
        memory=memory,
        extra_cgroups=writable_cgroups(memory_inputs, config.memory) | reclaimed_qos_classes(node_snapshot),
        knob_requests=knob_requests,
        node=node,
        forecasts=forecasts.forecasts,
        allowed_cpus=allowed,
        reclaim_roots=memory_inputs.roots,
        idle_class_obstacles=idle_class_obstacles(node_snapshot, config.kubelet.idle_class),
        short_slices=config.knobs.short_slices,
        evaluated_latency=advisor.evaluated_latency,
    )
    return result, PolicyState(
        advisor=advisor,
        memory=memory_state,
        reporter=reporter,
        cpus=cpus,
        knob_requests=knob_state,
        node=node_state,
        forecasts=forecasts,
        allowed_cpus=allowed,
    )


def _request_knobs(
    restricted: Snapshot, snapshot: Snapshot, rates: Rates | None, config: AgentConfig, state: KnobRequestState
) -> tuple[KnobRequests, KnobRequestState]:
    """Return the knob requests of the CPUs that pods may use; `snapshot` lacks those that the kubelet made exclusive."""
    # Only with the advisor's policy `none`, which assigns no CPUs, may cpusets be suppressed.
    excluded = unshareable_cpus(snapshot, config.placing) if config.knobs.suppress.policy == "cpuset" else ()
    limited = with_busy_limit(rates, len(restricted.topology.cpus))
    return build_knob_requests(restricted, limited, config.knobs, state, excluded)


def _advise_allocated_pods(
    snapshot: Snapshot,
    rates: Rates | None,
    config: AgentConfig,
    state: PolicyState,
    forecasts: ForecastState,
    now_ns: int,
) -> tuple[Advice | None, AdvisorState]:
    """CPU advice for the pods as QRM allocated them: a dedicated pod without CPUs of its own counts as a shared one."""
    allocated = replace(
        snapshot, pods=pods_as_allocated(with_pending_containers(snapshot.pods, state.cpus), state.cpus)
    )
    pairs = zip(snapshot.pods, allocated.pods, strict=True)
    refused = frozenset(pod.key for pod, as_allocated in pairs if pod.qos is not as_allocated.qos)
    before = replace(state.advisor, forecasts=forecasts.forecasts, refused=refused)
    advice, advisor = advise_cpu(allocated, config.advisor, before, now_ns, config.inference, rates)
    return advice, replace(advisor, previous=snapshot)


def _report(
    advice: Advice | None,
    memory: MemoryAdvice,
    snapshot: Snapshot,
    state: ReporterState,
    config: AgentConfig,
    now_ns: int,
) -> tuple[Advice | None, ReporterState]:
    """Complete the headroom by memory, and compute from it what the node reports."""
    if advice is None or advice.headroom is None:
        return advice, state
    headroom = HEADROOM_PODS_UNKNOWN
    if snapshot.pods_fresh:
        headroom = merge_memory_headroom(
            advice.headroom, memory.headroom_bytes, memory.headroom_by_numa, config.advisor
        )
    reported, reporter = report_headroom(
        headroom,
        node_capacity(snapshot),
        state,
        config.report,
        now_ns,
        enable_reclaim=config.advisor.enable_reclaim,
    )
    if not snapshot.can_journal:
        reported = limit_to_requests(reported, snapshot)
    return replace(advice, headroom=headroom, reported_headroom=reported), reporter


def _advise_memory(
    inputs: MemoryInputs,
    state: MemoryAdvisorState,
    forecasts: ForecastState,
    config: AgentConfig,
    external: MemoryAdvice | None,
) -> tuple[MemoryAdvice, MemoryAdvisorState]:
    """Computed memory advice, or the external advice with the computed pressure, which the protocol does not carry."""
    memory, state = advise_memory(inputs, state, config.memory)
    if external is not None:
        memory = replace(external, condition=memory.condition, numa_conditions=memory.numa_conditions)
    elif headroom_policy(config.advisor) == FORECAST_POLICY:
        memory = apply_memory_forecast(memory, forecasts.forecasts, inputs.snapshot, config)
    return memory, state


def _assign_cpus(
    advice: Advice | None,
    advisor: AdvisorState,
    snapshot: Snapshot,
    cpuset_state: CpusetState,
    config: AgentConfig,
    now_ns: int,
) -> tuple[Advice | None, AdvisorState, CpusetAllocation | None, CpusetState]:
    """Assign CPUs to the pools of the advice; without a CPU topology there is no advice."""
    if advice is None or not snapshot.topology.cpus:
        return None, advisor, None, cpuset_state
    by_numa = {} if advice.headroom is None else advice.headroom.cores_by_numa
    cpuset_state = replace(cpuset_state, numa_headroom=by_numa)
    placement, cpus = allocate_cpusets(
        advice.cpu.sizes, snapshot.pods, snapshot.topology, cpuset_state, config.placing, now_ns
    )
    # `fallback` is not a separate pool: it contains all CPUs outside of the reclaim pool.
    pools = tuple(pool for pool in placement.pools if pool.name != FALLBACK)
    advisor = replace(advisor, pools={pool.name: pool.cpus for pool in pools}, cpus=placement.cpus)
    reclaimable = advice.reclaimable_cores
    if not advice.idle:
        # Pools that do not fit together leave fewer CPUs to reclaim than their sizes suggest.
        reclaimable = min(reclaimable, float(sum(len(pool.cpus) for pool in pools if pool.name == RECLAIM_POOL)))
    advice = replace(advice, pools=pools, reclaimable_cores=reclaimable, rejected=placement.rejected)
    return advice, advisor, placement, cpus


def _advise_node(
    snapshot: Snapshot,
    rates: Rates | None,
    advisor: AdvisorState,
    config: AgentConfig,
    state: PolicyState,
    now_ns: int,
) -> tuple[NodeAdvice | None, NodeAdviceState | None]:
    if not (config.power.enable or config.overcommit.enable):
        return None, None
    from agent.advisor.node_advice import (  # noqa: PLC0415 - few nodes enable it
        NodeAdviceInputs,
        NodeAdviceState,
        advise_node,
    )

    inputs = NodeAdviceInputs(snapshot=snapshot, previous=state.advisor.previous, rates=rates, now_ns=now_ns)
    return advise_node(inputs, advisor, config, state.node or NodeAdviceState())
