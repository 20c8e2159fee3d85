"""IntelligentHorizontalPodAutoscaler, which scales by forecasts and calendars, and VirtualWorkload, which it tries on."""

from __future__ import annotations

from typing import Annotated, Literal

from api.crds.hpa import Behavior, MetricSpec, MetricStatus
from api.crds.meta import ATOMIC_LIST, Int32, Int64, Part, Quantity, Resource, TargetReference, Time, preset


class CustomMetric(Part, frozen=True, kw_only=True):
    """What is scaled by the forecast of."""

    identify: str
    """Its name in the forecast."""
    query: str | None = None
    """Its history, in PromQL."""
    value: Quantity
    """What one replica is to have of it; 0 is what its requests say."""


class IHPAMetric(Part, frozen=True, kw_only=True):
    """What is scaled by."""

    metric: MetricSpec | None = None
    custom_metric: CustomMetric | None = None


class Autoscaler(Part, frozen=True, kw_only=True):
    """What is scaled, within which bounds, by what, and how fast."""

    scale_target_ref: TargetReference
    min_replicas: Int32 | None = None
    max_replicas: Int32
    metrics: tuple[IHPAMetric, ...] | None = None
    behavior: Behavior | None = None


class TimeWindow(Part, frozen=True, kw_only=True):
    """What a forecast looks at and gives: steps of so many seconds."""

    input: int
    """Seconds of one step of the history."""
    history_steps: int
    aggregator: Literal["avg", "max"]
    output: int
    """Steps that are one point of the forecast."""
    prediction_steps: int


class AlgorithmConfig(Part, frozen=True, kw_only=True):
    """How the forecast is made."""

    method: str
    params: dict[str, str] | None = None
    resync_period: Int64
    """In seconds."""
    time_window: TimeWindow


class ReplicaBounds(Part, frozen=True, kw_only=True):
    """Other bounds, from when the calendar says so."""

    cron_tab: str
    min_replicas: Int32 | None = None
    max_replicas: Int32 | None = None


class TimeBounds(Part, frozen=True, kw_only=True):
    """A calendar of bounds, from when until when it holds."""

    start: Time | None = None
    end: Time | None = None
    bounds: tuple[ReplicaBounds, ...] | None = None


class IHPASpec(Part, frozen=True, kw_only=True):
    """What is scaled, and how."""

    autoscaler: Autoscaler
    algorithm_config: AlgorithmConfig | None = None
    time_bounds: tuple[TimeBounds, ...] | None = None
    scale_strategy: Annotated[str, preset("Preview")] | None = None
    """Preview scales a VirtualWorkload, to look at; Auto the workload itself."""


class IHPAStatus(Part, frozen=True, kw_only=True):
    """What was scaled to, and by what."""

    current_replicas: Int32 | None = None
    desired_replicas: Int32 | None = None
    last_scale_time: Time | None = None
    current_metrics: Annotated[tuple[MetricStatus, ...], ATOMIC_LIST] | None = None


class IntelligentHorizontalPodAutoscaler(Resource, frozen=True, kw_only=True):
    """How many replicas one workload has, by forecasts and calendars."""

    spec: IHPASpec | None = None
    status: IHPAStatus | None = None


class VirtualWorkloadSpec(Part, frozen=True, kw_only=True):
    """What somebody scaled it to."""

    replicas: Int32


class VirtualWorkloadStatus(Part, frozen=True, kw_only=True):
    """What an autoscaler sees."""

    replicas: Int32
    selector: str
    """Of the pods of the workload that it stands for."""


class VirtualWorkload(Resource, frozen=True, kw_only=True):
    """Something to scale without consequences."""

    spec: VirtualWorkloadSpec | None = None
    status: VirtualWorkloadStatus | None = None
