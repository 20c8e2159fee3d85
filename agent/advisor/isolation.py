"""Which shared pods are kept apart because they have far more tasks to run than CPU asked for: Katalyst's load isolation.

One that is apart has CPUs of its own, as many as its limit, so that its queue is not everybody's. Few may be: a part of
what the pool's pods may use, and never all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from agent.advisor.provision.situation import LoadMemory, ProvisionMemory, Situation
from agent.advisor.regions import most_cores, share_pool
from agent.config.provision import IsolationConfig
from api.knobs import Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel

NS_PER_S = 1_000_000_000


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """Pods to be kept apart and why, and what is to be remembered."""

    pods: Mapping[str, Verdict] = {}
    """By `namespace/name`."""
    loads: Mapping[str, LoadMemory] = {}


def isolate(situation: Situation, memory: ProvisionMemory, config: IsolationConfig) -> Isolation:
    """Go through the pods of every pool as long as its bounds allow one more: those that are apart first, then by uid."""
    if not config.enabled:
        return Isolation()
    numa_nodes = situation.snapshot.topology.numa_nodes
    pools: dict[str, list[Pod]] = {}
    for pod in situation.snapshot.pods:
        if pod.key in situation.together:
            continue
        if pod.qos is QoSLevel.SHARED and any(not _ramping(container, situation) for container in pod.containers):
            pools.setdefault(share_pool(pod, numa_nodes), []).append(pod)
    chosen: dict[str, Verdict] = {}
    loads: dict[str, LoadMemory] = {}
    for pool in sorted(pools):
        base = pool.rpartition("-NUMA")[0] or pool
        if base not in config.disabled_pools:
            _isolate_in(base, pools[pool], situation, memory, config, (chosen, loads))
    return Isolation(pods=chosen, loads=loads)


def _isolate_in(
    base: str,
    pods: Sequence[Pod],
    situation: Situation,
    memory: ProvisionMemory,
    config: IsolationConfig,
    result: tuple[dict[str, Verdict], dict[str, LoadMemory]],
) -> None:
    chosen, loads = result
    sizes = {
        pod.key: sum(most_cores(container) for container in pod.containers if not _ramping(container, situation))
        for pod in pods
    }
    # Rounded: 0.29 x 100 pods are 29 of them.
    most = round(sum(sizes.values()) * config.max_resource_ratios.get(base, config.max_resource_ratio), 6)
    most_pods = min(len(pods) - 1, int(round(len(pods) * config.max_pod_ratios.get(base, config.max_pod_ratio), 6)))
    apart: list[str] = []
    for pod in sorted(sorted(pods, key=_uid, reverse=True), key=lambda pod: pod.key not in memory.isolated):
        fits = sum(sizes[key] for key in apart) + sizes[pod.key] <= most and len(apart) < most_pods
        for container in pod.containers:
            if _ramping(container, situation):
                continue
            before = memory.loads.get(container.cgroup, LoadMemory())
            if not fits or pod.key in chosen:
                loads[container.cgroup] = before
                continue
            was = pod.key in memory.isolated
            runnable = situation.runnable.get(container.cgroup)
            loads[container.cgroup] = now = _watch(before, container, runnable, situation.now_ns, config)
            if _apart(now, runnable, situation.now_ns, config, was=was):
                chosen[pod.key] = _verdict(pod, container, runnable, now, config)
                apart.append(pod.key)


def _uid(pod: Pod) -> str:
    return pod.uid


def _ramping(container: Container, situation: Situation) -> bool:
    known = situation.needs.get(container.cgroup)
    return known is not None and known.ramping


def _watch(
    before: LoadMemory, container: Container, runnable: float | None, now_ns: int, config: IsolationConfig
) -> LoadMemory:
    if runnable is None:
        return before
    size = most_cores(container)
    if runnable > size * config.load_ratio or runnable > size + config.load_cores:
        return LoadMemory(rounds=min(before.rounds + 1, config.lock_in_rounds))
    return LoadMemory(calm_since_ns=now_ns if before.calm_since_ns is None else before.calm_since_ns)


def _apart(now: LoadMemory, runnable: float | None, now_ns: int, config: IsolationConfig, *, was: bool) -> bool:
    """Without a measurement a pod stays what it is."""
    if runnable is None:
        return was
    if now.calm_since_ns is None:
        return was or now.rounds >= config.lock_in_rounds
    return was and now_ns - now.calm_since_ns < config.lock_out_s * NS_PER_S


def _verdict(
    pod: Pod, container: Container, runnable: float | None, now: LoadMemory, config: IsolationConfig
) -> Verdict:
    size = most_cores(container)
    threshold = min(size * config.load_ratio, size + config.load_cores)
    if runnable is None:
        rule, text = "isolation_unknown", f"{pod.key} stays apart: how many tasks it has to run is not known"
    elif now.calm_since_ns is None:
        rule = "isolated"
        text = (
            f"{pod.key} has {runnable:.1f} tasks to run, more than {threshold:g} for the {size:g} cores that it may use"
        )
    else:
        rule = "isolation_lock_out"
        text = f"{pod.key} stays apart until {config.lock_out_s:g} s after its load fell to {runnable:.1f} tasks"
    return Verdict(
        rule=rule,
        text=text,
        threshold=threshold,
        inputs={"runnable": runnable, "cores": size, "rounds": now.rounds, "container": container.cgroup},
    )


def fits(needed: Mapping[int, float], cpus: Mapping[int, int], free: Collection[int]) -> bool:
    """Whether what share regions require, isolated pods may use and dedicated pods asked for fits, NUMA node by NUMA node.

    `needed` is by the NUMA node that they are bound to; what is under another number runs on the `free` nodes.
    """
    rest = sum(cores for numa, cores in needed.items() if numa not in cpus)
    return rest <= sum(cpus[numa] for numa in free) and all(
        cores <= cpus[numa] for numa, cores in needed.items() if numa in cpus
    )
