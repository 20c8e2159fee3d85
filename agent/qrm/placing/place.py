"""From sizes to CPUs: one pure function that says which CPUs and NUMA nodes every pool and every container is to have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.binding import Bindings, bind, cores_of
from agent.qrm.placing.carving import Ground, carve
from agent.qrm.placing.containers import Homes, place_containers
from agent.qrm.placing.layout import Layout, layout
from agent.qrm.placing.native import place_native
from agent.qrm.placing.picking import NONE
from agent.qrm.placing.sizing import Key, Room, Want, complete, fit, spread
from agent.qrm.placing.state import (
    DEDICATED,
    FALLBACK,
    INTERRUPT,
    ISOLATION,
    POOL_ENTRY,
    RECLAIM,
    RESERVE,
    SYSTEM,
    Allocation,
    CpuState,
    NumaState,
    Placement,
    bound_of,
    own_pool,
    pool_entry,
)
from agent.qrm.placing.static import Static, static_pools
from agent.qrm.placing.whole import of_cgroups, whole
from api.advice import UNBOUND, PoolSize
from api.cpus import Topology, format_cpu_list
from api.decisions import Pool
from api.knobs import Verdict
from api.pods import Pod
from api.qos import QoSLevel

S = 1_000_000_000
DYNAMIC = "dynamic"
_ISOLATED = re.compile(r"isolation-(?:NUMA\d+-)?(?P<pod>.+?)(?:-NUMA\d+)?")


@dataclass(frozen=True)
class _Scene:
    static: Static
    state: CpuState
    config: CpuPlacementConfig


def place(
    sizes: Sequence[PoolSize],
    pods: Sequence[Pod],
    topology: Topology,
    state: CpuState,
    config: CpuPlacementConfig,
    now_ns: int,
) -> tuple[Placement, CpuState]:
    """CPUs of every pool and container, and what to remember of it for the next time.

    Without sizes they are made from requests. The order of pods and sizes does not matter, and what did not change moves
    no CPU. A container that does not run keeps what it had, though it has no cgroup to write that to. CPUs that containers
    must not have whatever else holds (see `below`) are not in `topology`.
    """
    if state.policy_name not in ("", config.policy):
        state = CpuState(numa_headroom=state.numa_headroom)
    pods = whole(pods, state)
    state = _follow(state, pods, config, now_ns)
    node = layout(topology)
    static = static_pools(node, config, state.pool(RESERVE), state.alone())
    ordered = sorted(pods, key=lambda pod: _turn(pod, state))
    if config.policy == "native":
        placement, state = place_native(ordered, node, static, state, config, now_ns)
        return of_cgroups(placement), state
    bindings = bind(ordered, node, static.usable, state, config)
    owners = _owners(ordered, bindings, sizes)
    _admit(ordered, bindings)
    pools = _pools(sizes, ordered, owners, bindings, _Scene(static, state, config))
    homes = Homes(
        layout=node,
        static=static,
        pools=pools,
        owners=owners,
        bindings=bindings,
        fallback=_fallback(pools, static),
        limited=_limited(sizes),
    )
    placement, entries = place_containers(ordered, homes, state, config, now_ns)
    shown = {RESERVE: static.reserve, INTERRUPT: static.interrupt, **pools, FALLBACK: homes.fallback}
    result = msgspec.structs.replace(
        of_cgroups(placement),
        pools=tuple(Pool(name=name, cpus=tuple(sorted(cpus))) for name, cpus in sorted(shown.items()) if cpus),
    )
    return result, _remember(entries, {**pools, RESERVE: static.reserve, INTERRUPT: static.interrupt}, node, state)


def bindings(
    pods: Sequence[Pod], topology: Topology, state: CpuState, config: CpuPlacementConfig, now_ns: int
) -> Bindings:
    """Who has claims of his own on which NUMA nodes, as `place` would have it for these pods: what is left for one more."""
    pods = whole(pods, state)
    state = _follow(state, pods, config, now_ns)
    node = layout(topology)
    static = static_pools(node, config, state.pool(RESERVE), state.alone())
    return bind(sorted(pods, key=lambda pod: _turn(pod, state)), node, static.usable, state, config)


def _follow(state: CpuState, pods: Sequence[Pod], config: CpuPlacementConfig, now_ns: int) -> CpuState:
    """Who is not listed any more, since when, and without those who have not been for long enough."""
    there = {pod.uid for pod in pods}
    gone = {uid for uid, entry in state.pod_entries.items() if POOL_ENTRY not in entry and uid not in there}
    residual = {uid: state.residual.get(uid, now_ns) for uid in sorted(gone)}
    forgotten = {uid for uid, since in residual.items() if now_ns - since >= config.residual_s * S}
    if not forgotten and residual == state.residual:
        return state
    return msgspec.structs.replace(
        state,
        residual={uid: since for uid, since in residual.items() if uid not in forgotten},
        pod_entries={uid: entry for uid, entry in state.pod_entries.items() if uid not in forgotten},
    )


def _turn(pod: Pod, state: CpuState) -> tuple[bool, int, str, str]:
    """Bound pods first, the older the earlier."""
    entries = state.pod(pod.uid).values()
    since = min((entry.since_ns for entry in entries), default=None)
    return (not bound_of(pod, state), since if since is not None else 1 << 62, pod.key, pod.uid)


def _owners(pods: Sequence[Pod], bindings: Bindings, sizes: Sequence[PoolSize]) -> Mapping[str, str]:
    """The pool of each pod, by uid; `fallback` for those that were rejected what they need a place of their own for."""
    isolated = {match["pod"]: size.pool for size in sizes if (match := _ISOLATED.fullmatch(size.pool))}
    sized = {size.pool for size in sizes}
    owners = {}
    for pod in pods:
        bound = bindings.nodes.get(pod.uid, ())
        owner = own_pool(pod, bound)
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


def _admit(pods: Sequence[Pod], bindings: Bindings) -> None:
    """Shared pods, in turn, that are bound to no node may not ask for more than there is; the last to come are too many."""
    ledger = bindings.ledger
    room = max(len(ledger.free) - sum(ledger.requested.values()), 0.0)
    asked = 0.0
    waiting = [pod for pod in pods if pod.qos is QoSLevel.SHARED and pod.uid not in bindings.nodes]
    for pod in waiting:
        cores = sum(container.cpu_request_cores or 0.0 for container in pod.containers)
        if asked + cores > room and pod.key not in bindings.rejected:
            bindings.rejected[pod.key] = Verdict(
                rule="shared_requests_too_large",
                text=f"{pod.key} asks for {cores:g} CPUs where {max(room - asked, 0):g} of {room:g} are left to shared pods; "
                "it runs in its pool, which cannot hold what all ask for.",
                threshold=room,
                inputs={"request_cores": cores, "asked_before_cores": asked},
            )
        else:
            asked += cores


def _pools(
    sizes: Sequence[PoolSize],
    pods: Sequence[Pod],
    owners: Mapping[str, str],
    bindings: Bindings,
    scene: _Scene,
) -> dict[str, frozenset[int]]:
    ledger, config = bindings.ledger, scene.config
    node = ledger.layout
    demand = _demand(pods, owners, bindings, config)
    bound = frozenset({numa for _pool, numa in demand if numa != UNBOUND} | _bound_by(sizes, node)) & frozenset(
        node.numa
    )
    room = Room(
        bound={numa: len(node.on([numa]) & ledger.free) for numa in sorted(bound)},
        unbound=len(ledger.free - node.on(bound)),
    )
    least = config.reclaim_reserve(len(node.order), len(node.numa))
    reserve = spread(least, tuple(node.numa))
    known = tuple(sorted(sizes, key=lambda size: (size.pool, size.numa)))
    # A pool of a NUMA node that is not there any more is as large on the others; dedicated pods have their CPUs already.
    placed = {f"{DEDICATED}-{pod.key}" for pod in pods if owners[pod.uid] == DEDICATED}
    known = tuple(
        size if size.numa in node.numa else msgspec.structs.replace(size, numa=UNBOUND)
        for size in known
        if size.pool not in placed
    )
    wanted = complete(known, demand, room, reserve, config)
    wants: tuple[Want, ...] = fit(wanted, room)
    ground = Ground(
        layout=node,
        free=ledger.free,
        usable=scene.static.usable,
        before={name: scene.state.pool(name) for name in {RECLAIM, *(want.pool for want in wants)}},
        bound=bound,
        dedicated=_dedicated(pods, bindings),
        least=least,
        owned=node.on(numa for nodes in ledger.owned.values() for numa in nodes) & scene.static.usable,
    )
    return carve(wants, wanted, ground)


def _demand(
    pods: Sequence[Pod], owners: Mapping[str, str], bindings: Bindings, config: CpuPlacementConfig
) -> Mapping[Key, float]:
    demand: dict[Key, float] = {}
    for pod in pods:
        if pod.qos is QoSLevel.SHARED:
            bound = bindings.nodes.get(pod.uid, ())
            isolated = owners[pod.uid].startswith(ISOLATION)
            key = (owners[pod.uid], bound[0] if bound else UNBOUND)
            if not isolated:
                demand[key] = demand.get(key, 0.0) + cores_of(pod, config)
    return demand


def _bound_by(sizes: Sequence[PoolSize], node: Layout) -> set[int]:
    """NUMA nodes that online pools are bound to by their sizes."""
    return {
        size.numa for size in sizes if size.numa in node.numa and size.pool != RECLAIM and not _is_system(size.pool)
    }


def _is_system(pool: str) -> bool:
    return pool.startswith(SYSTEM) or pool in (RESERVE, INTERRUPT, DEDICATED, FALLBACK)


def _dedicated(pods: Sequence[Pod], bindings: Bindings) -> Mapping[str, frozenset[int]]:
    """CPUs of each dedicated pod, by its key."""
    return {
        pod.key: NONE.union(*(bindings.cpus.get(container.cgroup, NONE) for container in pod.containers))
        for pod in pods
        if pod.qos is QoSLevel.DEDICATED
    }


def _limited(sizes: Sequence[PoolSize]) -> frozenset[int]:
    """NUMA nodes of which reclaimed pods have a quota; none where what they use in all has one too."""
    limited = {size.numa for size in sizes if size.pool == RECLAIM and size.quota_cores is not None}
    return frozenset() if UNBOUND in limited else frozenset(limited)


def _fallback(pools: Mapping[str, frozenset[int]], static: Static) -> frozenset[int]:
    """All pools of online pods together; where there are none, what pools could have."""
    return NONE.union(*(cpus for name, cpus in pools.items() if name != RECLAIM)) or pools[RECLAIM] or static.usable


def _remember(
    entries: Mapping[str, Mapping[str, Allocation]], pools: Mapping[str, frozenset[int]], node: Layout, state: CpuState
) -> CpuState:
    taken = NONE.union(
        *(item.cpus for entry in entries.values() for item in entry.values() if item.owner_pool_name == DEDICATED)
    )
    online = NONE.union(*(cpus for name, cpus in pools.items() if name not in (RECLAIM, RESERVE, INTERRUPT)))
    return msgspec.structs.replace(
        state,
        policy_name=DYNAMIC,
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
