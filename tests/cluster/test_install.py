"""The chart on a real cluster: installed, checked, upgraded, rolled back and uninstalled."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from agent.config.profiles import PROFILES
from tests.cluster import audit
from tests.cluster.audit import AuditedRequest
from tests.cluster.cgroups import knobs_of_pods
from tests.cluster.cluster import Cluster, Failed
from tests.cluster.daemons import Late, wait
from tests.cluster.image_and_chart import CHART, IMAGE, ROOT, SHARED_MACHINE, TAG, helm
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Server
from tests.cluster.service_accounts import granted_by
from tests.cluster.test_kubectl import PLUGIN
from tests.cluster.test_rights import rules

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
NAMESPACE, RELEASE = "dioptase-system", "dioptase"
AGENT, CONTROLLER = f"{RELEASE}-agent", f"{RELEASE}-controller"
CONFIG, NODE = "config.katalyst.kubewharf.io", "node.katalyst.kubewharf.io"
# Bits of CAP_PERFMON and CAP_BPF: include/uapi/linux/capability.h.
CAPABILITIES = 1 << 38 | 1 << 39
RARE = {
    AuditedRequest("", "events", "create"): "only when a pod is evicted",
    AuditedRequest("", "pods/eviction", "create"): "only when a pod has to leave, or 20 minutes after an agent is gone",
    AuditedRequest("", "pods", "get"): "only of a pod that has to leave",
    AuditedRequest(
        "", "nodes", "get"
    ): "only before a node is tainted, or objects of one are deleted that is no longer listed",
    AuditedRequest("apps", "daemonsets", "get"): "only by an agent that ends",
    AuditedRequest("coordination.k8s.io", "leases", "get"): "of the agent, only when a pod is evicted",
    AuditedRequest("coordination.k8s.io", "leases", "patch"): "of the agent, only when a pod is evicted",
    AuditedRequest("", "nodes", "patch"): "only where something is short",
    AuditedRequest("", "nodes/status", "patch"): "of the controller, only where an agent has been gone for long",
    AuditedRequest(
        "", "nodes/finalizers", "update"
    ): "required by API servers with OwnerReferencesPermissionEnforcement",
    AuditedRequest("", "nodes/pods", "get"): "the kubelet asks for the agent, which is another user's request",
    AuditedRequest("", "nodes/configz", "get"): "the same",
    AuditedRequest("", "nodes/proxy", "get"): "the same, before Kubernetes 1.33",
    AuditedRequest(NODE, "customnoderesources", "get"): "only where the agent puts taints on it",
    AuditedRequest(NODE, "customnoderesources", "delete"): "only once its node is gone",
    AuditedRequest(NODE, "customnoderesources", "create"): "an apply asks for it where the object is missing",
    AuditedRequest(CONFIG, "customnodeconfigs", "delete"): "only once its node is gone",
    AuditedRequest(CONFIG, "customnodeconfigs", "create"): "an apply asks for it where the object is missing",
}
"""Rights that are granted and not used in this run, with the reason. Of the kinds of configuration only one is used."""


class Installed(NamedTuple):
    """One release, and the knobs before it."""

    cluster: Cluster
    server: Server
    workspace: str
    state: Path
    before: Mapping[str, str]

    def helm(self, *words: object) -> str:
        return helm(self.cluster, "--namespace", NAMESPACE, *words)

    def upgrade(self, *sets: str) -> str:
        """Upgrade the release and wait until it runs; return the output of helm."""
        words = [word for item in sets for word in ("--set", item)]
        printed = self.helm("upgrade", "--install", RELEASE, CHART, "--values", self.values, *words)
        self.settled()
        return printed

    @property
    def values(self) -> Path:
        return self.cluster.names.run / "values.json"

    def settled(self) -> None:
        for what in (f"daemonset/{AGENT}", f"deployment/{CONTROLLER}"):
            self.cluster.kubectl("--namespace", NAMESPACE, "rollout", "status", "--timeout=120s", what)

    def knobs(self) -> dict[str, str]:
        return knobs_of_pods(self.cluster.nodes[0].cgroup_root)

    def token(self, account: str) -> str:
        return self.cluster.kubectl("--namespace", self.workspace, "create", "token", account).strip()

    def address(self, component: str) -> tuple[str, int]:
        pods = self.server.ask(
            "GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io/component%3D{component}"
        )
        (first, *_) = (pod for pod in pods["items"] if "deletionTimestamp" not in pod["metadata"])
        return first["status"]["podIP"], 9102 if component == "agent" else 9316

    def get(self, path: str, token: str = "", component: str = "agent") -> tuple[int, str]:
        """Request a path over TLS, verified by the authority in the chart's Secret and the name in the certificate."""
        secret = self.server.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}-tls")["data"]
        context = ssl.create_default_context(cadata=base64.b64decode(secret["ca.crt"]).decode())
        with socket.create_connection(self.address(component), 10) as plain:
            wrapped = context.wrap_socket(plain, server_hostname=f"{RELEASE}-{component}.{NAMESPACE}.svc")
            connection = http.client.HTTPConnection("unused", timeout=10)
            connection.sock = wrapped
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
        return answer.status, text

    def sources(self) -> dict[str, float]:
        text = self.get("/metrics", self.token("reader"))[1]
        return {
            name: float(value)
            for name, value in re.findall(r'^dioptase_source_up\{source="([^"]+)".*\} (\S+)', text, re.M)
        }


def running(server: Server, namespace: str, name: str) -> bool:
    pod = server.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
    return bool(
        pod["status"].get("phase") == "Running" and all(item["ready"] for item in pod["status"]["containerStatuses"])
    )


@pytest.fixture(scope="module")
def installed(own_cluster: Cluster, server: Server, image: Path) -> Iterator[Installed]:
    """The release on a node with an online and a batch pod; all tests here share it, in their order."""
    own_cluster.grow(1)
    own_cluster.nodes[0].load(image)
    state = own_cluster.names.run / "state"
    for name in (NAMESPACE, "installed"):
        labels = {"pod-security.kubernetes.io/enforce": "privileged"} if name == NAMESPACE else {}
        server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    wait("accounts", lambda: server.ask("GET", "/api/v1/namespaces/installed/serviceaccounts/default"))
    for name in ("reader", "stranger"):
        server.ask("POST", "/api/v1/namespaces/installed/serviceaccounts", {"metadata": {"name": name}})
    own_cluster.kubectl(
        "create", "clusterrolebinding", "reader", f"--clusterrole={RELEASE}-reader", "--serviceaccount=installed:reader"
    )
    for name, level in (("web", "shared_cores"), ("batch", "reclaimed_cores")):
        server.ask("POST", "/api/v1/namespaces/installed/pods", a_pod(name, level))
    for name in ("web", "batch"):
        wait(f"the pod {name}", lambda name=name: running(server, "installed", name))
    values = {
        "image": {"repository": IMAGE, "tag": TAG, "pullPolicy": "Never"},
        "agent": {
            "stateDir": str(state),
            "settings": {
                "advisor": SHARED_MACHINE,
                "kubelet": {"cgroupRoot": own_cluster.nodes[0].cgroup_root},
                # Minutes on a real node.
                "report": {"periodS": 1, "windowS": 3},
            },
        },
        "metrics": {"scrapers": [{"name": "scraper", "namespace": "installed"}]},
    }
    item = Installed(own_cluster, server, "installed", state, knobs_of_pods(own_cluster.nodes[0].cgroup_root))
    item.values.write_text(json.dumps(values))
    server.ask("POST", "/api/v1/namespaces/installed/serviceaccounts", {"metadata": {"name": "scraper"}})
    item.upgrade()
    yield item
    item.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", "--timeout=240s")
    unconfigured(item)
    own_cluster.kubectl("delete", "namespace", NAMESPACE, "installed", "--timeout=60s")
    own_cluster.kubectl("delete", "clusterrolebinding", "reader")


def test_agent_and_controller_do_their_work_with_the_shipped_roles(installed: Installed) -> None:
    # Probes are compiled by a child that gives way to everybody.
    wait("every source", lambda: all_well(installed), 120)
    assert installed.sources().keys() >= {
        "kubelet",
        "container-runtime",
        "dynamic-config",
        "cnr",
        "events",
        "nri",
        "waits",
        "blame",
    }
    metrics = installed.get("/metrics", installed.token("reader"))[1]
    assert 'source="waits",detail="schedstat"' not in metrics
    # None of the kubelet's files are mounted: it says so itself.
    assert 'source="kubelet-managers",detail="cpu none, memory none"' in metrics

    def reported() -> dict[str, Any]:
        result: dict[str, Any] = installed.server.ask("GET", f"/apis/{NODE}/v1alpha1/customnoderesources/node1")
        return result["status"]["resources"]["allocatable"]  # type: ignore[no-any-return]

    wait("the report", reported, 60)
    reclaimable = reported()
    assert int(reclaimable["resource.katalyst.kubewharf.io/reclaimed_millicpu"]) >= 250
    lease = installed.server.ask("GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{CONTROLLER}")
    assert lease["spec"]["holderIdentity"].startswith(f"{CONTROLLER}-")
    pods = installed.server.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    assert sorted(pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods) == [0, 0, 0]
    for account in (AGENT, CONTROLLER):
        refused = [
            entry
            for entry in audit.entries(installed.cluster.names.run, f"{NAMESPACE}/{account}")
            if entry.status == 403
        ]
        assert refused == []


def test_the_page_of_a_node_comes_whole_through_the_api_server(installed: Installed) -> None:
    """Which writes itself before the links of documents that it passes on: a browser here would ask it for them."""
    (node,) = installed.cluster.nodes
    command = [sys.executable, "-c", PLUGIN, "page", node.name, "--kubeconfig", str(installed.cluster.kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as page:
        try:
            assert page.stdout is not None
            url = page.stdout.readline().split()[0].rstrip("/")
            with urllib.request.urlopen(f"{url}/", timeout=20) as answer:
                links = re.findall(r'(?:href|src)="(/[^"]*)"', answer.read().decode())
            assert {"/static/app.js", "/static/style.css"} <= set(links)
            for link in (*links, "/api/v1/view", "/static/charts.js"):
                with urllib.request.urlopen(url + link, timeout=20) as answer:
                    assert (answer.status, answer.read() != b"") == (200, True), link
        finally:
            page.terminate()


def all_well(installed: Installed) -> bool:
    """Return whether every source is healthy but CPU priority: with the cgroupfs driver a class of pods is never idle. Raises
    AssertionError with the failures."""
    status, text = installed.get("/readyz", installed.token("reader"))
    if status != 200 or [each for each in json.loads(text)["failed"] if each["source"] != "pod-siblings"]:
        raise AssertionError(text)
    return True


def test_the_batch_pod_is_acted_on(installed: Installed) -> None:
    wait(
        "a change",
        lambda: any(installed.knobs().get(path, text) != text for path, text in installed.before.items()),
        60,
    )
    status, result = installed.get("/api/v1/decisions", installed.token("reader"))
    assert status == 200
    assert '"applied"' in result
    assert f"{NAMESPACE}/{AGENT}" not in result, "it leaves itself alone"


def test_a_stock_scheduler_places_a_reclaimed_pod_without_any_value_for_it(installed: Installed) -> None:
    amounts = {RECLAIMED_MILLICPU: "50", "resource.katalyst.kubewharf.io/reclaimed_memory": "64Mi"}
    pod = a_pod("lent", "reclaimed_cores", resources={"requests": amounts, "limits": amounts})
    installed.server.ask("POST", "/api/v1/namespaces/installed/pods", pod)
    try:
        wait("the pod", lambda: running(installed.server, "installed", "lent"), 60)
    finally:
        installed.cluster.kubectl("--namespace", "installed", "delete", "pod", "lent", "--timeout=60s")
    plugins = setting(installed, "eviction.plugins")
    assert plugins == f"[{', '.join(PROFILES['colocate'].settings['eviction']['plugins'])}]"


def test_the_agent_has_no_more_than_it_says(installed: Installed) -> None:
    """Seen in the kernel: capabilities, no way to new ones, a filter of system calls, and a root that cannot be written."""
    status = process_status(installed.cluster, "agent", "dioptase")
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == CAPABILITIES
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    with pytest.raises(Failed, match="Read-only file system"):
        execute(installed, f"daemonset/{AGENT}", "touch", "/etc/made")
    status = process_status(installed.cluster, "controller", "dioptase")
    assert int(status["CapBnd"], 16) == 0
    assert status["Uid"].split() == ["65532"] * 4


def test_the_agent_listens_on_its_nodes_address_and_on_loopback_alone(installed: Installed) -> None:
    """As the kernel lists it in the node's network; the controller's port is in the network of its pod."""
    (node,) = installed.cluster.nodes
    assert listening(node.run("cat", "/proc/net/tcp", "/proc/net/tcp6")) == {node.address, "127.0.0.1"}
    assert installed.address("agent") == (node.address, 9102), "where Prometheus and the API server's proxy go"


def listening(table: str, port: int = 9102) -> set[str]:
    """Return the addresses of IPv4 on which a port is open; tables of /proc/net have them as little-endian words."""
    addresses = set()
    for words in (line.split() for line in table.splitlines()):
        if len(words) > 3 and words[3] == TCP_LISTEN and int(words[1].rpartition(":")[2], 16) == port:
            address = words[1].rpartition(":")[0]
            assert len(address) == 8, "IPv6, which this cluster does not have"
            addresses.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return addresses


TCP_LISTEN = "0A"
"""TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp prints it."""


def execute(installed: Installed, what: str, *words: str) -> str:
    return installed.cluster.kubectl("--namespace", NAMESPACE, "exec", what, "--", *words)


def process_status(cluster: Cluster, component: str, name: str) -> dict[str, str]:
    """Return /proc/PID/status of the process that runs `dioptase COMPONENT` in a pod."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if f"/opt/dioptase/bin/{name}".encode() in words and component.encode() in words:
                lines = (path.parent / "status").read_text().splitlines()
                return {field: value.strip() for field, _, value in (line.partition(":") for line in lines)}
        except OSError:
            continue
    raise LookupError(component)


@pytest.mark.parametrize("component", ["agent", "controller"])
def test_metrics_are_for_those_whose_token_may_have_them(installed: Installed, component: str) -> None:
    family = "dioptase_build_info" if component == "agent" else "dioptase_controller_leading"
    for account in ("reader", "scraper"):
        status, text = installed.get("/metrics", installed.token(account), component)
        assert (status, family in text) == (200, True)
    status, text = installed.get("/metrics", installed.token("stranger"), component)
    assert (status, "may not get /metrics" in text) == (403, True)
    wait("the pause", lambda: installed.get("/metrics", "eyJ.bad.token", component)[0] == 401, 5)
    assert installed.get("/metrics", "", component)[0] == 401
    assert [installed.get(path, "", component)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    if component == "agent":
        # The right to scrape does not include other data; after a bad token, new ones have to wait.
        scraper = installed.token("scraper")
        wait("the pause", lambda: installed.get("/api/v1/snapshot", scraper)[0] == 403, 5)
        assert installed.get("/api/v1/snapshot", installed.token("reader"))[0] == 200


def test_helm_asks_them_too(installed: Installed) -> None:
    assert "Phase:          Succeeded" in installed.helm("test", RELEASE, "--timeout=60s")


def granted(installed: Installed, account: str) -> set[AuditedRequest]:
    roles = "/apis/rbac.authorization.k8s.io/v1"
    result = rules(installed.server, f"{roles}/clusterroles/{account}")
    return result | rules(installed.server, f"{roles}/namespaces/{NAMESPACE}/roles/{account}")


@pytest.fixture(scope="module")
def configured(installed: Installed) -> None:
    """A configuration object that the agent applies."""
    kcc = {
        "apiVersion": f"{CONFIG}/v1alpha1",
        "kind": "KatalystCustomConfig",
        "metadata": {"name": "adminqos", "namespace": "installed"},
        "spec": {"targetType": {"group": CONFIG, "version": "v1alpha1", "resource": "adminqosconfigurations"}},
    }
    config = {
        "apiVersion": f"{CONFIG}/v1alpha1",
        "kind": "AdminQoSConfiguration",
        "metadata": {"name": "all", "namespace": "installed"},
        "spec": {"config": {"reclaimedResourceConfig": {"reservedResourceForReport": {"cpu": "125m"}}}},
    }
    base = f"/apis/{CONFIG}/v1alpha1/namespaces/installed"
    installed.server.ask("POST", f"{base}/katalystcustomconfigs", kcc)
    installed.server.ask("POST", f"{base}/adminqosconfigurations", config)
    wait("the setting", lambda: reserve(installed) == 0.125, 60)


def test_configuration_is_rolled_out_to_the_agent(installed: Installed, configured: None) -> None:
    assert reserve(installed) == 0.125
    assert (installed.state / "dynamic_config").exists(), "for a start without an API server"


def unconfigured(installed: Installed) -> None:
    """Remove the configuration, which finalizers would retain without the controller."""
    for kind in ("adminqosconfigurations", "katalystcustomconfigs"):
        installed.cluster.kubectl("--namespace", "installed", "delete", kind, "--all", "--timeout=30s")


def reserve(installed: Installed) -> float:
    document = json.loads(installed.get("/api/v1/config", installed.token("reader"))[1])
    return float(next(item["value"] for item in document["settings"] if item["name"] == "report.reservedCores"))


KINDS = "(authconfigurations|irqtuning.*|memorybandwidth.*|powermanagement.*|strategygroup.*|transparentmemory.*)"
"""Kinds that are requested like adminqosconfigurations once a KatalystCustomConfig names them."""


@pytest.mark.parametrize("account", [AGENT, CONTROLLER])
def test_every_right_is_used_or_it_is_known_why_not(installed: Installed, account: str) -> None:
    rights = granted(installed, account)
    used = {entry.request for entry in audit.entries(installed.cluster.names.run, f"{NAMESPACE}/{account}")}
    assert used <= rights
    idle = {right for right in rights - used if not re.match(KINDS, right.resource)}
    unknown = (
        idle
        - RARE.keys()
        - {right for right in idle if right.resource.startswith("adminqos") and right.verb == "delete"}
    )
    assert unknown == set()
    assert used, "an empty log would prove nothing"


def test_a_right_that_is_taken_away_is_missed_by_name(installed: Installed) -> None:
    """In the real agent, which goes on with the rest."""
    role = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{AGENT}"
    before = installed.server.ask("GET", role)["rules"]
    less = [rule for rule in before if "tokenreviews" not in rule["resources"]]
    assert len(less) == len(before) - 1
    installed.server.ask("PATCH", role, {"rules": less}, MERGE)
    try:

        def missed() -> bool:
            status, text = installed.get("/metrics", installed.token("reader"))
            return status == 503 and 'cannot create resource \\"tokenreviews\\"' in text

        wait("the refusal", missed, 10)
        assert installed.get("/readyz")[0] == 200
    finally:
        installed.server.ask("PATCH", role, {"rules": before}, MERGE)
    wait("the reviews", lambda: installed.get("/metrics", installed.token("reader"))[0] == 200, 10)


def test_upgrade_and_rollback_keep_what_was_remembered(installed: Installed, configured: None) -> None:
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}-tls"
    wait("a decision", lambda: journal(installed))
    certificate, first = installed.server.ask("GET", secret)["data"], journal(installed)
    printed = installed.upgrade("agent.settings.intervalS=2")
    assert "\nWhat changes on this cluster:\n" in printed
    next_commands = printed.rstrip().rpartition("\nNext:\n")[2].splitlines()
    assert [command.split()[0] for command in next_commands] == ["kubectl"] * 3
    assert setting(installed, "intervalS") == "2"
    assert installed.server.ask("GET", secret)["data"] == certificate
    # Includes the cluster's configuration, which existed before the installation.
    assert reserve(installed) == 0.125
    assert (installed.state / "dynamic_config").exists()
    second = journal(installed)
    assert second[: len(first)] == first
    installed.helm("rollback", RELEASE, "1")
    installed.settled()
    assert setting(installed, "intervalS") == "1"
    assert journal(installed)[: len(second)] == second


def test_what_agents_do_not_write_any_more_is_removed_from_nodes(installed: Installed) -> None:
    """Helm takes the right away before the old agent ends, which then cannot remove it."""

    def node() -> dict[str, Any]:
        return installed.server.ask("GET", "/api/v1/nodes/node1")  # type: ignore[no-any-return]

    def offered() -> bool:
        return RECLAIMED_MILLICPU in node()["status"]["capacity"]

    wait("the profile's resources", offered, 60)
    taints = [*node()["spec"].get("taints", ()), TAINT, OTHER_TAINT]
    recorded = {"metadata": {"annotations": RECORDED_TAINT}, "spec": {"taints": taints}}
    installed.server.ask("PATCH", "/api/v1/nodes/node1", recorded, MERGE)
    installed.upgrade("agent.extendedResources=false", "agent.evictions=false")
    try:
        wait("the resources' removal", lambda: not offered(), 30)
        wait("the taint's removal", lambda: TAINT["key"] not in json.dumps(node()["spec"]), 30)
        assert OTHER_TAINT["key"] in json.dumps(node()["spec"]), "of another owner"
    finally:
        installed.helm("rollback", RELEASE, "1")
        installed.settled()
        others = [taint for taint in node()["spec"].get("taints", ()) if taint["key"] != OTHER_TAINT["key"]]
        installed.server.ask("PATCH", "/api/v1/nodes/node1", {"spec": {"taints": others}}, MERGE)
    wait("the resources again", offered, 60)


def test_an_agent_without_runtime_and_nri_still_limits_new_batch_pods(installed: Installed) -> None:
    """By the values file of docs/install.md: no socket in its pod, containers and limits some seconds later."""
    installed.helm(
        "upgrade", RELEASE, CHART, "--values", installed.values, "--values", CHART / "values-without-runtime.yaml"
    )
    installed.settled()
    late = a_pod("late", "reclaimed_cores")
    try:
        wait("every source", lambda: all_well(installed), 120)
        assert installed.sources().keys() & {"container-runtime", "nri"} == set()
        mounts = execute(installed, f"daemonset/{AGENT}", "cat", "/proc/self/mountinfo")
        assert "/sys/fs/cgroup" in mounts
        assert not re.search(r" /(var/)?run/(containerd|crio|nri)\b", mounts)
        installed.server.ask("POST", "/api/v1/namespaces/installed/pods", late)

        def limited() -> bool:
            decisions = json.loads(installed.get("/api/v1/decisions?pod=installed/late", installed.token("reader"))[1])
            return any(entry["outcome"]["status"] == "applied" for entry in decisions)

        wait("limits of the new pod", limited, 60)
    finally:
        installed.cluster.kubectl(
            "--namespace", "installed", "delete", "pod", "late", "--ignore-not-found", "--timeout=60s"
        )
        installed.helm("rollback", RELEASE)
        installed.settled()
    wait("the runtime again", lambda: "container-runtime" in installed.sources(), 60)


def journal(installed: Installed) -> list[str]:
    (path,) = installed.state.glob("decisions*.jsonl")
    return path.read_text().splitlines()


def setting(installed: Installed, name: str) -> Any:
    token = installed.token("reader")
    wait("the page", lambda: installed.get("/api/v1/config", token)[0] == 200, 20)
    document = json.loads(installed.get("/api/v1/config", token)[1])
    return next(item["value"] for item in document["settings"] if item["name"] == name)


TAINT = {"key": "node.katalyst.kubewharf.io/MemoryPressure", "effect": "NoSchedule"}
RECORDED_TAINT = {"dioptase.io/node-taints": f"{TAINT['key']}:NoSchedule"}
"""The annotation with which the agent that added TAINT records it."""
OTHER_TAINT = {"key": "example.com/other", "effect": "PreferNoSchedule"}
LINUX = {"kubernetes.io/os": "linux"}
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
RECLAIMED_MILLICPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
CNRS = f"/apis/{NODE}/v1alpha1/customnoderesources"


@pytest.fixture
def dead(installed: Installed) -> Iterator[str]:
    """A node whose agent vanished; what the agent and the controller wrote still exists."""
    name, server = "dead", installed.server
    metadata = {"name": name, "labels": LINUX, "annotations": RECORDED_TAINT}
    server.ask("POST", "/api/v1/nodes", {"metadata": metadata, "spec": {"taints": [TAINT]}})
    server.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"capacity": {RECLAIMED_MILLICPU: "4k"}}}, MERGE)
    wait("its object", lambda: server.refusal("GET", f"{CNRS}/{name}") is None, 20)
    server.ask("PATCH", f"{CNRS}/{name}", {"spec": {"taints": [UNSCHEDULABLE]}}, MERGE)
    yield name
    server.ask("DELETE", f"/api/v1/nodes/{name}")
    server.refusal("DELETE", f"{CNRS}/{name}")


@pytest.mark.long
def test_after_uninstall_every_cgroup_is_as_it_was_and_no_headroom_is_reported(
    installed: Installed, configured: None, dead: str
) -> None:
    wait(
        "a change",
        lambda: any(installed.knobs().get(path, text) != text for path, text in installed.before.items()),
        60,
    )
    wait(
        "what is lent",
        lambda: RECLAIMED_MILLICPU in installed.server.ask("GET", "/api/v1/nodes/node1")["status"]["capacity"],
        60,
    )
    held = f"/apis/{CONFIG}/v1alpha1/namespaces/installed"
    finalizers = installed.server.ask("GET", f"{held}/katalystcustomconfigs/adminqos")["metadata"]["finalizers"]
    assert len(finalizers) == 1
    installed.helm("uninstall", RELEASE, "--wait", "--timeout=240s")

    for node in ("node1", dead):
        result = installed.server.ask("GET", f"/api/v1/nodes/{node}")
        assert not [item for item in result["spec"].get("taints", ()) if item["key"] == TAINT["key"]]
        assert RECLAIMED_MILLICPU not in {
            **result["status"].get("capacity", {}),
            **result["status"].get("allocatable", {}),
        }
        reported = installed.server.ask("GET", f"{CNRS}/{node}")
        assert not reported["spec"].get("taints")
        assert not reported.get("status", {}).get("resources", {}).get("allocatable")
    # No controller is left to remove finalizers, and there are none.
    unconfigured(installed)
    pods = installed.server.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    assert [pod["metadata"]["name"] for pod in pods] == []

    def other() -> dict[str, tuple[str, str]]:
        after = installed.knobs()
        return {path: (text, after.get(path, "")) for path, text in installed.before.items() if after.get(path) != text}

    # What kubelet gives a class of pods goes by their requests, and it looks at those once a minute.
    assert not [path for path in other() if "/pod" in path]
    with contextlib.suppress(Late):
        wait("the classes of pods", lambda: not other(), 90)
    assert other() == {}
    assert not (installed.state / "originals.json").exists()


@pytest.mark.long
def test_the_withdrawing_account_used_all_its_rights_and_is_deleted(installed: Installed) -> None:
    account = f"{RELEASE}-withdraw"
    created = installed.helm("template", RELEASE, CHART, "--show-only=templates/withdraw.yaml")
    roles = [
        item
        for item in map(msgspec.yaml.decode, created.split("\n---\n"))
        if item and item["kind"] in ("Role", "ClusterRole")
    ]
    rights = {right for role in roles for right in granted_by(role["rules"])}
    entries = list(audit.entries(installed.cluster.names.run, f"{NAMESPACE}/{account}"))
    used = {entry.request for entry in entries}
    assert used
    assert used <= rights
    assert [entry for entry in entries if entry.status == 403] == []
    idle = {right for right in rights - used if not (right.verb == "patch" and re.match(KINDS, right.resource))}
    # The controller takes from a tainted node what it lent, and may have been quicker.
    assert idle <= {AuditedRequest("", "nodes/status", "patch")}
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    for path in (f"{rbac}/clusterroles/{account}", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{account}"):
        removed = installed.server.refusal("GET", path)
        assert removed is not None
        assert removed.status == 404
