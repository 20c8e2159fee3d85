"""The chart's admission policy for privileged annotations, on a real API server, in step with the agents' rules."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from agent.config.loader import build_config
from agent.sensors.pods.pod_join import KubeletPodList, decode_pod_list, pod_from_kubelet
from agent.sensors.pods.pod_spec import PodParsingContext
from api.annotations import PROFILE_KEY
from api.qos import CPU_KEY, MAIN_CONTAINER_KEY, MEMORY_KEY, NETWORK_KEY, QOS_LEVEL_KEY
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.image_and_chart import CHART, helm
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Server

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
RELEASE, TENANT, TRUSTED = "test-rights-release", "test-rights-tenant", "test-rights-trusted"
CLASS = "test-rights-payments"
RIGHTS = {
    "oomPriority": {"namespaces": [TRUSTED], "priorityClasses": [CLASS]},
    "cpusetPool": {"namespaces": ["*"]},
    "disableReclaimLevel": {"namespaces": [TRUSTED]},
}
RENAMED = "example.com/cpu"
ENHANCEMENTS = (MEMORY_KEY, CPU_KEY, NETWORK_KEY, RENAMED)
SETTINGS = {"qos": {"rights": RIGHTS, "systemSelector": {"example.com/tier": "system"},
                    "enhancementKeys": {CPU_KEY: RENAMED}}}  # fmt: skip
KOORDINATOR = "koordinator.sh/qosClass"
TEXTS: dict[str, tuple[str, ...]] = {
    QOS_LEVEL_KEY: ("", "", "shared_cores", "dedicated_cores", "dedicated_cores", "system_cores"),
    MEMORY_KEY: (
        "", "", '{"numa_binding": "true"}', '{"oom_priority": "300"}', '{"oom_priority":"-300"}', '{"oom_priority" :\t"7"}',
        '{"numa_exclusive": "true", "numa_binding": "true"}', '{"numa_exclusive": "false"}', '{"numa_share": "false"}',
        '{"numa_share": "true"}', '{"cpuset_pool": "own"}', '{"oom_priority": "-300", "oom_priority": "300"}',
        '{"rss_overuse_threshold": "1.2"}',
    ),
    CPU_KEY: (
        "", "", '{"cpuset_pool": "own"}', '{"cpuset_pool": "share"}', '{"numa_share": "false"}',
        '{"full_pcpus_pairing": "true"}',
    ),
    RENAMED: ("", "", '{"numa_share": "false"}'),
    NETWORK_KEY: ("", "", '{"oom_priority": "1"}'),
    PROFILE_KEY: (
        "", "", '{"disableReclaimLevel": "Node"}', '{"disableReclaimLevel": "Pod"}', '{"disableReclaimLevel":"NUMA"}',
        '{"memoryOffloading": {"enable": true}}', '{"memoryOffloading": {"enable": false, "enableSwap": false}}',
        '{"memoryOffloading": {"enable": false, "intervalS": 1}}', '{"memoryOffloading": {}}',
        '{"targets": {"request_p99_ms": {"upper": 20}}}',
    ),
    "oom_priority": ("", "", "", "5", "-300"),
    "numa_exclusive": ("", "", "", "true", "false"),
    "cpuset_pool": ("", "", "", "own", "share"),
    "example.com/tier": ("", "", "", "system", "web"),
    MAIN_CONTAINER_KEY: ("", "", "second", "missing"),
}  # fmt: skip
"""Values of each annotation to choose from; empty leaves it out."""


def some_pod(chooser: random.Random) -> tuple[dict[str, Any], str]:
    """Return a pod with some annotations, and its namespace."""
    pod = a_pod(f"rights-{uuid.uuid4().hex[:8]}")
    annotated = chooser.sample(list(TEXTS), chooser.randint(0, 4))
    chosen = {key: chooser.choice(TEXTS[key]) for key in annotated}
    pod["metadata"]["annotations"] = {key: text for key, text in chosen.items() if text}
    if chooser.random() < 0.2:
        pod["metadata"]["labels"] = {KOORDINATOR: chooser.choice(["LSE", "LSR", "LS", "SYSTEM"])}
    (first,) = pod["spec"]["containers"]
    pod["spec"]["containers"].append({**first, "name": "second"})
    for container in pod["spec"]["containers"]:
        amount = chooser.choice(["", "1", "2", "500m", "1500m", "2000m", "0.25"])
        container["resources"] = {"requests": {"cpu": amount}} if amount else {}
    if chooser.random() < 0.2:
        pod["spec"]["priorityClassName"] = CLASS
    return pod, chooser.choice([TENANT, TENANT, TRUSTED])


def agent_problems(pod: dict[str, Any], namespace: str) -> tuple[str, ...]:
    """Return the problems that an agent with these settings finds, as the kubelet would list the pod."""
    config = build_config(SETTINGS, "test")
    metadata = {**pod["metadata"], "namespace": namespace, "uid": "u1"}
    body = json.dumps({"items": [{"metadata": metadata, "spec": pod["spec"]}]}).encode()
    (item,) = decode_pod_list(body, KubeletPodList()).items.values()
    context = PodParsingContext(rights=config.qos.rights, dialect=config.qos.dialect())
    return pod_from_kubelet(item.pod, {"main": "/a", "second": "/b"}, context).problems


def missing_rights(problems: tuple[str, ...]) -> set[str]:
    """Return the names of the rights that these problems name."""
    return {
        problem.partition("needs the right ")[2].partition(";")[0]
        for problem in problems
        if "needs the right" in problem
    }


def is_ambiguous(pod: dict[str, Any], problems: tuple[str, ...]) -> bool:
    """Return whether one annotation overrides or invalidates another: agents ignore some, and the policy refuses all."""
    annotations = pod["metadata"].get("annotations", {})
    objects = [json.loads(annotations[key]) for key in ENHANCEMENTS if key in annotations]
    names = [name for each in objects for name in each]
    names += [name for name in annotations if "/" not in name]
    both_keys = CPU_KEY in annotations and RENAMED in annotations
    return (
        both_keys
        or len(names) != len(set(names))
        or any("labels and annotations are ignored" in text for text in problems)
    )


@pytest.fixture(scope="module")
def policy(own_cluster: Cluster) -> Iterator[Server]:
    """The API server with the chart's policy, two namespaces and a priority class."""
    server = own_cluster.server
    values = own_cluster.names.run / "rights-values.json"
    values.write_text(json.dumps({"agent": {"settings": SETTINGS}}))
    show = "--show-only=templates/rights-policy.yaml"
    created = helm(own_cluster, "template", "dioptase", CHART, "--namespace", RELEASE, "--values", values, show)
    own_cluster.kubectl("apply", "-f", "-", text=created)
    for name in (TENANT, TRUSTED, RELEASE):
        server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        path = f"/api/v1/namespaces/{name}/serviceaccounts"
        server.refusal("POST", path, {"metadata": {"name": "default"}})
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    server.ask("POST", classes, {"metadata": {"name": CLASS}, "value": 100})

    def is_in_force() -> bool:
        pod = a_pod("in-force", "system_cores")
        return server.refusal("POST", f"/api/v1/namespaces/{TENANT}/pods?dryRun=All", pod) is not None

    # The API server takes its time with a new policy.
    wait("the policy", is_in_force, 30)
    yield server
    own_cluster.kubectl("delete", "-f", "-", text=created)
    server.ask("DELETE", f"{classes}/{CLASS}")
    for name in (TENANT, TRUSTED, RELEASE):
        server.ask("DELETE", f"/api/v1/namespaces/{name}")


def message(server: Server, namespace: str, pod: dict[str, Any]) -> str:
    """Return why the API server refuses the pod; empty if it accepts it."""
    refusal = server.refusal("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    return "" if refusal is None else str(refusal)


def annotated(**annotations: str) -> dict[str, Any]:
    pod = a_pod("annotated")
    pod["metadata"]["annotations"] = annotations
    return pod


def test_a_refusal_names_the_annotation_the_right_and_the_namespace(policy: Server) -> None:
    pod = annotated(**{MEMORY_KEY: '{"oom_priority": "300"}'})
    text = message(policy, TENANT, pod)
    name = "dioptase-rights"
    assert (
        f"ValidatingAdmissionPolicy '{name}' with binding '{name}' denied request: oom_priority needs the right "
        in text
    )
    assert f"oomPriority; add namespace {TENANT} to qos.rights.oomPriority (docs/security.md)" in text
    assert message(policy, TRUSTED, pod) == ""
    pod["spec"]["priorityClassName"] = CLASS
    assert message(policy, TENANT, pod) == ""


def test_pods_of_the_release_may_be_system_cores(policy: Server) -> None:
    assert message(policy, RELEASE, a_pod("agent", "system_cores")) == ""
    assert "system_cores needs the right systemCores" in message(policy, TRUSTED, a_pod("agent", "system_cores"))


HIDDEN = "with a backslash needs all rights of namespace"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (r'{"oom\u005fpriority": "300"}', HIDDEN),
        (r'{"\u006fom_priority": "300"}', HIDDEN),
        (r'{"oom_priority": "\u00330\u0030"}', "oom_priority needs the right oomPriority"),
    ],
)
def test_an_escape_hides_nothing(policy: Server, text: str, refusal: str) -> None:
    pod = annotated(**{MEMORY_KEY: text})
    assert missing_rights(agent_problems(pod, TENANT)) == {"oomPriority"}
    assert refusal in message(policy, TENANT, pod)


def test_the_policy_refuses_what_agents_ignore_and_nothing_else(policy: Server) -> None:
    chooser = random.Random(18)
    wrong, refused, accepted = [], 0, 0
    for _ in range(500):
        pod, namespace = some_pod(chooser)
        problems = agent_problems(pod, namespace)
        expected, text = missing_rights(problems), message(policy, namespace, pod)
        refused += bool(expected)
        accepted += not text
        # The API server names the first failed rule.
        is_same = any(f"qos.rights.{right}" in text for right in expected) if expected else not text
        if not is_same and (expected or not is_ambiguous(pod, problems)):
            wrong.append((pod["metadata"], pod["spec"], namespace, sorted(expected), text))
    assert not wrong, msgspec.json.encode(wrong[:3]).decode()
    assert (refused > 100, accepted > 100) == (True, True), (refused, accepted)


def test_older_pods_can_be_changed_and_no_annotation_added(policy: Server) -> None:
    path = f"/api/v1/namespaces/{TRUSTED}/pods"
    pod = a_pod("older")
    pod["metadata"]["annotations"] = {MEMORY_KEY: '{"oom_priority": "300"}'}
    policy.ask("POST", path, pod)
    try:
        policy.ask("PATCH", f"{path}/older", {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}}, MERGE)
        system = {"metadata": {"annotations": {QOS_LEVEL_KEY: "system_cores"}}}
        refusal = policy.refusal("PATCH", f"{path}/older", system, MERGE)
        assert refusal is not None
        assert "system_cores needs the right systemCores" in str(refusal)
    finally:
        policy.ask("DELETE", f"{path}/older?gracePeriodSeconds=0")
