"""cpu-pressure-load-plugin: more tasks of a pool want to run than it has CPUs, for minutes. Pure.

Every 30 s the one-minute loads of a pool's containers are added up and held against its size: above it is soft (no new pods),
above 1.8 times is hard (the pod with the highest load of all samples leaves). It counts when that is so in 80 % of the last
ten samples. Where the advisor sizes the pools by need, a load above the size is normal as long as they can grow; once they
cannot, it is soft at once. Katalyst reports threshold and observed value the wrong way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction_cpu import LoadConfig
from agent.eviction.judgement import Candidate, Finding, judged, missing, not_met
from agent.eviction.rings import Ring, grown, part_above, recent
from agent.eviction.situation import NS_PER_S, Situation, pools_of
from api.evictions import Met
from api.pods import Pod
from api.qos import QoSLevel

NAME, DEDICATED = "cpu-pressure-load-plugin", "dedicated"
SCOPE = "cpu.load.1min.container"
CONDITION = "CPUPressure"
SOFT_LEVEL, HARD_LEVEL = 1.0, 2.0


class LoadMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples."""

    sampled_at_ns: int | None = None
    pools: Mapping[str, Ring] = {}
    """By pool: 1 where the load was above the soft bound, 2 above the hard one."""
    pods: Mapping[str, Ring] = {}
    """Load by pod."""


def judge(situation: Situation, memory: LoadMemory, config: LoadConfig) -> tuple[tuple[Finding, ...], LoadMemory]:
    """One finding for each pool, the worst first."""
    pools = {name: cpus for name, cpus in situation.pools.items() if _counts(name, config)}
    if not pools:
        return (not_met(NAME, "no_pools", "No pool of online pods is placed.", SCOPE),), LoadMemory()
    homes = pools_of(situation)
    judged_pods = [pod for pod in situation.staying if _judged(pod, config)]
    members = {name: [pod for pod in judged_pods if homes.get(pod.key) == name] for name in pools}
    since = memory.sampled_at_ns
    if since is None or not 0 <= situation.now_ns - since < config.sample_s * NS_PER_S:
        memory = _sampled(situation, memory, members, config)
    age_s = situation.stale_s + config.sample_s
    memory = msgspec.structs.replace(
        memory,
        pools=recent(memory.pools, situation.now_ns, age_s),
        pods=recent(memory.pods, situation.now_ns, age_s),
    )
    findings = [_finding(name, len(pools[name]), members[name], memory, config) for name in sorted(pools)]
    findings.sort(key=lambda each: (_urgency(each.threshold.met), -(each.threshold.observed or 0.0)))
    return tuple(findings), memory


def _urgency(met: Met) -> int:
    return (Met.HARD, Met.SOFT, Met.NOT_MET).index(met)


def _counts(pool: str, config: LoadConfig) -> bool:
    base = DEDICATED if pool.startswith(f"{DEDICATED}-") else pool.partition("-NUMA")[0]
    return base not in config.skip_pools and not pool.startswith("isolation")


def _judged(pod: Pod, config: LoadConfig) -> bool:
    """A dedicated pod that has no CPUs of its own is on those of a pool, and still none of those that this is about."""
    return pod.qos is not QoSLevel.DEDICATED or DEDICATED not in config.skip_pools


def _sampled(
    situation: Situation, memory: LoadMemory, members: Mapping[str, list[Pod]], config: LoadConfig
) -> LoadMemory:
    """One sample more of each pool and pod whose load is known; rings of others go as they are, those of the gone go."""
    sizes = {name: len(situation.pools[name]) for name in members}
    limit = situation.shared_limit_cpus
    growing = limit is not None and sum(sizes.values()) < limit
    loads = {pod.key: load for pods in members.values() for pod in pods if (load := _load(situation, pod)) is not None}
    pools = {name: memory.pools[name] for name in members if name in memory.pools}
    for name, pods in members.items():
        known = [loads[pod.key] for pod in pods if pod.key in loads]
        if known or not pods:
            total, size = sum(known), sizes[name]
            soft = size * config.lower_bound_ratio
            if limit is not None:
                soft = total if growing else 1.0
            hard = total if growing else size * config.upper_bound_ratio
            level = HARD_LEVEL if total > hard else SOFT_LEVEL if total > soft else 0.0
            pools[name] = grown(memory.pools.get(name), level, config.ring_size, situation.now_ns)
    rings = {}
    for pods in members.values():
        for pod in pods:
            before = memory.pods.get(pod.key)
            if pod.key in loads:
                rings[pod.key] = grown(before, loads[pod.key], config.ring_size, situation.now_ns)
            elif before is not None:
                rings[pod.key] = before
    return LoadMemory(sampled_at_ns=situation.now_ns, pools=pools, pods=rings)


def _load(situation: Situation, pod: Pod) -> float | None:
    """One-minute load of a pod, by the probe or else as the advisor makes it from waits; what is known of it."""
    known = []
    for container in pod.containers:
        sample = situation.snapshot.cgroups.get(container.cgroup)
        if sample is None:
            continue
        load = sample.load.one if sample.load is not None else situation.loads.get(container.cgroup)
        if load is not None:
            known.append(load)
    return sum(known) if known else None


def _finding(name: str, size: int, pods: list[Pod], memory: LoadMemory, config: LoadConfig) -> Finding:
    ring = memory.pools.get(name)
    if ring is None:
        return missing(NAME, f"load of pool {name}", SCOPE, name)
    soft = part_above(ring, SOFT_LEVEL - 0.5, config.ring_size)
    hard = part_above(ring, HARD_LEVEL - 0.5, config.ring_size)
    bound = config.threshold_met_percentage
    met = Met.HARD if hard >= bound else Met.SOFT if soft >= bound else Met.NOT_MET
    observed = hard if met is Met.HARD else soft
    times = config.upper_bound_ratio if met is Met.HARD else config.lower_bound_ratio
    text = (
        f"The load of pool {name} was above {times:g} times its {size} CPUs in {observed:.0%} of the last {config.ring_size} "
        f"samples; the threshold is {bound:.0%}."
    )
    threshold = judged(
        NAME, met, SCOPE, subject=name, value=bound, observed=observed, condition=CONDITION, text=text,
        inputs={"pool": name, "cpus": size, "soft_part": soft, "hard_part": hard, "samples": len(ring.values)},
    )  # fmt: skip
    candidates: tuple[Candidate, ...] = ()
    if met is Met.HARD:
        known = [pod for pod in pods if pod.key in memory.pods]
        ranked = sorted(known, key=lambda pod: (-sum(memory.pods[pod.key].values), pod.key))
        candidates = tuple(Candidate(pod=pod, grace_s=config.grace_s) for pod in ranked)
    return Finding(threshold=threshold, candidates=candidates, kind="cpu", cool_down_s=config.cool_down_s, waits=True)
