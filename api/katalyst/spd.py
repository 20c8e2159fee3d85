"""ServiceProfileDescriptor: targets of a workload's indicators, and its aggregated metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from api.katalyst.meta import (
    ATOMIC_MAP,
    CustomResource,
    Duration,
    Extension,
    KatalystStruct,
    Percent,
    ResourceList,
    TargetReference,
    Time,
    keyed_by,
    schema_keywords,
)

BaselinePercent = Annotated[Percent, schema_keywords(format="int32")]


class IndicatorLimit(KatalystStruct, frozen=True, kw_only=True):
    """Bound of an indicator."""

    indicator_level: str
    """LowerBound or UpperBound."""
    value: float


class NamedIndicators(KatalystStruct, frozen=True, kw_only=True):
    """Bounds of one indicator."""

    name: str
    """RPCLatency for business indicators; cpu_sched_wait, cpu_usage_ratio, cpi and others for system indicators."""
    indicators: tuple[IndicatorLimit, ...] | None = None


class ExtendedIndicator(KatalystStruct, frozen=True, kw_only=True):
    """Parameters of a plugin, with a schema of its own."""

    name: str
    baseline_percent: BaselinePercent | None = None
    indicators: Extension | None = None
    """Object of the kind named like this indicator with the suffix `Indicators`."""


class ServiceProfileDescriptorSpec(KatalystStruct, frozen=True, kw_only=True):
    """Targets of the workload."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    baseline_percent: BaselinePercent | None = None
    """Number of pods, the oldest first, whose resources are not reclaimed; 100 means all."""
    business_indicator: Annotated[tuple[NamedIndicators, ...], keyed_by("name")] | None = None
    """Indicators that the workload measures itself."""
    system_indicator: Annotated[tuple[NamedIndicators, ...], keyed_by("name")] | None = None
    """Indicators measured on the nodes."""
    extended_indicator: Annotated[tuple[ExtendedIndicator, ...], keyed_by("name")] | None = None


class ContainerUsage(KatalystStruct, frozen=True, kw_only=True):
    """Usage of the containers of one name."""

    name: str
    usage: ResourceList


class AggregatedPoint(KatalystStruct, frozen=True, kw_only=True):
    """Measured or predicted values at one time."""

    timestamp: Time
    window: Duration
    annotations: dict[str, str] | None = None
    containers: tuple[ContainerUsage, ...]


class AggregatedMetrics(KatalystStruct, frozen=True, kw_only=True):
    """Time series of one plugin with one aggregation over pods."""

    aggregator: Literal["avg", "max", "sum"]
    scope: str | None = None
    items: tuple[AggregatedPoint, ...] | None = None


class BusinessIndicatorStatus(KatalystStruct, frozen=True, kw_only=True):
    """Current value of one business indicator."""

    name: str
    current: float | None = None


class ServiceProfileDescriptorStatus(KatalystStruct, frozen=True, kw_only=True):
    """Aggregated metrics of the workload."""

    agg_metrics: tuple[AggregatedMetrics, ...] | None = None
    business_status: tuple[BusinessIndicatorStatus, ...] | None = None


class ServiceProfileDescriptor(CustomResource, frozen=True, kw_only=True):
    """Targets and aggregated metrics of one workload."""

    spec: ServiceProfileDescriptorSpec | None = None
    status: ServiceProfileDescriptorStatus | None = None
