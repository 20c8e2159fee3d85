"""What the reclaim pool can be promised for: Katalyst's headroom assembler `common`, with and without utilisation.

Regions are not summed. The pool supplies what its CPUs leave idle and what reclaimed pods use already; NUMA nodes that
pods are bound to are reckoned one by one, all others together. With utilisation more is promised than is supplied while
reclaimed pods use little of it, since pods rarely use all they request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil, floor

import msgspec

from agent.advisor.headroom.exclusion import Lendable
from agent.config.headroom import HeadroomConfig, UtilConfig
from api.advice import UNBOUND, Headroom
from api.cpus import Topology
from api.knobs import Verdict

_DIGITS = 6
"""Cores are rounded to a millionth before they are rounded to whole ones: 10.000000000000002 is ten."""

Inputs = dict[str, float | int | str | None]


class PoolSituation(msgspec.Struct, frozen=True, kw_only=True):
    """The reclaim pool and what is known of its use. Keys are NUMA nodes, and UNBOUND for all that nobody is bound to."""

    topology: Topology
    cpus: Mapping[int, tuple[int, ...]]
    """CPUs of the reclaim pool by NUMA node; empty where there is no such pool yet."""
    busy: Mapping[int, float]
    """Busy ratio by CPU; one that is missing counts as fully busy."""
    use_cores: Mapping[int, float | None]
    """CPU that reclaimed pods use, of each bound NUMA node and of UNBOUND; missing or None is not known."""
    quota_cores: Mapping[int, float] = {}
    """Limit of the cgroup above those pods, where it has one."""
    bound: Collection[int] = ()
    """`exclusion.bound_nodes`."""
    lendable: Lendable
    last_cores: Mapping[int, float] = {}
    """What is advertised now, by NUMA node (ReporterMemory.advertised.cores_by_numa)."""


def assemble(situation: PoolSituation, config: HeadroomConfig) -> Headroom:
    """CPU that can be promised in all and by NUMA node; None where an input is missing. Memory is for others to say."""
    nodes = situation.topology.numa_nodes
    if not situation.cpus:
        return _unknown("There is no reclaim pool yet.", {})
    whole = config.rounds(len(situation.topology.cpus))
    here = [numa for numa in sorted(situation.cpus) if numa in situation.lendable.numa_nodes]
    groups: list[tuple[int, tuple[int, ...]]] = [(numa, (numa,)) for numa in here if numa in situation.bound]
    if rest := tuple(numa for numa in here if numa not in situation.bound):
        groups.append((UNBOUND, rest))
    by_numa = dict.fromkeys(nodes, 0.0)
    inputs: Inputs = {}
    texts = []
    for key, members in groups:
        found = _group(situation, config, key, members)
        inputs.update({f"{_label(key)}_{name}": value for name, value in found.inputs.items()})
        texts.append(found.text)
        if found.cores is None:
            return _unknown(found.text, inputs)
        by_numa.update(_split(found.cores, key, members, situation.topology, whole=whole, util=config.util.enable))
    total = round(sum(by_numa.values()), _DIGITS)
    refused = [f"NUMA node {numa} is not lent: {why}." for numa, why in situation.lendable.refused.items()]
    text = " ".join([f"{total:g} cores can be promised.", *texts, *refused])
    rule = "util_based" if config.util.enable else "pool_supply"
    threshold = config.util.target if config.util.enable else None
    return Headroom(
        cores=total, cores_by_numa=by_numa, verdict=Verdict(rule=rule, text=text, threshold=threshold, inputs=inputs)
    )


def refusal(nodes: Sequence[int], lendable: Lendable, *, enable_reclaim: bool) -> Headroom | None:
    """Why nothing, or nothing new, is promised whatever the policy; None where nothing stands in the way."""
    if not enable_reclaim:
        verdict = Verdict(rule="reclaim_off", text="Reclaim is off: nothing is promised.")
        return Headroom(cores=0.0, cores_by_numa=dict.fromkeys(nodes, 0.0), memory_bytes=0.0, verdict=verdict)
    if lendable.unknown:
        pods = ", ".join(lendable.unknown)
        return _unknown(f"Reclaim is off around {pods}, but where their CPUs are is not known.", {"pods": pods})
    return None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What one group of NUMA nodes can be promised for, before it is rounded."""

    cores: float | None
    text: str
    inputs: Inputs


def _group(situation: PoolSituation, config: HeadroomConfig, key: int, members: tuple[int, ...]) -> Found:
    cpus = [cpu for numa in members for cpu in situation.cpus[numa]]
    capacity = sum(1 for cpu in situation.topology.cpus if cpu.numa in members)
    used = situation.use_cores.get(key)
    name = "The NUMA nodes without bound pods" if key == UNBOUND else f"NUMA node {key}"
    if used is None:
        return Found(
            cores=None, text=f"{name}: what reclaimed pods use there is not known.", inputs={"use_cores": None}
        )
    busy = sum(situation.busy.get(cpu, 1.0) for cpu in cpus)
    quota = situation.quota_cores.get(key)
    supply = min(max(len(cpus) - busy, 0.0) + used, capacity if quota is None else min(quota, capacity))
    inputs: Inputs = {
        "cpus": len(cpus),
        "busy_cores": round(busy, 3),
        "use_cores": round(used, 3),
        "quota_cores": quota,
        "supply_cores": round(supply, 3),
    }
    text = f"{name}: {len(cpus)} CPUs, {busy:.2f} busy, {used:.2f} of that reclaimed, supply {supply:.2f} cores."
    if not config.util.enable:
        return Found(cores=supply, text=text, inputs=inputs)
    last = sum(situation.last_cores.get(numa, 0.0) for numa in members)
    cores = util_based(supply, used, last, capacity, config.util)
    inputs |= {"last_cores": round(last, 3), "capacity_cores": capacity, "promised_cores": round(cores, 3)}
    util = used / supply if supply > 0 else 0.0
    text += f" Of that {util:.2f} is used, against a target of {config.util.target:g}; {last:.2f} was promised:"
    return Found(cores=cores, text=f"{text} {cores:.2f}.", inputs=inputs)


def util_based(supply: float, used: float, last: float, capacity: float, config: UtilConfig) -> float:
    """Cores to promise for a supply of so many, of which so many are used, where `last` was promised before."""
    if supply <= 0:
        return 0.0
    util = used / supply
    over = 0.0
    if config.target > util:
        over = supply * (config.target - util)
    elif 0 < config.maximum < util:
        over = supply * (config.maximum - util)
    return min(max(last + over, supply), supply * config.max_oversold_rate, capacity * config.max_capacity_rate)


def _split(
    cores: float, key: int, members: tuple[int, ...], topology: Topology, *, whole: bool, util: bool
) -> dict[int, float]:
    """One group's cores by NUMA node. Whole cores as Katalyst has them, and never more than the node's CPUs.

    A bound node is rounded up, without utilisation; what the others share is rounded up with it and down for each of them.
    """
    cores = round(cores, _DIGITS)
    sizes = {numa: sum(1 for cpu in topology.cpus if cpu.numa == numa) for numa in members}
    if key != UNBOUND:
        return {key: float(ceil(cores)) if whole and not util else cores}
    if util:
        total = sum(sizes.values())
        cores = ceil(cores) if whole else cores
        shares = {numa: cores * size / total for numa, size in sizes.items()}
    else:
        shares = {numa: min(cores / len(members), float(sizes[numa])) for numa in members}
    return {numa: float(floor(round(share, _DIGITS))) if whole else share for numa, share in shares.items()}


def _unknown(text: str, inputs: Inputs) -> Headroom:
    return Headroom(verdict=Verdict(rule="headroom_unknown", text=f"{text} Nothing new is promised.", inputs=inputs))


def _label(key: int) -> str:
    return "unbound" if key == UNBOUND else f"numa{key}"
