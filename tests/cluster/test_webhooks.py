"""The webhooks on a real API server, by the objects of the chart: pods, profiles, Nodes, configuration, certificates."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from api.colocation_profile import APPLIED_KEY
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import CPU_KEY, QOS_LEVEL_KEY
from controller.webhooks.openssl import create_authority, create_certificate
from tests.cluster import audit
from tests.cluster.audit import AuditedRequest
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.objects import a_pod
from tests.cluster.server import MERGE, Refused, Server
from tests.cluster.webhooks import CONFIGURATIONS, NAME, WebhookInstallation

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
NATIVE = {"requests": {"cpu": "1500m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "128Mi"}}
MOVED = {RECLAIMED_CPU: "1500", RECLAIMED_MEMORY: "67108864"}
PROFILES = "/apis/colocation.dioptase.io/v1alpha1/colocationprofiles"
CONFIGS = "/apis/config.katalyst.kubewharf.io/v1alpha1"
LABEL = "colocation-test"
K = "katalyst.kubewharf.io"


@pytest.fixture(scope="module")
def installation(
    own_cluster: Cluster, definitions: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookInstallation]:
    created = WebhookInstallation(own_cluster, "test-webhooks", tmp_path_factory.mktemp("webhooks"))
    try:
        created.begin(replicas=2)
        wait("the certificate of the webhooks", created.published, 60)
        yield created
    finally:
        created.end()


@pytest.fixture
def room(installation: WebhookInstallation, namespace: str) -> str:
    """A namespace in which pods can be created, with webhooks that answer."""
    with contextlib.suppress(Refused):
        # Controllers create it, if there are any.
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        installation.cluster.server.ask("POST", path, {"metadata": {"name": "default"}})
    wait("webhooks that answer", lambda: is_moved(installation.cluster.server, namespace), 60)
    return namespace


def created_pod(server: Server, namespace: str, pod: dict[str, Any]) -> Any:
    """Return the pod as the API server would store it."""
    return server.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


def is_moved(server: Server, namespace: str) -> bool:
    """Return whether the requests of a new reclaimed pod are moved."""
    pod = created_pod(server, namespace, a_pod("batch", "reclaimed_cores", resources=NATIVE))
    return bool(pod["spec"]["containers"][0]["resources"] != NATIVE)


def test_requests_of_a_reclaimed_pod_are_moved(server: Server, room: str) -> None:
    pod = created_pod(server, room, a_pod("batch", "reclaimed_cores", resources=NATIVE))
    assert pod["spec"]["containers"][0]["resources"] == {"requests": MOVED, "limits": MOVED}
    assert pod["status"]["qosClass"] == "BestEffort"
    online = created_pod(server, room, a_pod("web", "shared_cores", resources=NATIVE))
    assert online["spec"]["containers"][0]["resources"] == NATIVE


def test_pods_of_a_deployment_in_a_labelled_namespace_become_reclaimed(
    own_cluster: Cluster, server: Server, room: str
) -> None:
    own_cluster.grow(0)
    priority = {"metadata": {"name": LABEL}, "value": -10, "preemptionPolicy": "Never"}
    server.ask("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    spec = {
        "namespaceSelector": {"matchLabels": {LABEL: "yes"}}, "selector": {"matchLabels": {"app": "batch"}},
        "priorityClassName": LABEL, "schedulerName": "katalyst-scheduler",
    }  # fmt: skip
    server.ask("POST", PROFILES, {"apiVersion": "colocation.dioptase.io/v1alpha1", "kind": "ColocationProfile",
                                  "metadata": {"name": LABEL}, "spec": spec})  # fmt: skip
    try:
        server.ask("PATCH", f"/api/v1/namespaces/{room}", {"metadata": {"labels": {LABEL: "yes"}}}, MERGE)
        plain = a_pod("plain", resources=NATIVE, app="batch")
        wait(
            "the profile",
            lambda: QOS_LEVEL_KEY in created_pod(server, room, plain)["metadata"].get("annotations", {}),
            30,
        )
        template = {
            "metadata": {"labels": {"app": "batch"}},
            "spec": plain["spec"] | {"terminationGracePeriodSeconds": 0},
        }
        deployment = {
            "metadata": {"name": "batch"},
            "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "batch"}}, "template": template},
        }
        server.ask("POST", f"/apis/apps/v1/namespaces/{room}/deployments", deployment)
        pods = f"/api/v1/namespaces/{room}/pods?labelSelector=app%3Dbatch"
        wait("three pods", lambda: len(server.ask("GET", pods)["items"]) == 3, 120)
        for pod in server.ask("GET", pods)["items"]:
            assert pod["metadata"]["annotations"] == {QOS_LEVEL_KEY: "reclaimed_cores", APPLIED_KEY: LABEL}
            assert pod["spec"]["containers"][0]["resources"] == {"requests": MOVED, "limits": MOVED}
            assert (pod["spec"]["priorityClassName"], pod["spec"]["priority"]) == (LABEL, -10)
            assert (pod["spec"]["preemptionPolicy"], pod["spec"]["schedulerName"]) == ("Never", "katalyst-scheduler")
        other = created_pod(server, room, a_pod("web", resources=NATIVE, app="web"))
        assert other["spec"]["containers"][0]["resources"] == NATIVE
    finally:
        server.refusal("DELETE", f"/apis/apps/v1/namespaces/{room}/deployments/batch")
        server.refusal("DELETE", f"{PROFILES}/{LABEL}")
        server.refusal("DELETE", f"/apis/scheduling.k8s.io/v1/priorityclasses/{LABEL}")


HUGE = "x" * 20_000
HOSTILE: dict[str, tuple[dict[str, str], str]] = {
    "unknown level": ({QOS_LEVEL_KEY: "lent_cores"}, "'lent_cores' is not a QoS level; use one of shared_cores"),
    "no JSON": ({CPU_KEY: "{"}, f"annotation {CPU_KEY}: '{{' is not JSON; write it like"),
    "wrong level": (
        {QOS_LEVEL_KEY: "reclaimed_cores", CPU_KEY: '{"cpuset_pool": "own"}'},
        f"annotation {CPU_KEY}: cpuset_pool: is for shared_cores and system_cores only, this pod has reclaimed_cores; remove",
    ),
    "a thousand": (
        {CPU_KEY: json.dumps({f"name{number}": "1" for number in range(1000)})},
        f"annotation {CPU_KEY}: has 1000 entries, more than 64; remove some",
    ),
    "huge": ({CPU_KEY: f'{{"{HUGE}": "1"}}'}, f"annotation {CPU_KEY}: has 20009 characters, more than 16384"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pod_is_rejected_with_field_and_remedy(server: Server, room: str, case: str) -> None:
    annotations, problem = HOSTILE[case]
    pod = a_pod("hostile")
    pod["metadata"]["annotations"] = annotations
    refusal = server.refusal("POST", f"/api/v1/namespaces/{room}/pods?dryRun=All", pod)
    assert refusal is not None
    assert problem in str(refusal)
    assert len(str(refusal)) < 3000


def test_a_thousand_other_annotations_are_no_reason_for_a_rejection(server: Server, room: str) -> None:
    pod = a_pod("many", "reclaimed_cores", resources=NATIVE)
    pod["metadata"]["annotations"] |= {f"example.com/{number}": "x" * 200 for number in range(1000)}
    assert created_pod(server, room, pod)["spec"]["containers"][0]["resources"]["limits"] == MOVED


@pytest.mark.parametrize(
    ("plural", "kind", "spec", "problem"),
    [
        ("katalystcustomconfigs", "KatalystCustomConfig",
         {"targetType": {"group": "apps", "version": "v1", "resource": "deployments"}},
         "TargetTypeNotAllowed: group 'apps' is not allowed, only config.katalyst.kubewharf.io"),
        ("adminqosconfigurations", "AdminQoSConfiguration",
         {"config": {}, "nodeLabelSelector": "a>b"}, "spec.nodeLabelSelector: 'a>b' is no part of a selector"),
        ("adminqosconfigurations", "AdminQoSConfiguration",
         {"config": {}, "ephemeralSelector": {"lastDuration": "2h"}},
         "spec.ephemeralSelector.lastDuration: requires nodeNames; only they are temporary"),
        ("adminqosconfigurations", "AdminQoSConfiguration",
         {"config": {"evictionConfig": {"cpuPressureEvictionConfig": {"loadEvictionCoolDownTime": "soon"}}}},
         "spec.config.evictionConfig.cpuPressureEvictionConfig.loadEvictionCoolDownTime: 'soon' is no duration such as"),
    ],
)  # fmt: skip
def test_invalid_configuration_is_rejected(
    server: Server, room: str, plural: str, kind: str, spec: dict[str, Any], problem: str
) -> None:
    path = f"{CONFIGS}/namespaces/{room}/{plural}?dryRun=All"
    body = {
        "apiVersion": "config.katalyst.kubewharf.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "one"},
        "spec": spec,
    }
    refusal = server.refusal("POST", path, body)
    assert refusal is not None
    assert problem in str(refusal)


def test_a_profile_for_the_whole_cluster_is_rejected(server: Server, room: str) -> None:
    body = {
        "apiVersion": "colocation.dioptase.io/v1alpha1",
        "kind": "ColocationProfile",
        "metadata": {"name": "all"},
        "spec": {},
    }
    refusal = server.refusal("POST", f"{PROFILES}?dryRun=All", body)
    assert refusal is not None
    assert "every pod of the cluster would be reclaimed; write for example namespaceSelector" in str(refusal)


def test_overcommitment_does_not_compound(server: Server, room: str) -> None:
    """Statuses by turns of a kubelet, which has the machine's amounts, and of a writer that sends back what is stored."""
    name, real = "test-overcommit", {"cpu": "16", "memory": "1Gi", "pods": "110"}
    path = f"/api/v1/nodes/{name}"
    ratios = {f"{K}/cpu_overcommit_ratio": "2", f"{K}/memory_overcommit_ratio": "1.5"}
    server.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "annotations": ratios}})
    try:
        for number in range(20):
            amounts = {} if number % 2 else {"capacity": real, "allocatable": {**real, "cpu": "15600m"}}
            condition = {"type": "Ready", "status": "True", "reason": f"turn{number}"}
            node = server.ask("PATCH", f"{path}/status", {"status": {**amounts, "conditions": [condition]}}, MERGE)
            assert node["status"]["capacity"] == {"cpu": "32", "memory": "1536Mi", "pods": "110"}
            assert node["status"]["allocatable"] == {"cpu": "31200m", "memory": "1536Mi", "pods": "110"}
            assert node["metadata"]["annotations"][f"{K}/original_allocatable_cpu"] == "15600m"
            assert node["status"]["conditions"][0]["reason"] == f"turn{number}"
        lower = {
            "metadata": {"annotations": {f"{K}/cpu_overcommit_ratio": "1.2", f"{K}/memory_overcommit_ratio": None}}
        }
        server.ask("PATCH", path, lower, MERGE)
        node = server.ask(
            "PATCH", f"{path}/status", {"status": {"conditions": [condition | {"reason": "lower"}]}}, MERGE
        )
        assert node["status"]["allocatable"] == {"cpu": "18720m", "memory": "1Gi", "pods": "110"}
        assert f"{K}/original_allocatable_memory" not in node["metadata"]["annotations"]
        server.ask("PATCH", path, {"metadata": {"annotations": {f"{K}/cpu_overcommit_ratio": None}}}, MERGE)
        node = server.ask(
            "PATCH", f"{path}/status", {"status": {"conditions": [condition | {"reason": "none"}]}}, MERGE
        )
        assert node["status"]["allocatable"] == {**real, "cpu": "15600m"}
        assert [key for key in node["metadata"].get("annotations", {}) if "original" in key] == []
    finally:
        server.ask("DELETE", path)


def test_a_wrong_bundle_is_repaired(installation: WebhookInstallation, server: Server, room: str) -> None:
    right = installation.secret()["ca.crt"]
    for path in CONFIGURATIONS:
        webhooks = server.ask("GET", path)["webhooks"]
        wrong = base64.b64encode(installation.cluster.control.authority.certificate("ca").read_bytes()).decode()
        for webhook in webhooks:
            webhook["clientConfig"]["caBundle"] = wrong
        server.ask("PATCH", path, {"webhooks": webhooks}, MERGE)
    wait("the right bundle", lambda: installation.bundles() == {right}, 30)
    wait("webhooks that answer", lambda: is_moved(server, room), 30)


def test_a_lost_certificate_is_replaced(installation: WebhookInstallation, server: Server, room: str) -> None:
    path = f"/api/v1/namespaces/{installation.namespace}/secrets/{NAME}"
    server.ask("PATCH", path, {"data": {"tls.key": base64.b64encode(b"no key").decode()}}, MERGE)
    before = installation.secret()["tls.crt"]
    wait("another certificate", lambda: installation.secret()["tls.crt"] != before, 60)
    wait("its bundle", installation.published, 60)
    wait("webhooks that answer", lambda: is_moved(server, room), 60)


def serves(address: tuple[str, int], certificate: str) -> bool:
    """Return whether a replica serves this certificate, in PEM, to new connections."""
    return ssl.get_server_certificate(address).strip() == certificate.strip()


class PodLoad:
    """Creates reclaimed pods one after another, as a dry run, and counts those that the webhook did not change."""

    def __init__(self, server: Server, namespace: str) -> None:
        self._server, self._namespace = server, namespace
        self.changed, self.failures = 0, []  # type: ignore[var-annotated]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> PodLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            if is_moved(self._server, self._namespace):
                self.changed += 1
            else:
                self.failures.append(self.changed)


def test_a_certificate_is_rotated_without_a_lost_request(
    installation: WebhookInstallation, server: Server, room: str
) -> None:
    """Without the authority's key, the next certificate needs a new authority: both steps of a rotation, under load."""
    before = installation.secret()
    path = f"/api/v1/namespaces/{installation.namespace}/secrets/{NAME}"
    with PodLoad(server, room) as load:
        server.ask("PATCH", path, {"data": {"ca.key": ""}}, MERGE)
        wait("a second authority", lambda: installation.secret()["ca.crt"] != before["ca.crt"], 60)
        bundle = base64.b64decode(installation.secret()["ca.crt"]).decode()
        assert bundle.endswith(base64.b64decode(before["ca.crt"]).decode()), "the old authority stays trusted"
        assert installation.secret()["tls.crt"] == before["tls.crt"]
        wait("the bundle of both", installation.published, 60)
        wait("a new certificate", lambda: installation.secret()["tls.crt"] != before["tls.crt"], 120)
        renewed = base64.b64decode(installation.secret()["tls.crt"]).decode()
        for address in installation.addresses:
            wait("the new certificate served", partial(serves, address, renewed), 120)
        wait("requests with it", lambda count=load.changed: load.changed > count + 5, 60)  # type: ignore[misc]
    assert load.failures == [], installation.failures()
    assert load.changed > 20


def test_a_replica_ends_without_a_lost_request(installation: WebhookInstallation, server: Server, room: str) -> None:
    """As in a rolling update: the address leaves the Service when the process receives SIGTERM."""
    first, _ = installation.replicas
    ports = [port for _, port in installation.addresses]
    try:
        with PodLoad(server, room) as load:
            wait("requests", lambda: load.changed > 5, 60)
            installation.route(ports[1:])
            first.end()
            before = load.changed
            wait("requests to the other replica", lambda: load.changed > before + 5, 60)
        assert load.failures == [], installation.failures()
    finally:
        first.again()
        first.ready()
        installation.route(ports)


def test_pods_start_without_webhooks(installation: WebhookInstallation, server: Server, room: str) -> None:
    for replica in installation.replicas:
        replica.end()
    try:
        pod = created_pod(server, room, a_pod("batch", "reclaimed_cores", resources=NATIVE))
        assert pod["spec"]["containers"][0]["resources"] == NATIVE
    finally:
        for replica in installation.replicas:
            replica.again()
            replica.ready()
    wait("webhooks that answer", lambda: is_moved(server, room), 60)


async def test_a_certificate_of_another_program_is_served_as_it_is(
    installation: WebhookInstallation, server: Server, room: str
) -> None:
    """As of cert-manager, whose Secret has no key of the authority."""
    authority = await create_authority("another program", 30)
    pair = await create_certificate(authority, [f"{NAME}.{installation.namespace}.svc"], 30)
    for replica in installation.replicas:
        replica.end()
    texts = {"ca.crt": authority.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()} | {"ca.key": None}
    path = f"/api/v1/namespaces/{installation.namespace}/secrets/{NAME}"
    server.ask("PATCH", path, {"data": data}, MERGE)
    reader = installation.replica(21, installation.addresses[0][1], certManager=True)
    try:
        reader.begin()
        wait("the bundle of the other program", installation.published, 60)
        wait("webhooks that answer", lambda: is_moved(server, room), 60)
        assert installation.secret() == {key: text for key, text in data.items() if text}
        assert serves(installation.addresses[0], pair.certificate)
    finally:
        reader.end()
        for replica in installation.replicas:
            replica.again()
            replica.ready()


def test_the_controller_has_used_every_right_of_the_webhooks_and_was_refused_nothing(
    installation: WebhookInstallation, own_cluster: Cluster
) -> None:
    """In the tests above."""
    requests = list(audit.entries(own_cluster.names.run, f"{installation.namespace}/dioptase-controller"))
    used = {entry.request for entry in requests}
    # This cluster has no ClusterColocationProfiles, so that there is nothing to watch.
    missing = AuditedRequest("config.koordinator.sh", "clustercolocationprofiles", "watch")
    assert installation.webhook_rights() - used == {missing}
    assert used <= installation.rights()
    assert [entry for entry in requests if entry.status == 403] == []
