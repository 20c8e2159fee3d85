"""The kubelet's answer to `GET /pods`, decoded: what is read of each pod, and nothing of what is not. Pure.

The kubelet lists its pods in another order each time (it walks a map), so that two answers that say the same differ: pods
are told apart one by one, by the digest of their text, and decoded only when that is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import msgspec

from agent.sense.cgroup_paths import BEST_EFFORT, BURSTABLE, GUARANTEED, plain
from agent.sense.resources import CPU, MEMORY
from api.quantities import read_quantity

MOST_PODS = 4096
LARGEST_BYTES = 64 << 20
"""Of an answer: a thousand pods with long annotations and statuses have 15 MB."""
LARGEST_POD_BYTES = 4 << 20
"""The API server takes no more than 1.5 MiB, or what it is set to, in a form that is shorter than JSON."""
MIRROR, SOURCE = "kubernetes.io/config.mirror", "kubernetes.io/config.source"
FROM_API = "api"
OVER = ("Succeeded", "Failed")
DIGEST_BYTES = 16
_NAMED = 3


class Garbage(ValueError):
    """What came is no list of pods; the text says what is wrong with it, and where."""


class Metadata(msgspec.Struct, frozen=True):
    name: str
    uid: str
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deleted_at: str | None = msgspec.field(name="deletionTimestamp", default=None)
    deletion_grace_s: int | None = msgspec.field(name="deletionGracePeriodSeconds", default=None)


class Amounts(msgspec.Struct, frozen=True):
    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None


class ContainerSpec(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resources: Amounts | None = None
    restart_policy: str | None = None


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[ContainerSpec]
    init_containers: list[ContainerSpec] | None = None
    ephemeral_containers: list[ContainerSpec] | None = None
    priority: int | None = None
    termination_grace_period_seconds: int | None = None
    priority_class_name: str | None = None
    resources: Amounts | None = None
    """Of the pod as a whole."""
    host_network: bool | None = None


class Running(msgspec.Struct, frozen=True):
    """That it does; since when nobody asks."""


class State(msgspec.Struct, frozen=True):
    running: Running | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    name: str
    id: str = msgspec.field(name="containerID", default="")
    state: State | None = None


class Status(msgspec.Struct, frozen=True, rename="camel"):
    phase: str | None = None
    qos_class: str | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    ephemeral_container_statuses: list[ContainerStatus] | None = None


class KubePod(msgspec.Struct, frozen=True):
    """A pod as the kubelet tells it."""

    metadata: Metadata
    spec: Spec
    status: Status = Status()

    @property
    def uid(self) -> str:
        """What cgroups and the runtime know it by: of the mirror of a static pod, which the API server made, the hash that is
        the static pod's own uid."""
        return (self.metadata.annotations or {}).get(MIRROR, self.metadata.uid)

    @property
    def from_api(self) -> bool:
        """Not from a file on this node. The kubelet has those from its start, and others when the API server told it."""
        annotations = self.metadata.annotations or {}
        return annotations.get(SOURCE, FROM_API) == FROM_API and MIRROR not in annotations

    @property
    def over(self) -> bool:
        """Whether all its containers have ended for good."""
        return self.status.phase in OVER

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


class Item(msgspec.Struct, frozen=True):
    """One pod and the digest of the text that said it."""

    digest: bytes
    pod: KubePod


class Listing(msgspec.Struct, frozen=True):
    """Everything that the kubelet listed: pods by uid, and what could not be read, as sentences."""

    items: Mapping[str, Item] = {}
    problems: tuple[str, ...] = ()


_POD = msgspec.json.Decoder(KubePod)


def decode(body: bytes, before: Listing) -> Listing:
    """The listing in these bytes; pods whose text was in the one before are not decoded again.

    Raises Garbage for what is no list. A pod that cannot be read is left out, and told.
    """
    if len(body) > LARGEST_BYTES:
        raise Garbage(f"it has more than {LARGEST_BYTES >> 20} MiB")
    try:
        rows = _list().decode(body).items
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Garbage(f"it is no list of pods: {error!s:.200}") from None
    raws = () if rows is None else tuple(takewhile(lambda raw: raw is not None, msgspec.structs.astuple(rows)))
    known = {item.digest: item for item in before.items.values()}
    found: list[Item] = []
    problems: list[str] = []
    for index, raw in enumerate(raws):
        digest = blake2b(raw, digest_size=DIGEST_BYTES).digest()
        item = known.get(digest)
        if item is None:
            try:
                item = Item(digest, _read(raw))
            except ValueError as error:
                problems.append(f"items[{index}]{error}")
                continue
        found.append(item)
    # A mirror beside its own static pod says nothing more.
    found.sort(key=lambda item: MIRROR in (item.pod.metadata.annotations or {}))
    items: dict[str, Item] = {}
    for item in found:
        items.setdefault(item.pod.uid, item)
    more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
    return Listing(items, (*problems[:_NAMED], *more))


def qos_class(pod: KubePod) -> str:
    """As the kubelet judges it where the status does not say: by CPU and memory of all containers but ephemeral ones."""
    if pod.status.qos_class in (GUARANTEED, BURSTABLE, BEST_EFFORT):
        return pod.status.qos_class
    listed = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    whole = _positive(pod.spec.resources)
    asks = [whole] if any(whole) else [_positive(container.resources) for container in listed]
    if not any(requests or limits for requests, limits in asks):
        return BEST_EFFORT
    guaranteed = all(
        limits.keys() == {CPU, MEMORY} and all(requests.get(name, limit) == limit for name, limit in limits.items())
        for requests, limits in asks
    )
    return GUARANTEED if guaranteed else BURSTABLE


def _positive(amounts: Amounts | None) -> tuple[dict[str, object], dict[str, object]]:
    listed = amounts or Amounts()
    requests, limits = (
        {name: value for name in (CPU, MEMORY) if (value := _amount(entries or {}, name))}
        for entries in (listed.requests, listed.limits)
    )
    return requests, limits


def _amount(entries: Mapping[str, object], name: str) -> object:
    try:
        return read_quantity(entries.get(name, 0))
    except ValueError:
        return 0


@cache
def _list() -> msgspec.json.Decoder[Any]:
    """Of a list of at most MOST_PODS texts. They are the fields of a struct that is written as a list: one that goes on is
    refused right there, where a list with a bound is made first, and measured then."""
    fields = [(f"at{number}", msgspec.Raw, None) for number in range(MOST_PODS)]
    rows = msgspec.defstruct("Pods", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(msgspec.defstruct("List", [("items", rows | None)]))


def _read(raw: msgspec.Raw) -> KubePod:
    """Raises ValueError that goes on where `items[3]` ends."""
    if len(raw) > LARGEST_POD_BYTES:
        raise ValueError(f": it has more than {LARGEST_POD_BYTES >> 20} MiB")
    try:
        pod = _POD.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason, _, where = str(error).partition(" - at `$")
        raise ValueError(f"{where.rstrip('`')}: {reason[:200]}") from None
    if not plain(pod.uid):
        raise ValueError(f".metadata.uid: {pod.uid[:80]!r} is no uid")
    if not pod.spec.containers:
        raise ValueError(".spec.containers: there are none")
    return pod
