"""Plain data of the CPU advisor: the inputs of provision, and the state kept from one cycle to the next.
A state is a frozen value that is passed in and returned; no module of the advisor keeps hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.advisor import InferenceConfig
from api.advice import PoolSize
from api.annotations import IndicatorTarget
from api.forecast import Forecast
from api.rates import Rates
from api.snapshot import RequestLatency, Snapshot


class ContainerDemand(msgspec.Struct, frozen=True, kw_only=True):
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


class LatencyPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said of one container (its generic output: predict_value, ignore)."""

    value: float
    ignore: bool = False


class LatencyPredictions(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said in one answer, by pod and container."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    by_pod: Mapping[str, Mapping[str, LatencyPrediction]]


class ProvisionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The node in one round. What is absent from a mapping is not known."""

    now_ns: int
    """CLOCK_MONOTONIC."""
    snapshot: Snapshot
    previous: Snapshot | None = None
    change: Rates | None = None
    needs: Mapping[str, ContainerDemand] = {}
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
    targets: Mapping[str, Mapping[str, IndicatorTarget]] = {}
    """By pod and indicator: targets of its own."""
    predictions: LatencyPredictions | None = None
    inference: InferenceConfig = InferenceConfig()
    """How predictions move targets."""
    runnable: Mapping[str, float] = {}
    """By cgroup of a container: tasks that run or wait for a CPU, for isolation."""
    not_reclaimable: frozenset[str] = frozenset()
    """Pods (`namespace/name`) of whose CPU nothing may be lent."""
    together: frozenset[str] = frozenset()
    """Pods that run with the others whatever they do: no pool of their own would hold them."""


class IndicatorController(msgspec.Struct, frozen=True, kw_only=True):
    """What `rama` keeps of one indicator."""

    knob: float = 0.0
    """The value that `total` is added to; another one begins anew."""
    total: float = 0.0
    error: float = 0.0


class RegionState(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided of a region in the round before."""

    policy: str = ""
    requirement: int | None = None
    quota_cores: float | None = None
    last_ramp_down_ns: int | None = None
    controllers: Mapping[str, IndicatorController] = {}


class IsolationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How long a container has had too much to run, or enough CPU again."""

    rounds: int = 0
    calm_since_ns: int | None = None


class ProvisionState(msgspec.Struct, frozen=True, kw_only=True):
    """All that provision knows of the past."""

    regions: Mapping[str, RegionState] = {}
    quotas: Mapping[int, float] = {}
    """By NUMA node: the quota that reclaimed pods there were given."""
    loads: Mapping[str, IsolationLoad] = {}
    """By cgroup."""
    isolated: tuple[str, ...] = ()
    """Pods that are kept apart, `namespace/name`."""


class RequestWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod had answered when the last two windows began."""

    base: RequestLatency
    next: RequestLatency


class AdvisorState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a policy may know of the past."""

    previous: Snapshot | None = None
    containers: Mapping[str, ContainerDemand] = {}
    """By cgroup path."""
    reclaimable_cores: float | None = None
    """None before the first round; then nothing but priority holds reclaimed pods back, as before the agent came."""
    reclaimed_use_cores: float | None = None
    """Smoothed over a second, because rounds can be milliseconds apart."""
    harmful_cores: float | None = None
    """What reclaimed pods used at the last breach: growth is careful around it."""
    baseline_latency_ns: Mapping[str, float] = {}
    """By online container whose wait, at the quantile, stayed when batch work was down to its minimum: its own queueing."""
    minimum_since_ns: int | None = None
    """Since when no more than the minimum has been lent; None while it is more."""
    last_breach_ns: int | None = None
    """When the waits were last above half the target; growth waits for calm_s after it."""
    last_wait_ns: int | None = None
    """When the online pods' waits were last measured."""
    claims: Mapping[str, float] = {}
    """By reclaimed container that made online pods wait: the part of its claim that it keeps."""
    requests: Mapping[str, RequestWindow] = {}
    """By pod that publishes how long it takes to answer."""
    provision: ProvisionState = ProvisionState()
    sizes: tuple[PoolSize, ...] = ()
    """Of the pools as canonical advice had them last: what is held on to while nobody lists the pods."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs of the pools as QRM placed them last; empty before it has."""
    refused: frozenset[str] = frozenset()
    """Dedicated pods that were refused CPUs of their own, and count as shared ones."""
    cpus: Mapping[str, tuple[int, ...]] = {}
    """The same of every listed container, by cgroup."""
    forecasts: tuple[Forecast, ...] = ()
    """What everything but reclaimed pods is foretold to use, as of this round."""
    reported_by_numa: Mapping[int, float] = {}
    """Reclaimed CPU that the node advertises, in cores."""
