"""Plain data of the CPU advisor: the inputs of provision, and the state kept from one cycle to the next.
A state is a frozen value that is passed in and returned; no module of the advisor keeps hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.advisor.latency_comparison import LatencyInterval
from agent.config.advisor import InferenceConfig
from api.advice import PoolSize, QuotaVerdict
from api.annotations import IndicatorTarget
from api.forecast import Forecast
from api.rates import Rates
from api.snapshot import RequestLatency, RunqLatency, Snapshot


class ContainerDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Smoothed demand of one container's cgroup; the id distinguishes a new cgroup of the same path."""

    cgroup_id: int
    first_seen_ns: int
    last_seen_ns: int
    ramping: bool
    """Whether it started after the agent and still counts with its request."""
    usage_cores: float | None = None
    load1: float | None = None
    load5: float | None = None
    load_at_ns: int | None = None
    """When run-queue latency was last measured, and both loads were updated."""


class SystemUse(msgspec.Struct, frozen=True, kw_only=True):
    """Smoothed CPU use of everything but online and reclaimed pods."""

    average_cores: float
    """May be slightly negative, because /proc/stat counts in ticks and cgroups in nanoseconds. Each interval has this
    noise, so that only the average is limited to 0."""
    measured_ns: int
    """When it was last updated; CLOCK_MONOTONIC."""

    @property
    def cores(self) -> float:
        """Return the average, at least 0."""
        return max(self.average_cores, 0.0)


class LatencyPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for one container (the model's generic output: predict_value, ignore)."""

    value: float
    ignore: bool = False


class LatencyPredictions(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model, by pod and container."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    by_pod: Mapping[str, Mapping[str, LatencyPrediction]]


class ProvisionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of provision in one cycle. A key that is absent from a mapping is not measured."""

    now_ns: int
    """CLOCK_MONOTONIC."""
    snapshot: Snapshot
    previous: Snapshot | None = None
    change: Rates | None = None
    needs: Mapping[str, ContainerDemand] = {}
    """By cgroup of an online container: its smoothed demand (`update_demand`)."""
    reserve: Mapping[int, int] = {}
    """By NUMA node: CPUs of the reserve pool."""
    forbidden: Mapping[int, int] = {}
    """By NUMA node: CPUs that no pool of pods may have (interrupts)."""
    assigned: Mapping[str, tuple[int, ...]] = {}
    """By cgroup of a container: its assigned CPUs."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs of the current pools, `reclaim` included."""
    restored_pools: frozenset[str] = frozenset()
    """Pools restored from the previous agent, until the first measurement."""
    reclaim_use_cores: Mapping[int, float] = {}
    """By NUMA node: CPU use of reclaimed pods."""
    reclaim_quota_cores: Mapping[int, float] = {}
    """By NUMA node: CPU quota of reclaimed pods; absent without one."""
    indicators: Mapping[str, Mapping[str, float]] = {}
    """By pod and name: current values from other sources; they take precedence over the agent's own."""
    targets: Mapping[str, Mapping[str, IndicatorTarget]] = {}
    """By pod and indicator: the pod's own targets."""
    predictions: LatencyPredictions | None = None
    inference: InferenceConfig = InferenceConfig()
    """How predictions move targets."""
    runnable: Mapping[str, float] = {}
    """By cgroup of a container: tasks that run or wait for a CPU, for isolation."""
    not_reclaimable: frozenset[str] = frozenset()
    """Pods (`namespace/name`) whose CPU is not reclaimable."""
    pods_without_own_pool: frozenset[str] = frozenset()
    """Pods that stay in the shared pool whatever their load, because no pool of their own would fit."""


class IndicatorController(msgspec.Struct, frozen=True, kw_only=True):
    """State of `rama` for one indicator."""

    knob: float = 0.0
    """Value that `total` is added to; a different value resets the total."""
    total: float = 0.0
    error: float = 0.0


class RegionState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a region after the previous cycle."""

    policy: str = ""
    requirement: int | None = None
    quota_cores: float | None = None
    last_ramp_down_ns: int | None = None
    controllers: Mapping[str, IndicatorController] = {}


class IsolationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """For how many cycles a container has been overloaded, or since when it has had enough CPU."""

    rounds: int = 0
    calm_since_ns: int | None = None


class ProvisionState(msgspec.Struct, frozen=True, kw_only=True):
    """State of provision."""

    regions: Mapping[str, RegionState] = {}
    quotas: Mapping[int, float] = {}
    """By NUMA node: CPU quota of reclaimed pods."""
    loads: Mapping[str, IsolationLoad] = {}
    """By cgroup."""
    isolated: tuple[str, ...] = ()
    """Isolated pods, `namespace/name`."""


class RequestWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Request counts of one pod when the last two windows began."""

    base: RequestLatency
    next: RequestLatency


class QuotaRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A control interval: the quota is lifted for a bounded time, to measure latency without it."""

    ends_ns: int
    level_cores: float
    """Quota before the interval; the policy restores it if latency rises."""


class QuotaTrialState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the trial of the CPU quota (quota_trial.py), and the verdicts of earlier trials."""

    key: str = ""
    """Digest of the online workloads that the intervals belong to."""
    intervals: tuple[LatencyInterval, ...] = ()
    """Finished intervals of both kinds in chronological order."""
    current: LatencyInterval | None = None
    """The interval that is being measured."""
    limit_is_measured: bool = False
    """Whether the latest finished interval is one with the quota; if so, the next one is without it."""
    limited_cores: float = 0.0
    """The latest quota that was measured: reclaimed pods that use less without a quota show nothing about it."""
    calm_since_ns: int | None = None
    """Time since which no online latency has required a quota; None while some does."""
    worst_ns: float = 0.0
    """Longest quantile of one container in one cycle."""
    release: QuotaRelease | None = None
    verdicts: tuple[QuotaVerdict, ...] = ()
    """The latest verdict of each set of online workloads, oldest first."""


class AdvisorState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the CPU advisor."""

    previous: Snapshot | None = None
    containers: Mapping[str, ContainerDemand] = {}
    """By cgroup path."""
    reclaimable_cores: float | None = None
    """None before the first cycle: then only priority limits reclaimed pods, as before the agent started."""
    reclaimed_use_cores: float | None = None
    """Smoothed over a second, because cycles can be milliseconds apart."""
    harmful_cores: float | None = None
    """CPU use of reclaimed pods at the last breach: growth slows down around it."""
    evaluated_latency: Mapping[str, RunqLatency | None] = {}
    """By online container: run-queue latency that the policy evaluated in this cycle; empty with policies that use none."""
    baseline_latency_ns: Mapping[str, float] = {}
    """By online container: the quantile that remained while reclaimed pods were at their minimum."""
    minimum_since_ns: int | None = None
    """Since when the quota has been at its minimum; None while it is above."""
    last_breach_ns: int | None = None
    """When latency was last above half the target; growth waits for `calm_s` after it."""
    last_wait_ns: int | None = None
    """When the latency of all online pods was last measured."""
    weights: Mapping[str, float] = {}
    """By reclaimed container that caused latency: the factor of its share of reclaimable CPU."""
    quota_trial: QuotaTrialState = QuotaTrialState()
    requests: Mapping[str, RequestWindow] = {}
    """By pod that publishes its request latency."""
    provision: ProvisionState = ProvisionState()
    sizes: tuple[PoolSize, ...] = ()
    """Pool sizes of the latest canonical advice, which are held while the list of pods is stale."""
    pools: Mapping[str, tuple[int, ...]] = {}
    """CPUs of the pools by the latest allocation; empty before it."""
    refused: frozenset[str] = frozenset()
    """Dedicated pods without CPUs of their own, which count as shared ones."""
    cpus: Mapping[str, tuple[int, ...]] = {}
    """By cgroup of a listed container: its CPUs by the latest allocation."""
    forecasts: tuple[Forecast, ...] = ()
    """Forecasts of the use by everything but reclaimed pods, of this cycle."""
    system_use: SystemUse | None = None
    """None before it is measured."""
    reported_by_numa: Mapping[int, float] = {}
    """Reclaimed CPU that the node reports, in cores by NUMA node."""
