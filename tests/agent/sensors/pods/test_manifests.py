"""Kubernetes' own objects as the pods file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.pods.static_pods import PodsError, parse_pods
from api.qos import QoSLevel

MANIFEST = """
apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
  uid: 6f1c
  creationTimestamp: 2026-01-01T00:00:00Z
  labels: {app: web}
  annotations:
    cgroup.dioptase.io/web: /kubepods/web
    cgroup.dioptase.io/proxy: /kubepods/proxy
    katalyst.kubewharf.io/qos_level: reclaimed_cores
spec:
  priority: 5
  nodeName: n1
  initContainers:
  - {name: migrate, image: m}
  - {name: proxy, image: p, restartPolicy: Always}
  containers:
  - name: web
    image: nginx
    resources:
      requests: {resource.katalyst.kubewharf.io/reclaimed_millicpu: 2k, nvidia.com/gpu: 1, ephemeral-storage: 1Gi}
      limits: {resource.katalyst.kubewharf.io/reclaimed_millicpu: 2k}
status: {phase: Running}
"""


def manifest(**metadata: Any) -> dict[str, Any]:
    more = {"name": "web", "annotations": {"cgroup.dioptase.io/a": "/a"}} | metadata
    return {"kind": "Pod", "metadata": more, "spec": {"containers": [{"name": "a"}]}}


def test_a_pod_is_read_with_the_cgroups_that_its_annotations_name() -> None:
    (pod,) = parse_pods(MANIFEST, "f")
    assert (pod.uid, pod.key, pod.qos, pod.priority, pod.labels) == (
        "6f1c", "shop/web", QoSLevel.RECLAIMED, 5, {"app": "web"},
    )  # fmt: skip
    web, proxy = pod.containers
    assert (web.cgroup, web.reclaimed_cpu_cores, web.sidecar) == ("/kubepods/web", 2.0, False)
    assert (proxy.cgroup, proxy.sidecar, pod.problems) == ("/kubepods/proxy", True, ())


def test_a_manifest_pod_is_scraped_at_its_address_or_on_loopback_without_one() -> None:
    its, hosts, nobodys = (
        parse_pods(json.dumps(manifest() | {"spec": {"containers": [{"name": "a"}], **spec}, "status": status}), "f")[0]
        for spec, status in (
            ({}, {"podIP": "10.88.0.7"}), ({"hostNetwork": True}, {"podIP": "192.0.2.1"}), ({}, {"phase": "Pending"}),
        )
    )  # fmt: skip
    assert (its.address, hosts.address, nobodys.address) == ("10.88.0.7", "127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize("kind", ["List", "PodList"])
def test_a_list_is_read_without_the_pods_that_have_ended(kind: str) -> None:
    ended = manifest(name="job") | {"status": {"phase": "Succeeded"}}
    pods = parse_pods(json.dumps({"apiVersion": "v1", "kind": kind, "items": [ended, manifest()]}, indent=4), "f")
    assert [pod.uid for pod in pods] == ["default/web"]
    assert parse_pods(json.dumps({"kind": kind, "items": []}), "f") == ()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kind": "List", "items": [manifest(), manifest(annotations={})]},
         "items[1].metadata.annotations['cgroup.dioptase.io/a']: is missing; set it to the path of that container's cgroup"),
        ({"kind": "Service"}, "kind: 'Service' is not a Pod; remove it"),
        ({"kind": ["Pod"]}, "kind: ['Pod'] is not a Pod; remove it"),
        ({"kind": "List", "items": [7]}, "items[0].kind: 'int' is not a Pod"),
        ({"kind": "List", "items": 7}, "items: is not a list; write `items: []` without pods"),
        ({"kind": "List"}, "items: is not a list"),
        ({"kind": "Pod", "metadata": {"name": "a"}}, "spec: is missing; write it"),
        ({"kind": "List", "items": [{"metadata": {"name": "a"}}]}, "items[0].spec: is missing; write it"),
        ({"kind": "List", "items": [manifest(name=7)]}, "items[0].metadata.name: is not text; write it in quotes"),
        (manifest(labels={"a": 1}), "metadata.labels['a']: 1 is not text; write it in quotes"),
        (manifest(annotations={"cgroup.dioptase.io/a": "a"}), "spec.containers[0].cgroup: 'a' must begin with /"),
        ({"kind": "List", "items": [manifest(), manifest()]}, "items[1].metadata.name: default/web is already items[0].meta"),
        (manifest() | {"spec": {"containers": []}}, "spec.containers: is empty; list at least one"),
        (manifest() | {"spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "x"}}}]}},
         "spec.containers[0].resources.requests.cpu: 'x' is not a quantity"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused_with_field_and_remedy(document: Any, message: str) -> None:
    with pytest.raises(PodsError) as caught:
        parse_pods(json.dumps(document), "f")
    assert str(caught.value).startswith(f"f: {message}")


plain = st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    plain | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(("metadata", "spec", "containers", "initContainers", "name", "resources", "requests", "limits",
                         "cpu", "kubernetes.io/batch-cpu", "priority", "annotations", "labels", "items", "kind")),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(("metadata", "spec", "items")), values), st.sampled_from(("Pod", "List")))
def test_no_object_raises_anything_but_the_named_error(document: dict[str, Any], kind: str) -> None:
    try:
        reported = repr(parse_pods(json.dumps(document | {"kind": kind}), "f"))
    except PodsError as error:
        reported = str(error)
    assert reported.startswith(("f: ", "(Pod(")) or reported == "()"
