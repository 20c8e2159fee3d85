"""One round of advice: a snapshot and what is remembered in, sizes of pools, lent CPU and the reason out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from agent.advisor import latency
from agent.advisor.culprits import claims
from agent.advisor.estimation import average, remember, requirement_cores
from agent.advisor.headroom.foretold import lent_by_pools
from agent.advisor.headroom.found import Lending, find
from agent.advisor.headroom.kept import lendable_cores, lent_nodes
from agent.advisor.measured import blames_of, online_waits, reclaimed_use_cores, starved_of
from agent.advisor.pool_sizes import apportion, node_cpus
from agent.advisor.provision.gather import situation_of
from agent.advisor.provision.provide import provision
from agent.advisor.requests import remember_requests
from agent.advisor.state import Memory
from agent.advisor.waits import NS_PER_MS, breaching
from agent.config import AdvisorConfig
from agent.config.inference import InferenceConfig
from api.advice import UNBOUND, CpuAdvice, PoolSize
from api.cpus import Topology
from api.decisions import Advice
from api.knobs import Verdict
from api.qos import QoSLevel
from api.rates import Rates, rates
from api.samples import Snapshot

NS_PER_S = 1_000_000_000
RECLAIMED_USE_WINDOW_S = 1.0
_NOT_SHARED = ("reclaim", "reserve", "interrupt")
NO_INFERENCE = InferenceConfig()
NOBODY = Verdict(rule="nothing_online", text="No online pod runs here: everything is lent.")


def advise(
    snapshot: Snapshot,
    config: AdvisorConfig,
    memory: Memory,
    now_ns: int,
    inference: InferenceConfig = NO_INFERENCE,
) -> tuple[Advice | None, Memory]:
    """What online pods need and what may be lent of the rest, and the memory for the next round.

    None where the policy is `none`. `now_ns` is CLOCK_MONOTONIC; a clock that went backwards lends nothing more.
    """
    change = rates(memory.previous, snapshot) if memory.previous else None
    memory = replace(memory, containers=remember(snapshot, change, memory, config))
    need = requirement_cores(snapshot, memory, config)
    if config.policy == "none":
        advice = None
    elif config.policy == "canonical":
        cpu, memory = _provided(snapshot, change, config, inference, memory, now_ns)
        advice, memory = _canonical(snapshot, change, need, config, memory, cpu)
    else:
        shared = replace(config, provision=replace(config.provision, overlap=True))
        cpu, memory = _provided(snapshot, change, shared, inference, memory, now_ns)
        advice, memory = _latency(snapshot, change, need, config, memory, now_ns)
        sizes = _everywhere(cpu.sizes, snapshot.topology, advice.lent_cores)
        regions = tuple(replace(one, verdict=_by_need_alone(one.verdict)) for one in cpu.regions)
        advice = replace(advice, cpu=replace(cpu, sizes=sizes, regions=regions))
    requests = remember_requests(snapshot.indicators, memory.requests, now_ns)
    return advice, replace(memory, previous=snapshot, requests=requests)


def _latency(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, memory: Memory, now_ns: int
) -> tuple[Advice, Memory]:
    """Online and batch pods share CPUs, kept apart by priority; the measured wait decides how much is lent."""
    cpus = snapshot.topology.ids
    elapsed_ns = change.node.interval_ns if change else 0
    used = reclaimed_use_cores(snapshot, change)
    if used is not None:
        used = average(memory.reclaimed_use_cores, used, elapsed_ns / NS_PER_S, RECLAIMED_USE_WINDOW_S)
    half_ns = config.latency.target_wait_ms * NS_PER_MS / 2
    waits = online_waits(snapshot, change, memory.previous)
    memory = replace(memory, own_waits_ns=_of_the_same(memory, snapshot))
    reclaimed = [c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers]
    blames = blames_of(
        breaching(waits, dict.fromkeys(waits, half_ns), config.latency), reclaimed, snapshot, memory.previous
    )
    situation = latency.Situation(
        now_ns=now_ns,
        elapsed_ns=elapsed_ns,
        node_cpus=len(cpus),
        waits=waits,
        reclaimed_use_cores=used,
        requirement_cores=need,
        enable_reclaim=config.enable_reclaim,
        blames=blames,
        starved=starved_of(waits, snapshot, change, memory.previous),
        most_cores=lendable_cores(snapshot, lent_nodes(snapshot, memory, config), memory, config),
        pods_known=snapshot.pods_known,
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
    advice = Advice(
        policy="latency",
        requirement_cores=need,
        headroom=find(snapshot, change, config, memory, Lending(need_cores=need, lent_cores=lending.lent_cores)),
        lent_cores=lending.lent_cores,
        idle=True,
        claims=kept,
        action=lending.action,
        verdict=lending.verdict,
    )
    return advice, replace(
        memory,
        lent_cores=lending.level_cores,
        claims=kept,
        reclaimed_use_cores=used,
        harmful_cores=lending.harmful_cores,
        own_waits_ns=lending.own_waits_ns,
        minimum_since_ns=lending.minimum_since_ns,
        last_breach_ns=lending.last_breach_ns,
        last_wait_ns=lending.last_wait_ns,
    )


def _of_the_same(memory: Memory, snapshot: Snapshot) -> dict[str, float]:
    """What containers wait by themselves, but of those that were replaced: who has a path now is another than who had it."""
    before = memory.previous.cgroups if memory.previous is not None else {}
    return {
        path: ns
        for path, ns in memory.own_waits_ns.items()
        if path not in snapshot.cgroups or path not in before or snapshot.cgroups[path].id == before[path].id
    }


def _provided(
    snapshot: Snapshot,
    change: Rates | None,
    config: AdvisorConfig,
    inference: InferenceConfig,
    memory: Memory,
    now_ns: int,
) -> tuple[CpuAdvice, Memory]:
    """How large every pool is to be by its policy."""
    situation = situation_of(snapshot, change, memory, inference, now_ns)
    cpu, provided = provision(situation, memory.provision, config, config.provision)
    sizes = _with_share(cpu.sizes, snapshot, config)
    return replace(cpu, sizes=sizes), replace(memory, provision=provided)


def _with_share(sizes: Sequence[PoolSize], snapshot: Snapshot, config: AdvisorConfig) -> tuple[PoolSize, ...]:
    """The same sizes, with a share pool for online pods that may come where there are none yet: Katalyst's smallest one."""
    if any(size.pool == "share" for size in sizes):
        return tuple(sizes)
    cpus, nodes = len(snapshot.topology.cpus), len(snapshot.topology.numa_nodes)
    made: list[PoolSize] = []
    for size in sizes:
        most = size.cpus if config.provision.overlap else size.cpus - config.reclaim_reserve_cores(cpus, nodes)
        if size.pool != "reclaim" or size.numa != UNBOUND or most < 1:
            made.append(size)
        elif config.provision.overlap:
            made += (PoolSize(pool="share", cpus=size.cpus), replace(size, cpus=0, overlap={"share": size.cpus}))
        else:
            share = min(max(config.min_share_cores, ceil(config.reserve_cores(cpus))), most)
            made += (PoolSize(pool="share", cpus=share), replace(size, cpus=size.cpus - share))
    return tuple(made)


def _everywhere(sizes: Sequence[PoolSize], topology: Topology, lent_cores: float) -> tuple[PoolSize, ...]:
    """The same sizes for lending by priority: nothing is kept for reclaimed pods alone, who may run on every CPU, and use
    what is lent in all; what is left of the node by pools for somebody in particular is the share pools', in proportion."""
    cpus = len(topology.cpus)
    lent = apportion(lent_cores, node_cpus(topology), {s.numa for s in sizes if s.pool == "reclaim"})
    sizes = [replace(s, cpus=0, quota_cores=lent.get(s.numa)) if s.pool == "reclaim" else s for s in sizes]
    shared = {s.pool: s.cpus for s in sizes if s.numa == UNBOUND and s.pool not in _NOT_SHARED}
    room = cpus - sum(s.cpus for s in sizes if s.pool not in shared)
    total = sum(shared.values())
    wide = {pool: max(own * room // total, own) for pool, own in shared.items()} if total else {}
    return tuple(
        replace(s, overlap=wide if s.numa == UNBOUND else s.overlap)
        if s.pool == "reclaim"
        else replace(s, cpus=wide.get(s.pool, s.cpus))
        for s in sizes
    )


def _by_need_alone(verdict: Verdict) -> Verdict:
    """The same reason, where it sizes nothing: pools are as wide as can be, and waits decide what is lent of them."""
    return replace(verdict, text=f"Were pools sized by need: {verdict.text}")


def _canonical(
    snapshot: Snapshot, change: Rates | None, need: float, config: AdvisorConfig, memory: Memory, cpu: CpuAdvice
) -> tuple[Advice, Memory]:
    """Katalyst's way: online pools are as large as their policies say, and what is left is reclaimed pods'."""
    lent = lent_by_pools(cpu.sizes, snapshot.topology.numa_nodes) or 0.0
    before = lent if memory.lent_cores is None else memory.lent_cores
    frozen = lent > before and not snapshot.pods_known and bool(memory.sizes)
    if frozen:
        # Some of those who need CPU may be new, and nobody lists them.
        cpu, lent = replace(cpu, sizes=memory.sizes), before
    found = find(snapshot, change, config, memory, Lending(need_cores=need, sizes=cpu.sizes))
    verdict = max((one.verdict for one in cpu.regions), key=lambda v: len(v.inputs), default=NOBODY)
    if len(cpu.regions) > 1:
        verdict = replace(verdict, text=" ".join(one.verdict.text for one in cpu.regions))
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
        lent_cores=lent,
        idle=False,
        action="freeze" if frozen else "shrink" if lent < before else "grow" if lent > before else "hold",
        verdict=verdict,
    )
    return advice, replace(memory, lent_cores=lent, sizes=cpu.sizes)
