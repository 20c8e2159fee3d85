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
    """Something that is so of the node: values, or a quantity."""

    property_name: str
    property_values: tuple[str, ...] | None = None
    property_quantity: Quantity | None = None


class QosTaint(KatalystStruct, frozen=True, kw_only=True):
    """As a node's taint, for pods of one level alone. It is the same one where key, effect and level are."""

    key: str
    effect: str
    qos_level: QoSLevel
    value: str | None = None
    time_added: Time | None = None


class CustomNodeResourceSpec(KatalystStruct, frozen=True, kw_only=True):
    """What is so of the node, and who may not come onto it."""

    node_resource_properties: tuple[NodeResourceProperty, ...] | None = None
    taints: tuple[QosTaint, ...] | None = None


class ZoneAttribute(KatalystStruct, frozen=True, kw_only=True):
    """Something more that is so."""

    name: str
    value: str


class ResourcePackage(KatalystStruct, frozen=True, kw_only=True):
    """Resources that are offered together. `default` and `default-N` are Katalyst's own."""

    package_name: str
    allocatable: ResourceList | None = None
    attributes: tuple[ZoneAttribute, ...] | None = None


class ResourcePool(KatalystStruct, frozen=True, kw_only=True):
    """Resources between two bounds."""

    pool_name: str
    min_allocatable: ResourceList | None = None
    max_allocatable: ResourceList | None = None
    attributes: tuple[ZoneAttribute, ...] | None = None


class ZoneResources(KatalystStruct, frozen=True, kw_only=True):
    """What there is, and what pods can have of it."""

    allocatable: ResourceList | None = None
    capacity: ResourceList | None = None
    resource_packages: Annotated[tuple[ResourcePackage, ...], keyed_by("packageName")] | None = None
    resource_pools: Annotated[tuple[ResourcePool, ...], keyed_by("poolName")] | None = None


class ZoneAllocation(KatalystStruct, frozen=True, kw_only=True):
    """What one pod was given here."""

    consumer: str
    """As namespace/name/uid."""
    requests: ResourceList | None = None


class ZoneSibling(KatalystStruct, frozen=True, kw_only=True):
    """Another zone beside this one, and how far away."""

    type: str
    name: str
    attributes: tuple[ZoneAttribute, ...] | None = None


class TopologyZone(KatalystStruct, frozen=True, kw_only=True):
    """A part of the node that resources belong to."""

    type: str
    """Socket, Numa, L3CacheGroup, GPU, NIC, Storage, or what somebody else calls theirs."""
    name: str
    """Of a Numa its number."""
    resources: ZoneResources | None = None
    attributes: tuple[ZoneAttribute, ...] | None = None
    allocations: tuple[ZoneAllocation, ...] | None = None
    children: Annotated[tuple[TopologyZone, ...], OPEN_SCHEMA] | None = None
    """Zones within this one; the API server takes them unchecked, since schemas cannot repeat themselves."""
    siblings: tuple[ZoneSibling, ...] | None = None


class NodeCondition(KatalystStruct, frozen=True, kw_only=True):
    """One thing that holds of the node's agent, or does not."""

    type: str
    """AgentReady or AgentNotFound."""
    status: str
    """True, False or Unknown."""
    last_heartbeat_time: Time | None = None
    reason: str | None = None
    message: str | None = None


class NumaUsage(KatalystStruct, frozen=True, kw_only=True):
    """What is used of one NUMA node."""

    numa_id: int
    usage: ResourceList


class NodeMetric(KatalystStruct, frozen=True, kw_only=True):
    """What is used of the node."""

    generic_usage: ResourceList | None = None
    numa_usage: tuple[NumaUsage, ...] | None = None


class GroupMetric(NodeMetric, frozen=True, kw_only=True):
    """What the pods of one level use."""

    qos_level: QoSLevel = field(name="QoSLevel")
    pod_list: tuple[str, ...] | None = None
    """As namespace/name."""


class NodeMetricStatus(KatalystStruct, frozen=True, kw_only=True):
    """What is used, and when that was so."""

    update_time: Time
    node_metric: NodeMetric | None = None
    group_metric: tuple[GroupMetric, ...] | None = None


class CustomNodeResourceStatus(KatalystStruct, frozen=True, kw_only=True):
    """What the node has, lends and has given out."""

    resources: ZoneResources | None = None
    """Also what reclaimed pods can have, which the scheduler goes by."""
    topology_zone: tuple[TopologyZone, ...] | None = None
    topology_policy: Annotated[str, schema_default("none")] | None = None
    """None, or SingleNUMANode, Restricted, BestEffort or Numeric, each with ContainerLevel or PodLevel behind it."""
    conditions: tuple[NodeCondition, ...] | None = None
    node_metric_status: NodeMetricStatus | None = None


class CustomNodeResource(CustomResource, frozen=True, kw_only=True):
    """What one node has, lends and has given out; it has the node's name."""

    spec: CustomNodeResourceSpec | None = None
    status: CustomNodeResourceStatus | None = None


class MetricValue(KatalystStruct, frozen=True, kw_only=True):
    """One number that was measured."""

    metric_name: str | None = None
    metric_labels: dict[str, str] | None = None
    timestamp: Time | None = None
    window: Duration | None = None
    """Over how long it was measured."""
    aggregator: str | None = None
    """What of that it is: avg, max, min, count, p99, p95 or p90."""
    value: Quantity | None = None


class ScopedNodeMetrics(KatalystStruct, frozen=True, kw_only=True):
    """What one plugin measured of the node."""

    scope: str | None = None
    metrics: tuple[MetricValue, ...] | None = None


class ProfiledPodMetric(KatalystStruct, frozen=True, kw_only=True):
    """What was measured of one pod."""

    namespace: str | None = None
    name: str | None = None
    metrics: tuple[MetricValue, ...] | None = None


class ScopedPodMetrics(KatalystStruct, frozen=True, kw_only=True):
    """What one plugin measured of the node's pods."""

    scope: str | None = None
    pod_metrics: tuple[ProfiledPodMetric, ...] | None = None


class NodeProfileDescriptorSpec(KatalystStruct, frozen=True, kw_only=True):
    """Nothing."""


class NodeProfileDescriptorStatus(KatalystStruct, frozen=True, kw_only=True):
    """What was measured."""

    node_metrics: tuple[ScopedNodeMetrics, ...] | None = None
    pod_metrics: tuple[ScopedPodMetrics, ...] | None = None


class NodeProfileDescriptor(CustomResource, frozen=True, kw_only=True):
    """What was measured of one node and its pods; it has the node's name."""

    spec: NodeProfileDescriptorSpec | None = None
    status: NodeProfileDescriptorStatus | None = None
