"""KatalystVerticalPodAutoscaler in both versions, its recommendation, and ResourceRecommend.
Both versions are served and v1alpha2 is stored without conversion: the API server preserves only those fields of a
v1alpha1 object that v1alpha2 also has.
"""

from __future__ import annotations

from typing import Annotated, Literal

from api.katalyst.meta import (
    ATOMIC_MAP,
    CustomResource,
    Extension,
    Int32,
    Int64,
    KatalystStruct,
    Quantity,
    ResourceCondition,
    ResourceList,
    TargetReference,
    Time,
    schema_default,
)


class AlgorithmPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Recommender and algorithm."""

    recommender: Annotated[str, schema_default("default")] | None = None
    algorithm: Annotated[str, schema_default("percentile")] | None = None
    extensions: Extension | None = None
    """Parameters of the recommender, with a schema of its own."""


class ControlledResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """Bounds of the recommendation for one resource."""

    resource_name: str
    """Either cpu or memory."""
    min_allowed: Quantity | None = None
    max_allowed: Quantity | None = None
    buffer_percent: Int32 | None = None
    """Percentage added to the computed recommendation."""
    controlled_values: str | None = None
    """One of RequestsAndLimits, RequestsOnly or LimitsOnly."""


class ContainerResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """Policy for containers of one name."""

    container_name: str
    """Name, or `*` for all containers."""
    controlled_resources_policies: tuple[ControlledResourcePolicy, ...]


class ResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """Resources to recommend, and how to compute the recommendation."""

    algorithm_policy: AlgorithmPolicy
    container_policies: tuple[ContainerResourcePolicy, ...]


class Recommendation(KatalystStruct, frozen=True, kw_only=True):
    """Recommended and current resources."""

    current: ResourceList | None = None
    target: ResourceList
    uncapped_target: ResourceList | None = None
    """Recommendation before the bounds of the policy are applied."""


class ContainerRecommendation(KatalystStruct, frozen=True, kw_only=True):
    """Recommendation for containers of one name."""

    container_name: str
    requests: Recommendation | None = None
    limits: Recommendation | None = None


class PodRecommendation(KatalystStruct, frozen=True, kw_only=True):
    """Recommendation for one pod."""

    pod_name: str
    container_recommendations: tuple[ContainerRecommendation, ...] | None = None


class RecommendResources(KatalystStruct, frozen=True, kw_only=True):
    """Recommendations for single pods or for all pods."""

    pod_recommendations: tuple[PodRecommendation, ...] | None = None
    container_recommendations: tuple[ContainerRecommendation, ...] | None = None


class ResourceRecommendSpec(KatalystStruct, frozen=True, kw_only=True):
    """Target workload and policy."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    resource_policy: ResourcePolicy


class ResourceRecommendStatus(KatalystStruct, frozen=True, kw_only=True):
    """Computed recommendations."""

    observed_generation: Int64
    last_recommendation_time: Time | None = None
    recommend_resources: RecommendResources | None = None
    conditions: tuple[ResourceCondition, ...] | None = None


class ResourceRecommend(CustomResource, frozen=True, kw_only=True):
    """Recommended requests for the containers of one workload."""

    spec: ResourceRecommendSpec
    status: ResourceRecommendStatus | None = None


class UpdatePolicy(KatalystStruct, frozen=True, kw_only=True):
    """How recommendations are applied to pods."""

    pod_updating_strategy: Annotated[
        Literal["Off", "Recreate", "Inplace", "BestEffortInplace"], schema_default("Off")
    ] | None = None  # fmt: skip
    pod_matching_strategy: Annotated[
        Literal["PodMatchingStrategyForHistoricalPod", "PodMatchingStrategyForFreshPod", "All"], schema_default("All")
    ] | None = None  # fmt: skip
    """Pods to update: created before the object, after it, or all. Katalyst's controllers support only All."""
    pod_apply_strategy: Annotated[Literal["Pod", "Group"], schema_default("Group")] | None = None
    """Whether each pod receives its own recommendation, or all pods the same."""


class VPAAlgorithmPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Recommender and granularity."""

    recommender: str | None = None
    """Empty for an external recommender."""
    granularity: Annotated[Literal["Default", "Pod"], schema_default("Default")] | None = None
    extensions: Extension | None = None
    """Parameters of the recommender, with a schema of its own."""


class VPAContainerPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Bounds for containers of one name."""

    container_name: str
    min_allowed: ResourceList | None = None
    max_allowed: ResourceList | None = None
    controlled_resources: Annotated[tuple[str, ...], schema_default(["cpu"])] | None = None
    controlled_values: Annotated[
        Literal["RequestsAndLimits", "RequestsOnly", "LimitsOnly"], schema_default("RequestsAndLimits")
    ] | None = None  # fmt: skip
    resource_resize_policy: Annotated[str, schema_default("None")] | None = None


class VPAResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """How containers are sized."""

    algorithm_policy: VPAAlgorithmPolicy | None = None
    container_policies: tuple[VPAContainerPolicy, ...] | None = None


class VPASpec(KatalystStruct, frozen=True, kw_only=True):
    """Target workload and policies."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    update_policy: UpdatePolicy | None = None
    resource_policy: VPAResourcePolicy | None = None


class VPASizedResources(KatalystStruct, frozen=True, kw_only=True):
    """Recommended resources of a container and their bounds."""

    target: ResourceList | None = None
    lower_bound: ResourceList | None = None
    upper_bound: ResourceList | None = None
    uncapped_target: ResourceList | None = None
    """Recommendation before the bounds of the policy are applied."""
    current: ResourceList | None = None


class VPAContainerResources(KatalystStruct, frozen=True, kw_only=True):
    """Recommended resources of containers of one name."""

    container_name: str | None = None
    requests: VPASizedResources | None = None
    limits: VPASizedResources | None = None


class VPAPodResources(KatalystStruct, frozen=True, kw_only=True):
    """Recommended resources of the containers of one pod."""

    pod_name: str | None = None
    container_recommendations: tuple[VPAContainerResources, ...] | None = None


class VPAStatus(KatalystStruct, frozen=True, kw_only=True):
    """Recommended resources of the pods."""

    pod_resources: tuple[VPAPodResources, ...] | None = None
    container_resources: tuple[VPAContainerResources, ...] | None = None
    conditions: tuple[ResourceCondition, ...] | None = None


class KatalystVerticalPodAutoscaler(CustomResource, frozen=True, kw_only=True):
    """Vertical autoscaling of the pods of one workload (v1alpha1)."""

    spec: VPASpec | None = None
    status: VPAStatus | None = None


class VPASpecV1Alpha2(KatalystStruct, frozen=True, kw_only=True):
    """Target workload and policies."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    update_policy: UpdatePolicy | None = None
    resource_policy: ResourcePolicy | None = None


class VPAStatusV1Alpha2(KatalystStruct, frozen=True, kw_only=True):
    """Recommended resources of the pods."""

    recommend_resources: RecommendResources | None = None
    conditions: tuple[ResourceCondition, ...] | None = None


class KatalystVerticalPodAutoscalerV1Alpha2(CustomResource, frozen=True, kw_only=True):
    """Vertical autoscaling of the pods of one workload (v1alpha2)."""

    spec: VPASpecV1Alpha2 | None = None
    status: VPAStatusV1Alpha2 | None = None


class RecommendedResources(KatalystStruct, frozen=True, kw_only=True):
    """Resources recommended by an external recommender."""

    resources: ResourceList | None = None


class RecommendedContainer(KatalystStruct, frozen=True, kw_only=True):
    """External recommendation for containers of one name."""

    container_name: str
    requests: RecommendedResources | None = None
    limits: RecommendedResources | None = None


class RecommendedPod(KatalystStruct, frozen=True, kw_only=True):
    """External recommendation for one pod."""

    pod_name: str
    container_recommendations: tuple[RecommendedContainer, ...] | None = None


class VPARecommendationSpec(KatalystStruct, frozen=True, kw_only=True):
    """External recommendations for single pods or for all pods."""

    pod_recommendations: tuple[RecommendedPod, ...] | None = None
    container_recommendations: tuple[RecommendedContainer, ...] | None = None


class VPARecommendationStatus(VPARecommendationSpec, frozen=True, kw_only=True):
    """Accepted part of the recommendations."""

    conditions: tuple[ResourceCondition, ...] | None = None


class VerticalPodAutoscalerRecommendation(CustomResource, frozen=True, kw_only=True):
    """Recommendations of an external recommender for the pods of one autoscaler."""

    spec: VPARecommendationSpec | None = None
    status: VPARecommendationStatus | None = None
