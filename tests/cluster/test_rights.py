"""The chart's roles and values against a real API server, which needs no nodes for it: no right too many, no value unseen."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from deploy import chart
from tests.cluster.audit import AuditedRequest
from tests.cluster.binaries import beside
from tests.cluster.cluster import Cluster, Failed
from tests.cluster.daemons import wait
from tests.cluster.image_and_chart import CHART, IMAGE, ROOT, helm
from tests.cluster.server import JSON, MERGE, Refused, Server
from tests.cluster.service_accounts import LENDING

pytestmark = pytest.mark.cluster
RBAC = "rbac.authorization.k8s.io"
RELEASE, NAMESPACE = "rights", "test-rights"
METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "patch": "PATCH",
    "update": "PUT",
    "delete": "DELETE",
}
NAMESPACED = ("leases", "events", "pods", "pods/eviction")


def rules(server: Server, path: str) -> set[AuditedRequest]:
    """Every verb on every resource that a role grants."""
    return granted_by(server.ask("GET", path)["rules"])


def granted_by(rules: Iterable[Mapping[str, Sequence[str]]]) -> set[AuditedRequest]:
    """The same of its rules."""
    return {
        AuditedRequest(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.fixture(scope="module")
def rights(ours: Cluster, definitions: Server) -> Iterator[Mapping[str, set[AuditedRequest]]]:
    """By component, what the chart's roles grant as the API server has them."""
    templates = [f"--show-only=templates/{name}-rbac.yaml" for name in ("agent", "controller")]
    made = helm(
        ours,
        "template",
        f"{RELEASE}-dioptase",
        CHART,
        "--namespace",
        NAMESPACE,
        *templates,
        "--set",
        "agent.extendedResources=true",
    )
    definitions.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    ours.kubectl("apply", "-f", "-", said=made)
    root, name = f"/apis/{RBAC}/v1", f"{RELEASE}-dioptase"
    yield {
        "agent": rules(definitions, f"{root}/clusterroles/{name}-agent"),
        "controller": rules(definitions, f"{root}/clusterroles/{name}-controller")
        | rules(definitions, f"{root}/namespaces/{NAMESPACE}/roles/{name}-controller"),
    }
    ours.kubectl("delete", "-f", "-", said=made)
    definitions.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


@pytest.mark.parametrize("component", ["agent", "controller"])
def test_without_any_one_of_its_rights_the_request_is_refused(
    ours: Cluster, definitions: Server, rights: Mapping[str, set[AuditedRequest]], component: str
) -> None:
    """For each right somebody who has all others, and the very request."""
    wanted = sorted(rights[component])
    assert len(wanted) == {"agent": 20, "controller": 68}[component]
    users = {missing: f"less-{component}-{number}" for number, missing in enumerate(wanted)}
    items = [part for missing, user in users.items() for part in role_of(user, component, set(wanted) - {missing})]
    ours.kubectl("create", "-f", "-", said=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    try:
        last = wanted[-1]
        wait("the last role", lambda: allowed(definitions, users[last], wanted[0]))
        for number, user in enumerate(users.values()):
            assert allowed(definitions, user, wanted[number - 1]), "what is not missing is there"
        assert [missing for missing, user in users.items() if not refused(definitions, user, missing)] == []
    finally:
        ours.kubectl("delete", "clusterroles,clusterrolebindings", "-l", f"less={component}")


def role_of(user: str, component: str, granted: set[AuditedRequest]) -> list[dict[str, object]]:
    """A role that grants this, and its binding to a user."""
    meta = {"name": user, "labels": {"less": component}}
    said = [{"apiGroups": [one.group], "resources": [one.resource], "verbs": [one.verb]} for one in sorted(granted)]
    role = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": meta, "rules": said}
    binding = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }
    return [role, binding]


def allowed(server: Server, user: str, right: AuditedRequest) -> bool:
    """Whether somebody may, as the API server's authorizer has it."""
    resource, _, subresource = right.resource.partition("/")
    wanted = {"group": right.group, "resource": resource, "subresource": subresource, "verb": right.verb}
    spec = {
        "user": user,
        "resourceAttributes": {**wanted, "namespace": NAMESPACE if right.resource in NAMESPACED else ""},
    }
    return bool(
        server.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})["status"]["allowed"]
    )


def refused(server: Server, user: str, right: AuditedRequest) -> bool:
    """Whether the API server refuses the request itself, by name. What others ask on our behalf is asked as they do."""
    if right.resource in ("nodes/pods", "nodes/configz", "nodes/finalizers"):
        return not allowed(server, user, right)
    plural, _, subresource = right.resource.partition("/")
    version = "v1" if right.group.endswith(".k8s.io") else "v1alpha1"
    root = f"/apis/{right.group}/{version}" if right.group else "/api/v1"
    namespace = f"/namespaces/{NAMESPACE}" if right.resource in NAMESPACED else ""
    every = right.verb in ("list", "watch") or (right.verb == "create" and not subresource)
    path = f"{root}{namespace}/{plural}{'' if every else '/some'}{f'/{subresource}' if subresource else ''}?dryRun=All"
    path += "&watch=true&timeoutSeconds=1" if right.verb == "watch" else ""
    method = METHODS[right.verb]
    body = None if method in ("GET", "DELETE") else {}
    try:
        server.text(method, path, body, MERGE if right.verb == "patch" else JSON, user=user)
    except Refused as error:
        return error.status == 403 and f'cannot {right.verb} resource "{right.resource}"' in str(error)
    return False


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("agent.act=yes", "/agent/act"),
        ("agent.port=0", "/agent/port"),
        ("agent.stateDir=lib", "/agent/stateDir"),
        ("agent.capabilities={sys_admin}", "/agent/capabilities/0"),
        ("tokenRevew=true", "'tokenRevew' not allowed"),
        ("metrics.scrapers[0].name=a", "/metrics/scrapers/0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_path(ours: Cluster, value: str, path: str) -> None:
    with pytest.raises(Failed, match=re.escape(path)):
        helm(ours, "template", "x", CHART, "--set", value)


def test_all_pods_but_those_of_agents_are_of_the_level_restricted(ours: Cluster, namespace: str) -> None:
    """As a namespace has it that enforces this level."""
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    ours.server.ask("PATCH", f"/api/v1/namespaces/{namespace}", level, MERGE)
    with contextlib.suppress(Refused):
        ours.server.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}})
    made = helm(ours, "template", "x", CHART, "--namespace", namespace)
    objects = [msgspec.yaml.decode(text) for text in made.split("\n---\n")]
    specs = {
        one["kind"]: one["spec"] if one["kind"] == "Pod" else one["spec"]["template"]["spec"]
        for one in objects
        if one and one["kind"] in ("DaemonSet", "Deployment", "Job", "Pod")
    }
    refused = {}
    for kind, spec in specs.items():
        spec.pop("serviceAccountName", None)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": kind.lower()}, "spec": spec}
        spec["restartPolicy"] = "Never"
        refused[kind] = ours.server.refusal("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    assert {kind for kind, error in refused.items() if error is None} == {"Deployment", "Job", "Pod"}
    assert 'violates PodSecurity "restricted:latest": host namespaces' in str(refused["DaemonSet"])


def test_the_controller_looks_for_agents_where_the_daemonset_has_them(ours: Cluster) -> None:
    role = "agent.nodeSelector.node-role\\.kubernetes\\.io/worker="
    made = helm(ours, "template", "x", CHART, "--set-string", f"{role},agent.nodeSelector.pool=batch")
    assert "nodeSelector: kubernetes.io/os=linux,node-role.kubernetes.io/worker=,pool=batch\n" in made


@pytest.mark.parametrize(("act", "mounted"), [("on", True), ("dry-run", False)])
def test_only_an_agent_that_acts_sees_where_the_runtime_takes_plugins(ours: Cluster, act: str, mounted: bool) -> None:
    made = helm(ours, "template", "x", CHART, "--set", f"agent.act={act},agent.nriDir=/run/other")
    assert (made.count("path: /run/other, type: DirectoryOrCreate"), made.count("mountPath: /var/run/nri,")) == (
        mounted,
        mounted,
    )


def test_definitions_that_helm_made_are_changed_by_the_command_of_the_page(ours: Cluster, tmp_path: Path) -> None:
    """Of an older release: helm never changes them, and holds their fields."""
    name = "nodeovercommitconfigs.overcommit.katalyst.kubewharf.io"
    definition = msgspec.yaml.decode(
        (ROOT / "deploy/crds/overcommit.katalyst.kubewharf.io_nodeovercommitconfigs.yaml").read_bytes()
    )
    columns = definition["spec"]["versions"][0].pop("additionalPrinterColumns")
    older = tmp_path / "older"
    (older / "crds").mkdir(parents=True)
    (older / "crds/one.yaml").write_bytes(msgspec.yaml.encode(definition))
    (older / "Chart.yaml").write_text("{apiVersion: v2, name: older, version: 0.0.1}")
    ours.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")
    helm(ours, "install", "older", older)
    try:
        with pytest.raises(Failed, match='conflict with "helm"'):
            ours.kubectl("apply", "--server-side", "-f", ROOT / "deploy/crds")
        _, upgrading = chart.INSTALL_DOCUMENT.read_text().split("## Without Helm")[0].split("## Upgrading")
        (command,) = re.findall(r"^kubectl (apply .*) -f deploy/crds$", upgrading, re.M)
        ours.kubectl(*command.split(), "-f", ROOT / "deploy/crds")
        made = ours.server.ask("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        assert [one["name"] for one in made["spec"]["versions"][0]["additionalPrinterColumns"]] == [
            one["name"] for one in columns
        ]
    finally:
        helm(ours, "uninstall", "older")


def test_the_kustomize_base_is_the_chart(ours: Cluster) -> None:
    assert chart.KUSTOMIZE_BASE.read_text() == chart.render_base(str(beside("helm")))
    shown = ours.kubectl("kustomize", chart.KUSTOMIZE_BASE.parent)
    assert shown.count("\nkind: ") == chart.KUSTOMIZE_BASE.read_text().count("\nkind: ") + 1
    assert f"image: {IMAGE}:0.1.0" in shown


@pytest.mark.parametrize(
    ("values", "granted"),
    [
        ((), False),
        (("agent.extendedResources=true",), True),
        (("agent.settings.report.extendedResources=true",), True),
        (("agent.extendedResources=true", "agent.settings.report.extendedResources=false"), False),
    ],
)
def test_who_writes_the_nodes_capacity_may(ours: Cluster, values: tuple[str, ...], *, granted: bool) -> None:
    """By the value or by the setting: what the agent is told to write is what its role lets it write."""
    chosen = [word for value in values for word in ("--set", value)]
    made = helm(ours, "template", "x", CHART, *chosen, "--show-only", "templates/agent-rbac.yaml")
    role = next(one for one in map(msgspec.yaml.decode, made.split("\n---\n")) if one["kind"] == "ClusterRole")
    assert any("nodes/status" in rule["resources"] for rule in role["rules"]) == granted
    assert (LENDING in role["rules"]) == granted


EVERYTHING = {
    "agent": {
        "extendedResources": True,
        "appArmor": "Unconfined",
        "kubelet": {"caFile": "/var/lib/kubelet/pki/kubelet.crt", "right": "proxy"},
    },
    "metrics": {"serviceMonitor": True, "rules": True, "dashboards": True, "labels": {"release": "prom"}},
    "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
}
EVERYTHING["agent"] |= {"hostPaths": [{"path": "/run/other", "readOnly": True}]}
EVERYTHING["metrics"] |= {"scrapers": [{"name": "prometheus", "namespace": "monitoring"}]}
NOTHING = {
    "agent": {"ownNodeOnly": False},
    "tls": {"enabled": False},
    "tokenReview": False,
    "controller": {"enabled": False},
    "priorityClass": {"create": False},
    "networkPolicy": {"enabled": False},
}


@pytest.mark.parametrize(("values", "kinds"), [(EVERYTHING, 19), (NOTHING, 10)], ids=["everything", "nothing"])
def test_whatever_is_chosen_is_taken_by_the_api_server(
    ours: Cluster, namespace: str, tmp_path: Path, values: object, kinds: int
) -> None:
    """Field by field, but for the Prometheus operator's kinds, which hold our own rules and dashboards unchanged."""
    (tmp_path / "values.json").write_text(json.dumps(values))
    with contextlib.suppress(Refused):
        # Controllers make it, where there are any.
        ours.server.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}})
    made = helm(ours, "template", "x", CHART, "--namespace", namespace, "--values", tmp_path / "values.json")
    objects = [msgspec.yaml.decode(text) for text in made.split("\n---\n") if not re.fullmatch(r"(#.*\n|\s)*", text)]
    assert len({one["kind"] for one in objects}) == kinds
    ours_alone = [one for one in objects if "monitoring.coreos.com" not in one["apiVersion"]]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": ours_alone})
    said = ours.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", said=listed)
    assert said.count("(server dry run)") == len(ours_alone)
    for rule in (one for one in objects if one["kind"] == "PrometheusRule"):
        assert rule["spec"] == msgspec.yaml.decode((ROOT / "dashboards/rules.yaml").read_bytes())
    boards = {
        name: text for one in objects if "dashboard" in one["metadata"]["name"] for name, text in one["data"].items()
    }
    there = {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
    assert boards == (there if values is EVERYTHING else {})
