"""Collects knob requests of the settings and resolves them into decisions on existing cgroups. Pure.
Of two requests for the same knob the first counts; a decision that was already made wins over both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from agent.config.qrm import KnobsConfig
from agent.qrm.decisions.cpu_burst import CpuBurstState, koordinator_burst, static_burst
from agent.qrm.decisions.koordinator_suppress import SuppressState, suppress_reclaimed
from agent.qrm.decisions.memory_qos import memory_qos_requests
from agent.qrm.decisions.network import NetworkAllocation, allocate_bandwidth, net_class_requests
from agent.qrm.knobs.io import io_requests
from api.advice import KnobRequest
from api.decision import Decision
from api.knobs import Knob
from api.rates import cgroups_by_container, compute_rates
from api.snapshot import Snapshot

LIST_KNOBS = (Knob.CPUSET, Knob.MEMS)


def resolve_knob_requests(
    knob_requests: Iterable[KnobRequest],
    snapshot: Snapshot,
    knobs: Mapping[str, Collection[Knob]],
    taken: Iterable[Decision] = (),
    named: Collection[str] = (),
) -> tuple[Decision, ...]:
    """A decision for each wish about a container, or a cgroup that the settings name, in the order of the wishes.

    Of two wishes for one knob the first counts, and none counts where `taken` has decided already. What no cgroup of the
    node has a knob for is dropped; where only this one lacks it the decision is made, so that its refusal is seen.
    """
    owners = {container.cgroup: pod.key for pod in snapshot.pods for container in pod.containers}
    known = frozenset[Knob]().union(*knobs.values())
    decided = {(decision.cgroup, decision.knob) for decision in taken}
    found: list[Decision] = []
    for wish in knob_requests:
        sample = snapshot.cgroups.get(wish.cgroup)
        key = (wish.cgroup, wish.knob)
        if (
            sample is None
            or (wish.cgroup not in owners and wish.cgroup not in named)
            or wish.knob not in known
            or key in decided
        ):
            continue
        decided.add(key)
        found.append(
            Decision(
                cgroup=wish.cgroup,
                cgroup_id=sample.id,
                pod=owners.get(wish.cgroup, ""),
                knob=wish.knob,
                value=wish.value,
                reason=wish.reason,
            )
        )
    return tuple(found)


def with_nested_cpusets(decisions: Sequence[Decision], snapshot: Snapshot) -> tuple[Decision, ...]:
    """The same, and the same lists of CPUs and NUMA nodes for what is below each of these cgroups.

    Version 1 takes no CPU away from a group whose children use it (kernel/cgroup/cpuset-v1.c, validate_change); on version 2
    children have what is left by themselves.
    """
    lists: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.knob in LIST_KNOBS:
            lists.setdefault(decision.cgroup, []).append(decision)
    taken = {(decision.cgroup, decision.knob) for decision in decisions}
    below = cgroups_by_container(snapshot.cgroups, lists)
    nested = [
        msgspec.structs.replace(decision, cgroup=path, cgroup_id=snapshot.cgroups[path].id)
        for cgroup, paths in below.items()
        for path in paths
        for decision in lists[cgroup]
        if (path, decision.knob) not in taken
    ]
    return (*decisions, *nested)


class KnobRequestState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier rounds."""

    burst: CpuBurstState = CpuBurstState()
    suppress: SuppressState = SuppressState()
    cards: Mapping[str, str] = {}
    """Network cards by the pod that they are promised to."""


class KnobRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Wishes, the cgroups whose quota may go above what the owner set, and the account of network cards."""

    knob_requests: tuple[KnobRequest, ...] = ()
    loosen: frozenset[str] = frozenset()
    bandwidth: NetworkAllocation = NetworkAllocation()


def build_knob_requests(
    snapshot: Snapshot,
    previous: Snapshot | None,
    config: KnobsConfig,
    memory: KnobRequestState,
    excluded: Collection[int] = (),
) -> tuple[KnobRequests, KnobRequestState]:
    """One round; with settings that ask for nothing, nothing but the account of network cards. `excluded` are CPUs that
    reclaimed pods must not be sent to."""
    bandwidth = allocate_bandwidth(snapshot, config.network, memory.cards)
    wishes = (
        *memory_qos_requests(snapshot, config.memory_qos),
        *io_requests(snapshot, config.io),
        *net_class_requests(snapshot, config.network),
    )
    loosen = frozenset[str]()
    if config.burst.policy == "katalyst":
        wishes += static_burst(snapshot, config.burst)
    if config.burst.policy != "koordinator" and config.suppress.policy == "off":
        return KnobRequests(knob_requests=wishes, bandwidth=bandwidth), KnobRequestState(cards=bandwidth.chosen)
    change = compute_rates(previous, snapshot) if previous is not None else None
    suppressed, suppress_memory = suppress_reclaimed(snapshot, change, config.suppress, memory.suppress, excluded)
    burst_memory = CpuBurstState()
    if config.burst.policy == "koordinator":
        burst, burst_memory = koordinator_burst(snapshot, change, config.burst.koordinator, memory.burst)
        suppressed, loosen = (*suppressed, *burst.knob_requests), burst.loosen
    asked = KnobRequests(knob_requests=(*suppressed, *wishes), loosen=loosen, bandwidth=bandwidth)
    return asked, KnobRequestState(burst=burst_memory, suppress=suppress_memory, cards=bandwidth.chosen)
