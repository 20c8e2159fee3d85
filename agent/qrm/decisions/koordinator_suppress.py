"""Koordinator's CPU suppress: limits reclaimed pods to the unused part of the node, by cpuset or quota. Pure.
    cores = capacity x threshold - usage of other pods - max(usage of the system, reserved)
A reduction is applied at once; growth is limited to a part of the node in each cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

import msgspec

from agent.config.qrm import SuppressConfig
from agent.qrm.knobs.knob_files import format_quota
from agent.qrm.knobs.notation import DEFAULT_PERIOD_US, UNLIMITED
from api.advice import KnobRequest
from api.cpu import Cpu, Topology, format_cpu_list
from api.knobs import Knob, Reason
from api.pod import Container, request_weight
from api.qos import QoSLevel
from api.rates import Rates
from api.snapshot import Snapshot, reclaimed_containers

MIN_CPUS = 2
MIN_QUOTA_US = 2000
"""Minimum of all reclaimed pods together, in the default period."""
MIN_CHANGE_RATIO = 0.01
"""A quota that would change by less than this part of the node stays unchanged."""


class SuppressState(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs and cores of the last cycle; None before the first one, or without a limit."""

    cpus: tuple[int, ...] | None = None
    cores: float | None = None


def suppress_reclaimed(
    snapshot: Snapshot,
    rates: Rates | None,
    config: SuppressConfig,
    state: SuppressState,
    excluded: Collection[int] = (),
) -> tuple[tuple[KnobRequest, ...], SuppressState]:
    """Return a request for every reclaimed container; `excluded` CPUs are reserved, for interrupts, or exclusive.
    While a usage is unknown, the last limit stays and never grows; before the first one it is the minimum."""
    if config.policy == "off":
        return (), SuppressState()
    capacity = len(snapshot.topology.cpus)
    target, reason = _allowed_cores(snapshot, rates, config)
    if target is None:
        target, reason = _hold_cores(state.cores, reason)
    containers = reclaimed_containers(snapshot)
    if config.policy == "cpuset":
        count = _cpu_count(target, capacity, config, state)
        reason = _growth_note(reason, count, target, config, None if state.cpus is None else len(state.cpus))
        # If others own all CPUs, the previous ones stay: without a request the original cpuset would be restored.
        cpus = select_spread_cpus(snapshot.topology, count, state.cpus or (), excluded) or state.cpus or ()
        value = format_cpu_list(cpus)
        # Without CPUs no cpuset is requested: on version 2 an empty one means all of the parent's CPUs.
        requests = tuple(_request(container, Knob.CPUSET, value, reason) for container in containers if cpus)
        return requests, SuppressState(cpus=cpus, cores=float(count))
    cores = _quota_cores(target, capacity, config, state)
    reason = _growth_note(reason, cores, target, config, state.cores)
    total = sum(request_weight(container) for container in containers)
    requests = tuple(
        _request(container, Knob.QUOTA, _quota_text(cores * request_weight(container) / total, capacity), reason)
        for container in containers
    )
    return requests, SuppressState(cores=cores)


def _allowed_cores(snapshot: Snapshot, rates: Rates | None, config: SuppressConfig) -> tuple[float | None, Reason]:
    capacity = len(snapshot.topology.cpus)
    floor = capacity * config.min_percent / 100
    busy = rates.node.busy_cores if rates is not None else None
    pods, others = _pod_usage_cores(snapshot, rates)
    if busy is None or pods is None or others is None:
        missing = "the node" if busy is None else "a pod"
        text = f"The CPU use of {missing} is not known"
        return None, Reason(rule="suppress_unknown", text=text)
    system = max(busy - pods, 0.0)
    system_share = max(system, config.reserved_cores)
    cores = max(capacity * config.threshold_percent / 100 - others - system_share, floor)
    text = (
        f"Reclaimed pods may use {cores:.2f} CPUs: {config.threshold_percent:g} % of {capacity} less {others:.2f} of other "
        f"pods and {system_share:.2f} of the system."
    )
    inputs = {"capacity_cores": capacity, "other_pods_cores": others, "system_cores": system, "floor_cores": floor}
    return cores, Reason(rule="suppress", text=text, threshold=config.threshold_percent / 100, inputs=inputs)


def _hold_cores(previous: float | None, reason: Reason) -> tuple[float, Reason]:
    """Return the cores while a usage is unknown: the previous ones, or the minimum."""
    if previous is None:
        return 0.0, msgspec.structs.replace(
            reason, text=f"{reason.text} yet: reclaimed pods get the minimum until it is."
        )
    return previous, msgspec.structs.replace(
        reason, text=f"{reason.text}: reclaimed pods keep their limit of {previous:.2f} CPUs."
    )


def _growth_note(reason: Reason, cores: float, target: float, config: SuppressConfig, previous: float | None) -> Reason:
    if cores >= target or cores == previous:
        return reason
    text = (
        f"{reason.text} They get {cores:.2f} now: growth is limited to {config.growth_ratio:.0%} of the node per cycle."
    )
    return msgspec.structs.replace(reason, text=text)


def _pod_usage_cores(snapshot: Snapshot, rates: Rates | None) -> tuple[float | None, float | None]:
    """Return the CPU usage of all pods and of pods that are not reclaimed; None if one is not measured."""
    total = others = 0.0
    for pod in snapshot.pods:
        for container in pod.containers:
            if container.cgroup not in snapshot.cgroups:
                continue
            usage = rates.cgroups.get(container.cgroup) if rates is not None else None
            if usage is None or usage.cpu_cores is None:
                return None, None
            total += usage.cpu_cores
            others += 0.0 if pod.qos is QoSLevel.RECLAIMED else usage.cpu_cores
    return total, others


def _cpu_count(target: float, capacity: int, config: SuppressConfig, state: SuppressState) -> int:
    count = min(max(ceil(target), MIN_CPUS), capacity)
    if state.cpus is None:
        return count
    return min(count, len(state.cpus) + ceil(capacity * config.growth_ratio))


def _quota_cores(target: float, capacity: int, config: SuppressConfig, state: SuppressState) -> float:
    cores = max(target, MIN_QUOTA_US / DEFAULT_PERIOD_US)
    if state.cores is None:
        return cores
    if abs(cores - state.cores) < capacity * MIN_CHANGE_RATIO:
        return state.cores
    return min(cores, state.cores + capacity * config.growth_ratio)


def select_spread_cpus(
    topology: Topology, count: int, previous: Collection[int], excluded: Collection[int]
) -> tuple[int, ...]:
    """Return at most `count` CPUs: previous ones first, then whole cores, taking from each NUMA node in turn."""
    free = [cpu for cpu in topology.cpus if cpu.id not in set(excluded)]
    selected = _round_robin([cpu for cpu in free if cpu.id in set(previous)], count, ())
    rest = [cpu for cpu in free if cpu not in selected]
    selected += _round_robin(rest, count - len(selected), selected)
    return tuple(sorted(cpu.id for cpu in selected))


def _round_robin(cpus: Sequence[Cpu], count: int, selected: Sequence[Cpu]) -> list[Cpu]:
    """Return at most `count` CPUs, core by core, from each NUMA node in turn; siblings of `selected` come first."""
    started_cores = {(cpu.numa, cpu.socket, cpu.core) for cpu in selected}
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in cpus:
        cores.setdefault((cpu.numa, cpu.socket, cpu.core), []).append(cpu)
    by_node: dict[int, list[list[Cpu]]] = {}
    for key in sorted(cores, key=lambda key: (key not in started_cores, -len(cores[key]), key)):
        by_node.setdefault(key[0], []).append(cores[key])
    result: list[Cpu] = []
    while len(result) < count and any(by_node.values()):
        for node in sorted(by_node):
            if by_node[node] and len(result) < count:
                result += by_node[node].pop(0)
    return result[: max(count, 0)]


def _quota_text(cores: float, capacity: int) -> str:
    return UNLIMITED if cores >= capacity else format_quota(cores)


def _request(container: Container, knob: Knob, value: str, reason: Reason) -> KnobRequest:
    return KnobRequest(cgroup=container.cgroup, knob=knob, value=value, reason=reason)
