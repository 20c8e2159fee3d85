"""Rejects new pods whose QoS annotations the agents could not apply as written. Pure."""

from __future__ import annotations

from api.annotations import INEFFECTIVE_MARKS, parse_enhancements, parse_service_profile
from api.colocation_profile import APPLIED_KEY
from api.qos import QOS_LEVEL_KEY, QoSLevel, explicit_qos_level
from controller.webhooks.admission_review import ReviewRequest, ReviewResult, decode_admitted
from controller.webhooks.admitted_pod import MIRROR_KEY, AdmittedPod
from controller.webhooks.reclaimed_requests import MOVED_RESOURCES, native_requests


def validate_pod(request: ReviewRequest) -> ReviewResult:
    """Return the problems of a pod, each with its field and the remedy, and warnings about annotations without effect.

    Raises InvalidReview if the object is no pod. It knows only Katalyst's names of annotations; agents may accept others, by
    their setting `qos`.
    """
    pod = decode_admitted(request.object, AdmittedPod)
    if MIRROR_KEY in pod.annotations:
        return ReviewResult()
    if problem := pod.size_problem:
        return ReviewResult(problems=(problem,))
    try:
        level = explicit_qos_level(pod.annotations) or QoSLevel.SHARED
    except ValueError as error:
        return ReviewResult(problems=(f"metadata.annotations: {error}",))
    texts = [*parse_enhancements(pod.annotations, level)[1], *parse_service_profile(pod.annotations)[1]]
    ineffective = [text for text in texts if any(mark in text for mark in INEFFECTIVE_MARKS)]
    problems = [f"metadata.annotations: {text}" for text in texts if text not in ineffective]
    native = _native_problems(pod) if level is QoSLevel.RECLAIMED else []
    if APPLIED_KEY in pod.annotations:
        # A profile made the pod reclaimed, and its requests stayed: Koordinator's annotation says so, or they cannot be moved.
        return ReviewResult(problems=tuple(problems), warnings=(*ineffective, *native))
    return ReviewResult(problems=(*problems, *native), warnings=tuple(ineffective))


def _native_problems(pod: AdmittedPod) -> list[str]:
    located = [(where, container.resources) for where, container in pod.containers()]
    moved = {native: extended for native, extended, _ in MOVED_RESOURCES}
    return [
        f"{where}.resources.{field}: a pod with {QOS_LEVEL_KEY}: {QoSLevel.RECLAIMED.value} runs on idle resources;"
        f" request {moved[field.rpartition('.')[2]]} instead"
        for where, resources in (("spec", pod.spec.resources), *located)
        for field in native_requests(resources)
    ]
