"""KatalystVerticalPodAutoscaler in both versions, its recommendation, and ResourceRecommend.
Both versions are served and v1alpha2 is stored, without conversion: the API server keeps of a v1alpha1 object only
the fields that v1alpha2 has.
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
    """Who computes it, and how."""

    recommender: Annotated[str, schema_default("default")] | None = None
    algorithm: Annotated[str, schema_default("percentile")] | None = None
    extensions: Extension | None = None
    """What the recommender is told, in a shape of its own."""


class ControlledResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """Between which bounds one resource is recommended."""

    resource_name: str
    """cpu or memory."""
    min_allowed: Quantity | None = None
    max_allowed: Quantity | None = None
    buffer_percent: Int32 | None = None
    """Added to what was found."""
    controlled_values: str | None = None
    """RequestsAndLimits, RequestsOnly or LimitsOnly."""


class ContainerResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """What is recommended for containers of one name."""

    container_name: str
    """`*` is all of them."""
    controlled_resources_policies: tuple[ControlledResourcePolicy, ...]


class ResourcePolicy(KatalystStruct, frozen=True, kw_only=True):
    """What is recommended, and how it is computed."""

    algorithm_policy: AlgorithmPolicy
    container_policies: tuple[ContainerResourcePolicy, ...]


class Recommendation(KatalystStruct, frozen=True, kw_only=True):
    """What is recommended beside what there is."""

    current: ResourceList | None = None
    target: ResourceList
    uncapped_target: ResourceList | None = None
    """Without the bounds of the policy."""


class ContainerRecommendation(KatalystStruct, frozen=True, kw_only=True):
    """What is recommended for containers of one name."""

    container_name: str
    requests: Recommendation | None = None
    limits: Recommendation | None = None


class PodRecommendation(KatalystStruct, frozen=True, kw_only=True):
    """What is recommended for one pod."""

    pod_name: str
    container_recommendations: tuple[ContainerRecommendation, ...] | None = None


class RecommendResources(KatalystStruct, frozen=True, kw_only=True):
    """What is recommended, for single pods or for all."""

    pod_recommendations: tuple[PodRecommendation, ...] | None = None
    container_recommendations: tuple[ContainerRecommendation, ...] | None = None


class ResourceRecommendSpec(KatalystStruct, frozen=True, kw_only=True):
    """For which workload, and how."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    resource_policy: ResourcePolicy


class ResourceRecommendStatus(KatalystStruct, frozen=True, kw_only=True):
    """What came of it."""

    observed_generation: Int64
    last_recommendation_time: Time | None = None
    recommend_resources: RecommendResources | None = None
    conditions: tuple[ResourceCondition, ...] | None = None


class ResourceRecommend(CustomResource, frozen=True, kw_only=True):
    """What the containers of one workload should request."""

    spec: ResourceRecommendSpec
    status: ResourceRecommendStatus | None = None


class UpdatePolicy(KatalystStruct, frozen=True, kw_only=True):
    """How what is recommended gets into pods."""

    pod_updating_strategy: Annotated[
        Literal["Off", "Recreate", "Inplace", "BestEffortInplace"], schema_default("Off")
    ] | None = None  # fmt: skip
    pod_matching_strategy: Annotated[
        Literal["PodMatchingStrategyForHistoricalPod", "PodMatchingStrategyForFreshPod", "All"], schema_default("All")
    ] | None = None  # fmt: skip
    """Whether pods from before the object, from after it, or all. Katalyst's own controllers act on All alone."""
    pod_apply_strategy: Annotated[Literal["Pod", "Group"], schema_default("Group")] | None = None
    """Whether every pod gets what is recommended for it, or all the same."""


class VPAAlgorithmPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Who computes it, and for what."""

    recommender: str | None = None
    """Nothing is somebody outside."""
    granularity: Annotated[Literal["Default", "Pod"], schema_default("Default")] | None = None
    extensions: Extension | None = None
    """What the recommender is told, in a shape of its own."""


class VPAContainerPolicy(KatalystStruct, frozen=True, kw_only=True):
    """Between which bounds containers of one name are sized."""

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
    """Which workload is sized, and how."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    update_policy: UpdatePolicy | None = None
    resource_policy: VPAResourcePolicy | None = None


class VPASizedResources(KatalystStruct, frozen=True, kw_only=True):
    """What a container is to have."""

    target: ResourceList | None = None
    lower_bound: ResourceList | None = None
    upper_bound: ResourceList | None = None
    uncapped_target: ResourceList | None = None
    """Without the bounds of the policy."""
    current: ResourceList | None = None


class VPAContainerResources(KatalystStruct, frozen=True, kw_only=True):
    """What containers of one name are to have."""

    container_name: str | None = None
    requests: VPASizedResources | None = None
    limits: VPASizedResources | None = None


class VPAPodResources(KatalystStruct, frozen=True, kw_only=True):
    """What the containers of one pod are to have."""

    pod_name: str | None = None
    container_recommendations: tuple[VPAContainerResources, ...] | None = None


class VPAStatus(KatalystStruct, frozen=True, kw_only=True):
    """What pods are to have."""

    pod_resources: tuple[VPAPodResources, ...] | None = None
    container_resources: tuple[VPAContainerResources, ...] | None = None
    conditions: tuple[ResourceCondition, ...] | None = None


class KatalystVerticalPodAutoscaler(CustomResource, frozen=True, kw_only=True):
    """How the pods of one workload are sized (v1alpha1)."""

    spec: VPASpec | None = None
    status: VPAStatus | None = None


class VPASpecV1Alpha2(KatalystStruct, frozen=True, kw_only=True):
    """Which workload is sized, and how."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    update_policy: UpdatePolicy | None = None
    resource_policy: ResourcePolicy | None = None


class VPAStatusV1Alpha2(KatalystStruct, frozen=True, kw_only=True):
    """What pods are to have."""

    recommend_resources: RecommendResources | None = None
    conditions: tuple[ResourceCondition, ...] | None = None


class KatalystVerticalPodAutoscalerV1Alpha2(CustomResource, frozen=True, kw_only=True):
    """How the pods of one workload are sized (v1alpha2)."""

    spec: VPASpecV1Alpha2 | None = None
    status: VPAStatusV1Alpha2 | None = None


class RecommendedResources(KatalystStruct, frozen=True, kw_only=True):
    """What somebody recommends."""

    resources: ResourceList | None = None


class RecommendedContainer(KatalystStruct, frozen=True, kw_only=True):
    """What somebody recommends for containers of one name."""

    container_name: str
    requests: RecommendedResources | None = None
    limits: RecommendedResources | None = None


class RecommendedPod(KatalystStruct, frozen=True, kw_only=True):
    """What somebody recommends for one pod."""

    pod_name: str
    container_recommendations: tuple[RecommendedContainer, ...] | None = None


class VPARecommendationSpec(KatalystStruct, frozen=True, kw_only=True):
    """What somebody recommends."""

    pod_recommendations: tuple[RecommendedPod, ...] | None = None
    container_recommendations: tuple[RecommendedContainer, ...] | None = None


class VPARecommendationStatus(VPARecommendationSpec, frozen=True, kw_only=True):
    """What of that was taken."""

    conditions: tuple[ResourceCondition, ...] | None = None


class VerticalPodAutoscalerRecommendation(CustomResource, frozen=True, kw_only=True):
    """What a recommender says that the pods of one autoscaler should have."""

    spec: VPARecommendationSpec | None = None
    status: VPARecommendationStatus | None = None
