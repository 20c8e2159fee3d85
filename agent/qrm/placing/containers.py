"""From pools to containers: which CPUs and NUMA nodes each one may use, why, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.binding import Bindings
from agent.qrm.placing.layout import Layout
from agent.qrm.placing.state import (
    DEDICATED,
    FALLBACK,
    ISOLATION,
    RECLAIM,
    RESERVE,
    Allocation,
    CpuState,
    Placement,
    by_node,
    requested,
)
from agent.qrm.placing.static import Static
from api.cpus import format_cpu_list
from api.knobs import Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel

S = 1_000_000_000


@dataclass(frozen=True)
class Homes:
    """Where containers can be put."""

    layout: Layout
    static: Static
    pools: Mapping[str, frozenset[int]]
    owners: Mapping[str, str]
    """The pool of each pod, by uid."""
    bindings: Bindings
    fallback: frozenset[int]
    limited: frozenset[int] = frozenset()
    """NUMA nodes of which reclaimed pods have a quota, where they have none elsewhere."""

    @property
    def pooled(self) -> frozenset[int]:
        """What a container may use while it ramps up: all that is neither reserved nor dedicated."""
        return self.bindings.ledger.free or self.fallback


@dataclass
class _Shown:
    """What many containers have in common, worked out once for each set of CPUs."""

    layout: Layout
    _known: dict[frozenset[int], tuple[tuple[int, ...], str, Mapping[int, str]]] = field(default_factory=dict)

    def of(self, cpus: frozenset[int]) -> tuple[tuple[int, ...], str, Mapping[int, str]]:
        if cpus not in self._known:
            self._known[cpus] = (tuple(sorted(cpus)), format_cpu_list(cpus), by_node(self.layout, cpus))
        return self._known[cpus]


def place_containers(
    pods: Sequence[Pod], homes: Homes, state: CpuState, config: CpuPlacementConfig, now_ns: int
) -> tuple[Placement, dict[str, dict[str, Allocation]]]:
    """CPUs, NUMA nodes and verdict of every container, and the entries to remember, those of residual pods included."""
    cpus: dict[str, tuple[int, ...]] = {}
    mems: dict[str, tuple[int, ...]] = {}
    verdicts: dict[str, Verdict] = {}
    entries: dict[str, dict[str, Allocation]] = {
        uid: dict(state.pod(uid)) for uid in state.residual if uid not in homes.owners
    }
    shown = _Shown(homes.layout)
    regions = _Regions(homes, pods)
    texts: dict[tuple[str, frozenset[int]], Verdict] = {}
    for pod in pods:
        owner = homes.owners[pod.uid]
        rejected = homes.bindings.rejected.get(pod.key)
        known = state.pod(pod.uid)
        for container in pod.containers:
            before = known.get(container.name)
            since_ns = now_ns if before is None else before.since_ns
            ramping = _ramps(pod, owner, before, state, young=now_ns - since_ns < config.ramp_up_s * S)
            chosen = homes.pooled if ramping else regions.cpus(pod, container)
            cpus[container.cgroup], text, nodes = shown.of(chosen)
            mems[container.cgroup] = regions.mems(pod, chosen)
            if ramping:
                why = _ramp_up(config.ramp_up_s, text)
            else:
                why = homes.bindings.verdicts.get(pod.key) or texts.setdefault((owner, chosen), _in_pool(owner, text))
            verdicts[container.cgroup] = rejected or why
            entries.setdefault(pod.uid, {})[container.name] = Allocation(
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
                request_quantity=_request(pod, container, before),
                bound_numa=homes.bindings.nodes.get(pod.uid, ()),
                exclusive=pod.uid in homes.bindings.ledger.owned,
                since_ns=since_ns,
            )
    placement = Placement(pools=(), cpus=cpus, mems=mems, rejected=dict(homes.bindings.rejected), verdicts=verdicts)
    return placement, entries


class _Regions:
    """CPUs and NUMA nodes for pods by what they are bound to; worked out once for all of them."""

    def __init__(self, homes: Homes, pods: Sequence[Pod]) -> None:
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
            return homes.static.reserve or homes.pooled
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


def _ramps(pod: Pod, owner: str, before: Allocation | None, state: CpuState, *, young: bool) -> bool:
    """Whether the container is new and to be left room. Those that were there before the agent are not new."""
    if pod.qos is not QoSLevel.SHARED or pod.enhancements.numa_binding or owner.startswith(ISOLATION) or not young:
        return False
    return bool(state.policy_name) if before is None else before.ramp_up


def _request(pod: Pod, container: Container, before: Allocation | None) -> float:
    # A dedicated container keeps what it began with.
    if before is not None and before.owner_pool_name == DEDICATED and pod.qos is QoSLevel.DEDICATED:
        return before.request_quantity
    return requested(pod, container) or 0.0


def _ramp_up(ramp_up_s: float, text: str) -> Verdict:
    return Verdict(
        rule="ramp_up",
        text=f"New for less than {ramp_up_s:g} s: it may use all pooled CPUs, {text}.",
        threshold=ramp_up_s,
        inputs={"cpu_list": text},
    )


def _in_pool(owner: str, text: str) -> Verdict:
    return Verdict(
        rule="pool", text=f"It runs on the CPUs of pool {owner}: {text}.", inputs={"pool": owner, "cpu_list": text}
    )
