"""What an agent reports about itself: doctor checks and the effective configuration with its origins."""

from __future__ import annotations

import msgspec


class DoctorCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One check; `remedy` is set if `ok` is false or an optional feature is missing, and empty otherwise."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    conclusive: bool = msgspec.field(default=True, name="checked")
    """False if the check could not be made; `remedy` then says how to make it."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Checks of a running agent, for remote callers."""

    version: str
    """Version of the agent."""
    checks: tuple[DoctorCheck, ...]


class EffectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting with its value and origin."""

    name: str
    """Path in the settings file."""
    value: str
    """Value in the notation of the settings file, on one line."""
    source: str
    """`default`, `file`, `profile NAME`, `kubelet` (follows from its cgroup root), or the kind of the API object that
    sets it."""
    object: str = ""
    """Name of that object, `namespace/name` if it has a namespace."""
    hash: str = ""
    """Hash of the object's content."""
    field: str = ""
    """Field of the object."""
    since_wall_ns: int | None = None
    """CLOCK_REALTIME since when the value is in effect; None for defaults."""


class AppliedConfigObject(msgspec.Struct, frozen=True, kw_only=True):
    """API object that this node's configuration is to be taken from."""

    kind: str
    object: str
    hash: str
    since_wall_ns: int | None = None
    """CLOCK_REALTIME since when the object is applied; None if it is not, and `problem` names the cause and the fallback."""
    problem: str = ""
    unused: tuple[str, ...] = ()
    """Fields of the object that have no effect in this agent, with the reason."""


class EffectiveConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Complete effective configuration."""

    settings: tuple[EffectiveSetting, ...]
    objects: tuple[AppliedConfigObject, ...] = ()
    node: str = ""
    """Node whose CustomNodeConfig is applied; empty if none is."""
    problem: str = ""
    """Why updates from the API server are not received; empty if they are."""
