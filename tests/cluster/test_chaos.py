"""The agent on a real node while its dependencies, or the agent itself, are killed: cycles continue, applied configuration
stays, no pod is evicted or changed, and every value is restored at the end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import pytest

from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.control_plane import API_SERVER
from tests.cluster.daemons import wait
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.katalyst import ADMINS, CNCS, CNRS, an_admin, is_deleted, within
from tests.cluster.pods import Pod, run
from tests.cluster.programs import Agent
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import Account

pytestmark = pytest.mark.cluster
SETTINGS = {
    "report": {"periodS": 1, "windowS": 3, "minCores": 1},
    "eviction": {"plugins": ["*", "rss-overuse-eviction-plugin", "cpu-pressure-load-plugin"]},
}
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def node(own_cluster: Cluster, cluster: Cluster | ExternalCluster, definitions: Server) -> Iterator[Cluster]:
    """A cluster with a node and the CustomNodeConfig that a controller would create."""
    for path, kind, group in ((CNCS, "CustomNodeConfig", "config"), (CNRS, "CustomNodeResource", "node")):
        head = {"apiVersion": f"{group}.katalyst.kubewharf.io/v1alpha1", "kind": kind, "metadata": {"name": "node1"}}
        refused = definitions.refusal("POST", path, head)
        assert refused is None or refused.status == 409, refused  # an earlier test created them
    yield own_cluster
    for path in (CNCS, CNRS):
        definitions.refusal("DELETE", f"{path}/node1")
    for item in definitions.ask("GET", within(CONSENT, ADMINS))["items"]:
        definitions.ask("DELETE", f"{within(CONSENT, ADMINS)}/{item['metadata']['name']}")


@pytest.fixture(scope="module")
def pods(node: Cluster) -> Iterator[tuple[Pod, Pod]]:
    """An online pod and a reclaimed pod."""
    account = f"/api/v1/namespaces/{CONSENT}/serviceaccounts/default"
    wait("the service account", lambda: node.server.ask("GET", account))
    limits = {"requests": {"cpu": "200m", "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": "64Mi"}}
    web = run(node, CONSENT, "web", "shared_cores", resources=limits)
    batch = run(node, CONSENT, "batch", "reclaimed_cores")
    yield web, batch
    for pod in (web, batch):
        node.server.ask("DELETE", pod.path)


@pytest.fixture(scope="module")
def agent(node: Cluster, pods: tuple[Pod, Pod], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An acting agent, which must restore everything at the end."""
    folder = tmp_path_factory.mktemp("agent")
    account = Account(node, "dioptase-agent", CONSENT, folder)
    before = [pod.knobs() for pod in pods]
    created = Agent(node, node.nodes[0], account, folder, SETTINGS, ("--act", "on"))
    created.begin()
    wait("the reclaimed pod gives way", lambda: pods[1].idle)
    yield created
    created.end()
    assert [pod.knobs() for pod in pods] == before, "everything is put back"
    account.forget()


@pytest.fixture(autouse=True)
def no_pod_lost(agent: Agent, pods: tuple[Pod, Pod]) -> Iterator[None]:
    """Check that no pod was evicted and none was lost."""
    yield
    assert all(pod.untouched for pod in pods)
    assert pods[1].idle
    assert agent.ask("/api/v1/evictions?limit=10") == []


def apply_config(server: Server, config: dict[str, Any], name: str = "all") -> str:
    """Make the node apply this configuration, as a controller would; return its hash."""
    path = f"{within(CONSENT, ADMINS)}/{name}"
    if is_deleted(server, path):
        server.ask("POST", within(CONSENT, ADMINS), an_admin(name, config))
    else:
        result = server.ask("GET", path)
        server.ask("PUT", path, {**result, "spec": {"config": config}})
    return point_at(server, name)


def point_at(server: Server, name: str) -> str:
    version = f"{next(_versions):012d}"
    point(server, {"configName": name, "configNamespace": CONSENT, "hash": version})
    return version


def point(server: Server, *entries: dict[str, Any], kind: str = ADMINS) -> None:
    target = {"group": "config.katalyst.kubewharf.io", "version": "v1alpha1", "resource": kind}
    listed = [{"configType": target, **entry} for entry in entries]
    server.ask("PATCH", f"{CNCS}/node1/status", {"status": {"katalystCustomConfigList": listed}}, MERGE)


def reserved(cores: int | str) -> dict[str, Any]:
    return {"reclaimedResourceConfig": {"reservedResourceForAllocate": {"cpu": str(cores)}}}


def setting(agent: Agent, name: str) -> Any:
    return next(item for item in agent.ask("/api/v1/config")["settings"] if item["name"] == name)


def applies(agent: Agent, version: str) -> bool:
    objects = agent.ask("/api/v1/config")["objects"]
    return [(item["hash"], item.get("problem", "")) for item in objects] == [(version, "")]


def rounds_go_on(agent: Agent, count: int = 3) -> None:
    seq = agent.view()["seq"]
    wait("rounds go on", lambda: agent.view()["seq"] >= seq + count)


@contextmanager
def watched(pod: Pod) -> Iterator[list[float]]:
    """Sample the pod's cpu.idle ten times a second; yield the times at which it was not set."""
    files = [group / "cpu.idle" for group in pod.cgroups()]
    ended, moments = threading.Event(), []

    def look() -> None:
        while not ended.wait(0.1):
            if not any(file.read_text() == "1\n" for file in files):
                moments.append(time.monotonic())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield moments
    finally:
        ended.set()
        looking.join()


@contextmanager
def away(node: Cluster) -> Iterator[None]:
    """Block the API server's address."""
    node.daemons.end(API_SERVER)
    try:
        yield
    finally:
        node.daemons.again(API_SERVER)
        node.control.ready()


@pytest.mark.long
def test_applied_configuration_stays_while_the_api_server_is_away_also_for_a_new_agent(
    node: Cluster, agent: Agent, pods: tuple[Pod, Pod]
) -> None:
    first = apply_config(node.server, reserved(1))
    wait("it is applied", lambda: applies(agent, first))
    with watched(pods[1]) as moments, away(node):
        rounds_go_on(agent)
        assert applies(agent, first)
        agent.end(signal.SIGKILL)
        agent.again()
        agent.ready()
        assert applies(agent, first), "from the state directory"
        rounds_go_on(agent)
    assert moments == []
    second = apply_config(node.server, reserved(2))
    wait("it is heard again", lambda: applies(agent, second))
    wait("and reported to", lambda: "cnr" not in agent.troubles())


@pytest.mark.long
def test_a_history_that_is_forgotten_and_an_object_that_is_gone_cost_nothing(node: Cluster, agent: Agent) -> None:
    server = node.server
    old = apply_config(server, reserved(1))
    wait("it is applied", lambda: applies(agent, old))
    with away(node):
        pass
    for number in range(20):
        server.ask("PATCH", f"{CNRS}/node1", {"metadata": {"labels": {"version": str(number)}}}, MERGE)
    node.compact()  # the agent's watch would go on from before
    server.ask("DELETE", f"{CNRS}/node1")
    new = apply_config(server, reserved(2))
    wait("what is new is heard", lambda: applies(agent, new))
    agent.end(signal.SIGKILL)  # what it wrote is not to be written again for minutes; a new one finds that out at once
    agent.again()
    agent.ready()
    wait("the object is created again", lambda: not is_deleted(server, f"{CNRS}/node1"))


@pytest.mark.long
@pytest.mark.parametrize("program", ["kubelet", "containerd"])
def test_pods_are_retained_while_their_source_is_away(
    node: Cluster, agent: Agent, pods: tuple[Pod, Pod], program: str
) -> None:
    source = {"kubelet": "kubelet", "containerd": "container-runtime"}[program]
    before = agent.ask("/api/v1/decisions?after=0&limit=500")
    with watched(pods[1]) as moments:
        node.daemons.end(f"node1-{program}")
        try:
            wait("it is said", lambda: source in agent.troubles())
            rounds_go_on(agent)
            listed = {result["pod"] for result in agent.view()["containers"]}
            assert {pod.key for pod in pods} <= listed
        finally:
            node.daemons.again(f"node1-{program}")
        wait("it is back", lambda: source not in agent.troubles(), 90)
        rounds_go_on(agent, 5)
    assert moments == []
    after = agent.ask("/api/v1/decisions?after=0&limit=500")
    mine = {pod.key for pod in pods}
    assert [item for item in after[len(before) :] if item["outcome"]["decision"]["pod"] in mine] == []
    node.daemons.wait("node1-kubelet", lambda: node.ready("node1"))


@pytest.mark.long
def test_an_agent_that_is_killed_in_any_phase_is_followed_by_one_that_knows_what_to_put_back(
    node: Cluster, agent: Agent, pods: tuple[Pod, Pod]
) -> None:
    agent.end()
    before = [pod.knobs() for pod in pods]
    assert not pods[1].idle
    for delay in (0.4, 1.0, 1.7, 2.5):
        agent.again()
        time.sleep(delay)  # somewhere between its first instruction and its third round
        agent.end(signal.SIGKILL)
    agent.again()
    wait("it acts", lambda: pods[1].idle)
    agent.end(signal.SIGKILL)
    assert pods[1].idle
    agent.again()
    agent.ready()
    agent.end()
    assert [pod.knobs() for pod in pods] == before
    for delay in (0.0, 0.05):
        agent.again()
        wait("it acts", lambda: pods[1].idle)
        threading.Timer(delay, lambda pid=agent.pid: _kill(pid)).start()
        agent.end()  # SIGTERM, and killed while it puts back
    agent.again()
    agent.ready()
    agent.end()
    assert [pod.knobs() for pod in pods] == before
    agent.again()
    wait("it acts", lambda: pods[1].idle)


def _kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


LARGE = "x" * (1 << 20)
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "more CPUs than there are": (reserved(8000), "reservedResourceForAllocate.cpu"),
    "below zero": (reserved("-1"), "reservedResourceForAllocate"),
    "no quantity": (reserved("NaN"), "reservedResourceForAllocate"),
    "beyond every number": (
        {"reclaimedResourceConfig": {"cpuHeadroomConfig": {"utilBasedConfig": {"maxOversoldRate": 1e308}}}}, "maxOversoldRate",
    ),
    "no number": ({"evictionConfig": {"cpuPressureEvictionConfig": {"loadUpperBoundRatio": "NaN"}}}, "loadUpperBoundRatio"),
    "another type": ({"evictionConfig": {"dryRun": "everything"}}, "dryRun"),
    "deeper than any": ({"evictionConfig": {"cpuPressureEvictionConfig": []}}, "cpuPressureEvictionConfig"),
    "a mebibyte": ({"reclaimedResourceConfig": {"disableReclaimSharePools": [LARGE]}}, "disableReclaimSharePools"),
    "a mebibyte for a time": (
        {"evictionConfig": {"networkEvictionConfig": {"nicUnhealthyToleranceDuration": LARGE}}},
        "nicUnhealthyToleranceDuration",
    ),
}  # fmt: skip


def test_hostile_objects_are_refused_by_the_fields_path_and_the_last_good_one_stands(
    node: Cluster, agent: Agent
) -> None:
    server, pid = node.server, agent.pid
    good = apply_config(server, reserved(1))
    wait("it is applied", lambda: applies(agent, good))
    samples = 0
    for number, (what, (config, field)) in enumerate(HOSTILE.items()):
        name = f"hostile{number}"
        if refused := server.refusal("POST", within(CONSENT, ADMINS), an_admin(name, config)):
            assert (refused.status, field in str(refused)) == (422, True), f"{what}: {refused}"
            continue
        version = point_at(server, name)
        samples += 1
        wait(
            what,
            lambda version=version: version in {result["hash"] for result in agent.ask("/api/v1/config")["objects"]},
        )
        objects = {item["hash"]: item.get("problem", "") for item in agent.ask("/api/v1/config")["objects"]}
        assert field in objects[version], f"{what}: the field's path"
        assert len(objects[version]) < 2000, f"{what}: bounded, whatever it says"
        assert setting(agent, "advisor.reservedForAllocateCores")["hash"] == good, what
    assert samples > 2, "not all is refused by the definition"
    point(server, *({"configName": LARGE[:253], "configNamespace": CONSENT, "hash": str(n)} for n in range(2000)))
    wait("no such object is said", lambda: "dynamic-config" in agent.troubles())
    rounds_go_on(agent)
    good = apply_config(server, reserved(1))
    wait("it goes on", lambda: applies(agent, good), 90)
    assert agent.pid == pid


def test_a_pod_is_scraped_at_the_address_of_the_kubelet(node: Cluster, agent: Agent) -> None:
    request = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": agent.url.rpartition(":")[2].strip("/"),
        "dioptase.io/latency-metric": "x",
    }
    created = run(node, CONSENT, "asked", "shared_cores", annotations=request)
    address = node.server.ask("GET", created.path)["status"]["podIP"]
    assert ip_address(address).is_loopback is False

    def values() -> bool:
        pods = agent.ask("/api/v1/snapshot")["pods"]
        return [pod.get("address") for pod in pods if pod["name"] == "asked"] == [address]

    wait("its address is known", values)
    wait("and there is no answer", lambda: "indicator-pods" in agent.troubles())
    node.server.ask("DELETE", created.path, {"gracePeriodSeconds": 0})


def test_hostile_annotations_are_reported_by_pod_and_name_without_side_effects(node: Cluster, agent: Agent) -> None:
    pid, prefix = agent.pid, "katalyst.kubewharf.io/"
    hostile = {
        "large": {f"{prefix}memory_enhancement": "[" * 100_000, f"{prefix}cpu_enhancement": "{" * 100_000},
        "numbers": {f"{prefix}cpu_enhancement": '{"suppression_tolerance_rate": "NaN", "cpu_burst_percent": "1e999"}',
                    f"{prefix}numa_ids": "0-4294967295", f"{prefix}numa_number": "-1"},
        "types": {f"{prefix}memory_enhancement": '{"numa_binding": true, "oom_priority": [1]}'},
        "level": {f"{prefix}qos_level": "\\u0000" + "y" * 200_000},
    }  # fmt: skip
    created = [run(node, CONSENT, name, "reclaimed_cores", annotations=result) for name, result in hostile.items()]
    keys = {pod.key for pod in created}
    wait("all are known", lambda: keys <= {value["pod"] for value in agent.view()["containers"]})
    problems = {item["name"]: json.dumps(item.get("problems", [])) for item in agent.ask("/api/v1/snapshot")["pods"]}
    for name, written in hostile.items():
        assert any(key in problems[name] for key in written), name
        assert len(problems[name]) < 5000, "bounded, whatever they say"
    assert "pod-annotations" in agent.troubles()
    rounds_go_on(agent)
    for pod in created:
        node.server.ask("DELETE", pod.path, {"gracePeriodSeconds": 0})
    wait("all is well again", lambda: "pod-annotations" not in agent.troubles())
    assert agent.pid == pid
