"""The chart's roles and values on a real API server without nodes: no superfluous right, no unchecked value."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from deploy import chart
from tests.cluster.audit import AuditedRequest
from tests.cluster.binaries import MINOR, compiled_program
from tests.cluster.cluster import Cluster, Failed
from tests.cluster.daemons import wait
from tests.cluster.image_and_chart import CHART, IMAGE, ROOT, helm
from tests.cluster.server import JSON, MERGE, Refused, Server
from tests.cluster.service_accounts import LENDING, granted_by

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
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
NAMESPACED = ("leases", "events", "pods", "pods/binding", "pods/eviction", "daemonsets", "secrets")


def rules(server: Server, path: str) -> set[AuditedRequest]:
    """Return every verb on every resource that a role grants."""
    return granted_by(server.ask("GET", path)["rules"])


@pytest.fixture(scope="module")
def rights(own_cluster: Cluster, definitions: Server) -> Iterator[Mapping[str, set[AuditedRequest]]]:
    """Return the rights of the chart's roles by component."""
    templates = [f"--show-only=templates/{name}-rbac.yaml" for name in ("agent", "controller")]
    words = (CHART, "--namespace", NAMESPACE, *templates)
    created = helm(own_cluster, "template", f"{RELEASE}-dioptase", *words)

    def rendered(component: str, *more: str) -> set[AuditedRequest]:
        text = helm(own_cluster, "template", f"{RELEASE}-dioptase", *words, *more)
        items = [item for item in map(msgspec.yaml.decode, text.split("\n---\n")) if item and "rules" in item]
        return granted_by(
            rule for item in items if item["metadata"]["name"].endswith(f"-{component}") for rule in item["rules"]
        )

    definitions.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    own_cluster.kubectl("apply", "-f", "-", text=created)
    root, name = f"/apis/{RBAC}/v1", f"{RELEASE}-dioptase"
    controller = rules(definitions, f"{root}/clusterroles/{name}-controller") | rules(
        definitions, f"{root}/namespaces/{NAMESPACE}/roles/{name}-controller"
    )
    yield {
        "agent": rules(definitions, f"{root}/clusterroles/{name}-agent")
        | rules(definitions, f"{root}/namespaces/{NAMESPACE}/roles/{name}-agent"),
        "controller": controller,
        "webhooks": rendered("controller", "--set=webhooks.enabled=true") - controller,
        "overcommit": rendered("controller", "--set=controller.settings.controllers={kcc,lifecycle,overcommit}")
        - controller,
        "scheduler": rendered(
            "scheduler", "--show-only=templates/scheduler-rbac.yaml", "--set=scheduler.enabled=true",
            "--set=scheduler.settings.elasticQuota=true",
        ),
    }  # fmt: skip
    own_cluster.kubectl("delete", "-f", "-", text=created)
    definitions.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


EXPECTED_RIGHTS = {
    # At kubelets before 1.33 one right, nodes/proxy, includes the other two.
    "agent": 23 if MINOR >= "1.33" else 22,
    "controller": 69,
    "webhooks": 17,
    "overcommit": 4,
    "scheduler": 15,
}


@pytest.mark.parametrize("component", EXPECTED_RIGHTS)
def test_without_any_one_of_its_rights_the_request_is_refused(
    own_cluster: Cluster, definitions: Server, rights: Mapping[str, set[AuditedRequest]], component: str
) -> None:
    """For each right: an account with all other rights, and the request that needs it."""
    expected = sorted(rights[component])
    assert len(expected) == EXPECTED_RIGHTS[component]
    users = {missing: f"less-{component}-{number}" for number, missing in enumerate(expected)}
    items = [part for missing, user in users.items() for part in role_of(user, component, set(expected) - {missing})]
    own_cluster.kubectl("create", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    try:
        last = expected[-1]
        wait("the last role", lambda: allowed(definitions, users[last], expected[0]))
        for number, user in enumerate(users.values()):
            assert allowed(definitions, user, expected[number - 1]), "what is not missing is there"
        assert [missing for missing, user in users.items() if not refused(definitions, user, missing)] == []
    finally:
        own_cluster.kubectl("delete", "clusterroles,clusterrolebindings", "-l", f"less={component}")


def role_of(user: str, component: str, granted: set[AuditedRequest]) -> list[dict[str, object]]:
    """Create a role that grants this right, and bind it to a user."""
    meta = {"name": user, "labels": {"less": component}}
    texts = [
        {"apiGroups": [item.group], "resources": [item.resource], "verbs": [item.verb]} for item in sorted(granted)
    ]
    role = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": meta, "rules": texts}
    binding = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }
    return [role, binding]


def allowed(server: Server, user: str, right: AuditedRequest) -> bool:
    """Return whether an account has a right, according to the API server's authorizer."""
    resource, _, subresource = right.resource.partition("/")
    expected = {"group": right.group, "resource": resource, "subresource": subresource, "verb": right.verb}
    spec = {
        "user": user,
        "resourceAttributes": {**expected, "namespace": NAMESPACE if right.resource in NAMESPACED else ""},
    }
    return bool(
        server.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})["status"]["allowed"]
    )


def refused(server: Server, user: str, right: AuditedRequest) -> bool:
    """Return whether the API server refuses the request for a missing right. Requests that other components send for the
    product are sent as they do."""
    if right.resource in ("nodes/pods", "nodes/configz", "nodes/proxy", "nodes/finalizers"):
        return not allowed(server, user, right)
    plural, _, subresource = right.resource.partition("/")
    version = "v1" if right.group.endswith(".k8s.io") or right.group == "apps" else "v1alpha1"
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
def test_a_value_that_cannot_be_is_refused_with_its_path(own_cluster: Cluster, value: str, path: str) -> None:
    with pytest.raises(Failed, match=re.escape(path)):
        helm(own_cluster, "template", "x", CHART, "--set", value)


def test_all_pods_but_those_of_agents_are_of_the_level_restricted(own_cluster: Cluster, namespace: str) -> None:
    """As a namespace has it that enforces this level."""
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    own_cluster.server.ask("PATCH", f"/api/v1/namespaces/{namespace}", level, MERGE)
    with contextlib.suppress(Refused):
        own_cluster.server.ask(
            "POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}}
        )
    created = helm(own_cluster, "template", "x", CHART, "--namespace", namespace)
    objects = [msgspec.yaml.decode(text) for text in created.split("\n---\n")]
    specs = {
        item["kind"]: item["spec"] if item["kind"] == "Pod" else item["spec"]["template"]["spec"]
        for item in objects
        if item and item["kind"] in ("DaemonSet", "Deployment", "Job", "Pod")
    }
    refused = {}
    for kind, spec in specs.items():
        spec.pop("serviceAccountName", None)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": kind.lower()}, "spec": spec}
        spec["restartPolicy"] = "Never"
        refused[kind] = own_cluster.server.refusal("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    assert {kind for kind, error in refused.items() if error is None} == {"Deployment", "Job", "Pod"}
    assert 'violates PodSecurity "restricted:latest": host namespaces' in str(refused["DaemonSet"])


def test_the_controller_looks_for_agents_where_the_daemonset_has_them(own_cluster: Cluster) -> None:
    role = "agent.nodeSelector.node-role\\.kubernetes\\.io/worker="
    created = helm(own_cluster, "template", "x", CHART, "--set-string", f"{role},agent.nodeSelector.pool=batch")
    assert "nodeSelector: kubernetes.io/os=linux,node-role.kubernetes.io/worker=,pool=batch\n" in created


@pytest.mark.parametrize(("act", "mounted"), [("on", True), ("dry-run", False)])
def test_only_an_agent_that_acts_sees_where_the_runtime_takes_plugins(
    own_cluster: Cluster, act: str, mounted: bool
) -> None:
    created = helm(own_cluster, "template", "x", CHART, "--set", f"agent.act={act},agent.nriDir=/run/other")
    assert (created.count("path: /run/other, type: DirectoryOrCreate"), created.count("mountPath: /var/run/nri,")) == (
        mounted,
        mounted,
    )


def test_definitions_that_helm_made_are_changed_by_the_command_of_the_page(
    own_cluster: Cluster, tmp_path: Path
) -> None:
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
    own_cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")
    helm(own_cluster, "install", "older", older)
    try:
        with pytest.raises(Failed, match='conflict with "helm"'):
            own_cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy/crds")
        _, upgrading = chart.INSTALL_DOCUMENT.read_text().split("## Without Helm")[0].split("## Upgrading")
        (command,) = re.findall(r"^kubectl (apply .*) -f deploy/crds$", upgrading, re.M)
        own_cluster.kubectl(*command.split(), "-f", ROOT / "deploy/crds")
        created = own_cluster.server.ask("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        assert [item["name"] for item in created["spec"]["versions"][0]["additionalPrinterColumns"]] == [
            column["name"] for column in columns
        ]
    finally:
        helm(own_cluster, "uninstall", "older")


def test_the_kustomize_base_is_the_chart(own_cluster: Cluster) -> None:
    assert chart.KUSTOMIZE_BASE.read_text() == chart.render_base(str(compiled_program("helm")))
    shown = own_cluster.kubectl("kustomize", chart.KUSTOMIZE_BASE.parent)
    assert shown.count("\nkind: ") == chart.KUSTOMIZE_BASE.read_text().count("\nkind: ") + 1
    assert f"image: {IMAGE}:0.1.0" in shown


@pytest.mark.parametrize(
    ("values", "granted"),
    [
        ((), True),
        (("profile=observe",), False),
        (("agent.extendedResources=false",), False),
        (("profile=observe", "agent.extendedResources=true"), True),
        (("profile=observe", "agent.settings.report.extendedResources=true"), True),
        (("agent.extendedResources=true", "agent.settings.report.extendedResources=false"), False),
    ],
)
def test_the_writer_of_the_nodes_capacity_has_the_right(
    own_cluster: Cluster, values: tuple[str, ...], *, granted: bool
) -> None:
    """By profile, by value or by setting: the agent's role allows exactly what the agent is configured to write."""
    chosen = [word for value in values for word in ("--set", value)]
    created = helm(own_cluster, "template", "x", CHART, *chosen, "--show-only", "templates/agent-rbac.yaml")
    role = next(item for item in map(msgspec.yaml.decode, created.split("\n---\n")) if item["kind"] == "ClusterRole")
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
EVERYTHING |= {
    "profile": "katalyst",
    "webhooks": {"enabled": True},
    "image": {"digest": f"sha256:{'0' * 64}"},
    "malachite": {"enabled": True},
    "otlp": {"endpoint": "http://otel:4317", "headersSecret": {"name": "otel"}},
    "recording": {"enabled": True},
}
EVERYTHING["agent"] |= {
    "extraArgs": ["--duration=60"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}
EVERYTHING["agent"] |= {"hostPaths": [{"path": "/run/other", "readOnly": True}]}
EVERYTHING["metrics"] |= {"scrapers": [{"name": "prometheus", "namespace": "monitoring"}]}
NOTHING = {
    "profile": "observe",
    "agent": {"ownNodeOnly": False},
    "tls": {"enabled": False},
    "tokenReview": False,
    "controller": {"enabled": False},
    "priorityClass": {"create": False},
    "networkPolicy": {"enabled": False},
}


@pytest.mark.parametrize(("values", "kinds"), [(EVERYTHING, 21), (NOTHING, 10)], ids=["everything", "nothing"])
def test_whatever_is_chosen_is_taken_by_the_api_server(
    own_cluster: Cluster, namespace: str, tmp_path: Path, values: object, kinds: int
) -> None:
    """Field by field, but for the Prometheus operator's kinds, which hold our own rules and dashboards unchanged."""
    (tmp_path / "values.json").write_text(json.dumps(values))
    with contextlib.suppress(Refused):
        # Controllers make it, where there are any.
        own_cluster.server.ask(
            "POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}}
        )
    created = helm(own_cluster, "template", "x", CHART, "--namespace", namespace, "--values", tmp_path / "values.json")
    objects = [msgspec.yaml.decode(text) for text in created.split("\n---\n") if not re.fullmatch(r"(#.*\n|\s)*", text)]
    assert len({output["kind"] for output in objects}) == kinds
    ours_alone = [item for item in objects if "monitoring.coreos.com" not in item["apiVersion"]]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": ours_alone})
    result = own_cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=listed)
    assert result.count("(server dry run)") == len(ours_alone)
    for rule in (value for value in objects if value["kind"] == "PrometheusRule"):
        assert rule["spec"] == msgspec.yaml.decode((ROOT / "dashboards/rules.yaml").read_bytes())
    boards = {
        name: text
        for entry in objects
        if "dashboard" in entry["metadata"]["name"]
        for name, text in entry["data"].items()
    }
    there = {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
    assert boards == (there if values is EVERYTHING else {})
