"""Converts one pod, from the pods file or a Kubernetes manifest, into the Pod of the api package. Pure. Interprets
Katalyst's labels and annotations, those that the cluster maps to them, and Koordinator's. Of Kubernetes objects only
the fields that are read have to be valid; `cgroup.dioptase.io/CONTAINER` names each container's cgroup."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, field

from agent.config.annotation_rights import PodRights, limit_level, limit_profile, pod_rights
from agent.config.memory import OffloadingLayerConfig
from agent.config.qos import RightsConfig
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
from api.text import limit_sentences, quote

MAX_NAME_CHARS = 253
MAX_PROBLEMS = 20
"""Problems of one pod that are reported; each of them costs space in every snapshot."""
MAX_PATH_BYTES = 4095
LOOPBACK = "127.0.0.1"
KNOWN_RESOURCES = (*CONTAINER_RESOURCES, *koordinator_labels.KOORDINATOR_RESOURCES)
SIDECAR_POLICY = "Always"
"""The restartPolicy of a sidecar, an init container that keeps running (KEP-753)."""
PRIORITY_CLASSES = {"system-node-critical": 2_000_001_000, "system-cluster-critical": 2_000_000_000}
"""Priority classes of every cluster (pkg/apis/scheduling); others are known to the API server only."""
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
    """Paths of a pod in its file: `pods[0]` for both, or `items[0].metadata` and `items[0].spec`."""

    metadata: str
    spec: str


class PodParsingContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the node and its settings contribute to the parsing of pods."""

    dialect: AnnotationMapping = AnnotationMapping()
    numa_nodes: Collection[int] | None = None
    """None if unknown."""
    rights: RightsConfig = RightsConfig()


class PodContainer(NamedTuple):
    """One container of a pod with its parsed quantities."""

    name: str
    cgroup: str
    """Empty without a cgroup: the container is waiting."""
    ask: ResourceRequirements
    init: bool
    """Whether it is not among the pod's `containers`: an init or an ephemeral container."""
    is_transient: bool = False
    """Whether it runs only for a while; it has no part in pod-level requests."""


def scrape_address(ip: str | None, *, host_network: bool) -> str | None:
    """Return the address to scrape a pod at, or None.

    Loopback is used only for pods in the node's network: for another pod the agent would send requests to services of
    the node.
    """
    if host_network:
        return LOOPBACK
    try:
        address = ip_address(ip or "")
    except ValueError:
        return None
    address = getattr(address, "ipv4_mapped", None) or address
    unusable = address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    return None if unusable else str(address)


def pod_from_spec(raw: RawPod, place: PodFieldPaths, context: PodParsingContext) -> Pod:
    """Return the pod, with invalid labels and annotations among its `problems`. Raises PodFieldError for an invalid
    field."""
    return assemble_pod(raw, _spec_containers(raw, place), place, context)


def assemble_pod(
    raw: RawPod,
    listed: Sequence[PodContainer],
    place: PodFieldPaths,
    context: PodParsingContext,
    pod_resources: ResourceRequirements = _NO_RESOURCES,
) -> Pod:
    """Return the pod of `raw` with the containers `listed`, at least one, and the pod-level resources."""
    namespace = _check_name(raw.namespace, f"{place.metadata}.namespace")
    name = _check_name(raw.name, f"{place.metadata}.name")
    labels = _check_texts(raw.labels, f"{place.metadata}.labels")
    annotations = _check_texts(raw.annotations, f"{place.metadata}.annotations")
    koordinator_input = koordinator_labels.KoordinatorPodInput(
        labels=labels,
        annotations=annotations,
        priority=raw.priority,
        priority_class=raw.priority_class,
        asks={container.name: container.ask for container in listed},
    )
    try:
        stated = explicit_qos_level(annotations, context.dialect.selectors)
        translation = koordinator_labels.translate_koordinator_pod(koordinator_input, stated)
    except ValueError as error:
        kind, _, reason = str(error).partition(" ")
        raise PodFieldError(f"{place.metadata}.{kind}s", reason) from None
    rights = pod_rights(context.rights, namespace, raw.priority_class)
    qos = stated or translation.level or QoSLevel.SHARED
    containers, container_problems = _build_containers(listed, qos, translation, annotations, pod_resources)
    qos, level_problems = limit_level(qos, _main_request_cores(containers), rights)
    dialect = msgspec.structs.replace(context.dialect, defaults={**context.dialect.defaults, **translation.words})
    enhancements, problems = parse_enhancements(
        annotations, qos, dialect, context.numa_nodes, rights.withheld_enhancements()
    )
    nodes, bind_problems = parse_numa_bind_result(annotations, dialect)
    profile, profile_problems = _read_profile(annotations, rights)
    priority, priority_problems = _resolve_priority(raw, translation)
    problems = (*level_problems, *problems, *bind_problems, *priority_problems, *translation.problems)
    return Pod(
        uid=f"{namespace}/{name}",
        namespace=namespace,
        name=name,
        qos=qos,
        containers=tuple(container for container in containers if container.cgroup),
        waiting=tuple(container for container in containers if not container.cgroup),
        annotations=annotations,
        labels=labels,
        priority=priority,
        priority_class=raw.priority_class,
        enhancements=enhancements,
        bound_numa=nodes or translation.bound_numa,
        profile=profile,
        problems=limit_sentences((*problems, *container_problems, *profile_problems), MAX_PROBLEMS),
    )


def _spec_containers(raw: RawPod, place: PodFieldPaths) -> list[PodContainer]:
    """Return the pod's containers, sidecars last."""
    if not raw.containers:
        raise PodFieldError(f"{place.spec}.containers", "is empty; list at least one with its cgroup")
    is_only_one = len(raw.containers) + len(raw.init_containers) == 1
    parsed = []
    for kind, containers in (("containers", raw.containers), ("initContainers", raw.init_containers)):
        for index, container in enumerate(containers):
            path = f"{place.spec}.{kind}[{index}]"
            name = container.name if container.name is not None else (raw.name if is_only_one else None)
            if name is None:
                raise PodFieldError(f"{path}.name", "is missing; name each container of a pod with several")
            init = kind == "initContainers"
            if (container.restart_policy == SIDECAR_POLICY) is not init and (
                init or container.restart_policy is not None
            ):
                raise PodFieldError(
                    f"{path}.restartPolicy",
                    f"is for sidecars among the init containers, with the value {SIDECAR_POLICY}; other init "
                    "containers end before the pod starts: remove them",
                )
            resources = container.resources
            ask = read_requirements(resources.requests, resources.limits, KNOWN_RESOURCES, f"{path}.resources")
            path = _check_cgroup_path(container.cgroup, f"{path}.cgroup")
            parsed.append(PodContainer(_check_name(name, f"{path}.name"), path, ask, init))
    return parsed


def _build_containers(
    listed: Sequence[PodContainer],
    qos: QoSLevel,
    translation: koordinator_labels.KoordinatorTranslation,
    annotations: Mapping[str, str],
    pod_resources: ResourceRequirements,
) -> tuple[tuple[Container, ...], tuple[str, ...]]:
    """Return the containers, all but one as sidecars: the main container is the annotation's, else the first."""
    problems: list[str] = []
    main = annotations.get(MAIN_CONTAINER_KEY, listed[0].name)
    if main not in [container.name for container in listed if not container.init]:
        problems.append(f"annotation {MAIN_CONTAINER_KEY}: there is no container {quote(main)}; name one of the pod's; "
                        f"until then it is {listed[0].name}")  # fmt: skip
        main = listed[0].name
    built = []
    for name, cgroup, ask, init, _passes in _distribute_pod_resources(listed, main, pod_resources):
        requirements, container_problems = koordinator_labels.translate_koordinator_resources(
            ask, translation.extended.get(name), qos
        )
        problems += [f"container {name}: {problem}" for problem in container_problems]
        built.append(
            Container(
                name=name,
                cgroup=cgroup,
                sidecar=init or name != main,
                **container_fields(requirements, reclaimed=qos is QoSLevel.RECLAIMED),
            )
        )
    return tuple(built), tuple(problems)


def _distribute_pod_resources(
    listed: Sequence[PodContainer], main: str, pod_resources: ResourceRequirements
) -> Iterator[PodContainer]:
    """Split pod-level requests: other containers get their own, the main container the rest (KEP-2837).

    Pod-level limits are in the pod's own cgroup, not in those of its containers.
    """
    requests = {**pod_resources.limits, **pod_resources.requests}
    remainder = {
        resource: max(
            request
            - sum(_effective_request(container, resource) for container in listed if not container.is_transient),
            Decimal(0),
        )
        for resource, request in requests.items()
    }
    for container in listed:
        if container.is_transient or not remainder:
            yield container
            continue
        requests_by_resource = {
            resource: _effective_request(container, resource) + (remainder[resource] if container.name == main else 0)
            for resource in remainder
        }
        yield container._replace(
            ask=ResourceRequirements({**container.ask.requests, **requests_by_resource}, container.ask.limits)
        )


def _effective_request(container: PodContainer, resource: str) -> Decimal:
    """Return the request; Kubernetes treats a limit alone as a request too."""
    return container.ask.requests.get(resource, container.ask.limits.get(resource, Decimal(0)))


def _main_request_cores(containers: Sequence[Container]) -> float | None:
    """Return the CPU request of the container whose CPUs the others of a dedicated pod share."""
    return next((container.cpu_request_cores for container in containers if not container.sidecar), None)


def _read_profile(annotations: Mapping[str, str], rights: PodRights) -> tuple[ServiceProfile, tuple[str, ...]]:
    """Return the pod's service profile without invalid offloading settings and without what the pod has no right to,
    and problems."""
    profile, problems = parse_service_profile(annotations)
    try:
        msgspec.convert(profile.memory_offloading, OffloadingLayerConfig)
    except msgspec.ValidationError as error:
        profile = msgspec.structs.replace(profile, memory_offloading={})
        problems = (f"annotation {PROFILE_KEY}: memoryOffloading: {error}; until then it is ignored",)
    profile, unauthorized = limit_profile(profile, rights)
    return profile, (*problems, *unauthorized)


def _resolve_priority(
    raw: RawPod, translation: koordinator_labels.KoordinatorTranslation
) -> tuple[int, tuple[str, ...]]:
    name, number = raw.priority_class, raw.priority if raw.priority is not None else translation.priority
    if number is not None:
        return number, ()
    if name and name not in PRIORITY_CLASSES:
        return 0, (f"priorityClassName: {quote(name)} is known to the cluster only; set priority too, it is 0 here",)
    return PRIORITY_CLASSES.get(name, 0), ()


def _check_name(name: str, where: str) -> str:
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise PodFieldError(
            where, f"{quote(name)} is not a name; use letters, digits, '-', '.' and '_', at most {MAX_NAME_CHARS}"
        )
    return name


def _check_texts(entries: dict[str, Any], where: str) -> dict[str, str]:
    for key, value in entries.items():
        if not isinstance(value, str):
            raise PodFieldError(f"{where}[{quote(key)}]", f"{quote(value)} is not text; write it in quotes")
    return entries


def _check_cgroup_path(path: str, where: str) -> str:
    shown = quote(path)
    if not path.startswith("/") or path == "/":
        raise PodFieldError(where, f"{shown} must begin with / and be a cgroup below the root, such as /web")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise PodFieldError(
            where, f"{shown} has an empty part, '.' or '..', or ends in /; write it plainly, like /web/app"
        )
    if not path.isprintable() or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise PodFieldError(where, f"{shown} contains control characters or is too long; use a plain path, like /web")
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


class KubernetesResources(msgspec.Struct, frozen=True):
    """The `resources` of a container or pod in Kubernetes objects."""

    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None


class KubernetesContainer(msgspec.Struct, frozen=True, rename="camel"):
    """A container in the `spec` of a Kubernetes pod."""

    name: str
    resources: KubernetesResources | None = None
    restart_policy: str | None = None


class _Spec(msgspec.Struct, frozen=True):
    containers: list[KubernetesContainer]
    init_containers: list[KubernetesContainer] | None = field(name="initContainers", default=None)
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
    """Return whether the document is a Kubernetes object rather than a pods file."""
    return isinstance(document, dict) and "kind" in document


def read_manifest(document: Mapping[str, Any]) -> list[ManifestPod]:
    """Return the pods that have not ended. Raises PodFieldError, or msgspec.ValidationError with the path in
    `document`."""
    if document["kind"] not in LIST_KINDS:
        return _read_item(document, "")
    items = document.get("items")
    if not isinstance(items, list):
        raise PodFieldError("items", "is not a list; write `items: []` without pods")
    return [pod for index, item in enumerate(items) for pod in _read_item(item, f"items[{index}].")]


def _read_item(item: object, prefix: str) -> list[ManifestPod]:
    kind = item.get("kind", "Pod") if isinstance(item, dict) else type(item).__name__
    if kind != "Pod":
        raise PodFieldError(f"{prefix}kind", f"{quote(kind)} is not a Pod; remove it")
    try:
        pod = msgspec.convert(item, _Pod)
    except msgspec.ValidationError as error:
        # Report the path from the document's root.
        reason, _, path = str(error).partition(" - at `$.")
        full_path = f"{prefix}{path.rstrip('`')}".rstrip(".")
        raise msgspec.ValidationError(f"{reason} - at `$.{full_path}`" if full_path else reason) from None
    if pod.status is not None and pod.status.phase in TERMINAL_PHASES:
        return []
    place = PodFieldPaths(f"{prefix}metadata", f"{prefix}spec")
    annotations = pod.metadata.annotations or {}
    sidecars = [each for each in pod.spec.init_containers or () if each.restart_policy == SIDECAR_POLICY]
    raw = RawPod(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        labels=pod.metadata.labels or {},
        annotations=annotations,
        priority=pod.spec.priority,
        priority_class=pod.spec.priority_class or "",
        containers=[_manifest_container(each, annotations, place) for each in pod.spec.containers],
        init_containers=[_manifest_container(each, annotations, place) for each in sidecars],
    )
    ip = pod.status.pod_ip if pod.status is not None else None
    # A manifest without an address was written by hand, for processes in the node's network.
    address = scrape_address(ip, host_network=not ip or bool(pod.spec.host_network))
    return [ManifestPod(raw, place, pod.metadata.uid, address)]


def _manifest_container(
    container: KubernetesContainer, annotations: Mapping[str, Any], place: PodFieldPaths
) -> RawContainer:
    key = f"{CGROUP_PREFIX}{container.name}"
    cgroup = annotations.get(key)
    if not isinstance(cgroup, str):
        raise PodFieldError(
            f"{place.metadata}.annotations[{quote(key)}]",
            "is missing; set it to the path of that container's cgroup below the cgroup root, like /kubepods/web",
        )
    listed = container.resources or KubernetesResources()
    requests, limits = (
        {name: value for name, value in (entries or {}).items() if name in KNOWN_RESOURCES}
        for entries in (listed.requests, listed.limits)
    )
    # Other restart policies of regular containers change nothing here.
    policy = container.restart_policy if container.restart_policy == SIDECAR_POLICY else None
    return RawContainer(cgroup, container.name, RawResources(requests, limits), policy)
