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
    """Requirement on a label."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] | None = None


class LabelSelector(KatalystStruct, frozen=True, kw_only=True):
    """Label selector; all requirements have to match."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[SelectorRequirement, ...] | None = None


class MetricIdentifier(KatalystStruct, frozen=True, kw_only=True):
    """Metric, and the selector of its series."""

    name: str
    selector: Annotated[LabelSelector, ATOMIC_MAP] | None = None


class MetricTarget(KatalystStruct, frozen=True, kw_only=True):
    """Target of a metric."""

    type: str
    """Utilization, Value or AverageValue."""
    value: Quantity | None = None
    average_value: Quantity | None = None
    average_utilization: Int32 | None = None
    """Percentage of requests."""


class MetricCurrent(KatalystStruct, frozen=True, kw_only=True):
    """Current value of a metric."""

    value: Quantity | None = None
    average_value: Quantity | None = None
    average_utilization: Int32 | None = None
    """Percentage of requests."""


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
    """Metric of every pod."""

    metric: MetricIdentifier
    target: MetricTarget


class ObjectSource(KatalystStruct, frozen=True, kw_only=True):
    """Metric of one object."""

    described_object: TargetReference
    metric: MetricIdentifier
    target: MetricTarget


class ExternalSource(KatalystStruct, frozen=True, kw_only=True):
    """Metric without an object."""

    metric: MetricIdentifier
    target: MetricTarget


class MetricSpec(KatalystStruct, frozen=True, kw_only=True):
    """Metric to scale by: the field that `type` names."""

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
    """Metric of every pod."""

    metric: MetricIdentifier
    current: MetricCurrent


class ObjectCurrent(KatalystStruct, frozen=True, kw_only=True):
    """Metric of one object."""

    described_object: TargetReference
    metric: MetricIdentifier
    current: MetricCurrent


class ExternalCurrent(KatalystStruct, frozen=True, kw_only=True):
    """Metric without an object."""

    metric: MetricIdentifier
    current: MetricCurrent


class MetricStatus(KatalystStruct, frozen=True, kw_only=True):
    """Current metric: the field that `type` names."""

    type: str
    """Resource, ContainerResource, Pods, Object or External."""
    resource: ResourceCurrent | None = None
    container_resource: ContainerResourceCurrent | None = None
    pods: PodsCurrent | None = None
    object: ObjectCurrent | None = None
    external: ExternalCurrent | None = None


class ScalingPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Maximum change of replicas within a period."""

    type: str
    """Pods or Percent."""
    value: Int32
    period_seconds: Int32


class ScalingRules(KatalystStruct, frozen=True, kw_only=True):
    """Speed of scaling in one direction."""

    policies: Annotated[tuple[ScalingPolicy, ...], ATOMIC_LIST] | None = None
    select_policy: str | None = None
    """Max, Min or Disabled."""
    stabilization_window_seconds: Int32 | None = None


class Behavior(KatalystStruct, frozen=True, kw_only=True):
    """Speed of scaling in both directions."""

    scale_up: ScalingRules | None = None
    scale_down: ScalingRules | None = None


class CustomMetric(KatalystStruct, frozen=True, kw_only=True):
    """Metric whose forecast determines the replicas."""

    identify: str
    """Name of the metric in the forecast."""
    query: str | None = None
    """PromQL query of the metric's history."""
    value: Quantity
    """Target value per replica; 0 uses the requests."""


class IHPAMetric(KatalystStruct, frozen=True, kw_only=True):
    """Metric to scale by."""

    metric: MetricSpec | None = None
    custom_metric: CustomMetric | None = None


class Autoscaler(KatalystStruct, frozen=True, kw_only=True):
    """Workload, bounds, metrics and speed of scaling."""

    scale_target_ref: TargetReference
    min_replicas: Int32 | None = None
    max_replicas: Int32
    metrics: tuple[IHPAMetric, ...] | None = None
    behavior: Behavior | None = None


class TimeWindow(KatalystStruct, frozen=True, kw_only=True):
    """Input and output of a forecast, in steps of fixed length."""

    input: int
    """Seconds of one step of the history."""
    history_steps: int
    aggregator: Literal["avg", "max"]
    output: int
    """Number of steps per point of the forecast."""
    prediction_steps: int


class AlgorithmConfig(KatalystStruct, frozen=True, kw_only=True):
    """Parameters of the forecast."""

    method: str
    params: dict[str, str] | None = None
    resync_period: Int64
    """Period in seconds."""
    time_window: TimeWindow


class ReplicaBounds(KatalystStruct, frozen=True, kw_only=True):
    """Bounds that apply from a time in the calendar."""

    cron_tab: str
    min_replicas: Int32 | None = None
    max_replicas: Int32 | None = None


class TimeBounds(KatalystStruct, frozen=True, kw_only=True):
    """Calendar of bounds with its period of validity."""

    start: Time | None = None
    end: Time | None = None
    bounds: tuple[ReplicaBounds, ...] | None = None


class IHPASpec(KatalystStruct, frozen=True, kw_only=True):
    """Workload and parameters of scaling."""

    autoscaler: Autoscaler
    algorithm_config: AlgorithmConfig | None = None
    time_bounds: tuple[TimeBounds, ...] | None = None
    scale_strategy: Annotated[str, schema_default("Preview")] | None = None
    """Preview scales a VirtualWorkload for evaluation; Auto scales the workload itself."""


class IHPAStatus(KatalystStruct, frozen=True, kw_only=True):
    """Current scaling and metrics."""

    current_replicas: Int32 | None = None
    desired_replicas: Int32 | None = None
    last_scale_time: Time | None = None
    current_metrics: Annotated[tuple[MetricStatus, ...], ATOMIC_LIST] | None = None


class IntelligentHorizontalPodAutoscaler(CustomResource, frozen=True, kw_only=True):
    """Horizontal autoscaling of one workload by forecasts and calendars."""

    spec: IHPASpec | None = None
    status: IHPAStatus | None = None


class VirtualWorkloadSpec(KatalystStruct, frozen=True, kw_only=True):
    """Replicas set by the autoscaler."""

    replicas: Int32


class VirtualWorkloadStatus(KatalystStruct, frozen=True, kw_only=True):
    """Replicas and selector that the autoscaler reads."""

    replicas: Int32
    selector: str
    """Label selector of the pods of the workload it stands for."""


class VirtualWorkload(CustomResource, frozen=True, kw_only=True):
    """Substitute for a workload, to evaluate scaling without effects."""

    spec: VirtualWorkloadSpec | None = None
    status: VirtualWorkloadStatus | None = None
