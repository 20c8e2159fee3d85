"""What CPU provision judges and what it remembers: plain data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.advisor.containers import ContainerMemory
from agent.advisor.inference import Predictions
from agent.config.inference import InferenceConfig
from api.profiles import Target
from api.rates import Rates
from api.samples import Snapshot


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The node in one round. What is absent from a mapping is not known."""

    now_ns: int
    """CLOCK_MONOTONIC."""
    snapshot: Snapshot
    previous: Snapshot | None = None
    change: Rates | None = None
    needs: Mapping[str, ContainerMemory] = {}
    """By cgroup of an online container: its smoothed demand, as `estimation.remember` makes it."""
    reserve: Mapping[int, int] = {}
    """By NUMA node: CPUs of the reserve pool."""
    forbidden: Mapping[int, int] = {}
    """By NUMA node: CPUs that no pool of pods may have (interrupts')."""
    assigned: Mapping[str, tuple[int, ...]] = {}
    """By cgroup of a container: the CPUs it was given."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs of the pools as they are now, `reclaim` among them."""
    found: frozenset[str] = frozenset()
    """Pools that an agent before this one made, as long as this one has not measured anything."""
    reclaim_use_cores: Mapping[int, float] = {}
    """By NUMA node: CPU that reclaimed pods use there."""
    reclaim_quota_cores: Mapping[int, float] = {}
    """By NUMA node: the quota that reclaimed pods there have; absent where they have none."""
    indicators: Mapping[str, Mapping[str, float]] = {}
    """By pod and name: current values that are measured elsewhere; they go before the agent's own."""
    targets: Mapping[str, Mapping[str, Target]] = {}
    """By pod and indicator: targets of its own."""
    predictions: Predictions | None = None
    inference: InferenceConfig = InferenceConfig()
    """How predictions move targets."""
    runnable: Mapping[str, float] = {}
    """By cgroup of a container: tasks that run or wait for a CPU, for isolation."""
    not_reclaimable: frozenset[str] = frozenset()
    """Pods (`namespace/name`) of whose CPU nothing may be lent."""
    together: frozenset[str] = frozenset()
    """Pods that run with the others whatever they do: no pool of their own would hold them."""


class Controller(msgspec.Struct, frozen=True, kw_only=True):
    """What `rama` keeps of one indicator."""

    knob: float = 0.0
    """The value that `total` is added to; another one begins anew."""
    total: float = 0.0
    error: float = 0.0


class RegionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided of a region in the round before."""

    policy: str = ""
    requirement: int | None = None
    quota_cores: float | None = None
    last_ramp_down_ns: int | None = None
    controllers: Mapping[str, Controller] = {}


class LoadMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How long a container has had too much to run, or enough CPU again."""

    rounds: int = 0
    calm_since_ns: int | None = None


class ProvisionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All that provision knows of the past."""

    regions: Mapping[str, RegionMemory] = {}
    quotas: Mapping[int, float] = {}
    """By NUMA node: the quota that reclaimed pods there were given."""
    loads: Mapping[str, LoadMemory] = {}
    """By cgroup."""
    isolated: tuple[str, ...] = ()
    """Pods that are kept apart, `namespace/name`."""
