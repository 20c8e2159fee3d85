"""Changes pods when they are created: applies colocation profiles and moves requests of reclaimed pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from api.colocation_profile import APPLIED_KEY, DRAW_KEY
from api.qos import QOS_LEVEL_KEY, QoSLevel, explicit_qos_level
from controller.webhooks.admission_review import (
    PatchOperation,
    ReviewRequest,
    ReviewResult,
    decode_admitted,
    patch_mapping,
    patch_text,
    remove_fields,
)
from controller.webhooks.admitted_pod import MIRROR_KEY, AdmittedPod
from controller.webhooks.colocation_profiles import PodProfile, draw_of, matching_profiles
from controller.webhooks.reclaimed_requests import move_pod_requests, native_requests

KUBE_SYSTEM = "kube-system"


class AppliedProfiles(msgspec.Struct, frozen=True):
    """Level, metadata and scheduling of a pod after the profiles. `moves_requests` is False if the last profile has
    Koordinator's annotation SKIP_RESOURCES_KEY."""

    level: QoSLevel | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    priority_class: str
    scheduler: str
    moves_requests: bool = True


def mutate_pod(
    request: ReviewRequest, profiles: Iterable[PodProfile], namespace_labels: Mapping[str, str]
) -> ReviewResult:
    """Return the patch of a pod. Raises InvalidReview if the object is no pod.

    A pod with an invalid QoS level stays as it is: the validating webhook rejects it.
    """
    pod = decode_admitted(request.object, AdmittedPod)
    if request.namespace == KUBE_SYSTEM or MIRROR_KEY in pod.annotations:
        return ReviewResult()
    if problem := pod.size_problem:
        return ReviewResult(warnings=(f"{problem}; the pod was not changed",))
    try:
        own_level = explicit_qos_level(pod.annotations)
    except ValueError as error:
        return ReviewResult(warnings=(f"{error}; the pod was not changed",))
    earlier = pod.annotations.get(APPLIED_KEY, "").split(",")
    selected = matching_profiles(profiles, namespace_labels, pod.labels, own_level, earlier)
    applied = apply_profiles(
        pod, own_level, selected, draw_of(pod.annotations, request.namespace, pod.metadata.name, request.uid)
    )
    patch = list(_metadata_patch(pod, applied))
    warnings: tuple[str, ...] = ()
    if applied.level is QoSLevel.RECLAIMED and applied.moves_requests:
        if own_level is None and native_requests(pod.spec.resources):
            # With requests that cannot be moved, a reclaimed pod would still reserve CPU and memory: leave it an online pod.
            return ReviewResult(warnings=move_pod_requests(pod)[1])
        moved, warnings = move_pod_requests(pod)
        patch += moved
    return ReviewResult(patch=tuple(patch), warnings=warnings)


def apply_profiles(
    pod: AdmittedPod, own_level: QoSLevel | None, profiles: Iterable[PodProfile], draw: int
) -> AppliedProfiles:
    """Apply the profiles in their order: a later one overrides an earlier one."""
    labels, annotations = dict(pod.labels), dict(pod.annotations)
    level, moves_requests = own_level, True
    priority_class, scheduler = pod.spec.priority_class_name, pod.spec.scheduler_name
    names: list[str] = []
    for profile in profiles:
        if profile.percent < 100:
            annotations[DRAW_KEY] = str(draw)
        if draw >= profile.percent:
            continue
        names.append(profile.name)
        labels |= profile.labels
        annotations |= profile.annotations
        level = profile.level or level
        moves_requests = profile.moves_requests
        priority_class = profile.priority_class or priority_class
        scheduler = profile.scheduler or scheduler
    if names:
        annotations[APPLIED_KEY] = ",".join(names)
        if level is not None:
            annotations[QOS_LEVEL_KEY] = level.value
    return AppliedProfiles(level, labels, annotations, priority_class, scheduler, moves_requests)


def _metadata_patch(pod: AdmittedPod, applied: AppliedProfiles) -> Iterable[PatchOperation]:
    yield from patch_mapping("/metadata/labels", pod.metadata.labels, applied.labels)
    yield from patch_mapping("/metadata/annotations", pod.metadata.annotations, applied.annotations)
    yield from patch_text("/spec/schedulerName", pod.spec.scheduler_name, applied.scheduler)
    if applied.priority_class != pod.spec.priority_class_name:
        yield PatchOperation("add", "/spec/priorityClassName", applied.priority_class)
        # The admission plugin Priority set these two for the former class. It runs again after a webhook has changed the pod,
        # and refuses values of another class (plugin/pkg/admission/priority).
        yield from remove_fields(
            "/spec", (("priority", pod.spec.priority), ("preemptionPolicy", pod.spec.preemption_policy))
        )
