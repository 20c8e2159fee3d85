"""What memory advice remembers from round to round: a frozen value that goes in and comes out, and can be stored as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Cache that a container was told to drop."""

    cgroup_id: int
    at_ns: int
    read_at_ns: int | None
    """The reading that it was told on: until there is another one, what it gave is not seen yet."""
    bytes: int


class Offloaded(msgspec.Struct, frozen=True, kw_only=True):
    """One cgroup that gives up memory bit by bit: what was read and asked at the last interval's end."""

    cgroup_id: int
    at_ns: int
    read_at_ns: int | None
    target_bytes: float = 0.0
    scanned: int | None = None
    stolen: int | None = None
    activated: int | None = None
    stall_us: int | None = None
    size_bytes: float | None = None
    """Policy `senpai`: the size that is aimed at."""


class SwapAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a cgroup that gives up memory may swap out: memory.swap.max as it was last asked for."""

    cgroup_id: int
    value: str


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """All that memory advice knows of the past."""

    headroom_bytes: float | None = None
    guard_bytes: Mapping[str, int] = {}
    """By cgroup: the limit that was last asked for."""
    asked: Mapping[str, Asked] = {}
    """By cgroup."""
    offloaded: Mapping[str, Offloaded] = {}
    """By cgroup."""
    swap: Mapping[str, SwapAsked] = {}
    """By cgroup."""
    dying_ns: int | None = None
    """When what removed cgroups left behind was last reclaimed."""
