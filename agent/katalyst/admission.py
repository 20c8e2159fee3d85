"""Decides the CPUs and NUMA nodes of a container that is being admitted, and its topology hints. Pure.
The allocation is the one that a cycle would make with this pod among the running ones. A request is parsed into a
pod with one container; reclaimed CPU is in thousandths of a core, all other CPU in cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import ceil
from typing import Any, NamedTuple

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.katalyst.messages import UnusableMessage
from agent.qrm.cpuset.allocate import allocate_cpusets, compute_numa_bindings
from agent.qrm.cpuset.allowed_cpus import AllowedCpus, allowed_cpus_of, restrict_to_allowed
from agent.qrm.cpuset.numa_binding import pod_cores, reclaimed_pod_cores, reclaimed_room_by_numa
from agent.qrm.cpuset.state import CpusetEntry, CpusetState, bound_numa_nodes, pool_name_of, with_numa_bindings
from agent.qrm.cpuset.topology_hints import NoTopologyHint, TopologyHint, topology_hints
from agent.qrm.cpuset.topology_hints import NumaRequest as Wanted
from agent.qrm.cpuset.topology_layout import layout_of
from api.advice import PoolSize
from api.annotations import parse_enhancements, parse_numa_bind_result
from api.cpu import Topology
from api.pod import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.proto import resource_plugin_pb2 as plugin
from api.qos import AnnotationMapping, QoSLevel, explicit_qos_level
from api.snapshot import Snapshot

CPU, MEMORY = "cpu", "memory"
_RESOURCE_KEYS = {CPU: (CPU, RECLAIMED_CPU), MEMORY: (MEMORY, RECLAIMED_MEMORY)}
_MAX_QUANTITY = float(1 << 62)


class AdmissionRequest(msgspec.Struct, frozen=True):
    """One container's request of one resource."""

    pod: Pod
    """With this container, and those that were asked for before."""
    container: Container
    resource: str
    """`cpu` or `memory`."""
    amount: float
    """Cores, or bytes."""
    hint: tuple[int, ...]
    """NUMA nodes that were agreed on; empty where none were."""


def parse_admission_request(
    request: Any, resource: str, before: Pod | None, dialect: AnnotationMapping
) -> AdmissionRequest:
    """What a ResourceRequest asks of the plugin of that resource; `before` is the pod as it is known.

    Raises Unusable that names the field.
    """
    for field in ("pod_uid", "pod_name", "container_name"):
        if not getattr(request, field):
            raise UnusableMessage(f"{field} is empty")
    annotations, labels = dict(request.annotations), dict(request.labels)
    try:
        qos = explicit_qos_level(annotations, dialect.selectors) or QoSLevel.SHARED
    except ValueError as error:
        raise UnusableMessage(f"annotations: {str(error)[:250]}") from None
    amount = requested_quantity(request, resource, qos)
    wants, problems = parse_enhancements(annotations, qos, dialect, None)
    said, unbound = parse_numa_bind_result(annotations, dialect)
    hint = tuple(sorted({int(node) for node in request.hint.nodes if node < 1024}))
    if not said and before is not None:
        said = before.bound_numa
    container = _container_with_request(request, resource, qos, amount, before)
    others = tuple(one for one in before.containers if one.name != container.name) if before is not None else ()
    pod = Pod(
        uid=request.pod_uid,
        namespace=request.pod_namespace,
        name=request.pod_name,
        qos=qos,
        containers=(*others, container) if container.sidecar or not others else (container, *others),
        annotations=annotations,
        labels=labels,
        priority=0 if before is None else before.priority,
        enhancements=wants,
        bound_numa=hint if wants.numa_binding and hint else said,
        problems=(*problems, *unbound),
    )
    return AdmissionRequest(pod, container, resource, amount, hint if wants.numa_binding else ())


def requested_quantity(request: Any, resource: str, qos: QoSLevel) -> float:
    """Cores or bytes. Raises Unusable where there is not just one number, or it is of another resource."""
    listed: dict[str, float] = dict(request.resource_requests)
    if len(listed) != 1:
        raise UnusableMessage(f"resource_requests has {len(listed)} entries; it has just the one that is asked for")
    ((key, value),) = listed.items()
    if key not in _RESOURCE_KEYS[resource]:
        other = f", it is of {NET_BANDWIDTH}" if key == NET_BANDWIDTH else ""
        raise UnusableMessage(
            f"resource_requests[{key:.80}] is not for the plugin of {resource}{other}; it takes {_RESOURCE_KEYS[resource]}"
        )
    if not math.isfinite(value) or not 0 <= value <= _MAX_QUANTITY:
        raise UnusableMessage(f"resource_requests[{key:.80}] is {value!r:.40}; it is a number from 0 on")
    thousandths = resource == CPU and (key == RECLAIMED_CPU or qos is QoSLevel.RECLAIMED)
    return value / 1000 if thousandths else value


def _container_with_request(request: Any, resource: str, qos: QoSLevel, amount: float, before: Pod | None) -> Container:
    name = request.container_name
    known = next((one for one in before.containers if one.name == name), None) if before is not None else None
    if known is None:
        # Not a path yet: nothing is written to it, it only tells containers apart.
        known = Container(
            name=name, cgroup=f"{request.pod_uid}/{name}", sidecar=request.container_type == plugin.SIDECAR
        )
    if resource == CPU:
        field = "reclaimed_cpu_cores" if qos is QoSLevel.RECLAIMED else "cpu_request_cores"
        return msgspec.structs.replace(known, **{field: amount})
    field = "reclaimed_memory_bytes" if qos is QoSLevel.RECLAIMED else "memory_request_bytes"
    return msgspec.structs.replace(known, **{field: int(amount)})


class AdmissionRefused(Exception):
    """The container cannot be admitted; the text says why, with the numbers."""


class AdmissionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on the node."""

    topology: Topology
    """Of CPUs that pods may have."""
    pods: tuple[Pod, ...] = ()
    """Those that are listed, and those that were admitted and are not listed yet."""
    sizes: tuple[PoolSize, ...] = ()
    state: CpusetState = CpusetState()
    config: CpuPlacementConfig = CpuPlacementConfig()
    memory_by_numa: Mapping[int, int] = {}
    """Bytes of each NUMA node that pods may have; empty where that is not known."""
    now_ns: int = 0


def build_admission_inputs(
    snapshot: Snapshot,
    sizes: tuple[PoolSize, ...],
    state: CpusetState,
    config: CpuPlacementConfig,
    ceiling: AllowedCpus | None = None,
) -> AdmissionInputs:
    """What a round saw, and what it left to remember; `ceiling` was in force before."""
    inside = restrict_to_allowed(snapshot, allowed_cpus_of(snapshot, ceiling))
    totals = {numa: node.meminfo.get("MemTotal", 0) for numa, node in sorted(snapshot.node.numa.items())}
    return AdmissionInputs(
        topology=inside.topology,
        pods=with_numa_bindings(snapshot.pods, state),
        sizes=sizes,
        state=state,
        config=config,
        memory_by_numa={numa: size for numa, size in totals.items() if size},
        now_ns=snapshot.taken_at_ns,
    )


class AdmissionResult(NamedTuple):
    """What a container got."""

    entry: CpusetEntry
    mems: tuple[int, ...]


def cpu_hints(ask: AdmissionRequest, seen: AdmissionInputs) -> tuple[TopologyHint, ...] | None:
    """NUMA nodes that could hold the pod; None where it may be anywhere. Raises NoFit."""
    pod, wants = ask.pod, ask.pod.enhancements
    if not _needs_numa_binding(pod, seen.config):
        return None
    if bound := bound_numa_nodes(pod, seen.state):
        return (TopologyHint(bound, preferred=True),)
    others = tuple(one for one in seen.pods if one.uid != pod.uid)
    node = layout_of(seen.topology)
    if pod.qos is QoSLevel.RECLAIMED:
        cores = reclaimed_pod_cores(pod)
        room = reclaimed_room_by_numa(others, node, seen.state)
        found = tuple(TopologyHint((numa,), preferred=True) for numa, left in sorted(room.items()) if left >= cores)
        if not found:
            rooms = ", ".join(f"{numa}: {left:g}" for numa, left in sorted(room.items())) or "not known"
            raise AdmissionRefused(
                f"{pod.key} requests {cores:g} reclaimed CPUs on one NUMA node; left to bind to: {rooms}"
            )
        return found
    ledger = compute_numa_bindings(others, seen.topology, seen.state, seen.config, seen.now_ns).ledger
    alone = wants.numa_exclusive or not wants.numa_share
    dedicated = pod.qos is QoSLevel.DEDICATED
    cores = float(ceil(pod_cores(pod, seen.config))) if dedicated else pod_cores(pod, seen.config)
    try:
        wanted = Wanted(cores=cores, enhancements=wants, several=dedicated and wants.numa_exclusive)
        return topology_hints(wanted, ledger.available(alone=alone), ledger.free, node)
    except NoTopologyHint as error:
        raise AdmissionRefused(f"{pod.key} {error}") from None


def memory_hints(ask: AdmissionRequest, seen: AdmissionInputs) -> tuple[TopologyHint, ...] | None:
    """The same by memory: every set of nodes, smallest first, whose unpromised memory holds the request."""
    pod, wants = ask.pod, ask.pod.enhancements
    if not _needs_numa_binding(pod, seen.config) or not seen.memory_by_numa:
        return None
    if bound := bound_numa_nodes(pod, seen.state):
        return (TopologyHint(bound, preferred=True),)
    left = dict(seen.memory_by_numa)
    for other in seen.pods:
        nodes = bound_numa_nodes(other, seen.state)
        for numa in nodes if other.uid != pod.uid else ():
            left[numa] = left.get(numa, 0) - pod_memory_bytes(other) // len(nodes)
    several = pod.qos is QoSLevel.DEDICATED and wants.numa_exclusive
    found = [
        nodes
        for nodes in _numa_node_sets(tuple(left), several=several)
        if sum(left[numa] for numa in nodes) >= ask.amount
    ]
    if not found:
        rooms = ", ".join(f"{numa}: {max(size, 0)}" for numa, size in sorted(left.items()))
        raise AdmissionRefused(
            f"{pod.key} asks for {ask.amount:.0f} bytes on NUMA nodes of its own choice; left on node {rooms}"
        )
    fewest = wants.numa_number or min(map(len, found))
    return tuple(TopologyHint(nodes, preferred=len(nodes) == fewest) for nodes in found)


def admit_container(ask: AdmissionRequest, seen: AdmissionInputs) -> AdmissionResult:
    """What the container gets, which is what it had where it runs already. Raises NoFit."""
    known = seen.state.pod(ask.pod.uid).get(ask.container.name)
    if known is not None:
        return AdmissionResult(known, allowed_mems(known, seen))
    if ask.resource == MEMORY and ask.container.cpu_request_cores is None and ask.container.reclaimed_cpu_cores is None:
        return _admit_memory_only(ask, seen)
    pods = (*(one for one in seen.pods if one.uid != ask.pod.uid), ask.pod)
    placement, state = allocate_cpusets(seen.sizes, pods, seen.topology, seen.state, seen.config, seen.now_ns)
    if (verdict := placement.rejected.get(ask.pod.key)) is not None:
        raise AdmissionRefused(verdict.text)
    entry = state.pod(ask.pod.uid)[ask.container.name]
    if ask.hint and entry.bound_numa and entry.bound_numa != ask.hint:
        raise AdmissionRefused(
            f"{ask.pod.key} was to have NUMA nodes {ask.hint}, which do not hold it any more; ask for hints again"
        )
    return AdmissionResult(entry, placement.mems[ask.container.cgroup])


def _admit_memory_only(ask: AdmissionRequest, seen: AdmissionInputs) -> AdmissionResult:
    """Memory of a container whose CPU nobody has asked for yet: by what it is bound to, or would be."""
    pod = ask.pod
    nodes = pod.bound_numa if _needs_numa_binding(pod, seen.config) else ()
    if _needs_numa_binding(pod, seen.config) and not nodes:
        found = memory_hints(ask, seen) or ()
        nodes = next((hint.nodes for hint in found if hint.preferred), ())
    entry = CpusetEntry(
        pod_uid=pod.uid,
        container_name=ask.container.name,
        owner_pool_name=pool_name_of(pod, nodes),
        qos_level=pod.qos.value,
        allocation_result="",
        bound_numa=nodes,
    )
    return AdmissionResult(entry, allowed_mems(entry, seen))


def allowed_mems(entry: CpusetEntry, seen: AdmissionInputs) -> tuple[int, ...]:
    """NUMA nodes whose memory a container may use, as `place` has it: its own where it is bound; else, with those of its CPUs,
    all that are nobody's own, and for shared pods none that online pods are bound to."""
    if entry.bound_numa:
        return entry.bound_numa
    node = layout_of(seen.topology)
    others = [one for its in seen.state.pod_entries.values() for one in its.values() if one.bound_numa]
    taken = {numa for one in others if one.exclusive for numa in one.bound_numa}
    if entry.qos_level == QoSLevel.SHARED:
        online = {level.value for level in QoSLevel if level.online}
        taken |= {numa for one in others if one.qos_level in online for numa in one.bound_numa}
    here = node.nodes_of(entry.cpus & frozenset(node.order))
    return tuple(sorted((set(node.numa) - taken).union(here)))


def pod_memory_bytes(pod: Pod) -> int:
    """Bytes that the pod asks for."""
    return sum(one.reclaimed_memory_bytes or one.memory_request_bytes or 0 for one in pod.containers)


def _needs_numa_binding(pod: Pod, config: CpuPlacementConfig) -> bool:
    if config.policy != "dynamic" or not pod.enhancements.numa_binding or pod.qos is QoSLevel.SYSTEM:
        return False
    return pod.qos is not QoSLevel.RECLAIMED or config.enable_reclaim_numa_binding


def _numa_node_sets(nodes: tuple[int, ...], *, several: bool) -> Iterator[tuple[int, ...]]:
    # Masks of many nodes are too many to try: the fewest that can hold it come first, and are enough.
    for count in range(1, min(len(nodes), 8 if several else 1) + 1):
        yield from combinations(sorted(nodes), count)
