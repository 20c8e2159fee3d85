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

from agent.config.annotation_rights import limit_level, pod_rights
from agent.config.qos import QosConfig
from agent.config.qrm import CpuPlacementConfig
from agent.katalyst.messages import CPU, MEMORY, UnusableMessage
from agent.qrm.cpuset.allocate import allocate_cpusets, compute_numa_bindings
from agent.qrm.cpuset.allowed_cpus import AllowedCpus, allowed_cpus_of, restrict_to_allowed
from agent.qrm.cpuset.numa_binding import UNFULFILLED_RULES, pod_cores, reclaimed_pod_cores, reclaimed_room_by_numa
from agent.qrm.cpuset.state import CpusetEntry, CpusetState, bound_numa_nodes, pool_name_of, with_numa_bindings
from agent.qrm.cpuset.topology_hints import NoTopologyHint, NumaRequest, TopologyHint, topology_hints
from agent.qrm.cpuset.topology_layout import layout_of
from api.advice import PoolSize
from api.annotations import parse_enhancements, parse_numa_bind_result
from api.cpu import Topology
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.proto import resource_plugin_pb2 as plugin
from api.qos import QoSLevel, explicit_qos_level
from api.snapshot import Snapshot
from api.text import quote

_RESOURCE_KEYS = {CPU: (CPU, RECLAIMED_CPU), MEMORY: (MEMORY, RECLAIMED_MEMORY)}
_MAX_QUANTITY = float(1 << 62)


class AdmissionRequest(msgspec.Struct, frozen=True):
    """One container's request of one resource."""

    pod: Pod
    """The pod with this container and those of earlier requests."""
    container: Container
    resource: str
    """`cpu` or `memory`."""
    amount: float
    """Cores or bytes."""
    hint: tuple[int, ...]
    """NUMA nodes of the agreed topology hint; empty without one."""


def parse_admission_request(request: Any, resource: str, before: Pod | None, qos_config: QosConfig) -> AdmissionRequest:
    """Parse a ResourceRequest to the plugin of `resource`; `before` is the pod from the list or from earlier requests.

    The request lacks the pod's priority class, so only the namespace can give the pod rights until the pod is listed. Raises
    UnusableMessage.
    """
    for field in ("pod_uid", "pod_name", "container_name"):
        if not getattr(request, field):
            raise UnusableMessage(f"{field} is empty")
    annotations, labels, dialect = dict(request.annotations), dict(request.labels), qos_config.dialect()
    try:
        qos = explicit_qos_level(annotations, dialect.selectors) or QoSLevel.SHARED
    except ValueError as error:
        raise UnusableMessage(f"annotations: {str(error)[:250]}") from None
    amount = requested_quantity(request, resource, qos)
    priority_class = "" if before is None else before.priority_class
    rights = pod_rights(qos_config.rights, request.pod_namespace, priority_class)
    main_request = amount if resource == CPU and request.container_type != plugin.SIDECAR else None
    qos, level_problems = limit_level(qos, main_request, rights)
    enhancements, problems = parse_enhancements(annotations, qos, dialect, None, rights.withheld_enhancements())
    bound_numa, unbound = parse_numa_bind_result(annotations, dialect)
    hint = tuple(sorted({int(node) for node in request.hint.nodes if node < 1024}))
    if not bound_numa and before is not None:
        bound_numa = before.bound_numa
    container = _container_with_request(request, resource, qos, amount, before)
    others = tuple(other for other in before.containers if other.name != container.name) if before is not None else ()
    pod = Pod(
        uid=request.pod_uid,
        namespace=request.pod_namespace,
        name=request.pod_name,
        qos=qos,
        containers=(*others, container) if container.sidecar or not others else (container, *others),
        annotations=annotations,
        labels=labels,
        priority=0 if before is None else before.priority,
        priority_class=priority_class,
        enhancements=enhancements,
        bound_numa=hint if enhancements.numa_binding and hint else bound_numa,
        problems=(*level_problems, *problems, *unbound),
    )
    return AdmissionRequest(pod, container, resource, amount, hint if enhancements.numa_binding else ())


def requested_quantity(request: Any, resource: str, qos: QoSLevel) -> float:
    """Return cores or bytes. Raises UnusableMessage unless the request has exactly one amount, of this resource."""
    requests: dict[str, float] = dict(request.resource_requests)
    if len(requests) != 1:
        raise UnusableMessage(f"resource_requests has {len(requests)} entries; exactly one is allowed")
    ((key, value),) = requests.items()
    if key not in _RESOURCE_KEYS[resource]:
        raise UnusableMessage(
            f"resource_requests[{key:.80}] does not belong to the plugin of {resource}, which serves {_RESOURCE_KEYS[resource]}"
        )
    if not math.isfinite(value) or not 0 <= value <= _MAX_QUANTITY:
        raise UnusableMessage(f"resource_requests[{key:.80}] is {quote(value, 40)}; it must be a number of at least 0")
    thousandths = resource == CPU and (key == RECLAIMED_CPU or qos is QoSLevel.RECLAIMED)
    return value / 1000 if thousandths else value


def _container_with_request(request: Any, resource: str, qos: QoSLevel, amount: float, before: Pod | None) -> Container:
    name = request.container_name
    container = next((other for other in before.containers if other.name == name), None) if before is not None else None
    if container is None:
        # The cgroup does not exist yet: the path only identifies the container and is never written to.
        container = Container(
            name=name, cgroup=f"{request.pod_uid}/{name}", sidecar=request.container_type == plugin.SIDECAR
        )
    if resource == CPU:
        field = "reclaimed_cpu_cores" if qos is QoSLevel.RECLAIMED else "cpu_request_cores"
        return msgspec.structs.replace(container, **{field: amount})
    field = "reclaimed_memory_bytes" if qos is QoSLevel.RECLAIMED else "memory_request_bytes"
    return msgspec.structs.replace(container, **{field: int(amount)})


class AdmissionRefused(Exception):
    """The container cannot be admitted; the text contains the reason with its numbers."""


class AdmissionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node for admissions."""

    topology: Topology
    """CPUs that pods may use."""
    pods: tuple[Pod, ...] = ()
    """Listed pods, and admitted pods that are not listed yet."""
    sizes: tuple[PoolSize, ...] = ()
    state: CpusetState = CpusetState()
    config: CpuPlacementConfig = CpuPlacementConfig()
    memory_by_numa: Mapping[int, int] = {}
    """Memory of each NUMA node in bytes; empty if unknown."""
    now_ns: int = 0


def build_admission_inputs(
    snapshot: Snapshot,
    sizes: tuple[PoolSize, ...],
    state: CpusetState,
    config: CpuPlacementConfig,
    allowed: AllowedCpus | None = None,
) -> AdmissionInputs:
    """Build the inputs from a cycle and its resulting state; `allowed` are the allowed CPUs of the cycle before."""
    restricted = restrict_to_allowed(snapshot, allowed_cpus_of(snapshot, allowed))
    totals = {numa: node.meminfo.get("MemTotal", 0) for numa, node in sorted(snapshot.node.numa.items())}
    return AdmissionInputs(
        topology=restricted.topology,
        pods=with_numa_bindings(snapshot.pods, state),
        sizes=sizes,
        state=state,
        config=config,
        memory_by_numa={numa: size for numa, size in totals.items() if size},
        now_ns=snapshot.taken_at_ns,
    )


class AdmissionResult(NamedTuple):
    """CPU entry and memory nodes of an admitted container."""

    entry: CpusetEntry
    mems: tuple[int, ...]


def cpu_hints(request: AdmissionRequest, inputs: AdmissionInputs) -> tuple[TopologyHint, ...] | None:
    """Return NUMA nodes whose CPUs can hold the pod; None for any placement. Raises AdmissionRefused."""
    pod, enhancements = request.pod, request.pod.enhancements
    if not _needs_numa_binding(pod, inputs.config):
        return None
    if bound := bound_numa_nodes(pod, inputs.state):
        return (TopologyHint(bound, preferred=True),)
    others = tuple(other for other in inputs.pods if other.uid != pod.uid)
    node = layout_of(inputs.topology)
    if pod.qos is QoSLevel.RECLAIMED:
        cores = reclaimed_pod_cores(pod)
        room = reclaimed_room_by_numa(others, node, inputs.state)
        hints = tuple(TopologyHint((numa,), preferred=True) for numa, free in sorted(room.items()) if free >= cores)
        if not hints:
            rooms = ", ".join(f"{numa}: {free:g}" for numa, free in sorted(room.items())) or "unknown"
            raise AdmissionRefused(
                f"{pod.key} requests {cores:g} reclaimed CPUs on one NUMA node; available by node: {rooms}"
            )
        return hints
    allocations = compute_numa_bindings(others, inputs.topology, inputs.state, inputs.config, inputs.now_ns).allocations
    alone = enhancements.numa_exclusive or not enhancements.numa_share
    dedicated = pod.qos is QoSLevel.DEDICATED
    cores = float(ceil(pod_cores(pod, inputs.config))) if dedicated else pod_cores(pod, inputs.config)
    try:
        numa_request = NumaRequest(
            cores=cores, enhancements=enhancements, several=dedicated and enhancements.numa_exclusive
        )
        return topology_hints(numa_request, allocations.available(alone=alone), allocations.free, node)
    except NoTopologyHint as error:
        raise AdmissionRefused(f"{pod.key} {error}") from None


def memory_hints(request: AdmissionRequest, inputs: AdmissionInputs) -> tuple[TopologyHint, ...] | None:
    """Return sets of NUMA nodes, smallest first, whose unreserved memory can hold the request; None for any placement. Raises
    AdmissionRefused."""
    pod, enhancements = request.pod, request.pod.enhancements
    if not _needs_numa_binding(pod, inputs.config) or not inputs.memory_by_numa:
        return None
    if bound := bound_numa_nodes(pod, inputs.state):
        return (TopologyHint(bound, preferred=True),)
    free = dict(inputs.memory_by_numa)
    for other in inputs.pods:
        nodes = bound_numa_nodes(other, inputs.state)
        for numa in nodes if other.uid != pod.uid else ():
            free[numa] = free.get(numa, 0) - pod_memory_bytes(other) // len(nodes)
    several = pod.qos is QoSLevel.DEDICATED and enhancements.numa_exclusive
    sets = [
        nodes
        for nodes in _numa_node_sets(tuple(free), several=several)
        if sum(free[numa] for numa in nodes) >= request.amount
    ]
    if not sets:
        rooms = ", ".join(f"{numa}: {max(size, 0)}" for numa, size in sorted(free.items()))
        raise AdmissionRefused(
            f"{pod.key} requests {request.amount:.0f} bytes of NUMA-bound memory; available by node: {rooms}"
        )
    count = enhancements.numa_number or min(map(len, sets))
    return tuple(TopologyHint(nodes, preferred=len(nodes) == count) for nodes in sets)


def admit_container(request: AdmissionRequest, inputs: AdmissionInputs) -> AdmissionResult:
    """Return the allocation of the container; a container that has one keeps it. Raises AdmissionRefused."""
    pod, container = request.pod, request.container
    current = inputs.state.pod(pod.uid).get(container.name)
    if current is not None:
        return AdmissionResult(current, allowed_mems(current, inputs))
    if request.resource == MEMORY and container.cpu_request_cores is None and container.reclaimed_cpu_cores is None:
        return _admit_memory_only(request, inputs)
    pods = (*(other for other in inputs.pods if other.uid != pod.uid), pod)
    placement, state = allocate_cpusets(inputs.sizes, pods, inputs.topology, inputs.state, inputs.config, inputs.now_ns)
    reason = placement.rejected.get(pod.key)
    if reason is not None and reason.rule not in UNFULFILLED_RULES:
        raise AdmissionRefused(reason.text)
    entry = state.pod(pod.uid)[container.name]
    if request.hint and entry.bound_numa and entry.bound_numa != request.hint:
        raise AdmissionRefused(f"{pod.key} does not fit on NUMA nodes {request.hint} any more; request new hints")
    return AdmissionResult(entry, placement.mems[container.cgroup])


def _admit_memory_only(request: AdmissionRequest, inputs: AdmissionInputs) -> AdmissionResult:
    """Allocate memory for a container without a CPU request, on the NUMA nodes of its binding or of its preferred hint."""
    pod = request.pod
    nodes = pod.bound_numa if _needs_numa_binding(pod, inputs.config) else ()
    if _needs_numa_binding(pod, inputs.config) and not nodes:
        hints = memory_hints(request, inputs) or ()
        nodes = next((hint.nodes for hint in hints if hint.preferred), ())
    entry = CpusetEntry(
        pod_uid=pod.uid,
        container_name=request.container.name,
        owner_pool_name=pool_name_of(pod, nodes),
        qos_level=pod.qos.value,
        allocation_result="",
        bound_numa=nodes,
    )
    return AdmissionResult(entry, allowed_mems(entry, inputs))


def allowed_mems(entry: CpusetEntry, inputs: AdmissionInputs) -> tuple[int, ...]:
    """Return the NUMA nodes whose memory a container may use, by the rules of a cycle.

    A bound container uses its own nodes. Others use the nodes of their CPUs and all nodes without an exclusive pod; shared pods
    also avoid nodes to which online pods are bound.
    """
    if entry.bound_numa:
        return entry.bound_numa
    node = layout_of(inputs.topology)
    others = [other for pod in inputs.state.pod_entries.values() for other in pod.values() if other.bound_numa]
    excluded = {numa for other in others if other.exclusive for numa in other.bound_numa}
    if entry.qos_level == QoSLevel.SHARED:
        online = {level.value for level in QoSLevel if level.online}
        excluded |= {numa for other in others if other.qos_level in online for numa in other.bound_numa}
    own = node.nodes_of(entry.cpus & frozenset(node.order))
    return tuple(sorted((set(node.numa) - excluded).union(own)))


def pod_memory_bytes(pod: Pod) -> int:
    """Return the memory request of the pod in bytes."""
    return sum(container_memory_bytes(container) for container in pod.containers)


def container_memory_bytes(container: Container) -> int:
    """Return the reclaimed memory request of the container, else its memory request, in bytes."""
    return container.reclaimed_memory_bytes or container.memory_request_bytes or 0


def _needs_numa_binding(pod: Pod, config: CpuPlacementConfig) -> bool:
    if config.policy != "dynamic" or not pod.enhancements.numa_binding or pod.qos is QoSLevel.SYSTEM:
        return False
    return pod.qos is not QoSLevel.RECLAIMED or config.enable_reclaim_numa_binding


def _numa_node_sets(nodes: tuple[int, ...], *, several: bool) -> Iterator[tuple[int, ...]]:
    # Smallest sets first; sets above 8 nodes are skipped, because their number grows exponentially.
    for count in range(1, min(len(nodes), 8 if several else 1) + 1):
        yield from combinations(sorted(nodes), count)
