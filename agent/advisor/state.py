"""What the advisor remembers from round to round: a frozen value that goes in and comes out, never hidden state."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.advisor.containers import ContainerMemory
from agent.advisor.provision.situation import ProvisionMemory
from agent.advisor.requests import Requests
from api.advice import PoolSize
from api.forecasts import Outlook
from api.samples import Snapshot


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
    own_waits_ns: Mapping[str, float] = {}
    """By online container whose wait, at the quantile, stayed when batch work was down to its minimum: its own queueing."""
    minimum_since_ns: int | None = None
    """Since when no more than the minimum has been lent; None while it is more."""
    last_breach_ns: int | None = None
    """When the waits were last above half the target; growth waits for calm_s after it."""
    last_wait_ns: int | None = None
    """When the online pods' waits were last measured."""
    claims: Mapping[str, float] = {}
    """By reclaimed container that made online pods wait: the part of its claim that it keeps."""
    requests: Mapping[str, Requests] = {}
    """By pod that publishes how long it takes to answer."""
    provision: ProvisionMemory = ProvisionMemory()
    sizes: tuple[PoolSize, ...] = ()
    """Of the pools as canonical advice had them last: what is held on to while nobody lists the pods."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs of the pools as QRM placed them last; empty before it has."""
    refused: frozenset[str] = frozenset()
    """Dedicated pods that were refused CPUs of their own, and count as shared ones."""
    cpus: Mapping[str, tuple[int, ...]] = {}
    """The same of every listed container, by cgroup."""
    forecasts: tuple[Outlook, ...] = ()
    """What everything but reclaimed pods is foretold to use, as of this round."""
    advertised_by_numa: Mapping[int, float] = {}
    """Reclaimed CPU that the node advertises, in cores."""
