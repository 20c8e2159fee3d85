"""What is remembered of one container from round to round."""

from __future__ import annotations

import msgspec


class ContainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Smoothed demand of one container's cgroup; the id tells a new cgroup of the same path apart."""

    cgroup_id: int
    first_seen_ns: int
    last_seen_ns: int
    ramping: bool
    """Whether it came after the agent and is still to be taken at its request."""
    usage_cores: float | None = None
    load1: float | None = None
    load5: float | None = None
    load_at_ns: int | None = None
    """When a wait was last known, and so both loads were brought up to date."""
