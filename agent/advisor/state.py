"""What the advisor remembers from round to round: a frozen value that goes in and comes out, never hidden state."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.samples import Snapshot


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


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """All that a policy may know of the past."""

    previous: Snapshot | None = None
    containers: Mapping[str, ContainerMemory] = {}
    """By cgroup path."""
    lent_cores: float | None = None
    """None before the first round; then nothing but priority holds reclaimed pods back, as before the agent came."""
    reclaimed_use_cores: float | None = None
    """Smoothed over a second, because rounds can be milliseconds apart."""
    harmful_cores: float | None = None
    """What reclaimed pods used at the last breach: growth is careful around it."""
    own_wait_ns: float | None = None
    """Online pods' wait, at the quantile, that stayed when batch work was down to its minimum: their own queueing."""
    minimum_since_ns: int | None = None
    """Since when no more than the minimum has been lent; None while it is more."""
    last_breach_ns: int | None = None
    """When the waits were last above half the target; growth waits for calm_s after it."""
    last_wait_ns: int | None = None
    """When the online pods' waits were last measured."""
    claims: Mapping[str, float] = {}
    """By reclaimed container that made online pods wait: the part of its claim that it keeps."""
    share_cores: int | None = None
    """Size of the share pool under disjoint cpusets."""
    share_cpus: tuple[int, ...] = ()
    last_ramp_down_ns: int | None = None
