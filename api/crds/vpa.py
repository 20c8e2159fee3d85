"""KatalystVerticalPodAutoscaler in both of its versions, and VerticalPodAutoscalerRecommendation that feeds the first.

Both versions are served and v1alpha2 is stored, without conversion: the API server keeps of a v1alpha1 object what
v1alpha2 has a place for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from api.crds.meta import (
    ATOMIC_MAP,
    Condition,
    Extension,
    Part,
    Resource,
    ResourceList,
    TargetReference,
    preset,
)
from api.crds.recommendation import RecommendResources, ResourcePolicy


class UpdatePolicy(Part, frozen=True, kw_only=True):
    """How what is recommended gets into pods."""

    pod_updating_strategy: Annotated[
        Literal["Off", "Recreate", "Inplace", "BestEffortInplace"], preset("Off")
    ] | None = None  # fmt: skip
    pod_matching_strategy: Annotated[
        Literal["PodMatchingStrategyForHistoricalPod", "PodMatchingStrategyForFreshPod", "All"], preset("All")
    ] | None = None  # fmt: skip
    """Whether pods from before the object, from after it, or all. Katalyst's own controllers act on All alone."""
    pod_apply_strategy: Annotated[Literal["Pod", "Group"], preset("Group")] | None = None
    """Whether every pod gets what is recommended for it, or all the same."""


class VPAAlgorithmPolicy(Part, frozen=True, kw_only=True):
    """Who computes it, and for what."""

    recommender: str | None = None
    """Nothing is somebody outside."""
    granularity: Annotated[Literal["Default", "Pod"], preset("Default")] | None = None
    extensions: Extension | None = None
    """What the recommender is told, in a shape of its own."""


class VPAContainerPolicy(Part, frozen=True, kw_only=True):
    """Between which bounds containers of one name are sized."""

    container_name: str
    min_allowed: ResourceList | None = None
    max_allowed: ResourceList | None = None
    controlled_resources: Annotated[tuple[str, ...], preset(["cpu"])] | None = None
    controlled_values: Annotated[
        Literal["RequestsAndLimits", "RequestsOnly", "LimitsOnly"], preset("RequestsAndLimits")
    ] | None = None  # fmt: skip
    resource_resize_policy: Annotated[str, preset("None")] | None = None


class VPAResourcePolicy(Part, frozen=True, kw_only=True):
    """How containers are sized."""

    algorithm_policy: VPAAlgorithmPolicy | None = None
    container_policies: tuple[VPAContainerPolicy, ...] | None = None


class VPASpec(Part, frozen=True, kw_only=True):
    """Which workload is sized, and how."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    update_policy: UpdatePolicy | None = None
    resource_policy: VPAResourcePolicy | None = None


class SizedResources(Part, frozen=True, kw_only=True):
    """What a container is to have."""

    target: ResourceList | None = None
    lower_bound: ResourceList | None = None
    upper_bound: ResourceList | None = None
    uncapped_target: ResourceList | None = None
    """Without the bounds of the policy."""
    current: ResourceList | None = None


class ContainerResources(Part, frozen=True, kw_only=True):
    """What containers of one name are to have."""

    container_name: str | None = None
    requests: SizedResources | None = None
    limits: SizedResources | None = None


class PodResources(Part, frozen=True, kw_only=True):
    """What the containers of one pod are to have."""

    pod_name: str | None = None
    container_recommendations: tuple[ContainerResources, ...] | None = None


class VPAStatus(Part, frozen=True, kw_only=True):
    """What pods are to have."""

    pod_resources: tuple[PodResources, ...] | None = None
    container_resources: tuple[ContainerResources, ...] | None = None
    conditions: tuple[Condition, ...] | None = None


class KatalystVerticalPodAutoscaler(Resource, frozen=True, kw_only=True):
    """How the pods of one workload are sized (v1alpha1)."""

    spec: VPASpec | None = None
    status: VPAStatus | None = None


class VPASpecV1Alpha2(Part, frozen=True, kw_only=True):
    """Which workload is sized, and how."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    update_policy: UpdatePolicy | None = None
    resource_policy: ResourcePolicy | None = None


class VPAStatusV1Alpha2(Part, frozen=True, kw_only=True):
    """What pods are to have."""

    recommend_resources: RecommendResources | None = None
    conditions: tuple[Condition, ...] | None = None


class KatalystVerticalPodAutoscalerV1Alpha2(Resource, frozen=True, kw_only=True):
    """How the pods of one workload are sized (v1alpha2)."""

    spec: VPASpecV1Alpha2 | None = None
    status: VPAStatusV1Alpha2 | None = None


class RecommendedResources(Part, frozen=True, kw_only=True):
    """What somebody recommends."""

    resources: ResourceList | None = None


class RecommendedContainer(Part, frozen=True, kw_only=True):
    """What somebody recommends for containers of one name."""

    container_name: str
    requests: RecommendedResources | None = None
    limits: RecommendedResources | None = None


class RecommendedPod(Part, frozen=True, kw_only=True):
    """What somebody recommends for one pod."""

    pod_name: str
    container_recommendations: tuple[RecommendedContainer, ...] | None = None


class VPARecommendationSpec(Part, frozen=True, kw_only=True):
    """What somebody recommends."""

    pod_recommendations: tuple[RecommendedPod, ...] | None = None
    container_recommendations: tuple[RecommendedContainer, ...] | None = None


class VPARecommendationStatus(VPARecommendationSpec, frozen=True, kw_only=True):
    """What of that was taken."""

    conditions: tuple[Condition, ...] | None = None


class VerticalPodAutoscalerRecommendation(Resource, frozen=True, kw_only=True):
    """What a recommender says that the pods of one autoscaler should have."""

    spec: VPARecommendationSpec | None = None
    status: VPARecommendationStatus | None = None
