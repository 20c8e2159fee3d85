"""Removes finalizers, taints and reported resources that agents and controllers wrote, for `dioptase withdraw`.
A finalizer without its controller keeps an object for ever; taints and extended resources would mislead schedulers.
The objects themselves are deleted with their definitions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from api.eviction import TAINT_PREFIX
from api.katalyst.kinds import CONFIG_COLUMNS, KATALYST_KINDS, KatalystKind
from controller.kcc import ownership, targets
from controller.kinds import CNRS, KCCS, NODE_GROUP, NODES, ControllerCnrSpec, ControllerNode
from controller.lifecycle.health_policy import is_own_taint
from controller.reconcile import ignore_missing
from kube.client import KubeClient, ObjectList, RequestBody
from kube.errors import ApiError, ApiUnreachable
from kube.informer import is_kind_missing
from kube.objects import PartialObjectMetadata, ResourceType, key_of

log = logging.getLogger(__name__)

OWN_FINALIZERS = frozenset((ownership.FINALIZER, targets.FINALIZER, *targets.LEGACY_FINALIZERS))
REPORTED_FIELDS = ("resources", "topologyZone", "nodeMetricStatus")
"""Fields of a CustomNodeResource's status by which others place pods, and that nobody keeps true any more."""
WORKLOADS = {
    "daemonset": ResourceType("apps", "v1", "daemonsets", "DaemonSet", PartialObjectMetadata, namespaced=True),
    "deployment": ResourceType("apps", "v1", "deployments", "Deployment", PartialObjectMetadata, namespaced=True),
}
MAX_ATTEMPTS, RETRY_S = 3, 2.0
"""Of all of it: whoever wrote an object meanwhile is read anew."""
MAX_CONCURRENT_PATCHES = 16
POLL_INTERVAL_S = 1.0

Workload = tuple[ResourceType[PartialObjectMetadata], str]
"""A kind of WORKLOADS, and the key of one."""
PatchStep = tuple[RequestBody, str]
"""A merge patch, and the subresource that it is of."""


class ReportedCnr(PartialObjectMetadata, frozen=True, kw_only=True):
    """CustomNodeResource, as far as something of it is to go."""

    spec: ControllerCnrSpec = ControllerCnrSpec()
    status: Mapping[str, Any] = {}


def configuration_steps(found: PartialObjectMetadata) -> list[PatchStep]:
    """What is ours of a configuration, or of a KatalystCustomConfig."""
    before = found.metadata.finalizers
    kept = [each for each in before if each not in OWN_FINALIZERS]
    return [] if len(kept) == len(before) else [(_at_version(found, finalizers=kept), "")]


def cnr_steps(found: ReportedCnr) -> list[PatchStep]:
    """The same of a CustomNodeResource."""
    before, steps = found.spec.taints, list[PatchStep]()
    kept = [each for each in before if not is_own_taint(each) and not str(each.get("key", "")).startswith(TAINT_PREFIX)]
    if len(kept) < len(before):
        steps.append(({**_at_version(found), "spec": {"taints": kept}}, ""))
    if said := [name for name in REPORTED_FIELDS if name in found.status]:
        steps.append(({"status": dict.fromkeys(said)}, "status"))
    return steps


def node_steps(found: ControllerNode) -> list[PatchStep]:
    """The same of a Node."""
    before, steps = found.spec.taints, list[PatchStep]()
    kept = [each for each in before if not str(each.get("key", "")).startswith(TAINT_PREFIX)]
    if len(kept) < len(before):
        steps.append(({**_at_version(found), "spec": {"taints": kept}}, ""))
    if nothing := dict.fromkeys(found.lent):
        steps.append(({"status": {"capacity": nothing, "allocatable": nothing}}, "status"))
    return steps


def parse_workload(text: str) -> Workload:
    """KIND/NAMESPACE/NAME, as the resource and its key. Raises ValueError."""
    kind, _, key = text.partition("/")
    if kind not in WORKLOADS or len(key.split("/")) != 2:
        raise ValueError(f"{text!r:.200} is none; write {' or '.join(f'{kind}/NAMESPACE/NAME' for kind in WORKLOADS)}")
    WORKLOADS[kind].path(key)
    return WORKLOADS[kind], key


async def delete_workloads(client: KubeClient, workloads: Iterable[Workload], timeout_s: float) -> list[str]:
    """Delete them and wait until their pods are gone too, which until then take back themselves what they wrote; those that
    could not be deleted, with why. Who is there after that time, as on a node that nobody reaches, is told of in the log."""
    until_s, refused, going = time.monotonic() + timeout_s, list[str](), list[Workload]()
    for resource, key in workloads:
        try:
            await ignore_missing(client.delete(resource, key, foreground=True))
            going.append((resource, key))
        except (ApiError, ApiUnreachable) as error:
            refused.append(f"{resource.plural} {key}: {error}")
    for resource, key in going:
        if not await _wait_until_deleted(client, resource, key, until_s):
            log.warning("%s %s: pods of it are there after %g s, and may write again", resource.plural, key, timeout_s)
    return refused


async def remove_written_fields(client: KubeClient) -> list[str]:
    """Everywhere; what could not be taken back, with why. A kind that is not installed has nothing."""
    left: list[str] = []
    for tries in range(MAX_ATTEMPTS):
        if tries:
            await asyncio.sleep(RETRY_S)
        left = []
        for resource, steps in cleanup_steps():
            left += await _clean_resource(client, resource, steps)
        if not left:
            break
    return left


def cleanup_steps() -> Iterator[tuple[ResourceType[Any], Callable[[Any], Sequence[PatchStep]]]]:
    """Every kind that has something of ours, with what says what of an object."""
    yield msgspec.structs.replace(KCCS, type=PartialObjectMetadata), configuration_steps
    for kind in KATALYST_KINDS:
        if _is_configuration(kind):
            named = kind.scope == "Namespaced"
            yield (
                ResourceType(
                    kind.group, kind.versions[-1].name, kind.plural, kind.kind, PartialObjectMetadata, namespaced=named
                ),
                configuration_steps,
            )
    yield ResourceType(NODE_GROUP, CNRS.version, CNRS.plural, CNRS.kind, ReportedCnr), cnr_steps
    yield NODES, node_steps


def _is_configuration(kind: KatalystKind) -> bool:
    return any(version.columns is CONFIG_COLUMNS for version in kind.versions)


async def _clean_resource(
    client: KubeClient, resource: ResourceType[Any], steps: Callable[[Any], Sequence[PatchStep]]
) -> list[str]:
    try:
        listing = await _list_if_installed(client, resource)
    except (ApiError, ApiUnreachable) as error:
        return [f"{resource.plural}: {error}"]
    if listing is None:
        return []
    at_once = asyncio.Semaphore(MAX_CONCURRENT_PATCHES)

    async def take_back(key: str, wanted: Sequence[PatchStep]) -> str:
        try:
            async with at_once:
                for body, part in wanted:
                    await ignore_missing(client.merge_patch(resource, key, body, part))
        except (ApiError, ApiUnreachable) as error:
            return f"{resource.plural} {key}: {error}"
        return ""

    told: list[Awaitable[str]] = [
        take_back(key_of(found.metadata), wanted) for found in listing.objects.values() if (wanted := steps(found))
    ]
    unread = [f"{resource.plural} {key}: cannot be read: {why}" for key, why in sorted(listing.problems.items())]
    return [*unread, *(each for each in await asyncio.gather(*told) if each)]


async def _list_if_installed(client: KubeClient, resource: ResourceType[Any]) -> ObjectList[Any] | None:
    """All of a kind; None where the API server says that it has no such kind. Raises ApiError or Unreachable."""
    try:
        return await client.list(resource)
    except ApiError as error:
        if error.status == 404 and await is_kind_missing(client, resource):
            return None
        raise


async def _wait_until_deleted(
    client: KubeClient, resource: ResourceType[PartialObjectMetadata], key: str, until_s: float
) -> bool:
    while True:
        try:
            await client.get(resource, key)
        except ApiError as error:
            if error.missing:
                return True
        except ApiUnreachable:
            pass  # it is asked again
        if time.monotonic() >= until_s:
            return False
        await asyncio.sleep(POLL_INTERVAL_S)


def _at_version(found: PartialObjectMetadata, **metadata: Any) -> dict[str, Any]:
    """A list is replaced whole: as of the version that was read."""
    return {"metadata": {"resourceVersion": found.metadata.resource_version, **metadata}}
