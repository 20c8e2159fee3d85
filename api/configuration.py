"""Which settings are in force, where each came from and since when, as plain data."""

from __future__ import annotations

import msgspec


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting."""

    name: str
    """Its path in the settings file."""
    value: str
    """As the settings file would have it, in one line."""
    source: str
    """`default`, `file`, or the kind of the object that says so."""
    object: str = ""
    """That object, `namespace/name`, or its name alone,"""
    hash: str = ""
    """its content,"""
    field: str = ""
    """and the field."""
    since_wall_ns: int | None = None
    """CLOCK_REALTIME since when it is in force; None of defaults."""


class ObeyedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object of the cluster's that this node is to obey."""

    kind: str
    object: str
    hash: str
    since_wall_ns: int | None = None
    """Since when it is obeyed; None where it is not: then `problem` says why, and what stands instead."""
    problem: str = ""
    unused: tuple[str, ...] = ()
    """Its fields that nothing here obeys, with the reason."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is in force."""

    settings: tuple[Setting, ...]
    objects: tuple[ObeyedObject, ...] = ()
    node: str = ""
    """Whose CustomNodeConfig is obeyed; empty where none is."""
    problem: str = ""
    """Why the API server says nothing new; empty where it does."""
