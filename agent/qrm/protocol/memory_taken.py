"""An answer of somebody else's memory advisor as advice of ours, for our QRM to carry out. Pure; whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.qrm.protocol import memory_words as words
from agent.qrm.protocol.common import MOST_ENTRIES, Unusable, by_uid, number_by_node
from agent.qrm.protocol.memory_answer import DYING_RULE, MOUNT
from api.advice import Wish
from api.knobs import Knob, Verdict
from api.memory_advice import MemoryAdvice, MemoryCondition, MemoryPressure
from api.pods import Pod
from api.samples import Snapshot

POLICY = "katalyst"
_WHY = Verdict(rule="remote_memory_advice", text="The memory advisor at the socket asks for it.")
_DYING = Verdict(rule=DYING_RULE, text="The memory advisor at the socket has what removed members left reclaimed.")
_UNKNOWN = Verdict(rule="remote_memory_condition", text="Not known: the memory advisor at the socket does not say it.")


def taken(answer: Any, pods: Sequence[Pod], left_bytes: Mapping[str, int]) -> MemoryAdvice:
    """What an answer (GetAdviceResponse, ListAndWatchResponse) says. `left_bytes` is the page cache of each container, by its
    cgroup, and what removed members left in other cgroups: the protocol says that it is to be given up, not how much.

    Containers that are not known are left out, they are gone or not seen yet. Raises Unusable that names the field.
    """
    if len(answer.pod_entries) + len(answer.extra_entries) > MOST_ENTRIES:
        raise Unusable(f"pod_entries and extra_entries are {MOST_ENTRIES} together at the most")
    known = by_uid(pods)
    cgroups = {(pod.uid, container.name): container.cgroup for pod in pods for container in pod.containers}
    wishes: list[Wish] = []
    for uid, its in sorted(answer.pod_entries.items()):
        for name, info in sorted(its.container_entries.items()):
            field = f"pod_entries[{uid[:80]}].container_entries[{name[:80]}]"
            values = info.calculation_result.values
            found = words.known_knobs(values, field)
            cgroup = cgroups.get((uid, name), "")
            if words.DROP_CACHE in values and words.truth(values[words.DROP_CACHE], f"{field} {words.DROP_CACHE}"):
                found |= _left(Knob.DROP_CACHE, left_bytes.get(cgroup, 0))
            wishes += (
                Wish(cgroup=cgroup, knob=knob, value=value, verdict=_WHY) for knob, value in found.items() if cgroup
            )
    provision: Mapping[int, float] = {}
    headroom: Mapping[int, float] = {}
    for index, info in enumerate(answer.extra_entries):
        field, values = f"extra_entries[{index}]", info.calculation_result.values
        wishes += _of_group(info.cgroup_path, values, field, left_bytes)
        if words.BALANCE in values:
            asked = words.balance_from_wire(values[words.BALANCE], f"{field} {words.BALANCE}")
            wishes += _moves(asked, cgroups)
        if words.RECLAIMED_SIZE in values:
            provision = number_by_node(values[words.RECLAIMED_SIZE], f"{field} {words.RECLAIMED_SIZE}")
        if words.HEADROOM in values:
            headroom = number_by_node(values[words.HEADROOM], f"{field} {words.HEADROOM}")
    text = f"The memory advisor at the socket asks for {len(wishes)} things of {len(known)} pods and of cgroups above."
    return MemoryAdvice(
        policy=POLICY,
        headroom_bytes=sum(headroom.values()) if headroom else None,
        headroom_by_numa=headroom,
        headroom_verdict=_WHY if headroom else _UNKNOWN,
        provision_by_numa=provision,
        condition=MemoryCondition(state=MemoryPressure.UNKNOWN, verdict=_UNKNOWN),
        wishes=tuple(wishes),
        verdicts=(Verdict(rule="remote_memory_advice", text=text, inputs={"wishes": len(wishes)}),),
    )


def _of_group(path: str, values: Mapping[str, str], field: str, left_bytes: Mapping[str, int]) -> Iterable[Wish]:
    found = words.known_knobs(values, field)
    cgroup = path.removeprefix(MOUNT)
    if (found or words.DYING in values) and (not cgroup.startswith("/") or ".." in cgroup.split("/")):
        raise Unusable(f"{field}.cgroup_path: {path!r:.80} is not the path of a cgroup below the root")
    wishes = [Wish(cgroup=cgroup, knob=knob, value=value, verdict=_WHY) for knob, value in found.items()]
    if words.DYING in values and words.truth(values[words.DYING], f"{field} {words.DYING}"):
        left = _left(Knob.MEMORY_RECLAIM, left_bytes.get(cgroup, 0))
        wishes += (Wish(cgroup=cgroup, knob=knob, value=value, verdict=_DYING) for knob, value in left.items())
    return wishes


def _left(knob: Knob, size: int) -> dict[Knob, str]:
    return {knob: str(size)} if size > 0 else {}


def _moves(asked: words.Balance, cgroups: Mapping[tuple[str, str], str]) -> list[Wish]:
    """The first of the nodes that a container may go to; that advisor asks again where it did not help."""
    wishes = []
    for moved in asked.moved:
        cgroup = cgroups.get((moved.uid, moved.container))
        goals = [node for node in asked.to if node in moved.to and node != asked.source]
        if cgroup is not None and goals:
            wishes.append(
                Wish(cgroup=cgroup, knob=Knob.MIGRATE_PAGES, value=f"{asked.source} {goals[0]}", verdict=_WHY)
            )
    return wishes


def left_in(snapshot: Snapshot) -> Mapping[str, int]:
    """Bytes that can be given up, by cgroup: the page cache of containers, and of others what no living member is charged with.

    What is not measured is left out, and so is whoever has a member that is not.
    """
    containers = {container.cgroup for pod in snapshot.pods for container in pod.containers}
    members: dict[str, int | None] = {}
    for path, sample in snapshot.cgroups.items():
        above, size = path.rpartition("/")[0], members.get(path.rpartition("/")[0], 0)
        members[above] = None if size is None or sample.memory_bytes is None else size + sample.memory_bytes
    found: dict[str, int] = {}
    for path, sample in snapshot.cgroups.items():
        if path in containers:
            found[path] = sample.memory_stat.get("total_cache", sample.memory_stat.get("file", 0))
        elif sample.memory_bytes is not None and (inside := members.get(path)) is not None:
            found[path] = max(sample.memory_bytes - inside, 0)
    return found
