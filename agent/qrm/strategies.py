"""Koordinator's CPU suppress: what reclaimed pods may use is what is left of a share of the node, as CPUs or as a quota. Pure.

    cores = capacity x threshold - use of other pods - max(use of the system, reserved)

Less is taken at once, more is given by a tenth of the node at a time. When the strategy is off there are no wishes, and
what it had changed is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from agent.config.qrm_knobs import SuppressConfig
from agent.qrm.notation import DEFAULT_PERIOD_US, UNLIMITED
from api.advice import Wish
from api.cpus import Cpu, Topology, format_cpu_list
from api.knobs import Knob, Verdict
from api.pods import Container
from api.qos import QoSLevel
from api.rates import Rates
from api.samples import Snapshot

MIN_CPUS = 2
MIN_QUOTA_US = 2000
MIN_CHANGE_RATIO = 0.01
"""Of the node: a quota that would change by less is left as it is."""


class SuppressMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What was given in the last round; nothing yet, or no limit, is None."""

    cpus: tuple[int, ...] | None = None
    cores: float | None = None


def suppress(
    snapshot: Snapshot,
    rates: Rates | None,
    config: SuppressConfig,
    memory: SuppressMemory,
    excluded: Sequence[int] = (),
) -> tuple[tuple[Wish, ...], SuppressMemory]:
    """Wishes for every reclaimed container. `excluded` are CPUs that nobody may share: reserved, interrupt, exclusive ones.

    Where a use is not known, what was given last stays and never grows; before anything was given, it is the minimum.
    """
    if config.policy == "off":
        return (), SuppressMemory()
    capacity = len(snapshot.topology.cpus)
    wanted, verdict = _cores(snapshot, rates, config)
    if wanted is None:
        wanted = 0.0 if memory.cores is None else memory.cores
    containers = [
        container
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        if container.cgroup in snapshot.cgroups
    ]
    if config.policy == "cpuset":
        count = _cpu_count(wanted, capacity, config, memory)
        cpus = pick(snapshot.topology, count, memory.cpus or (), excluded)
        value = format_cpu_list(cpus)
        # No CPU of its own is no cpuset: an empty one would mean all of them on version 2.
        wishes = tuple(_wish(container, Knob.CPUSET, value, verdict) for container in containers if cpus)
        return wishes, SuppressMemory(cpus=cpus, cores=float(count))
    cores = _quota_cores(wanted, capacity, config, memory)
    total = sum(_claim(container) for container in containers)
    wishes = tuple(
        _wish(container, Knob.QUOTA, _quota(cores * _claim(container) / total, capacity), verdict)
        for container in containers
    )
    return wishes, SuppressMemory(cores=cores)


def _cores(snapshot: Snapshot, rates: Rates | None, config: SuppressConfig) -> tuple[float | None, Verdict]:
    capacity = len(snapshot.topology.cpus)
    floor = capacity * config.min_percent / 100
    busy = rates.node.busy_cores if rates is not None else None
    pods, others = _used(snapshot, rates)
    if busy is None or pods is None or others is None:
        missing = "the node" if busy is None else "a pod"
        text = f"The use of {missing} is not known: reclaimed pods keep what they have and get no more."
        return None, Verdict(rule="suppress_unknown", text=text)
    system = max(busy - pods, 0.0)
    held = max(system, config.reserved_cores)
    cores = max(capacity * config.threshold_percent / 100 - others - held, floor)
    text = (
        f"Reclaimed pods may use {cores:.2f} CPUs: {config.threshold_percent:g} % of {capacity} less {others:.2f} of other "
        f"pods and {held:.2f} of the system."
    )
    inputs = {"capacity_cores": capacity, "other_pods_cores": others, "system_cores": system, "floor_cores": floor}
    return cores, Verdict(rule="suppress", text=text, threshold=config.threshold_percent / 100, inputs=inputs)


def _used(snapshot: Snapshot, rates: Rates | None) -> tuple[float | None, float | None]:
    """CPUs that all pods use, and those that are not reclaimed; None where one of them is not measured."""
    everybody = others = 0.0
    for pod in snapshot.pods:
        for container in pod.containers:
            if container.cgroup not in snapshot.cgroups:
                continue
            found = rates.cgroups.get(container.cgroup) if rates is not None else None
            if found is None or found.cpu_cores is None:
                return None, None
            everybody += found.cpu_cores
            others += 0.0 if pod.qos is QoSLevel.RECLAIMED else found.cpu_cores
    return everybody, others


def _cpu_count(wanted: float, capacity: int, config: SuppressConfig, memory: SuppressMemory) -> int:
    count = min(max(ceil(wanted), MIN_CPUS), capacity)
    if memory.cpus is None:
        return count
    return min(count, len(memory.cpus) + ceil(capacity * config.growth_ratio))


def _quota_cores(wanted: float, capacity: int, config: SuppressConfig, memory: SuppressMemory) -> float:
    cores = max(wanted, MIN_QUOTA_US / DEFAULT_PERIOD_US)
    if memory.cores is None:
        return cores
    if abs(cores - memory.cores) < capacity * MIN_CHANGE_RATIO:
        return memory.cores
    return min(cores, memory.cores + capacity * config.growth_ratio)


def pick(topology: Topology, count: int, held: Sequence[int], excluded: Sequence[int]) -> tuple[int, ...]:
    """So many CPUs, whole physical cores first, one NUMA node after the other in turn; those that are held come first.

    Fewer where there are fewer.
    """
    free = [cpu for cpu in topology.cpus if cpu.id not in set(excluded)]
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in free:
        cores.setdefault((cpu.numa, cpu.socket, cpu.core), []).append(cpu)
    kept = set(held)
    by_node: dict[int, list[list[Cpu]]] = {}
    # Of each node the cores that are held most; among equals whole ones, in order.
    for key in sorted(cores, key=lambda key: (-sum(cpu.id in kept for cpu in cores[key]), -len(cores[key]), key)):
        by_node.setdefault(key[0], []).append(cores[key])
    chosen: list[int] = []
    while len(chosen) < count and any(by_node.values()):
        for node in sorted(by_node, key=lambda node: (-_held(by_node[node], kept), node)):
            if by_node[node] and len(chosen) < count:
                core = by_node[node].pop(0)
                chosen += [cpu.id for cpu in sorted(core, key=lambda cpu: (cpu.id not in kept, cpu.id))]
    return tuple(sorted(chosen[:count]))


def _held(cores: list[list[Cpu]], kept: set[int]) -> int:
    return sum(cpu.id in kept for cpu in cores[0]) if cores else 0


def _quota(cores: float, capacity: int) -> str:
    if cores >= capacity:
        return UNLIMITED
    return f"{max(round(cores * DEFAULT_PERIOD_US), MIN_QUOTA_US)} {DEFAULT_PERIOD_US}"


def _claim(container: Container) -> float:
    return container.reclaimed_cpu_cores or container.cpu_request_cores or 1.0


def _wish(container: Container, knob: Knob, value: str, verdict: Verdict) -> Wish:
    return Wish(cgroup=container.cgroup, knob=knob, value=value, verdict=verdict)
