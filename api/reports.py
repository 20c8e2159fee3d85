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


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface that is a device."""

    name: str
    index: int
    numa: int
    """-1 where the firmware does not say."""
    pci: str
    """Its address on the bus; empty of one that is on another."""
    speed_mbit: int
    """-1 where it has no link, or is only emulated."""
    enabled: bool


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's files say that no policy looks at."""

    flags: tuple[str, ...] = ()
    """Of the first CPU, as the kernel calls them; empty where it does not say."""
    cards: tuple[Card, ...] = ()
