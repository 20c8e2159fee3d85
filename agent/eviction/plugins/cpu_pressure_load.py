"""Plugin cpu-pressure-load-plugin: the one-minute load of a pool exceeds its number of CPUs for minutes.
It is pure. Sampled every 30 s; above 1.0 times the size is soft, above 1.8 times is hard, in 80 % of the last ten
samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction import CpuLoadEvictionConfig
from agent.eviction.eviction_inputs import NS_PER_S, EvictionInputs, pool_by_pod
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
)
from agent.eviction.sample_window import SampleWindow, append_sample, ratio_above, recent_windows
from api.eviction import ThresholdMet
from api.pod import Pod
from api.qos import QoSLevel

NAME, DEDICATED = "cpu-pressure-load-plugin", "dedicated"
SCOPE = "cpu.load.1min.container"
CONDITION = "CPUPressure"
SOFT_LEVEL, HARD_LEVEL = 1.0, 2.0


class CpuLoadState(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples."""

    sampled_at_ns: int | None = None
    pools: Mapping[str, SampleWindow] = {}
    """By pool: 1 where the load was above the soft bound, 2 above the hard one."""
    pods: Mapping[str, SampleWindow] = {}
    """Load by pod."""


def evaluate_cpu_load(
    situation: EvictionInputs, memory: CpuLoadState, config: CpuLoadEvictionConfig
) -> tuple[tuple[EvictionFinding, ...], CpuLoadState]:
    """One finding for each pool, the worst first."""
    pools = {name: cpus for name, cpus in situation.pools.items() if _is_monitored_pool(name, config)}
    if not pools:
        return (not_met_finding(NAME, "no_pools", "No pool of online pods is placed.", SCOPE),), CpuLoadState()
    homes = pool_by_pod(situation)
    judged_pods = [pod for pod in situation.running_pods if _is_evaluated(pod, config)]
    members = {name: [pod for pod in judged_pods if homes.get(pod.key) == name] for name in pools}
    since = memory.sampled_at_ns
    if since is None or not 0 <= situation.now_ns - since < config.sample_s * NS_PER_S:
        memory = _add_samples(situation, memory, members, config)
    age_s = situation.stale_s + config.sample_s
    memory = msgspec.structs.replace(
        memory,
        pools=recent_windows(memory.pools, situation.now_ns, age_s),
        pods=recent_windows(memory.pods, situation.now_ns, age_s),
    )
    findings = [_finding(name, len(pools[name]), members[name], memory, config) for name in sorted(pools)]
    findings.sort(key=lambda each: (_urgency(each.threshold.met), -(each.threshold.observed or 0.0)))
    return tuple(findings), memory


def _urgency(met: ThresholdMet) -> int:
    return (ThresholdMet.HARD, ThresholdMet.SOFT, ThresholdMet.NOT_MET).index(met)


def _is_monitored_pool(pool: str, config: CpuLoadEvictionConfig) -> bool:
    base = DEDICATED if pool.startswith(f"{DEDICATED}-") else pool.partition("-NUMA")[0]
    return base not in config.skip_pools and not pool.startswith("isolation")


def _is_evaluated(pod: Pod, config: CpuLoadEvictionConfig) -> bool:
    """A dedicated pod that has no CPUs of its own is on those of a pool, and still none of those that this is about."""
    return pod.qos is not QoSLevel.DEDICATED or DEDICATED not in config.skip_pools


def _add_samples(
    situation: EvictionInputs, memory: CpuLoadState, members: Mapping[str, list[Pod]], config: CpuLoadEvictionConfig
) -> CpuLoadState:
    """One sample more of each pool and pod whose load is known; rings of others go as they are, those of the gone go."""
    sizes = {name: len(situation.pools[name]) for name in members}
    limit = situation.shared_limit_cpus
    growing = limit is not None and sum(sizes.values()) < limit
    loads = {
        pod.key: load for pods in members.values() for pod in pods if (load := _pod_load(situation, pod)) is not None
    }
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
            pools[name] = append_sample(memory.pools.get(name), level, config.ring_size, situation.now_ns)
    rings = {}
    for pods in members.values():
        for pod in pods:
            before = memory.pods.get(pod.key)
            if pod.key in loads:
                rings[pod.key] = append_sample(before, loads[pod.key], config.ring_size, situation.now_ns)
            elif before is not None:
                rings[pod.key] = before
    return CpuLoadState(sampled_at_ns=situation.now_ns, pools=pools, pods=rings)


def _pod_load(situation: EvictionInputs, pod: Pod) -> float | None:
    """One-minute load of a pod, by the probe or else as the advisor makes it from waits; what is known of it."""
    known = []
    for container in pod.containers:
        sample = situation.snapshot.cgroups.get(container.cgroup)
        if sample is None:
            continue
        load = sample.load.load1 if sample.load is not None else situation.loads.get(container.cgroup)
        if load is not None:
            known.append(load)
    return sum(known) if known else None


def _finding(
    name: str, size: int, pods: list[Pod], memory: CpuLoadState, config: CpuLoadEvictionConfig
) -> EvictionFinding:
    ring = memory.pools.get(name)
    if ring is None:
        return missing_input_finding(NAME, f"load of pool {name}", SCOPE, name)
    soft = ratio_above(ring, SOFT_LEVEL - 0.5, config.ring_size)
    hard = ratio_above(ring, HARD_LEVEL - 0.5, config.ring_size)
    bound = config.threshold_met_percentage
    met = ThresholdMet.HARD if hard >= bound else ThresholdMet.SOFT if soft >= bound else ThresholdMet.NOT_MET
    observed = hard if met is ThresholdMet.HARD else soft
    times = config.upper_bound_ratio if met is ThresholdMet.HARD else config.lower_bound_ratio
    text = (
        f"The load of pool {name} was above {times:g} times its {size} CPUs in {observed:.0%} of the last {config.ring_size} "
        f"samples; the threshold is {bound:.0%}."
    )
    threshold = make_threshold(
        NAME, met, SCOPE, subject=name, value=bound, observed=observed, condition=CONDITION, text=text,
        inputs={"pool": name, "cpus": size, "soft_part": soft, "hard_part": hard, "samples": len(ring.values)},
    )  # fmt: skip
    candidates: tuple[EvictionCandidate, ...] = ()
    if met is ThresholdMet.HARD:
        known = [pod for pod in pods if pod.key in memory.pods]
        ranked = sorted(known, key=lambda pod: (-sum(memory.pods[pod.key].values), pod.key))
        candidates = tuple(EvictionCandidate(pod=pod, grace_s=config.grace_s) for pod in ranked)
    return EvictionFinding(
        threshold=threshold, candidates=candidates, kind="cpu", cool_down_s=config.cool_down_s, waits=True
    )
