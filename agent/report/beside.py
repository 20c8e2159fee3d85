"""What goes into the node's CustomNodeResource and is not in a round: what kubelet, machine and plugins say. Plain."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.pod_resources import NodeShare, PodShare
from api.reports import Hardware, ReportedField

NO_POLICY = "None"
"""[topologyPolicy] No pod is refused for the NUMA nodes that it would get."""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as it was heard last."""

    fields: tuple[ReportedField, ...] = ()
    """Of plugins."""
    hardware: Hardware = Hardware()
    cpu_flags: bool = False
    """Whether all of them are told."""
    policy: str | None = NO_POLICY
    """None while a kubelet that has one cannot be asked: then the object does not say it."""
    node: NodeShare | None = None
    pods: tuple[PodShare, ...] = ()
    zone_types: Mapping[str, str] = {}
    """Types of the zones that devices are shown as, by resource; others are counted only."""


NOTHING = Beside()
