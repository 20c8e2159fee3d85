"""IntelligentHorizontalPodAutoscaler, VirtualWorkload, and the parts of autoscaling/v2 that they embed."""

from __future__ import annotations

from typing import Annotated, Literal

from api.katalyst.meta import (
    ATOMIC_LIST,
    ATOMIC_MAP,
    CustomResource,
    Int32,
    Int64,
    KatalystStruct,
    Quantity,
    TargetReference,
    Time,
    schema_default,
)


class SelectorRequirement(KatalystStruct, frozen=True, kw_only=True):
    """What a label has to be."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] | None = None


class LabelSelector(KatalystStruct, frozen=True, kw_only=True):
    """What the labels have to be, all of it."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[SelectorRequirement, ...] | None = None


class MetricIdentifier(KatalystStruct, frozen=True, kw_only=True):
    """A metric, and which of its series."""

    name: str
    selector: Annotated[LabelSelector, ATOMIC_MAP] | None = None


class MetricTarget(KatalystStruct, frozen=True, kw_only=True):
    """What a metric is to be."""

    type: str
    """Utilization, Value or AverageValue."""
    value: Quantity | None = None
    average_value: Quantity | None = None
    average_utilization: Int32 | None = None
    """In percent of requests."""


class MetricCurrent(KatalystStruct, frozen=True, kw_only=True):
    """What a metric is."""

    value: Quantity | None = None
    average_value: Quantity | None = None
    average_utilization: Int32 | None = None
    """In percent of requests."""


class ResourceSource(KatalystStruct, frozen=True, kw_only=True):
    """CPU or memory of all containers."""

    name: str
    target: MetricTarget


class ContainerResourceSource(KatalystStruct, frozen=True, kw_only=True):
    """CPU or memory of the containers of one name."""

    name: str
    container: str
    target: MetricTarget


class PodsSource(KatalystStruct, frozen=True, kw_only=True):
    """A metric that every pod has."""

    metric: MetricIdentifier
    target: MetricTarget


class ObjectSource(KatalystStruct, frozen=True, kw_only=True):
    """A metric of one object."""

    described_object: TargetReference
    metric: MetricIdentifier
    target: MetricTarget


class ExternalSource(KatalystStruct, frozen=True, kw_only=True):
    """A metric of no object."""

    metric: MetricIdentifier
    target: MetricTarget


class MetricSpec(KatalystStruct, frozen=True, kw_only=True):
    """What is scaled by: the field that `type` names."""

    type: str
    """Resource, ContainerResource, Pods, Object or External."""
    resource: ResourceSource | None = None
    container_resource: ContainerResourceSource | None = None
    pods: PodsSource | None = None
    object: ObjectSource | None = None
    external: ExternalSource | None = None


class ResourceCurrent(KatalystStruct, frozen=True, kw_only=True):
    """CPU or memory of all containers."""

    name: str
    current: MetricCurrent


class ContainerResourceCurrent(KatalystStruct, frozen=True, kw_only=True):
    """CPU or memory of the containers of one name."""

    name: str
    container: str
    current: MetricCurrent


class PodsCurrent(KatalystStruct, frozen=True, kw_only=True):
    """A metric that every pod has."""

    metric: MetricIdentifier
    current: MetricCurrent


class ObjectCurrent(KatalystStruct, frozen=True, kw_only=True):
    """A metric of one object."""

    described_object: TargetReference
    metric: MetricIdentifier
    current: MetricCurrent


class ExternalCurrent(KatalystStruct, frozen=True, kw_only=True):
    """A metric of no object."""

    metric: MetricIdentifier
    current: MetricCurrent


class MetricStatus(KatalystStruct, frozen=True, kw_only=True):
    """What was seen: the field that `type` names."""

    type: str
    """Resource, ContainerResource, Pods, Object or External."""
    resource: ResourceCurrent | None = None
    container_resource: ContainerResourceCurrent | None = None
    pods: PodsCurrent | None = None
    object: ObjectCurrent | None = None
    external: ExternalCurrent | None = None


class ScalingPolicy(KatalystStruct, frozen=True, kw_only=True):
    """How many replicas may come or go in some time."""

    type: str
    """Pods or Percent."""
    value: Int32
    period_seconds: Int32


class ScalingRules(KatalystStruct, frozen=True, kw_only=True):
    """How fast replicas come, or go."""

    policies: Annotated[tuple[ScalingPolicy, ...], ATOMIC_LIST] | None = None
    select_policy: str | None = None
    """Max, Min or Disabled."""
    stabilization_window_seconds: Int32 | None = None


class Behavior(KatalystStruct, frozen=True, kw_only=True):
    """How fast replicas come and go."""

    scale_up: ScalingRules | None = None
    scale_down: ScalingRules | None = None


class CustomMetric(KatalystStruct, frozen=True, kw_only=True):
    """What is scaled by the forecast of."""

    identify: str
    """Its name in the forecast."""
    query: str | None = None
    """Its history, in PromQL."""
    value: Quantity
    """What one replica is to have of it; 0 is what its requests say."""


class IHPAMetric(KatalystStruct, frozen=True, kw_only=True):
    """What is scaled by."""

    metric: MetricSpec | None = None
    custom_metric: CustomMetric | None = None


class Autoscaler(KatalystStruct, frozen=True, kw_only=True):
    """What is scaled, within which bounds, by what, and how fast."""

    scale_target_ref: TargetReference
    min_replicas: Int32 | None = None
    max_replicas: Int32
    metrics: tuple[IHPAMetric, ...] | None = None
    behavior: Behavior | None = None


class TimeWindow(KatalystStruct, frozen=True, kw_only=True):
    """What a forecast looks at and gives: steps of so many seconds."""

    input: int
    """Seconds of one step of the history."""
    history_steps: int
    aggregator: Literal["avg", "max"]
    output: int
    """Steps that are one point of the forecast."""
    prediction_steps: int


class AlgorithmConfig(KatalystStruct, frozen=True, kw_only=True):
    """How the forecast is made."""

    method: str
    params: dict[str, str] | None = None
    resync_period: Int64
    """In seconds."""
    time_window: TimeWindow


class ReplicaBounds(KatalystStruct, frozen=True, kw_only=True):
    """Other bounds, from when the calendar says so."""

    cron_tab: str
    min_replicas: Int32 | None = None
    max_replicas: Int32 | None = None


class TimeBounds(KatalystStruct, frozen=True, kw_only=True):
    """A calendar of bounds, from when until when it holds."""

    start: Time | None = None
    end: Time | None = None
    bounds: tuple[ReplicaBounds, ...] | None = None


class IHPASpec(KatalystStruct, frozen=True, kw_only=True):
    """What is scaled, and how."""

    autoscaler: Autoscaler
    algorithm_config: AlgorithmConfig | None = None
    time_bounds: tuple[TimeBounds, ...] | None = None
    scale_strategy: Annotated[str, schema_default("Preview")] | None = None
    """Preview scales a VirtualWorkload, to look at; Auto the workload itself."""


class IHPAStatus(KatalystStruct, frozen=True, kw_only=True):
    """What was scaled to, and by what."""

    current_replicas: Int32 | None = None
    desired_replicas: Int32 | None = None
    last_scale_time: Time | None = None
    current_metrics: Annotated[tuple[MetricStatus, ...], ATOMIC_LIST] | None = None


class IntelligentHorizontalPodAutoscaler(CustomResource, frozen=True, kw_only=True):
    """How many replicas one workload has, by forecasts and calendars."""

    spec: IHPASpec | None = None
    status: IHPAStatus | None = None


class VirtualWorkloadSpec(KatalystStruct, frozen=True, kw_only=True):
    """What somebody scaled it to."""

    replicas: Int32


class VirtualWorkloadStatus(KatalystStruct, frozen=True, kw_only=True):
    """What an autoscaler sees."""

    replicas: Int32
    selector: str
    """Of the pods of the workload that it stands for."""


class VirtualWorkload(CustomResource, frozen=True, kw_only=True):
    """Something to scale without consequences."""

    spec: VirtualWorkloadSpec | None = None
    status: VirtualWorkloadStatus | None = None
