"""The extender with a real kube-scheduler: pods are bound by CustomNodeResources, and no node is ever overfilled. What is bound
is counted from the API server's own data. The nodes are objects without kubelets."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.error import HTTPError

import pytest

from api.placement import PLACEMENT_SCORE_KEY
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.scheduler.pending_pods import RETRY_ANNOTATION
from tests.cluster import audit
from tests.cluster.audit import AuditedRequest
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.katalyst import CNRS
from tests.cluster.schedulers import (
    NAMESPACE,
    SCHEDULER_NAME,
    ExtendedScheduler,
    extended_scheduler,
    rendered_manifests,
)
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import granted_by

pytestmark = pytest.mark.cluster
NODES, PODS = "/api/v1/nodes", f"/api/v1/namespaces/{NAMESPACE}/pods"
GIB = 1 << 30


@pytest.fixture(scope="module")
def scheduler(
    own_cluster: Cluster, definitions: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ExtendedScheduler]:
    with extended_scheduler(
        own_cluster, definitions, tmp_path_factory.mktemp("scheduler"), {"topology": {"enabled": True}}
    ) as running:
        yield running


@pytest.fixture
def nodes(definitions: Server, scheduler: ExtendedScheduler) -> Iterator[dict[str, int]]:
    """Two nodes by the millicores that they offer; they and all pods are deleted at the end."""
    scheduler.restart_if_ended()
    offers = {"plenty": 20_000, "scarce": 5_000}
    for name, millicpu in offers.items():
        status = {"allocatable": {"cpu": "64", "memory": "256Gi", "pods": "500"}}
        definitions.ask(
            "POST", NODES, {"metadata": {"name": name}, "status": {**status, "capacity": status["allocatable"]}}
        )
        definitions.ask("POST", CNRS, a_cnr(name))
        offer(definitions, name, millicpu)
    yield offers
    for item in definitions.ask("GET", PODS)["items"]:
        definitions.ask("DELETE", f"{PODS}/{item['metadata']['name']}", {"gracePeriodSeconds": 0})
    for name in offers:
        definitions.ask("DELETE", f"{CNRS}/{name}")
        definitions.ask("DELETE", f"{NODES}/{name}")


def a_cnr(name: str) -> dict[str, Any]:
    api = "node.katalyst.kubewharf.io/v1alpha1"
    return {"apiVersion": api, "kind": "CustomNodeResource", "metadata": {"name": name}}


def offer(server: Server, node: str, millicpu: int) -> None:
    """Report reclaimed resources as an agent does."""
    amounts = {RECLAIMED_CPU: str(millicpu), RECLAIMED_MEMORY: str(64 * GIB)}
    status = {"resources": {"allocatable": amounts, "capacity": amounts}}
    server.ask("PATCH", f"{CNRS}/{node}/status", {"status": status}, MERGE)


def create(server: Server, name: str, millicpu: int, annotations: Mapping[str, str] | None = None, **spec: Any) -> None:
    amounts = {RECLAIMED_CPU: str(millicpu), RECLAIMED_MEMORY: str(GIB // 4)}
    container = {"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}
    # These nodes have no heartbeats.
    fixed = {"tolerations": [{"operator": "Exists"}], "automountServiceAccountToken": False}
    level = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
    metadata = {"name": name, "annotations": {**level, **(annotations or {})}}
    body = {"metadata": metadata, "spec": {"containers": [container], "schedulerName": SCHEDULER_NAME, **fixed, **spec}}
    server.ask("POST", PODS, body)


def node_of(server: Server, name: str) -> str:
    return str(server.ask("GET", f"{PODS}/{name}")["spec"].get("nodeName", ""))


def message_of(server: Server, name: str) -> str:
    conditions = server.ask("GET", f"{PODS}/{name}").get("status", {}).get("conditions", [])
    return " ".join(item.get("message", "") for item in conditions)


def requested_by_node(server: Server) -> Counter[str]:
    """Millicores of reclaimed CPU that the API server's pods have requested on each node; pending ones under an empty name."""
    total: Counter[str] = Counter()
    for pod in server.ask("GET", PODS)["items"]:
        amount = pod["spec"]["containers"][0]["resources"]["requests"][RECLAIMED_CPU]
        total[pod["spec"].get("nodeName", "")] += int(amount[:-1]) * 1000 if amount.endswith("k") else int(amount)
    return total


def test_a_pod_is_bound_where_the_cnr_offers_enough_and_else_its_explanation_has_the_numbers(
    definitions: Server, nodes: dict[str, int], scheduler: ExtendedScheduler
) -> None:
    create(definitions, "large", 12_000)
    wait("the only node that offers 12 cores", lambda: node_of(definitions, "large") == "plenty", 120)
    annotations = definitions.ask("GET", f"{PODS}/large")["metadata"]["annotations"]
    assert 0 < float(annotations[PLACEMENT_SCORE_KEY]) <= 100, "the API server adds annotations of a Binding to the pod"
    create(definitions, "second", 12_000)
    # Other tests may have left further nodes.
    wait(
        "the reason why no node fits", lambda: f"Insufficient {RECLAIMED_CPU}" in message_of(definitions, "second"), 120
    )
    explanation = scheduler.extender.ask(f"/explain?pod={NAMESPACE}/second")
    assert explanation["fitting"] == 0
    plenty = next(item for item in explanation["nodes"] if item["node"] == "plenty")
    (fit,) = (item for item in plenty["verdicts"] if item["plugin"] == "QoSAwareNodeResourcesFit")
    assert fit["numbers"].startswith("reclaimed_millicpu: requests 12000, 8000 of 20000 are free")
    definitions.ask("DELETE", f"{PODS}/large", {"gracePeriodSeconds": 0})
    wait("the second, once the first is gone", lambda: node_of(definitions, "second") == "plenty", 30)


def test_a_pending_pod_is_tried_again_when_its_resource_appears(definitions: Server, nodes: dict[str, int]) -> None:
    """By itself kube-scheduler would wait five minutes: it does not watch CustomNodeResources."""
    create(definitions, "waiting", 30_000)
    wait("it is rejected", lambda: f"Insufficient {RECLAIMED_CPU}" in message_of(definitions, "waiting"), 120)
    time.sleep(3)
    assert RETRY_ANNOTATION not in definitions.ask("GET", f"{PODS}/waiting")["metadata"]["annotations"]
    began_s = time.monotonic()
    offer(definitions, "scarce", 40_000)
    wait("it is bound", lambda: node_of(definitions, "waiting") == "scarce", 30)
    print(f"bound {time.monotonic() - began_s:.2f} s after its resource appeared")
    assert RETRY_ANNOTATION in definitions.ask("GET", f"{PODS}/waiting")["metadata"]["annotations"]


def test_two_hundred_pods_at_once_never_overfill_a_node(definitions: Server, nodes: dict[str, int]) -> None:
    for number in range(200):
        create(definitions, f"batch{number}", 500)

    def is_settled() -> bool:
        total = requested_by_node(definitions)
        assert all(total[name] <= millicpu for name, millicpu in nodes.items()), total
        return total[""] == 200 * 500 - sum(nodes.values())

    wait("both nodes are full", is_settled, 300)
    assert requested_by_node(definitions) == {**nodes, "": 75_000}
    offer(definitions, "scarce", 10_000)
    wait("ten more", lambda: requested_by_node(definitions)["scarce"] == 10_000, 60)
    assert requested_by_node(definitions) == {"plenty": 20_000, "scarce": 10_000, "": 70_000}


def test_an_extender_killed_while_it_binds_overfills_and_loses_nothing(
    definitions: Server, nodes: dict[str, int], scheduler: ExtendedScheduler
) -> None:
    for number in range(60):
        create(definitions, f"batch{number}", 500)
    for _ in range(3):
        before = sum(requested_by_node(definitions)[name] for name in nodes)
        scheduler.extender.end(signal.SIGKILL)
        scheduler.extender.again()
        scheduler.extender.ready()
        wait("it goes on", lambda before=before: sum(requested_by_node(definitions)[name] for name in nodes) > before or
             before == sum(nodes.values()), 120)  # fmt: skip
    wait("both nodes are full", lambda: requested_by_node(definitions) == {**nodes, "": 5_000}, 300)


def test_a_cnr_that_is_deleted_and_created_again_is_not_filled_twice(
    definitions: Server, nodes: dict[str, int]
) -> None:
    create(definitions, "filler", 20_000)
    wait("it is bound", lambda: node_of(definitions, "filler") == "plenty", 120)
    definitions.ask("DELETE", f"{CNRS}/plenty")
    create(definitions, "late", 15_000)
    wait("it is rejected", lambda: "without a CustomNodeResource" in message_of(definitions, "late"), 120)
    definitions.ask("POST", CNRS, a_cnr("plenty"))
    offer(definitions, "plenty", nodes["plenty"])
    time.sleep(3)
    assert node_of(definitions, "late") == ""
    offer(definitions, "plenty", 35_000)
    wait("it is bound", lambda: node_of(definitions, "late") == "plenty", 60)


def test_a_taint_of_the_cnr_keeps_reclaimed_pods_away(definitions: Server, nodes: dict[str, int]) -> None:
    taint = {"key": "t", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
    for name in nodes:
        definitions.ask("PATCH", f"{CNRS}/{name}", {"spec": {"taints": [taint]}}, MERGE)
    create(definitions, "batch", 100, tolerations=[{"operator": "Exists", "key": "node.kubernetes.io/not-ready"}])
    wait("it is rejected", lambda: "taint for the pod's QoS level" in message_of(definitions, "batch"), 120)
    definitions.ask("PATCH", f"{CNRS}/scarce", {"spec": {"taints": []}}, MERGE)
    wait("it is bound", lambda: node_of(definitions, "batch") == "scarce", 60)


def test_an_api_server_killed_with_its_history_gone_loses_no_pod_and_fills_no_node_twice(
    definitions: Server, nodes: dict[str, int], own_cluster: Cluster, scheduler: ExtendedScheduler
) -> None:
    for number in range(20):
        create(definitions, f"before{number}", 500)
    wait("they are bound", lambda: not requested_by_node(definitions)[""], 120)
    # Watches that would resume get 410 Gone, and everything is listed again.
    own_cluster.compact()
    own_cluster.restart_server()
    for number in range(40):
        create(definitions, f"after{number}", 500)

    def is_full() -> bool:
        scheduler.restart_if_ended()
        return requested_by_node(definitions) == {**nodes, "": 5_000}

    wait("both nodes are full", is_full, 300)
    time.sleep(2)
    assert requested_by_node(definitions) == {**nodes, "": 5_000}


def test_a_gang_gets_all_its_nodes_or_none(definitions: Server, nodes: dict[str, int]) -> None:
    prefix = "gang.scheduling.koordinator.sh"
    gang = {f"{prefix}/name": "job", f"{prefix}/min-available": "4"}
    for number in range(4):
        create(definitions, f"job{number}", 6_000, gang)
    expected = "only 3 of 4 pods that have to start together fit"
    wait("it is rejected", lambda: any(expected in message_of(definitions, f"job{number}") for number in range(4)), 120)
    assert requested_by_node(definitions) == {"": 24_000}
    create(definitions, "other", 20_000)
    wait("nothing is held for the gang", lambda: node_of(definitions, "other") == "plenty", 60)
    definitions.ask("DELETE", f"{PODS}/other", {"gracePeriodSeconds": 0})
    offer(definitions, "scarce", 6_000)
    wait("all of it", lambda: requested_by_node(definitions) == {"plenty": 18_000, "scarce": 6_000}, 60)


@pytest.fixture
def priorities(definitions: Server) -> Iterator[None]:
    """The PriorityClasses test-low and test-high."""
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    for name, value in (("test-low", 1), ("test-high", 1000)):
        definitions.ask("POST", path, {"metadata": {"name": name}, "value": value})
    yield
    for name in ("test-low", "test-high"):
        definitions.ask("DELETE", f"{path}/{name}")


def test_kube_scheduler_preempts_for_cpu_on_a_node_whose_reclaimed_resources_have_shrunk(
    definitions: Server, nodes: dict[str, int], priorities: None
) -> None:
    """It takes the victims from the verb preempt: those that it selected itself, and no batch pod, as none has to go."""
    field = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["plenty"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [field]}}}
    containers = [{"name": "main", "image": "none", "resources": {"requests": {"cpu": "40"}}}]
    level = {"katalyst.kubewharf.io/qos_level": "shared_cores"}
    spec = {"containers": containers, "affinity": affinity}
    create(definitions, "batch", 15_000, affinity=affinity, priorityClassName="test-low")
    create(definitions, "victim", 0, level, priorityClassName="test-low", **spec)
    wait("both are bound", lambda: node_of(definitions, "batch") == node_of(definitions, "victim") == "plenty", 120)
    offer(definitions, "plenty", 1_000)
    create(definitions, "web", 0, level, priorityClassName="test-high", **spec)

    def is_being_deleted(name: str) -> bool:
        return "deletionTimestamp" in definitions.ask("GET", f"{PODS}/{name}")["metadata"]

    wait("the victim has to go", lambda: is_being_deleted("victim"), 120)
    assert definitions.ask("GET", f"{PODS}/web")["status"]["nominatedNodeName"] == "plenty"
    assert not is_being_deleted("batch")
    definitions.ask("DELETE", f"{PODS}/victim", {"gracePeriodSeconds": 0})
    wait("its room is used", lambda: node_of(definitions, "web") == "plenty", 60)


def report_zones(server: Server, node: str, cpus: int, used: int) -> None:
    """Report one NUMA node with these CPUs, some of which a pod has that is no object of this cluster."""
    offers = {"cpu": str(cpus), "memory": "32Gi"}
    zone = {
        "type": "Numa", "name": "0", "resources": {"allocatable": offers, "capacity": offers},
        "allocations": [{"consumer": "default/other/uid-other", "requests": {"cpu": str(used), "memory": "1Gi"}}],
    }  # fmt: skip
    zones = [{"type": "Socket", "name": "0", "children": [zone]}]
    status = {"topologyPolicy": "SingleNUMANodeContainerLevel", "topologyZone": zones}
    server.ask("PATCH", f"{CNRS}/{node}/status", {"status": status}, MERGE)


def test_a_pod_with_numa_binding_goes_to_the_node_with_a_free_numa_node_and_the_next_one_waits(
    definitions: Server, nodes: dict[str, int]
) -> None:
    report_zones(definitions, "plenty", 16, 13)
    report_zones(definitions, "scarce", 4, 0)
    annotations = {
        "katalyst.kubewharf.io/qos_level": "dedicated_cores",
        "katalyst.kubewharf.io/memory_enhancement": '{"numa_binding": "true"}',
    }
    amounts = {"cpu": "4", "memory": "1Gi"}
    containers = [{"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}]
    create(definitions, "first", 0, annotations, containers=containers)
    wait("the only free NUMA node with 4 CPUs", lambda: node_of(definitions, "first") == "scarce", 120)
    create(definitions, "second", 0, annotations, containers=containers)
    expected = "2 node(s) whose NUMA nodes cannot hold the pod"
    wait("the reason", lambda: expected in message_of(definitions, "second"), 120)
    report_zones(definitions, "plenty", 16, 12)
    wait("4 of 16 CPUs are free now", lambda: node_of(definitions, "second") == "plenty", 60)


def test_a_client_outside_of_the_pod_can_bind_nothing_without_a_certificate(
    definitions: Server, nodes: dict[str, int], scheduler: ExtendedScheduler
) -> None:
    create(definitions, "huge", 90_000)
    body = {"PodName": "huge", "PodNamespace": NAMESPACE, "PodUID": "any", "Node": "plenty"}
    with pytest.raises(HTTPError, match="413") as caught:
        scheduler.extender.text("/bind", json.dumps(body).encode())
    with caught.value as answer:
        assert answer.read().decode().startswith("verbs need a client certificate")


def test_the_extender_has_used_every_right_and_was_refused_nothing(
    own_cluster: Cluster, scheduler: ExtendedScheduler
) -> None:
    """In the tests above. Both programs have one account; kube-scheduler's other rights are those of the cluster's own role."""
    rights = granted_by(
        rule for item in rendered_manifests() if item["kind"] in ("ClusterRole", "Role") for rule in item["rules"]
    )
    folder, account = own_cluster.names.run, f"{NAMESPACE}/dioptase-scheduler"
    requests = list(audit.entries(folder, account, "dioptase-scheduler/"))
    used = {entry.request for entry in requests}
    leases = {right for right in rights if right.resource == "leases"}
    # A pod is read only if the result of its binding is unknown, or its watch is late.
    assert rights - leases - used <= {AuditedRequest("", "pods", "get")}
    assert used <= rights
    # An API server that has started a moment ago knows no roles yet, and a test above restarts it: the same request succeeds
    # later.
    latest = {entry.request: entry for entry in requests}
    assert [entry for entry in latest.values() if entry.status == 403] == []
    assert {entry.request for entry in audit.entries(folder, account, "kube-scheduler/")} >= leases
