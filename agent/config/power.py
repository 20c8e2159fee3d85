"""Settings of the answer to power alerts. Names in brackets are Katalyst's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.config.units import Seconds


class PowerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What is done when the node is told to use less power."""

    enable: bool = False
    """[power_aware among the sysadvisor plugins] Whether it is done at all."""
    annotation_prefix: str = ""
    """[AnnotationKeyPrefix] of the node's annotations power-alert and the like, without the slash."""
    period_s: Seconds = 9.0
    """A cap needs 4 to 6 s to settle, and its measurement 2 more: no more than one action in so long."""
    voluntary_cpu_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.45
    """At p0 frequencies are lowered only while the node is busier than this."""
    voluntary_percent: Annotated[int, Meta(ge=0, le=100)] = 10
    """Below s0 frequencies are lowered by no more than this in all, until the alert is over."""
