"""The admission policy that restricts the scheduler's patches of pods to one annotation, on a real API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from controller.scheduler.pending_pods import RETRY_ANNOTATION
from tests.cluster.cluster import Cluster, Failed
from tests.cluster.daemons import wait
from tests.cluster.image_and_chart import CHART, helm
from tests.cluster.objects import a_pod

pytestmark = pytest.mark.cluster
NAMESPACE = "test-scheduler-policy"
REFUSAL = "the scheduler may change no more of a pod than its annotation"


@pytest.fixture(scope="module")
def restricted(own_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the scheduler's account, rights and policy, and a pod."""
    templates = [f"--show-only=templates/scheduler-{name}.yaml" for name in ("rbac", "policy")]
    values = ("--set", "scheduler.enabled=true")
    created = helm(own_cluster, "template", "dioptase", CHART, "--namespace", NAMESPACE, *templates, *values)
    own_cluster.kubectl("create", "namespace", NAMESPACE)
    own_cluster.kubectl("apply", "-f", "-", text=created)
    pod = a_pod("web", app="web")
    pod["metadata"]["annotations"]["owner"] = "payments"
    pod["spec"] |= {"schedulerName": "none", "serviceAccountName": "dioptase-scheduler"}
    own_cluster.kubectl("-n", NAMESPACE, "create", "-f", "-", text=json.dumps(pod))
    yield own_cluster
    own_cluster.kubectl("delete", "-f", "-", text=created)
    own_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def patch(cluster: Cluster, body: Any, account: str = "dioptase-scheduler") -> str:
    """Patch the pod with the account's rights; return why that is refused, or an empty text."""
    user = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
    try:
        cluster.kubectl("-n", NAMESPACE, user, "patch", "pod", "web", "--patch", json.dumps(body))
    except Failed as failure:
        return str(failure)
    return ""


def image(name: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "image": name}]}}


def annotated(**annotations: str | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {name.replace("_", "-"): value for name, value in annotations.items()}}}


def is_refused(cluster: Cluster) -> bool:
    """Return whether the policy is in effect, which takes the API server some seconds; each try changes the pod."""
    return REFUSAL in patch(cluster, {"metadata": {"labels": {"tried": str(time.monotonic_ns())}}})


RETRY = {"metadata": {"annotations": {RETRY_ANNOTATION: "2026-11-28T04:00:00.000000Z"}}}


def test_the_scheduler_changes_no_more_of_a_pod_than_one_annotation(restricted: Cluster) -> None:
    wait("the policy", lambda: is_refused(restricted), 30)
    refused = {
        "an image": image("example.com/miner:1"),
        "an annotation": annotated(owner="others"),
        "another annotation": annotated(team="others"),
        "a removed annotation": annotated(owner=None),
        "a label": {"metadata": {"labels": {"app": "others"}}},
        "a finalizer": {"metadata": {"finalizers": ["example.com/held"]}},
        "both": {"metadata": {"annotations": {**RETRY["metadata"]["annotations"], "owner": "others"}}},
        "a deadline": {"spec": {"activeDeadlineSeconds": 1}},
    }
    assert [what for what, body in refused.items() if REFUSAL not in patch(restricted, body)] == []
    for _ in range(2):
        assert patch(restricted, RETRY) == ""
    pod = json.loads(restricted.kubectl("-n", NAMESPACE, "get", "pod", "web", "-o", "json"))
    assert pod["metadata"]["annotations"] == {"owner": "payments", **RETRY["metadata"]["annotations"]}


def test_others_are_not_restricted(restricted: Cluster) -> None:
    wait("the policy", lambda: is_refused(restricted), 30)
    body = json.dumps({"metadata": {"labels": {"tier": "front"}}})
    assert "patched" in restricted.kubectl("-n", NAMESPACE, "patch", "pod", "web", "--type=merge", "--patch", body)
