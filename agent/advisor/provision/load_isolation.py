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
from api.units import NS_PER_S


class LoadIsolation(msgspec.Struct, frozen=True, kw_only=True):
    """Isolated pods with the reason of each, and the state for the next cycle."""

    pods: Mapping[str, Reason] = {}
    """By `namespace/name`."""
    loads: Mapping[str, IsolationLoad] = {}


def isolate_pods(inputs: ProvisionInputs, state: ProvisionState, config: IsolationConfig) -> LoadIsolation:
    """Select the pods to isolate, pool by pool within its bounds: pods that are isolated already first, then by uid."""
    if not config.enabled:
        return LoadIsolation()
    numa_nodes = inputs.snapshot.topology.numa_nodes
    pools: dict[str, list[Pod]] = {}
    for pod in inputs.snapshot.pods:
        if pod.key in inputs.pods_without_own_pool:
            continue
        if pod.qos is QoSLevel.SHARED and any(not _is_ramping(container, inputs) for container in pod.containers):
            pools.setdefault(share_pool_name(pod, numa_nodes), []).append(pod)
    chosen: dict[str, Reason] = {}
    loads: dict[str, IsolationLoad] = {}
    for pool in sorted(pools):
        base = pool.rpartition("-NUMA")[0] or pool
        if base not in config.disabled_pools:
            _isolate_pool(base, pools[pool], inputs, state, config, (chosen, loads))
    return LoadIsolation(pods=chosen, loads=loads)


def _isolate_pool(
    base: str,
    pods: Sequence[Pod],
    inputs: ProvisionInputs,
    state: ProvisionState,
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
    # Rounded because of binary fractions: 0.29 x 100 pods are 29 pods.
    max_cores = round(sum(sizes.values()) * config.max_resource_ratios.get(base, config.max_resource_ratio), 6)
    max_pods = min(len(pods) - 1, int(round(len(pods) * config.max_pod_ratios.get(base, config.max_pod_ratio), 6)))
    isolated: list[str] = []
    for pod in sorted(
        sorted(pods, key=lambda pod: pod.uid, reverse=True), key=lambda pod: pod.key not in state.isolated
    ):
        fits = sum(sizes[key] for key in isolated) + sizes[pod.key] <= max_cores and len(isolated) < max_pods
        for container in pod.containers:
            if _is_ramping(container, inputs):
                continue
            before = state.loads.get(container.cgroup, IsolationLoad())
            if not fits or pod.key in chosen:
                loads[container.cgroup] = before
                continue
            isolated_before = pod.key in state.isolated
            runnable = inputs.runnable.get(container.cgroup)
            loads[container.cgroup] = now = _update_load(before, container, runnable, inputs.now_ns, config)
            if _is_isolated(now, runnable, inputs.now_ns, config, isolated_before=isolated_before):
                chosen[pod.key] = _isolation_reason(pod, container, runnable, now, config)
                isolated.append(pod.key)


def _is_ramping(container: Container, inputs: ProvisionInputs) -> bool:
    demand = inputs.needs.get(container.cgroup)
    return demand is not None and demand.ramping


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
    now: IsolationLoad, runnable: float | None, now_ns: int, config: IsolationConfig, *, isolated_before: bool
) -> bool:
    """Without a measurement, a pod keeps its state."""
    if runnable is None:
        return isolated_before
    if now.calm_since_ns is None:
        return isolated_before or now.rounds >= config.lock_in_rounds
    return isolated_before and now_ns - now.calm_since_ns < config.lock_out_s * NS_PER_S


def _isolation_reason(
    pod: Pod, container: Container, runnable: float | None, now: IsolationLoad, config: IsolationConfig
) -> Reason:
    size = max_container_cores(container)
    threshold = min(size * config.load_ratio, size + config.load_cores)
    if runnable is None:
        rule, text = "isolation_unknown", f"{pod.key} stays isolated: its number of runnable tasks is not measured"
    elif now.calm_since_ns is None:
        rule = "isolated"
        text = f"{pod.key} has {runnable:.1f} runnable tasks, more than {threshold:g} for its {size:g} cores"
    else:
        rule = "isolation_lock_out"
        text = f"{pod.key} stays isolated until {config.lock_out_s:g} s after its load fell to {runnable:.1f} runnable tasks"
    return Reason(
        rule=rule,
        text=text,
        threshold=threshold,
        inputs={"runnable": runnable, "cores": size, "rounds": now.rounds, "container": container.cgroup},
    )


def fits_numa_nodes(needed: Mapping[int, float], cpus: Mapping[int, int], free: Collection[int]) -> bool:
    """Return whether share regions, isolated pods and dedicated pods fit on every NUMA node.

    `needed` is by the NUMA node that they are bound to; other keys run on the `free` nodes.
    """
    rest = sum(cores for numa, cores in needed.items() if numa not in cpus)
    return rest <= sum(cpus[numa] for numa in free) and all(
        cores <= cpus[numa] for numa, cores in needed.items() if numa in cpus
    )
