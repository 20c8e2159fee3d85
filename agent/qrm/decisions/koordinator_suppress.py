"""Koordinator's CPU suppress: limits reclaimed pods to the unused part of the node, by cpuset or quota. Pure.
    cores = capacity x threshold - usage of other pods - max(usage of the system, reserved)
A reduction is applied at once; growth is limited to a part of the node in each cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

import msgspec

from agent.config.qrm import SuppressConfig
from agent.qrm.decisions.cpu import format_quota, reclaimed_containers, request_weight
from agent.qrm.knobs.notation import DEFAULT_PERIOD_US, UNLIMITED
from api.advice import KnobRequest
from api.cpu import Cpu, Topology, format_cpu_list
from api.knobs import Knob, Reason
from api.pod import Container
from api.qos import QoSLevel
from api.rates import Rates
from api.snapshot import Snapshot

MIN_CPUS = 2
MIN_QUOTA_US = 2000
"""Of all reclaimed pods together, in the usual period."""
MIN_CHANGE_RATIO = 0.01
"""Of the node: a quota that would change by less is left as it is."""


class SuppressState(msgspec.Struct, frozen=True, kw_only=True):
    """What was given in the last round; nothing yet, or no limit, is None."""

    cpus: tuple[int, ...] | None = None
    cores: float | None = None


def suppress_reclaimed(
    snapshot: Snapshot,
    rates: Rates | None,
    config: SuppressConfig,
    memory: SuppressState,
    excluded: Collection[int] = (),
) -> tuple[tuple[KnobRequest, ...], SuppressState]:
    """Wishes for every reclaimed container. `excluded` are CPUs that nobody may share: reserved, interrupt, exclusive ones.

    Where a use is not known, what was given last stays and never grows; before anything was given, it is the minimum.
    """
    if config.policy == "off":
        return (), SuppressState()
    capacity = len(snapshot.topology.cpus)
    wanted, verdict = _allowed_cores(snapshot, rates, config)
    if wanted is None:
        wanted, verdict = _hold_cores(memory.cores, verdict)
    containers = reclaimed_containers(snapshot)
    if config.policy == "cpuset":
        count = _cpu_count(wanted, capacity, config, memory)
        verdict = _growth_note(verdict, count, wanted, config, None if memory.cpus is None else len(memory.cpus))
        # Where others own them all, they stay where they were: without a wish they would get back what they had at first.
        cpus = select_spread_cpus(snapshot.topology, count, memory.cpus or (), excluded) or memory.cpus or ()
        value = format_cpu_list(cpus)
        # No CPU of its own is no cpuset: an empty one would mean all of them on version 2.
        wishes = tuple(_knob_request(container, Knob.CPUSET, value, verdict) for container in containers if cpus)
        return wishes, SuppressState(cpus=cpus, cores=float(count))
    cores = _quota_cores(wanted, capacity, config, memory)
    verdict = _growth_note(verdict, cores, wanted, config, memory.cores)
    total = sum(request_weight(container) for container in containers)
    wishes = tuple(
        _knob_request(container, Knob.QUOTA, _quota_text(cores * request_weight(container) / total, capacity), verdict)
        for container in containers
    )
    return wishes, SuppressState(cores=cores)


def _allowed_cores(snapshot: Snapshot, rates: Rates | None, config: SuppressConfig) -> tuple[float | None, Reason]:
    capacity = len(snapshot.topology.cpus)
    floor = capacity * config.min_percent / 100
    busy = rates.node.busy_cores if rates is not None else None
    pods, others = _pod_usage_cores(snapshot, rates)
    if busy is None or pods is None or others is None:
        missing = "the node" if busy is None else "a pod"
        text = f"The use of {missing} is not known"
        return None, Reason(rule="suppress_unknown", text=text)
    system = max(busy - pods, 0.0)
    held = max(system, config.reserved_cores)
    cores = max(capacity * config.threshold_percent / 100 - others - held, floor)
    text = (
        f"Reclaimed pods may use {cores:.2f} CPUs: {config.threshold_percent:g} % of {capacity} less {others:.2f} of other "
        f"pods and {held:.2f} of the system."
    )
    inputs = {"capacity_cores": capacity, "other_pods_cores": others, "system_cores": system, "floor_cores": floor}
    return cores, Reason(rule="suppress", text=text, threshold=config.threshold_percent / 100, inputs=inputs)


def _hold_cores(given: float | None, reason: Reason) -> tuple[float, Reason]:
    """What is wanted while a use is not known: what was given, or the minimum as long as nothing was."""
    if given is None:
        return 0.0, msgspec.structs.replace(
            reason, text=f"{reason.text} yet: reclaimed pods get the minimum until it is."
        )
    return given, msgspec.structs.replace(
        reason, text=f"{reason.text}: reclaimed pods keep {given:.2f} CPUs, and no more."
    )


def _growth_note(reason: Reason, cores: float, wanted: float, config: SuppressConfig, before: float | None) -> Reason:
    if cores >= wanted or cores == before:
        return reason
    text = (
        f"{reason.text} They get {cores:.2f} now: no more than {config.growth_ratio:.0%} of the node is added at once."
    )
    return msgspec.structs.replace(reason, text=text)


def _pod_usage_cores(snapshot: Snapshot, rates: Rates | None) -> tuple[float | None, float | None]:
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


def _cpu_count(wanted: float, capacity: int, config: SuppressConfig, memory: SuppressState) -> int:
    count = min(max(ceil(wanted), MIN_CPUS), capacity)
    if memory.cpus is None:
        return count
    return min(count, len(memory.cpus) + ceil(capacity * config.growth_ratio))


def _quota_cores(wanted: float, capacity: int, config: SuppressConfig, memory: SuppressState) -> float:
    cores = max(wanted, MIN_QUOTA_US / DEFAULT_PERIOD_US)
    if memory.cores is None:
        return cores
    if abs(cores - memory.cores) < capacity * MIN_CHANGE_RATIO:
        return memory.cores
    return min(cores, memory.cores + capacity * config.growth_ratio)


def select_spread_cpus(
    topology: Topology, count: int, held: Sequence[int], excluded: Collection[int]
) -> tuple[int, ...]:
    """So many CPUs: those that are held first, then whole physical cores, one NUMA node after the other in turn.

    Fewer where there are fewer.
    """
    free = [cpu for cpu in topology.cpus if cpu.id not in set(excluded)]
    chosen = _round_robin([cpu for cpu in free if cpu.id in set(held)], count, ())
    rest = [cpu for cpu in free if cpu not in chosen]
    chosen += _round_robin(rest, count - len(chosen), chosen)
    return tuple(sorted(cpu.id for cpu in chosen))


def _round_robin(cpus: Sequence[Cpu], count: int, chosen: Sequence[Cpu]) -> list[Cpu]:
    """At most so many of these, core by core, from each NUMA node in turn; siblings of those that are chosen come first."""
    begun = {(cpu.numa, cpu.socket, cpu.core) for cpu in chosen}
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in cpus:
        cores.setdefault((cpu.numa, cpu.socket, cpu.core), []).append(cpu)
    by_node: dict[int, list[list[Cpu]]] = {}
    for key in sorted(cores, key=lambda key: (key not in begun, -len(cores[key]), key)):
        by_node.setdefault(key[0], []).append(cores[key])
    found: list[Cpu] = []
    while len(found) < count and any(by_node.values()):
        for node in sorted(by_node):
            if by_node[node] and len(found) < count:
                found += by_node[node].pop(0)
    return found[: max(count, 0)]


def _quota_text(cores: float, capacity: int) -> str:
    return UNLIMITED if cores >= capacity else format_quota(cores)


def _knob_request(container: Container, knob: Knob, value: str, reason: Reason) -> KnobRequest:
    return KnobRequest(cgroup=container.cgroup, knob=knob, value=value, reason=reason)
