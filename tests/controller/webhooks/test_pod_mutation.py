"""Changes of new pods: requests of reclaimed pods, and colocation profiles of both kinds."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from api.colocation_profile import APPLIED_KEY, DRAW_KEY, ColocationProfile
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QOS_LEVEL_KEY, QoSLevel
from controller.webhooks.admission_review import InvalidReview
from controller.webhooks.admitted_pod import MIRROR_KEY, AdmittedResources
from controller.webhooks.colocation_profiles import PodProfile, draw_of, parse_koordinator_profile, parse_profile
from controller.webhooks.pod_mutation import mutate_pod
from controller.webhooks.reclaimed_requests import move_resources
from kube.objects import UnstructuredObject
from tests.controller.webhooks.reviews import a_review, apply_patch

RECLAIMED = {QOS_LEVEL_KEY: "reclaimed_cores"}
BATCH, WEB = {"colocation": "batch"}, {"app": "web"}
PROFILE = PodProfile(name="batch", priority_class="dioptase-reclaimed", scheduler="katalyst-scheduler")


def a_pod(*, annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None, **spec: Any) -> Any:
    container = {"name": "main", "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"cpu": "2"}}}
    metadata: dict[str, Any] = {"generateName": "job-"}
    metadata |= {"annotations": annotations} if annotations else {}
    metadata |= {"labels": labels} if labels else {}
    return {
        "metadata": metadata,
        "spec": {"containers": [container], "schedulerName": "default-scheduler", "priority": 0, **spec},
    }


def mutated(pod: Any, *profiles: PodProfile, namespace_labels: dict[str, str] | None = None, **options: Any) -> Any:
    """Return the pod after the webhook."""
    return apply_patch(pod, mutate_pod(a_review(pod, **options), profiles, namespace_labels or {}).patch)


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        ({"cpu": "2", "memory": "1Gi"}, {}, {RECLAIMED_CPU: "2000", RECLAIMED_MEMORY: "1073741824"}),
        ({"cpu": "100m"}, {"cpu": "1"}, {RECLAIMED_CPU: "100"}),
        ({}, {"cpu": "1500m"}, {RECLAIMED_CPU: "1500"}),
        ({"cpu": "1.0005"}, {}, {RECLAIMED_CPU: "1001"}),
        ({"memory": "0.5"}, {}, {RECLAIMED_MEMORY: "1"}),
        ({"memory": 1024}, {}, {RECLAIMED_MEMORY: "1024"}),
        ({"cpu": "0"}, {}, {}),
        ({"cpu": "16E"}, {}, None),
        ({"cpu": "4E"}, {}, {RECLAIMED_CPU: "9223372036854775807"}),
        ({"cpu": "two"}, {}, None),
        ({"cpu": "2", RECLAIMED_CPU: "500"}, {RECLAIMED_CPU: "500"}, {RECLAIMED_CPU: "500"}),
        ({"ephemeral-storage": "1Gi"}, {}, {"ephemeral-storage": "1Gi"}),
    ],
)  # fmt: skip
def test_amounts_are_moved_in_the_units_of_the_extended_resources(
    requests: dict[str, Any], limits: dict[str, Any], expected: dict[str, str] | None
) -> None:
    resources = AdmittedResources(requests=requests, limits=limits)
    if expected is None:
        with pytest.raises(ValueError, match="cpu: "):
            move_resources(resources)
        return
    moved = move_resources(resources)
    assert moved.requests == expected
    assert moved.limits == {name: amount for name, amount in expected.items() if name != "ephemeral-storage"}


def test_all_containers_of_a_reclaimed_pod_lose_their_native_requests() -> None:
    resources = {"requests": {"cpu": "50m"}, "limits": {"cpu": "50m"}}
    pod = a_pod(
        annotations=RECLAIMED,
        initContainers=[{"name": "first", "resources": {}}, {"name": "side", "resources": resources}],
    )
    changed = mutated(pod)
    assert changed["spec"]["containers"][0]["resources"] == {
        "requests": {RECLAIMED_CPU: "1500", RECLAIMED_MEMORY: "1073741824"},
        "limits": {RECLAIMED_CPU: "1500", RECLAIMED_MEMORY: "1073741824"},
    }
    assert changed["spec"]["initContainers"][1]["resources"] == {
        "requests": {RECLAIMED_CPU: "50"},
        "limits": {RECLAIMED_CPU: "50"},
    }
    assert mutate_pod(a_review(changed), (), {}).patch == (), "the second review changes nothing"


@pytest.mark.parametrize(
    ("pod", "namespace", "warning"),
    [
        (a_pod(), "batch", ""),
        (a_pod(annotations={QOS_LEVEL_KEY: "shared_cores"}), "batch", ""),
        (a_pod(annotations={QOS_LEVEL_KEY: "lent_cores"}), "batch", "'lent_cores' is not a QoS level; use one of shared_cores"),
        (a_pod(annotations={**RECLAIMED, MIRROR_KEY: "1"}), "batch", ""),
        (a_pod(annotations=RECLAIMED), "kube-system", ""),
    ],
)  # fmt: skip
def test_other_pods_stay_as_they_are(pod: Any, namespace: str, warning: str) -> None:
    result = mutate_pod(a_review(pod, namespace=namespace), (), {})
    assert (result.patch, result.problems) == ((), ())
    assert all(warning in text for text in result.warnings)
    assert bool(result.warnings) == bool(warning)


def test_requests_of_the_pod_as_a_whole_are_reported() -> None:
    pod = a_pod(annotations=RECLAIMED, resources={"requests": {"cpu": "1"}})
    result = mutate_pod(a_review(pod), (), {})
    assert [text[:29] for text in result.warnings] == ["spec.resources.requests.cpu: "]
    plain = a_pod(resources={"requests": {"cpu": "1"}})
    assert mutated(plain, PROFILE) == plain, "a profile leaves a pod online that it cannot move as a whole"


def test_a_plain_pod_becomes_reclaimed() -> None:
    changed = mutated(a_pod(preemptionPolicy="PreemptLowerPriority"), PROFILE)
    assert changed["metadata"]["annotations"] == {QOS_LEVEL_KEY: "reclaimed_cores", APPLIED_KEY: "batch"}
    assert set(changed["spec"]["containers"][0]["resources"]["requests"]) == {RECLAIMED_CPU, RECLAIMED_MEMORY}
    spec = {name: value for name, value in changed["spec"].items() if name != "containers"}
    assert spec == {"schedulerName": "katalyst-scheduler", "priorityClassName": "dioptase-reclaimed"}


@pytest.mark.parametrize(
    ("spec", "namespace_labels", "labels", "selected"),
    [
        ({"namespaceSelector": {"matchLabels": BATCH}}, BATCH, {}, True),
        ({"namespaceSelector": {"matchLabels": BATCH}}, {}, BATCH, False),
        ({"selector": {"matchLabels": BATCH}}, {}, BATCH, True),
        ({"namespaceSelector": {"matchLabels": BATCH}, "selector": {"matchLabels": {"app": "a"}}}, BATCH, {"app": "b"}, False),
        ({"selector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}}, {}, {}, True),
        ({"selector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}}, {}, WEB, False),
        ({"selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}, {}, {"app": ""}, True),
        ({"selector": {"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}}, {}, {"app": ""}, False),
        ({"selector": {"matchLabels": BATCH}, "percent": 0}, {}, BATCH, False),
    ],
)  # fmt: skip
def test_profiles_select_by_namespace_and_by_pod(
    spec: dict[str, Any], namespace_labels: dict[str, str], labels: dict[str, str], *, selected: bool
) -> None:
    profile = {
        "apiVersion": "colocation.dioptase.io/v1alpha1",
        "kind": "ColocationProfile",
        "metadata": {"name": "p"},
        "spec": spec,
    }
    parsed = parse_profile(msgspec.convert(profile, ColocationProfile))
    changed = mutated(a_pod(labels=labels), parsed, namespace_labels=namespace_labels)
    assert (changed["metadata"].get("annotations", {}).get(QOS_LEVEL_KEY) == "reclaimed_cores") == selected


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "spec: without namespaceSelector and selector every pod of the cluster would be reclaimed; write for example"),
        ({"selector": {"matchLabels": {}}}, "spec: without namespaceSelector and selector"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "in", "values": ["b"]}]}},
         "spec.selector.matchExpressions[0].operator: 'in' is unknown; use In, NotIn, Exists, DoesNotExist"),
        ({"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
         "spec.namespaceSelector.matchExpressions[0].values: In has 0 values; write at least one"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
         "spec.selector.matchExpressions[0].values: Exists has 1 values; remove them"),
        ({"selector": {"matchLabels": BATCH}, "annotations": RECLAIMED}, f"spec.annotations: remove {QOS_LEVEL_KEY}"),
    ],
)  # fmt: skip
def test_an_invalid_profile_is_rejected_by_field(spec: dict[str, Any], problem: str) -> None:
    profile = {
        "apiVersion": "colocation.dioptase.io/v1alpha1",
        "kind": "ColocationProfile",
        "metadata": {"name": "p"},
        "spec": spec,
    }
    with pytest.raises(ValueError) as caught:
        parse_profile(msgspec.convert(profile, ColocationProfile))
    assert str(caught.value).startswith(problem)


def test_profiles_apply_in_order_of_their_names_and_later_ones_override() -> None:
    first = PodProfile(name="a", scheduler="one", labels={"tier": "a", "first": "yes"}, priority_class="low")
    second = PodProfile(name="b", scheduler="two", labels={"tier": "b"}, annotations={"note": "x"}, level=None)
    changed = mutated(a_pod(labels={"app": "job"}), second, first)
    assert changed["metadata"]["labels"] == {"app": "job", "tier": "b", "first": "yes"}
    assert changed["metadata"]["annotations"] == {QOS_LEVEL_KEY: "reclaimed_cores", APPLIED_KEY: "a,b", "note": "x"}
    assert (changed["spec"]["schedulerName"], changed["spec"]["priorityClassName"]) == ("two", "low")


@pytest.mark.parametrize(
    ("level", "applies"), [("dedicated_cores", False), ("shared_cores", False), ("reclaimed_cores", True)]
)
def test_a_pod_that_states_another_level_keeps_it(level: str, *, applies: bool) -> None:
    changed = mutated(a_pod(annotations={QOS_LEVEL_KEY: level}), PROFILE)
    assert changed["metadata"]["annotations"][QOS_LEVEL_KEY] == level
    assert (changed["spec"]["schedulerName"] == "katalyst-scheduler") == applies


def test_the_second_review_of_a_pod_that_another_webhook_has_changed_lists_the_same_profiles() -> None:
    """As of reinvocationPolicy IfNeeded: the level that the first review set must not exclude a profile that it applied."""
    shared = PodProfile(name="a", level=QoSLevel.SHARED, labels={"tier": "a"})
    changed = mutated(a_pod(labels={"app": "job"}), shared, PROFILE)
    assert changed["metadata"]["annotations"] == {QOS_LEVEL_KEY: "reclaimed_cores", APPLIED_KEY: "a,batch"}
    changed["spec"]["containers"].append({"name": "sidecar", "resources": {"requests": {"cpu": "50m"}}})
    again = mutated(changed, shared, PROFILE)
    assert again["metadata"] == changed["metadata"]
    assert again["spec"]["containers"][1]["resources"]["requests"] == {RECLAIMED_CPU: "50"}


def koordinator(spec: dict[str, Any], annotations: dict[str, str] | None = None) -> UnstructuredObject:
    body = {"metadata": {"name": "k", "annotations": annotations or {}}, "spec": spec}
    return msgspec.convert(body, UnstructuredObject)


def test_a_profile_of_koordinator_has_the_same_effect() -> None:
    """The example of Koordinator's documentation (docs/user-manuals/colocation-profile)."""
    spec = {
        "namespaceSelector": {"matchLabels": {"koordinator.sh/enable-colocation": "true"}},
        "selector": {"matchLabels": {"koordinator.sh/enable-colocation": "true"}},
        "qosClass": "BE", "priorityClassName": "koord-batch", "koordinatorPriority": 1000, "schedulerName": "koord-scheduler",
        "labels": {"koordinator.sh/mutated": "true"}, "annotations": {"koordinator.sh/intercepted": "true"},
        "probability": "100%",
    }  # fmt: skip
    enabled = {"koordinator.sh/enable-colocation": "true"}
    changed = mutated(a_pod(labels=enabled), parse_koordinator_profile(koordinator(spec)), namespace_labels=enabled)
    assert changed["metadata"]["annotations"][QOS_LEVEL_KEY] == "reclaimed_cores"
    assert changed["metadata"]["labels"] == {**enabled, "koordinator.sh/mutated": "true"}
    assert changed["spec"]["priorityClassName"] == "koord-batch"
    assert changed["spec"]["containers"][0]["resources"]["limits"][RECLAIMED_CPU] == "1500"
    skipping = koordinator(spec, {"config.koordinator.sh/skip-update-resources": "true"})
    unmoved = mutated(a_pod(labels=enabled), parse_koordinator_profile(skipping), namespace_labels=enabled)
    assert unmoved["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1500m", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"qosClass": "LSR"}, "spec.qosClass: 'LSR' is not supported; write BE for reclaimed pods, or LS"),
        ({"probability": "half"}, "spec.probability: 'half' is no percentage; write 0% to 100%"),
        ({"probability": 101}, "spec.probability: 101 is no percentage"),
        ({"patch": {"spec": {}}}, "spec.patch is not supported; remove it"),
        ({"labels": {"a": 1}}, "Expected str, got int"),
    ],
)
def test_what_is_not_supported_of_koordinators_profiles_is_named(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_koordinator_profile(koordinator(spec))
    assert str(caught.value).startswith(problem)


def test_a_percentage_is_stable_for_each_pod() -> None:
    """10 % of 2,000 pods are 200, with a standard deviation of 13; a pod that is reviewed again keeps its draw."""
    profile = PodProfile(name="canary", percent=10)
    reclaimed = 0
    for number in range(2000):
        pod = a_pod()
        changed = mutated(pod, profile, uid=f"review-{number}")
        draw = int(changed["metadata"]["annotations"][DRAW_KEY])
        reclaimed += draw < 10
        assert (QOS_LEVEL_KEY in changed["metadata"]["annotations"]) == (draw < 10)
        if number < 50:
            assert mutated(changed, profile, uid="another") == changed
    assert 150 <= reclaimed <= 250


def test_a_pod_with_a_name_keeps_its_draw_when_it_is_created_again() -> None:
    draws = Counter(draw_of({}, "batch", f"web-{number}", "review") for number in range(1000))
    assert draw_of({}, "batch", "web-0", "one") == draw_of({}, "batch", "web-0", "two")
    assert draw_of({}, "batch", "web-0", "") != draw_of({}, "other", "web-0", "")
    assert (min(draws), max(draws)) == (0, 99)
    assert draw_of({DRAW_KEY: "7"}, "batch", "web-0", "") == 7
    assert draw_of({DRAW_KEY: "-1"}, "batch", "web-0", "") == draw_of({}, "batch", "web-0", "")


def test_an_object_that_is_no_pod_is_an_invalid_review() -> None:
    for pod in ({"spec": {"containers": 1}}, {"metadata": {"annotations": {"a": 1}}}, [], None):
        with pytest.raises(InvalidReview, match="cannot be decoded"):
            mutate_pod(a_review(json.loads(json.dumps(pod))), (), {})
