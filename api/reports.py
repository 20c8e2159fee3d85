"""Parts of custom resources that somebody else's plugin reports of this node, as plain data."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Part(StrEnum):
    """Where in an object a field is."""

    SPEC = "spec"
    STATUS = "status"
    METADATA = "metadata"


class ReportedField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the first level of one object of this node."""

    plugin: str
    group: str
    version: str
    kind: str
    part: Part
    name: str
    """Go's name of it, such as `NodeResourceProperties`."""
    value: msgspec.Raw
    """JSON."""
