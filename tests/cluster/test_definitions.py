"""A real API server takes deploy/crds, explains them, loses no field of their objects, refuses what is wrong by its path."""

from __future__ import annotations

import copy
import json
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from api.katalyst.crd_schema import openapi_schema
from api.katalyst.kinds import KATALYST_KINDS, KatalystKind, KindVersion
from tests.api.katalyst.instances import fullest, instances
from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.server import MERGE, Refused, Server

pytestmark = pytest.mark.cluster
VERSIONS = [(kind, version) for kind in KATALYST_KINDS for version in kind.versions]
STORED = [(kind, kind.versions[-1]) for kind in KATALYST_KINDS]
EVERY_VERSION = pytest.mark.parametrize(
    ("kind", "version"), VERSIONS, ids=[f"{kind.kind}-{version.name}" for kind, version in VERSIONS]
)
MANY = settings(
    max_examples=25, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
)
HEAD = ("apiVersion", "kind", "metadata")


def collection(kind: KatalystKind, version: KindVersion) -> str:
    within = f"/namespaces/{CONSENT}" if kind.scope == "Namespaced" else ""
    return f"/apis/{kind.group}/{version.name}{within}/{kind.plural}"


def named(kind: KatalystKind, version: KindVersion, body: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": f"{kind.group}/{version.name}", "kind": kind.kind}
    return {**head, "metadata": {"name": f"test-{uuid.uuid4().hex[:12]}"}, **body}


def stored(server: Server, kind: KatalystKind, version: KindVersion, body: dict[str, Any]) -> dict[str, Any]:
    """Write an object and its status, by the subresource if there is one, and return it as the API server has it."""
    path = collection(kind, version)
    created = named(kind, version, body)
    server.ask("POST", path, created)
    item = f"{path}/{created['metadata']['name']}"
    if "status" in body:
        try:
            server.ask("PATCH", f"{item}/status", {"status": body["status"]}, MERGE)
        except Refused as error:
            if error.status != 404:
                raise
    got: dict[str, Any] = server.ask("GET", item)
    server.ask("DELETE", item)
    return got


def missing(sent: Any, got: Any, path: str = "") -> list[str]:
    """Return what was sent and is missing in the response; additions of the server, such as defaults, do not count."""
    if isinstance(sent, dict) and isinstance(got, dict):
        absent = [f"{path}.{name}" for name in sent if name not in got]
        return absent + [
            result for name in sent if name in got for result in missing(sent[name], got[name], f"{path}.{name}")
        ]
    if isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        return [item for n, pair in enumerate(zip(sent, got, strict=True)) for item in missing(*pair, f"{path}[{n}]")]
    # A whole number of a great float comes without its exponent.
    return (
        []
        if sent == (float(got) if isinstance(sent, float) and isinstance(got, int) else got)
        else [f"{path}: {sent!r} became {got!r}"]
    )


def test_the_definitions_are_served_and_none_is_found_fault_with(definitions: Server) -> None:
    for kind in KATALYST_KINDS:
        created = definitions.ask("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.name}")
        conditions = {
            item["type"]: (item["status"], item.get("message", "")) for item in created["status"]["conditions"]
        }
        assert conditions.get("NonStructuralSchema", ("False", ""))[0] == "False", conditions
        assert conditions["Established"][0] == conditions["NamesAccepted"][0] == "True", conditions
        assert created["status"]["storedVersions"] == [kind.versions[-1].name]


def test_they_can_be_applied_again_without_a_change(api_server: Cluster | ExternalCluster, definitions: Server) -> None:
    kind = KATALYST_KINDS[0]
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.name}"
    before = definitions.ask("GET", path)["metadata"]
    api_server.kubectl("apply", "--server-side", "-f", f"deploy/crds/{kind.group}_{kind.plural}.yaml")
    after = definitions.ask("GET", path)["metadata"]
    assert (after["generation"], after["resourceVersion"]) == (before["generation"], before["resourceVersion"])


@EVERY_VERSION
def test_kubectl_explains_every_kind(
    api_server: Cluster | ExternalCluster, definitions: Server, kind: KatalystKind, version: KindVersion
) -> None:
    text = api_server.kubectl("explain", kind.name.split(".")[0], f"--api-version={kind.group}/{version.name}")
    assert f"KIND:       {kind.kind}" in text
    assert f"VERSION:    {version.name}" in text


def test_a_field_is_explained_by_its_docstring(api_server: Cluster | ExternalCluster, definitions: Server) -> None:
    field = "adminqosconfigurations.spec.config.evictionConfig.cpuPressureEvictionConfig.loadUpperBoundRatio"
    text = api_server.kubectl("explain", field)
    assert "FIELD: loadUpperBoundRatio <number>" in text
    assert "<empty>" not in text


def test_short_names_and_columns_are_known_to_kubectl(
    api_server: Cluster | ExternalCluster, definitions: Server
) -> None:
    for kind in KATALYST_KINDS:
        if kind.short_name:
            assert api_server.kubectl("get", kind.short_name, "-l", "made-by=nobody", f"--namespace={CONSENT}") == ""
    path = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
    cpu = {"propertyName": "cpu", "propertyQuantity": "8"}
    memory = {"propertyName": "memory", "propertyQuantity": "16Gi"}
    spec = {"nodeResourceProperties": [{"propertyName": "numa", "propertyQuantity": "2"}, cpu, memory]}
    head = {"apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource"}
    definitions.ask("POST", path, {**head, "metadata": {"name": "columns"}, "spec": spec})
    try:
        prefix = "resource.katalyst.kubewharf.io/reclaimed_"
        amounts = {f"{prefix}millicpu": "5200", f"{prefix}memory": "7Gi"}
        definitions.ask("PATCH", f"{path}/columns/status", {"status": {"resources": {"allocatable": amounts}}}, MERGE)
        titles, row = api_server.kubectl("get", "kcnr", "columns").splitlines()
        assert titles.split() == ["NAME", "CPU", "MEMORY", "RECLAIMED-MILLICPU", "RECLAIMED-MEMORY", "AGE"]
        assert row.split()[:5] == ["columns", "8", "16Gi", "5200", "7Gi"]
    finally:
        definitions.ask("DELETE", f"{path}/columns")


@EVERY_VERSION
def test_an_object_with_every_field_comes_back_whole(
    definitions: Server, kind: KatalystKind, version: KindVersion
) -> None:
    """From the version in which it was written, where that one is stored."""
    schema = openapi_schema(version.type, {})
    body = {name: fullest(node) for name, node in schema["properties"].items() if name not in HEAD}
    got = stored(definitions, kind, version, body)
    typed = json.loads(msgspec.json.encode(msgspec.json.decode(json.dumps(got), type=version.type)))
    assert {name: part for name, part in typed.items() if name != "metadata"} == {
        name: part for name, part in got.items() if name != "metadata"
    }
    if version is kind.versions[-1]:
        assert missing(body, got) == []


@pytest.mark.parametrize(("kind", "version"), STORED, ids=[kind.kind for kind in KATALYST_KINDS])
def test_objects_of_every_shape_are_taken_and_lose_nothing(
    definitions: Server, kind: KatalystKind, version: KindVersion
) -> None:
    """In the version that is stored; of an older one only what that has a place for is kept."""
    schema = openapi_schema(version.type, {})
    body = {name: node for name, node in schema["properties"].items() if name not in HEAD}
    if version.scale:
        # What autoscalers ask for is no number below zero, whatever the schema says.
        for part in ("spec", "status"):
            body[part]["properties"]["replicas"]["minimum"] = 0
    shape = instances({"type": "object", "properties": body, "required": schema.get("required", [])})

    @MANY
    @given(text=shape)
    def takes(text: dict[str, Any]) -> None:
        assert missing(text, stored(definitions, kind, version, text)) == []

    takes()


@pytest.mark.parametrize(
    ("plural", "body", "path", "why"),
    [
        ("adminqosconfigurations", {"spec": {}}, "spec.config", "Required value"),
        (
            "adminqosconfigurations",
            {"spec": {"config": {"evictionConfig": {"cpuPressureEvictionConfig": {"loadUpperBoundRatio": 0.5}}}}},
            "spec.config.evictionConfig.cpuPressureEvictionConfig.loadUpperBoundRatio",
            "greater than or equal to 1",
        ),
        (
            "adminqosconfigurations",
            {"spec": {"config": {"reclaimedResourceConfig": {"reservedResourceForReport": {"cpu": "four"}}}}},
            "spec.config.reclaimedResourceConfig.reservedResourceForReport.cpu",
            "should match",
        ),
        (
            "customnoderesources",
            {"spec": {"taints": [{"key": "a", "effect": "b", "qosLevel": "c"}]}},
            "spec.taints[0].qosLevel",
            "Unsupported value",
        ),
        (
            "nodeovercommitconfigs",
            {"spec": {"resourceOvercommitRatio": {"cpu": 2}}},
            "spec.resourceOvercommitRatio.cpu",
            "must be of type string",
        ),
        ("serviceprofiledescriptors", {"spec": {"targetRef": {"kind": "a"}}}, "spec.targetRef.name", "Required value"),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(
    definitions: Server, plural: str, body: dict[str, Any], path: str, why: str
) -> None:
    (kind,) = (kind for kind in KATALYST_KINDS if kind.plural == plural)
    version = kind.versions[-1]
    with pytest.raises(Refused) as refused:
        definitions.ask("POST", collection(kind, version), named(kind, version, body))
    causes = {cause["field"]: cause["message"] for cause in refused.value.status_body["details"]["causes"]}
    assert refused.value.status == 422
    assert why in causes[path], causes


def test_an_unknown_field_is_dropped_and_reported(definitions: Server) -> None:
    (kind,) = (kind for kind in KATALYST_KINDS if kind.plural == "adminqosconfigurations")
    version = kind.versions[-1]
    body = named(kind, version, {"spec": {"config": {"fieldOfTomorrow": 1}}})
    with pytest.raises(Refused, match=r'unknown field "spec\.config\.fieldOfTomorrow"'):
        definitions.ask("POST", f"{collection(kind, version)}?fieldValidation=Strict", copy.deepcopy(body))
    got = stored(definitions, kind, version, {"spec": body["spec"]})
    assert got["spec"]["config"] == {}
