"""ResourceRecommend: what the containers of a workload should request, by what they used."""

from __future__ import annotations

from typing import Annotated

from api.crds.meta import (
    ATOMIC_MAP,
    Condition,
    Extension,
    Int32,
    Int64,
    Part,
    Quantity,
    Resource,
    ResourceList,
    TargetReference,
    Time,
    preset,
)


class AlgorithmPolicy(Part, frozen=True, kw_only=True):
    """Who computes it, and how."""

    recommender: Annotated[str, preset("default")] | None = None
    algorithm: Annotated[str, preset("percentile")] | None = None
    extensions: Extension | None = None
    """What the recommender is told, in a shape of its own."""


class ControlledResourcePolicy(Part, frozen=True, kw_only=True):
    """Between which bounds one resource is recommended."""

    resource_name: str
    """cpu or memory."""
    min_allowed: Quantity | None = None
    max_allowed: Quantity | None = None
    buffer_percent: Int32 | None = None
    """Added to what was found."""
    controlled_values: str | None = None
    """RequestsAndLimits, RequestsOnly or LimitsOnly."""


class ContainerResourcePolicy(Part, frozen=True, kw_only=True):
    """What is recommended for containers of one name."""

    container_name: str
    """`*` is all of them."""
    controlled_resources_policies: tuple[ControlledResourcePolicy, ...]


class ResourcePolicy(Part, frozen=True, kw_only=True):
    """What is recommended, and how it is computed."""

    algorithm_policy: AlgorithmPolicy
    container_policies: tuple[ContainerResourcePolicy, ...]


class Recommendation(Part, frozen=True, kw_only=True):
    """What is recommended beside what there is."""

    current: ResourceList | None = None
    target: ResourceList
    uncapped_target: ResourceList | None = None
    """Without the bounds of the policy."""


class ContainerRecommendation(Part, frozen=True, kw_only=True):
    """What is recommended for containers of one name."""

    container_name: str
    requests: Recommendation | None = None
    limits: Recommendation | None = None


class PodRecommendation(Part, frozen=True, kw_only=True):
    """What is recommended for one pod."""

    pod_name: str
    container_recommendations: tuple[ContainerRecommendation, ...] | None = None


class RecommendResources(Part, frozen=True, kw_only=True):
    """What is recommended, for single pods or for all."""

    pod_recommendations: tuple[PodRecommendation, ...] | None = None
    container_recommendations: tuple[ContainerRecommendation, ...] | None = None


class ResourceRecommendSpec(Part, frozen=True, kw_only=True):
    """For which workload, and how."""

    target_ref: Annotated[TargetReference, ATOMIC_MAP]
    resource_policy: ResourcePolicy


class ResourceRecommendStatus(Part, frozen=True, kw_only=True):
    """What came of it."""

    observed_generation: Int64
    last_recommendation_time: Time | None = None
    recommend_resources: RecommendResources | None = None
    conditions: tuple[Condition, ...] | None = None


class ResourceRecommend(Resource, frozen=True, kw_only=True):
    """What the containers of one workload should request."""

    spec: ResourceRecommendSpec
    status: ResourceRecommendStatus | None = None
