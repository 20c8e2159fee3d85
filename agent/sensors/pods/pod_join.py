"""Decodes the kubelet's pod list and joins it with the runtime's running containers into the node's pods. Pure.
A pod exists from the moment the kubelet lists it and remains while any of its containers runs: a restarted kubelet
lists nothing for a while. Pods are decoded only when the digest of their text changes, because the kubelet's order
varies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
from agent.sensors.pods.pod_spec import (
    KNOWN_RESOURCES,
    SIDECAR_POLICY,
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


class RunningContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One container that runs."""

    pod_uid: str
    pod: str
    """`namespace/name`."""
    name: str
    id: str
    created_at_ns: int
    cgroup: str = ""
    """Below the root of every controller, as the runtime tells it; empty where it does not, or was not asked yet."""


class RuntimeContainers(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the runtime gave: of two containers of one pod with one name the newer."""

    running: Mapping[tuple[str, str], RunningContainer] = {}
    """By uid of the pod and name."""
    sandboxes: frozenset[str] = frozenset()
    """Uids of the pods whose sandbox is up, with containers or without."""

    def pods(self) -> Mapping[str, str]:
        """`namespace/name` of the pods of which some container runs, by uid."""
        return {one.pod_uid: one.pod for one in self.running.values()}


MAX_PODS = 4096
MAX_POD_LIST_BYTES = 64 << 20
"""Of an answer: a thousand pods with long annotations and statuses have 15 MB."""
MAX_POD_BYTES = 4 << 20
"""The API server takes no more than 1.5 MiB, or what it is set to, in a form that is shorter than JSON."""
MIRROR_ANNOTATION, SOURCE_ANNOTATION = "kubernetes.io/config.mirror", "kubernetes.io/config.source"
SOURCE_API = "api"
TERMINAL_PHASES = ("Succeeded", "Failed")
DIGEST_BYTES = 16
_MAX_PROBLEMS_SHOWN = 3


class InvalidPodList(ValueError):
    """What came is no list of pods; the text says what is wrong with it, and where."""


class KubeletPodMetadata(msgspec.Struct, frozen=True):
    name: str
    uid: str
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deleted_at: str | None = msgspec.field(name="deletionTimestamp", default=None)
    deletion_grace_s: int | None = msgspec.field(name="deletionGracePeriodSeconds", default=None)


class KubeletResources(msgspec.Struct, frozen=True):
    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None


class KubeletContainerSpec(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resources: KubeletResources | None = None
    restart_policy: str | None = None


class KubeletPodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[KubeletContainerSpec]
    init_containers: list[KubeletContainerSpec] | None = None
    ephemeral_containers: list[KubeletContainerSpec] | None = None
    priority: int | None = None
    termination_grace_period_seconds: int | None = None
    priority_class_name: str | None = None
    resources: KubeletResources | None = None
    """Of the pod as a whole."""
    host_network: bool | None = None


class ContainerStateRunning(msgspec.Struct, frozen=True):
    """That it does; since when nobody asks."""


class ContainerState(msgspec.Struct, frozen=True):
    running: ContainerStateRunning | None = None


class KubeletContainerStatus(msgspec.Struct, frozen=True):
    name: str
    id: str = msgspec.field(name="containerID", default="")
    state: ContainerState | None = None


class KubeletPodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str | None = None
    qos_class: str | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    container_statuses: list[KubeletContainerStatus] | None = None
    init_container_statuses: list[KubeletContainerStatus] | None = None
    ephemeral_container_statuses: list[KubeletContainerStatus] | None = None


class KubeletPod(msgspec.Struct, frozen=True):
    """A pod as the kubelet tells it."""

    metadata: KubeletPodMetadata
    spec: KubeletPodSpec
    status: KubeletPodStatus = KubeletPodStatus()

    @property
    def uid(self) -> str:
        """What cgroups and the runtime know it by: of the mirror of a static pod, which the API server made, the hash that is
        the static pod's own uid."""
        return (self.metadata.annotations or {}).get(MIRROR_ANNOTATION, self.metadata.uid)

    @property
    def from_api(self) -> bool:
        """Not from a file on this node. The kubelet has those from its start, and others when the API server told it."""
        annotations = self.metadata.annotations or {}
        return annotations.get(SOURCE_ANNOTATION, SOURCE_API) == SOURCE_API and MIRROR_ANNOTATION not in annotations

    @property
    def over(self) -> bool:
        """Whether all its containers have ended for good."""
        return self.status.phase in TERMINAL_PHASES

    def running(self) -> dict[str, str]:
        """Ids of the containers that run, by name, as the status has them: the API server's word, so that it may be late."""
        status = self.status
        listed = (status.container_statuses, status.init_container_statuses, status.ephemeral_container_statuses)
        return {
            one.name: one.id
            for statuses in listed
            for one in statuses or ()
            if one.id and one.state is not None and one.state.running is not None
        }


class KubeletPodItem(msgspec.Struct, frozen=True):
    """One pod and the digest of the text that said it."""

    digest: bytes
    pod: KubeletPod


class KubeletPodList(msgspec.Struct, frozen=True):
    """Everything that the kubelet listed: pods by uid, and what could not be read, as sentences."""

    items: Mapping[str, KubeletPodItem] = {}
    problems: tuple[str, ...] = ()


_POD = msgspec.json.Decoder(KubeletPod)


def decode_pod_list(body: bytes, before: KubeletPodList) -> KubeletPodList:
    """The listing in these bytes; pods whose text was in the one before are not decoded again.

    Raises Garbage for what is no list. A pod that cannot be read is left out, and told.
    """
    if len(body) > MAX_POD_LIST_BYTES:
        raise InvalidPodList(f"it has more than {MAX_POD_LIST_BYTES >> 20} MiB")
    try:
        rows = _pod_list_decoder().decode(body).items
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidPodList(f"it is no list of pods: {error!s:.200}") from None
    raws = () if rows is None else tuple(takewhile(lambda raw: raw is not None, msgspec.structs.astuple(rows)))
    known = {item.digest: item for item in before.items.values()}
    found: list[KubeletPodItem] = []
    problems: list[str] = []
    for index, raw in enumerate(raws):
        digest = blake2b(raw, digest_size=DIGEST_BYTES).digest()
        item = known.get(digest)
        if item is None:
            try:
                item = KubeletPodItem(digest, _decode_pod(raw))
            except ValueError as error:
                problems.append(f"items[{index}]{error}")
                continue
        found.append(item)
    # A mirror beside its own static pod says nothing more.
    found.sort(key=lambda item: MIRROR_ANNOTATION in (item.pod.metadata.annotations or {}))
    items: dict[str, KubeletPodItem] = {}
    for item in found:
        items.setdefault(item.pod.uid, item)
    more = [f"and {len(problems) - _MAX_PROBLEMS_SHOWN} more"] if len(problems) > _MAX_PROBLEMS_SHOWN else []
    return KubeletPodList(items, (*problems[:_MAX_PROBLEMS_SHOWN], *more))


def qos_class(pod: KubeletPod) -> str:
    """As the kubelet judges it where the status does not say: by CPU and memory of all containers but ephemeral ones."""
    if pod.status.qos_class in (GUARANTEED, BURSTABLE, BEST_EFFORT):
        return pod.status.qos_class
    listed = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    whole = _positive_resources(pod.spec.resources)
    asks = [whole] if any(whole) else [_positive_resources(container.resources) for container in listed]
    if not any(requests or limits for requests, limits in asks):
        return BEST_EFFORT
    guaranteed = all(
        limits.keys() == {CPU, MEMORY} and all(requests.get(name, limit) == limit for name, limit in limits.items())
        for requests, limits in asks
    )
    return GUARANTEED if guaranteed else BURSTABLE


def _positive_resources(amounts: KubeletResources | None) -> tuple[dict[str, object], dict[str, object]]:
    listed = amounts or KubeletResources()
    requests, limits = (
        {name: value for name in (CPU, MEMORY) if (value := _quantity_or_zero(entries or {}, name))}
        for entries in (listed.requests, listed.limits)
    )
    return requests, limits


def _quantity_or_zero(entries: Mapping[str, object], name: str) -> object:
    try:
        return convert_quantity(entries.get(name, 0))
    except ValueError:
        return 0


@cache
def _pod_list_decoder() -> msgspec.json.Decoder[Any]:
    """Of a list of at most MOST_PODS texts. They are the fields of a struct that is written as a list: one that goes on is
    refused right there, where a list with a bound is made first, and measured then."""
    fields = [(f"at{number}", msgspec.Raw, None) for number in range(MAX_PODS)]
    rows = msgspec.defstruct("Pods", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(msgspec.defstruct("List", [("items", rows | None)]))


def _decode_pod(raw: msgspec.Raw) -> KubeletPod:
    """Raises ValueError that goes on where `items[3]` ends."""
    if len(raw) > MAX_POD_BYTES:
        raise ValueError(f": it has more than {MAX_POD_BYTES >> 20} MiB")
    try:
        pod = _POD.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason, _, where = str(error).partition(" - at `$")
        raise ValueError(f"{where.rstrip('`')}: {reason[:200]}") from None
    if not is_valid_id(pod.uid):
        raise ValueError(f".metadata.uid: {pod.uid[:80]!r} is no uid")
    if not pod.spec.containers:
        raise ValueError(".spec.containers: there are none")
    return pod


KUBELET_FIELD_PATHS = PodFieldPaths("metadata", "spec")


class PodEntry(NamedTuple):
    """A pod, and what it was made of: as long as that stays, so does the pod."""

    digest: bytes
    cgroups: Mapping[str, str]
    """Of the containers that run, by name."""
    kube: KubeletPod
    pod: Pod


class NodePods(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the node's pods."""

    entries: Mapping[str, PodEntry] = {}
    """By uid: those that are to stay, those that are to go, those that are gone from the list."""
    unlisted_pods: Mapping[str, str] = {}
    """`namespace/name`, by uid, of pods that run and that the kubelet neither lists nor has listed."""
    containers_without_cgroup: frozenset[str] = frozenset()
    """`namespace/name/container` of those that run and whose cgroup was not found."""
    problems: tuple[str, ...] = ()

    def pods(self) -> tuple[Pod, ...]:
        """By name. Of two with one name, as after a deletion by force, the one that comes first among the entries."""
        named: dict[str, Pod] = {}
        for entry in self.entries.values():
            named.setdefault(entry.pod.key, entry.pod)
        return tuple(named[key] for key in sorted(named))


class PodJoinContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where cgroups are on this node, and what its settings say of pods."""

    door: PodParsingContext
    exists: CgroupExists
    """Whether there is a cgroup at a path."""
    cgroup_root: str = "/"


def join_pods(
    listing: KubeletPodList, runtime: RuntimeContainers | None, previous: Mapping[str, PodEntry], node: PodJoinContext
) -> NodePods:
    """The node's pods. `looked` is None where no runtime tells: then the pods' statuses say what runs."""
    entries: dict[str, PodEntry] = {}
    homeless: set[str] = set()
    problems: list[str] = []
    inside = sorted(listing.items.items(), key=lambda each: each[1].pod.metadata.deleted_at is not None)
    listed = {uid: (item.digest, item.pod) for uid, item in inside}
    left = {uid: (entry.digest, entry.kube) for uid, entry in previous.items() if uid not in listed}
    for uid, (digest, kube) in (listed | left).items():
        known = previous.get(uid)
        cgroups, lost = _running_cgroups(kube, runtime, known.cgroups if known is not None else {}, node)
        homeless |= lost
        if not cgroups and (uid in left or kube.over or kube.metadata.deleted_at):
            continue
        if known is not None and known.digest == digest and known.cgroups == cgroups:
            entries[uid] = known
            continue
        try:
            entries[uid] = PodEntry(digest, cgroups, kube, pod_from_kubelet(kube, cgroups, node.door))
        except PodFieldError as error:
            problems.append(f"{kube.metadata.namespace}/{kube.metadata.name}: {error}")
    running = runtime.pods() if runtime is not None else {}
    unlisted = {uid: pod for uid, pod in running.items() if uid not in listed and uid not in entries}
    return NodePods(
        entries=entries, unlisted_pods=unlisted, containers_without_cgroup=frozenset(homeless), problems=tuple(problems)
    )


def pod_from_kubelet(kube: KubeletPod, cgroups: Mapping[str, str], context: PodParsingContext) -> Pod:
    """The pod as everybody else knows it, with the containers that have a cgroup. What of its labels and annotations cannot be
    is among its problems: it is a pod all the same. Raises FieldError for a pod that has a name which cannot be one."""
    metadata, spec = kube.metadata, kube.spec
    listed, problems = _pod_containers(kube, cgroups)
    together = _read_resources(spec.resources, (CPU, MEMORY), "resources", problems)
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
        pod = assemble_pod(raw, listed, KUBELET_FIELD_PATHS, context, together)
    except PodFieldError as error:
        # Whoever cannot be understood is protected: as online work that says nothing of itself.
        pod = assemble_pod(
            msgspec.structs.replace(raw, labels={}, annotations={}), listed, KUBELET_FIELD_PATHS, context, together
        )
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
        terminating=metadata.deleted_at is not None,
        address=scrape_address(kube.status.pod_ip, host_network=bool(spec.host_network)),
        problems=(*problems, *pod.problems),
    )


def _pod_containers(kube: KubeletPod, cgroups: Mapping[str, str]) -> tuple[list[PodContainer], list[str]]:
    """Containers that stay, whether they run or not, and of those that do not (init, ephemeral) the ones that run now."""
    problems: list[str] = []
    found = [_pod_container(each, cgroups, problems) for each in kube.spec.containers]
    for each in (*(kube.spec.init_containers or ()), *(kube.spec.ephemeral_containers or ())):
        passes = each.restart_policy != SIDECAR_POLICY
        if not passes or each.name in cgroups:
            found.append(_pod_container(each, cgroups, problems)._replace(init=True, is_transient=passes))
    return found, problems


def _pod_container(spec: KubeletContainerSpec, cgroups: Mapping[str, str], problems: list[str]) -> PodContainer:
    ask = _read_resources(spec.resources, KNOWN_RESOURCES, f"container {spec.name}: resources", problems)
    return PodContainer(spec.name, cgroups.get(spec.name, ""), ask, init=False)


def _read_resources(
    listed: KubeletResources | None, known: Collection[str], path: str, problems: list[str]
) -> ResourceRequirements:
    amounts = listed or KubeletResources()
    requests = {name: value for name, value in (amounts.requests or {}).items() if name in known}
    # Kubernetes takes a limit of nothing for none.
    limits = {
        name: value
        for name, value in (amounts.limits or {}).items()
        if name in known and not ("/" not in name and str(value) == "0")
    }
    try:
        return read_requirements(requests, limits, known, path)
    except PodFieldError as error:
        problems.append(f"{error}; until then it asks for nothing")
        return ResourceRequirements()


def _running_cgroups(
    kube: KubeletPod, looked: RuntimeContainers | None, known: Mapping[str, str], node: PodJoinContext
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
    home = PodCgroupIdentity(uid, qos_class(kube), node.cgroup_root)
    lost: set[str] = set()
    for name, container_id in running.items():
        before = known.get(name, "")
        # Where it was is where it is: to try every spelling each second costs more than all the rest.
        likely = told.get(name) or (before if container_id.rpartition("/")[2] in before else "")
        if path := find_container_cgroup(home, container_id, likely, node.exists):
            cgroups[name] = path
        else:
            lost.add(f"{kube.metadata.namespace}/{kube.metadata.name}/{name}")
    return cgroups, lost
