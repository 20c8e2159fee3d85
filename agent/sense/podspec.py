"""One pod as somebody wrote it down, in our file's form, to the Pod that everybody else knows. Pure.

Here labels, annotations and resources get their meaning: Katalyst's own, those of the cluster's dialect, Koordinator's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, field

from agent.config.memory import OffloadConfig
from agent.sense import koordinator
from agent.sense.resources import OWN, Ask, FieldError, amounts, read_ask
from api.enhancements import bound_numa, enhancements
from api.pods import Container, Pod
from api.profiles import PROFILE_KEY, ServiceProfile, service_profile
from api.qos import MAIN_CONTAINER_KEY, Dialect, QoSLevel, stated_level

LONGEST_NAME = 253
LONGEST_PATH = 4095
LOOPBACK = "127.0.0.1"
KNOWN_RESOURCES = (*OWN, *koordinator.RESOURCES)
SIDECAR_POLICY = "Always"
"""restartPolicy of an init container that goes on beside the others."""
PRIORITY_CLASSES = {"system-node-critical": 2_000_001_000, "system-cluster-critical": 2_000_000_000}
"""Those that every cluster has; others are known to the cluster alone."""
_NOTHING = Ask()
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)


class RawResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}


class RawContainer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cgroup: str
    name: str | None = None
    resources: RawResources = RawResources()
    restart_policy: str | None = field(name="restartPolicy", default=None)


class RawPod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    containers: list[RawContainer]
    namespace: str = "default"
    labels: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    priority_class: str = field(name="priorityClassName", default="")
    init_containers: list[RawContainer] = field(name="initContainers", default_factory=list)


class Place(NamedTuple):
    """Where a pod stands in its file: `pods[0]` for both, or `items[0].metadata` and `items[0].spec`."""

    metadata: str
    spec: str


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of this cluster and node when pods come in."""

    dialect: Dialect = Dialect()
    numa_nodes: Collection[int] | None = None
    """None where it is not known."""


class Listed(NamedTuple):
    """One container of a pod, the quantities that it asks for understood."""

    name: str
    cgroup: str
    """Empty where it has none now: then it is one that waits."""
    ask: Ask
    init: bool
    """Not among the pod's `containers`: an init container, or one that was added to look around (ephemeral)."""
    passes: bool = False
    """It runs before the others or beside them for a while: what the pod asks for as a whole is not for it."""


def address_of(ip: str | None, *, host_network: bool) -> str | None:
    """Where a pod is asked about itself. Loopback only where it is the pod's own too: another would have the agent, which is in
    the node's network, ask services of the node in its name."""
    if host_network:
        return LOOPBACK
    try:
        found = ip_address(ip or "")
    except ValueError:
        return None
    found = getattr(found, "ipv4_mapped", None) or found
    nobodys = found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast
    return None if nobodys else str(found)


def pod_of(raw: RawPod, place: Place, door: Door) -> Pod:
    """The pod, with what it says and cannot have as its `problems`. Raises FieldError for what cannot hold at all."""
    return assemble(raw, _listed(raw, place), place, door)


def assemble(raw: RawPod, listed: Sequence[Listed], place: Place, door: Door, together: Ask = _NOTHING) -> Pod:
    """The same of a pod whose containers are known: `listed` instead of those that `raw` has, one of them at least; and what
    the pod asks for as a whole."""
    namespace = _name(raw.namespace, f"{place.metadata}.namespace")
    name = _name(raw.name, f"{place.metadata}.name")
    labels = _texts(raw.labels, f"{place.metadata}.labels")
    annotations = _texts(raw.annotations, f"{place.metadata}.annotations")
    said = koordinator.Said(
        labels=labels,
        annotations=annotations,
        priority=raw.priority,
        priority_class=raw.priority_class,
        asks={one.name: one.ask for one in listed},
    )
    try:
        stated = stated_level(annotations, door.dialect.selectors)
        spoken = koordinator.listen(said, stated)
    except ValueError as error:
        kind, _, reason = str(error).partition(" ")
        raise FieldError(f"{place.metadata}.{kind}s", reason) from None
    qos = stated or spoken.level or QoSLevel.SHARED
    dialect = msgspec.structs.replace(door.dialect, defaults={**door.dialect.defaults, **spoken.words})
    enhanced, problems = enhancements(annotations, qos, dialect, door.numa_nodes)
    nodes, unbound = bound_numa(annotations, dialect)
    known, others = _containers(listed, qos, spoken, annotations, together)
    profile, unread = _profile(annotations)
    priority, nameless = _priority(raw, spoken)
    return Pod(
        uid=f"{namespace}/{name}",
        namespace=namespace,
        name=name,
        qos=qos,
        containers=tuple(one for one in known if one.cgroup),
        waiting=tuple(one for one in known if not one.cgroup),
        annotations=annotations,
        labels=labels,
        priority=priority,
        enhancements=enhanced,
        bound_numa=nodes or spoken.bound_numa,
        profile=profile,
        problems=(*problems, *unbound, *nameless, *spoken.problems, *others, *unread),
    )


def _listed(raw: RawPod, place: Place) -> list[Listed]:
    """The pod's containers, those of the init containers that stay last."""
    if not raw.containers:
        raise FieldError(f"{place.spec}.containers", "is empty; list at least one with its cgroup")
    alone = len(raw.containers) + len(raw.init_containers) == 1
    found = []
    for kind, containers in (("containers", raw.containers), ("initContainers", raw.init_containers)):
        for index, container in enumerate(containers):
            where = f"{place.spec}.{kind}[{index}]"
            name = container.name if container.name is not None else (raw.name if alone else None)
            if name is None:
                raise FieldError(f"{where}.name", "is missing; a pod of several containers names each")
            init = kind == "initContainers"
            if (container.restart_policy == SIDECAR_POLICY) is not init and (
                init or container.restart_policy is not None
            ):
                raise FieldError(
                    f"{where}.restartPolicy",
                    f"is for init containers that stay, with the value {SIDECAR_POLICY}; others end before the "
                    "pod begins to work: leave them out",
                )
            resources = container.resources
            ask = read_ask(resources.requests, resources.limits, KNOWN_RESOURCES, f"{where}.resources")
            path = _cgroup(container.cgroup, f"{where}.cgroup")
            found.append(Listed(_name(name, f"{where}.name"), path, ask, init))
    return found


def _containers(
    listed: Sequence[Listed],
    qos: QoSLevel,
    spoken: koordinator.Spoken,
    annotations: Mapping[str, str],
    together: Ask,
) -> tuple[tuple[Container, ...], tuple[str, ...]]:
    """All but one are sidecars: the main container is the one that the annotation names, else the first."""
    problems: list[str] = []
    main = annotations.get(MAIN_CONTAINER_KEY, listed[0].name)
    if main not in [one.name for one in listed if not one.init]:
        problems.append(f"annotation {MAIN_CONTAINER_KEY}: there is no container {main!r:.80}; name one of the pod's; "
                        f"until then it is {listed[0].name}")  # fmt: skip
        main = listed[0].name
    found = []
    for name, cgroup, ask, init, _passes in _shared_out(listed, main, together):
        own, wrong = koordinator.translate(ask, spoken.extended.get(name), qos)
        problems += [f"container {name}: {problem}" for problem in wrong]
        found.append(Container(name=name, cgroup=cgroup, sidecar=init or name != main, **amounts(own)))
    return tuple(found), tuple(problems)


def _shared_out(listed: Sequence[Listed], main: str, together: Ask) -> Iterator[Listed]:
    """Who asks for which part of what the pod asks for as a whole: the others for their own, the main container for all the
    rest. Limits of a whole pod are in its own cgroup, and nobody's of its containers."""
    requests = {**together.limits, **together.requests}
    rest = {
        resource: max(asked - sum(_request(one, resource) for one in listed if not one.passes), Decimal(0))
        for resource, asked in requests.items()
    }
    for one in listed:
        if one.passes or not rest:
            yield one
            continue
        own = {resource: _request(one, resource) + (rest[resource] if one.name == main else 0) for resource in rest}
        yield one._replace(ask=Ask({**one.ask.requests, **own}, one.ask.limits))


def _request(one: Listed, resource: str) -> Decimal:
    """Kubernetes takes a limit alone for a request too."""
    return one.ask.requests.get(resource, one.ask.limits.get(resource, Decimal(0)))


def _profile(annotations: Mapping[str, str]) -> tuple[ServiceProfile, tuple[str, ...]]:
    """The pod's service profile; settings of offloading that cannot hold are left out."""
    profile, problems = service_profile(annotations)
    try:
        msgspec.convert(profile.memory_offloading, OffloadConfig)
    except msgspec.ValidationError as error:
        profile = msgspec.structs.replace(profile, memory_offloading={})
        problems = (f"annotation {PROFILE_KEY}: memoryOffloading: {error}; until then it is as without",)
    return profile, problems


def _priority(raw: RawPod, spoken: koordinator.Spoken) -> tuple[int, tuple[str, ...]]:
    name, number = raw.priority_class, raw.priority if raw.priority is not None else spoken.priority
    if number is not None:
        return number, ()
    if name and name not in PRIORITY_CLASSES:
        return 0, (
            f"priorityClassName: {name!r:.80} is a number in the cluster alone; write priority too, it is 0 here",
        )
    return PRIORITY_CLASSES.get(name, 0), ()


def _name(name: str, where: str) -> str:
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise FieldError(
            where, f"{name[:80]!r} is no name; use letters, digits, '-', '.' and '_', at most {LONGEST_NAME}"
        )
    return name


def _texts(entries: dict[str, Any], where: str) -> dict[str, str]:
    for key, value in entries.items():
        if not isinstance(value, str):
            raise FieldError(f"{where}[{key!r}]", f"{value!r:.80} is not text; write it in quotes")
    return entries


def _cgroup(path: str, where: str) -> str:
    shown = repr(path[:80])
    if not path.startswith("/") or path == "/":
        raise FieldError(where, f"{shown} must begin with / and name a cgroup below the root, like /web")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise FieldError(
            where, f"{shown} has an empty part, '.' or '..', or ends in /; write it plainly, like /web/app"
        )
    if not path.isprintable() or len(path.encode(errors="replace")) > LONGEST_PATH:
        raise FieldError(where, f"{shown} holds control characters or is too long; write a plain path, like /web")
    return path
