"""Policy `native`, the kubelet's static CPU manager: Guaranteed containers with whole CPUs have theirs, others share the rest.

Guaranteed is what Kubernetes calls a pod whose containers all have requests equal to limits, of CPU and of memory. QoS
levels and NUMA bindings of Katalyst's mean nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.hints import NoHint, fewest_nodes
from agent.qrm.placing.layout import Layout
from agent.qrm.placing.picking import NONE, pick, spread_evenly
from agent.qrm.placing.state import (
    DEDICATED,
    INTERRUPT,
    POOL_ENTRY,
    RESERVE,
    SHARE,
    Allocation,
    CpuState,
    Placement,
    allocated,
    pool_entry,
)
from agent.qrm.placing.static import Static
from api.decisions import Pool
from api.knobs import Verdict
from api.pods import Container, Pod

NATIVE = "native"


@dataclass(frozen=True)
class _Given:
    own: Mapping[str, frozenset[int]]
    shared: frozenset[int]
    rejected: Mapping[str, Verdict]
    layout: Layout
    static: Static


def place_native(
    pods: Sequence[Pod], layout: Layout, static: Static, state: CpuState, config: CpuPlacementConfig, now_ns: int
) -> tuple[Placement, CpuState]:
    """As `place`; `pods` in the order in which they came. Reserved CPUs are part of the shared rest and nobody's alone."""
    rejected: dict[str, Verdict] = {}
    taken = NONE.union(*(_had(state, uid) for uid in state.residual)) & static.usable
    given: dict[str, frozenset[int]] = {}
    for known in (True, False):
        for pod in pods:
            for container in pod.containers:
                before = state.pod(pod.uid).get(container.name)
                kept = NONE if before is None or before.owner_pool_name != DEDICATED else before.cpus
                if not exclusive(pod, container) or bool(kept) is not known:
                    continue
                try:
                    cpus = _allocate(container, static.usable - taken, kept, layout, config)
                except NoHint as error:
                    rejected[pod.key] = Verdict(rule="native_no_room", text=f"{pod.key}: {container.name} {error}.")
                    continue
                given[container.cgroup] = cpus
                taken |= cpus
    shared = (static.usable | static.reserve) - taken or static.usable
    return _result(pods, _Given(given, shared, rejected, layout, static), state, now_ns)


def exclusive(pod: Pod, container: Container) -> bool:
    """Whether the kubelet's static policy gives this container CPUs of its own."""
    guaranteed = all(
        None not in (c.cpu_request_cores, c.memory_request_bytes)
        and c.cpu_request_cores == c.cpu_limit_cores
        and c.memory_request_bytes == c.memory_limit_bytes
        for c in (*pod.containers, *pod.waiting)
    )
    cores = container.cpu_request_cores or 0.0
    return guaranteed and cores >= 1 and cores == int(cores)


def _allocate(
    container: Container, free: frozenset[int], kept: frozenset[int], layout: Layout, config: CpuPlacementConfig
) -> frozenset[int]:
    count = int(container.cpu_request_cores or 0)
    native = config.native
    if native.full_physical_cores:
        if count % layout.threads:
            raise NoHint(f"asks for {count} CPUs, which is no multiple of the {layout.threads} of a physical core")
        free = frozenset(cpu for core in layout.whole_cores(free) for cpu in layout.cores[core])
    if len(free) < count:
        raise NoHint(f"asks for {count} CPUs for itself, {len(free)} are left")
    if kept or native.allocation == "packed":
        return pick(layout, count, free, kept)
    fewest = fewest_nodes(count, layout)
    for number in range(fewest, len(layout.numa) + 1):
        most = sorted(layout.numa, key=lambda node: (-len(layout.on([node]) & free), node))[:number]
        if len(layout.on(most) & free) >= count:
            return spread_evenly(layout, count, free, sorted(most))
    raise NoHint(f"asks for {count} CPUs for itself, {len(free)} are left")


def _had(state: CpuState, uid: str) -> frozenset[int]:
    return NONE.union(*(entry.cpus for entry in state.pod(uid).values() if entry.owner_pool_name == DEDICATED))


def _result(pods: Sequence[Pod], all_given: _Given, state: CpuState, now_ns: int) -> tuple[Placement, CpuState]:
    given, shared, rejected, layout = all_given.own, all_given.shared, all_given.rejected, all_given.layout
    cpus: dict[str, tuple[int, ...]] = {}
    verdicts: dict[str, Verdict] = {}
    entries: dict[str, dict[str, Allocation]] = {uid: dict(state.pod(uid)) for uid in state.residual}
    rest = Verdict(rule="native_shared", text=f"It shares {len(shared)} CPUs with all that have none of their own.")
    ordered = tuple(sorted(shared))
    for pod in pods:
        for container in pod.containers:
            own = given.get(container.cgroup)
            cpus[container.cgroup] = ordered if own is None else tuple(sorted(own))
            own_text = f"Guaranteed with whole CPUs: it has {len(own or ())} for itself."
            verdict = rest if own is None else Verdict(rule="native_exclusive", text=own_text)
            verdicts[container.cgroup] = rejected.get(pod.key, verdict) if own is None else verdict
            before = state.pod(pod.uid).get(container.name)
            entry = allocated(pod, container, SHARE if own is None else DEDICATED, cpus[container.cgroup], layout)
            since_ns = now_ns if before is None else before.since_ns
            entries.setdefault(pod.uid, {})[container.name] = msgspec.structs.replace(entry, since_ns=since_ns)
    pools = {RESERVE: all_given.static.reserve, INTERRUPT: all_given.static.interrupt, SHARE: shared}
    placement = Placement(
        pools=tuple(Pool(name=name, cpus=tuple(sorted(held))) for name, held in sorted(pools.items()) if held),
        cpus=cpus,
        mems=dict.fromkeys(cpus, tuple(layout.numa)),
        rejected=rejected,
        verdicts=verdicts,
    )
    shown = {name: {POOL_ENTRY: pool_entry(name, held, layout)} for name, held in sorted(pools.items()) if held}
    after = msgspec.structs.replace(
        state, policy_name=NATIVE, pod_entries={**shown, **dict(sorted(entries.items()))}, machine_state={}
    )
    return placement, after
