"""Allocates CPUs and NUMA nodes to every pool and container: pool sizes in, cpusets and next state out. Pure.
An unchanged input moves no CPU. Each allocation and each rejection carries its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allowed_cpus import ReservedCpus, reserve_cpus
from agent.qrm.cpuset.assign_pools import (
    AssignableCpus,
    PoolCapacity,
    PoolKey,
    SizedPool,
    assign_pools,
    complete_pool_sizes,
    fit_pool_sizes,
    spread_over_numa,
)
from agent.qrm.cpuset.fair_shares import (
    is_named_pool,
    limit_own_pools,
    min_pool_sizes,
    raise_to_requests,
    requested_pod_cores,
    share_missing_cpus,
)
from agent.qrm.cpuset.native_policy import allocate_native
from agent.qrm.cpuset.numa_binding import NumaBindings, bind_pods, forget_requested_pods, pod_cores
from agent.qrm.cpuset.select_cpus import NO_CPUS
from agent.qrm.cpuset.state import (
    DEDICATED,
    FALLBACK,
    INTERRUPT,
    ISOLATION_PREFIX,
    POOL_ENTRY,
    RECLAIM,
    RESERVE,
    SHARE,
    SYSTEM_PREFIX,
    CpuListCache,
    CpusetAllocation,
    CpusetEntry,
    CpusetState,
    NumaState,
    bound_numa_nodes,
    container_entry,
    list_pools,
    pods_to_allocate,
    pool_entries,
    pool_name_of,
    requested_cores,
    without_pending_containers,
)
from agent.qrm.cpuset.topology_layout import CpuLayout, layout_of
from api.advice import NOT_NUMA_BOUND, PoolSize
from api.cpu import Topology, format_cpu_list
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.units import NS_PER_S


@dataclass(frozen=True)
class ContainerPools:
    """Pools, bindings and reserved CPUs that containers are assigned to."""

    layout: CpuLayout
    static: ReservedCpus
    pools: Mapping[str, frozenset[int]]
    owners: Mapping[str, str]
    """Pool by pod uid."""
    bindings: NumaBindings
    fallback: frozenset[int]
    limited: frozenset[int] = frozenset()
    """NUMA nodes with a quota for reclaimed pods, if there is no node-wide quota."""

    @property
    def ramp_up_cpus(self) -> frozenset[int]:
        """CPUs of a container that ramps up: all that are neither reserved nor dedicated."""
        return self.bindings.allocations.free or self.fallback


def allocate_containers(
    pods: Sequence[Pod], inputs: ContainerPools, state: CpusetState, config: CpuPlacementConfig, now_ns: int
) -> tuple[CpusetAllocation, dict[str, dict[str, CpusetEntry]]]:
    """Return CPUs, NUMA nodes and reason of every container, and the new entries, including those of residual pods."""
    cpus: dict[str, tuple[int, ...]] = {}
    mems: dict[str, tuple[int, ...]] = {}
    reasons: dict[str, Reason] = {}
    entries: dict[str, dict[str, CpusetEntry]] = {
        uid: dict(state.pod(uid)) for uid in state.residual if uid not in inputs.owners
    }
    lists = CpuListCache(inputs.layout)
    selector = _CpusetSelector(inputs, pods)
    pool_reasons: dict[tuple[str, frozenset[int]], Reason] = {}
    for pod in pods:
        owner = inputs.owners[pod.uid]
        rejected = inputs.bindings.rejected.get(pod.key)
        entries_before = state.pod(pod.uid)
        for container in pod.containers:
            before = entries_before.get(container.name)
            since_ns = now_ns if before is None else before.since_ns
            ramping = _is_ramping_up(pod, owner, before, state, young=now_ns - since_ns < config.ramp_up_s * NS_PER_S)
            chosen = inputs.ramp_up_cpus if ramping else selector.cpus(pod, container)
            cpus[container.cgroup], text, _ = lists.of(chosen)
            mems[container.cgroup] = selector.mems(pod, chosen)
            pod_reason = _ramp_up_reason(config.ramp_up_s, text) if ramping else inputs.bindings.reasons.get(pod.key)
            reasons[container.cgroup] = (
                rejected or pod_reason or pool_reasons.setdefault((owner, chosen), _pool_reason(owner, text))
            )
            entries.setdefault(pod.uid, {})[container.name] = container_entry(
                pod,
                container,
                owner,
                chosen,
                lists,
                ramp_up=ramping,
                request_quantity=_entry_request_cores(pod, container, before),
                bound_numa=inputs.bindings.nodes.get(pod.uid, ()),
                exclusive=pod.uid in inputs.bindings.allocations.owned,
                since_ns=since_ns,
            )
    placement = CpusetAllocation(
        pools=(), cpus=cpus, mems=mems, rejected=dict(inputs.bindings.rejected), reasons=reasons
    )
    return placement, entries


class _CpusetSelector:
    """Selects CPUs and NUMA nodes of containers by pool and binding."""

    def __init__(self, inputs: ContainerPools, pods: Sequence[Pod]) -> None:
        self._inputs = inputs
        layout, nodes = inputs.layout, inputs.bindings.nodes
        reclaim = inputs.pools[RECLAIM]
        reclaimed = {nodes[pod.uid][0] for pod in pods if pod.qos is QoSLevel.RECLAIMED and pod.uid in nodes}
        self._reclaim_on = {numa: reclaim & layout.on([numa]) or reclaim for numa in reclaimed}
        # A pod's quota cannot limit its use of one NUMA node among several, so unbound pods stay off limited nodes.
        unbound = reclaim - layout.on(reclaimed) or reclaim
        self._reclaim = unbound - layout.on(inputs.limited) or unbound
        online = {numa for pod in pods if pod.qos.online for numa in nodes.get(pod.uid, ())}
        owned = {numa for owned in inputs.bindings.allocations.owned.values() for numa in owned}
        self._not_owned = frozenset(layout.numa) - owned
        self._unbound = self._not_owned - online
        self._mems: dict[tuple[frozenset[int], frozenset[int]], tuple[int, ...]] = {}

    def cpus(self, pod: Pod, container: Container) -> frozenset[int]:
        """Return the CPUs of the container; never empty."""
        inputs, owner = self._inputs, self._inputs.owners[pod.uid]
        if owner == DEDICATED:
            return inputs.bindings.cpus[container.cgroup] or inputs.fallback
        if owner == RECLAIM:
            bound = inputs.bindings.nodes.get(pod.uid, ())
            return self._reclaim_on[bound[0]] if bound else self._reclaim
        if owner == RESERVE:
            return inputs.static.reserve or inputs.ramp_up_cpus
        if owner == FALLBACK:
            return inputs.fallback
        return inputs.pools[owner]

    def mems(self, pod: Pod, cpus: frozenset[int]) -> tuple[int, ...]:
        """Return the NUMA nodes whose memory the pod may use: its bound ones, else all that no other pod owns."""
        bound = self._inputs.bindings.nodes.get(pod.uid, ())
        wide = frozenset(bound)
        if not bound:
            wide = self._unbound if pod.qos is QoSLevel.SHARED else self._not_owned
        key = (cpus, wide)
        if key not in self._mems:
            self._mems[key] = tuple(sorted(wide.union(self._inputs.layout.nodes_of(cpus))))
        return self._mems[key]


def _is_ramping_up(pod: Pod, owner: str, before: CpusetEntry | None, state: CpusetState, *, young: bool) -> bool:
    """Return whether the container is new. Containers from before the agent's start are not."""
    if (
        pod.qos is not QoSLevel.SHARED
        or pod.enhancements.numa_binding
        or owner.startswith(ISOLATION_PREFIX)
        or not young
    ):
        return False
    return bool(state.policy_name) if before is None else before.ramp_up


def _entry_request_cores(pod: Pod, container: Container, before: CpusetEntry | None) -> float:
    cores = requested_cores(pod, container) or 0.0
    # A dedicated container keeps the request that it started with, unless it requests less now.
    if before is not None and before.owner_pool_name == DEDICATED and pod.qos is QoSLevel.DEDICATED:
        return min(before.request_quantity or cores, cores)
    return cores


def _ramp_up_reason(ramp_up_s: float, text: str) -> Reason:
    return Reason(
        rule="ramp_up",
        text=f"The container is younger than {ramp_up_s:g} s: it may use all CPUs of the pools, {text}.",
        threshold=ramp_up_s,
        inputs={"cpu_list": text},
    )


def _pool_reason(owner: str, text: str) -> Reason:
    return Reason(
        rule="pool",
        text=f"The container runs on the CPUs of pool {owner}: {text}.",
        inputs={"pool": owner, "cpu_list": text},
    )


DYNAMIC_POLICY = "dynamic"
_ISOLATION_POOL = re.compile(r"isolation-(?:NUMA\d+-)?(?P<pod>.+?)(?:-NUMA\d+)?")


@dataclass(frozen=True)
class _PoolInputs:
    static: ReservedCpus
    state: CpusetState
    config: CpuPlacementConfig


def allocate_cpusets(
    sizes: Sequence[PoolSize],
    pods: Sequence[Pod],
    topology: Topology,
    state: CpusetState,
    config: CpuPlacementConfig,
    now_ns: int,
) -> tuple[CpusetAllocation, CpusetState]:
    """Return the CPUs of every pool and container, and the next state. Without sizes, pools are sized by requests.
    The order of pods and sizes does not matter; an unchanged input moves no CPU. A container that does not run keeps
    its CPUs, although it has no cgroup. `topology` excludes CPUs that containers must not have (see
    `restrict_to_allowed`)."""
    if state.policy_name not in ("", config.policy):
        state = CpusetState(numa_headroom=state.numa_headroom)
    ordered, state, layout, static = _prepare(pods, topology, state, config, now_ns)
    if config.policy == "native":
        placement, state = allocate_native(ordered, layout, static, state, config, now_ns)
        return without_pending_containers(placement), state
    bindings = bind_pods(ordered, layout, static.usable, state, config)
    owners = _pools_by_pod(ordered, bindings, sizes)
    _reject_excess_requests(ordered, bindings)
    pools = _allocate_pools(sizes, ordered, owners, bindings, _PoolInputs(static, state, config))
    inputs = ContainerPools(
        layout=layout,
        static=static,
        pools=pools,
        owners=owners,
        bindings=bindings,
        fallback=_fallback_cpus(pools, static),
        limited=_quota_limited_numa(sizes),
    )
    placement, entries = allocate_containers(ordered, inputs, state, config, now_ns)
    all_pools = {RESERVE: static.reserve, INTERRUPT: static.interrupt, **pools, FALLBACK: inputs.fallback}
    result = msgspec.structs.replace(without_pending_containers(placement), pools=list_pools(all_pools))
    return result, _next_state(entries, {**pools, RESERVE: static.reserve, INTERRUPT: static.interrupt}, layout, state)


def compute_numa_bindings(
    pods: Sequence[Pod], topology: Topology, state: CpusetState, config: CpuPlacementConfig, now_ns: int
) -> NumaBindings:
    """Return the NUMA bindings that `allocate_cpusets` would compute: what is left for one more pod."""
    ordered, state, layout, static = _prepare(pods, topology, state, config, now_ns)
    return bind_pods(ordered, layout, static.usable, state, config)


def _prepare(
    pods: Sequence[Pod], topology: Topology, state: CpusetState, config: CpuPlacementConfig, now_ns: int
) -> tuple[list[Pod], CpusetState, CpuLayout, ReservedCpus]:
    """Return the pods in the order of binding, the state without expired pods, the layout and the reserved CPUs."""
    pods = pods_to_allocate(pods, state)
    state = _expire_residual_pods(state, pods, config, now_ns)
    layout = layout_of(topology)
    static = reserve_cpus(layout, config, state.pool(RESERVE), state.exclusive_cpus())
    if config.policy == DYNAMIC_POLICY:
        state = forget_requested_pods(state, pods, layout, static.usable)
    return sorted(pods, key=lambda pod: _binding_order(pod, state)), state, layout, static


def _expire_residual_pods(
    state: CpusetState, pods: Sequence[Pod], config: CpuPlacementConfig, now_ns: int
) -> CpusetState:
    """Update when pods were last listed, and forget those that have been missing for long enough."""
    listed = {pod.uid for pod in pods}
    missing = {uid for uid, entry in state.pod_entries.items() if POOL_ENTRY not in entry and uid not in listed}
    residual = {uid: state.residual.get(uid, now_ns) for uid in sorted(missing)}
    expired = {uid for uid, since_ns in residual.items() if now_ns - since_ns >= config.residual_s * NS_PER_S}
    if not expired and residual == state.residual:
        return state
    return msgspec.structs.replace(
        state,
        residual={uid: since_ns for uid, since_ns in residual.items() if uid not in expired},
        pod_entries={uid: entry for uid, entry in state.pod_entries.items() if uid not in expired},
    )


def _binding_order(pod: Pod, state: CpusetState) -> tuple[bool, int, str, str]:
    """Return the sort key of binding: bound pods first, by age."""
    entries = state.pod(pod.uid).values()
    since_ns = min((entry.since_ns for entry in entries), default=None)
    return (not bound_numa_nodes(pod, state), since_ns if since_ns is not None else 1 << 62, pod.key, pod.uid)


def _pools_by_pod(pods: Sequence[Pod], bindings: NumaBindings, sizes: Sequence[PoolSize]) -> Mapping[str, str]:
    """Return the pool by pod uid; `fallback` for pods whose binding was rejected."""
    isolated = {match["pod"]: size.pool for size in sizes if (match := _ISOLATION_POOL.fullmatch(size.pool))}
    pools_with_size = {size.pool for size in sizes}
    owners = {}
    for pod in pods:
        bound = bindings.nodes.get(pod.uid, ())
        owner = pool_name_of(pod, bound)
        if pod.qos is QoSLevel.SHARED:
            owner = (
                isolated.get(pod.key) or isolated.get(f"{pod.namespace}-{pod.name}") or isolated.get(pod.uid) or owner
            )
        elif pod.qos is QoSLevel.DEDICATED and pod.uid not in bindings.nodes:
            owner = FALLBACK
        elif pod.qos is QoSLevel.SYSTEM and owner not in pools_with_size:
            owner = RESERVE
        owners[pod.uid] = owner
    return _without_empty_pools(pods, owners)


def _without_empty_pools(pods: Sequence[Pod], owners: Mapping[str, str]) -> Mapping[str, str]:
    """Return the owners with the pods of named pools in which nothing is requested in the share pool."""
    cores: dict[str, float] = {}
    for pod in pods:
        if pod.qos is QoSLevel.SHARED:
            cores[owners[pod.uid]] = cores.get(owners[pod.uid], 0.0) + requested_pod_cores(pod)
    empty = {pool for pool, requested in cores.items() if not requested and is_named_pool(pool)}
    suffixes = {pool: pool.rpartition("-NUMA") for pool in empty}
    share = {pool: f"{SHARE}-NUMA{numa}" if base else SHARE for pool, (base, _, numa) in suffixes.items()}
    return {uid: share.get(owner, owner) for uid, owner in owners.items()}


def _reject_excess_requests(pods: Sequence[Pod], bindings: NumaBindings) -> None:
    """Reject shared pods, in order, whose requests exceed the CPUs that dedicated and bound pods leave."""
    allocations = bindings.allocations
    available = max(len(allocations.free) - sum(allocations.requested.values()), 0.0)
    accepted_cores = 0.0
    unbound_pods = [pod for pod in pods if pod.qos is QoSLevel.SHARED and pod.uid not in bindings.nodes]
    for pod in unbound_pods:
        cores = sum(container.cpu_request_cores or 0.0 for container in pod.containers)
        if accepted_cores + cores > available and pod.key not in bindings.rejected:
            bindings.rejected[pod.key] = Reason(
                rule="shared_requests_too_large",
                text=f"{pod.key} requests {cores:g} CPUs; "
                f"{max(available - accepted_cores, 0):g} of {available:g} are left for shared pods. "
                "It runs in its pool, which is smaller than the requests of its pods.",
                threshold=available,
                inputs={"request_cores": cores, "asked_before_cores": accepted_cores},
            )
        else:
            accepted_cores += cores


def _allocate_pools(
    sizes: Sequence[PoolSize],
    pods: Sequence[Pod],
    owners: Mapping[str, str],
    bindings: NumaBindings,
    inputs: _PoolInputs,
) -> dict[str, frozenset[int]]:
    allocations, config = bindings.allocations, inputs.config
    layout = allocations.layout
    demand = _pool_demand(pods, owners, bindings, config)
    bound = frozenset(
        {numa for _pool, numa in demand if numa != NOT_NUMA_BOUND} | _numa_bound_by_sizes(sizes, layout)
    ) & frozenset(layout.numa)
    capacity = PoolCapacity(
        bound={numa: len(layout.on([numa]) & allocations.free) for numa in sorted(bound)},
        unbound=len(allocations.free - layout.on(bound)),
    )
    reclaim_cpus = config.reclaim_reserve(len(layout.order), len(layout.numa))
    reserve = spread_over_numa(reclaim_cpus, tuple(layout.numa))
    assignable_sizes = tuple(sorted(sizes, key=lambda size: (size.pool, size.numa)))
    # The pool of an offline NUMA node moves to the other nodes. Dedicated pods have their CPUs already, or run with the shared
    # pods, whose pool has their requests.
    dedicated_names = {f"{DEDICATED}-{pod.key}" for pod in pods if pod.qos is QoSLevel.DEDICATED}
    assignable_sizes = tuple(
        size if size.numa in layout.numa else msgspec.structs.replace(size, numa=NOT_NUMA_BOUND)
        for size in assignable_sizes
        if size.pool not in dedicated_names
    )
    requests = _requests_by_pool(pods, owners, bindings)
    completed = complete_pool_sizes(assignable_sizes, demand, capacity, reserve, config)
    completed = limit_own_pools(completed, requests)
    sized_pools: tuple[SizedPool, ...] = fit_pool_sizes(completed, capacity)
    min_sizes: Mapping[PoolKey, int] = {}
    lendable = 0
    if sum(requests.values()) <= capacity.total:
        advised = {(size.pool, size.numa) for size in assignable_sizes if size.pool != RECLAIM}
        # Reclaimed pods return CPUs on demand: what an advisor gives them, up to the reserve, is lent.
        given = sum(size.cpus for size in assignable_sizes if size.pool == RECLAIM)
        lendable = min(reclaim_cpus, given) if advised else 0
        min_sizes = min_pool_sizes(sized_pools, requests, capacity, advised)
        sized_pools, min_sizes = raise_to_requests(sized_pools, min_sizes, capacity, lendable)
    assignable = AssignableCpus(
        layout=layout,
        free=allocations.free,
        usable=inputs.static.usable,
        before={name: inputs.state.pool(name) for name in {RECLAIM, *(pool.pool for pool in sized_pools)}},
        bound=bound,
        dedicated=_dedicated_cpus(pods, bindings),
        shared_reclaim_cpus=reclaim_cpus,
        owned=layout.on(numa for nodes in allocations.owned.values() for numa in nodes) & inputs.static.usable,
    )
    pools = assign_pools(sized_pools, completed, assignable)
    candidates = allocations.free - pools[RECLAIM] if lendable else allocations.free
    return share_missing_cpus(pools, min_sizes, layout, candidates)


def _pool_demand(
    pods: Sequence[Pod], owners: Mapping[str, str], bindings: NumaBindings, config: CpuPlacementConfig
) -> Mapping[PoolKey, float]:
    demand: dict[PoolKey, float] = {}
    for pod in pods:
        if pod.qos is QoSLevel.SHARED:
            bound = bindings.nodes.get(pod.uid, ())
            isolated = owners[pod.uid].startswith(ISOLATION_PREFIX)
            key = (owners[pod.uid], bound[0] if bound else NOT_NUMA_BOUND)
            if not isolated:
                demand[key] = demand.get(key, 0.0) + pod_cores(pod, config)
        elif owners[pod.uid] == FALLBACK and (cores := requested_pod_cores(pod)):
            # The pod runs with the shared pods, so their pool has to hold its request too.
            demand[SHARE, NOT_NUMA_BOUND] = demand.get((SHARE, NOT_NUMA_BOUND), 0.0) + cores
    return demand


def _requests_by_pool(
    pods: Sequence[Pod], owners: Mapping[str, str], bindings: NumaBindings
) -> Mapping[PoolKey, float]:
    """Return the requests of the pods of each online pool, isolated pods included."""
    requests: dict[PoolKey, float] = {}
    for pod in pods:
        bound = bindings.nodes.get(pod.uid, ()) if pod.qos is QoSLevel.SHARED else ()
        owner = owners[pod.uid] if pod.qos is QoSLevel.SHARED else SHARE
        if pod.qos is QoSLevel.SHARED or owners[pod.uid] == FALLBACK:
            key = (owner, bound[0] if bound else NOT_NUMA_BOUND)
            requests[key] = requests.get(key, 0.0) + requested_pod_cores(pod)
    return requests


def _numa_bound_by_sizes(sizes: Sequence[PoolSize], layout: CpuLayout) -> set[int]:
    """Return NUMA nodes to which sizes bind online pools."""
    return {
        size.numa
        for size in sizes
        if size.numa in layout.numa and size.pool != RECLAIM and not _is_system_pool(size.pool)
    }


def _is_system_pool(pool: str) -> bool:
    return pool.startswith(SYSTEM_PREFIX) or pool in (RESERVE, INTERRUPT, DEDICATED, FALLBACK)


def _dedicated_cpus(pods: Sequence[Pod], bindings: NumaBindings) -> Mapping[str, frozenset[int]]:
    """Return the CPUs of each dedicated pod by pod key."""
    return {
        pod.key: NO_CPUS.union(*(bindings.cpus.get(container.cgroup, NO_CPUS) for container in pod.containers))
        for pod in pods
        if pod.qos is QoSLevel.DEDICATED
    }


def _quota_limited_numa(sizes: Sequence[PoolSize]) -> frozenset[int]:
    """Return NUMA nodes with a quota for reclaimed pods; none if there is a node-wide one as well."""
    limited = {size.numa for size in sizes if size.pool == RECLAIM and size.quota_cores is not None}
    return frozenset() if NOT_NUMA_BOUND in limited else frozenset(limited)


def _fallback_cpus(pools: Mapping[str, frozenset[int]], static: ReservedCpus) -> frozenset[int]:
    """Return the union of all online pools; without any, the CPUs that pools could have."""
    return NO_CPUS.union(*(cpus for name, cpus in pools.items() if name != RECLAIM)) or pools[RECLAIM] or static.usable


def _next_state(
    entries: Mapping[str, Mapping[str, CpusetEntry]],
    pools: Mapping[str, frozenset[int]],
    layout: CpuLayout,
    state: CpusetState,
) -> CpusetState:
    exclusive = NO_CPUS.union(
        *(item.cpus for entry in entries.values() for item in entry.values() if item.owner_pool_name == DEDICATED)
    )
    online = NO_CPUS.union(*(cpus for name, cpus in pools.items() if name not in (RECLAIM, RESERVE, INTERRUPT)))
    return msgspec.structs.replace(
        state,
        policy_name=DYNAMIC_POLICY,
        overlap=bool(online & pools[RECLAIM]),
        machine_state={
            numa: NumaState(
                default_cpuset=format_cpu_list(frozenset(cpus) - exclusive),
                allocated_cpuset=format_cpu_list(exclusive & frozenset(cpus)),
            )
            for numa, cpus in layout.numa.items()
        },
        pod_entries={**pool_entries(pools, layout), **dict(sorted(entries.items()))},
    )
