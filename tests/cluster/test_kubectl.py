"""`kubectl dioptase` through a real API server: agents that answer, over HTTP and TLS, and unreachable ones.

The pods are objects of the API server; at their addresses are servers on this machine, or nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config.config import AgentConfig
from agent.dynamic_config.effective import effective_configuration
from agent.dynamic_config.merge import resolve_config
from api.diagnostics import DoctorCheck, EffectiveConfiguration
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from common.http.web_config import WebConfig
from common.yaml_guard import check_yaml
from kube.client import KubeClient
from kube.objects import format_timestamp
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.fleet import Agents, Fleet, Reviewing
from tests.cluster.katalyst import CNRS
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Refused, Server
from tests.cluster.test_scheduler import a_cnr
from tests.exporters.certificates import Authority

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
PLUGIN = "from cli.kubectl import main; main()"
MANY = 200
LACKS = DoctorCheck(name="pressure", ok=False, detail="no /proc/pressure", remedy="boot with psi=1")
PASSWORD = "$2b$04$cVWp4XaNU8a4v1uMRum2SO026BWLIoQMD/TXg5uZV.0P.uO8m3YEm"


def effective_config(interval_s: float = 1.0) -> EffectiveConfiguration:
    config = msgspec.structs.replace(AgentConfig(), interval_s=interval_s)
    return effective_configuration(
        resolve_config(config, {}, {}, lambda _config: ""),
        {} if interval_s == 1 else {"file": {"intervalS": interval_s}},
        5,
    )


@pytest.fixture
def account(server: Server, namespace: str) -> None:
    """The service account that the controllers would create."""
    with suppress(Refused):  # it is there already where there are controllers
        server.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}})


@pytest.fixture
def agents(own_cluster: Cluster) -> Iterator[Agents]:
    created = Agents(own_cluster.names.host)
    yield created
    created.close()


@pytest.fixture
def fleet(own_cluster: Cluster, server: Server, namespace: str, account: None) -> Iterator[Fleet]:
    created = Fleet(server, own_cluster.names.host, namespace)
    yield created
    created.remove()


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(own_cluster: Cluster, fleet: Fleet) -> Call:
    """Run the plugin on the nodes of the fleet."""

    def called(*words: str, namespace: str = fleet.namespace) -> subprocess.CompletedProcess[str]:
        return run(*words, "--kubeconfig", str(own_cluster.kubeconfig), "-n", namespace, "-l", fleet.label)

    return called


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the plugin."""
    return subprocess.run(
        [sys.executable, "-c", PLUGIN, *words], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        env={**os.environ, "TZ": "UTC"},
    )  # fmt: skip


@pytest.fixture
def mixed(agents: Agents, fleet: Fleet, definitions: Server, tmp_path: Path) -> Fleet:
    """Eight nodes, three of which have an answering agent."""
    authority = Authority(tmp_path)
    authority.issue("server")
    (tmp_path / "tls.yml").write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    (tmp_path / "users.yml").write_text(f"basic_auth_users: {{me: {PASSWORD}}}\n")
    fleet.agent("a-plain", agents.start(effective_config()))
    fleet.agent(
        "b-secure",
        agents.start(effective_config(), WebConfig(tmp_path / "tls.yml", check_yaml), lacks=(LACKS,)),
        "HTTPS",
    )
    fleet.agent("c-other", agents.start(effective_config(2.0), lacks=(LACKS,)))
    fleet.agent("d-closed", agents.closed())
    fleet.agent("e-silent", agents.silent())
    fleet.agent("f-locked", agents.start(effective_config(), WebConfig(tmp_path / "users.yml", check_yaml)))
    fleet.agent("g-early", agents.start(effective_config(), round_=False))
    fleet.node("h-none")
    return fleet


def steady(fleet: Fleet, text: str) -> str:
    """Replace names that differ between runs by others of the same width."""
    text = (
        text.replace(f"-{fleet.label[-4:]}", "-0000")
        .replace(fleet.host, "10.0.0.10")
        .replace(fleet.namespace, "agents")
    )
    return re.sub(r":\d{5}\b", ":12345", text)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("top", "--request-timeout", "2"), 0),
        (("value", "--request-timeout", "2"), 0),
        (("top", "pods", "web", "--sort-by", "wait", "--request-timeout", "1"), 0),
        (("config", "--differing", "--request-timeout", "1"), 0),
        (("doctor", "--request-timeout", "2"), 1),
    ],
    ids=lambda item: item[0] if isinstance(item, tuple) else "",
)
def test_an_unreachable_node_has_a_row_with_the_reason(
    mixed: Fleet, call: Call, golden: Callable[[str, str], None], words: tuple[str, ...], status: int
) -> None:
    done = call(*words)
    assert "Traceback" not in done.stderr
    assert done.returncode == status
    name = "-".join(word for word in words[:2] if word.isalpha())
    golden(f"kubectl-{name}.txt", steady(mixed, done.stdout + done.stderr))


def test_one_node_explains_itself(mixed: Fleet, call: Call) -> None:
    done = call("explain", mixed.name("b-secure"), "share")
    assert done.stdout.startswith("Pool share has CPUs 0-3\n")
    nothing = call("explain", mixed.name("b-secure"), "nonsense")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "There is no data on 'nonsense'" in nothing.stderr
    for node, complaint in (
        ("d-closed", "connection refused\n  remedy: let it listen at an address that the control plane reaches"),
        ("h-none", "no agent runs here\n  remedy: kubectl dioptase doctor"),
        ("z-unknown", "there is no node"),
    ):
        done = call("explain", mixed.name(node))
        assert done.returncode == 1
        assert complaint in done.stderr


def test_a_pending_pod_is_explained_by_what_it_waits_for(
    fleet: Fleet, agents: Agents, server: Server, own_cluster: Cluster, call: Call
) -> None:
    fleet.agent("a", agents.start(effective_config()))
    pod = a_pod("batch", "reclaimed_cores")
    pod["spec"]["schedulerName"] = "katalyst-scheduler"
    server.ask("POST", f"/api/v1/namespaces/{fleet.namespace}/pods", pod)
    expected = "no scheduler named katalyst-scheduler has tried to place it"

    def explained() -> str:
        return call("explain", fleet.name("a"), f"{fleet.namespace}/batch").stdout

    text = f"{fleet.namespace}/batch is Pending: {expected}.\n  remedy: remove spec.schedulerName"
    wait("the reason", lambda: explained().startswith(text), 60)
    done = run("doctor", "-o", "json", "--kubeconfig", str(own_cluster.kubeconfig), "-n", fleet.namespace)
    rows = [row for row in json.loads(done.stdout) if row["name"] == "pending pods"]
    assert any(row["detail"] == f"{fleet.namespace}/batch: {expected}" and not row["ok"] for row in rows)
    assert done.returncode == 1
    chosen = json.loads(call("doctor", "-o", "json").stdout)
    assert "pending pods" not in [row["name"] for row in chosen], "-l selects nodes, on which it is not"


def test_placements_and_harm_come_from_the_api_server_where_no_agent_answers(
    fleet: Fleet, agents: Agents, definitions: Server, call: Call
) -> None:
    """A CustomNodeResource offers 3 cores; one pod got the node ten minutes ago, and another one requests too much."""
    fleet.agent("a", agents.closed())
    node, now_s = fleet.name("a"), time.time()
    definitions.ask("POST", CNRS, a_cnr(node))
    usage = {"cpu": "700m", "memory": "1Gi"}
    metrics = {
        "updateTime": format_timestamp(now_s),
        "nodeMetric": {"genericUsage": {"dioptase.io/runq_latency_p99": "4m", "dioptase.io/cpu_pressure": "100m"}},
        "groupMetric": [{"QoSLevel": "reclaimed_cores", "genericUsage": usage}],
    }
    amounts = {RECLAIMED_CPU: "3k", RECLAIMED_MEMORY: "8Gi"}
    status = {"resources": {"allocatable": amounts}, "nodeMetricStatus": metrics}
    definitions.ask("PATCH", f"{CNRS}/{node}/status", {"status": status}, MERGE)
    pods = f"/api/v1/namespaces/{fleet.namespace}/pods"
    for name, spec in (("train", {"nodeName": node}), ("large", {"schedulerName": "any-scheduler"})):
        pod = a_pod(name, "reclaimed_cores", resources={"limits": {RECLAIMED_CPU: "2k" if name == "train" else "4k"}})
        pod["metadata"]["annotations"]["dioptase.io/placement-score"] = "64.4"
        definitions.ask("POST", pods, {**pod, "spec": {**pod["spec"], **spec}})
        condition = {"type": "PodScheduled", "status": str(name == "train"), "reason": "Unschedulable"}
        condition |= {"lastTransitionTime": format_timestamp(now_s - 600), "message": "0/1 nodes are available"}
        definitions.ask("PATCH", f"{pods}/{name}/status", {"status": {"conditions": [condition]}}, MERGE)
    (row,) = json.loads(call("top", "-o", "json").stdout)
    reclaimed = {name: row["reclaimed"].get(name) for name in ("allocatable_cores", "requested_cores", "pods")}
    assert reclaimed == {"allocatable_cores": 3.0, "requested_cores": 2.0, "pods": 1}
    assert (row["reclaimed"]["harm_share"], row["used_cores"]) == (pytest.approx(0.4), 0.7)
    latest = json.loads(call("top", "placements", node, "-o", "json").stdout)
    assert [(each["pod"], each["node"], each["score"]) for each in latest] == [(f"{fleet.namespace}/train", node, 64.4)]
    assert now_s - latest[0]["placed_s"] == pytest.approx(600, abs=2)
    reasons = json.loads(call("top", "pending", "-o", "json").stdout)
    (reason,) = [each for each in reasons if f"{fleet.namespace}/large" in each["pods"]]
    assert f"{node} has 1000 left, 3000 short" in reason["detail"]
    text = call("top").stdout
    assert re.search(rf"^{fleet.namespace}/train +{node} +10 min +64$", text, re.MULTILINE), text
    assert "PENDING" not in text, "-l selects nodes, on which pending pods are not"


def test_a_wrong_scheme_is_reported(fleet: Fleet, agents: Agents, call: Call, tmp_path: Path) -> None:
    Authority(tmp_path).issue("server")
    (tmp_path / "tls.yml").write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    fleet.agent("a", agents.start(effective_config(), WebConfig(tmp_path / "tls.yml", check_yaml)), "HTTP")
    fleet.agent("b", agents.start(effective_config()), "HTTPS")
    rows = json.loads(call("top", "-o", "json").stdout)
    texts = [row["problem"].partition("cannot reach it: ")[2] for row in rows]
    assert texts == ["EOF", "tls: first record does not look like a TLS handshake"]
    assert all("with TLS if its probe uses HTTPS" in row["remedy"] for row in rows)


def test_json_has_the_numbers(mixed: Fleet, call: Call) -> None:
    rows = json.loads(
        call("top", "-o", "json", "--node", mixed.name("a-plain"), "--node", mixed.name("d-closed")).stdout
    )
    assert [(row.get("lent_cores"), row["allocatable_cores"]) for row in rows] == [(2.5, 7.8), (None, 7.8)]
    assert "connection refused" in rows[1]["problem"]
    output = json.loads(call("config", "intervalS", "-o", "json", "--request-timeout", "1").stdout)
    assert [(item["value"], len(item["nodes"])) for item in output["settings"][0]["values"]] == [("1", 3), ("2", 1)]
    assert len(output["silent"]) == 4


def test_a_namespace_without_agents_is_named(fleet: Fleet, call: Call) -> None:
    done = call("top", namespace="default")
    assert done.returncode == 1
    assert "no pod in namespace default is labelled app.kubernetes.io/name=dioptase" in done.stderr


@pytest.mark.long
async def test_two_hundred_nodes_take_seconds(fleet: Fleet, agents: Agents, call: Call, client: KubeClient) -> None:
    port = agents.start(effective_config())
    names = [f"n{number:03}" for number in range(MANY)]
    await fleet.many(names, port, client)
    began = time.monotonic()
    done = await asyncio.to_thread(call, "top", "-o", "json")
    print(f"{MANY} nodes in {time.monotonic() - began:.1f} s")
    rows = json.loads(done.stdout)
    assert [row["node"] for row in rows] == [fleet.name(name) for name in names]
    assert [row["problem"] for row in rows if row.get("problem")] == []
    lines = (await asyncio.to_thread(call, "top")).stdout.splitlines()
    assert lines[-1].split()[:3] == ["200", "nodes", "800"]


@pytest.fixture
def reviewing(server: Server, own_cluster: Cluster) -> Iterator[Reviewing]:
    created = Reviewing(server, own_cluster.names.host)
    yield created
    created.close()


def test_an_agent_that_wants_a_token_gets_one_of_the_account_that_looks(
    fleet: Fleet, reviewing: Reviewing, call: Call, server: Server
) -> None:
    fleet.agent("a", reviewing.port)
    fleet.agent("b", reviewing.port)
    done = call("top")
    assert done.returncode == 1
    assert f"you may not create one of account {fleet.namespace}/dioptase-reader: 404" in done.stdout
    accounts = f"/api/v1/namespaces/{fleet.namespace}/serviceaccounts"
    server.ask("POST", accounts, {"metadata": {"name": "dioptase-reader"}})
    done = call("top")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("on, grow") == 2
    viewer = f"system:serviceaccount:{fleet.namespace}:dioptase-reader"
    assert reviewing.requests == [(None, viewer)] * 2, "and the API server passed on no credentials of a user"


def test_what_a_person_needs_to_be_allowed(fleet: Fleet, agents: Agents, own_cluster: Cluster, server: Server) -> None:
    fleet.agent("a", agents.start(effective_config()))
    base = f"/api/v1/namespaces/{fleet.namespace}/serviceaccounts"
    server.ask("POST", base, {"metadata": {"name": "person"}})
    token = server.ask("POST", f"{base}/person/token", {"spec": {"expirationSeconds": 600}})["status"]["token"]
    config = json.loads(own_cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = own_cluster.names.run / "person.kubeconfig"
    path.write_text(json.dumps(config))

    def called(*words: str) -> subprocess.CompletedProcess[str]:
        scope = ["top", "--kubeconfig", str(path), "-n", fleet.namespace, *words]
        return run(*scope)

    def grant(*rules: dict[str, Any]) -> None:
        roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{fleet.namespace}"
        name = uuid.uuid4().hex
        server.ask("POST", f"{roles}/roles", {"metadata": {"name": name}, "rules": list(rules)})
        subject = {"kind": "ServiceAccount", "name": "person", "namespace": fleet.namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        body = {"metadata": {"name": name}, "subjects": [subject], "roleRef": reference}
        server.ask("POST", f"{roles}/rolebindings", body)

    assert "ask an administrator for the right to list pods" in called().stderr
    grant({"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]})
    wait("the role", lambda: "you may not reach it" in called().stdout)
    grant({"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]})
    wait("the role", lambda: called().returncode == 0)
    assert "on, grow" in called().stdout, "nodes may not be listed, so those of the agents are shown"
    assert "nodes cannot be listed" in called("-l", fleet.label).stderr


def test_kubectl_finds_it(fleet: Fleet, agents: Agents, own_cluster: Cluster, tmp_path: Path) -> None:
    fleet.agent("a", agents.start(effective_config()))
    program = tmp_path / "kubectl-dioptase"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PLUGIN}' \"$@\"\n")
    program.chmod(0o755)
    words = [
        own_cluster.programs["kubectl"],
        "dioptase",
        "-n",
        fleet.namespace,
        "--kubeconfig",
        own_cluster.kubeconfig,
        "-l",
        fleet.label,
        "top",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert "on, grow" in done.stdout
    helped = subprocess.run([*words[:2], "top", "-h"], capture_output=True, text=True, check=True, env=environment)
    assert helped.stdout.startswith("Usage: kubectl dioptase top ")


def test_an_agent_in_a_pod_of_a_real_node_answers(
    own_cluster: Cluster, cluster: Cluster | ExternalCluster, server: Server, workspace: str, tmp_path: Path
) -> None:
    """The code is this machine's, by hostPath, and so is its root: what an image has is tested with the image."""
    pod = a_pod("agent", **{"app.kubernetes.io/name": "dioptase", "app.kubernetes.io/component": "agent"})
    options = f"--listen 0.0.0.0:9102 --state-dir {tmp_path}/state"
    inside = f"cd {ROOT} && exec {sys.executable} -c 'from cli.main import main; main()' agent {options}"
    pod["spec"]["volumes"] = [{"name": "root", "hostPath": {"path": "/"}}]
    pod["spec"]["containers"][0] |= {
        "command": ["chroot", "/host", "sh", "-c", inside],
        "volumeMounts": [{"name": "root", "mountPath": "/host"}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": 9102}, "periodSeconds": 1},
    }
    server.ask("POST", f"/api/v1/namespaces/{workspace}/pods", pod)
    base = ["--kubeconfig", str(own_cluster.kubeconfig), "-n", workspace, "--node", "node1"]

    def row() -> dict[str, Any]:
        (output,) = json.loads(run("top", "-o", "json", *base).stdout)
        return dict(output)

    wait("the agent", lambda: row().get("busy_cores") is not None, 120)
    assert row()["cpus"] == os.cpu_count()
    assert row()["allocatable_cores"] == pytest.approx(row()["cpus"] - 0.1), "the kubelet keeps 100m back"
    text = run("config", "intervalS", *base)
    assert text.stdout.split() == ["intervalS", "1", "(default)"]
    output = json.loads(run("doctor", "-o", "json", *base).stdout)
    assert [item["ok"] for item in output if item["name"] == "agent"] == [True]
    assert "Now: cycle" in run("explain", "node1", *base).stdout
