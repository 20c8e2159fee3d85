"""The descheduler on a real API server, with exactly the chart's rights: a hot node is relieved of batch pods first, disruption
budgets hold, and nothing is moved back. Nodes are objects without kubelets; a real kube-scheduler with the extender places
the pod that replaces the moved one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.descheduler.move_history import parse_history
from kube.objects import format_timestamp
from tests.cluster import audit
from tests.cluster.audit import AuditedRequest
from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.daemons import wait
from tests.cluster.katalyst import CNRS, is_deleted
from tests.cluster.programs import Controller
from tests.cluster.schedulers import NAMESPACE, SCHEDULER_NAME, ExtendedScheduler, extended_scheduler
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import Account

pytestmark = pytest.mark.cluster
NODES, PODS = "/api/v1/nodes", f"/api/v1/namespaces/{NAMESPACE}/pods"
MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{CONSENT}/leases"
MOVES_LEASE = f"{LEASES}/dioptase-descheduler"
RULES = (
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["list", "watch"]},
    {
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["dioptase-descheduler"],
        "verbs": ["get", "patch"],
    },
)  # fmt: skip
"""Rules that the chart adds with descheduler.enabled (tests/deploy/test_rendered_chart.py)."""
GIB = 1 << 30
Start = Callable[..., Controller]


@pytest.fixture(scope="module")
def scheduler(
    own_cluster: Cluster, definitions: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ExtendedScheduler]:
    with extended_scheduler(own_cluster, definitions, tmp_path_factory.mktemp("descheduler-scheduler")) as running:
        yield running


@pytest.fixture
def start(
    own_cluster: Cluster, definitions: Server, scheduler: ExtendedScheduler, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Start a controller with these fields of `lowNodeLoad`, and two nodes, `burning` and `cool`, with 10 cores each."""
    scheduler.restart_if_ended()
    folder = tmp_path_factory.mktemp("descheduler")
    account = Account(own_cluster, "dioptase-controller", CONSENT, folder, RULES)
    controllers: list[Controller] = []

    def begin(**node_load: Any) -> Controller:
        args = {
            "apiVersion": "descheduler/v1alpha2", "kind": "LowNodeLoadArgs", "lowThresholds": {"cpu": 30},
            "highThresholds": {"cpu": 60}, "anomalyCondition": {"consecutiveAbnormalities": 2},
            "nodeSelector": {"matchLabels": {"descheduler": "test"}}, **node_load,
        }  # fmt: skip
        # The cool-downs outlast the test on a slow machine, too.
        own = {"intervalS": 1, "nodeCooldownS": 3000, "workloadCooldownS": 3000, "lowNodeLoad": args}
        settings = {"controllers": ["descheduler"], "descheduler": own}
        controllers.append(Controller(own_cluster, account, folder, 5 + len(controllers), settings))
        controllers[-1].begin()
        wait("the leader", lambda: controllers[-1].leads)
        return controllers[-1]

    status = {"allocatable": {"cpu": "10", "memory": "100Gi", "pods": "110"}}
    for name in ("burning", "cool"):
        metadata = {"name": name, "labels": {"descheduler": "test"}}
        definitions.ask("POST", NODES, {"metadata": metadata, "status": {**status, "capacity": status["allocatable"]}})
        api = "node.katalyst.kubewharf.io/v1alpha1"
        definitions.ask("POST", CNRS, {"apiVersion": api, "kind": "CustomNodeResource", "metadata": {"name": name}})
    yield begin
    for controller in controllers:
        if controller.pid is not None:
            controller.end()
    for item in definitions.ask("GET", PODS)["items"]:
        definitions.ask("DELETE", f"{PODS}/{item['metadata']['name']}", {"gracePeriodSeconds": 0})
    for path in (*(f"{kind}/{name}" for kind in (CNRS, NODES) for name in ("burning", "cool")), MOVES_LEASE):
        definitions.refusal("DELETE", path)
    account.forget()


def report(server: Server, **millicpu_by_node: tuple[int, int]) -> None:
    """Report as agents do, now: for each node the CPU usage of online and of reclaimed pods."""
    # Timestamps of reports have a resolution of one second, and a report with the same time is the same report.
    time.sleep(1.1)
    for name, (online, reclaimed) in millicpu_by_node.items():
        groups = [
            {"QoSLevel": f"{level}_cores", "genericUsage": {"cpu": f"{amount}m", "memory": "1Gi"}}
            for level, amount in (("shared", online), ("reclaimed", reclaimed))
        ]
        usage = {"cpu": f"{online + reclaimed}m", "memory": "5Gi"}
        metrics = {
            "updateTime": format_timestamp(time.time()),
            "nodeMetric": {"genericUsage": usage},
            "groupMetric": groups,
        }
        offered = {RECLAIMED_CPU: "9000", RECLAIMED_MEMORY: str(50 * GIB)}
        status = {"resources": {"allocatable": offered, "capacity": offered}, "nodeMetricStatus": metrics}
        server.ask("PATCH", f"{CNRS}/{name}/status", {"status": status}, MERGE)


def create(server: Server, name: str, millicpu: int, level: str = "reclaimed", workload: str = "", **spec: Any) -> None:
    """Create a pod, on node `burning` unless `spec` has a schedulerName, which runs for an hour. Its owner is an object that
    exists, so that the garbage collector leaves it."""
    workload = workload or name
    server.refusal("POST", MAPS, {"metadata": {"name": workload}})
    uid = server.ask("GET", f"{MAPS}/{workload}")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": workload, "uid": uid, "controller": True}
    amounts = (
        {"cpu": f"{millicpu}m"}
        if level == "shared"
        else {RECLAIMED_CPU: str(millicpu), RECLAIMED_MEMORY: str(GIB // 4)}
    )
    container = {"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}
    # These nodes have no heartbeats, and no kubelet that would confirm the end of a pod.
    fixed = {
        "tolerations": [{"operator": "Exists"}],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    metadata = {
        "name": name, "labels": {"app": workload}, "ownerReferences": [owner],
        "annotations": {"katalyst.kubewharf.io/qos_level": f"{level}_cores"},
    }  # fmt: skip
    assigned = {} if "schedulerName" in spec else {"nodeName": "burning"}
    server.ask("POST", PODS, {"metadata": metadata, "spec": {"containers": [container], **fixed, **assigned, **spec}})
    started = format_timestamp(time.time() - 3600)
    server.ask("PATCH", f"{PODS}/{name}/status", {"status": {"phase": "Running", "startTime": started}}, MERGE)


def names(server: Server) -> set[str]:
    return {
        item["metadata"]["name"]
        for item in server.ask("GET", PODS)["items"]
        if "deletionTimestamp" not in item["metadata"]
    }


def explanation(controller: Controller, node: str) -> Any:
    """Return what the endpoint says about a hot node; empty if it is not hot."""
    latest = controller.ask("/dioptase/descheduler")
    return next((item for item in latest["hotNodes"] if item["node"] == node), {})


def report_twice(server: Server, controller: Controller, hot: str, **millicpu_by_node: tuple[int, int]) -> None:
    """Report that a node is hot, and again once the first report has been counted: the number that the settings require."""
    report(server, **millicpu_by_node)
    wait("the first report counts", lambda: explanation(controller, hot).get("hotReports", 0) >= 1)
    report(server, **millicpu_by_node)


def moves(server: Server) -> list[Any]:
    """Return the events of moved pods."""
    events = server.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    return [item for item in events if item["reason"] == "Descheduled"]


def test_a_hot_node_is_relieved_of_a_batch_pod_which_goes_to_the_cool_node_and_stays(
    own_cluster: Cluster, definitions: Server, start: Start
) -> None:
    server, controller = definitions, start()
    create(server, "batch-a", 3000)
    create(server, "batch-b", 1000)
    create(server, "web", 4000, "shared")
    # 80 % of 10 cores; without batch-a, which uses 3 of the 4 cores of batch pods, 50 % remain, and 60 % is the limit.
    report(server, burning=(4000, 4000), cool=(500, 0))
    wait("one report is not enough", lambda: explanation(controller, "burning").get("hotReports") == 1)
    time.sleep(2)
    assert names(server) == {"batch-a", "batch-b", "web"}
    report(server, burning=(4000, 4000), cool=(500, 0))
    wait("the batch pod is evicted", lambda: names(server) == {"batch-b", "web"})
    wait("its event", lambda: len(moves(server)) == 1)
    (event,) = moves(server)
    assert event["involvedObject"]["name"] == "batch-a"
    assert event["message"] == (
        "Moving the pod relieves 30.0% of node burning, which is hot: CPU usage is 80.0 %, highThresholds.cpu 60 %. "
        "Node cool would take it"
    )
    history = parse_history(server.ask("GET", MOVES_LEASE)["metadata"]["annotations"])
    assert history is not None
    assert set(history.workloads) == {f"{NAMESPACE}/ConfigMap/batch-a"}
    assert (set(history.sources), set(history.targets)) == ({"burning"}, {"cool"})
    create(server, "batch-a2", 3000, workload="batch-a", schedulerName=SCHEDULER_NAME)
    wait(
        "its successor is on the cool node",
        lambda: server.ask("GET", f"{PODS}/batch-a2")["spec"].get("nodeName") == "cool",
        120,
    )
    # Now that node is hot, the other one is not, and the controller is a new one: the moves in the Lease hold.
    controller.end()
    controller.again()
    wait("the leader", lambda: controller.leads)
    report_twice(server, controller, "cool", burning=(1000, 0), cool=(500, 8000))
    wait("it waits", lambda: explanation(controller, "cool").get("state", "").endswith("(nodeCooldownS)"))
    time.sleep(3)
    assert names(server) == {"batch-a2", "batch-b", "web"}
    assert 'dioptase_descheduler_hot_nodes{cause="cpu_usage"} 1.0' in controller.text("/metrics")
    used = list(audit.entries(own_cluster.names.run, f"{CONSENT}/dioptase-controller"))
    assert {entry.request for entry in used} >= {
        AuditedRequest("policy", "poddisruptionbudgets", "list"),
        AuditedRequest("policy", "poddisruptionbudgets", "watch"),
        AuditedRequest("coordination.k8s.io", "leases", "create"),
        AuditedRequest("", "pods/eviction", "create"),
    }
    assert [entry for entry in used if entry.status == 403] == []


def test_a_disruption_budget_holds_and_a_stale_report_moves_nothing(definitions: Server, start: Start) -> None:
    server, controller = definitions, start()
    create(server, "batch", 4000)
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "batch"}}}
    server.ask("POST", BUDGETS, {"metadata": {"name": "batch"}, "spec": spec})
    report_twice(server, controller, "burning", burning=(4000, 4000), cool=(500, 0))
    blocked = {f"{NAMESPACE}/batch": "PodDisruptionBudget batch allows no disruption now"}
    wait("the budget is the reason", lambda: explanation(controller, "burning").get("skipped") == blocked)
    assert names(server) == {"batch"}
    # The report of the node becomes as old as the default limit; the budget goes only then.
    old = {"status": {"nodeMetricStatus": {"updateTime": format_timestamp(time.time() - 180)}}}
    server.ask("PATCH", f"{CNRS}/burning/status", old, MERGE)
    wait("it is stale", lambda: "burning" in controller.ask("/dioptase/descheduler")["staleNodes"])
    server.ask("DELETE", f"{BUDGETS}/batch")
    time.sleep(3)
    assert names(server) == {"batch"}
    assert is_deleted(server, MOVES_LEASE)
    report_twice(server, controller, "burning", burning=(4000, 4000), cool=(500, 0))
    wait("it is evicted", lambda: names(server) == set())


def test_a_dry_run_explains_and_evicts_nothing(definitions: Server, start: Start) -> None:
    server, controller = definitions, start(dryRun=True)
    create(server, "batch", 3000)
    create(server, "web", 4000, "shared")
    report_twice(server, controller, "burning", burning=(4000, 3000), cool=(500, 0))
    metric = 'dioptase_descheduler_evictions_total{level="reclaimed_cores",result="dry-run"} 1.0'
    wait("it is explained", lambda: metric in controller.text("/metrics"))
    assert (
        "pod dioptase-scheduler-tests/batch: dry-run: Moving the pod relieves 30.0% of node burning" in controller.log
    )
    time.sleep(3)
    assert metric in controller.text("/metrics"), "its cool-down holds"
    assert names(server) == {"batch", "web"}
    assert is_deleted(server, MOVES_LEASE)
