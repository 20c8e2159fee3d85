"""Allocates CPUs and NUMA nodes to every pool and container: pool sizes in, cpusets and next state out. Pure.
An unchanged input moves no CPU. Each allocation and each rejection carries its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from agent.qrm.cpuset.native_policy import allocate_native
from agent.qrm.cpuset.numa_binding import NumaBindings, bind_pods, pod_cores
from agent.qrm.cpuset.select_cpus import NO_CPUS
from agent.qrm.cpuset.state import (
    DEDICATED,
    FALLBACK,
    INTERRUPT,
    ISOLATION_PREFIX,
    POOL_ENTRY,
    RECLAIM,
    RESERVE,
    SYSTEM_PREFIX,
    CpusetAllocation,
    CpusetEntry,
    CpusetState,
    NumaState,
    bound_numa_nodes,
    cpu_lists_by_numa,
    pods_to_allocate,
    pool_entry,
    pool_name_of,
    requested_cores,
    without_pending_containers,
)
from agent.qrm.cpuset.topology_layout import CpuLayout, layout_of
from api.advice import NOT_NUMA_BOUND, PoolSize
from api.cpu import Topology, format_cpu_list
from api.decision import Pool
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class ContainerPools:
    """Where containers can be put."""

    layout: CpuLayout
    static: ReservedCpus
    pools: Mapping[str, frozenset[int]]
    owners: Mapping[str, str]
    """The pool of each pod, by uid."""
    bindings: NumaBindings
    fallback: frozenset[int]
    limited: frozenset[int] = frozenset()
    """NUMA nodes of which reclaimed pods have a quota, where they have none elsewhere."""

    @property
    def ramp_up_cpus(self) -> frozenset[int]:
        """What a container may use while it ramps up: all that is neither reserved nor dedicated."""
        return self.bindings.ledger.free or self.fallback


@dataclass
class _CpuListCache:
    """What many containers have in common, worked out once for each set of CPUs."""

    layout: CpuLayout
    _known: dict[frozenset[int], tuple[tuple[int, ...], str, Mapping[int, str]]] = field(default_factory=dict)

    def of(self, cpus: frozenset[int]) -> tuple[tuple[int, ...], str, Mapping[int, str]]:
        if cpus not in self._known:
            self._known[cpus] = (tuple(sorted(cpus)), format_cpu_list(cpus), cpu_lists_by_numa(self.layout, cpus))
        return self._known[cpus]


def allocate_containers(
    pods: Sequence[Pod], homes: ContainerPools, state: CpusetState, config: CpuPlacementConfig, now_ns: int
) -> tuple[CpusetAllocation, dict[str, dict[str, CpusetEntry]]]:
    """CPUs, NUMA nodes and verdict of every container, and the entries to remember, those of residual pods included."""
    cpus: dict[str, tuple[int, ...]] = {}
    mems: dict[str, tuple[int, ...]] = {}
    verdicts: dict[str, Reason] = {}
    entries: dict[str, dict[str, CpusetEntry]] = {
        uid: dict(state.pod(uid)) for uid in state.residual if uid not in homes.owners
    }
    shown = _CpuListCache(homes.layout)
    regions = _CpusetSelector(homes, pods)
    texts: dict[tuple[str, frozenset[int]], Reason] = {}
    for pod in pods:
        owner = homes.owners[pod.uid]
        rejected = homes.bindings.rejected.get(pod.key)
        known = state.pod(pod.uid)
        for container in pod.containers:
            before = known.get(container.name)
            since_ns = now_ns if before is None else before.since_ns
            ramping = _is_ramping_up(pod, owner, before, state, young=now_ns - since_ns < config.ramp_up_s * _NS_PER_S)
            chosen = homes.ramp_up_cpus if ramping else regions.cpus(pod, container)
            cpus[container.cgroup], text, nodes = shown.of(chosen)
            mems[container.cgroup] = regions.mems(pod, chosen)
            if ramping:
                why = _ramp_up_reason(config.ramp_up_s, text)
            else:
                why = homes.bindings.reasons.get(pod.key) or texts.setdefault(
                    (owner, chosen), _pool_reason(owner, text)
                )
            verdicts[container.cgroup] = rejected or why
            entries.setdefault(pod.uid, {})[container.name] = CpusetEntry(
                pod_uid=pod.uid,
                pod_namespace=pod.namespace,
                pod_name=pod.name,
                container_name=container.name,
                container_type="SIDECAR" if container.sidecar else "MAIN",
                owner_pool_name=owner,
                qos_level=pod.qos.value,
                ramp_up=ramping,
                allocation_result=text,
                topology_aware_assignments=nodes,
                request_quantity=_entry_request_cores(pod, container, before),
                bound_numa=homes.bindings.nodes.get(pod.uid, ()),
                exclusive=pod.uid in homes.bindings.ledger.owned,
                since_ns=since_ns,
            )
    placement = CpusetAllocation(
        pools=(), cpus=cpus, mems=mems, rejected=dict(homes.bindings.rejected), reasons=verdicts
    )
    return placement, entries


class _CpusetSelector:
    """CPUs and NUMA nodes for pods by what they are bound to; worked out once for all of them."""

    def __init__(self, homes: ContainerPools, pods: Sequence[Pod]) -> None:
        self._homes = homes
        node, nodes = homes.layout, homes.bindings.nodes
        reclaim = homes.pools[RECLAIM]
        reclaimed = {nodes[pod.uid][0] for pod in pods if pod.qos is QoSLevel.RECLAIMED and pod.uid in nodes}
        self._reclaim_on = {numa: reclaim & node.on([numa]) or reclaim for numa in reclaimed}
        # No quota of a pod could keep it to a part of one node among several: who is bound to none stays off.
        anywhere = reclaim - node.on(reclaimed) or reclaim
        self._reclaim = anywhere - node.on(homes.limited) or anywhere
        online = {numa for pod in pods if pod.qos.online for numa in nodes.get(pod.uid, ())}
        owned = {numa for owned in homes.bindings.ledger.owned.values() for numa in owned}
        self._not_owned = frozenset(node.numa) - owned
        self._unbound = self._not_owned - online
        self._mems: dict[tuple[frozenset[int], frozenset[int]], tuple[int, ...]] = {}

    def cpus(self, pod: Pod, container: Container) -> frozenset[int]:
        """Never empty."""
        homes, owner = self._homes, self._homes.owners[pod.uid]
        if owner == DEDICATED:
            return homes.bindings.cpus[container.cgroup] or homes.fallback
        if owner == RECLAIM:
            bound = homes.bindings.nodes.get(pod.uid, ())
            return self._reclaim_on[bound[0]] if bound else self._reclaim
        if owner == RESERVE:
            return homes.static.reserve or homes.ramp_up_cpus
        if owner == FALLBACK:
            return homes.fallback
        return homes.pools[owner]

    def mems(self, pod: Pod, cpus: frozenset[int]) -> tuple[int, ...]:
        """NUMA nodes whose memory the pod may use: its own where it is bound, else all that are not somebody's own."""
        bound = self._homes.bindings.nodes.get(pod.uid, ())
        wide = frozenset(bound)
        if not bound:
            wide = self._unbound if pod.qos is QoSLevel.SHARED else self._not_owned
        key = (cpus, wide)
        if key not in self._mems:
            self._mems[key] = tuple(sorted(wide.union(self._homes.layout.nodes_of(cpus))))
        return self._mems[key]


def _is_ramping_up(pod: Pod, owner: str, before: CpusetEntry | None, state: CpusetState, *, young: bool) -> bool:
    """Whether the container is new and to be left room. Those that were there before the agent are not new."""
    if (
        pod.qos is not QoSLevel.SHARED
        or pod.enhancements.numa_binding
        or owner.startswith(ISOLATION_PREFIX)
        or not young
    ):
        return False
    return bool(state.policy_name) if before is None else before.ramp_up


def _entry_request_cores(pod: Pod, container: Container, before: CpusetEntry | None) -> float:
    # A dedicated container keeps what it began with.
    if before is not None and before.owner_pool_name == DEDICATED and pod.qos is QoSLevel.DEDICATED:
        return before.request_quantity
    return requested_cores(pod, container) or 0.0


def _ramp_up_reason(ramp_up_s: float, text: str) -> Reason:
    return Reason(
        rule="ramp_up",
        text=f"New for less than {ramp_up_s:g} s: it may use all pooled CPUs, {text}.",
        threshold=ramp_up_s,
        inputs={"cpu_list": text},
    )


def _pool_reason(owner: str, text: str) -> Reason:
    return Reason(
        rule="pool", text=f"It runs on the CPUs of pool {owner}: {text}.", inputs={"pool": owner, "cpu_list": text}
    )


NS_PER_S = 1_000_000_000
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
    """CPUs of every pool and container, and what to remember of it for the next time.

    Without sizes they are made from requests. The order of pods and sizes does not matter, and what did not change moves
    no CPU. A container that does not run keeps what it had, though it has no cgroup to write that to. CPUs that containers
    must not have whatever else holds (see `below`) are not in `topology`.
    """
    if state.policy_name not in ("", config.policy):
        state = CpusetState(numa_headroom=state.numa_headroom)
    pods = pods_to_allocate(pods, state)
    state = _expire_residual_pods(state, pods, config, now_ns)
    node = layout_of(topology)
    static = reserve_cpus(node, config, state.pool(RESERVE), state.alone())
    ordered = sorted(pods, key=lambda pod: _binding_order(pod, state))
    if config.policy == "native":
        placement, state = allocate_native(ordered, node, static, state, config, now_ns)
        return without_pending_containers(placement), state
    bindings = bind_pods(ordered, node, static.usable, state, config)
    owners = _pools_by_pod(ordered, bindings, sizes)
    _reject_excess_requests(ordered, bindings)
    pools = _allocate_pools(sizes, ordered, owners, bindings, _PoolInputs(static, state, config))
    homes = ContainerPools(
        layout=node,
        static=static,
        pools=pools,
        owners=owners,
        bindings=bindings,
        fallback=_fallback_cpus(pools, static),
        limited=_quota_limited_numa(sizes),
    )
    placement, entries = allocate_containers(ordered, homes, state, config, now_ns)
    shown = {RESERVE: static.reserve, INTERRUPT: static.interrupt, **pools, FALLBACK: homes.fallback}
    result = msgspec.structs.replace(
        without_pending_containers(placement),
        pools=tuple(Pool(name=name, cpus=tuple(sorted(cpus))) for name, cpus in sorted(shown.items()) if cpus),
    )
    return result, _next_state(entries, {**pools, RESERVE: static.reserve, INTERRUPT: static.interrupt}, node, state)


def compute_numa_bindings(
    pods: Sequence[Pod], topology: Topology, state: CpusetState, config: CpuPlacementConfig, now_ns: int
) -> NumaBindings:
    """Who has claims of his own on which NUMA nodes, as `place` would have it for these pods: what is left for one more."""
    pods = pods_to_allocate(pods, state)
    state = _expire_residual_pods(state, pods, config, now_ns)
    node = layout_of(topology)
    static = reserve_cpus(node, config, state.pool(RESERVE), state.alone())
    return bind_pods(sorted(pods, key=lambda pod: _binding_order(pod, state)), node, static.usable, state, config)


def _expire_residual_pods(
    state: CpusetState, pods: Sequence[Pod], config: CpuPlacementConfig, now_ns: int
) -> CpusetState:
    """Who is not listed any more, since when, and without those who have not been for long enough."""
    there = {pod.uid for pod in pods}
    gone = {uid for uid, entry in state.pod_entries.items() if POOL_ENTRY not in entry and uid not in there}
    residual = {uid: state.residual.get(uid, now_ns) for uid in sorted(gone)}
    forgotten = {uid for uid, since in residual.items() if now_ns - since >= config.residual_s * NS_PER_S}
    if not forgotten and residual == state.residual:
        return state
    return msgspec.structs.replace(
        state,
        residual={uid: since for uid, since in residual.items() if uid not in forgotten},
        pod_entries={uid: entry for uid, entry in state.pod_entries.items() if uid not in forgotten},
    )


def _binding_order(pod: Pod, state: CpusetState) -> tuple[bool, int, str, str]:
    """Bound pods first, the older the earlier."""
    entries = state.pod(pod.uid).values()
    since = min((entry.since_ns for entry in entries), default=None)
    return (not bound_numa_nodes(pod, state), since if since is not None else 1 << 62, pod.key, pod.uid)


def _pools_by_pod(pods: Sequence[Pod], bindings: NumaBindings, sizes: Sequence[PoolSize]) -> Mapping[str, str]:
    """The pool of each pod, by uid; `fallback` for those that were rejected what they need a place of their own for."""
    isolated = {match["pod"]: size.pool for size in sizes if (match := _ISOLATION_POOL.fullmatch(size.pool))}
    sized = {size.pool for size in sizes}
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
        elif pod.qos is QoSLevel.SYSTEM and owner not in sized:
            owner = RESERVE
        owners[pod.uid] = owner
    return owners


def _reject_excess_requests(pods: Sequence[Pod], bindings: NumaBindings) -> None:
    """Shared pods, in turn, that are bound to no node may not ask for more than there is; the last to come are too many."""
    ledger = bindings.ledger
    room = max(len(ledger.free) - sum(ledger.requested.values()), 0.0)
    asked = 0.0
    waiting = [pod for pod in pods if pod.qos is QoSLevel.SHARED and pod.uid not in bindings.nodes]
    for pod in waiting:
        cores = sum(container.cpu_request_cores or 0.0 for container in pod.containers)
        if asked + cores > room and pod.key not in bindings.rejected:
            bindings.rejected[pod.key] = Reason(
                rule="shared_requests_too_large",
                text=f"{pod.key} asks for {cores:g} CPUs where {max(room - asked, 0):g} of {room:g} are left to shared pods; "
                "it runs in its pool, which cannot hold what all ask for.",
                threshold=room,
                inputs={"request_cores": cores, "asked_before_cores": asked},
            )
        else:
            asked += cores


def _allocate_pools(
    sizes: Sequence[PoolSize],
    pods: Sequence[Pod],
    owners: Mapping[str, str],
    bindings: NumaBindings,
    scene: _PoolInputs,
) -> dict[str, frozenset[int]]:
    ledger, config = bindings.ledger, scene.config
    node = ledger.layout
    demand = _pool_demand(pods, owners, bindings, config)
    bound = frozenset(
        {numa for _pool, numa in demand if numa != NOT_NUMA_BOUND} | _numa_bound_by_sizes(sizes, node)
    ) & frozenset(node.numa)
    room = PoolCapacity(
        bound={numa: len(node.on([numa]) & ledger.free) for numa in sorted(bound)},
        unbound=len(ledger.free - node.on(bound)),
    )
    least = config.reclaim_reserve(len(node.order), len(node.numa))
    reserve = spread_over_numa(least, tuple(node.numa))
    known = tuple(sorted(sizes, key=lambda size: (size.pool, size.numa)))
    # A pool of a NUMA node that is not there any more is as large on the others; dedicated pods have their CPUs already.
    placed = {f"{DEDICATED}-{pod.key}" for pod in pods if owners[pod.uid] == DEDICATED}
    known = tuple(
        size if size.numa in node.numa else msgspec.structs.replace(size, numa=NOT_NUMA_BOUND)
        for size in known
        if size.pool not in placed
    )
    wanted = complete_pool_sizes(known, demand, room, reserve, config)
    wants: tuple[SizedPool, ...] = fit_pool_sizes(wanted, room)
    ground = AssignableCpus(
        layout=node,
        free=ledger.free,
        usable=scene.static.usable,
        before={name: scene.state.pool(name) for name in {RECLAIM, *(want.pool for want in wants)}},
        bound=bound,
        dedicated=_dedicated_cpus(pods, bindings),
        least=least,
        owned=node.on(numa for nodes in ledger.owned.values() for numa in nodes) & scene.static.usable,
    )
    return assign_pools(wants, wanted, ground)


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
    return demand


def _numa_bound_by_sizes(sizes: Sequence[PoolSize], node: CpuLayout) -> set[int]:
    """NUMA nodes that online pools are bound to by their sizes."""
    return {
        size.numa
        for size in sizes
        if size.numa in node.numa and size.pool != RECLAIM and not _is_system_pool(size.pool)
    }


def _is_system_pool(pool: str) -> bool:
    return pool.startswith(SYSTEM_PREFIX) or pool in (RESERVE, INTERRUPT, DEDICATED, FALLBACK)


def _dedicated_cpus(pods: Sequence[Pod], bindings: NumaBindings) -> Mapping[str, frozenset[int]]:
    """CPUs of each dedicated pod, by its key."""
    return {
        pod.key: NO_CPUS.union(*(bindings.cpus.get(container.cgroup, NO_CPUS) for container in pod.containers))
        for pod in pods
        if pod.qos is QoSLevel.DEDICATED
    }


def _quota_limited_numa(sizes: Sequence[PoolSize]) -> frozenset[int]:
    """NUMA nodes of which reclaimed pods have a quota; none where what they use in all has one too."""
    limited = {size.numa for size in sizes if size.pool == RECLAIM and size.quota_cores is not None}
    return frozenset() if NOT_NUMA_BOUND in limited else frozenset(limited)


def _fallback_cpus(pools: Mapping[str, frozenset[int]], static: ReservedCpus) -> frozenset[int]:
    """All pools of online pods together; where there are none, what pools could have."""
    return NO_CPUS.union(*(cpus for name, cpus in pools.items() if name != RECLAIM)) or pools[RECLAIM] or static.usable


def _next_state(
    entries: Mapping[str, Mapping[str, CpusetEntry]],
    pools: Mapping[str, frozenset[int]],
    node: CpuLayout,
    state: CpusetState,
) -> CpusetState:
    taken = NO_CPUS.union(
        *(item.cpus for entry in entries.values() for item in entry.values() if item.owner_pool_name == DEDICATED)
    )
    online = NO_CPUS.union(*(cpus for name, cpus in pools.items() if name not in (RECLAIM, RESERVE, INTERRUPT)))
    return msgspec.structs.replace(
        state,
        policy_name=DYNAMIC_POLICY,
        overlap=bool(online & pools[RECLAIM]),
        machine_state={
            numa: NumaState(
                default_cpuset=format_cpu_list(frozenset(cpus) - taken),
                allocated_cpuset=format_cpu_list(taken & frozenset(cpus)),
            )
            for numa, cpus in node.numa.items()
        },
        pod_entries={
            **{name: {POOL_ENTRY: pool_entry(name, cpus, node)} for name, cpus in sorted(pools.items()) if cpus},
            **dict(sorted(entries.items())),
        },
    )
