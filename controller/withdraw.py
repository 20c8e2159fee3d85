"""Take back what agents and controllers wrote to the API server, once nobody is there any more to do it.

A finalizer whose controller is gone keeps its object for ever, and a taint or a promise of a node that nobody lends on goes on
to lead schedulers. The objects themselves stay: they go with their definitions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from api.crds.kinds import CONFIG_COLUMNS, KINDS, Kind
from api.evictions import TAINT_PREFIX
from controller.kcc import owners, targets
from controller.kinds import CNRS, KCCS, NODE_GROUP, NODES, CnrSpec, Node
from controller.lifecycle.health import is_ours
from controller.working import settled
from kube.client import Body, Client, Listing
from kube.discovery import lacks
from kube.errors import ApiError, Unreachable
from kube.objects import Bare, Resource, key_of

log = logging.getLogger(__name__)

FINALIZERS = frozenset((owners.FINALIZER, targets.FINALIZER, *targets.OLD_FINALIZERS))
REPORTED = ("resources", "topologyZone", "nodeMetricStatus")
"""Fields of a CustomNodeResource's status by which others place pods, and that nobody keeps true any more."""
WORKLOADS = {
    "daemonset": Resource("apps", "v1", "daemonsets", "DaemonSet", Bare, namespaced=True),
    "deployment": Resource("apps", "v1", "deployments", "Deployment", Bare, namespaced=True),
}
TRIES, AGAIN_S = 3, 2.0
"""Of all of it: whoever wrote an object meanwhile is read anew."""
AT_ONCE = 16
LOOK_S = 1.0

Workload = tuple[Resource[Bare], str]
"""A kind of WORKLOADS, and the key of one."""
Step = tuple[Body, str]
"""A merge patch, and the subresource that it is of."""


class Cnr(Bare, frozen=True, kw_only=True):
    """CustomNodeResource, as far as something of it is to go."""

    spec: CnrSpec = CnrSpec()
    status: Mapping[str, Any] = {}


def of_configuration(found: Bare) -> list[Step]:
    """What is ours of a configuration, or of a KatalystCustomConfig."""
    before = found.metadata.finalizers
    kept = [each for each in before if each not in FINALIZERS]
    return [] if len(kept) == len(before) else [(_as_of(found, finalizers=kept), "")]


def of_resource(found: Cnr) -> list[Step]:
    """The same of a CustomNodeResource."""
    before, steps = found.spec.taints, list[Step]()
    kept = [each for each in before if not is_ours(each) and not str(each.get("key", "")).startswith(TAINT_PREFIX)]
    if len(kept) < len(before):
        steps.append(({**_as_of(found), "spec": {"taints": kept}}, ""))
    if said := [name for name in REPORTED if name in found.status]:
        steps.append(({"status": dict.fromkeys(said)}, "status"))
    return steps


def of_node(found: Node) -> list[Step]:
    """The same of a Node."""
    before, steps = found.spec.taints, list[Step]()
    kept = [each for each in before if not str(each.get("key", "")).startswith(TAINT_PREFIX)]
    if len(kept) < len(before):
        steps.append(({**_as_of(found), "spec": {"taints": kept}}, ""))
    if nothing := dict.fromkeys(found.lent):
        steps.append(({"status": {"capacity": nothing, "allocatable": nothing}}, "status"))
    return steps


def workload(text: str) -> Workload:
    """KIND/NAMESPACE/NAME, as the resource and its key. Raises ValueError."""
    kind, _, key = text.partition("/")
    if kind not in WORKLOADS or len(key.split("/")) != 2:
        raise ValueError(f"{text!r:.200} is none; write {' or '.join(f'{kind}/NAMESPACE/NAME' for kind in WORKLOADS)}")
    WORKLOADS[kind].path(key)
    return WORKLOADS[kind], key


async def stop(client: Client, workloads: Iterable[Workload], timeout_s: float) -> list[str]:
    """Delete them and wait until their pods are gone too, which until then take back themselves what they wrote; those that
    could not be deleted, with why. Who is there after that time, as on a node that nobody reaches, is told of in the log."""
    until_s, refused, going = time.monotonic() + timeout_s, list[str](), list[Workload]()
    for resource, key in workloads:
        try:
            await settled(client.delete(resource, key, foreground=True))
            going.append((resource, key))
        except (ApiError, Unreachable) as error:
            refused.append(f"{resource.plural} {key}: {error}")
    for resource, key in going:
        if not await _gone(client, resource, key, until_s):
            log.warning("%s %s: pods of it are there after %g s, and may write again", resource.plural, key, timeout_s)
    return refused


async def withdraw(client: Client) -> list[str]:
    """Everywhere; what could not be taken back, with why. A kind that is not installed has nothing."""
    left: list[str] = []
    for tries in range(TRIES):
        if tries:
            await asyncio.sleep(AGAIN_S)
        left = []
        for resource, steps in everything():
            left += await _of(client, resource, steps)
        if not left:
            break
    return left


def everything() -> Iterator[tuple[Resource[Any], Callable[[Any], Sequence[Step]]]]:
    """Every kind that has something of ours, with what says what of an object."""
    yield msgspec.structs.replace(KCCS, type=Bare), of_configuration
    for kind in KINDS:
        if _is_configuration(kind):
            named = kind.scope == "Namespaced"
            yield (
                Resource(kind.group, kind.versions[-1].name, kind.plural, kind.kind, Bare, namespaced=named),
                of_configuration,
            )
    yield Resource(NODE_GROUP, CNRS.version, CNRS.plural, CNRS.kind, Cnr), of_resource
    yield NODES, of_node


def _is_configuration(kind: Kind) -> bool:
    return any(version.columns is CONFIG_COLUMNS for version in kind.versions)


async def _of(client: Client, resource: Resource[Any], steps: Callable[[Any], Sequence[Step]]) -> list[str]:
    try:
        listing = await _listed(client, resource)
    except (ApiError, Unreachable) as error:
        return [f"{resource.plural}: {error}"]
    if listing is None:
        return []
    at_once = asyncio.Semaphore(AT_ONCE)

    async def take_back(key: str, wanted: Sequence[Step]) -> str:
        try:
            async with at_once:
                for body, part in wanted:
                    await settled(client.merge_patch(resource, key, body, part))
        except (ApiError, Unreachable) as error:
            return f"{resource.plural} {key}: {error}"
        return ""

    told: list[Awaitable[str]] = [
        take_back(key_of(found.metadata), wanted) for found in listing.objects.values() if (wanted := steps(found))
    ]
    unread = [f"{resource.plural} {key}: cannot be read: {why}" for key, why in sorted(listing.problems.items())]
    return [*unread, *(each for each in await asyncio.gather(*told) if each)]


async def _listed(client: Client, resource: Resource[Any]) -> Listing[Any] | None:
    """All of a kind; None where the API server says that it has no such kind. Raises ApiError or Unreachable."""
    try:
        return await client.list(resource)
    except ApiError as error:
        if error.status == 404 and await lacks(client, resource):
            return None
        raise


async def _gone(client: Client, resource: Resource[Bare], key: str, until_s: float) -> bool:
    while True:
        try:
            await client.get(resource, key)
        except ApiError as error:
            if error.missing:
                return True
        except Unreachable:
            pass  # it is asked again
        if time.monotonic() >= until_s:
            return False
        await asyncio.sleep(LOOK_S)


def _as_of(found: Bare, **metadata: Any) -> dict[str, Any]:
    """A list is replaced whole: as of the version that was read."""
    return {"metadata": {"resourceVersion": found.metadata.resource_version, **metadata}}
