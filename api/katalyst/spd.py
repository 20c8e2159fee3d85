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
    """A bound that a value is to keep."""

    indicator_level: str
    """LowerBound or UpperBound."""
    value: float


class NamedIndicators(KatalystStruct, frozen=True, kw_only=True):
    """The bounds of one measure."""

    name: str
    """Of the workload RPCLatency; of the system cpu_sched_wait, cpu_usage_ratio, cpi and the like."""
    indicators: tuple[IndicatorLimit, ...] | None = None


class ExtendedIndicator(KatalystStruct, frozen=True, kw_only=True):
    """What a plugin is told, in a shape of its own."""

    name: str
    baseline_percent: BaselinePercent | None = None
    indicators: Extension | None = None
    """An object of the kind that is called as this indicator, with `Indicators` behind it."""


class ServiceProfileDescriptorSpec(KatalystStruct, frozen=True, kw_only=True):
    """What the workload needs to be well."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    baseline_percent: BaselinePercent | None = None
    """Of its pods, how many, the oldest, lend nothing; 100 is all of them."""
    business_indicator: Annotated[tuple[NamedIndicators, ...], keyed_by("name")] | None = None
    """What the workload measures itself."""
    system_indicator: Annotated[tuple[NamedIndicators, ...], keyed_by("name")] | None = None
    """What is measured of it on its nodes."""
    extended_indicator: Annotated[tuple[ExtendedIndicator, ...], keyed_by("name")] | None = None


class ContainerUsage(KatalystStruct, frozen=True, kw_only=True):
    """What the containers of one name use."""

    name: str
    usage: ResourceList


class AggregatedPoint(KatalystStruct, frozen=True, kw_only=True):
    """What was measured, or is foretold, of one time."""

    timestamp: Time
    window: Duration
    annotations: dict[str, str] | None = None
    containers: tuple[ContainerUsage, ...]


class AggregatedMetrics(KatalystStruct, frozen=True, kw_only=True):
    """Points of one plugin that are aggregated over pods in one way."""

    aggregator: Literal["avg", "max", "sum"]
    scope: str | None = None
    items: tuple[AggregatedPoint, ...] | None = None


class BusinessIndicatorStatus(KatalystStruct, frozen=True, kw_only=True):
    """How one of the workload's own indicators is."""

    name: str
    current: float | None = None


class ServiceProfileDescriptorStatus(KatalystStruct, frozen=True, kw_only=True):
    """What was measured of the workload."""

    agg_metrics: tuple[AggregatedMetrics, ...] | None = None
    business_status: tuple[BusinessIndicatorStatus, ...] | None = None


class ServiceProfileDescriptor(CustomResource, frozen=True, kw_only=True):
    """What one workload needs to be well, and how it is."""

    spec: ServiceProfileDescriptorSpec | None = None
    status: ServiceProfileDescriptorStatus | None = None
