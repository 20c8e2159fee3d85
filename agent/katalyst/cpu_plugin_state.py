"""Converts the state of a CPU plugin to ours and back, and fits pool sizes to a stock plugin. Pure.
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
"""CPUs that reclaimed pods may share, by lender and NUMA node."""


class PluginLayout(msgspec.Struct, frozen=True):
    """Sizes of online pools and of reclaim, none of no CPUs, and what reclaim shares of the former."""

    online: tuple[PoolSize, ...]
    reclaim: tuple[PoolSize, ...]
    lent: SharedCpus


def fit_plugin_layout(
    sizes: Sequence[PoolSize], usable: Mapping[int, int], dedicated: Mapping[int, int]
) -> PluginLayout:
    """`usable` are the CPUs of each NUMA node that are neither reserved nor for interrupts, `dedicated` those of containers.

    What is too much is taken from reclaimed pods, whatever our own settings say is reserved. Raises Unusable where online
    pools alone are too much.
    """
    lent = shared_cpus_of(sizes)
    online = tuple(size for size in sizes if _is_sized_pool(size.pool) and size.cpus > 0)
    reclaim = tuple(size for size in sizes if size.pool == RECLAIM)
    taken = {numa for numa, cpus in dedicated.items() if cpus}
    bound = {size.numa for size in online if size.numa != NOT_NUMA_BOUND} | taken
    room = {numa: cpus - dedicated.get(numa, 0) for numa, cpus in usable.items()}
    if set(usable) <= bound and any(size.numa == NOT_NUMA_BOUND for size in online):
        online = _spread_over_numa(online, reclaim, room, lent)
    fitted = list(reclaim)
    for scope in (*sorted(usable), NOT_NUMA_BOUND):
        free = room[scope] if scope != NOT_NUMA_BOUND else _unbound_cpus(room, bound, fitted)
        fitted = _shrink_reclaim(scope, free, online, fitted)
    return PluginLayout(online, tuple(fitted), lent)


def shared_cpus_of(sizes: Iterable[PoolSize]) -> SharedCpus:
    """What sizes say that reclaimed pods may share."""
    found: SharedCpus = {}
    for size in sizes:
        if size.pool == RECLAIM:
            for lender, cpus in size.overlap.items():
                plain, _dash, node = lender.rpartition("-NUMA")
                # A dedicated pod may be named with the node that it is lent from.
                own = lender.startswith(f"{DEDICATED}-") and node.isdigit()
                key = (plain, int(node)) if own else (lender, size.numa)
                found[key] = found.get(key, 0) + cpus
    return found


def _is_sized_pool(pool: str) -> bool:
    return pool not in (RECLAIM, RESERVE, INTERRUPT, DEDICATED, FALLBACK) and not pool.startswith(f"{DEDICATED}-")


def _spread_over_numa(
    online: Sequence[PoolSize], reclaim: Sequence[PoolSize], room: Mapping[int, int], lent: SharedCpus
) -> tuple[PoolSize, ...]:
    """Where every NUMA node has pods that are bound to it, pools of no node are laid over them, where there is most room
    first, and what they lend with them."""
    laid = [size for size in online if size.numa != NOT_NUMA_BOUND]
    left_on = {
        numa: cpus - sum(size.cpus for size in (*laid, *reclaim) if size.numa == numa) for numa, cpus in room.items()
    }
    for size in (size for size in online if size.numa == NOT_NUMA_BOUND):
        left, shared = size.cpus, lent.pop((size.pool, NOT_NUMA_BOUND), 0)
        while left > 0:
            numa = max(left_on, key=lambda numa: (left_on[numa], -numa))
            # Where nothing is left reclaimed pods give way.
            part = min(left, max(left_on[numa], 1))
            laid.append(msgspec.structs.replace(size, numa=numa, cpus=part))
            left_on[numa], left = left_on[numa] - part, left - part
            if share := min(shared, part):
                lent[size.pool, numa] = lent.get((size.pool, numa), 0) + share
                shared -= share
    merged: dict[tuple[str, int], int] = {}
    for size in laid:
        merged[size.pool, size.numa] = merged.get((size.pool, size.numa), 0) + size.cpus
    return tuple(PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in merged.items())


def _unbound_cpus(room: Mapping[int, int], bound: Iterable[int], reclaim: Sequence[PoolSize]) -> int:
    """CPUs of the nodes that nobody is bound to, without what reclaimed pods have there in particular."""
    free = set(room).difference(bound)
    return sum(room[numa] for numa in free) - sum(size.cpus for size in reclaim if size.numa in free)


def _shrink_reclaim(scope: int, free: int, online: Sequence[PoolSize], reclaim: Sequence[PoolSize]) -> list[PoolSize]:
    """The sizes of reclaim, with less of this scope where all is too much."""
    asked = sum(size.cpus for size in online if size.numa == scope)
    if asked > max(free, 0):
        where = "beside bound pods" if scope == NOT_NUMA_BOUND else f"on NUMA node {scope}"
        raise UnusableMessage(
            f"the advisor gives online pools {asked} CPUs {where}, where the plugin has {max(free, 0)} for them"
        )
    left, fitted = free - asked, []
    for size in reclaim:
        if size.numa == scope:
            size = msgspec.structs.replace(size, cpus=min(size.cpus, left))  # noqa: PLW2901 - the same, but smaller
            left -= size.cpus
        fitted.append(size)
    return fitted


DYNAMIC_POLICY = "dynamic"
NUMA_HINT = "numa_hint"
"""Where a plugin writes the NUMA nodes that it chose, in its own copy of a pod's annotations."""
_NUMA_POOL = re.compile(r".+-NUMA(\d{1,4})", re.ASCII)


def decode_plugin_state(request: Any) -> CpusetState:
    """What the plugin has given to whom, from its request (GetAdviceRequest). Raises Unusable that names the field."""
    if len(request.entries) > MAX_ENTRIES:
        raise UnusableMessage(f"entries has {len(request.entries)} of them; {MAX_ENTRIES} are the most")
    entries: dict[str, dict[str, CpusetEntry]] = {}
    for entry, its in sorted(request.entries.items()):
        for container, item in sorted(its.entries.items()):
            entries.setdefault(entry, {})[container] = _decode_entry(entry, container, item)
    return CpusetState(policy_name=DYNAMIC_POLICY, pod_entries=entries)


def request_from_checkpoint(checkpoint: Any, containers: Mapping[tuple[str, str], Any]) -> Any:
    """The same request from what an older plugin says in two places: GetCheckpointResponse, and each AddContainer by uid
    and container."""
    request = cpu.GetAdviceRequest()
    for entry, its in checkpoint.entries.items():
        for container, item in its.entries.items():
            made = request.entries[entry].entries[container]
            made.allocation_info.CopyFrom(item)
            known = containers.get((entry, container))
            made.metadata.CopyFrom(known or svc.ContainerMetadata(pod_uid=entry, container_name=container))
    return request


def count_cpus_by_numa(info: Any, field: str) -> dict[int, int]:
    """How many CPUs of each NUMA node an AllocationInfo has. Raises Unusable that names the field."""
    return {numa: len(_parse_cpus(text, field)) for numa, text in sorted(info.topology_aware_assignments.items())}


def bound_nodes_of(item: Any) -> tuple[int, ...]:
    """The NUMA nodes that a container (ContainerAllocationInfo) is bound to; empty where to none."""
    metadata, info = item.metadata, item.allocation_info
    if metadata.annotations.get("numa_binding") != "true":
        return ()
    if metadata.qos_level == QoSLevel.DEDICATED:
        return tuple(sorted(int(numa) for numa in info.topology_aware_assignments))
    if match := _NUMA_POOL.fullmatch(info.owner_pool_name):
        return (int(match[1]),)
    said = metadata.annotations.get(NUMA_HINT) or metadata.annotations.get(NUMA_BIND_RESULT_KEY, "")
    return (int(said),) if said.isascii() and said.isdigit() and len(said) < 5 else ()


def encode_cpu_request(state: CpusetState, pods: tuple[Pod, ...]) -> Any:
    """What our QRM asks somebody else's CPU advisor with: who has what, and who that is."""
    request = cpu.GetAdviceRequest()
    known = pods_by_uid(pods)
    for entry, its in sorted(state.pod_entries.items()):
        if POOL_ENTRY not in its and entry not in known:
            continue  # it is gone: an advisor that cannot find it refuses the whole request
        for container, item in sorted(its.items()):
            made = request.entries[entry].entries[container]
            made.allocation_info.CopyFrom(encode_allocation_info(item, pool=container == POOL_ENTRY))
            if container == POOL_ENTRY:
                made.metadata.SetInParent()
            else:
                made.metadata.CopyFrom(encode_metadata(known[entry], item, item.request_quantity, index=len(its)))
    if RESERVE not in request.entries:
        # That advisor says nothing without such a pool, be it empty.
        request.entries[RESERVE].entries[POOL_ENTRY].allocation_info.owner_pool_name = RESERVE
        request.entries[RESERVE].entries[POOL_ENTRY].metadata.SetInParent()
    gate = svc.FeatureGate(name=QUOTA_GATE, type="CPU")
    request.wanted_feature_gates[QUOTA_GATE].CopyFrom(gate)
    return request


def encode_checkpoint(state: CpusetState) -> Any:
    """The same for advisors that ask the plugin: GetCheckpointResponse."""
    found = cpu.GetCheckpointResponse()
    for entry, its in sorted(state.pod_entries.items()):
        for container, item in sorted(its.items()):
            found.entries[entry].entries[container].CopyFrom(encode_allocation_info(item, pool=container == POOL_ENTRY))
    if RESERVE not in found.entries:
        found.entries[RESERVE].entries[POOL_ENTRY].owner_pool_name = RESERVE
    return found


def encode_allocation_info(item: CpusetEntry, *, pool: bool) -> Any:
    """What one has. Shared containers have what their pool has, which is said there; one that ramps up is in no pool."""
    info = cpu.AllocationInfo(ramp_up=item.ramp_up, owner_pool_name="" if item.ramp_up else item.owner_pool_name)
    if pool or item.qos_level != QoSLevel.SHARED:
        for numa, text in item.topology_aware_assignments.items():
            info.topology_aware_assignments[numa] = text
            info.original_topology_aware_assignments[numa] = text
    return info


def encode_metadata(pod: Pod, item: CpusetEntry, quantity: float, index: int = 0) -> Any:
    """Who a container is, for either advisor; cores, or bytes. Enhancements are laid out flat, as a plugin gets them."""
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
    wants = pod.enhancements
    said = {
        "numa_binding": "true" if wants.numa_binding else "",
        "numa_exclusive": "true" if wants.numa_exclusive else "",
        "cpuset_pool": wants.cpuset_pool,
        NUMA_BIND_RESULT_KEY: str(bound[0]) if len(bound) == 1 else "",
        NUMA_HINT: format_cpu_list(bound),
    }
    return {key: value for key, value in said.items() if value}


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
