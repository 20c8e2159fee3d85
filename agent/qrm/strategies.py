"""Koordinator's CPU suppress: what reclaimed pods may use is what is left of a share of the node, as CPUs or as a quota. Pure.

    cores = capacity x threshold - use of other pods - max(use of the system, reserved)

Less is taken at once, more is given by a tenth of the node at a time. When the strategy is off there are no wishes, and
what it had changed is given back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

import msgspec

from agent.config.qrm_knobs import SuppressConfig
from agent.qrm.cpu import claim, quota_of, reclaimed_containers
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
"""Of all reclaimed pods together, in the usual period."""
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
    excluded: Collection[int] = (),
) -> tuple[tuple[Wish, ...], SuppressMemory]:
    """Wishes for every reclaimed container. `excluded` are CPUs that nobody may share: reserved, interrupt, exclusive ones.

    Where a use is not known, what was given last stays and never grows; before anything was given, it is the minimum.
    """
    if config.policy == "off":
        return (), SuppressMemory()
    capacity = len(snapshot.topology.cpus)
    wanted, verdict = _cores(snapshot, rates, config)
    if wanted is None:
        wanted, verdict = _held(memory.cores, verdict)
    containers = reclaimed_containers(snapshot)
    if config.policy == "cpuset":
        count = _cpu_count(wanted, capacity, config, memory)
        verdict = _in_steps(verdict, count, wanted, config, None if memory.cpus is None else len(memory.cpus))
        # Where others own them all, they stay where they were: without a wish they would get back what they had at first.
        cpus = pick(snapshot.topology, count, memory.cpus or (), excluded) or memory.cpus or ()
        value = format_cpu_list(cpus)
        # No CPU of its own is no cpuset: an empty one would mean all of them on version 2.
        wishes = tuple(_wish(container, Knob.CPUSET, value, verdict) for container in containers if cpus)
        return wishes, SuppressMemory(cpus=cpus, cores=float(count))
    cores = _quota_cores(wanted, capacity, config, memory)
    verdict = _in_steps(verdict, cores, wanted, config, memory.cores)
    total = sum(claim(container) for container in containers)
    wishes = tuple(
        _wish(container, Knob.QUOTA, _quota(cores * claim(container) / total, capacity), verdict)
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
        text = f"The use of {missing} is not known"
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


def _held(given: float | None, verdict: Verdict) -> tuple[float, Verdict]:
    """What is wanted while a use is not known: what was given, or the minimum as long as nothing was."""
    if given is None:
        return 0.0, msgspec.structs.replace(
            verdict, text=f"{verdict.text} yet: reclaimed pods get the minimum until it is."
        )
    return given, msgspec.structs.replace(
        verdict, text=f"{verdict.text}: reclaimed pods keep {given:.2f} CPUs, and no more."
    )


def _in_steps(verdict: Verdict, cores: float, wanted: float, config: SuppressConfig, before: float | None) -> Verdict:
    if cores >= wanted or cores == before:
        return verdict
    text = (
        f"{verdict.text} They get {cores:.2f} now: no more than {config.growth_ratio:.0%} of the node is added at once."
    )
    return msgspec.structs.replace(verdict, text=text)


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


def pick(topology: Topology, count: int, held: Sequence[int], excluded: Collection[int]) -> tuple[int, ...]:
    """So many CPUs: those that are held first, then whole physical cores, one NUMA node after the other in turn.

    Fewer where there are fewer.
    """
    free = [cpu for cpu in topology.cpus if cpu.id not in set(excluded)]
    chosen = _in_turn([cpu for cpu in free if cpu.id in set(held)], count, ())
    rest = [cpu for cpu in free if cpu not in chosen]
    chosen += _in_turn(rest, count - len(chosen), chosen)
    return tuple(sorted(cpu.id for cpu in chosen))


def _in_turn(cpus: Sequence[Cpu], count: int, chosen: Sequence[Cpu]) -> list[Cpu]:
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


def _quota(cores: float, capacity: int) -> str:
    return UNLIMITED if cores >= capacity else quota_of(cores)


def _wish(container: Container, knob: Knob, value: str, verdict: Verdict) -> Wish:
    return Wish(cgroup=container.cgroup, knob=knob, value=value, verdict=verdict)
