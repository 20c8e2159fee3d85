"""The cpuset state: the CPUs of every container and pool, and since when they have them. Pure.
The keys are those of Katalyst's `cpu_plugin_state` where it has them. Times are ns of CLOCK_MONOTONIC and mean
nothing after a reboot (`state_after_reboot`). A container that is restarted keeps its CPUs until its pod ends
(`with_pending_containers`). `rebuild_state` derives the state from the cgroups' own cpusets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from agent.qrm.cpuset.topology_layout import CpuLayout, layout_of
from api.cpu import Topology, format_cpu_list, parse_cpu_list
from api.decision import Pool
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample

SHARE, RECLAIM, DEDICATED, RESERVE, INTERRUPT, FALLBACK = (
    "share", "reclaim", "dedicated", "reserve", "interrupt", "fallback"
)  # fmt: skip
ISOLATION_PREFIX, SYSTEM_PREFIX = "isolation-", "system-"
"""How the names of pools of isolated pods, and of named pools of system_cores, begin."""
_RESERVED_POOL_NAMES = frozenset((RECLAIM, DEDICATED, RESERVE, INTERRUPT, FALLBACK))
POOL_ENTRY = ""
"""Where a pool stands in the place of a pod, its CPUs stand in the place of a container without a name."""


class CpusetEntry(msgspec.Struct, frozen=True, kw_only=True, rename={"qos_level": "qosLevel"}):
    """What one container has, or one pool."""

    pod_uid: str = ""
    pod_namespace: str = ""
    pod_name: str = ""
    container_name: str = ""
    container_type: str = ""
    """`MAIN` or `SIDECAR`."""
    owner_pool_name: str
    qos_level: str = ""
    ramp_up: bool = False
    allocation_result: str
    """CPU list."""
    topology_aware_assignments: Mapping[int, str] = {}
    """The same by NUMA node."""
    request_quantity: float = 0.0
    """Cores."""
    bound_numa: tuple[int, ...] = ()
    """NUMA nodes that its pod is bound to."""
    exclusive: bool = False
    """Whether those nodes are for that pod alone."""
    since_ns: int = 0
    """When it was first seen."""

    @property
    def cpus(self) -> frozenset[int]:
        return parse_cpuset(self.allocation_result)


class NumaState(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs of one NUMA node."""

    default_cpuset: str
    """For pools."""
    allocated_cpuset: str
    """Of dedicated containers."""


class CpusetState(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "policy_name": "policyName",
        "machine_state": "machineState",
        "overlap": "allow_shared_cores_overlap_reclaimed_cores",
    },
):
    """Everything that `place` needs to know of the past. One made of nothing is a fresh start."""

    policy_name: str = ""
    """Empty before the first placement: containers that are there then are not taken for new ones."""
    machine_state: Mapping[int, NumaState] = {}
    numa_headroom: Mapping[int, float] = {}
    """Cores that can be promised to reclaimed pods, by NUMA node; an input of `place` that comes from the advisor."""
    overlap: bool = False
    pod_entries: Mapping[str, Mapping[str, CpusetEntry]] = {}
    """By uid of the pod and name of the container, or by name of the pool and POOL_ENTRY."""
    residual: Mapping[str, int] = {}
    """Pods that nobody lists any more, by uid, and since when."""

    def pool(self, name: str) -> frozenset[int]:
        """CPUs that the pool had; none where there was no such pool."""
        entry = self.pod_entries.get(name, {}).get(POOL_ENTRY)
        return frozenset() if entry is None else entry.cpus

    def pod(self, uid: str) -> Mapping[str, CpusetEntry]:
        """What the containers of a pod had, by name; nothing of a pod that is not known."""
        entries = self.pod_entries.get(uid, {})
        return {} if POOL_ENTRY in entries else entries

    def alone(self) -> frozenset[int]:
        """What dedicated containers had."""
        entries = (item for entry in self.pod_entries.values() for item in entry.values())
        return frozenset[int]().union(*(item.cpus for item in entries if item.owner_pool_name == DEDICATED))

    def pools(self) -> dict[str, tuple[int, ...]]:
        """CPUs of every pool, by name; `fallback` is none."""
        names = (name for name, entry in self.pod_entries.items() if POOL_ENTRY in entry and name != FALLBACK)
        return {name: tuple(sorted(self.pool(name))) for name in names}


class CpusetAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Who is to have which CPUs, and why."""

    pools: tuple[Pool, ...]
    cpus: Mapping[str, tuple[int, ...]]
    """By cgroup path, for every container of every listed pod; never empty."""
    mems: Mapping[str, tuple[int, ...]]
    """NUMA nodes in the same way: those that have CPUs; a node of memory alone is not known here."""
    rejected: Mapping[str, Reason] = {}
    """Pods whose wish cannot be fulfilled, by `namespace/name`; they have CPUs all the same."""
    reasons: Mapping[str, Reason]
    """By cgroup path."""


@lru_cache(maxsize=4096)
def parse_cpuset(text: str) -> frozenset[int]:
    """CPUs of a list in the kernel's syntax. Raises ValueError where it is none."""
    return frozenset(parse_cpu_list(text))


def state_after_reboot(state: CpusetState, now_ns: int) -> CpusetState:
    """The state of an earlier boot: who had what is still good to know, when is not."""
    entries = {
        key: {name: msgspec.structs.replace(item, ramp_up=False, since_ns=now_ns) for name, item in entry.items()}
        for key, entry in state.pod_entries.items()
    }
    return msgspec.structs.replace(state, pod_entries=entries, residual=dict.fromkeys(state.residual, now_ns))


def with_numa_bindings(pods: Iterable[Pod], state: CpusetState) -> tuple[Pod, ...]:
    """The pods with the NUMA nodes that they were bound to; what a pod says of itself stays."""
    return tuple(
        msgspec.structs.replace(pod, bound_numa=bound)
        if not pod.bound_numa and (bound := bound_numa_nodes(pod, state))
        else pod
        for pod in pods
    )


def pods_as_allocated(pods: Iterable[Pod], state: CpusetState) -> tuple[Pod, ...]:
    """The pods as they were placed, whatever they ask for: dedicated ones that were refused CPUs of their own as shared ones,
    and online ones that were bound to no NUMA node as unbound. What is provided for them anywhere else lies idle."""
    return tuple(_pod_as_allocated(pod, tuple(state.pod(pod.uid).values())) for pod in pods)


def _pod_as_allocated(pod: Pod, entries: Sequence[CpusetEntry]) -> Pod:
    if not pod.qos.online or not entries:
        return pod
    wishes, qos, bound = pod.enhancements, pod.qos, pod.bound_numa
    if bound and not any(entry.bound_numa for entry in entries):
        wishes, bound = msgspec.structs.replace(wishes, numa_binding=False), ()
    if qos is QoSLevel.DEDICATED and any(entry.owner_pool_name == FALLBACK for entry in entries):
        wishes, qos = msgspec.structs.replace(wishes, cpuset_pool=""), QoSLevel.SHARED
    if wishes is pod.enhancements and qos is pod.qos:
        return pod
    return msgspec.structs.replace(pod, qos=qos, enhancements=wishes, bound_numa=bound)


def bound_numa_nodes(pod: Pod, state: CpusetState) -> tuple[int, ...]:
    """NUMA nodes that the pod was bound to in the last placement."""
    for entry in state.pod(pod.uid).values():
        if entry.bound_numa:
            return entry.bound_numa
    return ()


def rebuild_state(
    pods: Sequence[Pod], cgroups: Mapping[str, CgroupSample], topology: Topology, policy: str, now_ns: int
) -> CpusetState:
    """What the state must have been, from the cpusets that containers have now; for when its file cannot be trusted.

    Cpusets as wide as the node tell nothing and are left out. A pool has what most of its containers have.
    """
    node = layout_of(topology)
    entries: dict[str, dict[str, CpusetEntry]] = {}
    seen: dict[str, Counter[frozenset[int]]] = {}
    for pod in sorted(pods, key=lambda pod: pod.uid):
        found = {c.name: cpus for c in pod.containers if (cpus := _narrowed_cpuset(cgroups.get(c.cgroup), node))}
        nodes = node.nodes_of(frozenset[int]().union(*found.values()))
        bound = nodes if pod.enhancements.numa_binding and found and len(nodes) < len(node.numa) else ()
        owner = pool_name_of(pod, bound)
        for container in pod.containers:
            if container.name in found:
                cpus = found[container.name]
                allocation = container_entry(pod, container, owner, cpus, node)
                entries.setdefault(pod.uid, {})[container.name] = msgspec.structs.replace(
                    allocation,
                    bound_numa=bound,
                    since_ns=now_ns,
                    exclusive=pod.enhancements.numa_exclusive and owner == DEDICATED,
                )
                seen.setdefault(owner, Counter())[cpus] += 1
    for owner, sets in seen.items():
        if owner != DEDICATED:
            most = min(sets, key=lambda cpus: (-sets[cpus], len(cpus), sorted(cpus)))
            entries[owner] = {POOL_ENTRY: pool_entry(owner, most, node)}
    return CpusetState(policy_name=policy, pod_entries=entries)


def pool_name_of(pod: Pod, bound: tuple[int, ...]) -> str:
    """The pool that the pod belongs to by its level, name and NUMA binding, before anybody isolates it."""
    if pod.qos is QoSLevel.RECLAIMED:
        return RECLAIM
    if pod.qos is QoSLevel.DEDICATED:
        return DEDICATED
    if pod.qos is QoSLevel.SYSTEM:
        return f"{SYSTEM_PREFIX}{pod.enhancements.cpuset_pool}" if pod.enhancements.cpuset_pool else RESERVE
    name = pod.enhancements.cpuset_pool
    # Names that mean something else here are nobody's to choose.
    if not name or name in _RESERVED_POOL_NAMES or name.startswith((ISOLATION_PREFIX, SYSTEM_PREFIX, f"{DEDICATED}-")):
        name = SHARE
    return f"{name}-NUMA{bound[0]}" if bound else name


def container_entry(pod: Pod, container: Container, owner: str, cpus: Collection[int], node: CpuLayout) -> CpusetEntry:
    """An entry of a container of the pod."""
    return CpusetEntry(
        pod_uid=pod.uid,
        pod_namespace=pod.namespace,
        pod_name=pod.name,
        container_name=container.name,
        container_type="SIDECAR" if container.sidecar else "MAIN",
        owner_pool_name=owner,
        qos_level=pod.qos.value,
        allocation_result=format_cpu_list(cpus),
        topology_aware_assignments=cpu_lists_by_numa(node, cpus),
        request_quantity=requested_cores(pod, container) or 0.0,
    )


def pool_entry(name: str, cpus: Collection[int], node: CpuLayout) -> CpusetEntry:
    """An entry of a pool."""
    return CpusetEntry(
        pod_uid=name,
        owner_pool_name=name,
        allocation_result=format_cpu_list(cpus),
        topology_aware_assignments=cpu_lists_by_numa(node, cpus),
    )


def cpu_lists_by_numa(node: CpuLayout, cpus: Collection[int]) -> Mapping[int, str]:
    """CPU list of each NUMA node that has some of these CPUs."""
    return {numa: format_cpu_list(node.on([numa]) & frozenset(cpus)) for numa in node.nodes_of(cpus)}


def requested_cores(pod: Pod, container: Container) -> float | None:
    """Cores that the container asks for; for a reclaimed one those of the reclaimed resource first."""
    if pod.qos is QoSLevel.RECLAIMED and container.reclaimed_cpu_cores is not None:
        return container.reclaimed_cpu_cores
    return container.cpu_request_cores


def _narrowed_cpuset(sample: CgroupSample | None, node: CpuLayout) -> frozenset[int]:
    if sample is None or not sample.limits.cpus:
        return frozenset()
    try:
        cpus = parse_cpuset(sample.limits.cpus) & frozenset(node.order)
    except ValueError:
        return frozenset()
    return frozenset() if len(cpus) == len(node.order) else cpus


_PENDING_PREFIX = "waiting:"


def pods_to_allocate(pods: Sequence[Pod], state: CpusetState) -> list[Pod]:
    """The pods that have a place, each with the containers that wait for theirs, whose cgroup is none (see `of_cgroups`). A pod
    of which nothing has run yet has none: it may never come to run."""
    return [pod for pod in with_pending_containers(pods, state) if pod.containers]


def with_pending_containers(pods: Sequence[Pod], state: CpusetState) -> tuple[Pod, ...]:
    """All of them, with those containers: what is kept for one is not lent."""
    return tuple(_pod_with_pending(pod, state) for pod in pods)


def without_pending_containers(placement: CpusetAllocation) -> CpusetAllocation:
    """The same, of containers that run."""
    if all(map(_is_running, placement.cpus)):
        return placement
    return msgspec.structs.replace(
        placement,
        cpus={cgroup: cpus for cgroup, cpus in placement.cpus.items() if _is_running(cgroup)},
        mems={cgroup: mems for cgroup, mems in placement.mems.items() if _is_running(cgroup)},
        reasons={cgroup: verdict for cgroup, verdict in placement.reasons.items() if _is_running(cgroup)},
    )


def _pod_with_pending(pod: Pod, state: CpusetState) -> Pod:
    if not pod.waiting:
        return pod
    known = state.pod(pod.uid)
    begun = bool(pod.containers or known)
    waiting = [one for one in pod.waiting if one.name in known or (begun and _owns_pod_cpus(pod, one))]
    if not waiting:
        return pod
    homeless = [msgspec.structs.replace(one, cgroup=f"{_PENDING_PREFIX}{pod.uid}/{one.name}") for one in waiting]
    return msgspec.structs.replace(pod, containers=(*pod.containers, *homeless))


def _owns_pod_cpus(pod: Pod, container: Container) -> bool:
    """Whether the pod's CPUs are those of this container, which others of it share."""
    return pod.qos is QoSLevel.DEDICATED and not container.sidecar


def _is_running(cgroup: str) -> bool:
    return not cgroup.startswith(_PENDING_PREFIX)
