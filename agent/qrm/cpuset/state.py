"""The cpuset state: the CPUs of every container and pool, and since when they have them. Pure.
The keys are those of Katalyst's `cpu_plugin_state` where it has them. Times are ns of CLOCK_MONOTONIC and mean
nothing after a reboot (`state_after_reboot`). A container that is restarted keeps its CPUs until its pod ends
(`with_pending_containers`). `rebuild_state` derives the state from the cgroups' own cpusets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

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
"""Prefixes of pools of isolated pods, and of named pools of system_cores."""
_RESERVED_POOL_NAMES = frozenset((RECLAIM, DEDICATED, RESERVE, INTERRUPT, FALLBACK))
POOL_ENTRY = ""
"""Container name of a pool's entry: in `pod_entries` a pool stands in the place of a pod."""


class CpusetEntry(msgspec.Struct, frozen=True, kw_only=True, rename={"qos_level": "qosLevel"}):
    """CPUs of one container or pool."""

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
    """CPU list by NUMA node."""
    request_quantity: float = 0.0
    """Cores."""
    bound_numa: tuple[int, ...] = ()
    """NUMA nodes that its pod is bound to."""
    exclusive: bool = False
    """Whether the pod owns those nodes."""
    since_ns: int = 0
    """Time of the first allocation."""

    @property
    def cpus(self) -> frozenset[int]:
        return parse_cpuset(self.allocation_result)


class NumaState(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs of one NUMA node."""

    default_cpuset: str
    """CPUs of pools."""
    allocated_cpuset: str
    """CPUs of dedicated containers."""


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
    """State between allocations. The default is a fresh start."""

    policy_name: str = ""
    """Empty before the first allocation: containers that exist then are not new."""
    machine_state: Mapping[int, NumaState] = {}
    """By NUMA node."""
    numa_headroom: Mapping[int, float] = {}
    """Cores available to reclaimed pods by NUMA node; an input that comes from the advisor."""
    overlap: bool = False
    """Whether online pools share CPUs with reclaim."""
    pod_entries: Mapping[str, Mapping[str, CpusetEntry]] = {}
    """Entries by pod uid and container name, or by pool name and POOL_ENTRY."""
    residual: Mapping[str, int] = {}
    """Pods that are not listed any more, with the time (ns) since when."""

    def pool(self, name: str) -> frozenset[int]:
        """Return the CPUs of the pool; none if it does not exist."""
        entry = self.pod_entries.get(name, {}).get(POOL_ENTRY)
        return frozenset() if entry is None else entry.cpus

    def pod(self, uid: str) -> Mapping[str, CpusetEntry]:
        """Return the entries of a pod by container name; none for an unknown pod."""
        entries = self.pod_entries.get(uid, {})
        return {} if POOL_ENTRY in entries else entries

    def exclusive_cpus(self) -> frozenset[int]:
        """Return the CPUs of dedicated containers."""
        entries = (item for entry in self.pod_entries.values() for item in entry.values())
        return frozenset[int]().union(*(item.cpus for item in entries if item.owner_pool_name == DEDICATED))

    def pools(self) -> dict[str, tuple[int, ...]]:
        """Return the CPUs of every pool by name, without `fallback`."""
        names = (name for name, entry in self.pod_entries.items() if POOL_ENTRY in entry and name != FALLBACK)
        return {name: tuple(sorted(self.pool(name))) for name in names}


class CpusetAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs and NUMA nodes of every pool and container, with reasons."""

    pools: tuple[Pool, ...]
    cpus: Mapping[str, tuple[int, ...]]
    """By cgroup path, for every container of every listed pod; never empty."""
    mems: Mapping[str, tuple[int, ...]]
    """NUMA nodes by cgroup path; nodes without CPUs are not included."""
    rejected: Mapping[str, Reason] = {}
    """Reason by `namespace/name` of pods whose request was rejected; they have CPUs nevertheless."""
    reasons: Mapping[str, Reason]
    """By cgroup path."""


@lru_cache(maxsize=4096)
def parse_cpuset(text: str) -> frozenset[int]:
    """Return the CPUs of a list in the kernel's syntax. Raises ValueError."""
    return frozenset(parse_cpu_list(text))


def state_after_reboot(state: CpusetState, now_ns: int) -> CpusetState:
    """Return the state of an earlier boot with the CPUs kept and all times reset."""
    entries = {
        key: {name: msgspec.structs.replace(item, ramp_up=False, since_ns=now_ns) for name, item in entry.items()}
        for key, entry in state.pod_entries.items()
    }
    return msgspec.structs.replace(state, pod_entries=entries, residual=dict.fromkeys(state.residual, now_ns))


def with_numa_bindings(pods: Iterable[Pod], state: CpusetState) -> tuple[Pod, ...]:
    """Return the pods with their NUMA nodes of the last allocation; a pod's own setting has precedence."""
    return tuple(
        msgspec.structs.replace(pod, bound_numa=bound)
        if not pod.bound_numa and (bound := bound_numa_nodes(pod, state))
        else pod
        for pod in pods
    )


def pods_as_allocated(pods: Iterable[Pod], state: CpusetState) -> tuple[Pod, ...]:
    """Return the pods as they were allocated, not as they request it. Rejected dedicated pods count as shared, online
    pods without a binding as unbound, and pods that own no NUMA node as not exclusive. Otherwise CPU reserved for what they
    requested would stay idle."""
    return tuple(_pod_as_allocated(pod, tuple(state.pod(pod.uid).values())) for pod in pods)


def _pod_as_allocated(pod: Pod, entries: Sequence[CpusetEntry]) -> Pod:
    if not pod.qos.online or not entries:
        return pod
    enhancements, qos, bound = pod.enhancements, pod.qos, pod.bound_numa
    if bound and not any(entry.bound_numa for entry in entries):
        enhancements, bound = msgspec.structs.replace(enhancements, numa_binding=False), ()
    if enhancements.numa_exclusive and not any(entry.exclusive for entry in entries):
        enhancements = msgspec.structs.replace(enhancements, numa_exclusive=False)
    if qos is QoSLevel.DEDICATED and any(entry.owner_pool_name == FALLBACK for entry in entries):
        enhancements, qos = msgspec.structs.replace(enhancements, cpuset_pool=""), QoSLevel.SHARED
    if enhancements is pod.enhancements and qos is pod.qos:
        return pod
    return msgspec.structs.replace(pod, qos=qos, enhancements=enhancements, bound_numa=bound)


def bound_numa_nodes(pod: Pod, state: CpusetState) -> tuple[int, ...]:
    """Return the NUMA nodes that the pod was bound to in the last allocation."""
    for entry in state.pod(pod.uid).values():
        if entry.bound_numa:
            return entry.bound_numa
    return ()


def rebuild_state(
    pods: Sequence[Pod], cgroups: Mapping[str, CgroupSample], topology: Topology, policy: str, now_ns: int
) -> CpusetState:
    """Return the state derived from the containers' present cpusets, for when its file is lost or damaged. Cpusets
    as wide as the node say nothing and are skipped. A pool has the cpuset that most of its containers have."""
    layout = layout_of(topology)
    lists = CpuListCache(layout)
    entries: dict[str, dict[str, CpusetEntry]] = {}
    cpus_by_pool: dict[str, Counter[frozenset[int]]] = {}
    for pod in sorted(pods, key=lambda pod: pod.uid):
        narrowed = {c.name: cpus for c in pod.containers if (cpus := _narrowed_cpuset(cgroups.get(c.cgroup), layout))}
        nodes = layout.nodes_of(frozenset[int]().union(*narrowed.values()))
        bound = nodes if pod.enhancements.numa_binding and narrowed and len(nodes) < len(layout.numa) else ()
        pool = pool_name_of(pod, bound)
        for container in pod.containers:
            if container.name in narrowed:
                cpus = narrowed[container.name]
                exclusive = pod.enhancements.numa_exclusive and pool == DEDICATED
                entries.setdefault(pod.uid, {})[container.name] = container_entry(
                    pod, container, pool, cpus, lists, bound_numa=bound, since_ns=now_ns, exclusive=exclusive
                )
                cpus_by_pool.setdefault(pool, Counter())[cpus] += 1
    common_cpus = {
        pool: min(sets, key=lambda cpus: (-sets[cpus], len(cpus), sorted(cpus)))
        for pool, sets in cpus_by_pool.items()
        if pool != DEDICATED
    }
    return CpusetState(policy_name=policy, pod_entries={**entries, **pool_entries(common_cpus, layout)})


def pool_name_of(pod: Pod, bound: tuple[int, ...]) -> str:
    """Return the pool of the pod by QoS level, pool name and NUMA binding, regardless of isolation."""
    if pod.qos is QoSLevel.RECLAIMED:
        return RECLAIM
    if pod.qos is QoSLevel.DEDICATED:
        return DEDICATED
    if pod.qos is QoSLevel.SYSTEM:
        return f"{SYSTEM_PREFIX}{pod.enhancements.cpuset_pool}" if pod.enhancements.cpuset_pool else RESERVE
    name = pod.enhancements.cpuset_pool
    # A pod cannot choose a name that has another meaning.
    if not name or name in _RESERVED_POOL_NAMES or name.startswith((ISOLATION_PREFIX, SYSTEM_PREFIX, f"{DEDICATED}-")):
        name = SHARE
    return f"{name}-NUMA{bound[0]}" if bound else name


def cpu_lists_by_numa(layout: CpuLayout, cpus: Collection[int]) -> Mapping[int, str]:
    """Return the CPU list of each NUMA node that has some of these CPUs."""
    return {numa: format_cpu_list(layout.on([numa]) & frozenset(cpus)) for numa in layout.nodes_of(cpus)}


class CpuListCache:
    """CPU tuple, CPU list and CPU lists by NUMA node of each distinct set of CPUs: containers of a pool share them."""

    def __init__(self, layout: CpuLayout) -> None:
        self._layout = layout
        self._lists: dict[frozenset[int], tuple[tuple[int, ...], str, Mapping[int, str]]] = {}

    def of(self, cpus: frozenset[int]) -> tuple[tuple[int, ...], str, Mapping[int, str]]:
        """Return the three forms of these CPUs."""
        if cpus not in self._lists:
            self._lists[cpus] = (tuple(sorted(cpus)), format_cpu_list(cpus), cpu_lists_by_numa(self._layout, cpus))
        return self._lists[cpus]


def container_entry(
    pod: Pod, container: Container, owner: str, cpus: frozenset[int], lists: CpuListCache, **fields: Any
) -> CpusetEntry:
    """Return an entry for a container of the pod; `fields` are further fields of the entry."""
    _, text, by_numa = lists.of(cpus)
    return CpusetEntry(
        pod_uid=pod.uid,
        pod_namespace=pod.namespace,
        pod_name=pod.name,
        container_name=container.name,
        container_type="SIDECAR" if container.sidecar else "MAIN",
        owner_pool_name=owner,
        qos_level=pod.qos.value,
        allocation_result=text,
        topology_aware_assignments=by_numa,
        **{"request_quantity": requested_cores(pod, container) or 0.0, **fields},
    )


def pool_entries(pools: Mapping[str, frozenset[int]], layout: CpuLayout) -> dict[str, dict[str, CpusetEntry]]:
    """Return the entries of all pools that have CPUs, by name."""
    return {
        name: {
            POOL_ENTRY: CpusetEntry(
                pod_uid=name,
                owner_pool_name=name,
                allocation_result=format_cpu_list(cpus),
                topology_aware_assignments=cpu_lists_by_numa(layout, cpus),
            )
        }
        for name, cpus in sorted(pools.items())
        if cpus
    }


def list_pools(pools: Mapping[str, frozenset[int]]) -> tuple[Pool, ...]:
    """Return all pools that have CPUs, sorted by name."""
    return tuple(Pool(name=name, cpus=tuple(sorted(cpus))) for name, cpus in sorted(pools.items()) if cpus)


def requested_cores(pod: Pod, container: Container) -> float | None:
    """Return the requested cores; for a reclaimed container those of the reclaimed resource first."""
    if pod.qos is QoSLevel.RECLAIMED and container.reclaimed_cpu_cores is not None:
        return container.reclaimed_cpu_cores
    return container.cpu_request_cores


def _narrowed_cpuset(sample: CgroupSample | None, layout: CpuLayout) -> frozenset[int]:
    if sample is None or not sample.limits.cpus:
        return frozenset()
    try:
        cpus = parse_cpuset(sample.limits.cpus) & frozenset(layout.order)
    except ValueError:
        return frozenset()
    return frozenset() if len(cpus) == len(layout.order) else cpus


_PENDING_PREFIX = "waiting:"


def pods_to_allocate(pods: Sequence[Pod], state: CpusetState) -> list[Pod]:
    """Return the pods with containers that run or wait for a restart. A pod of which no container has run yet has no
    CPUs, since it may never start. Pending containers have no cgroup; see `without_pending_containers`."""
    return [pod for pod in with_pending_containers(pods, state) if pod.containers]


def with_pending_containers(pods: Sequence[Pod], state: CpusetState) -> tuple[Pod, ...]:
    """Return all pods with their pending containers, whose CPUs are not reclaimed."""
    return tuple(_pod_with_pending(pod, state) for pod in pods)


def without_pending_containers(placement: CpusetAllocation) -> CpusetAllocation:
    """Return the allocation of running containers only."""
    if all(map(_is_running, placement.cpus)):
        return placement
    return msgspec.structs.replace(
        placement,
        cpus={cgroup: cpus for cgroup, cpus in placement.cpus.items() if _is_running(cgroup)},
        mems={cgroup: mems for cgroup, mems in placement.mems.items() if _is_running(cgroup)},
        reasons={cgroup: reason for cgroup, reason in placement.reasons.items() if _is_running(cgroup)},
    )


def _pod_with_pending(pod: Pod, state: CpusetState) -> Pod:
    entries = state.pod(pod.uid)
    started = bool(pod.containers or entries)
    pending = [
        msgspec.structs.replace(container, cgroup=f"{_PENDING_PREFIX}{pod.uid}/{container.name}")
        for container in pod.waiting
        if container.name in entries or (started and _owns_pod_cpus(pod, container))
    ]
    return msgspec.structs.replace(pod, containers=(*pod.containers, *pending)) if pending else pod


def _owns_pod_cpus(pod: Pod, container: Container) -> bool:
    """Return whether the container owns the pod's CPUs, which the others share."""
    return pod.qos is QoSLevel.DEDICATED and not container.sidecar


def _is_running(cgroup: str) -> bool:
    return not cgroup.startswith(_PENDING_PREFIX)
