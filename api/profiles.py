"""What whoever runs a service says of its pods: where its indicators should be, and what may be taken from them.

Katalyst has it in an object of the cluster (ServiceProfileDescriptor); on a node without one, a pod carries the same in an
annotation, as JSON:

    dioptase.io/service-profile: '{"targets": {"request_p99_ms": {"upper": 20}}, "disableReclaimLevel": "Pod"}'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PROFILE_KEY = "dioptase.io/service-profile"
REQUEST_P99_MS = "request_p99_ms"
"""Indicator: the time within which 99 of 100 requests were answered, as the pod itself publishes it."""
Bound = Annotated[float, Meta(gt=0, lt=1e12)]


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a service profile says of one indicator."""

    lower: Bound | None = None
    upper: Bound | None = None
    """Goes before `lower`."""


class ServiceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Of one pod; the default says nothing."""

    targets: Mapping[str, Target] = {}
    """[extendedIndicator] By indicator, in its unit."""
    disable_reclaim_level: Literal["", "Pod", "NUMA", "Socket", "Node"] = ""
    """[disableReclaimLevel] Nothing is lent of the pod, its NUMA nodes, their sockets or the whole node; empty lends."""
    memory_offloading: Mapping[str, Any] = {}
    """[transparentMemoryOffloading] Settings of `memory.offloading.default`, by their names there."""

    @property
    def lends(self) -> bool:
        """Whether what the pod leaves idle may be lent."""
        return not self.disable_reclaim_level


def service_profile(annotations: Mapping[str, str]) -> tuple[ServiceProfile, tuple[str, ...]]:
    """The profile of a pod's annotations and what is wrong with it. Of a pod whose profile cannot be read nothing is lent."""
    text = annotations.get(PROFILE_KEY)
    if text is None:
        return ServiceProfile(), ()
    try:
        return msgspec.json.decode(text, type=ServiceProfile), ()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        remedy = (
            'write JSON such as {"targets": {"request_p99_ms": {"upper": 20}}}; until then nothing of the pod is lent'
        )
        return ServiceProfile(disable_reclaim_level="Pod"), (f"annotation {PROFILE_KEY}: {error}; {remedy}",)
