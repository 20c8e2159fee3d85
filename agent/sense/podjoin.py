"""The kubelet's word on what pods are to be, and the runtime's on what of them runs, made one: the node's pods. Pure.

A pod is here from when the kubelet lists it, with those of its containers that run now, and stays while any of them does: a
kubelet that was just started lists nobody for a while, and forgetting a pod would give its cgroups back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from agent.sense.cgroup_paths import Home, found_path
from agent.sense.podlist import Amounts, ContainerSpec, KubePod, Listing, qos_class
from agent.sense.podspec import KNOWN_RESOURCES, SIDECAR_POLICY, Door, Listed, Place, RawPod, address_of, assemble
from agent.sense.resources import CPU, MEMORY, Ask, FieldError, read_ask
from agent.sense.running import Looked
from api.pods import Pod

PLACE = Place("metadata", "spec")
Exists = Callable[[str], bool]


class Entry(NamedTuple):
    """A pod, and what it was made of: as long as that stays, so does the pod."""

    digest: bytes
    cgroups: Mapping[str, str]
    """Of the containers that run, by name."""
    kube: KubePod
    pod: Pod


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the node's pods."""

    entries: Mapping[str, Entry] = {}
    """By uid: those that are to stay, those that are to go, those that are gone from the list."""
    unlisted: Mapping[str, str] = {}
    """`namespace/name`, by uid, of pods that run and that the kubelet neither lists nor has listed."""
    homeless: frozenset[str] = frozenset()
    """`namespace/name/container` of those that run and whose cgroup was not found."""
    problems: tuple[str, ...] = ()

    def pods(self) -> tuple[Pod, ...]:
        """By name. Of two with one name, as after a deletion by force, the one that comes first among the entries."""
        named: dict[str, Pod] = {}
        for entry in self.entries.values():
            named.setdefault(entry.pod.key, entry.pod)
        return tuple(named[key] for key in sorted(named))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Where cgroups are on this node, and what its settings say of pods."""

    door: Door
    exists: Exists
    """Whether there is a cgroup at a path."""
    cgroup_root: str = "/"


def join(listing: Listing, looked: Looked | None, before: Mapping[str, Entry], node: Node) -> Joined:
    """The node's pods. `looked` is None where no runtime tells: then the pods' statuses say what runs."""
    entries: dict[str, Entry] = {}
    homeless: set[str] = set()
    problems: list[str] = []
    inside = sorted(listing.items.items(), key=lambda each: each[1].pod.metadata.deleted_at is not None)
    listed = {uid: (item.digest, item.pod) for uid, item in inside}
    left = {uid: (entry.digest, entry.kube) for uid, entry in before.items() if uid not in listed}
    for uid, (digest, kube) in (listed | left).items():
        known = before.get(uid)
        cgroups, lost = _homes(kube, looked, known.cgroups if known is not None else {}, node)
        homeless |= lost
        if not cgroups and (uid in left or kube.over or kube.metadata.deleted_at):
            continue
        if known is not None and known.digest == digest and known.cgroups == cgroups:
            entries[uid] = known
            continue
        try:
            entries[uid] = Entry(digest, cgroups, kube, pod_of_kubelet(kube, cgroups, node.door))
        except FieldError as error:
            problems.append(f"{kube.metadata.namespace}/{kube.metadata.name}: {error}")
    running = looked.pods() if looked is not None else {}
    unlisted = {uid: pod for uid, pod in running.items() if uid not in listed and uid not in entries}
    return Joined(entries=entries, unlisted=unlisted, homeless=frozenset(homeless), problems=tuple(problems))


def pod_of_kubelet(kube: KubePod, cgroups: Mapping[str, str], door: Door) -> Pod:
    """The pod as everybody else knows it, with the containers that have a cgroup. What of its labels and annotations cannot be
    is among its problems: it is a pod all the same. Raises FieldError for a pod that has a name which cannot be one."""
    metadata, spec = kube.metadata, kube.spec
    listed, problems = _listed(kube, cgroups)
    together = _ask(spec.resources, (CPU, MEMORY), "resources", problems)
    raw = RawPod(
        name=metadata.name,
        containers=[],
        namespace=metadata.namespace,
        labels=dict(metadata.labels or {}),
        annotations=dict(metadata.annotations or {}),
        priority=spec.priority,
        priority_class=spec.priority_class_name or "",
    )
    try:
        pod = assemble(raw, listed, PLACE, door, together)
    except FieldError as error:
        # Whoever cannot be understood is protected: as online work that says nothing of itself.
        pod = assemble(msgspec.structs.replace(raw, labels={}, annotations={}), listed, PLACE, door, together)
        # They go on to say who may not be touched: static pods, and those that are spared by a key.
        pod = msgspec.structs.replace(pod, labels=raw.labels, annotations=raw.annotations)
        problems.append(f"{error}; until then its labels and annotations ask for nothing, and it is {pod.qos.value}")
    # Whoever told it to end may have given it more or less than it asks for.
    given_s = metadata.deletion_grace_s if metadata.deleted_at is not None else None
    said_s = spec.termination_grace_period_seconds if given_s is None else given_s
    return msgspec.structs.replace(
        pod,
        uid=kube.uid,
        grace_s=None if said_s is None else float(max(said_s, 0)),
        leaving=metadata.deleted_at is not None,
        address=address_of(kube.status.pod_ip, host_network=bool(spec.host_network)),
        problems=(*problems, *pod.problems),
    )


def _listed(kube: KubePod, cgroups: Mapping[str, str]) -> tuple[list[Listed], list[str]]:
    """Containers that stay, whether they run or not, and of those that do not (init, ephemeral) the ones that run now."""
    problems: list[str] = []
    found = [_container(each, cgroups, problems) for each in kube.spec.containers]
    for each in (*(kube.spec.init_containers or ()), *(kube.spec.ephemeral_containers or ())):
        passes = each.restart_policy != SIDECAR_POLICY
        if not passes or each.name in cgroups:
            found.append(_container(each, cgroups, problems)._replace(init=True, passes=passes))
    return found, problems


def _container(spec: ContainerSpec, cgroups: Mapping[str, str], problems: list[str]) -> Listed:
    ask = _ask(spec.resources, KNOWN_RESOURCES, f"container {spec.name}: resources", problems)
    return Listed(spec.name, cgroups.get(spec.name, ""), ask, init=False)


def _ask(listed: Amounts | None, known: Collection[str], path: str, problems: list[str]) -> Ask:
    amounts = listed or Amounts()
    requests = {name: value for name, value in (amounts.requests or {}).items() if name in known}
    # Kubernetes takes a limit of nothing for none.
    limits = {
        name: value
        for name, value in (amounts.limits or {}).items()
        if name in known and not ("/" not in name and str(value) == "0")
    }
    try:
        return read_ask(requests, limits, known, path)
    except FieldError as error:
        problems.append(f"{error}; until then it asks for nothing")
        return Ask()


def _homes(
    kube: KubePod, looked: Looked | None, known: Mapping[str, str], node: Node
) -> tuple[dict[str, str], set[str]]:
    """Cgroups of the pod's containers that run, by name, and which of those were not found; `known` has those of before."""
    uid, spec = kube.uid, kube.spec
    told, running = {}, kube.running()
    cgroups: dict[str, str] = {}
    if looked is None:
        # Statuses may be late, and nobody else tells: what was known and is still there goes on.
        cgroups = {name: path for name, path in known.items() if node.exists(path)}
    else:
        kinds = (spec.containers, spec.init_containers or (), spec.ephemeral_containers or ())
        ours = {
            each.name: one
            for kind in kinds
            for each in kind
            if (one := looked.running.get((uid, each.name))) is not None
        }
        told = {name: one.cgroup for name, one in ours.items()}
        running = {name: one.id for name, one in ours.items()}
    home = Home(uid, qos_class(kube), node.cgroup_root)
    lost: set[str] = set()
    for name, container_id in running.items():
        before = known.get(name, "")
        # Where it was is where it is: to try every spelling each second costs more than all the rest.
        likely = told.get(name) or (before if container_id.rpartition("/")[2] in before else "")
        if path := found_path(home, container_id, likely, node.exists):
            cgroups[name] = path
        else:
            lost.add(f"{kube.metadata.namespace}/{kube.metadata.name}/{name}")
    return cgroups, lost
