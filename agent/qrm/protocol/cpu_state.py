"""What somebody else's CPU plugin says of who has which CPUs, as ours, and what ours says to somebody else's advisor. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agent.qrm.placing.state import DEDICATED, POOL_ENTRY, RESERVE, Allocation, CpuState
from agent.qrm.protocol.common import MOST_ENTRIES, QUOTA_GATE, Unusable, by_uid
from api.cpus import format_cpu_list, parse_cpu_list
from api.pods import Pod
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.proto import resource_plugin_pb2 as plugin
from api.qos import NUMA_BIND_RESULT_KEY, QoSLevel

DYNAMIC = "dynamic"
NUMA_HINT = "numa_hint"
"""Where a plugin writes the NUMA nodes that it chose, in its own copy of a pod's annotations."""
_NUMA_POOL = re.compile(r".+-NUMA(\d{1,4})", re.ASCII)


def state_of(request: Any) -> CpuState:
    """What the plugin has given to whom, from its request (GetAdviceRequest). Raises Unusable that names the field."""
    if len(request.entries) > MOST_ENTRIES:
        raise Unusable(f"entries has {len(request.entries)} of them; {MOST_ENTRIES} are the most")
    entries: dict[str, dict[str, Allocation]] = {}
    for entry, its in sorted(request.entries.items()):
        for container, item in sorted(its.entries.items()):
            entries.setdefault(entry, {})[container] = _allocation(entry, container, item)
    return CpuState(policy_name=DYNAMIC, pod_entries=entries)


def request_from(checkpoint: Any, containers: Mapping[tuple[str, str], Any]) -> Any:
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


def count(info: Any, field: str) -> dict[int, int]:
    """How many CPUs of each NUMA node an AllocationInfo has. Raises Unusable that names the field."""
    return {numa: len(_cpus(text, field)) for numa, text in sorted(info.topology_aware_assignments.items())}


def binding(item: Any) -> tuple[int, ...]:
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


def request_of(state: CpuState, pods: tuple[Pod, ...]) -> Any:
    """What our QRM asks somebody else's CPU advisor with: who has what, and who that is."""
    request = cpu.GetAdviceRequest()
    known = by_uid(pods)
    for entry, its in sorted(state.pod_entries.items()):
        if POOL_ENTRY not in its and entry not in known:
            continue  # it is gone: an advisor that cannot find it refuses the whole request
        for container, item in sorted(its.items()):
            made = request.entries[entry].entries[container]
            made.allocation_info.CopyFrom(allocation_info(item, pool=container == POOL_ENTRY))
            if container == POOL_ENTRY:
                made.metadata.SetInParent()
            else:
                made.metadata.CopyFrom(metadata(known[entry], item, item.request_quantity, index=len(its)))
    if RESERVE not in request.entries:
        # That advisor says nothing without such a pool, be it empty.
        request.entries[RESERVE].entries[POOL_ENTRY].allocation_info.owner_pool_name = RESERVE
        request.entries[RESERVE].entries[POOL_ENTRY].metadata.SetInParent()
    gate = svc.FeatureGate(name=QUOTA_GATE, type="CPU")
    request.wanted_feature_gates[QUOTA_GATE].CopyFrom(gate)
    return request


def checkpoint_of(state: CpuState) -> Any:
    """The same for advisors that ask the plugin: GetCheckpointResponse."""
    found = cpu.GetCheckpointResponse()
    for entry, its in sorted(state.pod_entries.items()):
        for container, item in sorted(its.items()):
            found.entries[entry].entries[container].CopyFrom(allocation_info(item, pool=container == POOL_ENTRY))
    if RESERVE not in found.entries:
        found.entries[RESERVE].entries[POOL_ENTRY].owner_pool_name = RESERVE
    return found


def allocation_info(item: Allocation, *, pool: bool) -> Any:
    """What one has. Shared containers have what their pool has, which is said there; one that ramps up is in no pool."""
    info = cpu.AllocationInfo(ramp_up=item.ramp_up, owner_pool_name="" if item.ramp_up else item.owner_pool_name)
    if pool or item.qos_level != QoSLevel.SHARED:
        for numa, text in item.topology_aware_assignments.items():
            info.topology_aware_assignments[numa] = text
            info.original_topology_aware_assignments[numa] = text
    return info


def metadata(pod: Pod, item: Allocation, quantity: float, index: int = 0) -> Any:
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
        annotations={**pod.annotations, **_flat(pod, item.bound_numa)},
        qos_level=pod.qos.value,
        requestQuantity=int(quantity),
        requestMilliQuantity=round(quantity * 1000),
        useMilliQuantity=True,
    )


def _flat(pod: Pod, bound: tuple[int, ...]) -> dict[str, str]:
    wants = pod.enhancements
    said = {
        "numa_binding": "true" if wants.numa_binding else "",
        "numa_exclusive": "true" if wants.numa_exclusive else "",
        "cpuset_pool": wants.cpuset_pool,
        NUMA_BIND_RESULT_KEY: str(bound[0]) if len(bound) == 1 else "",
        NUMA_HINT: format_cpu_list(bound),
    }
    return {key: value for key, value in said.items() if value}


def _allocation(entry: str, container: str, item: Any) -> Allocation:
    field = f"entries[{entry[:80]}]" + (f".entries[{container[:80]}]" if container else "")
    metadata, info = item.metadata, item.allocation_info
    lists = {numa: _cpus(text, field) for numa, text in sorted(info.topology_aware_assignments.items())}
    bound = () if container == POOL_ENTRY else binding(item)
    own = not container or info.owner_pool_name == DEDICATED
    quantity = metadata.requestMilliQuantity / 1000 if metadata.useMilliQuantity else float(metadata.requestQuantity)
    return Allocation(
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


def _cpus(text: str, field: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise Unusable(f"{field}.topology_aware_assignments: {str(error)[:200]}") from None
