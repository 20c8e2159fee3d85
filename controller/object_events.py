"""Writes Events about objects of the cluster, so that `kubectl describe` shows what the controller reports about them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from api.katalyst.kinds import KATALYST_KINDS
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import KubeMetadata, PartialObjectMetadata, ResourceType, format_timestamp

log = logging.getLogger(__name__)
EVENTS = ResourceType("", "v1", "events", "Event", PartialObjectMetadata, namespaced=True)
EVENT_SOURCE, MAX_EVENT_CHARS = "dioptase-controller", 1024
_KIND_NAMES = {kind.plural: kind.kind for kind in KATALYST_KINDS}


class ObjectWarning(msgspec.Struct, frozen=True):
    """Warning about an object. `action` is what the controller did, `message` is for people."""

    reason: str
    action: str
    message: str


async def write_warning(
    client: KubeClient, resource: ResourceType[Any], metadata: KubeMetadata, warning: ObjectWarning
) -> None:
    """Create an Event of type Warning on an object. A rejection is only logged."""
    try:
        body = build_event(resource, metadata, warning, time.time())
        await client.create(EVENTS, body, body["metadata"]["namespace"])
    except (ApiError, ApiUnreachable) as error:
        log.warning("%s %s: the event %s cannot be written: %s", resource.gvr, metadata.name, warning.reason, error)


def build_event(
    resource: ResourceType[Any], metadata: KubeMetadata, warning: ObjectWarning, at_s: float
) -> Mapping[str, Any]:
    """Build the Event; `at_s` is since the epoch. Events of objects without namespace are in `default`."""
    namespace = metadata.namespace or "default"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata.name[:200]}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": resource.api_version,
            "kind": resource.kind or _KIND_NAMES.get(resource.plural, resource.plural),
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        },
        "reason": warning.reason,
        "message": warning.message[:MAX_EVENT_CHARS],
        "type": "Warning",
        "action": warning.action,
        "count": 1,
        "firstTimestamp": format_timestamp(at_s),
        "lastTimestamp": format_timestamp(at_s),
        "eventTime": format_timestamp(at_s, micro=True),
        "source": {"component": EVENT_SOURCE},
        "reportingComponent": EVENT_SOURCE,
        "reportingInstance": EVENT_SOURCE,
    }
