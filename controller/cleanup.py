"""Removes finalizers, taints and reported resources that agents and controllers wrote, for `dioptase withdraw`.
A finalizer without its controller retains an object for ever; taints and extended resources would mislead schedulers.
The objects themselves are deleted with their definitions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from api.eviction import NODE_TAINTS_ANNOTATION, TAINT_PREFIX, recorded_taints
from api.katalyst.kinds import CONFIG_COLUMNS, KATALYST_KINDS, KatalystKind
from api.overcommit import CONFIG_KEY
from api.text import quote
from controller.kcc import ownership, targets
from controller.kinds import CNRS, KCCS, NODE_GROUP, NODES, ControllerNode
from controller.lifecycle.health_policy import is_own_taint
from controller.overcommit.node_ratios import OWN_KEYS
from controller.reconcile import ignore_missing
from controller.settings import Leftover
from kube.client import KubeClient, ObjectList, RequestBody
from kube.errors import ApiError, ApiUnreachable
from kube.informer import is_kind_missing
from kube.objects import PartialObjectMetadata, ResourceType, TaintedObject, key_of

log = logging.getLogger(__name__)

OWN_FINALIZERS = frozenset((ownership.FINALIZER, targets.FINALIZER, *targets.LEGACY_FINALIZERS))
REPORTED_FIELDS = ("resources", "topologyZone", "nodeMetricStatus")
"""Status fields of a CustomNodeResource that schedulers use and that no agent updates any more."""


class DaemonSetStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Numbers of the nodes that a DaemonSet selects, and of those with a ready pod."""

    desired_number_scheduled: int = 0
    number_ready: int = 0


class DaemonSetProgress(PartialObjectMetadata, frozen=True, kw_only=True):
    """A DaemonSet with the numbers of its pods."""

    status: DaemonSetStatus = DaemonSetStatus()


DAEMON_SETS = ResourceType("apps", "v1", "daemonsets", "DaemonSet", DaemonSetProgress, namespaced=True)
WORKLOADS: Mapping[str, ResourceType[Any]] = {
    "daemonset": DAEMON_SETS,
    "deployment": ResourceType("apps", "v1", "deployments", "Deployment", PartialObjectMetadata, namespaced=True),
}
MAX_ATTEMPTS, RETRY_S = 3, 2.0
"""Attempts of the complete cleanup; each reads objects that were changed meanwhile again."""
MAX_CONCURRENT_PATCHES = 16
POLL_INTERVAL_S = 1.0
READY_SHARE = 0.25
"""Share of the timeout for which agents that are being replaced may become ready, before their DaemonSet is deleted."""

Workload = tuple[ResourceType[Any], str]
"""Resource of WORKLOADS and key of an object."""
PatchStep = tuple[RequestBody, str]
"""Merge patch, and the subresource to patch."""


class ReportedCnr(TaintedObject, frozen=True, kw_only=True):
    """CustomNodeResource with the fields to clean up."""

    status: Mapping[str, Any] = {}


def configuration_steps(target: PartialObjectMetadata) -> list[PatchStep]:
    """Patches that remove this program's finalizers from a configuration object or KatalystCustomConfig."""
    before = target.metadata.finalizers
    after = [name for name in before if name not in OWN_FINALIZERS]
    return [] if len(after) == len(before) else [(_at_version(target, finalizers=after), "")]


def cnr_steps(cnr: ReportedCnr) -> list[PatchStep]:
    """Patches that remove taints and reported fields from a CustomNodeResource."""
    before, steps = cnr.spec.taints, list[PatchStep]()
    after = [taint for taint in before if not is_own_taint(taint) and not _is_eviction_taint(taint)]
    if len(after) < len(before):
        steps.append(({**_at_version(cnr), "spec": {"taints": after}}, ""))
    if reported := [name for name in REPORTED_FIELDS if name in cnr.status]:
        steps.append(({"status": dict.fromkeys(reported)}, "status"))
    return steps


def node_steps(node: ControllerNode) -> list[PatchStep]:
    """Return patches that remove recorded taints, extended resources and overcommit ratios from a Node."""
    # Ratios last: the taints' patch requires the version that was read.
    return [*(patch for steps in NODE_STEPS.values() for patch in steps(node)), *_ratio_steps(node)]


def _taint_steps(node: ControllerNode) -> list[PatchStep]:
    # A stock Katalyst agent writes taints with the same prefix, so only taints that our agents recorded are removed.
    recorded = recorded_taints(node.metadata.annotations)
    if not recorded:
        return []
    after = [taint for taint in node.spec.taints if (taint.get("key"), taint.get("effect")) not in recorded]
    return [({**_at_version(node, annotations={NODE_TAINTS_ANNOTATION: None}), "spec": {"taints": after}}, "")]


def _resource_steps(node: ControllerNode) -> list[PatchStep]:
    removed = dict.fromkeys(node.reclaimed_resources)
    return [({"status": {"capacity": removed, "allocatable": removed}}, "status")] if removed else []


def _ratio_steps(node: ControllerNode) -> list[PatchStep]:
    # Without this annotation, an administrator or a stock Katalyst controller wrote the ratios.
    if CONFIG_KEY not in node.metadata.annotations:
        return []
    removed = {key: None for key in OWN_KEYS if key in node.metadata.annotations}
    return [({"metadata": {"annotations": removed}}, "")]


NODE_STEPS: Mapping[Leftover, Callable[[ControllerNode], list[PatchStep]]] = {
    "eviction-taints": _taint_steps,
    "reclaimed-resources": _resource_steps,
}
"""Patches that remove one kind of leftover from a Node."""


def _is_eviction_taint(taint: Mapping[str, Any]) -> bool:
    return str(taint.get("key", "")).startswith(TAINT_PREFIX)


def parse_workload(text: str) -> Workload:
    """Parse KIND/NAMESPACE/NAME into resource and key. Raises ValueError."""
    kind, _, key = text.partition("/")
    if kind not in WORKLOADS or len(key.split("/")) != 2:
        raise ValueError(
            f"{quote(text, 200)} is invalid; write {' or '.join(f'{kind}/NAMESPACE/NAME' for kind in WORKLOADS)}"
        )
    WORKLOADS[kind].path(key)
    return WORKLOADS[kind], key


async def delete_workloads(client: KubeClient, workloads: Iterable[Workload], timeout_s: float) -> list[str]:
    """Delete the workloads and wait for their pods, which restore what they wrote when they end; return what failed, and why.

    Pods that remain after the timeout, as on an unreachable node, are logged. Agents that are being replaced have left changed
    values in force, and only an agent on the node can restore them. So the function first waits until the new agents are ready.
    """
    start_s, failures, deleted = time.monotonic(), list[str](), list[Workload]()
    deadline_s = start_s + timeout_s
    for resource, key in workloads:
        if resource is DAEMON_SETS:
            await _wait_until_ready(client, key, start_s + READY_SHARE * timeout_s)
        try:
            await ignore_missing(client.delete(resource, key, foreground=True))
            deleted.append((resource, key))
        except (ApiError, ApiUnreachable) as error:
            failures.append(f"{resource.plural} {key}: {error}")
    for resource, key in deleted:
        if not await _wait_until_deleted(client, resource, key, deadline_s):
            log.warning("%s %s: its pods remain after %g s and may write again", resource.plural, key, timeout_s)
    return failures


async def remove_written_fields(client: KubeClient) -> list[str]:
    """Clean up all objects; return what failed, and why. A kind that is not installed has no objects."""
    failures: list[str] = []
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            await asyncio.sleep(RETRY_S)
        failures = []
        for resource, steps in cleanup_steps():
            failures += await _clean_resource(client, resource, steps)
        if not failures:
            break
    return failures


def cleanup_steps() -> Iterator[tuple[ResourceType[Any], Callable[[Any], Sequence[PatchStep]]]]:
    """Resources to clean up, with the function that computes the patches of an object."""
    yield msgspec.structs.replace(KCCS, type=PartialObjectMetadata), configuration_steps
    for kind in KATALYST_KINDS:
        if _is_configuration(kind):
            resource = ResourceType(
                kind.group,
                kind.versions[-1].name,
                kind.plural,
                kind.kind,
                PartialObjectMetadata,
                namespaced=kind.scope == "Namespaced",
            )
            yield resource, configuration_steps
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
    limit = asyncio.Semaphore(MAX_CONCURRENT_PATCHES)

    async def clean(key: str, patches: Sequence[PatchStep]) -> str:
        try:
            async with limit:
                for body, subresource in patches:
                    await ignore_missing(client.merge_patch(resource, key, body, subresource))
        except (ApiError, ApiUnreachable) as error:
            return f"{resource.plural} {key}: {error}"
        return ""

    requests: list[Awaitable[str]] = [
        clean(key_of(object_.metadata), patches) for object_ in listing.objects.values() if (patches := steps(object_))
    ]
    unread = [f"{resource.plural} {key}: cannot be read: {why}" for key, why in sorted(listing.problems.items())]
    return [*unread, *(failure for failure in await asyncio.gather(*requests) if failure)]


async def _list_if_installed(client: KubeClient, resource: ResourceType[Any]) -> ObjectList[Any] | None:
    """All objects of a kind; None if the API server does not have the kind. Raises ApiError or ApiUnreachable."""
    try:
        return await client.list(resource)
    except ApiError as error:
        if error.status == 404 and await is_kind_missing(client, resource):
            return None
        raise


async def _wait_until_ready(client: KubeClient, key: str, deadline_s: float) -> None:
    """Wait until every node of the DaemonSet has a ready pod. Nodes that have none at the deadline are logged."""
    while True:
        try:
            daemon_set = await client.get(DAEMON_SETS, key)
        except (ApiError, ApiUnreachable):
            return  # the deletion reports the error
        status = daemon_set.status
        missing = status.desired_number_scheduled - status.number_ready
        if missing <= 0 or daemon_set.metadata.deletion_timestamp is not None:
            return
        if time.monotonic() >= deadline_s:
            log.warning(
                "daemonsets %s: %d nodes have no ready pod. If values of an earlier agent are in force there, run "
                "`dioptase reset` on these nodes", key, missing,
            )  # fmt: skip
            return
        await asyncio.sleep(POLL_INTERVAL_S)


async def _wait_until_deleted(client: KubeClient, resource: ResourceType[Any], key: str, deadline_s: float) -> bool:
    while True:
        try:
            await client.get(resource, key)
        except ApiError as error:
            if error.missing:
                return True
        except ApiUnreachable:
            pass  # try again
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(POLL_INTERVAL_S)


def _at_version(object_: PartialObjectMetadata, **metadata: Any) -> dict[str, Any]:
    # A merge patch replaces lists as a whole, so it must fail if the object has changed.
    return {"metadata": {"resourceVersion": object_.metadata.resource_version, **metadata}}
