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
from agent.qrm.cpuset.select_cpus import NO_CPUS, select_cpus, select_evenly
from agent.qrm.cpuset.state import (
    DEDICATED,
    INTERRUPT,
    POOL_ENTRY,
    RESERVE,
    SHARE,
    CpusetAllocation,
    CpusetEntry,
    CpusetState,
    container_entry,
    pool_entry,
)
from agent.qrm.cpuset.topology_hints import NoTopologyHint, fewest_nodes
from agent.qrm.cpuset.topology_layout import CpuLayout
from api.decision import Pool
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
    """As `place`; `pods` in the order in which they came. Reserved CPUs are part of the shared rest and nobody's alone."""
    rejected: dict[str, Reason] = {}
    taken = NO_CPUS.union(*(_exclusive_cpus_of(state, uid) for uid in state.residual)) & static.usable
    given: dict[str, frozenset[int]] = {}
    for known in (True, False):
        for pod in pods:
            for container in pod.containers:
                before = state.pod(pod.uid).get(container.name)
                kept = NO_CPUS if before is None or before.owner_pool_name != DEDICATED else before.cpus
                if not is_exclusive(pod, container) or bool(kept) is not known:
                    continue
                try:
                    cpus = _select_exclusive_cpus(container, static.usable - taken, kept, layout, config)
                except NoTopologyHint as error:
                    rejected[pod.key] = Reason(rule="native_no_room", text=f"{pod.key}: {container.name} {error}.")
                    continue
                given[container.cgroup] = cpus
                taken |= cpus
    shared = (static.usable | static.reserve) - taken or static.usable
    return _build_allocation(pods, _NativeAllocation(given, shared, rejected, layout, static), state, now_ns)


def is_exclusive(pod: Pod, container: Container) -> bool:
    """Whether the kubelet's static policy gives this container CPUs of its own."""
    guaranteed = all(
        None not in (c.cpu_request_cores, c.memory_request_bytes)
        and c.cpu_request_cores == c.cpu_limit_cores
        and c.memory_request_bytes == c.memory_limit_bytes
        for c in (*pod.containers, *pod.waiting)
    )
    cores = container.cpu_request_cores or 0.0
    return guaranteed and cores >= 1 and cores == int(cores)


def _select_exclusive_cpus(
    container: Container, free: frozenset[int], kept: frozenset[int], layout: CpuLayout, config: CpuPlacementConfig
) -> frozenset[int]:
    count = int(container.cpu_request_cores or 0)
    native = config.native
    if native.full_physical_cores:
        if count % layout.threads:
            raise NoTopologyHint(
                f"asks for {count} CPUs, which is no multiple of the {layout.threads} of a physical core"
            )
        free = frozenset(cpu for core in layout.whole_cores(free) for cpu in layout.cores[core])
    if len(free) < count:
        raise NoTopologyHint(f"asks for {count} CPUs for itself, {len(free)} are left")
    if kept or native.allocation == "packed":
        return select_cpus(layout, count, free, kept)
    fewest = fewest_nodes(count, layout)
    for number in range(fewest, len(layout.numa) + 1):
        most = sorted(layout.numa, key=lambda node: (-len(layout.on([node]) & free), node))[:number]
        if len(layout.on(most) & free) >= count:
            return select_evenly(layout, count, free, sorted(most))
    raise NoTopologyHint(f"asks for {count} CPUs for itself, {len(free)} are left")


def _exclusive_cpus_of(state: CpusetState, uid: str) -> frozenset[int]:
    return NO_CPUS.union(*(entry.cpus for entry in state.pod(uid).values() if entry.owner_pool_name == DEDICATED))


def _build_allocation(
    pods: Sequence[Pod], all_given: _NativeAllocation, state: CpusetState, now_ns: int
) -> tuple[CpusetAllocation, CpusetState]:
    given, shared, rejected, layout = all_given.own, all_given.shared, all_given.rejected, all_given.layout
    cpus: dict[str, tuple[int, ...]] = {}
    verdicts: dict[str, Reason] = {}
    entries: dict[str, dict[str, CpusetEntry]] = {uid: dict(state.pod(uid)) for uid in state.residual}
    rest = Reason(rule="native_shared", text=f"It shares {len(shared)} CPUs with all that have none of their own.")
    ordered = tuple(sorted(shared))
    for pod in pods:
        for container in pod.containers:
            own = given.get(container.cgroup)
            cpus[container.cgroup] = ordered if own is None else tuple(sorted(own))
            own_text = f"Guaranteed with whole CPUs: it has {len(own or ())} for itself."
            verdict = rest if own is None else Reason(rule="native_exclusive", text=own_text)
            verdicts[container.cgroup] = rejected.get(pod.key, verdict) if own is None else verdict
            before = state.pod(pod.uid).get(container.name)
            entry = container_entry(pod, container, SHARE if own is None else DEDICATED, cpus[container.cgroup], layout)
            since_ns = now_ns if before is None else before.since_ns
            entries.setdefault(pod.uid, {})[container.name] = msgspec.structs.replace(entry, since_ns=since_ns)
    pools = {RESERVE: all_given.static.reserve, INTERRUPT: all_given.static.interrupt, SHARE: shared}
    placement = CpusetAllocation(
        pools=tuple(Pool(name=name, cpus=tuple(sorted(held))) for name, held in sorted(pools.items()) if held),
        cpus=cpus,
        mems=dict.fromkeys(cpus, tuple(layout.numa)),
        rejected=rejected,
        reasons=verdicts,
    )
    shown = {name: {POOL_ENTRY: pool_entry(name, held, layout)} for name, held in sorted(pools.items()) if held}
    after = msgspec.structs.replace(
        state, policy_name=NATIVE_POLICY, pod_entries={**shown, **dict(sorted(entries.items()))}, machine_state={}
    )
    return placement, after
