"""Converts the state of a CPU plugin to CpusetState and back, and fits pool sizes to a stock plugin. Pure.
A stock plugin selects the CPUs of an unbound pool on NUMA nodes without bound pods, and those of a bound pool on
its node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.katalyst.messages import MAX_ENTRIES, QUOTA_GATE, UnusableMessage, pods_by_uid
from agent.qrm.cpuset.state import (
    DEDICATED,
    FALLBACK,
    INTERRUPT,
    POOL_ENTRY,
    RECLAIM,
    RESERVE,
    CpusetEntry,
    CpusetState,
)
from api.advice import NOT_NUMA_BOUND, PoolSize
from api.cpu import format_cpu_list, parse_cpu_list
from api.pod import Pod
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.proto import resource_plugin_pb2 as plugin
from api.qos import NUMA_BIND_RESULT_KEY, QoSLevel

SharedCpus = dict[tuple[str, int], int]
"""CPUs of online pools that reclaimed pods may share, by pool and NUMA node."""


class PluginLayout(msgspec.Struct, frozen=True):
    """Nonempty sizes of online pools and of reclaim, and the CPUs that reclaim shares with the former."""

    online: tuple[PoolSize, ...]
    reclaim: tuple[PoolSize, ...]
    shared: SharedCpus


def fit_plugin_layout(
    sizes: Sequence[PoolSize], usable: Mapping[int, int], dedicated: Mapping[int, int]
) -> PluginLayout:
    """Fit sizes to the CPUs of the plugin: `usable` by NUMA node without reserved and interrupt CPUs, and `dedicated`.

    Excess is taken from reclaimed pods, regardless of their configured minimum. Raises UnusableMessage if the online
    pools alone do not fit.
    """
    shared = shared_cpus_of(sizes)
    online = tuple(size for size in sizes if _is_sized_pool(size.pool) and size.cpus > 0)
    reclaim = tuple(size for size in sizes if size.pool == RECLAIM)
    bound = {size.numa for size in online if size.numa != NOT_NUMA_BOUND}
    bound |= {numa for numa, cpus in dedicated.items() if cpus}
    room = {numa: cpus - dedicated.get(numa, 0) for numa, cpus in usable.items()}
    if set(usable) <= bound and any(size.numa == NOT_NUMA_BOUND for size in online):
        online = _spread_over_numa(online, reclaim, room, shared)
    fitted = list(reclaim)
    for scope in (*sorted(usable), NOT_NUMA_BOUND):
        free = room[scope] if scope != NOT_NUMA_BOUND else _unbound_cpus(room, bound, fitted)
        fitted = _shrink_reclaim(scope, free, online, fitted)
    return PluginLayout(online, tuple(fitted), shared)


def shared_cpus_of(sizes: Iterable[PoolSize]) -> SharedCpus:
    """Return the CPUs that reclaimed pods may share according to the sizes."""
    shared: SharedCpus = {}
    for size in sizes:
        if size.pool == RECLAIM:
            for pool, cpus in size.overlap.items():
                plain, _dash, node = pool.rpartition("-NUMA")
                # The pool of a dedicated pod may have the NUMA node of the shared CPUs in its name.
                own = pool.startswith(f"{DEDICATED}-") and node.isdigit()
                key = (plain, int(node)) if own else (pool, size.numa)
                shared[key] = shared.get(key, 0) + cpus
    return shared


def _is_sized_pool(pool: str) -> bool:
    return pool not in (RECLAIM, RESERVE, INTERRUPT, DEDICATED, FALLBACK) and not pool.startswith(f"{DEDICATED}-")


def _spread_over_numa(
    online: Sequence[PoolSize], reclaim: Sequence[PoolSize], room: Mapping[int, int], shared: SharedCpus
) -> tuple[PoolSize, ...]:
    """Spread unbound pools over NUMA nodes, the freest first, with their shared CPUs: if every node has bound pods, a stock
    plugin has no CPUs for unbound pools."""
    spread = [size for size in online if size.numa != NOT_NUMA_BOUND]
    free = {
        numa: cpus - sum(size.cpus for size in (*spread, *reclaim) if size.numa == numa) for numa, cpus in room.items()
    }
    for size in (size for size in online if size.numa == NOT_NUMA_BOUND):
        left, overlap = size.cpus, shared.pop((size.pool, NOT_NUMA_BOUND), 0)
        while left > 0:
            numa = max(free, key=lambda numa: (free[numa], -numa))
            # On a full node reclaimed pods shrink.
            part = min(left, max(free[numa], 1))
            spread.append(msgspec.structs.replace(size, numa=numa, cpus=part))
            free[numa], left = free[numa] - part, left - part
            if share := min(overlap, part):
                shared[size.pool, numa] = shared.get((size.pool, numa), 0) + share
                overlap -= share
    merged: dict[tuple[str, int], int] = {}
    for size in spread:
        merged[size.pool, size.numa] = merged.get((size.pool, size.numa), 0) + size.cpus
    return tuple(PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in merged.items())


def _unbound_cpus(room: Mapping[int, int], bound: Iterable[int], reclaim: Sequence[PoolSize]) -> int:
    """Return the CPUs of NUMA nodes without bound pods, less the reclaim pools of these nodes."""
    free = set(room).difference(bound)
    return sum(room[numa] for numa in free) - sum(size.cpus for size in reclaim if size.numa in free)


def _shrink_reclaim(scope: int, free: int, online: Sequence[PoolSize], reclaim: Sequence[PoolSize]) -> list[PoolSize]:
    """Return the reclaim sizes, reduced on this NUMA node to the CPUs that online pools leave."""
    online_cpus = sum(size.cpus for size in online if size.numa == scope)
    if online_cpus > max(free, 0):
        where = "outside NUMA nodes with bound pods" if scope == NOT_NUMA_BOUND else f"on NUMA node {scope}"
        raise UnusableMessage(
            f"the advisor assigns online pools {online_cpus} CPUs {where}, where the plugin has {max(free, 0)}"
        )
    left, fitted = free - online_cpus, []
    for size in reclaim:
        if size.numa == scope:
            size = msgspec.structs.replace(size, cpus=min(size.cpus, left))  # noqa: PLW2901 - the same size, reduced
            left -= size.cpus
        fitted.append(size)
    return fitted


DYNAMIC_POLICY = "dynamic"
NUMA_HINT = "numa_hint"
"""Annotation in which a plugin keeps the NUMA nodes that it selected, in its copy of the pod."""
_NUMA_POOL = re.compile(r".+-NUMA(\d{1,4})", re.ASCII)


def decode_plugin_state(request: Any) -> CpusetState:
    """Decode the plugin's allocations from its GetAdviceRequest. Raises UnusableMessage."""
    if len(request.entries) > MAX_ENTRIES:
        raise UnusableMessage(f"entries has {len(request.entries)} items; at most {MAX_ENTRIES} are allowed")
    entries: dict[str, dict[str, CpusetEntry]] = {}
    for entry, containers in sorted(request.entries.items()):
        for container, item in sorted(containers.entries.items()):
            entries.setdefault(entry, {})[container] = _decode_entry(entry, container, item)
    return CpusetState(policy_name=DYNAMIC_POLICY, pod_entries=entries)


def request_from_checkpoint(checkpoint: Any, containers: Mapping[tuple[str, str], Any]) -> Any:
    """Build a GetAdviceRequest of an older plugin from its GetCheckpointResponse and its AddContainer calls."""
    request = cpu.GetAdviceRequest()
    for entry, allocations in checkpoint.entries.items():
        for name, allocation in allocations.entries.items():
            target = request.entries[entry].entries[name]
            target.allocation_info.CopyFrom(allocation)
            metadata = containers.get((entry, name)) or svc.ContainerMetadata(pod_uid=entry, container_name=name)
            target.metadata.CopyFrom(metadata)
    return request


def count_cpus_by_numa(info: Any, field: str) -> dict[int, int]:
    """Return the number of CPUs of an AllocationInfo by NUMA node. Raises UnusableMessage."""
    return {numa: len(_parse_cpus(text, field)) for numa, text in sorted(info.topology_aware_assignments.items())}


def bound_nodes_of(item: Any) -> tuple[int, ...]:
    """Return the NUMA nodes to which a container (ContainerAllocationInfo) is bound; empty without a binding."""
    metadata, info = item.metadata, item.allocation_info
    if metadata.annotations.get("numa_binding") != "true":
        return ()
    if metadata.qos_level == QoSLevel.DEDICATED:
        return tuple(sorted(int(numa) for numa in info.topology_aware_assignments))
    if match := _NUMA_POOL.fullmatch(info.owner_pool_name):
        return (int(match[1]),)
    text = metadata.annotations.get(NUMA_HINT) or metadata.annotations.get(NUMA_BIND_RESULT_KEY, "")
    return (int(text),) if text.isascii() and text.isdigit() and len(text) < 5 else ()


def encode_cpu_request(state: CpusetState, pods: tuple[Pod, ...]) -> Any:
    """Return the GetAdviceRequest to a foreign CPU advisor: allocations and metadata of all containers and pools."""
    request = cpu.GetAdviceRequest()
    by_uid = pods_by_uid(pods)
    for entry, containers in sorted(state.pod_entries.items()):
        if POOL_ENTRY not in containers and entry not in by_uid:
            continue  # An advisor rejects the whole request if it contains a pod that is gone.
        for name, item in sorted(containers.items()):
            target = request.entries[entry].entries[name]
            target.allocation_info.CopyFrom(encode_allocation_info(item, pool=name == POOL_ENTRY))
            if name == POOL_ENTRY:
                target.metadata.SetInParent()
            else:
                metadata = encode_metadata(by_uid[entry], item, item.request_quantity, index=len(containers))
                target.metadata.CopyFrom(metadata)
    if RESERVE not in request.entries:
        # Katalyst's advisor gives no advice without a reserve pool, even an empty one.
        request.entries[RESERVE].entries[POOL_ENTRY].allocation_info.owner_pool_name = RESERVE
        request.entries[RESERVE].entries[POOL_ENTRY].metadata.SetInParent()
    gate = svc.FeatureGate(name=QUOTA_GATE, type="CPU")
    request.wanted_feature_gates[QUOTA_GATE].CopyFrom(gate)
    return request


def encode_checkpoint(state: CpusetState) -> Any:
    """Return the allocations as GetCheckpointResponse, for advisors that read them from the plugin."""
    checkpoint = cpu.GetCheckpointResponse()
    for entry, containers in sorted(state.pod_entries.items()):
        for name, item in sorted(containers.items()):
            info = encode_allocation_info(item, pool=name == POOL_ENTRY)
            checkpoint.entries[entry].entries[name].CopyFrom(info)
    if RESERVE not in checkpoint.entries:
        checkpoint.entries[RESERVE].entries[POOL_ENTRY].owner_pool_name = RESERVE
    return checkpoint


def encode_allocation_info(item: CpusetEntry, *, pool: bool) -> Any:
    """Return the AllocationInfo of a container or pool. The CPUs of a shared container are listed only with its pool; a
    container that ramps up is in no pool."""
    info = cpu.AllocationInfo(ramp_up=item.ramp_up, owner_pool_name="" if item.ramp_up else item.owner_pool_name)
    if pool or item.qos_level != QoSLevel.SHARED:
        for numa, text in item.topology_aware_assignments.items():
            info.topology_aware_assignments[numa] = text
            info.original_topology_aware_assignments[numa] = text
    return info


def encode_metadata(pod: Pod, item: CpusetEntry, quantity: float, index: int = 0) -> Any:
    """Return the ContainerMetadata for either advisor; `quantity` is in cores or bytes. Enhancements become single annotations,
    as a plugin gets them."""
    names = [container.name for container in pod.containers]
    return svc.ContainerMetadata(
        pod_uid=pod.uid,
        pod_namespace=pod.namespace,
        pod_name=pod.name,
        container_name=item.container_name,
        container_type=plugin.SIDECAR if item.container_type == "SIDECAR" else plugin.MAIN,
        container_index=names.index(item.container_name) if item.container_name in names else index,
        labels=dict(pod.labels),
        annotations={**pod.annotations, **_flat_annotations(pod, item.bound_numa)},
        qos_level=pod.qos.value,
        requestQuantity=int(quantity),
        requestMilliQuantity=round(quantity * 1000),
        useMilliQuantity=True,
    )


def _flat_annotations(pod: Pod, bound: tuple[int, ...]) -> dict[str, str]:
    enhancements = pod.enhancements
    annotations = {
        "numa_binding": "true" if enhancements.numa_binding else "",
        "numa_exclusive": "true" if enhancements.numa_exclusive else "",
        "cpuset_pool": enhancements.cpuset_pool,
        NUMA_BIND_RESULT_KEY: str(bound[0]) if len(bound) == 1 else "",
        NUMA_HINT: format_cpu_list(bound),
    }
    return {key: value for key, value in annotations.items() if value}


def _decode_entry(entry: str, container: str, item: Any) -> CpusetEntry:
    field = f"entries[{entry[:80]}]" + (f".entries[{container[:80]}]" if container else "")
    metadata, info = item.metadata, item.allocation_info
    lists = {numa: _parse_cpus(text, field) for numa, text in sorted(info.topology_aware_assignments.items())}
    bound = () if container == POOL_ENTRY else bound_nodes_of(item)
    own = not container or info.owner_pool_name == DEDICATED
    quantity = metadata.requestMilliQuantity / 1000 if metadata.useMilliQuantity else float(metadata.requestQuantity)
    return CpusetEntry(
        pod_uid=entry,
        pod_namespace=metadata.pod_namespace,
        pod_name=metadata.pod_name,
        container_name=container,
        container_type="" if not container else "SIDECAR" if metadata.container_type == plugin.SIDECAR else "MAIN",
        owner_pool_name=info.owner_pool_name or (entry if own else ""),
        qos_level=metadata.qos_level,
        ramp_up=info.ramp_up,
        allocation_result=format_cpu_list(cpu for cpus in lists.values() for cpu in cpus),
        topology_aware_assignments={int(numa): format_cpu_list(cpus) for numa, cpus in lists.items()},
        request_quantity=quantity,
        bound_numa=bound,
        exclusive=metadata.annotations.get("numa_exclusive") == "true" and bool(bound),
    )


def _parse_cpus(text: str, field: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise UnusableMessage(f"{field}.topology_aware_assignments: {str(error)[:200]}") from None
