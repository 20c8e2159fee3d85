"""What an agent reports about itself: doctor checks and the effective configuration with its origins."""

from __future__ import annotations

import msgspec


class DoctorCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; `remedy` says what to do where `ok` is false, or something optional is lacking, and is empty otherwise."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    conclusive: bool = msgspec.field(default=True, name="checked")
    """False where there was nothing to ask: then nobody knows, and `remedy` says what to do to find out."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a running agent says of its node, for whoever asks from afar."""

    version: str
    """The agent's own."""
    checks: tuple[DoctorCheck, ...]


class EffectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
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


class AppliedConfigObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object of the cluster's that this node is to obey."""

    kind: str
    object: str
    hash: str
    since_wall_ns: int | None = None
    """Since when it is obeyed; None where it is not: then `problem` says why, and what stands instead."""
    problem: str = ""
    unused: tuple[str, ...] = ()
    """Its fields that nothing here obeys, with the reason."""


class EffectiveConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is in force."""

    settings: tuple[EffectiveSetting, ...]
    objects: tuple[AppliedConfigObject, ...] = ()
    node: str = ""
    """Whose CustomNodeConfig is obeyed; empty where none is."""
    problem: str = ""
    """Why the API server says nothing new; empty where it does."""
