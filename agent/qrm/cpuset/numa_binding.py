"""Binds pods to NUMA nodes: dedicated_cores, and shared and reclaimed pods with `numa_binding`. Pure.
Bound pods keep their nodes, oldest first; new pods are bound by topology hints in the order of their names, so
the order of the pod list does not matter. A reclaimed pod is bound to a node whose headroom holds it. A pod that
cannot be bound is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import floor

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.fair_shares import ceil_cores, requested_pod_cores
from agent.qrm.cpuset.select_cpus import select_cpus, select_evenly
from agent.qrm.cpuset.state import (
    DEDICATED,
    POOL_ENTRY,
    RECLAIM,
    CpusetEntry,
    CpusetState,
    bound_numa_nodes,
    requested_cores,
)
from agent.qrm.cpuset.topology_hints import NoTopologyHint, NumaRequest, select_hint, topology_hints
from agent.qrm.cpuset.topology_layout import CpuLayout
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel

EXCEEDS_FREE_REQUESTS = "dedicated_exceeds_free_requests"
UNFULFILLED_RULES = frozenset(("numa_exclusive_not_requested", "full_cores_not_requested"))
"""Rules of pods that have the CPUs that they request, but not what their annotations would add."""


@dataclass
class NumaAllocations:
    """CPUs and nodes allocated so far in one run: dedicated containers, NUMA-bound shared pods, closed nodes."""

    layout: CpuLayout
    usable: frozenset[int]
    unbound_cores: float
    """Requests of shared pods without a binding."""
    used: frozenset[int]
    """CPUs that online pools had, selected last."""
    assigned: dict[str, frozenset[int]] = field(default_factory=dict)
    """CPUs by container."""
    requested: dict[int, float] = field(default_factory=dict)
    """Cores of NUMA-bound shared pods by node."""
    bound: set[int] = field(default_factory=set)
    """Nodes with bound pods."""
    closed: set[int] = field(default_factory=set)
    """Nodes whose pods share them with no other bound pod."""
    owned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Nodes that one pod owns, by its uid."""
    shared_requests: float = 0.0
    """Cores that pods without dedicated CPUs request, bound or not."""
    pending_requests: float = 0.0
    """Cores that dedicated pods request that are not bound yet."""
    retrying: bool = False
    """Whether postponed pods are bound: shared pods bound before them may request the CPUs that these pods had."""

    def __post_init__(self) -> None:
        self._free = self.usable

    @property
    def free(self) -> frozenset[int]:
        """CPUs that no dedicated container has."""
        return self._free

    def assign(self, container: str, cpus: frozenset[int]) -> None:
        """Make these CPUs exclusive to the container."""
        self.assigned[container] = cpus
        self._free -= cpus

    def may_dedicate(self, cpus: int, requested: float) -> bool:
        """Return whether this many CPUs can be exclusive to a pod: the rest has to hold the requests of all pods that
        share CPUs. CPUs that only rounding adds must not come from the requests of other dedicated pods either."""
        others = self.shared_requests + (self.pending_requests if cpus > requested else 0.0)
        return max(len(self._free) - cpus, 0) >= ceil_cores(others)

    def own_nodes(self, uid: str, nodes: tuple[int, ...]) -> frozenset[int]:
        """Make the pod the owner of these nodes; return their CPUs."""
        self.owned[uid] = nodes
        self.closed.update(nodes)
        self.bound.update(nodes)
        cpus = self.layout.on(nodes) & self.usable
        self._free -= cpus
        return cpus

    def covers(self, count: int, nodes: Collection[int]) -> bool:
        """Return whether a request of `count` CPUs is all usable CPUs of these nodes."""
        return count >= len(self.layout.on(nodes) & self.usable)

    def bind_shared(self, nodes: Collection[int], cores: float) -> None:
        """Bind a shared pod to these nodes; each gets an equal part of its cores."""
        for node in nodes:
            self.requested[node] = self.requested.get(node, 0.0) + cores / len(nodes)
        self.bound.update(nodes)

    def selectable(self, nodes: Collection[int], retained: frozenset[int]) -> frozenset[int]:
        """Return the free CPUs of these nodes that a container may have to itself: on each node, those that bound shared pods
        do not request, because these pods run on no other node. `retained` are CPUs that it has already; it keeps them
        although pods that grew in place request them."""
        result = frozenset[int]() if self.retrying else retained & self.layout.on(nodes) & self._free
        for node in nodes:
            here = self.layout.on([node]) & self._free
            spare = max(len(here) - ceil_cores(self.requested.get(node, 0.0)), 0)
            result |= select_cpus(self.layout, spare, here, retained, self.used)
        return result

    def available(self, *, alone: bool, first: bool = False) -> Mapping[int, float]:
        """Return the cores of each node that a pod can be bound to; `alone` excludes nodes with other bound pods. A
        node without bound pods has none if the unbound shared pods would not fit on the remaining nodes, unless the
        pod goes `first`."""
        free = {node: float(len(self._free.intersection(cpus))) for node, cpus in self.layout.numa.items()}
        unbound = {node: cores for node, cores in free.items() if node not in self.bound}
        spare = sum(unbound.values()) - self.unbound_cores
        result = {}
        for node, cores in free.items():
            left = cores - self.requested.get(node, 0.0)
            if node in self.closed or (alone and node in self.bound):
                left = 0.0
            elif len(free) == 1 and not first:
                # The only NUMA node holds all pods.
                left -= self.unbound_cores
            elif node in unbound and spare < cores and not first:
                left = 0.0
            result[node] = max(left, 0.0)
        return result


def bind_reclaimed(
    pods: Sequence[Pod], layout: CpuLayout, state: CpusetState, config: CpuPlacementConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, Reason]]:
    """Return the NUMA nodes of each bound reclaimed pod by uid, and the reason by pod key of those rejected. If the
    headroom of nodes is not known, existing bindings stay and no pod is bound."""
    nodes, requested, unbound = _bound_reclaimed_pods(pods, layout, state)
    rejected: dict[str, Reason] = {}
    for pod in (pod for pod in pods if pod.qos is QoSLevel.RECLAIMED and pod.enhancements.numa_binding):
        if pod.uid in nodes:
            continue
        cores = reclaimed_pod_cores(pod)
        left = _room_by_numa(layout, state.numa_headroom, requested, unbound)
        fitting = [node for node, room in left.items() if room >= cores]
        if not fitting:
            rejected[pod.key] = _rejection_reason(pod, cores, left, state.numa_headroom)
            unbound += cores
            continue
        sign = 1 if config.numa_hint == "packing" else -1
        node = min(fitting, key=lambda node: (sign * left[node], node))
        nodes[pod.uid] = (node,)
        requested[node] = requested.get(node, 0.0) + cores
    return nodes, rejected


def reclaimed_room_by_numa(pods: Sequence[Pod], layout: CpuLayout, state: CpusetState) -> Mapping[int, float]:
    """Return the cores of each NUMA node that one more reclaimed pod can be bound to."""
    _nodes, requested, unbound = _bound_reclaimed_pods(pods, layout, state)
    return _room_by_numa(layout, state.numa_headroom, requested, unbound)


def reclaimed_pod_cores(pod: Pod) -> float:
    """Return the cores that all containers of the pod request."""
    return sum(requested_cores(pod, container) or 0.0 for container in pod.containers)


def _bound_reclaimed_pods(
    pods: Sequence[Pod], layout: CpuLayout, state: CpusetState
) -> tuple[dict[str, tuple[int, ...]], dict[int, float], float]:
    """Return the nodes of each bound pod by uid, the requested cores by node, and those of unbound pods."""
    nodes: dict[str, tuple[int, ...]] = {}
    requested: dict[int, float] = {}
    unbound = 0.0
    for pod in pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        if not pod.enhancements.numa_binding:
            unbound += reclaimed_pod_cores(pod)
            continue
        bound = bound_numa_nodes(pod, state) or pod.bound_numa
        if len(bound) == 1 and bound[0] in layout.numa:
            nodes[pod.uid] = bound
            requested[bound[0]] = requested.get(bound[0], 0.0) + reclaimed_pod_cores(pod)
    return nodes, requested, unbound


def _room_by_numa(
    layout: CpuLayout, headroom: Mapping[int, float], requested: Mapping[int, float], unbound: float
) -> Mapping[int, float]:
    """Return the cores of each node that a pod can be bound to. A node gets its first bound pod only if the unbound
    pods fit on the remaining nodes."""
    unbound_nodes = {node: headroom[node] for node in layout.numa if node in headroom and node not in requested}
    spare = sum(unbound_nodes.values()) - unbound
    room = {node: headroom[node] - cores for node, cores in requested.items() if node in headroom}
    return room | {node: cores for node, cores in unbound_nodes.items() if spare >= cores}


def _rejection_reason(pod: Pod, cores: float, left: Mapping[int, float], headroom: Mapping[int, float]) -> Reason:
    if not headroom:
        text = f"{pod.key} cannot be bound to a NUMA node: the headroom of each node is not known."
        return Reason(rule="numa_headroom_unknown", text=text)
    rooms = ", ".join(f"{node}: {max(room, 0.0):g}" for node, room in sorted(left.items())) or "none"
    return Reason(
        rule="numa_headroom_too_small",
        text=f"{pod.key} requests {cores:g} reclaimed CPUs on one NUMA node; CPUs left by node: {rooms}.",
        inputs={"request_cores": cores, **{f"left_on_{node}": room for node, room in left.items()}},
    )


@dataclass
class NumaBindings:
    """Result of binding, filled pod by pod."""

    allocations: NumaAllocations
    nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """NUMA nodes of a bound pod, by uid."""
    cpus: dict[str, frozenset[int]] = field(default_factory=dict)
    """CPUs of dedicated containers, by cgroup."""
    rejected: dict[str, Reason] = field(default_factory=dict)
    """Reason by pod key."""
    reasons: dict[str, Reason] = field(default_factory=dict)
    """Of dedicated and bound pods, by pod key."""


def bind_pods(
    pods: Sequence[Pod], layout: CpuLayout, usable: frozenset[int], state: CpusetState, config: CpuPlacementConfig
) -> NumaBindings:
    """Bind every pod that requests it, in the order of `pods`."""
    # Only requests restrict other pods to NUMA nodes: pods without a request must not take the CPUs of dedicated pods.
    unbound_cores = sum(
        requested_pod_cores(pod) for pod in pods if _is_shared(pod) and not pod.enhancements.numa_binding
    )
    result = NumaBindings(
        allocations=NumaAllocations(
            layout=layout,
            usable=usable,
            unbound_cores=unbound_cores,
            used=_online_pool_cpus(state),
            shared_requests=sum(requested_pod_cores(pod) for pod in pods if _is_shared(pod)),
            pending_requests=sum(requested_pod_cores(pod) for pod in pods if pod.qos is QoSLevel.DEDICATED),
        )
    )
    _retain_residual_pods(result.allocations, state)
    claimants = [
        pod for pod in pods if pod.qos is QoSLevel.DEDICATED or (_is_shared(pod) and pod.enhancements.numa_binding)
    ]
    # Pods that lost CPUs are bound after those that still have all of theirs.
    waiting = sorted(claimants, key=lambda pod: not _has_own_cpus(pod, state, usable))
    while waiting:
        waiting = _bind_in_order(waiting, result, state, config)
        result.allocations.retrying = True
    if config.enable_reclaim_numa_binding:
        nodes, rejected = bind_reclaimed(pods, layout, state, config)
        result.nodes |= nodes
        result.rejected |= rejected
    return result


def _bind_in_order(
    pods: Sequence[Pod], result: NumaBindings, state: CpusetState, config: CpuPlacementConfig
) -> list[Pod]:
    """Bind these pods; return those to try again. Later pods may need less than was reserved for them. Without another try, the
    next cycle would bind more pods for the same input."""
    allocations = result.allocations
    dedicated = [pod for pod in pods if pod.qos is QoSLevel.DEDICATED]
    allocations.pending_requests = sum(_kept_cores(pod, state) for pod in dedicated)
    for pod in pods:
        try:
            if pod.qos is QoSLevel.DEDICATED:
                allocations.pending_requests -= _kept_cores(pod, state)
                _bind_dedicated(pod, result, state, config)
            else:
                _bind_shared(pod, result, state, config)
        except NoTopologyHint as error:
            result.rejected[pod.key] = Reason(rule="numa_binding_impossible", text=f"{pod.key} {error}.")
        if pod.qos is QoSLevel.DEDICATED and pod.uid not in result.nodes:
            allocations.shared_requests += requested_pod_cores(pod)
    unbound = [pod for pod in dedicated if pod.uid not in result.nodes]
    postponed = [pod for pod in unbound if result.rejected[pod.key].rule == EXCEEDS_FREE_REQUESTS]
    if len(unbound) == len(dedicated):
        return []
    for pod in postponed:
        del result.rejected[pod.key]
        allocations.shared_requests -= requested_pod_cores(pod)
    return postponed


def _kept_cores(pod: Pod, state: CpusetState) -> float:
    """Return the cores to reserve for a dedicated pod until it is bound: its requests, or the CPUs of its allocation if these
    are fewer, because its sidecars run on the same CPUs."""
    own = [entry for entry in state.pod(pod.uid).values() if entry.owner_pool_name == DEDICATED]
    requested = requested_pod_cores(pod)
    return min(requested, len(frozenset[int]().union(*(entry.cpus for entry in own)))) if own else requested


def _has_own_cpus(pod: Pod, state: CpusetState, usable: frozenset[int]) -> bool:
    """Return whether the pod is bound and all of its exclusive CPUs are still usable."""
    exclusive = (entry.cpus for entry in state.pod(pod.uid).values() if entry.owner_pool_name == DEDICATED)
    return bool(bound_numa_nodes(pod, state)) and all(cpus <= usable for cpus in exclusive)


def _is_shared(pod: Pod) -> bool:
    return pod.qos is QoSLevel.SHARED


def pod_cores(pod: Pod, config: CpuPlacementConfig) -> float:
    """Return the cores the pod requests; a shared container without a request counts as configured, others as 0."""
    missing = config.fallback_cores if pod.qos.online else 0.0
    requests = (requested_cores(pod, container) for container in pod.containers if not container.sidecar)
    return sum(missing if cores is None else cores for cores in requests)


def _online_pool_cpus(state: CpusetState) -> frozenset[int]:
    pools = (name for name, entry in state.pod_entries.items() if POOL_ENTRY in entry and name != RECLAIM)
    return frozenset[int]().union(*map(state.pool, pools))


def forget_requested_pods(
    state: CpusetState, pods: Sequence[Pod], layout: CpuLayout, usable: frozenset[int]
) -> CpusetState:
    """Return the state without the residual pods whose CPUs listed pods request: otherwise a tenant could hold a node by
    creating and deleting pods. A pod that is forgotten gets no CPUs back, so no CPU is exclusive and in a pool at once."""
    spare = len(usable) - sum(
        requested_pod_cores(pod) for pod in pods if pod.qos is QoSLevel.DEDICATED or _is_shared(pod)
    )
    forgotten: set[str] = set()
    for uid in sorted(state.residual):
        entries = _retained_entries(state, uid, layout).values()
        exclusive = (entry.cpus & usable for entry in entries if entry.owner_pool_name == DEDICATED)
        cores: float = len(frozenset[int]().union(*exclusive))
        cores += sum(entry.request_quantity for entry in entries if entry.owner_pool_name != DEDICATED)
        if cores and round(cores - spare, 6) > 0:
            forgotten.add(uid)
        else:
            spare -= cores
    if not forgotten:
        return state
    return msgspec.structs.replace(
        state,
        residual={uid: since_ns for uid, since_ns in state.residual.items() if uid not in forgotten},
        pod_entries={uid: entry for uid, entry in state.pod_entries.items() if uid not in forgotten},
    )


def _retained_entries(state: CpusetState, uid: str, layout: CpuLayout) -> Mapping[str, CpusetEntry]:
    """Return the entries of a residual pod that retain CPUs or a NUMA node, by container name, sorted."""
    return {
        name: entry
        for name, entry in sorted(state.pod(uid).items())
        if entry.owner_pool_name == DEDICATED
        or (
            entry.owner_pool_name != RECLAIM
            and entry.container_type != "SIDECAR"
            and any(node in layout.numa for node in entry.bound_numa)
        )
    }


def _retain_residual_pods(allocations: NumaAllocations, state: CpusetState) -> None:
    """Keep the allocations of pods that are not listed any more until they expire or are forgotten."""
    for uid in sorted(state.residual):
        for name, entry in _retained_entries(state, uid, allocations.layout).items():
            nodes = tuple(node for node in entry.bound_numa if node in allocations.layout.numa)
            if entry.exclusive and nodes:
                allocations.own_nodes(uid, nodes)
            elif entry.owner_pool_name == DEDICATED:
                allocations.assign(f"{uid}/{name}", entry.cpus & allocations.free)
                allocations.bound.update(nodes)
            else:
                allocations.bind_shared(nodes, entry.request_quantity)


def _bind_dedicated(pod: Pod, result: NumaBindings, state: CpusetState, config: CpuPlacementConfig) -> None:
    """Give the pod CPUs of its own, at most its request rounded up, or reject it with the reason."""
    allocations = result.allocations
    entries = {name: entry for name, entry in state.pod(pod.uid).items() if entry.owner_pool_name == DEDICATED}
    main_containers = [container for container in pod.containers if not container.sidecar] or list(pod.containers[:1])
    cores = {container.name: _dedicated_cores(pod, container, entries) for container in main_containers}
    counts = {name: ceil_cores(requested) for name, requested in cores.items() if requested}
    count = sum(counts.values())
    if rejection := _dedicated_rejection(pod, count, sum(cores.values()), allocations):
        result.rejected[pod.key] = rejection
        return
    if any(_is_grown(pod, container, entries) for container in main_containers):
        result.rejected[pod.key] = Reason(
            rule="dedicated_resize",
            text=f"{pod.key} changed its request in place; it keeps the {count} CPUs that it started with.",
        )
    nodes, owns_nodes = _dedicated_nodes(pod, entries, allocations, count, config)
    if owns_nodes:
        assigned = dict.fromkeys(counts, allocations.own_nodes(pod.uid, nodes))
    else:
        assigned = {
            name: _select_container_cpus(name, pod, nodes, cpus, entries, allocations) for name, cpus in counts.items()
        }
        allocations.bound.update(nodes)
        if not pod.enhancements.numa_share:
            allocations.closed.update(nodes)
        if limitation := _unfulfilled_enhancement(pod, nodes, count, allocations):
            result.rejected.setdefault(pod.key, limitation)
    result.nodes[pod.uid] = nodes
    main_cpus = next(iter(assigned.values()))
    for container in pod.containers:
        result.cpus[container.cgroup] = assigned.get(container.name, main_cpus)
    own_cpus = len(frozenset().union(*assigned.values()))
    result.reasons[pod.key] = _dedicated_reason(pod, nodes, count, own_cpus, owns_nodes=owns_nodes)


def _dedicated_rejection(pod: Pod, count: int, requested: float, allocations: NumaAllocations) -> Reason | None:
    """Return why the pod runs with the shared pods; None if it may have `count` CPUs of its own."""
    if not pod.enhancements.numa_binding:
        return Reason(
            rule="dedicated_needs_numa_binding",
            text=f"{pod.key} requests dedicated_cores without numa_binding, which is not supported; "
            "it runs with the shared pods.",
        )
    if count == 0:
        return Reason(
            rule="dedicated_needs_request",
            text=f"{pod.key} has dedicated_cores and its main container requests no CPU; it runs with the shared pods. "
            "Request the CPUs that it needs.",
        )
    if not allocations.may_dedicate(count, requested):
        free, others = len(allocations.free), allocations.shared_requests
        return Reason(
            rule=EXCEEDS_FREE_REQUESTS,
            text=f"{pod.key} requests {count} CPUs of its own; of {free} CPUs, shared pods request {others:g} and "
            f"dedicated pods that follow {allocations.pending_requests:g}. It runs with the shared pods.",
            threshold=free - others,
            inputs={"request_cores": count, "shared_request_cores": others, "free_cpus": free},
        )
    return None


def _dedicated_nodes(
    pod: Pod,
    entries: Mapping[str, CpusetEntry],
    allocations: NumaAllocations,
    count: int,
    config: CpuPlacementConfig,
) -> tuple[tuple[int, ...], bool]:
    """Return the NUMA nodes of the pod, and whether it owns them: with numa_exclusive, where it requests all their CPUs.
    Raises NoTopologyHint."""
    enhancements, layout = pod.enhancements, allocations.layout
    request = NumaRequest(cores=count, enhancements=enhancements, several=enhancements.numa_exclusive)
    retained = _retained_nodes(pod, entries, allocations, count)
    if retained is not None:
        is_apart = not allocations.bound.intersection(retained)
        return retained, enhancements.numa_exclusive and is_apart and allocations.covers(count, retained)
    if enhancements.numa_exclusive:
        alone = _whole_cpus(allocations.available(alone=True, first=bool(entries)))
        with suppress(NoTopologyHint):
            hints = topology_hints(request, alone, allocations.free, layout)
            if covered := [hint for hint in hints if allocations.covers(count, hint.nodes)]:
                return select_hint(covered, alone, layout, config).nodes, True
    available = _whole_cpus(allocations.available(alone=not enhancements.numa_share, first=bool(entries)))
    hints = topology_hints(request, available, allocations.free, layout)
    return select_hint(hints, available, layout, config).nodes, False


def _whole_cpus(cores: Mapping[int, float]) -> Mapping[int, float]:
    """Return the whole CPUs of each node: fractions left on two nodes make no CPU."""
    return {node: float(floor(round(available, 6))) for node, available in cores.items()}


def _unfulfilled_enhancement(
    pod: Pod, nodes: tuple[int, ...], count: int, allocations: NumaAllocations
) -> Reason | None:
    """Return the enhancement that the request is too small for; None if there is none."""
    threads = allocations.layout.threads
    if pod.enhancements.numa_exclusive:
        cpus = len(allocations.layout.on(nodes) & allocations.usable)
        listed = ",".join(map(str, nodes))
        return Reason(
            rule="numa_exclusive_not_requested",
            text=f"{pod.key} sets numa_exclusive on NUMA nodes {listed}, which have {cpus} CPUs, and requests {count}. It gets "
            f"{count} exclusive, and other pods run on the rest. Request all {cpus} CPUs to have the nodes alone.",
            threshold=cpus,
            inputs={"request_cores": count, "numa": listed},
        )
    if pod.enhancements.full_cores and count % threads:
        return Reason(
            rule="full_cores_not_requested",
            text=f"{pod.key} requests {count} CPUs and whole physical cores, which have {threads} CPUs each; it shares "
            f"one core. Request a multiple of {threads}.",
            threshold=threads,
            inputs={"request_cores": count},
        )
    return None


def _dedicated_reason(pod: Pod, nodes: tuple[int, ...], requested: int, assigned: int, *, owns_nodes: bool) -> Reason:
    listed = ",".join(map(str, nodes))
    rule = "dedicated_exclusive" if owns_nodes else "dedicated"
    text = f"{pod.key} requests {requested} CPUs and has {assigned} exclusive CPUs of NUMA node {listed}"
    if assigned < requested:
        rule, text = "dedicated_short", f"{text}, because CPUs went offline and no other node has more"
    return Reason(
        rule=rule,
        text=f"{text}; sidecars run with its main container.",
        threshold=requested,
        inputs={"request_cores": requested, "cpus": assigned, "numa": listed},
    )


def _dedicated_cores(pod: Pod, container: Container, entries: Mapping[str, CpusetEntry]) -> float:
    """Return the cores of one dedicated container: its request, or that at its start if it has grown in place since."""
    cores = requested_cores(pod, container) or 0.0
    before = entries.get(container.name)
    return cores if before is None or not before.request_quantity else min(cores, before.request_quantity)


def _is_grown(pod: Pod, container: Container, entries: Mapping[str, CpusetEntry]) -> bool:
    before = entries.get(container.name)
    return before is not None and 0 < before.request_quantity < (requested_cores(pod, container) or 0.0)


def _retained_nodes(
    pod: Pod, entries: Mapping[str, CpusetEntry], allocations: NumaAllocations, count: int
) -> tuple[int, ...] | None:
    """Return the previous nodes of the pod if they have enough CPUs, or if no other nodes have more."""
    bound = next((entry.bound_numa for entry in entries.values() if entry.bound_numa), pod.bound_numa)
    if not bound or not set(bound) <= set(allocations.layout.numa) or allocations.closed.intersection(bound):
        return None
    here = allocations.layout.on(bound) & allocations.free
    if entries and allocations.retrying and len(allocations.selectable(bound, frozenset())) < count:
        return None
    if entries:
        return (
            bound if here and (len(here) >= count or len(here) >= len(_best_other_cpus(allocations, bound))) else None
        )
    alone = pod.enhancements.numa_exclusive or not pod.enhancements.numa_share
    available = _whole_cpus(allocations.available(alone=alone))
    return bound if sum(available[node] for node in bound) >= count else None


def _best_other_cpus(allocations: NumaAllocations, bound: tuple[int, ...]) -> frozenset[int]:
    """Return the most free CPUs of the same number of other nodes."""
    others = [allocations.free & allocations.layout.on([node]) for node in allocations.layout.numa if node not in bound]
    return frozenset[int]().union(*sorted(others, key=len, reverse=True)[: len(bound)])


def _select_container_cpus(
    name: str,
    pod: Pod,
    nodes: tuple[int, ...],
    count: int,
    entries: Mapping[str, CpusetEntry],
    allocations: NumaAllocations,
) -> frozenset[int]:
    retained = entries[name].cpus if name in entries else frozenset[int]()
    here = allocations.selectable(nodes, retained)
    if len(here) < count:
        here = allocations.layout.on(nodes) & allocations.free
    even = pod.enhancements.distribute_evenly and not retained
    cpus = (
        select_evenly(allocations.layout, count, here, nodes)
        if even
        else select_cpus(allocations.layout, count, here, retained, allocations.used)
    )
    allocations.assign(f"{pod.uid}/{name}", cpus)
    return cpus


def _bind_shared(pod: Pod, result: NumaBindings, state: CpusetState, config: CpuPlacementConfig) -> None:
    """Bind a shared pod to one NUMA node: its previous one, the one it names, or the best by hints."""
    allocations, cores = result.allocations, requested_pod_cores(pod)
    enhancements = pod.enhancements
    available = allocations.available(alone=not enhancements.numa_share)
    nodes = bound_numa_nodes(pod, state)
    # A running pod is not moved when its node becomes too small for all.
    if len(nodes) != 1 or nodes[0] not in allocations.layout.numa or nodes[0] in allocations.closed:
        hints = topology_hints(
            NumaRequest(cores=cores, enhancements=enhancements, several=False),
            available,
            allocations.free,
            allocations.layout,
        )
        matching = [hint for hint in hints if hint.nodes == pod.bound_numa]
        nodes = (matching[0] if matching else select_hint(hints, available, allocations.layout, config)).nodes
    if len(nodes) > 1:
        raise NoTopologyHint(f"requests {len(nodes)} NUMA nodes; shared_cores are bound to one")
    allocations.bind_shared(nodes, cores)
    if not enhancements.numa_share:
        allocations.closed.update(nodes)
    result.nodes[pod.uid] = nodes
    node = nodes[0]
    result.reasons[pod.key] = Reason(
        rule="shared_numa_binding",
        text=f"{pod.key} requests {cores:g} CPUs and is bound to NUMA node {node}, which had {available[node]:g} left.",
        inputs={"request_cores": cores, "numa": node, "available_cores": available[node]},
    )
