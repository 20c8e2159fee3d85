"""Converts one pod, from the pods file or a Kubernetes manifest, into the Pod of the api package. Pure.
Interprets Katalyst's labels and annotations, those that the cluster maps to them, and Koordinator's. Of Kubernetes
objects only the fields that are read have to be valid; `cgroup.dioptase.io/CONTAINER` names each container's
cgroup.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, field

from agent.config.memory import OffloadingLayerConfig
from agent.sensors.pods import koordinator_labels
from agent.sensors.pods.resource_quantities import (
    CONTAINER_RESOURCES,
    PodFieldError,
    ResourceRequirements,
    container_fields,
    read_requirements,
)
from api.annotations import (
    PROFILE_KEY,
    ServiceProfile,
    parse_enhancements,
    parse_numa_bind_result,
    parse_service_profile,
)
from api.pod import Container, Pod
from api.qos import MAIN_CONTAINER_KEY, AnnotationMapping, QoSLevel, explicit_qos_level

MAX_NAME_CHARS = 253
MAX_PATH_BYTES = 4095
LOOPBACK = "127.0.0.1"
KNOWN_RESOURCES = (*CONTAINER_RESOURCES, *koordinator_labels.KOORDINATOR_RESOURCES)
SIDECAR_POLICY = "Always"
"""restartPolicy of an init container that goes on beside the others."""
PRIORITY_CLASSES = {"system-node-critical": 2_000_001_000, "system-cluster-critical": 2_000_000_000}
"""Those that every cluster has; others are known to the cluster alone."""
_NO_RESOURCES = ResourceRequirements()
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


class PodFieldPaths(NamedTuple):
    """Where a pod stands in its file: `pods[0]` for both, or `items[0].metadata` and `items[0].spec`."""

    metadata: str
    spec: str


class PodParsingContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of this cluster and node when pods come in."""

    dialect: AnnotationMapping = AnnotationMapping()
    numa_nodes: Collection[int] | None = None
    """None where it is not known."""


class PodContainer(NamedTuple):
    """One container of a pod, the quantities that it asks for understood."""

    name: str
    cgroup: str
    """Empty where it has none now: then it is one that waits."""
    ask: ResourceRequirements
    init: bool
    """Not among the pod's `containers`: an init container, or one that was added to look around (ephemeral)."""
    is_transient: bool = False
    """It runs before the others or beside them for a while: what the pod asks for as a whole is not for it."""


def scrape_address(ip: str | None, *, host_network: bool) -> str | None:
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


def pod_from_spec(raw: RawPod, place: PodFieldPaths, context: PodParsingContext) -> Pod:
    """The pod, with what it says and cannot have as its `problems`. Raises FieldError for what cannot hold at all."""
    return assemble_pod(raw, _spec_containers(raw, place), place, context)


def assemble_pod(
    raw: RawPod,
    listed: Sequence[PodContainer],
    place: PodFieldPaths,
    context: PodParsingContext,
    pod_resources: ResourceRequirements = _NO_RESOURCES,
) -> Pod:
    """The same of a pod whose containers are known: `listed` instead of those that `raw` has, one of them at least; and what
    the pod asks for as a whole."""
    namespace = _check_name(raw.namespace, f"{place.metadata}.namespace")
    name = _check_name(raw.name, f"{place.metadata}.name")
    labels = _check_texts(raw.labels, f"{place.metadata}.labels")
    annotations = _check_texts(raw.annotations, f"{place.metadata}.annotations")
    said = koordinator_labels.KoordinatorPodInput(
        labels=labels,
        annotations=annotations,
        priority=raw.priority,
        priority_class=raw.priority_class,
        asks={one.name: one.ask for one in listed},
    )
    try:
        stated = explicit_qos_level(annotations, context.dialect.selectors)
        spoken = koordinator_labels.translate_koordinator_pod(said, stated)
    except ValueError as error:
        kind, _, reason = str(error).partition(" ")
        raise PodFieldError(f"{place.metadata}.{kind}s", reason) from None
    qos = stated or spoken.level or QoSLevel.SHARED
    dialect = msgspec.structs.replace(context.dialect, defaults={**context.dialect.defaults, **spoken.words})
    enhanced, problems = parse_enhancements(annotations, qos, dialect, context.numa_nodes)
    nodes, unbound = parse_numa_bind_result(annotations, dialect)
    known, others = _build_containers(listed, qos, spoken, annotations, pod_resources)
    profile, unread = _read_profile(annotations)
    priority, nameless = _resolve_priority(raw, spoken)
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


def _spec_containers(raw: RawPod, place: PodFieldPaths) -> list[PodContainer]:
    """The pod's containers, those of the init containers that stay last."""
    if not raw.containers:
        raise PodFieldError(f"{place.spec}.containers", "is empty; list at least one with its cgroup")
    alone = len(raw.containers) + len(raw.init_containers) == 1
    found = []
    for kind, containers in (("containers", raw.containers), ("initContainers", raw.init_containers)):
        for index, container in enumerate(containers):
            where = f"{place.spec}.{kind}[{index}]"
            name = container.name if container.name is not None else (raw.name if alone else None)
            if name is None:
                raise PodFieldError(f"{where}.name", "is missing; a pod of several containers names each")
            init = kind == "initContainers"
            if (container.restart_policy == SIDECAR_POLICY) is not init and (
                init or container.restart_policy is not None
            ):
                raise PodFieldError(
                    f"{where}.restartPolicy",
                    f"is for init containers that stay, with the value {SIDECAR_POLICY}; others end before the "
                    "pod begins to work: leave them out",
                )
            resources = container.resources
            ask = read_requirements(resources.requests, resources.limits, KNOWN_RESOURCES, f"{where}.resources")
            path = _check_cgroup_path(container.cgroup, f"{where}.cgroup")
            found.append(PodContainer(_check_name(name, f"{where}.name"), path, ask, init))
    return found


def _build_containers(
    listed: Sequence[PodContainer],
    qos: QoSLevel,
    spoken: koordinator_labels.KoordinatorTranslation,
    annotations: Mapping[str, str],
    together: ResourceRequirements,
) -> tuple[tuple[Container, ...], tuple[str, ...]]:
    """All but one are sidecars: the main container is the one that the annotation names, else the first."""
    problems: list[str] = []
    main = annotations.get(MAIN_CONTAINER_KEY, listed[0].name)
    if main not in [one.name for one in listed if not one.init]:
        problems.append(f"annotation {MAIN_CONTAINER_KEY}: there is no container {main!r:.80}; name one of the pod's; "
                        f"until then it is {listed[0].name}")  # fmt: skip
        main = listed[0].name
    found = []
    for name, cgroup, ask, init, _passes in _distribute_pod_resources(listed, main, together):
        own, wrong = koordinator_labels.translate_koordinator_resources(ask, spoken.extended.get(name), qos)
        problems += [f"container {name}: {problem}" for problem in wrong]
        found.append(Container(name=name, cgroup=cgroup, sidecar=init or name != main, **container_fields(own)))
    return tuple(found), tuple(problems)


def _distribute_pod_resources(
    listed: Sequence[PodContainer], main: str, together: ResourceRequirements
) -> Iterator[PodContainer]:
    """Who asks for which part of what the pod asks for as a whole: the others for their own, the main container for all the
    rest. Limits of a whole pod are in its own cgroup, and nobody's of its containers."""
    requests = {**together.limits, **together.requests}
    rest = {
        resource: max(
            asked - sum(_effective_request(one, resource) for one in listed if not one.is_transient), Decimal(0)
        )
        for resource, asked in requests.items()
    }
    for one in listed:
        if one.is_transient or not rest:
            yield one
            continue
        own = {
            resource: _effective_request(one, resource) + (rest[resource] if one.name == main else 0)
            for resource in rest
        }
        yield one._replace(ask=ResourceRequirements({**one.ask.requests, **own}, one.ask.limits))


def _effective_request(one: PodContainer, resource: str) -> Decimal:
    """Kubernetes takes a limit alone for a request too."""
    return one.ask.requests.get(resource, one.ask.limits.get(resource, Decimal(0)))


def _read_profile(annotations: Mapping[str, str]) -> tuple[ServiceProfile, tuple[str, ...]]:
    """The pod's service profile; settings of offloading that cannot hold are left out."""
    profile, problems = parse_service_profile(annotations)
    try:
        msgspec.convert(profile.memory_offloading, OffloadingLayerConfig)
    except msgspec.ValidationError as error:
        profile = msgspec.structs.replace(profile, memory_offloading={})
        problems = (f"annotation {PROFILE_KEY}: memoryOffloading: {error}; until then it is as without",)
    return profile, problems


def _resolve_priority(raw: RawPod, spoken: koordinator_labels.KoordinatorTranslation) -> tuple[int, tuple[str, ...]]:
    name, number = raw.priority_class, raw.priority if raw.priority is not None else spoken.priority
    if number is not None:
        return number, ()
    if name and name not in PRIORITY_CLASSES:
        return 0, (
            f"priorityClassName: {name!r:.80} is a number in the cluster alone; write priority too, it is 0 here",
        )
    return PRIORITY_CLASSES.get(name, 0), ()


def _check_name(name: str, where: str) -> str:
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise PodFieldError(
            where, f"{name[:80]!r} is no name; use letters, digits, '-', '.' and '_', at most {MAX_NAME_CHARS}"
        )
    return name


def _check_texts(entries: dict[str, Any], where: str) -> dict[str, str]:
    for key, value in entries.items():
        if not isinstance(value, str):
            raise PodFieldError(f"{where}[{key!r}]", f"{value!r:.80} is not text; write it in quotes")
    return entries


def _check_cgroup_path(path: str, where: str) -> str:
    shown = repr(path[:80])
    if not path.startswith("/") or path == "/":
        raise PodFieldError(where, f"{shown} must begin with / and name a cgroup below the root, like /web")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise PodFieldError(
            where, f"{shown} has an empty part, '.' or '..', or ends in /; write it plainly, like /web/app"
        )
    if not path.isprintable() or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise PodFieldError(where, f"{shown} holds control characters or is too long; write a plain path, like /web")
    return path


CGROUP_PREFIX = "cgroup.dioptase.io/"
LIST_KINDS = ("List", "PodList")
TERMINAL_PHASES = ("Succeeded", "Failed")
"""Phases of pods that have no cgroups any more."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str = "default"
    labels: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    uid: str = ""


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None


class _Container(msgspec.Struct, frozen=True):
    name: str
    resources: _Resources | None = None
    restart_policy: str | None = field(name="restartPolicy", default=None)


class _Spec(msgspec.Struct, frozen=True):
    containers: list[_Container]
    init_containers: list[_Container] | None = field(name="initContainers", default=None)
    priority: int | None = None
    priority_class: str | None = field(name="priorityClassName", default=None)
    host_network: bool | None = field(name="hostNetwork", default=None)


class _Status(msgspec.Struct, frozen=True):
    phase: str | None = None
    pod_ip: str | None = field(name="podIP", default=None)


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec
    status: _Status | None = None


class ManifestPod(msgspec.Struct, frozen=True):
    """One pod of the document."""

    raw: RawPod
    place: PodFieldPaths
    uid: str
    address: str | None


def is_manifest(document: object) -> bool:
    """Whether this is one of Kubernetes' objects rather than our own file."""
    return isinstance(document, dict) and "kind" in document


def read_manifest(document: Mapping[str, Any]) -> list[ManifestPod]:
    """The pods that have not ended. Raises FieldError, or msgspec.ValidationError with the path inside of `document`."""
    if document["kind"] not in LIST_KINDS:
        return _read_item(document, "")
    items = document.get("items")
    if not isinstance(items, list):
        raise PodFieldError("items", "is no list; write `items: []` where there are no pods")
    return [found for index, item in enumerate(items) for found in _read_item(item, f"items[{index}].")]


def _read_item(item: object, prefix: str) -> list[ManifestPod]:
    kind = item.get("kind", "Pod") if isinstance(item, dict) else type(item).__name__
    if kind != "Pod":
        raise PodFieldError(f"{prefix}kind", f"{kind!r:.80} is no Pod; leave Pods only")
    try:
        pod = msgspec.convert(item, _Pod)
    except msgspec.ValidationError as error:
        # As if it had been converted together with what holds it.
        reason, _, path = str(error).partition(" - at `$.")
        field_of = f"{prefix}{path.rstrip('`')}".rstrip(".")
        raise msgspec.ValidationError(f"{reason} - at `$.{field_of}`" if field_of else reason) from None
    if pod.status is not None and pod.status.phase in TERMINAL_PHASES:
        return []
    place = PodFieldPaths(f"{prefix}metadata", f"{prefix}spec")
    annotations = pod.metadata.annotations or {}
    staying = [each for each in pod.spec.init_containers or () if each.restart_policy == SIDECAR_POLICY]
    raw = RawPod(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        labels=pod.metadata.labels or {},
        annotations=annotations,
        priority=pod.spec.priority,
        priority_class=pod.spec.priority_class or "",
        containers=[_manifest_container(each, annotations, place) for each in pod.spec.containers],
        init_containers=[_manifest_container(each, annotations, place) for each in staying],
    )
    ip = pod.status.pod_ip if pod.status is not None else None
    # One without is somebody's own writing, for what runs on the node without a network of its own.
    address = scrape_address(ip, host_network=not ip or bool(pod.spec.host_network))
    return [ManifestPod(raw, place, pod.metadata.uid, address)]


def _manifest_container(container: _Container, annotations: Mapping[str, Any], place: PodFieldPaths) -> RawContainer:
    key = f"{CGROUP_PREFIX}{container.name}"
    cgroup = annotations.get(key)
    if not isinstance(cgroup, str):
        raise PodFieldError(
            f"{place.metadata}.annotations[{key!r:.80}]",
            "is missing; write the path of that container's cgroup there, below the cgroup root, like /kubepods/web",
        )
    listed = container.resources or _Resources()
    requests, limits = (
        {name: value for name, value in (entries or {}).items() if name in KNOWN_RESOURCES}
        for entries in (listed.requests, listed.limits)
    )
    # Of containers that are no init containers Kubernetes has further policies, which change nothing here.
    policy = container.restart_policy if container.restart_policy == SIDECAR_POLICY else None
    return RawContainer(cgroup, container.name, RawResources(requests, limits), policy)
