"""Policy `native`, the kubelet's static CPU manager: exclusive CPUs for Guaranteed containers. Pure.
A container gets exclusive CPUs if its pod is Guaranteed and its CPU request is a whole number. All other
containers share the remaining CPUs. Katalyst's QoS levels and NUMA bindings are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allowed_cpus import ReservedCpus
from agent.qrm.cpuset.fair_shares import requested_pod_cores
from agent.qrm.cpuset.select_cpus import NO_CPUS, select_cpus, select_evenly
from agent.qrm.cpuset.state import (
    DEDICATED,
    INTERRUPT,
    RESERVE,
    SHARE,
    CpuListCache,
    CpusetAllocation,
    CpusetEntry,
    CpusetState,
    container_entry,
    list_pools,
    pool_entries,
)
from agent.qrm.cpuset.topology_hints import NoTopologyHint, fewest_nodes
from agent.qrm.cpuset.topology_layout import CpuLayout
from api.knobs import Reason
from api.pod import Container, Pod

NATIVE_POLICY = "native"


@dataclass(frozen=True)
class _NativeAllocation:
    own: Mapping[str, frozenset[int]]
    shared: frozenset[int]
    rejected: Mapping[str, Reason]
    layout: CpuLayout
    static: ReservedCpus


def allocate_native(
    pods: Sequence[Pod],
    layout: CpuLayout,
    static: ReservedCpus,
    state: CpusetState,
    config: CpuPlacementConfig,
    now_ns: int,
) -> tuple[CpusetAllocation, CpusetState]:
    """As `allocate_cpusets`, with `pods` in the order of creation. Reserved CPUs are shared and never exclusive."""
    rejected: dict[str, Reason] = {}
    exclusive = NO_CPUS.union(*(_exclusive_cpus_of(state, uid) for uid in state.residual)) & static.usable
    if len(static.usable - exclusive) < sum(map(requested_pod_cores, pods)):
        # A tenant that creates and deletes pods must not hold CPUs that other pods request.
        exclusive = NO_CPUS
    cpus_by_cgroup: dict[str, frozenset[int]] = {}
    for retained_first in (True, False):
        for pod in pods:
            for container in pod.containers:
                before = state.pod(pod.uid).get(container.name)
                retained = NO_CPUS if before is None or before.owner_pool_name != DEDICATED else before.cpus
                if not is_exclusive(pod, container) or bool(retained) is not retained_first:
                    continue
                try:
                    cpus = _select_exclusive_cpus(container, static.usable - exclusive, retained, layout, config)
                except NoTopologyHint as error:
                    rejected[pod.key] = Reason(rule="native_no_room", text=f"{pod.key}: {container.name} {error}.")
                    continue
                cpus_by_cgroup[container.cgroup] = cpus
                exclusive |= cpus
    shared = (static.usable | static.reserve) - exclusive or static.usable
    return _build_allocation(pods, _NativeAllocation(cpus_by_cgroup, shared, rejected, layout, static), state, now_ns)


def is_exclusive(pod: Pod, container: Container) -> bool:
    """Return whether the kubelet's static policy gives this container exclusive CPUs."""
    guaranteed = all(
        None not in (c.cpu_request_cores, c.memory_request_bytes)
        and c.cpu_request_cores == c.cpu_limit_cores
        and c.memory_request_bytes == c.memory_limit_bytes
        for c in (*pod.containers, *pod.waiting)
    )
    cores = container.cpu_request_cores or 0.0
    return guaranteed and cores >= 1 and cores == int(cores)


def _select_exclusive_cpus(
    container: Container, free: frozenset[int], retained: frozenset[int], layout: CpuLayout, config: CpuPlacementConfig
) -> frozenset[int]:
    count = int(container.cpu_request_cores or 0)
    native = config.native
    if native.full_physical_cores:
        if count % layout.threads:
            raise NoTopologyHint(
                f"requests {count} CPUs, which is no multiple of the {layout.threads} threads of a physical core"
            )
        free = frozenset(cpu for core in layout.whole_cores(free) for cpu in layout.cores[core])
    if len(free) < count:
        raise NoTopologyHint(f"requests {count} exclusive CPUs, {len(free)} are left")
    if retained or native.allocation == "packed":
        return select_cpus(layout, count, free, retained)
    min_nodes = fewest_nodes(count, layout)
    for number in range(min_nodes, len(layout.numa) + 1):
        roomiest = sorted(layout.numa, key=lambda node: (-len(layout.on([node]) & free), node))[:number]
        if len(layout.on(roomiest) & free) >= count:
            return select_evenly(layout, count, free, sorted(roomiest))
    raise NoTopologyHint(f"requests {count} exclusive CPUs, {len(free)} are left")


def _exclusive_cpus_of(state: CpusetState, uid: str) -> frozenset[int]:
    return NO_CPUS.union(*(entry.cpus for entry in state.pod(uid).values() if entry.owner_pool_name == DEDICATED))


def _build_allocation(
    pods: Sequence[Pod], allocation: _NativeAllocation, state: CpusetState, now_ns: int
) -> tuple[CpusetAllocation, CpusetState]:
    cpus_by_cgroup, shared, rejected, layout = allocation.own, allocation.shared, allocation.rejected, allocation.layout
    cpus: dict[str, tuple[int, ...]] = {}
    reasons: dict[str, Reason] = {}
    entries: dict[str, dict[str, CpusetEntry]] = {uid: dict(state.pod(uid)) for uid in state.residual}
    shared_reason = Reason(
        rule="native_shared",
        text=f"The container shares {len(shared)} CPUs with all containers without exclusive CPUs.",
    )
    lists = CpuListCache(layout)
    for pod in pods:
        for container in pod.containers:
            exclusive = cpus_by_cgroup.get(container.cgroup)
            chosen = shared if exclusive is None else exclusive
            cpus[container.cgroup] = lists.of(chosen)[0]
            text = f"The pod is Guaranteed and requests whole CPUs: the container has {len(chosen)} exclusive CPUs."
            reason = shared_reason if exclusive is None else Reason(rule="native_exclusive", text=text)
            reasons[container.cgroup] = rejected.get(pod.key, reason) if exclusive is None else reason
            before = state.pod(pod.uid).get(container.name)
            owner = SHARE if exclusive is None else DEDICATED
            since_ns = now_ns if before is None else before.since_ns
            entry = container_entry(pod, container, owner, chosen, lists, since_ns=since_ns)
            entries.setdefault(pod.uid, {})[container.name] = entry
    pools = {RESERVE: allocation.static.reserve, INTERRUPT: allocation.static.interrupt, SHARE: shared}
    placement = CpusetAllocation(
        pools=list_pools(pools),
        cpus=cpus,
        mems=dict.fromkeys(cpus, tuple(layout.numa)),
        rejected=rejected,
        reasons=reasons,
    )
    after = msgspec.structs.replace(
        state,
        policy_name=NATIVE_POLICY,
        pod_entries={**pool_entries(pools, layout), **dict(sorted(entries.items()))},
        machine_state={},
    )
    return placement, after
