"""Wishes for knobs into decisions on the cgroups that are there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from api.advice import Wish
from api.decisions import Decision
from api.knobs import Knob
from api.samples import Snapshot


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
