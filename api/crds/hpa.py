"""The parts of Kubernetes' HorizontalPodAutoscaler (autoscaling/v2) that Katalyst's autoscaler passes on to it."""

from __future__ import annotations

from typing import Annotated

from api.crds.meta import ATOMIC_LIST, ATOMIC_MAP, Int32, Part, Quantity, TargetReference


class SelectorRequirement(Part, frozen=True, kw_only=True):
    """What a label has to be."""

    key: str
    operator: str
    """In, NotIn, Exists or DoesNotExist."""
    values: tuple[str, ...] | None = None


class LabelSelector(Part, frozen=True, kw_only=True):
    """What the labels have to be, all of it."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[SelectorRequirement, ...] | None = None


class MetricIdentifier(Part, frozen=True, kw_only=True):
    """A metric, and which of its series."""

    name: str
    selector: Annotated[LabelSelector, ATOMIC_MAP] | None = None


class MetricTarget(Part, frozen=True, kw_only=True):
    """What a metric is to be."""

    type: str
    """Utilization, Value or AverageValue."""
    value: Quantity | None = None
    average_value: Quantity | None = None
    average_utilization: Int32 | None = None
    """In percent of requests."""


class MetricCurrent(Part, frozen=True, kw_only=True):
    """What a metric is."""

    value: Quantity | None = None
    average_value: Quantity | None = None
    average_utilization: Int32 | None = None
    """In percent of requests."""


class ResourceSource(Part, frozen=True, kw_only=True):
    """CPU or memory of all containers."""

    name: str
    target: MetricTarget


class ContainerResourceSource(Part, frozen=True, kw_only=True):
    """CPU or memory of the containers of one name."""

    name: str
    container: str
    target: MetricTarget


class PodsSource(Part, frozen=True, kw_only=True):
    """A metric that every pod has."""

    metric: MetricIdentifier
    target: MetricTarget


class ObjectSource(Part, frozen=True, kw_only=True):
    """A metric of one object."""

    described_object: TargetReference
    metric: MetricIdentifier
    target: MetricTarget


class ExternalSource(Part, frozen=True, kw_only=True):
    """A metric of no object."""

    metric: MetricIdentifier
    target: MetricTarget


class MetricSpec(Part, frozen=True, kw_only=True):
    """What is scaled by: the field that `type` names."""

    type: str
    """Resource, ContainerResource, Pods, Object or External."""
    resource: ResourceSource | None = None
    container_resource: ContainerResourceSource | None = None
    pods: PodsSource | None = None
    object: ObjectSource | None = None
    external: ExternalSource | None = None


class ResourceCurrent(Part, frozen=True, kw_only=True):
    """CPU or memory of all containers."""

    name: str
    current: MetricCurrent


class ContainerResourceCurrent(Part, frozen=True, kw_only=True):
    """CPU or memory of the containers of one name."""

    name: str
    container: str
    current: MetricCurrent


class PodsCurrent(Part, frozen=True, kw_only=True):
    """A metric that every pod has."""

    metric: MetricIdentifier
    current: MetricCurrent


class ObjectCurrent(Part, frozen=True, kw_only=True):
    """A metric of one object."""

    described_object: TargetReference
    metric: MetricIdentifier
    current: MetricCurrent


class ExternalCurrent(Part, frozen=True, kw_only=True):
    """A metric of no object."""

    metric: MetricIdentifier
    current: MetricCurrent


class MetricStatus(Part, frozen=True, kw_only=True):
    """What was seen: the field that `type` names."""

    type: str
    """Resource, ContainerResource, Pods, Object or External."""
    resource: ResourceCurrent | None = None
    container_resource: ContainerResourceCurrent | None = None
    pods: PodsCurrent | None = None
    object: ObjectCurrent | None = None
    external: ExternalCurrent | None = None


class ScalingPolicy(Part, frozen=True, kw_only=True):
    """How many replicas may come or go in some time."""

    type: str
    """Pods or Percent."""
    value: Int32
    period_seconds: Int32


class ScalingRules(Part, frozen=True, kw_only=True):
    """How fast replicas come, or go."""

    policies: Annotated[tuple[ScalingPolicy, ...], ATOMIC_LIST] | None = None
    select_policy: str | None = None
    """Max, Min or Disabled."""
    stabilization_window_seconds: Int32 | None = None


class Behavior(Part, frozen=True, kw_only=True):
    """How fast replicas come and go."""

    scale_up: ScalingRules | None = None
    scale_down: ScalingRules | None = None
