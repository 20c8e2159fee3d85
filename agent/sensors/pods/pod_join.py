"""Decodes the kubelet's pod list and joins it with the runtime's running containers into the node's pods. Pure. A pod
exists from the moment the kubelet lists it and remains while any of its containers runs: a restarted kubelet lists
nothing for a while. Pods are decoded only when the digest of their text changes, because the kubelet's order varies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from agent.sensors.cgroup.pod_cgroup_paths import (
    BEST_EFFORT,
    BURSTABLE,
    GUARANTEED,
    CgroupExists,
    PodCgroupIdentity,
    find_container_cgroup,
    is_valid_id,
)
from agent.sensors.pods.pod_conditions import KubeletPodCondition, is_resize_pending, placement_time_s
from agent.sensors.pods.pod_spec import (
    KNOWN_RESOURCES,
    MAX_PROBLEMS,
    SIDECAR_POLICY,
    TERMINAL_PHASES,
    KubernetesContainer,
    KubernetesResources,
    PodContainer,
    PodFieldPaths,
    PodParsingContext,
    RawPod,
    assemble_pod,
    scrape_address,
)
from agent.sensors.pods.resource_quantities import CPU, MEMORY, PodFieldError, ResourceRequirements, read_requirements
from api.pod import Pod
from api.quantity import convert_quantity
from api.text import limit_sentences, printable, quote


class RunningContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One running container."""

    pod_uid: str
    pod: str
    """Key of the pod, `namespace/name`."""
    name: str
    id: str
    created_at_ns: int
    cgroup: str = ""
    """Path reported by the runtime; empty if it is not reported, or was not requested yet."""


class RuntimeContainers(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the runtime: of two containers of one pod with one name, the newer."""

    running: Mapping[tuple[str, str], RunningContainer] = {}
    """Containers by pod uid and name."""
    sandboxes: frozenset[str] = frozenset()
    """Uids of the pods whose sandbox is ready, with or without containers."""

    def pods(self) -> Mapping[str, str]:
        """Return `namespace/name` of the pods with a running container, by uid."""
        return {container.pod_uid: container.pod for container in self.running.values()}


MAX_PODS = 4096
MAX_POD_LIST_BYTES = 64 << 20
"""Limit of an answer: a thousand pods with long annotations and statuses have 15 MB."""
MAX_POD_BYTES = 4 << 20
"""The API server accepts at most 1.5 MiB per object by default, in protobuf, which is shorter than JSON."""
MAX_CONTAINERS = 256
"""Containers of one kind in a pod: an object of 1.5 MiB can have twenty thousand."""
MAX_LABELS = 1024
"""Labels of a pod, and separately its annotations."""
_UNGRANTED_RESIZES = ("Proposed", "Deferred", "Infeasible")
MIRROR_ANNOTATION, SOURCE_ANNOTATION = "kubernetes.io/config.mirror", "kubernetes.io/config.source"
SOURCE_API = "api"
DIGEST_BYTES = 16
MAX_SHOWN_NAME_CHARS = 100
_MAX_PROBLEMS_SHOWN = 3


class InvalidPodList(ValueError):
    """An answer that is not a list of pods; the text says what is wrong, and where."""


class KubeletOwner(msgspec.Struct, frozen=True):
    """An owner reference."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class KubeletPodMetadata(msgspec.Struct, frozen=True):
    name: str
    uid: str
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deleted_at: str | None = msgspec.field(name="deletionTimestamp", default=None)
    deletion_grace_s: int | None = msgspec.field(name="deletionGracePeriodSeconds", default=None)
    owners: list[KubeletOwner] | None = msgspec.field(name="ownerReferences", default=None)
    generation: int = 0


class KubeletPodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[KubernetesContainer]
    init_containers: list[KubernetesContainer] | None = None
    ephemeral_containers: list[KubernetesContainer] | None = None
    priority: int | None = None
    termination_grace_period_seconds: int | None = None
    priority_class_name: str | None = None
    resources: KubernetesResources | None = None
    """Pod-level resources (KEP-2837)."""
    host_network: bool | None = None


class ContainerStateRunning(msgspec.Struct, frozen=True):
    """Present if the container runs; its fields are not needed."""


class ContainerState(msgspec.Struct, frozen=True):
    running: ContainerStateRunning | None = None


class KubeletContainerStatus(msgspec.Struct, frozen=True):
    name: str
    id: str = msgspec.field(name="containerID", default="")
    state: ContainerState | None = None
    resources: KubernetesResources | None = None
    """What the kubelet has granted, from Kubernetes 1.33 on."""
    allocated: dict[str, str | int | float] | None = msgspec.field(name="allocatedResources", default=None)
    """Granted requests, with the gates of older releases."""

    def granted(self, resource: str) -> Decimal | None:
        """Return the granted request of the resource, 0 without one; None if the status lacks them."""
        if not self.allocated and self.resources is None:
            return None
        requests = self.allocated or (self.resources.requests if self.resources is not None else None) or {}
        return _quantity_or_zero(requests, resource)


class KubeletPodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str | None = None
    qos_class: str | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    container_statuses: list[KubeletContainerStatus] | None = None
    init_container_statuses: list[KubeletContainerStatus] | None = None
    ephemeral_container_statuses: list[KubeletContainerStatus] | None = None
    conditions: list[KubeletPodCondition] | None = None
    resize: str | None = None
    """State of a resize in place, before Kubernetes 1.33."""
    observed_generation: int | None = None

    def containers(self) -> Iterator[KubeletContainerStatus]:
        """Yield the statuses of all containers."""
        for statuses in (self.container_statuses, self.init_container_statuses, self.ephemeral_container_statuses):
            yield from statuses or ()


class KubeletPod(msgspec.Struct, frozen=True):
    """A pod as the kubelet lists it."""

    metadata: KubeletPodMetadata
    spec: KubeletPodSpec
    status: KubeletPodStatus = KubeletPodStatus()

    @property
    def uid(self) -> str:
        """The uid in cgroups and the runtime: of the mirror of a static pod, which the API server creates, the hash
        that is the static pod's own uid."""
        return (self.metadata.annotations or {}).get(MIRROR_ANNOTATION, self.metadata.uid)

    @property
    def from_api(self) -> bool:
        """Whether the pod comes from the API server. The kubelet has pods from files from its start, others once the
        API server lists them."""
        annotations = self.metadata.annotations or {}
        return annotations.get(SOURCE_ANNOTATION, SOURCE_API) == SOURCE_API and MIRROR_ANNOTATION not in annotations

    @property
    def workload(self) -> str:
        """The controller as `namespace/Kind/name`; empty without one. That of a Deployment's ReplicaSet is the Deployment,
        whose name the ReplicaSet's extends by the pod template's hash."""
        controller = next((owner for owner in self.metadata.owners or () if owner.controller), None)
        if controller is None:
            return ""
        template_hash = (self.metadata.labels or {}).get("pod-template-hash", "")
        kind, name = controller.kind, controller.name
        if kind == "ReplicaSet" and template_hash and name.endswith(f"-{template_hash}"):
            kind, name = "Deployment", name.removesuffix(f"-{template_hash}")
        return f"{self.metadata.namespace}/{kind}/{name}"

    @property
    def is_resize_refused(self) -> bool:
        """Whether the kubelet has not granted what the spec requests."""
        return self.status.resize in _UNGRANTED_RESIZES or is_resize_pending(self.status.conditions or ())

    @property
    def is_unobserved(self) -> bool:
        """Whether the kubelet has not reported yet that it knows this spec."""
        observed = self.status.observed_generation
        return observed is not None and self.metadata.generation > observed

    @property
    def ended(self) -> bool:
        """Whether all its containers have ended for good."""
        return self.status.phase in TERMINAL_PHASES

    def running(self) -> dict[str, str]:
        """Return ids of running containers by name from the status, which may lag behind the runtime."""
        return {
            container.name: container.id
            for container in self.status.containers()
            if container.id and container.state is not None and container.state.running is not None
        }


class KubeletPodItem(msgspec.Struct, frozen=True):
    """One pod and the digest of its text."""

    digest: bytes
    pod: KubeletPod
    manifest: bytes = b""
    """The text itself, if it is kept."""


class KubeletPodList(msgspec.Struct, frozen=True):
    """The kubelet's pods by uid, and what could not be read, as sentences."""

    items: Mapping[str, KubeletPodItem] = {}
    problems: tuple[str, ...] = ()


class _NamedPodMetadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = "default"


class _NamedPod(msgspec.Struct, frozen=True):
    metadata: _NamedPodMetadata = _NamedPodMetadata()


_POD = msgspec.json.Decoder(KubeletPod)
_NAMED_POD = msgspec.json.Decoder(_NamedPod)


def decode_pod_list(body: bytes, before: KubeletPodList, *, keep_manifests: bool = False) -> KubeletPodList:
    """Decode the kubelet's answer; a pod whose text was in the previous list is not decoded again.

    Raises InvalidPodList for an answer that is no list. A pod that cannot be read is left out and reported.
    """
    if len(body) > MAX_POD_LIST_BYTES:
        raise InvalidPodList(f"it has more than {MAX_POD_LIST_BYTES >> 20} MiB")
    try:
        rows = _pod_list_decoder().decode(body).items
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidPodList(f"it is not a list of pods: {printable(str(error), 200)}") from None
    raws = () if rows is None else tuple(takewhile(lambda raw: raw is not None, msgspec.structs.astuple(rows)))
    known_items = {item.digest: item for item in before.items.values()}
    decoded: list[KubeletPodItem] = []
    problems: list[str] = []
    for index, raw in enumerate(raws):
        digest = blake2b(raw, digest_size=DIGEST_BYTES).digest()
        item = known_items.get(digest)
        if item is None:
            try:
                item = KubeletPodItem(digest, _decode_pod(raw), bytes(raw) if keep_manifests else b"")
            except ValueError as error:
                problems.append(f"items[{index}]{error}")
                continue
        decoded.append(item)
    # A mirror of a listed static pod adds nothing.
    decoded.sort(key=lambda item: MIRROR_ANNOTATION in (item.pod.metadata.annotations or {}))
    items: dict[str, KubeletPodItem] = {}
    for item in decoded:
        items.setdefault(item.pod.uid, item)
    return KubeletPodList(items, limit_sentences(problems, _MAX_PROBLEMS_SHOWN))


def qos_class(pod: KubeletPod) -> str:
    """Return the pod's QoS class: the status', else the kubelet's rule (CPU and memory of all but ephemeral
    containers)."""
    if pod.status.qos_class in (GUARANTEED, BURSTABLE, BEST_EFFORT):
        return pod.status.qos_class
    listed = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    pod_level = _positive_resources(pod.spec.resources)
    requirements = [pod_level] if any(pod_level) else [_positive_resources(container.resources) for container in listed]
    if not any(requests or limits for requests, limits in requirements):
        return BEST_EFFORT
    guaranteed = all(
        limits.keys() == {CPU, MEMORY} and all(requests.get(name, limit) == limit for name, limit in limits.items())
        for requests, limits in requirements
    )
    return GUARANTEED if guaranteed else BURSTABLE


def _positive_resources(amounts: KubernetesResources | None) -> tuple[dict[str, Decimal], dict[str, Decimal]]:
    listed = amounts or KubernetesResources()
    requests, limits = (
        {name: value for name in (CPU, MEMORY) if (value := _quantity_or_zero(entries or {}, name))}
        for entries in (listed.requests, listed.limits)
    )
    return requests, limits


def _quantity_or_zero(entries: Mapping[str, object], name: str) -> Decimal:
    try:
        return convert_quantity(entries.get(name, 0))
    except ValueError:
        return Decimal(0)


@cache
def _pod_list_decoder() -> msgspec.json.Decoder[Any]:
    """Return a decoder for a list of at most MAX_PODS raw texts.

    They are fields of a struct that is encoded as a list: msgspec rejects a longer list at the next item, whereas a
    list with a length bound is built first and measured then.
    """
    fields = [(f"at{number}", msgspec.Raw, None) for number in range(MAX_PODS)]
    rows = msgspec.defstruct("Pods", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(msgspec.defstruct("List", [("items", rows | None)]))


def _decode_pod(raw: msgspec.Raw) -> KubeletPod:
    """Decode one pod. Raises ValueError whose text continues after `items[3]`."""
    if len(raw) > MAX_POD_BYTES:
        raise ValueError(f"{_shown_name(raw)}: it has more than {MAX_POD_BYTES >> 20} MiB; make it smaller")
    try:
        pod = _POD.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason, _, where = str(error).partition(" - at `$")
        raise ValueError(f"{printable(where.rstrip('`'), 200)}: {printable(reason, 200)}") from None
    if not is_valid_id(pod.uid):
        raise ValueError(f".metadata.uid: {quote(pod.uid)} is not a uid")
    if not pod.spec.containers:
        raise ValueError(".spec.containers: is empty")
    for field, count, limit in _counts(pod):
        if count > limit:
            raise ValueError(f"{_shown_name(raw)}.{field}: has {count} entries, more than {limit}; remove some")
    spec = pod.spec
    for container in (*spec.containers, *(spec.init_containers or ()), *(spec.ephemeral_containers or ())):
        if not is_valid_id(container.name):
            raise ValueError(f"{_shown_name(raw)}.spec: {quote(container.name)} is not the name of a container")
    return pod


def _counts(pod: KubeletPod) -> tuple[tuple[str, int, int], ...]:
    """Return the fields whose entries cost work in every listing, with their number and the limit."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    return (
        ("metadata.labels", len(metadata.labels or ()), MAX_LABELS),
        ("metadata.annotations", len(metadata.annotations or ()), MAX_LABELS),
        ("spec.containers", len(spec.containers), MAX_CONTAINERS),
        ("spec.initContainers", len(spec.init_containers or ()), MAX_CONTAINERS),
        ("spec.ephemeralContainers", len(spec.ephemeral_containers or ()), MAX_CONTAINERS),
        ("status.containerStatuses", len(status.container_statuses or ()), MAX_CONTAINERS),
        ("status.initContainerStatuses", len(status.init_container_statuses or ()), MAX_CONTAINERS),
        ("status.ephemeralContainerStatuses", len(status.ephemeral_container_statuses or ()), MAX_CONTAINERS),
        ("status.conditions", len(status.conditions or ()), MAX_LABELS),
    )


def _shown_name(raw: msgspec.Raw) -> str:
    """Return ` (namespace/name)` of a pod that is left out; empty if it cannot be read."""
    try:
        metadata = _NAMED_POD.decode(raw).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return f" ({printable(metadata.namespace, MAX_SHOWN_NAME_CHARS)}/{printable(metadata.name, MAX_SHOWN_NAME_CHARS)})"


KUBELET_FIELD_PATHS = PodFieldPaths("metadata", "spec")


class PodEntry(NamedTuple):
    """A pod and its inputs: while they are unchanged, so is the pod."""

    digest: bytes
    cgroups: Mapping[str, str]
    """Cgroups of the running containers, by name."""
    kube: KubeletPod
    pod: Pod


class NodePods(msgspec.Struct, frozen=True, kw_only=True):
    """The node's pods and what is wrong with them."""

    entries: Mapping[str, PodEntry] = {}
    """Entries by uid: running pods, then terminating ones, then those no longer listed."""
    unlisted_pods: Mapping[str, str] = {}
    """Keys by uid of running pods that the kubelet neither lists nor has listed."""
    containers_without_cgroup: frozenset[str] = frozenset()
    """`namespace/name/container` of running containers whose cgroup was not found."""
    problems: tuple[str, ...] = ()

    def pods(self) -> tuple[Pod, ...]:
        """Return the pods by name. Of two with one name, as after a forced deletion, the first of `entries`."""
        named: dict[str, Pod] = {}
        for entry in self.entries.values():
            named.setdefault(entry.pod.key, entry.pod)
        return tuple(named[key] for key in sorted(named))


class PodJoinContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where cgroups are on this node, and how pods are parsed."""

    parsing: PodParsingContext
    exists: CgroupExists
    """Return whether a cgroup exists."""
    cgroup_root: str = "/"


def join_pods(
    listing: KubeletPodList, runtime: RuntimeContainers | None, previous: Mapping[str, PodEntry], node: PodJoinContext
) -> NodePods:
    """Return the node's pods. `runtime` is None without a runtime: then the pods' statuses say what runs."""
    entries: dict[str, PodEntry] = {}
    without_cgroup: set[str] = set()
    problems: list[str] = []
    by_deletion = sorted(listing.items.items(), key=lambda each: each[1].pod.metadata.deleted_at is not None)
    listed = {uid: (item.digest, item.pod) for uid, item in by_deletion}
    unlisted_before = {uid: (entry.digest, entry.kube) for uid, entry in previous.items() if uid not in listed}
    for uid, (digest, kube) in (listed | unlisted_before).items():
        previous_entry = previous.get(uid)
        cgroups, missing = _running_cgroups(
            kube, runtime, previous_entry.cgroups if previous_entry is not None else {}, node
        )
        without_cgroup |= missing
        if not cgroups and (uid in unlisted_before or kube.ended or kube.metadata.deleted_at):
            continue
        if previous_entry is not None and previous_entry.digest == digest and previous_entry.cgroups == cgroups:
            entries[uid] = previous_entry
            continue
        try:
            entries[uid] = PodEntry(digest, cgroups, kube, pod_from_kubelet(kube, cgroups, node.parsing))
        except PodFieldError as error:
            problems.append(f"{kube.metadata.namespace}/{kube.metadata.name}: {error}")
    running = runtime.pods() if runtime is not None else {}
    unlisted = {uid: pod for uid, pod in running.items() if uid not in listed and uid not in entries}
    return NodePods(
        entries=entries,
        unlisted_pods=unlisted,
        containers_without_cgroup=frozenset(without_cgroup),
        problems=tuple(problems),
    )


def pod_from_kubelet(kube: KubeletPod, cgroups: Mapping[str, str], context: PodParsingContext) -> Pod:
    """Return the pod with the containers that have a cgroup, and invalid labels and annotations among its problems.

    Raises PodFieldError for a pod with an invalid name.
    """
    metadata, spec = kube.metadata, kube.spec
    listed, problems = _pod_containers(kube, cgroups)
    pod_resources = _read_resources(spec.resources, (CPU, MEMORY), "resources", problems)
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
        pod = assemble_pod(raw, listed, KUBELET_FIELD_PATHS, context, pod_resources)
    except PodFieldError as error:
        # Protect a pod with invalid annotations: treat it as online work without any.
        pod = assemble_pod(
            msgspec.structs.replace(raw, labels={}, annotations={}), listed, KUBELET_FIELD_PATHS, context, pod_resources
        )
        # Labels and annotations still mark static pods and pods that are never evicted.
        pod = msgspec.structs.replace(pod, labels=raw.labels, annotations=raw.annotations)
        problems.append(f"{error}; until then its labels and annotations are ignored, and it is {pod.qos.value}")
    # The deletion's grace period overrides the pod's own.
    deletion_grace_s = metadata.deletion_grace_s if metadata.deleted_at is not None else None
    grace_s = spec.termination_grace_period_seconds if deletion_grace_s is None else deletion_grace_s
    return msgspec.structs.replace(
        pod,
        uid=kube.uid,
        grace_s=None if grace_s is None else float(max(grace_s, 0)),
        placed_s=placement_time_s(kube.status.conditions or ()),
        terminating=metadata.deleted_at is not None,
        address=scrape_address(kube.status.pod_ip, host_network=bool(spec.host_network)),
        problems=limit_sentences((*problems, *pod.problems), MAX_PROBLEMS),
    )


def _pod_containers(kube: KubeletPod, cgroups: Mapping[str, str]) -> tuple[list[PodContainer], list[str]]:
    """Return regular containers and sidecars, and init and ephemeral containers that run now; and problems."""
    problems: list[str] = []
    containers = [_pod_container(each, cgroups, problems) for each in kube.spec.containers]
    for each in (*(kube.spec.init_containers or ()), *(kube.spec.ephemeral_containers or ())):
        is_transient = each.restart_policy != SIDECAR_POLICY
        if not is_transient or each.name in cgroups:
            containers.append(_pod_container(each, cgroups, problems)._replace(init=True, is_transient=is_transient))
    if kube.is_resize_refused or kube.is_unobserved:
        statuses = {status.name: status for status in kube.status.containers()}
        containers = [
            each._replace(ask=_granted_requests(each, statuses.get(each.name), kube, problems)) for each in containers
        ]
    return containers, problems


def _granted_requests(
    container: PodContainer, status: KubeletContainerStatus | None, kube: KubeletPod, problems: list[str]
) -> ResourceRequirements:
    """Return the requests of a container, none above what the kubelet has granted.

    An owner that may resize a pod in place can write any request into its spec. It stays there while the kubelet refuses it.
    """
    requests = dict(container.ask.requests)
    for resource in (CPU, MEMORY):
        granted = None if status is None else status.granted(resource)
        if granted is None and kube.is_resize_refused:
            granted = Decimal(0)
        if granted is not None and requests.get(resource, 0) > granted:
            problems.append(f"container {container.name}: resources.requests.{resource}: the kubelet has not granted "
                            f"{requests[resource]:f}; until then {granted:f} counts")  # fmt: skip
            requests[resource] = granted
    return ResourceRequirements(requests, container.ask.limits)


def _pod_container(spec: KubernetesContainer, cgroups: Mapping[str, str], problems: list[str]) -> PodContainer:
    ask = _read_resources(spec.resources, KNOWN_RESOURCES, f"container {spec.name}: resources", problems)
    return PodContainer(spec.name, cgroups.get(spec.name, ""), ask, init=False)


def _read_resources(
    listed: KubernetesResources | None, known_resources: Collection[str], path: str, problems: list[str]
) -> ResourceRequirements:
    amounts = listed or KubernetesResources()
    requests = {name: value for name, value in (amounts.requests or {}).items() if name in known_resources}
    # Kubernetes treats a limit of 0 as no limit.
    limits = {
        name: value
        for name, value in (amounts.limits or {}).items()
        if name in known_resources and not ("/" not in name and str(value) == "0")
    }
    try:
        return read_requirements(requests, limits, known_resources, path)
    except PodFieldError as error:
        problems.append(f"{error}; until then its requests are ignored")
        return ResourceRequirements()


def _running_cgroups(
    kube: KubeletPod, runtime: RuntimeContainers | None, previous: Mapping[str, str], node: PodJoinContext
) -> tuple[dict[str, str], set[str]]:
    """Return the cgroups of running containers by name, and the containers without one. `previous` are the
    cgroups of the last call."""
    uid, spec = kube.uid, kube.spec
    reported, running = {}, kube.running()
    cgroups: dict[str, str] = {}
    if runtime is None:
        # Statuses may lag, and there is no other source: keep known cgroups that still exist.
        cgroups = {name: path for name, path in previous.items() if node.exists(path)}
    else:
        kinds = (spec.containers, spec.init_containers or (), spec.ephemeral_containers or ())
        containers = {
            each.name: container
            for kind in kinds
            for each in kind
            if (container := runtime.running.get((uid, each.name))) is not None
        }
        reported = {name: container.cgroup for name, container in containers.items()}
        running = {name: container.id for name, container in containers.items()}
    identity = PodCgroupIdentity(uid, qos_class(kube), node.cgroup_root)
    missing: set[str] = set()
    for name, container_id in running.items():
        previous_path = previous.get(name, "")
        # Try the previous path first: trying every spelling each second costs more than all the rest.
        expected = reported.get(name) or (previous_path if container_id.rpartition("/")[2] in previous_path else "")
        if path := find_container_cgroup(identity, container_id, expected, node.exists):
            cgroups[name] = path
        else:
            missing.add(f"{kube.metadata.namespace}/{kube.metadata.name}/{name}")
    return cgroups, missing
