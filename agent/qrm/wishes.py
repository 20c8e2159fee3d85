"""Wishes for knobs into decisions on the cgroups that are there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from api.advice import Wish
from api.decisions import Decision
from api.knobs import Knob
from api.rates import members
from api.samples import Snapshot

LISTS = (Knob.CPUSET, Knob.MEMS)


def resolve(
    wishes: Iterable[Wish],
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
    for wish in wishes:
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
                verdict=wish.verdict,
            )
        )
    return tuple(found)


def with_nested(decisions: Sequence[Decision], snapshot: Snapshot) -> tuple[Decision, ...]:
    """The same, and the same lists of CPUs and NUMA nodes for what is below each of these cgroups.

    Version 1 takes no CPU away from a group whose children use it (kernel/cgroup/cpuset-v1.c, validate_change); on version 2
    children have what is left by themselves.
    """
    lists: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.knob in LISTS:
            lists.setdefault(decision.cgroup, []).append(decision)
    taken = {(decision.cgroup, decision.knob) for decision in decisions}
    below = members(snapshot.cgroups, lists)
    nested = [
        msgspec.structs.replace(decision, cgroup=path, cgroup_id=snapshot.cgroups[path].id)
        for cgroup, paths in below.items()
        for path in paths
        for decision in lists[cgroup]
        if (path, decision.knob) not in taken
    ]
    return (*decisions, *nested)
