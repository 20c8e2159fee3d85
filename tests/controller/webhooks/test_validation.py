"""Rejections of pods, configuration and autoscalers, each with field and remedy."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from api.annotations import PROFILE_KEY
from api.colocation_profile import APPLIED_KEY
from api.qos import CPU_KEY, MEMORY_KEY, QOS_LEVEL_KEY
from controller.__main__ import check_config
from controller.webhooks.admission_review import InvalidReview
from controller.webhooks.colocation_profiles import parse_koordinator_profile
from controller.webhooks.config_validation import validate_config
from controller.webhooks.pod_mutation import mutate_pod
from controller.webhooks.pod_validation import validate_pod
from controller.webhooks.vpa_validation import validate_vpa
from kube.objects import UnstructuredObject
from tests.controller.webhooks.reviews import a_review

CONFIG = ("config.katalyst.kubewharf.io", "v1alpha1")
NATIVE = {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}}]}
RECLAIMED = {QOS_LEVEL_KEY: "reclaimed_cores"}
WHERE = "metadata.annotations: annotation"
POLICY = "spec.resourcePolicy.containerPolicies[0]"
RESOURCES = "spec.containers[0].resources"
GPU = {"resourceName": "gpu", "minAllowed": 2, "maxAllowed": 1}
K = "katalyst.kubewharf.io"


@pytest.mark.parametrize(
    ("annotations", "spec", "problems", "warnings"),
    [
        ({}, NATIVE, [], []),
        ({QOS_LEVEL_KEY: "lent"}, {}, [f"{WHERE} {QOS_LEVEL_KEY}: 'lent' is not a QoS"], []),
        ({MEMORY_KEY: '{"numa_binding": true}'}, {}, [f"{WHERE} {MEMORY_KEY}: 'numa_binding': true is not"], []),
        ({MEMORY_KEY: '{"oom_priority": "150"}'}, {},
         [f"{WHERE} {MEMORY_KEY}: oom_priority: 150 is outside of 0 to 99"], []),
        ({MEMORY_KEY: '{"numa_exclusive": "true"}'}, {},
         [f"{WHERE} {MEMORY_KEY}: numa_exclusive: is for dedicated_cores only"], []),
        ({MEMORY_KEY: '{"numa_binding": "true"}', f"{K}/numa_ids": "0,1", f"{K}/numa_number": "3"},
         {}, [f"{WHERE} katalyst.kubewharf.io/numa_ids: names 2 nodes, numa_number says 3"], []),
        ({CPU_KEY: '{"cpu_burst_threshold": "1"}'}, {}, [], [f"annotation {CPU_KEY}: cpu_burst_threshold: has no effect"]),
        ({CPU_KEY: '{"of_a_newer_katalyst": "1"}'}, {}, [], [f"annotation {CPU_KEY}: 'of_a_newer_katalyst' is no enhancement"]),
        ({CPU_KEY: '{"numa_binding": "true"}'}, {}, [], [f"annotation {CPU_KEY}: numa_binding: belongs in {MEMORY_KEY}"]),
        ({QOS_LEVEL_KEY: "dedicated_cores"}, {}, [], [f"annotation {MEMORY_KEY}: numa_binding: is missing"]),
        ({PROFILE_KEY: '{"target": {}}'}, {}, [f"{WHERE} {PROFILE_KEY}: Object contains unknown field"], []),
        (RECLAIMED, NATIVE, [f"{RESOURCES}.requests.cpu: a pod", f"{RESOURCES}.limits.memory: a"], []),
        ({**RECLAIMED, APPLIED_KEY: "one"}, NATIVE, [], [f"{RESOURCES}.requests.cpu: a", f"{RESOURCES}.limits.memory: a"]),
        (RECLAIMED, {"resources": {"limits": {"cpu": "1"}}}, ["spec.resources.limits.cpu: a pod with"], []),
        ({QOS_LEVEL_KEY: "lent", "kubernetes.io/config.mirror": "1"}, {}, [], []),
    ],
)  # fmt: skip
def test_pods(annotations: dict[str, str], spec: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    result = validate_pod(a_review({"metadata": {"annotations": annotations}, "spec": spec}))
    assert [text[: len(start)] for text, start in zip(result.problems, problems, strict=True)] == problems
    assert [text[: len(start)] for text, start in zip(result.warnings, warnings, strict=True)] == warnings


def validated(plural: str, spec: dict[str, Any], **options: Any) -> Any:
    object_ = {"metadata": {"name": "one", "namespace": "default"}, "spec": spec}
    return validate_config(a_review(object_, resource=(*CONFIG, plural), **options), check_config)


TARGET = {"group": CONFIG[0], "version": "v1alpha1", "resource": "adminqosconfigurations"}


@pytest.mark.parametrize(
    ("plural", "spec", "problem"),
    [
        ("katalystcustomconfigs", {"targetType": TARGET}, ""),
        ("katalystcustomconfigs", {"targetType": {**TARGET, "group": "apps"}}, "TargetTypeNotAllowed: group 'apps' is not"),
        ("katalystcustomconfigs", {"targetType": {**TARGET, "resource": "Some Kind"}}, "TargetTypeNotExist: spec.targetType."),
        ("katalystcustomconfigs",
         {"targetType": TARGET, "nodeLabelSelectorAllowedKeyList": [{"priority": 0}, {"priority": 0}]},
         "PrioritySelectorKeyInvalid: duplicated priority: [0]"),
        ("adminqosconfigurations", {"config": {}}, ""),
        ("adminqosconfigurations", {"config": {}, "nodeLabelSelector": "any=label", "priority": 7}, ""),
        ("adminqosconfigurations", {"nodeLabelSelector": "a,"}, "spec.nodeLabelSelector: 'a,' ends with a comma; remove it"),
        ("adminqosconfigurations", {"updateStrategy": {"rollingUpdate": {"canary": "ten"}}},
         "spec.updateStrategy.rollingUpdate.canary: 'ten' is invalid; write 3 or 10%"),
        ("adminqosconfigurations", {"config": {"evictionConfig": {"cpuPressureEvictionConfig": {"loadUpperBoundRatio": 0.5}}}},
         "spec.config.evictionConfig.cpuPressureEvictionConfig.loadUpperBoundRatio: Expected `float` >= 1.0"),
        ("powermanagementconfigurations", {"config": {"powerReductionRatio": 200}}, "spec.config.powerReductionRatio: "),
        ("strategygroupconfigurations", {"paused": "yes"}, "Expected bool, got str - at spec.paused"),
    ],
)  # fmt: skip
def test_configuration(plural: str, spec: dict[str, Any], problem: str) -> None:
    result = validated(plural, spec)
    assert [text[: len(problem)] for text in result.problems] == ([problem] if problem else [])


def test_fields_that_agents_do_not_use_are_warnings() -> None:
    result = validated("authconfigurations", {"config": {}})
    assert [text[:33] for text in result.warnings] == ["without effect: the whole object:"]


def test_an_invalid_object_can_still_lose_its_finalizer() -> None:
    spec = {"nodeLabelSelector": "a,"}
    same = {"metadata": {"name": "one"}, "spec": spec}
    assert validated("adminqosconfigurations", spec, operation="UPDATE", old=same).problems == ()
    assert validated("adminqosconfigurations", spec, operation="UPDATE", old={**same, "spec": {}}).problems
    deleted = {"metadata": {"name": "one", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec}
    assert validate_config(a_review(deleted, resource=(*CONFIG, "adminqosconfigurations")), check_config).problems == ()


def a_vpa(name: str, namespace: str, **policy: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}}
    spec |= {"resourcePolicy": {"containerPolicies": [policy]}} if policy else {}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


@pytest.mark.parametrize(
    ("vpa", "namespace", "problems"),
    [
        (a_vpa("b", "one"), "one", ["spec.targetRef: 'apps Deployment web' belongs to one/a; delete one of the two"]),
        (a_vpa("a", "one"), "one", []),
        (a_vpa("b", "two"), "two", []),
        (a_vpa("b", "two", controlledResources=["cpu"]), "two", [f"{POLICY}.containerName: is missing"]),
        (a_vpa("b", "two", containerName="*", controlledResources=["cpu", "disk"]), "two",
         [f"{POLICY}.controlledResources[1]: 'disk' cannot be scaled; use cpu or memory"]),
        (a_vpa("b", "two", containerName="a", minAllowed={"cpu": "2"}, maxAllowed={"cpu": "1500m"}), "two",
         [f"{POLICY}.minAllowed.cpu: 2 is more than maxAllowed, 1500m; lower it"]),
        (a_vpa("b", "two", containerName="a", minAllowed={"cpu": "2"}, maxAllowed={"memory": "1"}), "two", []),
        (a_vpa("b", "two", containerName="a", maxAllowed={"cpu": "much"}), "two",
         [f"{POLICY}.maxAllowed.cpu: 'much' is not a quantity"]),
        (a_vpa("b", "two", containerName="a", controlledResourcesPolicies=[GPU]), "two",
         [f"{POLICY}.controlledResourcesPolicies[0].resourceName: 'gpu' cannot be scaled",
          f"{POLICY}.controlledResourcesPolicies[0].minAllowed: 2 is more"]),
    ],
)  # fmt: skip
def test_autoscalers(vpa: dict[str, Any], namespace: str, problems: list[str]) -> None:
    others = [msgspec.json.decode(json.dumps(a_vpa("a", "one")), type=UnstructuredObject)]
    result = validate_vpa(a_review(vpa, namespace=namespace), others)
    assert [text[: len(start)] for text, start in zip(result.problems, problems, strict=True)] == problems


@pytest.mark.parametrize(
    "spec",
    [
        {"resourcePolicy": [1]},
        {"resourcePolicy": {"containerPolicies": 5}},
        {"resourcePolicy": {"containerPolicies": [1]}},
        {"resourcePolicy": {"containerPolicies": [{"minAllowed": [1]}]}},
        {"resourcePolicy": {"containerPolicies": [{"controlledResources": 5}]}},
        {"resourcePolicy": {"containerPolicies": [{"controlledResourcesPolicies": [1]}]}},
    ],
)
def test_an_autoscaler_of_the_wrong_shape_is_no_bug(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidReview, match=r"^spec.resourcePolicy: Expected"):
        validate_vpa(a_review({"metadata": {"name": "a"}, "spec": spec}), ())


def test_of_a_million_problems_of_an_autoscaler_the_first_ones_are_looked_for() -> None:
    vpa = a_vpa("b", "one", containerName="a", controlledResources=["disk"] * 1_000_000)
    assert len(validate_vpa(a_review(vpa), ()).problems) == 64


@pytest.mark.parametrize("field", ["containers", "initContainers"])
def test_a_pod_with_thousands_of_containers_is_refused(field: str) -> None:
    pod = {"spec": {field: [{"name": "c"}] * 1025}}
    assert validate_pod(a_review(pod)).problems == (
        "spec.containers: 1025 containers are more than 1024; write several pods",
    )
    result = mutate_pod(a_review(pod), (), {})
    assert (result.patch, len(result.warnings)) == ((), 1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"labels": {"": "x"}}, "spec.labels: '' is no key"),
        ({"labels": {"a b": "x"}}, "spec.labels: 'a b' is no key"),
        ({"labels": {"a": "x\ny"}}, "spec.labels.a: 'x\\ny' is no label value"),
        ({"labels": {"a": "x" * 64}}, "spec.labels.a: 'xxx"),
        ({"annotations": {"a/b/c": "x"}}, "spec.annotations: 'a/b/c' is no key"),
        ({"annotations": {"a": "x" * 70_000}}, "spec.annotations: has 70001 bytes, more than 65536"),
        ({"priorityClassName": "Batch \x1b[1m"}, "spec.priorityClassName: 'Batch \\x1b[1m' is no name"),
        ({"schedulerName": "a_b"}, "spec.schedulerName: 'a_b' is no name"),
    ],
)
def test_a_profile_with_which_the_api_server_would_refuse_every_selected_pod_is_rejected(
    fields: dict[str, Any], problem: str
) -> None:
    spec = {"selector": {"matchLabels": {"a": "b"}}, **fields}
    profile = {"apiVersion": "v1", "kind": "ColocationProfile", "metadata": {"name": "p"}, "spec": spec}
    request = a_review(profile, resource=("colocation.dioptase.io", "v1alpha1", "colocationprofiles"))
    (text,) = validate_config(request, check_config).problems
    assert text.startswith(problem)
    document = msgspec.convert({"metadata": {"name": "p"}, "spec": {"qosClass": "BE", **spec}}, UnstructuredObject)
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_koordinator_profile(document)
