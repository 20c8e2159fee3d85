"""CustomNodeResource (capacity, topology zones, allocations, taints) and NodeProfileDescriptor (metrics)."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from api.katalyst.meta import (
    OPEN_SCHEMA,
    CustomResource,
    Duration,
    KatalystStruct,
    Quantity,
    ResourceList,
    Time,
    keyed_by,
    schema_default,
)
from api.qos import QoSLevel


class NodeResourceProperty(KatalystStruct, frozen=True, kw_only=True):
    """Property of the node: values, or a quantity."""

    property_name: str
    property_values: tuple[str, ...] | None = None
    property_quantity: Quantity | None = None


class QosTaint(KatalystStruct, frozen=True, kw_only=True):
    """Node taint for pods of one QoS level, identified by key, effect and level."""

    key: str
    effect: str
    qos_level: QoSLevel
    value: str | None = None
    time_added: Time | None = None


class CustomNodeResourceSpec(KatalystStruct, frozen=True, kw_only=True):
    """Properties and QoS taints of the node."""

    node_resource_properties: tuple[NodeResourceProperty, ...] | None = None
    taints: tuple[QosTaint, ...] | None = None


class ZoneAttribute(KatalystStruct, frozen=True, kw_only=True):
    """Attribute of a zone, sibling, package or pool."""

    name: str
    value: str


class ResourcePackage(KatalystStruct, frozen=True, kw_only=True):
    """Resources offered as a unit. `default` and `default-N` are created by Katalyst."""

    package_name: str
    allocatable: ResourceList | None = None
    attributes: tuple[ZoneAttribute, ...] | None = None


class ResourcePool(KatalystStruct, frozen=True, kw_only=True):
    """Resources with lower and upper bounds."""

    pool_name: str
    min_allocatable: ResourceList | None = None
    max_allocatable: ResourceList | None = None
    attributes: tuple[ZoneAttribute, ...] | None = None


class ZoneResources(KatalystStruct, frozen=True, kw_only=True):
    """Capacity and allocatable resources."""

    allocatable: ResourceList | None = None
    capacity: ResourceList | None = None
    resource_packages: Annotated[tuple[ResourcePackage, ...], keyed_by("packageName")] | None = None
    resource_pools: Annotated[tuple[ResourcePool, ...], keyed_by("poolName")] | None = None


class ZoneAllocation(KatalystStruct, frozen=True, kw_only=True):
    """Resources of a zone allocated to one pod."""

    consumer: str
    """Pod as namespace/name/uid."""
    requests: ResourceList | None = None


class ZoneSibling(KatalystStruct, frozen=True, kw_only=True):
    """Sibling zone and its distance."""

    type: str
    name: str
    attributes: tuple[ZoneAttribute, ...] | None = None


class TopologyZone(KatalystStruct, frozen=True, kw_only=True):
    """Part of the node that owns resources."""

    type: str
    """Socket, Numa, L3CacheGroup, GPU, NIC, Storage, or a custom type."""
    name: str
    """For Numa, the number of the NUMA node."""
    resources: ZoneResources | None = None
    attributes: tuple[ZoneAttribute, ...] | None = None
    allocations: tuple[ZoneAllocation, ...] | None = None
    children: Annotated[tuple[TopologyZone, ...], OPEN_SCHEMA] | None = None
    """Zones within this zone. Not validated by the API server, because schemas cannot be recursive."""
    siblings: tuple[ZoneSibling, ...] | None = None


class NodeCondition(KatalystStruct, frozen=True, kw_only=True):
    """Condition of the node's agent."""

    type: str
    """AgentReady or AgentNotFound."""
    status: str
    """True, False or Unknown."""
    last_heartbeat_time: Time | None = None
    reason: str | None = None
    message: str | None = None


class NumaUsage(KatalystStruct, frozen=True, kw_only=True):
    """Usage of one NUMA node."""

    numa_id: int
    usage: ResourceList


class NodeMetric(KatalystStruct, frozen=True, kw_only=True):
    """Usage of the node."""

    generic_usage: ResourceList | None = None
    numa_usage: tuple[NumaUsage, ...] | None = None


class GroupMetric(NodeMetric, frozen=True, kw_only=True):
    """Usage of the pods of one QoS level."""

    qos_level: QoSLevel = field(name="QoSLevel")
    pod_list: tuple[str, ...] | None = None
    """Pods as namespace/name."""


class NodeMetricStatus(KatalystStruct, frozen=True, kw_only=True):
    """Usage and the time of measurement."""

    update_time: Time
    node_metric: NodeMetric | None = None
    group_metric: tuple[GroupMetric, ...] | None = None


class CustomNodeResourceStatus(KatalystStruct, frozen=True, kw_only=True):
    """Resources, topology, allocations and usage of the node."""

    resources: ZoneResources | None = None
    """Includes the resources for reclaimed pods, which the scheduler uses."""
    topology_zone: tuple[TopologyZone, ...] | None = None
    topology_policy: Annotated[str, schema_default("none")] | None = None
    """None, or SingleNUMANode, Restricted, BestEffort or Numeric followed by ContainerLevel or PodLevel."""
    conditions: tuple[NodeCondition, ...] | None = None
    node_metric_status: NodeMetricStatus | None = None


class CustomNodeResource(CustomResource, frozen=True, kw_only=True):
    """Resources and allocations of one node, including those for reclaimed pods; named like the node."""

    spec: CustomNodeResourceSpec | None = None
    status: CustomNodeResourceStatus | None = None


class MetricValue(KatalystStruct, frozen=True, kw_only=True):
    """One measured value."""

    metric_name: str | None = None
    metric_labels: dict[str, str] | None = None
    timestamp: Time | None = None
    window: Duration | None = None
    """Period over which the value was aggregated."""
    aggregator: str | None = None
    """Aggregation: avg, max, min, count, p99, p95 or p90."""
    value: Quantity | None = None


class ScopedNodeMetrics(KatalystStruct, frozen=True, kw_only=True):
    """Node metrics of one plugin."""

    scope: str | None = None
    metrics: tuple[MetricValue, ...] | None = None


class ProfiledPodMetric(KatalystStruct, frozen=True, kw_only=True):
    """Metrics of one pod."""

    namespace: str | None = None
    name: str | None = None
    metrics: tuple[MetricValue, ...] | None = None


class ScopedPodMetrics(KatalystStruct, frozen=True, kw_only=True):
    """Pod metrics of one plugin."""

    scope: str | None = None
    pod_metrics: tuple[ProfiledPodMetric, ...] | None = None


class NodeProfileDescriptorSpec(KatalystStruct, frozen=True, kw_only=True):
    """Empty."""


class NodeProfileDescriptorStatus(KatalystStruct, frozen=True, kw_only=True):
    """Metrics of the node and its pods."""

    node_metrics: tuple[ScopedNodeMetrics, ...] | None = None
    pod_metrics: tuple[ScopedPodMetrics, ...] | None = None


class NodeProfileDescriptor(CustomResource, frozen=True, kw_only=True):
    """Metrics of one node and its pods; named like the node."""

    spec: NodeProfileDescriptorSpec | None = None
    status: NodeProfileDescriptorStatus | None = None
