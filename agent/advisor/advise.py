"""One round of advice: a snapshot and what is remembered in, pools and lent CPU and the reason out. Pure."""

from __future__ import annotations

import msgspec

from agent.advisor import latency, pools
from agent.advisor.culprits import claims
from agent.advisor.estimation import average, remember, requirement_cores
from agent.advisor.headroom import pool_cores, region_cores
from agent.advisor.measured import blames_of, online_waits, reclaimed_use_cores
from agent.advisor.state import Memory
from agent.advisor.waits import NS_PER_MS, breaching
from agent.config import AdvisorConfig
from api.decisions import Advice, Pool
from api.knobs import Verdict
from api.qos import QoSLevel
from api.rates import Rates, rates
from api.samples import Snapshot

NS_PER_S = 1_000_000_000
RECLAIMED_USE_WINDOW_S = 1.0


def advise(snapshot: Snapshot, config: AdvisorConfig, memory: Memory, now_ns: int) -> tuple[Advice | None, Memory]:
    """What online pods need and what may be lent of the rest, and the memory for the next round.

    None where the policy is `none`. `now_ns` is CLOCK_MONOTONIC; a clock that went backwards lends nothing more.
    """
    change = rates(memory.previous, snapshot) if memory.previous else None
    memory = msgspec.structs.replace(memory, containers=remember(snapshot, change, memory, config))
    need = requirement_cores(snapshot, memory, config)
    if config.policy == "none":
        advice = None
    elif config.policy == "canonical":
        advice, memory = _canonical(snapshot, change, need, config, memory, now_ns)
    else:
        advice, memory = _latency(snapshot, change, need, config, memory, now_ns)
    return advice, msgspec.structs.replace(memory, previous=snapshot)


def _latency(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, memory: Memory, now_ns: int
) -> tuple[Advice, Memory]:
    """Both pools are the whole node, kept apart by priority; the measured wait decides how much is lent."""
    cpus = snapshot.topology.ids
    elapsed_ns = change.node.interval_ns if change else 0
    used = reclaimed_use_cores(snapshot, change)
    if used is not None:
        used = average(memory.reclaimed_use_cores, used, elapsed_ns / NS_PER_S, RECLAIMED_USE_WINDOW_S)
    half_ns = config.latency.target_wait_ms * NS_PER_MS / 2
    waits = online_waits(snapshot, change, memory.previous)
    reclaimed = [c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers]
    blames = blames_of(breaching(waits, half_ns, config.latency), reclaimed, snapshot, memory.previous)
    situation = latency.Situation(
        now_ns=now_ns,
        elapsed_ns=elapsed_ns,
        node_cpus=len(cpus),
        waits=waits,
        reclaimed_use_cores=used,
        requirement_cores=need,
        enable_reclaim=config.enable_reclaim,
        blames=blames,
    )
    lending = latency.lend(situation, memory, config.latency)
    before = memory.lent_cores if memory.lent_cores is not None else float(len(cpus))
    kept = claims(
        memory.claims,
        reclaimed,
        blames,
        taken_ratio=1 - lending.level_cores / before if lending.action == "shrink" else 0.0,
        healed=config.latency.grow_ratio_per_s * elapsed_ns / NS_PER_S if lending.action == "grow" else 0.0,
    )
    reserve = config.reclaim_reserve_cores(len(cpus), len(snapshot.topology.numa_nodes))
    advice = Advice(
        policy="latency",
        pools=(Pool(name="share", cpus=cpus), Pool(name="reclaim", cpus=cpus)),
        requirement_cores=need,
        headroom_cores=min(
            region_cores(len(cpus) - reserve, need, config.reserve_cores(len(cpus)), reserve), lending.lent_cores
        ),
        lent_cores=lending.lent_cores,
        idle=True,
        claims=kept,
        action=lending.action,
        verdict=lending.verdict,
    )
    return advice, msgspec.structs.replace(
        memory,
        lent_cores=lending.level_cores,
        claims=kept,
        reclaimed_use_cores=used,
        harmful_cores=lending.harmful_cores,
        own_wait_ns=lending.own_wait_ns,
        minimum_since_ns=lending.minimum_since_ns,
        last_breach_ns=lending.last_breach_ns,
        last_wait_ns=lending.last_wait_ns,
    )


def _canonical(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, memory: Memory, now_ns: int
) -> tuple[Advice, Memory]:
    """Katalyst's way: the share pool is as large as the estimate, the reclaim pool is the rest, on CPUs of its own."""
    topology, before = snapshot.topology, memory.share_cores
    since = memory.last_ramp_down_ns
    may_shrink = since is None or now_ns - since >= config.min_ramp_down_period_s * NS_PER_S
    size = pools.share_cores(need, topology, config, before, may_shrink=may_shrink)
    if not config.enable_reclaim:
        cpus = len(topology.cpus)
        size = max(cpus - config.reclaim_reserve_cores(cpus, len(topology.numa_nodes)), 1)
    share, reclaim = pools.split(topology, size, memory.share_cpus)
    used = reclaimed_use_cores(snapshot, change)
    headroom = None
    if not config.enable_reclaim:
        headroom = 0.0
    elif change is not None and used is not None:
        headroom = pool_cores(reclaim, change.node.per_cpu_busy_ratio, used)
    before_cores = size if before is None else before
    action = "shrink" if size > before_cores else "grow" if size < before_cores else "hold"
    reserve = config.reserve_cores(len(topology.cpus))
    verdict = Verdict(
        rule="canonical_estimate",
        text=f"Online pods are estimated to need {need:.2f} cores; with a reserve of {reserve:g} they get {size} CPUs.",
        threshold=reserve,
        inputs={"requirement_cores": round(need, 3), "reserve_cores": reserve, "share_cpus_before": before},
    )
    advice = Advice(
        policy="canonical",
        pools=(Pool(name="share", cpus=share), Pool(name="reclaim", cpus=reclaim)),
        requirement_cores=need,
        headroom_cores=headroom,
        lent_cores=float(len(reclaim)),
        idle=False,
        action=action,
        verdict=verdict,
    )
    return advice, msgspec.structs.replace(
        memory,
        share_cores=size,
        share_cpus=share,
        lent_cores=float(len(reclaim)),
        last_ramp_down_ns=now_ns if before is not None and size < before else since,
    )
