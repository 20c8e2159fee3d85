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
from agent.advisor.advisor_state import AdvisorState
from agent.advisor.cpu_estimate import estimate_online_cores, exponential_average, update_demand
from agent.advisor.forecast.node_forecast import ForecastState, update_forecasts
from agent.advisor.headroom.forecast_headroom import FORECAST_POLICY, apply_memory_forecast
from agent.advisor.headroom.headroom_policies import (
    CpuAllowance,
    compute_headroom,
    headroom_policy,
    merge_memory_headroom,
)
from agent.advisor.headroom.headroom_reporter import ReporterState, node_capacity, report_headroom
from agent.advisor.headroom.reclaim_exclusion import max_reclaimable_cores, reclaimable_nodes
from agent.advisor.interference import measure_interference, update_weights
from agent.advisor.latency import PODS_UNKNOWN
from agent.advisor.memory.memory_advisor import advise_memory, build_memory_inputs, writable_cgroups
from agent.advisor.memory.memory_inputs import MemoryAdvisorState
from agent.advisor.pod_usage import reclaimed_use_cores
from agent.advisor.provision.pool_sizes import RECLAIM_POOL, apportion_cores, cpus_per_numa_node, pool_reclaimable_cores
from agent.advisor.provision.provisioner import build_provision_inputs, provision_cpus
from agent.advisor.provision.region_indicators import update_request_windows
from agent.advisor.runq_latency import NS_PER_MS, find_breaches, find_starved, online_runq_latency
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
from agent.qrm.decisions.compose import PolicyResult
from agent.qrm.decisions.knob_requests import KnobRequestState, build_knob_requests
from api.advice import NOT_NUMA_BOUND, CpuAdvice, Headroom, MemoryAdvice, NodeAdvice, PoolSize
from api.cpu import Topology
from api.decision import Advice
from api.knobs import Reason
from api.qos import QoSLevel
from api.rates import Rates, compute_rates
from api.snapshot import Snapshot

if TYPE_CHECKING:
    from agent.advisor.node_advice import NodeAdviceState

NS_PER_S = 1_000_000_000
RECLAIMED_USE_WINDOW_S = 1.0
_NON_ONLINE_POOLS = ("reclaim", "reserve", "interrupt")
INFERENCE_OFF = InferenceConfig()
NO_ONLINE_PODS = Reason(rule="nothing_online", text="No online pod runs here: everything is lent.")


def advise_cpu(
    snapshot: Snapshot,
    config: AdvisorConfig,
    memory: AdvisorState,
    now_ns: int,
    inference: InferenceConfig = INFERENCE_OFF,
) -> tuple[Advice | None, AdvisorState]:
    """What online pods need and what may be lent of the rest, and the memory for the next round.

    None where the policy is `none`. `now_ns` is CLOCK_MONOTONIC; a clock that went backwards lends nothing more.
    """
    change = compute_rates(memory.previous, snapshot) if memory.previous else None
    memory = replace(memory, containers=update_demand(snapshot, change, memory, config))
    need = estimate_online_cores(snapshot, memory, config)
    if config.policy == "none":
        advice = None
    elif config.policy == "canonical":
        cpu, memory = _size_pools(snapshot, change, config, inference, memory, now_ns)
        advice, memory = _advise_by_canonical(snapshot, change, need, config, memory, cpu)
    else:
        shared = replace(config, provision=replace(config.provision, overlap=True))
        cpu, memory = _size_pools(snapshot, change, shared, inference, memory, now_ns)
        advice, memory = _advise_by_latency(snapshot, change, need, config, memory, now_ns)
        sizes = _overlap_pools(cpu.sizes, snapshot.topology, advice.reclaimable_cores)
        regions = tuple(replace(one, reason=_mark_as_hypothetical(one.reason)) for one in cpu.regions)
        advice = replace(advice, cpu=replace(cpu, sizes=sizes, regions=regions))
    requests = update_request_windows(snapshot.indicators, memory.requests, now_ns)
    return advice, replace(memory, previous=snapshot, requests=requests)


def _advise_by_latency(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, memory: AdvisorState, now_ns: int
) -> tuple[Advice, AdvisorState]:
    """Online and batch pods share CPUs, kept apart by priority; the measured wait decides how much is lent."""
    cpus = snapshot.topology.ids
    elapsed_ns = change.node.interval_ns if change else 0
    used = reclaimed_use_cores(snapshot, change)
    if used is not None:
        used = exponential_average(memory.reclaimed_use_cores, used, elapsed_ns / NS_PER_S, RECLAIMED_USE_WINDOW_S)
    half_ns = config.latency.target_wait_ms * NS_PER_MS / 2
    waits = online_runq_latency(snapshot, change, memory.previous)
    memory = replace(memory, baseline_latency_ns=_drop_replaced_cgroups(memory, snapshot))
    reclaimed = [c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers]
    blames = measure_interference(
        find_breaches(waits, dict.fromkeys(waits, half_ns), config.latency), reclaimed, snapshot, memory.previous
    )
    situation = latency.LatencyInputs(
        now_ns=now_ns,
        elapsed_ns=elapsed_ns,
        node_cpus=len(cpus),
        waits=waits,
        reclaimed_use_cores=used,
        requirement_cores=need,
        enable_reclaim=config.enable_reclaim,
        blames=blames,
        starved=find_starved(waits, snapshot, change, memory.previous),
        max_cores=max_reclaimable_cores(snapshot, reclaimable_nodes(snapshot, memory, config), memory, config),
        pods_fresh=snapshot.pods_fresh,
    )
    lending = latency.evaluate_latency(situation, memory, config.latency)
    before = memory.reclaimable_cores if memory.reclaimable_cores is not None else float(len(cpus))
    kept = update_weights(
        memory.claims,
        reclaimed,
        blames,
        shrink_ratio=1 - lending.level_cores / before if lending.action == "shrink" else 0.0,
        recovered_ratio=config.latency.grow_ratio_per_s * elapsed_ns / NS_PER_S if lending.action == "grow" else 0.0,
    )
    advice = Advice(
        policy="latency",
        requirement_cores=need,
        headroom=compute_headroom(
            snapshot, change, config, memory, CpuAllowance(need_cores=need, reclaimable_cores=lending.reclaimable_cores)
        ),
        reclaimable_cores=lending.reclaimable_cores,
        idle=True,
        claims=kept,
        action=lending.action,
        reason=lending.reason,
    )
    return advice, replace(
        memory,
        reclaimable_cores=lending.level_cores,
        claims=kept,
        reclaimed_use_cores=used,
        harmful_cores=lending.harmful_cores,
        baseline_latency_ns=lending.baseline_latency_ns,
        minimum_since_ns=lending.minimum_since_ns,
        last_breach_ns=lending.last_breach_ns,
        last_wait_ns=lending.last_wait_ns,
    )


def _drop_replaced_cgroups(memory: AdvisorState, snapshot: Snapshot) -> dict[str, float]:
    """What containers wait by themselves, but of those that were replaced: who has a path now is another than who had it."""
    before = memory.previous.cgroups if memory.previous is not None else {}
    return {
        path: ns
        for path, ns in memory.baseline_latency_ns.items()
        if path not in snapshot.cgroups or path not in before or snapshot.cgroups[path].id == before[path].id
    }


def _size_pools(
    snapshot: Snapshot,
    change: Rates | None,
    config: AdvisorConfig,
    inference: InferenceConfig,
    memory: AdvisorState,
    now_ns: int,
) -> tuple[CpuAdvice, AdvisorState]:
    """How large every pool is to be by its policy."""
    situation = build_provision_inputs(snapshot, change, memory, inference, now_ns)
    cpu, provided = provision_cpus(situation, memory.provision, config, config.provision)
    sizes = _add_share_pool(cpu.sizes, snapshot, config)
    return replace(cpu, sizes=sizes), replace(memory, provision=provided)


def _add_share_pool(sizes: Sequence[PoolSize], snapshot: Snapshot, config: AdvisorConfig) -> tuple[PoolSize, ...]:
    """The same sizes, with a share pool for online pods that may come where there are none yet: Katalyst's smallest one."""
    if any(size.pool == "share" for size in sizes):
        return tuple(sizes)
    cpus, nodes = len(snapshot.topology.cpus), len(snapshot.topology.numa_nodes)
    made: list[PoolSize] = []
    for size in sizes:
        most = size.cpus if config.provision.overlap else size.cpus - config.reclaim_reserve_cores(cpus, nodes)
        if size.pool != "reclaim" or size.numa != NOT_NUMA_BOUND or most < 1:
            made.append(size)
        elif config.provision.overlap:
            made += (PoolSize(pool="share", cpus=size.cpus), replace(size, cpus=0, overlap={"share": size.cpus}))
        else:
            share = min(max(config.min_share_cores, ceil(config.reserve_cores(cpus))), most)
            made += (PoolSize(pool="share", cpus=share), replace(size, cpus=size.cpus - share))
    return tuple(made)


def _overlap_pools(sizes: Sequence[PoolSize], topology: Topology, reclaimable_cores: float) -> tuple[PoolSize, ...]:
    """The same sizes for lending by priority: nothing is kept for reclaimed pods alone, who may run on every CPU, and use
    what is lent in all; what is left of the node by pools for somebody in particular is the share pools', in proportion."""
    cpus = len(topology.cpus)
    lent = apportion_cores(
        reclaimable_cores, cpus_per_numa_node(topology), {s.numa for s in sizes if s.pool == "reclaim"}
    )
    sizes = [replace(s, cpus=0, quota_cores=lent.get(s.numa)) if s.pool == "reclaim" else s for s in sizes]
    shared = {s.pool: s.cpus for s in sizes if s.numa == NOT_NUMA_BOUND and s.pool not in _NON_ONLINE_POOLS}
    room = cpus - sum(s.cpus for s in sizes if s.pool not in shared)
    total = sum(shared.values())
    wide = {pool: max(own * room // total, own) for pool, own in shared.items()} if total else {}
    return tuple(
        replace(s, overlap=wide if s.numa == NOT_NUMA_BOUND else s.overlap)
        if s.pool == "reclaim"
        else replace(s, cpus=wide.get(s.pool, s.cpus))
        for s in sizes
    )


def _mark_as_hypothetical(reason: Reason) -> Reason:
    """The same reason, where it sizes nothing: pools are as wide as can be, and waits decide what is lent of them."""
    return replace(reason, text=f"Were pools sized by need: {reason.text}")


def _advise_by_canonical(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, memory: AdvisorState, cpu: CpuAdvice
) -> tuple[Advice, AdvisorState]:
    """Katalyst's way: online pools are as large as their policies say, and what is left is reclaimed pods'."""
    lent = pool_reclaimable_cores(cpu.sizes, snapshot.topology.numa_nodes) or 0.0
    before = lent if memory.reclaimable_cores is None else memory.reclaimable_cores
    frozen = lent > before and not snapshot.pods_fresh and bool(memory.sizes)
    if frozen:
        # Some of those who need CPU may be new, and nobody lists them.
        cpu, lent = replace(cpu, sizes=memory.sizes), before
    found = compute_headroom(snapshot, change, config, memory, CpuAllowance(need_cores=need, sizes=cpu.sizes))
    verdict = max((one.reason for one in cpu.regions), key=lambda v: len(v.inputs), default=NO_ONLINE_PODS)
    if len(cpu.regions) > 1:
        verdict = replace(verdict, text=" ".join(one.reason.text for one in cpu.regions))
    if frozen:
        text = (
            f"{verdict.text} But the list of pods is not up to date: some may be new, and no more is lent than before."
        )
        verdict = replace(verdict, rule=latency.PODS_UNKNOWN, text=text)
    advice = Advice(
        policy="canonical",
        cpu=cpu,
        requirement_cores=need,
        headroom=found,
        reclaimable_cores=lent,
        idle=False,
        action="freeze" if frozen else "shrink" if lent < before else "grow" if lent > before else "hold",
        reason=verdict,
    )
    return advice, replace(memory, reclaimable_cores=lent, sizes=cpu.sizes)


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier rounds."""

    advisor: AdvisorState = AdvisorState()
    memory: MemoryAdvisorState = MemoryAdvisorState()
    reporter: ReporterState = ReporterState()
    cpus: CpusetState = CpusetState()
    asked: KnobRequestState = KnobRequestState()
    node: NodeAdviceState | None = None
    forecasts: ForecastState = ForecastState()
    ceiling: AllowedCpus | None = None


class ExternalAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What advisors of somebody else's say, in the place of ours; None of one that says nothing or is not trusted."""

    cpu: Advice | None = None
    memory: MemoryAdvice | None = None


def restore_policy_state(cpus: CpusetState, reclaimable_cores: float | None = None) -> PolicyState:
    """What an agent that was just started knows of the one before it: the CPU that its quotas left, who has which CPUs, and
    how large the pools are. Where reclaimed pods shared those of the others, that says nothing."""
    pools = {} if cpus.overlap else cpus.pools()
    return PolicyState(advisor=AdvisorState(reclaimable_cores=reclaimable_cores, pools=pools), cpus=cpus)


_NO_EXTERNAL_ADVICE = ExternalAdvice()
HEADROOM_PODS_UNKNOWN = Headroom(
    reason=Reason(rule=PODS_UNKNOWN, text="The list of pods is not up to date: nothing new is promised.")
)
"""Found where nobody knows who is here: what was promised before stands for a while and then goes down, by the reporter."""


def evaluate_policy(
    snapshot: Snapshot,
    config: AgentConfig,
    state: PolicyState,
    now_ns: int,
    external_advice: ExternalAdvice = _NO_EXTERNAL_ADVICE,
) -> tuple[PolicyResult, PolicyState]:
    """One round; `now_ns` is CLOCK_MONOTONIC. What others say is carried out; ours goes on learning beside it."""
    # Whom QRM bound to NUMA nodes, the advisor provides for there.
    whole = msgspec.structs.replace(snapshot, pods=with_numa_bindings(snapshot.pods, state.cpus))
    # CPUs that no pod may have are nobody's need and nobody's to lend; memory and power are the whole node's.
    ceiling = allowed_cpus_of(whole, state.ceiling)
    snapshot = without_kubelet_exclusive(restrict_to_allowed(whole, ceiling))
    previous = state.advisor.previous
    watched = update_forecasts(previous, snapshot, state.forecasts, config.forecast, now_ns)
    before = msgspec.structs.replace(state.advisor, forecasts=watched.forecasts)
    provided_for = msgspec.structs.replace(
        snapshot, pods=pods_as_allocated(with_pending_containers(snapshot.pods, state.cpus), state.cpus)
    )
    before = msgspec.structs.replace(before, refused=_refused_dedicated_pods(snapshot, provided_for))
    advice, advisor = advise_cpu(provided_for, config.advisor, before, now_ns, config.inference)
    advisor = msgspec.structs.replace(advisor, previous=snapshot)
    advice = advice and (external_advice.cpu or advice)
    advice, advisor, placement, cpus = _assign_cpus(advice, advisor, snapshot, state.cpus, config, now_ns)
    advice = _add_allowed_cpus(advice, ceiling, whole)
    situation = build_memory_inputs(whole, advisor, config, now_ns)
    memory, remembered = advise_memory(situation, state.memory, config.memory)
    if headroom_policy(config.advisor) == FORECAST_POLICY:
        memory = apply_memory_forecast(memory, watched.forecasts, whole, config)
    memory = _merge_memory_advice(external_advice.memory, memory)
    reporter = state.reporter
    if advice is not None and advice.headroom is not None:
        found = _complete_headroom(advice.headroom, memory, config) if whole.pods_fresh else HEADROOM_PODS_UNKNOWN
        lends = config.advisor.enable_reclaim
        advertised, reporter = report_headroom(
            found, node_capacity(snapshot), reporter, config.report, now_ns, enable_reclaim=lends
        )
        advice = msgspec.structs.replace(advice, headroom=found, reported_headroom=advertised)
        advisor = msgspec.structs.replace(advisor, reported_by_numa=advertised.cores_by_numa)
    # Only where the advisor's policy is `none` may cpusets be suppressed: nothing is placed then.
    excluded = unshareable_cpus(snapshot, config.placing) if config.knobs.suppress.policy == "cpuset" else ()
    asked, asked_memory = build_knob_requests(
        restrict_to_allowed(whole, ceiling), previous, config.knobs, state.asked, excluded
    )
    if advice is not None:
        # A pod is shown with one reason, and to be without the CPUs that it asks for is the graver one.
        rejected = {**asked.bandwidth.rejected, **advice.rejected}
        advice = msgspec.structs.replace(advice, cards=asked.bandwidth.cards, rejected=rejected)
    node, node_memory = _advise_node(whole, advisor, config, state, now_ns)
    judged = PolicyResult(
        advice=advice,
        placement=placement,
        memory=memory,
        extra_cgroups=writable_cgroups(situation, config.memory),
        knob_requests=asked,
        node=node,
        forecasts=watched.forecasts,
        allowed_cpus=ceiling,
        reclaim_roots=situation.roots,
    )
    return judged, PolicyState(
        advisor=advisor,
        memory=remembered,
        reporter=reporter,
        cpus=cpus,
        asked=asked_memory,
        node=node_memory,
        forecasts=watched,
        ceiling=ceiling,
    )


def _complete_headroom(headroom: Headroom, memory: MemoryAdvice, config: AgentConfig) -> Headroom:
    """What can be promised of both."""
    return merge_memory_headroom(headroom, memory.headroom_bytes, memory.headroom_by_numa, config.advisor)


def _refused_dedicated_pods(snapshot: Snapshot, provided_for: Snapshot) -> frozenset[str]:
    """Pods that do not run as what they ask for, by key."""
    both = zip(snapshot.pods, provided_for.pods, strict=True)
    return frozenset(mine.key for mine, its in both if mine.qos is not its.qos)


def _add_allowed_cpus(advice: Advice | None, ceiling: AllowedCpus | None, whole: Snapshot) -> Advice | None:
    """The same, and where CPUs are nobody's to give, that they are."""
    if advice is None:
        return None
    return msgspec.structs.replace(
        advice, reason=with_allowed_cpus_note(advice.reason, ceiling, len(whole.topology.cpus))
    )


def _merge_memory_advice(external: MemoryAdvice | None, computed: MemoryAdvice) -> MemoryAdvice:
    """What somebody else's advisor says, if any, and how short memory is, which it does not say."""
    if external is None:
        return computed
    return msgspec.structs.replace(external, condition=computed.condition, numa_conditions=computed.numa_conditions)


def _assign_cpus(
    advice: Advice | None,
    advisor: AdvisorState,
    snapshot: Snapshot,
    cpuset_state: CpusetState,
    config: AgentConfig,
    now_ns: int,
) -> tuple[Advice | None, AdvisorState, CpusetAllocation | None, CpusetState]:
    """The same advice with the CPUs of the pools; without CPUs there is none."""
    if advice is None or not snapshot.topology.cpus:
        return None, advisor, None, cpuset_state
    by_numa = {} if advice.headroom is None else advice.headroom.cores_by_numa
    cpuset_state = msgspec.structs.replace(cpuset_state, numa_headroom=by_numa)
    placement, cpus = allocate_cpusets(
        advice.cpu.sizes, snapshot.pods, snapshot.topology, cpuset_state, config.placing, now_ns
    )
    # `fallback` is no pool of its own: it is all that are not reclaimed pods'.
    pools = tuple(pool for pool in placement.pools if pool.name != FALLBACK)
    advisor = msgspec.structs.replace(advisor, pools={pool.name: pool.cpus for pool in pools}, cpus=placement.cpus)
    lent = float(sum(len(pool.cpus) for pool in pools if pool.name == RECLAIM_POOL))
    # Where pools are asked for that do not fit together, less is there to be lent than their sizes leave.
    lent = advice.reclaimable_cores if advice.idle else min(advice.reclaimable_cores, lent)
    advice = msgspec.structs.replace(advice, pools=pools, reclaimable_cores=lent, rejected=placement.rejected)
    return advice, advisor, placement, cpus


def _advise_node(
    snapshot: Snapshot, advisor: AdvisorState, config: AgentConfig, state: PolicyState, now_ns: int
) -> tuple[NodeAdvice | None, NodeAdviceState | None]:
    if not (config.power.enable or config.overcommit.enable):
        return None, None
    from agent.advisor.node_advice import NodeAdviceState, advise_node  # noqa: PLC0415 - few nodes ask for it

    return advise_node(snapshot, state.advisor.previous, advisor, config, state.node or NodeAdviceState(), now_ns)
