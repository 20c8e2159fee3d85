"""Pods with claims of their own on NUMA nodes: dedicated_cores, and shared and reclaimed pods with numa_binding.

Known pods keep what they have, in the order in which they came; new ones are bound by hints, by name, so that the order
of a list never matters. What cannot be is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.hints import Ask, NoHint, choose, hints
from agent.qrm.placing.layout import Layout
from agent.qrm.placing.ledger import Ledger
from agent.qrm.placing.picking import pick, spread_evenly
from agent.qrm.placing.reclaimed import bind_reclaimed
from agent.qrm.placing.state import DEDICATED, POOL_ENTRY, RECLAIM, Allocation, CpuState, bound_of, requested
from api.knobs import Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel


@dataclass
class Bindings:
    """Filled pod by pod."""

    ledger: Ledger
    nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """NUMA nodes that a pod is bound to, by uid."""
    cpus: dict[str, frozenset[int]] = field(default_factory=dict)
    """CPUs of dedicated containers, by cgroup."""
    rejected: dict[str, Verdict] = field(default_factory=dict)
    """By pod key."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Of dedicated and bound pods, by pod key."""


def bind(
    pods: Sequence[Pod], layout: Layout, usable: frozenset[int], state: CpuState, config: CpuPlacementConfig
) -> Bindings:
    """Bind every pod that asks for it. `pods` in the order in which they are to have their turn."""
    unbound = sum(cores_of(pod, config) for pod in pods if _is_shared(pod) and not pod.enhancements.numa_binding)
    result = Bindings(ledger=Ledger(layout=layout, usable=usable, unbound_cores=unbound, used=_used(state)))
    _keep_residual(result.ledger, pods, state)
    claimants = [
        pod for pod in pods if pod.qos is QoSLevel.DEDICATED or (_is_shared(pod) and pod.enhancements.numa_binding)
    ]
    # Whoever lost CPUs looks for others only after those who did not have theirs.
    for pod in sorted(claimants, key=lambda pod: not _intact(pod, state, usable)):
        try:
            if pod.qos is QoSLevel.DEDICATED:
                _dedicate(pod, result, state, config)
            else:
                _bind_shared(pod, result, state, config)
        except NoHint as error:
            result.rejected[pod.key] = Verdict(rule="numa_binding_impossible", text=f"{pod.key} {error}.")
    if config.enable_reclaim_numa_binding:
        nodes, rejected = bind_reclaimed(pods, layout, state, config)
        result.nodes |= nodes
        result.rejected |= rejected
    return result


def _intact(pod: Pod, state: CpuState, usable: frozenset[int]) -> bool:
    """Whether the pod is bound and can have all CPUs of its own that it had."""
    own = (entry.cpus for entry in state.pod(pod.uid).values() if entry.owner_pool_name == DEDICATED)
    return bool(bound_of(pod, state)) and all(cpus <= usable for cpus in own)


def _is_shared(pod: Pod) -> bool:
    return pod.qos is QoSLevel.SHARED


def cores_of(pod: Pod, config: CpuPlacementConfig) -> float:
    """What the pod asks for; a shared container without a request counts as configured, any other as nothing."""
    missing = config.fallback_cores if pod.qos.online else 0.0
    asked = (requested(pod, container) for container in pod.containers if not container.sidecar)
    return sum(missing if cores is None else cores for cores in asked)


def _used(state: CpuState) -> frozenset[int]:
    pools = (name for name, entry in state.pod_entries.items() if POOL_ENTRY in entry and name != RECLAIM)
    return frozenset[int]().union(*map(state.pool, pools))


def _keep_residual(ledger: Ledger, pods: Iterable[Pod], state: CpuState) -> None:
    """What pods had that are not listed any more, until they are forgotten."""
    there = {pod.uid for pod in pods}
    for uid in sorted(state.residual.keys() - there):
        for name, entry in sorted(state.pod(uid).items()):
            nodes = tuple(node for node in entry.bound_numa if node in ledger.layout.numa)
            if entry.exclusive and nodes:
                ledger.own(uid, nodes)
            elif entry.owner_pool_name == DEDICATED:
                ledger.take(f"{uid}/{name}", entry.cpus & ledger.free)
                ledger.bound.update(nodes)
            elif nodes and entry.owner_pool_name != RECLAIM and entry.container_type != "SIDECAR":
                ledger.ask(nodes, entry.request_quantity)


def _dedicate(pod: Pod, result: Bindings, state: CpuState, config: CpuPlacementConfig) -> None:
    wants = pod.enhancements
    if not wants.numa_binding:
        result.rejected[pod.key] = Verdict(
            rule="dedicated_needs_numa_binding",
            text=f"{pod.key} asks for dedicated_cores without numa_binding, which nobody can hold; "
            "it runs with the shared pods.",
        )
        return
    ledger = result.ledger
    known = {name: entry for name, entry in state.pod(pod.uid).items() if entry.owner_pool_name == DEDICATED}
    mains = [container for container in pod.containers if not container.sidecar] or list(pod.containers[:1])
    counts = {container.name: _count(pod, container, known, ledger.layout, config) for container in mains}
    if any(_resized(pod, container, known) for container in mains):
        result.rejected[pod.key] = Verdict(
            rule="dedicated_resize",
            text=f"{pod.key} changed its request in place; it keeps the {sum(counts.values())} CPUs that it began with.",
        )
    nodes = _nodes_kept(pod, known, ledger, sum(counts.values()))
    if nodes is None:
        alone = wants.numa_exclusive or not wants.numa_share
        available = ledger.available(alone=alone, first=bool(known))
        ask = Ask(cores=sum(counts.values()), wants=wants, several=wants.numa_exclusive)
        nodes = choose(hints(ask, available, ledger.free, ledger.layout), available, ledger.layout, config).nodes
    if wants.numa_exclusive:
        whole = ledger.own(pod.uid, nodes)
        given = dict.fromkeys(counts, whole)
    else:
        given = {name: _give(name, pod, nodes, count, known, ledger) for name, count in counts.items()}
        ledger.bound.update(nodes)
        if not wants.numa_share:
            ledger.closed.update(nodes)
    result.nodes[pod.uid] = nodes
    main = given[mains[0].name]
    for container in pod.containers:
        result.cpus[container.cgroup] = given.get(container.name, main)
    result.verdicts[pod.key] = _dedicated(pod, nodes, sum(counts.values()), len(frozenset().union(*given.values())))


def _dedicated(pod: Pod, nodes: tuple[int, ...], asked: int, has: int) -> Verdict:
    listed = ",".join(map(str, nodes))
    rule = "dedicated_exclusive" if pod.enhancements.numa_exclusive else "dedicated"
    text = f"{pod.key} asked for {asked} CPUs and has {has} of NUMA node {listed} for itself"
    if has < asked:
        rule, text = "dedicated_short", f"{text}, because CPUs went offline and no other node has more"
    return Verdict(
        rule=rule,
        text=f"{text}; sidecars run with its main container.",
        threshold=asked,
        inputs={"request_cores": asked, "cpus": has, "numa": listed},
    )


def _count(
    pod: Pod, container: Container, known: Mapping[str, Allocation], layout: Layout, config: CpuPlacementConfig
) -> int:
    """CPUs of one dedicated container: its request rounded up, to whole cores where it asks for them."""
    before = known.get(container.name)
    cores = requested(pod, container) if before is None else before.request_quantity
    count = max(ceil(cores or config.fallback_cores), 1)
    return ceil(count / layout.threads) * layout.threads if pod.enhancements.full_cores else count


def _resized(pod: Pod, container: Container, known: Mapping[str, Allocation]) -> bool:
    before = known.get(container.name)
    return before is not None and before.request_quantity != (requested(pod, container) or 0.0)


def _nodes_kept(pod: Pod, known: Mapping[str, Allocation], ledger: Ledger, count: int) -> tuple[int, ...] | None:
    """The nodes that a pod was bound to, as long as they are there and have CPUs enough, or nobody has more."""
    bound = next((entry.bound_numa for entry in known.values() if entry.bound_numa), pod.bound_numa)
    if not bound or not set(bound) <= set(ledger.layout.numa) or ledger.closed.intersection(bound):
        return None
    here = ledger.layout.on(bound) & ledger.free
    if known:
        return bound if here and (len(here) >= count or len(here) >= len(_elsewhere(ledger, bound))) else None
    alone = pod.enhancements.numa_exclusive or not pod.enhancements.numa_share
    available = ledger.available(alone=alone)
    return bound if sum(available[node] for node in bound) >= count else None


def _elsewhere(ledger: Ledger, bound: tuple[int, ...]) -> frozenset[int]:
    """The most free CPUs of as many other nodes."""
    others = [ledger.free & ledger.layout.on([node]) for node in ledger.layout.numa if node not in bound]
    return frozenset[int]().union(*sorted(others, key=len, reverse=True)[: len(bound)])


def _give(
    name: str, pod: Pod, nodes: tuple[int, ...], count: int, known: Mapping[str, Allocation], ledger: Ledger
) -> frozenset[int]:
    here = ledger.layout.on(nodes) & ledger.free
    kept = known[name].cpus if name in known else frozenset[int]()
    even = pod.enhancements.distribute_evenly and not kept
    cpus = (
        spread_evenly(ledger.layout, count, here, nodes)
        if even
        else pick(ledger.layout, count, here, kept, ledger.used)
    )
    ledger.take(f"{pod.uid}/{name}", cpus)
    return cpus


def _bind_shared(pod: Pod, result: Bindings, state: CpuState, config: CpuPlacementConfig) -> None:
    """One NUMA node for a shared pod: the one that it has, the one that it names, or the best by hints."""
    ledger, cores = result.ledger, cores_of(pod, config)
    wants = pod.enhancements
    available = ledger.available(alone=not wants.numa_share)
    nodes = bound_of(pod, state)
    # A pod that runs there is not moved because the node has become too small for all.
    if len(nodes) != 1 or nodes[0] not in ledger.layout.numa or nodes[0] in ledger.closed:
        found = hints(Ask(cores=cores, wants=wants, several=False), available, ledger.free, ledger.layout)
        named = [hint for hint in found if hint.nodes == pod.bound_numa]
        nodes = (named[0] if named else choose(found, available, ledger.layout, config)).nodes
    if len(nodes) > 1:
        raise NoHint(f"asks for {len(nodes)} NUMA nodes; shared_cores are bound to one")
    ledger.ask(nodes, cores)
    if not wants.numa_share:
        ledger.closed.update(nodes)
    result.nodes[pod.uid] = nodes
    node = nodes[0]
    result.verdicts[pod.key] = Verdict(
        rule="shared_numa_binding",
        text=f"{pod.key} asks for {cores:g} CPUs and is bound to NUMA node {node}, which had {available[node]:g} left.",
        inputs={"request_cores": cores, "numa": node, "available_cores": available[node]},
    )
