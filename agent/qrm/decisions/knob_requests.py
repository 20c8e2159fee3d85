"""Collects knob requests of the settings and resolves them into decisions on existing cgroups. Pure.
Of two requests for the same knob of a cgroup the first counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from agent.config.qrm import KnobsConfig
from agent.qrm.decisions.cpu_burst import CpuBurstRequests, CpuBurstState, koordinator_burst, static_burst
from agent.qrm.decisions.cpu_priority import priority_cgroups
from agent.qrm.decisions.koordinator_suppress import SuppressState, suppress_reclaimed
from agent.qrm.decisions.memory_controls import memory_qos_requests
from agent.qrm.decisions.network import NetworkAllocation, allocate_bandwidth, net_class_requests
from agent.qrm.knobs.io import io_requests
from agent.qrm.knobs.knob_files import LIST_KNOBS
from api.advice import KnobRequest
from api.decision import Decision
from api.knobs import Knob
from api.rates import Rates, cgroups_by_container
from api.snapshot import Snapshot


def resolve_knob_requests(
    requests: Iterable[KnobRequest],
    snapshot: Snapshot,
    knobs: Mapping[str, Collection[Knob]],
    extra_cgroups: Collection[str] = (),
) -> tuple[Decision, ...]:
    """Return a decision for each request about a container, a reclaimed pod or one of `extra_cgroups`, in their order. The
    first request for a knob of a cgroup counts. Knobs that no cgroup of the node has are dropped; a knob that only
    this cgroup lacks is decided, so that its refusal is reported. The actuator drops decisions that change nothing."""
    owners = {container.cgroup: pod.key for pod in snapshot.pods for container in pod.containers}
    owners |= {cgroup: pod.key for cgroup, pod in priority_cgroups(snapshot.pods, snapshot.cgroups).items()}
    available = frozenset[Knob]().union(*knobs.values())
    decided: set[tuple[str, Knob]] = set()
    resolved: list[Decision] = []
    for request in requests:
        cgroup, knob = request.cgroup, request.knob
        sample = snapshot.cgroups.get(cgroup)
        writable = cgroup in owners or cgroup in extra_cgroups
        if sample is None or not writable or knob not in available or (cgroup, knob) in decided:
            continue
        decided.add((cgroup, knob))
        resolved.append(
            Decision(
                cgroup=cgroup,
                cgroup_id=sample.id,
                pod=owners.get(cgroup, ""),
                knob=knob,
                value=request.value,
                reason=request.reason,
            )
        )
    return tuple(resolved)


def with_nested_cpusets(decisions: Sequence[Decision], snapshot: Snapshot) -> tuple[Decision, ...]:
    """Return the decisions, with the CPU and NUMA lists of each cgroup repeated for the cgroups below it. Version 1
    refuses to remove a CPU from a cgroup whose children use it (kernel/cgroup/cpuset-v1.c, validate_change()); on
    version 2 the kernel restricts the children itself."""
    lists: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.knob in LIST_KNOBS:
            lists.setdefault(decision.cgroup, []).append(decision)
    decided = {(decision.cgroup, decision.knob) for decision in decisions}
    below = cgroups_by_container(snapshot.cgroups, lists)
    nested = [
        msgspec.structs.replace(decision, cgroup=path, cgroup_id=snapshot.cgroups[path].id)
        for cgroup, paths in below.items()
        for path in paths
        for decision in lists[cgroup]
        if (path, decision.knob) not in decided
    ]
    return (*decisions, *nested)


class KnobRequestState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the knob policies between cycles."""

    burst: CpuBurstState = CpuBurstState()
    suppress: SuppressState = SuppressState()
    cards: Mapping[str, str] = {}
    """Network card by pod, for pods with allocated bandwidth."""


class KnobRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Knob requests of one cycle, and the account of network cards."""

    requests: tuple[KnobRequest, ...] = ()
    quota_exempt: frozenset[str] = frozenset()
    """Cgroups whose CPU quota may exceed the owner's limit."""
    bandwidth: NetworkAllocation = NetworkAllocation()


def build_knob_requests(
    snapshot: Snapshot,
    rates: Rates | None,
    config: KnobsConfig,
    state: KnobRequestState,
    excluded: Collection[int] = (),
) -> tuple[KnobRequests, KnobRequestState]:
    """Return the requests of all configured knob policies; without any, only the account of network cards.
    `rates` are those since the previous cycle, `excluded` CPUs that reclaimed pods must not use."""
    bandwidth = allocate_bandwidth(snapshot, config.network, state.cards)
    requests = (
        *memory_qos_requests(snapshot, config.memory_qos),
        *io_requests(snapshot, config.io),
        *net_class_requests(snapshot, config.network),
    )
    if config.burst.policy == "katalyst":
        requests += static_burst(snapshot, config.burst)
    if config.burst.policy != "koordinator" and config.suppress.policy == "off":
        return KnobRequests(requests=requests, bandwidth=bandwidth), KnobRequestState(cards=bandwidth.card_by_pod)
    suppressed, suppress_state = suppress_reclaimed(snapshot, rates, config.suppress, state.suppress, excluded)
    burst, burst_state = CpuBurstRequests(), CpuBurstState()
    if config.burst.policy == "koordinator":
        burst, burst_state = koordinator_burst(snapshot, rates, config.burst.koordinator, state.burst)
    result = KnobRequests(
        requests=(*suppressed, *burst.requests, *requests), quota_exempt=burst.quota_exempt, bandwidth=bandwidth
    )
    return result, KnobRequestState(burst=burst_state, suppress=suppress_state, cards=bandwidth.card_by_pod)
