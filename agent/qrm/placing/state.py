"""What the CPU side remembers: who has which CPUs and since when, in the keys of Katalyst's cpu_plugin_state where it has them.

Times are ns of CLOCK_MONOTONIC, so they mean nothing after a reboot: see `reboot`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from agent.qrm.placing.layout import Layout, layout
from api.cpus import Topology, format_cpu_list, parse_cpu_list
from api.decisions import Pool
from api.knobs import Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel
from api.samples import CgroupSample

SHARE, RECLAIM, DEDICATED, RESERVE, INTERRUPT, FALLBACK = (
    "share", "reclaim", "dedicated", "reserve", "interrupt", "fallback"
)  # fmt: skip
ISOLATION, SYSTEM = "isolation-", "system-"
"""How the names of pools of isolated pods, and of named pools of system_cores, begin."""
_OWN_NAMES = frozenset((RECLAIM, DEDICATED, RESERVE, INTERRUPT, FALLBACK))
POOL_ENTRY = ""
"""Where a pool stands in the place of a pod, its CPUs stand in the place of a container without a name."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True, rename={"qos_level": "qosLevel"}):
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
        return cpus_of(self.allocation_result)


class NumaState(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs of one NUMA node."""

    default_cpuset: str
    """For pools."""
    allocated_cpuset: str
    """Of dedicated containers."""


class CpuState(
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
    pod_entries: Mapping[str, Mapping[str, Allocation]] = {}
    """By uid of the pod and name of the container, or by name of the pool and POOL_ENTRY."""
    residual: Mapping[str, int] = {}
    """Pods that nobody lists any more, by uid, and since when."""

    def pool(self, name: str) -> frozenset[int]:
        """CPUs that the pool had; none where there was no such pool."""
        entry = self.pod_entries.get(name, {}).get(POOL_ENTRY)
        return frozenset() if entry is None else entry.cpus

    def pod(self, uid: str) -> Mapping[str, Allocation]:
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


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Who is to have which CPUs, and why."""

    pools: tuple[Pool, ...]
    cpus: Mapping[str, tuple[int, ...]]
    """By cgroup path, for every container of every listed pod; never empty."""
    mems: Mapping[str, tuple[int, ...]]
    """NUMA nodes in the same way: those that have CPUs; a node of memory alone is not known here."""
    rejected: Mapping[str, Verdict] = {}
    """Pods whose wish cannot be fulfilled, by `namespace/name`; they have CPUs all the same."""
    verdicts: Mapping[str, Verdict]
    """By cgroup path."""


@lru_cache(maxsize=4096)
def cpus_of(text: str) -> frozenset[int]:
    """CPUs of a list in the kernel's syntax. Raises ValueError where it is none."""
    return frozenset(parse_cpu_list(text))


def reboot(state: CpuState, now_ns: int) -> CpuState:
    """The state of an earlier boot: who had what is still good to know, when is not."""
    entries = {
        key: {name: msgspec.structs.replace(item, ramp_up=False, since_ns=now_ns) for name, item in entry.items()}
        for key, entry in state.pod_entries.items()
    }
    return msgspec.structs.replace(state, pod_entries=entries, residual=dict.fromkeys(state.residual, now_ns))


def with_bindings(pods: Iterable[Pod], state: CpuState) -> tuple[Pod, ...]:
    """The pods with the NUMA nodes that they were bound to; what a pod says of itself stays."""
    return tuple(
        msgspec.structs.replace(pod, bound_numa=bound)
        if not pod.bound_numa and (bound := bound_of(pod, state))
        else pod
        for pod in pods
    )


def where_they_run(pods: Iterable[Pod], state: CpuState) -> tuple[Pod, ...]:
    """The pods as they were placed, whatever they ask for: dedicated ones that were refused CPUs of their own as shared ones,
    and online ones that were bound to no NUMA node as unbound. What is provided for them anywhere else lies idle."""
    return tuple(_as_placed(pod, tuple(state.pod(pod.uid).values())) for pod in pods)


def _as_placed(pod: Pod, entries: Sequence[Allocation]) -> Pod:
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


def bound_of(pod: Pod, state: CpuState) -> tuple[int, ...]:
    """NUMA nodes that the pod was bound to in the last placement."""
    for entry in state.pod(pod.uid).values():
        if entry.bound_numa:
            return entry.bound_numa
    return ()


def rebuild(
    pods: Sequence[Pod], cgroups: Mapping[str, CgroupSample], topology: Topology, policy: str, now_ns: int
) -> CpuState:
    """What the state must have been, from the cpusets that containers have now; for when its file cannot be trusted.

    Cpusets as wide as the node tell nothing and are left out. A pool has what most of its containers have.
    """
    node = layout(topology)
    entries: dict[str, dict[str, Allocation]] = {}
    seen: dict[str, Counter[frozenset[int]]] = {}
    for pod in sorted(pods, key=lambda pod: pod.uid):
        found = {c.name: cpus for c in pod.containers if (cpus := _cpuset(cgroups.get(c.cgroup), node))}
        nodes = node.nodes_of(frozenset[int]().union(*found.values()))
        bound = nodes if pod.enhancements.numa_binding and found and len(nodes) < len(node.numa) else ()
        owner = own_pool(pod, bound)
        for container in pod.containers:
            if container.name in found:
                cpus = found[container.name]
                allocation = allocated(pod, container, owner, cpus, node)
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
    return CpuState(policy_name=policy, pod_entries=entries)


def own_pool(pod: Pod, bound: tuple[int, ...]) -> str:
    """The pool that the pod belongs to by its level, name and NUMA binding, before anybody isolates it."""
    if pod.qos is QoSLevel.RECLAIMED:
        return RECLAIM
    if pod.qos is QoSLevel.DEDICATED:
        return DEDICATED
    if pod.qos is QoSLevel.SYSTEM:
        return f"{SYSTEM}{pod.enhancements.cpuset_pool}" if pod.enhancements.cpuset_pool else RESERVE
    name = pod.enhancements.cpuset_pool
    # Names that mean something else here are nobody's to choose.
    if not name or name in _OWN_NAMES or name.startswith((ISOLATION, SYSTEM, f"{DEDICATED}-")):
        name = SHARE
    return f"{name}-NUMA{bound[0]}" if bound else name


def allocated(pod: Pod, container: Container, owner: str, cpus: Collection[int], node: Layout) -> Allocation:
    """An entry of a container of the pod."""
    return Allocation(
        pod_uid=pod.uid,
        pod_namespace=pod.namespace,
        pod_name=pod.name,
        container_name=container.name,
        container_type="SIDECAR" if container.sidecar else "MAIN",
        owner_pool_name=owner,
        qos_level=pod.qos.value,
        allocation_result=format_cpu_list(cpus),
        topology_aware_assignments=by_node(node, cpus),
        request_quantity=requested(pod, container) or 0.0,
    )


def pool_entry(name: str, cpus: Collection[int], node: Layout) -> Allocation:
    """An entry of a pool."""
    return Allocation(
        pod_uid=name,
        owner_pool_name=name,
        allocation_result=format_cpu_list(cpus),
        topology_aware_assignments=by_node(node, cpus),
    )


def by_node(node: Layout, cpus: Collection[int]) -> Mapping[int, str]:
    """CPU list of each NUMA node that has some of these CPUs."""
    return {numa: format_cpu_list(node.on([numa]) & frozenset(cpus)) for numa in node.nodes_of(cpus)}


def requested(pod: Pod, container: Container) -> float | None:
    """Cores that the container asks for; for a reclaimed one those of the reclaimed resource first."""
    if pod.qos is QoSLevel.RECLAIMED and container.reclaimed_cpu_cores is not None:
        return container.reclaimed_cpu_cores
    return container.cpu_request_cores


def _cpuset(sample: CgroupSample | None, node: Layout) -> frozenset[int]:
    if sample is None or not sample.limits.cpus:
        return frozenset()
    try:
        cpus = cpus_of(sample.limits.cpus) & frozenset(node.order)
    except ValueError:
        return frozenset()
    return frozenset() if len(cpus) == len(node.order) else cpus
