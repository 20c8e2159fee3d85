"""Two replicas of the controller on a real API server, with Node objects without kubelets: configuration, taints and evictions,
and that nothing is lost when a replica or the API server is killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from api.eviction_budget import BUDGET_ANNOTATION, format_budget, parse_budget, with_eviction
from controller.kcc.targets import config_hash
from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import wait
from tests.cluster.katalyst import (
    ADMINS,
    CNCS,
    CNRS,
    KCCS,
    a_kcc,
    an_admin,
    change,
    configured_object,
    is_deleted,
    lending,
    valid,
    within,
)
from tests.cluster.programs import Controller
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import Account

pytestmark = pytest.mark.cluster
NODES = "/api/v1/nodes"
PODS = f"/api/v1/namespaces/{CONSENT}/pods"
SPOOFED = "spoofed"
ELSEWHERE = "/api/v1/namespaces/default/pods"
SELECTED_LABELS = {"nodes.test/kind": "object"}
SETTINGS = {
    "health": {
        "nodeSelector": "nodes.test/kind=object", "agents": {"agent": "app=agent"}, "namespace": CONSENT,
        "taintAfterS": 1, "evictAfterS": 6, "taintPerS": 100, "evictPerS": 100,
    },
    "rollout": {"soakS": 10},
}  # fmt: skip
TAINT = ("node.kubernetes.io/unschedulable", "NoSchedule", "reclaimed_cores")


@pytest.fixture(scope="module")
def replicas(
    own_cluster: Cluster, definitions: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Controller]]:
    folder = tmp_path_factory.mktemp("controllers")
    account = Account(own_cluster, "dioptase-controller", CONSENT, folder)
    created = [Controller(own_cluster, account, folder, number, SETTINGS) for number in (1, 2)]
    for item in created:
        item.begin()
    wait("a leader", lambda: leader(created))
    yield created
    for item in created:
        item.end()
    account.forget()


def leader(replicas: list[Controller]) -> Controller | None:
    leading = [replica for replica in replicas if replica.leads]
    assert len(leading) <= 1
    return leading[0] if leading else None


def leading(replicas: list[Controller]) -> Controller:
    result = leader(replicas)
    assert result is not None
    return result


@contextmanager
def nodes(server: Server, prefix: str, count: int, **labels: str) -> Iterator[list[str]]:
    """Create Node objects without kubelets; they are deleted at the end."""
    names = [f"{prefix}{number}" for number in range(count)]
    for name in names:
        server.ask("POST", NODES, {"metadata": {"name": name, "labels": {**SELECTED_LABELS, **labels}}})
    try:
        for name in names:
            wait(f"{name}'s objects", lambda name=name: not is_deleted(server, f"{CNCS}/{name}"))
            wait(f"{name}'s objects", lambda name=name: not is_deleted(server, f"{CNRS}/{name}"))
        yield names
    finally:
        for name in names:
            server.ask("DELETE", f"{NODES}/{name}")


@contextmanager
def configured(server: Server, kcc: dict[str, Any], *objects: dict[str, Any]) -> Iterator[None]:
    """Create a KatalystCustomConfig and these objects; at the end all are deleted, and their finalizers are released."""
    kccs, admins = within(CONSENT, KCCS), within(CONSENT, ADMINS)
    server.ask("POST", kccs, kcc)
    try:
        for item in objects:
            server.ask("POST", admins, item)
        yield
    finally:
        for item in server.ask("GET", admins)["items"]:
            server.ask("DELETE", f"{admins}/{item['metadata']['name']}")
        wait("no configuration is left", lambda: not server.ask("GET", admins)["items"])
        for item in server.ask("GET", kccs)["items"]:
            server.ask("DELETE", f"{kccs}/{item['metadata']['name']}")
        wait("no KatalystCustomConfig is left", lambda: not server.ask("GET", kccs)["items"])


def assert_stays(seconds: float, check: Callable[[], bool]) -> None:
    """Assert that the check holds all the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert check()
        time.sleep(0.2)


def taints(server: Server, node: str) -> set[tuple[str, ...]]:
    result = server.ask("GET", f"{CNRS}/{node}").get("spec", {}).get("taints", [])
    return {(item["key"], item["effect"], item["qosLevel"]) for item in result}


def a_pod_on(
    server: Server, node: str, name: str, level: str = "reclaimed_cores", pods: str = PODS, **labels: str
) -> str:
    """Create a pod object without a kubelet; return its path."""
    container = {"name": "main", "image": "none", "command": ["none"]}
    annotations = {"katalyst.kubewharf.io/qos_level": level}
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    spec = {"nodeName": node, "containers": [container], "automountServiceAccountToken": False}
    server.ask("POST", pods, {"metadata": metadata, "spec": spec})
    return f"{pods}/{name}"


def set_ready(server: Server, pod: str, ready: bool) -> None:
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    server.ask("PATCH", f"{pod}/status", {"status": status}, MERGE)


@pytest.fixture
def pods(server: Server, replicas: list[Controller]) -> Iterator[None]:
    """Delete the tests' pods without grace at the end."""
    for pods in (PODS, ELSEWHERE):
        account = pods.replace("/pods", "/serviceaccounts")
        refused = server.refusal("POST", account, {"metadata": {"name": "default"}})
        assert refused is None or refused.status == 409  # where there are controllers, they have made it
    yield
    server.refusal("DELETE", f"{ELSEWHERE}/{SPOOFED}", {"gracePeriodSeconds": 0})
    for item in server.ask("GET", PODS)["items"]:
        server.ask("DELETE", f"{PODS}/{item['metadata']['name']}", {"gracePeriodSeconds": 0})


def test_objects_come_follow_and_go_with_their_node(definitions: Server, replicas: list[Controller]) -> None:
    with nodes(definitions, "follow", 1, zone="a") as (name,):
        uid = definitions.ask("GET", f"{NODES}/{name}")["metadata"]["uid"]
        for path in (f"{CNCS}/{name}", f"{CNRS}/{name}"):
            result = definitions.ask("GET", path)["metadata"]
            assert result["labels"] == {**SELECTED_LABELS, "zone": "a"}
            assert [item["uid"] for item in result["ownerReferences"]] == [uid]
        definitions.ask("PATCH", f"{CNRS}/{name}", {"metadata": {"labels": {"own": "1"}}}, MERGE)
        definitions.ask("PATCH", f"{NODES}/{name}", {"metadata": {"labels": {"zone": None, "disk": "ssd"}}}, MERGE)
        for path, more in ((f"{CNCS}/{name}", {}), (f"{CNRS}/{name}", {"own": "1"})):
            expected = {**SELECTED_LABELS, "disk": "ssd", **more}
            wait(
                "labels",
                lambda path=path, expected=expected: definitions.ask("GET", path)["metadata"]["labels"] == expected,
            )
    for path in (f"{CNCS}/{name}", f"{CNRS}/{name}"):
        wait("objects go with their node", lambda path=path: is_deleted(definitions, path))


def test_a_rollout_reaches_canaries_first_and_stops_when_paused(
    definitions: Server, replicas: list[Controller]
) -> None:
    server, first, second = definitions, lending("1"), lending("2")
    old, new = f"all {config_hash(first, {})}", f"all {config_hash(second, {})}"
    path = f"{within(CONSENT, ADMINS)}/all"
    # Other tests may have left a node that is one.
    admin = an_admin("all", first, nodeLabelSelector="nodes.test/kind=object", priority=1)
    kcc = a_kcc(nodeLabelSelectorAllowedKeyList=[{"priority": 1, "keyList": ["nodes.test/kind"]}])
    with nodes(server, "roll", 10) as names, configured(server, kcc, admin):

        def with_the_new() -> list[str]:
            return [name for name in names if configured_object(server, name) == new]

        wait("all nodes are updated", lambda: all(configured_object(server, name) == old for name in names))
        change(server, path, config=second, updateStrategy={"rollingUpdate": {"canary": "30%"}})
        wait("canaries are updated", lambda: len(with_the_new()) == 3)
        assert with_the_new() == names[:3], "the first by name"
        wait("the object says so", lambda: server.ask("GET", path)["status"].get("updatedTargetNodes") == 3)
        status = server.ask("GET", path)["status"]
        assert (status["canaryNodes"], status["currentHash"]) == (3, new.split()[1])
        change(server, path, paused=True, updateStrategy={"rollingUpdate": {"canary": 7}})
        assert_stays(1.5, lambda: len(with_the_new()) == 3)
        change(server, path, paused=False)
        wait("seven are updated", lambda: len(with_the_new()) == 7)


def rolled_out(server: Server, path: str) -> str:
    """Return the reason of an object's condition RolledOut; empty without one."""
    conditions = server.ask("GET", path).get("status", {}).get("conditions", [])
    return next((str(item["reason"]) for item in conditions if item["type"] == "RolledOut"), "")


def count_evictions(server: Server, node: str, pods: int) -> None:
    """Add evictions of a node to the budget, as its agent does."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{CONSENT}/leases/dioptase-evictions"
    for _ in range(pods):
        metadata = server.ask("GET", path)["metadata"]
        budget = parse_budget(metadata["annotations"])
        assert budget is not None
        annotations = {BUDGET_ANNOTATION: format_budget(with_eviction(budget, node))}
        version = metadata["resourceVersion"]
        server.ask("PATCH", path, {"metadata": {"resourceVersion": version, "annotations": annotations}}, MERGE)


def test_a_rollout_pauses_when_its_canary_evicts_and_is_rolled_back(
    definitions: Server, replicas: list[Controller]
) -> None:
    server, path = definitions, f"{within(CONSENT, ADMINS)}/all"
    old, new = (f"all {config_hash(lending(report), {})}" for report in ("1", "2"))
    admin = an_admin("all", lending("1"), nodeLabelSelector="nodes.test/kind=object", priority=1)
    kcc = a_kcc(nodeLabelSelectorAllowedKeyList=[{"priority": 1, "keyList": ["nodes.test/kind"]}])
    with nodes(server, "guarded", 10) as names, configured(server, kcc, admin):
        wait("all have the first content", lambda: rolled_out(server, path) == "Complete")
        assert [configured_object(server, name) for name in names] == [old] * 10
        change(server, path, config=lending("2"))
        wait("the canary has the second", lambda: configured_object(server, names[0]) == new)
        count_evictions(server, names[0], 3)
        wait("the pause", lambda: rolled_out(server, path) == "EvictionsRose")
        assert_stays(12, lambda: [configured_object(server, name) for name in names] == [new, *[old] * 9])
        events = server.ask("GET", f"/api/v1/namespaces/{CONSENT}/events?fieldSelector=reason%3DRolloutPaused")["items"]
        (event,) = [item for item in events if item["involvedObject"]["name"] == "all"]
        assert event["involvedObject"]["kind"] == "AdminQoSConfiguration"
        assert event["message"].startswith(
            "paused: 3 pods were evicted on the 1 nodes with the new content, 0 on the 9 others."
        )
        change(server, path, config=lending("1"))
        wait("the rollback", lambda: configured_object(server, names[0]) == old)
        wait("its end", lambda: rolled_out(server, path) == "Complete")


def test_labels_go_by_priority_and_two_for_one_node_stop_the_kind(
    definitions: Server, replicas: list[Controller]
) -> None:
    server, admins = definitions, within(CONSENT, ADMINS)
    allowed = [{"priority": 1, "keyList": ["zone", "disk"]}, {"priority": 2, "keyList": ["zone"]}]
    objects = (
        an_admin("everybody", lending("1")),
        an_admin("zone", lending("2"), nodeLabelSelector="zone=a", priority=1),
        an_admin("more", lending("3"), nodeLabelSelector="zone in (a,b)", priority=2),
    )
    with (
        nodes(server, "labelled", 2, zone="a") as names,
        nodes(server, "other", 1) as (other,),
        configured(server, a_kcc(nodeLabelSelectorAllowedKeyList=allowed), *objects),
    ):
        wait(
            "the highest priority counts",
            lambda: all(str(configured_object(server, name)).startswith("more ") for name in names),
        )
        wait("the others have what is for all", lambda: str(configured_object(server, other)).startswith("everybody "))
        before = configured_object(server, other)
        server.ask("POST", admins, an_admin("overlap", lending("4"), nodeLabelSelector="disk=ssd", priority=1))
        wait("it is found out", lambda: valid(server, f"{admins}/overlap")[0] == "False")
        status, reason, message = valid(server, f"{admins}/overlap")
        assert (status, reason) == ("False", "ValidateFailed")
        assert "zone" in message
        change(server, f"{admins}/everybody", config=lending("9"))
        assert_stays(1.5, lambda: configured_object(server, other) == before)
        server.ask("DELETE", f"{admins}/overlap")
        wait("it goes on", lambda: configured_object(server, other) == f"everybody {config_hash(lending('9'), {})}")
        short = {"nodeNames": [other], "lastDuration": "2s"}
        server.ask("POST", admins, an_admin("short", lending("5"), ephemeralSelector=short))
        wait("it is before all others", lambda: str(configured_object(server, other)).startswith("short "))
        wait("for its time", lambda: str(configured_object(server, other)).startswith("everybody "))
        wait("then it is deleted", lambda: is_deleted(server, f"{admins}/short"))


HOSTILE = {
    "a mebibyte for a selector": {"nodeLabelSelector": "zone=" + "a" * (1 << 20)},
    "no selector at all": {"nodeLabelSelector": "((("},
    "a key that is not allowed": {"nodeLabelSelector": "secret=1", "priority": 1},
    "a canary that is no number": {"updateStrategy": {"rollingUpdate": {"canary": "NaN%"}}},
    "a time that is none": {"ephemeralSelector": {"nodeNames": ["x"], "lastDuration": "NaNs"}},
    "a priority beyond its type": {"nodeLabelSelector": "zone=a", "priority": 1 << 40},
}


def test_hostile_objects_are_refused_by_name_and_the_kind_goes_on_without_them(
    definitions: Server, replicas: list[Controller]
) -> None:
    server, admins = definitions, within(CONSENT, ADMINS)
    pids = [replica.pid for replica in replicas]
    with nodes(server, "hostile", 1) as (name,), configured(server, a_kcc(), an_admin("all", lending("1"))):
        wait("the node is updated", lambda: configured_object(server, name) == f"all {config_hash(lending('1'), {})}")
        samples = {}
        for number, (what, spec) in enumerate(HOSTILE.items()):
            refused = server.refusal("POST", admins, an_admin(f"bad{number}", lending("7"), **spec))
            if refused is None:
                samples[f"{admins}/bad{number}"] = what
            else:
                assert (refused.status, "spec." in str(refused)) == (422, True), f"{what}: the field's path"
        assert len(samples) > 3, "not all is refused by the definition"
        for path, what in samples.items():
            wait(what, lambda path=path: valid(server, path)[0] == "False")
            assert len(valid(server, path)[2]) < 5000, "the message is bounded"
        for path in samples:
            server.ask("DELETE", path)
        change(server, f"{admins}/all", config=lending("8"))
        wait("the kind goes on", lambda: configured_object(server, name) == f"all {config_hash(lending('8'), {})}")
    assert [item.pid for item in replicas] == pids


def test_a_node_without_its_agent_is_tainted_then_emptied_and_well_again_at_once(
    definitions: Server, replicas: list[Controller], pods: None
) -> None:
    server = definitions
    with nodes(server, "sick", 3) as (sick, *well):
        agents = {node: a_pod_on(server, node, f"agent-{node}", "system_cores", app="agent") for node in (sick, *well)}
        batch, web = a_pod_on(server, sick, "batch"), a_pod_on(server, sick, "web", "shared_cores")
        other = a_pod_on(server, well[0], "elsewhere")
        budget = {
            "metadata": {"name": "kept"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}},
        }
        server.ask("POST", f"/apis/policy/v1/namespaces/{CONSENT}/poddisruptionbudgets", budget)
        rest = a_pod_on(server, sick, "kept", app="kept")
        # Created by a user with the right to create pods, not by an installer of agents.
        spoofed = a_pod_on(server, sick, SPOOFED, "system_cores", ELSEWHERE, app="agent")
        for pod in (*agents.values(), batch, web, other, rest, spoofed):
            set_ready(server, pod, ready=True)
        metrics = leading(replicas)
        wait("all agents are well", lambda: "dioptase_lifecycle_unwell_nodes 0.0" in metrics.text("/metrics"))
        set_ready(server, agents[sick], ready=False)
        wait("the taint", lambda: taints(server, sick) == {TAINT})
        assert "deletionTimestamp" not in server.ask("GET", batch)["metadata"], "first no new ones, later the old ones"
        wait("the reclaimed pod is evicted", lambda: "deletionTimestamp" in server.ask("GET", batch)["metadata"])
        refused = 'dioptase_lifecycle_evictions_total{result="budget"} '
        wait("the budget refuses an eviction", lambda: refused in metrics.text("/metrics"))
        for pod in (rest, web, other, agents[sick]):
            assert "deletionTimestamp" not in server.ask("GET", pod)["metadata"], pod
        assert [taints(server, node) for node in well] == [set(), set()]
        set_ready(server, agents[sick], ready=True)
        wait("the taint goes at once", lambda: not taints(server, sick), 3)
        # All nodes at once are a configuration error.
        for pod in agents.values():
            set_ready(server, pod, ready=False)
        wait("a halt", lambda: 'dioptase_lifecycle_halt{reason="full"} 1.0' in metrics.text("/metrics"))
        assert_stays(6, lambda: not any(taints(server, node) for node in (sick, *well)))
        assert "deletionTimestamp" not in server.ask("GET", other)["metadata"]
        server.ask("DELETE", f"/apis/policy/v1/namespaces/{CONSENT}/poddisruptionbudgets/kept")


MILLICPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"


def report_reclaimable(server: Server, node: str, millicpu: str) -> None:
    """Write a node's capacity and reclaimable CPU, as its agent and kubelet do."""
    amounts = {"pods": "10", "cpu": "8", "memory": "8Gi", MILLICPU: millicpu}
    server.ask("PATCH", f"{NODES}/{node}/status", {"status": {"capacity": amounts, "allocatable": amounts}}, MERGE)


def node_millicpu(server: Server, node: str) -> list[str | None]:
    status = server.ask("GET", f"{NODES}/{node}")["status"]
    return [status.get(part, {}).get(MILLICPU) for part in ("capacity", "allocatable")]


def a_batch_pod(server: Server, name: str, kind: str) -> Callable[[], str]:
    """Create a pod for the stock scheduler; return a function that returns its node, or why it is not scheduled."""
    amount = {MILLICPU: "1000"}
    container = {"name": "main", "image": "none", "resources": {"requests": amount, "limits": amount}}
    spec = {
        "containers": [container], "automountServiceAccountToken": False, "nodeSelector": {"kind": kind},
        # These nodes have no heartbeats.
        "tolerations": [{"operator": "Exists"}],
    }  # fmt: skip
    annotations = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
    server.ask("POST", PODS, {"metadata": {"name": name, "annotations": annotations}, "spec": spec})

    def where() -> str:
        result = server.ask("GET", f"{PODS}/{name}")
        why = [item.get("message", "") for item in result["status"].get("conditions", [])]
        return str(result["spec"].get("nodeName") or " ".join(why))

    return where


def test_a_stock_scheduler_places_no_reclaimed_pod_on_a_node_whose_agent_is_gone(
    cluster: Cluster, own_cluster: Cluster, definitions: Server, replicas: list[Controller], pods: None
) -> None:
    """The taint goes with the Node; otherwise an evicted pod would return at once and be evicted again."""
    server = definitions
    with nodes(server, "gone", 1, kind="gone") as (sick,), nodes(server, "there", 2) as well:
        agents = {node: a_pod_on(server, node, f"agent-{node}", "system_cores", app="agent") for node in (sick, *well)}
        for pod in agents.values():
            set_ready(server, pod, ready=True)
        for node in (sick, *well):
            report_reclaimable(server, node, "4k")
        first = a_batch_pod(server, "first", "gone")
        wait("it is placed", lambda: first() == sick)
        set_ready(server, agents[sick], ready=False)
        wait("the node reports no headroom", lambda: node_millicpu(server, sick) == [None, None])
        assert taints(server, sick) == {TAINT}
        wait("the pod on it is evicted", lambda: "deletionTimestamp" in server.ask("GET", f"{PODS}/first")["metadata"])
        server.ask("DELETE", f"{PODS}/first", {"gracePeriodSeconds": 0})
        second = a_batch_pod(server, "second", "gone")
        wait("it is placed nowhere", lambda: f"Insufficient {MILLICPU}" in second())
        assert_stays(3, lambda: f"Insufficient {MILLICPU}" in second())
        assert [node_millicpu(server, node) for node in well] == [["4k", "4k"]] * 2
        set_ready(server, agents[sick], ready=True)
        wait("the taint goes", lambda: not taints(server, sick))
        report_reclaimable(server, sick, "3k")
        wait("its agent reports headroom again", lambda: second() == sick)
        assert_stays(3, lambda: node_millicpu(server, sick) == ["3k", "3k"])


@pytest.mark.long
def test_a_leader_killed_with_the_api_server_is_followed_by_the_other_and_nothing_is_lost(
    own_cluster: Cluster, definitions: Server, replicas: list[Controller], pods: None
) -> None:
    server = definitions
    with nodes(server, "away", 2) as names, configured(server, a_kcc(), an_admin("all", lending("1"))):
        for name in names:
            set_ready(server, a_pod_on(server, name, f"agent-{name}", "system_cores", app="agent"), ready=True)
        batch = a_pod_on(server, names[0], "batch")
        wait("the node is updated", lambda: configured_object(server, names[1]) is not None)
        first = leading(replicas)
        (second,) = [replica for replica in replicas if replica is not first]
        pid = second.pid
        first.end(signal.SIGKILL)
        # All watches end; those that would resume get 410 Gone.
        own_cluster.compact()
        own_cluster.daemons.end(API_SERVER)
        time.sleep(8)  # longer than both ages of SETTINGS
        own_cluster.daemons.again(API_SERVER)
        own_cluster.control.ready()
        change(server, f"{within(CONSENT, ADMINS)}/all", config=lending("2"))
        wait("the other leads", lambda: second.leads, 25)
        wait("what came between", lambda: configured_object(server, names[1]) == f"all {config_hash(lending('2'), {})}")
        assert [taints(server, name) for name in names] == [set(), set()]
        assert "deletionTimestamp" not in server.ask("GET", batch)["metadata"]
        assert second.pid == pid
        first.again()
        first.ready()
        assert not first.leads
        second.end(signal.SIGTERM)
        began = time.monotonic()
        wait("a stopping replica releases the lease", lambda: first.leads, 25)
        assert time.monotonic() - began < 5, "at once, and not when it has run out"
        second.again()
        second.ready()
