"""Objects of every kind come out as they went in, whatever an API server could hand out, and errors name the field."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.katalyst.admin_qos import AdminQoSConfiguration
from api.katalyst.cnr import CustomNodeResource
from api.katalyst.crd_schema import crd_manifest, openapi_schema
from api.katalyst.kinds import KATALYST_KINDS
from api.katalyst.meta import CustomResource
from api.katalyst.node_pools import NodeOvercommitConfig
from api.katalyst.spd import ServiceProfileDescriptor
from api.katalyst.vpa import KatalystVerticalPodAutoscaler
from tests.api.katalyst.instances import fullest, objects
from tests.api.katalyst.structural import Node, problems

CONFIG = "config.katalyst.kubewharf.io/v1alpha1"
NODE = "node.katalyst.kubewharf.io/v1alpha1"
VERSIONS = [(kind, version) for kind in KATALYST_KINDS for version in kind.versions]
SCHEMAS: dict[type[CustomResource], Node] = {version.type: openapi_schema(version.type, {}) for _, version in VERSIONS}
HEAD = {"apiVersion": "a/v1", "kind": "b", "metadata": {"name": "c"}}
GIVEN = {
    version.type: objects(SCHEMAS[version.type], f"{kind.group}/{version.name}", kind.kind)
    for kind, version in VERSIONS
}
LEAST = {
    version.type: objects(SCHEMAS[version.type], f"{kind.group}/{version.name}", kind.kind, least=True)
    for kind, version in VERSIONS
}
EVERY_VERSION = pytest.mark.parametrize(
    "resource", list(SCHEMAS), ids=[f"{kind.kind}-{version.name}" for kind, version in VERSIONS]
)
PATIENTLY = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def encoded(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


@EVERY_VERSION
def test_no_field_of_the_schema_is_lost(resource: type[CustomResource]) -> None:
    """False, 0 and the like are said too."""
    schema = SCHEMAS[resource]
    body = {name: fullest(node) for name, node in schema["properties"].items() if name in ("spec", "status")}
    assert list(problems({**schema, "required": []}, body)) == []
    assert encoded(msgspec.json.decode(json.dumps(HEAD | body), type=resource)) == HEAD | body


@EVERY_VERSION
@PATIENTLY
@given(data=st.data())
def test_objects_come_out_as_they_went_in(resource: type[CustomResource], data: st.DataObject) -> None:
    given_object = data.draw(GIVEN[resource])
    decoded = msgspec.json.decode(json.dumps(given_object), type=resource)
    assert encoded(decoded) == given_object
    assert msgspec.json.decode(msgspec.json.encode(decoded), type=resource) == decoded
    stored = encoded(decoded) | {"metadata": {}}
    assert list(problems(SCHEMAS[resource], stored, pruned=True)) == []


@EVERY_VERSION
@PATIENTLY
@given(data=st.data())
def test_objects_need_no_more_than_the_schema_says(resource: type[CustomResource], data: st.DataObject) -> None:
    given_object = data.draw(LEAST[resource])
    assert encoded(msgspec.json.decode(json.dumps(given_object), type=resource)) == given_object


@EVERY_VERSION
@PATIENTLY
@given(data=st.data())
def test_unknown_fields_are_ignored(resource: type[CustomResource], data: st.DataObject) -> None:
    """As of an agent that is older than its API server, in every object of the object."""
    given_object = data.draw(GIVEN[resource])
    newer = copy.deepcopy(given_object)
    _add_everywhere(newer, SCHEMAS[resource])
    assert newer != given_object
    decoded = msgspec.json.decode(json.dumps(newer), type=resource)
    assert decoded == msgspec.json.decode(json.dumps(given_object), type=resource)


def _add_everywhere(value: Any, node: Node) -> None:
    if isinstance(value, list):
        for element in value:
            _add_everywhere(element, node.get("items", {}))
    elif isinstance(value, dict) and "properties" in node:
        for name, part in value.items():
            _add_everywhere(part, node["properties"].get(name, {}))
        value["fieldOfTomorrow"] = {"list": [1, None]}


def decoded(resource: type[Any], text: str) -> Any:
    return msgspec.json.decode(msgspec.json.encode(msgspec.yaml.decode(text)), type=resource)


def test_a_configuration_as_a_person_writes_it() -> None:
    object_ = decoded(
        AdminQoSConfiguration,
        f"""
        apiVersion: {CONFIG}
        kind: AdminQoSConfiguration
        metadata: {{name: default, namespace: kube-system}}
        spec:
          nodeLabelSelector: pool in (a, b)
          priority: 2
          ephemeralSelector: {{nodeNames: [n1], lastDuration: 1h}}
          updateStrategy: {{type: RollingUpdate, rollingUpdate: {{canary: 20%}}}}
          config:
            reclaimedResourceConfig:
              enableReclaim: true
              reservedResourceForReport: {{cpu: 4, memory: 5Gi}}
            fineGrainedResourceConfig: {{cpuBurstConfig: {{defaultCPUBurstPercent: 50}}}}
            evictionConfig:
              dryRun: []
              cpuPressureEvictionConfig:
                numaCPUPressureEvictionConfig: {{enableEviction: true}}
                numaSysCPUPressureEvictionConfig: {{numaCPUUsageHardThreshold: 0.5}}
              cpuSystemPressureEvictionConfig: {{RankingLabels: {{tier: [low, mid]}}, checkCPUManager: false}}
              memoryPressureEvictionConfig:
                enableRSSOveruseEviction: true
                systemKswapdRateThreshold: 2000
                numaEvictionRankingMetrics: [qos.pod, mem.total.numa.container]
              networkEvictionConfig: {{enableNICNetworkEviction: true}}
        """,
    )
    spec, config = object_.spec, object_.spec.config
    assert spec.ephemeral_selector.last_duration == "1h"
    assert spec.update_strategy.rolling_update.canary == "20%"
    assert config.reclaimed_resource_config.reserved_resource_for_report == {"cpu": 4, "memory": "5Gi"}
    assert config.fine_grained_resource_config.cpu_burst_config.default_cpu_burst_percent == 50
    eviction = config.eviction_config
    assert eviction.dry_run == ()
    assert eviction.cpu_pressure_eviction_config.numa_cpu_pressure_eviction_config.enable_eviction is True
    assert (
        eviction.cpu_pressure_eviction_config.numa_sys_cpu_pressure_eviction_config.numa_cpu_usage_hard_threshold == 0.5
    )
    assert eviction.cpu_system_pressure_eviction_config.ranking_labels == {"tier": ("low", "mid")}
    assert eviction.cpu_system_pressure_eviction_config.check_cpu_manager is False
    assert eviction.memory_pressure_eviction_config.enable_rss_overuse_eviction is True
    assert eviction.network_eviction_config.enable_nic_network_eviction is True
    assert eviction.rootfs_pressure_eviction_config is None


def test_an_empty_list_is_not_an_absent_one() -> None:
    """The first takes away what a node was started with, the second leaves it."""
    head = f"{{apiVersion: {CONFIG}, kind: AdminQoSConfiguration, metadata: {{name: a}}, spec: {{config: "
    emptied = decoded(AdminQoSConfiguration, head + "{evictionConfig: {dryRun: []}}}}")
    untold = decoded(AdminQoSConfiguration, head + "{evictionConfig: {}}}}")
    assert encoded(emptied)["spec"] == {"config": {"evictionConfig": {"dryRun": []}}}
    assert encoded(untold)["spec"] == {"config": {"evictionConfig": {}}}


def test_zones_are_read_to_any_depth() -> None:
    object_ = decoded(
        CustomNodeResource,
        f"""
        apiVersion: {NODE}
        kind: CustomNodeResource
        metadata: {{name: n1}}
        spec:
          taints: [{{key: node.kubernetes.io/unschedulable, effect: NoSchedule, qosLevel: reclaimed_cores}}]
        status:
          topologyPolicy: SingleNUMANodeContainerLevel
          topologyZone:
          - type: Socket
            name: "0"
            children:
            - type: Numa
              name: "0"
              siblings: [{{type: Numa, name: "1", attributes: [{{name: numa_distance, value: "20"}}]}}]
              allocations: [{{consumer: default/p/u, requests: {{cpu: "2"}}}}]
              children:
              - {{type: L3CacheGroup, name: "3", attributes: [{{name: cpu_lists, value: 0-7}}]}}
          nodeMetricStatus:
            updateTime: "2026-01-31T12:00:00Z"
            groupMetric: [{{QoSLevel: shared_cores, podList: [default/p], numaUsage: [{{numaId: 1, usage: {{cpu: 1}}}}]}}]
        """,
    )
    numa = object_.status.topology_zone[0].children[0]
    assert numa.siblings[0].attributes[0].value == "20"
    assert numa.allocations[0].requests == {"cpu": "2"}
    assert numa.children[0].type == "L3CacheGroup"
    assert object_.status.node_metric_status.group_metric[0].qos_level == "shared_cores"
    assert object_.spec.taints[0].qos_level == "reclaimed_cores"


@pytest.mark.parametrize(
    ("resource", "spec", "message"),
    [
        (AdminQoSConfiguration, "{}", "missing required field `config` - at `$.spec`"),
        (
            AdminQoSConfiguration,
            "{config: {evictionConfig: {cpuPressureEvictionConfig: {loadUpperBoundRatio: 0.5}}}}",
            "Expected `float` >= 1.0 - at `$.spec.config.evictionConfig.cpuPressureEvictionConfig.loadUpperBoundRatio`",
        ),
        (
            AdminQoSConfiguration,
            "{config: {reclaimedResourceConfig: {reservedResourceForReport: {cpu: four}}}}",
            "at `$.spec.config.reclaimedResourceConfig.reservedResourceForReport[...]`",
        ),
        (
            AdminQoSConfiguration,
            "{config: {evictionConfig: {memoryPressureEvictionConfig: {systemEvictionRankingMetrics: [x]}}}}",
            "Invalid enum value 'x' - at `$.spec.config.evictionConfig.memoryPressureEvictionConfig.systemEvictionRankingM",
        ),
        (
            CustomNodeResource,
            "{taints: [{key: a, effect: b, qosLevel: c}]}",
            "Invalid enum value 'c' - at `$.spec.taints[0].qosL",
        ),
        (
            NodeOvercommitConfig,
            "{resourceOvercommitRatio: {cpu: 2}}",
            "Expected `str`, got `int` - at `$.spec.resourceOverc",
        ),
        (ServiceProfileDescriptor, "{targetRef: {kind: a}}", "missing required field `name` - at `$.spec.targetRef`"),
        (KatalystVerticalPodAutoscaler, "{targetRef: []}", "Expected `object`, got `array` - at `$.spec.targetRef`"),
    ],
)
def test_what_is_wrong_is_said_with_its_path(resource: type[Any], spec: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        decoded(resource, f"{{apiVersion: a/v1, kind: b, metadata: {{name: c}}, spec: {spec}}}")
    assert message in str(raised.value)


def test_zones_nested_beyond_all_measure_are_an_error_and_no_crash() -> None:
    deep = '{"type":"a","name":"b","children":[' * 5000 + "]}" * 5000
    head = f'{{"apiVersion":"{NODE}","kind":"CustomNodeResource","metadata":{{}},"status":{{"topologyZone":['
    with pytest.raises(RecursionError):
        msgspec.json.decode(head + deep + "]}}", type=CustomNodeResource)


def test_types_that_no_schema_has_words_for_are_refused_with_their_field() -> None:
    class Odd(CustomResource, frozen=True, kw_only=True):
        spec: str | list[str] | None = None

    with pytest.raises(TypeError, match=r"Odd\.spec"):
        openapi_schema(Odd, {})


def test_a_stored_version_is_what_an_object_says() -> None:
    for kind in KATALYST_KINDS:
        versions = crd_manifest(kind, {})["spec"]["versions"]
        stored = next(version["name"] for version in versions if version["storage"])
        assert kind.api_version == f"{kind.group}/{stored}"
