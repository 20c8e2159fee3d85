"""Load isolation: selects shared pods that get CPUs of their own because of many runnable tasks.
An isolated pod gets as many CPUs as its limit. A bounded part of a pool's pods is isolated, never all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from agent.advisor.advisor_state import IsolationLoad, ProvisionInputs, ProvisionState
from agent.advisor.provision.regions import max_container_cores, share_pool_name
from agent.config.advisor import IsolationConfig
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel

NS_PER_S = 1_000_000_000


class LoadIsolation(msgspec.Struct, frozen=True, kw_only=True):
    """Pods to be kept apart and why, and what is to be remembered."""

    pods: Mapping[str, Reason] = {}
    """By `namespace/name`."""
    loads: Mapping[str, IsolationLoad] = {}


def isolate_pods(inputs: ProvisionInputs, memory: ProvisionState, config: IsolationConfig) -> LoadIsolation:
    """Go through the pods of every pool as long as its bounds allow one more: those that are apart first, then by uid."""
    if not config.enabled:
        return LoadIsolation()
    numa_nodes = inputs.snapshot.topology.numa_nodes
    pools: dict[str, list[Pod]] = {}
    for pod in inputs.snapshot.pods:
        if pod.key in inputs.together:
            continue
        if pod.qos is QoSLevel.SHARED and any(not _is_ramping(container, inputs) for container in pod.containers):
            pools.setdefault(share_pool_name(pod, numa_nodes), []).append(pod)
    chosen: dict[str, Reason] = {}
    loads: dict[str, IsolationLoad] = {}
    for pool in sorted(pools):
        base = pool.rpartition("-NUMA")[0] or pool
        if base not in config.disabled_pools:
            _isolate_pool(base, pools[pool], inputs, memory, config, (chosen, loads))
    return LoadIsolation(pods=chosen, loads=loads)


def _isolate_pool(
    base: str,
    pods: Sequence[Pod],
    inputs: ProvisionInputs,
    memory: ProvisionState,
    config: IsolationConfig,
    result: tuple[dict[str, Reason], dict[str, IsolationLoad]],
) -> None:
    chosen, loads = result
    sizes = {
        pod.key: sum(
            max_container_cores(container) for container in pod.containers if not _is_ramping(container, inputs)
        )
        for pod in pods
    }
    # Rounded: 0.29 x 100 pods are 29 of them.
    most = round(sum(sizes.values()) * config.max_resource_ratios.get(base, config.max_resource_ratio), 6)
    most_pods = min(len(pods) - 1, int(round(len(pods) * config.max_pod_ratios.get(base, config.max_pod_ratio), 6)))
    apart: list[str] = []
    for pod in sorted(sorted(pods, key=_pod_uid, reverse=True), key=lambda pod: pod.key not in memory.isolated):
        fits = sum(sizes[key] for key in apart) + sizes[pod.key] <= most and len(apart) < most_pods
        for container in pod.containers:
            if _is_ramping(container, inputs):
                continue
            before = memory.loads.get(container.cgroup, IsolationLoad())
            if not fits or pod.key in chosen:
                loads[container.cgroup] = before
                continue
            was = pod.key in memory.isolated
            runnable = inputs.runnable.get(container.cgroup)
            loads[container.cgroup] = now = _update_load(before, container, runnable, inputs.now_ns, config)
            if _is_isolated(now, runnable, inputs.now_ns, config, was=was):
                chosen[pod.key] = _isolation_reason(pod, container, runnable, now, config)
                apart.append(pod.key)


def _pod_uid(pod: Pod) -> str:
    return pod.uid


def _is_ramping(container: Container, inputs: ProvisionInputs) -> bool:
    known = inputs.needs.get(container.cgroup)
    return known is not None and known.ramping


def _update_load(
    before: IsolationLoad, container: Container, runnable: float | None, now_ns: int, config: IsolationConfig
) -> IsolationLoad:
    if runnable is None:
        return before
    size = max_container_cores(container)
    if runnable > size * config.load_ratio or runnable > size + config.load_cores:
        return IsolationLoad(rounds=min(before.rounds + 1, config.lock_in_rounds))
    return IsolationLoad(calm_since_ns=now_ns if before.calm_since_ns is None else before.calm_since_ns)


def _is_isolated(
    now: IsolationLoad, runnable: float | None, now_ns: int, config: IsolationConfig, *, was: bool
) -> bool:
    """Without a measurement a pod stays what it is."""
    if runnable is None:
        return was
    if now.calm_since_ns is None:
        return was or now.rounds >= config.lock_in_rounds
    return was and now_ns - now.calm_since_ns < config.lock_out_s * NS_PER_S


def _isolation_reason(
    pod: Pod, container: Container, runnable: float | None, now: IsolationLoad, config: IsolationConfig
) -> Reason:
    size = max_container_cores(container)
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
    return Reason(
        rule=rule,
        text=text,
        threshold=threshold,
        inputs={"runnable": runnable, "cores": size, "rounds": now.rounds, "container": container.cgroup},
    )


def fits_numa_nodes(needed: Mapping[int, float], cpus: Mapping[int, int], free: Collection[int]) -> bool:
    """Whether what share regions require, isolated pods may use and dedicated pods asked for fits, NUMA node by NUMA node.

    `needed` is by the NUMA node that they are bound to; what is under another number runs on the `free` nodes.
    """
    rest = sum(cores for numa, cores in needed.items() if numa not in cpus)
    return rest <= sum(cpus[numa] for numa in free) and all(
        cores <= cpus[numa] for numa, cores in needed.items() if numa in cpus
    )
