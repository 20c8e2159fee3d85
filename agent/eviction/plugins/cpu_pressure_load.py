"""Plugin cpu-pressure-load-plugin: the one-minute load of a pool exceeds its number of CPUs for minutes.
It is pure. Sampled every 30 s; above 1.0 times the size is soft, above 1.8 times is hard, in 80 % of the last ten
samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction import CpuLoadEvictionConfig
from agent.eviction.eviction_inputs import EvictionInputs, pool_by_pod
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
    rank_candidates,
)
from agent.eviction.sample_window import SampleWindow, append_pod_samples, append_sample, ratio_above, recent_windows
from api.eviction import ThresholdMet
from api.pod import Pod
from api.qos import QoSLevel
from api.units import NS_PER_S

NAME, DEDICATED = "cpu-pressure-load-plugin", "dedicated"
SCOPE = "cpu.load.1min.container"
CONDITION = "CPUPressure"
SOFT_LEVEL, HARD_LEVEL = 1.0, 2.0


class CpuLoadState(msgspec.Struct, frozen=True, kw_only=True):
    """The latest samples of pools and pods."""

    sampled_at_ns: int | None = None
    pools: Mapping[str, SampleWindow] = {}
    """Samples by pool: 1 for a load above the soft bound, 2 for one above the hard bound."""
    pods: Mapping[str, SampleWindow] = {}
    """Samples of the load by pod."""


def evaluate_cpu_load(
    inputs: EvictionInputs, state: CpuLoadState, config: CpuLoadEvictionConfig
) -> tuple[tuple[EvictionFinding, ...], CpuLoadState]:
    """Return one finding per pool, the worst first."""
    pools = {name: cpus for name, cpus in inputs.pools.items() if _is_monitored_pool(name, config)}
    if not pools:
        return (not_met_finding(NAME, "no_pools", "No pool of online pods is placed.", SCOPE),), CpuLoadState()
    homes = pool_by_pod(inputs)
    evaluated_pods = [pod for pod in inputs.running_pods if _is_evaluated(pod, config)]
    members = {name: [pod for pod in evaluated_pods if homes.get(pod.key) == name] for name in pools}
    since = state.sampled_at_ns
    if since is None or not 0 <= inputs.now_ns - since < config.sample_s * NS_PER_S:
        state = _add_samples(inputs, state, members, config)
    age_s = inputs.stale_s + config.sample_s
    state = msgspec.structs.replace(
        state,
        pools=recent_windows(state.pools, inputs.now_ns, age_s),
        pods=recent_windows(state.pods, inputs.now_ns, age_s),
    )
    findings = [_finding(name, len(pools[name]), members[name], state, config) for name in sorted(pools)]
    findings.sort(key=lambda each: (_urgency(each.threshold.met), -(each.threshold.observed or 0.0)))
    return tuple(findings), state


def _urgency(met: ThresholdMet) -> int:
    return (ThresholdMet.HARD, ThresholdMet.SOFT, ThresholdMet.NOT_MET).index(met)


def _is_monitored_pool(pool: str, config: CpuLoadEvictionConfig) -> bool:
    base = DEDICATED if pool.startswith(f"{DEDICATED}-") else pool.partition("-NUMA")[0]
    return base not in config.skip_pools and not pool.startswith("isolation")


def _is_evaluated(pod: Pod, config: CpuLoadEvictionConfig) -> bool:
    """Return whether the pod is a candidate: a dedicated pod without CPUs of its own runs in a pool, and is none."""
    return pod.qos is not QoSLevel.DEDICATED or DEDICATED not in config.skip_pools


def _add_samples(
    inputs: EvictionInputs, state: CpuLoadState, members: Mapping[str, list[Pod]], config: CpuLoadEvictionConfig
) -> CpuLoadState:
    """Return the state with one more sample of each pool and pod with a load, without pools and pods that are gone."""
    sizes = {name: len(inputs.pools[name]) for name in members}
    limit = inputs.shared_limit_cpus
    growing = limit is not None and sum(sizes.values()) < limit
    loads = {pod.key: load for pods in members.values() for pod in pods if (load := _pod_load(inputs, pod)) is not None}
    pools = {name: state.pools[name] for name in members if name in state.pools}
    for name, pods in members.items():
        loads_known = [loads[pod.key] for pod in pods if pod.key in loads]
        if loads_known or not pods:
            total, size = sum(loads_known), sizes[name]
            soft = size * config.lower_bound_ratio
            if limit is not None:
                soft = total if growing else 1.0
            hard = total if growing else size * config.upper_bound_ratio
            level = HARD_LEVEL if total > hard else SOFT_LEVEL if total > soft else 0.0
            pools[name] = append_sample(state.pools.get(name), level, config.ring_size, inputs.now_ns)
    sampled = [pod for pods in members.values() for pod in pods]
    windows = append_pod_samples(state.pods, sampled, loads, config.ring_size, inputs.now_ns)
    return CpuLoadState(sampled_at_ns=inputs.now_ns, pools=pools, pods=windows)


def _pod_load(inputs: EvictionInputs, pod: Pod) -> float | None:
    """Return the one-minute load of a pod, by the probe or else the advisor's estimate from run-queue latency."""
    loads_known = []
    for container in pod.containers:
        sample = inputs.snapshot.cgroups.get(container.cgroup)
        if sample is None:
            continue
        load = sample.load.load1 if sample.load is not None else inputs.loads.get(container.cgroup)
        if load is not None:
            loads_known.append(load)
    return sum(loads_known) if loads_known else None


def _finding(
    name: str, size: int, pods: list[Pod], state: CpuLoadState, config: CpuLoadEvictionConfig
) -> EvictionFinding:
    ring = state.pools.get(name)
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
        sampled = [pod for pod in pods if pod.key in state.pods]
        candidates = rank_candidates(sampled, lambda pod: -sum(state.pods[pod.key].values), config.grace_s)
    return EvictionFinding(
        threshold=threshold, candidates=candidates, kind="cpu", cool_down_s=config.cool_down_s, awaits_termination=True
    )
