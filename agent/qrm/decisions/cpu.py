"""Turns the result of a policy into decisions: CPU first, then knob requests that do not conflict with it. Pure.
Online pods are changed only where cpusets separate the pools. Reclaimed pods share the reclaimable CPU, or the quota of
their NUMA nodes, in proportion to their requests. Controls that the kubelet writes itself (static CPU manager, memory
manager) are left out. cpu_priority.py selects the cgroups that get the lowest priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from agent.advisor.policy_result import PolicyResult
from agent.qrm.cpuset.allowed_cpus import restrict_to_allowed
from agent.qrm.cpuset.state import RECLAIM, CpusetAllocation
from agent.qrm.decisions.container_limits import enforce_container_limits
from agent.qrm.decisions.cpu_priority import (
    has_only_reclaimed_pods,
    priority_cgroups,
    slice_requests,
    yield_request,
)
from agent.qrm.decisions.knob_requests import resolve_knob_requests
from agent.qrm.knobs.knob_files import QUOTA_PERIODS_US, format_quota
from agent.sensors.cgroup.pod_cgroup_paths import is_qos_cgroup
from api.advice import NOT_NUMA_BOUND, ControlKnob, KnobRequest, PoolSize
from api.cpu import format_cpu_list
from api.decision import Advice, Decision
from api.knobs import Knob, Reason
from api.pod import Container, Pod, request_weight
from api.qos import QoSLevel
from api.snapshot import KubeletManagers, Snapshot, reclaimed_containers


def numa_quota_cores(sizes: Sequence[PoolSize]) -> dict[int, float]:
    """Return by NUMA node the cores that reclaimed pods may use together, for nodes with a quota."""
    return {
        size.numa: size.quota_cores
        for size in sizes
        if size.pool == RECLAIM and size.numa != NOT_NUMA_BOUND and size.quota_cores is not None
    }


def split_numa_quotas(
    limits: Mapping[int, float], weights: Mapping[str, float], cpus: Mapping[str, Counter[int]]
) -> dict[str, float]:
    """Return the cores of each container on a limited NUMA node; all containers of a node together get its limit.
    The weight of a container on several nodes is split in proportion to their limits. On a node without a limit it
    may use its CPUs there. `weights` and `cpus` (CPU count by NUMA node) are by container."""
    shares = {}
    for container, weight in weights.items():
        limit_by_node = {numa: limits[numa] for numa in cpus[container] if numa in limits}
        sum_of_limits = sum(limit_by_node.values())
        if limit_by_node:
            shares[container] = {
                numa: weight * (limit / sum_of_limits if sum_of_limits else 1.0)
                for numa, limit in limit_by_node.items()
            }
    total = {numa: sum(shares_of.get(numa, 0.0) for shares_of in shares.values()) for numa in limits}
    return {
        container: sum(count for numa, count in cpus[container].items() if numa not in limits)
        + sum(limits[numa] * share / total[numa] for numa, share in container_shares.items() if total[numa] > 0)
        for container, container_shares in shares.items()
    }


def cpu_requests(
    advice: Advice, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]], placement: CpusetAllocation | None = None
) -> tuple[KnobRequest, ...]:
    """Return a request for every knob of a managed container that the advice covers, whatever its current value is.
    `knobs` are those that the kernel offers for each cgroup. A cpuset is requested only for containers that may not
    use the whole node."""
    quotas = _node_wide_quotas(advice, snapshot) if advice.idle else _numa_quotas(advice, snapshot, placement)
    reasons = {
        cgroup: region_advice.reason
        for region_advice in advice.cpu.regions
        for cgroup in region_advice.region.containers
    }
    cpus, nodes = tuple(sorted(snapshot.topology.ids)), tuple(sorted(snapshot.topology.numa_nodes))
    requests = list(_priority_requests(snapshot, knobs)) if advice.idle else []
    for pod in snapshot.pods:
        is_reclaimed = pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers:
            cgroup = container.cgroup
            values: dict[Knob, tuple[str, Reason]] = {}
            if is_reclaimed and (quota := quotas.get(cgroup)) is not None:
                values = {Knob.QUOTA: quota}
            if placement is not None:
                values |= _cpuset_values(placement, cgroup, cpus, nodes, reasons.get(cgroup, advice.reason))
            requests.extend(
                KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=reason)
                for knob, (value, reason) in values.items()
            )
    return tuple(requests)


def _cpuset_values(
    placement: CpusetAllocation, cgroup: str, all_cpus: tuple[int, ...], all_nodes: tuple[int, ...], pool_reason: Reason
) -> dict[Knob, tuple[str, Reason]]:
    """Return CPUs and NUMA nodes of a container that may not use all of them, with the reasons of its pool and CPUs."""
    cpus, mems = placement.cpus.get(cgroup, ()), placement.mems.get(cgroup, ())
    narrow_cpus, narrow_mems = cpus and cpus != all_cpus, mems and mems != all_nodes
    if not narrow_cpus and not narrow_mems:
        return {}
    cpu_reason = placement.reasons.get(cgroup, pool_reason)
    reason = msgspec.structs.replace(
        pool_reason, text=f"{pool_reason.text} {cpu_reason.text}", inputs={**pool_reason.inputs, **cpu_reason.inputs}
    )
    values = {Knob.CPUSET: (_cpu_list_text(cpus), reason)} if narrow_cpus else {}
    return values | ({Knob.MEMS: (_cpu_list_text(mems), reason)} if narrow_mems else {})


@lru_cache(maxsize=512)
def _cpu_list_text(numbers: tuple[int, ...]) -> str:
    # All containers of a pool share one list.
    return format_cpu_list(numbers)


def _share_reason(advice: Advice, container: Container, weight: float, total: float) -> Reason:
    """Return the reason with the container's share of the reclaimable CPU, so that a reader can compute it again."""
    reason, claim = advice.reason, advice.claims.get(container.cgroup)
    share = advice.reclaimable_cores * weight / total
    text = f"{reason.text} This container has {weight:.4g} of {total:.4g} of the reclaimed pods' weight: {share:.2f} cores."
    inputs = {**reason.inputs, "weight": round(weight, 6), "weight_total": round(total, 6)}
    if claim is not None:
        text += f" It made online pods wait: its weight is {claim:.0%} of its request."
        inputs["claim"] = round(claim, 3)
    text += _own_limit_text(container, share)
    return msgspec.structs.replace(reason, text=text, inputs=inputs)


def _unlimited_reason(advice: Advice, container: Container) -> Reason:
    """Return the reason where reclaimed pods may use the whole node, with the container's own limit."""
    own = _own_limit_text(container, advice.reclaimable_cores)
    return msgspec.structs.replace(advice.reason, text=f"{advice.reason.text}{own}") if own else advice.reason


def _priority_requests(snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]) -> Iterator[KnobRequest]:
    """Yield the requests for the lowest priority of reclaimed pods."""
    for cgroup, pod in priority_cgroups(snapshot.pods, snapshot.cgroups).items():
        # The knobs of a pod that the runtime is creating are not known yet: they are those of its container.
        own = [cgroup, *(container.cgroup for container in pod.containers)]
        available = next((knobs[path] for path in own if path in knobs), ())
        if (request := yield_request(cgroup, available)) is not None:
            yield request


def _node_wide_quotas(advice: Advice, snapshot: Snapshot) -> Mapping[str, tuple[str, Reason]]:
    """Return the quota of each reclaimed container: the reclaimable CPU by weight, at most its own limit. Containers
    that made online pods wait have a smaller weight. A small share gets a longer period instead of the kernel's
    minimum quota in the default period, so that the quotas add up to the reclaimable CPU; its burst is then longer
    too."""
    containers = reclaimed_containers(snapshot)
    unlimited = advice.reclaimable_cores >= len(snapshot.topology.cpus)
    weights = {c.cgroup: request_weight(c) * advice.claims.get(c.cgroup, 1.0) for c in containers}
    total = sum(weights.values())
    result = {}
    for container in containers:
        cgroup = container.cgroup
        cores = _limited_cores(container, None if unlimited else advice.reclaimable_cores * weights[cgroup] / total)
        value = f"max {QUOTA_PERIODS_US[0]}" if cores is None else format_quota(cores)
        result[cgroup] = (
            value,
            _unlimited_reason(advice, container)
            if unlimited
            else _share_reason(advice, container, weights[cgroup], total),
        )
    return result


def _numa_quotas(
    advice: Advice, snapshot: Snapshot, placement: CpusetAllocation | None
) -> Mapping[str, tuple[str, Reason]]:
    """Return the quotas where cpusets limit reclaimed pods and only some NUMA nodes have a quota."""
    limits = numa_quota_cores(advice.cpu.sizes)
    if not limits or placement is None:
        return {}
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    count_cache: dict[tuple[int, ...], Counter[int]] = {}
    containers, cpus = reclaimed_containers(snapshot), {}
    for container in containers:
        container_cpus = placement.cpus.get(container.cgroup, ())
        if container_cpus not in count_cache:
            count_cache[container_cpus] = Counter(numa_of[cpu] for cpu in container_cpus if cpu in numa_of)
        cpus[container.cgroup] = count_cache[container_cpus]
    cores_by_container = split_numa_quotas(
        limits, {container.cgroup: request_weight(container) for container in containers}, cpus
    )
    result = {}
    for container in containers:
        cores = _limited_cores(container, cores_by_container.get(container.cgroup))
        if cores is not None and container.cgroup in cores_by_container:
            nodes = [numa for numa in sorted(cpus[container.cgroup]) if numa in limits]
            result[container.cgroup] = (
                format_quota(cores),
                _numa_quota_reason(advice, limits, nodes, container, cores_by_container[container.cgroup]),
            )
    return result


def _numa_quota_reason(
    advice: Advice, limits: Mapping[int, float], nodes: list[int], container: Container, share: float
) -> Reason:
    listed = " and ".join(f"{limits[numa]:.2f} cores of NUMA node {numa}" for numa in nodes)
    region_texts = [
        region_advice.reason.text
        for region_advice in advice.cpu.regions
        if ControlKnob.RECLAIM_QUOTA in region_advice.controls and set(nodes) & set(region_advice.region.numa_nodes)
    ]
    text = f"Reclaimed pods may use {listed} together, and this container {share:.2f} by its weight."
    text += _own_limit_text(container, share)
    inputs = {f"quota_numa{numa}_cores": round(limits[numa], 3) for numa in nodes}
    return Reason(
        rule="reclaim_quota",
        text=" ".join((text, *region_texts)),
        threshold=sum(limits[numa] for numa in nodes),
        inputs=inputs,
    )


def _own_limit_text(container: Container, share: float) -> str:
    limit = container.cpu_limit_cores
    return f" Its own limit of {limit:g} cores is lower." if limit is not None and limit < share else ""


def _limited_cores(container: Container, cores: float | None) -> float | None:
    limit = container.cpu_limit_cores
    if limit is None or cores is None:
        return limit if cores is None else cores
    return min(cores, limit)


def managed_cgroups(pods: tuple[Pod, ...], cgroups: Collection[str] = ()) -> frozenset[str]:
    """Return the cgroups that the agent may write to: those of listed containers and of reclaimed pods. Among `cgroups`
    those of pods without a running container are looked for."""
    containers = (container.cgroup for pod in pods for container in pod.containers)
    return frozenset(containers) | priority_cgroups(pods, cgroups).keys()


def compose_decisions(
    result: PolicyResult, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]
) -> tuple[Decision, ...]:
    """Return one decision per (cgroup, knob); `knobs` are those that the kernel offers for each cgroup. The CPU advice
    has precedence over other requests for the same knob."""
    managers, advice, placement = snapshot.node.kubelet, result.advice, result.placement
    if managers is not None and managers.manages_cpusets and advice is not None and not advice.idle:
        # The kubelet owns the cpusets, so priority and quota must separate what the pools would have separated.
        advice, placement = msgspec.structs.replace(advice, idle=True), None
    requests: tuple[KnobRequest, ...] = ()
    if advice is not None:
        requests = cpu_requests(advice, restrict_to_allowed(snapshot, result.allowed_cpus), knobs, placement)
        requests += _idle_ancestor_requests(result, snapshot, knobs) if advice.idle else ()
    requests += result.memory.knob_requests if result.memory is not None else ()
    limited = enforce_container_limits((*requests, *result.knob_requests.requests), snapshot)
    decisions = resolve_knob_requests(limited, snapshot, knobs, result.extra_cgroups)
    if advice is not None and advice.idle and result.short_slices:
        decisions += resolve_knob_requests(slice_requests(snapshot, decisions), snapshot, knobs)
    kubelet_knobs = _knobs_of_kubelet(managers)
    return tuple(decision for decision in decisions if decision.knob not in kubelet_knobs)


def _idle_ancestor_requests(
    result: PolicyResult, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]
) -> tuple[KnobRequest, ...]:
    """Return the requests for cgroups above reclaimed pods: their own parent, and QoS classes that may be idle. The kubelet
    already gives the class of BestEffort pods the minimum weight."""
    available = frozenset[Knob]().union(*knobs.values())
    classes = [path for path, obstacle in sorted(result.idle_class_obstacles.items()) if obstacle is None]
    roots = [
        root for root in result.reclaim_roots if not is_qos_cgroup(root) and has_only_reclaimed_pods(snapshot, root)
    ]
    requests = (yield_request(path, available) for path in (*roots, *(classes if Knob.IDLE in available else ())))
    return tuple(request for request in requests if request is not None)


def _knobs_of_kubelet(managers: KubeletManagers | None) -> frozenset[Knob]:
    """Return the knobs that the kubelet's CPU and memory managers rewrite periodically."""
    if managers is None or not (managers.manages_cpusets or managers.mems):
        return frozenset()
    return frozenset({Knob.CPUSET, Knob.MEMS} if managers.manages_cpusets else {Knob.MEMS})
